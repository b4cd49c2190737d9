"""Resident memory of this process, watched while it works.

Pages of memory-mapped files count as resident while they are mapped and touched, although the system can drop them at
any time; so the parts are kept apart: ``anonymous`` (the process's own) and ``mapped`` (backed by files).
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
