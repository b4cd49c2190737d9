"""Preprocessing steps: those that treat every document alike, those that look at its list, principal components."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_choice, check_number, check_positive, check_whole, optional
from lgmml_torch.functional.features import (
    interpolate_knots,
    list_ids,
    list_rank_percentiles,
    mid_rank_knots,
    pad_knots,
    ramp_knots,
)
from lgmml_torch.models.preprocess.base import Preprocess, Source, TrainingLists

_RAMP_ROWS = 100_000  # documents whose values the ends of ramps are taken from: more would move them by little


class Norm2(Preprocess):
    """Each feature divided by its 2-norm over the training documents, x_j/‖X_j‖₂: the paper's normalisation.

    A feature that is zero throughout stays as it is.

    >>> Norm2().fit_transform(torch.tensor([[3.0, 0.0], [4.0, 0.0]]), torch.tensor([0, 2]))
    tensor([[0.6000, 0.0000],
            [0.8000, 0.0000]])
    """

    name = "norm2"
    state = ("norm",)
    norm: Tensor  # (D,)

    def _fit(self, lists: TrainingLists) -> None:
        mean, deviation = lists.moments
        norm = (mean.square() + deviation.square()).sqrt() * lists.num_documents**0.5
        self.norm = _positive_or_one(norm, lists.features.dtype)

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        return features / self.norm.to(features.dtype)


class Standardize(Preprocess):
    """(x − mean)/deviation with the training set's moments; a feature that is constant there is only centred.

    A deviation of at most two units of rounding counts as constant: an earlier step may have rounded equal values
    differently.

    >>> Standardize().fit_transform(torch.tensor([[1.0, 7.0], [3.0, 7.0]]), torch.tensor([0, 2]))
    tensor([[-1.,  0.],
            [ 1.,  0.]])
    """

    name = "standardize"
    state = ("mean", "deviation")
    mean: Tensor  # (D,)
    deviation: Tensor  # (D,)

    def _fit(self, lists: TrainingLists) -> None:
        mean, deviation = lists.moments
        varies = deviation > 2 * torch.finfo(lists.features.dtype).eps * mean.abs()
        self.mean = mean.to(lists.features.dtype)
        self.deviation = _positive_or_one(torch.where(varies, deviation, 0.0), lists.features.dtype)

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        return (features - self.mean.to(features.dtype)) / self.deviation.to(features.dtype)


class SignedLog1p(Preprocess):
    """sign(x)·log(1 + |x|): tames raw counts, keeps order and sign.

    >>> SignedLog1p().fit_transform(torch.tensor([[-1.0], [0.0]]), torch.tensor([0, 2])).flatten()
    tensor([-0.6931,  0.0000])
    """

    name = "signed_log1p"
    view = "log"

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        return features.sign() * features.abs().log1p()


class Clip(Preprocess):
    """Values limited to [−limit, limit]."""

    name = "clip"

    def __init__(self, limit: float = 5.0) -> None:
        check_positive("limit", limit)
        super().__init__()
        self.limit = float(limit)

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        return features.clamp(-self.limit, self.limit)


class _Columns(Preprocess):
    """Some of the features, unchanged."""

    state = ("kept",)
    kept: Tensor  # (D',) long, rising

    def _sources(self, width: int) -> list[Source]:
        return [Source(column, self.view) for column in self.kept.tolist()]

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        if len(self.kept) == features.shape[1]:
            return features
        return features.index_select(1, self.kept)


class KeepColumns(_Columns):
    """Some of the features by their columns, counted from 0; the others are set aside.

    >>> KeepColumns([2, 0]).fit_transform(torch.tensor([[1.0, 7.0, 5.0]]), torch.tensor([0, 1]))
    tensor([[1., 5.]])
    """

    name = "keep_columns"

    def __init__(self, columns: list[int]) -> None:
        if not columns or min(columns) < 0:
            raise LGMMLError(f"`columns` must name at least one feature, counted from 0, got {columns}")
        super().__init__()
        self.columns = sorted(set(map(int, columns)))

    def _fit(self, lists: TrainingLists) -> None:
        if self.columns[-1] >= lists.num_features:
            raise LGMMLError(f"`columns` must lie below the {lists.num_features} features, got {self.columns[-1]}")
        self.kept = torch.tensor(self.columns, device=lists.features.device)


class RemoveConstant(_Columns):
    """Drops the features whose training deviation is not above ``tolerance``; 0 drops the exactly constant ones.

    >>> RemoveConstant().fit_transform(torch.tensor([[1.0, 7.0], [3.0, 7.0]]), torch.tensor([0, 2]))
    tensor([[1.],
            [3.]])
    """

    name = "remove_constant"

    def __init__(self, tolerance: float = 0.0) -> None:
        check_positive("tolerance", tolerance, zero=True)
        super().__init__()
        self.tolerance = float(tolerance)

    def _fit(self, lists: TrainingLists) -> None:
        kept = (lists.moments[1] > self.tolerance).nonzero()[:, 0]
        if len(kept) == 0:
            raise LGMMLError(
                f"`features` must have a feature that varies, got {lists.num_features} with a deviation of at most "
                f"{self.tolerance:g}"
            )
        self.kept = kept


class Quantile(Preprocess):
    """Where a value lies among the training values of its feature, as mid-rank quantile in (0, 1).

    u(v) = (#{x < v} + ½·#{x = v})/N at the training values, linear between them, constant beyond the ends. Up to
    ``max_knots`` distinct values are kept exactly; of more, at most ``max_knots`` are chosen so that u is met within
    1/(max_knots/2 − 1) at every training value (.002 by default): the state stays small whatever the size of the set.

    ``output="normal"`` (rank-Gauss) puts the normal quantiles of u, limited to [tail, 1 − tail], at the knots.

    >>> Quantile().fit_transform(torch.tensor([[5.0], [9.0], [5.0], [1e6]]), torch.tensor([0, 4])).flatten()
    tensor([0.2500, 0.6250, 0.2500, 0.8750])
    """

    name = "quantile"
    view = "quantile"
    state = ("knots", "levels")
    knots: Tensor  # (D, 2ᵖ)
    levels: Tensor  # (D, 2ᵖ)

    def __init__(self, output: str = "uniform", max_knots: int = 1024, tail: float = 0.005) -> None:
        check_choice("output", output, ("uniform", "normal"))
        check_whole("max_knots", max_knots)
        check_number("tail", tail)
        if max_knots < 4:
            raise LGMMLError(f"`max_knots` must be at least 4, got {max_knots}")
        if not 0 < tail < 0.5:
            raise LGMMLError(f"`tail` must lie in (0, 0.5), got {tail}")
        super().__init__()
        self.output, self.max_knots, self.tail = output, int(max_knots), float(tail)

    def _fit(self, lists: TrainingLists) -> None:
        columns = lists.per_column(lambda column: mid_rank_knots(column, self.max_knots))
        knots, levels = [], []
        for column, level in columns:
            if self.output == "normal":
                clipped = torch.from_numpy(np.clip(level, self.tail, 1 - self.tail))
                level = torch.special.ndtri(clipped).numpy()
            knots.append(column)
            levels.append(level)
        self.knots = pad_knots(knots, lists.features.dtype).to(lists.features)
        self.levels = pad_knots(levels, lists.features.dtype).to(lists.features)

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        return interpolate_knots(features, self.knots, self.levels)


class Ramps(Preprocess):
    """Each feature as a few ramps, clip((x − low)/span, 0, 1), end to end between quantiles of its training values.

    A linear function of the ramps is a piecewise linear function of the feature, so metrics of low rank see thresholds.
    A value that most documents share is the end of a ramp, and the quantiles are those of the other values.

    Args:
        count: ramps of a feature at most; one of few distinct values has fewer.
        max_columns: fewer ramps, or none, where all features would have more columns together; None: no limit.
        others: further columns of each feature that count towards ``max_columns``.

    >>> ramps = Ramps(2)
    >>> ramps.fit_transform(torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 5]))[:, 0]
    tensor([0.0000, 0.5000, 1.0000, 1.0000, 1.0000])
    """

    name = "ramps"
    state = ("origin", "low", "span")
    origin: Tensor  # (C,) long: the feature of each ramp
    low: Tensor  # (C,)
    span: Tensor  # (C,)

    def __init__(self, count: int = 6, max_columns: int | None = None, others: int = 0) -> None:
        check_whole("count", count)
        optional(check_whole)("max_columns", max_columns)
        super().__init__()
        self.count, self.max_columns, self.others = int(count), max_columns, others

    def _sources(self, width: int) -> list[Source]:
        """Ramps of a feature are counted from 1."""
        columns = self.origin.tolist()
        ramps = []
        for place, column in enumerate(columns):
            ramps.append(Source(column, f"ramp {place + 1 - columns.index(column)}"))
        return ramps

    def _fit(self, lists: TrainingLists) -> None:
        step, count = max(1, lists.num_documents // _RAMP_ROWS), self.count
        if self.max_columns is not None:
            count = max(0, min(count, self.max_columns // lists.num_features - self.others))
        knots: list[NDArray[Any]] = [np.empty(1)] * lists.num_features  # a single one makes no ramp
        if count:
            knots = lists.per_column(lambda column: ramp_knots(column[::step], count))
        counts = torch.tensor([len(knot) - 1 for knot in knots])
        if count and not int(counts.sum()):
            raise LGMMLError(f"`features` must have a feature that varies, got {len(knots)} that do not")
        self.origin = torch.arange(len(knots)).repeat_interleave(counts).to(lists.features.device)
        low = np.concatenate([knot[:-1] for knot in knots])
        high = np.concatenate([knot[1:] for knot in knots])
        self.low = torch.from_numpy(low).to(lists.features)
        self.span = torch.from_numpy(high - low).to(lists.features)

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        raised = features.index_select(1, self.origin) - self.low.to(features.dtype)
        return (raised / self.span.to(features.dtype)).clamp(0.0, 1.0)


def _positive_or_one(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale in the features' precision; 1 where it is, or rounds to, zero, and where it overflows."""
    scale = scale.to(dtype)
    return torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))


class ListRank(Preprocess):
    """Rank percentile of each value within its own list, mid-ranks for ties, in (−½, ½); 0 when all are tied.

    Makes the score depend on the list: a new query brings its own context.

    >>> ListRank().fit_transform(torch.tensor([[1.0], [9.0], [5.0], [5.0]]), torch.tensor([0, 2, 4])).flatten()
    tensor([-0.2500,  0.2500,  0.0000,  0.0000])
    """

    name = "list_rank"
    view = "list rank"

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        return list_rank_percentiles(features, offsets)


class ListMinMax(Preprocess):
    """(x − min)/(max − min) over the document's own list, in [0, 1]; 0 where the list does not vary.

    >>> ListMinMax().fit_transform(torch.tensor([[1.0], [9.0], [5.0], [5.0]]), torch.tensor([0, 3, 4])).flatten()
    tensor([0.0000, 1.0000, 0.5000, 0.0000])
    """

    name = "list_min_max"
    view = "list min-max"

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        lists = list_ids(offsets, features.shape[0])
        low = _list_extreme(features, offsets, lists, "amin").double()
        span = _list_extreme(features, offsets, lists, "amax").double() - low
        return _ratio(features.double() - low, span).to(features.dtype)


class ListStandardize(Preprocess):
    """(x − mean)/deviation over the document's own list; 0 where the list does not vary.

    >>> ListStandardize().fit_transform(torch.tensor([[1.0], [9.0], [5.0]]), torch.tensor([0, 2, 3])).flatten()
    tensor([-1.,  1.,  0.])
    """

    name = "list_standardize"
    view = "list z-score"

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        lists = list_ids(offsets, features.shape[0])
        sizes = (offsets[lists + 1] - offsets[lists]).double()[:, None]
        # From the minimum, in float64: a list that does not vary is exactly 0, however large its values.
        raised = features.double() - _list_extreme(features, offsets, lists, "amin").double()
        centred = raised - _list_sum(raised, offsets, lists) / sizes
        deviation = (_list_sum(centred.square(), offsets, lists) / sizes).sqrt()
        return _ratio(centred, deviation).to(features.dtype)


class PCA(Preprocess):
    """Projection of the centred features on the leading eigenvectors of their training covariance.

    ``components`` is a number of components, or a share of the variance in (0, 1) to be kept at least; all of them
    without it. Each eigenvector's largest entry is made positive, so that the result has one sign. A `Standardize`
    after it whitens.

    >>> x = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    >>> PCA(1).fit_transform(x, torch.tensor([0, 3])).flatten()
    tensor([-1.4142,  0.0000,  1.4142])
    """

    name = "pca"
    state = ("mean", "directions")
    mean: Tensor  # (D,)
    directions: Tensor  # (D, C)

    def __init__(self, components: int | float | None = None) -> None:
        whole = isinstance(components, int) and not isinstance(components, bool) and components > 0
        share = isinstance(components, float) and 0 < components < 1
        if not (components is None or whole or share):
            raise LGMMLError(
                f"`components` must be a positive whole number, a share in (0, 1) or None, got {components!r}"
            )
        super().__init__()
        self.components = components

    def _sources(self, width: int) -> list[Source]:
        """Components, each of several features."""
        return [Source(-1, f"component {number + 1}") for number in range(self.directions.shape[1])]

    def origins(self) -> Tensor:  # (D', D)
        """A component, which is a direction of length 1, belongs to its features by their squared entries."""
        squares = self.directions.detach().double().cpu().square().mT
        return squares / squares.sum(1, keepdim=True)

    def _fit(self, lists: TrainingLists) -> None:
        columns = lists.num_features
        if isinstance(self.components, int) and self.components > columns:
            raise LGMMLError(f"`components` must be at most the number of features, {columns}, got {self.components}")
        variances, vectors = torch.linalg.eigh(lists.covariance())
        variances, vectors = variances.flip(0).clamp_min(0), vectors.flip(1)
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        vectors = vectors * torch.where(largest < 0, -1.0, 1.0)
        self.mean = lists.moments[0].to(lists.features.dtype)
        self.directions = vectors[:, : self._count(variances)].to(lists.features.dtype).contiguous()

    def _count(self, variances: Tensor) -> int:
        if isinstance(self.components, float):
            below = variances.cumsum(0) < self.components * variances.sum()
            return min(int(below.sum()) + 1, len(variances))
        return self.components or len(variances)

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        return (features - self.mean.to(features.dtype)) @ self.directions.to(features.dtype)


# One row more than there are lists keeps the exported program free of assumptions about a single list.
def _list_extreme(
    features: Tensor, offsets: Tensor, lists: Tensor, reduce: str
) -> Tensor:  # (N, D), (Q+1,), (N,) -> (N, D)
    out = features.new_zeros((offsets.shape[0], features.shape[1]))
    index = lists[:, None].expand(features.shape)
    return out.scatter_reduce(0, index, features, reduce=reduce, include_self=False)[lists]


def _list_sum(values: Tensor, offsets: Tensor, lists: Tensor) -> Tensor:  # (N, D), (Q+1,), (N,) -> (N, D)
    return values.new_zeros((offsets.shape[0], values.shape[1])).index_add(0, lists, values)[lists]


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Numerator/denominator, 0 where the denominator is; NaN stays NaN."""
    varies = denominator != 0
    return torch.where(varies, numerator / torch.where(varies, denominator, 1.0), 0 * numerator)
