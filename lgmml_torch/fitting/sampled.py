"""The paper's way to build a bank: one region per metric, sampled from the training queries."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
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
from lgmml_torch.fitting.bank import Bank, BankBuilder, OnRound
from lgmml_torch.functional.distance import NORMS
from lgmml_torch.functional.gmml import REDUCTIONS, gmml, gmml_bank, pooled_scatter
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.functional.regions import (
    CANDIDATES,
    choose_anchors,
    regions_from_queries,
    sample_regions,
    usable_queries,
)
from lgmml_torch.functional.score import KERNELS, median_scales, score
from lgmml_torch.functional.spd import METHODS
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.ragged import RankingData

log = logging.getLogger(__name__)

_BANDWIDTHS = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)
_PRIORS = ("identity", "global")
GLOBAL_LAM = 0.01  # regularises the global metric itself: enough for features that hardly vary
MEDIAN_DOCUMENTS = 65_536  # the median of more documents than this does not move the scale noticeably


@dataclass(frozen=True)
class SampledBuilder(BankBuilder):
    """`fit_sampled` with its settings as fields."""

    num_metrics: int = 500
    pool: int = 1
    t: float = 0.5
    lam: float = 0.1
    relative: bool = True
    prior: str | Tensor = "identity"  # or (D, D), (K, D, D)
    reduction: str = "mean"
    method: str = "cholesky"
    candidates: str = "positives"
    alphas: Sequence[float] = ()
    norm: str = "mahalanobis"
    kernel: str = "paper"
    bandwidth: float | Sequence[float] = _BANDWIDTHS

    kind: ClassVar[str] = "sampled"

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_choice("candidates", self.candidates, CANDIDATES)
        check_choice("norm", self.norm, NORMS)
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("method", self.method, METHODS)
        check_whole("num_metrics", self.num_metrics)
        check_whole("pool", self.pool)
        check_unit_interval("t", self.t)
        check_positive("lam", self.lam, zero=True)
        check_flag("relative", self.relative)
        check_each("alphas", self.alphas, check_number)
        if not isinstance(self.prior, Tensor):  # a tensor is looked at when its size is known
            check_choice("prior", str(self.prior), _PRIORS)
        grid = self.bandwidth
        if not isinstance(grid, Collection) or isinstance(grid, str):
            grid = [grid]
        check_each("bandwidth", grid, check_number)
        if not grid or min(grid) <= 0:
            raise LGMMLError(f"`bandwidth` must be a positive number or some of them, got {list(grid)}")
        # A configuration file gives lists; equal settings should compare equal.
        object.__setattr__(self, "alphas", tuple(self.alphas))
        if isinstance(self.bandwidth, Collection):
            object.__setattr__(self, "bandwidth", tuple(self.bandwidth))

    def fit(self, data: RankingData, valid: RankingData | None, *, seed: int, on_round: OnRound | None) -> Bank:
        """See `fit_sampled`."""
        generator = torch.Generator().manual_seed(seed)
        regions = sample_regions(data.labels, data.offsets, self.num_metrics, pool=self.pool, generator=generator)
        if len(regions) < self.num_metrics:
            log.info("%d local metrics instead of %d: one for each usable query", len(regions), self.num_metrics)
        rules: dict[str, Any] = {"t": self.t, "lam": self.lam, "relative": self.relative, "reduction": self.reduction}
        rules |= {"prior": self._prior_metric(data), "method": self.method}
        progress = None if on_round is None else lambda done, total: on_round(done, SimpleNamespace(total=total))
        factors = gmml_bank(data.features, regions, progress=progress, **rules)
        rules = {"candidates": self.candidates, "alphas": self.alphas, "norm": self.norm}
        anchors = choose_anchors(data.features, data.labels, data.offsets, regions, factors, **rules)
        block = MetricBlock(anchors.points, factors, quality=anchors.ndcg)
        metrics = LocalMetrics([block], num_features=data.num_features, norm=self.norm)
        some = torch.randperm(len(data.features), generator=generator)[:MEDIAN_DOCUMENTS].sort().values
        judges = data if valid is None else valid
        history = self._set_scales(metrics, data.features[some], judges)
        return Bank(metrics, self.kernel, None, {**history, "regions": regions.queries.tolist()})

    def _prior_metric(self, data: RankingData) -> Tensor | None:
        if isinstance(self.prior, Tensor):
            return self.prior
        if self.prior == "global":
            return _global_metric(data, t=self.t, method=self.method)
        return None

    def _set_scales(self, metrics: LocalMetrics, rows: Tensor, judges: RankingData) -> dict[str, Any]:
        """Divide distances by their median over ``rows`` and by the bandwidth that ``judges`` choose; how it went.

        Of several bandwidths the one whose NDCG@10 with equal weights is best.
        """
        dists = metrics(rows)
        medians = median_scales(dists)
        metrics.set_scales(medians)
        grid = np.atleast_1d(self.bandwidth).astype(float).tolist()
        judged: dict[float, float] = {}
        if len(grid) > 1:
            to_judge = metrics(judges.features)
            ones = dists.new_ones(1, metrics.num_metrics)
            for value in grid:
                scores = score(to_judge / value, ones, judges.offsets, kernel=self.kernel)
                judged[value] = mean_measure(scores, judges)
        chosen = max(grid, key=lambda value: judged.get(value, 0.0))
        metrics.set_scales(medians * chosen)
        beyond = float((dists > metrics.scales).double().mean())  # where the paper's kernel falls
        log.info("bandwidth %g; %.0f%% of the training distances lie beyond 1", chosen, 100 * beyond)
        return {
            "bandwidth": chosen,
            "share of distances beyond 1": beyond,
            "ndcg@10 by bandwidth": {str(value): found for value, found in judged.items()},
        }


def fit_sampled(
    data: RankingData,
    valid: RankingData | None = None,
    *,
    seed: int = 0,
    on_round: OnRound | None = None,
    **settings: Any,
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
        prior: A₀, what a large λ turns every metric into: ``"identity"``, ``"global"`` (one metric of
            the pairs of all training queries), or a positive definite matrix, one for all regions or one for each.
        reduction: ``"mean"`` over pairs, or the paper's ``"sum"``.
        method: how the geometric mean is computed, ``"cholesky"`` or ``"eigh"``; the same metric up to rounding.
        candidates: anchors are taken from all ``"positives"`` of the region or its ``"top"`` label.
        alphas: how far the anchor may be moved away from the negatives; by default it stays a real document.
        norm: of the local distances, ``"mahalanobis"`` or ``"trace"``.
        kernel: κ of the score; the bandwidth is chosen for it.
        bandwidth: distances are divided by it and by their median; of several, validation NDCG@10 with equal weights
            chooses.
        seed: of the regions.
        on_round: called as ``on_round(metrics_done, info)``; ``info.total`` is how many there will be.
        **settings: the fields of `SampledBuilder`, above.

    Raises:
        DataError: when no query has a positive and a lower-labelled document.
    """
    return SampledBuilder.of(**settings)(data, valid, seed=seed, on_round=on_round)


def _global_metric(data: RankingData, *, t: float = 0.5, method: str = "cholesky") -> Tensor:  # (D, D)
    """One GMML metric of the pairs of all usable training queries, each pair within its list; A₀ of ``prior="global"``.

    Of the metrics one could pull towards, this is the one that leaves a region alone when it looks like the whole: for
    S, D and M = S⁻¹ ♯ D of all pairs, M (S + cM⁻¹) M = D + cM for every c, so that t=½ gives M again, whatever λ (up to
    the little that regularises M itself). An inverse covariance has no such place in the equation, and would have to be
    given a scale by hand.
    """
    queries = usable_queries(data.labels, data.offsets).nonzero()[:, 0]
    every = torch.arange(len(queries) + 1, device=queries.device)
    regions = regions_from_queries(data.labels, data.offsets, queries, every)
    S, D = pooled_scatter(data.features, regions)
    return gmml(S, D, t, lam=GLOBAL_LAM, method=method).metric
