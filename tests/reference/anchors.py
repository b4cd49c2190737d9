"""Regions and anchors by plain loops over Python lists."""

from __future__ import annotations

import math
import statistics

from torch import Tensor


def high_and_low(labels: list[float]) -> tuple[list[int], list[int]]:
    """Positions of X₊ and X₋ within one query."""
    lowest = min(labels)
    positive = [i for i, y in enumerate(labels) if y > lowest]
    middle = statistics.median(sorted({labels[i] for i in positive}))
    high = [i for i in positive if labels[i] >= middle]
    zeros = [i for i, y in enumerate(labels) if y == 0]
    low = zeros if zeros and lowest == 0 else [i for i, y in enumerate(labels) if y == lowest]
    return (high if len(high) >= 2 else positive), low


def ndcg(keys: list[float], labels: list[float], k: int) -> float | None:
    """NDCG@k of the order by ascending key, ties as they come; None without anything relevant."""

    def dcg(ordered: list[float]) -> float:
        return sum((2**y - 1) / math.log2(i + 2) for i, y in enumerate(ordered[:k]))

    ideal = dcg(sorted(labels, reverse=True))
    if ideal <= 0:
        return None
    order = sorted(range(len(keys)), key=lambda i: keys[i])
    return dcg([labels[i] for i in order]) / ideal


def quality(
    point: Tensor,
    left_out: int,
    features: Tensor,
    labels: Tensor,
    offsets: Tensor,
    queries: list[int],
    F: Tensor,
    k: int,
) -> float:
    values = []
    for q in queries:
        rows = [i for i in range(int(offsets[q]), int(offsets[q + 1])) if i != left_out]
        # rounded: distances equal on paper are a tie
        keys = [round(float(((features[i].double() - point.double()) @ F.double()).norm()), 9) for i in rows]
        value = ndcg(keys, [float(labels[i]) for i in rows], k)
        if value is not None:
            values.append(value)
    return sum(values) / len(values) if values else float("nan")


def first_best(values: list[float]) -> int:
    best = 0
    for i, value in enumerate(values):
        current = -1.0 if math.isnan(values[best]) else values[best]
        if not math.isnan(value) and value > current + 1e-12:
            best = i
    return best
