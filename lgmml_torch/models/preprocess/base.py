"""The interface of preprocessing: fitted on the training lists, then a fixed map whose state is in buffers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lgmml_torch import distributed
from lgmml_torch.checks import LGMMLError, check_finite, check_offsets, check_shape
from lgmml_torch.distributed import AllLists, SharedLists
from lgmml_torch.functional.features import OrderlessSum, block_moments, block_ranges, row_blocks
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks

_Found = TypeVar("_Found")

BLOCK_VALUES = 1 << 20  # raw features of whole lists that go through the steps together
COLUMN_VALUES = 1 << 23  # of whole columns that a process looks at together
_CHUNK_ROWS = 4096  # that are transformed together, or fewer where they are wide: more leave the processor's cache
_CHUNK_VALUES = 1 << 21


def feature_label(names: Sequence[str] | None, feature: int) -> str:
    """The name of a raw feature, or else its number, from 1 as in LETOR files."""
    if names is None:
        return f"feature {feature + 1}"
    return names[feature]


class Source(NamedTuple):
    """Where a column comes from: the feature, from 0 (−1: several), and the view of it, empty for its own scale."""

    feature: int
    view: str

    def called(self, names: Sequence[str] | None = None) -> str:
        """The name of the feature, or else its number from 1 on, and the view."""
        if self.feature < 0:
            return self.view
        return ", ".join(filter(None, (feature_label(names, self.feature), self.view)))

    def __str__(self) -> str:
        return self.called()


class Preprocess(nn.Module):
    """A map of features that may look at the training data once (`fit`) and at a document's own list (`forward`).

    Subclasses name their ``state`` (buffers) and write `_fit` and `_transform`. Whatever `fit` learns is in buffers,
    so it travels in the state dict; `build_preprocess` of `spec`, then ``load_state_dict``, restores the module bit
    for bit. The result for a list never depends on other lists in the call. Features keep their dtype; the state is
    cast to it. NaN in gives NaN out; `fit` takes finite values only.
    """

    name: ClassVar[str]
    state: ClassVar[tuple[str, ...]] = ()
    view: ClassVar[str] = ""  # what explanations call the result; empty when only origin and unit change
    width: Tensor  # () number of features seen by `fit`, -1 before

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("width", torch.tensor(-1))
        self._num_features_in = -1  # mirrors `width`: reading a tensor would break export
        for name in self.state:
            self.register_buffer(name, torch.empty(0))

    @property
    def num_features_in(self) -> int:
        """Number of features `fit` saw; refused before, as all that depends on it."""
        if not self.fitted:
            raise LGMMLError(f"preprocessing {self.name!r} must be fitted before it is used: call `fit` first")
        return self._num_features_in

    @property
    def num_features_out(self) -> int:
        """Number of features `forward` gives."""
        return len(self.sources())

    @property
    def fitted(self) -> bool:
        """Whether `fit` has run or a state has been loaded."""
        return self._num_features_in != -1

    def sources(self) -> list[Source]:
        """For every column of the result, the feature it comes from and the view of it."""
        return self._sources(self.num_features_in)

    def _sources(self, width: int) -> list[Source]:
        """Those of a fitted step with this many features in."""
        return [Source(column, self.view) for column in range(width)]

    def origins(self) -> Tensor:  # (D', D)
        """How much of every column of the result belongs to each feature; rows add up to 1.

        All of it belongs to the feature of `sources`; a step that mixes features defines the shares.
        """
        places = torch.tensor([source.feature for source in self.sources()], dtype=torch.long)
        return nn.functional.one_hot(places, self.num_features_in).double()

    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor, which are attributes of the same names, as primitives."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def spec(self) -> dict[str, Any]:
        """A description in primitives from which `build_preprocess` makes an unfitted module of the same kind."""
        return {"name": self.name, "args": self.arguments()}

    def fit(self, features: Tensor, offsets: Tensor) -> Self:  # (N, D), (Q+1,)
        """Learn the state from training lists.

        Raises:
            LGMMLError: for no rows, values that are not finite, or offsets that do not fit the rows.
        """
        return self.fit_lists(TrainingLists(features, offsets))

    @torch.no_grad()
    def fit_lists(self, lists: TrainingLists) -> Self:
        """`fit`, of lists that processes may share: the state is the same on each, and as if one had them all."""
        self._start(lists)
        self._fit(lists)
        return self._finish(lists.num_features)

    def fit_transform(self, features: Tensor, offsets: Tensor) -> Tensor:  # (N, D), (Q+1,) -> (N, D')
        """`fit`, and the training features transformed."""
        transformed: Tensor = self.fit(features, offsets)(features, offsets)
        return transformed

    def forward(self, features: Tensor, offsets: Tensor) -> Tensor:  # (N, D), (Q+1,) -> (N, D')
        """Transform lists. Without gradients, large inputs go through in groups of whole lists to bound the memory.

        Raises:
            LGMMLError: before `fit`, or when the number of features is not that of `fit`.
        """
        expected = self.num_features_in
        if features.dim() != 2 or features.shape[1] != expected:
            got = features.shape[1] if features.dim() == 2 else f"shape {tuple(features.shape)}"
            raise LGMMLError(f"`features` must have {expected} columns, as when {self.name!r} was fitted, got {got}")
        if torch.compiler.is_compiling():
            return self._transform(features, offsets)
        check_offsets(offsets, len(features))
        if len(features) <= self._chunk or (torch.is_grad_enabled() and features.requires_grad):
            return self._transform(features, offsets)
        return self._in_chunks(features, offsets)

    @property
    def _chunk(self) -> int:
        return max(1, min(_CHUNK_ROWS, _CHUNK_VALUES // max(1, self.num_features_in)))

    @torch.no_grad()
    def _in_chunks(self, features: Tensor, offsets: Tensor) -> Tensor:
        out = features.new_empty((len(features), self.num_features_out))
        for first, last in list_blocks(offsets, self._chunk):  # a list longer than a chunk goes through whole
            start, stop = int(offsets[first]), int(offsets[last])
            out[start:stop] = self._transform(features[start:stop], offsets[first : last + 1] - start)
        return out

    def _start(self, lists: TrainingLists) -> None:
        lists.check(self.name)
        self.width.fill_(-1)  # should a step fail, what an earlier `fit` left must not pass for a whole
        self._num_features_in = -1

    def _finish(self, width: int) -> Self:
        self.width.fill_(width)
        self._num_features_in = width
        return self

    def _fit(self, lists: TrainingLists) -> None:
        """Set the buffers; nothing to learn by default."""

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Before the values are copied the buffers take the saved shapes: an unfitted module has none of its own.
        for name in self.state:
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, torch.empty_like(saved, device=self.width.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
        saved_width = state_dict.get(prefix + "width")
        if saved_width is not None:
            self._num_features_in = int(saved_width)

    def extra_repr(self) -> str:
        """Arguments and, once fitted, the number of features."""
        parts = [f"{key}={value!r}" for key, value in self.arguments().items()]
        return ", ".join([*parts, self._size()])

    def _size(self) -> str:
        if not self.fitted:
            return "not fitted"
        return f"{self.num_features_in} → {self.num_features_out} features"


class TrainingLists:
    """Training lists on their way through the steps of a preprocessing; what a step makes of them is made once.

    ``lists`` are all lists of the set, by default these.
    """

    def __init__(self, features: Tensor, offsets: Tensor, lists: AllLists | None = None) -> None:  # (N, D), (Q+1,)
        self.features, self.offsets = features, offsets
        self.lists = AllLists(offsets.diff()) if lists is None else lists

    @staticmethod
    def of(data: RankingData) -> TrainingLists:
        """Raw lists, which processes may share."""
        if data.shared_lists is None:
            return TrainingLists(data.features, data.offsets)
        return _SharedTrainingLists(data.features, data.offsets, data.shared_lists)

    @property
    def num_documents(self) -> int:
        """Number of documents of all lists."""
        return self.lists.num_documents

    @property
    def num_features(self) -> int:
        """Number of columns, after the steps so far."""
        return self.features.shape[1]

    def check(self, name: str) -> None:
        """Require rows and columns to fit the preprocessing of this name on, finite values, and offsets of the rows."""
        features = self.features
        check_shape("features", features, (None, None))
        if not features.is_floating_point():
            raise LGMMLError(f"`features` must hold floating-point values, got {features.dtype}")
        check_offsets(self.offsets, len(features))
        if self.num_documents == 0 or self.num_features == 0:
            raise LGMMLError(f"`features` must have rows and columns to fit {name!r}, got {tuple(features.shape)}")
        self._check_finite()

    def _check_finite(self) -> None:
        check_finite("features", self.features)

    def through(self, step: Preprocess) -> TrainingLists:
        """The lists as a fitted step makes them."""
        return TrainingLists(step(self.features, self.offsets), self.offsets)

    @cached_property
    def ranges(self) -> tuple[Tensor, Tensor]:  # (D,), (D,) float64
        """Middle and half width of the range of each column over all documents.

        Raises:
            LGMMLError: values that are not finite, on every process.
        """
        return block_ranges(self.blocks(), self.features.new_empty(self.num_features), self.lists.all_reduce)

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:  # (D,), (D,) float64
        """Mean and (population) standard deviation of each column over all documents."""
        return block_moments(self.blocks(), self.num_documents, self.ranges, self.lists.all_reduce)

    def weighted_sum(self, weights: Tensor) -> Tensor:  # (n,) of the documents that are here -> (D,) float64
        """The sum over all documents of each column times the weights."""
        centre, half = self.ranges
        largest = weights.abs().max() if len(weights) else weights.new_zeros(())
        scale = (centre.abs() + half) * self.lists.all_reduce(largest.double(), "max")
        scale = torch.where(scale > 0, scale, 1.0)
        total, start = OrderlessSum(self.num_documents, scale), 0
        for block in self.blocks():
            part = weights[start : start + len(block)].double()[:, None]
            total.add(block.double() * part / scale)
            start += len(block)
        total.parts = self.lists.all_reduce(total.parts, "sum")
        return total.total * scale

    def blocks(self) -> Iterator[Tensor]:  # (n, D)
        """The rows that are here, some at a time."""
        return row_blocks(self.features, BLOCK_VALUES)

    def per_column(self, call: Callable[[NDArray], _Found]) -> list[_Found]:  # type: ignore[type-arg]
        """What a function finds in each column, which it is given whole."""
        return [call(column.cpu().numpy()) for column in self.features.detach().unbind(1)]

    def covariance(self) -> Tensor:  # (D, D) float64
        """That of the columns over all documents."""
        mean, _ = self.moments
        total = mean.new_zeros((len(mean), len(mean)))
        for block in self.blocks():
            centred = block.double() - mean
            total.addmm_(centred.mT, centred, alpha=1 / self.num_documents)
        return self.lists.all_reduce(total, "sum")


class _SharedTrainingLists(TrainingLists):
    """Training lists that processes share, or that are mapped from files: they may be larger than memory.

    They go through all steps again, block by block, whenever something is asked. The answers are the same bits as in
    memory, but for `covariance`, which is the same up to rounding.
    """

    def __init__(self, features: Tensor, offsets: Tensor, shared: SharedLists, *steps: Preprocess) -> None:
        super().__init__(features, offsets, shared)
        self.shared, self.steps = shared, steps

    @property
    def num_features(self) -> int:
        return self.steps[-1].num_features_out if self.steps else self.features.shape[1]

    def _check_finite(self) -> None:
        if not self.steps:
            _ = self.ranges  # what is not finite is noticed by all processes

    def through(self, step: Preprocess) -> TrainingLists:
        return _SharedTrainingLists(self.features, self.offsets, self.shared, *self.steps, step)

    def blocks(self) -> Iterator[Tensor]:
        widest = max(1, self.features.shape[1], self.num_features)
        for first, last in list_blocks(self.offsets, max(1, BLOCK_VALUES // widest)):
            start, stop = int(self.offsets[first]), int(self.offsets[last])
            block = self.features[start:stop]
            for step in self.steps:
                block = step(block, self.offsets[first : last + 1] - start)
            yield block

    def per_column(self, call: Callable[[NDArray], _Found]) -> list[_Found]:  # type: ignore[type-arg]
        _ = self.ranges  # for what is not finite
        rank, size = distributed.rank(), distributed.world_size()
        # Columns that the process with most documents reads at once.
        together = 2 * COLUMN_VALUES // self.shared.most
        width = min(COLUMN_VALUES // self.num_documents, together // size, math.ceil(self.num_features / size))
        width = max(1, width)  # columns that each process looks at
        found: list[_Found] = []
        for start in range(0, self.num_features, width * size):
            here = self._columns(start, min(start + width * size, self.num_features))
            mine: list[_Found] = []
            for number in range(math.ceil(here.shape[1] / width)):
                whole = self.shared.collect(here[:, number * width : (number + 1) * width], number)
                if number == rank:
                    mine = [call(column.numpy()) for column in whole.mT.contiguous().cpu()]
            for part in self.shared.all_gather(mine):
                found += part
        return found

    def _columns(self, start: int, stop: int) -> Tensor:  # (n, D')
        found, done = self.features.new_empty((len(self.features), stop - start)), 0
        for block in self.blocks():
            found[done : done + len(block)] = block[:, start:stop]
            done += len(block)
        return found
