"""How the step size rises and falls while a model is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lgmml_torch.checks import check_unit_interval


class Horizon(NamedTuple):
    """How far training goes: what a rule for the step size may depend on."""

    queries: int
    updates: int  # single updates in all: batches times their size


StepSize = Callable[[int, Horizon], float]
"""Factor on the learning rate after so many single updates."""


def constant() -> None:
    """No rule: the optimizer's learning rate stays as it is."""


@dataclass(frozen=True)
class Logistic:
    """μ_t = 1/(1 + exp(t/(100·Q))): half at the start, then falling within a few hundred updates per query.

    >>> Logistic()(0, Horizon(queries=10, updates=100))
    0.5
    """

    def __call__(self, updates: int, horizon: Horizon) -> float:
        """The factor after so many single updates."""
        # exp overflows beyond 709; the step is zero in any float long before.
        return 1 / (1 + math.exp(min(updates / (100 * horizon.queries), 700.0)))


@dataclass(frozen=True)
class OneCycle:
    """A rise along half a cosine over the share ``warmup`` of all updates, then a fall along the other half to zero.

    >>> rule, horizon = OneCycle(warmup=0.25, start=0.0), Horizon(queries=10, updates=100)
    >>> [round(rule(t, horizon), 3) for t in (0, 25, 100)]
    [0.0, 1.0, 0.0]
    """

    warmup: float = 0.15
    start: float = 0.04

    def __post_init__(self) -> None:
        check_unit_interval("warmup", self.warmup)
        check_unit_interval("start", self.start)

    def __call__(self, updates: int, horizon: Horizon) -> float:
        """The factor after so many single updates."""
        done = min(1.0, updates / max(1, horizon.updates))
        if done < self.warmup:
            return self.start + (1 - self.start) * (1 - math.cos(math.pi * done / self.warmup)) / 2
        return (1 + math.cos(math.pi * (done - self.warmup) / max(1e-9, 1 - self.warmup))) / 2
