"""Weighted geometric means of symmetric positive definite (SPD) matrices, batched.

The mean is delivered as a factor F with F Fᵀ = A ♯ₜ B: a distance needs only Fᵀv, and a product F Fᵀ cannot
lose its positive definiteness to rounding. Everything is computed in float64 and returned in the caller's dtype.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from lgmml_torch.checks import (
    LGMMLError,
    check_choice,
    check_finite,
    check_square,
    check_symmetric,
    check_unit_interval,
)
from lgmml_torch.functional.cholesky import cholesky_jittered
from lgmml_torch.functional.spd_routes import METHODS, stacked_factor

__all__ = ["METHODS", "cholesky_jittered", "geometric_mean", "geometric_mean_factor"]


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
    F = geometric_mean_factor(A, B, t, method=method, dtype=torch.float64)
    return (F @ F.mT).to(result_dtype(A, B))


def geometric_mean_factor(
    A: Tensor,  # (..., D, D)
    B: Tensor,  # (..., D, D)
    t: float = 0.5,
    *,
    invert_first: bool = False,
    method: str = "cholesky",
    dtype: torch.dtype | None = None,
) -> Tensor:  # (..., D, D)
    """A factor F of the mean, F Fᵀ = A ♯ₜ B, or of A⁻¹ ♯ₜ B with ``invert_first``, which never forms the inverse.

    Args:
        A: SPD matrices; batch dimensions broadcast against those of ``B``.
        B: SPD matrices.
        t: Weight in [0, 1].
        invert_first: Start the geodesic at A⁻¹ instead of A.
        method: ``"cholesky"`` or ``"eigh"``, see `geometric_mean`.
        dtype: Of the result; the inputs' own when not given.

    Raises:
        LGMMLError: A or B is not square, finite, symmetric and of a matching size, or t is outside [0, 1].
        NotSPDError: A or B is not positive definite.

    >>> geometric_mean_factor(torch.tensor([[4.0]]), torch.tensor([[9.0]]), invert_first=True) ** 2
    tensor([[1.5000]])
    """
    check_choice("method", method, METHODS)
    check_unit_interval("t", t)
    X, Y = broadcast_pair(A, B, names=("A", "B"))
    shape, size, dtype = X.shape, X.shape[-2:], dtype or result_dtype(A, B)
    X, Y = X.reshape(-1, *size), Y.reshape(-1, *size)
    return stacked_factor(X, Y, t, invert_first=invert_first, method=method, dtype=dtype).reshape(shape).to(dtype)


def broadcast_pair(
    A: Tensor,  # (..., D, D)
    B: Tensor,  # (..., D, D)
    *,
    names: tuple[str, str],
) -> tuple[Tensor, Tensor]:  # (..., D, D), (..., D, D) float64
    """Two stacks in float64 and of one shape, each checked to be square, finite and symmetric."""
    shapes = f"got {tuple(A.shape)} and {tuple(B.shape)}"
    A, B = A.to(torch.float64), B.to(torch.float64)
    for name, X in zip(names, (A, B), strict=True):
        check_square(name, X)
        # The usual case, finite and symmetric to the last digit, is settled without a temporary.
        if not (torch.isfinite(X.sum()) and torch.equal(X, X.mT)):
            check_finite(name, X)
            check_symmetric(name, X)
    if A.shape[-1] == B.shape[-1] > 0:
        with contextlib.suppress(RuntimeError):
            A, B = torch.broadcast_tensors(A, B)  # type: ignore[no-untyped-call]
            return A, B
    raise LGMMLError(f"`{names[0]}` and `{names[1]}` must have matching shapes (..., D, D), D >= 1, {shapes}")


def result_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype to return: what the inputs promote to, or torch's default when all are integers."""
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype if dtype.is_floating_point else torch.get_default_dtype()
