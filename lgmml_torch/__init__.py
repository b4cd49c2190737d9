"""Learning to rank with localized geometric-mean metrics.

The names below are all a user needs; each is imported when it is first used, because Lightning and scikit-learn take
longer to import than most calls take to run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from lgmml_torch.data.catalog import open_dataset, open_table
    from lgmml_torch.data.letor import load_letor, load_letor_splits, load_lightgbm
    from lgmml_torch.data.source import open_source
    from lgmml_torch.data.write import save_letor, save_table
    from lgmml_torch.estimator import LGMMLRanker
    from lgmml_torch.evaluation.evaluate import Evaluation, evaluate
    from lgmml_torch.evaluation.metric import RankingMetrics
    from lgmml_torch.fitting.boosted import fit_boosted
    from lgmml_torch.fitting.sampled import fit_sampled
    from lgmml_torch.fitting.trained import start_trained
    from lgmml_torch.functional.gmml import gmml
    from lgmml_torch.functional.ranking.measures import (
        average_precision,
        dcg,
        err,
        ndcg,
        precision,
        rank_metrics,
        recall,
        reciprocal_rank,
    )
    from lgmml_torch.functional.spd import geometric_mean
    from lgmml_torch.models.combine import merge_models
    from lgmml_torch.models.explain import Explanation, explain
    from lgmml_torch.models.importance import (
        Importance,
        pair_importance,
        partial_effect,
        permutation_importance,
        structural_importance,
    )
    from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
    from lgmml_torch.models.phi import Phi
    from lgmml_torch.models.preprocess.base import Preprocess
    from lgmml_torch.models.preprocess.compose import all_views, build_preprocess, list_rank_features
    from lgmml_torch.models.ranker import LGMML
    from lgmml_torch.ragged import RankingData
    from lgmml_torch.training.datamodule import RankingDataModule
    from lgmml_torch.training.module import LGMMLModule

_HOMES = {
    "data.catalog": ("open_dataset", "open_table"),
    "data.letor": ("load_letor", "load_letor_splits", "load_lightgbm"),
    "data.source": ("open_source",),
    "data.write": ("save_letor", "save_table"),
    "estimator": ("LGMMLRanker",),
    "evaluation.evaluate": ("Evaluation", "evaluate"),
    "evaluation.metric": ("RankingMetrics",),
    "fitting.boosted": ("fit_boosted",),
    "fitting.sampled": ("fit_sampled",),
    "fitting.trained": ("start_trained",),
    "functional.gmml": ("gmml",),
    "functional.ranking.measures": (
        "average_precision", "dcg", "err", "ndcg", "precision", "rank_metrics", "recall", "reciprocal_rank",
    ),
    "functional.spd": ("geometric_mean",),
    "models.explain": ("Explanation", "explain"),
    "models.importance": (
        "Importance", "pair_importance", "partial_effect", "permutation_importance", "structural_importance",
    ),
    "models.local_metrics": ("LocalMetrics", "MetricBlock"),
    "models.combine": ("merge_models",),
    "models.phi": ("Phi",),
    "models.preprocess.base": ("Preprocess",),
    "models.preprocess.compose": ("all_views", "build_preprocess", "list_rank_features"),
    "models.ranker": ("LGMML",),
    "ragged": ("RankingData",),
    "training.datamodule": ("RankingDataModule",),
    "training.module": ("LGMMLModule",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LGMML",
    "Evaluation",
    "Explanation",
    "Importance",
    "LGMMLModule",
    "LGMMLRanker",
    "LocalMetrics",
    "MetricBlock",
    "Phi",
    "Preprocess",
    "RankingData",
    "RankingDataModule",
    "RankingMetrics",
    "__version__",
    "all_views",
    "average_precision",
    "build_preprocess",
    "dcg",
    "err",
    "evaluate",
    "explain",
    "fit_boosted",
    "fit_sampled",
    "geometric_mean",
    "gmml",
    "list_rank_features",
    "load_letor",
    "load_letor_splits",
    "load_lightgbm",
    "merge_models",
    "ndcg",
    "open_dataset",
    "open_source",
    "open_table",
    "pair_importance",
    "partial_effect",
    "permutation_importance",
    "precision",
    "rank_metrics",
    "recall",
    "reciprocal_rank",
    "save_letor",
    "save_table",
    "start_trained",
    "structural_importance",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lgmml_torch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lgmml_torch.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
