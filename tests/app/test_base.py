"""Ours added to a tree model: one run, one file, one score, and all three in the report."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.app import compose
from lgmml_torch.app import train as app
from lgmml_torch.app.cli import main
from lgmml_torch.app.compose import load_splits
from lgmml_torch.app.train import RunResult, _load_base, add_base, train
from lgmml_torch.checks import CheckpointError, ConfigError, LGMMLError, MissingDependencyError
from lgmml_torch.data.write import save_letor
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.trees import TreeBase
from lgmml_torch.ragged import RankingData
from tests.app.test_train import BOOSTED, small
from tests.doors import small_data, small_model

QUICK = [*BOOSTED, "data.num_queries=90", "trainer.max_epochs=1", "logger=none"]


def grow(data: RankingData, file: Path, **settings: Any) -> Path:
    lightgbm = pytest.importorskip("lightgbm")
    lists = lightgbm.Dataset(data.features.numpy(), data.labels.numpy(), group=data.sizes.numpy())
    params = {"objective": "lambdarank", "num_leaves": 7, "verbosity": -1, "num_threads": 1, "seed": 0, **settings}
    lightgbm.train(params, lists, 12).save_model(file)
    return file


def grow_xgboost(data: RankingData, file: Path) -> Path:
    xgboost = pytest.importorskip("xgboost")
    lists = xgboost.DMatrix(data.features.numpy(), data.labels.numpy(), nthread=1)
    lists.set_group(data.sizes.numpy())
    xgboost.train({"objective": "rank:ndcg", "max_depth": 3, "nthread": 1}, lists, 12).save_model(file)
    return file


def run(folder: Path, *overrides: str) -> RunResult:
    result = train(small(folder, *QUICK, *overrides))
    assert result is not None
    return result


@pytest.fixture(scope="module")
def splits() -> dict[str, RankingData]:
    return load_splits(small(Path(), *QUICK))


@pytest.fixture(scope="module")
def trees(splits: dict[str, RankingData], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grow(splits["train"], tmp_path_factory.mktemp("trees") / "trees.txt")


@pytest.fixture(scope="module")
def with_trees(trees: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(tmp_path_factory.mktemp("run"), f"base={trees}")


def test_the_file_holds_both_and_scores_their_sum(with_trees: RunResult, splits: dict[str, RankingData]) -> None:
    model = LGMML.load(with_trees.folder / "model.safetensors")
    ours = LGMML.load(with_trees.folder / "checkpoints" / "best.ckpt")
    assert ours.base is None
    assert model.base is not None
    assert model.base.weight > 0
    assert model.base.own_weight > 0
    for data in splits.values():
        expected = model.base.own_weight * ours.score(data).double()
        expected += model.base.weight * model.base.predict(data.features, data.offsets)
        torch.testing.assert_close(model.score(data), expected.float())
        assert torch.equal(model.score(data), with_trees.model.score(data))
        rows = data.features[: data.sizes[0]].numpy()  # the short way has no trees
        assert model.score_list(rows) is None
        torch.testing.assert_close(torch.as_tensor(ours.score_list(rows)), ours.score(data)[: len(rows)])


def test_chances_of_grades_are_those_of_the_sum(with_trees: RunResult, splits: dict[str, RankingData]) -> None:
    """Fitted ones expect as much relevance as the validation lists have."""
    model, valid = LGMML.load(with_trees.folder / "model.safetensors"), splits["valid"]
    expected = model.calibrated.expected(model.score(valid)).mean()
    torch.testing.assert_close(expected, valid.labels.double().mean(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["valid"])
def test_the_report_shows_all_three(name: str, with_trees: RunResult, splits: dict[str, RankingData]) -> None:
    model, data = with_trees.model, splits[name]
    assert model.base is not None
    found = {e.policy: e.means["ndcg@10"] for e in with_trees.evaluations if e.split == f"{name}: unseen queries"}
    assert found == {
        "together (shared)": pytest.approx(mean_measure(model.score(data), data)),
        "ours alone": pytest.approx(mean_measure(model.score(data, alone=True), data)),
        "base alone": pytest.approx(mean_measure(model.base.predict(data.features, data.offsets), data)),
    }
    if name == "valid":
        assert found["together (shared)"] >= max(found["ours alone"], found["base alone"])
    text = (with_trees.folder / "report.md").read_text()
    for label, value in found.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {name}: unseen queries | {label} |"))
        assert f"{value:.4f}" in row
    report = json.loads((with_trees.folder / "report.json").read_text())
    assert [e["policy"] for e in report["evaluations"] if e["split"].startswith(name)] == list(found)
    assert [e["policy"] for e in report["evaluations"] if e["split"] == "training queries"] == ["together (shared)"]


def test_our_part_is_what_a_run_without_trees_gives(
    with_trees: RunResult, splits: dict[str, RankingData], tmp_path: Path
) -> None:
    alone = run(tmp_path)
    assert alone.model.base is None
    assert torch.equal(alone.model.score(splits["test"]), with_trees.model.score(splits["test"], alone=True))
    assert {e.policy for e in alone.evaluations} == {"shared"}


def test_info_and_scores_on_the_command_line(
    with_trees: RunResult, splits: dict[str, RankingData], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, base = with_trees.folder / "model.safetensors", with_trees.model.base
    assert base is not None
    main(["info", str(file)])
    printed = capsys.readouterr().out
    assert "a LightGBM model of" in printed
    assert f"{base.own_weight:.6g} · own + {base.weight:.6g} · that of the trees" in printed
    assert "lightgbm (pip install 'lgmml-torch[trees]')" in printed
    save_letor(splits["test"], tmp_path / "new.txt")
    main(["score", str(file), str(tmp_path / "new.txt"), "--output", str(tmp_path / "scores.npy")])
    expected = with_trees.model.score_in_caller_order(splits["test"])
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected, rtol=1e-5, atol=1e-6)
    qid = splits["test"].qids[0]
    words = ["explain", str(file), str(tmp_path / "new.txt"), "--qid", str(qid), "--document", "1", "--over", "2"]
    main([*words, "--json", "--top", "3"])
    found = json.loads(capsys.readouterr().out)
    parts = sum(row["part"] for row in found["metrics"]) + found["other_metrics"] + found["base"]
    assert parts == pytest.approx(found["difference"], abs=1e-9)
    parts = sum(row["part"] for row in found["features"]) + found["other_features"] + found["base"]
    assert parts == pytest.approx(found["difference"], abs=1e-9)
    main(words)
    assert capsys.readouterr().out.count("trees it adds to") == (2 if found["base"] else 0)


def test_xgboost_as_well(splits: dict[str, RankingData], tmp_path: Path) -> None:
    trees = grow_xgboost(splits["train"], tmp_path / "trees.ubj")
    result = run(tmp_path / "run", f"base={trees}")
    again = LGMML.load(result.folder / "model.safetensors")
    assert again.base is not None
    assert again.base.kind == "xgboost"
    assert torch.equal(again.score(splits["test"]), result.model.score(splits["test"]))


def test_trees_that_do_not_help_are_left_out(
    splits: dict[str, RankingData], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trees that may not split give every document the same: the report shows them, the file is free of them."""
    trees = grow(splits["train"], tmp_path / "trees.txt", min_data_in_leaf=10**6)
    with caplog.at_level(logging.INFO):
        result = run(tmp_path / "run", f"base={trees}")
    assert result.model.base is None
    assert LGMML.load(result.folder / "model.safetensors").base is None
    assert "the LightGBM model gets no weight and is left out" in caplog.text
    policies = [e.policy for e in result.evaluations if e.split == "valid: unseen queries"]
    assert policies == ["together (shared)", "ours alone", "base alone"]


def test_the_weights_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, model = small_data(60, seed=9), small_model()
    base = TreeBase.read(grow(data, tmp_path / "trees.txt"))
    with caplog.at_level(logging.INFO):
        add_base(model, base, data)
    assert model.base is base
    assert f"by validation, the score is {base.own_weight:.4g} · ours + {base.weight:.4g} · the LightGBM" in caplog.text


class TestRefusals:
    """One sentence each, before anything is fitted."""

    @pytest.fixture(autouse=True)
    def _nothing_is_fitted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fitted(*_: Any, **__: Any) -> None:
            pytest.fail("a fit was started")

        monkeypatch.setattr(app, "prepare", fitted)

    def test_files_that_are_no_trees(self, trees: Path, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no model file at"):
            run(tmp_path, f"base={tmp_path / 'none.txt'}")
        (tmp_path / "notes.txt").write_text("no trees here")
        with pytest.raises(CheckpointError, match="is neither LightGBM's text nor XGBoost's JSON or UBJ"):
            run(tmp_path, f"base={tmp_path / 'notes.txt'}")
        (tmp_path / "cut.txt").write_bytes(trees.read_bytes()[:2000])
        with pytest.raises(CheckpointError, match="cut short"):
            run(tmp_path, f"base={tmp_path / 'cut.txt'}")

    def test_other_features(self, trees: Path, tmp_path: Path) -> None:
        with pytest.raises(LGMMLError, match="the LightGBM model has 6 features, the data has 7"):
            run(tmp_path, f"base={trees}", "data.num_features=7")

    def test_no_validation_queries(
        self, trees: Path, splits: dict[str, RankingData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compose, "load_splits", lambda _: {"train": splits["train"]})
        with pytest.raises(ConfigError, match="`base` needs validation queries to choose the weights by"):
            run(tmp_path, f"base={trees}")

    def test_a_missing_library(self, trees: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "lightgbm", None)
        with pytest.raises(MissingDependencyError, match=r"`lightgbm` is needed.*pip install 'lgmml-torch\[trees\]'"):
            _load_base(small(tmp_path, *QUICK, f"base={trees}"), load_splits(small(tmp_path, *QUICK)))


def test_trees_are_fitted_where_none_are_given(tmp_path: Path) -> None:
    """``base=auto``: LightGBM on the same training lists, in the same model file."""
    result = run(tmp_path, "base=auto")
    base = LGMML.load(tmp_path / "model.safetensors").base
    assert base is not None
    assert base.list_ranks
    policies = [each.policy for each in result.evaluations if each.split == "test: unseen queries"]
    assert policies[1:] == ["ours alone", "base alone"]
