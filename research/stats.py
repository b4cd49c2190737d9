"""Means over queries with their intervals, paired gains, and how both are written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.functional.significance import Comparison, Interval, bootstrap_interval, compare, resampled_means
from research.store import Record

SEED = 0  # of the bootstrap
MAP_DEFINITION = (
    "MAP: average precision over the whole database, relevant documents equal in weight, ties in database order; "
    "queries without a relevant document are skipped"
)
INTERVAL = "intervals: 95% percentile bootstrap over queries, 10,000 resamples, seed 0; gains are paired per query"


def pooled(records: Iterable[Record], metric: str) -> Tensor:  # (ΣQ,)
    """The values of all folds one after the other."""
    return torch.cat([record.tensor(metric) for record in records])


def interval(values: Tensor) -> Interval:
    """The mean over queries and its bootstrap interval."""
    return bootstrap_interval(values, generator=torch.Generator().manual_seed(SEED))


def gain(a: Tensor, b: Tensor) -> Comparison:
    """What the first ranking gains over the second, query by query."""
    return compare(a, b, generator=torch.Generator().manual_seed(SEED))


def gains(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Interval]:
    """The gain of first over second on each set, and under ``"mean"`` their mean, every set counting the same."""
    found = {name: gain(a, b).difference for name, (a, b) in pairs.items()}
    if found:
        found["mean"] = _mean_gain([(a.double() - b.double()) for a, b in pairs.values()])
    return found


def _mean_gain(gaps: Sequence[Tensor]) -> Interval:  # (Q,) each
    """The mean over sets of their mean differences; queries are resampled within their set."""
    generator = torch.Generator().manual_seed(SEED)
    known = [gap[~gap.isnan()] for gap in gaps]
    draws = torch.stack([resampled_means(gap, 10_000, generator) for gap in known]).mean(dim=0)
    low, high = torch.quantile(draws, draws.new_tensor([0.025, 0.975])).tolist()
    counted, total = sum(map(len, known)), sum(map(len, gaps))
    mean = float(torch.stack([gap.mean() for gap in known]).mean())
    return Interval(mean, low, high, 0.95, counted, total - counted)


def counts(values: Tensor) -> str:
    """How many queries stand behind a mean.

    >>> counts(torch.tensor([0.5, float("nan")]))
    '1 counted, 1 skipped'
    """
    skipped = int(values.isnan().sum())
    return f"{len(values) - skipped:,} counted, {skipped:,} skipped"


def number(value: float, digits: int = 4) -> str:
    """A fixed number of digits; a dash for no number.

    >>> number(0.5), number(float("nan"))
    ('0.5000', '–')
    """
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def shown(found: Interval, digits: int = 4) -> str:
    """Mean and interval."""
    return f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def signed(found: Interval, digits: int = 4) -> str:
    """Mean difference and its interval, with signs."""
    return f"{found.mean:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"


def over_folds(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over folds; no deviation of one fold."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def seconds(value: float) -> str:
    """Seconds with a sensible number of digits.

    >>> seconds(0.01234), seconds(3.21), seconds(45.6)
    ('0.012', '3.2', '46')
    """
    return f"{value:.3f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def judged(found: Interval) -> str:
    """Whether a claimed gain is there, by its interval."""
    return "holds" if found.low > 0 else "does not hold" if found.high < 0 else "not decided"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    r"""A Markdown table; nothing is shown for None.

    >>> print(markdown(["set", "MAP"], [["a|b", 0.5], ["c", None]]))
    | set | MAP |
    | --- | --- |
    | a\|b | 0.5 |
    | c |  |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def target_word(met: bool) -> str:
    """How a target that was or was not met appears in a table."""
    return "met" if met else "MISSED"


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """How time grows with size: the slope of log seconds over log size, by least squares.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
