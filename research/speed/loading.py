"""Loading a large LETOR file: parsing beside scikit-learn's, the cached load, and memory.

``python -m research.speed.loading`` writes a file of 200 MB to a temporary folder, loads it in turn with scikit-learn
and with this package, and measures each memory peak in a process of its own. The file is removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_svmlight_file

from lgmml_torch.data.cache import Cache
from lgmml_torch.data.letor import load_letor
from research.speed.harness import print_table, save_result, time_interleaved
from research.stats import target_word

FEATURES = 136
PEAK = """
import json, resource, sys, threading, time
from pathlib import Path
from lgmml_torch.data.letor import load_letor
from lgmml_torch.ragged import RankingData
warm = Path(sys.argv[3])
load_letor(warm, cache=False)  # allocations that come once, with the first call of anything
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to the present size
before = resident()
data = load_letor(sys.argv[1], cache=sys.argv[2] or False)
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
peak = int(status["VmHWM"].split()[0]) * 1024
print(json.dumps({"peak": peak - before, "dense": data.features.numel() * 4}))
"""


def write_file(path: Path, megabytes: float) -> None:
    """MSLR-like lines: 136 features, a third of them zero, a third counts, a third with six decimals."""
    rng = np.random.default_rng(0)
    size, query = 0, 0
    with path.open("wb") as file:
        while size < megabytes * 1e6:
            query += 1
            values = rng.normal(size=(120, FEATURES)) * 20
            counts = rng.integers(0, 10**4, (120, FEATURES))
            kinds = rng.integers(0, 3, FEATURES)
            lines = []
            for row in range(120):
                cells = (
                    "0" if kind == 0 else str(counts[row, i]) if kind == 1 else f"{values[row, i]:.6f}"
                    for i, kind in enumerate(kinds)
                )
                features = " ".join(f"{i + 1}:{cell}" for i, cell in enumerate(cells))
                lines.append(f"{rng.integers(0, 5)} qid:{query} {features}\n")
            block = "".join(lines).encode()
            file.write(block)
            size += len(block)


def peak_memory(file: Path, warm: Path, cache: str) -> dict[str, int]:
    command = [sys.executable, "-c", PEAK, str(file), cache, str(warm)]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def measure(megabytes: float, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file, warm, cache = folder / "train.txt", folder / "small.txt", Cache(folder / "cache")
        write_file(file, megabytes)
        write_file(warm, 0.5)
        load_letor(file, cache=cache, progress=False)
        time.sleep(0.1)
        cache.content(file)  # written a moment ago: the first load may not have trusted its time stamp
        timings = time_interleaved(
            {
                "scikit-learn": lambda: load_svmlight_file(str(file), query_id=True, dtype=np.float32),
                "parse": lambda: load_letor(file, cache=False, progress=False),
                "cached": lambda: load_letor(file, cache=cache, progress=False),
            },
            rounds=rounds,
            warmup=0,
        )
        parsing = peak_memory(file, warm, "")
        building = peak_memory(file, warm, str(folder / "cache2"))
        data = load_letor(file, cache=cache)
        return {
            "megabytes": file.stat().st_size / 1e6,
            "documents": data.num_documents,
            "features": data.num_features,
            "seconds": {name: timing.median for name, timing in timings.items()},
            "parse_over_sklearn": timings["parse"].ratio(timings["scikit-learn"]),
            "cached_over_parse": timings["cached"].ratio(timings["parse"]),
            "peak_over_dense": parsing["peak"] / parsing["dense"],
            "peak_over_dense_building_cache": building["peak"] / building["dense"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    result = measure(arguments.megabytes, arguments.rounds)
    seconds = result["seconds"]
    print_table(
        f"{result['megabytes']:.0f} MB, {result['documents']:,} documents, {result['features']} features",
        ["", "figure", "target", ""],
        [
            ["scikit-learn, seconds", seconds["scikit-learn"], "", ""],
            ["parse, seconds", seconds["parse"], "", ""],
            ["cached, seconds", seconds["cached"], "", ""],
            *(
                [title, result[name], f"≤ {target}", target_word(result[name] <= target)]
                for title, name, target in (
                    ("parse / scikit-learn", "parse_over_sklearn", 1.0),
                    ("cached / parse", "cached_over_parse", 0.02),
                    ("peak memory / dense array", "peak_over_dense", 2.2),
                    ("the same, building the cache", "peak_over_dense_building_cache", 2.2),
                )
            ),
        ],
    )
    save_result("loading", result)


if __name__ == "__main__":
    main()
