"""Measures that are not built in."""

from __future__ import annotations

import torch
from torch import Tensor

from lgmml_torch.segments import argsort_segments


def first_is_good(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
    """Whether the first document is relevant; lists of one document do not count."""
    first = argsort_segments(scores, offsets, descending=True)[offsets[:-1]]
    return torch.where(offsets.diff() > 1, (labels[first] > 0).double(), torch.nan)


def nothing_better(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
    return torch.ones(len(offsets) - 1)


NOT_A_FUNCTION = 3
