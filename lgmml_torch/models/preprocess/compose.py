"""Preprocessing: steps, chains and unions of them, built from a description in primitives.

>>> prep = Chain([RemoveConstant(), Standardize(), Clip(5.0)])
>>> x, offsets = torch.tensor([[1.0, 7.0], [3.0, 7.0]]), torch.tensor([0, 2])
>>> prep.fit_transform(x, offsets).flatten()
tensor([-1.,  1.])
>>> again = build_preprocess(prep.spec())
>>> _ = again.load_state_dict(prep.state_dict())
>>> again(x, offsets).flatten()
tensor([-1.,  1.])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lgmml_torch.checks import ConfigError, LGMMLError, check_choice, check_whole
from lgmml_torch.models.preprocess import steps as single
from lgmml_torch.models.preprocess.base import Preprocess, Source, TrainingLists
from lgmml_torch.models.preprocess.steps import Clip, ListRank, ListStandardize, Quantile, RemoveConstant, Standardize


class _Composite(Preprocess):
    """Holds other steps, which hold the state."""

    def __init__(self, steps: Sequence[Preprocess]) -> None:
        super().__init__()
        for place, step in enumerate(steps):
            if not isinstance(step, Preprocess):
                raise LGMMLError(f"`steps` must be Preprocess modules, got {type(step).__name__} at position {place}")
        self.steps = nn.ModuleList(steps)

    def arguments(self) -> dict[str, Any]:
        """The steps' own descriptions."""
        return {"steps": [step.spec() for step in self._parts()]}

    def _parts(self) -> list[Preprocess]:
        return cast(list[Preprocess], list(self.steps))

    def extra_repr(self) -> str:
        """The number of features; the steps print themselves."""
        return self._size()


class Chain(_Composite):
    """Steps one after the other, each fitted on what the ones before it give. An empty chain changes nothing."""

    name = "chain"

    def _sources(self, width: int) -> list[Source]:
        """Traced back through the steps; "list rank of log" when both leave their mark."""
        traced = super()._sources(width)
        for step in self._parts():
            traced = [_traced(source, traced) for source in step.sources()]
        return traced

    def origins(self) -> Tensor:  # (D', D)
        """Traced back through the steps."""
        traced = torch.eye(self.num_features_in, dtype=torch.float64)
        for step in self._parts():
            traced = step.origins() @ traced
        return traced

    def fit_transform(self, features: Tensor, offsets: Tensor) -> Tensor:  # (N, D), (Q+1,) -> (N, D')
        """`fit`, and the training features transformed, with no step run twice."""
        lists = TrainingLists(features, offsets)
        self._start(lists)
        for step in self._parts():
            lists = lists.through(step.fit_lists(lists))
        self._finish(features.shape[1])
        return lists.features

    def _fit(self, lists: TrainingLists) -> None:
        parts = self._parts()
        for step in parts[:-1]:
            lists = lists.through(step.fit_lists(lists))
        for step in parts[-1:]:
            step.fit_lists(lists)

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        for step in self._parts():
            features = step(features, offsets)
        return features


class Concat(_Composite):
    """The columns of several steps side by side, each fitted on the same features."""

    name = "concat"

    def __init__(self, steps: Sequence[Preprocess]) -> None:
        if len(steps) == 0:
            raise LGMMLError("`steps` must hold at least one step, got none")
        super().__init__(steps)

    def _sources(self, width: int) -> list[Source]:
        """Those of the steps, one after the other."""
        together = []
        for step in self._parts():
            together += step.sources()
        return together

    def origins(self) -> Tensor:  # (D', D)
        """Those of the steps, one after the other."""
        return torch.cat([step.origins() for step in self._parts()])

    def _fit(self, lists: TrainingLists) -> None:
        for step in self._parts():
            step.fit_lists(lists)

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat([step(features, offsets) for step in self._parts()], dim=1)


def _traced(source: Source, before: list[Source]) -> Source:
    """A column of a step whose own columns have sources."""
    if source.feature < 0:
        return source
    origin = before[source.feature]
    return Source(origin.feature, " of ".join(filter(None, (source.view, origin.view))))


_STEPS: tuple[type[Preprocess], ...] = (
    single.Norm2, Standardize, single.SignedLog1p, Clip, single.KeepColumns, RemoveConstant, Quantile, single.Ramps,
    ListRank, single.ListMinMax, ListStandardize, single.PCA, Chain, Concat,
)  # fmt: skip
PREPROCESS_STEPS = {step.name: step for step in _STEPS}


def build_preprocess(spec: Mapping[str, Any]) -> Preprocess:
    """An unfitted module from ``{"name": …, "args": {…}}``; "steps" among the arguments are such mappings themselves.

    Raises:
        LGMMLError: for an unknown name, with a suggestion.
        ConfigError: for a mapping of another form, or arguments the step does not take.

    >>> build_preprocess({"name": "clip", "args": {"limit": 3.0}})
    Clip(limit=3.0, not fitted)
    """
    if not isinstance(spec, Mapping) or "name" not in spec or set(spec) - {"name", "args"}:
        raise ConfigError(f"a preprocessing `spec` must be a mapping with 'name' and, optionally, 'args', got {spec!r}")
    name, arguments = spec["name"], dict(spec.get("args") or {})
    check_choice("name", name, PREPROCESS_STEPS)
    if "steps" in arguments:
        arguments["steps"] = [build_preprocess(step) for step in arguments["steps"]]
    try:
        return PREPROCESS_STEPS[name](**arguments)
    except TypeError as error:
        raise ConfigError(f"preprocessing {name!r} does not take these arguments: {error}") from error


def list_rank_features(*, max_knots: int = 1024, limit: float = 5.0) -> Chain:
    """Each feature's training quantile and its rank percentile within the list: the map boosted metrics are fitted on.

    Constant features go first; then the two views side by side, those that hardly vary dropped (a feature that is
    constant within every list has no ranks), standardised and limited to ±``limit``. D features become at most 2D.
    """
    return _limited_views([Quantile(max_knots=max_knots), ListRank()], limit)


def all_views(*, max_knots: int = 1024, ramps: int = 6, limit: float = 5.0, max_columns: int | None = None) -> Chain:
    """Each feature's quantile, its rank and z-score within the list, and ramps: the map metrics are trained on.

    Treated as those of `list_rank_features`. D features become at most (3 + ``ramps``)·D; without ramps 3·D.
    There are fewer ramps of a feature, or none, where that would be more than ``max_columns``.
    """
    check_whole("ramps", ramps, zero=True)
    views: list[Preprocess] = [Quantile(max_knots=max_knots), ListRank(), Chain([ListStandardize(), Clip(limit)])]
    if ramps:
        views.append(single.Ramps(ramps, max_columns, others=len(views)))
    return _limited_views(views, limit)


def _limited_views(views: Sequence[Preprocess], limit: float) -> Chain:
    return Chain([RemoveConstant(), Concat(views), RemoveConstant(tolerance=1e-6), Standardize(), Clip(limit)])
