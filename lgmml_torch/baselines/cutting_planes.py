"""Metric learning to rank: MLR and its robust variant R-MLR, by one-slack cutting planes.

min over W ⪰ 0 of tr(W)/D + λ‖W‖₂,₁ + C·ξ(W), ξ the mean over queries of the largest violation of any order. Each round
adds the most violated mean constraint and improves W on the constraints so far (:mod:`lgmml_torch.baselines.admm`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.baselines.admm import ADMMState, WorkingSet, lower_bound, objective, solve_working_set
from lgmml_torch.baselines.oracles import ORACLES, Cut, most_violated_cut
from lgmml_torch.checks import DataError, check_choice, check_positive
from lgmml_torch.functional.examples import ExampleSet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Round:
    """What one cutting-plane round saw. ``gap`` = best objective − best certified lower bound, so far."""

    round: int
    constraints: int
    violation: float
    slack: float
    objective: float
    lower_bound: float
    gap: float
    primal_residual: float
    dual_residual: float
    admm_steps: int
    seconds: float


@dataclass
class RMLRResult:
    """The metric, how it was reached, and whether the time limit cut the work short.

    Converged, the metric is the optimum of ``cuts`` with the multipliers in ``state``. Otherwise it is the one with the
    lowest true objective that any round saw.
    """

    metric: Tensor  # (D, D)
    factor: Tensor  # (D, D)
    cuts: WorkingSet
    state: ADMMState
    history: list[Round] = field(default_factory=list)
    converged: bool = False
    cut: bool = False


@dataclass(frozen=True)
class Limits:
    """When to stop: rounds, violation, ADMM steps in and after the rounds, idle rounds of a constraint, seconds."""

    max_rounds: int = 200
    tol: float = 1e-3
    inner_steps: int = 20
    final_steps: int = 5000
    final_tol: float = 1e-6
    forget_after: int = 50
    time_limit: float | None = None


def fit_rmlr(
    examples: ExampleSet,
    C: float,
    lam: float = 0.0,
    *,
    loss: str = "map",
    limits: Limits | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> RMLRResult:
    """Cutting planes until no order violates the margin by more than ξ + tol.

    Inside the rounds ADMM makes a few warm-started steps. Once the violation is met, the working set is solved to
    ``final_tol`` and the oracle asked again; only a metric that passes after that counts as converged.

    Args:
        examples: the training queries; those without a relevant or another document are left out.
        C: weight of the ranking loss.
        lam: weight of the column norms; 0 is plain MLR.
        loss: ``"map"`` or ``"auc"``.
        limits: when to stop.
        on_round: called with every :class:`Round`.

    Raises:
        DataError: no query has both a relevant and another document.
    """
    check_choice("loss", loss, ORACLES)
    limits = limits or Limits()
    started = time.perf_counter()
    data = examples.select(examples.usable).to(torch.float64)
    if data.num_queries == 0:
        raise DataError("`examples` must have a query with both a relevant and another document, got none")
    run = _Run(data, C, lam, loss, limits, started)
    for number in range(limits.max_rounds):
        entry = run.round(number)
        log.info("round %d: %s", number, asdict(entry))
        if on_round is not None:
            on_round(entry)
        if run.result.converged or run.out_of_time():
            break
    if not run.result.converged and not run.out_of_time():
        log.warning("no convergence in %d rounds, violation %.3g", limits.max_rounds, run.result.history[-1].violation)
        run.polish()
        run.look(limits.max_rounds)
    run.result.cut = not run.result.converged and run.out_of_time()
    run.keep_best()
    return run.result


class _Run:
    """The state of one cutting-plane run."""

    def __init__(self, data: ExampleSet, C: float, lam: float, loss: str, limits: Limits, started: float) -> None:
        check_positive("C", C)
        check_positive("lam", lam, zero=True)
        self.data, self.C, self.lam, self.limits, self.started = data, C, lam, limits, started
        self.oracle = ORACLES[loss]
        std = data.database.std(0, correction=0)
        start = torch.diag(1 / std.where(std > 0, 1.0))
        D = len(std)
        self.result = RMLRResult(start, start.sqrt(), WorkingSet(D), ADMMState.start(D))
        self.idle = np.zeros(0, dtype=np.int64)
        self.lower, self.polished = 0.0, False
        self.upper, self.best = math.inf, (self.result.metric, self.result.factor)

    def out_of_time(self) -> bool:
        limit = self.limits.time_limit
        return limit is not None and time.perf_counter() - self.started >= limit

    def look(self, number: int) -> Cut:
        """Ask the oracle about the metric at hand, and note what it says."""
        result = self.result
        cut = most_violated_cut(result.factor, self.data, self.oracle)
        value = objective(result.metric, max(0.0, cut.violation), self.C, self.lam)
        if value < self.upper:
            self.upper, self.best = value, (result.metric, result.factor)
        result.history.append(Round(
            number, len(result.cuts), cut.violation, result.cuts.slack(result.metric),
            self.upper, self.lower, self.upper - self.lower,
            result.state.primal, result.state.dual, result.state.steps, time.perf_counter() - self.started,
        ))  # fmt: skip
        return cut

    def round(self, number: int) -> Round:
        """Accept the metric at hand, solve more finely, or add the constraint it violates most."""
        result, cut = self.result, self.look(number)
        entry = result.history[-1]
        # The first metric is a guess, not the optimum of an empty working set, so it is never accepted.
        if number > 0 and cut.violation <= entry.slack + self.limits.tol:
            if self.polished:
                result.converged = True
            else:
                self.polish()
        elif not self.out_of_time():
            self.forget()
            result.cuts.add(cut.psi, cut.loss)
            self.idle = np.append(self.idle, 0)
            self.solve(self.limits.inner_steps, tol=self.limits.final_tol)
            self.polished = False
        return entry

    def forget(self) -> None:
        """Drop constraints that have had no weight for long, so memory stays bounded."""
        keep = self.idle < self.limits.forget_after
        if not keep.all():
            self.result.cuts.keep(keep)
            self.result.state.alpha = self.result.state.alpha[keep]
            self.idle = self.idle[keep]

    def keep_best(self) -> None:
        """Without convergence the last metric need not be the best one seen: the true objective decides."""
        if not self.result.converged:
            self.result.metric, self.result.factor = self.best

    def polish(self) -> None:
        self.solve(self.limits.final_steps, tol=self.limits.final_tol)
        self.polished = True

    def solve(self, steps: int, tol: float) -> None:
        result = self.result
        state = solve_working_set(
            result.cuts, self.C, self.lam, result.state, steps=steps, tol=tol, out_of_time=self.out_of_time
        )
        self.idle = np.where(state.alpha > 0, 0, self.idle + 1)
        self.lower = max(self.lower, lower_bound(result.cuts, self.lam, state))
        values, vectors = torch.linalg.eigh(state.Z)
        result.state, result.metric = state, state.Z
        result.factor = vectors * values.clamp_min(0).sqrt()
