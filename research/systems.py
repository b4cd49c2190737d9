"""The compared systems by name, and one piece of work with each: fit, time, rank, keep the values per query."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lgmml_torch.app import train as run
from lgmml_torch.app.config import load_config
from lgmml_torch.baselines.base import ExampleSystem, RankingSystem, fitted
from lgmml_torch.baselines.gmml import GlobalGMML, LocalGMML
from lgmml_torch.baselines.mlr import MLR, RMLR, Limits
from lgmml_torch.baselines.simple import Euclidean, LinearRanker, RandomDistances, RandomRanker
from lgmml_torch.baselines.trees import GBRT, LambdaMART
from lgmml_torch.checks import ConfigError, DegenerateScoresWarning, did_you_mean
from lgmml_torch.functional.ranking.measures import rank_metrics
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from research.protocol import ExampleFold, RankingFold, with_noise
from research.store import Record

RANKING_METRICS = ("ndcg@5", "ndcg@10", "ndcg@20", "map")
NAMES = {
    "random": "random", "linear": "linear", "gbrt": "GBRT", "lambdamart": "λ-MART",
    "published": "L-GMML as published", "boosted": "L-GMML boosted (our default)",
    "euclidean": "Euclidean", "gmml": "GMML", "lgmml": "L-GMML", "mlr": "MLR", "rmlr": "R-MLR",
}  # fmt: skip


class LGMMLSystem(RankingSystem):
    """L-GMML for given lists, trained exactly as ``train.py`` trains it with the same overrides.

    Args:
        overrides: of ``conf/train.yaml``; none is the default, ``experiment=paper`` the paper's settings.
        seed: of all draws.

    After ``fit``: ``model``, ``chosen``, ``stages`` (seconds for the metrics and for Φ).
    """

    name = "L-GMML"

    def __init__(self, overrides: Sequence[str] = (), *, seed: int = 0) -> None:
        self.overrides, self.seed = list(overrides), seed

    def fit(self, train: RankingData, valid: RankingData) -> Self:
        """Preprocessing and metrics in closed form, then Φ."""
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), quiet("pytorch_lightning"):
            warnings.simplefilter("ignore", DegenerateScoresWarning)  # a finding, seen in the figures
            cfg = load_config([
                *self.overrides, f"seed={self.seed}", "callbacks=quiet", "logger=none", "loader.num_workers=0",
                "trainer.enable_progress_bar=false", "paths.cache_dir=false", f"paths.output_dir='{folder}'",
            ])  # fmt: skip
            started = time.perf_counter()
            prepared = run.fit_metrics(cfg, {"train": train, "valid": valid}, [])
            middle = time.perf_counter()
            module, keeper, _ = run.train_best_phi(cfg, prepared, [], Path(folder))
            self.stages = {"metrics": middle - started, "phi": time.perf_counter() - middle}
        self.model: LGMML = module.model
        self.chosen = {
            "metrics": self.model.metrics.num_metrics, "best epoch": keeper.best_epoch,
            "policy": self.model.phi.policy, "bandwidth": prepared.bank.history.get("bandwidth"),
        }  # fmt: skip
        return self

    @torch.no_grad()
    def score(self, data: RankingData) -> Tensor:
        """Scores of the rows, by the policy for new queries."""
        model: LGMML = fitted(self, "model")
        return model.score(data)

    @torch.no_grad()
    def known_scores(self, data: RankingData) -> Tensor:
        """Scores of training rows with the queries' own Φ."""
        model: LGMML = fitted(self, "model")
        scores: Tensor = model(data.features, data.offsets, rows=model.known_rows(data.qids))
        return scores


def ranking_system(name: str, options: Mapping[str, Any], *, seed: int, threads: int) -> RankingSystem:
    """A system for given lists by its name in `NAMES`."""
    trees = {"gbrt": GBRT, "lambdamart": LambdaMART}
    if name in trees:
        return trees[name](seed=seed, num_threads=threads, **options)
    if name in ("published", "boosted"):
        start = ["experiment=paper"] if name == "published" else []
        return LGMMLSystem([*start, *options.get("overrides", ())], seed=seed)
    if name == "linear":
        return LinearRanker(**options)
    if name == "random":
        return RandomRanker(seed=seed)
    raise ConfigError(f"no ranking system {name!r}{did_you_mean(name, list(NAMES))}")


def example_system(name: str, options: Mapping[str, Any], *, seed: int) -> ExampleSystem:
    """A system for query by example by its name in `NAMES`; ``time_limit`` is for R-MLR."""
    settings = dict(options)
    if name in ("rmlr", "mlr"):
        limits = Limits(time_limit=settings.pop("time_limit", None))
        return (RMLR if name == "rmlr" else MLR)(**settings, limits=limits)
    if name == "lgmml":
        return LocalGMML(**settings, seed=seed)
    if name == "gmml":
        return GlobalGMML(**settings)
    if name == "euclidean":
        return Euclidean()
    if name == "random":
        return RandomDistances(seed=seed)
    raise ConfigError(f"no query-by-example system {name!r}{did_you_mean(name, list(NAMES))}")


def rank_with(system: RankingSystem, fold: RankingFold, *, repeats: int = 3) -> Record:
    """Fit on the training lists, score the test lists; seconds for both."""
    seconds = _timed(lambda: system.fit(fold.train, fold.valid))
    test = fold.test
    scores = system.score(test)
    scoring = statistics.median(_timed(lambda: system.score(test)) for _ in range(repeats))
    values = rank_metrics(scores, test.labels, test.offsets, metrics=RANKING_METRICS, tie_order=test.order)
    info: dict[str, Any] = {
        "seconds": seconds, "scoring seconds per document": scoring / max(1, test.num_documents),
        "documents": test.num_documents, "features": test.num_features, "chosen": dict(system.chosen),
        "training queries": fold.train.num_queries, "queries": [str(qid) for qid in test.qids],
    }  # fmt: skip
    if isinstance(system, LGMMLSystem):
        info["stages"] = system.stages
        if system.model.phi.mode == "per_query":
            train = fold.train
            own = rank_metrics(
                system.known_scores(train), train.labels, train.offsets, metrics=["ndcg@10"], tie_order=train.order
            )
            info["ndcg@10 of training queries with their own Φ"] = float(own["ndcg@10"].nanmean())
    if hasattr(system, "best_round"):
        info["trees"] = system.best_round
    return Record({name: row.tolist() for name, row in values.items()}, info)


def retrieve_with(system: ExampleSystem, fold: ExampleFold) -> Record:
    """Fit on the database's own items, rank the database for the test queries."""
    with quiet("lgmml_torch.baselines"):
        seconds = _timed(lambda: system.fit(fold.train, fold.valid))
    values = system.evaluate(fold.test)
    info: dict[str, Any] = {
        "seconds": seconds, "chosen": dict(system.chosen), "database": len(fold.train.database),
        "features": fold.train.database.shape[1], "training queries": fold.train.num_queries,
    }  # fmt: skip
    if isinstance(system, RMLR):
        info |= {"cut": system.cut, "converged": system.result.converged, "rounds": len(system.result.history)}
    if isinstance(system, LocalGMML):
        info |= {"metrics": system.num_regions_used, "validation map": system.bank.valid_map}
    return Record({name: row.tolist() for name, row in values.items()}, info)


def noisy_ranking(fold: RankingFold, times: int, kind: str, seed: int) -> RankingFold:
    """The same lists with features that mean nothing, drawn for each part by itself."""
    parts = (fold.train, fold.valid, fold.test)
    made = [part.replace(features=with_noise(part.features, times, kind, 3 * seed + i)) for i, part in enumerate(parts)]
    return RankingFold(*made)


def noisy_examples(fold: ExampleFold, times: int, kind: str, seed: int) -> ExampleFold:
    """The same items, scaled to a root mean square deviation of one, with features that mean nothing."""
    scale = fold.train.database.std(0, correction=0).square().mean().sqrt()
    database = with_noise(fold.train.database / scale, times, kind, 3 * seed)

    def part(data: Any, queries: Tensor) -> Any:
        return replace(data, database=database, queries=queries)

    asked = [with_noise(p.queries / scale, times, kind, 3 * seed + i) for i, p in ((1, fold.valid), (2, fold.test))]
    return ExampleFold(part(fold.train, database), part(fold.valid, asked[0]), part(fold.test, asked[1]))


def _timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Keep what is reported with the result, such as a time cap, out of the log."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
