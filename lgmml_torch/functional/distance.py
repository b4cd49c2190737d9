"""Local distances: every document to every anchor, each under the anchor's own metric.

Work goes tile by tile of rows (:mod:`lgmml_torch.functional.tiles`), so beside the result no tensor is larger than a
tile. Full-dimensional metrics have two forms: the factor form, accurate to rounding, and the quadratic form, with
half the operations (:mod:`lgmml_torch.functional.quadratic`).
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import (
    DataError,
    LGMMLError,
    NumericsWarning,
    check_choice,
    check_finite,
    check_positive,
    check_shape,
)
from lgmml_torch.functional.quadratic import quadratic_kernel
from lgmml_torch.functional.tiles import TileKernel, factor_kernel, fill_tiles, subspace_kernel

NORMS = ("mahalanobis", "trace")
METHODS = ("factor", "quadratic", "auto")
# With fewer rows the table of the quadratic form costs more than it saves; with ranks below this share of D it saves
# nothing.
MANY_ROWS, HIGH_RANK = 2048, 0.55
CHUNK_ROWS = 2048
SUBSPACE_TILE = 1 << 17  # distances of one tile: its few copies stay in a core's second-level cache


def norm_factors(
    factors: Tensor,  # (K, D, R)
    norm: str,
) -> Tensor:  # (K, D, R) or (K, D, D)
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


@torch.no_grad()
def local_distances(
    features: Tensor,  # (N, D)
    anchors: Tensor,  # (K, D)
    factors: Tensor,  # (K, D, R)
    *,
    norm: str = "mahalanobis",
    method: str = "factor",
    chunk_rows: int = CHUNK_ROWS,
    out: Tensor | np.ndarray | None = None,  # (N, K)
) -> Tensor:  # (N, K)
    r"""Distances of all documents to all anchors.

    .. math:: d_r(p) = \lVert F_r^\top (p - p_r) \rVert \quad\text{or}\quad \lVert F_r F_r^\top (p - p_r) \rVert

    for ``norm="mahalanobis"`` and ``"trace"``. Identity factors give Euclidean distances under both norms; a document
    equal to an anchor gets exactly 0. Computed in the dtype and on the device of ``features``; features are neither
    copied nor changed. The working memory is ``chunk_rows * (2 D + K)`` numbers; the quadratic form adds a table of
    ``K D² / 2`` and ``2048 * chunk_rows``. The result carries no graph.

    Args:
        features: One row for each document.
        anchors: One point for each metric.
        factors: One factor of each metric, ``M = F Fᵀ``; a low rank R makes the work proportionally smaller.
        norm: ``"mahalanobis"`` or ``"trace"``.
        method: ``"factor"``, accurate to rounding, or ``"quadratic"``, within 1e-4 of the mean distance and up to
            twice as fast for many rows and factors of full rank; only float32 features have the choice. ``"auto"``
            takes the quadratic form where it is faster.
        chunk_rows: Rows in one tile; the default keeps a tile of usual width in a core's second-level cache.
        out: Where to write, a tensor or a (memory-mapped) array, of any floating dtype; made when not given.

    Raises:
        LGMMLError: Shapes that do not fit, entries that are not finite, or distances beyond the dtype's range.

    >>> x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    >>> local_distances(x, anchors=torch.zeros(1, 2), factors=torch.eye(2)[None])
    tensor([[0.],
            [5.]])
    """
    check_shape("features", features, (None, None))
    num, dim = features.shape
    check_shape("anchors", anchors, (None, dim))
    check_shape("factors", factors, (len(anchors), dim, None))
    check_choice("method", method, METHODS)
    kernel = distance_kernel(features, anchors, factors, norm=norm, method=method)
    return fill_tiles(kernel, features, _result(out, (num, len(anchors)), features), chunk_rows)


@torch.no_grad()
def subspace_distances(
    features: Tensor,  # (N, D)
    support: Tensor,  # (K, s) long
    anchors: Tensor,  # (K, s)
    factors: Tensor,  # (K, s, r)
    *,
    norm: str = "mahalanobis",
    chunk_rows: int | None = None,
    out: Tensor | np.ndarray | None = None,  # (N, K)
) -> Tensor:  # (N, K)
    """Distances under metrics that look at few features: ``d_r(p) = ‖F_rᵀ(p[support_r] − p_r)‖``.

    The same numbers as :func:`local_distances` with factors that are zero outside the support, at a cost of s·r
    instead of D·R each; meant for s up to about a dozen.

    Raises:
        LGMMLError: As :func:`local_distances`, and a support index outside the features.

    >>> x = torch.tensor([[9.0, 1.0], [9.0, 5.0]])
    >>> subspace_distances(x, torch.tensor([[1]]), torch.tensor([[2.0]]), torch.ones(1, 1, 1))
    tensor([[1.],
            [3.]])
    """
    check_shape("features", features, (None, None))
    check_shape("support", support, (None, None))
    check_shape("anchors", anchors, support.shape)
    check_shape("factors", factors, (*support.shape, None))
    num, dim = features.shape
    if support.numel() and not (int(support.min()) >= 0 and int(support.max()) < dim):
        worst = int(support.min()) if int(support.min()) < 0 else int(support.max())
        raise LGMMLError(f"`support` must index the {dim} features, got {worst}")
    kernel = distance_kernel(features, anchors, factors, support=support, norm=norm)
    chunk_rows = subspace_chunk(len(support)) if chunk_rows is None else chunk_rows
    return fill_tiles(kernel, features, _result(out, (num, len(support)), features), chunk_rows)


def subspace_chunk(num_metrics: int) -> int:
    """Rows of one tile of small metrics: fewer calls when there are few metrics, no more than the cache holds."""
    return max(128, SUBSPACE_TILE // max(1, num_metrics))


def quadratic_pays(
    features: Tensor,  # (N, D)
    factors: Tensor,  # (K, D, R)
    norm: str,
) -> bool:
    """Whether ``method="auto"`` takes the quadratic form: many float32 rows, and factors of high rank."""
    rank = factors.shape[2] if norm == "mahalanobis" else factors.shape[1]
    return features.dtype == torch.float32 and len(features) >= MANY_ROWS and rank >= HIGH_RANK * factors.shape[1]


def distance_kernel(
    like: Tensor,  # features, or anything of their dtype and device
    anchors: Tensor,  # (K, s)
    factors: Tensor,  # (K, s, R)
    *,
    support: Tensor | None = None,  # (K, s)
    norm: str = "mahalanobis",
    method: str = "factor",
) -> TileKernel:
    """What :func:`local_distances` and :func:`subspace_distances` run on every tile, to be kept for several calls."""
    points, lenses = _like(like, anchors, norm_factors(factors, norm))
    if support is not None:
        return subspace_kernel(support, points, lenses)
    if method == "auto":
        method = "quadratic" if quadratic_pays(like, factors, norm) else "factor"
    if method == "quadratic" and like.dtype == torch.float32 and points.numel() > 0:
        return quadratic_kernel(points, lenses)
    return factor_kernel(points, lenses)


def median_scales(
    dists: Tensor,  # (N, K)
    *,
    bandwidth: float = 1.0,
    chunk_columns: int = 16,
) -> Tensor:  # (K,)
    """What each local distance is divided by: its median over the documents, times a bandwidth.

    The median is the lower middle value, so it is one of the distances. Where half of the documents sit on the anchor
    it is 0; the mean takes its place there (1 when that is 0 too), with a warning.

    Raises:
        DataError: There are no documents.
        LGMMLError: A bandwidth that is not positive, or distances that are not finite.

    >>> median_scales(torch.tensor([[1.0, 4.0], [2.0, 5.0], [9.0, 6.0]]), bandwidth=2.0)
    tensor([ 4., 10.])
    """
    check_shape("dists", dists, (None, None))
    check_positive("bandwidth", bandwidth)
    if len(dists) == 0:
        raise DataError("`dists` must have at least one row to take medians of, got 0")
    scales = dists.new_empty(dists.shape[1])
    zero = 0
    for start in range(0, dists.shape[1], chunk_columns):
        block = dists[:, start : start + chunk_columns].T.contiguous()
        check_finite("dists", block.T)
        median = block.median(dim=1).values
        mean = block.double().mean(dim=1).to(median.dtype)
        zero += int((median == 0).sum())
        median = torch.where(median > 0, median, torch.where(mean > 0, mean, torch.ones_like(mean)))
        scales[start : start + chunk_columns] = median
    if zero:
        warnings.warn(
            f"{zero} of {len(scales)} metrics have a median distance of 0 (many documents on the anchor); they are "
            "scaled by the mean distance (1 when that is 0) instead",
            NumericsWarning,
            stacklevel=2,
        )
    return scales * bandwidth


def _like(features: Tensor, anchors: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    check_finite("anchors", anchors)
    check_finite("factors", factors)
    return anchors.to(features), factors.to(features)


def _result(out: Tensor | np.ndarray | None, shape: tuple[int, int], like: Tensor) -> Tensor:
    if out is None:
        return like.new_empty(shape)
    target = torch.from_numpy(out) if isinstance(out, np.ndarray) else out
    check_shape("out", target, shape)
    return target
