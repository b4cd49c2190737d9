"""`Phi`: the nonnegative weights of the local metrics, and what a query gets that has none of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lgmml_torch.checks import (
    DivergedError,
    LGMMLError,
    check_choice,
    check_flag,
    check_number,
    check_shape,
    check_whole,
)

# The policies for new queries that each way of training Φ allows. The first is the default, except for per-query
# weights: there validation chooses (`AUTO`).
POLICIES = {
    "per_query": ("mean", "knn", "amortized", "ones"),
    "shared": ("shared", "ones"),
    "amortized": ("amortized", "shared", "ones"),
}
AUTO = "auto"
_RIDGE = 10.0  # of the regression of per-query weights on list summaries, per number of summaries

# The parameter `phi` of `LGMMLRanker`, as settings of `Phi`.
PHIS: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in POLICIES},
    "deviations": {"mode": "shared", "deviations": True},
}


class Phi(nn.Module):
    """Weights Φ ≥ 0 of K metrics for each query, as rows of an `torch.nn.Embedding`.

    Three ways to train them:

    - ``"per_query"``: a row for each training query (the paper's). A new query gets ``"ones"``, the ``"mean"`` row,
      the mean row of the training queries whose list summaries are nearest (``"knn"``), or the row that a linear
      regression of the training rows on their list summaries predicts (``"amortized"``).
    - ``"shared"``: one row Φ₀ for all; with ``deviations`` each training query adds a row of its own to it, kept
      small by a penalty. A new query gets Φ₀.
    - ``"amortized"``: Φ₀ · exp(gate), the gate a small network of the list's own summary.

    Args:
        num_queries: Q, of the training data.
        num_metrics: K.
        mode: one of the three ways.
        policy: what a new query gets; the mode's default when None. That of ``"per_query"`` is ``"auto"``: validation
            chooses after training, and until then it is the mean.
        init: starting weight, a number or one for each metric.
        deviations: with ``"shared"``: whether training queries have rows of their own.
        neighbours: for ``"knn"``.
        hidden: width of the gate.
        sparse: give sparse gradients, so that a step costs what it touches; needs an optimizer that takes them.
    """

    summaries: Tensor
    summary_mean: Tensor
    summary_spread: Tensor

    def __init__(
        self,
        num_queries: int,
        num_metrics: int,
        *,
        mode: str = "shared",
        policy: str | None = None,
        init: float | Tensor = 1.0,
        deviations: bool = False,
        neighbours: int = 10,
        hidden: int = 16,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        check_choice("mode", mode, POLICIES)
        for name, value in (("num_metrics", num_metrics), ("neighbours", neighbours), ("hidden", hidden)):
            check_whole(name, value)
        for name, value in (("deviations", deviations), ("sparse", sparse)):
            check_flag(name, value)
        if not isinstance(init, Tensor):
            check_number("init", init)
        if deviations and mode != "shared":
            raise LGMMLError(f"`deviations` needs `mode` 'shared', got {mode!r}")
        self.mode, self.deviations, self.neighbours, self.hidden = mode, deviations, neighbours, hidden
        self.num_queries, self.num_metrics, self.sparse = num_queries, num_metrics, sparse
        self._solution: Tensor | None = None
        self.policy = policy or (AUTO if mode == "per_query" else POLICIES[mode][0])
        self.table = _embedding(num_queries if mode == "per_query" else 1, num_metrics, sparse)
        self.deviation = _embedding(num_queries, num_metrics, sparse) if deviations else None
        self.gate = _Gate(num_metrics, hidden) if mode == "amortized" else None
        # Only k-NN and the gate look at the lists of the training queries.
        rows = 0 if mode == "shared" else num_queries
        self.register_buffer("summaries", torch.zeros(rows, 2 * num_metrics))
        self.register_buffer("summary_mean", torch.zeros(2 * num_metrics))
        self.register_buffer("summary_spread", torch.ones(2 * num_metrics))
        self.reset(init)

    @property
    def policy(self) -> str:
        """What a new query gets; assign to switch, where the mathematics allows it."""
        return self._policy

    @policy.setter
    def policy(self, name: str) -> None:
        self._check_policy(name)
        self._policy = name

    def _check_policy(self, name: str) -> None:
        if name != AUTO or self.mode != "per_query":
            check_choice("policy", name, POLICIES[self.mode])

    @property
    def needs_summaries(self) -> bool:
        """Whether training lists have to be summarised before training (the gate) or scoring (k-NN)."""
        return self.mode != "shared"

    @property
    def rows_by_query(self) -> tuple[str, ...]:
        """Names of the tensors that have a row for each training query."""
        own = {"per_query": ("table.weight", "summaries"), "amortized": ("summaries",), "shared": ()}[self.mode]
        if self.deviation is None:
            return own
        return (*own, "deviation.weight")

    @torch.no_grad()
    def reset(self, init: float | Tensor) -> None:
        """Give every row the starting weights."""
        start = torch.as_tensor(init, dtype=self.table.weight.dtype, device=self.table.weight.device)
        if start.dim():
            check_shape("init", start, (self.num_metrics,))
        if bool((start < 0).any()) or not bool(torch.isfinite(start).all()):
            raise LGMMLError(f"`init` must be finite and at least 0, got {float(start.min())}")
        self.table.weight.copy_(start.expand_as(self.table.weight))
        if self.deviation is not None:
            self.deviation.weight.zero_()

    @torch.no_grad()
    def set_summaries(self, summaries: Tensor) -> None:  # (Q, 2K) of the training lists
        """Remember what the training lists look like."""
        if not self.needs_summaries:
            return
        check_shape("summaries", summaries, (self.num_queries, 2 * self.num_metrics))
        self.summaries.copy_(summaries)
        spread = summaries.std(0, unbiased=False)
        self.summary_mean.copy_(summaries.mean(0))
        self.summary_spread.copy_(torch.where(spread > 0, spread, torch.ones_like(spread)))

    def forward(
        self,
        queries: Tensor,  # (B,) indices of training queries
    ) -> Tensor:  # (B, K), or (1, K) when all are the same
        """The weights of training queries."""
        rows = queries
        if self.mode != "per_query":
            rows = torch.zeros(1, dtype=torch.long, device=queries.device)
        base: Tensor = self.table(rows)
        if self.deviation is not None:
            own: Tensor = self.deviation(queries)
            return (base + own).clamp_min(0)
        if self.gate is None:
            return base
        return self._gated(base, self.summaries[queries])

    def for_new(
        self,
        summaries: Tensor | None,  # (Q, 2K) of the new lists; needed by "knn" and "amortized"
        count: int,
        policy: str | None = None,
    ) -> Tensor:  # (Q, K), or (1, K) when all are the same
        """The weights of queries that were not trained on, by the policy."""
        name = policy or self.policy
        self._check_policy(name)
        rule = RULES[name]
        if rule.looks:
            if summaries is None:
                raise LGMMLError(f"`summaries` must be given for policy {name!r}, got None")
            check_shape("summaries", summaries, (count, 2 * self.num_metrics))
        return rule.weights(self, summaries)

    def _trained_rows(self, policy: str) -> Tensor:  # (Q, K)
        """The rows of the training queries, which some checkpoints of release 0.2 do not have."""
        if not self.table.num_embeddings:
            raise LGMMLError(f"`policy` {policy!r} needs the rows of the training queries, and this file has none")
        return self.table.weight

    def mean_row(self) -> Tensor:  # (1, K)
        """The mean of all rows."""
        return self._trained_rows("mean").mean(0, keepdim=True)

    def nearest(self, summaries: Tensor) -> Tensor:  # (Q, 2K) -> (Q, K)
        """The mean row of the training queries whose means of κ are nearest."""
        half = self.num_metrics
        rows = self._trained_rows("knn")
        return _nearest_mean(summaries[:, :half], self.summaries[:, :half], rows, self.neighbours)

    def amortized(self, summaries: Tensor) -> Tensor:  # (Q, 2K) -> (Q, K)
        """Weights as a function of the list: by the gate, or by regression of the rows of training queries.

        That is ridge regression on their list summaries, in closed form and float64, clamped at 0:
        W = (ZᵀZ + c·I)⁻¹ Zᵀ(Φ − mean Φ).
        """
        if self.mode != "per_query":
            return self._gated(self.table.weight, summaries)
        solution = self._solution
        if solution is None:
            solution = self._solve()
        mean = self.mean_row()
        rows: Tensor = mean + (self._standard(summaries).double() @ solution).to(mean.dtype)
        return rows.clamp_min(0)

    def _gated(self, base: Tensor, summaries: Tensor) -> Tensor:  # (1, K), (Q, 2K) -> (Q, K)
        assert self.gate is not None
        gate: Tensor = self.gate(self._standard(summaries))
        return base * gate.exp()

    def _solve(self) -> Tensor:  # (2K, K)
        known = self._standard(self.summaries).double()
        gram = known.T @ known
        gram.diagonal().add_(_RIDGE * known.shape[1])
        gaps = (self.table.weight - self.mean_row()).double()
        solution: Tensor = torch.linalg.solve(gram, known.T @ gaps)
        return solution

    @torch.no_grad()
    def keep_regression_(self) -> None:
        """Solve the regression of per-query rows once, for programs that are exported; rows must not change after."""
        if self.mode == "per_query":
            self._solution = self._solve()

    def _standard(self, summaries: Tensor) -> Tensor:
        return ((summaries - self.summary_mean) / self.summary_spread).clamp(-5, 5)

    def penalty(self, queries: Tensor) -> Tensor:  # (B,) -> ()
        """½‖deviation‖² summed over the given queries; zero where there are none."""
        if self.deviation is None:
            return self.table.weight.new_zeros(())
        deviations: Tensor = self.deviation(queries)
        return 0.5 * deviations.square().sum()

    @torch.no_grad()
    def project_(
        self,
        rows: Tensor | None = None,  # (B,) of the table, those that may have changed; all when None
    ) -> None:
        """Φ ← max(Φ, 0), in place."""
        table = self.table.weight
        if rows is None:
            table.clamp_(min=0)
        else:
            table[rows] = table[rows].clamp_min(0)
        if self.deviation is not None:
            torch.maximum(self.deviation.weight, -table, out=self.deviation.weight.data)

    @torch.no_grad()
    def check(self) -> None:
        """Require weights that are finite and at least 0, each query's own (base and deviation together) included.

        A query's weights must have a finite sum, too: it is what bounds the scores of a κ that is bounded by 1.
        """
        _check_weights(self.table.weight)
        if self.deviation is not None:
            _check_weights(self.table.weight + self.deviation.weight)

    @torch.no_grad()
    def select(self, columns: Tensor) -> Phi:  # (C,)
        """The weights of some metrics only; mode and policy stay."""
        small = Phi(**{**self.spec(), "num_metrics": len(columns)}).to(self.table.weight)
        both = torch.cat([columns, columns + self.num_metrics])
        small.table.weight.copy_(self.table.weight[:, columns])
        if small.deviation is not None and self.deviation is not None:
            small.deviation.weight.copy_(self.deviation.weight[:, columns])
        for name in ("summaries", "summary_mean", "summary_spread"):
            setattr(small, name, getattr(self, name)[..., both].clone())
        if small.gate is not None and self.gate is not None:
            small.gate.first.weight.copy_(self.gate.first.weight[:, both])
            small.gate.first.bias.copy_(self.gate.first.bias)
            small.gate.last.weight.copy_(self.gate.last.weight[columns])
            small.gate.last.bias.copy_(self.gate.last.bias[columns])
        return small

    def spec(self) -> dict[str, Any]:
        """The arguments of a module of the same shapes, to be filled by ``load_state_dict``."""
        names = ("num_queries", "num_metrics", "mode", "policy", "deviations", "neighbours", "hidden", "sparse")
        return {name: getattr(self, name) for name in names}


class _Gate(nn.Module):
    """Two layers whose output starts at zero, so that training starts at Φ₀; bounded, so that Φ cannot explode."""

    def __init__(self, num_metrics: int, hidden: int, bound: float = 3.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # the layers' own start values are drawn, and not used
            self.first = nn.Linear(2 * num_metrics, hidden)
            self.last = nn.Linear(hidden, num_metrics)
        self.bound = bound
        # A fixed pattern instead of random numbers: the same model from the same data, without global state.
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.first.weight.normal_(0, (2 * num_metrics) ** -0.5, generator=generator)
            self.first.bias.zero_()
            self.last.weight.zero_()
            self.last.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        out: Tensor = self.bound * torch.tanh(self.last(hidden) / self.bound)
        return out


def _nearest_mean(
    summaries: Tensor,  # (Q, S) of the new lists
    known: Tensor,  # (T, S) of the training lists
    rows: Tensor,  # (T, K) what the training lists have
    neighbours: int,
) -> Tensor:  # (Q, K)
    """Mean row of the training lists whose summaries are nearest, each column of the summaries standardised.

    Squared distances of a list are taken as |b|² − 2ab, without the |a|² that they share, which can be exported where
    `torch.cdist` cannot; in float64, because of the difference.
    """
    mean, spread = known.mean(0), known.std(0, unbiased=False)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    new = (summaries - mean).div(spread).double()
    old = (known - mean).div(spread).double()
    gaps = old.square().sum(dim=1) - 2 * new @ old.mT
    nearest = gaps.topk(min(neighbours, len(known)), largest=False).indices
    return rows[nearest].mean(dim=1)


def _check_weights(weights: Tensor) -> None:
    low = high = 0.0
    if weights.numel():  # both bounds are NaN as soon as one weight is
        low, high = map(float, weights.aminmax())
    if not (low >= 0 and math.isfinite(high)):
        raise LGMMLError(f"weights Φ must be finite and at least 0, got {high if low >= 0 else low}")
    if not bool(weights.sum(dim=1).isfinite().all()):
        raise DivergedError(f"weights Φ must have a finite sum, or scores are infinite, got some of {high:g}")


def _embedding(rows: int, width: int, sparse: bool) -> nn.Embedding:
    """An embedding of zeros; without the weight given, the constructor would draw from the global random state."""
    return nn.Embedding(rows, width, sparse=sparse, _weight=torch.zeros(rows, width))


class Policy(NamedTuple):
    """What a query gets that was not trained on."""

    # called with the `Phi` and the summaries of the new lists ``(Q, 2K)``, which only policies that look at the list
    # need; gives ``(Q, K)`` weights, or ``(1, K)`` when all are the same
    weights: Callable[[Phi, Any], Tensor]
    looks: bool = False  # whether it looks at the new list


RULES: dict[str, Policy] = {
    "ones": Policy(lambda phi, _: phi.table.weight.new_ones(1, phi.num_metrics)),
    "shared": Policy(lambda phi, _: phi.table.weight),
    "mean": Policy(lambda phi, _: phi.mean_row()),
    "knn": Policy(lambda phi, summaries: phi.nearest(summaries), looks=True),
    "amortized": Policy(lambda phi, summaries: phi.amortized(summaries), looks=True),
    AUTO: Policy(lambda phi, _: phi.mean_row()),
}
"""Policies by name. A new one stands here, and in `POLICIES` with the ways of training Φ that allow it."""
