"""Metric learning to rank: MLR and its robust variant R-MLR, by one-slack cutting planes.

min over W ⪰ 0 of tr(W)/D + λ‖W‖₂,₁ + C·ξ(W), ξ the mean over queries of the largest violation of any order. Each round
adds the most violated mean constraint and improves W on the constraints so far (:mod:`research.systems.admm`).

The separation oracles find the order of the database that violates the margin most. For a query with n₊ relevant and n₋
other documents and scores s = −distance², an order y has the value Σ y_ij·(s_i−s_j)/(n₊n₋), where i is relevant, j
another document, and y_ij = 1 if i stands before j, else −1. The oracles maximise loss(y) + value(y). Given how many
others stand before each relevant document, both parts are best with each group sorted by score, so only the
interleavings of the two sorted groups need to be searched.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, check_choice, check_positive
from research.by_example.sets import ExampleSet, squared_distances, weighted_scatter
from research.systems.admm import ADMMState, WorkingSet, lower_bound, objective, solve_working_set
from research.systems.base import MetricSystem, choose, grid_points, mean_average_precision


@dataclass(frozen=True)
class WorstOrder:
    """The most violating order of each query.

    The difference of the feature maps of the right and of this order is Σᵢ c_i·φ_i with φ_i = −(q−x_i)(q−x_i)ᵀ; the
    coefficients c of a query sum to zero. Both are zero for queries where no order is wrong.
    """

    coefficients: Tensor  # (Q, N)
    loss: Tensor  # (Q,)


Oracle = Callable[[Tensor, Tensor, Tensor], WorstOrder]


def worst_auc_order(
    scores: Tensor,  # (Q, N)
    relevant: Tensor,  # (Q, N) bool
    others: Tensor,  # (Q, N) bool
) -> WorstOrder:
    """Loss = share of discordant pairs; each pair decides for itself: discordant pays when s_i − s_j < ½.

    >>> mask = torch.tensor([[True, False]])
    >>> worst_auc_order(torch.tensor([[0.2, 0.0]]), mask, ~mask)
    WorstOrder(coefficients=tensor([[ 2., -2.]]), loss=tensor([1.]))
    """
    n_pos, n_neg = relevant.sum(1, keepdim=True), others.sum(1, keepdim=True)
    lowered = (scores - 0.5).contiguous()  # one array for both counts, so that rounding cannot tell them apart
    low_sorted = lowered.masked_fill(~relevant, torch.inf).sort(dim=1).values
    high_sorted = scores.masked_fill(~others, -torch.inf).sort(dim=1).values
    others_before = scores.shape[1] - torch.searchsorted(high_sorted, lowered, right=True)
    relevant_after = torch.searchsorted(low_sorted, scores.contiguous(), right=False)
    counts = (others_before * relevant - relevant_after * others) * (n_neg > 0)
    pairs = (n_pos * n_neg).clamp_min(1).to(scores.dtype)  # integers would divide in float32
    return WorstOrder(
        coefficients=2 * counts / pairs,
        loss=(others_before * relevant).sum(1) / pairs[:, 0] * (n_neg[:, 0] > 0),
    )


def worst_map_order(
    scores: Tensor,  # (Q, N)
    relevant: Tensor,  # (Q, N) bool
    others: Tensor,  # (Q, N) bool
) -> WorstOrder:
    """Loss = 1 − average precision, by dynamic programming over the relevant documents in order of score.

    If b others stand before the k-th relevant document, its part of the maximum is
    g_k(b) = −k/(k+b)/n₊ + Σ_j ±(s_k−s_j)/(n₊n₋), with minus for the b best others; the b_k must not decrease:
    f_k(b) = g_k(b) + max over b′ ≤ b of f_{k−1}(b′). O(n₊·n₋) per query after sorting.

    >>> mask = torch.tensor([[True, False]])
    >>> worst_map_order(torch.tensor([[0.2, 0.0]]), mask, ~mask)
    WorstOrder(coefficients=tensor([[ 2., -2.]]), loss=tensor([0.5000]))
    """
    n_pos, n_neg = relevant.sum(1, keepdim=True), others.sum(1, keepdim=True)
    pairs = (n_pos * n_neg).clamp_min(1).to(scores.dtype)  # integers would divide in float32
    P, M = int(n_pos.max()), int(n_neg.max())
    pos_scores, pos_rows = _best_first(scores, relevant, P)
    neg_scores, neg_rows = _best_first(scores, others, M)
    b = torch.arange(M + 1, device=scores.device)
    ahead = torch.nn.functional.pad(neg_scores.cumsum(1), (1, 0))  # (Q, M+1) sum of the b best others
    balance = ahead.gather(1, n_neg) - 2 * ahead
    best = torch.zeros_like(ahead)
    came_from = []
    for k in range(1, P + 1):
        gain = ((n_neg - 2 * b) * pos_scores[:, k - 1 : k] - balance) / pairs - k / (
            k + b.to(scores.dtype)
        ) / n_pos.clamp_min(1)
        best, index = best.cummax(1) if k > 1 else (best, b.expand_as(best))
        best = best + gain.where(k <= n_pos, 0.0)
        best = best.masked_fill(b > n_neg, -torch.inf)
        came_from.append(index)
    place = best.argmax(1, keepdim=True)
    places = []
    for index in reversed(came_from):
        places.append(place)
        place = index.gather(1, place)
    before = torch.cat([*reversed(places), place[:, :0]], dim=1)  # (Q, P) others before the k-th relevant document
    ranks = torch.arange(1, P + 1, device=scores.device, dtype=scores.dtype)
    real = (ranks <= n_pos) & (n_neg > 0)
    precision = (ranks / (ranks + before) * real).sum(1) / n_pos[:, 0].clamp_min(1)
    # The j-th other stands before every relevant document that has at least j others before it; -1 hides padding.
    behind = P - torch.searchsorted(
        before.where(real, -1).sort(dim=1).values, b[1:].expand(len(scores), M).contiguous(), right=False
    )
    out = torch.zeros_like(scores)
    out.scatter_add_(1, pos_rows, 2 * before * real / pairs)
    out.scatter_add_(1, neg_rows, -2 * behind * (b[1:] <= n_neg) / pairs)
    return WorstOrder(out, (1 - precision) * real.any(1))


def _best_first(scores: Tensor, mask: Tensor, width: int) -> tuple[Tensor, Tensor]:  # (Q, width) twice
    """Scores and rows of the masked documents, best first; padding scores zero."""
    values, rows = scores.masked_fill(~mask, -torch.inf).sort(dim=1, descending=True, stable=True)
    values, rows = values[:, :width], rows[:, :width]
    return values.masked_fill(values == -torch.inf, 0.0), rows


ORACLES: Mapping[str, Oracle] = MappingProxyType({"map": worst_map_order, "auc": worst_auc_order})


@dataclass(frozen=True)
class Cut:
    """One constraint ⟨W, psi⟩ ≥ loss − ξ: the mean over queries of their most violating orders."""

    psi: Tensor  # (D, D)
    loss: float
    violation: float  # loss − ⟨W, psi⟩ at the metric it was made for


def most_violated_cut(
    factor: Tensor,  # (D, R), W = F Fᵀ
    examples: ExampleSet,
    oracle: Oracle,
    *,
    max_elements: int = 1 << 22,
) -> Cut:
    """The constraint of the one-slack problem that W violates most, from blocks of queries.

    Its violation is the exact hinge term of the objective at W: no set of orders has a larger one.
    """
    D, N = examples.database.shape[1], len(examples.database)
    psi, loss, inner = factor.new_zeros((D, D)), 0.0, 0.0
    block = max(1, max_elements // max(1, N))
    for start in range(0, examples.num_queries, block):
        queries = examples.queries[start : start + block]
        scores = -squared_distances(queries, examples.database, factor)
        worst = oracle(scores, *examples.masks(start, start + block))
        psi -= weighted_scatter(queries, examples.database, worst.coefficients)
        loss += float(worst.loss.sum())
        inner += float((worst.coefficients * scores).sum())
    count = max(1, examples.num_queries)
    return Cut(psi / count, loss / count, (loss - inner) / count)


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
