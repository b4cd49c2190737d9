"""Distances of one tile of rows to all anchors, and the loop over tiles.

A kernel fills ``tile (K, B)``, metrics first, so that each metric writes one contiguous run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_finite, check_positive

TileKernel = Callable[[Tensor, Tensor], None]
"""Fills ``tile (K, B)`` with the distances of ``rows (B, D)``."""


def factor_kernel(
    anchors: Tensor,  # (K, D)
    factors: Tensor,  # (K, D, R)
) -> TileKernel:
    """Difference, product, row norm, one metric after another; the difference comes first, so anchors get exactly 0."""

    def fill(rows: Tensor, tile: Tensor) -> None:
        gap = rows.new_empty(rows.shape)
        image = rows.new_empty((len(rows), factors.shape[2]))
        for r in range(len(anchors)):
            torch.sub(rows, anchors[r], out=gap)
            torch.mm(gap, factors[r], out=image)
            torch.linalg.vector_norm(image, dim=1, out=tile[r])

    return fill


def subspace_kernel(
    support: Tensor,  # (K, s)
    anchors: Tensor,  # (K, s)
    factors: Tensor,  # (K, s, r)
) -> TileKernel:
    """Metrics on few features: all K at once, one feature and one direction after another."""
    # Turned to be lower triangular, which changes no distance and leaves half of the products out.
    lenses = torch.linalg.qr(factors.double().mT).R.mT.to(factors)

    def fill(rows: Tensor, tile: Tensor) -> None:
        columns = rows.T.contiguous()
        gaps = [columns[support[:, j]].sub_(anchors[:, j, None]) for j in range(support.shape[1])]
        if lenses.shape[2] == 0:
            tile.zero_()
        image = torch.empty_like(tile)
        for c in range(lenses.shape[2]):
            torch.mul(gaps[c], lenses[:, c, c, None], out=image)
            for j in range(c + 1, len(gaps)):
                image.addcmul_(gaps[j], lenses[:, j, c, None])
            if c == 0:
                torch.mul(image, image, out=tile)
            else:
                tile.addcmul_(image, image)
        tile.sqrt_()

    return fill


def scaled_tiles(
    kernel: TileKernel,
    features: Tensor,  # (N, D)
    num_metrics: int,
    chunk_rows: int,
    *,
    scales: Tensor | None = None,  # (K,)
) -> Iterator[tuple[slice, Tensor]]:  # rows, (K, B)
    """Run a kernel over tiles of rows and divide by the scales; the caller may write into a tile."""
    check_positive("chunk_rows", chunk_rows)
    for start in range(0, len(features), chunk_rows):
        rows = features[start : start + chunk_rows]
        tile = rows.new_empty((num_metrics, len(rows)))
        kernel(rows, tile)
        # One cheap sum watches over every entry: it is finite only when they all are (or barely overflows, see below).
        if not torch.isfinite(tile.sum()):
            check_finite("features", features)
            if not torch.isfinite(tile).all():
                raise LGMMLError(
                    f"distances must stay below {torch.finfo(tile.dtype).max:.3g} ({tile.dtype}), got an overflow"
                )
        if scales is not None:
            tile.div_(scales[:, None])
        yield slice(start, start + len(rows)), tile


def fill_tiles(
    kernel: TileKernel,
    features: Tensor,  # (N, D)
    out: Tensor,  # (N, K)
    chunk_rows: int,
    *,
    scales: Tensor | None = None,  # (K,)
) -> Tensor:  # (N, K)
    """Run a kernel over tiles of rows, divide by the scales and write the transposed tiles to ``out``.

    Dividing tiles costs no pass over ``out`` and rounds once, whatever the dtype of ``out``.
    """
    for rows, tile in scaled_tiles(kernel, features, out.shape[1], chunk_rows, scales=scales):
        out[rows].copy_(tile.T)
    return out
