"""Sampled WARP: a rank-weighted hinge loss on a positive and the first drawn document that violates its margin.

First the draws: single triplets, or whole lists with draws for each of their positives. All numbers come from a given
generator, so that loader workers get the same draws. Then the loss: ``f`` is the score of
:mod:`lgmml_torch.functional.score`, so ∂f/∂Φ_q[r] = −κ(d_r).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, check_choice, check_finite, check_offsets, check_positive, check_shape
from lgmml_torch.functional.presets import log_discounts
from lgmml_torch.segments import (
    argsort_segments,
    gather_segments,
    offsets_from_sizes,
    positions,
    segment_ids,
    segment_sum,
)

_NEGATIVES = ("lower", "zero")


@dataclass(frozen=True)
class NegativeTable:
    """For every document, the run of ``order`` that holds the documents a negative may be drawn from."""

    order: Tensor  # (N,) row indices, within each query by label ascending
    start: Tensor  # (N,) where a document's run starts
    count: Tensor  # (N,) how long it is, n⁻; 0 for documents that are not positive
    positives: Tensor  # (M,) rows with ``count > 0``, grouped by query
    positive_offsets: Tensor  # (Q+1,) boundaries of the queries in ``positives``
    queries: Tensor  # (U,) the queries that have positives

    @classmethod
    def of(cls, labels: Tensor, offsets: Tensor, *, negatives: str = "lower") -> Self:  # (N,), (Q+1,)
        """Sort each query by label once, so that drawing a negative is a look-up; documents may come in any order.

        ``negatives="lower"``: every document of the query labelled lower than the positive. ``"zero"`` (the paper's):
        those labelled 0, for positives labelled above 0.

        >>> NegativeTable.of(torch.tensor([2.0, 0.0, 1.0]), torch.tensor([0, 3])).count
        tensor([2, 0, 1])
        """
        check_choice("negatives", negatives, _NEGATIVES)
        check_shape("labels", labels, (None,))
        check_finite("labels", labels)
        check_offsets(offsets, len(labels))
        ids = segment_ids(offsets)
        order = argsort_segments(labels, offsets)
        ordered, place = labels[order], positions(offsets)
        if negatives == "lower":
            # A run of equal labels starts where label or query changes; what precedes it in the query is lower.
            change = torch.ones_like(ids, dtype=torch.bool)
            change[1:] = (ordered[1:] != ordered[:-1]) | (ids[1:] != ids[:-1])
            lower = torch.where(change, torch.arange(len(ids), device=ids.device), 0).cummax(0).values - offsets[ids]
            count = torch.empty_like(place).index_copy_(0, order, lower)
            start = offsets[ids]
        else:
            start = (offsets[:-1] + segment_sum((labels < 0).long(), offsets))[ids]
            count = torch.where(labels > 0, segment_sum((labels == 0).long(), offsets)[ids], 0)
        positive = count > 0
        sizes = segment_sum(positive.long(), offsets)
        return cls(order, start, count, positive.nonzero()[:, 0], offsets_from_sizes(sizes), sizes.nonzero()[:, 0])

    def sample_triplets(self, num: int, *, max_draws: int | None = 10, generator: torch.Generator) -> Draws:
        """Triplets: a query uniformly among those with positives, one of its positives, negatives with replacement.

        ``max_draws=None`` allows each tuple n⁻ draws (the paper's limit).

        Raises:
            DataError: No query has a positive and something lower to draw.

        >>> table = NegativeTable.of(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0, 3]))
        >>> table.sample_triplets(2, max_draws=5, generator=torch.Generator().manual_seed(0)).negatives.shape
        torch.Size([2, 5])
        """
        if len(self.queries) == 0:
            raise DataError("no query has a positive and a lower-labelled document, so no triplet can be drawn")
        check_positive("num", num, zero=True)
        first, second = _rand(num, 2, generator).to(self.order.device).unbind(dim=1)
        queries = self.queries[_pick(first, torch.full_like(first, len(self.queries)).long())]
        sizes = self.positive_offsets.diff()[queries]
        positives = self.positives[self.positive_offsets[queries] + _pick(second, sizes)]
        uniforms = _rand(num, self._width(positives, max_draws), generator)
        weights = torch.ones(num, dtype=torch.float64, device=queries.device)
        return self._draws(queries, positives, weights, uniforms, max_draws is None)

    def sample_list_draws(
        self,
        queries: Tensor,  # (B,)
        *,
        max_draws: int | None = 10,
        generator: torch.Generator,
        among: Among | None = None,
    ) -> Draws:
        """Draws for every positive of whole lists; ``max_draws=None`` allows n⁻ draws each.

        Each positive weighs 1/|positives of its query|, so a list drawn uniformly among those with positives has the
        expected loss and gradient of one triplet. Lists without positives give no tuples.

        With ``among``, numbers are drawn for the whole batch these lists belong to: its draws are then the same for any
        number of processes that share it.

        >>> table = NegativeTable.of(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 3]))
        >>> draws = table.sample_list_draws(torch.tensor([0]), generator=torch.Generator().manual_seed(0))
        >>> draws.positives, draws.weights
        (tensor([1, 2]), tensor([0.5000, 0.5000], dtype=torch.float64))
        """
        places, list_offsets = gather_segments(self.positive_offsets, queries)
        owner, positives = segment_ids(list_offsets), self.positives[places]
        if among is None:
            uniforms = _rand(len(places), self._width(positives, max_draws), generator)
        else:
            width = among.most if max_draws is None else max_draws
            uniforms = _rand(among.total, width, generator)[among.places]
        weights = 1 / list_offsets.diff()[owner].double()
        return self._draws(queries[owner], positives, weights, uniforms, max_draws is None)

    def _draws(
        self, queries: Tensor, positives: Tensor, weights: Tensor, uniforms: Tensor, all_negatives: bool
    ) -> Draws:
        counts = self.count[positives]
        places = _pick(uniforms.to(self.order.device), counts[:, None])
        negatives = self.order[self.start[positives][:, None] + places]
        num_draws = torch.full_like(counts, uniforms.shape[1])
        if all_negatives:
            num_draws = counts.minimum(num_draws)
        return Draws(queries, positives, negatives, counts, num_draws, weights)

    def _width(self, positives: Tensor, max_draws: int | None) -> int:
        if max_draws is not None:
            check_positive("max_draws", max_draws)
            return max_draws
        if not len(positives):
            return 0
        return int(self.count[positives].max())


@dataclass(frozen=True)
class Draws:
    """P tuples of a query, one of its positives and T drawn negatives; rows index the documents."""

    queries: Tensor  # (P,)
    positives: Tensor  # (P,) rows
    negatives: Tensor  # (P, T) rows in the order drawn
    num_negatives: Tensor  # (P,) how many documents they were drawn from
    num_draws: Tensor  # (P,) how many of the T draws count
    weights: Tensor  # (P,) float64; 1 for triplets, 1/|positives| for whole lists


class Among(NamedTuple):
    """Where the positives of some lists stand among those of a batch that several processes share."""

    places: Tensor  # (M,) of these positives
    total: int  # positives of the whole batch
    most: int  # the largest number of negatives that one of them has


def _pick(uniforms: Tensor, counts: Tensor) -> Tensor:
    # u·n may round up to n for u just below 1.
    return (uniforms * counts).long().clamp(min=0).minimum(counts - 1)


def _rand(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    # float64: with 24 bits, places in a list of 10,000 documents would differ in probability by a thousandth.
    return torch.rand(rows, columns, dtype=torch.float64, generator=generator, device=generator.device)


@dataclass(frozen=True)
class WarpOutcome:
    """What sampled WARP found for each of P tuples; a batch loss is ``loss.sum()``."""

    loss: Tensor  # ``weight · (ζ − f(p⁺) + f(p⁻))``, 0 without a violator; differentiable in the scores
    violator: Tensor  # which draw was the first violator, or −1
    draws: Tensor  # how many draws were made: up to and with the violator, or all
    rank: Tensor  # the rank estimate, 0 without a violator
    weight: Tensor  # L(rank) times the tuple's own weight, 0 without a violator


def rank_weight_table(max_rank: int, *, device: torch.device | str | None = None) -> Tensor:  # (max_rank + 1,)
    """L(0), …, L(max_rank) as float64: L(k), the loss of k violators above a positive, is ``Σ_{i ≤ k} 1/log₂(i + 1)``.

    >>> rank_weight_table(2)
    tensor([0.0000, 1.0000, 1.6309], dtype=torch.float64)
    """
    check_positive("max_rank", max_rank, zero=True)
    terms = log_discounts(torch.arange(max_rank, device=device))
    return torch.cat([terms.new_zeros(1), terms.cumsum(0)])


def warp_loss(
    pos_scores: Tensor,  # (P,)
    neg_scores: Tensor,  # (P, T) in the order drawn
    num_negatives: Tensor,  # (P,) how many documents each row of draws was drawn from; with 0 there is no violator
    *,
    margin: float,  # ζ > 0
    weights: Tensor | None = None,  # (P,) of each tuple, such as 1/|positives| for whole lists; 1 when not given
    num_draws: Tensor | None = None,  # (P,) how many of a row's draws count; all when not given
    table: Tensor | None = None,  # `rank_weight_table` up to the largest ``num_negatives``, to spare its making
) -> WarpOutcome:
    """Loss of each positive against the first of its draws that comes too close.

    A draw violates when ``ζ + f(p⁻) > f(p⁺)``. With n draws to the first violator the loss is
    ``L(max(1, ⌊n⁻/n⌋)) · (ζ − f(p⁺) + f(p⁻))``; it is 0 when no draw violates.

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
    width = neg_scores.shape[1]
    allowed = torch.full_like(num_negatives, width)
    if num_draws is not None:
        check_shape("num_draws", num_draws, (size,))
        allowed = num_draws.clamp(max=width)
    allowed = torch.where(num_negatives > 0, allowed, 0)
    counted = torch.arange(width, device=allowed.device) < allowed[:, None]
    violates = ((margin + neg_scores.detach()) > pos_scores.detach()[:, None]) & counted
    found = violates.any(dim=1)
    # argmax needs a column to look at; the first maximum is the first violator.
    first, closest = torch.zeros_like(num_negatives), torch.zeros_like(pos_scores)
    if width:
        first = violates.to(torch.uint8).argmax(dim=1)
        closest = neg_scores.gather(dim=1, index=first[:, None])[:, 0]
    draws = torch.where(found, first + 1, allowed)
    # Few draws to the first violator mean that there are many.
    estimate = torch.div(num_negatives, draws.clamp_min(1), rounding_mode="floor").clamp_min(1)
    rank = torch.where(found, estimate, 0)
    if table is None:
        table = rank_weight_table(max(rank.tolist(), default=0), device=rank.device)
    weight = table[rank].to(pos_scores.dtype)
    if weights is not None:
        check_shape("weights", weights, (size,))
        weight = weight * weights.to(weight.dtype)
    loss = weight * torch.where(found, margin - pos_scores + closest, 0.0)
    return WarpOutcome(loss, torch.where(found, first, -1), draws, rank, weight)
