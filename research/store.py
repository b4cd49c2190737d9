"""Raw results on disk, one file per piece of work, so that a run that was stopped goes on where it was.

A piece of work is known by its settings. The file name is a hash of them, and they are kept inside the file: changing a
setting computes a new result and leaves the old one alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lgmml_torch import __version__
from lgmml_torch.checks import DataError
from lgmml_torch.files import write_text
from lgmml_torch.progress import progress_bar

log = logging.getLogger(__name__)

VERSION = 4  # of the meaning of stored results; raising it lets all of them be computed again


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Keep what is reported with the result, such as a time cap, out of the log."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class Record:
    """What one piece of work found: values per query, NaN where a query is skipped, and facts about the run."""

    values: dict[str, list[float]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)  # seconds of the whole piece of work, load of the machine

    def tensor(self, metric: str) -> Tensor:  # (Q,)
        """The values of one metric."""
        return torch.tensor(self.values[metric], dtype=torch.float64)

    def mean(self, metric: str) -> float:
        """Over the queries that count."""
        return float(self.tensor(metric).nanmean())


@dataclass(frozen=True)
class Job:
    """A piece of work: what it is, by which it is found again, and how to do it."""

    kind: str
    settings: Mapping[str, Any]
    make: Callable[[], Record]

    @property
    def label(self) -> str:
        """For progress bars and logs."""
        facts = [(key, v) for key, v in self.settings.items() if isinstance(v, (str, int, float)) and v is not False]
        return " ".join(value if isinstance(value, str) else f"{key}={value}" for key, value in facts)


class Store:
    """A folder of records.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> job = Job("demo", {"seed": 0}, lambda: Record({"map": [0.5, float("nan")]}))
    >>> store.get(job).mean("map"), store.get(Job("demo", {"seed": 0}, lambda: Record())).mean("map")
    (0.5, 0.5)
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._costs: dict[str, Mapping[str, float]] = {}

    def path(self, job: Job) -> Path:
        """Where the record of a job is or will be."""
        text = json.dumps({"version": VERSION, **job.settings}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        slug = re.sub(r"[^a-z0-9]+", "-", job.label.lower()).strip("-")[:60]
        return self.folder / job.kind / f"{slug}-{digest}.json"

    def find(self, job: Job) -> Record | None:
        """The stored record, or None; no work is done."""
        path = self.path(job)
        return self._read(path) if path.is_file() else None

    def get(self, job: Job) -> Record:
        """The stored record, or the work done and stored, whole or not at all."""
        if (stored := self.find(job)) is not None:
            return stored
        path = self.path(job)
        started, cpu = time.perf_counter(), time.process_time()
        record = job.make()
        if "seed" in job.settings:
            record.info.setdefault("seed", job.settings["seed"])
        took = time.perf_counter() - started
        content = {
            "version": VERSION, "settings": dict(job.settings), "values": record.values, "info": record.info,
            "took": took, "cpu": time.process_time() - cpu, "machine": machine_facts(),
        }  # fmt: skip
        write_text(path, to_json(content))
        log.info("%s %s: %.1f s", job.kind, job.label, took)
        return self._read(path)  # the same object whether or not the work was done just now

    @property
    def cost(self) -> dict[str, float]:
        """Seconds of all the work asked for, done now or earlier, and the machine's load average meanwhile."""
        parts = list(self._costs.values())
        total = {name: sum(part[name] for part in parts) for name in ("wall clock", "processor")}
        loads = [part["load"] for part in parts] or [0.0]
        return {**total, "lowest load": min(loads), "highest load": max(loads)}

    def _read(self, path: Path) -> Record:
        record = read_record(path)
        self._costs[path.name] = record.cost
        return record

    def share(self, jobs: Iterable[Job]) -> None:
        """Do what is not done and nobody has begun; a file beside the record says that somebody has.

        Several processes may call this with the same jobs. Delete what a killed one has left: ``*.begun``.
        """
        for job in jobs:
            begun = self.path(job).with_suffix(".begun")
            begun.parent.mkdir(parents=True, exist_ok=True)
            try:
                begun.touch(exist_ok=False)
            except FileExistsError:
                continue
            try:
                self.get(job)
            finally:
                begun.unlink(missing_ok=True)

    def all(self, jobs: Iterable[Job], title: str) -> list[Record]:
        """The records of all jobs, in order, with a progress bar."""
        listed = list(jobs)
        records = []
        with progress_bar(title, total=len(listed), delay=0.5) as report:
            for number, job in enumerate(listed):
                report(number)
                records.append(self.get(job))
        return records


def read_record(path: Path) -> Record:
    """Read one file.

    Raises:
        DataError: when it is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        values = {name: [math.nan if v is None else float(v) for v in row] for name, row in content["values"].items()}
        load = content["machine"]["load_1min"] or 0.0
        cost = {"wall clock": content["took"], "processor": content["cpu"], "load": load}
        return Record(values, content["info"], cost)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a stored result ({error}); delete it to compute it again") from error


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge a figure: processor, threads, load and versions."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "release": __version__,
        "processor": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def to_json(content: Any) -> str:
    """Text for a file: NaN and infinities as null, numbers of numpy and torch as Python's.

    >>> print(to_json({"a": float("nan"), "b": (torch.tensor(2), 0.5)}), end="")
    {
     "a": null,
     "b": [
      2,
      0.5
     ]
    }
    """
    return json.dumps(_writable(content), indent=1, allow_nan=False) + "\n"


def _writable(value: Any) -> Any:
    """What JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _writable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "item"):
        return _writable(value.item())
    return str(value)
