"""Boosted trees for the quality benchmark: LightGBM and XGBoost, on raw features or with list ranks beside them.

LightGBM stops early by its own NDCG@10, which differs from this package's by a constant (queries without a relevant
document count 1), and is given the rows in the order of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightgbm
import torch
from torch import Tensor

from lgmml_torch.baselines.base import grid_points
from lgmml_torch.baselines.trees import XGBoostRanker
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.models.preprocess.compose import Chain, Concat
from lgmml_torch.models.preprocess.steps import ListRank
from lgmml_torch.ragged import RankingData
from research.protocol import RankingFold
from research.quality.data import Arrays, as_arrays

Score = Callable[[RankingData], Tensor]

GRID: dict[str, list[Any]] = {"num_leaves": [7, 15, 31], "learning_rate": [0.03, 0.1], "min_data_in_leaf": [5, 20, 50]}
# As many points: XGBoost bounds the Hessians of a leaf instead of its documents.
XGBOOST_GRID: dict[str, list[Any]] = {
    "num_leaves": [7, 15, 31], "learning_rate": [0.03, 0.1], "min_child_weight": [0.1, 1.0, 5.0]
}  # fmt: skip
SAMPLING = {"feature_fraction": 0.5, "bagging_fraction": 0.8, "bagging_freq": 1}
XGBOOST_SAMPLING = {"colsample_bynode": 0.5, "subsample": 0.8}


def with_list_ranks(data: RankingData) -> RankingData:
    """Every feature's rank within its list beside the feature itself."""
    both = Concat([Chain([]), ListRank()])
    return data.replace(features=both.fit_transform(data.features, data.offsets))


def rank_fold(fold: RankingFold) -> RankingFold:
    """The fold with list ranks."""
    return RankingFold(*(with_list_ranks(part) for part in (fold.train, fold.valid, fold.test)))


def grow_lightgbm(train: Arrays, valid: Arrays, point: Mapping[str, Any], seed: int) -> Any:
    """One LambdaMART model, stopped early."""
    data = lightgbm.Dataset(train.features, train.labels, group=train.sizes, params={"feature_pre_filter": False})
    held = data.create_valid(valid.features, valid.labels, group=valid.sizes)
    settings = {
        "objective": "lambdarank", "metric": "ndcg", "eval_at": [10], "verbosity": -1, "num_threads": 1,
        "seed": seed + 1, "deterministic": True, "force_row_wise": True, "feature_pre_filter": False,
        **SAMPLING, **point,
    }  # fmt: skip
    rounds = 500 if point["learning_rate"] < 0.05 else 300
    stop = lightgbm.early_stopping(50, verbose=False)
    return lightgbm.train(settings, data, rounds, valid_sets=[held], callbacks=[stop])


def lightgbm_score(model: Any, data: RankingData) -> Tensor:  # (N,)
    """Scores of the rows of ``data``."""
    found = model.predict(data.features.float().numpy(), num_iteration=model.best_iteration, num_threads=1)
    return torch.from_numpy(found)


def fit_lightgbm(fold: RankingFold, seed: int, point: Mapping[str, Any]) -> Score:
    """LambdaMART with given settings."""
    model = grow_lightgbm(as_arrays(fold.train), as_arrays(fold.valid), point, seed)
    return lambda data: lightgbm_score(model, data)


def bag_lightgbm(fold: RankingFold, seed: int, point: Mapping[str, Any], members: int = 5) -> Score:
    """The mean of several models' scores, each divided by its spread over the training documents."""
    train, valid = as_arrays(fold.train), as_arrays(fold.valid)
    models = [grow_lightgbm(train, valid, point, seed + 1000 * member) for member in range(members)]
    spreads = [float(lightgbm_score(model, fold.train).std().clamp_min(1e-12)) for model in models]

    def score(data: RankingData) -> Tensor:
        found = [lightgbm_score(model, data) / spread for model, spread in zip(models, spreads, strict=True)]
        return torch.stack(found).mean(0)

    return score


def fit_xgboost(fold: RankingFold, seed: int, point: Mapping[str, Any]) -> Score:
    """XGBoost with given settings."""
    return XGBoostRanker({**XGBOOST_SAMPLING, **point}, seed=seed).fit(fold.train, fold.valid).score


def choose_point(
    fold: RankingFold,
    fit: Callable[[RankingFold, int, Mapping[str, Any]], Score],
    grid: Mapping[str, Sequence[Any]],
    seed: int = 0,
) -> tuple[dict[str, Any], float]:
    """The grid point with the best validation NDCG@10, the first of equals, and that NDCG."""
    found = []
    for number, point in enumerate(grid_points(**grid)):
        found.append((mean_ndcg(fit(fold, seed, point)(fold.valid), fold.valid), -number, point))
    best = max(found, key=lambda item: item[:2])
    return best[2], best[0]
