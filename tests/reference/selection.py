"""T of features, squares and pairs by loops over lists and documents, in plain Python numbers."""

from __future__ import annotations

import math
from itertools import pairwise


def ranks(values: list[float]) -> list[float]:
    """Mid-rank percentiles in (−½, ½)."""
    found = []
    for value in values:
        below = sum(other < value for other in values)
        equal = sum(other == value for other in values)
        found.append((below + equal / 2) / len(values) - 0.5)
    return found


def seen(column: list[float], other: list[float] | None) -> list[float]:
    """What a feature, or the product of two, looks like in one list."""
    first = ranks(column)
    if other is None:
        return first
    return [a * b for a, b in zip(first, ranks(other), strict=True)]


def statistic(
    columns: list[list[float]], labels: list[float], offsets: list[int], j: int, k: int | None = None
) -> float:
    """T of feature j by itself, or together with feature k, which may be j itself."""
    total = squares = variance = 0.0
    for start, end in pairwise(offsets):
        y, count = labels[start:end], end - start
        if len(set(y)) < 2:
            continue
        z = seen(columns[j][start:end], None if k is None else columns[k][start:end])
        mean_y, mean_z = sum(y) / count, sum(z) / count
        together = sum((a - mean_y) * (b - mean_z) for a, b in zip(y, z, strict=True))
        total += together
        squares += together**2
        # The variance of a sum of products over all orders of one factor.
        variance += sum((a - mean_y) ** 2 for a in y) * sum((b - mean_z) ** 2 for b in z) / (count - 1)
    scale = math.sqrt(max(squares, variance))
    return total / scale if scale > 0 else 0.0
