"""What every benchmark needs: interleaved timing, facts about the machine, a result file, a table."""

from __future__ import annotations

import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lgmml_torch.files import write_text
from research.store import machine_facts, to_json


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


GIB = 2**30
_FIELDS = {"VmRSS": "resident", "RssAnon": "anonymous", "RssFile": "mapped"}


def resident() -> dict[str, float]:
    """Resident memory now, in GiB: in all, anonymous, and mapped from files."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] = int(rest.split()[0]) * 1024 / GIB
    return found


def peak() -> float:
    """The most this process ever had resident, mapped files included, in GiB, as the system counted it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


@contextmanager
def watched(every: float = 0.05) -> Iterator[dict[str, float]]:
    """Largest values of `resident` while the block runs, each for itself."""
    most = resident()
    done = threading.Event()

    def look() -> None:
        for name, value in resident().items():
            most[name] = max(most.get(name, 0.0), value)

    def watch() -> None:
        while not done.wait(every):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()
        look()


RESULTS = Path(__file__).parent.parent / "results"


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


def save_result(name: str, result: Mapping[str, Any]) -> Path:
    """Write ``research/results/<name>.json`` with the machine's facts, whole or not at all."""
    path = RESULTS / f"{name}.json"
    write_text(path, to_json({"machine": machine_facts(), **result}))
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
