"""Lists spread over processes: whoever asks for documents gets them, the same on every process."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.distributed import Spread
from tests.processes import in_processes

SIZES = torch.tensor([3, 1, 4, 0, 5, 2])


def spread(owner: list[int], rank: int | None = None) -> Spread:
    return Spread(SIZES, torch.tensor(owner), distributed.place()[0] if rank is None else rank)


def asked(owner: list[int], rows: Tensor) -> list[Tensor]:
    """Every process has the numbers of its own rows, and asks for some of all."""
    part = spread(owner)
    values = part.own_rows.double()
    found = part.take(torch.stack([values, values.square()], dim=1), rows)
    lists = part.per_query(part.own.double())
    return [found, lists, torch.tensor([part.traffic.calls, part.traffic.bytes])]


@pytest.mark.parametrize("owner", [[0, 1, 0, 2, 1, 0], [1, 1, 1, 1, 1, 1], [2, 2, 1, 1, 0, 0]])
def test_three_processes_find_what_one_would(owner: list[int]) -> None:
    rows = torch.tensor([14, 0, 7, 7, 3, 2, 9])
    for found, lists, traffic in in_processes(3, asked, owner, rows):
        assert found[:, 0].tolist() == rows.tolist()
        assert found[:, 1].tolist() == rows.square().tolist()
        assert lists.tolist() == [0, 1, 2, 3, 4, 5]
        counts = [sum(1 for q in _lists_of(rows) if owner[q] == rank) for rank in range(3)]
        most = [max(counts) * 2 * 8, max(owner.count(rank) for rank in range(3)) * 8]
        assert traffic.tolist() == [2, sum(most)]


def _lists_of(rows: Tensor) -> list[int]:
    return (torch.bucketize(rows, spread([0] * 6, 0).offsets, right=True) - 1).tolist()


def test_one_process_sends_nothing() -> None:
    part = spread([0] * 6)
    values = torch.arange(15.0)
    assert torch.equal(part.take(values, torch.tensor([4, 1])), torch.tensor([4.0, 1.0]))
    assert part.traffic.calls == 0
    assert distributed.agreed("word") == "word"
    assert distributed.of_each(3) == [3]


def test_an_owner_for_every_list() -> None:
    with pytest.raises(LGMMLError, match="`owner` must name a process for each of 6 lists, got 2"):
        spread([0, 1])


def told(value: list[int]) -> list[list[int]]:
    rank, _ = distributed.place()
    tensors = {"b": torch.full((2,), float(rank)), "a": torch.tensor([rank])}
    distributed.copy_of_first(tensors)
    own = [value[rank]]
    return [distributed.agreed(own), *distributed.of_each(own), tensors["a"].tolist(), tensors["b"].long().tolist()]


def file_held(folder: str) -> list[bool]:
    """The first has the newest, the second an older one, the third none."""
    rank, _ = distributed.place()
    path = Path(folder) / str(rank) / "last.ckpt"
    path.parent.mkdir()
    if rank < 2:
        path.write_bytes(b"new" if rank == 0 else b"old")
    os.chdir(path.parent)
    distributed.file_of_first(Path("last.ckpt"))
    distributed.file_of_first(Path("nowhere.ckpt"))
    return [path.read_bytes() == b"new", Path("nowhere.ckpt").exists()]


def test_the_first_ones_file_counts(tmp_path: Path) -> None:
    assert in_processes(3, file_held, str(tmp_path)) == [[True, False]] * 3


def come_alone(rank: int, link: Any) -> None:
    """Be one of two processes, the other of which never comes; say how that ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    link.send("waiting")
    try:
        distributed.join()
    except BaseException as error:
        link.send(f"{type(error).__name__}: {error}")


def alone(rank: int) -> tuple[Any, Any]:
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=come_alone, args=(rank, there))
    process.start()
    assert here.recv() == "waiting"
    return process, here


@pytest.mark.parametrize(("rank", "there"), [(0, "1 of 2 processes had come"), (1, "nobody was there")])
def test_who_waits_in_vain_says_for_whom(rank: int, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "PATIENCE", timedelta(seconds=0.3))
    process, link = alone(rank)
    said = link.recv()
    assert re.fullmatch(
        rf"ConfigError: process {rank} of 2 could not join the others: after 0.005 minutes at 127.0.0.1:\d+, {there}",
        said,
    )
    process.join()


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_the_others_hears_signals(rank: int) -> None:
    process, link = alone(rank)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    assert link.recv().startswith("KeyboardInterrupt")
    process.join()


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_an_address_is_needed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(
        ConfigError, match="process 0 of 2 could not join the others: MASTER_ADDR and MASTER_PORT do not"
    ):
        distributed.join()


def test_processes_agree() -> None:
    assert in_processes(2, told, [5, 7]) == [[[5], [5], [7], [0], [0, 0]]] * 2
