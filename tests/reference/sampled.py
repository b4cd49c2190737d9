"""A bank of sampled regions by plain loops: regions, scatters, metrics, anchors, medians, bandwidth, one at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.ragged import RankingData
from tests.reference import anchors as judge
from tests.reference import gmml

KAPPA = {"paper": lambda d: d * math.exp(-d), "distance": lambda d: d, "rbf": lambda d: -math.exp(-d)}


@dataclass
class Found:
    """What a fit should come to, and the alternatives it chose among."""

    metrics: list[Tensor]  # (D, D) each
    anchors: list[Tensor]  # (D,) each
    quality: list[float]
    alphas: list[float]
    medians: list[float]
    judged: dict[float, float]  # NDCG by bandwidth
    bandwidth: float


def rows_of(data: RankingData, query: int) -> range:
    return range(int(data.offsets[query]), int(data.offsets[query + 1]))


def sides(data: RankingData, queries: Sequence[int]) -> tuple[list[int], list[int]]:
    """Rows of X₊ and X₋ of a region."""
    positives, negatives = [], []
    for q in queries:
        rows = rows_of(data, q)
        high, low = judge.high_and_low([float(data.labels[i]) for i in rows])
        positives += [rows[i] for i in high]
        negatives += [rows[i] for i in low]
    return positives, negatives


def usable(data: RankingData) -> list[int]:
    return [q for q in range(data.num_queries) if len({float(data.labels[i]) for i in rows_of(data, q)}) > 1]


def global_metric(data: RankingData, t: float, lam: float) -> Tensor:
    """One metric of the pairs of all lists, pair by pair."""
    D = data.num_features
    sums, counts = [torch.zeros(D, D, dtype=torch.float64) for _ in range(2)], [0, 0]
    for q in usable(data):
        high, low = sides(data, [q])
        similar = [(i, j) for i in high for j in high if i != j]
        dissimilar = [(i, j) for i in high for j in low]
        for side, pairs in enumerate((similar, dissimilar)):
            for i, j in pairs:
                gap = data.features[i] - data.features[j]
                sums[side] += torch.outer(gap, gap)
                counts[side] += 1
    S, Dd = sums[0] / counts[0], sums[1] / counts[1]
    return gmml.metric(S, Dd, t, lam, True, torch.eye(D, dtype=torch.float64))


def lens(metric: Tensor, norm: str) -> Tensor:
    """What a difference is multiplied by before its length is taken: M itself for the trace norm."""
    return metric if norm == "trace" else torch.linalg.cholesky(metric)


def choose_anchor(
    data: RankingData, queries: Sequence[int], F: Tensor, candidates: str, alphas: Sequence[float]
) -> tuple[Tensor, float, float]:
    """Point, its NDCG@10 on the region, and how far it was moved."""
    high, low = sides(data, queries)
    if candidates == "top":
        top = max(float(data.labels[i]) for i in high)
        high = [i for i in high if float(data.labels[i]) == top]

    def quality(point: Tensor, row: int) -> float:
        return judge.quality(point, row, data.features, data.labels, data.offsets, list(queries), F, 10)

    values = [quality(data.features[i], i) for i in high]
    row = high[judge.first_best(values)]
    start = data.features[row]
    if not alphas:
        return start, values[judge.first_best(values)], 0.0
    away = start - data.features[low].mean(0)
    moved = [start + alpha * away for alpha in alphas]
    values = [quality(point, row) for point in moved]
    best = judge.first_best(values)
    return moved[best], values[best], alphas[best]


def distance(x: Tensor, anchor: Tensor, F: Tensor) -> float:
    return float(((x - anchor) @ F).norm())


def judge_bandwidth(data: RankingData, banks: list[tuple[Tensor, Tensor, float]], width: float, kernel: str) -> float:
    """Mean NDCG@10 of equal weights, lists without a relevant document skipped."""
    values = []
    for q in range(data.num_queries):
        rows = rows_of(data, q)
        keys = [
            sum(KAPPA[kernel](distance(data.features[i], anchor, F) / (median * width)) for anchor, F, median in banks)
            for i in rows
        ]
        value = judge.ndcg(keys, [float(data.labels[i]) for i in rows], 10)
        if value is not None:
            values.append(value)
    return sum(values) / len(values)


def fit(
    data: RankingData,
    judges: RankingData,
    regions: Sequence[Sequence[int]],
    *,
    t: float = 0.5,
    lam: float = 0.1,
    relative: bool = True,
    prior: Tensor | None = None,
    reduction: str = "mean",
    candidates: str = "positives",
    alphas: Sequence[float] = (),
    norm: str = "mahalanobis",
    kernel: str = "paper",
    bandwidth: Sequence[float] = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0),
) -> Found:
    """The bank of the given regions; of ``alphas``, 0 is always one."""
    A = torch.eye(data.num_features, dtype=torch.float64) if prior is None else prior
    metrics, points, quality, moved, medians = [], [], [], [], []
    for queries in regions:
        high, low = sides(data, queries)
        X, Z = data.features[high], data.features[low]
        S, D = gmml.scatter(X, Z, reduction)
        metrics.append(gmml.metric(S, D, t, lam, relative, A))
        grid = (0.0, *alphas) if alphas else ()
        point, value, alpha = choose_anchor(data, queries, lens(metrics[-1], norm), candidates, grid)
        points.append(point)
        quality.append(value)
        moved.append(alpha)
        dists = sorted(distance(x, point, lens(metrics[-1], norm)) for x in data.features)
        medians.append(dists[(len(dists) - 1) // 2])
    banks = [(point, lens(M, norm), median) for point, M, median in zip(points, metrics, medians, strict=True)]
    judged = {width: judge_bandwidth(judges, banks, width, kernel) for width in bandwidth}
    best = max(judged.values())
    chosen = next(width for width in bandwidth if judged[width] == best)
    return Found(metrics, points, quality, moved, medians, judged, chosen)
