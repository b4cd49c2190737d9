"""Weights for the sum of several systems' scores, chosen by NDCG@10 on lists that none of them was fitted to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, check_finite, check_offsets, check_positive, check_shape
from lgmml_torch.functional.ranking.measures import ndcg
from lgmml_torch.segments import segment_ids, segment_max, segment_min, segment_sum


def combination_weights(
    scores: Tensor,  # (M, N)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    *,
    tie_order: Tensor | None = None,  # (N,)
    steps: int = 20,
) -> Tensor:  # (M,)
    r"""Nonnegative weights :math:`w` for :math:`\sum_m w_m s_m`, by greedy selection with replacement.

    Scores are first brought to one scale: the mean over the lists of their standard deviation within the list. The best
    system by itself comes first; then, step by step, the system is added, perhaps again, with which the sum ranks best,
    and the best sum on the way is kept. So no system alone ranks these lists better than the result. Where two are
    level, the earlier system and the shorter sum win.

    Args:
        scores: Finite scores of every document, a row for each system.
        labels: Relevance of each document.
        offsets: Boundaries of the lists.
        tie_order: As in :func:`~lgmml_torch.functional.ranking.measures.ndcg`.
        steps: How many summands are tried, the first among them: weights are multiples of 1/steps or coarser.

    Returns:
        Weights for the scores as they were given, float64; 0 for scores that never differ within a list.

    Raises:
        DataError: No list has a relevant document.
        LGMMLError: Shapes or offsets that do not fit, scores that are not finite, no steps.

    >>> scores = torch.tensor([[30.0, 20.0, 10.0], [1.0, 3.0, 2.0]])  # the second has the relevant document first
    >>> combination_weights(scores, torch.tensor([0, 1, 0]), torch.tensor([0, 3]))
    tensor([0.0000, 1.2247], dtype=torch.float64)
    """
    check_positive("steps", steps)
    check_shape("scores", scores, (None, len(labels)))
    check_offsets(offsets, len(labels))
    check_finite("scores", scores)
    wide = scores.detach().double()
    spread = mean_deviations(wide, offsets)
    units = torch.eye(len(spread), dtype=spread.dtype, device=spread.device)[spread > 0]  # earlier systems first

    def weights(counts: Tensor) -> Tensor:
        return torch.where(spread > 0, counts / counts.sum().clamp_min(1) / spread, 0.0)

    def value(counts: Tensor) -> float:
        return float(ndcg(weighted_sum(weights(counts), wide), labels, offsets, k=10, tie_order=tie_order))

    counts = kept = torch.zeros_like(spread)
    if math.isnan(value(counts)):
        raise DataError("`labels` must have a list with a relevant document to choose weights by, got none")
    best = -1.0
    for _ in range(steps if len(units) else 0):
        tried = [(value(counts + unit), counts + unit) for unit in units]
        found, counts = max(tried, key=lambda item: item[0])
        if found > best:
            best, kept = found, counts
    return weights(kept)


def weighted_sum(
    weights: Tensor,  # (M,)
    scores: Tensor,  # (M, N)
) -> Tensor:  # (N,)
    """Σ wₘ sₘ, one after the other: equal columns give equal sums, wherever they stand."""
    total = scores.new_zeros(scores.shape[1])
    for weight, row in zip(weights, scores, strict=True):
        total = total + weight * row
    return total


def mean_deviations(
    scores: Tensor,  # (M, N)
    offsets: Tensor,  # (Q+1,)
) -> Tensor:  # (M,)
    """Standard deviation within lists, mean over the lists; exactly 0 for scores that never differ within one.

    >>> mean_deviations(torch.tensor([[0.1, 0.1, 0.7], [1.0, 3.0, 9.0]]), torch.tensor([0, 2, 3]))
    tensor([0.0000, 0.5000])
    """
    sizes = offsets.diff().clamp_min(1).unsqueeze(1)
    columns = scores.T
    gaps = columns - (segment_sum(columns, offsets) / sizes)[segment_ids(offsets)]
    deviations = (segment_sum(gaps.square(), offsets) / sizes).sqrt().mean(dim=0)
    ranges = [segment_max(row, offsets, empty=0.0) - segment_min(row, offsets, empty=0.0) for row in scores]
    varies = [bool((width > 0).any()) for width in ranges]
    return torch.where(torch.tensor(varies, dtype=torch.bool, device=scores.device), deviations, 0.0)
