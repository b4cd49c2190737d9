"""Run a function in several processes that know of one another, as a launcher would."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from lgmml_torch import distributed
from lgmml_torch.distributed import Spread
from lgmml_torch.ragged import RankingData


def in_processes(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``work(*arguments)`` gives in each of so many processes; tensors and primitives only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        # Forked: a fresh interpreter would spend seconds on importing torch.
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


def own_part(data: RankingData, owner: list[int] | None = None) -> RankingData:
    """The lists of this process; by default every process has the same number, one after the other in turn."""
    rank, count = distributed.place()
    owners = torch.arange(data.num_queries) % count if owner is None else torch.tensor(owner)
    spread = Spread(data.sizes, owners, rank)
    return data.select(spread.own).replace(spread=spread)
