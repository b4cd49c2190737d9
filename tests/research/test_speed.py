"""The speed benchmarks at toy size: every command's measurement runs and has the figures its page shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lgmml_torch import fit_boosted, list_rank_features
from lgmml_torch.data.catalog import generated_splits
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.functional.score import score
from research.picture import fit_curve
from research.protocol import RankingFold
from research.speed import core, harness, loading, race, report, scale, scoring, training
from research.speed.scale import SHAPES, Shape, generate

TINY = Shape(600, 30, 6)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SHAPES, "small", TINY)
    monkeypatch.setitem(SHAPES, "web10k", TINY)
    for module in (harness, race, report, scale, scoring):
        monkeypatch.setattr(module, "RESULTS", tmp_path)


def test_generated_validation_lists_are_others() -> None:
    train, valid = generate(TINY)
    assert (train.num_queries, train.num_documents, train.num_features) == (30, 600, 6)
    assert valid.num_queries == 20
    rows = {tuple(row) for row in train.features.tolist()}
    assert not any(tuple(row) in rows for row in valid.features.tolist())


def test_scale_times_every_stage() -> None:
    settings = {**scale.DEFAULTS, "shape": "small", "metrics": 5, "passes": 2}
    found = scale.run(settings)
    assert list(found["seconds"]) == ["preprocessing and metrics", "distances", "weights"]
    assert found["metrics"] == 5
    assert sorted(found["valid_ndcg@10"]) == sorted(found["seconds_at_pass"]) == [0, 1, 2]
    assert found["training_seconds"] == pytest.approx(sum(found["seconds"].values()))
    scale.show(found)
    harness.save_result("scale-small", found)
    assert "| small | 600 x 6 | 5 |" in report.scale()


def test_race_grows_until_the_goal_and_enough_trees() -> None:
    train, valid = generate(TINY)
    found = race.lightgbm_race(train, valid, 0.0, at_least=4, at_most=9, threads=1)
    assert found.trees == 4
    assert found.reached_at is not None
    assert found.reached_at["trees"] == 1
    never = race.lightgbm_race(train, valid, 2.0, at_least=2, at_most=5, threads=1)
    assert (never.trees, never.reached_at, sorted(never.curve)) == (5, None, [1, 2, 3, 4, 5])
    construction, rate = race.xgboost_rate(train, 3, threads=1)
    assert construction > 0
    assert rate > 0


def test_scoring_sets_all_rankers_side_by_side() -> None:
    settings = {**scoring.DEFAULTS, "fraction": 1.0, "metrics": 5, "trees": 4, "rounds": 1, "passes": 1}
    found = scoring.measured("web", settings)
    assert list(found["microseconds_per_document"]) == ["ours, full rank", "LightGBM, 4 trees", "XGBoost, 4 trees"]
    assert found["lightgbm_over"]["LightGBM, 4 trees"] == 1.0
    scoring.show("web", found)
    harness.save_result("scoring", {"web": found})
    assert "| LightGBM, 4 trees |" in report.scoring()


def test_both_loops_find_the_same_weights() -> None:
    small = {"metrics": 8, "batch": 32, "steps": 4, "rounds": 1, "documents": 1200, "phi": "shared"}
    found = training.run({**training.DEFAULTS, **small})
    assert found["largest_change_of_phi"] > 1e-5
    assert found["largest_difference_of_phi"] < 0.01 * found["largest_change_of_phi"]


def test_core_and_loading_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "SIZES", ((5, 3),))
    (means,) = core.run_means(rounds=1)["figures"]
    assert means["largest_difference"] < 1e-8
    found = loading.measure(megabytes=0.2, rounds=1)
    assert found["features"] == 136
    assert found["peak_over_dense"] > 0


def test_result_files_are_whole_and_say_where_they_come_from(tmp_path: Path) -> None:
    path = harness.save_result("demo", {"value": float("nan"), "by": {1: 2.0}})
    content = json.loads(path.read_text())
    assert content["value"] is None
    assert content["by"] == {"1": 2.0}
    assert {"processor", "torch_threads", "load_1min"} <= set(content["machine"])
    assert [file.name for file in tmp_path.iterdir()] == ["demo.json"]


def test_the_test_curve_of_the_readme_is_that_of_the_bank() -> None:
    history, chance = fit_curve(20, 10)
    fold = RankingFold(**generated_splits(20, 20, noise=0.8, seed=3)).prepared(list_rank_features())
    bank = fit_boosted(fold.train, fold.valid, rounds=10, patience=10, seed=0)
    kept = history["test_ndcg"][history["rounds"].index(history["best_round"])]
    scores = score(bank.metrics(fold.test.features), bank.phi[None], fold.test.offsets, kernel=bank.kernel)
    assert kept == pytest.approx(mean_measure(scores, fold.test))
    assert 0 < chance < 1


def test_the_page_shows_the_stored_figures_and_where_each_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", Path(report.__file__).parents[1] / "results")
    text = report.PAGE.read_text()
    assert report.fill(text) == text
