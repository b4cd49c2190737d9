"""Training at full scale: stage times, peak memory and throughput, or how they grow with N, K and D.

Run with ``python -m research.speed.scale shape=web10k`` (or ``web30k``, ``yahoo1``, ``small``) or
``python -m research.speed.scale curves``. Settings follow as ``name=value``:

    shape=web10k   which shape, or the word ``curves``
    fraction=1     share of the lists, to try things out
    metrics=500    K
    passes=20      passes of Φ over all lists
    dtype=float32  of the stored distances: float32, float16 or bfloat16
    threads=2      cores
    seed=0

``curves`` takes ``threads``, ``passes=5`` and ``repeats=2``, of which the median counts.

Results go to ``research/results/scale-<shape>.json`` (with the fraction in the name when it is not 1).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from lgmml_torch.data.cache import Cache
from lgmml_torch.data.generated import LetorLike
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.plots import save_figure
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.preprocessed import compute_distances
from research.compare import sampled_bank, train_on_lists
from research.speed.harness import GIB, RESULTS, parse, peak, print_table, save_result, time_interleaved, watched
from research.speed.plots import scaling_picture, stages_picture
from research.stats import exponent, target_word

VALID_SHARE = 0.1  # validation lists, beside the training lists


@dataclass(frozen=True)
class Shape:
    """Training documents, lists and features of a set."""

    documents: int
    queries: int
    features: int

    def part(self, fraction: float) -> Shape:
        """The same kind of set with a share of the lists."""
        return Shape(max(2, round(self.documents * fraction)), max(2, round(self.queries * fraction)), self.features)


SHAPES = {
    "web10k": Shape(723_412, 6_000, 136),
    "web30k": Shape(2_270_296, 18_919, 136),
    "yahoo1": Shape(473_134, 19_944, 519),
    "small": Shape(20_000, 300, 46),
}


def generate(shape: Shape, *, seed: int = 0) -> tuple[RankingData, RankingData]:
    """Training and validation lists; the validation lists are further lists of the same world."""
    train = LetorLike(shape.queries, shape.features, num_documents=shape.documents, seed=seed)
    features = np.empty((shape.documents, shape.features), dtype=np.float32)
    labels = np.empty(shape.documents, dtype=np.float32)
    train.fill(features, labels)
    held = max(20, round(VALID_SHARE * shape.queries))
    mean = shape.documents / shape.queries
    more = LetorLike(
        shape.queries + held, shape.features, num_documents=round((shape.queries + held) * mean), seed=seed
    )
    lists = [more.query(index) for index in range(shape.queries, shape.queries + held)]
    valid = RankingData.from_arrays(
        np.concatenate([part.features for part in lists]),
        np.concatenate([part.labels for part in lists]),
        group=np.array([len(part.labels) for part in lists]),
    )
    return RankingData.from_arrays(features, labels, group=train.sizes), valid


@dataclass
class Stages:
    """Seconds and peak memory of each stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # of all threads; tells a busy machine from slow code
    memory: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        start, cpu = time.perf_counter(), time.process_time()
        with watched() as most:
            yield
        self.seconds[name], self.cpu_seconds[name] = time.perf_counter() - start, time.process_time() - cpu
        self.memory[name] = most

    @property
    def total(self) -> float:
        """All stages together."""
        return sum(self.seconds.values())


class EpochClock(Callback):
    """When each epoch of Φ was validated, in seconds since training Φ began."""

    def __init__(self) -> None:
        self.start, self.at = 0.0, dict[int, float]()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the time."""
        self.at[trainer.current_epoch + 1] = time.perf_counter() - self.start


@dataclass
class Run:
    """What a run of the pipeline leaves."""

    model: LGMML
    stages: Stages
    valid_ndcg: dict[int, float]  # by pass, 0 before the first
    seconds_at: dict[int, float]  # whole training time up to the end of each pass
    bank: dict[str, Any]


def train(
    data: RankingData,
    valid: RankingData,
    *,
    folder: Path,
    metrics: int = 500,
    passes: int = 20,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Run:
    """Preprocessing, local metrics, distances (memory-mapped) and Φ on whole lists."""
    stages = Stages()
    with stages.stage("preprocessing and metrics"):
        bank, model = sampled_bank(data, valid, metrics=metrics, seed=seed)
    with stages.stage("distances"):
        cache = Cache(folder / "distances")
        for name, part in bank.splits.items():
            bank.inputs[name] = compute_distances(model, part, cache=cache, dtype=dtype)
    clock = EpochClock()
    with stages.stage("weights"):
        trained, curve = train_on_lists(
            bank, folder=folder / "checkpoints", passes=passes, callbacks=[clock], seed=seed
        )
    before = stages.total - stages.seconds["weights"]
    at = {epoch: before + seconds for epoch, seconds in clock.at.items()}
    return Run(trained, stages, curve, {0: before, **at}, bank.bank.history)


BASE = {"documents": 60_000, "metrics": 250, "features": 136}
GRID = {
    "documents": (30_000, 60_000, 120_000, 240_000),
    "metrics": (125, 250, 500, 1000),
    "features": (34, 68, 136, 272),
}
DOCUMENTS_PER_LIST = 50  # short lists, so that even the smallest set has one for each of 500 metrics
LINEAR = 1.1


def curves(repeats: int, passes: int) -> dict[str, Any]:
    """Time the stages over the grid, fit exponents, print, plot and save."""
    times: dict[str, dict[int, dict[str, float]]] = {
        name: {value: _stages({**BASE, name: value}, repeats, passes) for value in values}
        for name, values in GRID.items()
    }
    exponents = {
        name: {
            stage: exponent(list(points), [found[stage] for found in points.values()])
            for stage in [*_stage_names(points)]
        }
        for name, points in times.items()
    }
    stages = list(exponents["documents"])
    rows = [(name, *(exponents[name][stage] for stage in stages)) for name in GRID]
    print_table("Exponents of the seconds of each stage", ("in", *stages), rows)
    targets = {f"linear in {name}": exponents[name]["all"] <= LINEAR for name in ("documents", "metrics")}
    for name, met in targets.items():
        print(f"{name} (exponent <= {LINEAR:g}): {target_word(met)}")
    result = {"base": BASE, "passes": passes, "seconds": times, "exponents": exponents, "targets": targets}
    print(f"saved {save_result('scale-curves', result).name}")
    save_figure(scaling_picture(times, exponents), RESULTS / "scale-curves.png")
    return result


def _stages(size: dict[str, int], repeats: int, passes: int) -> dict[str, float]:
    """Median seconds of each stage."""
    queries = max(size["documents"] // DOCUMENTS_PER_LIST, size["metrics"])
    data, valid = generate(Shape(size["documents"], queries, size["features"]))
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="lgmml-scale-") as folder:
            found = train(data, valid, folder=Path(folder), metrics=size["metrics"], passes=passes).stages
        runs.append({**found.seconds, "all": found.total})
    middle = {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
    print(size, {stage: round(seconds, 2) for stage, seconds in middle.items()}, flush=True)
    return middle


def _stage_names(points: dict[int, dict[str, float]]) -> list[str]:
    return list(next(iter(points.values())))


DEFAULTS: dict[str, Any] = {
    "shape": "web10k", "fraction": 1.0, "metrics": 500, "passes": 20, "dtype": "float32", "threads": 2, "seed": 0,
}  # fmt: skip
LIMITS = {"web10k": {"seconds": 360.0, "gib": 6.0}, "web30k": {"gib": 10.0}}
GEMM_SHARE = 0.7
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PROBE_ROWS = 8192


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Generate the set, train, and say how long it took and what it needed."""
    shape = SHAPES[settings["shape"]].part(settings["fraction"])
    start = time.perf_counter()
    data, valid = generate(shape, seed=settings["seed"])
    generated = time.perf_counter() - start
    with tempfile.TemporaryDirectory(prefix="lgmml-scale-") as folder:
        trained = train(
            data,
            valid,
            folder=Path(folder),
            metrics=settings["metrics"],
            passes=settings["passes"],
            dtype=DTYPES[settings["dtype"]],
            seed=settings["seed"],
        )
        most = peak()
    kernel = kernel_rate(trained.model, data.features[:PROBE_ROWS])
    entries = shape.documents * trained.model.metrics.num_metrics
    result = {
        "settings": settings,
        "shape": asdict(shape),
        "metrics": trained.model.metrics.num_metrics,
        "generated_seconds": generated,
        "seconds": trained.stages.seconds,
        "cpu_seconds": trained.stages.cpu_seconds,
        "training_seconds": trained.stages.total,
        "memory_gib": trained.stages.memory,
        "peak_resident_gib": most,
        "distance_file_gib": entries * DTYPES[settings["dtype"]].itemsize / GIB,
        "distances_per_second": entries / trained.stages.seconds["distances"],
        "list_entries_per_second": entries * settings["passes"] / trained.stages.seconds["weights"],
        "kernel": kernel,
        "valid_ndcg@10": trained.valid_ndcg,
        "seconds_at_pass": trained.seconds_at,
        "bank": {name: value for name, value in trained.bank.items() if name != "regions"},
    }
    return {**result, "targets": targets(settings, result)}


def kernel_rate(model: LGMML, rows: torch.Tensor) -> dict[str, float]:
    """Rate of the distance kernel on real rows and metrics, in operations of the plain form, against one GEMM."""
    (block,) = model.metrics.iter_blocks()
    features = model.preprocess(rows, torch.tensor([0, len(rows)]))
    out = torch.empty(len(rows), block.num_metrics)
    A, B = (torch.randn(2048, 2048, generator=torch.Generator().manual_seed(i)) for i in range(2))
    times = time_interleaved(
        {"gemm": lambda: A @ B, "distances": lambda: block.distances(features, norm=model.metrics.norm, out=out)},
        rounds=5,
    )
    gemm = 2 * 2048**3 / times["gemm"].median
    ours = 2 * out.numel() * block.factors[0].numel() / times["distances"].median
    return {"gemm_gflops": gemm / 1e9, "plain_form_gflops": ours / 1e9, "share_of_gemm": ours / gemm}


def targets(settings: dict[str, Any], result: dict[str, Any]) -> dict[str, bool]:
    """Which targets were met; those of a shape hold for the whole of it on an idle machine only."""
    found = {"kernel at 70% of GEMM": result["kernel"]["share_of_gemm"] >= GEMM_SHARE}
    limits = LIMITS.get(settings["shape"], {}) if settings["fraction"] == 1 else {}
    if "seconds" in limits:
        found[f"training below {limits['seconds']:.0f} s"] = result["training_seconds"] < limits["seconds"]
    if "gib" in limits:
        found[f"peak below {limits['gib']:g} GiB"] = result["peak_resident_gib"] < limits["gib"]
    return found


def show(result: dict[str, Any]) -> None:
    """Print the stages and the targets."""
    rows: list[tuple[object, ...]] = [
        (name, seconds, result["cpu_seconds"][name], *(result["memory_gib"][name][k] for k in ("anonymous", "mapped")))
        for name, seconds in result["seconds"].items()
    ]
    rows.append(("all", result["training_seconds"], sum(result["cpu_seconds"].values()), "", ""))
    shape = result["shape"]
    title = f"Training on {shape['documents']:,} x {shape['features']} documents, {result['metrics']} metrics"
    print_table(title, ("stage", "seconds", "CPU seconds", "own GiB", "mapped GiB"), rows)
    print(f"peak resident memory, mapped distances included: {result['peak_resident_gib']:.2f} GiB")
    rate = result["kernel"]
    print(f"distance kernel: {rate['plain_form_gflops']:.0f} GFLOP/s of the plain form, GEMM {rate['gemm_gflops']:.0f}")
    best = max(result["valid_ndcg@10"].values())
    print(f"validation NDCG@10: {result['valid_ndcg@10'][0]:.4f} at first, {best:.4f} at best")
    for name, met in result["targets"].items():
        print(f"{name}: {target_word(met)}")


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["curves"]:
        settings = parse(words[1:], {"threads": 2, "repeats": 2, "passes": 5}, __doc__)
        torch.set_num_threads(settings["threads"])
        curves(settings["repeats"], settings["passes"])
        return
    settings = parse(words, DEFAULTS, __doc__, choices={"shape": SHAPES, "dtype": DTYPES})
    torch.set_num_threads(settings["threads"])
    result = run(settings)
    show(result)
    whole = settings["fraction"] == 1
    name = f"scale-{settings['shape']}" + ("" if whole else f"-{settings['fraction']:g}")
    name += "" if settings["dtype"] == "float32" else f"-{settings['dtype']}"
    print(f"saved {save_result(name, result).name}")
    save_figure(stages_picture({name: result["seconds"]}), RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
