"""Errors, warnings and argument checks used by every other module.

A check names the argument, the rule and the offending value, so that a user can mend the call without reading
the source: ``"`t` must lie in [0, 1], got 1.3"``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class LGMMLError(ValueError):
    """Base class of the errors this package raises about what it was given."""


class NotSPDError(LGMMLError):
    """A matrix that must be symmetric positive definite is not, and jitter could not mend it."""


class DataError(LGMMLError):
    """Ranking data that cannot be used; parsers say ``file:line``, arrays the row."""


class CheckpointError(LGMMLError):
    """A checkpoint or cache file that is foreign, damaged or of another format version."""


class ConfigError(LGMMLError):
    """A configuration that names something unknown or contradicts itself."""


class MissingDependencyError(LGMMLError, ImportError):
    """An optional package is needed for this call; the message names the extra to install."""


class LGMMLWarning(UserWarning):
    """Base class of the warnings this package gives."""


class NumericsWarning(LGMMLWarning):
    """Rounding had to be compensated (jitter added, eigenvalues clamped); the message says by how much."""


class DegenerateScoresWarning(LGMMLWarning):
    """Scores hardly differ within lists, so the ranking is close to arbitrary."""


class DataWarning(LGMMLWarning):
    """The data was accepted, but something in it is probably not what its owner wants."""


def check_unit_interval(name: str, value: float) -> None:
    """Require ``0 <= value <= 1``.

    >>> check_unit_interval("t", 1.3)
    Traceback (most recent call last):
    ...
    lgmml_torch.checks.LGMMLError: `t` must lie in [0, 1], got 1.3
    """
    if not 0.0 <= value <= 1.0:
        raise LGMMLError(f"`{name}` must lie in [0, 1], got {value}")


def check_positive(name: str, value: float, *, zero: bool = False) -> None:
    """Require ``value > 0``, or ``value >= 0`` with ``zero=True``; NaN fails either way."""
    if not (value >= 0 if zero else value > 0):
        rule = "at least 0" if zero else "positive"
        raise LGMMLError(f"`{name}` must be {rule}, got {value}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Require ``value`` to be one of ``choices``; a near miss is suggested.

    >>> check_choice("kernel", "papr", ("paper", "rbf"))
    Traceback (most recent call last):
    ...
    lgmml_torch.checks.LGMMLError: `kernel` must be one of 'paper', 'rbf', got 'papr'; did you mean 'paper'?
    """
    known = list(choices)
    if value not in known:
        listed = ", ".join(repr(choice) for choice in known)
        raise LGMMLError(f"`{name}` must be one of {listed}, got {value!r}{did_you_mean(str(value), known)}")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """A suggestion to append to an error message, empty when nothing is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_finite(name: str, x: Tensor) -> None:
    """Require every entry to be finite; the first bad one is named by position and value."""
    if not x.is_floating_point() or x.numel() == 0:
        return
    # One reduction decides the usual case: the sum of |x| * 0 is NaN exactly when an entry is not finite.
    if torch.isfinite((x.detach() * 0).sum()):
        return
    where = tuple(int(i) for i in (~torch.isfinite(x)).nonzero()[0])
    raise LGMMLError(f"`{name}` must be finite, got {x[where].item()} at position {where}")


def check_shape(name: str, x: Tensor, shape: Sequence[int | None]) -> None:
    """Require a shape; ``None`` stands for any size.

    >>> check_shape("labels", torch.zeros(3, 2), (3,))
    Traceback (most recent call last):
    ...
    lgmml_torch.checks.LGMMLError: `labels` must have shape (3,), got (3, 2)
    """
    if len(shape) != x.dim() or any(want is not None and want != got for want, got in zip(shape, x.shape, strict=True)):
        wanted = ", ".join("*" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "")
        raise LGMMLError(f"`{name}` must have shape ({wanted}), got {tuple(x.shape)}")


def check_square(name: str, A: Tensor) -> None:
    """Require ``(..., D, D)``."""
    if A.dim() < 2 or A.shape[-1] != A.shape[-2]:
        raise LGMMLError(f"`{name}` must be square, (..., D, D), got {tuple(A.shape)}")


def check_symmetric(name: str, A: Tensor, *, rtol: float = 1e-6) -> None:
    """Require ``A == Aᵀ`` up to ``rtol`` of the largest entry of each matrix."""
    check_square(name, A)
    if A.numel() == 0:
        return
    A = A if A.is_floating_point() else A.double()
    gap = (A - A.mT).abs().amax(dim=(-2, -1))
    scale = A.abs().amax(dim=(-2, -1))
    if bool((gap > rtol * scale).any()):
        worst = float((gap / scale.clamp_min(torch.finfo(A.dtype).tiny)).max())
        raise LGMMLError(f"`{name}` must be symmetric, got a relative asymmetry of {worst:.3g}")


def check_offsets(offsets: Tensor, total: int, *, name: str = "offsets") -> None:
    """Require segment boundaries: 1-D integers, starting at 0, never decreasing, ending at ``total``."""
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise LGMMLError(f"`{name}` must be 1-D with at least one entry, got shape {tuple(offsets.shape)}")
    if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        raise LGMMLError(f"`{name}` must hold integers, got {offsets.dtype}")
    if int(offsets[0]) != 0:
        raise LGMMLError(f"`{name}` must start at 0, got {int(offsets[0])}")
    falls = (offsets.diff() < 0).nonzero()
    if falls.numel():
        i = int(falls[0])
        raise LGMMLError(
            f"`{name}` must not decrease, got {int(offsets[i])} before {int(offsets[i + 1])} at position {i + 1}"
        )
    if int(offsets[-1]) != total:
        raise LGMMLError(f"`{name}` must end at the number of rows, {total}, got {int(offsets[-1])}")
