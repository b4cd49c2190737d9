"""Distances one document and one metric at a time, for autograd to differentiate as it stands."""

from __future__ import annotations

import torch
from torch import Tensor


def distances(
    features: Tensor,  # (N, D)
    anchors: Tensor,  # (K, D)
    factors: Tensor,  # (K, D, R)
) -> Tensor:  # (N, K)
    """√(‖Fᵀ(x − a)‖² + 1e-12)."""
    rows = []
    for x in features:
        pairs = zip(anchors, factors, strict=True)
        rows.append(torch.stack([((F.T @ (x - a)).square().sum() + 1e-12).sqrt() for a, F in pairs]))
    return torch.stack(rows)
