"""Scoring one list at a time, as a server does, side by side with LightGBM: processor time of a call, in turn.

Run with ``python -m research.speed.short_lists``. Settings follow as ``name=value``:

    data=mq2008    a named set; documents of its validation lists are drawn into lists of the wanted length
    epochs=1       of trained metrics, whose number makes no difference to the time of a call
    rounds=25
    repeats=10     calls of a round, fewer for long lists

lleaves, which compiles LightGBM's trees, is measured, too, where it is installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.models.ranker import LGMML
from research.protocol import RankingFold, ranking_fold
from research.speed.harness import Timing, parse, print_table, save_result
from research.speed.race import TREES
from research.systems.trees import LambdaMART

DEFAULTS: dict[str, Any] = {"data": "mq2008", "epochs": 1, "rounds": 25, "repeats": 10}
LENGTHS = (10, 100, 1000)
_YARDSTICK = "LightGBM"


def fitted(fold: RankingFold, kind: str, **options: Any) -> LGMMLRanker:
    """Our ranker with one kind of metrics."""
    train, valid = fold.train, fold.valid
    held = (valid.features.numpy(), valid.labels.numpy(), valid.query_index.numpy())
    ranker = LGMMLRanker(bank=kind, random_state=0, n_jobs=1, **options)
    return ranker.fit(train.features.numpy(), train.labels.numpy(), group=train.sizes.numpy(), eval_set=held)


def in_torch(model: LGMML, X: NDArray[Any]) -> torch.Tensor:
    """The scores operation by operation, without checks and ties."""
    with torch.no_grad():
        scores: torch.Tensor = model(torch.from_numpy(X), torch.tensor([0, len(X)]))
    return scores


def processor_times(calls: dict[str, Callable[[], object]], *, rounds: int, repeats: int) -> dict[str, Timing]:
    """Processor seconds of a call, in turn, round after round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for place in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeats):
                call()
            if place:  # the first round warms up
                seconds[name].append((time.process_time() - start) / repeats)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def main() -> None:
    settings = parse(sys.argv[1:], DEFAULTS, __doc__)
    torch.set_num_threads(1)
    fold = ranking_fold(settings["data"], 0)
    trees = LambdaMART(TREES).fit(fold.train, fold.valid)
    rankers = {"boosted": fitted(fold, "boosted"), "trained": fitted(fold, "trained", epochs=settings["epochs"])}
    documents, draws = fold.valid.features.numpy(), np.random.default_rng(0)
    compiled = trees.growth.compiled(trees.best_round)
    result: dict[str, Any] = {"settings": settings, "trees": trees.best_round}
    for length in LENGTHS:
        X = documents[draws.permutation(len(documents))[:length]]
        calls: dict[str, Callable[[], object]] = {_YARDSTICK: partial(trees.growth.predict, X, trees.best_round)}
        if compiled is not None:
            calls["lleaves"] = partial(compiled, X)
        for kind, ranker in rankers.items():
            calls[f"{kind}, predict"] = partial(ranker.predict, X, group=[length])
            calls[f"{kind}, frozen"] = partial(ranker.model_.freeze(), X)
            calls[f"{kind}, in torch"] = partial(in_torch, ranker.model_, X)
        repeats = max(1, settings["repeats"] * 10 // length)
        times = processor_times(calls, rounds=settings["rounds"], repeats=repeats)
        rows = [(name, 1000 * took.median, took.ratio(times[_YARDSTICK])) for name, took in times.items()]
        result[str(length)] = {name: {"ms": ms, "over LightGBM": ratio} for name, ms, ratio in rows}
        title = f"{length} documents, LightGBM of {trees.best_round} trees"
        print_table(title, ("ranker", "CPU ms", "over LightGBM"), rows)
    print(f"saved {save_result('short-lists', result).name}")


if __name__ == "__main__":
    main()
