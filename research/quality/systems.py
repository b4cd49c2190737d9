"""The systems that are compared, each as one function of a fold, a seed and what validation chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lgmml_torch.baselines.simple import LinearRanker, RandomRanker
from lgmml_torch.functional.losses import ideal_dcg, lambda_gradients
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.ragged import RankingData
from research.protocol import RankingFold
from research.quality.data import NOISES
from research.quality.trees import (
    GRID,
    XGBOOST_GRID,
    Score,
    bag_lightgbm,
    choose_point,
    fit_lightgbm,
    fit_xgboost,
    rank_fold,
    with_list_ranks,
)

STEPS, EVERY, RATE = 150, 5, 0.02


def fit_linear(fold: RankingFold, seed: int, chosen: Mapping[str, Any]) -> tuple[dict[str, Score], dict[str, Any]]:
    """Adam on all lists at once; validation NDCG@10 keeps the best step."""
    features = list_rank_features()
    train = fold.train.replace(features=features.fit_transform(fold.train.features, fold.train.offsets))
    valid = fold.valid.replace(features=features(fold.valid.features, fold.valid.offsets))
    weights = torch.zeros(train.num_features, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=RATE)
    ideal = ideal_dcg(train.labels, train.offsets)
    best, kept, kept_step = -1.0, weights.detach().clone(), 0
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            scores = train.features @ weights
            gradients, _ = lambda_gradients(scores, train.labels.to(scores), train.offsets, ideal=ideal)
            weights.grad = -(train.features.mT @ gradients.to(scores)) / train.num_queries
        optimizer.step()
        if step % EVERY == 0:
            value = mean_ndcg(valid.features @ weights.detach(), valid)
            if value > best:
                best, kept, kept_step = value, weights.detach().clone(), step
    return {"linear": lambda data: features(data.features, data.offsets) @ kept}, {"step": kept_step}


def fit_ridge(fold: RankingFold, seed: int, chosen: Mapping[str, Any]) -> tuple[dict[str, Score], dict[str, Any]]:
    """Ridge regression on the same features; validation chooses the penalty."""
    features = list_rank_features()
    train = fold.train.replace(features=features.fit_transform(fold.train.features, fold.train.offsets))
    valid = fold.valid.replace(features=features(fold.valid.features, fold.valid.offsets))
    ranker = LinearRanker().fit(train, valid)
    score: Score = lambda data: ranker.score(data.replace(features=features(data.features, data.offsets)))  # noqa: E731
    return {"ridge": score}, dict(ranker.chosen)


def fit_random(fold: RankingFold, seed: int, chosen: Mapping[str, Any]) -> tuple[dict[str, Score], dict[str, Any]]:
    """Random order."""
    return {"random": RandomRanker(seed).fit(fold.train, fold.valid).score}, {}


Chosen = tuple[dict[str, Any], float]
Choice = Callable[[RankingFold, bool], Chosen]
Grid = Mapping[str, Sequence[Any]]


def _tree_choice(fit: Callable[[RankingFold, int, Mapping[str, Any]], Score], grid: Grid, *, ranks: bool) -> Choice:
    def choose(fold: RankingFold, quick: bool) -> Chosen:
        small = {name: values[-1:] if name != "learning_rate" else values for name, values in grid.items()}
        return choose_point(rank_fold(fold) if ranks else fold, fit, small if quick else grid)

    return choose


def _paper(fold: RankingFold, quick: bool) -> Chosen:
    from research.quality.lgmml import choose_paper

    return choose_paper(fold, quick)


def _rate(mode: str) -> Choice:
    def choose(fold: RankingFold, quick: bool) -> Chosen:
        from research.quality.lgmml import choose_rate

        return choose_rate(fold, mode)

    return choose


# Every choice looks at the training and validation queries of the fold alone; quick ones try fewer settings.
CHOICES: Mapping[str, Choice] = {
    "lightgbm": _tree_choice(fit_lightgbm, GRID, ranks=False),
    "lightgbm+ranks": _tree_choice(fit_lightgbm, GRID, ranks=True),
    "xgboost": _tree_choice(fit_xgboost, XGBOOST_GRID, ranks=False),
    "xgboost+ranks": _tree_choice(fit_xgboost, XGBOOST_GRID, ranks=True),
    "paper": _paper,
    "sampled shared": _rate("shared"),
    "sampled amortized": _rate("amortized"),
}


MAIN_SEEDS = 10  # of the two systems the main target compares; the spread over seeds is as large as the target

Fit = Callable[[RankingFold, int, Mapping[str, Any]], tuple[dict[str, Score], dict[str, Any]]]


@dataclass(frozen=True)
class System:
    """One or several rows of the table that come from one fit.

    Attributes:
        name: by which it is stored and named on the command line.
        fit: gives scores by row name, and facts about the fit.
        labels: row names and how they read in tables.
        choice: what is chosen on validation beforehand.
        seeds: at most so many are of use (1: nothing is random).
        noises: kinds of noise it is also run with.
    """

    name: str
    fit: Fit
    labels: Mapping[str, str]
    choice: str | None = None
    seeds: int = 3
    noises: tuple[str, ...] = ()


def _tree_rows(name: str, fit: Callable[..., Score], ranks: bool) -> Fit:
    def run(fold: RankingFold, seed: int, chosen: Mapping[str, Any]) -> tuple[dict[str, Score], dict[str, Any]]:
        if not ranks:
            return {name: fit(fold, seed, chosen)}, {}
        score = fit(rank_fold(fold), seed, chosen)
        return {name: lambda data: score(with_list_ranks(data))}, {}

    return run


def _lgmml(function: str, **options: Any) -> Fit:
    """A function of `quality_lgmml`, imported when it is needed: Lightning takes its time."""

    def run(fold: RankingFold, seed: int, chosen: Mapping[str, Any]) -> tuple[dict[str, Score], dict[str, Any]]:
        from research.quality import lgmml as quality_lgmml

        resolved = {
            key: getattr(quality_lgmml, value) if key == "preprocess" else value for key, value in options.items()
        }
        found: tuple[dict[str, Score], dict[str, Any]] = getattr(quality_lgmml, function)(
            fold, seed, chosen, **resolved
        )
        return found

    return run


_boosted = partial(_lgmml, "fit_boosted_model")

# In the order in which they are run: what the targets are about comes first. The default is what `train.py` does:
# boosting, then WARP; the ablations stop before WARP and are compared with the same of the default, Φ₀.
SYSTEMS = (
    System("random", fit_random, {"random": "random order"}),
    System("ridge", fit_ridge, {"ridge": "linear, ridge regression"}, seeds=1),
    System("linear", fit_linear, {"linear": "linear, LambdaRank"}, seeds=1),
    System(
        "boosted", _boosted(warp=True),
        {"boosted+warp": "**boosted L-GMML (default)**", "boosted": "boosted, Φ₀ before WARP"}, seeds=MAIN_SEEDS,
    ),
    System(
        "lightgbm+ranks", _tree_rows("lightgbm+ranks", fit_lightgbm, True),
        {"lightgbm+ranks": "LightGBM + list ranks"}, "lightgbm+ranks", seeds=MAIN_SEEDS,
    ),
    System("lightgbm", _tree_rows("lightgbm", fit_lightgbm, False), {"lightgbm": "LightGBM"}, "lightgbm"),
    System(
        "paper", _lgmml("fit_paper"),
        {f"paper {policy}": f"paper's L-GMML, new queries: {policy}" for policy in ("ones", "mean", "knn")}, "paper",
    ),
    System(
        "sampled shared", _lgmml("fit_sampled_phi", mode="shared"),
        {"sampled shared": "paper's metrics, shared Φ"}, "sampled shared",
    ),
    System(
        "sampled amortized", _lgmml("fit_sampled_phi", mode="amortized"),
        {"sampled amortized": "paper's metrics, amortized Φ"}, "sampled amortized",
    ),
    System(
        "boosted bag", _boosted(name="boosted bag", settings=("local_metrics=bagged",), warp=True),
        {"boosted bag+warp": "bag of 5 boosted L-GMML", "boosted bag": "bag of 5 boosted, Φ₀ before WARP"},
    ),
    System(
        "lightgbm bag", _tree_rows("lightgbm bag", bag_lightgbm, True),
        {"lightgbm bag": "bag of 5 LightGBM + list ranks"}, "lightgbm+ranks",
    ),
    System(
        "boosted identity", _boosted(name="boosted identity", settings=("local_metrics.metric=identity",)),
        {"boosted identity": "boosted, identity metric, Φ₀"},
    ),
    System(
        "boosted pooled", _boosted(name="boosted pooled", settings=("local_metrics.metric=gmml-pooled",)),
        {"boosted pooled": "boosted, pooled pairs, Φ₀"},
    ),
    System(
        "boosted no ranks", _boosted(name="boosted no ranks", preprocess="quantile_features"),
        {"boosted no ranks": "boosted, no list ranks, Φ₀"},
    ),
    System(
        "boosted noise", _boosted(name="boosted noise", warp=True),
        {"boosted noise+warp": "boosted L-GMML with noise", "boosted noise": "boosted, Φ₀, with noise"}, noises=NOISES,
    ),
    System(
        "lightgbm noise", _tree_rows("lightgbm noise", fit_lightgbm, True),
        {"lightgbm noise": "LightGBM + list ranks with noise"}, "lightgbm+ranks", noises=NOISES,
    ),
    System(
        "xgboost+ranks", _tree_rows("xgboost+ranks", fit_xgboost, True), {"xgboost+ranks": "XGBoost + list ranks"},
        "xgboost+ranks",
    ),
    System("xgboost", _tree_rows("xgboost", fit_xgboost, False), {"xgboost": "XGBoost"}, "xgboost"),
)  # fmt: skip
LABELS = {row: label for system in SYSTEMS for row, label in system.labels.items()}


def find_system(name: str) -> System:
    """The system of that name.

    Raises:
        KeyError: there is none.
    """
    return {system.name: system for system in SYSTEMS}[name]


def score_all(scores: Mapping[str, Score], data: RankingData) -> dict[str, list[float]]:
    """NDCG@10 of every query under every score; NaN where a query has no relevant document."""
    from lgmml_torch.functional.ranking.measures import ndcg

    return {
        name: ndcg(
            score(data), data.labels, data.offsets, k=10, tie_order=data.order, reduction="none"
        ).double().tolist()
        for name, score in scores.items()
    }  # fmt: skip
