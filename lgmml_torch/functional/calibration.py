"""Scores that mean the same in every list: a map from a score to the chance of each grade, and how far it is off."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from lgmml_torch.checks import DataError, LGMMLError, check_finite, check_positive, check_shape

_MOST_GRADES = 32  # different labels; of more, each is too rare to have a chance of its own
_MOST_DOCUMENTS = 1 << 18  # that a map is fitted to: more do not change four numbers


@dataclass(frozen=True)
class GradeMap:
    r"""The chance of each grade of a document, from its score :math:`s`.

    .. math:: P(y \ge g_t \mid s) = 1 / (1 + e^{-a (s - c) - b_t}), \qquad a > 0, \quad b_1 > b_2 > \ldots

    So a higher score never has a lower chance, and lists keep their order. Chances within 1e-16 of 1 are equal.

    >>> found = GradeMap((0.0, 1.0, 2.0), centre=5.0, slope=1.0, cuts=(0.0, -1.0))
    >>> found.chances(torch.tensor([5.0]))
    tensor([[0.5000, 0.2311, 0.2689]], dtype=torch.float64)
    """

    grades: tuple[float, ...]  # the labels, lowest first
    centre: float  # c
    slope: float  # a
    cuts: tuple[float, ...]  # b of each grade but the lowest

    def __post_init__(self) -> None:
        check_positive("slope", self.slope)
        rising, falling = sorted(set(self.grades)), sorted(set(self.cuts), reverse=True)
        finite = all(map(math.isfinite, (*self.grades, self.centre, *self.cuts)))
        ordered = (rising, falling) == (list(self.grades), list(self.cuts))
        if not finite or not ordered or not 1 < len(rising) == len(falling) + 1:
            raise LGMMLError(f"`grades` must rise and `cuts` fall, one less, got {self.grades} and {self.cuts}")

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> GradeMap:
        """The map that ``dataclasses.asdict`` describes."""
        return cls(tuple(spec["grades"]), spec["centre"], spec["slope"], tuple(spec["cuts"]))

    def at_least(self, scores: ArrayLike, threshold: float = 1.0) -> Tensor:  # (N,)
        """The chance that the label is at least ``threshold``, which by default makes a document relevant.

        Raises:
            LGMMLError: no grade lies below the threshold, or none above.
        """
        grade = bisect_left(self.grades, threshold)
        if not 0 < grade < len(self.grades):
            raise LGMMLError(f"`threshold` must part the grades {list(self.grades)}, got {threshold:g}")
        levels, place = _levels(scores)
        return self._above(levels, self.cuts[grade - 1 : grade])[place, 0]

    def chances(self, scores: ArrayLike) -> Tensor:  # (N, G)
        """The chance of each grade."""
        levels, place = _levels(scores)
        above = self._above(levels, self.cuts)
        return (nn.functional.pad(above, (1, 0), value=1.0) - nn.functional.pad(above, (0, 1))).clamp_min(0)[place]

    def expected(self, scores: ArrayLike) -> Tensor:  # (N,)
        """The mean label of documents of these scores."""
        levels, place = _levels(scores)
        steps = torch.tensor(self.grades, dtype=torch.float64).diff()
        means = self.grades[0] + (self._above(levels, self.cuts) * steps).sum(dim=1)
        return means.cummax(0).values[place]

    def _above(self, levels: Tensor, cuts: Sequence[float]) -> Tensor:  # (L, T)
        """The chance of rising scores to lie above each cut, which never falls, whatever the rounding."""
        logits = self.slope * (levels[:, None] - self.centre) + torch.tensor(cuts, dtype=torch.float64)
        return torch.sigmoid(logits).cummax(0).values


def _levels(scores: ArrayLike) -> tuple[Tensor, Tensor]:  # (L,), (N,)
    """The different scores, rising, and which of them each document has: equal scores have equal chances."""
    return torch.unique(torch.as_tensor(scores).double().cpu(), return_inverse=True)  # type: ignore[no-any-return]


def fit_grade_map(scores: Tensor, labels: Tensor) -> GradeMap:  # (N,), (N,)
    r"""The map whose log losses over all cuts, :math:`\sum_t`, are least, plus half the square of a standardised slope.

    At the best :math:`b_t` the chances to lie above a cut add up to the number of documents that do, so these documents
    are calibrated as a whole. Of two grades it is logistic regression. The square keeps the slope finite where scores
    part the grades without a mistake. Every document counts once.

    Raises:
        DataError: labels that are all equal or of too many values; scores that are all equal or do not rise with them.
    """
    check_shape("labels", labels, (len(scores),))
    check_finite("scores", scores)
    every = len(scores) // _MOST_DOCUMENTS + 1
    labels, wide = labels[::every].double().cpu(), scores[::every].double().cpu()
    grades = torch.unique(labels)
    if not 1 < len(grades) <= _MOST_GRADES:
        raise DataError(f"`labels` must have 2 to {_MOST_GRADES} different values, got {len(grades)}")
    centre, scale = float(wide.mean()), float(wide.std())
    if not 0 < scale < math.inf:
        raise DataError("`scores` must differ between documents, got equal ones")
    slope, *cuts = _least_loss((wide - centre) / scale, (labels[:, None] >= grades[1:]).double()).tolist()
    if not 0 < slope / scale < math.inf:
        raise DataError("`scores` must rise with the labels over all queries, got scores that do not")
    return GradeMap(tuple(grades.tolist()), centre, slope / scale, tuple(cuts))


def _least_loss(scores: Tensor, above: Tensor) -> Tensor:  # (N,), (N, T) -> (1+T,)
    """Slope and cuts by Newton's method, with shorter steps where a whole one goes too far."""

    def loss(point: Tensor) -> float:
        logits = point[0] * scores[:, None] + point[1:]
        return float(nn.functional.softplus(logits).sub(above * logits).sum() + point[0].square() / 2)

    point = torch.cat([scores.new_zeros(1), above.mean(0).logit()])
    for _ in range(100):  # about ten are needed
        chances = torch.sigmoid(point[0] * scores[:, None] + point[1:])
        excess, spread = chances - above, chances * (1 - chances)
        gradient = torch.cat([(scores @ excess).sum() + point[:1], excess.sum(0)])
        curvature = torch.diag(torch.cat([(scores.square() @ spread).sum(0, keepdim=True) + 1, spread.sum(0)]))
        curvature[0, 1:] = curvature[1:, 0] = scores @ spread
        step = torch.linalg.solve(curvature, gradient)
        most = loss(point) * (1 + 1e-12)
        while loss(point - step) > most:
            step = step / 2
        point = point - step
        if float(step.abs().max()) < 1e-9:
            break
    return point


class Reliability(NamedTuple):
    """Chances beside what came true, in groups of equally many documents, lowest chances first."""

    chances: tuple[float, ...]  # the mean chance of each group
    shares: tuple[float, ...]  # the share of its documents of which it came true
    documents: tuple[int, ...]  # how many they are; equal chances stay together
    error: float  # the expected calibration error: by how much chance and share differ, mean over documents
    brier: float  # mean square of chance minus outcome, over all documents


def reliability(chances: Tensor, outcomes: Tensor, *, groups: int = 10) -> Reliability:  # (N,), (N,) bool
    """Compare chances with outcomes.

    >>> found = reliability(torch.tensor([0.1, 0.3, 0.5, 0.9]), torch.tensor([False, False, True, True]), groups=2)
    >>> found.shares, round(found.error, 4), round(found.brier, 4)
    ((0.0, 1.0), 0.25, 0.09)
    """
    check_positive("documents", len(chances))
    check_shape("outcomes", outcomes, (len(chances),))
    both = torch.stack([chances.double(), outcomes.double()], dim=1)
    group = torch.searchsorted(both[:, 0].sort().values, both[:, 0].contiguous()) * groups // len(both)
    _, group, counts = torch.unique(group, return_inverse=True, return_counts=True)
    means = torch.zeros(len(counts), 2, dtype=torch.float64).index_add(0, group, both) / counts[:, None]
    error = float((means.diff(dim=1).abs()[:, 0] * counts).sum() / len(both))
    mean_chances, shares = map(tuple, means.T.tolist())
    return Reliability(mean_chances, shares, tuple(counts.tolist()), error, float(both.diff(dim=1).square().mean()))
