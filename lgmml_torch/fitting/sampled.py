"""The paper's way to build a bank: one region per metric, sampled from the training queries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lgmml_torch.checks import (
    LGMMLError,
    check_choice,
    check_each,
    check_flag,
    check_number,
    check_positive,
    check_unit_interval,
    check_whole,
)
from lgmml_torch.fitting.bank import Bank, checked_by
from lgmml_torch.functional.distance import NORMS, median_scales
from lgmml_torch.functional.gmml import REDUCTIONS, gmml, gmml_bank, pooled_scatter
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.functional.regions import (
    CANDIDATES,
    Regions,
    choose_anchors,
    extrapolate_anchors,
    regions_from_queries,
    sample_regions,
    usable_queries,
)
from lgmml_torch.functional.score import KERNELS, score, share_beyond_turning_point
from lgmml_torch.functional.spd import METHODS
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.ragged import RankingData

log = logging.getLogger(__name__)

BANDWIDTHS = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
PRIORS = ("identity", "global")
GLOBAL_LAM = 0.01  # regularises the global metric itself: enough for features that hardly vary
MEDIAN_DOCUMENTS = 65_536  # the median of more documents than this does not move the scale noticeably


@dataclass(frozen=True)
class SampledInfo:
    """What `fit_sampled` reports as it goes.

    Attributes:
        total: metrics there will be.
    """

    total: int


def check_settings(**settings: Any) -> None:
    """Refuse what `fit_sampled` cannot work with."""
    rules: dict[str, tuple[str, ...]] = {
        "reduction": REDUCTIONS, "candidates": CANDIDATES, "norm": NORMS, "kernel": tuple(KERNELS), "method": METHODS
    }  # fmt: skip
    for name, choices in rules.items():
        if name in settings:
            check_choice(name, settings[name], choices)
    for name in ("num_metrics", "pool"):
        check_whole(name, settings.get(name, 1))
    check_unit_interval("t", settings.get("t", 0.5))
    check_positive("lam", settings.get("lam", 0.0), zero=True)
    check_flag("relative", settings.get("relative", True))
    check_each("alphas", settings.get("alphas", ()), check_number)
    prior = settings.get("prior", "identity")
    if not isinstance(prior, Tensor):  # a tensor is looked at when its size is known
        check_choice("prior", str(prior), PRIORS)
    bandwidth = settings.get("bandwidth", 1.0)
    several = isinstance(bandwidth, Collection) and not isinstance(bandwidth, str)
    check_each("bandwidth", bandwidth if several else [bandwidth], check_number)
    grid = _grid(bandwidth)
    if not grid or min(grid) <= 0:
        raise LGMMLError(f"`bandwidth` must be a positive number or some of them, got {grid}")


@checked_by(check_settings)
def fit_sampled(
    data: RankingData,
    valid: RankingData | None = None,
    *,
    num_metrics: int = 500,
    pool: int = 1,
    t: float = 0.5,
    lam: float = 0.1,
    relative: bool = True,
    prior: str | Tensor = "identity",  # or (D, D), (K, D, D)
    reduction: str = "mean",
    method: str = "cholesky",
    candidates: str = "positives",
    alphas: Sequence[float] = (),
    norm: str = "mahalanobis",
    kernel: str = "paper",
    bandwidth: float | Sequence[float] = BANDWIDTHS,
    seed: int = 0,
    on_round: Callable[[int, SampledInfo], None] | None = None,
) -> Bank:
    """Sample regions, take the geometric-mean metric of each in closed form, and choose its anchor by NDCG.

    Args:
        data: training queries, features preprocessed.
        valid: queries the bandwidth is chosen by, when there is a choice; the training queries without them.
        num_metrics: K; fewer when there are fewer usable queries.
        pool: queries per region.
        t: place on the geodesic from S⁻¹ to D.
        lam: regularisation, relative to the scatter unless ``relative=False``.
        relative: see ``lam``.
        prior: A₀, what a large λ turns every metric into: ``"identity"``, ``"global"`` (see `global_metric`), or a
            positive definite matrix, one for all regions or one for each.
        reduction: ``"mean"`` over pairs, or the paper's ``"sum"``.
        method: how the geometric mean is computed, ``"cholesky"`` or ``"eigh"``; the same metric up to rounding.
        candidates: anchors are taken from all ``"positives"`` of the region or its ``"top"`` label.
        alphas: how far the anchor may be moved away from the negatives; by default it stays a real document.
        norm: of the local distances, ``"mahalanobis"`` or ``"trace"``.
        kernel: κ of the score; the bandwidth is chosen for it.
        bandwidth: distances are divided by it and by their median; of several, validation NDCG@10 with equal weights
            chooses.
        seed: of the regions.
        on_round: called as ``on_round(metrics_done, info)``.

    Raises:
        DataError: when no query has a positive and a lower-labelled document.
        LGMMLError: for settings that `check_settings` refuses.
    """
    check_settings(num_metrics=num_metrics, prior=prior, bandwidth=bandwidth)
    generator = torch.Generator().manual_seed(seed)
    regions = sample_regions(data.labels, data.offsets, num_metrics, pool=pool, generator=generator)
    if len(regions) < num_metrics:
        log.info("%d local metrics instead of %d: one for each usable query", len(regions), num_metrics)
    if isinstance(prior, str):
        prior_metric = global_metric(data, t=t, method=method) if prior == "global" else None
    else:
        prior_metric = prior
    factors = gmml_bank(
        data.features,
        *_sides(regions),
        t=t,
        lam=lam,
        relative=relative,
        prior=prior_metric,
        reduction=reduction,
        method=method,
        progress=None if on_round is None else lambda done, total: on_round(done, SampledInfo(total)),
    )
    lists = (data.features, data.labels, data.offsets)
    anchors = choose_anchors(*lists, regions, factors, candidates=candidates, norm=norm)
    if len(alphas):
        anchors = extrapolate_anchors(*lists, regions, factors, anchors, alphas=(0.0, *alphas), norm=norm)
    block = MetricBlock(anchors.points, factors, quality=anchors.ndcg)
    metrics = LocalMetrics([block], num_features=data.num_features, norm=norm)
    rows = _some_rows(data.features, generator)
    history = _set_scales(metrics, rows, data if valid is None else valid, _grid(bandwidth), kernel)
    return Bank(metrics, kernel, None, {**history, "regions": [int(q) for q in regions.queries]})


def global_metric(data: RankingData, *, t: float = 0.5, method: str = "cholesky") -> Tensor:  # (D, D)
    """One GMML metric of the pairs of all usable training queries, each pair within its list; A₀ of ``prior="global"``.

    Of the metrics one could pull towards, this is the one that leaves a region alone when it looks like the whole: for
    S, D and M = S⁻¹ ♯ D of all pairs, M (S + cM⁻¹) M = D + cM for every c, so that t=½ gives M again, whatever λ (up to
    the little that regularises M itself). An inverse covariance has no such place in the equation, and would have to be
    given a scale by hand.
    """
    queries = usable_queries(data.labels, data.offsets).nonzero()[:, 0]
    every = torch.arange(len(queries) + 1, device=queries.device)
    regions = regions_from_queries(data.labels, data.offsets, queries, every)
    S, D = pooled_scatter(data.features, *_sides(regions))
    return gmml(S, D, t, lam=GLOBAL_LAM, method=method).metric


def _sides(regions: Regions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return regions.positives, regions.positive_offsets, regions.negatives, regions.negative_offsets


def _grid(bandwidth: float | Sequence[float]) -> list[float]:
    return [float(bandwidth)] if isinstance(bandwidth, (int, float)) else [float(value) for value in bandwidth]


def _some_rows(features: Tensor, generator: torch.Generator) -> Tensor:
    if len(features) <= MEDIAN_DOCUMENTS:
        return features
    return features[torch.randperm(len(features), generator=generator)[:MEDIAN_DOCUMENTS].sort().values]


def _set_scales(
    metrics: LocalMetrics, rows: Tensor, judges: RankingData, grid: Sequence[float], kernel: str
) -> dict[str, Any]:
    """Divide distances by their median over ``rows`` and by the bandwidth that ``judges`` choose; how it went."""
    dists = metrics(rows)
    medians = median_scales(dists)
    metrics.set_scales(medians)
    judged = _judge_bandwidths(metrics, judges, grid, kernel) if len(grid) > 1 else {}
    chosen = max(judged, key=lambda value: judged[value]) if judged else grid[0]
    metrics.set_scales(medians * chosen)
    beyond = share_beyond_turning_point(dists / metrics.scales)
    log.info("bandwidth %g; %.0f%% of the training distances lie beyond 1", chosen, 100 * beyond)
    return {
        "bandwidth": chosen,
        "share of distances beyond 1": beyond,
        "ndcg@10 by bandwidth": {str(value): found for value, found in judged.items()},
    }


def _judge_bandwidths(
    metrics: LocalMetrics, data: RankingData, grid: Sequence[float], kernel: str
) -> dict[float, float]:
    """NDCG@10 of equal weights for each bandwidth."""
    dists = metrics(data.features)
    ones = dists.new_ones(1, metrics.num_metrics)
    found = {}
    for value in grid:
        scores = score(dists / value, ones, data.offsets, kernel=kernel)
        found[value] = mean_ndcg(scores, data)
    return found
