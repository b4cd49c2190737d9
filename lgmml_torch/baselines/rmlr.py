"""MLR and R-MLR as systems: metric learning to rank with C and λ chosen on validation queries."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from lgmml_torch.baselines.base import MetricSystem, choose, grid_points, mean_average_precision
from lgmml_torch.baselines.cutting_planes import Limits, RMLRResult, Round, fit_rmlr
from lgmml_torch.baselines.oracles import ORACLES
from lgmml_torch.checks import check_choice
from lgmml_torch.functional.examples import ExampleSet, squared_distances


class RMLR(MetricSystem):
    """R-MLR as a system; ``C`` and ``lam`` given as lists are chosen by validation MAP.

    Features are first divided by one number, their root mean square deviation, so that C and λ mean the same on data of
    any unit. After ``fit``: ``result`` (history, converged, cut), ``chosen``, ``cut`` (any part hit the time limit).

    Args:
        C: weight or weights of the ranking loss.
        lam: weight or weights of the column norms.
        loss: ``"map"`` or ``"auc"``.
        limits: when to stop; ``time_limit`` is for the whole grid, and points not begun by then are left out.
        on_round: called with every :class:`Round` of every grid point.
    """

    name = "R-MLR"

    def __init__(
        self,
        C: float | Sequence[float] = (0.1, 1.0, 10.0),
        lam: float | Sequence[float] = (0.001, 0.01, 0.1),
        *,
        loss: str = "map",
        limits: Limits | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        check_choice("loss", loss, ORACLES)
        self.C, self.lam, self.loss, self.on_round = C, lam, loss, on_round
        self.limits = limits or Limits()

    def fit(self, train: ExampleSet, valid: ExampleSet | None = None) -> Self:
        """Learn the metric; several values of C or λ need ``valid``."""
        started = time.perf_counter()
        deviation = train.database.double().std(0, correction=0).square().mean().sqrt()
        scale = float(deviation) or 1.0
        data = train.to(torch.float64)
        data = replace(data, database=data.database / scale, queries=data.queries / scale)
        self.cut = False

        def run(point: Mapping[str, Any]) -> RMLRResult | None:
            left = self.limits.time_limit
            if left is not None:
                left = max(0.0, left - (time.perf_counter() - started))
            limits = replace(self.limits, time_limit=left)
            if left == 0.0 and self.cut:
                return None
            result = fit_rmlr(data, **point, loss=self.loss, limits=limits, on_round=self.on_round)
            self.cut = self.cut or result.cut
            return result

        def quality(result: RMLRResult | None) -> float:
            if result is None or valid is None:
                return math.nan
            factor = result.factor / scale
            return mean_average_precision(lambda q, x: squared_distances(q.double(), x.double(), factor), valid)

        points = list(grid_points(C=self.C, lam=self.lam))
        self.chosen, result = choose(points, run, None if valid is None else quality)
        assert result is not None
        self.result, self.factor = result, result.factor / scale
        return self


class MLR(RMLR):
    """R-MLR without the column norms."""

    name = "MLR"

    def __init__(self, C: float | Sequence[float] = (0.1, 1.0, 10.0), **settings: Any) -> None:
        super().__init__(C, 0.0, **settings)
