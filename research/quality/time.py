"""Training and scoring times of the default: beside one LightGBM fit on the same fold, and as the documents grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lgmml_torch.data.generated import letor_like
from lgmml_torch.ragged import RankingData
from research.protocol import RankingFold
from research.quality.trees import Score, fit_lightgbm, rank_fold, with_list_ranks

GROWTH = (10_000, 20_000, 40_000, 80_000)  # documents
GROWTH_ROUNDS = 60  # the same for all sizes: when validation stops is no matter of size
LIST_LENGTH, FEATURES = 50, 46


def time_fold(fold: RankingFold, chosen: Mapping[str, Any], rounds: int = 2) -> dict[str, Any]:
    """CPU seconds of one thread, which other work on the machine does not stretch much; preprocessing on both sides."""
    from research.quality.lgmml import fit_default

    def boosted() -> Score:
        return fit_default(fold)

    def trees() -> Score:
        score = fit_lightgbm(rank_fold(fold), 0, chosen)
        return lambda data: score(with_list_ranks(data))

    found: dict[str, dict[str, list[float]]] = {"train": {}, "score": {}}
    for _ in range(rounds):
        for name, make in (("boosted", boosted), ("lightgbm", trees)):
            seconds, score = cpu_seconds(make)
            found["train"].setdefault(name, []).append(seconds)
            found["score"].setdefault(name, []).append(score_seconds(score, fold.train))
    return {**found, "documents": fold.train.num_documents}


def cpu_seconds(make: Callable[[], Score]) -> tuple[float, Score]:
    """The time a fit takes, and the fit."""
    start = time.process_time()
    score = make()
    return time.process_time() - start, score


def score_seconds(score: Score, data: RankingData, calls: int = 3) -> float:
    """The fastest of a few calls."""
    seconds = []
    for _ in range(calls):
        start = time.process_time()
        score(data)
        seconds.append(time.process_time() - start)
    return min(seconds)


def time_growth(sizes: Sequence[int] = GROWTH, rounds: int = GROWTH_ROUNDS) -> dict[str, Any]:
    """CPU seconds of training and scoring generated lists of more and more documents, and how they grow."""
    from research.quality.lgmml import fit_default

    settings = (f"local_metrics.rounds={rounds}", f"local_metrics.patience={rounds}")
    train: list[float] = []
    score: list[float] = []
    for size in sizes:
        data = letor_like(size // LIST_LENGTH, FEATURES, num_documents=size)
        fold = RankingFold(data, letor_like(100, FEATURES, num_documents=100 * LIST_LENGTH, seed=1), data)
        seconds, found = cpu_seconds(partial(fit_default, fold, settings))
        train.append(seconds)
        score.append(score_seconds(found, data))
    return {
        "documents": list(sizes), "train": train, "score": score, "rounds": rounds,
        "train exponent": _exponent(sizes, train), "score exponent": _exponent(sizes, score),
    }  # fmt: skip


def _exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of log seconds over log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
