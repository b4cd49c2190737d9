"""Training and scoring times of the default beside one LightGBM fit, on the same fold, in turn, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.quality_data import Fold
from benchmarks.quality_trees import Score, fit_lightgbm, rank_fold, with_list_ranks
from lgmml_torch.models.phi import Phi
from lgmml_torch.ragged import RankingData


def time_fold(fold: Fold, chosen: Mapping[str, Any], rounds: int = 2) -> dict[str, Any]:
    """CPU seconds of one thread, which other work on the machine does not stretch much; preprocessing on both sides."""
    from benchmarks.quality_lgmml import fit_boosted_bank, scorer

    def boosted() -> Score:
        return scorer(fit_boosted_bank(fold, 0).model(partial(Phi, mode="shared")).eval())

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
