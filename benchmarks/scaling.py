"""How training time grows with the number of documents, metrics and features."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, print_table, save_result, verdict
from benchmarks.pipeline import train
from benchmarks.shapes import Shape, generate
from lgmml_torch.plots import save_figure
from lgmml_torch.plots_benchmarks import scaling_picture

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
