"""Scoring side by side with tree rankers of 5,000 trees: same documents, same cores, measured in turn.

Run with ``python -m research.speed.scoring``. Settings follow as ``name=value``:

    parts=all      all, or some of web,mq2008,mslr-sample
    fraction=0.1   of the WEB10K shape our model is trained on
    metrics=500    K
    trees=5000     of the tree rankers; leaves of single documents are allowed in growing them
    grow=10000     documents the tree rankers are grown on
    documents=8192 scored in each call
    rounds=5
    passes=5       of Φ over all lists, in training our model
    threads=1      cores
    draw=0         1: measure nothing, draw the pictures of the stored result again

On the WEB10K shape our K metrics have full rank; on MQ2008 and the MSLR sample there are as many metrics as usable
training queries. The real sets are looked for below LGMML_DATA and left out with a word when they are not there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lgmml_torch.checks import DataError
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.plots import save_figure
from lgmml_torch.ragged import RankingData
from research.plots import Figure
from research.protocol import ranking_fold
from research.speed.harness import RESULTS, parse, print_table, save_result, time_interleaved
from research.speed.plots import ratios_picture
from research.speed.race import FAST, TREES
from research.speed.scale import SHAPES, generate, train
from research.stats import target_word
from research.systems.trees import LambdaMART, TreeRanker, XGBoostRanker

DEFAULTS: dict[str, Any] = {
    "parts": "all", "fraction": 0.1, "metrics": 500, "trees": 5000, "grow": 10_000, "documents": 8192,
    "rounds": 5, "threads": 1, "passes": 5, "draw": False,
}  # fmt: skip
REAL = ("mq2008", "mslr-sample")
FASTER = {"web": 1.5, "mq2008": 10.0, "mslr-sample": 10.0}  # targets: times as fast as LightGBM


def measured(part: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One part: our model and the tree rankers, timed on the same documents."""
    if part == "web":
        data, valid = generate(SHAPES["web10k"].part(settings["fraction"]))
    else:
        fold = ranking_fold(part, 0)
        data, valid = fold.train, fold.valid
    with tempfile.TemporaryDirectory() as folder:
        model = train(data, valid, folder=Path(folder), metrics=settings["metrics"], passes=settings["passes"]).model
    found = compare(model, data, settings)
    found["met"] = found["lightgbm_over"]["ours, full rank"] >= FASTER[part]
    return found


def compare(model: LGMML, data: RankingData, settings: dict[str, Any]) -> dict[str, Any]:
    """Microseconds per document of all rankers, on the same documents."""
    some = data.select(torch.arange(_lists(data, settings["grow"])))
    print(f"growing {settings['trees']} trees on {some.num_documents} documents, twice", flush=True)
    options = {"num_rounds": settings["trees"], "patience": None, "num_threads": settings["threads"]}
    rankers: dict[str, TreeRanker] = {  # leaves of single documents are allowed, so that no tree stays small
        "LightGBM": LambdaMART({**TREES, **FAST, "min_data_in_leaf": 1}, **options),
        "XGBoost": XGBoostRanker({**TREES, "min_child_weight": 0.0}, **options),
    }
    growing = {}
    for name, ranker in rankers.items():
        start = time.perf_counter()
        ranker.fit(some)
        growing[name] = time.perf_counter() - start
    scored = data.select(torch.arange(_lists(data, settings["documents"])))
    calls: dict[str, Callable[[], object]] = {"ours, full rank": partial(model.score, scored)}
    for name, ranker in rankers.items():
        calls[f"{name}, {settings['trees']:,} trees"] = partial(ranker.score, scored)
    times = time_interleaved(calls, rounds=settings["rounds"])
    yardstick = times[f"LightGBM, {settings['trees']:,} trees"]
    return {
        "documents": scored.num_documents,
        "metrics": model.metrics.num_metrics,
        "features": data.num_features,
        "microseconds_per_document": {name: 1e6 * t.median / scored.num_documents for name, t in times.items()},
        "lightgbm_over": {name: yardstick.ratio(t) for name, t in times.items()},
        "growing_seconds": growing,
    }


def _lists(data: RankingData, documents: int) -> int:
    """How many lists hold about so many documents."""
    return max(1, int((data.offsets <= documents).sum()) - 1)


def show(name: str, found: dict[str, Any]) -> None:
    """Print one part."""
    times = found["microseconds_per_document"]
    rows = [(label, value, found["lightgbm_over"][label]) for label, value in times.items()]
    title = f"{name}: {found['metrics']} metrics, {found['features']} features"
    print_table(title, ("ranker", "µs/document", "LightGBM over it"), rows)
    print(f"target: {target_word(found['met'])}")


def picture(name: str, found: dict[str, Any]) -> Figure:
    """Microseconds of every ranker of one part."""
    title = f"{name}: {found['metrics']} local metrics, {found['features']} features"
    return ratios_picture(found["microseconds_per_document"], unit="µs per document", title=title)


def main() -> None:
    settings = parse(sys.argv[1:], DEFAULTS, __doc__)
    if settings.pop("draw"):
        stored = json.loads((RESULTS / "scoring.json").read_text())
        for part in ("web", *REAL):
            if part in stored:
                save_figure(picture(part, stored[part]), RESULTS / f"scoring-{part}.png", dpi=110)
        return
    torch.set_num_threads(settings["threads"])
    wanted = ("web", *REAL) if settings["parts"] == "all" else tuple(settings["parts"].split(","))
    result: dict[str, Any] = {"settings": settings}
    for part in wanted:
        try:
            result[part] = measured(part, settings)
        except DataError as error:
            print(f"{part} left out: {error}")
            continue
        show(part, result[part])
        save_figure(picture(part, result[part]), RESULTS / f"scoring-{part}.png", dpi=110)
    name = "scoring" if settings["parts"] == "all" else f"scoring-{'-'.join(wanted)}"
    print(f"saved {save_result(name, result).name}")


if __name__ == "__main__":
    main()
