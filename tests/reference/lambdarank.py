"""LambdaRank by loops over pairs, in plain Python numbers."""

from __future__ import annotations

import math
from itertools import pairwise


def lambda_gradients(
    scores: list[float],
    labels: list[float],
    offsets: list[int],
    truncation: int = 30,
    sigma: float = 1.0,
    floor: float = 0.05,
) -> tuple[list[float], list[float]]:
    grad, hess = [0.0] * len(scores), [0.0] * len(scores)
    for start, end in pairwise(offsets):
        ranked = sorted(range(start, end), key=lambda i: -scores[i])
        rank = {i: place for place, i in enumerate(ranked)}
        best = sorted((2 ** labels[i] - 1 for i in range(start, end)), reverse=True)[:truncation]
        ideal = sum(gain / math.log2(place + 2) for place, gain in enumerate(best))
        for i in range(start, end):
            for j in range(start, end):
                if labels[i] <= labels[j] or min(rank[i], rank[j]) >= truncation:
                    continue
                gain = 2 ** labels[i] - 2 ** labels[j]
                discount = abs(1 / math.log2(rank[i] + 2) - 1 / math.log2(rank[j] + 2))
                weight = gain * discount / ideal
                p = 1 / (1 + math.exp(sigma * (scores[i] - scores[j])))
                grad[i] += sigma * weight * p
                grad[j] -= sigma * weight * p
                hess[i] += sigma**2 * weight * (p * (1 - p) + floor)
                hess[j] += sigma**2 * weight * (p * (1 - p) + floor)
    return grad, hess
