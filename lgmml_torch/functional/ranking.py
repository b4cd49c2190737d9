"""Ranking metrics over ragged lists: NDCG, DCG, MAP, MRR, ERR, precision and recall.

A higher score ranks first; scores may be negative or infinite. Each function takes one cutoff, several or none (the
whole list) and gives the mean over the queries, or with ``reduction="none"`` a value per query with NaN for the queries
that are skipped; means run over the others. :func:`rank_metrics` gives several metrics from the same sort. What a name
means is a preset's matter: see :class:`Preset` and :func:`describe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_choice
from lgmml_torch.functional.evaluation import rank_metrics
from lgmml_torch.functional.presets import METRICS, PRESETS, Preset, describe

__all__ = [
    "METRICS",
    "PRESETS",
    "Preset",
    "average_precision",
    "dcg",
    "describe",
    "err",
    "ndcg",
    "precision",
    "rank_metrics",
    "recall",
    "reciprocal_rank",
]

Cutoffs = int | None | Sequence[int | None]
Reduction = Literal["mean", "none"]


def dcg(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    *,
    k: Cutoffs = None,
    preset: str | Preset = "default",
    tie_order: Tensor | None = None,  # (N,)
    reduction: Reduction = "mean",
) -> Tensor:  # () or (len(k),); (Q,) or (Q, len(k)) with reduction="none"
    """Discounted cumulative gain, ``sum over ranks i <= k of gain(y_i) * discount(i)``.

    >>> dcg(torch.tensor([2.0, 1.0]), torch.tensor([1, 2]), torch.tensor([0, 2]))  # 1 + 3 / log2(3)
    tensor(2.8928, dtype=torch.float64)
    """
    return _single("dcg", scores, labels, offsets, k, preset, None, None, tie_order, reduction)


def ndcg(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    *,
    k: Cutoffs = None,
    preset: str | Preset = "default",
    tie_order: Tensor | None = None,  # (N,)
    reduction: Reduction = "mean",
) -> Tensor:  # () or (len(k),); (Q,) or (Q, len(k)) with reduction="none"
    """DCG over the DCG of the best order, in [0, 1]; lists without any gain follow the preset's rule.

    >>> scores, labels = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1, 2, 0])
    >>> ndcg(scores, labels, torch.tensor([0, 2, 3]), k=[1, 10], reduction="none")
    tensor([[0.3333, 0.7967],
            [   nan,    nan]], dtype=torch.float64)
    >>> ndcg(scores, labels, torch.tensor([0, 2, 3]), k=10, preset="lightgbm")
    tensor(0.8984, dtype=torch.float64)
    """
    return _single("ndcg", scores, labels, offsets, k, preset, None, None, tie_order, reduction)


def average_precision(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    *,
    k: Cutoffs = None,
    preset: str | Preset = "default",
    threshold: float | None = None,
    tie_order: Tensor | None = None,  # (N,)
    reduction: Reduction = "mean",
) -> Tensor:  # () or (len(k),); (Q,) or (Q, len(k)) with reduction="none"
    """Mean over the relevant documents of the precision at their ranks; with ``k``, ranks after k add nothing.

    >>> average_precision(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1, 0, 1]), torch.tensor([0, 3]))  # (1 + 2/3) / 2
    tensor(0.8333, dtype=torch.float64)
    """
    return _single("map", scores, labels, offsets, k, preset, threshold, None, tie_order, reduction)


def reciprocal_rank(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    *,
    k: Cutoffs = None,
    preset: str | Preset = "default",
    threshold: float | None = None,
    tie_order: Tensor | None = None,  # (N,)
    reduction: Reduction = "mean",
) -> Tensor:  # () or (len(k),); (Q,) or (Q, len(k)) with reduction="none"
    """One over the rank of the first relevant document, 0 if there is none up to rank k.

    >>> reciprocal_rank(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 0, 1]), torch.tensor([0, 3]), k=[2, 3])
    tensor([0.0000, 0.3333], dtype=torch.float64)
    """
    return _single("mrr", scores, labels, offsets, k, preset, threshold, None, tie_order, reduction)


def err(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    *,
    k: Cutoffs = None,
    preset: str | Preset = "default",
    max_grade: float | None = None,
    tie_order: Tensor | None = None,  # (N,)
    reduction: Reduction = "mean",
) -> Tensor:  # () or (len(k),); (Q,) or (Q, len(k)) with reduction="none"
    """Expected reciprocal rank: a reader goes down the list and stops at label y with chance (2^y - 1) / 2^max_grade.

    ``max_grade`` is the data set's highest grade: with the list's own, equal lists would get unequal values.

    >>> err(torch.tensor([2.0, 1.0]), torch.tensor([1, 2]), torch.tensor([0, 2]), max_grade=2)  # 1/4 + 3/4 * 3/4 / 2
    tensor(0.5312, dtype=torch.float64)
    """
    return _single("err", scores, labels, offsets, k, preset, None, max_grade, tie_order, reduction)


def precision(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    *,
    k: Cutoffs = None,
    preset: str | Preset = "default",
    threshold: float | None = None,
    tie_order: Tensor | None = None,  # (N,)
    reduction: Reduction = "mean",
) -> Tensor:  # () or (len(k),); (Q,) or (Q, len(k)) with reduction="none"
    """Share of relevant documents among the first k; a list shorter than k is filled up with irrelevant ones.

    >>> precision(torch.tensor([2.0, 1.0]), torch.tensor([1, 0]), torch.tensor([0, 2]), k=[1, 5])
    tensor([1.0000, 0.2000], dtype=torch.float64)
    """
    return _single("precision", scores, labels, offsets, k, preset, threshold, None, tie_order, reduction)


def recall(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    *,
    k: Cutoffs = None,
    preset: str | Preset = "default",
    threshold: float | None = None,
    tie_order: Tensor | None = None,  # (N,)
    reduction: Reduction = "mean",
) -> Tensor:  # () or (len(k),); (Q,) or (Q, len(k)) with reduction="none"
    """Share of the list's relevant documents found among the first k.

    >>> recall(torch.tensor([2.0, 1.0]), torch.tensor([1, 1]), torch.tensor([0, 2]), k=1)
    tensor(0.5000, dtype=torch.float64)
    """
    return _single("recall", scores, labels, offsets, k, preset, threshold, None, tie_order, reduction)


def _single(
    kind: str,
    scores: Tensor,
    labels: Tensor,
    offsets: Tensor,
    k: Cutoffs,
    preset: str | Preset,
    threshold: float | None,
    max_grade: float | None,
    tie_order: Tensor | None,
    reduction: Reduction,
) -> Tensor:
    check_choice("reduction", reduction, ("mean", "none"))
    several = isinstance(k, Sequence)
    cutoffs: Sequence[int | None] = k if isinstance(k, Sequence) else [k]
    for cutoff in cutoffs:
        if cutoff is not None and (isinstance(cutoff, bool) or not isinstance(cutoff, int) or cutoff < 1):
            raise LGMMLError(f"`k` must be None or whole numbers of at least 1, got {cutoff!r}")
    names = [kind if cutoff is None else f"{kind}@{cutoff}" for cutoff in cutoffs]
    if not names:
        raise LGMMLError("`k` must hold at least one cutoff, got none")
    found = rank_metrics(
        scores,
        labels,
        offsets,
        metrics=names,
        preset=preset,
        threshold=threshold,
        max_grade=max_grade,
        tie_order=tie_order,
    )
    values = torch.stack([found[name] for name in names], dim=-1)
    values = values if reduction == "none" else values.nanmean(dim=0)
    return values if several else values[..., 0]
