"""Every logger the configuration knows, for real and without a network."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from lgmml_torch.app.train import RunResult
from lgmml_torch.checks import MissingDependencyError
from lgmml_torch.evaluation.evaluate import evaluate_scores
from lgmml_torch.training.loggers import MLflow, Wandb
from tests.app.test_page import outcome_of
from tests.app.test_train import BOOSTED, run
from tests.doors import small_data, small_model

FILES = ("model.safetensors", "report.md", "report.json")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """One run that everybody is told about."""
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    folder = tmp_path_factory.mktemp("told")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow sets it to the store of an earlier test
        loggers = ["logger=[tensorboard,csv,wandb,mlflow]", f"logger.mlflow.store={folder / 'store'}"]
        return run(folder / "run", *BOOSTED, *loggers, "trainer.max_epochs=1")


def test_a_table_of_curves_and_settings(told: RunResult) -> None:
    with (told.folder / "csv" / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {"val/ndcg@10", "train/loss_step", "final/test/ndcg@10", "bank/valid_ndcg"} <= set(rows[0])
    test = next(e for e in told.evaluations if e.split.startswith("test"))
    assert [float(row["final/test/map"]) for row in rows if row["final/test/map"]] == [test.means["map"]]
    assert "local_metrics.rounds: 6" in (told.folder / "csv" / "hparams.yaml").read_text()


def test_weights_and_biases_offline(told: RunResult) -> None:
    (place,) = (told.folder / "wandb").glob("offline-run-*")
    (record,) = place.glob("run-*.wandb")
    content = record.read_bytes()
    for name in ("val/ndcg@10", "final/test/ndcg@10", "local_metrics.rounds", "bank/valid_ndcg"):
        assert name.encode() in content, name
    assert b"_target_" not in content
    assert list(place.glob("files/media/images/metrics/learned_*.png"))
    for name in FILES:
        assert (place / "files" / name).read_bytes() == (told.folder / name).read_bytes()


def test_mlflow_in_a_local_store(told: RunResult) -> None:
    from mlflow.tracking import MlflowClient

    store = told.folder.parent / "store"
    client = MlflowClient(f"sqlite:///{store}/runs.db")
    (found,) = client.search_runs([client.get_experiment_by_name("lgmml").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["local_metrics.rounds"] == "6"
    test = next(e for e in told.evaluations if e.split.startswith("test"))
    assert found.data.metrics["final/test/ndcg_at_10"] == pytest.approx(test.means["ndcg@10"])
    assert "epoch" not in found.data.metrics
    kept = {item.path for item in client.list_artifacts(found.info.run_id)}
    assert {*FILES, "metrics"} <= kept
    assert (store / "files" / found.info.run_id / "artifacts" / "model.safetensors").is_file()


def test_tensorboard_compares_runs_by_names_people_read(told: RunResult) -> None:
    names: set[str] = set()
    scalars: set[str] = set()
    texts: set[str] = set()
    for file in (told.folder / "tensorboard").glob("events*"):
        events = EventAccumulator(str(file))
        events.Reload()
        scalars |= set(events.Tags()["scalars"])
        texts |= {tag for tag in events.Tags()["tensors"] if "text_summary" in tag}
        content = events.summary_metadata.get("_hparams_/session_start_info")
        if content is not None:
            data = plugin_data_pb2.HParamsPluginData.FromString(content.plugin_data.content)
            names |= set(data.session_start_info.hparams)
    assert {"seed", "data.num_queries", "local_metrics", "local_metrics.rounds", "phi.mode", "optimizer.lr"} <= names
    assert not {name for name in names if "_target_" in name or name.startswith(("paths", "logger", "callbacks"))}
    assert "epoch" not in scalars
    assert texts == {"report/text_summary"}


def test_settings_lose_folders_and_machinery(tmp_path: Path) -> None:
    step = {"_target_": "a.b.Quantile", "knots": 9}
    settings = {
        "name": "x", "seed": 0, "resume": None, "paths": {"data_dir": "/x"}, "base": "/here/trees.txt", "threads": 2,
        "preprocess": {"_target_": "a.chain", "_partial_": True, "steps": [step, "norm"]},
        "trainer": {"_target_": "T", "max_epochs": 3, "devices": 1}, "data": {"cache": "/c", "fold": 1},
    }  # fmt: skip
    data = small_data()
    assert outcome_of(small_model(), {"train": data}, tmp_path, settings).comparable_settings() == {
        "seed": 0, "base": "trees.txt", "preprocess": "chain", "preprocess.steps": "Quantile(knots=9), norm",
        "trainer.max_epochs": 3, "data.fold": 1,
    }  # fmt: skip


def test_figures_of_other_ways_to_rank_have_their_name(tmp_path: Path) -> None:
    data, model = small_data(seed=1), small_model()
    policy, unseen = model.phi.policy, "test: unseen queries"
    ways = [("training queries", "own Φ"), (unseen, policy), (unseen, "another")]
    found = [evaluate_scores(data.labels, data, split=s, policy=p, metrics=["map"]) for s, p in ways]
    figures = replace(outcome_of(model, {"train": data}, tmp_path), evaluations=found).figures()
    assert figures == {"final/train/map": 1.0, "final/test/map": 1.0, "final/test-another/map": 1.0}


@pytest.mark.parametrize(("logger", "package"), [(MLflow, "mlflow")])
def test_a_missing_package_is_named_with_its_extra(
    logger: type[Wandb], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"`{package}` is needed for logger={package}; install it with"):
        logger()
