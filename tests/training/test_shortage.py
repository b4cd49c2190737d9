"""Runs that are short of something: handles, worker processes, room on the disk. They end with a sentence, or go on."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from unittest.mock import Mock

import pytest
import pytorch_lightning as pl
import torch

from lgmml_torch.checks import LoaderError, NoSpaceError
from lgmml_torch.training.batches import BatchLoader, TrainingBatches
from tests.full_disk import room_for
from tests.training import tiny

OPEN = Path("/proc/self/fd")


@contextmanager
def handles(more: int) -> Iterator[None]:
    """Only so many more file handles than are open now."""
    resource_tracker.ensure_running()  # started now, it would have too few handles as well, and be dead for later tests
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(path.name) for path in OPEN.iterdir()) + 20, before[1]))
    with suppress(OSError):
        while True:  # no gaps shall be left between those that are open
            taken.append(os.dup(taken[0]))
    while more:
        os.close(taken.pop())
        more -= 1
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for handle in taken:
            os.close(handle)


def loader(workers: int) -> BatchLoader:
    return BatchLoader(TrainingBatches(tiny.splits()[0], batch_size=1), num_workers=workers)


def test_workers_need_few_handles_and_no_shared_memory() -> None:
    """One handle a tensor would be some hundred of them here."""
    want = list(loader(0))
    with handles(20):
        short = loader(2)
        found = list(short)
        short.close()
    assert len(found) == len(want) > 10
    for batch, same in zip(found, want, strict=True):
        assert batch.whole == same.whole
        pairs = list(zip(batch, same, strict=True))[:-1]
        assert all(torch.equal(a, b) and not a.is_shared() for a, b in pairs)


@pytest.mark.parametrize("more", [0, 7])
def test_workers_that_cannot_be_started_are_one_sentence(more: int) -> None:
    sentence = r"the 2 processes that make batches could not be started \(Too many open files\); with loader.num_work"
    with handles(more), pytest.raises(LoaderError, match=sentence):
        list(loader(2))


class KillWorker(pl.Callback):
    """In the middle of the second epoch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == 9:
            workers = trainer.datamodule._loader._loader._iterator._workers  # type: ignore[attr-defined]
            os.kill(workers[0].pid, signal.SIGKILL)


class HearsOfDeaths(pl.Callback):
    """Whether PyTorch's handler of dead workers is there."""

    heard = False

    def on_train_batch_end(self, *_: object) -> None:
        self.heard = callable(signal.getsignal(signal.SIGCHLD))


def test_every_fit_of_a_program_hears_of_dead_workers(tmp_path: Path) -> None:
    """Without the signal, a run would wait for ever for the rest of a batch that a killed worker began to send."""
    for name in ("first", "second"):
        watch = HearsOfDeaths()
        tiny.train(tmp_path / name, workers=1, epochs=1, callbacks=(watch,))
        assert watch.heard, name


# PyTorch raises from a signal handler: a file that was just being opened is closed by the collector, with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_worker_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match=r"DataLoader worker .*; with loader.num_workers=0 the run makes its batches"):
        tiny.train(tmp_path, workers=2, callbacks=(KillWorker(),))
    tiny.train(tmp_path, resume=True)  # what was kept is whole


@pytest.mark.parametrize("error", [OSError("got end of file during message"), EOFError()])
def test_a_worker_that_dies_while_it_sends_is_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may notice the broken pipe before it notices the death, and then tells of the pipe."""
    cut = loader(2)
    iterator = iter(cut)
    next(iterator)
    monkeypatch.setattr(cut._loader._iterator, "_try_get_data", Mock(side_effect=error))
    with pytest.raises(LoaderError, match=r"a DataLoader worker ended while it sent a batch \(.*; with loader.num"):
        list(iterator)
    cut.close()


def test_a_full_disk_ends_training_with_a_sentence_and_a_whole_checkpoint(tmp_path: Path) -> None:
    prepared = tiny.prepared()
    tiny.train(tmp_path, found=prepared, epochs=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"best.ckpt", "last.ckpt"}
    sizes = sorted(len(content) for content in before.values())
    for limit in (0, sizes[0] // 2, sizes[0] - 1):
        with room_for(limit), pytest.raises(NoSpaceError, match=r"no room for .*\.ckpt \(File too large\): it needs"):
            tiny.train(tmp_path, found=prepared, epochs=2, resume=True)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
