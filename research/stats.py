"""Means with intervals, and how they are written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lgmml_torch.functional.significance import Comparison, Interval, bootstrap_interval, compare
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
    """Of the mean over queries."""
    return bootstrap_interval(values, generator=torch.Generator().manual_seed(SEED))


def gain(a: Tensor, b: Tensor) -> Comparison:
    """Of the first over the second, query by query."""
    return compare(a, b, generator=torch.Generator().manual_seed(SEED))


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
