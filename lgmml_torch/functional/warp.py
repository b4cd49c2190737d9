"""Sampled WARP: a rank-weighted hinge loss on a positive and the first drawn document that violates its margin.

``f`` is the score of :mod:`lgmml_torch.functional.score`, so ∂f/∂Φ_q[r] = −κ(d_r); drawing is in
:mod:`lgmml_torch.functional.sampling`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_finite, check_positive, check_shape
from lgmml_torch.functional.sampling import (
    Draws,
    NegativeTable,
    list_draws_from_uniforms,
    negative_table,
    sample_list_draws,
    sample_triplets,
    triplets_from_uniforms,
)

__all__ = [
    "Draws",
    "NegativeTable",
    "WarpOutcome",
    "list_draws_from_uniforms",
    "negative_table",
    "project_",
    "projected_step_",
    "rank_estimate",
    "rank_weight",
    "rank_weight_table",
    "sample_list_draws",
    "sample_triplets",
    "triplets_from_uniforms",
    "warp_loss",
    "warp_phi_gradient",
]


@dataclass(frozen=True)
class WarpOutcome:
    """What sampled WARP found for each of P tuples; a batch loss is ``loss.sum()``.

    Attributes:
        loss: ``weight · (ζ − f(p⁺) + f(p⁻))``, 0 without a violator; differentiable in the scores.
        violator: Which draw was the first violator, or −1.
        draws: How many draws were made: up to and with the violator, or all.
        rank: The rank estimate, 0 without a violator.
        weight: L(rank) times the tuple's own weight, 0 without a violator.
    """

    loss: Tensor
    violator: Tensor
    draws: Tensor
    rank: Tensor
    weight: Tensor


def rank_weight_table(max_rank: int, *, device: torch.device | str | None = None) -> Tensor:  # (max_rank + 1,)
    """L(0), …, L(max_rank) as float64, ``L(k) = Σ_{i ≤ k} 1/log₂(i + 1)``, L(0) = 0.

    >>> rank_weight_table(2)
    tensor([0.0000, 1.0000, 1.6309], dtype=torch.float64)
    """
    check_positive("max_rank", max_rank, zero=True)
    terms = 1 / torch.log2(torch.arange(2, max_rank + 2, dtype=torch.float64, device=device))
    return torch.cat([terms.new_zeros(1), terms.cumsum(0)])


def rank_weight(
    k: Tensor | int,  # (...)
) -> Tensor:  # (...)
    """L(k), the loss of a positive document with k violators above it; float64.

    >>> rank_weight(1)
    tensor(1., dtype=torch.float64)
    """
    ranks = torch.as_tensor(k)
    if ranks.numel() == 0:
        return ranks.double()
    if int(ranks.min()) < 0:
        raise LGMMLError(f"`k` must be at least 0, got {int(ranks.min())}")
    return rank_weight_table(int(ranks.max()), device=ranks.device)[ranks]


def rank_estimate(
    num_negatives: Tensor,  # (P,) long
    draws: Tensor,  # (P,) long
) -> Tensor:  # (P,) long
    """``max(1, ⌊n⁻ / draws⌋)``: few draws to the first violator mean that there are many.

    >>> rank_estimate(torch.tensor([10, 10, 3]), torch.tensor([1, 4, 5]))
    tensor([10,  2,  1])
    """
    if draws.numel() and int(draws.min()) < 1:
        raise LGMMLError(f"`draws` must be at least 1, got {int(draws.min())}")
    return torch.div(num_negatives, draws, rounding_mode="floor").clamp_min(1)


def warp_loss(
    pos_scores: Tensor,  # (P,)
    neg_scores: Tensor,  # (P, T)
    num_negatives: Tensor,  # (P,) long
    *,
    margin: float,
    weights: Tensor | None = None,  # (P,)
    num_draws: Tensor | None = None,  # (P,) long
    table: Tensor | None = None,  # rank_weight_table
) -> WarpOutcome:
    """Loss of each positive against the first of its draws that comes too close.

    A draw violates when ``ζ + f(p⁻) > f(p⁺)``. With n draws to the first violator the loss is
    ``L(max(1, ⌊n⁻/n⌋)) · (ζ − f(p⁺) + f(p⁻))``; it is 0 when no draw violates.

    Args:
        pos_scores: Scores of the positives.
        neg_scores: Scores of the drawn negatives, in the order drawn.
        num_negatives: How many documents each row of draws was drawn from; a tuple with 0 has no violator.
        margin: ζ > 0.
        weights: Weight of each tuple, such as 1/|positives| for whole lists; 1 when not given.
        num_draws: How many of a row's draws count; all when not given.
        table: Precomputed :func:`rank_weight_table` reaching the largest ``num_negatives``, to spare its making.

    Raises:
        LGMMLError: Shapes that do not fit, a margin that is not positive, or scores that are not finite.

    >>> found = warp_loss(torch.tensor([1.0]), torch.tensor([[0.0, 0.8]]), torch.tensor([4]), margin=0.5)
    >>> found.draws, found.rank, found.loss  # L(2) · (.5 − 1 + .8)
    (tensor([2]), tensor([2]), tensor([0.4893]))
    """
    check_positive("margin", margin)
    check_shape("pos_scores", pos_scores, (None,))
    size = len(pos_scores)
    check_shape("neg_scores", neg_scores, (size, None))
    check_shape("num_negatives", num_negatives, (size,))
    check_finite("pos_scores", pos_scores)
    check_finite("neg_scores", neg_scores)
    if num_draws is not None:
        check_shape("num_draws", num_draws, (size,))
    width = neg_scores.shape[1]
    allowed = torch.full_like(num_negatives, width) if num_draws is None else num_draws.clamp(max=width)
    allowed = torch.where(num_negatives > 0, allowed, 0)
    counted = torch.arange(width, device=allowed.device) < allowed[:, None]
    violates = ((margin + neg_scores.detach()) > pos_scores.detach()[:, None]) & counted
    found = violates.any(dim=1)
    # argmax needs a column to look at; the first maximum is the first violator.
    first = violates.to(torch.uint8).argmax(dim=1) if width else torch.zeros_like(num_negatives)
    draws = torch.where(found, first + 1, allowed)
    rank = torch.where(found, rank_estimate(num_negatives, draws.clamp_min(1)), 0)
    weight = (rank_weight(rank) if table is None else table[rank]).to(pos_scores.dtype)
    if weights is not None:
        check_shape("weights", weights, (size,))
        weight = weight * weights.to(weight.dtype)
    closest = neg_scores.gather(1, first[:, None])[:, 0] if width else torch.zeros_like(pos_scores)
    loss = weight * torch.where(found, margin - pos_scores + closest, 0.0)
    return WarpOutcome(loss, torch.where(found, first, -1), draws, rank, weight)


def warp_phi_gradient(
    outcome: WarpOutcome,
    queries: Tensor,  # (P,) long
    pos_kappa: Tensor,  # (P, K)
    neg_kappa: Tensor,  # (P, K)
    *,
    num_queries: int,
) -> Tensor:  # (Q, K)
    """Gradient of the batch loss in Φ: each tuple adds ``L(rank) · (κ(p⁺) − κ(p⁻))`` to the row of its query.

    The sign follows from ∂f/∂Φ = −κ. A query that occurs twice gets both terms; tuples without a violator add nothing,
    whatever stands in their ``neg_kappa``. A Φ shared by all queries has ``num_queries=1`` and zeros for ``queries``.

    Args:
        outcome: From :func:`warp_loss`.
        queries: Row of Φ for each tuple.
        pos_kappa: Kernel values of the positives.
        neg_kappa: Kernel values of the violators.
        num_queries: Rows of Φ.

    >>> found = warp_loss(torch.zeros(2), torch.zeros(2, 1), torch.tensor([1, 1]), margin=1.0)
    >>> k = torch.tensor([[0.25], [0.5]])
    >>> warp_phi_gradient(found, torch.tensor([0, 0]), k, torch.zeros(2, 1), num_queries=1)
    tensor([[0.7500]])
    """
    check_shape("pos_kappa", pos_kappa, (len(queries), None))
    check_shape("neg_kappa", neg_kappa, pos_kappa.shape)
    terms = outcome.weight.detach().to(pos_kappa.dtype)[:, None] * (pos_kappa - neg_kappa)
    terms = torch.where((outcome.violator >= 0)[:, None], terms, 0.0)
    return pos_kappa.new_zeros((num_queries, pos_kappa.shape[1])).index_add(0, queries, terms)


@torch.no_grad()
def project_(phi: Tensor) -> Tensor:
    """Φ ← max(Φ, 0) in place.

    >>> project_(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    return phi.clamp_(min=0)


@torch.no_grad()
def projected_step_(phi: Tensor, gradient: Tensor, step: float) -> Tensor:
    """Φ ← max(Φ − step · gradient, 0) in place, one projected update.

    >>> projected_step_(torch.ones(2), torch.tensor([1.0, 4.0]), 0.5)
    tensor([0.5000, 0.0000])
    """
    return phi.sub_(gradient.to(phi.dtype), alpha=step).clamp_(min=0)
