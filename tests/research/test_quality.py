"""The quality benchmark on a toy set: splits, storage, tables, and the command from start to page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.functional.ranking.measures import mean_ndcg
from research.quality.__main__ import main
from research.quality.data import NOISES, TOY, add_noise, as_arrays, load_fold
from research.quality.store import Cells
from research.quality.systems import System, find_system
from research.quality.tables import Row, collect, compare_rows, gaps, noise_losses
from research.quality.time import time_growth
from research.quality.trees import choose_point, fit_lightgbm, rank_fold

pytest.importorskip("lightgbm")


def test_every_query_is_a_test_query_once_and_the_parts_of_a_fold_share_none() -> None:
    tested = []
    for number in range(5):
        fold = load_fold(TOY, number)
        parts = [set(part.qids) for part in (fold.train, fold.valid, fold.test)]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 40
        tested += list(fold.test.qids)
    assert sorted(tested) == list(range(40))


def test_arrays_are_in_the_order_of_the_file() -> None:
    data = load_fold(TOY, 0).valid
    arrays = as_arrays(data)
    assert arrays.sizes.sum() == len(arrays.labels) == data.num_documents
    np.testing.assert_array_equal(arrays.features[data.order.numpy()], data.features.numpy())


@pytest.mark.parametrize("kind", NOISES)
def test_noise_triples_the_features_and_keeps_the_real_ones(kind: str) -> None:
    clean = load_fold(TOY, 0)
    noisy = add_noise(clean, kind, seed=3)
    assert noisy.train.num_features == 3 * clean.train.num_features
    assert torch.equal(noisy.test.features[:, : clean.test.num_features], clean.test.features)
    if kind == "permuted":
        copy = noisy.train.features[:, clean.train.num_features : 2 * clean.train.num_features]
        assert torch.equal(copy.sort(0).values, clean.train.features.sort(0).values)
        assert not torch.equal(copy, clean.train.features)


def test_choosing_takes_the_best_point_on_validation() -> None:
    fold = rank_fold(load_fold(TOY, 0))
    grid = {"num_leaves": [4], "learning_rate": [0.1], "min_data_in_leaf": [1, 10_000]}
    point, value = choose_point(fold, fit_lightgbm, grid)
    assert point["min_data_in_leaf"] == 1  # the other cannot split at all
    assert value == mean_ndcg(fit_lightgbm(fold, 0, point)(fold.valid), fold.valid)


def test_a_result_is_computed_once(tmp_path: Path) -> None:
    cells, calls = Cells(tmp_path), []

    def make() -> dict[str, object]:
        calls.append(1)
        return {"values": [0.5, float("nan")]}

    first = cells.get(make, "test", "a b", "set", 0, None, 1)
    assert cells.get(make, "test", "a b", "set", 0, None, 1) == first
    assert calls == [1]
    assert first["values"] == [0.5, None]
    assert cells.find("test", "a b", "set", 0, None, 2) is None


def test_differences_are_paired_and_skip_what_either_skips() -> None:
    first, second = np.array([0.5, 0.7, np.nan]), np.array([0.4, 0.4, 0.9])
    found = gaps({"one": (first, second), "two": (second, second)})
    assert found["one"].mean == pytest.approx(0.2)
    assert found["one"].low >= 0.1 - 1e-12
    assert found["one"].high <= 0.3 + 1e-12
    assert found["mean"].mean == pytest.approx(0.1)
    assert str(found["two"]) == "+0.0000 [+0.0000, +0.0000]"


def test_rows_are_compared_over_the_seeds_both_have() -> None:
    def row(*seeds: float) -> Row:
        return Row(np.array([[value, value] for value in seeds]), tuple(seeds), 1.0)

    table = {("a", "set", None): row(0.1, 0.2, 0.9), ("b", "set", None): row(0.0, 0.1), ("c", "set", None): row(0.0)}
    assert compare_rows(table, "a", "b", ["set"])["set"].mean == pytest.approx(0.1)
    assert compare_rows(table, "a", "c", ["set"])["set"].mean == pytest.approx(0.4)  # c has nothing random in it
    assert compare_rows(table, "a", "c", ["set"], seeds=2)["set"].mean == pytest.approx(0.15)


def test_only_whole_seeds_count(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    system = System("s", lambda *_: ({}, {}), {"s": "S"})
    noisy = System("n", lambda *_: ({}, {}), {"n": "N"}, noises=("normal",))
    for fold, seed in ((0, 0), (1, 0), (0, 1)):
        content = {"values": {"s": [0.1, None]}, "valid": {"s": 0.3}, "fit seconds": 1.0}
        cells.get(lambda content=content: content, "test", "s", "set", fold, None, seed)
    for fold in (0, 1):
        content = {"values": {"n": [0.05, None]}, "valid": {"n": 0.3}, "fit seconds": 1.0}
        cells.get(lambda content=content: content, "test", "n", "set", fold, "normal", 0)
    table = collect(cells, [system, noisy], ["set"], [0, 1], 2)
    assert table["s", "set", None].values.shape == (1, 4)
    assert table["s", "set", None].mean == pytest.approx(0.1)
    assert compare_rows(table, "s", "missing", ["set"]) == {}
    loss = noise_losses(table, "s", "n", "normal", ["set"])["set"]
    assert np.nanmean(loss) == pytest.approx(0.05)


def test_growth_is_timed_for_every_size() -> None:
    found = time_growth(sizes=(500, 1000), rounds=2)
    assert found["documents"] == [500, 1000]
    assert all(seconds > 0 for stage in ("train", "score") for seconds in found[stage])
    assert np.isfinite(found["train exponent"])


def test_an_unknown_system_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
    assert find_system("boosted").labels["boosted+warp"]


@pytest.mark.slow
def test_the_command_goes_from_data_to_page_and_does_nothing_twice(tmp_path: Path) -> None:
    places = ["--cells", str(tmp_path / "cells"), "--out", str(tmp_path)]
    only = ["--only", "random", "ridge", "boosted", "lightgbm+ranks", "lightgbm noise", "boosted noise", "times"]
    main(["--quick", "--sets", TOY, *only, *places])
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*.json")}
    assert not (tmp_path / "docs").exists()
    main(["--quick", "--sets", TOY, *only, "--stage", "report", *places])
    main(["--quick", "--sets", TOY, *only, *places])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*.json")} == stored
    result = json.loads((tmp_path / "research" / "results" / "quality-quick.json").read_text())
    assert result["rows"]["boosted"][TOY]["ndcg@10"] > result["rows"]["random"][TOY]["ndcg@10"]
    page = (tmp_path / "docs" / "quality-quick.md").read_text()
    for word in ("## Protocol", "## Targets", "## Noise", "## Times", "LightGBM + list ranks", "not measured"):
        assert word in page
    with np.load(tmp_path / "research" / "results" / "quality-quick-per-query.npz") as arrays:
        assert arrays[f"boosted|{TOY}"].shape == (1, 8)
    assert (tmp_path / "docs" / "images" / "quality-quick-differences.png").stat().st_size > 1000
