"""PyTerrier: a ranker as the last stage of a retrieval pipeline (the extra ``terrier``).

PyTerrier's own ``pt.ltr.apply_learned_model`` calls ``predict`` without the query of each row, which a score that
depends on its list cannot do without; `LGMMLTransformer` passes it on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import DataError, require
from lgmml_torch.estimator import LGMMLRanker

try:
    from pyterrier import Estimator
except ImportError:  # told when a transformer is made, so that the module can be looked at without
    Estimator = object

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("qid", "docno", "features")


class LGMMLTransformer(Estimator):  # type: ignore[misc]
    """A stage that ranks the documents of each query by their ``features``.

    ``(first_stage >> features >> LGMMLTransformer())`` is fitted with ``fit(topics, qrels, valid_topics, valid_qrels)``
    and then ranks like any other pipeline.

    Args:
        ranker: what is fitted; ``LGMMLRanker.load("model.safetensors")`` ranks without being fitted here.
    """

    def __init__(self, ranker: LGMMLRanker | None = None) -> None:
        require("pyterrier", "for pipelines of PyTerrier", "terrier")
        super().__init__()
        self.ranker = LGMMLRanker() if ranker is None else ranker

    def fit(
        self,
        topics_or_res_tr: pd.DataFrame,
        qrels_tr: pd.DataFrame,
        topics_or_res_va: pd.DataFrame | None = None,
        qrels_va: pd.DataFrame | None = None,
    ) -> LGMMLTransformer:
        """Fit the ranker; documents that nobody judged are not relevant, and neither are those judged below 0.

        Args:
            topics_or_res_tr: rows with ``qid``, ``docno`` and ``features``.
            qrels_tr: rows with ``qid``, ``docno`` and ``label``.
            topics_or_res_va: the same of validation queries; without them the ranker puts some aside.
            qrels_va: their judgements.

        Raises:
            DataError: columns or rows that are missing, vectors of different lengths.
        """
        X, qid = _features_of(topics_or_res_tr)
        y = _labels_of(topics_or_res_tr, qrels_tr)
        valid = None
        if topics_or_res_va is not None and qrels_va is not None:
            X_valid, qid_valid = _features_of(topics_or_res_va)
            valid = (X_valid, _labels_of(topics_or_res_va, qrels_va), qid_valid)
        self.ranker.fit(X, y, qid=qid, eval_set=valid)
        return self

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """The same rows with ``score`` and ``rank``; whole lists belong in one call."""
        from pyterrier.model import add_ranks

        found = inp.copy()
        if len(found):
            X, qid = _features_of(found)
            found["score"] = self.ranker.predict(X, qid=qid).astype(float)
        else:
            found["score"] = np.empty(0)
        return add_ranks(found)

    def transform_outputs(self, inp_cols: list[str]) -> list[str]:
        """The columns that come out, for PyTerrier's checks of pipelines."""
        kept = [name for name in inp_cols if name not in ("score", "rank")]
        return [*kept, "score", "rank"]


def _features_of(rows: pd.DataFrame) -> tuple[NDArray[Any], NDArray[Any]]:
    """``(N, D)`` the vectors of a frame of results, and the query of each."""
    for name in _COLUMNS:
        if name not in rows.columns:
            raise DataError(f"results must have the columns {', '.join(_COLUMNS)}; there is no {name!r}")
    if not len(rows):
        raise DataError("results must have at least one row, got none")
    vectors = list(map(np.asarray, rows["features"]))
    widths = set(map(np.shape, vectors))
    if len(widths) > 1 or len(vectors[0].shape) != 1:
        raise DataError(f"`features` must hold vectors of one length, got shapes {sorted(widths)}")
    return np.stack(vectors), rows["qid"].to_numpy()


def _labels_of(rows: pd.DataFrame, qrels: pd.DataFrame) -> NDArray[Any]:
    """``(N,)`` the judgement of each result, 0 where there is none."""
    for name in ("qid", "docno", "label"):
        if name not in qrels.columns:
            raise DataError(f"qrels must have the columns qid, docno and label; there is no {name!r}")
    pairs = zip(qrels["qid"].astype(str), qrels["docno"].astype(str), strict=True)
    judged = dict(zip(pairs, qrels["label"], strict=True))
    labels = []
    for pair in zip(rows["qid"].astype(str), rows["docno"].astype(str), strict=True):
        labels.append(max(float(judged.get(pair, 0.0)), 0.0))
    return np.array(labels)
