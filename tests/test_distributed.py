"""Lists spread over processes: whoever asks for documents gets them, the same on every process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.checks import LGMMLError
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


def test_processes_agree() -> None:
    assert in_processes(2, told, [5, 7]) == [[[5], [5], [7], [0], [0, 0]]] * 2
