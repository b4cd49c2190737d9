"""Scatter matrices by a double loop over pairs, and a bank of metrics by a loop over regions."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.reference.spd import geometric_mean


def scatter(
    positives: Tensor,  # (P, D)
    negatives: Tensor,  # (M, D)
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """One region: every ordered pair of different positives, and every positive with every negative."""
    D = positives.shape[1]
    similar = dissimilar = torch.zeros(D, D, dtype=torch.float64)
    similar_pairs = dissimilar_pairs = 0
    for i in range(len(positives)):
        for j in range(len(positives)):
            if i != j:
                v = (positives[i] - positives[j]).double()
                similar, similar_pairs = similar + torch.outer(v, v), similar_pairs + 1
        for j in range(len(negatives)):
            v = (positives[i] - negatives[j]).double()
            dissimilar, dissimilar_pairs = dissimilar + torch.outer(v, v), dissimilar_pairs + 1
    if reduction == "sum":
        return similar, dissimilar
    return similar / (similar_pairs or 1), dissimilar / (dissimilar_pairs or 1)


def metric(S: Tensor, D: Tensor, t: float, lam: float, relative: bool, prior: Tensor) -> Tensor:
    """One regularised GMML metric with explicit inverses."""
    weight = lam * float((S.trace() + D.trace()) / (2 * len(S))) if relative else lam
    S, D = S + weight * torch.linalg.inv(prior), D + weight * prior
    return geometric_mean(torch.linalg.inv(S), D, t)
