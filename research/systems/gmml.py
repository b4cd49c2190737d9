"""Geometric-mean metrics for query by example: one for all queries, or one per region with location weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from lgmml_torch.checks import DataError, check_choice, check_positive, check_shape
from lgmml_torch.functional.distance import local_distances
from lgmml_torch.functional.gmml import gmml, scatter_matrices
from lgmml_torch.functional.regions import Regions
from lgmml_torch.functional.score import median_scales
from lgmml_torch.metric_learning import location_distances, location_weights
from lgmml_torch.segments import offsets_from_sizes
from research.by_example.sets import ExampleSet, exponential_weights, squared_distances, weighted_scatter
from research.systems.base import ExampleSystem, MetricSystem, choose, fitted, grid_points, mean_average_precision

log = logging.getLogger(__name__)


class GlobalGMML(MetricSystem):
    """One metric for all queries; ``t`` and ``lam`` may be lists.

    ``pairs="all"`` takes every training pair (query, relevant) and (query, other). ``"region"`` is the paper's m = 1:
    the pairs of one sampled region, that of ``LocationGMML(1)`` with the same ``seed``.
    """

    name = "GMML"

    def __init__(
        self,
        t: float | Sequence[float] = 0.5,
        lam: float | Sequence[float] = 0.1,
        *,
        pairs: str = "all",
        seed: int = 0,
    ) -> None:
        check_choice("pairs", pairs, ("all", "region"))
        self.t, self.lam, self.pairs, self.seed = t, lam, pairs, seed

    def fit(self, train: ExampleSet, valid: ExampleSet | None = None) -> Self:
        """Closed form for every combination of settings; ``valid`` decides between several."""
        data = _usable(train)
        if self.pairs == "all":
            similar, dissimilar = pair_means(data)
        else:
            _, (similar,), (dissimilar,) = sampled_regions(data, 1, seed=self.seed)
        self.chosen, self.factor = choose(
            list(grid_points(t=self.t, lam=self.lam)),
            lambda point: gmml(similar, dissimilar, **point).factor,
            None if valid is None else lambda factor: _map(factor, valid),
        )
        return self


@dataclass(frozen=True)
class LocationBank:
    """Local metrics and what weighs them at a query: anchors, medians of the training distances, ρ."""

    anchors: Tensor  # (K, D)
    factors: Tensor  # (K, D, D)
    scales: Tensor  # (K,)
    rho: float
    valid_map: float
    normalise: bool = True

    def weights(self, queries: Tensor) -> Tensor:  # (Q, K)
        """w_r(q)."""
        dists = local_distances(queries, self.anchors, self.factors)
        weigh = location_weights if self.normalise else exponential_weights
        return weigh(dists, self.scales, self.rho)

    def distances(self, queries: Tensor, database: Tensor) -> Tensor:  # (Q, N) squared
        """(q−x)ᵀM(q)(q−x)."""
        queries, database = queries.double(), database.double()
        return location_distances(queries, database, self.factors, self.weights(queries))


class LocationGMML(ExampleSystem):
    """L-GMML for query by example: M(q) = Σᵣ w_r(q)·M_r; a query never seen needs nothing more.

    Regions, each with an anchor and a metric:

    - ``"sampled"``: a training query and its relevant documents are X₊, all others X₋, pairs as in ranking given lists;
      the anchor is the mean of X₊. Queries whose X₊ is already covered by earlier regions are drawn last, so few
      regions spread out.
    - ``"kmeans"``: k-means of the training queries; the pairs are those of the queries in the cell, the anchor its
      centre.

    ``weights``: ``"softmax"``, or the paper's ``"exponential"``, which ranks the same as long as nothing underflows.

    ``num_regions``, ``t``, ``lam`` and ``rho`` given as lists are chosen by validation MAP. ρ=0 is the plain mean of
    the metrics. After ``fit``: ``bank``, ``chosen`` (with ``rho``), ``num_regions_used``.
    """

    name = "L-GMML"

    def __init__(
        self,
        num_regions: int | Sequence[int] = 10,
        *,
        regions: str = "sampled",
        t: float | Sequence[float] = 0.5,
        lam: float | Sequence[float] = 0.1,
        rho: float | Sequence[float] = (0.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
        weights: str = "softmax",
        seed: int = 0,
    ) -> None:
        check_choice("regions", regions, ("sampled", "kmeans"))
        check_choice("weights", weights, ("softmax", "exponential"))
        self.num_regions, self.regions, self.t, self.lam, self.rho = num_regions, regions, t, lam, rho
        self.weights, self.seed = weights, seed

    def fit(self, train: ExampleSet, valid: ExampleSet | None = None) -> Self:
        """Closed-form metrics for every region, then ρ on validation."""
        data = _usable(train)
        make = sampled_regions if self.regions == "sampled" else kmeans_regions
        made: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        quality: Callable[[LocationBank], float] | None = None if valid is None else (lambda bank: bank.valid_map)

        def run(point: Mapping[str, Any]) -> LocationBank:
            K = point["num_regions"]
            check_positive("num_regions", K)
            if K not in made:
                made[K] = make(data, K, seed=self.seed)
            anchors, similar, dissimilar = made[K]
            factors = gmml(similar, dissimilar, point["t"], lam=point["lam"]).factor
            scales = median_scales(local_distances(data.queries, anchors, factors))

            def at(setting: Mapping[str, Any]) -> LocationBank:
                softmax = self.weights == "softmax"
                bank = LocationBank(anchors, factors, scales, setting["rho"], float("nan"), softmax)
                value = float("nan") if valid is None else mean_average_precision(bank.distances, valid)
                return replace(bank, valid_map=value)

            return choose(list(grid_points(rho=self.rho)), at, quality)[1]

        points = list(grid_points(num_regions=self.num_regions, t=self.t, lam=self.lam))
        chosen, self.bank = choose(points, run, quality)
        self.chosen = {**chosen, "rho": self.bank.rho}
        self.num_regions_used = len(self.bank.anchors)
        return self

    def distances(self, queries: Tensor, database: Tensor) -> Tensor:
        """Root of (q−x)ᵀM(q)(q−x)."""
        bank: LocationBank = fitted(self, "bank")
        check_shape("queries", queries, (None, bank.anchors.shape[1]))
        check_shape("database", database, (None, bank.anchors.shape[1]))
        return bank.distances(queries, database).sqrt()


def pair_means(
    examples: ExampleSet,
    *,
    max_elements: int = 1 << 22,
) -> tuple[Tensor, Tensor]:  # (D, D) twice
    """Mean of (q−x)(q−x)ᵀ over all pairs of a query with a relevant and with another document."""
    D, N = examples.database.shape[1], len(examples.database)
    sums, counts = examples.database.new_zeros((2, D, D)), examples.database.new_zeros((2, 1, 1))
    block = max(1, max_elements // max(1, N))
    for start in range(0, examples.num_queries, block):
        queries = examples.queries[start : start + block]
        for side, mask in enumerate(examples.masks(start, start + block)):
            sums[side] += weighted_scatter(queries, examples.database, mask.to(sums.dtype))
            counts[side] += mask.sum()
    means = sums / counts
    return means[0], means[1]


def kmeans_regions(examples: ExampleSet, num_regions: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors (K, D), similar and dissimilar scatter (K, D, D) of the k-means cells of the queries."""
    K = min(num_regions, len(np.unique(examples.queries.numpy(), axis=0)))
    cells = KMeans(K, n_init=4, random_state=seed).fit(examples.queries.numpy())
    labels = torch.from_numpy(cells.labels_).long()
    pairs = [pair_means(examples.select(labels == r)) for r in range(K)]
    anchors = torch.from_numpy(cells.cluster_centers_).to(examples.queries.dtype)
    return anchors, torch.stack([s for s, _ in pairs]), torch.stack([d for _, d in pairs])


def sampled_regions(examples: ExampleSet, num_regions: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors (K, D), similar and dissimilar scatter (K, D, D) around sampled queries."""
    generator = torch.Generator().manual_seed(seed)
    chosen = _spread(examples, torch.randperm(examples.num_queries, generator=generator).tolist(), num_regions)
    part = examples.select(torch.tensor(chosen))
    relevant, others = part.masks()
    # The query's own vector belongs to X₊; it is appended below the database, whether or not it is also a row there.
    relevant = torch.cat([relevant, torch.eye(len(chosen), dtype=torch.bool)], dim=1)
    rows = torch.cat([part.database, part.queries])
    regions = Regions(
        torch.tensor(chosen), torch.arange(len(chosen) + 1),
        relevant.nonzero()[:, 1], offsets_from_sizes(relevant.sum(1)),
        others.nonzero()[:, 1], offsets_from_sizes(others.sum(1)),
    )  # fmt: skip
    similar, dissimilar = scatter_matrices(rows, regions)
    anchors = relevant.to(rows.dtype) @ rows / relevant.sum(1, keepdim=True)
    return anchors, similar, dissimilar


def _spread(examples: ExampleSet, order: list[int], count: int) -> list[int]:
    """The first ``count`` queries of ``order``, those whose documents earlier ones cover put last."""
    covered = torch.zeros(len(examples.database), dtype=torch.bool)
    fresh, rest = [], []
    for q in order:
        rows = examples.relevant[int(examples.offsets[q]) : int(examples.offsets[q + 1])]
        if bool(covered[rows].all()):
            rest.append(q)
            continue
        fresh.append(q)
        covered[rows] = True
        if examples.own_rows is not None and examples.own_rows[q] >= 0:
            covered[examples.own_rows[q]] = True
    return (fresh + rest)[:count]


def _usable(train: ExampleSet) -> ExampleSet:
    data = train.select(train.usable).to(torch.float64)
    if data.num_queries == 0:
        raise DataError("`train` must have a query with both a relevant and another document, got none")
    return data


def _map(factor: Tensor, valid: ExampleSet) -> float:
    return mean_average_precision(lambda q, x: squared_distances(q.double(), x.double(), factor), valid)
