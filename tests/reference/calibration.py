"""Chances of grades, their loss and their reliability, one document and one cut at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence


def chance_above(score: float, centre: float, slope: float, cut: float) -> float:
    """1 / (1 + e^−z), without overflow."""
    z = slope * (score - centre) + cut
    if z < 0:
        return math.exp(z) / (1 + math.exp(z))
    return 1 / (1 + math.exp(-z))


def chances(score: float, centre: float, slope: float, cuts: Sequence[float]) -> list[float]:
    """Of each grade: of lying above its own cut, and not above the next."""
    above = [1.0, *(chance_above(score, centre, slope, cut) for cut in cuts), 0.0]
    return [above[place] - above[place + 1] for place in range(len(above) - 1)]


def loss(scores: Sequence[float], labels: Sequence[float], slope: float, cuts: Sequence[float]) -> float:
    """Log losses of all documents and cuts, plus half the square of the slope, for scores of mean 0 and deviation 1."""
    grades = sorted(set(labels))
    total = slope**2 / 2
    for score, label in zip(scores, labels, strict=True):
        for grade, cut in zip(grades[1:], cuts, strict=True):
            z = slope * score + cut
            if label >= grade:
                z = -z
            total += max(z, 0.0) + math.log1p(math.exp(-abs(z)))
    return total


def reliability(chances: Sequence[float], outcomes: Sequence[bool], groups: int) -> tuple[float, float, list[int]]:
    """Expected calibration error, Brier score and sizes of the groups; a document's group is by those below it."""
    members: dict[int, list[int]] = {}
    for place, chance in enumerate(chances):
        below = sum(other < chance for other in chances)
        members.setdefault(below * groups // len(chances), []).append(place)
    error = 0.0
    for group in members.values():
        gap = sum(chances[place] - outcomes[place] for place in group)
        error += abs(gap) / len(chances)
    brier = sum((chance - outcome) ** 2 for chance, outcome in zip(chances, outcomes, strict=True)) / len(chances)
    return error, brier, [len(members[group]) for group in sorted(members)]
