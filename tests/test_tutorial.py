"""The tutorial and the lines of the README work as printed, one after the other in one folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.documented import REFUSED, ROOT, blocks, steps, table_lines

README, TUTORIAL = "../README.md", "tutorial.md"
Step = tuple[str, ...] | str
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tutorial")]


def all_steps() -> list[Step]:
    """Of the tutorial, of the README except what the tutorial has too, and of its table."""
    found = steps(TUTORIAL)
    found += [step for step in steps(README) if step not in found]
    found += table_lines(README, "a line")
    return [step for step in found if step[0] not in ("pip", "make")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shop")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[Step, dict[str, Any]]:
    """What came of every step; the server gets a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    todo = all_steps()
    (folder / "todo.json").write_text(json.dumps(todo).replace("8000", port))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LGMML_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.documented", "todo.json", "results.json"],
        capture_output=True, text=True, cwd=folder, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(todo, json.loads((folder / "results.json").read_text()), strict=True))


def test_every_step_works(outcomes: dict[Step, dict[str, Any]]) -> None:
    assert REFUSED in outcomes
    for step, outcome in outcomes.items():
        if step != REFUSED:
            assert outcome["code"] == 0, (step, outcome["told"])


def test_a_setting_without_effect_is_refused(outcomes: dict[Step, dict[str, Any]]) -> None:
    assert outcomes[REFUSED]["code"] != 0
    assert "has no effect with the loss softmax of trained metrics" in outcomes[REFUSED]["told"]


def test_the_tutorial_shows_what_inspect_says(outcomes: dict[Step, dict[str, Any]]) -> None:
    *_, last = outcomes["lgmml", "inspect", "shop.parquet"]["told"].splitlines()
    assert last.startswith("train with: lgmml train")
    assert any(last in " ".join(block.split()) for block in blocks(TUTORIAL, "text"))


def test_the_server_ranks_as_the_command_line_scores(outcomes: dict[Step, dict[str, Any]], folder: Path) -> None:
    new = pd.read_parquet(folder / "new.parquet").assign(score=np.loadtxt(folder / "scores.txt"))
    one = new[new["search_id"] == "S10000"].sort_values("score", ascending=False)
    served = next(step for step in outcomes if isinstance(step, str) and "/rank" in step)
    assert outcomes[served]["told"].strip() == str(one["product"].head(3).tolist())
