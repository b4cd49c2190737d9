"""The benchmarks of large sets, in small: what is selected where, what the page says, how work is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lgmml_torch.data.generated import letor_like
from research import closed_forms, protocol, starts
from research.compare import find_system
from research.protocol import RankingFold, large_fold
from research.quality import large, large_report
from research.quality.large import better, choices
from research.speed import climb
from research.store import Job, Record, Store


def toy_fold(name: str, queries: int | None = None, draw: int = 0) -> RankingFold:
    parts = [
        letor_like(count, 6, num_documents=15 * count, noise=0.2, seed=seed)
        for count, seed in ((24, 0), (8, 1), (8, 2))
    ]
    fold = RankingFold(*parts)
    return fold if queries is None else RankingFold(fold.train.select(list(range(draw, draw + queries))), *parts[1:])


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (large, large_report, starts, climb):
        monkeypatch.setattr(module, "large_fold", toy_fold)
    monkeypatch.setattr(large, "SIZES", {"debian": (8, 12, None)})
    monkeypatch.setattr(large_report, "SIZES", {"debian": (8, 12, None)})
    monkeypatch.setattr(large_report, "LIMITS", {"8": -1.0, "12": -1.0, "all": 1.0})
    grid = {"num_leaves": (2, 3, 5), "min_data_in_leaf": (4, 5), "learning_rate": (0.05, 0.1)}
    monkeypatch.setattr(large, "GRIDS", {"lightgbm": grid})
    monkeypatch.setattr(large_report, "GRIDS", {"lightgbm": grid})
    monkeypatch.setattr(large, "STARTS", {"lightgbm": {"num_leaves": 3, "min_data_in_leaf": 5, "learning_rate": 0.1}})
    quick = find_system("ridge")
    monkeypatch.setattr(large, "find_system", lambda name: quick if name == "default" else find_system(name))
    monkeypatch.setattr(large, "MOST_TREES", 8)


@pytest.mark.usefixtures("toy")
def test_one_setting_after_the_other_is_searched_on_validation(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for size, most in ((8, 7), (12, 7), (None, 4)):
        store.share(choices(store, "debian", size, "lightgbm"))
        best = {}
        for job in choices(store, "debian", size, "lightgbm"):
            info = store.get(job).info
            assert len(info["tried"]) <= most
            best[job.settings["system"]] = info["valid"]
            chosen = [one for one in info["tried"] if one.items() >= info["chosen"].items()]
            assert [one["valid"] for one in chosen] == [max(one["valid"] for one in info["tried"])]
        name, _ = better(store, "debian", size, "lightgbm")
        assert best[name] == max(best.values())
        assert len(best) == (2 if size else 1)
    assert not list(tmp_path.rglob("*.begun"))
    assert not (tmp_path / "large").exists()  # no test query was scored


@pytest.mark.usefixtures("toy")
def test_sides_that_were_fitted_in_different_places_are_paired(tmp_path: Path) -> None:
    (tmp_path / "docs" / "images").mkdir(parents=True)
    place = ["--out", str(tmp_path), "--sets", "debian"]
    for side, stage in (("default", "default"), ("lightgbm", "all")):
        asked = [*place, "--store", str(tmp_path / side), "--systems", "lightgbm"]
        large.main([*asked, "--stage", stage, "--seeds", "0"])
        large.main([*asked, "--stage", "report"])
    large_report.write_page(Store(tmp_path / "none"), root=tmp_path)
    page = (tmp_path / "docs" / "large.md").read_text()
    figures = json.loads((tmp_path / "research" / "results" / "quality-large.json").read_text())
    values = large_report.read_values(tmp_path / "research" / "results" / "quality-large-per-query.npz")
    found = figures["sets"]["debian"]
    assert set(found) == {"8", "12", "all"}
    for size, entry in found.items():
        assert entry["default"]["queries"] + entry["default"]["skipped"] == 8
        mean, low, high = entry["default − lightgbm"]
        ours, trees = (values[f"debian|{size}|{side}"] for side in ("default", "lightgbm"))
        assert low <= mean <= high
        assert mean == pytest.approx(float((ours - trees).nanmean()), abs=1e-6)
    assert "at least -1.000: met" in page
    assert "at least +1.000: MISSED" in page
    assert (tmp_path / "docs" / "images" / "quality-large.png").stat().st_size > 5000


@pytest.mark.usefixtures("toy")
def test_without_values_per_query_a_difference_has_no_interval() -> None:
    entry = {side: {"test ndcg@10 by seed": [value]} for side, value in (("default", 0.5), ("lightgbm", 0.25))}
    assert large_report.difference(None, torch.ones(1, 3), entry, "lightgbm") == [0.25, None, None]


def test_two_who_share_do_nothing_twice(tmp_path: Path) -> None:
    done: list[int] = []
    store, other = Store(tmp_path), Store(tmp_path)

    def job(number: int) -> Job:
        def make() -> Record:
            done.append(number)
            if number == 0:
                other.share(job(i) for i in range(4))  # somebody else comes by in the middle of it
            return Record(info={"number": number})

        return Job("work", {"number": number}, make)

    store.share(job(i) for i in range(4))
    assert sorted(done) == [0, 1, 2, 3]


def test_a_smaller_training_part_is_drawn_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"train": letor_like(30, 4, seed=0), "valid": letor_like(5, 4, seed=1), "test": letor_like(5, 4, seed=2)}
    monkeypatch.setattr(protocol, "open_dataset", lambda *args, **options: whole)
    large_fold.cache_clear()
    one, again, other = (large_fold("debian", 10, draw) for draw in (0, 0, 1))
    large_fold.cache_clear()
    assert one.train.qids == again.train.qids != other.train.qids
    assert one.train.num_queries == 10
    assert one.test is whole["test"]
    with pytest.raises(protocol.DataError, match="must be below the 30 of 'debian', got 30"):
        large_fold("debian", 30)
    large_fold.cache_clear()


@pytest.mark.usefixtures("toy")
def test_starts_are_compared_with_random_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("experiment=trained", "local_metrics.num_metrics=4", "local_metrics.rank=2", "trainer.max_epochs=1")
    monkeypatch.setattr(starts, "SMALL", small)
    monkeypatch.setattr(starts, "SIZES", (8,))
    few = {name: starts.START_SETTINGS[name] for name in ("random", "strength")}
    monkeypatch.setattr(starts, "START_SETTINGS", few)
    closed = ("random", "strength", "through the global geometric mean", "through gradient outer products")
    monkeypatch.setattr(starts, "CLOSED_FORMS", {name: starts.CLOSED_FORMS[name] for name in closed})
    monkeypatch.setattr(starts, "CLOSED_SEEDS", 2)
    monkeypatch.setattr(starts, "SEEDS", 2)
    monkeypatch.setattr(starts, "PART_SEEDS", 2)
    monkeypatch.setattr(starts, "PARTS", {name: starts.PARTS[name] for name in ("the recipe",)})
    monkeypatch.setattr(starts, "PULLS", (10,))
    monkeypatch.setattr(starts, "TURN_DATA", protocol.TOY)
    monkeypatch.setattr(starts, "FOLDS", range(1))
    monkeypatch.setattr(closed_forms, "SETTINGS", (*closed_forms.SETTINGS, "trainer.max_epochs=1"))
    starts.main(["--store", str(tmp_path / "store"), "--out", str(tmp_path / "starts.md")])
    page = (tmp_path / "starts.md").read_text()
    assert "| strength |" in page
    assert "| through gradient outer products |" in page
    assert "| through the global geometric mean, pulled 10 |" in page
    assert "| alternated twice |" in page
    assert "| identity, own anchors |" in page
    assert "Not run yet" not in page


@pytest.mark.usefixtures("toy")
def test_a_climb_has_a_curve_over_seconds() -> None:
    settings: dict[str, Any] = {**climb.DEFAULTS, "side": "trees", "trees": 6, "leaves": 4}
    found = climb.run_side(settings)
    seconds = [moment for moment, _ in found["curve"]]
    assert seconds == sorted(seconds)
    assert found["of the kept"] == pytest.approx(found["valid_ndcg@10"], abs=1e-6)
    assert found["scoring_us_per_document"] > 0
    assert climb.picture({"settings": settings, "ours": found, "trees": found}) is not None
