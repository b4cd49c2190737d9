"""Scoring for hours in one process, eight threads on one model: ``python -m tools.soak --minutes 120``.

Does resident memory grow, and is every result that of one thread? Two models, one of boosted and one of trained
metrics, score lists of 1 to 5,000 documents drawn from a fixed pool, each call from raw arrays as a server has them.
The eight threads begin every round together, so that their calls overlap, and rest together after it. What one thread
found before is what every call has to find, bit for bit.

A line is written every ten seconds (seconds, MiB, calls, differences), and ``--report FILE`` tells what a file of them
says, whether its run has ended or not. The rule of the slope, fixed before the first run: the first ten minutes are
left out (the first half of a run shorter than twenty); least squares; the interval is that of a bootstrap of residuals
in circular blocks of five minutes (at most a quarter of what there is), 10,000 resamples, seed 0, percentiles 2.5 and
97.5.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from lgmml_torch.data.generated import LetorLike, letor_like
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

FEATURES, LONGEST, POOL = 40, 5000, 48
THREADS, CALLS = 8, 4  # calls of each thread in a round
SHARE = 1 / 3  # of one core
EVERY = 10.0  # seconds between two lines
WARM_UP, BLOCK = 600.0, 300.0  # seconds
RESAMPLES = 10_000
MIB = 1 << 20


@dataclass
class Work:
    """What is scored, and what one thread found: for every model the pool of lists with their scores."""

    models: dict[str, LGMML]
    lists: list[NDArray[np.float32]]  # (n, D) each
    expected: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)

    @classmethod
    def prepare(cls, seed: int = 0) -> Work:
        """Train both models, draw the lists and score them with one thread."""
        train = letor_like(60, FEATURES, num_documents=2400, seed=seed)
        X, y, qid = train.features.numpy(), train.labels.numpy(), train.query_index.numpy()
        models = {}
        with tempfile.TemporaryDirectory() as folder:
            for bank in ("boosted", "trained"):
                ranker = LGMMLRanker(bank=bank, epochs=1, budget="fast", random_state=seed, n_jobs=1)
                path = Path(folder) / bank
                ranker.fit(X, y, qid=qid).model_.save(path)
                models[bank] = LGMML.load(path)  # as a server has it
        sizes = np.unique(np.geomspace(1, LONGEST, POOL).round().astype(int))
        world = LetorLike(1, FEATURES, num_documents=int(sizes.sum()), seed=seed + 1).query(0)
        work = cls(models, np.split(world.features, np.cumsum(sizes)[:-1]))
        work.expected = {name: [work.score(name, i) for i in range(len(work.lists))] for name in models}
        return work

    def score(self, name: str, number: int) -> NDArray[np.float32]:
        """One call, from raw arrays."""
        X = self.lists[number]
        rows = RankingData.from_arrays(X, np.zeros(len(X), dtype=np.float32), group=[len(X)])
        found: NDArray[np.float32] = self.models[name].score_in_caller_order(rows)
        return found


class Soak:
    """Threads that score in rounds until they are told to stop; a call that fails is a difference."""

    def __init__(self, work: Work, share: float = SHARE, seed: int = 0) -> None:
        self.work, self.share = work, share
        self.calls, self.differences = [0] * THREADS, [0] * THREADS
        self.faults: list[str] = []
        self.stopped = self._over = False
        self._used = time.process_time()
        self._round = threading.Barrier(THREADS, self._rest)
        self._threads = [threading.Thread(target=self._run, args=(i, random.Random(seed + i))) for i in range(THREADS)]

    def _rest(self) -> None:
        """Sleep so long that the processor time of the round is its share."""
        used = time.process_time() - self._used
        time.sleep(used / self.share - used)
        self._used = time.process_time()
        self._over = self.stopped  # for all threads at once: none may wait for one that has left

    def _run(self, thread: int, draw: random.Random) -> None:
        torch.set_num_threads(1)  # each thread has a setting of its own
        names = sorted(self.work.models)
        while True:
            for _ in range(CALLS):
                name, number = draw.choice(names), draw.randrange(len(self.work.lists))
                self.calls[thread] += 1
                try:
                    equal = np.array_equal(self.work.score(name, number), self.work.expected[name][number])
                except Exception as error:
                    equal = False
                    self.faults.append(f"{name}, list {number}: {error!r}")
                self.differences[thread] += not equal
            self._round.wait()
            if self._over:
                return

    def run(self, seconds: float, out: TextIO, every: float = EVERY) -> None:
        """Score for so long; a line now and then."""
        out.write("seconds,mib,calls,differences\n")
        started, process = time.monotonic(), psutil.Process()
        for thread in self._threads:
            thread.start()
        while (passed := time.monotonic() - started) < seconds:
            out.write(f"{passed:.1f},{process.memory_info().rss / MIB:.3f},{sum(self.calls)},{sum(self.differences)}\n")
            out.flush()
            time.sleep(min(every, max(0.0, seconds - passed)))
        self.stopped = True
        for thread in self._threads:
            thread.join()


def after_warm_up(seconds: NDArray[np.float64]) -> NDArray[np.bool_]:  # (n,)
    """Which samples count: those after ten minutes, or after half of a run shorter than twenty."""
    kept: NDArray[np.bool_] = seconds >= min(WARM_UP, seconds[-1] / 2)
    return kept


class Slope(NamedTuple):
    """Growth per hour and its 95% interval."""

    found: float
    low: float
    high: float


def slope(seconds: NDArray[np.float64], values: NDArray[np.float64], seed: int = 0) -> Slope:
    """Growth per hour by least squares, with the bootstrap interval of the rule above."""
    hours = (seconds - seconds.mean()) / 3600  # (n,)
    per_hour = hours / (hours @ hours)  # the slope is the product with it
    found = float(per_hour @ values)
    residuals = values - values.mean() - found * hours
    n = len(hours)
    block = max(1, min(n // 4, round(BLOCK * (n - 1) / (seconds[-1] - seconds[0]))))
    starts = np.random.default_rng(seed).integers(n, size=(RESAMPLES, -(-n // block)))
    rows = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :n] % n
    drawn = found + residuals[rows] @ per_hour
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Slope(found, float(low), float(high))


def told(lines: Sequence[str]) -> str:
    """What a file of samples says; a last line that is not whole yet is left out."""
    rows = [line.split(",") for line in lines[1:]]
    table = np.array([[float(v) for v in row] for row in rows if len(row) == 4 and row[3]])  # (n, 4)
    kept = table[after_warm_up(table[:, 0])]
    found = slope(kept[:, 0], kept[:, 1])
    minutes, calls, differences = table[-1, 0] / 60, int(table[-1, 2]), int(table[-1, 3])
    return (
        f"{minutes:.0f} minutes, {calls:,} calls by {THREADS} threads, {differences} differences; after "
        f"{kept[0, 0] / 60:.0f} minutes of warm-up ({len(kept)} samples) resident memory {kept[:, 1].min():.1f} to "
        f"{kept[:, 1].max():.1f} MiB, slope {found.found:+.2f} MiB per hour [{found.low:+.2f}, {found.high:+.2f}]"
    )


def main() -> None:
    """Run, or tell what a file says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--share", type=float, default=SHARE, help="of one core (default: a third)")
    parser.add_argument("--out", type=Path, default=Path("soak.csv"), help="a line every ten seconds")
    parser.add_argument("--report", type=Path, help="tell what this file says, and run nothing")
    options = parser.parse_args()
    if options.report is None:
        torch.set_num_threads(1)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        soak = Soak(Work.prepare(), options.share)
        with options.out.open("w", encoding="utf-8") as out:
            soak.run(60 * options.minutes, out)
        sys.stdout.write("".join(f"{fault}\n" for fault in soak.faults[:20]))
    found = told((options.report or options.out).read_text(encoding="utf-8").splitlines())
    sys.stdout.write(found + "\n")


if __name__ == "__main__":
    main()
