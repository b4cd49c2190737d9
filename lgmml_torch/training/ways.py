"""What is fitted where nobody says: boosted metrics on small sets, trained ones on large sets, within a budget.

The rules are a function of the size of the data and the budget alone, so the same data and settings give the same
model on any machine. docs/quality.md has the evidence for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lgmml_torch.checks import LGMMLError, did_you_mean
from lgmml_torch.fitting.trained import start_trained
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import all_views
from lgmml_torch.training.callbacks import OneCycle
from lgmml_torch.training.losses import Softmax
from lgmml_torch.training.module import Dropout
from lgmml_torch.training.stages import PhiSettings, Recipe

TRAINED_DOCUMENTS = 20_000  # from so many documents and queries on, metrics are trained
TRAINED_QUERIES = 200
# Shares of features and of metrics to drop, up to so many documents: the more there are, the less.
DROPOUTS = ((100_000, Dropout(0.3, 0.2)), (400_000, Dropout(0.15, 0.2)), (math.inf, Dropout(0.1, 0.1)))
COLUMNS = 1_000  # of the preprocessed features, within which a feature gets ramps
COLUMN_BYTES = 4 << 30  # all preprocessed features of the training documents, in float32
MOST_RAMPS = 6
LEARNING_RATE, WEIGHT_DECAY = 2e-3, 0.3
GRADIENT_CLIP = 10.0  # for the trainer


@dataclass(frozen=True)
class Budget:
    """How much work a fit may be.

    Attributes:
        rounds: of boosting at most.
        directions: K·R, the columns of the one product training consists of.
        visits: documents looked at in all epochs together.
        epochs: at least and at most.
    """

    rounds: int
    directions: int
    visits: float
    epochs: tuple[int, int]


BUDGETS = {
    "fast": Budget(100, 512, 2.5e6, (4, 10)),
    "normal": Budget(200, 1024, 7.5e6, (6, 15)),
    "thorough": Budget(400, 2048, 2e7, (10, 20)),
}
SPEED = 3e10  # floating-point operations a second that a core of some years ago gets done in training


def budget_seconds(budget: str) -> float | None:
    """The seconds of a budget that is a time; None for one that has a name.

    Raises:
        LGMMLError: neither a name nor a time.

    >>> budget_seconds("10m"), budget_seconds("fast")
    (600.0, None)
    """
    if isinstance(budget, str) and budget in BUDGETS:
        return None
    time = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", str(budget).strip())
    if time is None:
        names = list(BUDGETS)
        hint = did_you_mean(str(budget), names)
        raise LGMMLError(f"`budget` must be {', '.join(names)}, or a time such as 60s or 10m, got {budget!r}{hint}")
    return float(time[1]) * {"s": 1, "m": 60, "h": 3600}[time[2]]


def find_budget(budget: str, documents: int, columns: int) -> Budget:
    """The budget of that name, or the largest whose work on so much data is about ``"60s"`` or ``"10m"`` of one core.

    Raises:
        LGMMLError: neither a name nor a time.

    >>> find_budget("90s", 700_000, 1_000) == BUDGETS["fast"], find_budget("2h", 700_000, 1_000) == BUDGETS["thorough"]
    (True, True)
    """
    seconds = budget_seconds(budget)
    if seconds is None:
        return BUDGETS[budget]
    affordable = [found for found in BUDGETS.values() if _seconds(found, documents, columns) <= seconds]
    return affordable[-1] if affordable else BUDGETS["fast"]


def _seconds(budget: Budget, documents: int, columns: int) -> float:
    """Two products of all visited documents, which is nearly all of the work."""
    return _epochs(budget, documents) * documents * columns * budget.directions * 4 / SPEED


def _epochs(budget: Budget, documents: int) -> int:
    low, high = budget.epochs
    return round(min(high, max(low, budget.visits / max(1, documents))))


@dataclass(frozen=True)
class Way:
    """What is fitted, and why.

    Attributes:
        bank: ``"boosted"``, then sampled WARP; or ``"trained"``.
        reason: a sentence for the log and the report.
        rounds: of boosting at most.
        num_metrics: K.
        rank: R.
        ramps: of a feature.
        epochs: of trained metrics.
        dropout: of trained metrics.
    """

    bank: str
    reason: str
    rounds: int = 200
    num_metrics: int = 128
    rank: int = 8
    ramps: int = MOST_RAMPS
    epochs: int = 15
    dropout: Dropout = field(default_factory=Dropout)


def choose_way(queries: int, documents: int, features: int, budget: str = "normal", *, trained: bool = False) -> Way:
    """The way for so much data; ``trained`` metrics in any case, where they are wanted.

    >>> choose_way(470, 9_630, 46).bank, choose_way(7_274, 722_339, 110).bank
    ('boosted', 'trained')
    """
    size = f"{queries:,} training queries with {documents:,} documents of {features} features, budget {budget}"
    room = min(COLUMNS, COLUMN_BYTES // (4 * max(1, documents)))
    ramps = max(0, min(MOST_RAMPS, room // max(1, features) - 3))
    found = find_budget(budget, documents, (3 + ramps) * features)
    if not trained and (documents < TRAINED_DOCUMENTS or queries < TRAINED_QUERIES):
        reason = f"{size}: boosted metrics, at most {found.rounds} rounds, then WARP (trained metrics need more data)"
        return Way("boosted", reason, rounds=found.rounds)
    dropout = next(found for most, found in DROPOUTS if documents < most)
    rank = 8 if found.directions <= 1024 else 16
    way = Way("trained", "", found.rounds, found.directions // rank, rank, ramps, _epochs(found, documents), dropout)
    reason = (
        f"{size}: {way.num_metrics} metrics of rank {rank} trained by gradient for {way.epochs} epochs, {ramps} ramps "
        f"of a feature, dropout {dropout.features:g} of features and {dropout.metrics:g} of metrics"
    )
    return replace(way, reason=reason)


def trained_recipe(
    way: Way,
    seed: int,
    *,
    preprocess: Callable[[], Preprocess] | None = None,
    rate: float | None = None,
    options: Mapping[str, Any] | None = None,
    loader: Mapping[str, Any] | None = None,
    **phi: Any,
) -> Recipe:
    """The recipe of trained metrics, as ``experiment=trained`` has it.

    Args:
        way: how wide, how much is dropped.
        seed: of all draws.
        preprocess: `all_views` when None.
        rate: the highest learning rate; `LEARNING_RATE` when None.
        options: further settings of `start_trained`.
        loader: settings of `RankingDataModule`.
        **phi: settings of `Phi`.
    """
    sizes = {"num_metrics": way.num_metrics, "rank": way.rank, **(options or {})}
    return Recipe(
        preprocess=preprocess or partial(all_views, ramps=way.ramps),
        fit_bank=partial(start_trained, **sizes),
        make_phi=partial(Phi, **phi),
        phi=PhiSettings(
            loss=Softmax(),
            loader=loader or {},
            optimizer=partial(torch.optim.AdamW, lr=rate or LEARNING_RATE, weight_decay=WEIGHT_DECAY),
            step_size=OneCycle(),
            dropout=way.dropout,
        ),
        seed=seed,
    )
