"""Kills commands at seeded moments and file operations, and fills their disks: ``python -m tools.crash``.

Three commands are disturbed: a training run, by one process on LETOR files and by two on shards; ``lgmml convert``; and
``lgmml score``. Each is killed (SIGKILL), at an operation on files that it does or at a random moment, and started
again: training from ``last.ckpt`` where there is one, from the beginning where not. It has to end with what comes of a
run that was left alone, bit for bit. After every kill each file under its final name is read, and must be whole; after
every run nothing temporary may be left. A disk becomes full at one of the operations and stays so until the next run.

Operations are those that Python reports to its audit hooks, reading included, and every flush to the disk. Of several
processes one is killed, and the others after it, as torchrun does; at a random moment all die at once. Commands run in
processes forked from this one, which has imported everything: a fresh interpreter would take longer than they do.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from lgmml_torch import distributed
from lgmml_torch.app import cli
from lgmml_torch.app.config import load_config
from lgmml_torch.app.train import train
from lgmml_torch.checks import DataWarning, NoSpaceError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.shards import MANIFEST, check_shards
from lgmml_torch.data.write import save_letor, write_shards
from lgmml_torch.files import SUFFIX
from lgmml_torch.models.storage import load_checkpoint, read_model
from lgmml_torch.training import resume
from research.stats import markdown

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
SETTINGS = (
    "local_metrics=boosted_short", "local_metrics.rounds=3", "trainer.max_epochs=2", "loader.batch_size=8",
    "loader.num_workers=0", "trainer.enable_progress_bar=false", "callbacks=quiet", "threads=1",
    "trainer.accelerator=cpu", "name=crash",
)  # fmt: skip
LISTS = {"train": 16, "vali": 6, "test": 4}
PLANS = (  # command, processes, and how many of a hundred kills, of them at random moments, and of a hundred full disks
    ("train", 1, 50, 8, 50),
    ("train", 2, 28, 7, 25),
    ("convert", 1, 16, 2, 15),
    ("score", 1, 6, 0, 10),
)
FULL = 28  # exit code of a run that said that there was no room
LARGEST = 65_536  # bytes of room that are left, at most
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "os.scandir", "os.listdir")
MARK = "disturbed at: "  # what the log of a disturbed process says
KINDS = {  # of files, by what stands in their path
    "tensorboard": "TensorBoard", "checkpoints": "checkpoints", "unfinished": "unfinished bank", "cache": "cache",
    "report": "report", "model.": "model", "scores": "scores", "shard-": "shards", "index.": "shards",
    "manifest": "manifest", "data": "data read", "run": "folder",
}  # fmt: skip


@dataclass
class Row:
    """What was tried in one way, and what came of it."""

    command: str
    processes: int
    way: str
    tried: int = 0
    hit: int = 0
    same: int = 0
    places: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Order:
    """What the processes of a command are told.

    Attributes:
        home: everything happens below it.
        command: ``train``, ``convert`` or ``score``.
        words: its own.
        processes: so many together.
        victim: the one of them that is disturbed.
        at: the operation at which; 0 for none.
        room: bytes that a file may have from then on; None kills instead.
    """

    home: Path
    command: str
    words: tuple[str, ...]
    processes: int = 1
    victim: int = 0
    at: int = 0
    room: int | None = None

    def carry_out(self, rank: int, port: int, log: int) -> None:
        """Be one of the processes; the exit code says whether there was no room."""
        warnings.simplefilter("default")  # as in a run of its own, whatever the parent does with them
        for handle in (1, 2):
            os.dup2(log, handle)
        sys.stdout, sys.stderr = (os.fdopen(handle, "w", buffering=1, closefd=False) for handle in (1, 2))
        resume.STATE_SECONDS = 0.0  # a state of the bank after every round
        if self.room is None:
            warnings.simplefilter("error", DataWarning)  # a damaged cache entry is rebuilt with one
        count = arm(self, rank)
        code = 1
        try:
            code = self._run(rank, port)
            if self.at == 0:
                told = {"operations": count[0], "modules": sorted(sys.modules)}
                (self.home / f"told-{rank}").write_text(json.dumps(told))
        except NoSpaceError as error:
            code = FULL
            sys.stderr.write(f"{error}\n")
        except BaseException:
            traceback.print_exc()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def _run(self, rank: int, port: int) -> int:
        if self.command != "train":
            return cli.main([self.command, *self.words])
        if self.processes > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.processes, "MASTER_PORT": port}
            os.environ |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
            distributed.join()
        train(composed(self.words))
        return 0


@functools.cache
def composed(words: tuple[str, ...]) -> DictConfig:
    """The configuration, composed once."""
    return load_config(words)


def arm(order: Order, rank: int) -> list[int]:
    """Count this process's operations on files below a folder, and disturb the one that was asked for."""
    count, place, sync = [0], f"{order.home}/", os.fsync

    def step(event: str, path: str) -> None:
        count[0] += 1
        if count[0] != order.at or rank != order.victim:
            return
        os.write(2, f"{MARK}{event} {path}\n".encode())
        if order.room is None:
            os.kill(os.getpid(), signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (order.room or 0, resource.RLIM_INFINITY))

    def audited(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(arguments[0]).startswith(place):
            step(event, str(arguments[0]).removeprefix(place))

    def fsync(handle: int) -> None:
        step("fsync", str(Path(f"/proc/self/fd/{handle}").readlink()).removeprefix(place))
        sync(handle)

    sys.addaudithook(audited)
    os.fsync = fsync  # type: ignore[assignment]
    return count


class Running:
    """A command in forked processes; what they say is kept in ``log``."""

    def __init__(self, order: Order) -> None:
        if order.command == "train":
            composed(order.words)  # here, so that it is there for the next ones as well
        fork = multiprocessing.get_context("fork")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        reading, writing = os.pipe()
        self.processes = [
            fork.Process(target=order.carry_out, args=(rank, port, writing)) for rank in range(order.processes)
        ]
        sys.stdout.flush()  # children must not have it to write
        for process in self.processes:
            process.start()
        os.close(writing)
        self.log = ""
        self._reader = threading.Thread(target=self._drain, args=(reading,))
        self._reader.start()

    def _drain(self, reading: int) -> None:
        with open(reading, encoding="utf-8", errors="replace") as stream:
            self.log = stream.read()

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, or None while it is running; when one process fails, the others are killed."""
        end = None if seconds is None else time.monotonic() + seconds
        while running := [process for process in self.processes if process.exitcode is None]:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            wait_for([process.sentinel for process in running], left)
            if any(process.exitcode for process in self.processes):
                self.kill()
        self._reader.join()
        codes = [int(process.exitcode or 0) for process in self.processes]
        full = FULL in codes or (2 in codes and "no room for" in self.log)
        return FULL if full else next((code for code in codes if code), 0)

    def kill(self) -> None:
        """All of its processes, at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


class Bench:
    """A place for one command, and what comes of it when nobody disturbs it."""

    def __init__(self, home: Path, command: str, processes: int = 1) -> None:
        self.home, self.command, self.processes = home, command, processes
        self.run, self.cache, self.data = home / "run", home / "cache", home / "data"
        for seed, (name, lists) in enumerate(LISTS.items()):
            rows = letor_like(lists, 4, num_documents=8 * lists, seed=seed)
            save_letor(rows, self.data / f"{name}.txt")
            if processes > 1:
                write_shards(rows, self.data / "shards" / name, documents=24)
        if command == "score":
            Bench(home, "train").keep_model()
        for _ in range(2):  # the second time everything is imported, as in the runs to come
            self.clear()
            started, running = time.monotonic(), self.start()
            if code := running.wait():
                raise SystemExit(f"the run that nobody disturbs failed with {code}:\n{running.log}")
            self.seconds = time.monotonic() - started
            told = [json.loads((home / f"told-{rank}").read_text()) for rank in range(processes)]
            for module in told[0]["modules"]:
                with suppress(ImportError):
                    importlib.import_module(module)
        self.operations = [process["operations"] for process in told]
        self.expected = self.outcome()

    def keep_model(self) -> None:
        """For another command to use."""
        shutil.copy(self.run / "model.safetensors", self.home / "model.safetensors")

    def start(self, **disturbed: Any) -> Running:
        """Start the command; training from its checkpoint, where it has one."""
        if self.command == "convert":
            words: Sequence[str] = (str(self.data), str(self.run), "--documents", "24")
        elif self.command == "score":
            words = (str(self.home / "model.safetensors"), str(self.data / "test.txt"), "-o", str(self.run / "scores"))
        else:
            source = f"data=letor data.name={self.data}"
            if self.processes > 1:
                source = f"data=shards data.path={self.data}/shards"
            last = self.run / "checkpoints" / "last.ckpt"
            resume = [f"resume={last}"] if last.exists() else []
            places = [f"paths.output_dir={self.run}", f"paths.cache_dir={self.cache}"]
            words = (*SETTINGS, *source.split(), *places, *resume)
        order = Order(self.home, self.command, tuple(words), self.processes)
        return Running(replace(order, **disturbed))

    def clear(self) -> None:
        """Begin anew."""
        for folder in (self.run, self.cache):
            shutil.rmtree(folder, ignore_errors=True)

    def outcome(self) -> Any:
        """What is compared: the model, bit for bit, or the files."""
        if self.command == "train":
            spec, tensors = read_model(self.run / "model.safetensors")
            return spec, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
        files = sorted(path for path in self.run.rglob("*") if path.is_file())
        return {str(path.relative_to(self.run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def judge(self, row: Row, running: Running, label: str) -> None:
        """Read what the disturbed run left, run to the end, and compare."""
        row.hit += 1
        place = re.search(f"{MARK}(.*)", running.log)
        if place is not None:
            label = f"{label}, {place[1]}"
            row.places[next((kind for part, kind in KINDS.items() if part in place[1]), "other")] += 1
        outcome = "the same"
        try:
            self.read_all()
            again = self.start()
            if code := again.wait():
                raise RuntimeError(f"the next run failed with {code}: {again.log[-600:]}")
            if self.outcome() != self.expected:
                raise RuntimeError("something else came out")
            left = [path.name for path in self.home.rglob(f"*{SUFFIX}")]
            if left:
                raise RuntimeError(f"left behind: {left}")
            row.same += 1
        except (ValueError, RuntimeError, OSError, Warning) as error:
            outcome = str(error)
            row.faults.append(f"{row.command} by {row.processes}, {row.way}, {label}: {error}")
        print(f"{row.command} by {row.processes}, {row.way}, {label}: {outcome}", flush=True)

    def read_all(self) -> None:
        """Every file under its final name is whole, or reading it fails here."""
        for file in (self.run / "checkpoints").glob("*.ckpt"):
            load_checkpoint(file)
        for file in self.run.glob("*.safetensors"):
            read_model(file)
        for file in self.run.glob("*.json"):
            json.loads(file.read_text())
        for file in self.run.rglob(MANIFEST):
            check_shards(file.parent, progress=False)
        scores = self.run / "scores"
        if scores.exists() and self.outcome()["scores"] != self.expected["scores"]:
            raise RuntimeError("the file of scores is not whole")


def spread(count: int, total: int, draw: random.Random) -> list[int]:
    """So many of the numbers from 1 to ``total``, one drawn from each of as many stretches of the same length."""
    count = min(count, total)
    edges = [1 + total * i // max(1, count) for i in range(count + 1)]
    return [draw.randrange(low, high) for low, high in itertools.pairwise(edges)]


def at_operations(bench: Bench, tries: int, draw: random.Random, *, full: bool = False) -> Row:
    """Kill at file operations, or let the disk be full from then on; every one, or so many spread over all of them."""
    way = "disk full from a file operation on" if full else "killed at a file operation"
    row = Row(bench.command, bench.processes, way)
    for victim, operations in enumerate(bench.operations):
        for place in spread(tries // bench.processes, operations, draw):
            bench.clear()
            row.tried += 1
            room = draw.choice([0, draw.randrange(LARGEST)]) if full else None
            running = bench.start(victim=victim, at=place, room=room)
            code = running.wait()
            label = f"operation {place} of process {victim}" + (f", room for {room} bytes" if full else "")
            # Of several processes, one that waited for the killed one may end first, with an error of its own.
            if code == FULL if full else MARK in running.log:
                bench.judge(row, running, label)
            elif code:
                row.faults.append(f"{row.command}, {row.way}, {label}: ended with {code}: {running.log[-600:]}")
                print(row.faults[-1], flush=True)
    return row


def at_moments(bench: Bench, tries: int, draw: random.Random) -> Row:
    """Kill at random moments; a run that has ended before is counted as tried only."""
    row = Row(bench.command, bench.processes, "killed at a random moment")
    for _ in range(tries):
        bench.clear()
        row.tried += 1
        moment = draw.uniform(0, bench.seconds)
        running = bench.start()
        if running.wait(moment) is None:
            running.kill()
            running.wait()
            bench.judge(row, running, f"after {moment:.3f} s")
    return row


def table(rows: Sequence[Row], seed: int, minutes: float) -> str:
    """As Markdown."""
    columns = ("command", "processes", "disturbed", "tried", "hit", "same after", "faults", "files at that moment")
    places = [", ".join(f"{kind} {count}" for kind, count in row.places.most_common()) for row in rows]
    lines = [
        (r.command, r.processes, r.way, r.tried, r.hit, r.same, len(r.faults), where)
        for r, where in zip(rows, places, strict=True)
    ]
    kills = sum(row.hit for row in rows if "killed" in row.way)
    full = sum(row.hit for row in rows if "full" in row.way)
    return f"{markdown(columns, lines)}\n\n{kills} kills and {full} full disks; seed {seed}; {minutes:.0f} minutes.\n"


def campaign(kills: int, full: int, processes: Sequence[int], draw: random.Random) -> Iterator[Row]:
    """All of it, row by row."""
    for command, count, share, moments, fulls in PLANS:
        if count in processes:
            with tempfile.TemporaryDirectory() as home:
                bench = Bench(Path(home), command, count)
                yield at_operations(bench, kills * (share - moments) // 100, draw)
                yield at_moments(bench, kills * moments // 100, draw)
                yield at_operations(bench, full * fulls // 100, draw, full=True)


def main() -> None:
    """Run the campaign, and put its table into the page, row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=240, help="in all (default: 240)")
    parser.add_argument("--full", type=int, default=80, help="runs whose disk becomes full (default: 80)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="that train together (default: 1 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, rows = time.monotonic(), []
    for row in campaign(options.kills, options.full, options.processes, random.Random(options.seed)):
        rows += [row] if row.tried else []
        found = table(rows, options.seed, (time.monotonic() - started) / 60)
        text = options.page.read_text(encoding="utf-8")
        before, after = re.split(r"(?s)(?<=<!-- crash -->\n).*?(?=<!-- /crash -->)", text)
        options.page.write_text(before + found + after, encoding="utf-8")
    faults = [fault for row in rows for fault in row.faults]
    print("\n".join([found, *faults]))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
