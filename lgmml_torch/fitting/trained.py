"""The start of trained metrics: low-rank metrics over all features, whose anchors and factors gradients then move.

The builder hands back a `Bank` that is marked to be trained; the Lightning stage trains it whole, behind the loss seam.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, check_choice, check_whole
from lgmml_torch.fitting.bank import Bank, BankBuilder, OnRound
from lgmml_torch.functional.score import KERNELS
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.preprocess.base import TrainingLists
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import centre_segments, segment_min

SCALE_DOCUMENTS = 2000  # the mean distance of more of them is the same
_LEAST_STRENGTH = 0.1  # of the strongest feature's weight: none starts switched off
_LEAST_DEVIATION = 1e-6
_START_WEIGHT = 4.0  # Φ₀ = 4/√K: scores of a spread that a softmax can work with


@dataclass(frozen=True)
class TrainedBuilder(BankBuilder):
    """`start_trained` with its settings as fields."""

    num_metrics: int = 128
    rank: int = 8
    start: str = "strength"
    kernel: str = "paper"

    kind: ClassVar[str] = "trained"
    trains_metrics: ClassVar[bool] = True
    takes_shared_lists: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("start", self.start, STARTS)
        check_choice("kernel", self.kernel, KERNELS)
        for name in ("num_metrics", "rank"):
            check_whole(name, getattr(self, name))

    def fit(self, data: RankingData, valid: RankingData | None, *, seed: int, on_round: OnRound | None) -> Bank:
        """See `start_trained`."""
        generator = torch.Generator().manual_seed(seed)
        lowest = segment_min(data.labels, data.offsets)[data.query_index]
        count, everything = data.all_lists.num_documents, data.all_lists
        relevant = everything.take(data.labels > lowest, torch.arange(count)).nonzero()[:, 0]
        if not len(relevant):
            raise DataError("`data` must have a query with documents of different labels, got none")
        drawn = relevant[torch.randint(len(relevant), (self.num_metrics,), generator=generator)]
        anchors = everything.take(data.features, drawn).clone()
        rank = min(self.rank, data.num_features)
        shape = (self.num_metrics, data.num_features, rank)
        factors = STARTS[self.start](data, shape, generator).to(anchors)
        metrics = LocalMetrics([MetricBlock(anchors, factors)], num_features=data.num_features)
        some = torch.randperm(count, generator=generator)[:SCALE_DOCUMENTS].sort().values
        means = metrics(everything.take(data.features, some)).mean(0)
        metrics.set_scales(torch.where(means > 0, means, torch.ones_like(means)))
        phi = anchors.new_full((self.num_metrics,), _START_WEIGHT / self.num_metrics**0.5)
        return Bank(metrics, self.kernel, phi, {"start": self.start, "rank": rank}, trained=True)


def start_trained(data: RankingData, valid: RankingData | None = None, *, seed: int = 0, **settings: Any) -> Bank:
    r"""K metrics of rank R, anchored at relevant documents, to be trained by gradient.

    .. math:: d_r(x) = \lVert W_r^\top (x - a_r) \rVert / s_r

    with anchors :math:`a_r` drawn among the documents above the lowest label of their query, scales :math:`s_r` such
    that the mean distance is 1, where the paper's kernel turns, and :math:`\Phi_0 = 4/\sqrt{K}`.

    Args:
        data: training queries, features preprocessed.
        valid: not looked at.
        num_metrics: K.
        rank: R, at most the number of features.
        start: ``"random"`` factors, normal with variance 1/(D·R). ``"strength"``: the same, each feature times how much
            it says about the labels by itself.
        kernel: κ of the score.
        seed: of all draws.
        **settings: the fields of `TrainedBuilder`, above.

    Raises:
        DataError: when no query has a document above its lowest label.
    """
    return TrainedBuilder.of(**settings)(data, valid, seed=seed)


Shape = tuple[int, int, int]


def _random(data: RankingData, shape: Shape, generator: torch.Generator) -> Tensor:
    return weighted_factors(torch.ones(shape[1]), shape, generator)


def _strength(data: RankingData, shape: Shape, generator: torch.Generator) -> Tensor:
    """Each feature times its covariance with the labels, list by list, over its deviation."""
    lists = TrainingLists.of(data)
    covariance = lists.weighted_sum(centre_segments(data.labels.double(), data.offsets))
    strength = covariance.abs() / lists.moments[1].clamp_min(_LEAST_DEVIATION)
    return weighted_factors(strength / strength.max().clamp_min(torch.finfo(torch.float64).tiny), shape, generator)


def weighted_factors(weights: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """Random directions, each feature times its weight; the mean square stays that of random ones.

    Where no feature has a weight, all have the same.
    """
    if not weights.any():
        weights = torch.ones_like(weights)
    weights = weights.clamp_min(_LEAST_STRENGTH * float(weights.max()))
    weights = weights / weights.square().mean().sqrt()
    drawn: Tensor = torch.randn(shape, generator=generator) / math.sqrt(shape[1] * shape[2])
    return drawn * weights.cpu()[:, None].to(drawn)


STARTS: dict[str, Callable[[RankingData, Shape, torch.Generator], Tensor]] = {
    "random": _random,
    "strength": _strength,
}
