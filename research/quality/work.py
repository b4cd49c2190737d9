"""The pieces of work of the quality benchmark: what validation chooses, fits and their test queries, times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lgmml_torch.functional.measures import mean_measure, rank_data
from lgmml_torch.ragged import RankingData
from research.compare import (
    MAIN_SEEDS,
    SYSTEMS,
    Fitted,
    Score,
    System,
    find_system,
    fit_bank,
    fit_published,
    fit_sampled_phi,
)
from research.protocol import NUM_FOLDS, Noise, RankingFold, ranking_fold
from research.quality.times import time_fold, time_growth
from research.store import Job, Record, Store
from research.systems.base import choose, grid_points

log = logging.getLogger(__name__)

SETS = ("mq2008", "ohsumed", "lgbm-rank", "mslr-sample")
COPIES = 2  # noise columns for each real one: three times as many features
TIMED_FOLDS = 3
GRID: dict[str, list[Any]] = {"num_leaves": [7, 15, 31], "learning_rate": [0.03, 0.1], "min_data_in_leaf": [5, 20, 50]}
# As many points: XGBoost bounds the Hessians of a leaf instead of its documents.
XGBOOST_GRID: dict[str, list[Any]] = {
    "num_leaves": [7, 15, 31], "learning_rate": [0.03, 0.1], "min_child_weight": [0.1, 1.0, 5.0]
}  # fmt: skip
SAMPLING = {"feature_fraction": 0.5, "bagging_fraction": 0.8, "bagging_freq": 1, "feature_pre_filter": False}
XGBOOST_SAMPLING = {"colsample_bynode": 0.5, "subsample": 0.8}
PATIENCE = 50  # trees without a better validation NDCG@10
SEARCH_EPOCHS, EPOCHS = 2, 30  # of the paper's Φ: to choose among nine settings in reasonable time, and then
PAPER_GRID = {"init": [1.0, 0.1, 10.0], "margin": [0.1, 0.01, 1.0]}
RATES = [0.001, 0.01, 0.1]

Point = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is run."""

    sets: tuple[str, ...] = SETS
    folds: tuple[int, ...] = tuple(range(NUM_FOLDS))
    seeds: int = MAIN_SEEDS  # at most; a system may have fewer
    systems: tuple[System, ...] = SYSTEMS
    quick: bool = False
    split: str = "test"

    def fits(self) -> Iterator[tuple[System, str, int, str | None, int]]:
        """Every fit, all of one seed before any of the next: what is cut short is seeds, not systems."""
        for seed in range(self.seeds):
            for system in self.systems:
                for noise in system.noises or (None,):
                    for name in self.sets:
                        for fold in self.folds if seed < system.seeds else ():
                            yield system, name, fold, noise, seed


# --- what is chosen on validation queries; a choice never looks at the test queries of its fold ---

Chosen = tuple[dict[str, Any], float]


def _best(points: Sequence[Point], fit: Callable[[Point], Fitted], fold: RankingFold, row: str) -> tuple[Point, float]:
    """The point with the best validation NDCG@10, the first of equals, and that NDCG."""

    def measured(point: Point) -> float:
        return mean_measure(fit(point).scores[row](fold.valid), fold.valid)

    return choose(points, measured, lambda value: value)


def lightgbm_options(point: Point) -> dict[str, Any]:
    """A point of the grid with the sampling and the number of trees all points share."""
    rounds = 500 if point["learning_rate"] < 0.05 else 300
    return {"params": {**SAMPLING, **point}, "num_rounds": rounds, "patience": PATIENCE}


def xgboost_options(point: Point) -> dict[str, Any]:
    """The same for XGBoost."""
    return {"params": {**XGBOOST_SAMPLING, **point}, "num_rounds": 500, "patience": PATIENCE}


def choose_trees(
    fold: RankingFold,
    quick: bool,
    *,
    name: str,
    options: Callable[[Point], dict[str, Any]] = lightgbm_options,
    grid: Mapping[str, Sequence[Any]] = GRID,
) -> Chosen:
    """Leaves, rate and smallest leaf of a tree system."""
    small = {key: values if key == "learning_rate" else values[-1:] for key, values in grid.items()}
    system = find_system(name)
    points = list(grid_points(**(small if quick else grid)))
    best, value = _best(points, lambda point: system.fit(fold, 0, options(point)), fold, name)
    return options(best), value


def published_options(point: Point, epochs: int) -> dict[str, Any]:
    """Overrides for one starting weight and margin; no epoch is chosen by validation."""
    search = [f"search.{key}=[{value}]" for key, value in point.items()]
    return {"overrides": [*search, f"trainer.max_epochs={epochs}", f"trainer.check_val_every_n_epoch={epochs}"]}


def choose_published(fold: RankingFold, quick: bool) -> Chosen:
    """Starting weight and margin by validation NDCG@10 under ``mean``; ``ones`` would not tell them apart."""
    bank = fit_bank(fold, ["experiment=paper"])
    points = list(grid_points(**PAPER_GRID))[: 2 if quick else None]
    best, value = _best(
        points,
        lambda point: fit_published(fold, 0, published_options(point, SEARCH_EPOCHS), bank=bank),
        fold,
        "published mean",
    )
    return published_options(best, EPOCHS), value


def choose_rate(fold: RankingFold, quick: bool, *, mode: str) -> Chosen:
    """The learning rate of Φ on the paper's metrics."""
    bank = fit_bank(fold, ["experiment=paper"])
    points = [{"overrides": [f"optimizer.lr={rate}"]} for rate in RATES]
    fit = partial(fit_sampled_phi, fold, 0, mode=mode, bank=bank)
    best, value = _best(points, fit, fold, f"sampled {mode}")
    return dict(best), value


Choice = Callable[[RankingFold, bool], Chosen]
CHOICES: Mapping[str, Choice] = {
    "lightgbm": partial(choose_trees, name="lightgbm"),
    "lightgbm+ranks": partial(choose_trees, name="lightgbm+ranks"),
    "xgboost": partial(choose_trees, name="xgboost", options=xgboost_options, grid=XGBOOST_GRID),
    "xgboost+ranks": partial(choose_trees, name="xgboost+ranks", options=xgboost_options, grid=XGBOOST_GRID),
    "published": choose_published,
    "sampled shared": partial(choose_rate, mode="shared"),
    "sampled amortized": partial(choose_rate, mode="amortized"),
}


# --- jobs ---


def choice_job(plan: Plan, choice: str, name: str, fold: int) -> Job:
    """What validation chooses for one fold: options for the system's fit, and the NDCG@10 they reached."""

    def make() -> Record:
        chosen, value = CHOICES[choice](ranking_fold(name, fold), plan.quick)
        log.info("%s, %s, fold %d: %s, %.4f on validation", choice, name, fold, chosen, value)
        return Record(info={"chosen": chosen, "valid": value})

    return Job("choice", {"choice": choice, "data": name, "fold": fold, "quick": plan.quick}, make)


def fit_job(store: Store, plan: Plan, system: System, name: str, fold: int, noise: str | None, seed: int) -> Job:
    """One fit and what it makes of the held-out queries."""

    def make() -> Record:
        chosen = store.get(choice_job(plan, system.choice, name, fold)).info["chosen"] if system.choice else {}
        data = ranking_fold(name, fold, noise=None if noise is None else Noise(noise, COPIES))
        start = time.process_time()
        found = system.fit(data, seed, chosen)
        seconds = time.process_time() - start
        values = score_all(found.scores, data.test if plan.split == "test" else data.valid)
        valid = {row: mean_measure(score(data.valid), data.valid) for row, score in found.scores.items()}
        log.info("%s, %s, fold %d, %s, seed %d: %.1f s", system.name, name, fold, noise or "clean", seed, seconds)
        return Record(values, {**found.info, "valid": valid, "fit seconds": seconds})

    settings = {"system": system.name, "data": name, "fold": fold, "noise": noise, "seed": seed, "quick": plan.quick}
    return Job(plan.split, settings, make)


def time_job(store: Store, plan: Plan, name: str, fold: int) -> Job:
    """Training and scoring times of one fold."""

    def make() -> Record:
        chosen = store.get(choice_job(plan, "lightgbm+ranks", name, fold)).info["chosen"]
        return Record(info=time_fold(ranking_fold(name, fold), chosen, rounds=1 if plan.quick else 2))

    return Job("time", {"data": name, "fold": fold, "quick": plan.quick}, make)


def growth_job() -> Job:
    """Training and scoring times as the documents grow."""
    return Job("time", {"data": "growth"}, lambda: Record(info=time_growth()))


def score_all(scores: Mapping[str, Score], data: RankingData) -> dict[str, list[float]]:
    """NDCG@10 of every query under every score; NaN where a query has no relevant document."""
    return {row: rank_data(score(data), data, metrics=["ndcg@10"])["ndcg@10"].tolist() for row, score in scores.items()}
