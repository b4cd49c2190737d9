"""What every benchmark needs: interleaved timing, facts about the machine, a result file, a table."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one value per round; rounds of different callables pair up."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The typical call."""
        return statistics.median(self.seconds)

    def ratio(self, other: Timing) -> float:
        """How many times longer than ``other``: the median over rounds, which drifting load does not bias."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))


def time_interleaved(
    callables: Mapping[str, Callable[[], object]], *, rounds: int = 9, warmup: int = 1
) -> dict[str, Timing]:
    """Time several callables in turn, round after round, so that all of them see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in callables}
    for _ in range(warmup):
        for call in callables.values():
            call()
    for _ in range(rounds):
        for name, call in callables.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge a figure: processor, threads, load and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "processor": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def save_result(name: str, result: Mapping[str, Any]) -> Path:
    """Write ``benchmarks/results/<name>.json`` with the machine's facts, whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    with tempfile.NamedTemporaryFile("w", dir=RESULTS, prefix=f".{name}.", delete=False) as file:
        json.dump({"machine": machine_facts(), **result}, file, indent=2)
        file.write("\n")
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)
    return path


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; numbers are aligned to the right."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(_short(cell) for cell in row))
    Console().print(table)


def _short(cell: object) -> str:
    """Three digits of a number, without an exponent for thousands."""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if 1000 <= abs(cell) < 1e9 else f"{cell:.3g}"


def verdict(met: bool) -> str:
    """How a target that was or was not met appears in a table."""
    return "met" if met else "MISSED"
