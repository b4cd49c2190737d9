"""The score one document and one metric at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

KAPPA = {
    "paper": lambda d: d * math.exp(-d),
    "distance": lambda d: d,
    "rbf": lambda d: -math.exp(-d),
}


def score(dists: Tensor, phi: Tensor, offsets: Tensor, kernel: str) -> Tensor:
    out = torch.zeros(len(dists), dtype=torch.float64)
    for q in range(len(offsets) - 1):
        row = phi if phi.dim() == 1 else phi[q if len(phi) > 1 else 0]
        for i in range(int(offsets[q]), int(offsets[q + 1])):
            for r in range(dists.shape[1]):
                out[i] -= float(row[r]) * KAPPA[kernel](float(dists[i, r]))
    return out
