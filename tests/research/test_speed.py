"""The speed benchmarks at toy size: every command's measurement runs and has the figures its page shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lgmml_torch import fit_boosted, list_rank_features
from lgmml_torch.data.catalog import generated_splits
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.functional.score import score
from research.picture import fit_curve, picture
from research.plots import Figure
from research.protocol import RankingFold
from research.speed import core, harness, loading, race, report, scale, scoring, training
from research.speed.plots import ratios_picture
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


def test_race_is_told_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"settings": {"seed": 0}, "valid_ndcg@10": {"0": 0.1, "1": 0.2}, "training_seconds": 2.0, "machine": {}}
    monkeypatch.setattr(race, "run_ours", lambda settings: {**ours, "seconds_at_pass": {"0": 1.0, "1": 2.0}})
    monkeypatch.setattr(race, "run_boosted", lambda *_: {"seconds": 1.0, "metrics": 3, "valid_ndcg@10": 0.3})
    settings = {**race.DEFAULTS, "shape": "small", "trees": 3, "most": 4, "xgboost": 2, "threads": 1}
    found = race.run(settings)
    assert found["ours"]["seconds_to_best"] == 2.0
    assert [row[0] for row in race.race_rows(found)][3] == "XGBoost, 5,000 trees (projection)"
    assert len(race.picture(found).axes) == 2


RACE = {
    "ours": {
        "seconds": 90.0, "valid_ndcg@10": 0.4, "seconds_to_best": 80.0, "seconds_at_pass": {"0": 60.0, "1": 80.0},
        "valid_ndcg@10_at_pass": {"0": 0.3, "1": 0.4},
    },
    "lightgbm": {
        "trees": 3, "trees_per_second": 0.5, "construction_seconds": 4.0, "projected_seconds_5000_trees": 10_004.0,
        "reached_our_ndcg": {"trees": 2, "seconds": 8.0}, "valid_ndcg@10": {"1": 0.2, "2": 0.45, "3": 0.5},
    },
    "xgboost": {"projected_seconds_5000_trees": 20_000.0},
    "boosted": {"seconds": 30.0, "metrics": 3, "valid_ndcg@10": 0.6},
    "projected_over_ours": 111.0,
    "machine": {"torch_threads": 1, "load_1min": 1.0},
}  # fmt: skip


def test_the_picture_of_the_race_has_equal_ndcg_and_marks_projections() -> None:
    left, right = race.picture(RACE).axes
    lines = {line.get_label(): line for line in left.get_lines()}
    assert [len(line.get_xdata()) for line in lines.values()] == [2, 3, 1, 2, 2]  # three who ran, two projections
    assert list(lines["LightGBM, 3 trees"].get_xdata()) == [6.0, 8.0, 10.0]
    assert list(lines["LightGBM, 3 trees"].get_ydata()) == [0.2, 0.45, 0.5]
    assert sum("projection; NDCG not measured" in label for label in lines) == 2
    assert left.get_ylabel() == "validation NDCG@10"
    assert left.get_xlabel() == right.get_xlabel() == "seconds of training (log scale)"
    assert len(right.get_yticklabels()) == 3
    texts = [text.get_text() for text in right.texts]
    assert "LightGBM 8 s\n10x sooner" in texts
    assert "not reached: LightGBM" in texts  # the NDCG of the boosted metrics
    hollow = [line for line in right.get_lines() if line.get_markerfacecolor() == "white"]
    assert [line.get_xdata()[0] for line in hollow] == [10_004.0, 20_000.0]


def test_the_picture_of_the_race_is_drawn_again_from_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = harness.save_result("race-small", RACE).read_text()
    monkeypatch.setattr(race, "run", lambda _: pytest.fail("nothing is to be measured"))
    monkeypatch.setattr("sys.argv", ["race", "shape=small", "draw=1"])
    race.main()
    assert (tmp_path / "race-small.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "race-small.json").read_text() == stored
    text = report.race()
    assert "our time is 10x LightGBM's" in text
    assert "race-small.png" in text


def test_ours_and_rivals_differ_in_colour_and_ours_in_shade() -> None:
    labels = ["ours, full rank", "ours, rank 8", "ours, rank 4", "LightGBM, 5 trees"]
    axis = ratios_picture(dict.fromkeys(labels, 1.0), unit="µs per document", title="web").axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == labels
    assert axis.get_xlabel() == "µs per document; in brackets, times the first row"
    colours = [bar.get_facecolor()[:3] for bar in axis.patches]
    assert len(set(colours)) == 4
    assert all(colour[2] == max(colour) for colour in colours[:3])  # blues, paler and paler
    assert sum(colours[0]) < sum(colours[1]) < sum(colours[2])
    assert colours[3][2] < colours[3][0]


def test_scoring_sets_all_rankers_side_by_side() -> None:
    settings = {**scoring.DEFAULTS, "fraction": 1.0, "metrics": 5, "trees": 4, "rounds": 1, "passes": 1}
    found = scoring.measured("web", settings)
    assert list(found["microseconds_per_document"]) == ["ours, full rank", "LightGBM, 4 trees", "XGBoost, 4 trees"]
    assert found["lightgbm_over"]["LightGBM, 4 trees"] == 1.0
    scoring.show("web", found)
    harness.save_result("scoring", {"web": found})
    assert "| LightGBM, 4 trees |" in report.scoring()


@pytest.mark.parametrize("phi", ["shared", "per_query"])
def test_both_loops_find_the_same_weights(phi: str) -> None:
    small = {"metrics": 8, "batch": 32, "steps": 4, "rounds": 1, "documents": 1200, "phi": phi}
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


def test_page_keeps_its_text_and_says_what_is_missing() -> None:
    text = "before\n<!-- race -->\nold\n<!-- /race -->\nafter\n"
    assert report.fill(text) == "before\n<!-- race -->\n\n_Not measured yet._\n\n<!-- /race -->\nafter\n"


def test_wrong_settings_are_one_sentence() -> None:
    with pytest.raises(SystemExit, match=r"settings are shape=….*got 'shap=small'"):
        harness.parse(["shap=small"], race.DEFAULTS, "")
    with pytest.raises(SystemExit, match="trees must be of type int, got 'many'"):
        harness.parse(["trees=many"], race.DEFAULTS, "")
    with pytest.raises(SystemExit, match="shape must be one of"):
        harness.parse(["shape=huge"], race.DEFAULTS, "", choices={"shape": SHAPES})


def test_picture_of_the_readme_has_both_panels() -> None:
    figure = picture(queries=20, rounds=3)
    assert isinstance(figure, Figure)
    left, right = figure.axes
    assert left.get_title().startswith("Each region")
    assert right.get_title() == "Metrics are added while validation queries gain"
    curves = {line.get_label(): line for line in right.get_lines() if not line.get_label().startswith("_")}
    assert list(curves) == [
        "training queries", "validation queries, which choose the round", "test queries, which choose nothing",
    ]  # fmt: skip
    (training, validation, test) = (list(line.get_ydata()) for line in curves.values())
    assert len(training) == len(validation) == len(test)
    assert test != validation
    assert (right.get_xlabel(), right.get_ylabel()) == ("boosting round", "NDCG@10")


def test_the_test_curve_of_the_readme_is_that_of_the_bank() -> None:
    history, chance = fit_curve(20, 10)
    fold = RankingFold(**generated_splits(20, 20, noise=0.8, seed=3)).prepared(list_rank_features())
    bank = fit_boosted(fold.train, fold.valid, rounds=10, patience=10, seed=0)
    kept = history["test_ndcg"][history["rounds"].index(history["best_round"])]
    scores = score(bank.metrics(fold.test.features), bank.phi[None], fold.test.offsets, kernel=bank.kernel)
    assert kept == pytest.approx(mean_ndcg(scores, fold.test))
    assert 0 < chance < 1
