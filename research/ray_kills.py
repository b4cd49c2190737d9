"""Kills workers, then the driver, of runs on Ray at seeded moments: ``python -m research.ray_kills``.

One run is left alone. In a second, workers are killed (SIGKILL) one after the other, each time at a random moment after
the workers have started anew. In a third, the driver itself is killed, and the same command given again with
``resume=auto``. All have to end with the same model, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from lgmml_torch.models.storage import read_model

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "distributed.md"
SETTINGS = (
    "experiment=quick", "data.num_queries=120", "local_metrics.rounds=160", "trainer.max_epochs=40",
    "callbacks=quiet", "trainer.enable_progress_bar=false", "loader.batch_size=8", "loader.num_workers=0", "threads=1",
    "launcher=ray",
)  # fmt: skip
RESUMES, BEGINS, GOES_ON = "resume=auto: /", "] - train: ", "resumes after round"  # what workers say first
ANEW = "the beginning"
LONGEST = 900  # seconds that any wait may take
BEFORE_THE_END = 0.85  # of a run: one whose report is written has finished, and the same words begin another


class Driver:
    """``python train.py launcher=ray`` in a process of its own, and what it says."""

    def __init__(self, home: Path, *words: str) -> None:
        home.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "LGMML_CACHE": str(home / "cache"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-u", str(ROOT / "train.py"), *SETTINGS, *words]
        self.home, self.log, self.lives = home, home / f"log{len(list(home.glob('log*')))}", 0
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def wait_for_life(self) -> None:
        """Wait until the next group of workers speaks."""
        end = time.monotonic() + LONGEST
        while len(starts(self.log.read_text())) == self.lives:
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit(f"no workers came:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)
        self.lives += 1

    def workers(self) -> list[psutil.Process]:
        """The processes that train."""
        return workers_of(psutil.Process(self.process.pid))

    def ends(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def finish(self) -> None:
        """Wait for the end, which has to be a good one."""
        if not self.ends(LONGEST) or self.process.returncode:
            raise SystemExit(f"ended with {self.process.returncode}:\n{self.log.read_text()[-2000:]}")

    def stage(self) -> str:
        """How far the run has come: what stands on the disk."""
        if list(self.home.rglob("report.json")):
            return "its end, report written"
        if list(self.home.rglob("last.ckpt")):
            return "epochs"
        return "local metrics, kept state" if list(self.home.rglob("unfinished/*.bank")) else "local metrics"


def starts(said: str) -> list[str]:
    """What every group of workers so far went on from, by what they have said."""
    found, start = [], ANEW
    for line in said.splitlines():
        if RESUMES in line:
            start = "last.ckpt"
        elif BEGINS in line:
            found.append(start)
            start = ANEW
        elif GOES_ON in line:
            found[-1] = f"round {line.partition(GOES_ON)[2].split()[0]} of the metrics"
    return found


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """Ray Train's workers among the descendants of a process, in the order of their numbers."""
    found = []
    for child in process.children(recursive=True):
        try:
            if "TrainWorker" in " ".join(child.cmdline()[:1]):
                found.append(child)
        except psutil.Error:  # gone in the meantime
            continue
    return sorted(found, key=lambda child: child.pid)


@dataclass(frozen=True)
class Row:
    """One disturbance.

    Attributes:
        what: was killed.
        after: so many seconds of life.
        stage: of the run then.
        back: seconds until the next workers' first word.
        start: what they went on from.
    """

    what: str
    after: float
    stage: str
    back: float
    start: str = ""


def undisturbed(home: Path) -> float:
    """A run that is left alone; the seconds from its first word to its end."""
    driver = Driver(home)
    driver.wait_for_life()
    started = time.monotonic()
    driver.finish()
    return time.monotonic() - started


def workers_killed(home: Path, seconds: float, kills: int, draw: random.Random) -> list[Row]:
    """A run whose workers are killed again and again, on the way through."""
    driver, rows = Driver(home, f"launcher.failures={kills}"), []
    driver.wait_for_life()
    for number in range(kills):
        moment = draw.uniform(0, seconds / kills)
        if driver.ends(moment):
            raise SystemExit(f"the run had ended before kill {number + 1}; give it more to do")
        stage, workers = driver.stage(), driver.workers()
        victim = draw.randrange(len(workers))
        workers[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        driver.wait_for_life()
        rows.append(Row(f"worker {victim + 1} of {len(workers)}", moment, stage, time.monotonic() - killed))
        sys.stdout.write(f"{rows[-1]}\n")
    driver.finish()
    return [replace(row, start=start) for row, start in zip(rows, starts(driver.log.read_text())[1:], strict=True)]


def driver_killed(home: Path, seconds: float, draw: random.Random) -> Row:
    """A run whose driver is killed, and the same command with ``resume=auto``."""
    driver = Driver(home)
    driver.wait_for_life()
    moment = draw.uniform(0, BEFORE_THE_END * seconds)
    if driver.ends(moment):
        raise SystemExit("the run had ended before its driver was killed; give it more to do")
    stage, others = driver.stage(), psutil.Process(driver.process.pid).children(recursive=True)
    driver.process.kill()
    killed = time.monotonic()
    driver.process.wait()
    left = psutil.wait_procs(others, timeout=LONGEST)[1]
    if left:
        raise SystemExit(f"outlived their driver: {left}")
    again = Driver(home, "resume=auto")
    again.wait_for_life()
    row = Row("driver", moment, stage, time.monotonic() - killed)
    sys.stdout.write(f"{row}\n")
    again.finish()
    return replace(row, start=starts(again.log.read_text())[0])


def same(home: Path, other: Path) -> bool:
    """Whether two runs have come to the same model."""
    models = [read_model(next(place.rglob("model.safetensors"))) for place in (home, other)]
    return models[0][0] == models[1][0] and equal(models[0][1], models[1][1])


def table(rows: Sequence[Row], verdicts: Sequence[bool], seed: int, seconds: float) -> str:
    """As Markdown."""
    lines = [
        "| killed (-9) | after | stage | went on from | workers back after | model at the end |",
        "|---|---|---|---|---|---|",
    ]
    for row, verdict in zip(rows, verdicts, strict=True):
        outcome = "the same, bit for bit" if verdict else "ANOTHER"
        lines.append(f"| {row.what} | {row.after:.1f} s | {row.stage} | {row.start} | {row.back:.0f} s | {outcome} |")
    return "\n".join(
        [*lines, "", f"Seed {seed}; two workers; {seconds:.0f} s from the first word to the end undisturbed."]
    )


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same bits; NaN stands for itself only."""
    if a.keys() != b.keys():
        return False
    pairs = [(value, b[name]) for name, value in a.items()]
    return all(x.isnan().equal(y.isnan()) and x.nan_to_num().equal(y.nan_to_num()) for x, y in pairs)


def main() -> None:
    """Run the campaign, and put its table into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=3, help="of workers (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table goes")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        alone, workers, driver = (Path(place) / name for name in ("alone", "workers", "driver"))
        seconds = undisturbed(alone)
        sys.stdout.write(f"undisturbed: {seconds:.1f} s\n")
        rows = workers_killed(workers, seconds, options.kills, draw)
        verdicts = [same(workers, alone)] * len(rows)
        sys.stdout.write(f"{table(rows, verdicts, options.seed, seconds)}\n")
        rows.append(driver_killed(driver, seconds, draw))
        verdicts.append(same(driver, alone))
    found = table(rows, verdicts, options.seed, seconds)
    sys.stdout.write(f"{found}\n")
    text = options.page.read_text(encoding="utf-8")
    marked = re.sub(r"(?s)(?<=<!-- kills -->\n).*?(?=<!-- /kills -->)", lambda _: f"{found}\n", text)
    options.page.write_text(marked, encoding="utf-8")
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
