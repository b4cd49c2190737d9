"""Column sums in float64 over features that are too many to copy in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_finite, check_shape


def row_blocks(
    features: Tensor,  # (N, D)
    max_elements: int = 1 << 22,
) -> Iterator[Tensor]:  # (n, D) float64
    """The rows in float64, a block at a time, so that sums over them need no float64 copy of the whole."""
    rows = max(1, max_elements // max(1, features.shape[1]))
    for start in range(0, features.shape[0], rows):
        yield features[start : start + rows].double()


def column_moments(
    features: Tensor,  # (N, D)
) -> tuple[Tensor, Tensor]:  # (D,), (D,) float64
    """Mean and (population) standard deviation of each column, in float64.

    Rows are taken relative to the first, so a constant column has a deviation of exactly 0 however large its value.

    >>> column_moments(torch.tensor([[1.0, 0.1], [3.0, 0.1]]))[1].tolist()
    [1.0, 0.0]
    """
    check_shape("features", features, (None, None))
    check_finite("features", features)
    if len(features) == 0:
        raise LGMMLError("`features` must have at least one row, got none")
    origin = features[0].double()
    total, squares = torch.zeros_like(origin), torch.zeros_like(origin)
    for block in row_blocks(features):
        total += (block - origin).sum(0)
    mean = total / len(features)
    for block in row_blocks(features):
        squares += (block - origin - mean).square().sum(0)
    return origin + mean, (squares / len(features)).sqrt()
