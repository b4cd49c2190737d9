"""Query by example, pair by pair, and a small generator of overlapping Gaussian classes."""

from __future__ import annotations

import math

import torch
from scipy.stats import chi2
from torch import Tensor

from research.by_example.sets import ExampleSet


def average_precision(distances: list[float], relevant: set[int], others: set[int]) -> float:
    order = sorted(relevant | others, key=lambda i: (distances[i], i))
    found, total = 0, 0.0
    for rank, row in enumerate(order, start=1):
        if row in relevant:
            found += 1
            total += found / rank
    return total / len(relevant)


def auc(distances: list[float], relevant: set[int], others: set[int]) -> float:
    right = 0.0
    for i in relevant:
        for j in others:
            right += 1.0 if distances[i] < distances[j] else 0.5 if distances[i] == distances[j] else 0.0
    return right / (len(relevant) * len(others))


def location_distance(q: Tensor, x: Tensor, factors: Tensor, weights: Tensor) -> float:
    """(q−x)ᵀM(q)(q−x) with M(q) written out."""
    M = sum(w * F @ F.mT for w, F in zip(weights, factors, strict=True))
    return float((q - x) @ M @ (q - x))


def synthetic_classes(num_classes: int, *, seed: int, D: int = 20, points: int = 40) -> tuple[Tensor, Tensor]:
    """Gaussian classes (C, points, D) with labels: each has its own covariance, and along the line to its nearest
    neighbour its 95% ellipsoid touches the neighbour's (median over classes)."""
    g = torch.Generator().manual_seed(seed)
    roots = torch.randn(num_classes, D, D, generator=g, dtype=torch.float64) / math.sqrt(D)
    centres = torch.randn(num_classes, D, generator=g, dtype=torch.float64)
    lines = centres[:, None] - centres
    lengths = torch.linalg.vector_norm(lines, dim=2)
    lines = lines / lengths.clamp_min(1e-9)[..., None]
    precisions = torch.linalg.inv(roots @ roots.mT)
    reach = (chi2.ppf(0.95, D) / torch.einsum("ijd,ide,ije->ij", lines, precisions, lines)).sqrt()
    spread = ((reach + reach.T) / lengths).fill_diagonal_(0).amax(1).median()
    noise = torch.randn(num_classes, points, D, generator=g, dtype=torch.float64)
    X = spread * centres[:, None] + noise @ roots.mT
    return X, torch.arange(num_classes)[:, None].expand(num_classes, points)


def synthetic_splits(num_classes: int, *, seed: int) -> tuple[ExampleSet, ExampleSet, ExampleSet]:
    """Half of the points are the database, a quarter validation queries, a quarter test queries."""
    X, y = synthetic_classes(num_classes, seed=seed)
    parts = [(X[:, a:b].reshape(-1, X.shape[2]), y[:, a:b].reshape(-1)) for a, b in ((0, 20), (20, 30), (30, 40))]
    base = parts[0]
    return ExampleSet.from_labels(*base), *(ExampleSet.from_labels(*base, *part) for part in parts[1:])
