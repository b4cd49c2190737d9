"""Geometric-mean metric learning (GMML): one metric from two scatter matrices, or a bank of them, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, NotSPDError, check_choice, check_shape, check_unit_interval
from lgmml_torch.functional.cholesky import cholesky_jittered
from lgmml_torch.functional.scatter import REDUCTIONS, Side, check_sides, pair_scatter, scatter_matrices
from lgmml_torch.functional.spd import broadcast_pair, result_dtype
from lgmml_torch.functional.spd_routes import METHODS, stacked_factor

__all__ = ["GMML", "gmml", "gmml_bank", "scatter_matrices"]

# Float64 temporaries alive at once, with a margin over what was measured: D×D matrices per region, copies of its rows.
MATRICES_PER_REGION = 10
COPIES_PER_ROW = 4


@dataclass(frozen=True)
class GMML:
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
) -> GMML:
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
    dtype = result_dtype(S, D)
    S, D = broadcast_pair(S, D, names=("S", "D"))
    shape, dim = S.shape, S.shape[-1]
    S, D = S.reshape(-1, dim, dim), D.reshape(-1, dim, dim)
    _check_lam(lam)
    towards = _check_prior(prior, shape)
    S, D = _regularise(S, D, lam, relative, towards)
    F = stacked_factor(S, D, t, invert_first=True, method=method, dtype=dtype, names=("S", "D"))
    return GMML(F.reshape(shape).to(dtype))


def gmml_bank(
    features: Tensor,  # (N, D)
    positives: Tensor,  # (P,)
    positive_offsets: Tensor,  # (K+1,)
    negatives: Tensor,  # (M,)
    negative_offsets: Tensor,  # (K+1,)
    *,
    t: float = 0.5,
    lam: float = 0.1,
    relative: bool = True,
    prior: Tensor | None = None,  # (D, D) or (K, D, D)
    positive_weights: Tensor | None = None,  # (P,)
    negative_weights: Tensor | None = None,  # (M,)
    reduction: str = "mean",
    max_bytes: int = 2**29,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:  # (K, D, D)
    """Factors of the GMML metrics of K regions, `gmml` after `scatter_matrices`, in bounded memory.

    Regions are taken a few at a time, so that the float64 temporaries stay within ``max_bytes`` (a single region
    may need more: about ten matrices of D×D). The result has the dtype of the features.

    Args:
        features: One row per document.
        positives: Row numbers of the regions' positives, region after region.
        positive_offsets: Where each region begins in ``positives``.
        negatives: Row numbers of the regions' negatives.
        negative_offsets: Where each region begins in ``negatives``.
        t: Weight in [0, 1] on the geodesic from S⁻¹ to D.
        lam: λ, at least 0.
        relative: Multiply λ by the scale τ of the region's scatter; otherwise λ is absolute.
        prior: A₀, one for all regions or one for each; the identity when not given.
        positive_weights: At least 0; all 1 when not given.
        negative_weights: At least 0; all 1 when not given.
        reduction: ``"mean"`` over pairs, or ``"sum"``.
        max_bytes: Bound on temporary memory.
        progress: Called with (regions done, K) after each step.

    Raises:
        LGMMLError: An argument has a wrong shape or value, is not finite, or refers to rows that do not exist.
        DataError: A region has no positives or no negatives to take a mean over.
        NotSPDError: The rows of a region are all equal, or λ=0 and its scatter is singular beyond repair.

    >>> X = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
    >>> F = gmml_bank(X, torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([2]), torch.tensor([0, 1]))
    >>> (F @ F.mT).diagonal(dim1=-2, dim2=-1)  # positives differ in feature 0, negatives in feature 1
    tensor([[0.7245, 5.7843]])
    """
    check_unit_interval("t", t)
    check_choice("reduction", reduction, REDUCTIONS)
    _check_lam(lam)
    sides = check_sides(
        features, positives, positive_offsets, positive_weights, negatives, negative_offsets, negative_weights
    )
    count, dim = len(positive_offsets) - 1, features.shape[1]
    towards = _check_prior(prior, torch.Size((count, dim, dim)))
    out = features.new_empty((count, dim, dim), dtype=result_dtype(features))
    for start, stop in _steps(sides, dim, max_bytes):
        positive, negative = (side.part(start, stop) for side in sides)
        S, D = pair_scatter(features, positive, negative, reduction, first=start)
        members = torch.arange(start, stop, device=features.device)
        S, D = _regularise(S, D, lam, relative, towards, members)
        F = stacked_factor(S, D, t, invert_first=True, dtype=out.dtype, names=("S", "D"), members=members)
        out[start:stop] = F
        if progress is not None:
            progress(stop, count)
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
        tau = (S.diagonal(dim1=-2, dim2=-1).mean(-1) + D.diagonal(dim1=-2, dim2=-1).mean(-1)) / 2
        if bool((tau <= 0).any()):
            first = int((tau <= 0).nonzero()[0])
            raise NotSPDError(
                f"`S` and `D` must have a positive mean diagonal to scale `lam` by, got {float(tau[first]):.3g} in "
                f"member {first if members is None else int(members[first])}: are all its rows equal?"
            )
    weight = (lam * tau)[:, None, None]
    if towards is None:
        eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
        return torch.addcmul(S, weight, eye), torch.addcmul(D, weight, eye)
    A, A_inverse = (X if len(X) == 1 or members is None else X[members] for X in towards)
    return torch.addcmul(S, weight, A_inverse), torch.addcmul(D, weight, A)


def _check_prior(prior: Tensor | None, shape: torch.Size) -> tuple[Tensor, Tensor] | None:
    """A₀ and its inverse as float64 stacks of 1 or as many matrices as ``shape`` holds."""
    if prior is None:
        return None
    check_shape("prior", prior, shape[-2:] if prior.dim() == 2 else shape)
    A = prior.to(torch.float64).reshape(-1, *shape[-2:])
    return A, torch.cholesky_inverse(cholesky_jittered(A, name="prior"))


def _check_lam(lam: float) -> None:
    if not (lam >= 0 and math.isfinite(lam)):
        raise LGMMLError(f"`lam` must be finite and at least 0, got {lam}")


def _steps(sides: tuple[Side, Side], dim: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of consecutive regions whose temporaries fit in ``max_bytes``, at least one region each."""
    rows = sides[0].offsets.diff() + sides[1].offsets.diff()
    costs = (8 * dim * (MATRICES_PER_REGION * dim + COPIES_PER_ROW * rows)).tolist()
    start = used = 0
    for region, cost in enumerate(costs):
        if region > start and used + cost > max_bytes:
            yield start, region
            start, used = region, 0
        used += cost
    if costs:
        yield start, len(costs)
