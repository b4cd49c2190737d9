"""Features that mean nothing: how much each system loses. The paper opens with this claim and never tests it."""

from __future__ import annotations

from typing import Any

import torch

from lgmml_torch.functional.presets import describe
from lgmml_torch.functional.significance import Interval
from research.compare import NAMES
from research.paper.jobs import all_folds, example_job, per_query
from research.paper.outcome import Claim, Outcome, Table
from research.plots import Line, Panel, lines_picture
from research.protocol import Noise, split_name
from research.stats import INTERVAL, MAP_DEFINITION, counts, gain, interval, judged, pooled, shown, signed
from research.store import Store

KINDS = {"normal": "standard normal", "permuted": "permuted copies"}
Values = dict[str, dict[tuple[int, str], torch.Tensor]]  # by system, then (times, kind)


def run(cfg: Any, store: Store) -> Outcome:
    """Noise of both kinds, zero, one and three times as many features as there are real ones."""
    found: dict[str, Values] = {name: _ranking(cfg, store, name) for name in cfg.ranking}
    cut: set[tuple[str, str]] = set()  # data and system of fits that were cut at a time cap
    found |= {name: _examples(cfg, store, name, cut) for name in cfg.examples}
    rows, panels = [], []
    for name, systems in found.items():
        for kind in KINDS:
            lines = []
            for system, values in systems.items():
                points = {t: values[t, kind if t else ""] for t in cfg.times}
                drops = {t: gain(row, points[0]).difference for t, row in points.items() if t}
                rows += [
                    _row(name, system, kind, t, points[t], drops.get(t)) for t in cfg.times if t or kind == "normal"
                ]
                lines.append(_line(system, drops))
            panels.append(Panel(f"{name}, {KINDS[kind]}", lines, f"change in {_metric(name)} from no noise"))
    notes = [
        describe("ndcg@10", "default"),
        MAP_DEFINITION,
        INTERVAL,
        f"{cfg.folds} fold(s), seeds {', '.join(map(str, cfg.seeds))}; "
        + "; ".join(f"{name}: {split_name(name)}" for name in found),
        "noise is drawn for each part by itself; “normal”: standard normal; “permuted”: the values of each real "
        "feature in random order over documents; query-by-example features are first scaled to unit deviation",
    ]
    columns = ["data", "system", "noise", "times", "metric", "test queries", "change from no noise", "counted"]
    table = Table("robustness", "Noise features appended", columns, rows, notes)
    picture = lines_picture(
        panels, x="noise features per real feature", y="", log_x=False, columns=2, bars=True,
        note="error bars: 95% bootstrap of the change, paired per test query",
    )  # fmt: skip
    return Outcome(cfg.name, "Noise features", [table], {"robustness": picture}, _claims(cfg, found, cut))


def _ranking(cfg: Any, store: Store, name: str) -> Values:
    folds = range(cfg.folds)
    return {
        system: {
            (times, kind): per_query(
                all_folds(cfg, store, name, system, folds, noise=Noise(kind, times) if times else None), "ndcg@10"
            )
            for times, kind in _conditions(cfg)
        }
        for system in cfg.compared
    }


def _examples(cfg: Any, store: Store, name: str, cut: set[tuple[str, str]]) -> Values:
    found: Values = {}
    for system, options in cfg.example_systems.items():
        found[system] = {}
        for times, kind in _conditions(cfg):
            noise = Noise(kind or "normal", times)  # none of it still scales the features
            jobs = [example_job(cfg, name, fold, system, dict(options or {}), noise=noise) for fold in range(cfg.folds)]
            title = f"{name}, {NAMES[system]}, {times}x {kind}".strip()
            records = store.all(jobs, title)
            found[system][times, kind] = pooled(records, "map")
            if any(record.info.get("cut") for record in records):
                cut.add((name, system))
    return found


def _conditions(cfg: Any) -> list[tuple[int, str]]:
    return [(t, kind) for t in cfg.times for kind in (KINDS if t else ("",))]


def _metric(name: str) -> str:
    return "MAP" if name.startswith(("digits", "synthetic")) else "NDCG@10"


def _line(system: str, drops: dict[int, Interval]) -> Line:
    found = list(drops.values())
    means, low, high = ([0.0, *(getattr(i, side) for i in found)] for side in ("mean", "low", "high"))
    return Line(NAMES[system], [0, *drops], means, low, high)


def _row(name: str, system: str, kind: str, times: int, values: torch.Tensor, drop: Interval | None) -> list[Any]:
    metric = _metric(name)
    change = "" if drop is None else signed(drop)
    return [name, NAMES[system], KINDS[kind] if times else "none", f"{times}x", metric, shown(interval(values)), change,
            counts(values)]  # fmt: skip


def _claims(cfg: Any, found: dict[str, Values], cut: set[tuple[str, str]]) -> list[Claim]:
    """L-GMML's loss against that of the system it is compared with, query by query, at the most noise."""
    claims, most = [], max(cfg.times)
    pairs = (("boosted", "lightgbm"), ("published", "lightgbm"), ("lgmml", "rmlr"), ("lgmml", "euclidean"))
    for name, systems in found.items():
        for ours, other in pairs:
            if ours not in systems or other not in systems:
                continue
            for kind, word in KINDS.items():
                loss = {s: systems[s][most, kind] - systems[s][0, ""] for s in (ours, other)}
                difference = gain(loss[ours], loss[other]).difference
                means = {s: float(loss[s].nanmean()) for s in loss}
                level = gain(systems[ours][most, kind], systems[other][most, kind])
                verdict = "not decided" if (name, other) in cut else judged(difference)
                if verdict == "holds" and level.difference.high < 0:
                    verdict = "holds in part"
                claims.append(
                    Claim(
                        f"{name}, {most}x {word}: {NAMES[ours]} loses less to irrelevant features than {NAMES[other]}",
                        "claimed in the introduction, not tested",
                        f"{means[ours]:+.4f} against {means[other]:+.4f}: {signed(difference)}",
                        verdict,
                        f"difference of the changes, paired per test query; with the noise {level.mean_a:.4f} against "
                        f"{level.mean_b:.4f}"
                        + (f"; {NAMES[other]} was cut at its time cap" if (name, other) in cut else ""),
                    )
                )
    return claims
