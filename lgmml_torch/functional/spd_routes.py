"""The two routes to a factor of the geometric mean, for stacks of checked float64 matrices.

Here and nowhere else is the arithmetic; `lgmml_torch.functional.spd` is the interface.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lgmml_torch.checks import NumericsWarning
from lgmml_torch.functional.cholesky import not_spd, stacked_cholesky

METHODS = ("cholesky", "eigh")
EPS = torch.finfo(torch.float64).eps

# Relative error allowed in the smallest eigenvalue of the middle matrix before the singular value route takes over;
# results that are going to be rounded to a coarser dtype are content with its rounding.
ACCURACY = 2e-11

# Chosen by measurement: temporaries of this many elements stay in a CPU's cache, blocks of this width fill its units.
CACHED_ELEMENTS = 150_000
BLOCK = 128


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
    """`geometric_mean_factor` for checked input, accurate to what ``dtype`` can hold.

    Errors of the Cholesky route use the numbers in ``members``.
    """
    if method == "eigh":
        return _by_eigh(A, B, t, invert_first, names)
    L = stacked_cholesky(A, names[0], members)
    F, hard = torch.empty_like(A), torch.zeros(len(A), dtype=torch.bool, device=A.device)
    step = max(1, CACHED_ELEMENTS // A.shape[-1] ** 2) if A.device.type == "cpu" else max(1, len(A))
    for start in range(0, len(A), step):
        part = slice(start, start + step)
        F[part], share = _by_cholesky(L[part], B[part], t, invert_first)
        hard[part] = share * max(ACCURACY, torch.finfo(dtype).eps) <= EPS
    if bool(hard.any()):
        which = hard.nonzero().squeeze(-1)
        R = stacked_cholesky(B[which], names[1], which if members is None else members[which])
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
        middle = _lower_congruence(L, B)
    else:
        half = torch.linalg.solve_triangular(L, B, upper=False)
        middle = torch.linalg.solve_triangular(L, half.mT, upper=False)
    w, U = torch.linalg.eigh(middle)
    weight = scale_a ** (t - 1 if invert_first else 1 - t) * scale_b ** (t / 2)
    U = U * (w.pow(t / 2).unsqueeze(-2) * weight)
    # Rounding in the middle matrix is relative to the norms of its factors, which may exceed its own by far.
    pivots = L.diagonal(dim1=-2, dim2=-1).square()
    norm = (pivots.amax(-1) if invert_first else 1 / pivots.amin(-1)) * B.diagonal(dim1=-2, dim2=-1).amax(-1)
    share = torch.where(w[:, 0] > 0, w[:, 0] / torch.maximum(norm, w[:, -1]), 0.0)
    return (torch.linalg.solve_triangular(L.mT, U, upper=True) if invert_first else L @ U), share


def _by_svd(
    L: Tensor,  # (K, D, D), A = LLᵀ
    R: Tensor,  # (K, D, D), B = RRᵀ
    t: float,
    invert_first: bool,
) -> Tensor:  # (K, D, D)
    """The same from the factors of A and B, which does not square the condition of the middle matrix.

    The middle matrix is XXᵀ for X = L⁻¹R or LᵀR, and the singular values of X keep the digits that the eigenvalues
    of the product lose: at condition 1e12 the Riccati residual falls from 1e-4 to 1e-13. Several times slower than
    `eigh`, hence only where it is needed.
    """
    U, s, _ = torch.linalg.svd(L.mT @ R if invert_first else torch.linalg.solve_triangular(L, R, upper=False))
    U = U * _clamped(s, "singular values of the middle matrix").pow(t).unsqueeze(-2)
    F: Tensor = torch.linalg.solve_triangular(L.mT, U, upper=True) if invert_first else L @ U
    return F


def _lower_congruence(
    L: Tensor,  # (K, D, D)
    B: Tensor,  # (K, D, D)
) -> Tensor:  # (K, D, D)
    """The lower triangle of LᵀBL, by column blocks: the zeros of L save half of the work at large D."""
    out = torch.zeros_like(B)
    for start in range(0, L.shape[-1], BLOCK):
        tail, columns = slice(start, None), slice(start, start + BLOCK)
        out[:, tail, columns] = L[:, tail, tail].mT @ (B[:, tail, tail] @ L[:, tail, columns])
    return out


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
    if bool((w[:, 0] < EPS * w[:, -1]).any()) or bool((w[:, -1] <= 0).any()):
        _require_positive(torch.linalg.eigvalsh(B), names[1])
    power = _clamped(w, "eigenvalues of the middle matrix").pow(t / 2).unsqueeze(-2)
    F: Tensor = P @ (U * power) * (scale_a ** ((t - 1 if invert_first else 1 - t) / 2) * scale_b ** (t / 2))
    return F


def _require_positive(
    spectrum: Tensor,  # (K, D), ascending
    name: str,
) -> None:
    """Reject matrices that are further from positive definite than rounding of float32 input can explain."""
    bad = ((spectrum[:, 0] < -1e-6 * spectrum[:, -1]) | (spectrum[:, -1] <= 0)).nonzero()
    if bad.numel():
        member = int(bad[0])
        raise not_spd(name, member, float(spectrum[member, 0]))


def _clamped(
    values: Tensor,  # (K, D)
    what: str,
) -> Tensor:  # (K, D)
    """Lift values below ε times the largest of their row to that level, with a warning: only rounding is left there."""
    floor = EPS * values.amax(-1, keepdim=True)
    low = int((values < floor).sum())
    if low:
        warnings.warn(f"lifted {low} {what} to {EPS:.3g} of the largest", NumericsWarning, stacklevel=2)
    return torch.maximum(values, floor)


def _power_of_two(
    A: Tensor,  # (K, D, D)
) -> Tensor:  # (K, 1, 1)
    """The power of two at or just below the largest diagonal entry; 1 where that is not positive."""
    largest = A.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
    return torch.where(largest > 0, largest / (2 * torch.frexp(largest)[0]), 1.0)
