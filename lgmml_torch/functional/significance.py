"""How sure a mean over queries is, and whether one ranking beats another: bootstrap over queries, paired per query.

Queries, not documents, are the independent units of a ranking experiment, so they are what is resampled. Randomness
comes from an explicit generator: the same generator state gives the same interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_positive, check_shape
from lgmml_torch.segments import row_slices

# Drawn indices held at a time (32 MiB), whatever the number of queries and resamples.
_DRAWS = 4_194_304


@dataclass(frozen=True)
class Interval:
    """A mean over queries and its bootstrap percentile interval."""

    mean: float
    low: float
    high: float
    confidence: float
    counted: int
    skipped: int

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True)
class Comparison:
    """Two rankings of the same queries; the difference is the first minus the second."""

    mean_a: float
    mean_b: float
    difference: Interval
    wins: int
    ties: int
    losses: int

    @property
    def significant(self) -> bool:
        """Whether the interval of the mean difference leaves out 0."""
        return self.difference.low > 0 or self.difference.high < 0


def bootstrap_interval(
    values: Tensor,  # (Q,)
    *,
    generator: torch.Generator,
    confidence: float = 0.95,
    resamples: int = 10_000,
) -> Interval:
    """Percentile bootstrap interval of the mean over queries.

    Draws as many queries with replacement as there are, ``resamples`` times, and takes the (1 - confidence)/2 quantiles
    of the means at both ends. One query, or equal values: an interval of no width. NaN values (skipped queries) are
    left out and counted.

    >>> print(bootstrap_interval(torch.tensor([0.2, 0.4, 0.9, 0.5]), generator=torch.Generator().manual_seed(0)))
    0.5000 [0.2750, 0.7750]
    """
    check_shape("values", values, (None,))
    if not 0.0 < confidence < 1.0:
        raise LGMMLError(f"`confidence` must lie between 0 and 1, got {confidence}")
    if resamples < 1:
        raise LGMMLError(f"`resamples` must be at least 1, got {resamples}")
    known = _counted("values", values.detach().double())
    means, tail = resampled_means(known, resamples, generator), (1 - confidence) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=means.dtype)).tolist()
    return Interval(float(known.mean()), low, high, confidence, len(known), len(values) - len(known))


def compare(
    a: Tensor,  # (Q,)
    b: Tensor,  # (Q,)
    *,
    generator: torch.Generator,
    confidence: float = 0.95,
    resamples: int = 10_000,
    tolerance: float = 1e-12,
) -> Comparison:
    """Compare two rankings of the same queries by their differences per query.

    Pairing removes what makes some queries easier than others, which is most of the spread. A query that either ranking
    skips (NaN) is left out of everything, the two means included.

    Differences up to ``tolerance`` count as ties; the interval is that of `bootstrap_interval`.

    >>> a, b = torch.tensor([0.9, 0.6, 0.5, float("nan")]), torch.tensor([0.7, 0.5, 0.5, 0.1])
    >>> found = compare(a, b, generator=torch.Generator().manual_seed(0))
    >>> print(found.difference, found.wins, found.ties, found.losses, found.difference.skipped)
    0.1000 [0.0000, 0.2000] 2 1 0 1
    """
    check_shape("a", a, (None,))
    check_shape("b", b, (len(a),))
    check_positive("tolerance", tolerance, zero=True)
    a, b = a.detach().double(), b.detach().double()
    both = ~(a.isnan() | b.isnan())
    first = _counted("a", a.masked_fill(~both, torch.nan))
    second = _counted("b", b.masked_fill(~both, torch.nan))
    gaps = first - second
    # Skipped queries go in as NaN so that the interval counts them.
    interval = bootstrap_interval(
        (a - b).masked_fill(~both, torch.nan), generator=generator, confidence=confidence, resamples=resamples
    )
    wins, losses = int((gaps > tolerance).sum()), int((gaps < -tolerance).sum())
    ties = len(gaps) - wins - losses
    return Comparison(float(first.mean()), float(second.mean()), interval, wins, ties, losses)


def _counted(name: str, values: Tensor) -> Tensor:
    known = values[~values.isnan()]
    if known.isinf().any():
        raise LGMMLError(f"`{name}` must not be infinite, got {float(known[known.isinf()][0])}")
    if len(known) == 0:
        raise LGMMLError(f"`{name}` must hold at least one query that is not skipped (NaN), got {len(values)} queries")
    return known


def resampled_means(values: Tensor, resamples: int, generator: torch.Generator) -> Tensor:  # (Q,) -> (resamples,)
    """Means of as many values drawn with replacement as there are, ``resamples`` times."""
    # Draws are made on the generator's device, so that one seed means one result wherever the values are.
    values = values.to(generator.device)
    means = []
    for part in row_slices(resamples, len(values), _DRAWS):
        shape = (part.stop - part.start, len(values))
        draws = torch.randint(len(values), shape, generator=generator, device=generator.device)
        means.append(values[draws].mean(dim=1))
    return torch.cat(means).cpu()
