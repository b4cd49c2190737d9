"""The quality benchmark on a toy set: choices, tables, and the command from start to page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.functional.ranking.measures import mean_ndcg
from research.compare import SYSTEMS, Fitted, System, find_system
from research.plots import noise_picture
from research.protocol import TOY, ranking_fold
from research.quality.__main__ import main
from research.quality.tables import Row, Verdict, collect, compare_rows, noise_losses, read_table, verdicts
from research.quality.times import time_growth
from research.quality.work import (
    CHOICES,
    GRID,
    XGBOOST_GRID,
    Plan,
    choice_job,
    choose_trees,
    fit_job,
    lightgbm_options,
    published_options,
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
    assert value == mean_ndcg(score(fold.valid), fold.valid)


def test_the_trees_search_eighteen_points() -> None:
    for grid in (GRID, XGBOOST_GRID):
        assert np.prod([len(values) for values in grid.values()]) == 18
    assert lightgbm_options({"learning_rate": 0.03})["num_rounds"] == 500
    assert lightgbm_options({"learning_rate": 0.1})["num_rounds"] == 300
    assert published_options({"init": 0.1, "margin": 1.0}, 30)["overrides"][:2] == [
        "search.init=[0.1]", "search.margin=[1.0]",
    ]  # fmt: skip


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
        found.append([store.get(choice_job(plan, choice, TOY, 0)).info for choice in ("lightgbm+ranks", "published")])
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


def test_the_picture_of_noise_has_intervals_and_the_paired_difference() -> None:
    losses = {"boosted L-GMML": [(0.01, -0.01, 0.03)] * 2, "LightGBM": [(0.02, 0.01, 0.04), (0.0, -0.1, 0.1)]}
    figure = noise_picture(["a", "b"], losses, [(-0.01, -0.02, 0.01), (0.01, -0.03, 0.02)], title="Noise")
    above, below = figure.axes
    assert len(above.patches) == 4
    assert above.get_ylabel() == "loss of NDCG@10"
    assert below.get_title().startswith("boosted L-GMML minus LightGBM")
    assert len(above.containers) == 4  # bars and error bars of two systems
    (bars,) = below.containers
    ((low, high), _) = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
    assert (low, high) == pytest.approx((-0.02, 0.01))
    assert "95% bootstrap over queries" in figure.get_suptitle()


def test_stored_values_are_read_back_under_todays_names(tmp_path: Path) -> None:
    values = np.array([[0.5, np.nan]], dtype=np.float32)
    np.savez(tmp_path / "stored.npz", **{"boosted|mq2008": values, "boosted noise|mq2008|normal": values / 2})
    np.savez(tmp_path / "old.npz", **{"paper knn|mq2008": values})
    table = read_table(tmp_path / "stored.npz")
    assert set(table) == {("boosted", "mq2008", None), ("boosted noise", "mq2008", "normal")}
    assert table["boosted noise", "mq2008", "normal"].mean == 0.25
    assert set(read_table(tmp_path / "old.npz")) == {("published knn", "mq2008", None)}


def test_targets_are_judged_by_their_means() -> None:
    def row(value: float) -> Row:
        return Row(torch.tensor([[value, value + 0.1]], dtype=torch.float64), (value,), 1.0)

    table = {("boosted+warp", "set", None): row(0.5), ("lightgbm+ranks", "set", None): row(0.49)}
    table["published ones", "set", None] = row(0.47)
    times = {"set": {"train ratio": 9.0, "score ratio": 1.0}}
    found = verdicts(table, times, {"train exponent": 1.0, "score exponent": 1.2}, ["set"])
    assert [v.word for v in found] == ["met", "MISSED", "not measured", "not measured", "MISSED", "met", "MISSED"]
    assert found[0] == Verdict(
        "default − LightGBM + list ranks: at least -0.003 on each set, above 0 on average",
        "set +0.0100, mean +0.0100",
        True,
    )


def test_growth_is_timed_for_every_size() -> None:
    found = time_growth(sizes=(500, 1000), rounds=2)
    assert found["documents"] == [500, 1000]
    assert all(seconds > 0 for stage in ("train", "score") for seconds in found[stage])
    assert np.isfinite(found["train exponent"])


def test_an_unknown_system_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_goes_from_data_to_page_and_does_nothing_twice(tmp_path: Path) -> None:
    places = ["--store", str(tmp_path / "store"), "--out", str(tmp_path)]
    only = ["--only", "random", "ridge", "boosted", "lightgbm+ranks", "lightgbm noise", "boosted noise", "times"]
    main(["--quick", "--sets", TOY, *only, *places])
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*.json")}
    assert not (tmp_path / "docs").exists()
    main(["--quick", "--sets", TOY, *only, "--stage", "report", *places])
    main(["--quick", "--sets", TOY, *only, *places])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*.json")} == stored
    result = json.loads((tmp_path / "research" / "results" / "quality-quick.json").read_text())
    assert result["rows"]["boosted"][TOY]["ndcg@10"] > result["rows"]["random"][TOY]["ndcg@10"]
    page = (tmp_path / "docs" / "quality-quick.md").read_text()
    for word in (
        "Written by `python -m research.quality --quick`", "## Protocol", "this package's NDCG@10", "## Targets",
        "## Noise", "## Times", "LightGBM + list ranks", "not measured",
    ):  # fmt: skip
        assert word in page
    with np.load(tmp_path / "research" / "results" / "quality-quick-per-query.npz") as arrays:
        assert arrays[f"boosted|{TOY}"].shape == (1, 8)
    pictures = [tmp_path / "docs" / "images" / f"quality-quick-{name}.png" for name in ("differences", "noise")]
    drawn = [picture.read_bytes() for picture in pictures]
    for picture in pictures:
        picture.unlink()
    main(["--quick", "--sets", TOY, "--stage", "pictures", *places])
    assert [picture.read_bytes() for picture in pictures] == drawn
