"""Errors, warnings and argument checks used by every other module.

A check names the argument, the rule and the offending value, so that a user can mend the call without reading
the source: ``"`t` must lie in [0, 1], got 1.3"``.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # help, and the refusal of a setting, should not wait for torch
    from torch import Tensor

_MOST_SEED = 2**32 - 1  # what numpy takes


class LGMMLError(ValueError):
    """Base class of the errors this package raises about what it was given."""


class NotSPDError(LGMMLError):
    """A matrix that must be symmetric positive definite is not, and jitter could not mend it."""


class DataError(LGMMLError):
    """Ranking data that cannot be used; parsers say ``file:line``, arrays the row."""


class CheckpointError(LGMMLError):
    """A checkpoint or cache file that is foreign, damaged or of another format version."""


class FileError(LGMMLError, OSError):
    """A file that cannot be written where it should stand."""


class NoSpaceError(FileError):
    """The disk is full or a quota is used up; the message names the path, what it needs and what there is."""


class LoaderError(LGMMLError):
    """The processes that make batches could not be started, or one of them died."""


class ConfigError(LGMMLError):
    """A configuration that names something unknown or contradicts itself."""


class DivergedError(LGMMLError):
    """Scores or the loss are no finite numbers any more: no model is kept that was not one before."""


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


def sentence(error: Exception) -> str:
    """An error as one line for the command line; what the system refused is named with its file.

    >>> sentence(FileNotFoundError(2, "No such file or directory", "a.txt"))
    'a.txt: No such file or directory'
    """
    if isinstance(error, OSError) and error.strerror:
        if not error.filename:
            return error.strerror
        return f"{error.filename}: {error.strerror}"
    return str(error).partition("\n")[0] or type(error).__name__


def check_number(name: str, value: Any) -> None:
    """Require a number: no text, no truth value, no list."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise LGMMLError(f"`{name}` must be a number, got {shortened(value)}")


def check_unit_interval(name: str, value: float) -> None:
    """Require ``0 <= value <= 1``."""
    check_number(name, value)
    if not 0.0 <= value <= 1.0:
        raise LGMMLError(f"`{name}` must lie in [0, 1], got {value}")


def check_positive(name: str, value: float, *, zero: bool = False) -> None:
    """Require ``value > 0``, or ``value >= 0`` with ``zero=True``; NaN and infinity fail either way."""
    check_number(name, value)
    if zero and not value >= 0:
        raise LGMMLError(f"`{name}` must be at least 0, got {value}")
    if not zero and not value > 0:
        raise LGMMLError(f"`{name}` must be positive, got {value}")
    if value == math.inf:
        raise LGMMLError(f"`{name}` must be finite, got {value}")


def check_whole(name: str, value: int, *, zero: bool = False) -> None:
    """Require a whole number above 0, or from 0 on with ``zero=True``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise LGMMLError(f"`{name}` must be a whole number, got {shortened(value)}")
    check_positive(name, value, zero=zero)


def check_seed(name: str, value: int) -> None:
    """Require what every source of random numbers takes as a seed: a whole number from 0 to 2³² − 1."""
    check_whole(name, value, zero=True)
    if value > _MOST_SEED:
        raise LGMMLError(f"`{name}` must be at most {_MOST_SEED}, got {value}")


def check_flag(name: str, value: bool) -> None:
    """Require true or false."""
    if not isinstance(value, bool):
        raise LGMMLError(f"`{name}` must be true or false, got {shortened(value)}")


def check_each(name: str, values: Any, check: Callable[[str, Any], object]) -> None:
    """Require a list, or the like, whose members pass a check each.

    >>> check_each("sizes", [1, 0], check_whole)
    Traceback (most recent call last):
    ...
    lgmml_torch.checks.LGMMLError: `sizes[1]` must be positive, got 0
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Collection):
        raise LGMMLError(f"`{name}` must be a list, got {shortened(values)}")
    for place, value in enumerate(values):
        check(f"{name}[{place}]", value)


def shortened(value: object, most: int = 80) -> str:
    """A value as a message shows it, cut where it would fill the screen."""
    text = repr(value)
    if len(text) > most:
        text = f"{text[: most - 1]}…"
    return text


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Require ``value`` to be one of ``choices``; a near miss is suggested.

    >>> check_choice("kernel", "papr", ("paper", "rbf"))
    Traceback (most recent call last):
    ...
    lgmml_torch.checks.LGMMLError: `kernel` must be one of 'paper', 'rbf', got 'papr'; did you mean 'paper'?
    """
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        listed = ", ".join(map(repr, known))
        hint = did_you_mean(str(value), known)
        raise LGMMLError(f"`{name}` must be one of {listed}, got {shortened(value)}{hint}")


def require(package: str, purpose: str, extra: str) -> Any:
    """Import an optional package, or say what it is needed for and which extra brings it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"`{package}` is needed {purpose}; install it with: pip install 'lgmml-torch[{extra}]'"
        ) from error


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """A suggestion to append to an error message, empty when nothing is close."""
    close = difflib.get_close_matches(word, known, n=1)
    if not close:
        return ""
    return f"; did you mean {close[0]!r}?"


_AT_ONCE = 65_536  # rows that are looked at together


def check_finite(name: str, x: Tensor) -> None:
    """Require every entry to be finite; the first bad one is named by position and value."""
    if not x.is_floating_point() or x.numel() == 0:
        return
    rows = x.detach()
    if not x.dim():
        rows = rows[None]
    for start in range(0, len(rows), _AT_ONCE):  # not at once: x may be mapped from a file larger than memory
        part = rows[start : start + _AT_ONCE]
        # One reduction decides the usual case: the sum of |x| * 0 is NaN exactly when an entry is not finite.
        if not (part * 0).sum().isfinite():
            first, *rest = (~part.isfinite()).nonzero()[0].tolist()
            where = (start + first, *rest)[: x.dim()]
            raise LGMMLError(f"`{name}` must be finite, got {x[where].item()} at position {where}")


def check_shape(name: str, x: Tensor, shape: Sequence[int | None]) -> None:
    """Require a shape; ``None`` stands for any size.

    >>> import torch
    >>> check_shape("labels", torch.zeros(3, 2), (3,))
    Traceback (most recent call last):
    ...
    lgmml_torch.checks.LGMMLError: `labels` must have shape (3,), got (3, 2)
    """
    fits = len(shape) == x.dim()
    for wanted, size in zip(shape, x.shape, strict=False):
        if wanted is not None and wanted != size:
            fits = False
    if not fits:
        rule = str(tuple(shape)).replace("None", "*")
        raise LGMMLError(f"`{name}` must have shape {rule}, got {tuple(x.shape)}")


def check_offsets(offsets: Tensor, total: int, *, name: str = "offsets") -> None:
    """Require segment boundaries: 1-D integers, starting at 0, never decreasing, ending at ``total``."""
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise LGMMLError(f"`{name}` must be 1-D with at least one entry, got shape {tuple(offsets.shape)}")
    if offsets.is_floating_point() or offsets.is_complex() or str(offsets.dtype) == "torch.bool":
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


Rule = Callable[[str, Any], object]
"""Called with a name and a value; raises `LGMMLError`."""


def check_all(rules: Mapping[str, Rule], values: Mapping[str, Any]) -> None:
    """Require every value to follow the rule of its name."""
    for name, rule in rules.items():
        rule(name, values[name])


def optional(rule: Rule) -> Rule:
    """The rule, or None."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            rule(name, value)

    return check


def each(rule: Rule) -> Rule:
    """A list whose members follow the rule."""
    return partial(check_each, check=rule)


def one_of(choices: Collection[str]) -> Rule:
    """One of these words, and of those that are added to them later."""
    return partial(check_choice, choices=choices)


def at_least(least: float, *, whole: bool = False) -> Rule:
    """A number from ``least`` on."""

    def rule(name: str, value: Any) -> None:
        check_number(name, value)
        if not value >= least:
            raise LGMMLError(f"`{name}` must be at least {least:g}, got {value}")
        check = check_whole if whole else check_positive
        check(name, abs(value), zero=True)

    return rule


def flag_or(rule: Rule) -> Rule:
    """True or false, or what else the rule allows."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, bool):
            rule(name, value)

    return check


def instance_of(*kinds: type, called: str) -> Rule:
    """An object of one of these kinds."""

    def rule(name: str, value: Any) -> None:
        if not isinstance(value, kinds):
            raise LGMMLError(f"`{name}` must be {called}, got {shortened(value)}")

    return rule


def text(name: str, value: Any) -> None:
    """Words, a path for example."""
    if not isinstance(value, str) or not value.strip():
        raise LGMMLError(f"`{name}` must be text, got {shortened(value)}")


def count_or_all(name: str, value: Any) -> None:
    """A whole number above 0, or -1 for all there are."""
    if isinstance(value, bool) or value != -1:
        check_whole(name, value)


counts_from_zero: Rule = partial(check_whole, zero=True)
from_zero: Rule = at_least(0)
