"""Separation oracles of metric learning to rank: the order of the database that violates the margin most.

For a query with n₊ relevant and n₋ other documents and scores s = −distance², an order y has the value
Σ y_ij·(s_i−s_j)/(n₊n₋), where i is relevant, j another document, and y_ij = 1 if i stands before j, else −1. The
oracles maximise loss(y) + value(y). Given how many others stand before each relevant document, both parts are best
with each group sorted by score, so only the interleavings of the two sorted groups need to be searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lgmml_torch.functional.examples import ExampleSet, pair_scatter, squared_distances


@dataclass(frozen=True)
class WorstOrder:
    """The most violating order of each query.

    The difference of the feature maps of the right and of this order is Σᵢ c_i·φ_i with φ_i = −(q−x_i)(q−x_i)ᵀ; the
    coefficients c of a query sum to zero. Both are zero for queries where no order is wrong.
    """

    coefficients: Tensor  # (Q, N)
    loss: Tensor  # (Q,)


Oracle = Callable[[Tensor, Tensor, Tensor], WorstOrder]


def worst_auc_order(
    scores: Tensor,  # (Q, N)
    relevant: Tensor,  # (Q, N) bool
    others: Tensor,  # (Q, N) bool
) -> WorstOrder:
    """Loss = share of discordant pairs; each pair decides for itself: discordant pays when s_i − s_j < ½.

    >>> mask = torch.tensor([[True, False]])
    >>> worst_auc_order(torch.tensor([[0.2, 0.0]]), mask, ~mask)
    WorstOrder(coefficients=tensor([[ 2., -2.]]), loss=tensor([1.]))
    """
    n_pos, n_neg = relevant.sum(1, keepdim=True), others.sum(1, keepdim=True)
    lowered = (scores - 0.5).contiguous()  # one array for both counts, so that rounding cannot tell them apart
    low_sorted = lowered.masked_fill(~relevant, torch.inf).sort(dim=1).values
    high_sorted = scores.masked_fill(~others, -torch.inf).sort(dim=1).values
    others_before = scores.shape[1] - torch.searchsorted(high_sorted, lowered, right=True)
    relevant_after = torch.searchsorted(low_sorted, scores.contiguous(), right=False)
    counts = (others_before * relevant - relevant_after * others) * (n_neg > 0)
    pairs = (n_pos * n_neg).clamp_min(1).to(scores.dtype)  # integers would divide in float32
    return WorstOrder(
        coefficients=2 * counts / pairs,
        loss=(others_before * relevant).sum(1) / pairs[:, 0] * (n_neg[:, 0] > 0),
    )


def worst_map_order(
    scores: Tensor,  # (Q, N)
    relevant: Tensor,  # (Q, N) bool
    others: Tensor,  # (Q, N) bool
) -> WorstOrder:
    """Loss = 1 − average precision, by dynamic programming over the relevant documents in order of score.

    If b others stand before the k-th relevant document, its part of the maximum is
    g_k(b) = −k/(k+b)/n₊ + Σ_j ±(s_k−s_j)/(n₊n₋), with minus for the b best others; the b_k must not decrease:
    f_k(b) = g_k(b) + max over b′ ≤ b of f_{k−1}(b′). O(n₊·n₋) per query after sorting.

    >>> mask = torch.tensor([[True, False]])
    >>> worst_map_order(torch.tensor([[0.2, 0.0]]), mask, ~mask)
    WorstOrder(coefficients=tensor([[ 2., -2.]]), loss=tensor([0.5000]))
    """
    n_pos, n_neg = relevant.sum(1, keepdim=True), others.sum(1, keepdim=True)
    pairs = (n_pos * n_neg).clamp_min(1).to(scores.dtype)  # integers would divide in float32
    P, M = int(n_pos.max()), int(n_neg.max())
    pos_scores, pos_rows = _best_first(scores, relevant, P)
    neg_scores, neg_rows = _best_first(scores, others, M)
    b = torch.arange(M + 1, device=scores.device)
    ahead = torch.nn.functional.pad(neg_scores.cumsum(1), (1, 0))  # (Q, M+1) sum of the b best others
    balance = ahead.gather(1, n_neg) - 2 * ahead
    best = torch.zeros_like(ahead)
    came_from = []
    for k in range(1, P + 1):
        gain = ((n_neg - 2 * b) * pos_scores[:, k - 1 : k] - balance) / pairs - k / (
            k + b.to(scores.dtype)
        ) / n_pos.clamp_min(1)
        best, index = best.cummax(1) if k > 1 else (best, b.expand_as(best))
        best = best + gain.where(k <= n_pos, 0.0)
        best = best.masked_fill(b > n_neg, -torch.inf)
        came_from.append(index)
    place = best.argmax(1, keepdim=True)
    places = []
    for index in reversed(came_from):
        places.append(place)
        place = index.gather(1, place)
    before = torch.cat([*reversed(places), place[:, :0]], dim=1)  # (Q, P) others before the k-th relevant document
    ranks = torch.arange(1, P + 1, device=scores.device, dtype=scores.dtype)
    real = (ranks <= n_pos) & (n_neg > 0)
    precision = (ranks / (ranks + before) * real).sum(1) / n_pos[:, 0].clamp_min(1)
    # The j-th other stands before every relevant document that has at least j others before it; -1 hides padding.
    behind = P - torch.searchsorted(
        before.where(real, -1).sort(dim=1).values, b[1:].expand(len(scores), M).contiguous(), right=False
    )
    out = torch.zeros_like(scores)
    out.scatter_add_(1, pos_rows, 2 * before * real / pairs)
    out.scatter_add_(1, neg_rows, -2 * behind * (b[1:] <= n_neg) / pairs)
    return WorstOrder(out, (1 - precision) * real.any(1))


def _best_first(scores: Tensor, mask: Tensor, width: int) -> tuple[Tensor, Tensor]:  # (Q, width) twice
    """Scores and rows of the masked documents, best first; padding scores zero."""
    values, rows = scores.masked_fill(~mask, -torch.inf).sort(dim=1, descending=True, stable=True)
    values, rows = values[:, :width], rows[:, :width]
    return values.masked_fill(values == -torch.inf, 0.0), rows


ORACLES: Mapping[str, Oracle] = MappingProxyType({"map": worst_map_order, "auc": worst_auc_order})


@dataclass(frozen=True)
class Cut:
    """One constraint ⟨W, psi⟩ ≥ loss − ξ: the mean over queries of their most violating orders."""

    psi: Tensor  # (D, D)
    loss: float
    violation: float  # loss − ⟨W, psi⟩ at the metric it was made for


def most_violated_cut(
    factor: Tensor,  # (D, R), W = F Fᵀ
    examples: ExampleSet,
    oracle: Oracle,
    *,
    max_elements: int = 1 << 22,
) -> Cut:
    """The constraint of the one-slack problem that W violates most, from blocks of queries.

    Its violation is the exact hinge term of the objective at W: no set of orders has a larger one.
    """
    D, N = examples.database.shape[1], len(examples.database)
    psi, loss, inner = factor.new_zeros((D, D)), 0.0, 0.0
    block = max(1, max_elements // max(1, N))
    for start in range(0, examples.num_queries, block):
        queries = examples.queries[start : start + block]
        scores = -squared_distances(queries, examples.database, factor)
        worst = oracle(scores, *examples.masks(start, start + block))
        psi -= pair_scatter(queries, examples.database, worst.coefficients)
        loss += float(worst.loss.sum())
        inner += float((worst.coefficients * scores).sum())
    count = max(1, examples.num_queries)
    return Cut(psi / count, loss / count, (loss - inner) / count)
