"""Sampled WARP one tuple at a time, and its exact expectation by enumeration."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from lgmml_torch.functional.warp import WarpOutcome


def rank_weight(k: int) -> float:
    return sum(1 / math.log2(i + 1) for i in range(1, k + 1))


def warp(
    pos: float, drawn: list[float], num_negatives: int, margin: float, weight: float = 1.0, limit: int | None = None
) -> tuple[float, int, int, int]:
    """Loss, index of the violator, draws, rank."""
    limit = len(drawn) if limit is None else min(limit, len(drawn))
    if num_negatives == 0:
        return 0.0, -1, 0, 0
    for j in range(limit):
        if margin + drawn[j] > pos:
            rank = max(1, num_negatives // (j + 1))
            return weight * rank_weight(rank) * (margin - pos + drawn[j]), j, j + 1, rank
    return 0.0, -1, limit, 0


def negatives_of(row: int, labels: list[float], rows: range, kind: str) -> list[int]:
    if kind == "zero":
        return [i for i in rows if labels[i] == 0] if labels[row] > 0 else []
    return [i for i in rows if labels[i] < labels[row]]


def expected_gradient(
    scores: Tensor, kappa: Tensor, labels: Tensor, offsets: Tensor, margin: float, max_draws: int
) -> Tensor:
    """Expected gradient in Φ of one triplet, over every query, positive and sequence of draws."""
    num_queries = len(offsets) - 1
    out = torch.zeros(num_queries, kappa.shape[1], dtype=torch.float64)
    y = labels.tolist()
    lists = [range(int(offsets[q]), int(offsets[q + 1])) for q in range(num_queries)]
    positives = [[i for i in rows if negatives_of(i, y, rows, "lower")] for rows in lists]
    usable = [q for q in range(num_queries) if positives[q]]
    for q in usable:
        for p in positives[q]:
            below = negatives_of(p, y, lists[q], "lower")
            for drawn in itertools.product(below, repeat=max_draws):
                _, j, _, rank = warp(float(scores[p]), [float(scores[i]) for i in drawn], len(below), margin)
                if j >= 0:
                    share = len(below) ** max_draws * len(positives[q]) * len(usable)
                    out[q] += rank_weight(rank) * (kappa[p] - kappa[drawn[j]]) / share
    return out


def warp_phi_gradient(
    outcome: WarpOutcome,
    queries: Tensor,  # (P,) row of Φ for each tuple
    pos_kappa: Tensor,  # (P, K) of the positives
    neg_kappa: Tensor,  # (P, K) of the violators
    *,
    num_queries: int,
) -> Tensor:  # (Q, K)
    """The gradient by hand: each tuple with a violator adds L(rank)·(κ(p⁺) − κ(p⁻)) to the row of its query.

    The sign follows from ∂f/∂Φ = −κ.
    """
    gradient = torch.zeros(num_queries, pos_kappa.shape[1], dtype=pos_kappa.dtype)
    for i, query in enumerate(queries.tolist()):
        if outcome.violator[i] >= 0:
            gradient[query] += outcome.weight[i].detach() * (pos_kappa[i] - neg_kappa[i])
    return gradient
