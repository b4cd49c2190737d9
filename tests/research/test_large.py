"""The benchmarks of large sets, in small: what is selected where, what the page says, how work is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lgmml_torch.data.generated import letor_like
from research import protocol, starts
from research.compare import find_system
from research.protocol import RankingFold, large_fold
from research.quality import large, large_report
from research.quality.large import Place, better_trees, choices, chosen_point, fits, points
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
    monkeypatch.setattr(large, "FIGURES", Path("nowhere.json"))
    monkeypatch.setattr(large, "GRID", {"num_leaves": [3, 5], "learning_rate": [0.1], "min_data_in_leaf": [5]})
    monkeypatch.setattr(large, "SHORTLISTS", (2, 1))
    quick = find_system("ridge")
    monkeypatch.setattr(large, "find_system", lambda name: quick if name == "default" else find_system(name))
    short = lambda point: {"params": dict(point), "num_rounds": 8, "patience": 4}  # noqa: E731
    monkeypatch.setattr(large, "lightgbm_options", short)


@pytest.mark.usefixtures("toy")
def test_selection_is_on_validation_and_the_page_has_the_rest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.share(choices(store, "debian"))
    assert [len(points(store, "debian", size, "lightgbm")) for size in (8, 12, None)] == [2, 2, 1]
    for size in (8, 12, None):
        tried = points(store, "debian", size, "lightgbm")
        values = [store.get(large.point_job(Place("debian", size), "lightgbm", point)).info["valid"] for point in tried]
        assert chosen_point(store, "debian", size, "lightgbm") == tried[values.index(max(values))]
        assert better_trees(store, "debian", size) in large.TREES
    assert not list(tmp_path.rglob("*.begun"))
    assert not (tmp_path / "large").exists()  # no test query was scored
    store.share(fits(store, "debian", seeds=1))
    (tmp_path / "docs" / "images").mkdir(parents=True)
    large_report.write_page(store, root=tmp_path)
    page = (tmp_path / "docs" / "large.md").read_text()
    figures = json.loads((tmp_path / "research" / "results" / "quality-large.json").read_text())
    found = figures["sets"]["debian"]
    assert set(found) == {"8", "12", "all"}
    for entry in found.values():
        assert entry["default"]["queries"] + entry["default"]["skipped"] == 8
        low, high = entry["difference [mean, low, high]"][1:]
        assert low <= entry["difference [mean, low, high]"][0] <= high
    assert "at least -1.000: met" in page
    assert "at least +1.000: MISSED" in page
    assert (tmp_path / "docs" / "images" / "quality-large.png").stat().st_size > 5000


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
    closed = ("random", "through the global geometric mean", "through gradient outer products")
    monkeypatch.setattr(starts, "CLOSED_FORMS", {name: starts.CLOSED_FORMS[name] for name in closed})
    monkeypatch.setattr(starts, "CLOSED_SEEDS", 2)
    monkeypatch.setattr(starts, "SEEDS", 2)
    monkeypatch.setattr(starts, "PART_SEEDS", 2)
    monkeypatch.setattr(starts, "PARTS", {name: starts.PARTS[name] for name in ("the recipe",)})
    starts.main(["--store", str(tmp_path / "store"), "--out", str(tmp_path / "starts.md")])
    page = (tmp_path / "starts.md").read_text()
    assert "| strength |" in page
    assert "| through gradient outer products |" in page


@pytest.mark.usefixtures("toy")
def test_a_climb_has_a_curve_over_seconds() -> None:
    settings: dict[str, Any] = {**climb.DEFAULTS, "side": "trees", "trees": 6, "leaves": 4}
    found = climb.run_side(settings)
    seconds = [moment for moment, _ in found["curve"]]
    assert seconds == sorted(seconds)
    assert found["of the kept"] == pytest.approx(found["valid_ndcg@10"], abs=1e-6)
    assert found["scoring_us_per_document"] > 0
    assert climb.picture({"settings": settings, "ours": found, "trees": found}) is not None
