"""Learning to rank with localized geometric-mean metrics.

``__init__.pyi`` lists all a user needs. Each name is imported when it is first used, because Lightning and scikit-learn
take longer to import than most calls take to run.
"""

import importlib
import re
from pathlib import Path

__version__ = "0.3.0"

_IMPORT = re.compile(r"^from (\S+) import \S+ as (\S+)$", re.MULTILINE)
_HOMES = {name: home for home, name in _IMPORT.findall(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'lgmml_torch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
