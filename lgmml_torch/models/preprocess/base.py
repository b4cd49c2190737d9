"""The interface of preprocessing: fitted on the training lists, then a fixed map whose state is in buffers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from lgmml_torch.checks import LGMMLError, check_offsets
from lgmml_torch.models.preprocess.lists import TrainingLists

_CHUNK_ROWS = 16384  # that are transformed together, or fewer where they are wide
_CHUNK_VALUES = 1 << 21


class Source(NamedTuple):
    """Where a column comes from: the feature, from 0 (−1: several), and the view of it, empty for its own scale."""

    feature: int
    view: str

    def called(self, names: Sequence[str] | None = None) -> str:
        """The name of the feature, or else its number from 1 on, and the view."""
        if self.feature < 0:
            return self.view
        name = f"feature {self.feature + 1}"
        if names is not None:
            name = names[self.feature]
        return ", ".join(filter(None, (name, self.view)))

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
        """Number of features `fit` saw.

        Raises:
            LGMMLError: before `fit`.
        """
        if not self.fitted:
            raise LGMMLError(f"preprocessing {self.name!r} must be fitted before it is used: call `fit` first")
        return self._num_features_in

    @property
    def num_features_out(self) -> int:
        """Number of features `forward` gives.

        Raises:
            LGMMLError: before `fit`.
        """
        return self._width_out(self.num_features_in)

    def _width_out(self, width: int) -> int:
        """Number of features out, of a fitted step with this many in."""
        return width

    @property
    def fitted(self) -> bool:
        """Whether `fit` has run or a state has been loaded."""
        return self._num_features_in != -1

    def sources(self) -> list[Source]:
        """For every column of the result, the feature it comes from and the view of it.

        Raises:
            LGMMLError: before `fit`.
        """
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

    def fit(
        self,
        features: Tensor,  # (N, D)
        offsets: Tensor,  # (Q+1,)
    ) -> Self:
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

    def fit_transform(
        self,
        features: Tensor,  # (N, D)
        offsets: Tensor,  # (Q+1,)
    ) -> Tensor:  # (N, D')
        """`fit`, and the training features transformed."""
        transformed: Tensor = self.fit(features, offsets)(features, offsets)
        return transformed

    def forward(
        self,
        features: Tensor,  # (N, D)
        offsets: Tensor,  # (Q+1,)
    ) -> Tensor:  # (N, D')
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
        first, last = 0, len(offsets) - 1
        while first < last:
            start = int(offsets[first])
            stop = int(torch.searchsorted(offsets, start + self._chunk, right=True)) - 1
            stop = min(max(stop, first + 1), last)  # a list longer than a chunk goes through whole
            end = int(offsets[stop])
            out[start:end] = self._transform(features[start:end], offsets[first : stop + 1] - start)
            first = stop
        return out

    def _start(self, lists: TrainingLists) -> None:
        lists.check(self.name)
        self.width.fill_(-1)  # should a step fail, what an earlier `fit` left must not pass for a whole
        self._num_features_in = -1

    def _finish(self, width: int) -> Self:
        self.width.fill_(width)
        self._num_features_in = width
        return self

    def columns_kept(self) -> Tensor | None:  # (D',) long
        """Which columns of the features the result consists of, unchanged; None where it is made of them otherwise."""
        return None

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
