"""Settings of a benchmark as ``name=value`` words."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def parse(
    words: Sequence[str],
    defaults: Mapping[str, Any],
    text: str | None,
    *,
    choices: Mapping[str, Collection[str]] | None = None,
) -> dict[str, Any]:
    """Defaults with the words' values in their place; ``--help`` prints the text."""
    if any(word in ("-h", "--help") for word in words):
        print(text)
        sys.exit(0)
    found = dict(defaults)
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or name not in defaults:
            sys.exit(f"settings are {', '.join(f'{key}=…' for key in defaults)}; got {word!r}")
        kind = type(defaults[name])
        try:
            found[name] = value.lower() in ("1", "true", "yes") if kind is bool else kind(value)
        except ValueError:
            sys.exit(f"{name} must be of type {kind.__name__}, got {value!r}")
        if choices and name in choices and found[name] not in choices[name]:
            sys.exit(f"{name} must be one of {', '.join(choices[name])}, got {value!r}")
    return found
