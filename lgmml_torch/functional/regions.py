"""Regions: the queries a local metric is learned from, with their high- and low-relevance documents.

Positive always means: labelled above the lowest label of the same query. Labels are compared within queries only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, check_finite, check_offsets, check_positive, check_shape
from lgmml_torch.segments import (
    argsort_segments,
    gather_segments,
    offsets_from_sizes,
    segment_ids,
    segment_max,
    segment_min,
    segment_sum,
)


@dataclass(frozen=True)
class Regions:
    """K regions; each of the three ragged lists has its own offsets ``(K+1,)``, everything ``long``.

    Attributes:
        queries: Query indices of each region.
        positives: Rows of X₊, the documents of high relevance.
        negatives: Rows of X₋, the documents of lowest relevance; never one of X₊.
    """

    queries: Tensor
    query_offsets: Tensor
    positives: Tensor
    positive_offsets: Tensor
    negatives: Tensor
    negative_offsets: Tensor

    def __len__(self) -> int:
        return len(self.query_offsets) - 1


def check_labels(labels: Tensor, offsets: Tensor) -> None:
    """Require finite ``labels (N,)`` and offsets that end at N."""
    check_shape("labels", labels, (None,))
    check_finite("labels", labels)
    check_offsets(offsets, len(labels))


def usable_queries(
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
) -> Tensor:  # (Q,) bool
    """Which queries have a positive and a lower-labelled document; empty and one-document queries do not.

    >>> usable_queries(torch.tensor([0.0, 1.0, 2.0, 2.0]), torch.tensor([0, 2, 4, 4]))
    tensor([ True, False, False])
    """
    check_labels(labels, offsets)
    values = labels.double()
    return segment_max(values, offsets) > segment_min(values, offsets)


def high_thresholds(
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
) -> Tensor:  # (Q,)
    """Midpoint median of the distinct positive labels of each query, as float64; +inf where none is positive.

    With an even number of distinct positive labels the median is half way between the middle two.

    >>> high_thresholds(torch.tensor([0.0, 1.0, 1.0, 4.0, 0.0]), torch.tensor([0, 4, 5]))
    tensor([2.5000,    inf], dtype=torch.float64)
    """
    ids = segment_ids(offsets)
    ordered = labels[argsort_segments(labels, offsets)].double()
    new = torch.ones_like(ids, dtype=torch.bool)
    new[1:] = (ordered[1:] != ordered[:-1]) | (ids[1:] != ids[:-1])
    distinct = torch.cat([ordered[new], ordered.new_full((1,), torch.inf)])
    ends = offsets_from_sizes(segment_sum(new.long(), offsets))
    count = ends.diff() - 1  # the first distinct label of a query is its lowest, which is not positive
    none = len(distinct) - 1
    low = torch.where(count > 0, ends[:-1] + 1 + (count - 1) // 2, none)
    high = torch.where(count > 0, ends[:-1] + 1 + count // 2, none)
    return (distinct[low] + distinct[high]) / 2


def regions_from_queries(
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    queries: Tensor,  # (M,)
    query_offsets: Tensor,  # (K+1,)
) -> Regions:
    """High- and low-relevance documents of given groups of queries.

    In each query, X₊ holds the documents at or above the midpoint median of its distinct positive labels, or all its
    positives when that leaves fewer than two; X₋ holds those of its lowest label, which are its label-0 documents
    wherever labels start at 0 (below 0, only the lowest keeps X₋ and X₊ apart). A region of several queries is the
    union over them.

    Raises:
        DataError: A query in which no document is positive.

    >>> labels = torch.tensor([0.0, 1.0, 2.0, 2.0])
    >>> found = regions_from_queries(labels, torch.tensor([0, 4]), torch.tensor([0]), torch.tensor([0, 1]))
    >>> found.positives, found.negatives
    (tensor([2, 3]), tensor([0]))
    """
    check_labels(labels, offsets)
    check_offsets(query_offsets, len(queries), name="query_offsets")
    rows, row_offsets = gather_segments(offsets, queries)
    owner = segment_ids(row_offsets)
    values = labels[rows].double()
    lowest = segment_min(values, row_offsets)
    positive = values > lowest[owner]
    high = values >= high_thresholds(values, row_offsets)[owner]
    few = segment_sum(high.long(), row_offsets) < 2
    high = torch.where(few[owner], positive, high)
    empty = (segment_sum(high.long(), row_offsets) == 0).nonzero()
    if empty.numel():
        raise DataError(f"`queries` must have a positive and a lower-labelled document, got {int(queries[empty[0]])}")
    region = segment_ids(query_offsets)[owner]
    return Regions(
        queries,
        query_offsets,
        rows[high],
        _offsets(region[high], len(query_offsets) - 1),
        rows[~positive],
        _offsets(region[~positive], len(query_offsets) - 1),
    )


def sample_regions(
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    num_regions: int,
    *,
    pool: int = 1,
    generator: torch.Generator,
) -> Regions:
    """Draw regions of ``pool`` different usable queries each.

    No query is used twice while ``num_regions * pool`` does not exceed the usable queries. Beyond that, single-query
    regions are as many as there are usable queries (the paper's rule), and pools are drawn independently of each
    other, repeated ones dropped: so fewer regions than asked for may come back, never two alike.

    Raises:
        DataError: No query is usable.

    >>> labels, offsets = torch.tensor([0.0, 1.0, 0.0, 2.0]), torch.tensor([0, 2, 4])
    >>> len(sample_regions(labels, offsets, 500, generator=torch.Generator().manual_seed(0)))
    2
    """
    check_positive("num_regions", num_regions)
    check_positive("pool", pool)
    usable = usable_queries(labels, offsets).nonzero()[:, 0]
    if len(usable) == 0:
        raise DataError(
            f"none of the {len(offsets) - 1} queries has documents of two different labels, so no region can be formed"
        )
    picks = _draw_pools(len(usable), num_regions, min(pool, len(usable)), generator)
    queries = usable[picks.to(usable.device)]
    query_offsets = torch.arange(len(queries) + 1, device=offsets.device) * queries.shape[1]
    return regions_from_queries(labels, offsets, queries.flatten(), query_offsets)


def _draw_pools(num: int, count: int, pool: int, generator: torch.Generator) -> Tensor:  # (count or fewer, pool)
    def permutation() -> Tensor:
        return torch.randperm(num, generator=generator, device=generator.device)

    if pool == 1 or count * pool <= num:
        return permutation()[: count * pool].view(-1, pool).sort(dim=1).values
    drawn = [permutation()[:pool].sort().values for _ in range(count)]
    return torch.stack(list({tuple(pick.tolist()): pick for pick in drawn}.values()))


def _offsets(region: Tensor, count: int) -> Tensor:
    return offsets_from_sizes(torch.bincount(region, minlength=count))
