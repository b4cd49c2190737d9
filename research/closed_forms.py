"""Two trials with closed forms: trained factors that are pulled towards their start, and closed form and Φ in turns.

The second: after Φ is trained on sampled metrics, LambdaRank's gradients at the scores say which documents should still
rise and which should fall. They weight the pairs of each region anew, as in boosting, and Φ is trained again on the
metrics of these pairs. Anchors stay. `research.starts` has the protocols and the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lgmml_torch.fitting.bank import Bank
from lgmml_torch.functional.boosting import list_scatter
from lgmml_torch.functional.gmml import gmml
from lgmml_torch.functional.losses import lambda_gradients
from lgmml_torch.functional.measures import mean_measure, rank_data
from lgmml_torch.functional.score import median_scales, score
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.ragged import RankingData
from research.compare import fit_bank, train_weights
from research.protocol import ranking_fold
from research.store import Job, Record

SETTINGS = (
    "local_metrics=sampled", "local_metrics.num_metrics=100", "preprocess=quantile", "optimizer=adam",
    "trainer.max_epochs=10",
)  # fmt: skip
BANDWIDTHS = (0.3, 0.5, 1.0, 2.0)
TURNS = ("closed form", "alternated once", "alternated twice")
LAM = 0.1
GRID = f"local_metrics.bandwidth={list(BANDWIDTHS)}"
ENDS: dict[str, tuple[str, ...]] = {  # with anchors chosen for each of them
    "identity, own anchors": (GRID, "local_metrics.lam=1e9"),  # λ pulls towards it
    "inverse similar scatter (t = 0), own anchors": (GRID, "local_metrics.t=0.0"),
    "dissimilar scatter (t = 1), own anchors": (GRID, "local_metrics.t=1.0"),
}


class TowardsStart(torch.optim.AdamW):
    """AdamW; the factors of metrics decay towards where they started, with weight ``pull``, instead of towards zero."""

    def __init__(self, params: Iterable[Tensor], *, pull: float, **settings: Any) -> None:
        every: list[Tensor] = [*params]
        factors = [parameter for parameter in every if parameter.dim() == 3]
        others = [parameter for parameter in every if parameter.dim() != 3]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": factors, "weight_decay": 0.0}]
        super().__init__(groups, **settings)
        self.pull, self.factors = pull, factors
        self.starts = [parameter.detach().clone() for parameter in factors]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """A step of AdamW, then the pull."""
        loss = super().step(closure)
        share = min(1.0, self.param_groups[1]["lr"] * self.pull)
        for parameter, start in zip(self.factors, self.starts, strict=True):
            parameter.lerp_(start, share)
        return loss


def gradients(scores: Tensor, data: RankingData) -> Tensor:  # (N,)
    """LambdaRank's, of scores with a standard deviation of 1: the scale that Φ gives them means nothing."""
    scores = scores.double()
    found, _ = lambda_gradients(scores / scores.std().clamp_min(1e-12), data.labels.double(), data.offsets)
    return found


def weighted_metrics(data: RankingData, pull: Tensor, regions: list[int], before: Tensor) -> Tensor:  # (K, D, D)
    """Factors of the geometric means of pairs within each region; where no pair has a weight, the factor before."""
    factors = before.clone()
    for place, query in enumerate(regions):
        rows = slice(int(data.offsets[query]), int(data.offsets[query + 1]))
        up, down = pull[rows].clamp_min(0), (-pull[rows]).clamp_min(0)
        if float(up.sum()) > 0:
            values = data.features[rows].double()[:, None]
            S, D = list_scatter(values, up, down, torch.tensor([0, len(up)]))
            factors[place] = gmml(S[0], D[0], lam=LAM).factor.to(factors)
    return factors


def only_block(bank: Bank) -> MetricBlock:
    """Of metrics that all look at all features."""
    ((_, block),) = bank.metrics.iter_columns()
    return block


def with_factors(bank: Bank, factors: Tensor, train: RankingData, valid: RankingData) -> Bank:
    """The same anchors with other factors; the bandwidth is the one with the best validation NDCG@10."""
    metrics = LocalMetrics([MetricBlock(only_block(bank).anchors, factors)], num_features=train.num_features)
    medians = median_scales(metrics(train.features))
    seen = metrics(valid.features)
    ones = seen.new_ones(1, metrics.num_metrics)

    def quality(bandwidth: float) -> float:
        return mean_measure(score(seen / (medians * bandwidth), ones, valid.offsets, kernel=bank.kernel), valid)

    metrics.set_scales(medians * max(BANDWIDTHS, key=quality))
    return replace(bank, metrics=metrics)


def alternate(data: str, fold: int, seed: int) -> dict[str, list[float]]:
    """Validation NDCG@10 of every query with the identity, the closed form, and after each turn."""
    start = fit_bank(ranking_fold(data, fold), SETTINGS, seed)
    train, valid = (
        part.replace(features=start.preprocess(part.features, part.offsets))
        for part in (start.splits["train"], start.splits["valid"])
    )
    values: dict[str, list[float]] = {}

    def trained(name: str, factors: Tensor) -> Tensor:
        bank = with_factors(start.bank, factors, train, valid)
        model = train_weights(replace(start, bank=bank, inputs={}, preprocessed={}), SETTINGS, seed).model
        measured = rank_data(model.score(start.splits["valid"]), start.splits["valid"], metrics=["ndcg@10"])
        values[name] = measured["ndcg@10"].tolist()
        return model.score(start.splits["train"])

    factors = only_block(start.bank).factors
    trained("identity", torch.eye(factors.shape[1]).to(factors).expand_as(factors).clone())
    for name in TURNS:
        scores = trained(name, factors)
        factors = weighted_metrics(train, gradients(scores, train), start.bank.history["regions"], factors)
    return values


def ends(data: str, fold: int, seed: int) -> dict[str, list[float]]:
    """Validation NDCG@10 of every query with what stands at the ends of the geodesic, and with the identity."""
    parts = ranking_fold(data, fold)
    values: dict[str, list[float]] = {}
    for name, overrides in ENDS.items():
        settings = [*SETTINGS, *overrides]
        model = train_weights(fit_bank(parts, settings, seed), settings, seed).model
        values[name] = rank_data(model.score(parts.valid), parts.valid, metrics=["ndcg@10"])["ndcg@10"].tolist()
    return values


def ends_job(data: str, fold: int, seed: int) -> Job:
    """One fold of the rows that were added."""
    settings = {"data": data, "fold": fold, "seed": seed, "settings": list(SETTINGS), "ends": list(ENDS)}
    return Job("ends", settings, lambda: Record(ends(data, fold, seed)))


def alternating_job(data: str, fold: int, seed: int) -> Job:
    """One fold, all rows of the table."""

    def make() -> Record:
        return Record(alternate(data, fold, seed))

    return Job("alternating", {"data": data, "fold": fold, "seed": seed, "settings": list(SETTINGS)}, make)
