"""Loggers of a small run: what reaches TensorBoard's event file, CSV and the log; wandb and MLflow without a server."""

from __future__ import annotations

import csv
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor

from lgmml_torch.checks import MissingDependencyError
from lgmml_torch.functional.warp import NegativeTable
from lgmml_torch.training.callbacks import LogModel
from lgmml_torch.training.loggers import LoggerOutput, MLflow, TensorBoard, Wandb
from lgmml_torch.training.recipe import TrainerSettings
from lgmml_torch.training.stages import Trained, train_phi
from tests.full_disk import room_for
from tests.training import tiny

Run = tuple[Trained, Path]
SECONDS: list[float] = []  # of the run


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    loggers = (
        TensorBoard(folder, name="board", version="", default_hp_metric=False),
        CSVLogger(folder, name="csv", version=""),
    )
    around = TrainerSettings(folder, {"max_epochs": 2, "accelerator": "cpu"}, (LogModel(),), loggers)
    prepared, started = tiny.prepared(), time.perf_counter()
    trained = train_phi(prepared, tiny.recipe(), around)
    SECONDS.append(time.perf_counter() - started)
    (folder / "report.md").write_text("# Results")
    (folder / "model.bin").write_bytes(b"x")
    for logger in loggers:
        output = LoggerOutput.of(logger)
        output.outcome({"lr": 0.1}, {"final/ndcg": 0.5})
        output.attach([folder / "report.md", folder / "model.bin"])
        output.close()
    return trained, folder


def test_tensorboard_has_curves_histograms_figures_and_text(run: Run) -> None:
    trained, folder = run
    events = read(folder / "board")
    steps = trained.trainer.global_step
    assert steps == 14
    # The start is epoch 0; Lightning logs an epoch at its last step.
    curve = [(event.step, event.value) for event in events.Scalars("val/ndcg@10")]
    assert [step for step, _ in curve] == [0, 6, 13]
    assert [value for _, value in curve] == pytest.approx(list(trained.keeper.curve.values()))
    assert len(events.Scalars("train/loss_step")) == steps
    assert "epoch" not in events.Tags()["scalars"]
    model = trained.model
    table = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]["model.phi.table.weight"]
    assert events.Scalars("phi/mean")[-1].value == pytest.approx(float(table.mean()), rel=1e-5)
    assert events.Scalars("phi/share_zero")[-1].value == pytest.approx(float((table == 0).float().mean()))
    train = trained.module.data_of("train")
    tuples = len(NegativeTable.of(train.labels, train.offsets).positives)  # of an epoch, in less than the whole run
    for event in events.Scalars("train/tuples_per_second"):
        assert tuples / SECONDS[0] < event.value < tuples / 1e-3
    values: Any = events.Histograms("phi/values")[-1].histogram_value
    assert (values.min, values.max, values.num) == pytest.approx((table.min(), table.max(), table.numel()))
    metrics: Any = events.Histograms("metrics/anchor_ndcg")[0].histogram_value
    quality = model.metrics.quality
    assert (metrics.min, metrics.max) == pytest.approx((quality.min(), quality.max()))
    # The weights that are kept are those of an epoch of seven steps.
    # The last picture is in a second file of events; TensorBoard reads files by their names.
    assert sorted(image.step for image in events.Images("metrics/learned")) == [0, 7 * trained.keeper.best_epoch]
    assert [image.step for image in events.Images("metrics/spectrum")] == [0]
    (text,) = events.Tensors("report/text_summary")
    assert text.tensor_proto.string_val[0] == b"# Results"
    for tag in events.Tags()["scalars"]:
        assert len(events.Scalars(tag)) > 1, f"{tag} is no curve"
    stored = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    columns = HParamsPluginData.FromString(stored).session_start_info.hparams
    assert {name: column.number_value for name, column in columns.items()} == {"lr": 0.1, "final/ndcg": 0.5}


def test_condition_numbers_are_those_of_the_metrics(run: Run) -> None:
    trained, folder = run
    conditions = []
    for block in trained.model.metrics.iter_blocks():
        for factor in block.factors.double():
            sizes: Tensor = torch.linalg.svdvals(factor) ** 2
            conditions.append(sizes.max() / sizes.min())
    events = read(folder / "board")
    shown: Any = events.Histograms("metrics/log10_condition")[0].histogram_value
    expected = torch.stack(conditions).log10()
    assert (shown.min, shown.max) == pytest.approx((float(expected.min()), float(expected.max())), rel=1e-2)
    relative: Any = events.Histograms("metrics/log10_relative_eigenvalues")[0].histogram_value
    assert (relative.min, relative.max) == pytest.approx((-shown.max, 0.0), rel=1e-2, abs=1e-6)
    for tag in ("anchor_ndcg", "log10_condition", "log10_relative_eigenvalues"):  # before the first step
        assert [event.step for event in events.Histograms(f"metrics/{tag}")] == [0]


def test_csv_has_numbers_and_settings_only(run: Run) -> None:
    with (run[1] / "csv" / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {"val/ndcg@10", "train/loss_step", "final/ndcg"} <= set(rows[0])
    assert "lr: 0.1" in (run[1] / "csv" / "hparams.yaml").read_text()


def test_tensorboard_keeps_settings_beside_the_events(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, name="", version="", default_hp_metric=False)
    board.log_hyperparams({"lr": 0.1})
    board.save()
    assert (tmp_path / "hparams.yaml").read_text() == "lr: 0.1\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_gives_one_warning_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = TensorBoard(tmp_path / "full", name="", version="", default_hp_metric=False)
    board.log_metrics({"a": 1.0}, step=0)
    (tmp_path / "file").write_text("not a folder")
    nowhere = TensorBoard(tmp_path / "file", name="", version="")
    with caplog.at_level(logging.WARNING):
        with room_for(4000):
            for step in range(1, 200):
                board.log_metrics({"a": float(step)}, step=step)
            board.experiment.flush()
            assert len(caplog.messages) == 1
            board.experiment.add_histogram("b", torch.arange(9.0), 0)
            board.log_hyperparams({"x": "y" * 5000}, {"z": 1.0})
            board.save()
            board.finalize("success")
        nowhere.log_metrics({"a": 1.0}, step=0)
        nowhere.log_hyperparams({"x": 1}, {"z": 1.0})
    pattern = re.compile(r"Could not write TensorBoard events \(.+\); training continues without them\.")
    assert [bool(pattern.fullmatch(message)) for message in caplog.messages] == [True, True]
    assert [event.step for event in read(tmp_path / "full").Scalars("a")][:50] == list(range(50))


def test_wandb_and_mlflow_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for logger, package in ((Wandb, "wandb"), (MLflow, "mlflow")):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, package, None)
            with pytest.raises(MissingDependencyError, match=f"`{package}` is needed for logger={package}"):
                logger()
    pytest.importorskip("mlflow")
    logger = MLflow(store=str(tmp_path / "a" / "b"), experiment_name="e")
    logger.log_metrics({"val/ndcg@10": 0.5, "a@1 b:c!/d.e-f": 2.0, "epoch": 1.0}, 3)
    LoggerOutput.of(logger).attach([Path(__file__)])
    LoggerOutput.of(logger).close()
    client: Any = logger.experiment
    run = client.get_run(logger.run_id)
    assert run.data.metrics == {"val/ndcg_at_10": 0.5, "a_at_1 b_c_/d.e-f": 2.0}
    assert run.info.status == "FINISHED"
    assert list((tmp_path / "a" / "b" / "files").rglob(Path(__file__).name))
