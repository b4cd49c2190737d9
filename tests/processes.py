"""Run functions in forked processes: several that know of one another, as a launcher would, or programs to be killed.

Forked, because a fresh interpreter spends seconds on importing torch.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from lgmml_torch import distributed
from lgmml_torch.distributed import SharedLists
from lgmml_torch.ragged import RankingData


def in_processes(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``work(*arguments)`` gives in each of so many processes; tensors and primitives only."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_one, (count, port, folder, work, arguments), nprocs=count, start_method="fork")  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(count)]


def _one(rank: int, count: int, port: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    distributed.join()
    torch.save(work(*arguments), Path(folder) / f"{rank}.pt")
    distributed.leave()


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@dataclass(frozen=True)
class Ended:
    """How a program ended: the first exit code that is not 0, and what its processes said."""

    code: int
    said: str


def forked(main: Callable[[], None], *words: object, count: int = 1) -> Ended:
    """Run a program's ``main`` with these words in so many processes; when one of them dies, so do the others.

    Several are numbered as Lightning numbers those it starts.
    """
    port, context = free_port(), multiprocessing.get_context("fork")
    with tempfile.TemporaryFile() as log:
        arguments = (main, [str(word) for word in words], count, port, log.fileno())
        processes = [context.Process(target=_program, args=(rank, *arguments)) for rank in range(count)]
        for process in processes:
            process.start()
        try:
            while running := [process for process in processes if process.exitcode is None]:
                wait([process.sentinel for process in running])
                if any(process.exitcode for process in processes):
                    for process in running:
                        process.kill()
        finally:  # a test that took too long leaves nobody behind
            for process in processes:
                process.kill()
        log.seek(0)
        said = log.read().decode(errors="replace")
    return Ended(next((int(process.exitcode or 0) for process in processes if process.exitcode), 0), said)


def _program(rank: int, main: Callable[[], None], words: list[str], count: int, port: int, log: int) -> None:
    for handle in (1, 2):
        os.dup2(log, handle)
    sys.stdout, sys.stderr = (os.fdopen(handle, "w", buffering=1, closefd=False) for handle in (1, 2))
    sys.argv = [main.__module__, *words]
    warnings.simplefilter("default")  # as in a program of its own, whatever the tests do with them
    if count > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def own_part(data: RankingData, owner: list[int] | None = None) -> RankingData:
    """The lists of this process; by default every process has the same number, one after the other in turn."""
    rank, count = distributed.rank(), distributed.world_size()
    owners = torch.arange(data.num_queries) % count if owner is None else torch.tensor(owner)
    shared = SharedLists(data.sizes, owners, rank)
    return data.select(shared.own).replace(shared_lists=shared)
