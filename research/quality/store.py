"""Finished pieces of work on disk, one JSON file each, written whole or not at all: a run that was stopped goes on."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lgmml_torch.files import write_text

FOLDER = Path(__file__).parent.parent.parent / "outputs" / "quality"


class Cells:
    """A folder of results known by their place: kind, what, set, fold, noise, seed."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder

    def path(self, kind: str, *place: object) -> Path:
        """Where a result is or will be."""
        words = [re.sub(r"[^a-z0-9+.]+", "-", str(part).lower()) for part in place if part is not None]
        return self.folder / kind / ("_".join(words) + ".json")

    def find(self, kind: str, *place: object) -> dict[str, Any] | None:
        """The stored result, or None."""
        path = self.path(kind, *place)
        return json.loads(path.read_text()) if path.is_file() else None

    def get(self, make: Callable[[], Mapping[str, Any]], kind: str, *place: object) -> dict[str, Any]:
        """The stored result, or the work done and stored."""
        stored = self.find(kind, *place)
        if stored is not None:
            return stored
        started, cpu = time.perf_counter(), time.process_time()
        content = dict(make())
        content["wall seconds"], content["cpu seconds"] = time.perf_counter() - started, time.process_time() - cpu
        path = self.path(kind, *place)
        write_text(path, json.dumps(plain(content), allow_nan=False))
        return dict(json.loads(path.read_text()))


def plain(value: Any) -> Any:
    """What JSON can hold: NaN becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
