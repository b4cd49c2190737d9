"""Preprocessing by loops over lists and features, from the definitions."""

from __future__ import annotations

import math
from fractions import Fraction
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


def ramp_ends(train: Array, count: int) -> list[float]:
    """Distinct values where they are few; else quantiles, of all values but one that takes more than its share."""
    distinct = sorted(set(train.tolist()))
    if len(distinct) <= count + 1:
        return distinct
    shares = {value: float((train == value).mean()) for value in distinct}
    common = max(distinct, key=lambda value: (shares[value], -value))
    alone = shares[common] * count > 1
    rest = sorted(value for value in train.tolist() if not (alone and value == common))
    steps = count - alone
    ends = {rest[int(np.floor(level * (len(rest) - 1)))] for level in np.linspace(0, 1, steps + 1)}
    return sorted(ends | ({common} if alone else set()))


def ramps(train: Array, x: Array, count: int) -> Array:
    columns = []
    for j in range(x.shape[1]):
        for low, high in pairwise(ramp_ends(train[:, j], count)):
            columns.append([min(1.0, max(0.0, (value - low) / (high - low))) for value in x[:, j]])
    return np.array(columns).T


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


def exact_moments(column: list[float]) -> tuple[float, float]:
    """Mean and standard deviation in rational numbers, rounded once."""
    values = [Fraction(value) for value in column]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    scale = 2 ** max(0, 400 - variance.numerator.bit_length() + variance.denominator.bit_length())
    return float(mean), float(Fraction(math.isqrt(int(variance * scale**2)), scale)) if variance else 0.0
