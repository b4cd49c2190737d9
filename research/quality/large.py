"""How well unseen queries are ranked when there are many: sizes of one set, three draws of its training queries.

Run with ``python -m research.quality.large``; ``research/quality/large.md`` says what is selected where. Every fit is
stored when it is done, so a run that was stopped goes on, and several processes may share the work: each takes the next
piece that nobody has begun. ``--stage choices`` scores no test query; ``--stage default`` fits the default only;
``--stage report`` writes docs/large.md from what is stored and what earlier reports kept.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lgmml_torch.functional.measures import mean_measure
from research.compare import find_system
from research.protocol import NOISES, Noise, RankingFold, large_fold, noisy_ranking
from research.quality.work import PATIENCE, SAMPLING, XGBOOST_SAMPLING, Point, score_all
from research.store import Job, Record, Store

log = logging.getLogger("research.quality")

ROOT = Path(__file__).parent.parent.parent
SIZES: dict[str, tuple[int | None, ...]] = {"debian": (100, 500, 2000, None), "moby": (120, 500, 2000, None)}
SEEDS = 3  # the seed is the draw of the training queries, too
NOISY: dict[str, dict[int | None, tuple[str, ...]]] = {
    "debian": {500: NOISES, 2000: ("permuted",)}
}  # sizes and kinds of noise that are tried
MOST_TREES = 2000
LEAVES, RATES = (15, 31, 63, 127), (0.03, 0.05, 0.1, 0.2)
# What each setting may be, in the order of the stages; the leaves are tried once more at the end.
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "lightgbm": {"num_leaves": LEAVES, "min_data_in_leaf": (5, 20, 50, 100), "learning_rate": RATES},
    "xgboost": {"num_leaves": LEAVES, "min_child_weight": (0.1, 1.0, 5.0, 20.0), "learning_rate": RATES},
}
STARTS: dict[str, Point] = {
    "lightgbm": {"num_leaves": 31, "min_data_in_leaf": 20, "learning_rate": 0.1},
    "xgboost": {"num_leaves": 31, "min_child_weight": 1.0, "learning_rate": 0.1},
}
ALONE = {"debian": "", "moby": "+ranks"}  # the variant with all queries, for time: the former grid's at 2,000
SAMPLINGS = {"lightgbm": SAMPLING, "xgboost": XGBOOST_SAMPLING}


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


def tree_options(name: str, point: Point) -> dict[str, Any]:
    """Settings of a tree system, with the sampling and the number of trees that all of them share."""
    family = name.partition("+")[0]
    return {"params": {**SAMPLINGS[family], **point}, "num_rounds": MOST_TREES, "patience": PATIENCE}


# --- what is chosen on validation queries of draw 0 ---


def point_job(place: Place, name: str, point: Point) -> Job:
    """One fit of a tree system: its validation NDCG@10."""

    def make() -> Record:
        fold = place.fold()
        start = time.process_time()
        found = find_system(name).fit(fold, 0, tree_options(name, point))
        seconds = time.process_time() - start
        value = mean_measure(found.scores[name](fold.valid), fold.valid)
        log.info("%s, %s: %.4f on validation, %d trees", name, dict(point), value, found.info["trees"])
        return Record(info={"valid": value, "trees": found.info["trees"], "fit seconds": seconds})

    return Job("point", {"system": name, **place.settings, **point}, make)


def search_job(store: Store, place: Place, name: str) -> Job:
    """One setting after the other, each from the best so far: what is chosen, and what it was chosen from."""

    def make() -> Record:
        family = name.partition("+")[0]
        point, tried = STARTS[family], []
        grid = {setting: values if place.queries else values[1:] for setting, values in GRIDS[family].items()}
        for setting in (*grid, "num_leaves"):
            points = [{**point, setting: value} for value in grid[setting]]
            found = [(store.get(point_job(place, name, one)).info, one) for one in points]
            tried += [{**one, **info} for info, one in found if {**one, **info} not in tried]
            point = max(found, key=lambda pair: pair[0]["valid"])[1]
        return Record(info={"chosen": point, "valid": max(one["valid"] for one in tried), "tried": tried})

    return Job("search", {"system": name, **place.settings}, make)


def variants(data: str, queries: int | None, family: str) -> tuple[str, ...]:
    """Without and with list ranks; with all queries one of them."""
    return (family, f"{family}+ranks") if queries else (family + ALONE[data],)


def better(store: Store, data: str, queries: int | None, family: str) -> tuple[str, Point]:
    """The variant that validation prefers, and its settings."""
    tried = variants(data, queries, family)
    searched = {name: store.get(search_job(store, Place(data, queries), name)).info for name in tried}
    name = max(searched, key=lambda name: searched[name]["valid"])
    return name, searched[name]["chosen"]


def choices(store: Store, data: str, queries: int | None, family: str) -> list[Job]:
    """All that is selected for one family of trees at one size."""
    return [search_job(store, Place(data, queries), name) for name in variants(data, queries, family)]


# --- fits whose test queries are scored ---


def fit_job(place: Place, name: str, seed: int, point: Point | None = None) -> Job:
    """One fit, and what it makes of the test queries; ``point`` holds the settings of trees."""

    def make() -> Record:
        fold = place.fold()
        start = time.process_time()
        options: Mapping[str, Any] = {"trees": place.noise is None} if point is None else tree_options(name, point)
        found = find_system(name).fit(fold, seed, options)
        seconds = time.process_time() - start - found.info.get("trees seconds", 0.0)
        row = next(iter(found.scores))
        scores = {name: found.scores[row], **{each: score for each, score in found.scores.items() if each != row}}
        values = score_all(scores, fold.test)
        valid = mean_measure(found.scores[row](fold.valid), fold.valid)
        return Record(values, {**found.info, "valid": valid, "fit seconds": seconds})

    return Job("large", {"system": name, **place.settings, **(point or {}), "seed": seed}, make)


def fits(
    store: Store, data: str, queries: int | None, family: str, seeds: Sequence[int], noise: str | None = None
) -> Iterator[Job]:
    """Of one system at one size: the default, or the better variant of a family of trees."""
    name, point = ("default", None) if family == "default" else better(store, data, queries, family)
    for seed in seeds:
        yield fit_job(Place(data, queries, 0 if queries is None else seed, noise), name, seed, point)


def share(store: Store, data: str, queries: int | None, family: str, args: argparse.Namespace) -> None:
    """Everything a stage does with one system at one size; what is selected comes first."""
    if family != "default":
        store.share(choices(store, data, queries, family))
    if args.stage == "choices":
        return
    kinds = NOISY.get(data, {}).get(queries, ()) if args.stage == "noise" else ()
    for noise in (None, *kinds):
        store.share(fits(store, data, queries, family, args.seeds, noise))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m research.quality.large", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--sets", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--sizes", nargs="+", help="numbers of training queries, or all (default: every size)")
    parser.add_argument("--systems", nargs="+", choices=("default", *GRIDS), default=("default", "lightgbm"))
    parser.add_argument("--seeds", nargs="+", type=int, default=range(SEEDS), help="of the fits (default: all)")
    parser.add_argument("--stage", choices=("choices", "default", "all", "noise", "report"), default="all")
    parser.add_argument("--out", type=Path, default=ROOT, help="root for research/results and docs")
    parser.add_argument("--store", type=Path, help="where finished fits are kept (default: outputs/quality)")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)
    store = Store(args.store or ROOT / "outputs" / "quality")
    if args.stage == "report":
        from research.quality.large_report import write_page  # it needs this module

        write_page(store, root=args.out)
        return
    families = ("default",) if args.stage == "default" else args.systems
    for data in args.sets:
        sizes = [size for size in SIZES[data] if args.sizes is None or str(size or "all") in args.sizes]
        for queries in sizes:
            for family in families:
                share(store, data, queries, family, args)


if __name__ == "__main__":
    main()
