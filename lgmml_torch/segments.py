"""Operations on ragged rows: flat values plus ``offsets``, one segment per query.

``offsets`` has one entry more than there are segments; segment ``q`` is ``values[offsets[q]:offsets[q + 1]]``.
Segments may be empty. Nothing here pads unless its name says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lgmml_torch.checks import check_positive


def segment_ids(offsets: Tensor) -> Tensor:  # (Q+1,) -> (N,)
    """The segment each row belongs to.

    >>> segment_ids(torch.tensor([0, 2, 2, 5]))
    tensor([0, 0, 2, 2, 2])
    """
    return torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())


def offsets_from_sizes(sizes: Tensor) -> Tensor:  # (Q,) -> (Q+1,)
    """Boundaries of consecutive segments with the given sizes.

    >>> offsets_from_sizes(torch.tensor([2, 0, 3]))
    tensor([0, 2, 2, 5])
    """
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:  # (N, ...), (Q+1,) -> (Q, ...)
    """Sum over each segment; an empty segment sums to zero.

    >>> segment_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 2, 2, 3]))
    tensor([3., 0., 5.])
    """
    out = values.new_zeros((len(offsets) - 1, *values.shape[1:]))
    return out.index_add(0, segment_ids(offsets), values)


def centre_segments(values: Tensor, offsets: Tensor) -> Tensor:  # (N, ...), (Q+1,) -> (N, ...)
    """The values minus the mean of their segment.

    >>> centre_segments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([0, 2, 2, 3]))
    tensor([-1.,  1.,  0.])
    """
    return values - (segment_sum(values, offsets) / _divisors(values, offsets))[segment_ids(offsets)]


def segment_std(values: Tensor, offsets: Tensor) -> Tensor:  # (N, ...), (Q+1,) -> (Q, ...)
    """Standard deviation of each segment around its own mean; 0 for an empty segment.

    >>> segment_std(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([0, 2, 2, 3]))
    tensor([1., 0., 0.])
    """
    squares = segment_sum(centre_segments(values, offsets).square(), offsets)
    return (squares / _divisors(values, offsets)).sqrt()


def _divisors(values: Tensor, offsets: Tensor) -> Tensor:
    """Sizes of the segments, at least 1, in the shape of their sums."""
    return offsets.diff().clamp_min(1).reshape(-1, *[1] * (values.ndim - 1))


def segment_max(values: Tensor, offsets: Tensor, *, empty: float = float("-inf")) -> Tensor:  # (N,), (Q+1,) -> (Q,)
    """Maximum of each segment; ``empty`` where there is nothing to compare.

    >>> segment_max(torch.tensor([1.0, 2.0, -5.0]), torch.tensor([0, 2, 3]))
    tensor([ 2., -5.])
    """
    out = values.new_full((len(offsets) - 1,), empty)
    return out.scatter_reduce(0, segment_ids(offsets), values, reduce="amax", include_self=False)


def segment_min(values: Tensor, offsets: Tensor, *, empty: float = float("inf")) -> Tensor:  # (N,), (Q+1,) -> (Q,)
    """Minimum of each segment; ``empty`` where there is nothing to compare."""
    out = values.new_full((len(offsets) - 1,), empty)
    return out.scatter_reduce(0, segment_ids(offsets), values, reduce="amin", include_self=False)


def positions(offsets: Tensor) -> Tensor:  # (Q+1,) -> (N,)
    """Place of each row within its segment, from 0.

    >>> positions(torch.tensor([0, 2, 2, 5]))
    tensor([0, 1, 0, 1, 2])
    """
    total = int(offsets[-1])
    return torch.arange(total, device=offsets.device) - offsets[:-1].repeat_interleave(offsets.diff())


def gather_segments(offsets: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:  # (Q+1,), (C,) -> (M,), (C+1,)
    """Row indices of the chosen segments, in the order chosen, and the offsets of the result.

    >>> gather_segments(torch.tensor([0, 2, 2, 5]), torch.tensor([2, 0]))
    (tensor([2, 3, 4, 0, 1]), tensor([0, 3, 5]))
    """
    sizes = offsets.diff()[chosen]
    new_offsets = offsets_from_sizes(sizes)
    rows = offsets[:-1][chosen].repeat_interleave(sizes) + positions(new_offsets)
    return rows, new_offsets


def argsort_segments(
    values: Tensor, offsets: Tensor, *, descending: bool = False, tie_order: Tensor | None = None
) -> Tensor:  # (N,), (Q+1,), (N,) -> (N,)
    """Row indices that sort the values within every segment; segments keep their places.

    Equal values keep the order of ``tie_order`` (smaller first), or of the rows when it is not given.

    >>> argsort_segments(torch.tensor([1.0, 3.0, 2.0, 2.0]), torch.tensor([0, 3, 4]), descending=True)
    tensor([1, 2, 0, 3])
    """
    order = torch.arange(len(values), device=values.device) if tie_order is None else tie_order.argsort(stable=True)
    order = order[values[order].argsort(stable=True, descending=descending)]
    return order[segment_ids(offsets)[order].argsort(stable=True)]


def row_slices(count: int, width: int, entries: int) -> Iterator[slice]:
    """Consecutive runs of ``count`` rows of ``width`` numbers, at most ``entries`` numbers in a run, at least one row.

    >>> list(row_slices(5, 3, 7))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    check_positive("entries", entries)
    rows = max(1, entries // max(1, width))
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))


def list_blocks(offsets: Tensor, documents: int, *, at_least: int = 1) -> Iterator[tuple[int, int]]:  # (Q+1,)
    """Runs of consecutive lists [first, last) of at most so many documents; a longer list stands alone.

    ``at_least`` makes the runs small enough to give so many of them, where there are as many lists.

    >>> list(list_blocks(torch.tensor([0, 2, 4, 10, 11]), 4))
    [(0, 2), (2, 3), (3, 4)]
    """
    check_positive("documents", documents)
    bounds = offsets.tolist()
    documents = min(documents, max(1, bounds[-1] // at_least))
    first, count = 0, len(bounds) - 1
    while first < count:
        last = first + 1
        while last < count and bounds[last + 1] - bounds[first] <= documents:
            last += 1
        yield first, last
        first = last
