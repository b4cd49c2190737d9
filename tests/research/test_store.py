from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lgmml_torch.checks import DataError
from research.store import Job, Record, Store


def job(calls: list[int], **settings: object) -> Job:
    def make() -> Record:
        calls.append(1)
        return Record({"map": [0.25, math.nan, 0.75]}, {"seconds": 1.5, "factor": torch.tensor(2.0), "pair": (1, 2)})

    return Job("test", {"data": "digits", "seed": 3, **settings}, make)


def test_work_is_done_once_and_comes_back_as_it_was(tmp_path: Path) -> None:
    calls: list[int] = []
    first, second = Store(tmp_path).get(job(calls)), Store(tmp_path).get(job(calls))
    assert calls == [1]
    assert first.info == second.info == {"seconds": 1.5, "factor": 2.0, "pair": [1, 2], "seed": 3}
    torch.testing.assert_close(second.tensor("map"), torch.tensor([0.25, math.nan, 0.75]).double(), equal_nan=True)
    assert second.mean("map") == 0.5


def test_other_settings_are_other_work(tmp_path: Path) -> None:
    calls: list[int] = []
    store = Store(tmp_path)
    for options in ({}, {"fold": 1}, {"options": {"C": [1.0]}}, {"options": {"C": [2.0]}}, {"fold": 1}):
        store.get(job(calls, **options))
    assert len(calls) == 4
    assert len(list(tmp_path.rglob("*.json"))) == 4


def test_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    calls: list[int] = []

    def stop() -> Record:
        raise KeyboardInterrupt

    jobs = [job(calls, fold=0), job(calls, fold=1), Job("test", {"data": "digits", "seed": 3, "fold": 2}, stop)]
    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path).all(jobs, "title")
    assert len(calls) == 2
    jobs[2] = job(calls, fold=2)
    assert len(Store(tmp_path).all(jobs, "title")) == 3
    assert len(calls) == 3


def test_looking_does_no_work(tmp_path: Path) -> None:
    calls: list[int] = []
    store = Store(tmp_path)
    assert store.find(job(calls)) is None
    store.get(job(calls))
    found = store.find(job(calls))
    assert found is not None
    assert found.mean("map") == 0.5
    assert calls == [1]


def test_damaged_record_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.path(job([]))
    path.parent.mkdir()
    path.write_text('{"values": {"map": ')
    with pytest.raises(DataError, match=r"digits-seed-3-\w+\.json: not a stored result .* delete it"):
        store.get(job([]))
