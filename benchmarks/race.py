"""Training side by side with LightGBM's lambdarank: time for 5,000 trees, and time to the same validation NDCG@10.

Run ``python -m benchmarks.scale shape=web10k`` first, then ``python -m benchmarks.race shape=web10k``; both with the
same fraction and threads. Our figures are read from the former's result; the trees are grown here, in a process of
their own. Settings follow as ``name=value``:

    shape=web10k   as in the other run
    fraction=1
    trees=200      at least so many are timed
    most=2000      at most so many are grown in search of our NDCG
    threads=2      cores

5,000 trees are projected from the trees per second measured, and labelled so.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from benchmarks.harness import RESULTS, machine_facts, print_table, save_result, verdict
from benchmarks.peers import lightgbm_race
from benchmarks.settings import parse
from benchmarks.shapes import SHAPES, generate
from lgmml_torch.plots import save_figure
from lgmml_torch.plots_benchmarks import ratios_picture

DEFAULTS: dict[str, Any] = {"shape": "web10k", "fraction": 1.0, "trees": 200, "most": 2000, "threads": 2}
PAPER_TREES = 5000
FASTER = 10.0


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Grow trees on the same lists and set the figures side by side."""
    name = f"scale-{settings['shape']}" + ("" if settings["fraction"] == 1 else f"-{settings['fraction']:g}")
    path = RESULTS / f"{name}.json"
    if not path.exists():
        sys.exit(f"{path.name} is not there: run python -m benchmarks.scale with the same shape and fraction first")
    ours = json.loads(path.read_text())
    if ours["settings"]["threads"] != settings["threads"]:
        sys.exit(f"{path.name} was measured with {ours['settings']['threads']} threads, not {settings['threads']}")
    train, valid = generate(SHAPES[settings["shape"]].part(settings["fraction"]), seed=ours["settings"]["seed"])
    goal = max(ours["valid_ndcg@10"].values())
    best = next(step for step, value in ours["valid_ndcg@10"].items() if value == goal)
    race = lightgbm_race(
        train, valid, goal, at_least=settings["trees"], at_most=settings["most"], threads=settings["threads"]
    )
    projected = race.construction_seconds + PAPER_TREES / race.trees_per_second
    faster = projected / ours["training_seconds"]
    return {
        "settings": settings,
        "ours": {
            "seconds": ours["training_seconds"],
            "valid_ndcg@10": goal,
            "seconds_to_best": ours["seconds_at_pass"][best],
            "machine": ours["machine"],
        },
        "lightgbm": {
            "trees": race.trees,
            "trees_per_second": race.trees_per_second,
            "construction_seconds": race.construction_seconds,
            "projected_seconds_5000_trees": projected,
            "reached_our_ndcg": race.reached_at,
            "valid_ndcg@10": race.curve,
        },
        "projected_over_ours": faster,
        "met": faster >= FASTER,
    }


def main() -> None:
    settings = parse(sys.argv[1:], DEFAULTS, __doc__, choices={"shape": SHAPES})
    torch.set_num_threads(settings["threads"])  # for generating and evaluating; and the result says so
    result = run(settings)
    ours, trees = result["ours"], result["lightgbm"]
    reached, grown = trees["reached_our_ndcg"], max(trees["valid_ndcg@10"].values())
    rows: list[tuple[object, ...]] = [
        ("ours, whole training", ours["seconds"], ours["valid_ndcg@10"]),
        ("ours, to its best NDCG", ours["seconds_to_best"], ours["valid_ndcg@10"]),
        (f"LightGBM, {PAPER_TREES:,} trees (projection)", trees["projected_seconds_5000_trees"], "-"),
        (f"LightGBM, {trees['trees']} trees", trees["trees"] / trees["trees_per_second"], grown),
        ("LightGBM, to our NDCG", reached["seconds"] if reached else "not reached", ours["valid_ndcg@10"]),
    ]  # fmt: skip
    print_table("Training", ("", "seconds", "valid NDCG@10"), rows)
    print(f"projected over ours: {result['projected_over_ours']:.1f}x, target {FASTER:g}x: {verdict(result['met'])}")
    if abs(ours["machine"]["load_1min"] - machine_facts()["load_1min"]) > 1:
        print("the two runs saw different loads: compare with care")
    name = f"race-{settings['shape']}" + ("" if settings["fraction"] == 1 else f"-{settings['fraction']:g}")
    print(f"saved {save_result(name, result).name}")
    bars = {"ours": ours["seconds"], "LightGBM, 5,000 trees (projection)": trees["projected_seconds_5000_trees"]}
    save_figure(ratios_picture(bars, unit="seconds of training"), RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
