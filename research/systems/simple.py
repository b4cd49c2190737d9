"""Floors: systems that learn nothing or next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from lgmml_torch.checks import check_shape
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_ids, segment_sum
from research.by_example.sets import ExampleSet
from research.systems.base import ExampleSystem, MetricSystem, RankingSystem, choose, fitted, grid_points


class Euclidean(MetricSystem):
    """The identity metric."""

    name = "Euclidean"

    def fit(self, train: ExampleSet, valid: ExampleSet | None = None) -> Self:
        """Nothing to learn but the number of features."""
        self.chosen = {}
        self.factor = torch.eye(train.database.shape[1], dtype=torch.float64)
        return self


class RandomDistances(ExampleSystem):
    """Distances drawn at random, anew in each call but the same for the same ``seed`` and shapes."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def fit(self, train: ExampleSet, valid: ExampleSet | None = None) -> Self:
        """Nothing to learn."""
        self.chosen = {}
        return self

    def distances(self, queries: Tensor, database: Tensor) -> Tensor:
        """Uniform draws."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(len(queries), len(database), generator=generator, dtype=torch.float64)


class RandomRanker(RankingSystem):
    """Scores drawn at random."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def fit(self, train: RankingData, valid: RankingData) -> Self:
        """Nothing to learn."""
        self.chosen = {}
        return self

    def score(self, data: RankingData) -> Tensor:
        """Uniform draws, the same for the same ``seed`` and number of documents."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(len(data.labels), generator=generator, dtype=torch.float64)


class LinearRanker(RankingSystem):
    """Ridge regression of labels on features, both centred within queries: w = (XᵀX + λ·n·I)⁻¹Xᵀy.

    Features are standardised on the training documents; λ is chosen by validation NDCG@10. λ→∞ gives the direction
    of the covariances.
    """

    name = "linear"

    def __init__(self, ridge: float | Sequence[float] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)) -> None:
        self.ridge = ridge

    def fit(self, train: RankingData, valid: RankingData) -> Self:
        """Closed form, one eigendecomposition for all λ."""
        features = train.features.double()
        self.mean, std = features.mean(0), features.std(0, correction=0)
        self.std = std.where(std > 0, 1.0)
        X = _centred((features - self.mean) / self.std, train.offsets)
        y = _centred(train.labels.double(), train.offsets)
        values, vectors = torch.linalg.eigh(X.mT @ X / max(1, len(X)))
        target = vectors.mT @ (X.mT @ y) / max(1, len(X))
        self.chosen, self.weights = choose(
            list(grid_points(ridge=self.ridge)),
            lambda point: vectors @ (target / (values.clamp_min(0) + point["ridge"])),
            lambda weights: mean_measure(self._score(valid, weights), valid),
        )
        return self

    def score(self, data: RankingData) -> Tensor:
        """Standardised features times weights."""
        weights = fitted(self, "weights")
        check_shape("features", data.features, (None, len(weights)))
        return self._score(data, weights)

    def _score(self, data: RankingData, weights: Tensor) -> Tensor:
        return (data.features.double() - self.mean) / self.std @ weights


def _centred(values: Tensor, offsets: Tensor) -> Tensor:
    sizes = offsets.diff().clamp_min(1).to(values.dtype)
    means = segment_sum(values, offsets) / sizes.reshape(-1, *[1] * (values.dim() - 1))
    return values - means[segment_ids(offsets)]
