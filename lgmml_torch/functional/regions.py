"""Regions and their anchors.

A region is the queries a local metric is learned from, with their documents of high and of low relevance; its anchor is
the ideal candidate document, chosen by how well distance to it ranks the region's queries. Positive always means:
labelled above the lowest label of the same query. Labels are compared within queries only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, check_choice, check_finite, check_offsets, check_positive, check_shape
from lgmml_torch.functional.distance import norm_factors
from lgmml_torch.functional.presets import PRESETS, MetricName
from lgmml_torch.segments import (
    argsort_segments,
    gather_segments,
    offsets_from_sizes,
    row_slices,
    segment_ids,
    segment_max,
    segment_min,
    segment_sum,
)


@dataclass(frozen=True)
class Regions:
    """K regions; each of the three ragged lists has its own offsets ``(K+1,)``, everything ``long``."""

    queries: Tensor  # query indices of each region
    query_offsets: Tensor
    positives: Tensor  # rows of X₊, the documents of high relevance
    positive_offsets: Tensor
    negatives: Tensor  # rows of X₋, the documents of lowest relevance; never one of X₊
    negative_offsets: Tensor

    def __len__(self) -> int:
        return len(self.positive_offsets) - 1

    def part(self, some: slice) -> Regions:
        """Some regions that follow each other."""
        lists = list(vars(self).values())
        parts = []
        for values, offsets in zip(lists[::2], lists[1::2], strict=True):
            own = offsets[some.start : some.stop + 1]
            parts += [values[int(own[0]) : int(own[-1])], own - own[0]]
        return Regions(*parts)


def _check_labels(labels: Tensor, offsets: Tensor) -> None:
    """Require finite ``labels (N,)`` and offsets that end at N."""
    check_shape("labels", labels, (None,))
    check_finite("labels", labels)
    check_offsets(offsets, len(labels))


def usable_queries(labels: Tensor, offsets: Tensor) -> Tensor:  # (N,), (Q+1,) -> (Q,) bool
    """Which queries have a positive and a lower-labelled document; empty and one-document queries do not.

    >>> usable_queries(torch.tensor([0.0, 1.0, 2.0, 2.0]), torch.tensor([0, 2, 4, 4]))
    tensor([ True, False, False])
    """
    _check_labels(labels, offsets)
    values = labels.double()
    return segment_max(values, offsets) > segment_min(values, offsets)


def _high_thresholds(labels: Tensor, offsets: Tensor) -> Tensor:  # (N,), (Q+1,) -> (Q,)
    """Midpoint median of the distinct positive labels of each query, as float64; +inf where none is positive.

    With an even number of distinct positive labels the median is half way between the middle two.
    """
    ids = segment_ids(offsets)
    ordered = labels[argsort_segments(labels, offsets)].double()
    new = torch.ones_like(ids, dtype=torch.bool)
    new[1:] = (ordered[1:] != ordered[:-1]) | (ids[1:] != ids[:-1])
    distinct = torch.cat([ordered[new], ordered.new_full((1,), torch.inf)])
    ends = offsets_from_sizes(segment_sum(new.long(), offsets))
    count = ends.diff() - 1  # the first distinct label of a query is its lowest, which is not positive
    none = len(distinct) - 1
    low = ends[:-1] + 1 + (count - 1) // 2
    high = torch.where(count > 0, ends[:-1] + 1 + count // 2, none)  # infinity makes the sum infinite
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
    _check_labels(labels, offsets)
    check_offsets(query_offsets, len(queries), name="query_offsets")
    rows, row_offsets = gather_segments(offsets, queries)
    owner = segment_ids(row_offsets)
    values = labels[rows].double()
    lowest = segment_min(values, row_offsets)
    positive = values > lowest[owner]
    high = values >= _high_thresholds(values, row_offsets)[owner]
    few = segment_sum(high.long(), row_offsets) < 2
    high = torch.where(few[owner], positive, high)
    empty = (segment_sum(high.long(), row_offsets) == 0).nonzero()
    if empty.numel():
        raise DataError(f"`queries` must have a positive and a lower-labelled document, got {int(queries[empty[0]])}")
    region, count = segment_ids(query_offsets)[owner], len(query_offsets) - 1
    parts = []
    for side in (high, ~positive):
        parts += [rows[side], _offsets(region[side], count)]
    return Regions(queries, query_offsets, *parts)


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
        return permutation()[: count * pool].view(-1, pool).sort().values
    drawn = {}
    for _ in range(count):
        pick = permutation()[:pool].sort().values
        drawn[tuple(pick.tolist())] = pick
    return torch.stack(list(drawn.values()))


def _offsets(region: Tensor, count: int) -> Tensor:
    return offsets_from_sizes(torch.bincount(region, minlength=count))


CANDIDATES = ("positives", "top")
_BLOCK = 2_097_152  # entries of a (candidates, documents) block; about eight such blocks exist at a time
_LEVELS = 1 << 36  # distances are told apart to this share of their norm


@dataclass(frozen=True)
class _Anchors:
    """One anchor for each region."""

    points: Tensor  # (K, D) where the anchors lie, in the features' dtype
    rows: Tensor  # (K,) the document each anchor is, or was moved from
    ndcg: Tensor  # (K,) float64 mean NDCG of the distance order; NaN when no list had anything relevant left


def choose_anchors(
    features: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    regions: Regions,
    factors: Tensor,  # (K, D, R)
    *,
    k: int = 10,
    candidates: str = "positives",
    alphas: Sequence[float] = (),
    norm: str = "mahalanobis",
) -> _Anchors:
    """The document of X₊ whose distance order has the best NDCG@k on its region's queries.

    Each candidate is left out of the list it is judged on, where it would come first for being itself. NDCG has
    gain 2^y − 1 and discount 1/log₂(i+1); queries with nothing relevant left are skipped, and a candidate all of
    whose queries are skipped comes last. Equal distances and equal NDCG are decided by row order.

    ``candidates`` are all of X₊ (``"positives"``) or those with the region's highest label (``"top"``).

    The ideal candidate document need not exist. With ``alphas`` an anchor p_r then moves away from its region's
    negatives, to ``p_r + α(p_r − mean of X₋)``, with α = 0 or the one of ``alphas`` of the best NDCG@k; the first of
    equally good ones wins. The document it starts from is left out of the lists at every α: all values are then
    compared on the same lists, and none is credited with putting first the document it was built from.

    >>> x = torch.tensor([[0.0], [3.0], [4.0], [9.0]])
    >>> y, offsets = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([0, 4])
    >>> regions = regions_from_queries(y, offsets, torch.tensor([0]), torch.tensor([0, 1]))
    >>> choose_anchors(x, y, offsets, regions, torch.ones(1, 1, 1)).rows
    tensor([3])
    """
    check_choice("candidates", candidates, CANDIDATES)
    _check_labels(labels, offsets)
    check_shape("features", features, (len(labels), None))
    check_shape("factors", factors, (len(regions), features.shape[1], None))
    check_finite("features", features)
    check_finite("factors", factors)
    check_positive("k", k)
    grid = torch.tensor((0.0, *alphas), dtype=torch.float64, device=features.device)
    check_finite("alphas", grid[1:])
    lenses = norm_factors(factors.double(), norm)
    points = features.new_empty(len(regions), features.shape[1])
    rows, ndcgs = regions.queries.new_empty(len(regions)), lenses.new_empty(len(regions))
    for r in range(len(regions)):
        region = regions.part(slice(r, r + 1))
        judge, chosen = _Judge(features, labels, offsets, region.queries, k), region.positives
        if candidates == "top":
            chosen = chosen[labels[chosen] == labels[chosen].max()]
        tried = features[chosen].double()
        ndcg = judge(tried, lenses[r], chosen)
        best = _first_best(ndcg)
        rows[r] = chosen[best]
        if alphas:
            start = tried[best]
            tried = start + grid[:, None] * (start - features[region.negatives].double().mean(dim=0))
            ndcg = judge(tried, lenses[r], rows[r].expand(len(grid)))
            best = _first_best(ndcg)
        points[r], ndcgs[r] = tried[best], ndcg[best]
    return _Anchors(points, rows, ndcgs)


class _Judge:
    """NDCG@k of distance orders on fixed queries, for many points at once."""

    def __init__(self, features: Tensor, labels: Tensor, offsets: Tensor, queries: Tensor, k: int) -> None:
        self.rows, row_offsets = gather_segments(offsets, queries)
        # Equal documents must get equal distances, and a product may round equal rows differently: take each once.
        self.distinct, self.copy_of = torch.unique(features[self.rows], dim=0, return_inverse=True)
        self.labels, self.owner = labels[self.rows].double(), segment_ids(row_offsets)
        self.num_queries, self.measures = len(queries), [MetricName("ndcg", k)]

    def __call__(self, points: Tensor, factor: Tensor, left_out: Tensor) -> Tensor:
        """Mean NDCG (C,) of ``points (C, D)``, each judged without the row ``left_out (C,)``."""
        found = points.new_empty(len(points))
        for part in row_slices(len(points), len(self.rows), _BLOCK):
            found[part] = self._block(self._distances(points[part], factor), left_out[part])
        return found

    def _distances(self, points: Tensor, factor: Tensor) -> Tensor:  # (C, n)
        images = points @ factor
        dists = images.new_empty(len(images), len(self.distinct))
        for part in row_slices(len(self.distinct), sum(factor.shape), _BLOCK):
            # Differences, not expanded squares: near the anchor the latter cancel.
            own = self.distinct[part].double() @ factor
            dists[:, part] = torch.cdist(images, own, compute_mode="donot_use_mm_for_euclid_dist")
        dists = dists[:, self.copy_of]
        # Distances that are equal on paper (opposite sides of the anchor) must tie whatever the rounding of a product.
        unit = torch.linalg.vector_norm(dists, dim=1, keepdim=True).clamp_min(1e-300) / _LEVELS
        return dists.div_(unit).round_().long()

    def _block(self, dists: Tensor, left_out: Tensor) -> Tensor:
        candidate, place = (self.rows != left_out[:, None]).nonzero().unbind(1)
        lists = candidate * self.num_queries + self.owner[place]
        offsets = _offsets(lists, len(dists) * self.num_queries)
        ranked = (-dists[candidate, place], self.labels[place], offsets)
        found = PRESETS["default"].measure(ranked, self.measures)
        return found.view(len(dists), self.num_queries).nanmean(dim=1)  # NaN: nothing relevant in any list


def _first_best(ndcg: Tensor) -> Tensor:
    # Rounded, so that sums which differ in their last bit count as the tie they are.
    return torch.where(ndcg.isnan(), -1.0, ndcg).round(decimals=12).argmax()
