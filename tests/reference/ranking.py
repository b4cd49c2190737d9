"""Ranking metrics one list at a time, as their sources state them; knows nothing of the package's presets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Floats = Sequence[float]


def best_first(scores: Floats, labels: Floats, tie_order: Floats | None = None) -> list[float]:
    """Labels from the highest score to the lowest, ties in the caller's order."""
    ties = tie_order if tie_order is not None else range(len(scores))
    return [labels[i] for i in sorted(range(len(scores)), key=lambda i: (-scores[i], ties[i]))]


def worst_ties_first(scores: Floats, labels: Floats) -> list[float]:
    return [labels[i] for i in sorted(range(len(scores)), key=lambda i: (-scores[i], labels[i]))]


def exponential(label: float) -> float:
    return 2.0**label - 1


def linear(label: float) -> float:
    return label


def dcg(ranked: Floats, k: int | None, gain: Callable[[float], float]) -> float:
    return sum(gain(label) / math.log2(i + 1) for i, label in enumerate(ranked[:k], start=1))


def ndcg(ranked: Floats, k: int | None, gain: Callable[[float], float], no_relevant: float) -> float:
    best = dcg(sorted(ranked, reverse=True), k, gain)
    return no_relevant if best == 0 else dcg(ranked, k, gain) / best


def mean_over_ties(scores: Floats, labels: Floats, metric: Callable[[Floats], float]) -> float:
    """Mean of a metric over every order of the documents that agrees with the scores."""
    values = [
        metric([labels[i] for i in order])
        for order in itertools.permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    return sum(values) / len(values)


def average_precision(ranked: Floats, k: int | None, threshold: float = 1, *, no_relevant: float = math.nan) -> float:
    relevant = [label >= threshold for label in ranked]
    if not any(relevant):
        return no_relevant
    return sum(sum(relevant[: i + 1]) / (i + 1) for i in range(len(ranked[:k])) if relevant[i]) / sum(relevant)


def reciprocal_rank(ranked: Floats, k: int | None, threshold: float = 1) -> float:
    for i, label in enumerate(ranked[:k], start=1):
        if label >= threshold:
            return 1 / i
    return 0.0


def err(ranked: Floats, k: int | None, max_grade: float) -> float:
    total, going_on = 0.0, 1.0
    for i, label in enumerate(ranked[:k], start=1):
        stop = (2.0**label - 1) / 2.0**max_grade
        total += going_on * stop / i
        going_on *= 1 - stop
    return total


def precision(ranked: Floats, k: int | None, threshold: float = 1) -> float:
    return sum(label >= threshold for label in ranked[:k]) / (len(ranked) if k is None else k)


def recall(ranked: Floats, k: int | None, threshold: float = 1, *, no_relevant: float = math.nan) -> float:
    relevant = sum(label >= threshold for label in ranked)
    return sum(label >= threshold for label in ranked[:k]) / relevant if relevant else no_relevant


def letor_dcg(ranked: Floats, gain: dict[int, int], upto: int) -> list[float]:
    """Running DCG at ranks 1 .. upto: the first two ranks undiscounted, then 1/log2(rank)."""
    running, total = [], 0.0
    for rank in range(1, upto + 1):
        value = gain[int(ranked[rank - 1])]
        total += value if rank <= 2 else value / math.log2(rank)
        running.append(total)
    return running


def letor_ndcg(ranked: Floats, k: int, gain: dict[int, int]) -> float:
    """NDCG exists at the ranks the list has; a rank beyond it counts 0, and so does a list without gain."""
    n = len(ranked)
    if k > n:
        return 0.0
    best = letor_dcg(sorted(ranked, key=lambda label: gain[int(label)], reverse=True), gain, n)[k - 1]
    return letor_dcg(ranked, gain, n)[k - 1] / best if best else 0.0


def letor_precision(ranked: Floats, k: int, counts: dict[int, int]) -> float:
    """Ranks beyond the list are irrelevant documents."""
    padded = [*ranked, *[0] * k]
    return sum(counts[int(label)] for label in padded[:k]) / k


def letor_map(ranked: Floats, counts: dict[int, int]) -> float:
    found, total = 0, 0.0
    for rank, label in enumerate(ranked, start=1):
        if counts[int(label)]:
            found += 1
            total += found / rank
    return total / found if found else 0.0
