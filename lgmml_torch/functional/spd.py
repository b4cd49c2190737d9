"""Weighted geometric means of symmetric positive definite (SPD) matrices, batched.

The mean is delivered as a factor F with F Fᵀ = A ♯ₜ B: a distance needs only Fᵀv, and a product F Fᵀ cannot
lose its positive definiteness to rounding. Everything is computed in float64 and returned in the caller's dtype.
Matrices that are singular to rounding get a little jitter, those beyond it a named error.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, NotSPDError, NumericsWarning, check_choice, check_finite, check_unit_interval
from lgmml_torch.segments import row_slices

# Relative to the mean diagonal entry: from the rounding of float64 up to that of float32 input.
_FIRST_JITTER = 1e-15
_JITTER_TRIES = 10


def cholesky_jittered(A: Tensor, *, name: str = "A") -> Tensor:  # (..., D, D) -> (..., D, D)
    """The lower Cholesky factor L of A = LLᵀ; members that fail are tried again with a little more on the diagonal.

    Jitter starts at 1e-15 of the member's mean diagonal entry and grows tenfold up to 1e-6. Only failing members
    get any, and a `NumericsWarning` says how much; the others are returned as torch computes them.

    Raises:
        NotSPDError: No jitter was enough; the member and its smallest eigenvalue are named.

    >>> cholesky_jittered(torch.tensor([[4.0, 2.0], [2.0, 10.0]]))
    tensor([[2., 0.], [1., 3.]])
    """
    check_finite(name, A)
    _check_symmetric(name, A)
    size = A.shape[-2:]
    return _stacked_cholesky(A.reshape(-1, *size), name).reshape(A.shape)


def _check_symmetric(name: str, A: Tensor) -> None:
    """Require matrices ``(..., D, D)`` with ``A == Aᵀ`` up to 1e-6 of the largest entry of each."""
    if A.dim() < 2 or A.shape[-1] != A.shape[-2]:
        raise LGMMLError(f"`{name}` must be square, (..., D, D), got {tuple(A.shape)}")
    if A.numel() == 0:
        return
    if not A.is_floating_point():
        A = A.double()
    gap = (A - A.mT).amax(dim=(-2, -1))  # each difference stands there with both signs
    scale = A.abs().amax(dim=(-2, -1))
    if bool((gap > 1e-6 * scale).any()):
        worst = float((gap / scale.clamp_min(torch.finfo(A.dtype).tiny)).max())
        raise LGMMLError(f"`{name}` must be symmetric, got a relative asymmetry of {worst:.3g}")


def _stacked_cholesky(A: Tensor, name: str, members: Tensor | None = None) -> Tensor:  # (K, D, D), (K,) -> (K, D, D)
    """`cholesky_jittered` for input that has been checked; errors use the numbers in ``members``, if given."""
    L: Tensor
    L, info = torch.linalg.cholesky_ex(A)
    failing = info.nonzero()[:, 0]
    if not len(failing):
        return L
    retried, largest = len(failing), 0.0
    for attempt in range(_JITTER_TRIES):
        diagonal = A[failing].diagonal(dim1=-2, dim2=-1)
        jitter = diagonal.abs().mean(dim=-1, keepdim=True) * (_FIRST_JITTER * 10**attempt)
        candidate, info = torch.linalg.cholesky_ex(A[failing] + torch.diag_embed(jitter.expand_as(diagonal)))
        mended = info == 0
        L[failing[mended]] = candidate[mended]
        largest = max([largest, *jitter[mended, 0].tolist()])
        failing = failing[~mended]
        if not len(failing):
            warnings.warn(
                f"`{name}` is singular to rounding: added up to {largest:.3g} to the diagonal of {retried} of "
                f"{len(A)} matrices",
                NumericsWarning,
                stacklevel=2,
            )
            return L
    first = int(failing[0])
    member = first if members is None else int(members[first])
    raise _not_spd(name, member, float(torch.linalg.eigvalsh(A[first])[0]))


def _not_spd(name: str, member: int, smallest: float) -> NotSPDError:
    """The error for one matrix of a stack that is not positive definite."""
    return NotSPDError(f"`{name}` must be positive definite, got smallest eigenvalue {smallest:.3g} in member {member}")


METHODS = ("cholesky", "eigh")
_EPS = torch.finfo(torch.float64).eps

# Relative error allowed in the smallest eigenvalue of the middle matrix before the singular value route takes over;
# results that are going to be rounded to a coarser dtype are content with its rounding.
_ACCURACY = 2e-11

_CACHED_ELEMENTS = 150_000  # chosen by measurement: temporaries of this many elements stay in a CPU's cache


def stacked_factor(
    A: Tensor,  # (K, D, D) float64
    B: Tensor,  # (K, D, D) float64
    t: float,
    *,
    invert_first: bool,
    method: str = "cholesky",
    dtype: torch.dtype = torch.float64,
    names: tuple[str, str] = ("A", "B"),
    members: Tensor | None = None,  # (K,)
) -> Tensor:  # (K, D, D) float64
    """A factor F of the mean, F Fᵀ = A ♯ₜ B, or of A⁻¹ ♯ₜ B with ``invert_first``, which never forms the inverse.

    The input has been checked. The factor is accurate to what ``dtype`` can hold. Errors of the Cholesky route use the
    numbers in ``members``.
    """
    if method == "eigh":
        return _by_eigh(A, B, t, invert_first, names)
    L = _stacked_cholesky(A, names[0], members)
    F, hard = torch.empty_like(A), torch.zeros(len(A), dtype=torch.bool, device=A.device)
    for part in row_slices(len(A), A.shape[-1] ** 2, _CACHED_ELEMENTS):
        F[part], share = _by_cholesky(L[part], B[part], t, invert_first)
        hard[part] = share * max(_ACCURACY, torch.finfo(dtype).eps) <= _EPS
    if bool(hard.any()):
        which = hard.nonzero()[:, 0]
        R = _stacked_cholesky(B[which], names[1], which if members is None else members[which])
        F[which] = _by_svd(L[which], R, t, invert_first)
    return F


def _by_cholesky(
    L: Tensor,  # (K, D, D), A = LLᵀ
    B: Tensor,  # (K, D, D)
    t: float,
    invert_first: bool,
) -> tuple[Tensor, Tensor]:  # (K, D, D), (K,)
    """F = L U w^{t/2} with L⁻¹BL⁻ᵀ = U w Uᵀ, or F = L⁻ᵀ U w^{t/2} with LᵀBL = U w Uᵀ.

    Also the smallest eigenvalue w as a share of the largest possible one, which tells how much of it is rounding.
    Both are scaled first, by powers of two so that no digit changes: their product may leave the range of float64.
    """
    scale_a, scale_b = _power_of_two(L), _power_of_two(B)
    L, B = L / scale_a, B / scale_b
    if invert_first:
        middle = L.mT @ B @ L
    else:
        half = torch.linalg.solve_triangular(L, B, upper=False)
        middle = torch.linalg.solve_triangular(L, half.mT, upper=False)
    w, U = torch.linalg.eigh(middle)
    power = t - 1 if invert_first else 1 - t
    weight = scale_a**power * scale_b ** (t / 2)
    U = U * (w.pow(t / 2).unsqueeze(-2) * weight)
    # Rounding in the middle matrix is relative to the norms of its factors, which may exceed its own by far.
    pivots = L.diagonal(dim1=-2, dim2=-1).square()
    norm = pivots.amax(dim=-1) if invert_first else 1 / pivots.amin(dim=-1)
    norm = norm * B.diagonal(dim1=-2, dim2=-1).amax(dim=-1)
    share = torch.where(w[:, 0] > 0, w[:, 0] / torch.maximum(norm, w[:, -1]), 0.0)
    return _lifted(L, U, invert_first), share


def _lifted(L: Tensor, U: Tensor, invert_first: bool) -> Tensor:  # (K, D, D)
    """LU, or L⁻ᵀU."""
    if not invert_first:
        return L @ U
    lifted: Tensor = torch.linalg.solve_triangular(L.mT, U, upper=True)
    return lifted


def _by_svd(L: Tensor, R: Tensor, t: float, invert_first: bool) -> Tensor:  # (K, D, D), (K, D, D) -> (K, D, D)
    """The same from the factors of A = LLᵀ and B = RRᵀ, which does not square the condition of the middle matrix.

    The middle matrix is XXᵀ for X = L⁻¹R or LᵀR, and the singular values of X keep the digits that the eigenvalues
    of the product lose: at condition 1e12 the Riccati residual falls from 1e-4 to 1e-13. Several times slower than
    `eigh`, hence only where it is needed.
    """
    U, s, _ = torch.linalg.svd(L.mT @ R if invert_first else torch.linalg.solve_triangular(L, R, upper=False))
    U = U * _clamped(s, "singular values of the middle matrix").pow(t).unsqueeze(-2)
    return _lifted(L, U, invert_first)


def _by_eigh(A: Tensor, B: Tensor, t: float, invert_first: bool, names: tuple[str, str]) -> Tensor:
    """The equation as it stands: P = A^½ or A^−½, then the t-th power of P⁻¹BP⁻¹ between two P."""
    scale_a, scale_b = _power_of_two(A), _power_of_two(B)
    v, V = torch.linalg.eigh(A / scale_a)
    _require_positive(v, names[0])
    root = _clamped(v, f"eigenvalues of `{names[0]}`").sqrt().unsqueeze(-2)
    P, inverse = (V * root) @ V.mT, (V / root) @ V.mT
    if invert_first:
        P, inverse = inverse, P
    w, U = torch.linalg.eigh(inverse @ (B / scale_b) @ inverse)
    if bool((w[:, 0] < _EPS * w[:, -1]).any()) or bool((w[:, -1] <= 0).any()):
        _require_positive(torch.linalg.eigvalsh(B), names[1])
    root = _clamped(w, "eigenvalues of the middle matrix").pow(t / 2).unsqueeze(-2)
    power = t - 1 if invert_first else 1 - t
    F: Tensor = P @ (U * root) * (scale_a ** (power / 2) * scale_b ** (t / 2))
    return F


def _require_positive(spectrum: Tensor, name: str) -> None:  # (K, D), ascending
    """Reject matrices that are further from positive definite than rounding of float32 input can explain."""
    bad = ((spectrum[:, 0] < -1e-6 * spectrum[:, -1]) | (spectrum[:, -1] <= 0)).nonzero()
    if bad.numel():
        member = int(bad[0])
        raise _not_spd(name, member, float(spectrum[member, 0]))


def _clamped(values: Tensor, what: str) -> Tensor:  # (K, D) -> (K, D)
    """Lift values below ε times the largest of their row to that level, with a warning: only rounding is left there."""
    floor = _EPS * values.amax(dim=-1, keepdim=True)
    low = int((values < floor).sum())
    if low:
        warnings.warn(f"lifted {low} {what} to {_EPS:.3g} of the largest", NumericsWarning, stacklevel=2)
    return torch.maximum(values, floor)


def _power_of_two(A: Tensor) -> Tensor:  # (K, D, D) -> (K, 1, 1)
    """The power of two at or just below the largest diagonal entry; 1 where that is not positive."""
    largest = A.diagonal(dim1=-2, dim2=-1).amax(dim=-1)[:, None, None]
    return torch.where(largest > 0, largest / (2 * torch.frexp(largest)[0]), 1.0)


def geometric_mean(
    A: Tensor,  # (..., D, D)
    B: Tensor,  # (..., D, D)
    t: float = 0.5,
    *,
    method: str = "cholesky",
) -> Tensor:  # (..., D, D)
    """The point at weight t on the geodesic from A to B, A ♯ₜ B = A^½ (A^−½ B A^−½)ᵗ A^½.

    t=0 gives A and t=1 gives B; t=½ is the geometric mean, the one SPD solution G of G A⁻¹ G = B. Commuting
    matrices give A^{1−t} Bᵗ.

    Args:
        A: SPD matrices; batch dimensions broadcast against those of ``B``.
        B: SPD matrices.
        t: Weight in [0, 1].
        method: ``"cholesky"`` (fast, accurate up to condition 1e12) or ``"eigh"`` (the equation as it stands).

    Raises:
        LGMMLError: A or B is not square, finite, symmetric and of a matching size, or t is outside [0, 1].
        NotSPDError: A or B is not positive definite.

    >>> geometric_mean(torch.tensor([[4.0]]), torch.tensor([[9.0]]))
    tensor([[6.]])
    """
    check_choice("method", method, METHODS)
    check_unit_interval("t", t)
    X, Y, dtype = broadcast_pair(A, B, names=("A", "B"))
    size = X.shape[-2:]
    F = stacked_factor(X.reshape(-1, *size), Y.reshape(-1, *size), t, invert_first=False, method=method)
    return (F @ F.mT).reshape(X.shape).to(dtype)


def broadcast_pair(
    A: Tensor,  # (..., D, D)
    B: Tensor,  # (..., D, D)
    *,
    names: tuple[str, str],
) -> tuple[Tensor, Tensor, torch.dtype]:  # (..., D, D), (..., D, D) float64
    """Two stacks in float64 and of one shape, checked to be square, finite and symmetric, and the dtype to return."""
    dtype = torch.promote_types(A.dtype, B.dtype)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    shapes = f"got {tuple(A.shape)} and {tuple(B.shape)}"
    A, B = A.to(torch.float64), B.to(torch.float64)
    for name, X in zip(names, (A, B), strict=True):
        check_finite(name, X)
        _check_symmetric(name, X)
    if A.shape[-1] == B.shape[-1] > 0:
        with contextlib.suppress(RuntimeError):
            A, B = torch.broadcast_tensors(A, B)  # type: ignore[no-untyped-call]
            return A, B, dtype
    raise LGMMLError(f"`{names[0]}` and `{names[1]}` must have matching shapes (..., D, D), D >= 1, {shapes}")
