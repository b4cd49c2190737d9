"""Losses of ranked lists beside WARP: LambdaRank's gradients and Hessians, the listwise softmax, and losses of ranks.

A LambdaRank pair is two documents of one query with different labels, at least one of them among the ``truncation``
best by score. Sorted by score, every such pair joins a row to one of the first ``truncation`` rows of its list, so all
pairs fit in ``(N, truncation)`` matrices, built a few rows at a time: memory does not grow with the square of a list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lgmml_torch.checks import check_offsets, check_positive, check_shape
from lgmml_torch.functional.presets import log_discounts
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import (
    argsort_segments,
    centre_segments,
    positions,
    row_slices,
    segment_ids,
    segment_max,
    segment_sum,
)

_CHUNK_PAIRS = 65_536  # pairs in memory at a time: each float32 temporary fits in a core's second-level cache


def _ideal_dcg(labels: Tensor, offsets: Tensor, truncation: int) -> Tensor:  # (N,), (Q+1,) -> (Q,)
    """DCG of the best order of each list, gains ``2^y - 1``, its first ``truncation`` places."""
    place = positions(offsets)
    gains = torch.exp2(labels[argsort_segments(labels, offsets, descending=True)]) - 1
    return segment_sum(torch.where(place < truncation, gains * log_discounts(place).to(gains), 0.0), offsets)


def lambda_gradients(
    scores: Tensor,  # (N,) higher is better; equal scores rank in row order
    labels: Tensor,  # (N,) of gain ``2^y - 1``
    offsets: Tensor,  # (Q+1,)
    *,
    truncation: int = 30,  # pairs need a document among the first ``truncation`` places
    sigma: float = 1.0,  # slope of the pairwise probability
    floor: float = 0.05,  # added to ``p (1 - p)``
    weights: Tensor | None = None,  # (N,) what the relevance of each document counts; 1 when not given
) -> tuple[Tensor, Tensor]:  # (N,), (N,)
    r"""Negative gradient and diagonal Hessian of the LambdaRank loss.

    With :math:`p_{ij} = 1 / (1 + e^{\sigma (f_i - f_j)})` for a pair with :math:`y_i > y_j` and
    :math:`w_{ij} = |\Delta \mathrm{NDCG}_{ij}|`, the change of NDCG when the two swap places,

    .. math:: g_i = \sum_j \sigma w_{ij} p_{ij} - \sum_j \sigma w_{ji} p_{ji}, \qquad
              h_i = \sum_j \sigma^2 w_{ij} (p_{ij} (1 - p_{ij}) + \mathrm{floor})

    where the second sum runs over all pairs of ``i``. With ``weights``, a pair counts as often as the weight of its
    better document says; the ideal DCG stays what the labels make it. ``g`` points towards better scores and sums to
    zero over every list. Without ``floor`` the Hessian of well separated pairs vanishes and a Newton step has no bound.

    Limiting cases: lists with one document, equal labels or no gain have zero gradients; ``truncation`` at least the
    length of the list uses every pair.

    >>> g, h = lambda_gradients(torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([0, 2]))
    >>> g  # one pair, weight 1 - 1 / log2(3), probability one half
    tensor([-0.1845,  0.1845])
    """
    check_shape("labels", labels, scores.shape)
    check_offsets(offsets, len(scores))
    if weights is not None:
        check_shape("weights", weights, scores.shape)
    check_positive("truncation", truncation)
    check_positive("sigma", sigma)
    check_positive("floor", floor, zero=True)
    ideal = _ideal_dcg(labels, offsets, truncation)
    order = argsort_segments(scores, offsets, descending=True)
    f, place, query = sigma * scores[order], positions(offsets), segment_ids(offsets)
    # Divided by the ideal here, so that a pair needs no look-up of it; NDCG skips a list without gain, so does this.
    inverse = torch.where(ideal > 0, 1 / ideal, 0.0).to(f.dtype)
    gains = (torch.exp2(labels[order].to(f.dtype)) - 1) * inverse[query]
    width = 0
    if len(offsets) > 1:
        width = min(truncation, int(offsets.diff().max()))
    if not width:
        return torch.zeros_like(scores), torch.zeros_like(scores)
    w = None if weights is None else weights[order].to(f.dtype)
    grad, hess = _sums_over_pairs(f, gains, w, offsets, place, query, width, floor)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    return sigma * grad[back], sigma**2 * hess[back]


def _sums_over_pairs(
    f: Tensor,  # (N,) sorted within lists
    gains: Tensor,  # (N,)
    weights: Tensor | None,  # (N,)
    offsets: Tensor,  # (Q+1,)
    place: Tensor,  # (N,)
    query: Tensor,  # (N,)
    width: int,
    floor: float,
) -> tuple[Tensor, Tensor]:  # (N,), (N,)
    """Gradient and Hessian of sorted rows for a slope of 1, some rows at a time against ``width`` first places."""
    slots = torch.arange(width, device=f.device)
    discounts, head_discounts = log_discounts(place).to(f), log_discounts(slots).to(f)
    # Row numbers of the first places (Q, T); a short list repeats its last row, which no row of it stands below.
    heads = torch.minimum(offsets[:-1, None] + slots, offsets[1:, None] - 1)
    head_f, head_gains = f[heads], gains[heads]
    head_weights = None if weights is None else weights[heads]
    grad, hess = torch.zeros_like(f), torch.zeros_like(f)
    for rows in row_slices(len(f), width, _CHUNK_PAIRS):
        lists = query[rows]
        gap = head_gains[lists].sub_(gains[rows, None])  # (B, T)
        # A pair belongs to its lower row: slots at or below the row itself are the same pair again, or padding.
        weight = (head_discounts - discounts[rows, None]).clamp_min_(0).mul_(gap)
        if weights is not None and head_weights is not None:
            weight.mul_(torch.where(gap > 0, head_weights[lists], weights[rows, None]))
        p = head_f[lists].sub_(f[rows, None]).mul_(gap.sign_()).neg_().sigmoid_()
        lam = weight * p  # signed: positive when the higher place has the higher label
        h = weight.mul_(gap).mul_(torch.sub(1, p).mul_(p).add_(floor))
        grad[rows] -= lam.sum(dim=1)
        hess[rows] += h.sum(dim=1)
        head = heads[lists].flatten()
        grad.index_add_(0, head, lam.flatten())
        hess.index_add_(0, head, h.flatten())
    return grad, hess


def softmax_loss(
    scores: Tensor,  # (N,)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    *,
    weights: Tensor | None = None,  # (N,)
) -> Tensor:  # (Q,)
    r"""Cross entropy between the gains of each list and the softmax of its scores.

    .. math:: \ell_q = -\sum_{i \in q} \frac{2^{y_i} - 1}{\sum_{j \in q} (2^{y_j} - 1)} \log \frac{e^{f_i}}{
              \sum_{j \in q} e^{f_j}}

    Differentiable in the scores; its gradient is softmax minus target. Lists without any gain, and empty ones, have a
    loss of 0. Shifting all scores of a list changes nothing. With ``weights`` each term of the outer sum counts as
    often as the weight of its document says; the gains are shared out as without, so the same weight for a whole list
    is a factor on its loss.

    >>> softmax_loss(torch.zeros(3), torch.tensor([0, 1, 0]), torch.tensor([0, 2, 3]))  # log 2, and nothing to gain
    tensor([0.6931, 0.0000])
    """
    check_shape("labels", labels, scores.shape)
    check_offsets(offsets, len(scores))
    ids = segment_ids(offsets)
    gains = torch.exp2(labels.to(scores.dtype)) - 1
    total = segment_sum(gains, offsets)
    targets = gains / torch.where(total > 0, total, 1.0)[ids]
    if weights is not None:
        check_shape("weights", weights, scores.shape)
        targets = targets * weights.to(scores.dtype)
    highest = segment_max(scores.detach(), offsets, empty=0.0)[ids]
    sums = segment_sum((scores - highest).exp(), offsets)
    log_sums = sums.log()[ids] + highest
    return segment_sum(targets * (log_sums - scores), offsets)


def spearman_loss(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:  # (N,), (N,), (Q+1,) -> (Q,)
    r"""Distance of soft ranks by score from ranks by label: one minus a soft Spearman correlation ρ.

    With the soft rank :math:`\tilde r_i = \tfrac12 + \sum_{j \in q} 1 / (1 + e^{f_i - f_j})`, and :math:`r_i` the rank
    by label, the mean rank for equal labels,

    .. math:: \ell_q = \sum_{i \in q} (\tilde r_i - r_i)^2 / \big(2 \sum_{i \in q} (r_i - \bar r)^2\big)

    Limiting cases: 1 - ρ for scores far apart and labels that differ; 0 for lists of one document or one label. A list
    of n documents takes n² numbers.

    >>> spearman_loss(torch.tensor([90.0, 50.0, 10.0, 1.0]), torch.tensor([2, 0, 1, 1]), torch.tensor([0, 3, 4]))
    tensor([0.5000, 0.0000])
    """
    check_shape("labels", labels, scores.shape)
    check_offsets(offsets, len(scores))
    labels, sizes = labels.to(scores.dtype), offsets.diff().tolist()
    values = [scores.new_zeros(0)]
    for f, y in zip(torch.split(scores, sizes), torch.split(labels, sizes), strict=True):
        soft = (f - f[:, None]).sigmoid().sum(dim=1)  # both ranks without the half, which cancels
        ranks = torch.heaviside(y - y[:, None], y.new_tensor(0.5)).sum(dim=1)
        spread = 2 * (ranks - ranks.mean()).square().sum()
        gap = (soft - ranks).square().sum()
        values.append(torch.where(spread > 0, gap / spread.clamp_min(1e-12), 0.0)[None])
    return torch.cat(values)


def label_difference_loss(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:  # (N,), (N,), (Q+1,) -> (Q,)
    r"""Squared error of score differences as estimates of label differences, the mean over all pairs of a list.

    .. math:: \ell_q = \frac{2}{n (n - 1)} \sum_{i < j} ((f_i - f_j) - (y_i - y_j))^2
              = \frac{2}{n - 1} \sum_i (e_i - \bar e)^2, \qquad e_i = f_i - y_i

    The second form needs no pairs. Limiting cases: 0 where scores are the labels up to a shift, and for lists of one
    document; in lists of one label it pulls the scores together.

    >>> label_difference_loss(torch.tensor([0.0, -1.0, 5.0]), torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3]))
    tensor([1., 0.])
    """
    check_shape("labels", labels, scores.shape)
    check_offsets(offsets, len(scores))
    errors = centre_segments(scores - labels.to(scores.dtype), offsets)
    return 2 * segment_sum(errors.square(), offsets) / (offsets.diff() - 1).clamp_min(1)


def num_positions(data: RankingData) -> int:
    """Positions from 0 to the last one at which a document of any process was shown; 0 without positions."""
    if data.positions is None or not len(data.all_lists):
        return 0
    return 1 + int(data.all_lists.per_query(segment_max(data.positions, data.offsets, empty=-1)).max())


def bias_of(bias: Tensor, positions: Tensor) -> Tensor:  # (P,), (N,) -> (N,)
    """The bias of each document's position; 0 for one beyond all that were trained on."""
    known = torch.cat([bias, bias.new_zeros(1)])
    return known[positions.clamp_max(len(bias))]


def position_curve(bias: Tensor, data: RankingData) -> dict[int, float]:  # (P,)
    """The bias of each position that occurs, against that of the first: adding a number to all of them means nothing.

    >>> data = RankingData.from_arrays([[1.0], [2.0]], [1, 0], qid=[7, 7], positions=[1, 3])
    >>> position_curve(torch.tensor([0.0, 2.0, 0.0, 0.5]), data)
    {1: 0.0, 3: -1.5}
    """
    if data.positions is None:
        return {}
    shown = torch.unique(data.positions).tolist()
    values = bias.detach().tolist()
    return {position: values[position] - values[shown[0]] for position in shown}
