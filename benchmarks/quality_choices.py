"""What is chosen on validation queries, once per fold with seed 0, before any test query is scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.quality_trees import (
    GRID,
    XGBOOST_GRID,
    Score,
    choose_point,
    fit_lightgbm,
    fit_xgboost,
    rank_fold,
)
from lgmml_torch.experiments.sources import RankingFold

Chosen = tuple[dict[str, Any], float]
Choice = Callable[[RankingFold, bool], Chosen]
Grid = Mapping[str, Sequence[Any]]


def _trees(fit: Callable[[RankingFold, int, Mapping[str, Any]], Score], grid: Grid, *, ranks: bool) -> Choice:
    def choose(fold: RankingFold, quick: bool) -> Chosen:
        small = {name: values[-1:] if name != "learning_rate" else values for name, values in grid.items()}
        return choose_point(rank_fold(fold) if ranks else fold, fit, small if quick else grid)

    return choose


def _paper(fold: RankingFold, quick: bool) -> Chosen:
    from benchmarks.quality_lgmml import choose_paper  # Lightning takes its time to import

    return choose_paper(fold, quick)


def _rate(mode: str) -> Choice:
    def choose(fold: RankingFold, quick: bool) -> Chosen:
        from benchmarks.quality_lgmml import choose_rate

        return choose_rate(fold, mode)

    return choose


# Every choice looks at the training and validation queries of the fold alone; quick ones try fewer settings.
CHOICES: Mapping[str, Choice] = {
    "lightgbm": _trees(fit_lightgbm, GRID, ranks=False),
    "lightgbm+ranks": _trees(fit_lightgbm, GRID, ranks=True),
    "xgboost": _trees(fit_xgboost, XGBOOST_GRID, ranks=False),
    "xgboost+ranks": _trees(fit_xgboost, XGBOOST_GRID, ranks=True),
    "paper": _paper,
    "sampled shared": _rate("shared"),
    "sampled amortized": _rate("amortized"),
}
