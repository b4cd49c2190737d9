"""Geometric means the plain way: one pair at a time, square roots by eigendecomposition, nothing shared."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def matrix_power(A: np.ndarray, power: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(A)
    return sum(value**power * np.outer(v, v) for value, v in zip(values, vectors.T, strict=True))


def geometric_mean(A: Tensor, B: Tensor, t: float) -> Tensor:
    """A^½ (A^−½ B A^−½)ᵗ A^½, literally."""
    a, b = A.numpy(), B.numpy()
    root, inverse_root = matrix_power(a, 0.5), matrix_power(a, -0.5)
    return torch.from_numpy(root @ matrix_power(inverse_root @ b @ inverse_root, t) @ root)


def random_spd(*batch: int, dim: int, cond: float, generator: torch.Generator, basis: Tensor | None = None) -> Tensor:
    """SPD matrices whose eigenvalues run evenly in the logarithm from 1 down to 1/cond, in random directions."""
    if basis is None:
        basis = random_rotation(*batch, dim=dim, generator=generator)
    spectrum = torch.logspace(0, -math.log10(cond), dim, dtype=torch.float64)
    if basis.dim() > 2:
        spectrum = spectrum[torch.rand(*batch, dim, generator=generator).argsort(-1)]
    A = (basis * spectrum.unsqueeze(-2)) @ basis.mT
    return (A + A.mT) / 2


def random_rotation(*batch: int, dim: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(*batch, dim, dim, dtype=torch.float64, generator=generator))[0]


def relative_error(got: Tensor, want: Tensor) -> float:
    """The largest Frobenius error of a stack, relative to the matrix wanted."""
    norm = torch.linalg.matrix_norm
    return float((norm(got - want) / norm(want)).max())
