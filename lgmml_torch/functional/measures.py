"""Ranking measures over ragged lists: NDCG, DCG, MAP, MRR, ERR, precision and recall.

A higher score ranks first; scores may be negative or infinite. Each function takes one cutoff, several or none (the
whole list) and gives the mean over the queries, or with ``reduction="none"`` a value per query with NaN for the queries
that are skipped; means run over the others. :func:`rank_metrics` gives several measures from the same sort. Values are
float64. A preset says what a name means: see :class:`~lgmml_torch.functional.presets.Preset`.

Wherever a measure is named, a function may stand instead. It gets the scores ``(N,)``, labels ``(N,)`` and offsets
``(Q+1,)`` of whole lists, rows in the order of their `RankingData`. It returns a value for each query: higher is
better, NaN for a query that does not count. It decides itself how equal scores rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_choice, check_finite, check_offsets, check_shape
from lgmml_torch.functional.presets import MetricName, Preset, describe, find_preset, parse_metric
from lgmml_torch.inputs import warn_if_steep
from lgmml_torch.ragged import RankingData

# 2^y - 1 summed over any list stays below the float64 limit, 2^1024.
_MAX_EXPONENT = 960

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measure:
    """A measure by its name, and the function behind it where it is not a built-in one.

    >>> Measure.of("ndcg@10").function is None
    True
    >>> def first_label(scores, labels, offsets):
    ...     '''Label of the best-scored document.'''
    ...     lists = zip(offsets[:-1].tolist(), offsets[1:].tolist())
    ...     return torch.stack([labels[a:b][scores[a:b].argmax()] for a, b in lists])
    >>> own = Measure.of(first_label)
    >>> own.per_query(torch.tensor([0.5, 0.1]), torch.tensor([2.0, 0.0]), torch.tensor([0, 2]))
    tensor([2.], dtype=torch.float64)
    >>> own.definition()
    'first_label (own): Label of the best-scored document.'
    """

    name: str
    function: Function | None = field(default=None, repr=False)

    @classmethod
    def of(cls, given: str | Function | Measure) -> Measure:
        """The measure of that name, or the function under its own name."""
        if isinstance(given, Measure):
            return given
        if isinstance(given, str):
            parse_metric(given)
            return cls(given)
        name = getattr(given, "__name__", None)
        if not callable(given) or not isinstance(name, str):
            raise LGMMLError(
                f"a measure must be a name or a function with a name, got {type(given).__name__}; a partial call needs "
                "a `__name__`"
            )
        return cls(name, given)

    def per_query(self, scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:  # (N,), (N,), (Q+1,) -> (Q,)
        """What the function says of each query, as float64: refused unless it is one number, or NaN."""
        assert self.function is not None
        if len(offsets) == 1:  # no lists, which a function need not be ready for
            return scores.new_empty(0, dtype=torch.float64)
        found = one_per_query(f"the measure {self.name!r}", self.function(scores, labels, offsets), offsets)
        if bool(found.isinf().any()):
            raise LGMMLError(f"the measure {self.name!r} must give finite numbers or NaN, got an infinite one")
        return found.detach().to(device=scores.device, dtype=torch.float64)

    def definition(self, preset: str | Preset = "default", *, threshold: float | None = None) -> str:
        """One line that says what the figure is, see `describe`; of a function, the first line of its docstring."""
        if self.function is None:
            return describe(self.name, preset, threshold=threshold)
        lines = (getattr(self.function, "__doc__", None) or "").strip().splitlines()
        if not lines:
            lines = ["a function without a docstring"]
        return f"{self.name} (own): {lines[0]}"


def one_per_query(what: str, found: Any, offsets: Tensor) -> Tensor:  # (Q,)
    """What a function of a user gave; refused unless it has one value for each query."""
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    want = (len(offsets) - 1,)
    if not isinstance(found, Tensor) or shape != want:
        raise LGMMLError(f"{what} must give a tensor of shape {want}, got {shape}")
    return found


def measures_of(given: str | Function | Iterable[str | Function | Measure]) -> list[Measure]:
    """Each measure once, in the order asked for; two functions of one name are refused."""
    found: dict[str, Measure] = {}
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = [given]
    for item in given:
        measure = Measure.of(item)
        if found.setdefault(measure.name, measure) != measure:
            raise LGMMLError(f"measures must have names of their own, got two called {measure.name!r}")
    return list(found.values())


def rank_metrics(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    *,
    metrics: Sequence[str | Function | Measure] = ("ndcg@10", "map"),
    preset: str | Preset = "default",
    threshold: float | None = None,
    max_grade: float | None = None,
    tie_order: Tensor | None = None,  # (N,)
    retrieved: Tensor | None = None,  # (N,)
) -> dict[str, Tensor]:  # each (Q,)
    """Several metrics per query, all from one sort of each list.

    Args:
        scores: Score of each document; NaN is an error, infinities rank first and last.
        labels: Relevance of each document, from 0; fractions are fine unless the preset's source refuses them.
        offsets: Boundaries of the lists.
        metrics: Names such as ``"ndcg@10"`` or, for the whole list, ``"map"``; functions of one's own, see `Measure`.
        preset: Name in ``PRESETS``, or a :class:`Preset`.
        threshold: Label from which a document is relevant, instead of the preset's.
        max_grade: Highest grade of the data set (not of these lists); ERR needs it.
        tie_order: Rank of each document in the caller's order, which breaks ties; the rows' order when not given.
        retrieved: False for documents that are known to be relevant or not but were not ranked at all: they stand in
            no place, and count only where all relevant documents of a query do.

    Returns:
        Values per query by metric name; NaN where the query is skipped.

    Raises:
        LGMMLError: Unknown metric or preset, shapes or offsets that do not fit, NaN scores, labels the preset's
            source does not take, ERR without ``max_grade``.

    >>> scores, labels = torch.tensor([-1.0, -2.0, -3.0, 0.5]), torch.tensor([0, 1, 2, 0])
    >>> rank_metrics(scores, labels, torch.tensor([0, 3, 4]), metrics=["ndcg@2", "mrr"])
    {'ndcg@2': tensor([0.1738,    nan], dtype=torch.float64), 'mrr': tensor([0.5000, 0.0000], dtype=torch.float64)}
    """
    asked = measures_of(metrics)
    parsed: dict[str, MetricName] = {}
    for measure in asked:
        if measure.function is None:
            parsed[measure.name] = parse_metric(measure.name)
    rules = find_preset(preset)
    if threshold is not None:
        rules = dataclasses.replace(rules, threshold=threshold)
    if max_grade is None:
        max_grade = rules.max_grade
    _check_inputs(scores, labels, offsets, tie_order)
    scores, labels = scores.detach(), labels.detach().double()
    if retrieved is not None:
        check_shape("retrieved", retrieved, (len(scores),))
        if retrieved.dtype != torch.bool:
            raise LGMMLError(f"`retrieved` must hold truth values, got {retrieved.dtype}")
    names, lists = list(parsed.values()), (scores, labels, offsets)
    _check_labels(labels, names, rules, max_grade)
    values = rules.measure(lists, names, tie_order=tie_order, retrieved=retrieved, max_grade=max_grade)
    found = dict(zip(parsed, values, strict=True))
    for measure in asked:
        if measure.function is not None:
            found[measure.name] = measure.per_query(*lists)
    return {measure.name: found[measure.name] for measure in asked}


def rank_data(
    scores: Tensor,  # (N,) in the order of the rows of `data`
    data: RankingData,
    *,
    metrics: Sequence[str | Function | Measure] = ("ndcg@10", "map"),
    **rules: Any,
) -> dict[str, Tensor]:  # each (Q,)
    """:func:`rank_metrics` of the lists of a data set; equal scores rank in the caller's order.

    >>> data = RankingData.from_arrays([[1.0], [2.0]], [1, 0], qid=[7, 7])
    >>> rank_data(torch.zeros(2), data, metrics=["mrr"])  # a tie: the caller had the relevant document first
    {'mrr': tensor([1.], dtype=torch.float64)}
    """
    device = scores.device
    labels, offsets, order = data.labels.to(device), data.offsets.to(device), data.order.to(device)
    return rank_metrics(scores, labels, offsets, metrics=metrics, tie_order=order, **rules)


def mean_measure(
    scores: Tensor,  # (N,) in the order of the rows of `data`
    data: RankingData,
    measure: str | Function | Measure = "ndcg@10",
    *,
    weights: Tensor | None = None,  # (Q,)
) -> float:
    """The mean of a measure over the queries it counts, weighted where asked for; NaN when it counts none."""
    found = Measure.of(measure)
    values = rank_data(scores, data, metrics=[found])[found.name]
    if weights is None:
        return float(values.nanmean())
    counted = ~values.isnan()
    own = weights[counted].to(values.dtype)
    return float((values[counted] * own).sum() / own.sum())


def _check_inputs(scores: Tensor, labels: Tensor, offsets: Tensor, tie_order: Tensor | None) -> None:
    if not isinstance(scores, Tensor):
        raise LGMMLError(
            f"`scores` must be a tensor in the order of the rows, got {type(scores).__name__}: arrays are in the "
            "caller's order, which labels and offsets are not"
        )
    check_shape("scores", scores, (None,))
    check_shape("labels", labels, (len(scores),))
    check_offsets(offsets, len(scores))
    if len(scores) and bool(scores.aminmax().min.isnan()):  # both bounds are NaN as soon as one score is
        raise LGMMLError(f"`scores` must not be NaN, got NaN at position {int(scores.isnan().nonzero()[0])}")
    if tie_order is not None:
        check_shape("tie_order", tie_order, (len(scores),))
        if tie_order.is_floating_point() or tie_order.is_complex():
            raise LGMMLError(f"`tie_order` must hold integers, got {tie_order.dtype}")


def _check_labels(labels: Tensor, metrics: Sequence[MetricName], rules: Preset, max_grade: float | None) -> None:
    """Refuse labels the metrics cannot take."""
    kinds = {metric.kind for metric in metrics}
    if "err" in kinds and max_grade is None:
        raise LGMMLError("`max_grade` must be given for err: the highest grade of the data set, got None")
    check_finite("labels", labels)
    low = high = 0.0
    if len(labels):
        low, high = map(float, labels.aminmax())
    if low < 0:
        raise LGMMLError(f"`labels` must be at least 0, got {low:g}")
    broken = labels[labels != labels.floor()]
    if rules.max_label is not None and (len(broken) or high > rules.max_label):
        worst = float(broken[0]) if len(broken) else high
        raise LGMMLError(
            f"`labels` must be whole numbers from 0 to {rules.max_label} for preset {rules.name!r}, got {worst:g}"
        )
    if "err" in kinds and max_grade is not None and not high <= max_grade <= _MAX_EXPONENT:
        raise LGMMLError(f"`max_grade` must be from the highest label, {high:g}, to {_MAX_EXPONENT}, got {max_grade:g}")
    if rules.gain == "exponential" and kinds & {"ndcg", "dcg"}:
        if high > _MAX_EXPONENT:
            raise LGMMLError(f"`labels` must be at most {_MAX_EXPONENT} for the gain 2^y - 1, got {high:g}")
        warn_if_steep(high)


_Cutoffs = int | None | Sequence[int | None]
_Reduction = Literal["mean", "none"]


class _Rules(TypedDict, total=False):
    """Settings of every measure, see `rank_metrics`; ``reduction="none"`` gives a value per query, not their mean."""

    preset: str | Preset
    tie_order: Tensor | None
    reduction: _Reduction


class _BinaryRules(_Rules, total=False):
    """Settings of measures that only ask whether a document is relevant: labels from ``threshold`` on are."""

    threshold: float | None


class _GradeRules(_Rules, total=False):
    """Settings of ERR, which needs the data set's highest grade."""

    max_grade: float | None


def _measure(
    kind: str,
    rules: type[_Rules],
    lists: tuple[Tensor, Tensor, Tensor],  # (N,), (N,), (Q+1,)
    k: _Cutoffs,
    given: Mapping[str, Any],
) -> Tensor:  # () or (len(k),); (Q,) or (Q, len(k)) with reduction="none"
    """One measure at one cutoff or several: what all functions below compute."""
    for name in given:
        if name not in rules.__annotations__:
            raise TypeError(f"{kind} got an unexpected keyword argument {name!r}")
    settings = dict(given)
    reduction = settings.pop("reduction", "mean")
    check_choice("reduction", reduction, ("mean", "none"))
    cutoffs = k if isinstance(k, Sequence) else [k]
    if not cutoffs:
        raise LGMMLError("`k` must hold at least one cutoff, got none")
    names = []
    for cutoff in cutoffs:
        if cutoff is None:
            names.append(kind)
            continue
        if isinstance(cutoff, bool) or not isinstance(cutoff, int) or cutoff < 1:
            raise LGMMLError(f"`k` must be None or whole numbers of at least 1, got {cutoff!r}")
        names.append(f"{kind}@{cutoff}")
    found = rank_metrics(*lists, metrics=names, **settings)
    values = torch.stack([found[name] for name in names], dim=-1)
    if reduction == "mean":
        values = values.nanmean(dim=0)
    if isinstance(k, Sequence):
        return values
    return values[..., 0]


def dcg(scores: Tensor, labels: Tensor, offsets: Tensor, *, k: _Cutoffs = None, **rules: Unpack[_Rules]) -> Tensor:
    """Discounted cumulative gain, ``sum over ranks i <= k of gain(y_i) * discount(i)``.

    >>> dcg(torch.tensor([2.0, 1.0]), torch.tensor([1, 2]), torch.tensor([0, 2]))  # 1 + 3 / log2(3)
    tensor(2.8928, dtype=torch.float64)
    """
    return _measure("dcg", _Rules, (scores, labels, offsets), k, rules)


def ndcg(scores: Tensor, labels: Tensor, offsets: Tensor, *, k: _Cutoffs = None, **rules: Unpack[_Rules]) -> Tensor:
    """DCG over the DCG of the best order, in [0, 1]; lists without any gain follow the preset's rule.

    >>> scores, labels = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1, 2, 0])
    >>> ndcg(scores, labels, torch.tensor([0, 2, 3]), k=[1, 10], reduction="none")
    tensor([[0.3333, 0.7967],
            [   nan,    nan]], dtype=torch.float64)
    >>> ndcg(scores, labels, torch.tensor([0, 2, 3]), k=10, preset="lightgbm")
    tensor(0.8984, dtype=torch.float64)
    """
    return _measure("ndcg", _Rules, (scores, labels, offsets), k, rules)


def average_precision(
    scores: Tensor, labels: Tensor, offsets: Tensor, *, k: _Cutoffs = None, **rules: Unpack[_BinaryRules]
) -> Tensor:
    """Mean over the relevant documents of the precision at their ranks; with ``k``, ranks after k add nothing.

    >>> average_precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1, 0, 1]), torch.tensor([0, 3]))  # (1 + 2/3) / 2
    tensor(0.8333, dtype=torch.float64)
    """
    return _measure("map", _BinaryRules, (scores, labels, offsets), k, rules)


def reciprocal_rank(
    scores: Tensor, labels: Tensor, offsets: Tensor, *, k: _Cutoffs = None, **rules: Unpack[_BinaryRules]
) -> Tensor:
    """One over the rank of the first relevant document, 0 if there is none up to rank k.

    >>> reciprocal_rank(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 0, 1]), torch.tensor([0, 3]), k=[2, 3])
    tensor([0.0000, 0.3333], dtype=torch.float64)
    """
    return _measure("mrr", _BinaryRules, (scores, labels, offsets), k, rules)


def err(scores: Tensor, labels: Tensor, offsets: Tensor, *, k: _Cutoffs = None, **rules: Unpack[_GradeRules]) -> Tensor:
    """Expected reciprocal rank: a reader goes down the list and stops at label y with chance (2^y - 1) / 2^max_grade.

    ``max_grade`` is the data set's highest grade: with the list's own, equal lists would get unequal values.

    >>> err(torch.tensor([2.0, 1.0]), torch.tensor([1, 2]), torch.tensor([0, 2]), max_grade=2)  # 1/4 + 3/4 * 3/4 / 2
    tensor(0.5312, dtype=torch.float64)
    """
    return _measure("err", _GradeRules, (scores, labels, offsets), k, rules)


def precision(
    scores: Tensor, labels: Tensor, offsets: Tensor, *, k: _Cutoffs = None, **rules: Unpack[_BinaryRules]
) -> Tensor:
    """Share of relevant documents among the first k; a list shorter than k is filled up with irrelevant ones.

    >>> precision(torch.tensor([2.0, 1.0]), torch.tensor([1, 0]), torch.tensor([0, 2]), k=[1, 5])
    tensor([1.0000, 0.2000], dtype=torch.float64)
    """
    return _measure("precision", _BinaryRules, (scores, labels, offsets), k, rules)


def recall(
    scores: Tensor, labels: Tensor, offsets: Tensor, *, k: _Cutoffs = None, **rules: Unpack[_BinaryRules]
) -> Tensor:
    """Share of the list's relevant documents found among the first k.

    >>> recall(torch.tensor([2.0, 1.0]), torch.tensor([1, 1]), torch.tensor([0, 2]), k=1)
    tensor(0.5000, dtype=torch.float64)
    """
    return _measure("recall", _BinaryRules, (scores, labels, offsets), k, rules)
