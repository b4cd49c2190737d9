"""`lgmml compare`: any two of our models, trees and TREC runs, on the same lists."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from lgmml_torch.app import cli
from lgmml_torch.app.rankers import Ranker
from lgmml_torch.checks import CheckpointError, DataError
from lgmml_torch.functional.measures import rank_data
from lgmml_torch.models.ranker import LGMML
from tests.app.test_cli import lgmml, refused
from tests.data.test_source import write
from tests.doors import FEATURES, small_data, small_model


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    files = tmp_path / "a.safetensors", tmp_path / "b" / "model.safetensors"
    for seed, file in enumerate(files):
        small_model(seed=seed).save(file)
    return files


def test_figures_are_those_of_both(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small_data(seed=3)
    file = write(data, tmp_path, "txt")
    lgmml("compare", models[0], models[1].parent, file, "--json", tmp_path / "out.json", "--plot", tmp_path / "p.svg")
    printed = capsys.readouterr().out
    assert "a.safetensors against b on " in printed
    assert "95% interval [" in printed
    assert "ndcg@10 (default): gain 2^y-1" in printed
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
    found = json.loads((tmp_path / "out.json").read_text())
    rows = [rank_data(LGMML.load(m).score(data), data, metrics=["ndcg@10"])["ndcg@10"] for m in models]
    for got, want in zip(found["per_query"], rows, strict=True):
        assert [float("nan") if value is None else value for value in got] == pytest.approx(
            want.tolist(), abs=1e-9, nan_ok=True
        )
    assert found["difference"]["mean"] == pytest.approx(float((rows[0] - rows[1]).nanmean()), abs=1e-9)
    assert found["wins"] + found["ties"] + found["losses"] == found["counted"]
    assert found["counted"] + found["skipped"] == data.num_queries


def test_a_model_ties_with_itself_and_with_its_run(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ids in (True, False):
        file = write(small_data(seed=3, ids=ids), tmp_path, "txt")
        lgmml("score", models[0], file, "-o", tmp_path / "a.run")
        (tmp_path / "a.run.gz").write_bytes(gzip.compress((tmp_path / "a.run").read_bytes()))
        for other in (models[0], tmp_path / "a.run", tmp_path / "a.run.gz"):
            capsys.readouterr()
            lgmml("compare", models[0], other, file, "--json", "-", "--measure", "map", "--preset", "letor4")
            found = json.loads(capsys.readouterr().out)
            assert (found["wins"], found["losses"], found["difference"]["mean"]) == (0, 0, 0)
            assert found["definition"].startswith("map (letor4)")


def test_trees(models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    data = small_data(40)
    lists = lightgbm.Dataset(data.features.numpy(), data.labels.numpy(), group=data.sizes.numpy())
    options = {"objective": "lambdarank", "num_leaves": 3, "verbosity": -1, "num_threads": 1, "min_data_in_leaf": 2}
    lightgbm.train(options, lists, 3).save_model(tmp_path / "trees.txt")
    file = write(data, tmp_path, "csv")
    ranker = Ranker.open(tmp_path / "trees.txt")
    assert (ranker.kind, ranker.num_features, ranker.model) == ("LightGBM", FEATURES, None)
    lgmml("compare", tmp_path / "trees.txt", tmp_path / "trees.txt", file, "--top", 0)
    assert "+0.0000" in capsys.readouterr().out
    lgmml("compare", models[0], tmp_path / "trees.txt", file)
    wide = small_data().replace(features=torch.randn(small_data().num_documents, 6))
    small_model(data=wide).save(tmp_path / "wide.safetensors")
    message = refused(capsys, "compare", tmp_path / "wide.safetensors", tmp_path / "trees.txt", file)
    assert message == (
        "both must rank documents with the same number of features, or by their names: "
        "wide.safetensors has 6, trees.txt has 5"
    )


def test_models_with_different_rules_for_missing_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for file, rule in zip(files, ("zero", "query-mean"), strict=True):
        small_model().replace(table={"missing": rule}).save(file)
    data = write(small_data(), tmp_path, "csv")
    message = refused(capsys, "compare", *files, data)
    assert message == "both must be trained with one rule for missing values, got query-mean and zero"


def test_documents_that_a_run_lacks_come_last(tmp_path: Path) -> None:
    data, file = small_data(3), tmp_path / "x.run"
    names, qids = list(data.doc_ids or ()), [str(qid) for qid in data.qids]
    others = f"{qids[0]} Q0 other 1 9.0 tag\nelsewhere Q0 d 1 1.0 tag\n"
    file.write_text(f"{others}{qids[0]} Q0 {names[0]} 2 2.5 tag\n")
    assert Ranker.open(file).score(data).tolist() == [2.5] + [-float("inf")] * (data.num_documents - 1)
    file.write_text(others)
    with pytest.raises(DataError, match=r"x.run: none of the documents of the data is in this run"):
        Ranker.open(file).score(data)


def test_errors(models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(small_data(), tmp_path, "txt")
    (tmp_path / "bad.run").write_text("1 Q0 d 1 high tag\n")
    (tmp_path / "no.bin").write_bytes(b"\0\1")
    for other, words in (
        ("bad.run", "bad.run:1: the score must be a number, got 'high'"),
        ("no.bin", "nor a TREC run"),
        ("none.safetensors", "no model file at"),
    ):
        assert words in refused(capsys, "compare", models[0], tmp_path / other, file)
    assert "`plot` must be one of '.png'" in refused(capsys, "compare", *models, file, "--plot", "x.txt")
    assert "did you mean 'ndcg'" in refused(capsys, "compare", *models, file, "--measure", "ndgc@10")
    unlabelled = tmp_path / "unlabelled.csv"
    unlabelled.write_text("qid," + ",".join(f"f{i}" for i in range(FEATURES)) + "\n1,1,2,3,4,5\n")
    assert "no labels" in refused(capsys, "compare", *models, unlabelled)
    with pytest.raises(CheckpointError, match="no model file at"):
        Ranker.open(tmp_path)
    assert cli.main(["compare", str(models[0]), str(models[1]), str(file), "--top", "-1"]) == 2
