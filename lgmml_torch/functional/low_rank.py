"""Distances under metrics of low rank: one product of the rows with all factors side by side, forward and backward.

What training does thousands of times is kept to two products and a few passes over the images Fᵀ(x − a), tile by tile
of rows; where the images of a batch would need too much room they are computed again on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lgmml_torch.segments import row_slices

TINY = 1e-12  # under the root: on an anchor it has no slope
_KEPT_IMAGES = 33_554_432  # entries of all images of a batch that are kept for the way back (128 MiB in float32)
TILE_IMAGES = 524_288  # of a tile of rows: they stay in the cache


def low_rank_distances(
    features: Tensor,  # (N, D)
    anchors: Tensor,  # (K, D)
    factors: Tensor,  # (K, D, R)
    *,
    kept_images: int = _KEPT_IMAGES,
) -> Tensor:  # (N, K)
    r"""Distances :math:`\sqrt{\lVert F_r^\top (x - a_r) \rVert^2 + 10^{-12}}` that gradients flow through.

    With more than ``kept_images`` numbers Fᵀ(x − a) the backward pass computes them again, in tiles.

    >>> x, eye = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.eye(2)[None]
    >>> low_rank_distances(x, torch.zeros(1, 2), eye).sum().backward()
    >>> x.grad
    tensor([[0.6000, 0.8000]])
    """
    stacked = factors.permute(1, 0, 2).reshape(features.shape[1], -1)
    centres = (anchors[:, None] @ factors).reshape(-1)
    found: Tensor = _Distances.apply(  # type: ignore[no-untyped-call]
        features, stacked, centres, factors.shape[2], kept_images
    )
    return found


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,  # (N, D)
        stacked: Tensor,  # (D, K R)
        centres: Tensor,  # (K R,)
        rank: int,
        kept_images: int,
    ) -> Tensor:  # (N, K)
        count, width = len(features), stacked.shape[1]
        keep = count * width <= kept_images
        tiles = list(row_slices(count, width, TILE_IMAGES))
        images = features.new_empty(count if keep else tiles[0].stop, width)
        dists = features.new_empty(count, width // max(1, rank))
        for rows in tiles:
            tile = images[rows] if keep else images[: rows.stop - rows.start]
            torch.addmm(-centres, features[rows], stacked, out=tile)
            torch.sum(tile.view(len(tile), -1, rank).square(), dim=2, out=dists[rows])
        dists.add_(TINY).sqrt_()
        ctx.rank = rank
        ctx.save_for_backward(features, stacked, centres, dists, images if keep else None)
        return dists

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        features, stacked, centres, dists, images = ctx.saved_tensors
        count, width = len(features), stacked.shape[1]
        weights = slopes[0] / dists
        to_features = None
        if ctx.needs_input_grad[0]:
            to_features = torch.empty_like(features)
        to_stacked, to_centres = torch.zeros_like(stacked), torch.zeros_like(centres)
        for rows in row_slices(count, width, TILE_IMAGES):
            pulls = features.new_empty(rows.stop - rows.start, width)
            tile = images[rows] if images is not None else torch.addmm(-centres, features[rows], stacked, out=pulls)
            shape = (len(tile), -1, ctx.rank)
            torch.mul(tile.view(shape), weights[rows, :, None], out=pulls.view(shape))
            to_stacked.addmm_(features[rows].T, pulls)
            to_centres.sub_(pulls.sum(dim=0))
            if to_features is not None:
                torch.mm(pulls, stacked.T, out=to_features[rows])
        return to_features, to_stacked, to_centres, None, None


class StackedFiller:
    """Fills tiles ``(K, B)`` with the distances of ``rows (B, D)``, all metrics in one product.

    The product comes before the difference, so next to an anchor a distance is off by the rounding of its images, a
    few millionths of the mean distance in float32, where one metric after another is exact.
    """

    def __init__(self, anchors: Tensor, factors: Tensor) -> None:
        self.stacked = factors.permute(0, 2, 1).reshape(-1, factors.shape[1])  # (K R, D)
        self.centres = (anchors[:, None].double() @ factors.double()).reshape(-1, 1).to(factors)
        self.rank = factors.shape[2]

    def __call__(self, rows: Tensor, tile: Tensor) -> None:
        """Write the distances of ``rows (B, D)`` to ``tile (K, B)``."""
        images = torch.addmm(-self.centres, self.stacked, rows.T)
        torch.sum(images.view(len(tile), self.rank, len(rows)).square_(), dim=1, out=tile)
        tile.sqrt_()
