"""What boosting has so far: its settings, the metrics chosen, the scores they give, and how the rounds went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

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

METRIC_KINDS = ("gmml", "gmml-pooled", "identity")
DRAWS = ("uniform", "gradient")
LARGEST = 1e30  # its square, and its product with a feature, are still numbers


@dataclass(frozen=True)
class BoostConfig:
    """Settings of `fit_boosted`; the defaults are the recipe of the method, not tuned any further.

    Attributes:
        rounds: at most so many.
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
        phi_cap: documents the weights φ of the chosen metrics are fitted to, where that is more than ``cap``.
        draw: which documents: ``"uniform"``, or ``"gradient"``: large gradients more often, with weights that make up
            for it; where relevant documents are rare, few of them are most of what there is to learn from.
        truncation: LambdaRank pairs need a document among the first so many places.
        sigma: slope of LambdaRank.
        hessian_floor: added to p(1 - p); without it a step has no bound.
        feature_floor: smallest sampling weight of a feature, relative to the mean.
        position_ridge: L2 penalty on the biases of positions, where the data has any, relative to their mean Hessian.
        prior_power: exponent of the prior on features (see `feature_prior`); 0 turns it off.
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
    phi_cap: int = 0
    draw: str = "uniform"
    truncation: int = 30
    sigma: float = 1.0
    hessian_floor: float = 0.05
    feature_floor: float = 0.05
    position_ridge: float = 0.01
    prior_power: float = 0.0
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
        check_choice("metric", self.metric, METRIC_KINDS)
        check_choice("method", self.method, METHODS)
        check_choice("draw", self.draw, DRAWS)
        for name in ("t", "subsample", "shrinkage"):
            check_unit_interval(name, getattr(self, name))
        for name in (
            "rounds", "batch", "candidates", "anchors", "cap", "truncation", "evaluate_every", "k", "smooth", "patience"
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
        for name in (*positive, "lam", "prior_power"):
            check_positive(name, getattr(self, name), zero=name not in positive)
            if getattr(self, name) > LARGEST:
                raise LGMMLError(f"`{name}` must be at most {LARGEST:g}, got {getattr(self, name)}")
        check_whole("phi_cap", self.phi_cap, zero=True)
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
    return dists.mul_(dists.neg().exp_()) if name == "paper" else kappa_of(dists, name)


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
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.phi)

    def select(self, index: Tensor) -> Learners:
        """Some of the metrics, by position or mask."""
        return Learners(*(getattr(self, field.name)[index] for field in fields(self)))

    def double(self) -> Learners:
        """The same metrics in float64."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Learners(**{name: x.double() if x.is_floating_point() else x for name, x in values.items()})

    @property
    def widths(self) -> Tensor:
        """``(K,)`` number of features of each metric."""
        return (self.support >= 0).sum(1)

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


@dataclass(frozen=True)
class BoostState:
    """Everything a later call needs to go on as if it had never stopped.

    Attributes:
        round: rounds done.
        scores: ``(N,)`` float64 scores of the training documents, in the fit's own order.
        valid_scores: the same for the validation documents; empty without any.
        learners: the metrics so far.
        evaluated: rounds done at each evaluation.
        train_ndcg: NDCG of the training queries at each evaluation.
        valid_ndcg: NDCG of the validation queries; empty without any.
        best_round: rounds done at the best smoothed validation NDCG.
        best_value: that NDCG.
        idle: rounds in a row that found no metric worth adding.
        identity: what the fit belongs to (settings, seed, sizes of the data); a resume with another is refused.
        position_bias: ``(P,)`` float64 what being shown at each position adds to a score; None without positions.
        best_bias: the same at the best round.
        valid_measure: the measure that decides, at each evaluation, where it is another than NDCG.
    """

    round: int
    scores: Tensor
    valid_scores: Tensor
    learners: Learners
    evaluated: tuple[int, ...] = ()
    train_ndcg: tuple[float, ...] = ()
    valid_ndcg: tuple[float, ...] = ()
    best_round: int = 0
    best_value: float = float("-inf")
    idle: int = 0
    identity: str = ""
    position_bias: Tensor | None = None
    best_bias: Tensor | None = None
    valid_measure: tuple[float, ...] = ()

    def export(self) -> dict[str, Any]:
        """Tensors and primitives, fit for ``torch.save`` and ``weights_only=True``.

        Scores are left out: they follow from the metrics, and the size and the number of processes would be theirs.
        """
        left_out = ("learners", "scores", "valid_scores")
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        plain["learners"] = {field.name: getattr(self.learners, field.name) for field in fields(self.learners)}
        return plain

    @classmethod
    def load(cls, exported: dict[str, Any]) -> Self:
        """The state that `export` wrote; a fit that goes on from it adds its scores up again."""
        plain = dict(exported)
        learners = Learners(**plain.pop("learners"))
        none = torch.empty(0, dtype=torch.float64)
        for name in ("evaluated", "train_ndcg", "valid_ndcg", "valid_measure"):
            plain[name] = tuple(plain.get(name, ()))
        return cls(learners=learners, scores=none, valid_scores=none, **plain)

    def evaluated_with(
        self, train: float, valid: float | None, *, smooth: int, measured: float | None = None
    ) -> BoostState:
        """The state after an evaluation; the best round moves when the average of the last ones is better.

        What is averaged is NDCG, or the measure that was asked for instead.
        """
        after = replace(self, evaluated=(*self.evaluated, self.round), train_ndcg=(*self.train_ndcg, train))
        if valid is None:
            return replace(after, best_round=self.round, best_bias=self.position_bias)
        after = replace(after, valid_ndcg=(*self.valid_ndcg, valid))
        if measured is not None:
            after = replace(after, valid_measure=(*self.valid_measure, measured))
        last = (after.valid_measure or after.valid_ndcg)[-smooth:]
        average = sum(last) / len(last)
        if not average > self.best_value:
            return after
        return replace(after, best_round=self.round, best_value=average, best_bias=self.position_bias)
