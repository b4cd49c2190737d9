"""Cholesky factors of matrices that may be singular to rounding: jitter for those that fail, then a named error."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lgmml_torch.checks import NotSPDError, NumericsWarning, check_finite, check_symmetric

# Relative to the mean diagonal entry: from the rounding of float64 up to that of float32 input.
FIRST_JITTER = 1e-15
JITTER_TRIES = 10


def cholesky_jittered(
    A: Tensor,  # (..., D, D)
    *,
    name: str = "A",
) -> Tensor:  # (..., D, D)
    """The lower Cholesky factor L of A = LLᵀ; members that fail are tried again with a little more on the diagonal.

    Jitter starts at 1e-15 of the member's mean diagonal entry and grows tenfold up to 1e-6. Only failing members
    get any, and a `NumericsWarning` says how much; the others are returned as torch computes them.

    Raises:
        LGMMLError: A is not square, finite and symmetric.
        NotSPDError: No jitter was enough; the member and its smallest eigenvalue are named.

    >>> cholesky_jittered(torch.tensor([[4.0, 2.0], [2.0, 10.0]]))
    tensor([[2., 0.], [1., 3.]])
    """
    check_finite(name, A)
    check_symmetric(name, A)
    size = A.shape[-2:]
    return stacked_cholesky(A.reshape(-1, *size), name).reshape(A.shape)


def stacked_cholesky(
    A: Tensor,  # (K, D, D)
    name: str,
    members: Tensor | None = None,  # (K,)
) -> Tensor:  # (K, D, D)
    """`cholesky_jittered` for input that has been checked; errors use the numbers in ``members``, if given."""
    L: Tensor
    L, info = torch.linalg.cholesky_ex(A)
    failing = info.nonzero().squeeze(-1)
    if not len(failing):
        return L
    retried, largest = len(failing), 0.0
    for attempt in range(JITTER_TRIES):
        diagonal = A[failing].diagonal(dim1=-2, dim2=-1)
        jitter = diagonal.abs().mean(-1, keepdim=True) * (FIRST_JITTER * 10**attempt)
        candidate, info = torch.linalg.cholesky_ex(A[failing] + torch.diag_embed(jitter.expand_as(diagonal)))
        mended = info == 0
        if bool(mended.any()):
            L[failing[mended]] = candidate[mended]
            largest = max(largest, float(jitter[mended].amax()))
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
    raise not_spd(name, member, float(torch.linalg.eigvalsh(A[first])[0]))


def not_spd(name: str, member: int, smallest: float) -> NotSPDError:
    """The error for one matrix of a stack that is not positive definite."""
    return NotSPDError(f"`{name}` must be positive definite, got smallest eigenvalue {smallest:.3g} in member {member}")
