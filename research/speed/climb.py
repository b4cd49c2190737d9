"""Validation NDCG@10 over the CPU seconds of training, ours beside LightGBM, on a large set; memory and scoring too.

Run with ``python -m research.speed.climb``. Each side runs in a process of its own, one after the other.
Settings follow as ``name=value``:

    data=debian      or moby, or a generated shape of research/speed/scale.py: web10k, small …
    queries=0        of its training queries; 0: all
    threads=1        cores of either side
    leaves=31        LightGBM's, its learning rate, smallest leaf, list ranks (1) or not, and trees
    rate=0.1
    smallest=20
    ranks=0
    trees=300
    budget=normal    ours
    side=            internal: run one side and print what it found
    draw=0           1: measure nothing, draw the picture of the stored result again

Measuring NDCG after an epoch is part of our time, as it is in training; after a tree it is not counted. Scoring by
lleaves, which compiles LightGBM's trees, is measured where it is installed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.plots import save_figure
from research.compare import Score, Stopwatch, find_system, with_list_ranks
from research.plots import Line, Panel, lines_picture
from research.protocol import LARGE, RankingFold, large_fold
from research.quality.times import score_seconds
from research.quality.work import SAMPLING
from research.speed.harness import RESULTS, parse, print_table, save_result
from research.speed.scale import SHAPES, generate
from research.systems.trees import LambdaMART

DEFAULTS: dict[str, Any] = {
    "data": "debian", "queries": 0, "threads": 1, "leaves": 31, "rate": 0.1, "smallest": 20, "ranks": False,
    "trees": 300, "budget": "normal", "side": "", "draw": False,
}  # fmt: skip
SIDES = {"ours": "ours, the default", "trees": "LightGBM"}


def open_fold(name: str, queries: int | None) -> RankingFold:
    """A large set, or generated lists; there is no test part of those, and no use for one here."""
    if name not in SHAPES:
        return large_fold(name, queries)
    train, valid = generate(SHAPES[name])
    return RankingFold(train if queries is None else train.select(list(range(queries))), valid, valid)


Climbed = tuple[list[tuple[float, float]], Score, dict[str, Score]]  # the curve, the score, other ways to it


def climb_ours(fold: RankingFold, settings: dict[str, Any]) -> Climbed:
    """The default, and NDCG over seconds since the data was there."""
    watch, start = Stopwatch(), time.process_time()
    fitted = find_system("default").fit(fold, 0, {"overrides": [f"budget={settings['budget']}"], "watch": watch})
    return [(moment - start, value) for moment, value in watch.curve], fitted.scores["default"], {}


def climb_trees(fold: RankingFold, settings: dict[str, Any]) -> Climbed:
    """LightGBM with fixed settings, so many trees; the best of them score."""
    start = time.process_time()
    view = with_list_ranks if settings["ranks"] else lambda data: data
    train, valid = view(fold.train), view(fold.valid)
    params = {
        **SAMPLING, "num_leaves": settings["leaves"], "learning_rate": settings["rate"],
        "min_data_in_leaf": settings["smallest"],
    }  # fmt: skip
    growth = LambdaMART(params, num_threads=settings["threads"]).start(train, valid)
    curve, measuring = [], 0.0
    for _ in range(settings["trees"]):
        growth.grow()
        grown = time.process_time()
        curve.append((grown - start - measuring, growth.valid_ndcg()))
        measuring += time.process_time() - grown
    best = 1 + max(range(len(curve)), key=lambda place: curve[place][1])

    def by(predict: Callable[[Any], Any]) -> Score:
        return lambda data: torch.from_numpy(predict(view(data).features.numpy()))

    compiled = growth.compiled(best)
    return curve, by(partial(growth.predict, trees=best)), {} if compiled is None else {"lleaves": by(compiled)}


def run_side(settings: dict[str, Any]) -> dict[str, Any]:
    """One side, in this process."""
    torch.set_num_threads(settings["threads"])
    fold = open_fold(settings["data"], settings["queries"] or None)
    at_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    curve, score, others = (climb_ours if settings["side"] == "ours" else climb_trees)(fold, settings)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scoring = score_seconds(score, fold.valid) / fold.valid.num_documents
    return {
        "curve": curve, "seconds": curve[-1][0], "valid_ndcg@10": max(value for _, value in curve),
        "of the kept": mean_measure(score(fold.valid), fold.valid), "scoring_us_per_document": scoring * 1e6,
        "peak_mib": peak / 1024, "data_mib": at_start / 1024,
        **{
            f"{name}_us_per_document": score_seconds(other, fold.valid) / fold.valid.num_documents * 1e6
            for name, other in others.items()
        },
    }  # fmt: skip


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Both sides, one after the other, each in a process of its own."""
    found: dict[str, Any] = {"settings": settings}
    for name in SIDES:
        words = [f"{key}={int(value) if isinstance(value, bool) else value}" for key, value in settings.items()]
        command = [
            sys.executable,
            "-m",
            "research.speed.climb",
            *(w for w in words if w[:5] != "side="),
            f"side={name}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    goal = found["trees"]["valid_ndcg@10"]
    found["ours"]["seconds_to_lightgbms_best"] = _until(found["ours"]["curve"], goal)
    found["trees"]["seconds_to_our_best"] = _until(found["trees"]["curve"], found["ours"]["valid_ndcg@10"])
    found["training ratio"] = found["ours"]["seconds"] / found["trees"]["seconds"]
    found["scoring ratio"] = found["ours"]["scoring_us_per_document"] / found["trees"]["scoring_us_per_document"]
    return found


def _until(curve: list[tuple[float, float]], goal: float) -> float | None:
    return next((seconds for seconds, value in curve if value >= goal), None)


def picture(result: dict[str, Any]) -> Any:
    """Both curves; of many trees a dozen, evenly spaced in the logarithm."""
    lines = []
    for name, label in SIDES.items():
        curve = result[name]["curve"]
        places = (
            sorted({round(len(curve) ** (step / 11)) - 1 for step in range(12)})
            if len(curve) > 20
            else range(len(curve))
        )
        lines.append(Line(label, [curve[i][0] for i in places], [curve[i][1] for i in places]))
    return lines_picture([Panel(result["settings"]["data"], lines)], x="CPU seconds", y="NDCG@10")


def main() -> None:
    """The command line."""
    settings = parse(sys.argv[1:], DEFAULTS, __doc__, choices={"data": (*LARGE, *SHAPES)})
    if settings["side"]:
        print(json.dumps(run_side(settings)))
        return
    name = f"climb-{settings['data']}" + (f"-{settings['queries']}" if settings["queries"] else "")
    if settings.pop("draw"):
        save_figure(picture(json.loads((RESULTS / f"{name}.json").read_text())), RESULTS / f"{name}.png", dpi=110)
        return
    result = run(settings)
    rows = [
        (label, *(result[side][key] for key in ("seconds", "valid_ndcg@10", "scoring_us_per_document", "peak_mib")))
        for side, label in SIDES.items()
    ]
    print_table("Climb", ("", "CPU seconds", "validation NDCG@10", "scoring, µs per document", "peak MiB"), rows)
    print(f"training {result['training ratio']:.1f}x, scoring {result['scoring ratio']:.1f}x LightGBM's")
    print(f"saved {save_result(name, result).name}")
    save_figure(picture(result), RESULTS / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
