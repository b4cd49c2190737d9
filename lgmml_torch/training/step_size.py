"""How the step size falls, counted in single updates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lgmml_torch.checks import check_positive


def constant() -> None:
    """No rule: the optimizer's learning rate stays as it is."""


@dataclass(frozen=True)
class Logistic:
    """μ_t = 1/(1 + exp(t/(100·Q))): half at the start, then falling within a few hundred updates per query.

    >>> Logistic(num_queries=10)(0)
    0.5
    """

    num_queries: int

    def __post_init__(self) -> None:
        check_positive("num_queries", self.num_queries)

    def __call__(self, updates: int) -> float:
        """The factor after so many single updates."""
        # exp overflows beyond 709; the step is zero in any float long before.
        return 1 / (1 + math.exp(min(updates / (100 * self.num_queries), 700.0)))
