"""`Bank`: what a way of fitting hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lgmml_torch.checks import check_shape
from lgmml_torch.models.local_metrics import LocalMetrics


@dataclass(frozen=True)
class Bank:
    """Local metrics, and the weights to start from where the fit gives any.

    Attributes:
        metrics: features to scaled distances, K columns.
        phi: ``(K,)`` weights Φ₀ ≥ 0 shared by all queries, in the order of the columns; None when the fit has none.
        history: how the fit went, primitives only.
    """

    metrics: LocalMetrics
    phi: Tensor | None = None
    history: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.phi is not None:
            check_shape("phi", self.phi, (self.metrics.num_metrics,))
