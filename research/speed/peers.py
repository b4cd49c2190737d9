"""Tree rankers for side-by-side runs: grown for a number of trees, or until a validation NDCG is reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightgbm
import numpy as np
import torch
import xgboost
from numpy.typing import NDArray

from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.ragged import RankingData

LEAVES = 31  # the default of LightGBM; the fewer, the faster trees are
RATE = 0.05
Predict = Callable[[NDArray[np.float32]], Any]


@dataclass
class Grown:
    """A tree ranker: scores of raw features, how many trees, and how long they took to grow."""

    predict: Predict
    trees: int
    seconds: float


def lightgbm_ranker(data: RankingData, trees: int, *, threads: int, leaves: int = LEAVES) -> Grown:
    """``lambdarank`` with so many trees; leaves of single documents are allowed, so that no tree stays small."""
    rows = lightgbm.Dataset(data.features.numpy(), data.labels.numpy(), group=data.sizes.numpy())
    start = time.perf_counter()
    model = lightgbm.train({**_lightgbm_settings(threads, leaves), "min_data_in_leaf": 1}, rows, trees)
    seconds = time.perf_counter() - start
    return Grown(lambda x: model.predict(x, num_threads=threads), model.num_trees(), seconds)


def xgboost_ranker(data: RankingData, trees: int, *, threads: int) -> Grown:
    """``rank:ndcg`` with so many trees of as many leaves; leaves of single documents are allowed."""
    rows = _xgboost_rows(data, threads)
    start = time.perf_counter()
    model = xgboost.train({**_xgboost_settings(threads), "min_child_weight": 0.0}, rows, trees)
    return Grown(model.inplace_predict, model.num_boosted_rounds(), time.perf_counter() - start)


def xgboost_rate(data: RankingData, trees: int, *, threads: int) -> tuple[float, float]:
    """Seconds of reading and binning, with the first tree, and trees per second after it."""
    start = time.perf_counter()
    booster = xgboost.Booster(_xgboost_settings(threads), [rows := _xgboost_rows(data, threads)])
    booster.update(rows, 0)
    construction = time.perf_counter() - start
    start = time.perf_counter()
    for tree in range(1, trees + 1):
        booster.update(rows, tree)
    return construction, trees / (time.perf_counter() - start)


@dataclass
class Race:
    """How a growing LightGBM ranker did on the validation lists."""

    trees: int = 0
    seconds: float = 0.0  # growing, without evaluation
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
    rows = lightgbm.Dataset(train.features.numpy(), train.labels.numpy(), group=train.sizes.numpy(), params={
        "num_threads": threads, "verbosity": -1})  # fmt: skip
    booster = lightgbm.Booster({**_lightgbm_settings(threads, LEAVES), "min_data_in_leaf": 20}, rows)
    race.construction_seconds = time.perf_counter() - start
    scores = np.zeros(valid.num_documents)
    while race.trees < at_most and (race.reached_at is None or race.trees < at_least):
        start = time.perf_counter()
        booster.update()
        race.seconds += time.perf_counter() - start
        scores += booster.predict(
            valid.features.numpy(), start_iteration=race.trees, num_iteration=1, num_threads=threads, raw_score=True
        )
        race.trees += 1
        value = mean_ndcg(torch.from_numpy(scores), valid)
        race.curve[race.trees] = value
        if race.reached_at is None and value >= goal:
            race.reached_at = {"trees": race.trees, "seconds": race.construction_seconds + race.seconds}
    return race


def _xgboost_rows(data: RankingData, threads: int) -> xgboost.DMatrix:
    rows = xgboost.DMatrix(data.features.numpy(), data.labels.numpy(), nthread=threads)
    rows.set_group(data.sizes.numpy())
    return rows


def _xgboost_settings(threads: int) -> dict[str, Any]:
    return {
        "objective": "rank:ndcg", "tree_method": "hist", "grow_policy": "lossguide", "max_leaves": LEAVES,
        "max_depth": 0, "eta": RATE, "nthread": threads, "disable_default_eval_metric": 1,
    }  # fmt: skip


def _lightgbm_settings(threads: int, leaves: int) -> dict[str, Any]:
    return {
        "objective": "lambdarank", "metric": "none", "num_leaves": leaves, "learning_rate": RATE,
        "num_threads": threads, "verbosity": -1, "seed": 1,
    }  # fmt: skip
