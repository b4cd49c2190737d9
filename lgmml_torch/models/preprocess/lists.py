"""The lists that a preprocessing is fitted on, in memory or shared by processes: what its steps ask about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.checks import LGMMLError, check_finite, check_offsets, check_shape
from lgmml_torch.distributed import SharedLists
from lgmml_torch.functional.features import OrderlessSum, block_moments, block_ranges, row_blocks
from lgmml_torch.segments import list_blocks

if TYPE_CHECKING:
    from lgmml_torch.models.preprocess.base import Preprocess

Found = TypeVar("Found")

BLOCK_VALUES = 1 << 20  # raw features of whole lists that go through the steps together
COLUMN_VALUES = 1 << 23  # of whole columns that a process looks at together


class TrainingLists:
    """Training lists on their way through the steps of a preprocessing.

    In memory, what a step makes of them is made once. Lists that processes share, or that are mapped from files, may
    be larger than memory: they go through all steps again, block by block, whenever something is asked. The answers
    are the same bits either way, but for `covariance`, which is the same up to rounding.

    Args:
        features: ``(n, D)`` of the lists that are here.
        offsets: ``(q+1,)`` of these lists.
        shared_lists: where these are the lists of one process of several: who has which.
        steps: fitted, which the features go through.
        known: `ranges` and `moments`, as far as they are known.
    """

    def __init__(
        self,
        features: Tensor,
        offsets: Tensor,
        shared_lists: SharedLists | None = None,
        *,
        steps: tuple[Preprocess, ...] = (),
        known: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.features, self.offsets, self.shared_lists = features, offsets, shared_lists
        self.steps = steps
        self.__dict__.update(known or {})

    @property
    def num_documents(self) -> int:
        """Of all processes."""
        if self.shared_lists is None:
            return len(self.features)
        return int(self.shared_lists.offsets[-1])

    @property
    def num_features(self) -> int:
        """Number of columns, after the steps so far."""
        if self.steps:
            return self.steps[-1].num_features_out
        return self.features.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """That of the features."""
        return self.features.dtype

    @property
    def device(self) -> torch.device:
        """Where the features are."""
        return self.features.device

    def check(self, name: str) -> None:
        """Require lists that the preprocessing of this name can be fitted on.

        Raises:
            LGMMLError: for no rows or columns, values that are not finite, or offsets that do not fit the rows.
        """
        features = self.features
        check_shape("features", features, (None, None))
        if not features.is_floating_point():
            raise LGMMLError(f"`features` must hold floating-point values, got {features.dtype}")
        if self.num_documents == 0 or self.num_features == 0:
            raise LGMMLError(f"`features` must have rows and columns to fit {name!r}, got {tuple(features.shape)}")
        check_offsets(self.offsets, len(features))
        if self.shared_lists is None:
            check_finite("features", features)
        elif not self.steps:
            _ = self.ranges  # what is not finite is noticed by all processes

    def through(self, step: Preprocess) -> TrainingLists:
        """The lists as a fitted step makes them."""
        kept = step.columns_kept()
        known: dict[str, tuple[Tensor, Tensor]] = {}
        for name in ("ranges", "moments"):
            if kept is not None and name in self.__dict__:
                first, second = self.__dict__[name]
                known[name] = first[kept], second[kept]
        if self.shared_lists is None:
            return TrainingLists(step(self.features, self.offsets), self.offsets, known=known)
        return TrainingLists(self.features, self.offsets, self.shared_lists, steps=(*self.steps, step), known=known)

    @cached_property
    def ranges(self) -> tuple[Tensor, Tensor]:  # (D,), (D,) float64
        """Middle and half width of the range of each column over all documents.

        Raises:
            LGMMLError: values that are not finite, on every process.
        """
        return block_ranges(self.blocks(), self.features.new_empty(self.num_features), self._all_reduce)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:  # (D,), (D,) float64
        """Mean and (population) standard deviation of each column over all documents."""
        return block_moments(self.blocks(), self.num_documents, self.ranges, self._all_reduce)

    def weighted_sum(
        self,
        weights: Tensor,  # (n,) of the documents that are here
    ) -> Tensor:  # (D,) float64
        """The sum over all documents of each column times the weights."""
        centre, half = self.ranges
        largest = weights.abs().max() if len(weights) else weights.new_zeros(())
        scale = (centre.abs() + half) * self._all_reduce(largest.double(), "max")
        scale = torch.where(scale > 0, scale, 1.0)
        total, start = OrderlessSum(self.num_documents, scale), 0
        for block in self.blocks():
            part = weights[start : start + len(block)].double()[:, None]
            total.add(block.double() * part / scale)
            start += len(block)
        total.parts = self._all_reduce(total.parts, "sum")
        return total.total * scale

    def blocks(self) -> Iterator[Tensor]:  # (n, D)
        """The rows that are here, some at a time."""
        if self.shared_lists is None:
            yield from row_blocks(self.features, BLOCK_VALUES)
            return
        for first, last in list_blocks(self.offsets, max(1, BLOCK_VALUES // max(1, self.features.shape[1]))):
            start, stop = int(self.offsets[first]), int(self.offsets[last])
            block = self.features[start:stop]
            for step in self.steps:
                block = step(block, self.offsets[first : last + 1] - start)
            yield block

    def per_column(self, call: Callable[[NDArray], Found]) -> list[Found]:  # type: ignore[type-arg]
        """What a function finds in each column, which it is given whole; each process looks at some of them."""
        if self.shared_lists is None:
            return [call(column.cpu().numpy()) for column in self.features.detach().unbind(1)]
        _ = self.ranges  # for what is not finite
        rank, size = distributed.rank(), distributed.world_size()
        # Columns that the process with most documents reads at once.
        together = 2 * COLUMN_VALUES // self.shared_lists.most
        width = min(COLUMN_VALUES // self.num_documents, together // size, math.ceil(self.num_features / size))
        width = max(1, width)  # columns that each process looks at
        found: list[Found] = []
        for start in range(0, self.num_features, width * size):
            here = self._columns(start, min(start + width * size, self.num_features))
            mine: list[Found] = []
            for number in range(math.ceil(here.shape[1] / width)):
                whole = self.shared_lists.collect(here[:, number * width : (number + 1) * width], number)
                if number == rank:
                    mine = [call(column.numpy()) for column in whole.mT.contiguous().cpu()]
            for part in self.shared_lists.all_gather(mine):
                found += part
        return found

    def _columns(self, start: int, stop: int) -> Tensor:  # (n, D')
        found, done = self.features.new_empty((len(self.features), stop - start)), 0
        for block in self.blocks():
            found[done : done + len(block)] = block[:, start:stop]
            done += len(block)
        return found

    def covariance(self) -> Tensor:  # (D, D) float64
        """That of the columns over all documents."""
        mean, _ = self.moments
        total = mean.new_zeros((len(mean), len(mean)))
        for block in self.blocks():
            centred = block.double() - mean
            total.addmm_(centred.mT, centred, alpha=1 / self.num_documents)
        return self._all_reduce(total, "sum")

    def _all_reduce(self, values: Tensor, operation: str) -> Tensor:
        if self.shared_lists is None:
            return values
        return self.shared_lists.all_reduce(values, operation)
