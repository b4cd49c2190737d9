"""Training side by side with tree rankers: time for 5,000 trees, and time to the same validation NDCG@10.

Run with ``python -m research.speed.race``. It runs ``research.speed.scale`` first, in a process of its own, and then
grows trees on the same lists with as many threads, and boosts metrics as `train.py` does by default (before WARP).
Settings follow as ``name=value``:

    shape=web10k   of the generated set, see research/speed/scale.py
    fraction=1     of its lists
    trees=200      LightGBM: at least so many are timed
    most=2000      LightGBM: at most so many are grown in search of our NDCG
    xgboost=50     so many of its trees are timed; 0 leaves it out
    threads=2      cores
    draw=0         1: measure nothing, draw the picture of the stored result again

5,000 trees are projected from the trees per second measured, and labelled so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from lgmml_torch.fitting.boosted import fit_boosted
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.plots import save_figure
from lgmml_torch.ragged import RankingData
from research.plots import Figure
from research.protocol import RankingFold
from research.speed.harness import RESULTS, parse, print_table, save_result
from research.speed.plots import Heat, race_picture
from research.speed.scale import SHAPES, generate
from research.stats import target_word
from research.systems.trees import LambdaMART, XGBoostRanker

DEFAULTS: dict[str, Any] = {
    "shape": "web10k", "fraction": 1.0, "trees": 200, "most": 2000, "xgboost": 50, "threads": 2, "draw": False,
}  # fmt: skip
PAPER_TREES = 5000
FASTER = 10.0


TREES = {"num_leaves": 31, "learning_rate": 0.05}  # 31 is the default of LightGBM; the fewer, the faster trees are
FAST = {"deterministic": False, "force_row_wise": False}  # the library chooses how it reads the rows, as by default


@dataclass
class Race:
    """How a growing LightGBM ranker did on the validation lists."""

    trees: int = 0
    seconds: float = 0.0  # growing, with the sums of the validation lists' scores, without measuring their NDCG
    construction_seconds: float = 0.0  # binning the features, once
    reached_at: dict[str, float] | None = None  # trees and seconds when the goal was first met
    curve: dict[int, float] = field(default_factory=dict)

    @property
    def trees_per_second(self) -> float:
        """Over all trees grown."""
        return self.trees / self.seconds


def lightgbm_race(
    train: RankingData, valid: RankingData, goal: float, *, at_least: int, at_most: int, threads: int
) -> Race:
    """Grow ``lambdarank`` until validation NDCG@10 reaches the goal and enough trees have been timed."""
    race = Race()
    start = time.perf_counter()
    growth = LambdaMART({**TREES, **FAST}, num_threads=threads, seed=1).start(train, valid)
    race.construction_seconds = time.perf_counter() - start
    while race.trees < at_most and (race.reached_at is None or race.trees < at_least):
        start = time.perf_counter()
        growth.grow()
        race.seconds += time.perf_counter() - start
        race.trees += 1
        race.curve[race.trees] = growth.valid_ndcg()
        if race.reached_at is None and race.curve[race.trees] >= goal:
            race.reached_at = {"trees": race.trees, "seconds": race.construction_seconds + race.seconds}
    return race


def xgboost_rate(data: RankingData, trees: int, *, threads: int) -> tuple[float, float]:
    """Seconds of reading and binning, with the first tree, and trees per second after it."""
    start = time.perf_counter()
    growth = XGBoostRanker(TREES, num_threads=threads).start(data)
    growth.grow()
    construction = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(trees):
        growth.grow()
    return construction, trees / (time.perf_counter() - start)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Train ours, grow trees on the same lists and set the figures side by side."""
    ours = run_ours(settings)
    train, valid = generate(SHAPES[settings["shape"]].part(settings["fraction"]), seed=ours["settings"]["seed"])
    goal = max(ours["valid_ndcg@10"].values())
    best = next(step for step, value in ours["valid_ndcg@10"].items() if value == goal)
    race = lightgbm_race(
        train, valid, goal, at_least=settings["trees"], at_most=settings["most"], threads=settings["threads"]
    )
    projected = race.construction_seconds + PAPER_TREES / race.trees_per_second
    faster = projected / ours["training_seconds"]
    found = {
        "settings": settings,
        "ours": {
            "seconds": ours["training_seconds"],
            "valid_ndcg@10": goal,
            "seconds_to_best": ours["seconds_at_pass"][best],
            "seconds_at_pass": ours["seconds_at_pass"],
            "valid_ndcg@10_at_pass": ours["valid_ndcg@10"],
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
    found["boosted"] = run_boosted(train, valid)
    if settings["xgboost"]:
        construction, rate = xgboost_rate(train, settings["xgboost"], threads=settings["threads"])
        found["xgboost"] = {
            "trees": settings["xgboost"],
            "trees_per_second": rate,
            "construction_seconds": construction,
            "projected_seconds_5000_trees": construction + PAPER_TREES / rate,
        }
    return found


def run_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """The result of ``research.speed.scale`` with the same settings, measured now."""
    words = [f"{name}={settings[name]}" for name in ("shape", "fraction", "threads")]
    subprocess.run([sys.executable, "-m", "research.speed.scale", *words], check=True)
    found: dict[str, Any] = json.loads((RESULTS / f"scale-{label(settings)}.json").read_text())
    return found


def run_boosted(train: RankingData, valid: RankingData) -> dict[str, Any]:
    """The default's preprocessing and boosting, and what validation made of it."""
    start = time.perf_counter()
    seen = RankingFold(train, valid, valid).prepared(list_rank_features())
    bank = fit_boosted(seen.train, seen.valid)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "metrics": bank.metrics.num_metrics, "valid_ndcg@10": bank.history["best_valid_ndcg"]}


def label(settings: dict[str, Any]) -> str:
    """What results of these settings are called."""
    return str(settings["shape"]) + ("" if settings["fraction"] == 1 else f"-{settings['fraction']:g}")


def race_rows(result: dict[str, Any]) -> list[tuple[object, ...]]:
    """What, seconds, validation NDCG@10: ours, then the trees, reading and binning included."""
    ours, trees = result["ours"], result["lightgbm"]
    reached, grown = trees["reached_our_ndcg"], max(trees["valid_ndcg@10"].values())
    seconds = trees["construction_seconds"] + trees["trees"] / trees["trees_per_second"]
    rows: list[tuple[object, ...]] = [
        ("ours, sampled metrics, whole training", ours["seconds"], ours["valid_ndcg@10"]),
        (f"LightGBM, {PAPER_TREES:,} trees (projection)", trees["projected_seconds_5000_trees"], ""),
        (f"LightGBM, {trees['trees']} trees", seconds, grown),
        ("ours, sampled metrics, until their best NDCG", ours["seconds_to_best"], ours["valid_ndcg@10"]),
        ("LightGBM, until that NDCG", reached["seconds"] if reached else "not reached", ours["valid_ndcg@10"]),
    ]
    if "boosted" in result:
        boosted = result["boosted"]
        rows.insert(
            1, ("ours, boosted metrics (the default before WARP)", boosted["seconds"], boosted["valid_ndcg@10"])
        )
        later = seconds_until(trees, boosted["valid_ndcg@10"])
        rows.append(("LightGBM, until the boosted metrics' NDCG", later or "not reached", boosted["valid_ndcg@10"]))
    if "xgboost" in result:
        projected = result["xgboost"]["projected_seconds_5000_trees"]
        rows.insert(3, (f"XGBoost, {PAPER_TREES:,} trees (projection)", projected, ""))
    return rows


def seconds_until(trees: dict[str, Any], goal: float) -> float | None:
    """When LightGBM first reached the goal, by its mean trees per second; None when it did not."""
    enough = [int(number) for number, value in trees["valid_ndcg@10"].items() if value >= goal]
    return trees["construction_seconds"] + min(enough) / trees["trees_per_second"] if enough else None


def picture(result: dict[str, Any]) -> Figure:
    """NDCG over seconds of all who raced, the seconds they need for the same NDCG, and the paper's 5,000 trees."""
    ours, trees = result["ours"], result["lightgbm"]
    sampled, grown, many = "ours, sampled metrics", "LightGBM", f"{PAPER_TREES:,} trees"
    start, rate = trees["construction_seconds"], trees["trees_per_second"]
    passes = {seconds: ours["valid_ndcg@10_at_pass"][step] for step, seconds in ours["seconds_at_pass"].items()}
    measured = {
        f"{sampled}, {len(passes) - 1} passes of Φ": passes,
        f"{grown}, {trees['trees']} trees": {start + int(n) / rate: v for n, v in trees["valid_ndcg@10"].items()},
    }
    projected = {f"{grown}, {many}": trees["projected_seconds_5000_trees"]}
    if "xgboost" in result:
        projected[f"XGBoost, {many}"] = result["xgboost"]["projected_seconds_5000_trees"]
    goal, reached = ours["valid_ndcg@10"], trees["reached_our_ndcg"]
    heats = [
        Heat(f"NDCG@10 {goal:.3f},\nbest of ours, sampled",
             {sampled: ours["seconds_to_best"], grown: reached and reached["seconds"]}),
        Heat(f"the paper's measure:\nours, sampled, whole,\nand {many}", {sampled: ours["seconds"], **projected}),
    ]  # fmt: skip
    if "boosted" in result:
        label, boosted = "ours, boosted metrics", result["boosted"]
        measured[label] = {boosted["seconds"]: boosted["valid_ndcg@10"]}
        level = boosted["valid_ndcg@10"]
        text = f"NDCG@10 {level:.3f},\nours, boosted"
        heats.insert(1, Heat(text, {label: boosted["seconds"], grown: seconds_until(trees, level)}))
    return race_picture(measured, projected, heats)


def main() -> None:
    settings = parse(sys.argv[1:], DEFAULTS, __doc__, choices={"shape": SHAPES})
    name = f"race-{label(settings)}"
    if settings.pop("draw"):
        save_figure(picture(json.loads((RESULTS / f"{name}.json").read_text())), RESULTS / f"{name}.png", dpi=100)
        return
    torch.set_num_threads(settings["threads"])  # for generating and evaluating; and the result says so
    result = run(settings)
    print_table("Training", ("", "seconds", "validation NDCG@10"), race_rows(result))
    print(
        f"projected over ours: {result['projected_over_ours']:.1f}x, target {FASTER:g}x: {target_word(result['met'])}"
    )
    print(f"saved {save_result(name, result).name}")
    save_figure(picture(result), RESULTS / f"{name}.png", dpi=100)


if __name__ == "__main__":
    main()
