"""Some lists of a set that processes share, and all of them in one place.

Of a set in memory, these are what `RankingData.select` gives, and the set itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.files import scratch_array
from lgmml_torch.ragged import ROWS_AT_ONCE, RankingData
from lgmml_torch.segments import argsort_segments, gather_segments, positions


def sample_lists(data: RankingData, documents: int, *, seed: int = 0, folder: Path | None = None) -> RankingData:
    """Whole lists of about so many documents, one at least, drawn from the whole set; or all, if it has no more.

    Which lists they are does not depend on the number of processes, with whom they stay; their features are then in a
    file of ``folder``.
    """
    sizes = data.all_sizes
    if int(sizes.sum()) <= documents:
        return data
    drawn = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    within = sizes[drawn].cumsum(0) <= documents
    within[0] = True
    return pick_lists(data, drawn[within].sort().values, folder)


def pick_lists(
    data: RankingData,
    queries: Tensor,  # (C,) rising
    folder: Path | None = None,
) -> RankingData:
    """Lists by their numbers in the whole set; where processes share it, they stay with those that have them."""
    if data.spread is None:
        return data.select(queries)
    own = torch.isin(data.spread.own, queries).nonzero()[:, 0]
    rows = gather_segments(data.offsets, own)[0]
    part = data.replace(features=data.features[:, :0]).select(own)
    return part.replace(
        features=_copied(data, rows, lambda some: data.features[some], folder),
        feature_names=data.feature_names,
        categories=data.categories,
        spread=data.spread.part(queries),
    )


def gather_lists(data: RankingData, folder: Path | None = None) -> RankingData:
    """All lists in one place: where processes share them, on every process, the features in a file of ``folder``."""
    if data.spread is None:
        return data
    if distributed.place()[1] == 1:
        return data.replace(spread=None)
    offsets = data.all_offsets
    rows = torch.arange(int(offsets[-1]))
    place = torch.empty_like(data.order)  # of each document in its list, in the caller's order
    place[argsort_segments(data.order, data.offsets)] = positions(data.offsets)
    others = data.of_documents(lambda values: values if values is data.features else data.take(values, rows))
    return data.replace(
        **{**others, "features": _copied(data, rows, lambda some: data.take(data.features, some), folder)},
        offsets=offsets,
        qids=tuple(range(len(offsets) - 1)),
        order=data.take(place, rows) + offsets[:-1].repeat_interleave(offsets.diff()),
        doc_ids=None,
        query_weights=None if data.query_weights is None else data.of_all_queries(data.query_weights),
        spread=None,
    )


def _copied(data: RankingData, rows: Tensor, features_of: Callable[[Tensor], Tensor], folder: Path | None) -> Tensor:
    """Features of some documents in a file that is mapped; a few rows at a time are in memory."""
    kept = torch.from_numpy(scratch_array((len(rows), data.num_features), data.features.numpy().dtype, folder))
    for start in range(0, len(rows), ROWS_AT_ONCE):
        kept[start : start + ROWS_AT_ONCE] = features_of(rows[start : start + ROWS_AT_ONCE])
    return kept
