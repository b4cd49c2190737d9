"""Boosted trees: λ-MART and pointwise regression trees through LightGBM, and XGBoost's ranker.

All are grown tree by tree in one loop and stop early by validation NDCG@10 as this package defines it (queries without
a relevant document skipped, ties in the caller's order), not by the libraries' own, on labels of any kind. The rows are
those of the `RankingData`, so the order of the caller's rows does not matter. The packages are optional.
"""

from __future__ import annotations

import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError, check_positive, check_shape, require
from lgmml_torch.functional.measures import mean_measure, ndcg
from lgmml_torch.ragged import RankingData
from research.systems.base import RankingSystem, choose, fitted, grid_points

LIGHTGBM_MAX_ROWS = 10_000  # its lambdarank objective refuses longer lists
NEEDED = ("for this system", "trees")
COMMON: Mapping[str, Any] = MappingProxyType({"learning_rate": 0.1, "num_leaves": 31, "min_data_in_leaf": 20})


class Growth(ABC):
    """Trees that are grown one at a time: between two of them a caller may measure, use a clock, or stop."""

    def __init__(self, valid: RankingData | None) -> None:
        self.valid = valid

    def valid_ndcg(self) -> float:
        """NDCG@10 of the validation lists with all trees so far."""
        if self.valid is None:
            raise LGMMLError("`valid` must be given to measure validation NDCG@10")
        return mean_measure(torch.from_numpy(np.asarray(self._valid_scores(), dtype=np.float64)), self.valid)

    @abstractmethod
    def grow(self) -> None:
        """Add a tree."""

    @abstractmethod
    def _valid_scores(self) -> NDArray[Any]:
        """Scores of the validation rows, which the library sums up tree by tree."""

    @abstractmethod
    def predict(self, features: NDArray[Any], trees: int) -> Any:
        """Raw scores by the first so many trees."""

    def compiled(self, trees: int) -> Callable[[NDArray[Any]], Any] | None:
        """The same by a compiler of trees, on one thread; None where there is none."""
        return None


@dataclass(frozen=True)
class Grown:
    """What early stopping kept: the trees, how many of them count, and their validation NDCG@10."""

    growth: Growth
    trees: int
    valid_ndcg: float


class TreeRanker(RankingSystem):
    """What the tree systems share: a grid of parameters, early stopping by our NDCG@10, a seed, a number of threads.

    Args:
        params: parameters of the library, its sampling of rows and features among them; a list stands for several
            values, of which the best on validation is kept.
        num_rounds: at most this many trees.
        patience: stop after this many trees without a better validation NDCG@10 (queries without a relevant document
            skipped); None grows ``num_rounds`` trees and keeps them all.
        num_threads: threads of the library.
        seed: of the library's sampling.

    After ``fit``: ``chosen``, ``best_round`` (trees that are kept), ``valid_ndcg`` (NaN without validation lists).
    """

    def __init__(
        self,
        params: Mapping[str, Any] | None = None,
        *,
        num_rounds: int = 500,
        patience: int | None = 50,
        num_threads: int = 1,
        seed: int = 0,
    ) -> None:
        check_positive("num_rounds", num_rounds)
        if patience is not None:
            check_positive("patience", patience)
        check_positive("num_threads", num_threads)
        self.params = {**COMMON, **(params or {})}
        self.num_rounds, self.patience, self.num_threads, self.seed = num_rounds, patience, num_threads, seed

    def fit(self, train: RankingData, valid: RankingData | None = None) -> Self:
        """Grow trees on ``train`` until ``valid`` stops improving, for every point of the grid."""
        self._check(train, valid)
        self.chosen, best = choose(
            list(grid_points(**self.params)),
            lambda point: self._grow(self._start(train, valid, point), stops=valid is not None),
            None if valid is None else lambda found: found.valid_ndcg,
        )
        self.growth, self.best_round, self.valid_ndcg = best.growth, best.trees, best.valid_ndcg
        self.num_features = train.num_features
        return self

    def start(self, train: RankingData, valid: RankingData | None = None) -> Growth:
        """The library's data, binned, and no tree yet: for callers that grow trees themselves.

        Raises:
            LGMMLError: ``params`` is a grid.
        """
        points = list(grid_points(**self.params))
        if len(points) != 1:
            raise LGMMLError(f"`params` must be one combination of settings to start from, got {len(points)}")
        return self._start(train, valid, points[0])

    def score(self, data: RankingData) -> Tensor:
        """Raw scores of the best round."""
        growth: Growth = fitted(self, "growth")
        check_shape("features", data.features, (None, self.num_features))
        if not len(data.features):
            return torch.zeros(0, dtype=torch.float64)
        return torch.from_numpy(np.asarray(growth.predict(data.features.numpy(), self.best_round), dtype=np.float64))

    def _check(self, train: RankingData, valid: RankingData | None) -> None:
        if train.num_documents == 0:
            raise DataError("`train` must have documents, got none")
        if valid is None:
            if self.patience is not None:
                raise DataError("`valid` must be given for early stopping; `patience=None` does without")
            return
        check_shape("valid.features", valid.features, (None, train.num_features))
        if not bool(torch.isfinite(ndcg(torch.zeros_like(valid.labels), valid.labels, valid.offsets, k=10))):
            raise DataError("`valid` must have a query with a relevant document, which early stopping needs")

    def _grow(self, growth: Growth, *, stops: bool) -> Grown:
        if self.patience is None:
            for _ in range(self.num_rounds):
                growth.grow()
            return Grown(growth, self.num_rounds, growth.valid_ndcg() if stops else math.nan)
        best, kept = -math.inf, 0
        for trees in range(1, self.num_rounds + 1):
            growth.grow()
            value = growth.valid_ndcg()
            if value > best:
                best, kept = value, trees
            if trees - kept >= self.patience:
                break
        return Grown(growth, kept, best)

    @abstractmethod
    def _start(self, train: RankingData, valid: RankingData | None, point: Mapping[str, Any]) -> Growth:
        """The library's data and settings, without a tree."""


class _LightGBMGrowth(Growth):
    def __init__(self, booster: Any, valid: RankingData | None, threads: int) -> None:
        super().__init__(valid)
        self.booster, self.threads = booster, threads

    def grow(self) -> None:
        self.booster.update()

    def _valid_scores(self) -> NDArray[Any]:
        found: list[NDArray[Any]] = []

        def keep(scores: NDArray[Any], _: Any) -> tuple[str, float, bool]:
            found.append(scores)
            return "kept", 0.0, True

        self.booster.eval_valid(keep)  # hands out what it has summed; predicting would start again from the first tree
        return found[0]

    def predict(self, features: NDArray[Any], trees: int) -> Any:
        return self.booster.predict(features, num_iteration=trees, num_threads=self.threads)

    def compiled(self, trees: int) -> Callable[[NDArray[Any]], Any] | None:
        """By lleaves, where it is installed."""
        if find_spec("lleaves") is None:
            return None
        import lleaves

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trees.txt"
            self.booster.save_model(file, num_iteration=trees)
            model = lleaves.Model(str(file))
            model.compile()
        return partial(model.predict, n_jobs=1)


class _LightGBM(TreeRanker):
    objective: str

    def _labels(self, train: RankingData) -> tuple[NDArray[Any], dict[str, Any]]:
        """The labels LightGBM is given, and parameters that go with them."""
        return train.labels.double().numpy(), {}

    def _start(self, train: RankingData, valid: RankingData | None, point: Mapping[str, Any]) -> Growth:
        lightgbm = require("lightgbm", *NEEDED)
        labels, extra = self._labels(train)
        data = lightgbm.Dataset(train.features.numpy(), labels, group=train.sizes.numpy(), free_raw_data=False)
        params = {
            "objective": self.objective, "metric": "none", "seed": self.seed, "num_threads": self.num_threads,
            "verbosity": -1, "deterministic": True, "force_row_wise": True, **extra, **point,
        }  # fmt: skip
        booster = lightgbm.Booster(params, data)
        if valid is not None:
            unused = np.zeros(valid.num_documents)
            booster.add_valid(data.create_valid(valid.features.numpy(), unused, group=valid.sizes.numpy()), "valid")
        return _LightGBMGrowth(booster, valid, self.num_threads)


class LambdaMART(_LightGBM):
    """λ-MART: LightGBM's ``lambdarank``.

    LightGBM wants grades 0, 1, 2, …; any labels ≥ 0 are numbered in rising order and their gains 2^y − 1 passed on, so
    fractional labels keep their meaning. Early stopping is by this package's NDCG@10, which skips queries without a
    relevant document, where LightGBM's own counts them as 1.
    """

    name = "λ-MART"
    objective = "lambdarank"

    def _labels(self, train: RankingData) -> tuple[NDArray[Any], dict[str, Any]]:
        longest = int(train.sizes.max())
        if longest > LIGHTGBM_MAX_ROWS:
            raise DataError(f"`train` must not have more than {LIGHTGBM_MAX_ROWS} documents in a query, got {longest}")
        values, grades = np.unique(train.labels.double().numpy(), return_inverse=True)
        gains = label_gains(values)
        return grades, {"label_gain": gains.tolist()}


class GBRT(_LightGBM):
    """Pointwise regression trees on the labels: LightGBM's ``regression``."""

    name = "GBRT"
    objective = "regression"


class _XGBoostGrowth(Growth):
    def __init__(self, booster: Any, data: Any, valid: RankingData | None, held: Any) -> None:
        super().__init__(valid)
        self.booster, self.data, self.held, self.trees = booster, data, held, 0

    def grow(self) -> None:
        self.booster.update(self.data, self.trees)
        self.trees += 1

    def _valid_scores(self) -> NDArray[Any]:
        found: NDArray[Any] = self.booster.predict(self.held)
        return found

    def predict(self, features: NDArray[Any], trees: int) -> Any:
        return self.booster.inplace_predict(features, iteration_range=(0, trees))


class XGBoostRanker(TreeRanker):
    """XGBoost's ``rank:ndcg``, given gains 2^y − 1 in place of labels, so that fractions are not cut off."""

    name = "XGBoost"

    def _start(self, train: RankingData, valid: RankingData | None, point: Mapping[str, Any]) -> Growth:
        xgboost = require("xgboost", *NEEDED)
        # The smallest number of documents in a leaf has no counterpart: XGBoost bounds sums of Hessians instead.
        renamed = {"num_leaves": "max_leaves"}
        params = {
            "objective": "rank:ndcg", "ndcg_exp_gain": False, "tree_method": "hist", "grow_policy": "lossguide",
            "max_depth": 0, "seed": self.seed, "nthread": self.num_threads, "disable_default_eval_metric": 1,
            **{renamed.get(key, key): value for key, value in point.items() if key != "min_data_in_leaf"},
        }  # fmt: skip
        data = self._matrix(train, label_gains(train.labels.double().numpy()))
        held = None if valid is None else self._matrix(valid, np.zeros(valid.num_documents))
        booster = xgboost.Booster(params, [data] if held is None else [data, held])
        return _XGBoostGrowth(booster, data, valid, held)

    def _matrix(self, data: RankingData, labels: NDArray[Any]) -> Any:
        matrix = require("xgboost", *NEEDED).DMatrix(data.features.numpy(), labels, nthread=self.num_threads)
        matrix.set_group(data.sizes.numpy())
        return matrix


def label_gains(labels: NDArray[np.float64]) -> NDArray[np.float64]:
    """2^y − 1; negative labels, whose gain would be negative, are refused."""
    if len(labels) and float(labels.min()) < 0:
        raise LGMMLError(f"`labels` must be at least 0 for a gain of 2^y - 1, got {float(labels.min())}")
    return np.exp2(labels) - 1
