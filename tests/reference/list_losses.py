"""Losses of whole lists, pair by pair."""

from __future__ import annotations

import math


def spearman(scores: list[float], labels: list[float]) -> float:
    """Squared distance between soft ranks by score and mean ranks by label, over twice the spread of the latter."""
    n = len(scores)
    soft, ranks = [], []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        soft.append(1 + sum(1 / (1 + math.exp(scores[i] - scores[j])) for j in others))
        above = sum(labels[j] > labels[i] for j in others)
        equal = sum(labels[j] == labels[i] for j in others)
        ranks.append(1 + above + equal / 2)
    if len(set(labels)) < 2:
        return 0.0
    mean = sum(ranks) / n
    gap = sum((a - b) ** 2 for a, b in zip(soft, ranks, strict=True))
    return gap / (2 * sum((rank - mean) ** 2 for rank in ranks))


def label_differences(scores: list[float], labels: list[float]) -> float:
    """Mean over pairs of the squared error of the score difference."""
    errors = []
    for i in range(len(scores)):
        for j in range(i):
            errors.append(((scores[i] - scores[j]) - (labels[i] - labels[j])) ** 2)
    return sum(errors) / max(1, len(errors))
