"""What preprocessing learns of raw features: moments, quantiles of a training set, and ranks within lists.

Moments are sums that do not depend on the order of the rows, so that processes may share them. Quantiles and ranks,
the two views of a feature that ignore its raw scale, are made of comparisons, sorts and gathers with fixed shapes
only, so that they can be exported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_offsets, check_shape
from lgmml_torch.segments import list_blocks, row_slices


def row_blocks(features: Tensor, max_elements: int = 65_536) -> Iterator[Tensor]:  # (N, D) -> (n, D)
    """The rows, a block at a time: few enough for a processor's cache, and no float64 copy of the whole is needed."""
    for rows in row_slices(len(features), features.shape[1], max_elements):
        yield features[rows]


class OrderlessSum:
    """Sums of columns that do not depend on the order of the rows or on how they are grouped, bit for bit.

    Values in [−1, 1] become two whole numbers each, in units of 2⁻ˢ and 2⁻²ˢ, small enough that float64 adds up
    ``count`` of them without rounding; what is lost, less than 2⁻²ˢ of a value, is lost to each by itself.

    At most ``count`` rows will be added, by all processes together; ``like`` has a column for each sum.

    >>> small = OrderlessSum(3, torch.zeros(1))
    >>> small.add(torch.tensor([[1.0], [1e-9], [-1.0]], dtype=torch.float64))
    >>> small.total.item()
    1e-09
    """

    def __init__(self, count: int, like: Tensor) -> None:
        self.unit = 2.0 ** (count.bit_length() - 52)
        self.parts = torch.zeros(2, like.shape[-1], dtype=torch.float64, device=like.device)

    def add(self, values: Tensor) -> None:  # (n, D) float64
        """Some more rows."""
        scaled = values / self.unit
        whole = scaled.round()
        rest = scaled.sub_(whole).div_(self.unit).round_()
        self.parts += torch.stack([whole.sum(0), rest.sum(0)])

    @property
    def total(self) -> Tensor:  # (D,) float64
        """What was added so far; sums of the ``parts`` of several processes give that of all."""
        whole, rest = self.parts
        total: Tensor = (whole + rest * self.unit) * self.unit
        return total


_Combine = Callable[[Tensor, str], Tensor]  # "min", "max" or "sum" over the processes that share the rows


def _alone(values: Tensor, how: str) -> Tensor:
    return values


def block_ranges(
    blocks: Iterable[Tensor],  # (n, D) each
    like: Tensor,  # (D,)
    combine: _Combine = _alone,
) -> tuple[Tensor, Tensor]:  # (D,), (D,) float64
    """Middle and half width of the range of each column, of rows that come in blocks and that processes may share.

    A value that is not finite is an error on every process.

    >>> block_ranges([torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 5.0]])], torch.zeros(2))[1].tolist()
    [1.0, 0.0]
    """
    low = like.new_full(like.shape, math.inf, dtype=torch.float64)
    high = like.new_full(like.shape, -math.inf, dtype=torch.float64)
    for block in chain.from_iterable(map(row_blocks, blocks)):
        low = torch.minimum(low, block.amin(0).double())
        high = torch.maximum(high, block.amax(0).double())
    finite = (low.isfinite() & high.isfinite()) | (low > high)  # the last: no rows
    if not bool(combine(finite.all().double(), "min")):
        raise LGMMLError("`features` must be finite, got values that are not")
    low, high = combine(low, "min"), combine(high, "max")
    return low * 0.5 + high * 0.5, high * 0.5 - low * 0.5  # halved, so that nothing overflows


def block_moments(
    blocks: Iterable[Tensor],  # (n, D) each
    count: int,
    ranges: tuple[Tensor, Tensor],  # (D,), (D,)
    combine: _Combine = _alone,
) -> tuple[Tensor, Tensor]:  # (D,), (D,) float64
    """Mean and (population) standard deviation of each column, of rows in blocks that processes may share.

    The bits do not depend on the order of the rows, the blocks or the processes, and a constant column has a deviation
    of exactly 0 however large its value. ``count`` and ``ranges``, by `block_ranges`, are those of all rows.
    """
    centre, half = ranges
    unit = torch.where(half > 0, half, 1.0)
    total, squares = OrderlessSum(count, centre), OrderlessSum(count, centre)
    for block in chain.from_iterable(map(row_blocks, blocks)):
        shares = (block.double() * 0.5 - centre * 0.5) / unit * 2
        total.add(shares)
        squares.add(shares.square())
    for one in (total, squares):
        one.parts = combine(one.parts, "sum")
    # Both ends of the range are met, so squares are 1/N on average at least, and their difference is precise.
    mean = total.total / count
    variance = (squares.total / count - mean.square()).clamp_min(0)
    return centre + unit * mean, torch.where(half > 0, half * variance.sqrt(), 0.0)


_ROWS_SORTED = 8192  # of whole lists together
_BLOCK_VALUES = 131_072  # sorted or interpolated at once, so that a block's few copies stay in a processor's cache


def list_ids(offsets: Tensor, total: int) -> Tensor:  # (Q+1,) -> (N,)
    """The list of each of ``total`` rows: `segments.segment_ids` in operations whose shapes do not depend on values.

    >>> list_ids(torch.tensor([0, 2, 2, 5]), 5)
    tensor([0, 0, 2, 2, 2])
    """
    begun = torch.zeros(total + 1, dtype=torch.long, device=offsets.device)
    return begun.index_add(0, offsets, torch.ones_like(offsets, dtype=torch.long)).cumsum(0)[:total] - 1


def list_rank_percentiles(
    features: Tensor,  # (N, D)
    offsets: Tensor,  # (Q+1,)
    *,
    max_elements: int = _BLOCK_VALUES,
) -> Tensor:  # (N, D)
    """Rank percentile of each value within its own list, per feature: (rank − ½)/n − ½ with mid-ranks for ties.

    Values lie in (−½, ½), the smallest of n distinct ones at ½/n − ½; all values tied, or a list of one, give exactly
    0. The result depends on the order of the values within the list only: neither on other lists nor on the order of
    the rows, bit for bit. NaN stays NaN. Some lists are sorted together, with the list as the major key, so time grows
    linearly with the number of lists; at most ``max_elements`` values at once, columns are taken in groups.

    >>> list_rank_percentiles(torch.tensor([[3.0], [9.0], [9.0], [7.0]]), torch.tensor([0, 3, 4]))
    tensor([[-0.3333],
            [ 0.1667],
            [ 0.1667],
            [ 0.0000]])
    """
    check_shape("features", features, (None, None))
    rows, columns = features.shape
    if torch.compiler.is_compiling():
        return _rank_columns(features.mT, offsets).mT
    check_offsets(offsets, rows)
    out = torch.empty_like(features)
    for first, last in list_blocks(offsets, _ROWS_SORTED):
        start, stop = int(offsets[first]), int(offsets[last])
        own = offsets[first : last + 1] - start
        for group in row_slices(columns, stop - start, max_elements):
            block = features[start:stop, group].mT.contiguous()
            out[start:stop, group] = _rank_columns(block, own).mT
    return out


def _rank_columns(values: Tensor, offsets: Tensor) -> Tensor:  # (D, N), (Q+1,) -> (D, N)
    rows = values.shape[1]
    lists = list_ids(offsets, rows)
    keys, order = _list_keys(values, lists).sort()
    # The list is the major key: sorting leaves every list in its place, so positions and boundaries still agree.
    starts, ends = offsets[lists].long(), offsets[lists + 1].long()
    ties = _runs(keys)
    counts = torch.zeros_like(keys).scatter_add(dim=1, index=ties, src=torch.ones_like(keys))
    twice_mid = (2 * counts.cumsum(dim=1) - counts).gather(dim=1, index=ties)
    # Whole numbers up to the one division: equal lists give equal bits wherever they stand.
    percentile = (twice_mid - (starts + ends)).to(values.dtype) / (2 * (ends - starts)).to(values.dtype)
    ranks = torch.zeros_like(values).scatter(dim=1, index=order, src=percentile)
    return torch.where(values.isnan(), values, ranks)


def _list_keys(values: Tensor, lists: Tensor) -> Tensor:  # (D, N), (N,) -> (D, N)
    """Integers that order rows by list and then by value; equal values of a list share one."""
    values = values + 0.0  # −0.0 and 0.0 are the same number
    if values.dtype == torch.float32 and not torch.compiler.is_compiling():
        # Floats order like sign-magnitude integers: flipping the lower bits of negatives makes them two's complement.
        bits = values.view(torch.int32)
        return (lists << 32) + (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ordered, order = values.sort()
    dense = torch.zeros_like(order).scatter(dim=1, index=order, src=_runs(ordered))
    return lists * values.shape[1] + dense


def _runs(ordered: Tensor) -> Tensor:  # (D, N) -> (D, N)
    """Number of the run of equal entries each entry of a sorted row is in, from 0."""
    fresh = (ordered != ordered.roll(1, dims=1)).long().cumsum(dim=1)
    return fresh - fresh[:, :1]  # the first entry was compared with the last


def mid_rank_knots(
    column: NDArray[np.floating],  # (N,)
    max_knots: int,
) -> tuple[NDArray[np.floating], NDArray[np.float64]]:  # (k,), (k,)
    """Knots of the mid-rank distribution function u(v) = (#{x < v} + ½·#{x = v})/N of a sample.

    All distinct values when there are at most ``max_knots``; otherwise the first value at or above each of
    h = ⌊max_knots/2⌋ evenly spaced levels of u, and the value before it. Thinned, linear interpolation misses u at a
    value of the sample by less than 1/(h − 1); the value before keeps that bound next to a heavy tie.

    >>> mid_rank_knots(np.array([0.0, 0.0, 1.0, 5.0]), 8)
    (array([0., 1., 5.]), array([0.25 , 0.625, 0.875]))
    """
    values, counts = np.unique(column, return_counts=True)
    middles = (np.cumsum(counts) - 0.5 * counts) / len(column)
    if len(values) > max_knots:
        levels = np.linspace(middles[0], middles[-1], max_knots // 2)
        chosen = np.searchsorted(middles, levels)
        chosen = np.unique(np.concatenate([chosen, chosen[1:] - 1]))
        values, middles = values[chosen], middles[chosen]
    return values, middles


def ramp_knots(column: NDArray[np.floating], count: int) -> NDArray[np.floating]:  # (N,) -> (k,)
    """Rising ends of at most ``count`` ramps: the distinct values if few, else quantiles and the commonest value.

    Where one value takes more than its share of the sample, the quantiles are those of the other values.

    >>> ramp_knots(np.array([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0]), 2)
    array([0., 1., 3.])
    """
    values: NDArray[np.floating]
    values, counts = np.unique(column, return_counts=True)
    if len(values) <= count + 1:
        return values
    common = counts.argmax()
    rest, extra = column, []
    if counts[common] * count > len(column):
        rest, extra = column[column != values[common]], [values[common]]
    levels = np.linspace(0, 1, count + 1 - len(extra))
    quantiles = np.quantile(rest, levels, method="lower")
    return np.unique([*quantiles, *extra]).astype(column.dtype)


def pad_knots(columns: Sequence[NDArray[np.floating]], dtype: torch.dtype) -> Tensor:  # (D, 2ᵖ)
    """Ragged knots as one table as wide as `interpolate_knots` needs; the last entry of each row is repeated."""
    width = max(map(len, columns), default=1)
    width = 1 << (width - 1).bit_length()
    padded = [np.pad(column, (0, width - len(column)), mode="edge") for column in columns]
    return torch.from_numpy(np.stack(padded) if padded else np.zeros((0, width))).to(dtype)


def interpolate_knots(features: Tensor, knots: Tensor, levels: Tensor) -> Tensor:  # (N, D), (D, 2ᵖ), (D, 2ᵖ) -> (N, D)
    """Piecewise linear map of each feature through its own rising knots, constant beyond the first and the last.

    The knot at or below a value is found by p bisections of whole blocks, which is faster here than a search per
    feature and, unlike it, can be exported to ONNX. NaN stays NaN.

    >>> knots, levels = torch.tensor([[0.0, 2.0, 4.0, 4.0]]), torch.tensor([[0.1, 0.5, 0.9, 0.9]])
    >>> interpolate_knots(torch.tensor([[-1.0], [1.0], [4.0]]), knots, levels).flatten()
    tensor([0.1000, 0.3000, 0.9000])
    """
    width = knots.shape[1]
    if width & (width - 1):
        raise LGMMLError(f"`knots` must be a power of two wide, got {width}")
    check_shape("levels", levels, tuple(knots.shape))
    check_shape("features", features, (None, knots.shape[0]))
    knots, levels = knots.to(features.dtype), levels.to(features.dtype)
    if torch.compiler.is_compiling():
        return _interpolate(features, knots, levels)
    out = torch.empty_like(features)
    for rows in row_slices(len(features), features.shape[1], _BLOCK_VALUES):
        out[rows] = _interpolate(features[rows], knots, levels)
    return out


def _interpolate(x: Tensor, knots: Tensor, levels: Tensor) -> Tensor:  # (B, D), (D, 2ᵖ), (D, 2ᵖ) -> (B, D)
    width = knots.shape[1]
    table, values = knots.flatten(), levels.flatten()
    start = torch.arange(len(knots), device=x.device, dtype=torch.int32) * width
    below = start.expand(x.shape)
    step = width // 2
    while step:
        below = torch.add(below, _look_up(table, below + step) <= x, alpha=step)
        step //= 2
    above = torch.minimum(below + 1, start + (width - 1))
    # Halved, so that the width of an interval cannot overflow.
    low = _look_up(table, below) * 0.5
    gap = _look_up(table, above) * 0.5 - low
    share = ((x * 0.5 - low) / torch.where(gap > 0, gap, 1)).clamp(0, 1)
    return torch.lerp(_look_up(values, below), _look_up(values, above), share)


def _look_up(table: Tensor, index: Tensor) -> Tensor:  # (T,), (N, D) -> (N, D)
    return table.index_select(0, index.flatten()).view(index.shape)
