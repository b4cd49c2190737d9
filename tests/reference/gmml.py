"""Scatter matrices by a double loop over pairs, and a bank of metrics by a loop over regions."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.reference.spd import geometric_mean


def scatter(
    positives: Tensor,  # (P, D)
    negatives: Tensor,  # (M, D)
    weights_p: Tensor,  # (P,)
    weights_n: Tensor,  # (M,)
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """One region: every ordered pair of different positives, and every positive with every negative."""
    D = positives.shape[1]
    similar, similar_mass = torch.zeros(D, D, dtype=torch.float64), 0.0
    dissimilar, dissimilar_mass = torch.zeros(D, D, dtype=torch.float64), 0.0
    for i in range(len(positives)):
        for j in range(len(positives)):
            if i != j:
                v, w = (positives[i] - positives[j]).double(), float(weights_p[i] * weights_p[j])
                similar, similar_mass = similar + w * torch.outer(v, v), similar_mass + w
        for j in range(len(negatives)):
            v, w = (positives[i] - negatives[j]).double(), float(weights_p[i] * weights_n[j])
            dissimilar, dissimilar_mass = dissimilar + w * torch.outer(v, v), dissimilar_mass + w
    if reduction == "sum":
        return similar, dissimilar
    return similar / (similar_mass or 1.0), dissimilar / (dissimilar_mass or 1.0)


def metric(S: Tensor, D: Tensor, t: float, lam: float, relative: bool, prior: Tensor) -> Tensor:
    """One regularised GMML metric with explicit inverses."""
    weight = lam * float((S.trace() + D.trace()) / (2 * len(S))) if relative else lam
    S, D = S + weight * torch.linalg.inv(prior), D + weight * prior
    return geometric_mean(torch.linalg.inv(S), D, t)
