"""Loggers and the files of TensorBoard, with what lies below them pretended."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from lgmml_torch.training import board, loggers
from lgmml_torch.training.board import EventFile, TensorBoard
from lgmml_torch.training.loggers import MLflow, Sink, TensorBoardSink, Wandb, WandbSink


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches Lightning's own loggers, and which packages are asked for."""
    found: list[Any] = []
    monkeypatch.setattr(loggers, "require", lambda *words: found.append(("require", *words)))
    for kind in (WandbLogger, MLFlowLogger):
        monkeypatch.setattr(kind, "__init__", lambda self, **how: found.append(("init", how)))
        monkeypatch.setattr(kind, "log_metrics", lambda self, *args: found.append(("metrics", *args)))
        monkeypatch.setattr(kind, "finalize", lambda self, status: found.append(("finalize", status)))
    run = SimpleNamespace(finish=lambda **how: found.append(("finish", how)))
    monkeypatch.setattr(Wandb, "experiment", run)
    return found


class TestWandb:
    def test_it_writes_where_it_is_told(self, calls: list[Any], tmp_path: Path) -> None:
        folder = tmp_path / "a" / "b"
        for _ in range(2):  # a folder that is there is fine
            Wandb(save_dir=str(folder), offline=True)
        assert folder.is_dir()
        assert calls[:2] == [
            ("require", "wandb", "for logger=wandb", "wandb"),
            ("init", {"save_dir": str(folder), "offline": True}),
        ]
        Wandb()
        assert calls[-1] == ("init", {})

    def test_numbers_without_the_epoch(self, calls: list[Any]) -> None:
        Wandb().log_metrics({"a": 1.0, "epoch": 2.0}, 5)
        assert calls[-1] == ("metrics", {"a": 1.0}, 5)

    @pytest.mark.parametrize("status", ["success", "failed"])
    def test_a_run_that_failed_is_over(self, calls: list[Any], status: str) -> None:
        Wandb().finalize(status)
        failed = [("finish", {"exit_code": 1})] if status == "failed" else []
        assert calls[2:] == [("finalize", status), *failed]

    def test_pictures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shown: list[Any] = []
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Image=lambda figure: ("image", figure)))
        logger = SimpleNamespace(log_image=lambda *args, **how: shown.append((args, how)))
        WandbSink(logger).picture("tag", "figure", 7)
        assert shown == [(("tag", [("image", "figure")]), {"step": 7})]


class TestMLflow:
    def test_without_a_server_there_is_a_folder(self, calls: list[Any], tmp_path: Path) -> None:
        for _ in range(2):
            MLflow(store=str(tmp_path / "a" / "b"), experiment_name="e")
        folder = (tmp_path / "a" / "b").resolve()
        assert folder.is_dir()
        assert calls[:2] == [
            ("require", "mlflow", "for logger=mlflow", "mlflow"),
            (
                "init",
                {
                    "tracking_uri": f"sqlite:///{folder}/runs.db",
                    "experiment_name": "e",
                    "artifact_location": (folder / "files").as_uri(),
                },
            ),
        ]

    def test_a_server_needs_none(self, calls: list[Any], tmp_path: Path) -> None:
        MLflow(tracking_uri="http://server", store=str(tmp_path / "a"))
        assert calls[1:] == [("init", {"tracking_uri": "http://server"})]
        assert not list(tmp_path.iterdir())

    def test_names_it_can_hold(self, calls: list[Any]) -> None:
        MLflow(tracking_uri="http://server").log_metrics({"val/ndcg@10": 0.5, "epoch": 1.0}, 3)
        assert calls[-1] == ("metrics", {"val/ndcg_at_10": 0.5}, 3)


class TestSinks:
    def test_a_plain_one_has_no_place_for_pictures_and_files(self, tmp_path: Path) -> None:
        sink = Sink(None)
        sink.picture("tag", "figure", 1)
        sink.histogram("tag", torch.ones(2), 1)
        sink.attach([tmp_path / "nothing"])
        assert sink.shows_pictures is False

    def test_tensorboard_has_one_for_histograms(self) -> None:
        told: list[Any] = []
        logger = SimpleNamespace(experiment=SimpleNamespace(add_histogram=lambda *args: told.append(args)))
        TensorBoardSink(logger).histogram("tag", "values", 4)  # type: ignore[arg-type]
        assert told == [("tag", "values", 4)]


class System:
    """The calls of the system that files are written by."""

    O_WRONLY, O_CREAT, O_APPEND = os.O_WRONLY, os.O_CREAT, os.O_APPEND

    def __init__(self, handle: int = 0, most: int = 5, fails: int | None = None) -> None:
        self.handle, self.most, self.fails = handle, most, fails
        self.opened: list[Any] = []
        self.written = b""
        self.closed: list[int] = []
        self.calls = 0

    def getpid(self) -> int:
        return 77

    def open(self, *args: Any) -> int:
        self.opened.append(args)
        return self.handle

    def write(self, handle: int, data: memoryview) -> int:
        self.calls += 1
        assert handle == self.handle
        if self.calls == self.fails:
            raise OSError(28, "No space left")
        self.written += bytes(data[: self.most])
        return min(self.most, len(data))

    def close(self, handle: int) -> None:
        self.closed.append(handle)


class TestEventFile:
    def test_a_file_is_appended_to_by_whoever_may(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        system = System()
        monkeypatch.setattr(board, "os", system)
        EventFile(str(tmp_path / "a" / "b"), lambda *_: None)
        ((path, flags, mode),) = system.opened
        assert path.parent == tmp_path / "a" / "b"
        assert path.parent.is_dir()
        assert path.name.startswith("events.out.tfevents.")
        assert ".77." in path.name
        assert (flags, mode) == (os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    @pytest.mark.parametrize("handle", [0, 1, 9])
    def test_all_of_it_is_written_however_little_at_a_time(
        self, handle: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        system = System(handle)
        monkeypatch.setattr(board, "os", system)
        file = EventFile(str(tmp_path), lambda *_: pytest.fail("nothing is wrong"))
        system.written = b""
        file.write(b"a longer record")
        assert system.written == b"a longer record"
        file.flush()
        file.close()
        file.close()
        assert system.closed == [handle]
        calls = system.calls
        file.write(b"more")
        assert system.calls == calls

    def test_what_fails_is_said_and_the_rest_left_out(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        system, said = System(), list[Any]()
        monkeypatch.setattr(board, "os", system)
        file = EventFile(str(tmp_path), lambda place, error: said.append((place, error.strerror)))
        system.written, system.fails = b"", system.calls + 2
        file.write(b"a longer record")
        file.write(b"more")
        assert system.written == b"a lon"
        assert said == [(file._file, "No space left")]
        assert system.closed == [0]

    def test_where_no_file_can_be_opened_nothing_is_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        said: list[Any] = []
        file = EventFile(str(tmp_path / "file" / "below"), lambda place, error: said.append(type(error)))
        assert said == [NotADirectoryError]
        assert file._handle == -1
        file.write(b"x")
        file.close()

    def test_the_first_event_has_its_time(self, tmp_path: Path) -> None:
        before = time.time()
        EventFile(str(tmp_path), lambda *_: None).close()
        (path,) = tmp_path.iterdir()
        (event,) = EventFileLoader(str(path)).Load()
        assert before <= event.wall_time <= time.time()
        assert event.file_version == "brain.Event:2"


class TestBoard:
    def logger(self, tmp_path: Path) -> TensorBoard:
        return TensorBoard(str(tmp_path), name="", version="")

    def test_one_writer_for_one_file(self, tmp_path: Path) -> None:
        logger = self.logger(tmp_path)
        writer = logger.experiment
        assert logger.experiment is writer
        assert writer._get_file_writer() is writer.file_writer
        assert writer.all_writers == {writer.log_dir: writer.file_writer}
        assert Path(writer.file_writer.get_logdir()) == tmp_path
        assert len(list(tmp_path.iterdir())) == 1
        writer.flush()
        writer.close()

    def test_settings_reach_the_writer(self, tmp_path: Path) -> None:
        logger = TensorBoard(str(tmp_path), name="", version="", comment="c", max_queue=3)
        assert logger.experiment.max_queue == 3

    @pytest.mark.parametrize(
        ("error", "reason"), [(OSError(28, "No space left"), "No space left"), (OSError("odd"), "odd")]
    )
    def test_settings_that_cannot_be_written_are_said_once(
        self,
        error: OSError,
        reason: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        logger, saved = self.logger(tmp_path), list[int]()
        monkeypatch.setattr(TensorBoardLogger, "save", lambda self: saved.append(1))
        logger.save()
        assert (saved, caplog.messages) == ([1], [])

        def fail(self: Any) -> None:
            raise error

        monkeypatch.setattr(TensorBoardLogger, "save", fail)
        for _ in range(2):
            logger.save()
        assert caplog.messages == [f"TensorBoard has no more of this run: {logger.log_dir} ({reason}); the run goes on"]

    def test_numbers_have_their_step(self, tmp_path: Path) -> None:
        logger = self.logger(tmp_path)
        logger.log_metrics({"a": 0.5, "epoch": 1.0}, 3)
        (path,) = tmp_path.glob("events*")
        found = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
        assert [(event.step, event.summary.value[0].tag) for event in found] == [(3, "a")]
