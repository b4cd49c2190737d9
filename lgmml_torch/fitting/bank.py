"""`Bank`: what a way of fitting hands back, whole: the metrics, their κ and the weights to start from.

A builder is a function ``(data, valid, *, seed, on_round, **settings) -> Bank`` of preprocessed lists. A new one needs
nothing but that, and a file in ``conf/local_metrics/`` that names it; `checked_by` lets it refuse settings early.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, LGMMLError, check_choice, check_shape
from lgmml_torch.functional.score import KERNELS
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.storage import tensors_digest
from lgmml_torch.ragged import RankingData

OnRound = Callable[[int, Any], None]
"""Told how far a fit has come: what is done, and an object with its ``total`` and, perhaps, figures to log."""


@dataclass(frozen=True)
class Bank:
    """Local metrics, the kernel they were fitted for, and the weights to start from where the fit gives any.

    Attributes:
        metrics: features to scaled distances, K columns, in their norm.
        kernel: κ, see `lgmml_torch.functional.score.kernel`; a score of these metrics means nothing under another.
        phi: ``(K,)`` weights Φ₀ ≥ 0 shared by all queries, in the order of the columns; None when the fit has none.
        history: how the fit went, primitives only.
        trained: whether anchors, factors and scales are a start that gradients go on from, together with Φ.
        position_bias: ``(P,)`` what being shown at each position added to a score in training; None without positions.
            Scores of new lists do without it.
    """

    metrics: LocalMetrics
    kernel: str = "paper"
    phi: Tensor | None = None
    history: dict[str, Any] = field(default_factory=dict)
    trained: bool = False
    position_bias: Tensor | None = None

    @property
    def digest(self) -> str:
        """A fingerprint of the metrics and their weights."""
        return tensors_digest([*self.metrics.state_dict().values(), *([] if self.phi is None else [self.phi])])

    def __post_init__(self) -> None:
        check_choice("kernel", self.kernel, KERNELS)
        if self.phi is not None:
            check_shape("phi", self.phi, (self.metrics.num_metrics,))

    def score(
        self,
        features: Tensor,  # (N, D)
    ) -> Tensor:  # (N,)
        """−Σ Φᵣ κ(dᵣ) of every row, with the bank's own Φ, or equal weights where it has none."""
        phi = torch.ones(self.metrics.num_metrics) if self.phi is None else self.phi
        return -self.metrics.weighted_sum(features, phi.to(features), self.kernel)


class BankBuilder(Protocol):
    """A way to build a bank from preprocessed lists."""

    def __call__(
        self, data: RankingData, valid: RankingData | None = None, *, seed: int = 0, on_round: OnRound | None = None
    ) -> Bank:
        """Fit on ``data``; ``valid`` decides what is to be decided."""
        ...


Builder = TypeVar("Builder", bound=Callable[..., Bank])


def checked_by(check: Callable[..., Any]) -> Callable[[Builder], Builder]:
    """Mark a builder with a function that refuses its settings without fitting anything."""

    def mark(builder: Builder) -> Builder:
        builder.check_settings = check  # type: ignore[attr-defined]
        return builder

    return mark


def check_builder(builder: Callable[..., Any]) -> None:
    """Let a builder, or a partial call of one, refuse its settings before any time is spent on data.

    Raises:
        LGMMLError: what is wrong with them.
    """
    builder, settings = _unwrapped(builder)
    try:
        inspect.signature(builder).bind_partial(**settings)
    except TypeError as error:
        raise ConfigError(
            f"{getattr(builder, '__name__', 'the builder')} does not take these settings: {error}"
        ) from error
    check = getattr(builder, "check_settings", None)
    if check is not None:
        check(**settings)


def trains_metrics(builder: Callable[..., Any]) -> bool:
    """Whether a builder's banks are a start that gradients go on from; it says so by an attribute."""
    return bool(getattr(_unwrapped(builder)[0], "trains_metrics", False))


def takes_spread(builder: Callable[..., Any]) -> bool:
    """Whether a builder fits lists that processes share, together with the others; it says so by an attribute."""
    return bool(getattr(_unwrapped(builder)[0], "takes_spread", False))


def grows(builder: Callable[..., Any]) -> bool:
    """Whether a builder adds metrics to a bank that it is given as ``start``; it says so by an attribute."""
    return bool(getattr(_unwrapped(builder)[0], "grows", False))


def takes_measure(builder: Callable[..., Any]) -> bool:
    """Whether a builder lets a ``measure`` decide when it stops; it says so by an attribute."""
    return bool(getattr(_unwrapped(builder)[0], "takes_measure", False))


def takes_positions(builder: Callable[..., Any]) -> bool:
    """Whether a builder learns what a position adds to a score; it says so by an attribute."""
    return bool(getattr(_unwrapped(builder)[0], "takes_positions", False))


def resumable_by(builder: Callable[..., Any]) -> Callable[[dict[str, Any]], Any] | None:
    """How a builder reads the states that its ``on_round`` reports and its ``resume`` takes; None: it has none."""
    return getattr(_unwrapped(builder)[0], "load_state", None)


def describe_builder(builder: Callable[..., Any]) -> str:
    """A builder's name and settings: the same text for the same fit, in whatever process."""
    builder, settings = _unwrapped(builder)
    return f"{getattr(builder, '__qualname__', builder)} {sorted(settings.items())}"


def _unwrapped(builder: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function itself, and the settings that partial calls have given it."""
    settings: dict[str, Any] = {}
    while isinstance(builder, functools.partial):
        settings = {**builder.keywords, **settings}
        builder = builder.func
    return builder, settings


def merge_banks(banks: Sequence[Bank], weights: Sequence[float]) -> Bank:
    """One bank whose score is the weighted sum of the banks' scores; metrics of one shape become one block.

    Raises:
        LGMMLError: banks without Φ, of different features, norms or kernels, or not as many weights.
    """
    if not banks or len(banks) != len(weights):
        raise LGMMLError(f"`weights` must be one for each of at least one bank, got {len(weights)} for {len(banks)}")
    first = _nature(banks[0])
    blocks: dict[tuple[Any, ...], list[tuple[MetricBlock, Tensor]]] = {}
    for bank, weight in zip(banks, weights, strict=True):
        if bank.phi is None:
            raise LGMMLError("`banks` must have weights Φ, got one without")
        if _nature(bank) != first:
            raise LGMMLError(f"`banks` must agree on features, norm and kernel, got {_nature(bank)} beside {first}")
        start = 0
        for block in bank.metrics.iter_blocks():
            phi = bank.phi[start : start + block.num_metrics] * weight
            blocks.setdefault((block.is_full, *block.factors.shape[1:]), []).append((block, phi))
            start += block.num_metrics
    metrics = LocalMetrics(
        [_joined([block for block, _ in group]) for group in blocks.values()],
        num_features=banks[0].metrics.num_features,
        norm=banks[0].metrics.norm,
    )
    phi = torch.cat([phi for group in blocks.values() for _, phi in group])
    biases = [
        bank.position_bias * weight
        for bank, weight in zip(banks, weights, strict=True)
        if bank.position_bias is not None
    ]
    bias = torch.stack(biases).sum(0) if len(biases) == len(banks) else None
    return Bank(metrics, banks[0].kernel, phi, position_bias=bias)


def _nature(bank: Bank) -> tuple[int, str, str]:
    return bank.metrics.num_features, bank.metrics.norm, bank.kernel


def _joined(blocks: Sequence[MetricBlock]) -> MetricBlock:
    names = ("anchors", "factors", "scales", "quality")
    parts = {name: torch.cat([getattr(block, name) for block in blocks]) for name in names}
    support = None if blocks[0].is_full else torch.cat([block.support for block in blocks])
    return MetricBlock(
        parts["anchors"], parts["factors"], support=support, scales=parts["scales"], quality=parts["quality"]
    )
