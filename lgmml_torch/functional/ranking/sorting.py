"""Ragged lists sorted by score, and the metrics of the sorted lists under a preset's rules.

Lists of similar length are padded to a common width and sorted row by row, so the loop is over a handful of widths,
never over queries; every metric at every cutoff then reads the same sorted labels. Padding has label 0 and comes last:
it has no gain and is never relevant, so only rules about the list's length need to know of it. Documents that were
not ranked are treated alike, except that the best possible order knows of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.functional.ranking.presets import MetricName, Preset
from lgmml_torch.segments import row_slices, segment_sum

# Entries of one padded block: bounds the working memory to some ten tensors of 32 MiB.
_BLOCK = 4_194_304


@dataclass(frozen=True)
class _RankedBlock:
    """Lists of similar length, one per row, the sorted parts cut off after the deepest rank that is needed."""

    queries: Tensor  # (B,) which query each row is
    sizes: Tensor  # (B,) ranked documents of that query
    labels: Tensor  # (B, W) in the order given, also of documents that were not ranked
    seen: Tensor  # (B, W) the same with 0 for documents that were not ranked
    scores: Tensor  # (B, W) from best to worst
    order: Tensor  # (B, W) columns of `seen` from best to worst
    ranked: Tensor  # (B, V) seen labels of the best V <= W documents, best first


def ranked_blocks(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    tie_order: Tensor | None,  # (N,)
    retrieved: Tensor | None,  # (N,)
    *,
    pessimistic: bool,
    depth: int | None,
) -> Iterator[_RankedBlock]:
    """Sort every list once; widths double from block to block. Queries without documents appear in none."""
    sizes = counts = offsets.diff()
    absent = None
    # One more row at the end is what padding points at: cheaper than masking every padded tensor.
    if retrieved is not None:
        counts = segment_sum(retrieved.long(), offsets)
        absent = torch.cat([~retrieved, retrieved.new_ones(1)])
    lowest = -torch.inf if scores.is_floating_point() else torch.iinfo(scores.dtype).min
    scores = torch.cat([scores, scores.new_full((1,), lowest)])
    labels = torch.cat([labels, labels.new_zeros(1)])
    if tie_order is not None:
        tie_order = torch.cat([tie_order.long(), torch.full_like(offsets[:1], torch.iinfo(torch.int64).max)])
    # frexp's exponent is the bit length, exact for whole numbers: sizes 2^(e-1) .. 2^e - 1 share a block.
    widths = torch.frexp(sizes.double()).exponent
    for width in torch.bincount(widths[sizes > 0]).nonzero()[:, 0].tolist():
        members = (widths == width).nonzero()[:, 0]
        for part in row_slices(len(members), 2**width, _BLOCK):
            queries = members[part]
            rows = _padded_rows(offsets[queries], sizes[queries], len(labels) - 1)
            if tie_order is not None:
                rows = rows.gather(dim=1, index=_take(tie_order, rows).argsort(dim=1, stable=True))
            if pessimistic:
                keys = _take(labels, rows).masked_fill(rows == len(labels) - 1, torch.inf)
                rows = rows.gather(dim=1, index=keys.argsort(dim=1))
            # A stable sort keeps padding behind documents whose own score is the lowest there is.
            best, order = _take(scores, rows).sort(dim=1, descending=True, stable=True)
            given = _take(labels, rows)
            seen = given
            if absent is not None:
                missing = _take(absent, rows)
                behind = missing.gather(dim=1, index=order).byte().argsort(dim=1, stable=True)
                best, order = best.gather(dim=1, index=behind), order.gather(dim=1, index=behind)
                seen = given.masked_fill(missing, 0.0)
            ranked = seen.gather(dim=1, index=order[:, :depth])
            yield _RankedBlock(queries, counts[queries], given, seen, best, order, ranked)


def _padded_rows(
    starts: Tensor,  # (B,)
    sizes: Tensor,  # (B,)
    padding: int,
) -> Tensor:  # (B, W)
    low, width = map(int, sizes.aminmax())
    places = torch.arange(width, device=sizes.device)
    rows = starts[:, None] + places
    if low == width:
        return rows
    return torch.where(places < sizes[:, None], rows, padding)


def _take(
    values: Tensor,  # (N,)
    rows: Tensor,  # (B, W)
) -> Tensor:  # (B, W)
    return values.index_select(0, rows.reshape(-1)).view(rows.shape)


def block_metrics(
    block: _RankedBlock, metrics: Sequence[MetricName], rules: Preset, max_grade: float | None, levels: int | None
) -> Tensor:  # (len(metrics), B)
    """Every metric of every list of a block; ``levels`` is the highest label if all are whole numbers, else None."""
    values: dict[MetricName, Tensor] = {}
    by_gain, by_relevance, by_stopping = _grouped(metrics)
    if by_gain:
        values.update(_gain_metrics(block, by_gain, rules, levels))
    if by_relevance:
        values.update(_relevance_metrics(block, by_relevance, rules))
    if by_stopping and max_grade is not None:
        stops = (torch.exp2(block.ranked) - 1) * 2.0**-max_grade
        reached = torch.cat([torch.ones_like(stops[:, :1]), (1 - stops[:, :-1]).cumprod(dim=1)], dim=1)
        summands = reached * stops / _ranks(block.ranked)
        for metric in by_stopping:
            values[metric] = summands[:, : metric.k].sum(dim=1)
    return torch.stack([values[metric] for metric in metrics])


def _grouped(metrics: Sequence[MetricName]) -> tuple[list[MetricName], list[MetricName], list[MetricName]]:
    """Metrics of gains, metrics of relevance, and err."""
    by_gain, by_relevance, by_stopping = [], [], []
    for metric in metrics:
        if metric.kind in ("ndcg", "dcg"):
            by_gain.append(metric)
        elif metric.kind == "err":
            by_stopping.append(metric)
        else:
            by_relevance.append(metric)
    return by_gain, by_relevance, by_stopping


def _gain_metrics(
    block: _RankedBlock, metrics: Sequence[MetricName], rules: Preset, levels: int | None
) -> dict[MetricName, Tensor]:  # each (B,)
    summands = _ranked_gains(block, rules) * _discounts(_ranks(block.ranked), rules)
    cutoffs = []
    for metric in metrics:
        if metric.kind == "ndcg":
            cutoffs.append(metric.k)
    ideal = _ideal_dcg(block, cutoffs, rules, levels)
    values = {}
    for metric in metrics:
        value = summands[:, : metric.k].sum(dim=1)
        if metric.kind == "ndcg":
            best = ideal[metric.k]
            value = (value / best).clamp(max=1.0)  # above 1 by rounding only
            if metric.k is not None and rules.short_lists == "zero":
                value = value.masked_fill(block.sizes < metric.k, 0.0)
            value = value.masked_fill(best == 0, rules.no_relevant)
        values[metric] = value
    return values


def _relevance_metrics(
    block: _RankedBlock, metrics: Sequence[MetricName], rules: Preset
) -> dict[MetricName, Tensor]:  # each (B,)
    relevant = (block.ranked >= rules.threshold).double()
    total = (block.labels >= rules.threshold).sum(dim=1)
    found = relevant.cumsum(dim=1)
    reciprocal = relevant / _ranks(block.ranked)
    values = {}
    for metric in metrics:
        kind, k = metric
        hits = found[:, :k][:, -1]
        if kind == "mrr":
            values[metric] = reciprocal[:, :k].amax(dim=1)
        elif kind == "precision":
            values[metric] = hits / _precision_divisor(block.sizes, k, rules)
        elif kind == "recall":
            values[metric] = (hits / total).masked_fill(total == 0, rules.no_relevant)
        else:
            capped = total if k is None else total.clamp(max=k)
            divisor = {"relevant": total, "capped": capped, "hits": hits.clamp(min=1.0)}[rules.map_divisor]
            value = (found * reciprocal)[:, :k].sum(dim=1) / divisor
            values[metric] = value.masked_fill(total == 0, rules.no_relevant)
    return values


def _precision_divisor(sizes: Tensor, k: int | None, rules: Preset) -> Tensor | int:
    if k is None:
        return sizes.clamp(min=1)
    if rules.precision_divisor == "k":
        return k
    return sizes.clamp(1, k)


def _gains(
    labels: Tensor,  # (...)
    rules: Preset,
) -> Tensor:  # (...)
    """Gain of each label: ``2^y - 1`` or ``y``."""
    if rules.gain == "exponential":
        return torch.exp2(labels) - 1
    return labels


def log_discounts(
    places: Tensor,  # (...) from 0
) -> Tensor:  # (...)
    """What a gain counts for at each place, ``1 / log2(place + 2)``, in float64."""
    return 1 / torch.log2(places.double() + 2)


def _discounts(
    ranks: Tensor,  # (V,) from 1
    rules: Preset,
) -> Tensor:  # (V,)
    """Weight of each rank: ``1/log2(i+1)``, or 1, 1 and then ``1/log2(i)``."""
    if rules.discount == "log":
        return log_discounts(ranks - 1)
    return 1 / torch.log2(ranks.clamp(min=2.0))


def _ranks(
    like: Tensor,  # (B, V)
) -> Tensor:  # (V,)
    return torch.arange(1, like.shape[1] + 1, device=like.device, dtype=torch.float64)


def _ranked_gains(block: _RankedBlock, rules: Preset) -> Tensor:  # (B, V)
    """Gains from best to worst; averaged ties give each tied document the mean gain of its group.

    The mean of DCG over all orders of a tied group is the group's mean gain times its discounts, so replacing every
    gain by that mean is exact at any cutoff, also one inside the group.
    """
    values = _gains(block.ranked, rules)
    if rules.ties != "averaged":
        return values
    places = torch.arange(block.scores.shape[1], device=block.scores.device)
    real = places < block.sizes[:, None]  # padding does not tie with a document whose score is -inf
    tied = (block.scores[:, 1:] == block.scores[:, :-1]) & real[:, 1:]
    lists = tied.any(dim=1).nonzero()[:, 0]
    if len(lists) == 0:
        return values
    group = (~tied[lists]).cumsum(dim=1)
    group = torch.cat([torch.zeros_like(group[:, :1]), group], dim=1)
    ranked = _gains(block.seen[lists].gather(dim=1, index=block.order[lists]), rules)
    sums = torch.zeros_like(ranked).scatter_add_(dim=1, index=group, src=ranked)
    counts = torch.zeros_like(ranked).scatter_add_(dim=1, index=group, src=torch.ones_like(ranked))
    group = group[:, : values.shape[1]]
    return values.index_copy(0, lists, sums.gather(dim=1, index=group) / counts.gather(dim=1, index=group))


def _ideal_dcg(
    block: _RankedBlock, cutoffs: Sequence[int | None], rules: Preset, levels: int | None
) -> dict[int | None, Tensor]:  # each (B,)
    """DCG of the order by label, per cutoff.

    With few whole labels no second sort is needed. Summation by parts over the grades g gives
    ``sum over g of (gain(g) - gain(g-1)) * C(min(k, documents labelled g or more))``, C the cumulated discounts.
    """
    weights = _discounts(_ranks(block.labels), rules)
    if not cutoffs:
        return {}
    if levels is None or levels >= len(weights):
        summands = _gains(block.labels.sort(dim=1, descending=True).values, rules) * weights
        return {k: summands[:, :k].sum(dim=1) for k in cutoffs}
    cumulated = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    steps = _gains(torch.arange(levels + 1, device=weights.device, dtype=torch.float64), rules).diff()
    grades = block.labels.long()
    counts = grades.new_zeros(len(grades), levels + 1).scatter_add_(dim=1, index=grades, src=torch.ones_like(grades))
    at_least = len(weights) - counts.cumsum(dim=1)[:, :-1]  # documents above each grade; padding has grade 0
    return {k: cumulated[at_least.clamp(max=k or len(weights))] @ steps for k in cutoffs}
