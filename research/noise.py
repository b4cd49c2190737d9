"""What features set aside in closed form are worth where two thirds of them mean nothing.

Run with ``python -m research.noise``; docs/robust.md has the protocol. Every fit is stored when it is done, so a run
that was stopped goes on. ``--stage report`` writes research/results/noise.json and noise-per-query.npz.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.functional.selection import FeatureSums, choose_features
from lgmml_torch.ragged import RankingData
from research.compare import find_system
from research.protocol import NOISES, Noise, RankingFold, large_fold, noisy_ranking, ranking_fold
from research.quality.work import SETS, lightgbm_options, score_all
from research.store import Job, Record, Store, to_json

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "research" / "results"
# Set, training queries, and LightGBM's settings without noise: of 500 queries of `debian` those that the first grid of
# `research.quality.large` chose, of the others those of its search.
LARGE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "debian": ("debian", 500, {"num_leaves": 31, "learning_rate": 0.03, "min_data_in_leaf": 5}),
    "debian-2000": ("debian", 2000, {"num_leaves": 127, "learning_rate": 0.1, "min_data_in_leaf": 100}),
    "moby": ("moby", 500, {"num_leaves": 15, "learning_rate": 0.05, "min_data_in_leaf": 100}),
}
SMALL_TREES = {"num_leaves": 15, "learning_rate": 0.1, "min_data_in_leaf": 20}  # the middle of the first grid
SEEDS = (0, 1, 2, 3, 4)  # the seed is the draw of the large set's training queries, and the fold of a small set
SYSTEMS = ("default", "lightgbm+ranks")
KINDS = ("clean", *NOISES)
CHOICES = ("all", "single", "auto")  # features: all, judged one by one, judged alone and in pairs


@dataclass(frozen=True)
class Trial:
    """A system on a set with noise, and how its features are chosen."""

    system: str
    data: str
    noise: str
    features: str
    seed: int

    def fold(self) -> RankingFold:
        """Its lists with the columns that stay."""
        if self.data in LARGE:
            name, queries, _ = LARGE[self.data]
            fold = large_fold(name, queries, self.seed)
        else:
            fold = ranking_fold(self.data, self.seed)
        if self.noise != "clean":
            fold = noisy_ranking(fold, Noise(self.noise, 2), seed=100 + self.seed)
        if self.features == "all":
            return fold
        kept = kept_columns(fold.train, paired=self.features == "auto")
        return fold.each(lambda part: part.replace(features=part.features[:, kept]))

    def job(self) -> Job:
        """One fit: validation NDCG@10, and that of every test query."""

        def make() -> Record:
            fold = self.fold()
            options: dict[str, Any] = {"overrides": ["features=all"]}  # the columns are chosen already
            if self.system != "default":
                options = lightgbm_options(LARGE[self.data][2] if self.data in LARGE else SMALL_TREES)
            start = time.process_time()
            found = find_system(self.system).fit(fold, self.seed, options)
            seconds = time.process_time() - start
            score = next(iter(found.scores.values()))
            values = score_all({self.system: score}, fold.test)
            facts = {"valid": mean_measure(score(fold.valid), fold.valid), "fit seconds": seconds}
            return Record(values, {**facts, "columns": fold.train.num_features})

        return Job("noise", {**vars(self)}, make)


def kept_columns(train: RankingData, *, paired: bool) -> torch.Tensor:  # (D',)
    """The features that stay."""
    sums = FeatureSums(train.num_features, train.num_queries, paired=paired)
    sums.add(train.features, train.labels, train.offsets)
    return choose_features(sums).kept


def trials(
    data: Sequence[str],
    systems: Sequence[str] = SYSTEMS,
    features: Sequence[str] = CHOICES,
    noises: Sequence[str] = KINDS,
    seeds: Sequence[int] = SEEDS,
) -> Iterator[Trial]:
    """A seed at a time; without noise first."""
    for seed in seeds:
        for name in data:
            for noise in noises:
                for system in systems:
                    for how in features:
                        yield Trial(system, name, noise, how, seed)


def write_results(store: Store) -> None:
    """Means in one file, test queries in another; what is not stored stays as it was reported before."""
    file, queries = RESULTS / "noise.json", RESULTS / "noise-per-query.npz"
    rows = {_key(row): row for row in json.loads(file.read_text(encoding="utf-8"))}
    values = dict(np.load(queries))
    for trial in trials((*LARGE, *SETS)):
        record = store.find(trial.job())
        if record is not None:
            rows[_key(vars(trial))] = {**vars(trial), **record.info, "test": record.mean(trial.system)}
            values[_key(vars(trial))] = record.tensor(trial.system).numpy().astype(np.float32)
    file.write_text(to_json(list(rows.values())), encoding="utf-8")
    np.savez_compressed(queries, **values)


def _key(row: Mapping[str, Any]) -> str:
    return "|".join(str(row[name.name]) for name in fields(Trial))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m research.noise", description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=(*LARGE, *SETS), default=[*LARGE, *SETS])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--features", nargs="+", choices=CHOICES, default=["all", "auto"])
    parser.add_argument("--noises", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument("--stage", choices=("fits", "report"), default="fits")
    parser.add_argument("--store", type=Path, default=ROOT / "outputs" / "noise")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    store = Store(args.store)
    if args.stage == "report":
        write_results(store)
        return
    store.share(trial.job() for trial in trials(args.sets, args.systems, args.features, args.noises, args.seeds))


if __name__ == "__main__":
    main()
