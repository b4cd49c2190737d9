"""Brute force and a generic solver for metric learning to rank, on problems small enough to enumerate."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Array = NDArray[np.float64]


def interleavings(n_pos: int, n_neg: int) -> list[list[int]]:
    """Every interleaving of two sorted groups, as the places (from 0) of the relevant documents."""
    return [list(places) for places in combinations(range(n_pos + n_neg), n_pos)]


def order_terms(order: list[int], relevant: list[bool]) -> tuple[float, float, dict[int, float]]:
    """1−AP, share of discordant pairs, and the coefficients of ψ(y*) − ψ(y), pair by pair."""
    pos = [i for i in order if relevant[i]]
    neg = [i for i in order if not relevant[i]]
    place = {doc: rank for rank, doc in enumerate(order)}
    precision = [sum(place[other] <= place[i] for other in pos) / (place[i] + 1) for i in pos]
    coefficients = dict.fromkeys(order, 0.0)
    discordant = 0
    for i in pos:
        for j in neg:
            if place[j] < place[i]:
                discordant += 1
                coefficients[i] += 2 / (len(pos) * len(neg))
                coefficients[j] -= 2 / (len(pos) * len(neg))
    return 1 - sum(precision) / len(pos), discordant / (len(pos) * len(neg)), coefficients


def orders(scores: list[float], relevant: list[bool], *, everything: bool = False) -> list[list[int]]:
    """All orders worth looking at: interleavings of the sorted groups, or simply all permutations."""
    if everything:
        return [list(order) for order in permutations(range(len(scores)))]
    pos = sorted((i for i, r in enumerate(relevant) if r), key=lambda i: -scores[i])
    neg = sorted((i for i, r in enumerate(relevant) if not r), key=lambda i: -scores[i])
    found = []
    for places in interleavings(len(pos), len(neg)):
        p, n = iter(pos), iter(neg)
        found.append([next(p) if place in places else next(n) for place in range(len(scores))])
    return found


def worst_violation(scores: list[float], relevant: list[bool], loss: str, *, everything: bool = False) -> float:
    """max over orders of loss(y) − (value(y*) − value(y))."""
    best = -np.inf
    for order in orders(scores, relevant, everything=everything):
        map_loss, auc_loss, c = order_terms(order, relevant)
        best = max(best, (map_loss if loss == "map" else auc_loss) - sum(c[i] * scores[i] for i in order))
    return best


def all_cuts(queries: Array, database: Array, relevant: list[list[bool]], loss: str) -> list[list[tuple[Array, float]]]:
    """For every query, (ψ(y*) − ψ(y), loss(y)) of every permutation of the database."""
    cuts = []
    for q, flags in zip(queries, relevant, strict=True):
        seen = {}
        for order in permutations(range(len(database))):
            map_loss, auc_loss, c = order_terms(list(order), flags)
            psi = -sum(c[i] * np.outer(q - database[i], q - database[i]) for i in order)
            value = map_loss if loss == "map" else auc_loss
            key = (round(value, 12), *np.round(psi, 12).ravel())
            seen[key] = (psi, value)
        cuts.append(list(seen.values()))
    return cuts


def objective(W: Array, cuts: list[list[tuple[Array, float]]], C: float, lam: float) -> float:
    """tr(W)/D + λ‖W‖₂,₁ + C·(mean over queries of the largest violation)."""
    hinge = np.mean([max(delta - np.sum(W * psi) for psi, delta in group) for group in cuts])
    return float(np.trace(W) / len(W) + lam * np.linalg.norm(W, axis=0).sum() + C * max(hinge, 0.0))


def solve_generic(
    cuts: list[list[tuple[Array, float]]], C: float, lam: float, D: int, *, starts: int = 4
) -> tuple[float, Array]:
    """Sequential quadratic programming on W = L Lᵀ, one slack per query and one bound per column norm."""
    Q = len(cuts)
    psis = [np.stack([psi for psi, _ in group]) for group in cuts]
    deltas = [np.array([delta for _, delta in group]) for group in cuts]

    def split(x: Array) -> tuple[Array, Array, Array]:
        L = x[: D * D].reshape(D, D)
        return L @ L.T, x[D * D : D * D + Q], x[D * D + Q :]

    def value(x: Array) -> float:
        W, xi, t = split(x)
        return float(np.trace(W) / D + lam * t.sum() + C * xi.mean())

    def slack(x: Array) -> Array:
        W, xi, t = split(x)
        hinge = [xi[q] - deltas[q] + np.einsum("nij,ij->n", psis[q], W) for q in range(Q)]
        return np.concatenate([*hinge, t**2 - (W**2).sum(0)])

    rng = np.random.default_rng(0)
    best, best_W = np.inf, np.zeros((D, D))
    for _ in range(starts):
        L = rng.normal(size=(D, D))
        W = L @ L.T
        x = np.concatenate([L.ravel(), np.ones(Q), np.linalg.norm(W, axis=0)])
        bounds = [(None, None)] * (D * D) + [(0, None)] * (Q + D)
        result = minimize(
            value,
            x,
            method="SLSQP",
            bounds=bounds,
            constraints={"type": "ineq", "fun": slack},
            options={"maxiter": 800, "ftol": 1e-12},
        )
        W = split(result.x)[0]
        found = objective(W, cuts, C, lam)  # the true objective, so an infeasible end point cannot flatter it
        if found < best:
            best, best_W = found, W
    return best, best_W
