"""Settings of boosting, and the metrics it has chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from lgmml_torch.checks import (
    LGMMLError,
    check_choice,
    check_each,
    check_number,
    check_positive,
    check_unit_interval,
    check_whole,
)
from lgmml_torch.functional.distance import subspace_distances
from lgmml_torch.functional.score import KERNELS
from lgmml_torch.functional.score import kernel as kappa_of
from lgmml_torch.functional.spd import METHODS
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock

_METRIC_KINDS = ("gmml", "gmml-pooled", "identity")
LARGEST = 1e30  # its square, and its product with a feature, are still numbers


@dataclass(frozen=True)
class BoostConfig:
    """Settings of `fit_boosted`; the defaults are the recipe of the method, not tuned any further.

    Attributes:
        rounds: largest number of rounds.
        batch: metrics added in each round.
        shrinkage: ν, the share of a Newton step that is taken.
        candidates: subspaces tried in each round, shared out evenly over ``sizes``.
        sizes: numbers of features of the subspaces.
        anchors: documents tried as anchors in each subspace.
        steps: how far the mean anchor is moved away from the negatives, further anchors to try.
        bandwidths: times the mean distance, what distances are divided by.
        kernel: κ of the score, see `lgmml_torch.functional.score.kernel`.
        metric: ``"gmml"`` (pairs within queries), ``"gmml-pooled"`` (pairs of all queries) or ``"identity"``.
        lam: λ, regularisation of both scatters relative to their trace.
        t: weight on the geodesic from S⁻¹ to D.
        method: how the geometric mean is computed, ``"cholesky"`` or ``"eigh"``.
        ridge: of the Newton system, relative to the total Hessian.
        min_deviation: kernels that vary less over the documents are rejected.
        subsample: share of the queries a round looks at.
        cap: documents a round fits to; the gradients come from whole lists of at most four times as many.
        truncation: LambdaRank pairs need a document among the first ``truncation`` places.
        sigma: slope of LambdaRank.
        hessian_floor: added to p(1 - p); without it a step has no bound.
        feature_floor: smallest sampling weight of a feature, relative to the mean.
        position_ridge: L2 penalty on the biases of positions, where the data has any, relative to their mean Hessian.
        evaluate_every: rounds between two looks at NDCG.
        k: cutoff of that NDCG.
        smooth: evaluations averaged before they are compared.
        patience: rounds without a better average after which to stop.
    """

    rounds: int = 200
    batch: int = 4
    shrinkage: float = 0.1
    candidates: int = 24
    sizes: tuple[int, ...] = (1, 2, 3)
    anchors: int = 6
    steps: tuple[float, ...] = (2.0, 8.0)
    bandwidths: tuple[float, ...] = (0.3, 1.0, 3.0)
    kernel: str = "paper"
    metric: str = "gmml"
    lam: float = 0.1
    t: float = 0.5
    method: str = "cholesky"
    ridge: float = 0.05
    min_deviation: float = 0.01
    subsample: float = 0.7
    cap: int = 2500
    truncation: int = 30
    sigma: float = 1.0
    hessian_floor: float = 0.05
    feature_floor: float = 0.05
    position_ridge: float = 0.01
    evaluate_every: int = 5
    k: int = 10
    smooth: int = 3
    patience: int = 40

    def __post_init__(self) -> None:
        for name in ("sizes", "steps", "bandwidths"):
            check_each(name, getattr(self, name), check_number)
            # A configuration file gives lists; equal settings should compare equal.
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("metric", self.metric, _METRIC_KINDS)
        check_choice("method", self.method, METHODS)
        for name in ("t", "subsample", "shrinkage"):
            check_unit_interval(name, getattr(self, name))
        for name in (
            "batch", "candidates", "anchors", "cap", "truncation", "evaluate_every", "k", "smooth", "patience"
        ):  # fmt: skip
            check_whole(name, getattr(self, name))
        positive = (
            "shrinkage",
            "ridge",
            "subsample",
            "sigma",
            "hessian_floor",
            "feature_floor",
            "min_deviation",
            "position_ridge",
        )
        for name in (*positive, "lam"):
            check_positive(name, getattr(self, name), zero=name not in positive)
            if getattr(self, name) > LARGEST:
                raise LGMMLError(f"`{name}` must be at most {LARGEST:g}, got {getattr(self, name)}")
        check_whole("rounds", self.rounds, zero=True)
        for name in ("sizes", "bandwidths"):
            values = getattr(self, name)
            if not values or min(values) <= 0:
                raise LGMMLError(f"`{name}` must hold positive numbers, got {list(values)}")
        check_each("sizes", self.sizes, check_whole)
        if self.candidates < len(self.sizes):
            raise LGMMLError(
                f"`candidates` must be at least one for each of the {len(self.sizes)} sizes, got {self.candidates}"
            )


def kernel_(dists: Tensor, name: str) -> Tensor:
    """κ, overwriting its argument where it can: the search spends most of its time here."""
    if name == "paper":
        return dists.mul_(dists.neg().exp_())
    return kappa_of(dists, name)


@dataclass(frozen=True)
class Learners:
    """Metrics in subspaces of different sizes, as tensors padded to the largest one.

    Attributes:
        support: ``(K, S)`` features, -1 beyond the metric's size.
        anchors: ``(K, S)``, zero beyond it.
        factors: ``(K, S, S)``, zero beyond it.
        scales: ``(K,)`` what distances are divided by.
        phi: ``(K,)``.
        rounds: ``(K,)`` the round each was added in.
    """

    support: Tensor
    anchors: Tensor
    factors: Tensor
    scales: Tensor
    phi: Tensor
    rounds: Tensor

    @classmethod
    def empty(cls, width: int, like: Tensor) -> Self:
        """No metrics yet."""
        none = torch.empty(0, width, dtype=torch.long, device=like.device)
        zero = like.new_empty(0)
        return cls(none, like.new_empty(0, width), like.new_empty(0, width, width), zero, zero, none[:, 0])

    @classmethod
    def cat(cls, parts: Sequence[Learners]) -> Self:
        """All metrics of all parts, in order."""
        joined = {}
        for field in fields(cls):
            joined[field.name] = torch.cat([getattr(part, field.name) for part in parts])
        return cls(**joined)

    def __len__(self) -> int:
        return len(self.phi)

    def select(self, index: Tensor) -> Learners:
        """Some of the metrics, by position or mask."""
        return Learners(*(getattr(self, field.name)[index] for field in fields(self)))

    def double(self) -> Learners:
        """The same metrics in float64."""
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value.is_floating_point():
                value = value.double()
            values[field.name] = value
        return Learners(**values)

    @property
    def widths(self) -> Tensor:
        """``(K,)`` number of features of each metric."""
        return (self.support >= 0).sum(dim=1)

    def kernels(
        self,
        features: Tensor,  # (N, D)
        kernel: str,
    ) -> Tensor:  # (N, K)
        """κ of the scaled distances; only the columns of the features in use are copied."""
        used, place = torch.unique(self.support.clamp_min(0), return_inverse=True)
        dists = subspace_distances(features[:, used].to(self.phi.dtype), place, self.anchors, self.factors)
        return kernel_(dists.div_(self.scales), kernel)

    def local_metrics(self, num_features: int) -> tuple[LocalMetrics, Tensor]:
        """A bank with one block for each size, and Φ in the order of its columns."""
        blocks, phi = [], []
        for width in torch.unique(self.widths).tolist():
            part = self.select(self.widths == width)
            anchors, factors = part.anchors[:, :width], part.factors[:, :width, :width]
            support = part.support[:, :width]
            blocks.append(
                MetricBlock(anchors.clone(), factors.clone(), support=support.clone(), scales=part.scales.clone())
            )
            phi.append(part.phi)
        return LocalMetrics(blocks, num_features=num_features), torch.cat(phi)
