"""Ragged lists sorted by score, and the metrics of the sorted lists under a preset's rules.

Lists of similar length are padded to a common width and sorted row by row, so the loop is over a handful of widths,
never over queries; every metric at every cutoff then reads the same sorted labels. Padding has label 0 and comes last:
it has no gain and is never relevant, so only rules about the list's length need to know of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.functional.presets import MetricName, Preset

# Entries of one padded block: bounds the working memory to some ten tensors of 32 MiB.
_BLOCK = 1 << 22
# Above this many grades sorting the labels is faster than counting them.
_MAX_LEVELS = 31


@dataclass(frozen=True)
class RankedBlock:
    """Lists of similar length, one per row, the sorted parts cut off after the deepest rank that is needed."""

    queries: Tensor  # (B,) which query each row is
    sizes: Tensor  # (B,) documents of that query
    labels: Tensor  # (B, W) in the order given
    scores: Tensor  # (B, W) from best to worst
    order: Tensor  # (B, W) columns of `labels` from best to worst
    ranked: Tensor  # (B, V) labels of the best V <= W documents, best first


def ranked_blocks(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    tie_order: Tensor | None,  # (N,)
    *,
    pessimistic: bool,
    depth: int | None,
) -> Iterator[RankedBlock]:
    """Sort every list once; widths double from block to block. Queries without documents appear in none."""
    sizes = offsets.diff()
    # frexp's exponent is the bit length, exact for whole numbers: sizes 2^(e-1) .. 2^e - 1 share a block.
    widths = torch.frexp(sizes.double()).exponent
    for width in torch.bincount(widths[sizes > 0]).nonzero()[:, 0].tolist():
        members = (widths == width).nonzero()[:, 0]
        for queries in members.split(max(1, _BLOCK >> width)):
            yield _ranked_block(scores, labels, offsets, tie_order, queries, pessimistic, depth)


def _ranked_block(
    scores: Tensor,
    labels: Tensor,
    offsets: Tensor,
    tie_order: Tensor | None,
    queries: Tensor,  # (B,)
    pessimistic: bool,
    depth: int | None,
) -> RankedBlock:
    starts = offsets[queries]
    sizes = offsets[queries + 1] - starts
    places = torch.arange(int(sizes.max()), device=offsets.device)
    real = places < sizes[:, None]
    rows = torch.where(real, starts[:, None] + places, 0)
    if tie_order is not None:
        last = torch.iinfo(torch.int64).max
        rows = rows.gather(1, tie_order.long()[rows].masked_fill(~real, last).argsort(dim=1, stable=True))
    block_labels = labels[rows].masked_fill(~real, 0.0)
    if pessimistic:
        order = block_labels.masked_fill(~real, torch.inf).argsort(dim=1, stable=True)
        rows, block_labels = rows.gather(1, order), block_labels.gather(1, order)
    # A stable sort keeps padding behind documents whose own score is the lowest there is.
    lowest = -torch.inf if scores.is_floating_point() else torch.iinfo(scores.dtype).min
    ranked = scores[rows].masked_fill(~real, lowest).sort(dim=1, descending=True, stable=True)
    top = block_labels.gather(1, ranked.indices[:, :depth])
    return RankedBlock(queries, sizes, block_labels, ranked.values, ranked.indices, top)


def block_metrics(
    block: RankedBlock, metrics: Sequence[MetricName], rules: Preset, max_grade: float | None, levels: int | None
) -> Tensor:  # (len(metrics), B)
    """Every metric of every list of a block; ``levels`` is the highest label if all are whole numbers, else None."""
    kinds = {metric.kind for metric in metrics}
    summands: dict[str, Tensor] = {}
    ranks = torch.arange(1, block.ranked.shape[1] + 1, device=block.ranked.device, dtype=torch.float64)
    if kinds & {"ndcg", "dcg"}:
        summands["dcg"] = _ranked_gains(block, rules) * discounts(ranks, rules)
    relevant = (block.ranked >= rules.threshold).double()
    if "map" in kinds:
        summands["map"] = relevant * relevant.cumsum(1) / ranks
    if "mrr" in kinds:
        summands["mrr"] = relevant / ranks
    if "err" in kinds and max_grade is not None:
        stops = (torch.exp2(block.ranked) - 1) * 2.0**-max_grade
        reached = torch.cat([torch.ones_like(stops[:, :1]), (1 - stops[:, :-1]).cumprod(1)], dim=1)
        summands["err"] = reached * stops / ranks
    best = _ideal_dcg(block, [metric.k for metric in metrics if metric.kind == "ndcg"], rules, levels)
    total = (block.labels >= rules.threshold).sum(1).double()
    return torch.stack([_metric(metric, block, summands, relevant, total, best, rules) for metric in metrics])


def _metric(
    metric: MetricName,
    block: RankedBlock,
    summands: dict[str, Tensor],  # each (B, V)
    relevant: Tensor,  # (B, V)
    total: Tensor,  # (B,) relevant documents of the whole list
    best: dict[int | None, Tensor],  # each (B,)
    rules: Preset,
) -> Tensor:  # (B,)
    kind, k = metric
    if kind in ("dcg", "err"):
        return summands[kind][:, :k].sum(1)
    if kind == "mrr":
        return summands[kind][:, :k].amax(1)
    if kind == "ndcg":
        ratio = (summands["dcg"][:, :k].sum(1) / best[k]).clamp(max=1.0)
        if k is not None and rules.short_lists == "zero":
            ratio = ratio.masked_fill(block.sizes < k, 0.0)
        return ratio.masked_fill(best[k] == 0, rules.no_relevant)
    hits = relevant[:, :k].sum(1)
    if kind == "precision":
        length = block.sizes.double()
        return hits / (length if k is None else length.clamp(max=k) if rules.precision_divisor == "length" else k)
    if kind == "recall":
        return (hits / total).masked_fill(total == 0, rules.no_relevant)
    divisor = total
    if rules.map_divisor == "hits":
        divisor = hits.clamp(min=1.0)
    elif rules.map_divisor == "capped" and k is not None:
        divisor = total.clamp(max=k)
    return (summands["map"][:, :k].sum(1) / divisor).masked_fill(total == 0, rules.no_relevant)


def gains(
    labels: Tensor,  # (...)
    rules: Preset,
) -> Tensor:  # (...)
    """Gain of each label: ``2^y - 1`` or ``y``."""
    return torch.exp2(labels) - 1 if rules.gain == "exponential" else labels


def discounts(
    ranks: Tensor,  # (V,) from 1
    rules: Preset,
) -> Tensor:  # (V,)
    """Weight of each rank: ``1/log2(i+1)``, or 1, 1 and then ``1/log2(i)``."""
    return 1 / torch.log2(ranks + 1 if rules.discount == "log" else ranks.clamp(min=2.0))


def _ranked_gains(block: RankedBlock, rules: Preset) -> Tensor:  # (B, V)
    """Gains from best to worst; averaged ties give each tied document the mean gain of its group.

    The mean of DCG over all orders of a tied group is the group's mean gain times its discounts, so replacing every
    gain by that mean is exact at any cutoff, also one inside the group.
    """
    if rules.ties != "averaged":
        return gains(block.ranked, rules)
    depth = block.ranked.shape[1]
    places = torch.arange(block.scores.shape[1], device=block.scores.device)
    starts = torch.zeros_like(block.scores, dtype=torch.bool)
    starts[:, 1:] = block.scores[:, 1:] != block.scores[:, :-1]
    starts |= places == block.sizes[:, None]  # padding never ties with a document whose score is -inf
    group = starts.cumsum(1)
    values = gains(block.labels.gather(1, block.order), rules)
    sums = torch.zeros_like(values).scatter_add(1, group, values)
    counts = torch.zeros_like(values).scatter_add(1, group, torch.ones_like(values))
    return (sums / counts.clamp(min=1.0)).gather(1, group[:, :depth])


def _ideal_dcg(
    block: RankedBlock, cutoffs: Sequence[int | None], rules: Preset, levels: int | None
) -> dict[int | None, Tensor]:  # each (B,)
    """DCG of the order by label, per cutoff.

    With whole labels no second sort is needed. Summation by parts over the grades g gives
    ``sum over g of (gain(g) - gain(g-1)) * C(min(k, documents labelled g or more))``, C the cumulated discounts.
    """
    width = block.labels.shape[1]
    ranks = torch.arange(1, width + 1, device=block.labels.device, dtype=torch.float64)
    weights = discounts(ranks, rules)
    ideal: dict[int | None, Tensor] = {}
    if not cutoffs:
        return ideal
    if levels is None or levels > _MAX_LEVELS:
        summands = gains(block.labels.sort(dim=1, descending=True).values, rules) * weights
        return {k: summands[:, :k].sum(1) for k in cutoffs}
    cumulated = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    steps = gains(torch.arange(levels + 1, device=ranks.device, dtype=torch.float64), rules).diff()
    counts = [(block.labels >= grade).sum(1) for grade in range(1, levels + 1)]
    for k in cutoffs:
        ideal[k] = torch.zeros(len(block.sizes), device=ranks.device, dtype=torch.float64)
        for step, count in zip(steps, counts, strict=True):
            ideal[k] += step * cumulated[count if k is None else count.clamp(max=k)]
    return ideal
