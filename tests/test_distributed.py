"""Lists that processes share, and what processes send to one another."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException

from lgmml_torch import distributed
from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.distributed import SharedLists, gather_lists, limit_documents
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import argsort_segments
from tests.processes import free_port, in_processes, own_part

SIZES = torch.tensor([3, 1, 4, 0, 5, 2])
ROWS = torch.tensor([14, 0, 7, 7, 3, 2, 9])
OWNERS = ([0, 1, 0, 2, 1, 0], [1, 1, 1, 1, 1, 1], [2, 2, 1, 1, 0, 0])
DATA = letor_like(24, 9, seed=3, num_documents=200).replace(
    query_weights=torch.arange(24.0), positions=torch.arange(200), feature_names=tuple("abcdefghi")
)


def shared(owner: list[int], rank: int = 0) -> SharedLists:
    return SharedLists(SIZES, torch.tensor(owner), rank)


def exchanged(folder: str) -> dict[str, Any]:
    """What one of three processes gets from the others."""
    rank = distributed.rank()
    found: dict[str, Any] = {"shared": []}
    for owner in OWNERS:
        part = shared(owner, rank)
        values = part.own_rows.double()[:, None] * torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        taken, lists = part.take(values, ROWS), part.per_query(part.own.double())
        sent = [part.traffic["calls"], part.traffic["bytes"]]
        ids = list(part.ids([f"q{number}" for number in part.own.tolist()]))
        found["shared"].append([taken, lists, sent, ids, part.collect(values, 1), part.most])
    tensors = {"b": torch.full((2,), float(rank)), "a": torch.tensor([rank]), "none": torch.empty(0)}
    distributed.broadcast_tensors(tensors)
    path = Path(folder) / str(rank) / "last.ckpt"  # rank 0 has the newest, rank 1 an older one, rank 2 none
    path.parent.mkdir()
    if rank < 2:
        path.write_bytes(b"new" if rank == 0 else b"old")
    os.chdir(path.parent)
    distributed.broadcast_file(Path("last.ckpt"))
    distributed.broadcast_file(Path("nowhere.ckpt"))
    found["files"] = [path.read_bytes() == b"new", Path("nowhere.ckpt").exists()]
    found["values"] = [tensors["a"].item(), tensors["b"].tolist(), distributed.broadcast([rank, "x"])]
    found["values"] += [distributed.all_gather(rank)]
    found["values"] += [
        distributed.all_reduce(torch.tensor([rank + 1.0]), name).item() for name in ("sum", "min", "max")
    ]
    return found


def test_three_processes_exchange_what_one_would_have(tmp_path: Path) -> None:
    everything = torch.arange(15, dtype=torch.float64)[:, None] * torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    for rank, found in enumerate(in_processes(3, exchanged, str(tmp_path))):
        assert found["files"] == [True, False]
        assert found["values"] == [0, [0.0, 0.0], [0, "x"], [0, 1, 2], 6.0, 1.0, 3.0]
        for owner, (taken, lists, sent, ids, collected, most) in zip(OWNERS, found["shared"], strict=True):
            assert torch.equal(taken, everything[ROWS])
            assert lists.tolist() == [0, 1, 2, 3, 4, 5]
            assert ids == [f"q{number}" for number in range(6)]
            assert torch.equal(collected, everything if rank == 1 else everything[:0])
            documents = [sum(int(SIZES[q]) for q in range(6) if owner[q] == process) for process in range(3)]
            assert most == max(documents)
            lists_of_rows = (torch.bucketize(ROWS, shared(owner).offsets, right=True) - 1).tolist()
            rows_of = [sum(owner[q] == process for q in lists_of_rows) for process in range(3)]
            assert sent == [2, max(rows_of) * 2 * 8 + max(owner.count(process) for process in range(3)) * 8]


def test_one_process_sends_nothing() -> None:
    part = shared([0] * 6)
    assert torch.equal(part.take(torch.arange(15.0), torch.tensor([4, 1])), torch.tensor([4.0, 1.0]))
    assert not part.traffic
    assert (distributed.broadcast("word"), distributed.all_gather(3)) == ("word", [3])
    assert not distributed.joined()
    with pytest.raises(LGMMLError, match="`owner` must name a process for each of 6 lists, got 2"):
        shared([0, 1])


@pytest.mark.parametrize(("rank", "size"), [("0", "2"), ("1", "2"), ("x", "2")])
def test_who_waits_in_vain_is_named(rank: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=1))
    variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"process {rank} of {size} could not join the others: .+"):
        distributed.join()
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match=f"process {rank} of {size} could not join the others: .+"):
        distributed.join()
    monkeypatch.setenv("WORLD_SIZE", "1")
    distributed.join()
    assert not distributed.joined()


def sampled(owner: list[int] | None) -> dict[str, Any]:
    part = limit_documents(own_part(DATA, owner), 120, seed=5)
    assert part.shared_lists is not None
    assert part.sizes.tolist() == part.shared_lists.sizes[part.shared_lists.own].tolist()
    assert part.feature_names == DATA.feature_names
    whole = gather_lists(part)
    return {name: getattr(whole, name) for name in ("features", "labels", "offsets", "query_weights", "positions")}


def tied() -> Tensor:
    whole = gather_lists(own_part(ties()))
    return argsort_segments(torch.zeros(40), whole.offsets, tie_order=whole.order)


def ties() -> RankingData:
    """Equal documents, given in another order than that of the rows."""
    return RankingData.from_arrays(torch.zeros(40, 2), torch.arange(40) * 7 % 3, qid=torch.arange(40) % 4)


def both(owner: list[int]) -> dict[str, Any]:
    return {**sampled(owner), "ties": tied()}


def test_samples_and_ties_do_not_depend_on_processes() -> None:
    expected = limit_documents(DATA, 120, seed=5)
    order = argsort_segments(torch.zeros(40), ties().offsets, tie_order=ties().order)
    assert 0 < expected.num_documents <= 120
    assert order.tolist() != list(range(40))
    for found in [both([0] * 24), *in_processes(3, both, [0] * 20 + [2] * 4)]:
        assert torch.equal(found.pop("ties"), order)
        for name, value in found.items():
            assert torch.equal(value, getattr(expected, name)), name
    assert limit_documents(DATA, 200) is DATA
    assert limit_documents(own_part(DATA), 200).num_documents == 200
    few = DATA.select([0, 1, 2])
    for seed in range(6):
        assert limit_documents(few, 1, seed=seed).num_queries == 1
        assert limit_documents(own_part(few), 1, seed=seed).num_queries == 1


def test_lists_of_one_process() -> None:
    data = DATA.replace(categories=(*(None,) * 8, ("x", "y")))
    part, expected = limit_documents(own_part(data), 60), limit_documents(data, 60)
    assert 1 < part.num_queries < data.num_queries
    assert (part.feature_names, part.categories) == (data.feature_names, data.categories)
    assert torch.equal(part.features, expected.features)
    assert gather_lists(DATA) is DATA
    assert gather_lists(own_part(DATA)).shared_lists is None


def fails() -> None:
    raise LGMMLError("on purpose")


def test_an_error_of_one_process_is_seen() -> None:
    with pytest.raises(ProcessRaisedException, match="on purpose"):
        in_processes(2, fails)
