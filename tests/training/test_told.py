"""What a run tells and whom: each logger in what it can show, the log in lines, Lightning about its processes."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from lgmml_torch import distributed
from lgmml_torch.checks import CheckpointError, LGMMLError
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.training import callbacks, loggers, processes
from lgmml_torch.training.board import EventFile, TensorBoard
from lgmml_torch.training.callbacks import KeepCheckpoints, Story, check_same_run
from lgmml_torch.training.loggers import (
    MLflowSink,
    Sink,
    TensorBoardSink,
    WandbSink,
    plain_name,
    sink_of,
    without_epoch,
)
from lgmml_torch.training.stopping import StopAtStep
from lgmml_torch.training.telling import TellEpochs, tell_rounds
from lgmml_torch.training.views import Views


class Recorder:
    """Notes every call of whatever name, on itself and on what hangs below it."""

    def __init__(self, name: str = "", calls: list[tuple[Any, ...]] | None = None) -> None:
        self.name, self.calls = name, [] if calls is None else calls

    def __getattr__(self, name: str) -> Recorder:
        return Recorder(f"{self.name}.{name}".lstrip("."), self.calls)

    def __call__(self, *args: Any, **named: Any) -> None:
        self.calls.append((self.name, args, named))


class TestSinks:
    def test_every_logger_has_its_own(self) -> None:
        for kind, sink in (
            (TensorBoardLogger, TensorBoardSink),
            (WandbLogger, WandbSink),
            (MLFlowLogger, MLflowSink),
            (CSVLogger, Sink),
            (TensorBoard, TensorBoardSink),
        ):
            logger = object.__new__(kind)
            found = sink_of(logger)  # type: ignore[arg-type]
            assert type(found) is sink
            assert found.logger is logger
            assert found.shows_pictures == (sink is not Sink)

    def told(self, kind: type[Sink], tmp_path: Path) -> list[tuple[Any, ...]]:
        logger = Recorder()
        sink = kind(logger)
        (tmp_path / "report.md").write_text("# Well")
        (tmp_path / "model.bin").write_bytes(b"x")
        sink.histogram("h", torch.ones(2), 3)
        sink.numbers({"a": 1.0}, 4)
        sink.outcome({"lr": 0.1}, {"ndcg": 0.5}, 5)
        sink.attach([tmp_path / "report.md", tmp_path / "model.bin"])
        sink.close()
        return [call for call in logger.calls if call[0] != "experiment.add_histogram"]

    def test_plain(self, tmp_path: Path) -> None:
        assert self.told(Sink, tmp_path) == [
            ("log_metrics", ({"a": 1.0},), {"step": 4}),
            ("log_hyperparams", ({"lr": 0.1},), {}),
            ("log_metrics", ({"ndcg": 0.5},), {"step": 5}),
            ("save", (), {}),
        ]

    def test_tensorboard(self, tmp_path: Path) -> None:
        assert self.told(TensorBoardSink, tmp_path) == [
            ("log_metrics", ({"a": 1.0},), {"step": 4}),
            ("log_hyperparams", ({"lr": 0.1}, {"ndcg": 0.5}, 5), {}),
            ("experiment.add_text", ("report", "# Well"), {}),
            ("save", (), {}),
        ]
        logger = Recorder()
        TensorBoardSink(logger).picture("p", "figure", 7)
        assert logger.calls == [("experiment.add_figure", ("p", "figure", 7), {})]

    def test_weights_and_biases(self, tmp_path: Path) -> None:
        assert self.told(WandbSink, tmp_path)[1:] == [
            ("log_hyperparams", ({"lr": 0.1},), {}),
            ("experiment.summary.update", ({"ndcg": 0.5},), {}),
            *(
                ("experiment.save", (str(tmp_path / name),), {"base_path": str(tmp_path), "policy": "now"})
                for name in ("report.md", "model.bin")
            ),
            ("experiment.finish", (), {}),
        ]

    def test_mlflow(self, tmp_path: Path) -> None:
        logger = Recorder()
        logger.run_id = "r1"  # type: ignore[assignment]
        sink = MLflowSink(logger)
        sink.picture("metrics/learned", "figure", 12)
        sink.attach([tmp_path / "report.md"])
        sink.close()
        assert logger.calls == [
            ("experiment.log_figure", ("r1", "figure", "metrics/learned-000012.png"), {}),
            ("experiment.log_artifact", ("r1", str(tmp_path / "report.md")), {}),
            ("finalize", ("success",), {}),
        ]

    @pytest.mark.parametrize(("make", "name"), [(loggers.Wandb, "wandb"), (loggers.MLflow, "mlflow")])
    def test_what_is_missing_is_said_first(
        self, make: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def refuse(*words: str) -> None:
            raise LGMMLError(" ".join(words))

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(loggers, "require", refuse)
        with pytest.raises(LGMMLError, match=f"{name} for logger={name} {name}"):
            make()
        assert list(tmp_path.iterdir()) == []

    def test_names(self) -> None:
        assert without_epoch({"epoch": 3.0, "val/ndcg@10": 0.5}) == {"val/ndcg@10": 0.5}
        assert plain_name("a@1 b:c!/d.e-f") == "a_at_1 b_c_/d.e-f"


@dataclass
class Info:
    total: int
    valid_ndcg: float | None = None
    best_round: int = 0


class TestLines:
    def test_about_ten_rounds_and_the_last_are_told(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="lgmml_torch"):
            for done in range(1, 26):
                tell_rounds(done, Info(25, 0.5))
        expected = [f"local metrics: {done} of 25, valid_ndcg 0.5000" for done in (*range(2, 25, 2), 25)]
        assert caplog.messages == expected
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="lgmml_torch"):
            for done in range(1, 4):
                tell_rounds(done, Info(3))
        assert caplog.messages == [f"local metrics: {done} of 3" for done in (1, 2, 3)]

    def test_epochs_are_counted_from_one(self, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        keeper = KeepCheckpoints(tmp_path)
        keeper.curve = {3: 0.25}
        trainer: Any = SimpleNamespace(current_epoch=2, max_epochs=7, checkpoint_callbacks=[object(), keeper])
        with caplog.at_level(logging.INFO, logger="lgmml_torch"):
            TellEpochs().on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
            trainer.current_epoch = 3
            TellEpochs().on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
        assert caplog.messages == ["epoch 3 of 7, validation NDCG@10 0.2500", "epoch 4 of 7"]


def model() -> LGMML:
    quality = torch.tensor([0.5, float("nan"), 0.25])
    factors = torch.stack([torch.diag(torch.tensor([1.0, size])) for size in (1.0, 10.0, 100.0)])
    block = MetricBlock(torch.zeros(3, 2), factors, quality=quality)
    features = Chain([Standardize()]).fit(torch.tensor([[0.0, 1.0], [2.0, 5.0]]), torch.tensor([0, 2]))
    return LGMML(features, LocalMetrics([block], num_features=2), Phi(2, 3, mode="per_query"))


class TestStory:
    def module(self) -> Any:
        logged: dict[str, tuple[float, dict[str, Any]]] = {}
        found = model()
        with torch.no_grad():
            found.phi.table.weight.copy_(torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 6.0]]))
        return SimpleNamespace(
            model=found, logged=logged, log=lambda name, value, **how: logged.update({name: (float(value), how)})
        )

    def test_an_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times = iter((10.0, 14.0))
        monkeypatch.setattr(callbacks.time, "perf_counter", lambda: next(times))
        story, module, sink = Story(pictures=False), self.module(), Recorder()
        trainer: Any = SimpleNamespace(loggers=[None], is_global_zero=True, current_epoch=1, global_step=20)
        monkeypatch.setattr(callbacks, "sink_of", lambda _: sink)
        story.on_train_epoch_start(trainer, module)
        for size in (3, 5):
            story.on_train_batch_end(trainer, module, None, SimpleNamespace(queries=range(size)), 0)
        story.on_train_epoch_end(trainer, module)
        assert module.logged == {
            "train/tuples_per_second": (2.0, {"reduce_fx": "sum", "sync_dist": True}),
            "phi/share_zero": (0.5, {"sync_dist": True}),
            "phi/mean": (1.5, {"sync_dist": True}),
        }
        assert [(name, args[0], args[2]) for name, args, _ in sink.calls] == [("histogram", "phi/values", 20)]
        trainer.is_global_zero = False
        assert callbacks._sinks(trainer) == []

    def test_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sink = Recorder()
        monkeypatch.setattr(callbacks, "sink_of", lambda _: sink)
        trainer: Any = SimpleNamespace(loggers=[None], is_global_zero=True, global_step=0)
        Story(pictures=False).on_train_start(trainer, self.module())
        tags = [args[0] for name, args, _ in sink.calls if name == "histogram"]
        assert tags == ["metrics/log10_relative_eigenvalues", "metrics/log10_condition", "metrics/anchor_ndcg"]
        numbers = {key: value for name, args, _ in sink.calls if name == "numbers" for key, value in args[0].items()}
        assert numbers == pytest.approx({"metrics/median_condition": 100.0, "metrics/mean_anchor_ndcg": 0.375})
        assert {args[-1] for _, args, _ in sink.calls} == {0}

    def test_pictures_are_drawn_once_and_for_those_who_show_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shown: list[tuple[str, Any]] = []
        drawn: list[int] = []

        def sink(name: str, shows: bool) -> Any:
            return SimpleNamespace(shows_pictures=shows, picture=lambda *args: shown.append((name, args)))

        sinks = {"a": sink("a", True), "b": sink("b", False), "c": sink("c", True)}
        monkeypatch.setattr(callbacks, "sink_of", sinks.get)
        trainer: Any = SimpleNamespace(loggers=["a", "b", "c"], is_global_zero=True)
        callbacks.show(trainer, "tag", lambda: drawn.append(1) or "figure", 5)  # type: ignore[func-returns-value]
        assert shown == [("a", ("tag", "figure", 5)), ("c", ("tag", "figure", 5))]
        assert drawn == [1]
        trainer.loggers = ["b"]
        callbacks.show(trainer, "tag", lambda: drawn.append(2), 5)
        assert drawn == [1]

    def test_what_was_kept_is_shown_where_its_epoch_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        steps: list[int] = []
        monkeypatch.setattr(callbacks, "show", lambda trainer, tag, draw, step: steps.append(step))
        story = Story()
        story._steps = {0: 0, 1: 10, 2: 20}
        trainer: Any = SimpleNamespace(global_step=30)
        for epoch in (0, 1, 2, 9):
            story.show_kept(trainer, self.module(), epoch)
        assert steps == [0, 10, 20, 30]
        Story(pictures=False).show_kept(trainer, self.module(), 1)
        assert len(steps) == 4


def test_files_of_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for written, run in (("a", "a"), (None, "a"), ("a", None), (None, None)):
        monkeypatch.setattr(callbacks, "run_of", lambda _, written=written: written)
        check_same_run(Path("best.ckpt"), run)
    monkeypatch.setattr(callbacks, "run_of", lambda _: "b")
    with pytest.raises(CheckpointError, match=r"best\.ckpt is of another run"):
        check_same_run(Path("best.ckpt"), "a")


class TestEvents:
    def test_events_can_be_read_at_once(self, tmp_path: Path) -> None:
        logger = TensorBoard(str(tmp_path), name="", version="")
        logger.log_metrics({"a": 0.5, "epoch": 1.0}, step=3)
        logger.experiment.add_text("t", "words", 4)
        (file,) = tmp_path.glob("events*")
        events = [event for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
        assert [(event.summary.value[0].tag, event.step) for event in events] == [("a", 3), ("t/text_summary", 4)]
        assert next(iter(EventFileLoader(str(file)).Load())).file_version == "brain.Event:2"

    def test_files_of_one_second_have_names_of_their_own(self, tmp_path: Path) -> None:
        files = [EventFile(str(tmp_path), lambda *_: None) for _ in range(3)]
        assert len(list(tmp_path.glob(f"events.out.tfevents.*.{os.getpid()}.*"))) == 3
        for file in files:
            assert file.get_logdir() == str(tmp_path)
            file.close()
            file.close()
            file.write(b"nothing")
        assert {path.stat().st_size for path in tmp_path.iterdir()} != {0}

    def test_what_cannot_be_written_is_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").write_text("in the way")
        logger = TensorBoard(str(tmp_path / "file"), name="", version="")
        for step in range(3):
            logger.log_metrics({"a": 0.5}, step=step)
        assert len(caplog.messages) == 1
        assert "TensorBoard has no more of this run" in caplog.text


class TestProcesses:
    def test_what_lightning_asks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(distributed, "place", lambda: (5, 8))
        for name, value in (("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "7")):
            monkeypatch.setenv(name, value)
        found = processes.Joined()
        assert (found.world_size(), found.global_rank(), found.local_rank(), found.node_rank()) == (8, 5, 1, 1)
        assert (found.main_address, found.main_port, found.creates_processes_externally) == ("h", 7, True)
        assert not found.detect()
        assert processes.local_size() == 4

    def test_machines_of_different_size_count_by_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(distributed, "place", lambda: (5, 8))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        monkeypatch.setenv("LOCAL_RANK", "2")
        assert processes.local_size() == 1
        assert (processes.Joined().local_rank(), processes.Joined().node_rank()) == (0, 5)
        for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        found = processes.Joined()
        assert (found.main_address, found.main_port, found.local_rank()) == ("127.0.0.1", 0, 0)

    @pytest.mark.parametrize("joined", [True, False])
    def test_what_a_trainer_is_told(self, joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(distributed, "joined", lambda: joined)
        monkeypatch.setattr(distributed, "place", lambda: (0, 6))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        found = processes.trainer_settings()
        if not joined:
            assert found == {}
            return
        (plugin,) = found.pop("plugins")
        assert isinstance(plugin, processes.Joined)
        assert found == {"strategy": "ddp", "devices": 2, "num_nodes": 3}


class Asked:
    """A stopper that notes what it is asked to do."""

    def __init__(self, asked: int | None) -> None:
        self.asked, self.waits, self.told = asked, False, list[str]()

    def listen(self) -> None:
        self.told.append("listen")

    def stop(self) -> None:
        self.told.append("stop")


class TestStopping:
    def trainer(self, tmp_path: Path, **fields: Any) -> Any:
        saved: list[str] = []
        plain = {
            "world_size": 1,
            "global_step": 5,
            "num_training_batches": 4,
            "checkpoint_callbacks": [object(), KeepCheckpoints(tmp_path)],
            "save_checkpoint": lambda path, weights_only: saved.append(path.name),
            "saved": saved,
        }
        return SimpleNamespace(**{**plain, **fields})

    def batch(self, asked: int | None, tmp_path: Path, *, index: int = 1, moved: bool = True) -> tuple[list[str], Any]:
        stopper, trainer = Asked(asked), self.trainer(tmp_path)
        callback = StopAtStep(stopper)
        callback.on_train_batch_start(trainer)
        trainer.global_step += moved
        callback.on_train_batch_end(trainer, None, None, None, index)  # type: ignore[arg-type]
        return stopper.told, trainer.saved

    def test_a_step_is_saved_and_then_it_stops(self, tmp_path: Path) -> None:
        assert self.batch(15, tmp_path) == (["stop"], ["last.ckpt"])
        assert self.batch(None, tmp_path) == ([], [])
        assert self.batch(15, tmp_path, index=3) == ([], [])  # the last of the epoch: that may end
        assert self.batch(15, tmp_path, index=2) == (["stop"], ["last.ckpt"])
        assert self.batch(15, tmp_path, moved=False) == ([], [])  # gradients that are still gathered

    def test_before_an_epoch_and_after_all(self, tmp_path: Path) -> None:
        for asked in (None, 15):
            stopper, trainer = Asked(asked), self.trainer(tmp_path)
            callback = StopAtStep(stopper)
            callback.on_train_start(trainer, None)  # type: ignore[arg-type]
            assert (stopper.waits, stopper.told) == (True, ["listen"])
            callback.on_train_epoch_start(trainer, None)  # type: ignore[arg-type]
            assert stopper.told == ["listen"] + ["stop"] * (asked is not None)
            callback.on_train_end(trainer, None)  # type: ignore[arg-type]
            assert not stopper.waits
            assert stopper.told[-1] == "stop"
            stopper.waits = True
            callback.on_exception(trainer, None, ValueError())  # type: ignore[arg-type]
            assert not stopper.waits

    @pytest.mark.parametrize(("asked", "agreed"), [(None, True), (2, True), (None, False)])
    def test_several_processes_agree(self, asked: int | None, agreed: bool, tmp_path: Path) -> None:
        questions: list[tuple[bool, bool]] = []

        def reduce(mine: bool, all: bool) -> bool:  # noqa: A002 - Lightning's name
            questions.append((mine, all))
            return agreed

        stopper = Asked(asked)
        strategy = SimpleNamespace(reduce_boolean_decision=reduce)
        trainer = self.trainer(tmp_path, world_size=2, strategy=strategy)
        assert StopAtStep(stopper)._asked(trainer) == agreed
        assert questions == [(asked is not None, False)]
        assert stopper.asked == (asked if asked or not agreed else 15)


def test_views_are_the_preprocessed_lists() -> None:
    raw = torch.arange(12.0, dtype=torch.float64).view(6, 2)
    preprocess = Chain([Standardize()]).fit(raw, torch.tensor([0, 6]))
    views = Views(raw, preprocess, torch.float32)
    rows, offsets = torch.tensor([4, 5, 0]), torch.tensor([0, 2, 3])
    found = views.of(rows, offsets)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    torch.testing.assert_close(found, preprocess(raw[rows].float(), offsets))
    torch.testing.assert_close(views.of(slice(4, 6), torch.tensor([0, 2])), found[:2])
    assert views.to(torch.device("cpu")).device == torch.device("cpu")
