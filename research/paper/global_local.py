"""Global against local metrics on Synthetic-C: MAP against the number of local metrics (the paper's second figure)."""

from __future__ import annotations

from functools import partial
from typing import Any

from lgmml_torch.functional.significance import Interval
from research.paper.jobs import example_job
from research.paper.outcome import Claim, Outcome, Table
from research.plots import Line, Panel, lines_picture
from research.stats import INTERVAL, MAP_DEFINITION, counts, gain, interval, judged, number, pooled, shown, signed
from research.store import Store

LEVEL = 0.01  # MAP within which two numbers of metrics count as equally good


def run(cfg: Any, store: Store) -> Outcome:
    """Every number of classes, every number of metrics, some draws of the data."""
    make = partial(example_job, cfg)
    rows, panels, claims = [], [], []
    for classes in cfg.classes:
        data, folds = f"synthetic-{classes}", range(cfg.repetitions)
        base = store.all([make(data, fold, "gmml", {}) for fold in folds], f"{data}, GMML")
        level = pooled(base, "map")
        one = interval(level)
        found: dict[int, tuple[Interval, Interval, float]] = {}
        for K in cfg.metrics:
            jobs = [make(data, fold, "lgmml", {"num_regions": K}) for fold in folds]
            records = store.all(jobs, f"{data}, {K} local metrics")
            values = pooled(records, "map")
            valid = sum(record.info["validation map"] for record in records) / len(records)
            difference = gain(values, level).difference
            found[K] = (interval(values), difference, valid)
            rows.append([data, K, shown(found[K][0]), shown(one), signed(difference), counts(values)])
        panels.append(_panel(classes, found, one))
        claims += _claims(classes, found, one, cfg)
    notes = (
        MAP_DEFINITION,
        INTERVAL,
        f"each set drawn {cfg.repetitions} time(s), seeds 0 to {cfg.repetitions - 1}; 20 dimensions, 20 database items "
        "and 20 queries per class, half of the queries for validation (ρ), half for the test",
        "GMML: one metric from all training pairs, t = ½, λ = .1; L-GMML: the same per region, ρ by validation MAP; "
        "K is at most the number of training queries",
    )
    columns = ["data", "local metrics K", "MAP L-GMML", "MAP GMML", "gain", "test queries"]
    table = Table("global_local", "Global against local metrics, MAP on test queries", columns, rows, notes)
    picture = lines_picture(
        panels, x="number of local metrics K", y="MAP, test queries", note="bands: 95% bootstrap over queries"
    )
    return Outcome(cfg.name, "Global against local metrics", [table], {"global_local": picture}, claims)


def _panel(classes: int, found: dict[int, tuple[Interval, Interval, float]], one: Interval) -> Panel:
    K = list(found)
    local = [found[k][0] for k in K]
    lines = [
        Line("L-GMML", K, [i.mean for i in local], [i.low for i in local], [i.high for i in local]),
        Line("GMML (one global metric)", K, [one.mean] * len(K), [one.low] * len(K), [one.high] * len(K), dashed=True),
    ]
    return Panel(f"Synthetic-{classes}", lines, marks={"K = number of centres": classes})


def _claims(classes: int, found: dict[int, tuple[Interval, Interval, float]], one: Interval, cfg: Any) -> list[Claim]:
    chosen = max(found, key=lambda K: found[K][2])
    difference = found[chosen][1]
    peak = max(found, key=lambda K: found[K][0].mean)
    best = found[peak][0].mean
    level = [K for K in found if found[K][0].mean >= best - LEVEL]
    grid = ", ".join(map(str, cfg.metrics))
    first = Claim(
        f"Synthetic-{classes}: local metrics gain over one global metric",
        "a gain, read off a figure (values not given)",
        f"MAP {number(found[chosen][0].mean)} against {number(one.mean)}: {signed(difference)} at K = {chosen}, "
        "chosen on validation queries",
        judged(difference),
        "paired over test queries",
    )
    near = classes / 2 <= level[0] <= 2 * classes
    flat = level[-1] > level[0]
    second = Claim(
        f"Synthetic-{classes}: the gain is largest where K is about the number of centres",
        f"peak near K = {classes}",
        f"peak at K = {peak}; within {LEVEL} of it from K = {level[0]} to {level[-1]} (tried: {grid})",
        "does not hold" if not near else "holds in part" if flat else "holds",
        "MAP reaches its level near the number of centres"
        + (" and stays there: more metrics do no harm, so it is a plateau and not a peak" if flat else "")
        if near
        else "MAP reaches its level away from the number of centres",
    )
    return [first, second]
