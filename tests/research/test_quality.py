"""The quality benchmark on a toy set: choices, tables, and the command from start to page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.functional.measures import mean_measure
from research.compare import SYSTEMS, Fitted, System, find_system
from research.protocol import TOY, ranking_fold
from research.quality.__main__ import main
from research.quality.tables import Row, collect, compare_rows, noise_losses
from research.quality.work import (
    CHOICES,
    Plan,
    choice_job,
    choose_trees,
    fit_job,
)
from research.store import Job, Record, Store

pytest.importorskip("lightgbm")


def test_choosing_takes_the_best_point_on_validation() -> None:
    fold = ranking_fold(TOY, 0)
    grid = {"num_leaves": [4], "learning_rate": [0.1], "min_data_in_leaf": [1, 10_000]}
    options, value = choose_trees(fold, False, name="lightgbm+ranks", grid=grid)
    assert options["params"]["min_data_in_leaf"] == 1  # the other cannot split at all
    assert {key: options["params"][key] for key in ("feature_fraction", "bagging_fraction")} == {
        "feature_fraction": 0.5, "bagging_fraction": 0.8,
    }  # fmt: skip
    score = find_system("lightgbm+ranks").fit(fold, 0, options).scores["lightgbm+ranks"]
    assert value == mean_measure(score(fold.valid), fold.valid)


def test_every_choice_a_system_asks_for_is_there() -> None:
    asked = {system.choice for system in SYSTEMS if system.choice}
    assert asked == set(CHOICES)


def test_a_choice_never_sees_the_test_queries_of_its_fold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fold = ranking_fold(TOY, 0)
    plan = Plan(sets=(TOY,), folds=(0,), quick=True)
    found = []
    for number, test in enumerate((fold.test, fold.train)):  # whatever stands there
        monkeypatch.setattr("research.quality.work.ranking_fold", lambda *_, t=test, **__: replace(fold, test=t))
        store = Store(tmp_path / str(number))
        found.append([store.get(choice_job(plan, choice, TOY, 0)).info for choice in ("lightgbm+ranks",)])
    assert found[0] == found[1]


def test_rows_are_compared_over_the_seeds_both_have() -> None:
    def row(*seeds: float) -> Row:
        return Row(torch.tensor([[value, value] for value in seeds], dtype=torch.float64), tuple(seeds), 1.0)

    table = {("a", "set", None): row(0.1, 0.2, 0.9), ("b", "set", None): row(0.0, 0.1), ("c", "set", None): row(0.0)}
    assert compare_rows(table, "a", "b", ["set"])["set"].mean == pytest.approx(0.1)
    assert compare_rows(table, "a", "c", ["set"])["set"].mean == pytest.approx(0.4)  # c has nothing random in it
    assert compare_rows(table, "a", "c", ["set"], seeds=2)["set"].mean == pytest.approx(0.15)


def test_only_whole_seeds_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    system = System("s", lambda *_: Fitted({}), {"s": "S"})
    noisy = System("n", lambda *_: Fitted({}), {"n": "N"}, noises=("normal",))
    plan = Plan(sets=("set",), folds=(0, 1), seeds=2, systems=(system, noisy))

    def keep(job: Job, values: dict[str, list[float]]) -> None:
        info = {"valid": dict.fromkeys(values, 0.3), "fit seconds": 1.0}
        store.get(replace(job, make=lambda: Record(values, info)))

    for fold, seed in ((0, 0), (1, 0), (0, 1)):
        keep(fit_job(store, plan, system, "set", fold, None, seed), {"s": [0.1, float("nan")]})
    for fold in (0, 1):
        keep(fit_job(store, plan, noisy, "set", fold, "normal", 0), {"n": [0.05, float("nan")]})
    table = collect(store, plan)
    assert table["s", "set", None].values.shape == (1, 4)
    assert table["s", "set", None].mean == pytest.approx(0.1)
    assert compare_rows(table, "s", "missing", ["set"]) == {}
    loss = noise_losses(table, "s", "n", "normal", ["set"])["set"]
    assert float(loss.nanmean()) == pytest.approx(0.05)


@pytest.mark.slow
def test_the_command_goes_from_data_to_page_and_does_nothing_twice(tmp_path: Path) -> None:
    places = ["--store", str(tmp_path / "store"), "--out", str(tmp_path)]
    only = ["--only", "random", "ridge", "boosted", "lightgbm+ranks", "boosted noise"]
    main(["--quick", "--sets", TOY, *only, *places])
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*.json")}
    assert not (tmp_path / "docs").exists()
    main(["--quick", "--sets", TOY, *only, "--stage", "report", *places])
    main(["--quick", "--sets", TOY, *only, *places])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*.json")} == stored
    result = json.loads((tmp_path / "research" / "results" / "quality-quick.json").read_text())
    assert result["rows"]["boosted"][TOY]["ndcg@10"] > result["rows"]["random"][TOY]["ndcg@10"]
    page = (tmp_path / "docs" / "quality-quick.md").read_text()
    assert "LightGBM + list ranks" in page
    with np.load(tmp_path / "research" / "results" / "quality-quick-per-query.npz") as arrays:
        assert arrays[f"boosted|{TOY}"].shape == (1, 8)
