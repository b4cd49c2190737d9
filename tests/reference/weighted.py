"""Losses with a weight for each document, by loops over documents and pairs, in plain Python numbers."""

from __future__ import annotations

import math
from itertools import pairwise


def softmax(scores: list[float], labels: list[float], weights: list[float], offsets: list[int]) -> list[float]:
    out = []
    for start, end in pairwise(offsets):
        rows = range(start, end)
        total = sum(2 ** labels[i] - 1 for i in rows)
        log_sum = math.log(sum(math.exp(scores[i]) for i in rows)) if end > start else 0.0
        terms = [weights[i] * (2 ** labels[i] - 1) / total * (log_sum - scores[i]) for i in rows if total]
        out.append(sum(terms))
    return out


def lambda_gradients(
    scores: list[float],
    labels: list[float],
    weights: list[float],
    offsets: list[int],
    truncation: int = 30,
    floor: float = 0.05,
) -> tuple[list[float], list[float]]:
    """A pair counts as often as its better document."""
    grad, hess = [0.0] * len(scores), [0.0] * len(scores)
    for start, end in pairwise(offsets):
        ranked = sorted(range(start, end), key=lambda i: -scores[i])
        rank = {i: place for place, i in enumerate(ranked)}
        best = sorted((2 ** labels[i] - 1 for i in range(start, end)), reverse=True)[:truncation]
        ideal = sum(gain / math.log2(place + 2) for place, gain in enumerate(best))
        for better in range(start, end):
            for worse in range(start, end):
                if labels[better] <= labels[worse] or min(rank[better], rank[worse]) >= truncation:
                    continue
                gain = 2 ** labels[better] - 2 ** labels[worse]
                discount = abs(1 / math.log2(rank[better] + 2) - 1 / math.log2(rank[worse] + 2))
                weight = weights[better] * gain * discount / ideal
                p = 1 / (1 + math.exp(scores[better] - scores[worse]))
                grad[better] += weight * p
                grad[worse] -= weight * p
                for row in (better, worse):
                    hess[row] += weight * (p * (1 - p) + floor)
    return grad, hess


def position_step(
    bias: list[float], shown: list[int], gradients: list[float], hessians: list[float], shrinkage: float, ridge: float
) -> list[float]:
    pull = [sum(g for p, g in zip(shown, gradients, strict=True) if p == place) for place in range(len(bias))]
    stiff = [sum(h for p, h in zip(shown, hessians, strict=True) if p == place) for place in range(len(bias))]
    lam = ridge * sum(stiff) / sum(h > 0 for h in stiff)
    return [b + shrinkage * (g - lam * b) / (h + lam) for b, g, h in zip(bias, pull, stiff, strict=True)]
