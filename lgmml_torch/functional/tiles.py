"""Distances of one tile of rows to all anchors, and the loop over tiles.

A kernel fills ``tile (K, B)``, metrics first, so that each metric writes one contiguous run.
"""

from __future__ import annotations

from collections.abc import Callable

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

    def fill(rows: Tensor, tile: Tensor) -> None:
        columns = rows.T.contiguous()
        gaps = [columns[support[:, j]].sub_(anchors[:, j, None]) for j in range(support.shape[1])]
        tile.zero_()
        for c in range(factors.shape[2]):
            image = torch.zeros_like(tile)
            for j, gap in enumerate(gaps):
                image.addcmul_(gap, factors[:, j, c, None])
            tile.addcmul_(image, image)
        tile.sqrt_()

    return fill


def fill_tiles(
    kernel: TileKernel,
    features: Tensor,  # (N, D)
    out: Tensor,  # (N, K)
    chunk_rows: int,
    *,
    scales: Tensor | None = None,  # (K,)
) -> Tensor:  # (N, K)
    """Run a kernel over tiles of rows, divide by the scales and write the transposed tiles to ``out``.

    Dividing here costs no pass over ``out`` and rounds once, whatever the dtype of ``out``.
    """
    check_positive("chunk_rows", chunk_rows)
    for start in range(0, len(features), chunk_rows):
        rows = features[start : start + chunk_rows]
        tile = rows.new_empty((out.shape[1], len(rows)))
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
        out[start : start + chunk_rows].copy_(tile.T)
    return out
