"""Training and scoring times of the default: beside one LightGBM fit on the same fold, and as the documents grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lgmml_torch.data.generated import letor_like
from lgmml_torch.ragged import RankingData
from research.compare import Options, Score, find_system
from research.protocol import RankingFold
from research.stats import exponent

GROWTH = (10_000, 20_000, 40_000, 80_000)  # documents
GROWTH_ROUNDS = 60  # the same for all sizes: when validation stops is no matter of size
LIST_LENGTH, FEATURES = 50, 46


def time_fold(fold: RankingFold, chosen: Options, rounds: int = 2) -> dict[str, Any]:
    """CPU seconds of one thread, which other work on the machine does not stretch much; preprocessing on both sides.

    LightGBM grows as many trees as early stopping had it grow, without measuring: our NDCG@10 after every tree would
    take it half as long again.
    """
    stopped = find_system("lightgbm+ranks").fit(fold, 0, chosen)
    grown = min(stopped.info["trees"] + chosen["patience"], chosen["num_rounds"])
    fixed = {**chosen, "num_rounds": grown, "patience": None}
    found: dict[str, dict[str, list[float]]] = {"train": {}, "score": {}}
    for _ in range(rounds):
        ours, score = cpu_seconds(partial(fit_one, "default", fold, {}))
        theirs, _ = cpu_seconds(partial(fit_one, "lightgbm+ranks", fold, fixed))
        scores = {"default": score, "lightgbm": stopped.scores["lightgbm+ranks"]}
        for name, seconds in (("default", ours), ("lightgbm", theirs)):
            found["train"].setdefault(name, []).append(seconds)
            found["score"].setdefault(name, []).append(score_seconds(scores[name], fold.train))
    return {**found, "documents": fold.train.num_documents}


def fit_one(name: str, fold: RankingFold, options: Options) -> Score:
    """A system's reported way of scoring, fitted with seed 0."""
    return next(iter(find_system(name).fit(fold, 0, options).scores.values()))


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
    options = {"overrides": [f"local_metrics.rounds={rounds}", f"local_metrics.patience={rounds}"]}
    train: list[float] = []
    score: list[float] = []
    for size in sizes:
        data = letor_like(size // LIST_LENGTH, FEATURES, num_documents=size)
        fold = RankingFold(data, letor_like(100, FEATURES, num_documents=100 * LIST_LENGTH, seed=1), data)
        seconds, found = cpu_seconds(partial(fit_one, "boosted", fold, options))
        train.append(seconds)
        score.append(score_seconds(found, data))
    return {
        "documents": list(sizes), "train": train, "score": score, "rounds": rounds,
        "train exponent": exponent(sizes, train), "score exponent": exponent(sizes, score),
    }  # fmt: skip
