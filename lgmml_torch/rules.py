"""Rules for settings and parameters, to be written down as a table: name → rule.

A rule is a check of `lgmml_torch.checks`, or one put together here: it is called with a name and a value, and raises
`LGMMLError` with both.

>>> check_all({"rounds": optional(check_whole), "sizes": each(check_positive)}, {"rounds": None, "sizes": [1, -1]})
Traceback (most recent call last):
...
lgmml_torch.checks.LGMMLError: `sizes[1]` must be positive, got -1
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from lgmml_torch.checks import (
    LGMMLError,
    check_choice,
    check_each,
    check_flag,
    check_number,
    check_positive,
    check_whole,
    shortened,
)

Rule = Callable[[str, Any], None]
"""Called with a name and a value; raises `LGMMLError`."""


def check_all(rules: Mapping[str, Rule], values: Mapping[str, Any]) -> None:
    """Require every value to follow the rule of its name."""
    for name, rule in rules.items():
        rule(name, values[name])


def optional(rule: Rule) -> Rule:
    """The rule, or nothing given."""
    return lambda name, value: None if value is None else rule(name, value)


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
        (check_whole if whole else check_positive)(name, abs(value), zero=True)

    return rule


def flag_or(rule: Rule) -> Rule:
    """True or false, or what else the rule allows."""
    return lambda name, value: None if isinstance(value, bool) else rule(name, value)


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
flag: Rule = check_flag
