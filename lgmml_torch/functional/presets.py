"""The conventions behind a ranking metric's name, each source's rules under that source's name, and their arithmetic.

Two libraries that both print "NDCG@10" seldom mean the same number. A :class:`Preset` spells out every choice, so that
a figure can be compared with one published elsewhere, and :func:`describe` puts the choices next to the figure.

Lists of similar length are padded to a common width and sorted row by row, so the loop is over a handful of widths,
never over queries; every metric at every cutoff then reads the same sorted labels. Padding has label 0 and comes last:
it has no gain and is never relevant, so only rules about the list's length need to know of it. Documents that were
not ranked are treated alike, except that the best possible order knows of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_choice, check_positive, did_you_mean
from lgmml_torch.segments import row_slices, segment_sum

MEASURES = ("ndcg", "dcg", "map", "mrr", "err", "precision", "recall")
REPORTED = ("ndcg@1", "ndcg@5", "ndcg@10", "map")  # unless something else is asked for


@dataclass(frozen=True)
class Preset:
    """One set of rules; ``dataclasses.replace(PRESETS["default"], ties="pessimistic")`` makes another."""

    name: str  # what reports call it
    gain: Literal["exponential", "linear"] = "exponential"  # ``2^y - 1`` or ``y``, for DCG and NDCG; ERR has the first
    # ``1/log2(i+1)`` at rank i from 1, or 1 at ranks 1 and 2 and ``1/log2(i)`` after
    discount: Literal["log", "letor"] = "log"
    no_relevant: float = math.nan  # NDCG, MAP and recall without a relevant document; NaN: the query is left out
    short_lists: Literal["truncate", "zero"] = "truncate"  # NDCG@k of n < k documents: cut off at n, or 0
    # Equal scores keep the caller's order, give DCG and NDCG their mean over all orders of the tied documents (the
    # other metrics then use the caller's order), or put the lowest label first.
    ties: Literal["order", "averaged", "pessimistic"] = "order"
    threshold: float = 1.0  # label from which a document is relevant to MAP, MRR, precision and recall
    # MAP@k divides by all relevant documents of the list, by at most k of them, or by those found up to rank k
    map_divisor: Literal["relevant", "capped", "hits"] = "relevant"
    precision_divisor: Literal["k", "length"] = "k"  # of precision@k: k even for shorter lists, or min(k, n)
    max_label: int | None = None  # the source takes whole labels from 0 to this only; None: any number from 0
    max_grade: float | None = None  # highest grade of the data set, for ERR, where the source fixes one

    def __post_init__(self) -> None:
        """Refuse rules that do not exist, as a misspelt one would silently mean another."""
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal:
                check_choice(name, getattr(self, name), get_args(kind))
        check_positive("threshold", self.threshold)

    def measure(
        self,
        lists: tuple[Tensor, Tensor, Tensor],  # scores (N,), labels (N,) and offsets (Q+1,)
        metrics: Sequence[MetricName],
        *,
        tie_order: Tensor | None = None,  # (N,)
        retrieved: Tensor | None = None,  # (N,)
        max_grade: float | None = None,
    ) -> Tensor:  # (len(metrics), Q)
        """Every metric of every list by these rules; NaN for lists that are skipped."""
        values = lists[1].new_full((len(metrics), len(lists[2]) - 1), torch.nan)
        if metrics:
            depth = 0  # the deepest rank that one looks at
            for metric in metrics:
                depth = max(depth, metric.k or sys.maxsize)
            blocks = _ranked_blocks(*lists, tie_order, retrieved, pessimistic=self.ties == "pessimistic", depth=depth)
            for block in blocks:
                values[:, block.queries] = _block_metrics(block, metrics, self, max_grade)
        return values


_KNOWN = (
    Preset("default"),
    Preset("lightgbm", no_relevant=1.0, map_divisor="capped", max_label=30),
    Preset("xgboost", no_relevant=1.0, map_divisor="capped", precision_divisor="length", max_label=31),
    Preset("xgboost-", no_relevant=0.0, map_divisor="capped", precision_divisor="length", max_label=31),
    Preset("xgboost-linear", gain="linear", no_relevant=1.0, map_divisor="capped", precision_divisor="length"),
    Preset("xgboost-linear-", gain="linear", no_relevant=0.0, map_divisor="capped", precision_divisor="length"),
    Preset("catboost", gain="linear", no_relevant=1.0, ties="pessimistic", map_divisor="capped"),
    Preset("sklearn", gain="linear", no_relevant=0.0, ties="averaged"),
    Preset("torchmetrics", gain="linear", no_relevant=0.0, ties="averaged", map_divisor="hits"),
    Preset("ranklib", no_relevant=0.0, precision_divisor="length"),
    Preset("rax", no_relevant=0.0, precision_divisor="length"),
    Preset("pytorchltr", no_relevant=0.0),
    Preset("trec_eval", gain="linear", no_relevant=0.0),
    Preset("letor4", discount="letor", no_relevant=0.0, short_lists="zero", max_label=2, max_grade=2),
    Preset("mslr", discount="letor", no_relevant=0.0, short_lists="zero", threshold=2.0, max_label=4, max_grade=4),
)
PRESETS = {preset.name: preset for preset in _KNOWN}


class MetricName(NamedTuple):
    """A metric and its cutoff, None for the whole list."""

    kind: str
    k: int | None


def find_preset(preset: str | Preset) -> Preset:
    """The preset of that name; a :class:`Preset` is returned as it is."""
    if isinstance(preset, Preset):
        return preset
    check_choice("preset", preset, PRESETS)
    return PRESETS[preset]


def parse_metric(name: str) -> MetricName:
    """Read ``"ndcg@10"``: one of :data:`MEASURES`, then ``@k`` or nothing for the whole list.

    >>> parse_metric("ndcg@10"), parse_metric("map")
    (MetricName(kind='ndcg', k=10), MetricName(kind='map', k=None))
    """
    kind, at, cutoff = name.partition("@")
    if kind not in MEASURES:
        rule = f"names like 'ndcg@10' or 'map', of {', '.join(MEASURES)}"
        raise LGMMLError(f"`metrics` must hold {rule}, got {name!r}{did_you_mean(kind, MEASURES)}")
    if at and not (cutoff.isascii() and cutoff.isdigit() and int(cutoff) > 0):
        raise LGMMLError(f"`metrics` must have a whole number of at least 1 after '@', got {name!r}")
    return MetricName(kind, int(cutoff) if at else None)


def describe(metric: str, preset: str | Preset = "default", *, threshold: float | None = None) -> str:
    """One line that says which of the many definitions a figure follows.

    >>> describe("ndcg@10", "sklearn")
    'ndcg@10 (sklearn): gain y, discount 1/log2(i+1), no relevant document: 0, shorter lists: min(k, n), ties: averaged'
    >>> describe("precision@5", "mslr")
    "precision@5 (mslr): relevant means label >= 2, divided by k, ties: caller's order"
    """
    kind, k = parse_metric(metric)
    rules = find_preset(preset)
    if threshold is None:
        threshold = rules.threshold
    parts = []
    if kind in ("ndcg", "dcg"):
        gain = {"exponential": "2^y-1", "linear": "y"}[rules.gain]
        discount = {"log": "1/log2(i+1)", "letor": "1 at ranks 1 and 2, then 1/log2(i)"}[rules.discount]
        parts += [f"gain {gain}", f"discount {discount}"]
    if kind in ("map", "mrr", "precision", "recall"):
        parts.append(f"relevant means label >= {threshold:g}")
    if kind == "err":
        parts.append("stops at a document with probability (2^y-1)/2^(highest grade)")
    if kind in ("map", "precision"):
        parts.append(f"divided by {_divisor(kind, k, rules)}")
    if kind in ("ndcg", "map", "recall"):
        value = f"{rules.no_relevant:g}"
        if math.isnan(rules.no_relevant):
            value = "query skipped"
        parts.append(f"no relevant document: {value}")
    if kind == "ndcg" and k:
        length = {"truncate": "min(k, n)", "zero": "0"}[rules.short_lists]
        parts.append(f"shorter lists: {length}")
    ties = {"order": "caller's order", "pessimistic": "lowest label first", "averaged": "averaged"}[rules.ties]
    if rules.ties == "averaged" and kind not in ("ndcg", "dcg"):
        ties = "caller's order"
    return f"{metric} ({rules.name}): " + ", ".join([*parts, f"ties: {ties}"])


def _divisor(kind: str, k: int | None, rules: Preset) -> str:
    if kind == "precision":
        if k is None:
            return "n"
        if rules.precision_divisor == "k":
            return "k"
        return "min(k, n)"
    found = {
        "relevant": "the relevant documents",
        "capped": "the relevant documents, at most k",
        "hits": "the relevant documents found up to rank k",
    }[rules.map_divisor]
    if k is None:
        return found.removesuffix(", at most k").removesuffix(" up to rank k")
    return found


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


def _ranked_blocks(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    tie_order: Tensor | None,  # (N,)
    retrieved: Tensor | None,  # (N,)
    *,
    pessimistic: bool,
    depth: int,
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
            places = torch.arange(int(sizes[queries].max()), device=sizes.device)
            rows = offsets[queries, None] + places
            rows = rows.masked_fill(places >= sizes[queries, None], len(labels) - 1)
            if tie_order is not None:
                rows = rows.gather(dim=1, index=_take(tie_order, rows).argsort(stable=True))
            if pessimistic:
                keys = _take(labels, rows).masked_fill(rows == len(labels) - 1, torch.inf)
                rows = rows.gather(dim=1, index=keys.argsort())
            # A stable sort keeps padding behind documents whose own score is the lowest there is.
            best, order = _take(scores, rows).sort(descending=True, stable=True)
            given = _take(labels, rows)
            seen = given
            if absent is not None:
                missing = _take(absent, rows)
                behind = missing.gather(dim=1, index=order).byte().argsort(stable=True)
                best, order = best.gather(dim=1, index=behind), order.gather(dim=1, index=behind)
                seen = given.masked_fill(missing, 0.0)
            ranked = seen.gather(dim=1, index=order[:, :depth])
            yield _RankedBlock(queries, counts[queries], given, seen, best, order, ranked)


def _take(values: Tensor, rows: Tensor) -> Tensor:  # (N,), (B, W) -> (B, W)
    return values.index_select(0, rows.reshape(-1)).view(rows.shape)


def _block_metrics(
    block: _RankedBlock, metrics: Sequence[MetricName], rules: Preset, max_grade: float | None
) -> Tensor:  # (len(metrics), B)
    values: dict[MetricName, Tensor] = {}
    by_gain, by_relevance, by_stopping = list[MetricName](), list[MetricName](), list[MetricName]()
    groups = {"ndcg": by_gain, "dcg": by_gain, "err": by_stopping}
    for metric in metrics:
        groups.get(metric.kind, by_relevance).append(metric)
    if by_gain:
        values.update(_gain_metrics(block, by_gain, rules))
    if by_relevance:
        values.update(_relevance_metrics(block, by_relevance, rules))
    if by_stopping and max_grade is not None:
        stops = (torch.exp2(block.ranked) - 1) * 2.0**-max_grade
        reached = torch.cat([torch.ones_like(stops[:, :1]), (1 - stops[:, :-1]).cumprod(dim=1)], dim=1)
        summands = reached * stops / _ranks(block.ranked)
        for metric in by_stopping:
            values[metric] = summands[:, : metric.k].sum(dim=1)
    return torch.stack([values[metric] for metric in metrics])


def _gain_metrics(
    block: _RankedBlock, metrics: Sequence[MetricName], rules: Preset
) -> dict[MetricName, Tensor]:  # each (B,)
    summands = _ranked_gains(block, rules) * _discounts(_ranks(block.ranked), rules)
    ideal = _ideal_dcg(block, rules)
    values = {}
    for metric in metrics:
        value = summands[:, : metric.k].sum(dim=1)
        if metric.kind == "ndcg":
            best = ideal[:, : metric.k].sum(dim=1)
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


def _gains(labels: Tensor, rules: Preset) -> Tensor:  # (...) -> (...)
    """Gain of each label: ``2^y - 1`` or ``y``."""
    if rules.gain == "exponential":
        return torch.exp2(labels) - 1
    return labels


def log_discounts(places: Tensor) -> Tensor:  # (...) from 0 -> (...)
    """What a gain counts for at each place, ``1 / log2(place + 2)``, in float64."""
    return 1 / torch.log2(places.double() + 2)


def _discounts(ranks: Tensor, rules: Preset) -> Tensor:  # (V,) from 1 -> (V,)
    """Weight of each rank: ``1/log2(i+1)``, or 1, 1 and then ``1/log2(i)``."""
    if rules.discount == "log":
        return log_discounts(ranks - 1)
    return 1 / torch.log2(ranks.clamp(min=2.0))


def _ranks(like: Tensor) -> Tensor:  # (B, V) -> (V,)
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


def _ideal_dcg(block: _RankedBlock, rules: Preset) -> Tensor:  # (B, W)
    """What each rank adds to the DCG of the order by label."""
    gains = _gains(block.labels.sort(descending=True).values, rules)
    return gains * _discounts(_ranks(block.labels), rules)
