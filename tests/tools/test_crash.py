"""The crash campaign itself: it kills where it is told, and it notices what it is there to notice."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from lgmml_torch.files import SUFFIX
from tools.crash import Bench, Row, at_moments, at_operations, table


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("crash"), "train")


def test_kills_and_a_full_disk_end_with_the_same_model(bench: Bench) -> None:
    assert bench.operations[0] > 100
    draw = random.Random(0)
    for row in (at_operations(bench, 1, draw), at_operations(bench, 1, draw, full=True)):
        assert (row.tried, row.hit, row.same, row.faults) == (1, 1, 1, [])
    row = at_moments(bench, 1, draw)  # which may be after the end
    assert (row.tried, row.same, row.faults) == (1, row.hit, [])


def test_damage_and_leftovers_are_faults(bench: Bench) -> None:
    row = Row("train", 1, "by hand")
    bench.clear()
    running = bench.start(at=bench.operations[0])
    assert running.wait() == -signal.SIGKILL
    damaged = bench.run / "checkpoints" / "best.ckpt"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1])
    bench.judge(row, running, "a cut")
    damaged.write_bytes(good)
    left = Path(bench.home) / f".elsewhere{SUFFIX}"
    left.write_text("")
    bench.judge(row, running, "a leftover")
    left.unlink()
    assert (row.hit, row.same) == (2, 0)
    assert "is not a checkpoint" in row.faults[0]
    assert "left behind" in row.faults[1]
    assert "| train | 1 | by hand | 0 | 2 | 0 | 2 | " in table([row], seed=3, minutes=1)


def test_another_command(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "convert")
    for row in (at_operations(bench, 1, random.Random(4)), at_operations(bench, 1, random.Random(0), full=True)):
        assert (row.tried, row.faults) == (1, [])
        assert row.hit == row.same
