"""TensorBoard as an onlooker: what it cannot write is said once, and the run goes on."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.logger import rank_zero_experiment
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter

from lgmml_torch.training.loggers import without_epoch

log = logging.getLogger(__name__)

_numbers = itertools.count()  # files of one process in one second need names of their own


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, with files that never end the run: a full disk must not cost the model."""

    _said = False

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """TensorBoard's writer."""
        if self._experiment is None:
            self._experiment = _Writer(self._say_once, self.log_dir, **self._kwargs)
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Numbers at a step, without that of the epoch: it is a straight line."""
        super().log_metrics(without_epoch(metrics), step)

    @rank_zero_only
    def save(self) -> None:
        """Write the settings beside the events."""
        try:
            super().save()
        except OSError as error:
            self._say_once(self.log_dir, error)

    def _say_once(self, place: Path | str, error: OSError) -> None:
        if not self._said:
            self._said = True
            reason = error.strerror or error
            log.warning("TensorBoard has no more of this run: %s (%s); the run goes on", place, reason)


class EventFile:
    """Events, each written at once, until one cannot be; this is said, and the rest is left out.

    TensorBoard's own writer does its work in a thread, which a full disk ends with a traceback, and the run after it.
    """

    def __init__(self, folder: str, say: Callable[[Path, OSError], None]) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._folder, self._file, self._handle, self._say = folder, Path(folder) / name, -1, say
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            self._say(self._file, error)
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add_event(self, event: Event) -> None:
        """Append one event."""
        RecordWriter(self).write(event.SerializeToString())

    def write(self, data: bytes) -> None:
        """Append one record, as far as there is room."""
        rest = memoryview(data)
        while rest and self._handle >= 0:
            try:
                rest = rest[os.write(self._handle, rest) :]
            except OSError as error:
                self.close()
                self._say(self._file, error)

    def get_logdir(self) -> str:
        """The folder."""
        return self._folder

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """No more events."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class _Files(FileWriter):
    def __init__(self, log_dir: str, say: Callable[[Path, OSError], None]) -> None:
        self.event_writer = EventFile(str(log_dir), say)


class _Writer(SummaryWriter):
    def __init__(self, say: Callable[[Path, OSError], None], log_dir: str, **settings: Any) -> None:
        self._say = say
        super().__init__(log_dir, **settings)

    def _get_file_writer(self) -> Any:
        if self.file_writer is None:
            self.file_writer = _Files(self.log_dir, self._say)  # type: ignore[assignment]
            self.all_writers = {self.log_dir: self.file_writer}  # type: ignore[assignment]
        return self.file_writer
