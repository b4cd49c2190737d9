"""Preprocessing by loops over lists and features, from the definitions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Array = NDArray[np.floating]


def per_list(x: Array, offsets: NDArray[np.int64], f) -> Array:
    out = np.zeros(x.shape)
    for a, b in pairwise(offsets):
        for j in range(x.shape[1]):
            if b > a:
                out[a:b, j] = f(x[a:b, j].astype(np.float64))
    return out


def rank_percentile(v: Array) -> Array:
    return (rankdata(v) - 0.5) / len(v) - 0.5


def min_max(v: Array) -> Array:
    return (v - v.min()) / (v.max() - v.min()) if v.max() > v.min() else 0 * v


def standard(v: Array) -> Array:
    return (v - v.mean()) / v.std() if v.max() > v.min() else 0 * v


def ecdf(train: Array) -> tuple[Array, Array]:
    """Distinct values and their mid-ranks over N."""
    values = sorted(set(train.tolist()))
    levels = [((train < v).sum() + 0.5 * (train == v).sum()) / len(train) for v in values]
    return np.array(values), np.array(levels)


def quantiles(train: Array, x: Array) -> Array:
    return np.stack([np.interp(x[:, j], *ecdf(train[:, j])) for j in range(x.shape[1])], axis=1)


def list_rank_features(
    train: Array, train_offsets: NDArray[np.int64], x: Array, offsets: NDArray[np.int64], limit: float = 5.0
) -> Array:
    """Constants out, quantile beside list rank, near-constants out, standardised and clipped; moments from train."""
    varies = np.array([len(set(column.tolist())) > 1 for column in train.T])
    train, x = train[:, varies], x[:, varies]

    def views(rows: Array, bounds: NDArray[np.int64]) -> Array:
        return np.concatenate([quantiles(train, rows), per_list(rows, bounds, rank_percentile)], axis=1)

    base = views(train, train_offsets)
    kept = base.std(0) > 1e-6
    z = (views(x, offsets)[:, kept] - base.mean(0)[kept]) / base.std(0)[kept]
    return np.clip(z, -limit, limit)
