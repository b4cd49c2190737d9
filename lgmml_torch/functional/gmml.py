"""Geometric-mean metric learning (GMML): one metric from two scatter matrices, or a bank of them, in closed form.

Scatters of ragged regions run over all pairs, without a loop over them. The rows of a region are centred at the mean of
its positives, where the sums over pairs lose their mixed terms: Σ similar = 2 n₊G₊ and Σ dissimilar = n₋G₊ + n₊G₋ with
G = XᵀX. Nothing is subtracted, so nothing cancels and both stay positive semidefinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.checks import (
    DataError,
    LGMMLError,
    NotSPDError,
    check_choice,
    check_finite,
    check_positive,
    check_shape,
    check_unit_interval,
)
from lgmml_torch.functional.regions import Regions
from lgmml_torch.functional.spd import METHODS, broadcast_pair, cholesky_jittered, stacked_factor
from lgmml_torch.segments import row_slices, segment_ids, segment_sum

REDUCTIONS = ("mean", "sum")
_MAX_BYTES = 536_870_912  # of temporaries


def pair_scatter(
    left: Tensor,  # (..., D, D) Xᵀ diag(C1) X
    right: Tensor,  # (..., D, D) Yᵀ diag(Cᵀ1) Y
    cross: Tensor | None = None,  # (..., D, D) XᵀCY; zero when not given
) -> Tensor:  # (..., D, D)
    """Σ over pairs of c_ij (x_i − y_j)(x_i − y_j)ᵀ, from three sums over rows instead of a loop over pairs.

    Multiplied out, the products of a row with itself need the row's total weight only, and the mixed ones are XᵀCY and
    its transpose, which vanish for rows that are centred.

    >>> X, Y, C = torch.tensor([[1.0], [2.0]]), torch.tensor([[4.0]]), torch.tensor([[1.0], [0.5]])
    >>> pair_scatter(X.T @ (C.sum(1)[:, None] * X), Y.T @ (C.sum(0)[:, None] * Y), X.T @ C @ Y)  # 3² + 2²/2
    tensor([[11.]])
    """
    own = left + right
    if cross is None:
        return own
    return own - cross - cross.mT


def scatter_matrices(
    features: Tensor,  # (N, D)
    regions: Regions,  # K
    *,
    reduction: str = "mean",
    first: int = 0,  # what errors count regions from
) -> tuple[Tensor, Tensor]:  # (K, D, D), (K, D, D) float64
    """Ssim and Ddis of every region, the mean or sum over its pairs of (xᵢ−xⱼ)(xᵢ−xⱼ)ᵀ.

    Similar pairs are the ordered pairs i≠j of positives, dissimilar ones a positive and a negative. One positive has no
    similar pairs: its Ssim is zero. With ``reduction="sum"``, as in the paper, a region without pairs gives zero.

    Raises:
        DataError: A region has no positives or no negatives to take a mean over.

    >>> from lgmml_torch.functional.regions import regions_from_queries
    >>> X, labels, one = torch.tensor([[0.0], [2.0], [5.0]]), torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 1])
    >>> similar, dissimilar = scatter_matrices(X, regions_from_queries(labels, torch.tensor([0, 3]), one[:1], one))
    >>> similar.item(), dissimilar.item()  # (0−2)², and the mean of (0−5)² and (2−5)²
    (4.0, 17.0)
    """
    check_choice("reduction", reduction, REDUCTIONS)
    check_shape("features", features, (None, None))
    check_finite("features", features)
    sides = (
        ("positives", regions.positives, regions.positive_offsets),
        ("negatives", regions.negatives, regions.negative_offsets),
    )
    for name, rows, offsets in sides:
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < len(features)):
            raise LGMMLError(
                f"`{name}` must hold row numbers from 0 to {len(features) - 1}, "
                f"got {int(rows.min())} to {int(rows.max())}"
            )
        empty = (offsets.diff() == 0).nonzero()
        if reduction == "mean" and len(empty):
            raise DataError(f"`{name}` must give every region a row, region {first + int(empty[0])} has none")
    n_pos = regions.positive_offsets.diff()[:, None, None].double()
    n_neg = regions.negative_offsets.diff()[:, None, None].double()
    gram_p, gram_n = _centred_grams(features, regions)
    # Relative to the mean of the positives their sum is zero, and with it every mixed term.
    own = gram_p * n_pos
    similar = pair_scatter(own, own)
    dissimilar = pair_scatter(gram_p.mul_(n_neg), gram_n.mul_(n_pos))
    if reduction == "mean":
        similar = similar.mul_(1 / (n_pos * (n_pos - 1)).clamp_min(1))
        dissimilar = dissimilar.div_(n_pos * n_neg)
    for scatter in (similar, dissimilar):
        if not bool(scatter.isfinite().all()):
            raise LGMMLError("`features` must have products within the range of float64, got an overflow")
    return similar, dissimilar


def pooled_scatter(
    features: Tensor,  # (N, D)
    regions: Regions,  # K
    *,
    max_bytes: int = _MAX_BYTES,
) -> tuple[Tensor, Tensor]:  # (D, D), (D, D) float64
    """One Ssim and one Ddis for all regions: the mean over all their pairs, each pair within its region.

    A region counts by its pairs, so it is not the mean of `scatter_matrices`; no two regions are ever compared.
    """
    check_shape("features", features, (None, None))
    dim = features.shape[1]
    sums = torch.zeros(2, dim, dim, dtype=torch.float64, device=features.device)
    for some in _steps(regions, dim, max_bytes):
        part = scatter_matrices(features, regions.part(some), reduction="sum")
        sums += torch.stack([scatter.sum(0) for scatter in part])
    n_pos, n_neg = regions.positive_offsets.diff().double(), regions.negative_offsets.diff().double()
    similar, dissimilar = (n_pos * (n_pos - 1)).sum(), (n_pos * n_neg).sum()
    return sums[0] / similar.clamp_min(1), sums[1] / dissimilar.clamp_min(1)


def _centred_grams(features: Tensor, regions: Regions) -> tuple[Tensor, Tensor]:  # (K, D, D) each
    """XᵀX of both sides, the rows relative to the mean of the region's positives."""
    X, Z = features[regions.positives].to(torch.float64), features[regions.negatives].to(torch.float64)
    offsets = regions.positive_offsets
    ids_p, ids_n = segment_ids(offsets), segment_ids(regions.negative_offsets)
    # Relative to a row of the region first: equal rows and constant features then become zeros, not rounding.
    sizes = offsets.diff()
    shift = X.new_zeros(len(sizes), X.shape[1])
    shift[sizes > 0] = X[offsets[:-1][sizes > 0]]
    X -= shift[ids_p]
    Z -= shift[ids_n]
    mean = segment_sum(X * (1 / sizes.double())[ids_p, None], offsets)
    X -= mean[ids_p]
    Z -= mean[ids_n]
    return _grams(X, offsets), _grams(Z, regions.negative_offsets)


def _grams(X: Tensor, offsets: Tensor) -> Tensor:  # (P, D) -> (K, D, D)
    grams = [rows.mT @ rows for rows in torch.split(X, offsets.diff().tolist())]
    if not grams:
        return X.new_empty(0, X.shape[1], X.shape[1])
    return torch.stack(grams)


# Float64 temporaries alive at once, with a margin over what was measured: D×D matrices per region, copies of its rows.
_MATRICES_PER_REGION = 10
_COPIES_PER_ROW = 4


@dataclass(frozen=True)
class GMMLResult:
    """A metric M = F Fᵀ in factored form; the distance of v from the origin is ‖Fᵀv‖ = √(vᵀMv)."""

    factor: Tensor  # (..., D, D)

    @property
    def metric(self) -> Tensor:  # (..., D, D)
        """M itself."""
        return self.factor @ self.factor.mT


def gmml(
    S: Tensor,  # (..., D, D)
    D: Tensor,  # (..., D, D)
    t: float = 0.5,
    *,
    lam: float = 0.0,
    relative: bool = True,
    prior: Tensor | None = None,  # (..., D, D)
    method: str = "cholesky",
) -> GMMLResult:
    """The metric at weight t on the geodesic from S⁻¹ to D, M = S⁻¹ ♯ₜ D.

    It makes similar pairs near (S their scatter) and dissimilar pairs far (D theirs). At t=½ it is the one SPD
    solution of the Riccati equation M S M = D; t=0 gives S⁻¹, which forgets D, and t=1 gives D.

    With λ>0, S and D are regularised first: S + λτA₀⁻¹ and D + λτA₀ with τ = (tr S + tr D)/(2·dim), so that a
    large λ gives the prior metric A₀.

    Args:
        S: Scatter of similar pairs; batch dimensions broadcast against those of ``D``.
        D: Scatter of dissimilar pairs.
        t: Weight in [0, 1].
        lam: λ, at least 0. Positive semidefinite S and D need it.
        relative: Multiply λ by τ, the scale of the data; otherwise λ is absolute.
        prior: A₀, SPD; the identity when not given.
        method: ``"cholesky"`` or ``"eigh"``, see `lgmml_torch.functional.spd.geometric_mean`.

    Raises:
        LGMMLError: A matrix is not square, finite, symmetric and of a matching size, t or lam is out of range.
        NotSPDError: A matrix is not positive definite, or S and D are zero so that no scale can be taken.

    >>> gmml(torch.tensor([[0.25]]), torch.tensor([[4.0]])).metric  # M·¼·M = 4
    tensor([[4.]])
    """
    check_choice("method", method, METHODS)
    check_unit_interval("t", t)
    S, D, dtype = broadcast_pair(S, D, names=("S", "D"))
    shape, dim = S.shape, S.shape[-1]
    S, D = S.reshape(-1, dim, dim), D.reshape(-1, dim, dim)
    check_positive("lam", lam, zero=True)
    towards = _check_prior(prior, shape)
    S, D = _regularise(S, D, lam, relative, towards)
    F = stacked_factor(S, D, t, invert_first=True, method=method, dtype=dtype, names=("S", "D"))
    return GMMLResult(F.reshape(shape).to(dtype))


def gmml_bank(
    features: Tensor,  # (N, D)
    regions: Regions,  # K
    *,
    t: float = 0.5,
    lam: float = 0.1,
    relative: bool = True,
    prior: Tensor | None = None,  # (D, D) or (K, D, D)
    reduction: str = "mean",
    method: str = "cholesky",
    max_bytes: int = _MAX_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:  # (K, D, D)
    """Factors of the GMML metrics of K regions, `gmml` after `scatter_matrices`, in bounded memory.

    Regions are taken a few at a time, so that the float64 temporaries stay within ``max_bytes`` (a single region
    may need more: about ten matrices of D×D). The result has the dtype of the features.

    Regions, ``reduction`` and their errors are those of `scatter_matrices`; ``t`` to ``prior`` and ``method`` those of
    `gmml`, with one A₀ for all regions or one for each. ``progress`` is called with (regions done, K) after each step.

    Raises:
        NotSPDError: The rows of a region are all equal, or λ=0 and its scatter is singular beyond repair.
    """
    check_unit_interval("t", t)
    check_choice("method", method, METHODS)
    check_positive("lam", lam, zero=True)
    check_shape("features", features, (None, None))
    count, dim = len(regions), features.shape[1]
    towards = _check_prior(prior, torch.Size((count, dim, dim)))
    out = features.new_empty((count, dim, dim), dtype=torch.result_type(features, 1.0))
    for some in _steps(regions, dim, max_bytes):
        S, D = scatter_matrices(features, regions.part(some), reduction=reduction, first=some.start)
        members = torch.arange(some.start, some.stop, device=features.device)
        S, D = _regularise(S, D, lam, relative, towards, members)
        out[some] = stacked_factor(
            S, D, t, invert_first=True, method=method, dtype=out.dtype, names=("S", "D"), members=members
        )
        if progress is not None:
            progress(some.stop, count)
    return out


def _regularise(
    S: Tensor,  # (K, D, D)
    D: Tensor,  # (K, D, D)
    lam: float,
    relative: bool,
    towards: tuple[Tensor, Tensor] | None,  # A₀ and A₀⁻¹, (1 or K', D, D)
    members: Tensor | None = None,  # (K,)
) -> tuple[Tensor, Tensor]:
    """S + λτA₀⁻¹ and D + λτA₀; τ=1 for an absolute λ."""
    if lam == 0.0:
        return S, D
    tau = torch.ones(len(S), dtype=S.dtype, device=S.device)
    if relative:
        tau = (S.diagonal(dim1=-2, dim2=-1).mean(dim=-1) + D.diagonal(dim1=-2, dim2=-1).mean(dim=-1)) / 2
        if bool((tau <= 0).any()):
            first = int((tau <= 0).nonzero()[0])
            raise NotSPDError(
                f"`S` and `D` must have a positive mean diagonal to scale `lam` by, got {float(tau[first]):.3g} in "
                f"member {first if members is None else int(members[first])}: are all its rows equal?"
            )
    weight = (lam * tau)[:, None, None]
    if towards is None:
        S, D = S.clone(), D.clone()
        for scatter in (S, D):
            scatter.diagonal(dim1=-2, dim2=-1).add_(weight[:, 0])
        return S, D
    A, A_inverse = towards
    if len(A) > 1 and members is not None:
        A, A_inverse = A[members], A_inverse[members]
    return torch.addcmul(S, weight, A_inverse), torch.addcmul(D, weight, A)


def _check_prior(prior: Tensor | None, shape: torch.Size) -> tuple[Tensor, Tensor] | None:
    """A₀ and its inverse as float64 stacks of 1 or as many matrices as ``shape`` holds."""
    if prior is None:
        return None
    check_shape("prior", prior, shape[-2:] if prior.dim() == 2 else shape)
    A = prior.to(torch.float64).reshape(-1, *shape[-2:])
    return A, torch.cholesky_inverse(cholesky_jittered(A, name="prior"))


def _steps(regions: Regions, dim: int, max_bytes: int) -> Iterator[slice]:
    """Runs of consecutive regions whose temporaries fit in ``max_bytes``, at least one region each."""
    rows = regions.positive_offsets.diff() + regions.negative_offsets.diff()
    most = max(rows.tolist(), default=0)
    return row_slices(len(rows), 8 * dim * (_MATRICES_PER_REGION * dim + _COPIES_PER_ROW * most), max_bytes)
