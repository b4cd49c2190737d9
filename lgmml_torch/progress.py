"""A progress bar that stays away from quick work, from log files and from whoever does not want it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_DELAY = 2.0  # seconds of work before a bar is worth its flicker


@contextmanager
def progress_bar(
    title: str, total: float, *, enabled: bool = True, delay: float = _DELAY
) -> Iterator[Callable[[float], None]]:
    """Give a function to call with the amount of work done so far.

    The bar appears on standard error after ``delay`` seconds, only on a terminal.

    >>> with progress_bar("Counting", total=3) as report:
    ...     for done in range(3):
    ...         report(done)
    """
    started = time.monotonic()
    bar: Progress | None = None
    shows = enabled and sys.stderr.isatty()

    def report(done: float) -> None:
        nonlocal bar
        if not shows or (bar is None and time.monotonic() - started < delay):
            return
        if bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            bar.add_task(title, total=total)
            bar.start()
        bar.update(bar.task_ids[0], completed=done)

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()
