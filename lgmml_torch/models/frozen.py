"""`FrozenScorer`: a model's scores in few operations, for short lists, where calls cost more than numbers.

Preprocessing is done in numpy, which starts an operation several times as fast as torch and is there wherever torch is.
All metrics become one matrix, so distances are one product; it stays in torch, whose number of threads users set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from lgmml_torch.checks import LGMMLError, check_choice, check_finite, check_offsets
from lgmml_torch.functional.distance import TILE_IMAGES, norm_factors
from lgmml_torch.functional.score import KERNELS, first_equal_rows
from lgmml_torch.inputs import fingerprint
from lgmml_torch.models.local_metrics import LocalMetrics
from lgmml_torch.models.phi import RULES
from lgmml_torch.models.preprocess import compose, steps
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.segments import row_slices, segment_ids

if TYPE_CHECKING:
    from lgmml_torch.models.ranker import LGMML

_Array = NDArray[Any]
_ArrayStep = Callable[[_Array, Sequence[int]], _Array]
"""Called with features ``(N, D)`` and the bounds of the lists ``(Q+1,)``, gives ``(N, D')``; changes neither."""

_FEW_ROWS = 32  # whose quantiles are looked up one by one: half of the time of preprocessing a list of 10
_MOST_ENTRIES = 1 << 22  # of the matrix of all metrics: a larger one is slower than one metric after another


class FrozenScorer:
    """What `LGMML.score` gives, to rounding, as a function of arrays; what the model becomes later does not change it.

    Calls change nothing, so threads may share it. Equal rows of a list get equal scores.

    Args:
        model: of any preprocessing of this package; an encoder and a base are left out.
        policy: what queries get, by default the model's own policy; not one that looks at the list.

    Raises:
        LGMMLError: a policy that looks at the list, steps of other makers, or metrics too large for one matrix.
    """

    def __init__(self, model: LGMML, policy: str | None = None) -> None:
        policy = policy or model.phi.policy
        check_choice("policy", policy, RULES)
        if RULES[policy].looks:
            raise LGMMLError(f"`policy` must give all lists the same weights to be frozen, got {policy!r}")
        if model.dtype not in (torch.float32, torch.float64):
            raise LGMMLError(f"a model must be of float32 or float64 to be frozen, got {model.dtype}")
        self.num_features = model.num_features
        self._dtype = torch.empty(0, dtype=model.dtype).numpy().dtype
        self._prepare = _frozen_step(model.preprocess, self._dtype)
        with torch.no_grad():
            phi = model.phi.for_new(None, 1, policy)[0]
            metrics, used = model.metrics, phi.nonzero()[:, 0]
            if len(used):
                metrics, phi = metrics.select(used), phi[used]
            self._weights = phi.cpu().clone()
            lenses, centres = _stacked(metrics)
        self._shape = centres.shape  # directions of each metric, metrics
        self._lenses, self._centres = lenses.flatten(0, 1).to(model.dtype), centres.flatten().to(model.dtype)
        self._kernel = KERNELS[model.kernel]

    def __call__(
        self,
        features: ArrayLike,  # (N, D)
        offsets: ArrayLike | None = None,  # (Q+1,) all rows are one list when None
    ) -> _Array:  # (N,)
        """Scores of whole lists, in the order of the rows; higher is better.

        Raises:
            LGMMLError: shapes that do not fit, or features that are not finite.
        """
        rows = np.asarray(features)
        if rows.ndim != 2 or rows.shape[1] != self.num_features:
            raise LGMMLError(f"`features` must have shape (*, {self.num_features}), got {rows.shape}")
        bounds = [0, len(rows)]
        if offsets is not None:
            given = torch.as_tensor(offsets)
            check_offsets(given, len(rows))
            bounds = given.tolist()
        return self.of_lists(rows, bounds)

    @torch.no_grad()
    def of_lists(self, features: _Array, bounds: Sequence[int]) -> _Array:  # (N, D), (Q+1,) -> (N,)
        """The same, of shapes that were checked already."""
        rows = np.ascontiguousarray(features, dtype=self._dtype)
        if not math.isfinite(float(rows.sum(dtype=np.float64))):
            check_finite("features", torch.from_numpy(rows))
        with np.errstate(over="ignore"):  # infinite for a moment: steps limit what they give
            prepared = np.ascontiguousarray(self._prepare(rows, bounds))
        scores = self._scores(torch.from_numpy(prepared)).numpy()
        return _level(scores, rows, bounds)

    def _scores(self, prepared: Tensor) -> Tensor:  # (N, D') -> (N,)
        out = prepared.new_empty(len(prepared))
        for rows in row_slices(len(prepared), len(self._lenses), TILE_IMAGES):
            images = nn.functional.linear(prepared[rows], self._lenses, self._centres)
            dists = images.square_().view(len(images), *self._shape).sum(dim=1).sqrt_()
            if not math.isfinite(float(dists.sum())):
                raise LGMMLError(f"distances must stay below {torch.finfo(dists.dtype).max:.3g}, got an overflow")
            torch.mv(self._kernel(dists), self._weights, out=out[rows])
        return out.neg_()


def _stacked(metrics: LocalMetrics) -> tuple[Tensor, Tensor]:  # (R, K, D), (R, K) float64
    """Factors over their scales, one direction of all metrics after another, and minus what anchors become by them."""
    rank = 0
    for block in metrics.iter_blocks():
        rank = max(rank, norm_factors(block.factors[:1], metrics.norm).shape[2])
    entries = rank * metrics.num_metrics * metrics.num_features
    if entries > _MOST_ENTRIES:
        raise LGMMLError(f"metrics must have at most {_MOST_ENTRIES:,} entries together to be frozen, got {entries:,}")
    lenses = torch.zeros(rank, metrics.num_metrics, metrics.num_features, dtype=torch.float64)
    centres = torch.zeros(rank, metrics.num_metrics, dtype=torch.float64)
    for columns, block in metrics.iter_columns():
        own = norm_factors(block.zoomed_factors, metrics.norm).double() / block.scales.double()[:, None, None]
        own = own.cpu().permute(2, 0, 1)  # (r, K, s)
        centres[: len(own), columns] = -(own * block.anchors.double().cpu()).sum(dim=2)
        if block.is_full:
            lenses[: len(own), columns] = own
        else:
            place = block.support.cpu().expand(own.shape)
            lenses[: len(own), columns].scatter_add_(2, place, own)  # a feature may be named twice
    return lenses, centres


def _level(scores: _Array, rows: _Array, bounds: Sequence[int]) -> _Array:  # (N,), (N, D), (Q+1,) -> (N,)
    """The scores with equal rows of a list level: a row's place in a product may move its last bits."""
    keys = fingerprint(rows)
    ordered = np.sort(keys)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(again):
        return scores
    several = np.flatnonzero(np.isin(keys, again))
    ids = segment_ids(torch.tensor(bounds))[torch.from_numpy(several)]
    first = first_equal_rows(torch.from_numpy(rows[several]), ids).numpy()
    scores[several] = scores[several[first]]
    return scores


def _frozen_step(step: Preprocess, dtype: np.dtype[Any]) -> _ArrayStep:
    """The step as a function of arrays; what it learns later does not matter."""
    if type(step) not in _FREEZERS:
        raise LGMMLError(f"preprocessing must consist of steps of this package to be frozen, got {step.name!r}")
    return _FREEZERS[type(step)](step, dtype)


def _array(values: Tensor, dtype: Any) -> _Array:
    copied: _Array = values.detach().cpu().numpy().astype(dtype)
    return copied


def _chain(step: Any, dtype: np.dtype[Any]) -> _ArrayStep:
    parts = [_frozen_step(part, dtype) for part in step.steps]

    def run(x: _Array, bounds: Sequence[int]) -> _Array:
        for part in parts:
            x = part(x, bounds)
        return x

    return run


def _concat(step: Any, dtype: np.dtype[Any]) -> _ArrayStep:
    parts = [_frozen_step(part, dtype) for part in step.steps]
    return lambda x, bounds: np.concatenate([part(x, bounds) for part in parts], axis=1)


def _columns(step: Any, dtype: np.dtype[Any]) -> _ArrayStep:
    kept = _array(step.kept, np.intp)
    if len(kept) == step.num_features_in:
        return lambda x, _: x
    return lambda x, _: x.take(kept, axis=1)


def _by_row(of_rows: Callable[..., _Array]) -> Callable[[Any, Any], _ArrayStep]:
    """A step that treats every row by itself, by a function of the rows and its state."""

    def freeze(step: Any, dtype: np.dtype[Any]) -> _ArrayStep:
        state = [_array(getattr(step, name), dtype) for name in step.state]
        return lambda x, _: of_rows(x, *state)

    return freeze


def _clip(step: Any, dtype: np.dtype[Any]) -> _ArrayStep:
    limit = dtype.type(step.limit)
    return lambda x, _: _limited(x, -limit, limit)


def _limited(x: _Array, low: Any, high: Any) -> _Array:
    """`numpy.clip`, which takes several times as long to start."""
    limited: _Array = np.minimum(np.maximum(x, low), high)
    return limited


def _ramps(step: Any, dtype: np.dtype[Any]) -> _ArrayStep:
    origin, low, span = _array(step.origin, np.intp), _array(step.low, dtype), _array(step.span, dtype)
    zero, one = dtype.type(0), dtype.type(1)
    return lambda x, _: _limited((x.take(origin, axis=1) - low) / span, zero, one)


def _quantile(step: Any, dtype: np.dtype[Any]) -> _ArrayStep:
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


def _bisected(x: _Array, table: _Array, start: _Array, width: int) -> _Array:  # (N, D), (D 2ᵖ,), (D,) -> (N, D)
    """Places of the knots at or below the values, by bisections of all at once: the faster way for many rows."""
    below = np.empty(x.shape, dtype=np.intp)
    below[:] = start
    step = width // 2
    while step:
        below += (table.take(below + step) <= x) * step
        step //= 2
    return below


def _by_list(of_list: Callable[[_Array], _Array]) -> Callable[[Any, Any], _ArrayStep]:
    """A step that treats every list by itself."""

    def run(x: _Array, bounds: Sequence[int]) -> _Array:
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


_FREEZERS: dict[type[Preprocess], Callable[[Any, Any], _ArrayStep]] = {
    compose.Chain: _chain,
    compose.Concat: _concat,
    steps.KeepColumns: _columns,
    steps.RemoveConstant: _columns,
    steps.Norm2: _by_row(lambda x, norm: x / norm),
    steps.Standardize: _by_row(lambda x, mean, deviation: (x - mean) / deviation),
    steps.SignedLog1p: _by_row(lambda x: np.sign(x) * np.log1p(np.abs(x))),
    steps.Clip: _clip,
    steps.PCA: _by_row(lambda x, mean, directions: (x - mean) @ directions),
    steps.Ramps: _ramps,
    steps.Quantile: _quantile,
    steps.ListRank: _by_list(_list_rank),
    steps.ListMinMax: _by_list(_list_min_max),
    steps.ListStandardize: _by_list(_list_standardize),
}
