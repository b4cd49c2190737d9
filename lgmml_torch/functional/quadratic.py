"""Local distances by the quadratic form: half the operations of the factor form, made safe where it cancels.

With z the centred and scaled features and b the anchor, d² = zᵀMz − 2(Mb)ᵀz + bᵀMb is one product of the monomials
z_i z_j (i ≤ j), shared by all metrics, with a table of coefficients. The sum cancels where d² is small against its
terms; there the distance is computed again by the factor form, so every distance keeps to the tolerance, and none is
the root of a negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lgmml_torch.functional.tiles import factor_kernel

# Error allowed in a distance, as a share of the mean distance of the tile: a third of the 1e-4 that is promised.
TOLERANCE = 3e-5
# Below this share of the mean distance the factor form always answers.
NEAR = 0.05
# An error of d² is taken to be below so many roundings of its terms (their root sum of squares) plus so many of its
# size. The largest seen over well- and ill-conditioned metrics and heavy tails was .98 of it in 8 to 200 features and
# 1.44 in 1000, inside the reserve that `TOLERANCE` keeps.
_TERMS, _SIZE = 16.0, 12.0
_BLOCK = 2048  # monomials in one product, to bound the memory
_TOO_MANY = 0.3  # a metric for which so many distances are unsure is left to the factor form


def quadratic_kernel(
    anchors: Tensor,  # (K, D)
    factors: Tensor,  # (K, D, R)
) -> Callable[[Tensor, Tensor], None]:
    """The quadratic form for the metrics it suits, the factor form for the others; the anchors are the probe.

    The choice depends on anchors and factors alone, so all rows are treated alike.
    """
    kernel = QuadraticKernel(anchors, factors)
    probe = anchors.new_empty((len(anchors), len(anchors)))
    fits = kernel.approximate(anchors, probe).double().mean(dim=1) <= _TOO_MANY
    if bool(fits.all()):
        return kernel
    good, bad = fits.nonzero()[:, 0], (~fits).nonzero()[:, 0]
    plain = factor_kernel(anchors[bad], factors[bad])
    if len(good) == 0:
        return plain
    kernel.keep(good)

    def fill(rows: Tensor, tile: Tensor) -> None:
        for form, part in ((kernel, good), (plain, bad)):
            own = tile.new_empty((len(part), tile.shape[1]))
            form(rows, own)
            tile[part] = own

    return fill


class QuadraticKernel:
    """Fills tiles with distances in float32; see the module's text.

    Args:
        anchors: ``(K, D)``.
        factors: ``(K, D, R)``; the metric is ``F Fᵀ``.
    """

    def __init__(self, anchors: Tensor, factors: Tensor) -> None:
        self.anchors, self.factors = anchors, factors
        wide = anchors.double()
        centre = wide.mean(dim=0)
        spread = (wide - centre).square().mean(dim=0).sqrt()
        spread = torch.where(spread > 0, spread, 1.0)
        self.centre, self.spread = centre.to(anchors.dtype), spread.to(anchors.dtype)
        count, dim = anchors.shape
        # What is rounded here must be rounded in the same way in every tile.
        starts = (wide - self.centre.double()) / self.spread.double()
        i, j = torch.triu_indices(dim, dim, device=anchors.device)
        self.square = anchors.new_empty((count, len(i)))
        self.linear, self.rows = anchors.new_empty((count, dim)), anchors.new_empty((count, dim))
        self.constant = anchors.new_empty((count, 1))
        for r in range(count):
            factor = self.spread.double()[:, None] * factors[r].double()
            M = factor @ factor.T
            self.square[r] = torch.where(i == j, 1.0, 2.0) * M[i, j]
            pull = M @ starts[r]
            self.linear[r], self.constant[r] = -2 * pull, starts[r] @ pull
            self.rows[r] = M.square().sum(dim=1)

    def keep(self, metrics: Tensor) -> None:
        """Drop all metrics but these."""
        for name in ("anchors", "factors", "square", "linear", "rows", "constant"):
            setattr(self, name, getattr(self, name)[metrics])

    def __call__(self, rows: Tensor, tile: Tensor) -> None:
        """Write the distances of ``rows (B, D)`` to ``tile (K, B)``."""
        unsure = self.approximate(rows, tile)
        for r in unsure.any(dim=1).nonzero()[:, 0].tolist():
            picked = unsure[r].nonzero()[:, 0]
            gaps = rows[picked] - self.anchors[r]
            tile[r, picked] = torch.linalg.vector_norm(gaps @ self.factors[r], dim=1)

    def approximate(self, rows: Tensor, tile: Tensor) -> Tensor:
        """Write the quadratic form's distances to ``tile (K, B)``; returns where they may be too far off."""
        z = ((rows - self.centre) / self.spread).T.contiguous()
        tile.zero_()
        place = 0
        for monomials in _monomials(z):
            tile.addmm_(self.square[:, place : place + len(monomials)], monomials)
            place += len(monomials)
        eps = torch.finfo(tile.dtype).eps / 2
        terms = (self.rows @ z.square()).sqrt_().mul_(z.abs().amax(dim=0))
        error = terms.mul_(_TERMS * eps).add_(tile + self.constant, alpha=_SIZE * eps)
        tile.addmm_(self.linear, z).add_(self.constant).clamp_(min=0)
        mean = tile.sqrt().mean(dim=1, keepdim=True)
        # Halved by the root: an error e in d² is e / 2d in d.
        limit = error.div_(2 * TOLERANCE * mean.clamp_min(torch.finfo(tile.dtype).tiny))
        unsure = tile <= torch.maximum(limit, NEAR * mean).square_()
        tile.sqrt_()
        return unsure


def _monomials(z: Tensor) -> Iterator[Tensor]:
    """The products z_i z_j, i ≤ j, row by row of the upper triangle, in blocks of whole rows; z is ``(D, B)``."""
    dim = len(z)
    buffer = z.new_empty((max(_BLOCK, dim), z.shape[1]))
    filled = 0
    for i in range(dim):
        if filled + dim - i > len(buffer):
            yield buffer[:filled]
            filled = 0
        torch.mul(z[i:], z[i], out=buffer[filled : filled + dim - i])
        filled += dim - i
    yield buffer[:filled]
