"""Preprocessing in numpy: each fitted step as a function of arrays, for short lists, where calls cost the most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.models.preprocess import compose, steps
from lgmml_torch.models.preprocess.base import Preprocess

_Array = NDArray[Any]
ArrayStep = Callable[[_Array, Sequence[int]], _Array]
"""Called with features ``(N, D)`` and the bounds of the lists ``(Q+1,)``, gives ``(N, D')``; changes neither."""

_FEW_ROWS = 32  # whose values are looked up one by one


def frozen_step(step: Preprocess, dtype: np.dtype[Any]) -> ArrayStep:
    """The step as a function of arrays; what it learns later does not matter."""
    if type(step) not in _FREEZERS:
        raise LGMMLError(f"preprocessing must consist of steps of this package to be frozen, got {step.name!r}")
    return _FREEZERS[type(step)](step, dtype)


def _array(values: Tensor, dtype: Any) -> _Array:
    copied: _Array = values.detach().cpu().numpy().astype(dtype)
    return copied


def _chain(step: Any, dtype: np.dtype[Any]) -> ArrayStep:
    parts = [frozen_step(part, dtype) for part in step.steps]

    def run(x: _Array, bounds: Sequence[int]) -> _Array:
        for part in parts:
            x = part(x, bounds)
        return x

    return run


def _concat(step: Any, dtype: np.dtype[Any]) -> ArrayStep:
    parts = [frozen_step(part, dtype) for part in step.steps]
    return lambda x, bounds: np.concatenate([part(x, bounds) for part in parts], axis=1)


def _columns(step: Any, dtype: np.dtype[Any]) -> ArrayStep:
    kept = _array(step.kept, np.intp)
    if len(kept) == step.num_features_in:
        return lambda x, _: x
    return lambda x, _: x.take(kept, axis=1)


def _norm2(step: Any, dtype: np.dtype[Any]) -> ArrayStep:
    norm = _array(step.norm, dtype)
    return lambda x, _: x / norm


def _standardize(step: Any, dtype: np.dtype[Any]) -> ArrayStep:
    mean, deviation = _array(step.mean, dtype), _array(step.deviation, dtype)

    def run(x: _Array, bounds: Sequence[int]) -> _Array:
        centred = x - mean
        centred /= deviation
        return centred

    return run


def _signed_log1p(step: Any, dtype: np.dtype[Any]) -> ArrayStep:
    return lambda x, _: np.sign(x) * np.log1p(np.abs(x))


def _clip(step: Any, dtype: np.dtype[Any]) -> ArrayStep:
    limit = dtype.type(step.limit)
    return lambda x, _: _limited(x, -limit, limit)


def _limited(x: _Array, low: Any, high: Any) -> _Array:
    """`numpy.clip`, which takes several times as long to start."""
    limited: _Array = np.maximum(x, low)
    np.minimum(limited, high, out=limited)
    return limited


def _pca(step: Any, dtype: np.dtype[Any]) -> ArrayStep:
    mean, directions = _array(step.mean, dtype), _array(step.directions, dtype)
    return lambda x, _: (x - mean) @ directions


def _ramps(step: Any, dtype: np.dtype[Any]) -> ArrayStep:
    origin, low, span = _array(step.origin, np.intp), _array(step.low, dtype), _array(step.span, dtype)
    zero, one = dtype.type(0), dtype.type(1)
    return lambda x, _: _limited((x.take(origin, axis=1) - low) / span, zero, one)


def _quantile(step: Any, dtype: np.dtype[Any]) -> ArrayStep:
    """`interpolate_knots` with what it needs of each interval in tables."""
    knots, levels = _array(step.knots, dtype), _array(step.levels, dtype)
    width = knots.shape[1]
    start = np.arange(len(knots)) * width
    halves = knots * dtype.type(0.5)  # so that the width of an interval cannot overflow
    gaps, rises = np.zeros_like(knots), np.zeros_like(levels)
    gaps[:, :-1], rises[:, :-1] = np.diff(halves), np.diff(levels)
    gaps[gaps <= 0] = 1
    table, level, half, gap, rise = (values.ravel() for values in (knots, levels, halves, gaps, rises))
    rising, zero, one = torch.from_numpy(knots), dtype.type(0), dtype.type(1)

    def run(x: _Array, bounds: Sequence[int]) -> _Array:
        if len(x) <= _FEW_ROWS:
            above = torch.searchsorted(rising, torch.from_numpy(x.T.copy()), right=True).numpy().T
            below = np.maximum(above - 1, 0) + start
        else:
            below = _bisected(x, table, start, width)
        share = _limited((x * dtype.type(0.5) - half.take(below)) / gap.take(below), zero, one)
        share *= rise.take(below)
        share += level.take(below)
        return share

    return run


def _bisected(
    x: _Array,  # (N, D)
    table: _Array,  # (D 2ᵖ,)
    start: _Array,  # (D,)
    width: int,
) -> _Array:  # (N, D)
    """Places of the knots at or below the values, by bisections of all at once: the faster way for many rows."""
    below = np.empty(x.shape, dtype=np.intp)
    below[:] = start
    step = width // 2
    while step:
        below += (table.take(below + step) <= x) * step
        step //= 2
    return below


def _by_list(of_list: Callable[[_Array], _Array]) -> Callable[[Any, Any], ArrayStep]:
    """A step that treats every list by itself."""

    def run(x: _Array, bounds: Sequence[int]) -> _Array:
        if len(bounds) == 2 and len(x):
            return of_list(x)
        out = np.empty_like(x)
        for start, stop in pairwise(bounds):
            if stop > start:
                out[start:stop] = of_list(x[start:stop])
        return out

    return lambda step, dtype: run


def _list_rank(x: _Array) -> _Array:
    """`list_rank_percentiles` of one list: runs of equal values in sorted columns, one column after another."""
    rows, columns = x.shape
    values = x.T.ravel()
    order = values.reshape(columns, rows).argsort(axis=1)
    order += np.arange(0, len(values), rows)[:, None]
    places = order.ravel()
    ordered = values[places]
    fresh = np.empty(len(values) + 1, dtype=bool)  # one more: the end of the last run
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:-1])
    fresh[::rows] = True
    edges = np.flatnonzero(fresh)
    starts, counts = edges[:-1], edges[1:] - edges[:-1]
    twice_mid = 2 * (starts % rows) + counts - rows
    out = np.empty_like(values)
    out[places] = (twice_mid.astype(x.dtype) / x.dtype.type(2 * rows)).repeat(counts)
    return out.reshape(columns, rows).T


def _list_min_max(x: _Array) -> _Array:
    raised = x.astype(np.float64)
    raised -= raised.min(axis=0)
    return _over(raised, raised.max(axis=0)).astype(x.dtype)


def _list_standardize(x: _Array) -> _Array:
    centred = x.astype(np.float64)
    centred -= centred.min(axis=0)
    centred -= np.add.reduce(centred, axis=0) / len(x)
    return _over(centred, np.sqrt(np.einsum("nd,nd->d", centred, centred) / len(x))).astype(x.dtype)


def _over(numerator: _Array, denominator: _Array) -> _Array:
    """Numerator/denominator; a denominator of 0 counts as 1."""
    return numerator / np.where(denominator != 0, denominator, 1.0)


_FREEZERS: dict[type[Preprocess], Callable[[Any, Any], ArrayStep]] = {
    compose.Chain: _chain,
    compose.Concat: _concat,
    steps.KeepColumns: _columns,
    steps.RemoveConstant: _columns,
    steps.Norm2: _norm2,
    steps.Standardize: _standardize,
    steps.SignedLog1p: _signed_log1p,
    steps.Clip: _clip,
    steps.PCA: _pca,
    steps.Ramps: _ramps,
    steps.Quantile: _quantile,
    steps.ListRank: _by_list(_list_rank),
    steps.ListMinMax: _by_list(_list_min_max),
    steps.ListStandardize: _by_list(_list_standardize),
}
