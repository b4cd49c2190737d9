"""Similar and dissimilar scatter of ragged regions, over all pairs and without a loop over them.

The rows of a region are centred at the mean of its positives, where the sums over pairs lose their mixed terms:
Σ similar = 2 W₊G₊ and Σ dissimilar = W₋G₊ + W₊G₋ with G = Xᵀ diag(w) X. Nothing is subtracted, so nothing cancels
and both stay positive semidefinite.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError, check_choice, check_finite, check_offsets, check_shape
from lgmml_torch.segments import segment_ids, segment_sum

REDUCTIONS = ("mean", "sum")


class Side(NamedTuple):
    """The positives or the negatives of all regions: ragged row numbers into the features, and their weights."""

    rows: Tensor  # (P,) long
    offsets: Tensor  # (K+1,) long
    weights: Tensor  # (P,) float64

    def part(self, start: int, stop: int) -> Side:
        """The regions from ``start`` up to ``stop``."""
        low, high = int(self.offsets[start]), int(self.offsets[stop])
        return Side(self.rows[low:high], self.offsets[start : stop + 1] - low, self.weights[low:high])


def scatter_matrices(
    features: Tensor,  # (N, D)
    positives: Tensor,  # (P,)
    positive_offsets: Tensor,  # (K+1,)
    negatives: Tensor,  # (M,)
    negative_offsets: Tensor,  # (K+1,)
    *,
    positive_weights: Tensor | None = None,  # (P,)
    negative_weights: Tensor | None = None,  # (M,)
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:  # (K, D, D), (K, D, D) float64
    """Ssim and Ddis of every region, the mean or sum over its pairs of (xᵢ−xⱼ)(xᵢ−xⱼ)ᵀ.

    Similar pairs are the ordered pairs i≠j of positives, dissimilar ones a positive and a negative. A pair weighs
    wᵢwⱼ, so the similar mean divides by W₊²−Σw² and the dissimilar one by W₊W₋. One positive has no similar pairs:
    its Ssim is zero.

    Args:
        features: One row per document.
        positives: Row numbers of the regions' positives, region after region.
        positive_offsets: Where each region begins in ``positives``.
        negatives: Row numbers of the regions' negatives.
        negative_offsets: Where each region begins in ``negatives``.
        positive_weights: At least 0; all 1 when not given.
        negative_weights: At least 0; all 1 when not given.
        reduction: ``"mean"``, or ``"sum"`` as in the paper, where a region without pairs gives zero.

    Raises:
        LGMMLError: An argument has a wrong shape, is not finite, or refers to rows that do not exist.
        DataError: A region has no positives or no negatives to take a mean over.

    >>> X = torch.tensor([[0.0], [2.0], [5.0]])
    >>> similar, dissimilar = scatter_matrices(
    ...     X, torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([2]), torch.tensor([0, 1])
    ... )
    >>> similar.item(), dissimilar.item()  # (0−2)², and the mean of (0−5)² and (2−5)²
    (4.0, 17.0)
    """
    check_choice("reduction", reduction, REDUCTIONS)
    positive, negative = check_sides(
        features, positives, positive_offsets, positive_weights, negatives, negative_offsets, negative_weights
    )
    return pair_scatter(features, positive, negative, reduction)


def check_sides(
    features: Tensor,
    positives: Tensor,
    positive_offsets: Tensor,
    positive_weights: Tensor | None,
    negatives: Tensor,
    negative_offsets: Tensor,
    negative_weights: Tensor | None,
) -> tuple[Side, Side]:
    """Check the arguments of `scatter_matrices` and bundle them."""
    check_shape("features", features, (None, None))
    check_finite("features", features)
    positive = _check_side("positive", positives, positive_offsets, positive_weights, len(features))
    negative = _check_side("negative", negatives, negative_offsets, negative_weights, len(features))
    if len(positive.offsets) != len(negative.offsets):
        raise LGMMLError(
            "`positive_offsets` and `negative_offsets` must describe the same number of regions, "
            f"got {len(positive.offsets) - 1} and {len(negative.offsets) - 1}"
        )
    return positive, negative


def _check_side(side: str, rows: Tensor, offsets: Tensor, weights: Tensor | None, num_rows: int) -> Side:
    check_shape(f"{side}s", rows, (None,))
    if rows.is_floating_point() or rows.dtype == torch.bool:
        raise LGMMLError(f"`{side}s` must hold row numbers, got {rows.dtype}")
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < num_rows):
        raise LGMMLError(
            f"`{side}s` must hold row numbers from 0 to {num_rows - 1}, got {int(rows.min())} to {int(rows.max())}"
        )
    check_offsets(offsets, len(rows), name=f"{side}_offsets")
    if weights is None:
        return Side(rows.long(), offsets, torch.ones(len(rows), dtype=torch.float64, device=rows.device))
    check_shape(f"{side}_weights", weights, (len(rows),))
    check_finite(f"{side}_weights", weights)
    if len(weights) and float(weights.min()) < 0:
        raise LGMMLError(f"`{side}_weights` must be at least 0, got {float(weights.min())}")
    return Side(rows.long(), offsets, weights.to(torch.float64))


def pair_scatter(
    features: Tensor,  # (N, D)
    positive: Side,
    negative: Side,
    reduction: str,
    first: int = 0,
) -> tuple[Tensor, Tensor]:  # (K, D, D), (K, D, D) float64
    """`scatter_matrices` for checked arguments; errors count regions from ``first``."""
    mass_p, mass_n = (segment_sum(side.weights, side.offsets) for side in (positive, negative))  # (K,)
    if reduction == "mean":
        for name, mass in (("positives", mass_p), ("negatives", mass_n)):
            if bool((mass <= 0).any()):
                region = first + int((mass <= 0).nonzero()[0])
                raise DataError(f"`{name}` must give every region a row of positive weight, region {region} has none")
    gram_p, gram_n = _centred_grams(features, positive, negative, mass_p)
    similar = gram_p * (2 * mass_p)[:, None, None]
    dissimilar = gram_p.mul_(mass_n[:, None, None]).add_(gram_n.mul_(mass_p[:, None, None]))
    if reduction == "mean":
        rest = mass_p[segment_ids(positive.offsets)] - positive.weights
        pairs = segment_sum(positive.weights * rest, positive.offsets)  # W² − Σw²
        # All weight on one row leaves no pairs but rounding, which must not be divided by rounding.
        alone = pairs <= torch.finfo(torch.float64).eps * mass_p.square()
        similar = similar.mul_(torch.where(alone, 0.0, 1 / pairs)[:, None, None])
        dissimilar = dissimilar.div_((mass_p * mass_n)[:, None, None])
    if not bool(torch.isfinite(similar.sum() + dissimilar.sum())):
        raise LGMMLError("`features` and weights must have products within the range of float64, got an overflow")
    return similar, dissimilar


def _centred_grams(
    features: Tensor, positive: Side, negative: Side, mass: Tensor
) -> tuple[Tensor, Tensor]:  # (K, D, D)
    """Xᵀ diag(w) X of both sides, the rows relative to the mean of the region's positives."""
    X, Z = features[positive.rows].to(torch.float64), features[negative.rows].to(torch.float64)
    ids_p, ids_n = segment_ids(positive.offsets), segment_ids(negative.offsets)
    # Relative to a row of the region first: equal rows and constant features then become zeros, not rounding.
    filled = positive.offsets.diff() > 0
    shift = X.new_zeros(len(filled), X.shape[1])
    shift[filled] = X[positive.offsets[:-1][filled]]
    X -= shift[ids_p]
    Z -= shift[ids_n]
    share = torch.where(mass > 0, mass, 1.0)[ids_p]
    mean = segment_sum(X * (positive.weights / share).unsqueeze(-1), positive.offsets)
    X -= mean[ids_p]
    Z -= mean[ids_n]
    return _grams(X, positive), _grams(Z, negative)


def _grams(X: Tensor, side: Side) -> Tensor:  # (P, D) -> (K, D, D)
    X = X * side.weights.sqrt().unsqueeze(-1)
    out = X.new_empty(len(side.offsets) - 1, X.shape[1], X.shape[1])
    bounds = side.offsets.tolist()
    for region, (start, stop) in enumerate(itertools.pairwise(bounds)):
        rows = X[start:stop]
        out[region] = rows.mT @ rows
    return out
