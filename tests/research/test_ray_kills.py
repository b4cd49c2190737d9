"""What the campaign of kills on Ray reads from the story of a run, and what it writes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("psutil")

from research.ray_kills import Row, equal, starts, table


def test_what_workers_went_on_from() -> None:
    begins = "[2026-01-01][lgmml_torch.app.compose][INFO] - train: RankingData(3 queries)"
    bank = "[2026-01-01][unfinished][INFO] - the fit of local metrics resumes after round 35 of an earlier run"
    resumed = "[2026-01-01][train][INFO] - resume=auto: /run/checkpoints/last.ckpt"
    nothing = "[2026-01-01][train][INFO] - resume=auto: there is nothing to go on from, so the run begins"
    said = "\n".join([begins, begins, bank, resumed, begins, nothing, begins])
    assert starts(said) == ["the beginning", "round 35 of the metrics", "last.ckpt", "the beginning"]
    assert starts("") == []


def test_a_table_names_another_model() -> None:
    rows = [Row("worker 1 of 2", 3.25, "epochs", 20.4, "last.ckpt"), Row("driver", 1.0, "epochs", 9.0, "last.ckpt")]
    lines = table(rows, [True, False], 7, 61.5).splitlines()
    assert lines[2] == "| worker 1 of 2 | 3.2 s | epochs | last.ckpt | 20 s | the same, bit for bit |"
    assert lines[3].endswith("| ANOTHER |")
    assert lines[-1].startswith("Seed 7; two workers; 62 s")


def test_models_are_equal_in_every_number() -> None:
    model = {"a": torch.tensor([1.0, torch.nan]), "b": torch.tensor([2])}
    assert equal(model, {name: value.clone() for name, value in model.items()})
    for other in (torch.tensor([1.0, 0.0]), torch.tensor([1.0]), torch.tensor([1.5, torch.nan])):
        assert not equal(model, {**model, "a": other})
    assert not equal(model, {"a": model["a"]})
