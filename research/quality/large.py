"""How well unseen queries are ranked when there are many: sizes of one set, three draws of its training queries.

Run with ``python -m research.quality.large``; ``research/quality/large.md`` says what is selected where. Every fit is
stored when it is done, so a run that was stopped goes on, and several processes may share the work: each takes the next
piece that nobody has begun. ``--stage choices`` scores no test query;
``--stage report`` writes docs/large.md from what is stored.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lgmml_torch.functional.measures import mean_measure
from research.compare import find_system
from research.protocol import NOISES, Noise, RankingFold, large_fold, noisy_ranking
from research.quality.work import GRID, lightgbm_options, score_all
from research.store import Job, Record, Store
from research.systems.base import grid_points

log = logging.getLogger("research.quality")

ROOT = Path(__file__).parent.parent.parent
FIGURES = ROOT / "research" / "results" / "quality-large.json"
SIZES: dict[str, tuple[int | None, ...]] = {"debian": (500, 2000, None), "moby": (500, 2000, None)}
TREES = ("lightgbm", "lightgbm+ranks")
SEEDS = 3  # the seed is the draw of the training queries, too
NOISY: dict[str, dict[int | None, tuple[str, ...]]] = {
    "debian": {500: NOISES, 2000: ("permuted",)}
}  # sizes and kinds of noise that are tried
SHORTLISTS = (8, 4)  # points of the grid that are tried again with more queries: the best of the next smaller size


@dataclass(frozen=True)
class Place:
    """A set, how many of its training queries, and which; perhaps with two columns of noise for each feature."""

    data: str
    queries: int | None
    draw: int = 0
    noise: str | None = None

    def fold(self) -> RankingFold:
        """Its lists; all of the training queries can be drawn in one way only."""
        fold = large_fold(self.data, self.queries, 0 if self.queries is None else self.draw)
        return fold if self.noise is None else noisy_ranking(fold, Noise(self.noise, 2), seed=100 + self.draw)

    @property
    def settings(self) -> dict[str, Any]:
        """For the store."""
        noise = {} if self.noise is None else {"noise": self.noise}
        return {"data": self.data, "queries": self.queries or "all", "draw": self.draw, **noise}


def point_job(place: Place, name: str, point: dict[str, Any]) -> Job:
    """One point of the grid of a tree system: its validation NDCG@10."""

    def make() -> Record:
        fold = place.fold()
        start = time.process_time()
        found = find_system(name).fit(fold, 0, lightgbm_options(point))
        seconds = time.process_time() - start
        value = mean_measure(found.scores[name](fold.valid), fold.valid)
        return Record(info={"valid": value, "trees": found.info["trees"], "fit seconds": seconds})

    return Job("point", {"system": name, **place.settings, **point}, make)


def points(store: Store, data: str, queries: int | None, name: str) -> list[dict[str, Any]]:
    """The points to try: the whole grid at the smallest size, then the best of the next smaller one."""
    place = SIZES[data].index(queries)
    if place == 0:
        return list(grid_points(**GRID))
    smaller = SIZES[data][place - 1]
    before = points(store, data, smaller, name)
    ranked = sorted(before, key=lambda point: -_value(store, Place(data, smaller), name, point))
    return ranked[: SHORTLISTS[place - 1]]


def _value(store: Store, place: Place, name: str, point: dict[str, Any]) -> float:
    value: float = store.get(point_job(place, name, point)).info["valid"]
    return value


def kept_choice(data: str, queries: int | None) -> tuple[str, dict[str, Any]] | None:
    """What validation chose in an earlier run whose fits may be gone: the variant of LightGBM and its point."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.is_file() else {"sets": {}}
    found = figures["sets"].get(data, {}).get(str(queries or "all"))
    return None if found is None else (found["lightgbm"]["system"], found["lightgbm chosen"])


def chosen_point(store: Store, data: str, queries: int | None, name: str) -> dict[str, Any]:
    """The point with the best validation NDCG@10 of draw 0, the first of equals."""
    kept = kept_choice(data, queries)
    if kept is not None and kept[0] == name:
        return kept[1]
    place = Place(data, queries)
    return max(points(store, data, queries, name), key=lambda point: _value(store, place, name, point))


def better_trees(store: Store, data: str, queries: int | None) -> str:
    """LightGBM with or without list ranks, whichever validation prefers."""
    if (kept := kept_choice(data, queries)) is not None:
        return kept[0]
    tried = variants(store, data, queries)
    best = {name: _value(store, Place(data, queries), name, chosen_point(store, data, queries, name)) for name in tried}
    return max(tried, key=lambda name: best[name])


def fit_job(store: Store, place: Place, name: str, seed: int) -> Job:
    """One fit, and what it makes of the test queries."""

    def make() -> Record:
        fold = place.fold()
        options = lightgbm_options(chosen_point(store, place.data, place.queries, name)) if name in TREES else {}
        start = time.process_time()
        found = find_system(name).fit(fold, seed, options)
        seconds = time.process_time() - start
        row = next(iter(found.scores))
        values = score_all({name: found.scores[row]}, fold.test)
        valid = mean_measure(found.scores[row](fold.valid), fold.valid)
        return Record(values, {**found.info, "valid": valid, "fit seconds": seconds})

    return Job("large", {"system": name, **place.settings, "seed": seed}, make)


def choices(store: Store, data: str) -> Iterator[Job]:
    """All that is selected on validation queries, smaller sizes first."""
    for queries in SIZES[data]:
        for name in variants(store, data, queries) if kept_choice(data, queries) is None else ():
            for point in points(store, data, queries, name):
                yield point_job(Place(data, queries), name, point)


def variants(store: Store, data: str, queries: int | None) -> tuple[str, ...]:
    """LightGBM with and without list ranks; with all queries only what was better at the next smaller size."""
    return TREES if queries is not None else (better_trees(store, data, SIZES[data][-2]),)


def fits(store: Store, data: str, seeds: int = SEEDS, only: str | None = None) -> Iterator[Job]:
    """The default and the better LightGBM, a seed at a time."""
    for seed in range(seeds):
        for queries in SIZES[data]:
            yield from _both(store, Place(data, queries, 0 if queries is None else seed), seed, only)


def noisy_fits(store: Store, data: str, seeds: int = SEEDS, only: str | None = None) -> Iterator[Job]:
    """Both again where two thirds of the features mean nothing, with the settings chosen without noise."""
    for queries, kinds in NOISY.get(data, {}).items():
        for seed in range(seeds):
            for kind in (None, *kinds):  # without noise first: what the loss is measured from
                yield from _both(store, Place(data, queries, seed, kind), seed, only)


def _both(store: Store, place: Place, seed: int, only: str | None) -> Iterator[Job]:
    if only != "trees":
        yield fit_job(store, place, "default", seed)
    if only != "default":
        yield fit_job(store, place, better_trees(store, place.data, place.queries), seed)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m research.quality.large", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--sets", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--only", choices=("default", "trees"), help="fits of one side")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--stage", choices=("choices", "all", "noise", "report"), default="all")
    parser.add_argument("--out", type=Path, default=ROOT, help="root for research/results and docs")
    parser.add_argument("--store", type=Path, help="where finished fits are kept (default: outputs/quality)")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)
    store = Store(args.store or ROOT / "outputs" / "quality")
    for data in args.sets if args.stage != "report" else ():
        if args.only != "default":
            store.share(choices(store, data))
        if args.stage == "all":
            store.share(fits(store, data, args.seeds, args.only))
        if args.stage in ("all", "noise"):
            store.share(noisy_fits(store, data, args.seeds, args.only))
    if args.stage == "report":
        from research.quality.large_report import write_page  # it needs this module

        write_page(store, root=args.out)


if __name__ == "__main__":
    main()
