"""The number of local metrics on every data set at hand (the paper's third figure)."""

from __future__ import annotations

from typing import Any

import torch

from lgmml_torch.fitting.boosted import RoundInfo, fit_boosted
from lgmml_torch.fitting.sampled import fit_sampled
from lgmml_torch.functional.measures import rank_data
from lgmml_torch.functional.presets import describe
from lgmml_torch.functional.score import score
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.models.preprocess.steps import Norm2
from research.paper.jobs import example_job
from research.paper.outcome import Claim, Outcome, Table
from research.plots import Line, Panel, lines_picture
from research.protocol import RankingFold, ranking_fold, split_name
from research.stats import INTERVAL, MAP_DEFINITION, counts, gain, interval, judged, pooled, shown, signed
from research.store import Job, Record, Store

METRIC = "ndcg@10"
SAMPLED, BOOSTED = "L-GMML as published (equal weights)", "L-GMML boosted"


def run(cfg: Any, store: Store) -> Outcome:
    """K against MAP for query by example, K against NDCG@10 for given lists."""
    curves: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for name in cfg.examples:
        curves[name] = {"L-GMML": {}}
        for K in cfg.metrics:
            jobs = [example_job(cfg, name, fold, "lgmml", {"num_regions": K}) for fold in range(cfg.folds)]
            curves[name]["L-GMML"][K] = pooled(store.all(jobs, f"{name}, {K} local metrics"), "map")
    for name in cfg.ranking:
        curves[name] = {SAMPLED: _sampled(cfg, store, name), BOOSTED: _boosted(cfg, store, name)}
    rows = [
        [name, system, K, "MAP" if name in cfg.examples else "NDCG@10", shown(interval(values)), counts(values)]
        for name, systems in curves.items()
        for system, points in systems.items()
        for K, values in points.items()
    ]
    panels = [
        Panel(
            name,
            [_line(system, points) for system, points in systems.items()],
            "MAP, test queries" if name in cfg.examples else "NDCG@10, test queries",
        )
        for name, systems in curves.items()
    ]
    splits = "; ".join(f"{name}: {split_name(name)}" for name in curves)
    notes = (
        MAP_DEFINITION,
        describe(METRIC, "default"),
        INTERVAL,
        f"the first {cfg.folds} fold(s), seed {cfg.seed}; {splits}",
        "as published: one sampled query per metric, features over their 2-norm, trace norm, bandwidth by validation, "
        "weights 1 for new queries; boosted: one fit per fold, cut after several numbers of rounds",
    )
    columns = ["data", "system", "local metrics K", "metric", "test queries", "counted"]
    table = Table("num_metrics", "The number of local metrics", columns, rows, notes)
    picture = lines_picture(
        panels, x="number of local metrics K", y="", columns=3,
        note="bands: 95% bootstrap over queries",
    )  # fmt: skip
    return Outcome(cfg.name, "The number of local metrics", [table], {"num_metrics": picture}, _claims(curves))


def _line(system: str, points: dict[int, torch.Tensor]) -> Line:
    found = [interval(values) for values in points.values()]
    return Line(system, list(points), [i.mean for i in found], [i.low for i in found], [i.high for i in found])


def _claims(curves: dict[str, dict[str, dict[int, torch.Tensor]]]) -> list[Claim]:
    """Most metrics against fewest on every set, and how many are enough."""
    claims, enough = [], {}
    for name, systems in curves.items():
        for system, points in systems.items():
            first, last = min(points), max(points)
            enough[f"{name}, {system}"] = _enough(points)
            difference = gain(points[last], points[first]).difference
            claims.append(
                Claim(
                    f"{name}, {system}: {last} local metrics rank better than {first}",
                    "local competes with global on every set (figure, values not given)",
                    f"{signed(difference)} at K = {last} over K = {first}",
                    judged(difference),
                    "paired over test queries; the most metrics tried against the fewest, nothing chosen on the test",
                )
            )
    claims.append(
        Claim(
            "the number of metrics needed varies dramatically between data sets",
            "the optimal number varies (figure, values not given)",
            "; ".join(f"{name}: {K}" for name, K in enough.items()),
            "not decided",
            "the smallest number that is not worse than the best one by its interval, both read off test queries: "
            "small sets give small numbers for want of power",
        )
    )
    return claims


def _enough(points: dict[int, torch.Tensor]) -> int:
    """The fewest metrics whose loss to the best number is within its interval."""
    best = max(points, key=lambda K: float(points[K].nanmean()))
    return min(K for K in points if gain(points[K], points[best]).difference.high >= 0)


def _sampled(cfg: Any, store: Store, name: str) -> dict[int, torch.Tensor]:
    """Banks of growing size; numbers beyond the usable training queries are left out."""
    points: dict[int, torch.Tensor] = {}
    used = -1
    for K in cfg.metrics:
        jobs = [_sampled_job(cfg, name, fold, K) for fold in range(cfg.folds)]
        records = store.all(jobs, f"{name}, {K} sampled metrics")
        if max(record.info["metrics"] for record in records) == used:
            break
        used = max(record.info["metrics"] for record in records)
        points[min(used, K)] = pooled(records, METRIC)
    return points


def _sampled_job(cfg: Any, name: str, fold: int, K: int) -> Job:
    def make() -> Record:
        parts = ranking_fold(name, fold, cfg.data_dir).prepared(Norm2())
        bank = fit_sampled(parts.train, parts.valid, num_metrics=K, norm="trace", seed=cfg.seed)
        dists = bank.metrics(parts.test.features)
        scores = score(dists, dists.new_ones(1, dists.shape[1]), parts.test.offsets, kernel="paper")
        return Record({METRIC: _values(scores, parts)}, {"metrics": bank.metrics.num_metrics})

    return Job("sampled", {"data": name, "fold": fold, "metrics": K, "seed": cfg.seed}, make)


def _boosted(cfg: Any, store: Store, name: str) -> dict[int, torch.Tensor]:
    jobs = [_boosted_job(cfg, name, fold) for fold in range(cfg.folds)]
    records = store.all(jobs, f"{name}, boosted")
    points = {}
    for rounds in cfg.rounds:
        key = str(rounds)
        K = round(sum(record.info["metrics"][key] for record in records) / len(records))
        points[max(1, K)] = pooled(records, key)
    return points


def _boosted_job(cfg: Any, name: str, fold: int) -> Job:
    def make() -> Record:
        parts = ranking_fold(name, fold, cfg.data_dir).prepared(list_rank_features())
        seen: list[RoundInfo] = []
        last = max(cfg.rounds)
        fit_boosted(
            parts.train, parts.valid, seed=cfg.seed, rounds=last, patience=last, on_round=lambda _, i: seen.append(i)
        )
        learners = seen[-1].state.learners
        kernels = learners.kernels(parts.test.features, "paper")
        values, metrics = {}, {}
        for rounds in cfg.rounds:
            kept = learners.rounds <= rounds
            values[str(rounds)] = _values(-(kernels[:, kept] @ learners.phi[kept]), parts)
            metrics[str(rounds)] = int(kept.sum())
        return Record(values, {"metrics": metrics})

    return Job("boosted-curve", {"data": name, "fold": fold, "rounds": list(cfg.rounds), "seed": cfg.seed}, make)


def _values(scores: torch.Tensor, fold: RankingFold) -> list[float]:
    values: list[float] = rank_data(scores, fold.test, metrics=[METRIC])[METRIC].tolist()
    return values
