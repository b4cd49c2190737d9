"""Boosted trees: λ-MART and pointwise regression trees through LightGBM, and XGBoost's ranker.

All stop early on validation NDCG@10 as this package defines it, on labels of any kind. The packages are optional.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.baselines.base import RankingSystem, choose, fitted, grid_points
from lgmml_torch.checks import DataError, LGMMLError, MissingDependencyError, check_positive, check_shape
from lgmml_torch.functional.ranking.measures import mean_ndcg, ndcg
from lgmml_torch.ragged import RankingData

LIGHTGBM_MAX_ROWS = 10_000  # its lambdarank objective refuses longer lists
COMMON: Mapping[str, Any] = MappingProxyType({"learning_rate": 0.1, "num_leaves": 31, "min_data_in_leaf": 20})


def require(package: str) -> Any:
    """Import an optional package, or say which extra brings it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"`{package}` is needed for this system; install it with: pip install 'lgmml-torch[trees]'"
        ) from error


class TreeRanker(RankingSystem):
    """What the tree systems share: a grid of parameters, early stopping, a seed and a number of threads.

    Args:
        params: parameters of the library; a list stands for several values, the best on validation is kept.
        num_rounds: at most this many trees.
        patience: stop after this many trees without a better validation NDCG@10.
        num_threads: threads of the library.
        seed: of the library's sampling.

    After ``fit``: ``chosen``, ``model``, ``best_round``, ``valid_ndcg``.
    """

    def __init__(
        self,
        params: Mapping[str, Any] | None = None,
        *,
        num_rounds: int = 500,
        patience: int = 50,
        num_threads: int = 1,
        seed: int = 0,
    ) -> None:
        check_positive("num_rounds", num_rounds)
        check_positive("patience", patience)
        check_positive("num_threads", num_threads)
        self.params = {**COMMON, **(params or {})}
        self.num_rounds, self.patience, self.num_threads, self.seed = num_rounds, patience, num_threads, seed

    def fit(self, train: RankingData, valid: RankingData) -> Self:
        """Grow trees on ``train`` until ``valid`` stops improving, for every point of the grid."""
        if train.features.shape[0] == 0:
            raise DataError("`train` must have documents, got none")
        check_shape("valid.features", valid.features, (None, train.features.shape[1]))
        if not bool(torch.isfinite(ndcg(torch.zeros_like(valid.labels), valid.labels, valid.offsets, k=10))):
            raise DataError("`valid` must have a query with a relevant document, which early stopping needs")
        points = list(grid_points(**self.params))
        self.chosen, best = choose(points, lambda point: self._grow(train, valid, point), lambda found: found[2])
        self.model, self.best_round, self.valid_ndcg = best
        self.num_features = train.features.shape[1]
        return self

    def score(self, data: RankingData) -> Tensor:
        """Raw scores of the best round."""
        model = fitted(self, "model")
        check_shape("features", data.features, (None, self.num_features))
        if not len(data.features):
            return torch.zeros(0, dtype=torch.float64)
        return torch.from_numpy(np.asarray(self._predict(model, data.features.numpy()), dtype=np.float64))

    @abstractmethod
    def _grow(self, train: RankingData, valid: RankingData, point: Mapping[str, Any]) -> tuple[Any, int, float]:
        """One model, its best number of trees and its validation NDCG@10."""

    @abstractmethod
    def _predict(self, model: Any, features: NDArray[Any]) -> Any:
        """Scores of the best round."""


class _LightGBM(TreeRanker):
    objective: str

    def _labels(self, train: RankingData) -> tuple[NDArray[Any], dict[str, Any]]:
        """The labels LightGBM is given, and parameters that go with them."""
        return train.labels.double().numpy(), {}

    def _grow(self, train: RankingData, valid: RankingData, point: Mapping[str, Any]) -> tuple[Any, int, float]:
        lightgbm = require("lightgbm")
        labels, extra = self._labels(train)
        data = lightgbm.Dataset(train.features.numpy(), labels, group=train.offsets.diff().numpy(), free_raw_data=False)
        held = data.create_valid(
            valid.features.numpy(), np.zeros(len(valid.labels)), group=valid.offsets.diff().numpy()
        )
        params = {
            "objective": self.objective, "metric": "none", "seed": self.seed, "num_threads": self.num_threads,
            "verbosity": -1, "deterministic": True, "force_row_wise": True, **extra, **point,
        }  # fmt: skip

        def feval(scores: NDArray[Any], _: Any) -> tuple[str, float, bool]:
            return "ndcg@10", valid_ndcg(scores, valid), True

        stop = lightgbm.early_stopping(self.patience, verbose=False)
        model = lightgbm.train(
            params, data, self.num_rounds, valid_sets=[held], valid_names=["valid"], feval=feval, callbacks=[stop]
        )
        return model, int(model.best_iteration), float(model.best_score["valid"]["ndcg@10"])

    def _predict(self, model: Any, features: NDArray[Any]) -> Any:
        return model.predict(features, num_iteration=model.best_iteration, num_threads=self.num_threads)


class LambdaMART(_LightGBM):
    """λ-MART: LightGBM's ``lambdarank``.

    LightGBM wants grades 0, 1, 2, …; any labels ≥ 0 are numbered in rising order and their gains 2^y − 1 passed on, so
    fractional labels keep their meaning.
    """

    name = "λ-MART"
    objective = "lambdarank"

    def _labels(self, train: RankingData) -> tuple[NDArray[Any], dict[str, Any]]:
        longest = int(train.offsets.diff().max())
        if longest > LIGHTGBM_MAX_ROWS:
            raise DataError(f"`train` must not have more than {LIGHTGBM_MAX_ROWS} documents in a query, got {longest}")
        values, grades = np.unique(train.labels.double().numpy(), return_inverse=True)
        gains = label_gains(values)
        return grades, {"label_gain": gains.tolist()}


class GBRT(_LightGBM):
    """Pointwise regression trees on the labels: LightGBM's ``regression``."""

    name = "GBRT"
    objective = "regression"


class XGBoostRanker(TreeRanker):
    """XGBoost's ``rank:ndcg``, given gains 2^y − 1 in place of labels, so that fractions are not cut off."""

    name = "XGBoost"

    def _grow(self, train: RankingData, valid: RankingData, point: Mapping[str, Any]) -> tuple[Any, int, float]:
        xgboost = require("xgboost")
        data = xgboost.DMatrix(train.features.numpy(), label_gains(train.labels.double().numpy()))
        data.set_group(train.offsets.diff().numpy())
        held = xgboost.DMatrix(valid.features.numpy(), np.zeros(len(valid.labels)))
        held.set_group(valid.offsets.diff().numpy())
        # The smallest number of documents in a leaf has no counterpart: XGBoost bounds sums of Hessians instead.
        renamed = {"num_leaves": "max_leaves"}
        params = {
            "objective": "rank:ndcg", "ndcg_exp_gain": False, "tree_method": "hist", "grow_policy": "lossguide",
            "max_depth": 0, "seed": self.seed, "nthread": self.num_threads, "disable_default_eval_metric": 1,
            **{renamed.get(key, key): value for key, value in point.items() if key != "min_data_in_leaf"},
        }  # fmt: skip

        def measure(scores: NDArray[Any], _: Any) -> tuple[str, float]:
            return "ndcg@10", valid_ndcg(scores, valid)

        model = xgboost.train(
            params, data, self.num_rounds, evals=[(held, "valid")], custom_metric=measure, maximize=True,
            early_stopping_rounds=self.patience, verbose_eval=False,
        )  # fmt: skip
        return model, int(model.best_iteration) + 1, float(model.best_score)

    def _predict(self, model: Any, features: NDArray[Any]) -> Any:
        xgboost = require("xgboost")
        return model.predict(xgboost.DMatrix(features), iteration_range=(0, model.best_iteration + 1))


def label_gains(labels: NDArray[np.float64]) -> NDArray[np.float64]:
    """2^y − 1; negative labels, whose gain would be negative, are refused."""
    if len(labels) and float(labels.min()) < 0:
        raise LGMMLError(f"`labels` must be at least 0 for a gain of 2^y - 1, got {float(labels.min())}")
    return np.exp2(labels) - 1


def valid_ndcg(scores: NDArray[Any], valid: RankingData) -> float:
    """NDCG@10 with queries that have no relevant document skipped."""
    values = torch.from_numpy(np.asarray(scores, dtype=np.float64))
    return mean_ndcg(values, valid)
