"""Distances one pair at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def local_distances(features: Tensor, anchors: Tensor, factors: Tensor, norm: str = "mahalanobis") -> Tensor:
    out = torch.empty(len(features), len(anchors), dtype=torch.float64)
    for i, x in enumerate(features.double()):
        for r, (a, F) in enumerate(zip(anchors.double(), factors.double(), strict=True)):
            v = x - a
            M = F @ F.T
            square = v @ M @ M @ v if norm == "trace" else v @ M @ v
            out[i, r] = math.sqrt(max(float(square), 0.0))
    return out


def subspace_distances(features: Tensor, support: Tensor, anchors: Tensor, factors: Tensor, norm: str) -> Tensor:
    """Through full-dimensional factors that are zero outside the support."""
    out = torch.empty(len(features), len(support), dtype=torch.float64)
    for r in range(len(support)):
        cut = features[:, support[r]]
        out[:, r] = local_distances(cut, anchors[r : r + 1], factors[r : r + 1], norm)[:, 0]
    return out
