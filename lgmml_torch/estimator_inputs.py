"""What `LGMMLRanker` is handed: rows and their queries in the ways users have them, weights, and sets to validate on.

Queries come as `qid` (one id per row), as `group` (sizes of consecutive queries, LightGBM's way), or as a column of
``X`` called ``qid`` (XGBoost's way), which goes wherever ``X`` goes.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, DataWarning
from lgmml_torch.inputs import drop_column, frame_columns
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_max, segment_min

QID = "qid"  # the column of a frame that holds the query
WAYS = "`eval_set` must be (X, y, qid), got {}; or [(X, y)] with `eval_qid` or `eval_group`"


class Rows(NamedTuple):
    """Rows of lists; their queries are given by ``qid`` or by ``group``."""

    X: Any
    y: Any
    qid: Any = None
    group: Any = None


def find_queries(rows: Rows, *, name: str = "X") -> Rows:
    """The rows with their queries apart from the features.

    Raises:
        DataError: no queries, or two sorts of them; no labels.
    """
    if rows.y is None:
        raise DataError("`y` must be given: a ranker requires y to be passed, but the target y is None")
    has_column = QID in frame_columns(rows.X)
    given = [word for word, value in (("qid", rows.qid), ("group", rows.group)) if value is not None]
    if has_column:
        if given:
            raise DataError(f"`{given[0]}` must be None where `{name}` has a column {QID!r}, got both")
        X, qid = drop_column(rows.X, frame_columns(rows.X).index(QID))
        return Rows(X, rows.y, qid)
    if not given:
        raise DataError(
            "`qid` must name the query of each row, got None; `group` (sizes of consecutive queries) or a column "
            f"{QID!r} of a frame do as well"
        )
    return rows


def validation_rows(eval_set: Any, eval_qid: Any, eval_group: Any) -> Rows | None:
    """The rows to validate on, if there are any: of one set, or of the last of several.

    Raises:
        DataError: a set that is neither ``(X, y, qid)`` nor ``(X, y)`` with its queries elsewhere.
    """
    if eval_set is None:
        for name, value in (("eval_qid", eval_qid), ("eval_group", eval_group)):
            if value is not None:
                raise DataError(f"`{name}` must be None without an `eval_set`, got {type(value).__name__}")
        return None
    sets = [eval_set] if isinstance(eval_set, tuple) else list(eval_set)
    if not sets or not all(isinstance(one, (tuple, list)) and len(one) in (2, 3) for one in sets):
        got = (
            f"{len(eval_set)} parts" if isinstance(eval_set, tuple) else f"a {type(eval_set).__name__} of other things"
        )
        raise DataError(WAYS.format(got))
    if len(sets) > 1:
        warnings.warn(
            f"of the {len(sets)} sets in `eval_set` the last one decides when to stop; the others are not looked at",
            DataWarning,
            stacklevel=3,
        )
    qid, group = _last("eval_qid", eval_qid, len(sets)), _last("eval_group", eval_group, len(sets))
    X, y, *own = sets[-1]
    if own and qid is not None:
        raise DataError("`eval_qid` must be None where `eval_set` holds (X, y, qid), got both")
    try:
        return find_queries(Rows(X, y, own[0] if own else qid, group), name="eval_set")
    except DataError as error:
        raise error if (qid, group) != (None, None) else DataError(WAYS.format(f"{len(sets[-1])} parts")) from None


def _last(name: str, given: Any, count: int) -> Any:
    """What belongs to the last set: of one array per set, or of a bare array where there is one set."""
    if given is None:
        return None
    per_set = isinstance(given, (list, tuple)) and len(given) > 0 and np.ndim(given[0]) > 0
    if not per_set and count == 1:
        return given
    if not per_set or len(given) != count:
        raise DataError(f"`{name}` must have one array for each of {count} sets, got {len(given)} entries")
    return given[-1]


def query_weights(
    sample_weight: Any,  # (N,) in the caller's order
    data: RankingData,
) -> Tensor:  # (Q,)
    """One weight per query from weights of rows, which must agree within a query.

    Raises:
        DataError: for weights that are negative, not finite, all zero, or different within a query.

    >>> data = RankingData.from_arrays([[1.0], [2.0], [3.0]], [0, 1, 0], qid=["b", "b", "a"])
    >>> query_weights([2.0, 2.0, 0.5], data)
    tensor([0.5000, 2.0000])
    """
    found = data.replace(query_weights=None, document_weights=None).weighed(sample_weight, name="sample_weight")
    rows = found.document_weights
    if rows is not None:
        low, high = segment_min(rows, data.offsets), segment_max(rows, data.offsets)
        query = int((low != high).nonzero()[0])
        raise DataError(
            "`sample_weight` must be the same for all rows of a query, because queries are what is weighted, got "
            f"{float(low[query]):g} and {float(high[query]):g} for qid {data.qids[query]!r}"
        )
    assert found.query_weights is not None
    return found.query_weights


def weighed(data: RankingData, sample_weight: Any) -> RankingData:
    """The lists with weights of their rows, see `RankingData.weighed`, without those that weigh nothing.

    Raises:
        DataError: for weights that are negative, not finite or all zero.
    """
    if sample_weight is None:
        return data
    found = data.weighed(sample_weight, name="sample_weight")
    counts = found.query_weights
    if found.document_weights is not None:
        counts = segment_max(found.document_weights, data.offsets)
    return found if counts is None else found.select((counts > 0).nonzero()[:, 0])


def has_relevant(data: RankingData) -> bool:
    """Whether validation can measure anything."""
    return bool((data.labels > 0).any())


def held_out(data: RankingData, fraction: float, seed: int) -> tuple[RankingData, RankingData | None]:
    """The data cut by query into training and validation; without the latter when that would be of no use.

    Queries with different labels are shared out apart from the others, so that both parts have some of them.
    """
    if fraction == 0:
        return data, None
    varied = segment_max(data.labels, data.offsets) > segment_min(data.labels, data.offsets)
    useful, others = varied.nonzero()[:, 0], (~varied).nonzero()[:, 0]
    if len(useful) < 2:
        warnings.warn(
            f"of {data.num_queries} queries, {len(useful)} have documents of different labels: none can be held out "
            "for validation; training on all of them, to the end",
            DataWarning,
            stacklevel=3,
        )
        return data, None
    generator = torch.Generator().manual_seed(seed)
    count = min(max(1, round(fraction * len(useful))), len(useful) - 1)
    chosen = torch.zeros(data.num_queries, dtype=torch.bool)
    chosen[useful[torch.randperm(len(useful), generator=generator)[:count]]] = True
    chosen[others[torch.randperm(len(others), generator=generator)[: round(fraction * len(others))]]] = True
    return data.select((~chosen).nonzero()[:, 0]), data.select(chosen.nonzero()[:, 0])
