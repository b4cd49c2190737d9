"""Ranking metrics that accumulate over batches and processes, for training loops and evaluation.

Only sums and counts are kept, so the memory does not grow with the data and shards add up: whichever way the
queries are spread over batches and processes, the result is the mean over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.measures import Function, Measure, measures_of, rank_metrics
from lgmml_torch.functional.presets import Preset, find_preset


@dataclass(frozen=True)
class _MetricSummary:
    """A metric's mean, the queries it was taken over, those it left out, and what it means."""

    value: float
    counted: int
    skipped: int
    definition: str


class RankingMetrics(Metric):
    """Means of several ranking metrics over queries, from one sort per list.

    Each query counts once. Queries that a metric leaves out (see :mod:`lgmml_torch.functional.presets`) are
    counted as skipped; a metric that has counted no query yet is NaN.

    Args:
        metrics: Names such as ``"ndcg@10"`` or ``"map"``, or functions of one's own, see
            :class:`~lgmml_torch.functional.measures.Measure`.
        preset: Name of a set of rules, or a :class:`~lgmml_torch.functional.presets.Preset`.
        threshold: Label from which a document is relevant, instead of the preset's.
        max_grade: Highest grade of the data set; ERR needs it.
        kwargs: Options of :class:`torchmetrics.Metric`.

    Raises:
        LGMMLError: Unknown metric or preset, or no metric at all.

    >>> metric = RankingMetrics(["ndcg@10", "precision@1"])
    >>> metric.update(torch.tensor([2.0, 1.0, 3.0]), torch.tensor([0, 1, 0]), torch.tensor([0, 2, 3]))
    >>> metric.compute()
    {'ndcg@10': tensor(0.6309, dtype=torch.float64), 'precision@1': tensor(0., dtype=torch.float64)}
    >>> metric.summary()["ndcg@10"].counted, metric.summary()["ndcg@10"].skipped
    (1, 1)
    """

    is_differentiable: bool = False
    higher_is_better: bool = True
    full_state_update: bool = False

    total: Tensor  # (M,) sum over the counted queries
    counted: Tensor  # (M,) how many they are
    queries: Tensor  # () queries seen

    def __init__(
        self,
        metrics: Sequence[str | Function | Measure] = ("ndcg@10", "map"),
        *,
        preset: str | Preset = "default",
        threshold: float | None = None,
        max_grade: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.measures: dict[str, Measure] = {}
        for measure in measures_of(metrics):
            self.measures[measure.name] = measure
        self.names = tuple(self.measures)
        if not self.names:
            raise LGMMLError("`metrics` must hold at least one name, got none")
        self.preset = find_preset(preset)
        self.threshold = threshold
        self.max_grade = max_grade
        # No lists at all: a wrong name or a missing grade should fail here, not after the first epoch.
        self._per_query(torch.zeros(0), torch.zeros(0), torch.zeros(1, dtype=torch.int64), None)
        self.add_state("total", torch.zeros(len(self.names), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("counted", torch.zeros(len(self.names), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("queries", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(
        self,
        scores: Tensor,  # (N,)
        labels: Tensor,  # (N,)
        offsets: Tensor,  # (Q+1,)
        tie_order: Tensor | None = None,  # (N,)
    ) -> None:
        """Add the lists of a batch; a query's documents must not be spread over batches."""
        values = self._per_query(scores, labels, offsets, tie_order)
        self.total += values.nansum(dim=1)
        self.counted += (~values.isnan()).sum(dim=1)
        self.queries += values.shape[1]

    def compute(self) -> dict[str, Tensor]:
        """Mean of each metric over the queries it counts, over all processes."""
        return dict(zip(self.names, self.total / self.counted, strict=True))

    def summary(self) -> dict[str, _MetricSummary]:
        """Means with the queries counted and skipped, over all processes, and the definitions in words."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, distributed_available=self.distributed_available_fn):
            means = (self.total / self.counted).tolist()
            counted = self.counted.tolist()
            queries = int(self.queries)
        found = {}
        for name, mean, count in zip(self.names, means, counted, strict=True):
            found[name] = _MetricSummary(mean, count, queries - count, self.definition(name))
        return found

    def definition(self, name: str) -> str:
        """The metric's rules in one line, see :func:`~lgmml_torch.functional.presets.describe`."""
        return self.measures[name].definition(self.preset, threshold=self.threshold)

    def _per_query(self, scores: Tensor, labels: Tensor, offsets: Tensor, tie_order: Tensor | None) -> Tensor:  # (M, Q)
        found = rank_metrics(
            scores,
            labels,
            offsets,
            metrics=list(self.measures.values()),
            preset=self.preset,
            threshold=self.threshold,
            max_grade=self.max_grade,
            tie_order=tie_order,
        )
        return torch.stack([found[name] for name in self.names])
