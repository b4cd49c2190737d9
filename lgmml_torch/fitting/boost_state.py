"""What boosting has so far: the metrics chosen, the scores they give, and how the rounds went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from lgmml_torch.functional.distance import subspace_distances
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock


def paper_kernel_(dists: Tensor) -> Tensor:
    """``d e^{-d}``, overwriting its argument: the search spends most of its time here."""
    return dists.mul_(dists.neg().exp_())


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

    @property
    def widths(self) -> Tensor:
        """``(K,)`` number of features of each metric."""
        return (self.support >= 0).sum(1)

    def kernels(
        self,
        features: Tensor,  # (N, D)
    ) -> Tensor:  # (N, K)
        """κ of the scaled distances; only the columns of the features in use are copied."""
        used, place = torch.unique(self.support.clamp_min(0), return_inverse=True)
        dists = subspace_distances(features[:, used], place, self.anchors, self.factors)
        return paper_kernel_(dists.div_(self.scales))

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

    def export(self) -> dict[str, Any]:
        """Tensors and primitives, fit for ``torch.save`` and ``weights_only=True``."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "learners"}
        plain["learners"] = {field.name: getattr(self.learners, field.name) for field in fields(self.learners)}
        return plain

    @classmethod
    def load(cls, exported: dict[str, Any]) -> Self:
        """The state that `export` wrote."""
        plain = dict(exported)
        learners = Learners(**plain.pop("learners"))
        for name in ("evaluated", "train_ndcg", "valid_ndcg"):
            plain[name] = tuple(plain[name])
        return cls(learners=learners, **plain)

    def evaluated_with(self, train: float, valid: float | None, *, smooth: int) -> BoostState:
        """The state after an evaluation; the best round moves when the average of the last ones is better."""
        after = replace(self, evaluated=(*self.evaluated, self.round), train_ndcg=(*self.train_ndcg, train))
        if valid is None:
            return replace(after, best_round=self.round)
        after = replace(after, valid_ndcg=(*self.valid_ndcg, valid))
        last = after.valid_ndcg[-smooth:]
        average = sum(last) / len(last)
        return replace(after, best_round=self.round, best_value=average) if average > self.best_value else after
