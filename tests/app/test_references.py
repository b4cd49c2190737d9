"""A run beside the paper's own system, LightGBM and earlier models, on the same lists."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lgmml_torch.app.config import load_config
from lgmml_torch.app.rankers import Ranker, fit_lightgbm
from lgmml_torch.app.train import RunResult, train
from lgmml_torch.checks import DataError
from lgmml_torch.functional.measures import Measure
from lgmml_torch.models.ranker import LGMML
from tests.doors import small_data

SMALL = [
    "loader.num_workers=0", "trainer.max_epochs=2", "threads=1",
    "callbacks.progress=null", "trainer.accelerator=cpu", "name=test",
]  # fmt: skip


def run(folder: Path, *words: str) -> RunResult:
    sizes = ["data.num_queries=24", "data.num_features=6"]
    if "data=table" in words:
        sizes = []
    asked = [*SMALL, *sizes, *words, f"paths.output_dir='{folder}'"]
    result = train(load_config(asked), asked)
    assert result is not None
    return result


@pytest.fixture(scope="module")
def beside_both(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(tmp_path_factory.mktemp("run"), "reference=[lgmml,lightgbm]")


def test_one_table_has_the_model_and_its_references(beside_both: RunResult) -> None:
    rows = [(each.split, each.policy) for each in beside_both.evaluations]
    assert ("training queries", "L-GMML: own Φ") in rows
    policies = [policy for split, policy in rows if split == "test: unseen queries"]
    assert policies[0] == f"this model: {beside_both.model.phi.policy}"
    assert policies[1].startswith("L-GMML: ")
    assert policies[2] == "LightGBM"
    for name in ("report.md", "report.html"):
        text = (beside_both.folder / name).read_text()
        assert "L-GMML: own Φ" in text, name
        assert "LightGBM" in text, name


def test_each_reference_is_paired_query_by_query(beside_both: RunResult) -> None:
    report = json.loads((beside_both.folder / "report.json").read_text())
    assert [each["second"] for each in report["comparisons"]] == ["L-GMML", "LightGBM"]
    text = (beside_both.folder / "report.md").read_text()
    assert text.count("95% interval") == 2


def test_the_references_are_files_that_score_again(beside_both: RunResult) -> None:
    model = LGMML.load(beside_both.folder / "lgmml.safetensors")
    assert model.phi.mode == "per_query"
    assert (model.phi.table.weight != 1).any()
    names = [ranker.name for ranker in Ranker.of_run(beside_both.folder, ["lgmml", "lightgbm"])]
    assert names == ["L-GMML", "LightGBM"]


def test_tensorboard_has_both_runs(beside_both: RunResult) -> None:
    for folder in (beside_both.folder / "tensorboard", beside_both.folder / "tensorboard" / "lgmml"):
        events = EventAccumulator(str(folder))
        events.Reload()
        assert "val/ndcg@10" in events.Tags()["scalars"]


def test_the_reference_is_the_experiment_of_its_name(beside_both: RunResult, tmp_path: Path) -> None:
    """``experiment=lgmml`` by itself gives the same system on the same lists."""
    alone = run(tmp_path, "experiment=lgmml", "trainer.max_epochs=30")
    reference = LGMML.load(beside_both.folder / "lgmml.safetensors")
    assert alone.model.phi.policy == reference.phi.policy
    torch.testing.assert_close(alone.model.phi.table.weight, reference.phi.table.weight, rtol=1e-4, atol=1e-6)


def test_lists_that_lightgbm_does_not_take_are_compared_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = small_data()
    splits = {"train": data.replace(labels=data.labels + 0.5), "valid": data}
    with pytest.raises(DataError, match="LightGBM needs whole labels from 0 to 30"):
        fit_lightgbm(splits, Measure.of("ndcg@10"))
    with pytest.raises(DataError, match="LightGBM needs validation queries"):
        fit_lightgbm({"train": data}, Measure.of("ndcg@10"))
    table = tmp_path / "grades.npz"
    qid = np.repeat(np.arange(len(data)), data.sizes)
    np.savez(table, X=data.features.numpy(), y=data.labels.numpy() + 0.5, qid=qid)
    with caplog.at_level(logging.WARNING):
        result = run(
            tmp_path / "run", "data=table", f"data.path={table}", "reference=lightgbm", "local_metrics.rounds=3"
        )
    assert "no LightGBM to compare with: LightGBM needs whole labels" in caplog.text
    assert all("LightGBM" not in each.policy for each in result.evaluations)


def test_an_earlier_model_is_a_reference_too(beside_both: RunResult, tmp_path: Path) -> None:
    file = beside_both.folder / "model.safetensors"
    result = run(tmp_path, f"reference={file}", "local_metrics.rounds=3")
    report = json.loads((result.folder / "report.json").read_text())
    assert len(report["comparisons"]) == 1
