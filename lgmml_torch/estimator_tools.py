"""What `LGMMLRanker` needs around the edges: column names, weights of queries, threads and silence."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.arrays import check_length, float_vector
from lgmml_torch.checks import DataError, DataWarning
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_max, segment_min


def feature_names(X: Any) -> NDArray[np.object_] | None:
    """Names of the columns of a frame, if all of them are text."""
    columns = getattr(X, "columns", None)
    if columns is None or not all(isinstance(name, str) for name in columns):
        return None
    return np.asarray(list(columns), dtype=object)


def check_names(got: NDArray[np.object_] | None, fitted: NDArray[np.object_] | None, what: str) -> None:
    """Require the columns of `fit`, in their order, where both have names."""
    if got is None or fitted is None or list(got) == list(fitted):
        return
    new, gone = [name for name in got if name not in fitted], [name for name in fitted if name not in got]
    how = f"unknown {new[:3]}, missing {gone[:3]}" if new or gone else "the same names in another order"
    raise DataError(f"`{what}` must have the columns it had in `fit`, got {how}")


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
    given = torch.from_numpy(float_vector("sample_weight", sample_weight))
    check_length("sample_weight", len(given), data.num_documents)
    if not bool(((given >= 0) & given.isfinite()).all()):
        bad = given[~((given >= 0) & given.isfinite())][0]
        raise DataError(f"`sample_weight` must be finite and at least 0, got {float(bad):g}")
    rows = given[data.order]
    low, high = segment_min(rows, data.offsets), segment_max(rows, data.offsets)
    if bool((low != high).any()):
        query = int((low != high).nonzero()[0])
        raise DataError(
            "`sample_weight` must be the same for all rows of a query, because queries are what is weighted, got "
            f"{float(low[query]):g} and {float(high[query]):g} for qid {data.qids[query]!r}"
        )
    if not bool((high > 0).any()):
        raise DataError("`sample_weight` must be above 0 for some query, got 0 for all")
    return high


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


@contextmanager
def surroundings(threads: int | None, verbose: int) -> Iterator[None]:
    """So many threads, and no more talk than asked for; both as before in the end."""
    talkers = [logging.getLogger(name) for name in ("lgmml_torch", "pytorch_lightning", "lightning")]
    levels = [talker.level for talker in talkers]
    before = torch.get_num_threads()
    for talker in talkers:
        talker.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        if threads is not None and threads > 0:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
        for talker, level in zip(talkers, levels, strict=True):
            talker.setLevel(level)
