"""The best NDCG that any weights Φ ≥ 0 give one short list of two or three metrics, by looking at every order there is.

Only the direction of Φ counts, so Φ lies on an interval or a triangle. Two documents change places where their scores
are equal, a point of the interval or a line through the triangle. Between these places orders do not change, so one Φ
from each piece is enough. Every piece of the triangle has a corner, where lines or edges meet: going a little way from
each corner into each of the sectors around it visits all of them.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

STEP = 1e-7


def directions(kappa: np.ndarray) -> np.ndarray:  # (n, K) -> (P, K)
    """Weights from every piece."""
    K = kappa.shape[1]
    if K == 1:
        return np.ones((1, 1))
    return between_points(kappa) if K == 2 else around_corners(kappa)


def between_points(kappa: np.ndarray) -> np.ndarray:
    cuts = {0.0, 1.0}
    for i, j in itertools.combinations(range(len(kappa)), 2):
        first, second = kappa[i] - kappa[j]
        if first != second and 0 < first / (first - second) < 1:
            cuts.add(first / (first - second))
    ordered = sorted(cuts)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(ordered)]
    return np.array([(1 - u, u) for u in middles])


def around_corners(kappa: np.ndarray) -> np.ndarray:
    """Φ = (1 − u − v, u, v); a line is c + a·u + b·v = 0."""
    lines = [(0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, -1.0, -1.0)]
    for i, j in itertools.combinations(range(len(kappa)), 2):
        zero, one, two = kappa[i] - kappa[j]
        c, a, b = zero, one - zero, two - zero
        if math.hypot(a, b) > 1e-12:
            lines.append((c / math.hypot(a, b), a / math.hypot(a, b), b / math.hypot(a, b)))
    found = []
    for (c, a, b), (f, d, e) in itertools.combinations(lines, 2):
        det = a * e - b * d
        if abs(det) < 1e-12:
            continue
        u, v = (b * f - c * e) / det, (c * d - a * f) / det
        if min(u, v, 1 - u - v) < -1e-9:
            continue
        through = [line for line in lines if abs(line[0] + line[1] * u + line[2] * v) < 1e-9]
        angles = sorted({round(math.atan2(x, -y) % math.pi, 12) for _, x, y in through})
        angles += [angle + math.pi for angle in angles]
        for low, high in itertools.pairwise([*angles, angles[0] + 2 * math.pi]):
            middle = (low + high) / 2
            x, y = u + STEP * math.cos(middle), v + STEP * math.sin(middle)
            if min(x, y, 1 - x - y) >= 0:
                found.append((1 - x - y, x, y))
    return np.array(found)


def best_ndcg(kappa: np.ndarray, labels: list[float], k: int) -> float:
    """The largest NDCG@k of the orders by −κΦ."""
    gains = np.array([2.0**y - 1 for y in labels])
    discounts = np.array([1 / math.log2(i + 2) if i < k else 0.0 for i in range(len(labels))])
    ideal = float(np.sort(gains)[::-1] @ discounts)
    order = np.argsort(kappa @ directions(kappa).T, axis=0, kind="stable")  # (n, P)
    return float((discounts @ gains[order]).max() / ideal)
