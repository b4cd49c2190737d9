"""Pieces of work that several experiments have in common: one system on one fold, fitted, timed and ranked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lgmml_torch.functional.measures import mean_measure, rank_data
from research.compare import EXAMPLE_SYSTEMS, NAMES, System, find_system
from research.protocol import ExampleFold, Noise, RankingFold, example_fold, noisy_examples, ranking_fold
from research.store import Job, Record, Store, quiet
from research.systems.base import ExampleSystem
from research.systems.gmml import LocationGMML
from research.systems.mlr import RMLR

RANKING_METRICS = ("ndcg@5", "ndcg@10", "ndcg@20", "map")


def example_job(
    cfg: Any,
    data: str,
    fold: int,
    system: str,
    options: dict[str, Any],
    *,
    noise: Noise | None = None,
    repeat: int = 0,
    **fold_options: Any,
) -> Job:
    """Fit one system on one fold of a query-by-example set; ``repeat`` does it again, for its time."""

    def make() -> Record:
        parts = example_fold(data, fold, cfg.data_dir, **fold_options)
        if noise is not None:
            parts = noisy_examples(parts, noise, seed=100 + fold)
        return retrieve_with(EXAMPLE_SYSTEMS[system][1](options, cfg.seed + fold), parts)

    settings = {"data": data, "fold": fold, "system": system, "options": options, **fold_options, "seed": cfg.seed}
    if noise is not None:
        settings |= {"noise": noise.kind, "times": noise.times}
    if repeat:
        settings["repeat"] = repeat
    return Job("examples", settings, make)


def ranking_job(
    cfg: Any, data: str, fold: int, system: str, options: Mapping[str, Any], seed: int, noise: Noise | None = None
) -> Job:
    """Fit one system on one fold, with or without features that mean nothing."""

    def make() -> Record:
        return rank_with(find_system(system), ranking_fold(data, fold, cfg.data_dir, noise=noise), options, seed)

    settings: dict[str, Any] = {
        "data": data, "fold": fold, "system": system, "options": dict(options), "seed": seed, "threads": cfg.threads,
    }  # fmt: skip
    if noise is not None:
        settings |= {"noise": noise.kind, "times": noise.times}
    return Job("ranking", settings, make)


def all_folds(
    cfg: Any, store: Store, data: str, system: str, folds: Sequence[int], noise: Noise | None = None
) -> list[list[Record]]:
    """Records by seed, then by fold."""
    options = dict(cfg.systems[system] or {})
    shown = "" if noise is None else f", {noise.times}x {noise.kind}"
    return [
        store.all(
            [ranking_job(cfg, data, fold, system, options, seed, noise) for fold in folds],
            f"{data}{shown}, {NAMES[system]}, seed {seed}",
        )
        for seed in cfg.seeds
    ]


def per_query(records: list[list[Record]], metric: str) -> Tensor:  # (Q,)
    """The values of all folds, averaged over seeds."""
    rows = [torch.cat([record.tensor(metric) for record in by_fold]) for by_fold in records]
    return torch.stack(rows).mean(0)


def flat(records: list[list[Record]]) -> list[Record]:
    """All records of all seeds."""
    return [record for by_fold in records for record in by_fold]


def rank_with(system: System, fold: RankingFold, options: Mapping[str, Any], seed: int, *, repeats: int = 3) -> Record:
    """Fit on the training lists, score the test lists; seconds for both."""
    started = time.perf_counter()
    found = system.fit(fold, seed, options)
    seconds = time.perf_counter() - started
    score, test = next(iter(found.scores.values())), fold.test
    values = rank_data(score(test), test, metrics=RANKING_METRICS)
    scoring = statistics.median(_timed(lambda: score(test)) for _ in range(repeats))
    info: dict[str, Any] = {
        **found.info, "seconds": seconds, "scoring seconds per document": scoring / max(1, test.num_documents),
        "documents": test.num_documents, "features": test.num_features,
        "training queries": fold.train.num_queries, "queries": [str(qid) for qid in test.qids],
    }  # fmt: skip
    if found.own is not None:
        info["ndcg@10 of training queries with their own Φ"] = mean_measure(found.own(fold.train), fold.train)
    return Record({name: row.tolist() for name, row in values.items()}, info)


def retrieve_with(system: ExampleSystem, fold: ExampleFold) -> Record:
    """Fit on the database's own items, rank the database for the test queries."""
    with quiet("research.systems"):
        seconds = _timed(lambda: system.fit(fold.train, fold.valid))
    values = system.evaluate(fold.test)
    info: dict[str, Any] = {
        "seconds": seconds, "chosen": dict(system.chosen), "database": len(fold.train.database),
        "features": fold.train.database.shape[1], "training queries": fold.train.num_queries,
    }  # fmt: skip
    if isinstance(system, RMLR):
        info |= {"cut": system.cut, "converged": system.result.converged, "rounds": len(system.result.history)}
    if isinstance(system, LocationGMML):
        info |= {"metrics": system.num_regions_used, "validation map": system.bank.valid_map}
    return Record({name: row.tolist() for name, row in values.items()}, info)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
