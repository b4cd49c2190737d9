"""The conventions behind a ranking metric's name, each source's set of rules under that source's name.

Two libraries that both print "NDCG@10" seldom mean the same number. A :class:`Preset` spells out every choice, so that
a figure can be compared with one published elsewhere, and :func:`describe` puts the choices next to the figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lgmml_torch.checks import LGMMLError, check_choice, check_positive, did_you_mean

MEASURES = ("ndcg", "dcg", "map", "mrr", "err", "precision", "recall")
REPORTED = ("ndcg@1", "ndcg@5", "ndcg@10", "map")  # unless something else is asked for


@dataclass(frozen=True)
class Preset:
    """One set of rules; ``dataclasses.replace(PRESETS["default"], ties="pessimistic")`` makes another.

    Attributes:
        name: What reports call it.
        gain: ``2^y - 1`` (``"exponential"``) or ``y`` (``"linear"``), for DCG and NDCG. ERR is always exponential.
        discount: ``1/log2(i+1)`` at rank i from 1 (``"log"``), or 1 at ranks 1 and 2 and ``1/log2(i)`` after
            (``"letor"``).
        no_relevant: NDCG, MAP and recall of a query without a relevant document; NaN leaves the query out of means.
        short_lists: NDCG@k of a list with n < k documents: cut off at n (``"truncate"``), or ``"zero"``.
        ties: Equal scores keep the caller's order (``"order"``), put the lowest label first (``"pessimistic"``), or
            give DCG and NDCG their mean over all orders of the tied documents (``"averaged"``; the other metrics
            then use the caller's order).
        threshold: A document is relevant to MAP, MRR, precision and recall when its label is at least this.
        map_divisor: MAP@k divides by all relevant documents of the list (``"relevant"``), by at most k of them
            (``"capped"``), or by those found up to rank k (``"hits"``).
        precision_divisor: Precision@k divides by ``"k"`` even when the list is shorter, or by ``"length"``, min(k, n).
        max_label: The source takes whole labels from 0 to this only; None takes any number from 0.
        max_grade: Highest grade of the data set, for ERR, where the source fixes one.
    """

    name: str
    gain: Literal["exponential", "linear"] = "exponential"
    discount: Literal["log", "letor"] = "log"
    no_relevant: float = math.nan
    short_lists: Literal["truncate", "zero"] = "truncate"
    ties: Literal["order", "averaged", "pessimistic"] = "order"
    threshold: float = 1.0
    map_divisor: Literal["relevant", "capped", "hits"] = "relevant"
    precision_divisor: Literal["k", "length"] = "k"
    max_label: int | None = None
    max_grade: float | None = None

    def __post_init__(self) -> None:
        """Refuse rules that do not exist, as a misspelt one would silently mean another."""
        check_choice("gain", self.gain, ("exponential", "linear"))
        check_choice("discount", self.discount, ("log", "letor"))
        check_choice("short_lists", self.short_lists, ("truncate", "zero"))
        check_choice("ties", self.ties, ("order", "averaged", "pessimistic"))
        check_choice("map_divisor", self.map_divisor, ("relevant", "capped", "hits"))
        check_choice("precision_divisor", self.precision_divisor, ("k", "length"))
        check_positive("threshold", self.threshold)


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
        parts += _gain_parts(rules)
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
    return f"{metric} ({rules.name}): " + ", ".join([*parts, f"ties: {_ties(kind, rules)}"])


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


def _gain_parts(rules: Preset) -> list[str]:
    gain = "2^y-1" if rules.gain == "exponential" else "y"
    discount = "1/log2(i+1)" if rules.discount == "log" else "1 at ranks 1 and 2, then 1/log2(i)"
    return [f"gain {gain}", f"discount {discount}"]


def _ties(kind: str, rules: Preset) -> str:
    if rules.ties == "pessimistic":
        return "lowest label first"
    if rules.ties == "averaged" and kind in ("ndcg", "dcg"):
        return "averaged"
    return "caller's order"
