"""Local distances: every document to every anchor, each under the anchor's own metric.

Work goes tile by tile of rows, so beside the result no tensor is larger than a tile. A filler writes ``tile (K, B)``,
metrics first, so that each metric writes one contiguous run. Metrics of full rank have two forms:

- the factor form ‖Fᵀ(x − a)‖, accurate to rounding;
- the quadratic form, with half the operations. With z the centred and scaled features and b the anchor,
  d² = zᵀMz − 2(Mb)ᵀz + bᵀMb is one product of the monomials z_i z_j (i ≤ j), shared by all metrics, with a table of
  coefficients. The sum cancels where d² is small against its terms; there the distance is computed again by the factor
  form, so every distance keeps to the tolerance, and none is the root of a negative.

Metrics of low rank are one product of the rows with all factors side by side, forward and, where they are trained,
backward: two products and a few passes over the images Fᵀ(x − a), tile by tile of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lgmml_torch.checks import LGMMLError, check_choice, check_finite, check_shape
from lgmml_torch.segments import row_slices

_Filler = Callable[[Tensor, Tensor], None]
"""Fills ``tile (K, B)`` with the distances of ``rows (B, D)``."""


def _factor_filler(anchors: Tensor, factors: Tensor) -> _Filler:  # (K, D), (K, D, R)
    """Difference, product, row norm, one metric after another; the difference comes first, so anchors get exactly 0."""

    def fill(rows: Tensor, tile: Tensor) -> None:
        gap = rows.new_empty(rows.shape)
        image = rows.new_empty((len(rows), factors.shape[2]))
        for r in range(len(anchors)):
            torch.sub(rows, anchors[r], out=gap)
            torch.mm(gap, factors[r], out=image)
            torch.linalg.vector_norm(image, dim=1, out=tile[r])

    return fill


def _subspace_filler(support: Tensor, anchors: Tensor, factors: Tensor) -> _Filler:  # (K, s), (K, s), (K, s, r)
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


def _stacked_filler(anchors: Tensor, factors: Tensor) -> _Filler:  # (K, D), (K, D, R)
    """All metrics in one product, which comes before the difference.

    So next to an anchor a distance is off by the rounding of its images, a few millionths of the mean distance in
    float32, where one metric after another is exact.
    """
    stacked = factors.permute(0, 2, 1).reshape(-1, factors.shape[1])  # (K R, D)
    centres = (anchors[:, None].double() @ factors.double()).reshape(-1, 1).to(factors)

    def fill(rows: Tensor, tile: Tensor) -> None:
        images = torch.addmm(-centres, stacked, rows.T)
        torch.sum(images.view(len(tile), factors.shape[2], len(rows)).square_(), dim=1, out=tile)
        tile.sqrt_()

    return fill


# Error allowed in a distance, as a share of the mean distance of the tile: a third of the 1e-4 that is promised.
TOLERANCE = 3e-5
# Below this share of the mean distance the factor form always answers.
_NEAR = 0.05
# An error of d² is taken to be below so many last places of its terms (their root sum of squares) plus so many of its
# size. The largest seen over well- and ill-conditioned metrics and heavy tails was .98 of it in 8 to 200 features and
# 1.44 in 1000, inside the reserve that `TOLERANCE` keeps.
_TERMS, _SIZE = 8.0, 6.0
_BLOCK = 2048  # monomials in one product, to bound the memory
_TOO_MANY = 0.3  # metrics with a larger share of unsure distances are left to the factor form


class _QuadraticFiller:
    """Fills tiles with distances in float32; see the module's text."""

    def __init__(self, anchors: Tensor, factors: Tensor) -> None:  # (K, D), (K, D, R)
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

    def suits(self) -> bool:
        """Whether it is sure of most distances between the anchors: rows have no say, so all are treated alike."""
        unsure = self.approximate(self.anchors, self.anchors.new_empty((len(self.anchors), len(self.anchors))))
        return float(unsure.double().mean()) <= _TOO_MANY

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
        eps = torch.finfo(tile.dtype).eps
        terms = (self.rows @ z.square()).sqrt_().mul_(z.abs().amax(dim=0))
        error = terms.mul_(_TERMS * eps).add_(tile + self.constant, alpha=_SIZE * eps)
        tile.addmm_(self.linear, z).add_(self.constant).clamp_(min=0)
        mean = tile.sqrt().mean(dim=1, keepdim=True)
        # Halved by the root: an error e in d² is e / 2d in d.
        limit = error.div_(2 * TOLERANCE * mean.clamp_min(torch.finfo(tile.dtype).tiny))
        unsure = tile <= torch.maximum(limit, _NEAR * mean).square_()
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


NORMS = ("mahalanobis", "trace")
_METHODS = ("factor", "quadratic", "stacked")
# With fewer rows the table of the quadratic form costs more than it saves; with ranks below this share of D it saves
# nothing.
MANY_ROWS, _HIGH_RANK = 2048, 0.55
_LOW_RANK = 0.25  # up to this share of D all factors together make one good product
_CHUNK_ROWS = 2048
_SUBSPACE_TILE = 131_072  # distances of one tile: its few copies stay in a core's second-level cache


def norm_factors(factors: Tensor, norm: str) -> Tensor:  # (K, D, R) -> (K, D, R) or (K, D, D)
    """The factor G with ``‖v‖ = ‖Gᵀv‖``: F for ``mahalanobis`` (vᵀMv), M = FFᵀ for ``trace`` (vᵀMMv, Eq. trace_norm).

    >>> norm_factors(torch.tensor([[[2.0], [1.0]]]), "trace")
    tensor([[[4., 2.],
             [2., 1.]]])
    """
    check_choice("norm", norm, NORMS)
    if norm == "mahalanobis":
        return factors
    wide = factors.double()
    return (wide @ wide.mT).to(factors.dtype)


class DistanceTiles:
    """Distances to anchors by tiles of rows, prepared once for any number of rows.

    ``method`` is ``"factor"``, accurate to rounding; ``"quadratic"``, within 1e-4 of the mean distance and up to twice
    as fast for many rows and factors of full rank (float32 only); or ``"stacked"``, one product for all factors.
    """

    def __init__(
        self,
        like: Tensor,  # features, or anything of their dtype and device
        anchors: Tensor,  # (K, s), s = D without ``support``
        factors: Tensor,  # (K, s, R)
        *,
        support: Tensor | None = None,  # (K, s) the features each metric looks at; None for all
        norm: str = "mahalanobis",  # see `norm_factors`
        method: str = "factor",  # of metrics that look at all features
    ) -> None:
        check_choice("method", method, _METHODS)
        lenses = norm_factors(factors, norm)
        check_finite("anchors", anchors)
        check_finite("factors", lenses)
        self.num_metrics, self.chunk_rows = len(anchors), _CHUNK_ROWS
        points, lenses = anchors.to(like), lenses.to(like)
        self.fill: _Filler
        if support is not None:  # fewer calls when there are few metrics, no more than the cache holds
            self.chunk_rows = max(128, _SUBSPACE_TILE // max(1, self.num_metrics))
            self.fill = _subspace_filler(support, points, lenses)
            return
        if method == "stacked":
            self.fill = _stacked_filler(points, lenses)
            return
        self.fill = _factor_filler(points, lenses)
        if method == "quadratic" and like.dtype == torch.float32 and points.numel():
            quadratic = _QuadraticFiller(points, lenses)
            if quadratic.suits():
                self.fill = quadratic

    @staticmethod
    def method_for(features: Tensor, factors: Tensor, norm: str) -> str:  # (N, D), (K, D, R)
        """The form that suits: stacked factors of low rank, the quadratic form for many float32 rows otherwise."""
        rank = factors.shape[2] if norm == "mahalanobis" else factors.shape[1]
        if rank <= _LOW_RANK * factors.shape[1]:
            return "stacked"
        many = features.dtype == torch.float32 and len(features) >= MANY_ROWS
        if many and rank >= _HIGH_RANK * factors.shape[1]:
            return "quadratic"
        return "factor"

    def of(
        self,
        features: Tensor,  # (N, D)
        scales: Tensor | None = None,  # (K,)
    ) -> Iterator[tuple[slice, Tensor]]:  # rows, (K, B)
        """The tiles, divided by the scales; the caller may write into a tile."""
        for start in range(0, len(features), self.chunk_rows):
            rows = features[start : start + self.chunk_rows]
            tile = rows.new_empty((self.num_metrics, len(rows)))
            self.fill(rows, tile)
            # One cheap sum watches over every entry: it is finite only when they all are, or barely overflows.
            if not torch.isfinite(tile.sum()):
                check_finite("features", features)
                if not torch.isfinite(tile).all():
                    raise LGMMLError(
                        f"distances must stay below {torch.finfo(tile.dtype).max:.3g} ({tile.dtype}), got an overflow"
                    )
            if scales is not None:
                tile.div_(scales[:, None])
            yield slice(start, start + len(rows)), tile

    def write(
        self,
        features: Tensor,  # (N, D)
        out: Tensor,  # (N, K)
        scales: Tensor | None = None,  # (K,)
    ) -> Tensor:  # (N, K)
        """Write the transposed tiles to ``out``: they are divided, and rounded once, whatever the dtype of ``out``."""
        for rows, tile in self.of(features, scales):
            out[rows].copy_(tile.T)
        return out


@torch.no_grad()
def local_distances(
    features: Tensor,  # (N, D)
    anchors: Tensor,  # (K, s), s = D without `support`
    factors: Tensor,  # (K, s, R)
    *,
    support: Tensor | None = None,  # (K, s) long
    norm: str = "mahalanobis",
) -> Tensor:  # (N, K)
    r"""Distances of all documents to all anchors.

    .. math:: d_r(p) = \lVert F_r^\top (p - p_r) \rVert \quad\text{or}\quad \lVert F_r F_r^\top (p - p_r) \rVert

    for ``norm="mahalanobis"`` and ``"trace"``. Identity factors give Euclidean distances under both norms; a document
    equal to an anchor gets exactly 0. Computed in the dtype and on the device of ``features``, by the factor form; the
    result carries no graph.

    With ``support`` a metric looks at few features, p[support_r] in place of p: the same numbers as with factors that
    are zero elsewhere, at a cost of s·R instead of D·R each; meant for s up to about a dozen.

    >>> x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    >>> local_distances(x, anchors=torch.zeros(1, 2), factors=torch.eye(2)[None])
    tensor([[0.],
            [5.]])
    """
    check_shape("features", features, (None, None))
    num, dim = features.shape
    width = dim
    if support is not None:
        check_shape("support", support, (len(anchors), None))
        width = support.shape[1]
        bad = support[(support < 0) | (support >= dim)]
        if len(bad):
            raise LGMMLError(f"`support` must index the {dim} features, got {int(bad[0])}")
    check_shape("anchors", anchors, (None, width))
    check_shape("factors", factors, (len(anchors), width, None))
    tiles = DistanceTiles(features, anchors, factors, support=support, norm=norm)
    return tiles.write(features, features.new_empty((num, len(anchors))))


TINY = 1e-12  # under the root: on an anchor it has no slope
_KEPT_IMAGES = 33_554_432  # entries of all images of a batch that are kept for the way back (128 MiB in float32)
TILE_IMAGES = 524_288  # of a tile of rows: they stay in the cache


def low_rank_distances(
    features: Tensor,  # (N, D)
    anchors: Tensor,  # (K, D)
    factors: Tensor,  # (K, D, R)
) -> Tensor:  # (N, K)
    r"""Distances :math:`\sqrt{\lVert F_r^\top (x - a_r) \rVert^2 + 10^{-12}}` that gradients flow through.

    Of a large batch the backward pass computes the images Fᵀ(x − a) again, in tiles.

    >>> x, eye = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.eye(2)[None]
    >>> low_rank_distances(x, torch.zeros(1, 2), eye).sum().backward()
    >>> x.grad
    tensor([[0.6000, 0.8000]])
    """
    stacked = factors.permute(1, 0, 2).reshape(features.shape[1], -1)
    centres = (anchors[:, None] @ factors).reshape(-1)
    found: Tensor = _Distances.apply(features, stacked, centres, factors.shape[2])  # type: ignore[no-untyped-call]
    return found


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,  # (N, D)
        stacked: Tensor,  # (D, K R)
        centres: Tensor,  # (K R,)
        rank: int,
    ) -> Tensor:  # (N, K)
        count, width = len(features), stacked.shape[1]
        keep = count * width <= _KEPT_IMAGES
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
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
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
        return to_features, to_stacked, to_centres, None
