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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lgmml_torch.models.ranker import LGMML
from lgmml_torch.plots import save_figure
from research.plots import scaling_picture, stages_picture
from research.speed.harness import GIB, RESULTS, parse, peak, print_table, save_result, time_interleaved, verdict
from research.speed.pipeline import SHAPES, Shape, generate, train

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
        name: {stage: _exponent({v: found[stage] for v, found in points.items()}) for stage in [*_stage_names(points)]}
        for name, points in times.items()
    }
    stages = list(exponents["documents"])
    rows = [(name, *(exponents[name][stage] for stage in stages)) for name in GRID]
    print_table("Exponents of the seconds of each stage", ("in", *stages), rows)
    targets = {f"linear in {name}": exponents[name]["all"] <= LINEAR for name in ("documents", "metrics")}
    for name, met in targets.items():
        print(f"{name} (exponent <= {LINEAR:g}): {verdict(met)}")
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


def _exponent(points: dict[int, float]) -> float:
    """Slope of log seconds over log size, by least squares."""
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


DEFAULTS: dict[str, Any] = {
    "shape": "web10k", "fraction": 1.0, "metrics": 500, "passes": 20, "dtype": "float32", "threads": 2, "seed": 0,
}  # fmt: skip
LIMITS = {"web10k": {"seconds": 360.0, "gib": 6.0}, "web30k": {"gib": 10.0}}
GEMM_SHARE = 0.7
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
            dtype=getattr(torch, settings["dtype"]),
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
        "distance_file_gib": entries * getattr(torch, settings["dtype"]).itemsize / GIB,
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
        print(f"{name}: {verdict(met)}")


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["curves"]:
        settings = parse(words[1:], {"threads": 2, "repeats": 2, "passes": 5}, __doc__)
        torch.set_num_threads(settings["threads"])
        curves(settings["repeats"], settings["passes"])
        return
    settings = parse(words, DEFAULTS, __doc__, choices={"shape": SHAPES, "dtype": ("float32", "float16", "bfloat16")})
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
