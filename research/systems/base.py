"""The two small interfaces every compared system has, and the choice of settings on validation data.

Query by example: ``fit(train, valid)`` on :class:`~research.by_example.sets.ExampleSet`, then
``distances(queries, database)``. Ranking of given lists: ``fit(train, valid)`` on
:class:`~lgmml_torch.ragged.RankingData`, then ``score(data)``.
"""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_shape
from lgmml_torch.ragged import RankingData
from research.by_example.sets import ExampleSet, evaluate_examples, squared_distances

log = logging.getLogger(__name__)
Fitted = TypeVar("Fitted")


class ExampleSystem(ABC):
    """A way to rank a database for a query vector. ``chosen`` holds the settings validation picked."""

    name: str
    chosen: Mapping[str, Any]

    @abstractmethod
    def fit(self, train: ExampleSet, valid: ExampleSet | None = None) -> Self:
        """Learn from the training queries; settings given as several values are chosen on ``valid``."""

    @abstractmethod
    def distances(
        self,
        queries: Tensor,  # (Q, D)
        database: Tensor,  # (N, D)
    ) -> Tensor:  # (Q, N)
        """Distances by which the database is ranked, smallest first."""

    def evaluate(self, examples: ExampleSet) -> dict[str, Tensor]:  # (Q,) each
        """Average precision and AUC of every query, NaN where a query is skipped."""
        return evaluate_examples(self.distances, examples)


class MetricSystem(ExampleSystem):
    """One metric for all queries: M = F·Fᵀ with F in ``factor`` (D, R)."""

    factor: Tensor

    def distances(self, queries: Tensor, database: Tensor) -> Tensor:
        """‖Fᵀ(q−x)‖."""
        factor = fitted(self, "factor")
        check_shape("queries", queries, (None, len(factor)))
        check_shape("database", database, (None, len(factor)))
        return squared_distances(queries.to(factor.dtype), database.to(factor.dtype), factor).sqrt()

    @property
    def metric(self) -> Tensor:  # (D, D)
        """M."""
        factor: Tensor = fitted(self, "factor")
        return factor @ factor.mT


class RankingSystem(ABC):
    """A way to score the documents of given lists. ``chosen`` holds the settings validation picked."""

    name: str
    chosen: Mapping[str, Any]

    @abstractmethod
    def fit(self, train: RankingData, valid: RankingData) -> Self:
        """Learn from the training lists; ``valid`` decides when to stop and which settings to keep."""

    @abstractmethod
    def score(self, data: RankingData) -> Tensor:  # (N,)
        """One score per row of ``data``, higher is better."""


def fitted(system: object, attribute: str) -> Any:
    """The attribute that ``fit`` sets, or an error that says so."""
    if not hasattr(system, attribute):
        raise LGMMLError(f"`{type(system).__name__}` must be fitted first: call fit(train, valid)")
    return getattr(system, attribute)


def grid_points(**settings: Any) -> Iterator[dict[str, Any]]:
    """Every combination of settings; a list or tuple stands for several values.

    >>> list(grid_points(C=[1, 10], lam=0))
    [{'C': 1, 'lam': 0}, {'C': 10, 'lam': 0}]
    """
    values = [list(v) if isinstance(v, (list, tuple)) else [v] for v in settings.values()]
    for point in itertools.product(*values):
        yield dict(zip(settings, point, strict=True))


def choose(
    points: Sequence[Mapping[str, Any]],
    fit: Callable[[Mapping[str, Any]], Fitted],
    quality: Callable[[Fitted], float] | None,
) -> tuple[Mapping[str, Any], Fitted]:
    """The point whose fit has the best quality on validation data; the first of equals.

    Raises:
        LGMMLError: there are several points and no validation data (``quality`` is None) to choose by.
    """
    if not points:
        raise LGMMLError("`points` must hold at least one combination of settings, got none")
    if len(points) > 1 and quality is None:
        raise LGMMLError(f"`valid` must be given to choose among {len(points)} combinations of settings")
    best: tuple[float, Mapping[str, Any], Fitted] | None = None
    for point in points:
        result = fit(point)
        value = quality(result) if quality is not None else 0.0
        log.info("%s: %.4f on validation", dict(point), value)
        if best is None or (not math.isnan(value) and not value <= best[0]):
            best = (value, point, result)
    assert best is not None
    return best[1], best[2]


def mean_average_precision(
    distances: Callable[[Tensor, Tensor], Tensor],
    examples: ExampleSet,
) -> float:
    """Mean over the queries that have one; NaN when none has."""
    return float(torch.nanmean(evaluate_examples(distances, examples)["map"]))
