"""The paper's way to build a bank: one region per metric, sampled from the training queries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lgmml_torch.checks import check_choice, check_positive, check_unit_interval
from lgmml_torch.fitting.bank import Bank, checked_by
from lgmml_torch.functional.distance import NORMS, median_scales
from lgmml_torch.functional.gmml import REDUCTIONS, gmml_bank
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.functional.regions import CANDIDATES, choose_anchors, extrapolate_anchors, sample_regions
from lgmml_torch.functional.score import KERNELS, score, share_beyond_turning_point
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.ragged import RankingData

log = logging.getLogger(__name__)

BANDWIDTHS = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
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
        "reduction": REDUCTIONS, "candidates": CANDIDATES, "norm": NORMS, "kernel": tuple(KERNELS)
    }  # fmt: skip
    for name, choices in rules.items():
        if name in settings:
            check_choice(name, settings[name], choices)
    for name in ("num_metrics", "pool"):
        check_positive(name, settings.get(name, 1))
    check_unit_interval("t", settings.get("t", 0.5))
    check_positive("lam", settings.get("lam", 0.0), zero=True)


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
    reduction: str = "mean",
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
        reduction: ``"mean"`` over pairs, or the paper's ``"sum"``.
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
    """
    check_positive("num_metrics", num_metrics)
    generator = torch.Generator().manual_seed(seed)
    regions = sample_regions(data.labels, data.offsets, num_metrics, pool=pool, generator=generator)
    if len(regions) < num_metrics:
        log.info("%d local metrics instead of %d: one for each usable query", len(regions), num_metrics)
    factors = gmml_bank(
        data.features,
        regions.positives,
        regions.positive_offsets,
        regions.negatives,
        regions.negative_offsets,
        t=t,
        lam=lam,
        relative=relative,
        reduction=reduction,
        progress=None if on_round is None else lambda done, total: on_round(done, SampledInfo(total)),
    )
    lists = (data.features, data.labels, data.offsets)
    anchors = choose_anchors(*lists, regions, factors, candidates=candidates, norm=norm)
    if len(alphas):
        anchors = extrapolate_anchors(*lists, regions, factors, anchors, alphas=(0.0, *alphas), norm=norm)
    block = MetricBlock(anchors.points, factors, quality=anchors.ndcg)
    metrics = LocalMetrics([block], num_features=data.num_features, norm=norm)
    dists = metrics(_some_rows(data.features, generator))
    medians = median_scales(dists)
    metrics.set_scales(medians)
    grid = [float(bandwidth)] if isinstance(bandwidth, (int, float)) else [float(value) for value in bandwidth]
    judged = _judge_bandwidths(metrics, data if valid is None else valid, grid, kernel) if len(grid) > 1 else {}
    chosen = max(judged, key=lambda value: judged[value]) if judged else grid[0]
    metrics.set_scales(medians * chosen)
    beyond = share_beyond_turning_point(dists / metrics.scales)
    log.info("bandwidth %g; %.0f%% of the training distances lie beyond 1", chosen, 100 * beyond)
    history = {
        "bandwidth": chosen,
        "share of distances beyond 1": beyond,
        "ndcg@10 by bandwidth": {str(value): found for value, found in judged.items()},
        "regions": [int(q) for q in regions.queries],
    }
    return Bank(metrics, kernel, None, history)


def _some_rows(features: Tensor, generator: torch.Generator) -> Tensor:
    if len(features) <= MEDIAN_DOCUMENTS:
        return features
    return features[torch.randperm(len(features), generator=generator)[:MEDIAN_DOCUMENTS].sort().values]


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
