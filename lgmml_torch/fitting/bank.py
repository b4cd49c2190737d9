"""`Bank`: what a way of fitting hands back, whole: the metrics, their κ and the weights to start from.

A builder is a `BankBuilder`, or a function ``(data, valid, *, seed, on_round) -> Bank`` of preprocessed lists. A new
one needs nothing but that, and a file in ``conf/local_metrics/`` that names it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, LGMMLError, check_choice, check_shape, did_you_mean
from lgmml_torch.functional.score import KERNELS
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.storage import tensors_digest
from lgmml_torch.ragged import RankingData

OnRound = Callable[[int, Any], None]
"""Progress of a fit: the rounds or metrics done, and an object with their ``total`` and, perhaps, figures to log."""


@dataclass(frozen=True)
class Bank:
    """Local metrics, the kernel they were fitted for, and the weights to start from where the fit gives any."""

    metrics: LocalMetrics  # features to scaled distances, K columns, in their norm
    kernel: str = "paper"  # κ of `functional.score.kernel`; a score of these metrics means nothing under another
    phi: Tensor | None = None  # (K,) weights Φ₀ ≥ 0 shared by all queries; None when the fit has none
    history: dict[str, Any] = field(default_factory=dict)  # how the fit went, primitives only
    trained: bool = False  # whether anchors, factors and scales are a start that gradients go on from, together with Φ
    # (P,) what being shown at each position added to a score in training, which scores of new lists do without
    position_bias: Tensor | None = None

    @property
    def digest(self) -> str:
        """A fingerprint of the metrics and their weights."""
        tensors = list(self.metrics.state_dict().values())
        if self.phi is not None:
            tensors.append(self.phi)
        return tensors_digest(tensors)

    def __post_init__(self) -> None:
        check_choice("kernel", self.kernel, KERNELS)
        if self.phi is not None:
            check_shape("phi", self.phi, (self.metrics.num_metrics,))

    def score(self, features: Tensor) -> Tensor:  # (N, D) -> (N,)
        """−Σ Φᵣ κ(dᵣ) of every row, with the bank's own Φ, or equal weights where it has none."""
        phi = self.phi
        if phi is None:
            phi = torch.ones(self.metrics.num_metrics)
        return -self.metrics.weighted_sum(features, phi.to(features), self.kernel)


class BankBuilder:
    """Builds a bank from preprocessed lists: a frozen dataclass whose fields are its settings.

    Settings are checked when a builder is made. A call fits; the attributes say what else it takes.
    """

    kind: ClassVar[str] = ""  # of metrics: ``"boosted"``, ``"trained"``, ``"sampled"``, or ``""`` for another
    trains_metrics: ClassVar[bool] = False  # whether its banks are a start that gradients go on from
    grows: ClassVar[bool] = False  # whether ``start=bank`` adds metrics to an earlier bank
    takes_measure: ClassVar[bool] = False  # whether ``measure=…`` decides when it stops
    takes_positions: ClassVar[bool] = False  # whether it learns what a position adds to a score
    takes_shared_lists: ClassVar[bool] = False  # whether it fits lists that several processes share
    resumes: ClassVar[bool] = False  # whether ``resume=state`` goes on from a state that ``on_round`` reported

    fit: Callable[..., Bank]  # (data, valid, *, seed, on_round, **further), defined by each builder

    def __call__(
        self,
        data: RankingData,
        valid: RankingData | None = None,
        *,
        seed: int = 0,
        on_round: OnRound | None = None,
        **further: Any,
    ) -> Bank:
        """Fit on ``data``; ``valid`` decides when to stop and what to keep. ``further`` are the arguments above."""
        self.check_call(**further)
        return self.fit(data, valid, seed=seed, on_round=on_round, **further)

    def check_call(self, **further: Any) -> None:
        """Refuse arguments of a call that this builder does not take, before any time is spent on data."""
        able = {"start": self.grows, "measure": self.takes_measure, "resume": self.resumes}
        for name, value in further.items():
            if value is not None and not able[name]:
                raise ConfigError(f"`{name}` does not apply to {self.kind or 'these'} metrics")

    def load_state(self, exported: dict[str, Any]) -> Any:
        """The state that ``on_round`` reported and ``state.export()`` wrote, to be passed as ``resume``."""
        raise NotImplementedError

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """A builder with these settings; an unknown one is refused, with a suggestion."""
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in settings:
            if name not in known:
                raise ConfigError(f"`{name}` is no setting of {cls.kind} metrics{did_you_mean(name, known)}")
        return cls(**settings)


@dataclass(frozen=True)
class _FunctionBuilder(BankBuilder):
    """A function ``(data, valid, *, seed, on_round) -> Bank``, or a partial call of one, as a builder."""

    function: Callable[..., Bank]

    def __post_init__(self) -> None:
        function: Callable[..., Bank] = self.function
        settings: dict[str, Any] = {}
        if isinstance(self.function, functools.partial):
            function, settings = self.function.func, self.function.keywords
        try:
            inspect.signature(function).bind_partial(**settings)
        except TypeError as error:
            name = getattr(function, "__name__", "the builder")
            raise ConfigError(f"{name} does not take these settings: {error}") from error

    def fit(self, data: RankingData, valid: RankingData | None, *, seed: int, on_round: OnRound | None) -> Bank:
        """Call the function."""
        return self.function(data, valid, seed=seed, on_round=on_round)


def as_builder(builder: BankBuilder | Callable[..., Bank]) -> BankBuilder:
    """A builder as it is; a function wrapped as one."""
    if isinstance(builder, BankBuilder):
        return builder
    return _FunctionBuilder(builder)


def merge_banks(banks: Sequence[Bank], weights: Sequence[float]) -> Bank:
    """One bank whose score is the weighted sum of the banks' scores; metrics of one shape become one block."""
    if not banks or len(banks) != len(weights):
        raise LGMMLError(f"`weights` must be one for each of at least one bank, got {len(weights)} for {len(banks)}")
    first = _nature(banks[0])
    num_features, norm, kernel = first
    blocks: dict[tuple[Any, ...], list[MetricBlock]] = {}
    phis: dict[tuple[Any, ...], list[Tensor]] = {}
    biases = []
    for bank, weight in zip(banks, weights, strict=True):
        if bank.phi is None:
            raise LGMMLError("`banks` must have weights Φ, got one without")
        if _nature(bank) != first:
            raise LGMMLError(f"`banks` must agree on features, norm and kernel, got {_nature(bank)} beside {first}")
        for columns, block in bank.metrics.iter_columns():
            shape = (block.is_full, *block.factors.shape[1:])
            blocks.setdefault(shape, []).append(block)
            phis.setdefault(shape, []).append(bank.phi[columns] * weight)
        if bank.position_bias is not None:
            biases.append(bank.position_bias * weight)
    metrics = LocalMetrics(list(map(_joined, blocks.values())), num_features=num_features, norm=norm)
    phi = torch.cat(list(chain.from_iterable(phis.values())))
    bias = None
    if len(biases) == len(banks):
        bias = torch.stack(biases).sum(0)
    return Bank(metrics, kernel, phi, position_bias=bias)


def _nature(bank: Bank) -> tuple[int, str, str]:
    return bank.metrics.num_features, bank.metrics.norm, bank.kernel


def _joined(blocks: Sequence[MetricBlock]) -> MetricBlock:
    names = ["anchors", "factors", "scales", "quality"]
    if not blocks[0].is_full:
        names.append("support")
    parts = {}
    for name in names:
        parts[name] = torch.cat([getattr(block, name) for block in blocks])
    return MetricBlock(**parts)
