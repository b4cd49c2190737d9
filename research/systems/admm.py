"""The convex inner problem of metric learning to rank, by the alternating direction method of multipliers.

min over W ⪰ 0 of tr(W)/D + λ‖W‖₂,₁ + C·ξ subject to ⟨W, Ψᵢ⟩ ≥ Δᵢ − ξ, ξ ≥ 0, over a working set of constraints.
W carries the constraints, V the column norms, Z the cone; scaled duals U_w, U_v tie W = Z and V = Z.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import check_positive


def simplex_qp(
    H: NDArray[np.float64],  # (m, m) positive semidefinite
    b: NDArray[np.float64],  # (m,)
    C: float,
    start: NDArray[np.float64] | None = None,  # (m,)
) -> NDArray[np.float64]:  # (m,)
    """The minimum of ½αᵀHα + bᵀα over α ≥ 0, Σα ≤ C, by an exact active set method.

    A slack entry turns the inequality into Σ = C. Each pass minimises over the free entries; it either frees the entry
    with the steepest descent or drops the one that first reaches zero.

    >>> simplex_qp(np.eye(2), np.array([-1.0, -2.0]), C=2.0).round(6)
    array([0.5, 1.5])
    """
    m = len(b)
    A = np.zeros((m + 1, m + 1))
    # The ridge makes repeated constraints harmless: any split of their weight gives the same W.
    A[:m, :m] = H + np.eye(m) * (1e-11 * max(float(np.trace(H)) / max(m, 1), 1e-300))
    c = np.append(b, 0.0)
    x = np.append(np.zeros(m) if start is None else start, 0.0)
    x[:m] *= min(1.0, C / max(float(x.sum()), 1e-300))
    x[m] = max(C - float(x[:m].sum()), 0.0)
    free = x > 0
    for _ in range(20 * (m + 5)):
        rows = np.flatnonzero(free)
        system = np.ones((len(rows) + 1, len(rows) + 1))
        system[:-1, :-1], system[-1, -1] = A[np.ix_(rows, rows)], 0.0
        solved = np.linalg.solve(system, np.append(-c[rows], C))
        target, level = solved[:-1], -solved[-1]
        falling = target < 0
        if falling.any():
            steps = np.where(falling, x[rows] / np.maximum(x[rows] - target, 1e-300), np.inf)
            t = float(steps.min())
            x[rows] += t * (target - x[rows])
            x[rows[steps <= t]] = 0.0
            free[rows[steps <= t]] = False
            continue
        x[rows] = target
        gradient = A @ x + c
        gradient[rows] = np.inf
        steepest = int(gradient.argmin())
        if gradient[steepest] >= level - 1e-12 * (abs(level) + float(np.abs(c).max()) + 1e-300):
            break
        free[steepest] = True
    return np.asarray(x[:m])


class WorkingSet:
    """Constraints kept so far, as rows of one growing matrix, with their Gram matrix."""

    def __init__(self, D: int) -> None:
        self.D = D
        self.deltas = np.zeros(0)
        self.gram = np.zeros((0, 0))
        self._rows = torch.zeros((8, D * D), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.deltas)

    @property
    def psis(self) -> Tensor:  # (m, D·D)
        """The constraint matrices, flattened."""
        return self._rows[: len(self)]

    def add(self, psi: Tensor, delta: float) -> None:
        """Append one constraint."""
        m, flat = len(self), psi.reshape(-1).double()
        if m == len(self._rows):
            self._rows = torch.cat([self._rows, torch.zeros_like(self._rows)])
        self._rows[m] = flat
        self.deltas = np.append(self.deltas, delta)
        products = (self._rows[: m + 1] @ flat).numpy()
        gram = np.zeros((m + 1, m + 1))
        gram[:m, :m], gram[m], gram[:, m] = self.gram, products, products
        self.gram = gram

    def keep(self, chosen: NDArray[np.bool_]) -> None:
        """Forget the other constraints."""
        rows = self.psis[torch.from_numpy(chosen)]
        self._rows[: len(rows)] = rows
        self.deltas, self.gram = self.deltas[chosen], self.gram[np.ix_(chosen, chosen)]

    def inner(self, W: Tensor) -> NDArray[np.float64]:  # (m,)
        """⟨W, Ψᵢ⟩ of every constraint."""
        return np.asarray((self.psis @ W.reshape(-1)).numpy())

    def combine(self, alpha: NDArray[np.float64]) -> Tensor:  # (D, D)
        """Σ αᵢΨᵢ."""
        return (torch.from_numpy(alpha) @ self.psis).reshape(self.D, self.D)

    def slack(self, W: Tensor) -> float:
        """The smallest ξ ≥ 0 with which W meets every constraint."""
        return max(0.0, float((self.deltas - self.inner(W)).max(initial=0.0)))


@dataclass
class ADMMState:
    """Everything a warm start needs; ``Z`` is the metric."""

    Z: Tensor
    U_w: Tensor
    U_v: Tensor
    alpha: NDArray[np.float64]
    rho: float = 0.1
    primal: float = math.inf
    dual: float = math.inf
    steps: int = 0

    @classmethod
    def start(cls, D: int, rho: float = 0.1) -> ADMMState:
        """All zeros."""
        zero = torch.zeros((D, D), dtype=torch.float64)
        return cls(zero, zero.clone(), zero.clone(), np.zeros(0), rho)


def psd_part(A: Tensor) -> Tensor:
    """The nearest positive semidefinite matrix to A."""
    values, vectors = torch.linalg.eigh((A + A.mT) / 2)
    part: Tensor = (vectors * values.clamp_min(0)) @ vectors.mT
    return part


def shrink_columns(A: Tensor, threshold: float) -> Tensor:
    """Proximal map of threshold·‖·‖₂,₁: columns lose ``threshold`` of their length, short ones vanish.

    >>> shrink_columns(torch.tensor([[3.0, 0.1], [4.0, 0.1]]), 1.0)
    tensor([[2.4000, 0.0000], [3.2000, 0.0000]])
    """
    norms = torch.linalg.vector_norm(A, dim=0)
    kept: Tensor = A * (1 - threshold / norms.clamp_min(torch.finfo(A.dtype).tiny)).clamp_min(0)
    return kept


def solve_working_set(
    cuts: WorkingSet,
    C: float,
    lam: float,
    state: ADMMState,
    *,
    steps: int,
    tol: float = 1e-6,
    out_of_time: Callable[[], bool] = lambda: False,
) -> ADMMState:
    """Improve ``state`` until both residuals are below ``tol`` (relative to the metric), or for ``steps`` steps.

    The penalty ρ doubles or halves while one residual is over ten times the other, with the duals rescaled; it
    stays put after 200 steps, so that the method converges. With ``lam=0`` (plain MLR) V and its dual drop out.
    """
    check_positive("C", C)
    check_positive("lam", lam, zero=True)
    identity = torch.eye(cuts.D, dtype=torch.float64) / cuts.D
    traces, Z, U_w, U_v, rho = cuts.inner(identity), state.Z, state.U_w, state.U_v, state.rho
    alpha = np.append(state.alpha, np.zeros(len(cuts) - len(state.alpha)))
    primal = dual = math.inf
    done = 0
    while done < steps and not out_of_time():
        done += 1
        alpha = simplex_qp(cuts.gram, rho * (cuts.inner(Z - U_w) - cuts.deltas) - traces, C, alpha)
        W = Z - U_w + (cuts.combine(alpha) - identity) / rho
        V = shrink_columns(Z - U_v, lam / rho) if lam > 0 else W
        old, Z = Z, psd_part((W + V + U_w + U_v) / 2 if lam > 0 else W + U_w)
        U_w = U_w + W - Z
        U_v = U_v + V - Z if lam > 0 else U_v
        copies = math.sqrt(2 if lam > 0 else 1)
        primal = math.hypot(float((W - Z).norm()), float((V - Z).norm()) if lam > 0 else 0.0)
        dual = rho * copies * float((Z - old).norm())
        scale = max(1.0, float(Z.norm()))
        if primal <= tol * scale and dual <= tol * max(1.0, rho * float(U_w.norm())):
            break
        if done <= 200 and (primal > 10 * dual or dual > 10 * primal):
            factor = 2.0 if primal > dual else 0.5
            rho, U_w, U_v = rho * factor, U_w / factor, U_v / factor
    return ADMMState(Z, U_w, U_v, alpha, rho, primal, dual, state.steps + done)


def objective(W: Tensor, slack: float, C: float, lam: float) -> float:
    """tr(W)/D + λ‖W‖₂,₁ + C·ξ."""
    return float(W.trace()) / len(W) + lam * float(torch.linalg.vector_norm(W, dim=0).sum()) + C * slack


def column_multiplier(state: ADMMState, lam: float) -> Tensor:
    """The multiplier of V = Z, a point of λ·(unit balls, one per column): a subgradient of λ‖·‖₂,₁ at the optimum."""
    Y = -state.rho * state.U_v
    inside: Tensor = Y * (lam / torch.linalg.vector_norm(Y, dim=0).clamp_min(max(lam, 1e-300)))
    return inside


def lower_bound(cuts: WorkingSet, lam: float, state: ADMMState) -> float:
    """A certified lower bound of the working set's optimum, hence of the whole problem's.

    The dual is max ΣαᵢΔᵢ over α ≥ 0, Σα ≤ C, column norms of Y at most λ, I/D − ΣαΨ + sym(Y) ⪰ 0. ADMM's multipliers
    miss the cone by a little; since 0 is strictly inside, the pair shrunk towards 0 as far as needed is feasible.
    """
    if not len(state.alpha):
        return 0.0
    Y = column_multiplier(state, lam)
    eye = torch.eye(cuts.D, dtype=torch.float64) / cuts.D
    lowest = float(torch.linalg.eigvalsh(eye - cuts.combine(state.alpha) + (Y + Y.mT) / 2)[0])
    shrink = 1.0 if lowest >= 0 else (1 / cuts.D) / (1 / cuts.D - lowest)
    return shrink * float(state.alpha @ cuts.deltas[: len(state.alpha)])
