"""Ray: the processes of a run as workers of Ray Train, started anew from reported checkpoints when one dies.

Ray Train joins the workers into a process group and sets the variables that every launcher sets; each then runs the
same command with ``launcher=local``. What only Ray needs, reports of checkpoints, is added here, as a callback.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from lgmml_torch import distributed
from lgmml_torch.app.launch import WATCHERS, own_words
from lgmml_torch.app.ray_cluster import cluster, ray_part
from lgmml_torch.checks import ConfigError, check_whole, sentence
from lgmml_torch.files import write_bytes

log = logging.getLogger(__name__)

FILES = ("best.ckpt", "last.ckpt")  # in this order: where the second is, the first is, too


@dataclass(frozen=True)
class Ray:
    """Workers of Ray Train on this machine, or on a cluster that is running.

    Attributes:
        processes: workers.
        cpus: of each.
        failures: how often all are started anew, from the last checkpoint that was reported, after one of them died.
        storage: folder or URL (``s3://bucket/runs``) that all machines reach, for reported checkpoints and, in the end,
            the files of the run; None: a folder of this machine, for as long as the run takes.
        address: of a cluster that is running; None: that of RAY_ADDRESS, or one that is started here for the run.
    """

    processes: int = 2
    cpus: int = 1
    failures: int = 3
    storage: str | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        for name in ("processes", "cpus"):
            check_whole(f"launcher.{name}", getattr(self, name))
        check_whole("launcher.failures", self.failures, zero=True)
        for name in ("storage", "address"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"`launcher.{name}` must be text, got {value!r}")
        if self.storage is not None:
            open_storage(self.storage)

    def __call__(self, words: Sequence[str], folder: Path) -> bool:
        """Start the workers and wait for them.

        Raises:
            ConfigError: what was wrong, or too many of them died.
        """
        if distributed.joined():
            return False
        folder = folder.absolute()
        storage = str(folder / "ray") if self.storage is None else self.storage
        name = run_name(storage, words)
        with cluster(self.address, self.processes * self.cpus):
            said = ray_part("ray.util.queue").Queue(actor_options={"num_cpus": 0})
            own = tuple(own_words(words, folder, auto=False))
            task = Worker(own, folder, Path.cwd(), said, uploads=self.storage is not None)
            result = in_a_thread(self._trainer(task, storage, name).fit, lambda: _tell(said))
        if result.return_value is not None:
            raise ConfigError(result.return_value)
        if self.storage is None:
            shutil.rmtree(storage)  # copies of checkpoints
        elif not (folder / "report.json").is_file():  # the first process was on another machine
            result.checkpoint.to_directory(folder)
        return True

    def _trainer(self, task: Worker, storage: str, name: str) -> Any:
        train, filesystem = ray_part("ray.train"), open_storage(storage)
        return ray_part("ray.train.torch").TorchTrainer(
            task,
            scaling_config=train.ScalingConfig(num_workers=self.processes, resources_per_worker={"CPU": self.cpus}),
            run_config=train.RunConfig(
                name=name,
                storage_path=filesystem[1],
                storage_filesystem=filesystem[0],
                failure_config=train.FailureConfig(max_failures=self.failures),
                checkpoint_config=train.CheckpointConfig(num_to_keep=2),
                logging_config=train.LoggingConfig(log_level="ERROR"),
            ),
        )


def _tell(said: Any) -> None:
    """Repeat here what the first process has said since the last time."""
    sys.stdout.write("".join(said.get_nowait_batch(said.qsize())))
    sys.stdout.flush()


def in_a_thread(work: Callable[[], Any], meanwhile: Callable[[], object]) -> Any:
    """Do it beside the main thread, which then still hears Ctrl-C: Ray would take that for itself.

    Raises:
        ConfigError: it failed.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        meanwhile()
    if isinstance(found[0], Exception):
        raise ConfigError(
            f"the run ended early: {reason(found[0])}. "
            "The same command with resume=auto goes on from the last checkpoint"
        ) from found[0]
    return found[0]


def reason(error: Exception) -> str:
    """What Ray says, in a sentence: of several workers, the first that has one."""
    failures = getattr(error, "worker_failures", {})
    rank, first = next(iter(sorted(failures.items())), (None, error))
    where = "" if rank is None else f"process {rank}: "
    return where + (sentence(first) if isinstance(first, Exception) else str(first).partition("\n")[0]).rstrip(".")


def open_storage(place: str) -> tuple[Any, str]:
    """The file system of a folder or URL, and the path there.

    Raises:
        ConfigError: nobody here knows such URLs.
    """
    fs = ray_part("pyarrow.fs")
    if "://" not in place:
        return fs.LocalFileSystem(), str(Path(place).absolute())
    try:
        return fs.FileSystem.from_uri(place)  # type: ignore[no-any-return]
    except (ValueError, NotImplementedError):
        pass
    fsspec = ray_part("fsspec")
    try:
        system, path = fsspec.core.url_to_fs(place)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"`launcher.storage` {place!r} cannot be used: {sentence(error)}") from error
    return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def run_name(storage: str, words: Sequence[str]) -> str:
    """What a run is called in its storage: with ``resume=auto``, as the last one of the same words that did not finish.

    Ray Train goes on from the checkpoints of a run of the same name.
    """
    kept = [word for word in words if not word.lstrip("+").startswith(("launcher", "resume="))]
    same = f"lgmml-{hashlib.sha256(repr(kept).encode()).hexdigest()[:12]}-"
    if "resume=auto" in words:
        fs = ray_part("pyarrow.fs")
        system, path = open_storage(storage)
        runs = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
        for run in sorted((run.path for run in runs if run.base_name.startswith(same)), reverse=True):
            if _goes_on(run, system):
                return Path(run).name
    return f"{same}{time.strftime('%Y-%m-%d_%H-%M-%S')}"


def _goes_on(run: str, system: Any) -> bool:
    """Whether something was reported of a run that is not its end."""
    train = ray_part("ray.train")
    try:
        found = train.Result.from_path(run, storage_filesystem=system)
    except RuntimeError:
        return False
    return found.checkpoint is not None and not (found.metrics or {}).get("finished")


@dataclass(frozen=True)
class Worker:
    """One process of the run: Ray calls it, and again in a new process after one of them died.

    Attributes:
        words: of the command.
        folder: of the run.
        home: where the command was given: what its words name is seen from there.
        said: queue for what the first process says, to be repeated where the command was given.
        uploads: whether the files of the run go to the storage in the end.
    """

    words: tuple[str, ...]
    folder: Path
    home: Path
    said: Any
    uploads: bool

    def __call__(self) -> str | None:
        """Run the command; what is wrong with it, said in a sentence, is no reason to start anew."""
        from lgmml_torch.app import cli  # the command is what this module is part of

        if self.home.is_dir():
            os.chdir(self.home)
        words = self._going_on()
        reported = Reported(self.folder / "checkpoints")
        WATCHERS.append(reported)
        for name in logging.root.manager.loggerDict:
            if name.startswith("ray") or "/ray/" in name:  # some are called by their file
                logging.getLogger(name).setLevel(logging.WARNING)
        try:
            with Heard(self.said) as heard, redirect_stdout(heard), redirect_stderr(heard):
                cli.main(["train", *words])
        except SystemExit as end:
            distributed.leave()  # or the others would wait
            if end.code == 2 and isinstance(end.__context__, Exception):
                return sentence(end.__context__)
            raise ConfigError(f"it ended with {end.code}") from end
        if self.uploads:
            reported.finish(self.folder)
        return None

    def _going_on(self) -> list[str]:
        """The words, with the last checkpoint that all have reported put in place, if there is one."""
        train = ray_part("ray.train")
        checkpoint = train.get_checkpoint()
        if checkpoint is None:
            return list(self.words)
        if train.get_context().get_local_rank() == 0:
            with checkpoint.as_directory() as found:
                files = sorted((Path(found) / "checkpoints").iterdir(), key=lambda file: file.name in FILES)
                for file in files:  # what the two name first
                    write_bytes(self.folder / "checkpoints" / file.name, file.read_bytes())
        return [*(word for word in self.words if not word.lstrip("+").startswith("resume=")), "resume=auto"]


class Heard(io.TextIOBase):
    """A stream into a queue, line by line, of the first process only: it tells the story of all."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue if os.environ.get("RANK") == "0" else None
        self._line = ""

    def write(self, text: str) -> int:
        """Whole lines are sent at once; an error is the command's own to tell."""
        lines, end, self._line = (self._line + text).rpartition("\n")
        if end and self._queue is not None and not lines.startswith("error: "):
            self._queue.put(lines + end)
        return len(text)


class Reported(Callback):
    """Reports every ``last.ckpt`` to Ray, with the ``best.ckpt`` beside it, once the first process has written it.

    All processes have to report, or none of it counts.

    Args:
        folder: of the checkpoints; those of several candidates, which lie elsewhere, are not reported.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._due = False

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """One is about to be written; every process is told."""
        self._due = True

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """What was written after the batch before, or at the end of the epoch, is there now."""
        self._report(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """And so is the last one."""
        self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        if self._due:
            self._due = False
            files = []
            if trainer.is_global_zero and (self.folder / "last.ckpt").is_file():  # no resume from best.ckpt alone
                files = [self.folder / name for name in FILES]
            there = [f"checkpoints/{file.name}" for file in files if file.is_file()]
            self._send({"step": trainer.global_step}, self.folder.parent if there else None, there)

    def finish(self, folder: Path) -> None:
        """The run is done: its files are handed in."""
        files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        first = ray_part("ray.train").get_context().get_world_rank() == 0
        self._send({"finished": True}, folder if first else None, files)

    def _send(self, facts: dict[str, Any], folder: Path | None, files: Sequence[str]) -> None:
        train = ray_part("ray.train")
        if folder is None:
            train.report(facts)
            return
        with tempfile.TemporaryDirectory() as place:
            for file in files:
                copied = Path(place) / file
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / file, copied)
            train.report(facts, checkpoint=train.Checkpoint.from_directory(place))
