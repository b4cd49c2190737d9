"""Pieces of a boosting round by loops over pairs, documents and subsets."""

from __future__ import annotations

from itertools import chain, combinations, pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def list_scatter(x: Array, positive: Array, negative: Array, offsets: list[int]) -> tuple[Array, Array]:
    """x (M, s); weighted means over pairs within lists."""
    size = x.shape[1]
    S, D, s_weight, d_weight = np.zeros((size, size)), np.zeros((size, size)), 0.0, 0.0
    for start, end in pairwise(offsets):
        p_sum, n_sum = positive[start:end].sum(), negative[start:end].sum()
        w = min(p_sum, n_sum)
        if w == 0:
            continue
        p, n = positive * w / p_sum, negative * w / n_sum
        for i in range(start, end):
            for j in range(start, end):
                outer = np.outer(x[i] - x[j], x[i] - x[j])
                if i != j:
                    S, s_weight = S + p[i] * p[j] / w * outer, s_weight + p[i] * p[j] / w
                D, d_weight = D + p[i] * n[j] / w * outer, d_weight + p[i] * n[j] / w
    return S / (s_weight or 1.0), D / (d_weight or 1.0)


def newton_parts(k: Array, g: Array, h: Array, offsets: list[int], ridge: float) -> tuple[Array, Array]:
    """The system (a, b) of columns k (M, B): curvature around the list's own best shift, and slope."""
    k = k - k.mean(0)
    curvature = np.zeros((k.shape[1], k.shape[1]))
    for start, end in pairwise(offsets):
        rows, weight = k[start:end], h[start:end]
        inner = rows - (weight @ rows) / weight.sum()
        curvature += (inner * weight[:, None]).T @ inner
    return curvature + np.diag(ridge * h.sum() * (k**2).mean(0)), -(g @ k)


def nonnegative_solve(A: Array, b: Array) -> Array:
    """The best of the solutions on every subset of the variables."""
    best, best_value = np.zeros(len(b)), 0.0
    subsets = chain.from_iterable(combinations(range(len(b)), r) for r in range(1, len(b) + 1))
    for subset in map(list, subsets):
        x = np.zeros(len(b))
        x[subset] = np.linalg.solve(A[np.ix_(subset, subset)], b[subset])
        value = x @ A @ x / 2 - b @ x
        if (x >= 0).all() and value < best_value:
            best, best_value = x, value
    return best
