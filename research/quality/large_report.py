"""The page of the large sets and its picture, from figures that are kept; the store adds what it has to them.

Fits fill gigabytes of hours, figures a few kilobytes: ``research/results/quality-large.json`` has what a page needs.
``quality-large-per-query.npz`` holds the values of every query, (seeds, queries) under ``set|size|system``, so that
sides that were fitted in different places are paired query by query.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.files import replacing, write_text
from lgmml_torch.functional.significance import Interval
from lgmml_torch.plots import save_figure
from research.plots import Line, Panel, lines_picture
from research.protocol import large_fold
from research.quality.large import GRIDS, NOISY, SEEDS, SIZES, better, choices, fits, variants
from research.stats import gain, interval, markdown, target_word
from research.store import Record, Store, machine_facts, to_json

PROTOCOL, NOTES = (Path(__file__).with_name(name) for name in ("large.md", "large_notes.md"))
LIMITS = {"500": -0.005, "2000": -0.005, "all": 0.0}  # what the default may lie below LightGBM
LABELS = {
    "lightgbm": "LightGBM", "lightgbm+ranks": "LightGBM + list ranks",
    "xgboost": "XGBoost", "xgboost+ranks": "XGBoost + list ranks",
}  # fmt: skip
WITH_TREES = "default + trees"  # the row of `base=auto`
DIFFERENCE = "difference [mean, low, high]"

Facts = dict[str, Any]
Values = dict[str, Tensor]  # (seeds, Q) each


def side(store: Store, data: str, queries: int | None, family: str, noise: str | None = None) -> list[Record]:
    """What is stored of a system, as far as seeds follow one another; nothing is fitted."""
    searches = choices(store, data, queries, family) if family in GRIDS else []
    if any(store.find(job) is None for job in searches):
        return []
    records = []
    for job in fits(store, data, queries, family, range(SEEDS), noise):
        if (found := store.find(job)) is None:
            break
        records.append(found)
    return records


def per_query(records: Sequence[Record], row: str | None = None) -> Tensor:  # (seeds, Q)
    """The values of a row of one system, the first by default."""
    return torch.stack([record.tensor(row or next(iter(record.values))) for record in records])


def side_facts(records: Sequence[Record]) -> Facts:
    """For the file of figures."""
    values = per_query(records)
    mean = values.mean(0)
    return {
        "system": next(iter(records[0].values)),
        "test ndcg@10 by seed": values.nanmean(1).tolist(),
        "test ndcg@10 [mean, low, high]": _three(interval(mean)),
        "queries": int((~mean.isnan()).sum()), "skipped": int(mean.isnan().sum()),
        "valid by seed": [r.info["valid"] for r in records],
        "cpu seconds by seed": [r.info["fit seconds"] for r in records],
    }  # fmt: skip


def add_stored(store: Store, data: str, queries: int | None, entry: Facts, values: Values) -> None:
    """Put what the store has of one size in the place of what was kept."""
    new = {family: side(store, data, queries, family) for family in ("default", *GRIDS)}
    new = {family: records for family, records in new.items() if records}
    for family, records in new.items():
        entry[family] = side_facts(records)
        values[f"{data}|{queries or 'all'}|{family}"] = per_query(records)
        if all(WITH_TREES in record.values for record in records):
            values[f"{data}|{queries or 'all'}|{WITH_TREES}"] = per_query(records, WITH_TREES)
        if family in GRIDS:
            entry[f"{family} chosen"] = better(store, data, queries, family)[1]
            entry[f"{family} searched"] = searches(store, data, queries, family)
    if new:
        fold = large_fold(data)
        entry |= {"training queries": queries or fold.train.num_queries, "features": fold.train.num_features}
        entry["noise"] = entry.get("noise", {}) | noise_facts(store, data, queries)


def searches(store: Store, data: str, queries: int | None, family: str) -> Facts:
    """Of each variant: what was chosen, its validation NDCG@10, and what the search took."""
    found = {}
    for name, job in zip(variants(data, queries, family), choices(store, data, queries, family), strict=True):
        info = store.get(job).info
        found[name] = {
            "chosen": info["chosen"], "valid": info["valid"], "fits": len(info["tried"]),
            "cpu seconds": sum(one["fit seconds"] for one in info["tried"]), "tried": info["tried"],
        }  # fmt: skip
    return found


def difference(ours: Tensor | None, trees: Tensor | None, entry: Facts, family: str) -> list[float | None]:
    """Paired where the values of every query are there; else a difference of means, without an interval."""
    if ours is not None and trees is not None:
        count = min(len(ours), len(trees))
        return [*_three(gain(ours[:count].mean(0), trees[:count].mean(0)).difference)]
    means = [statistics.fmean(entry[name]["test ndcg@10 by seed"]) for name in ("default", family)]
    return [means[0] - means[1], None, None]


def noise_facts(store: Store, data: str, queries: int | None) -> dict[str, Facts]:
    """What noise costs both, where all seeds are there."""
    found = {}
    for kind in NOISY.get(data, {}).get(queries, ()):
        sides = [
            side(store, data, queries, family, noise) for noise in (None, kind) for family in ("default", "lightgbm")
        ]
        if any(len(records) < SEEDS for records in sides):
            continue
        clean_ours, clean_trees, ours, trees = (per_query(records).mean(0) for records in sides)
        losses = clean_ours - ours, clean_trees - trees
        found[kind] = {
            "default": side_facts(sides[2]), "lightgbm": side_facts(sides[3]),
            "loss of the default": _three(interval(losses[0])), "loss of LightGBM": _three(interval(losses[1])),
            "beyond LightGBM's": _three(gain(*losses).difference),
        }  # fmt: skip
    return found


def collect(store: Store, kept: Mapping[str, Mapping[str, Facts]], values: Values) -> dict[str, dict[str, Facts]]:
    """Figures by set and size: those that were kept, and those the store has in their place."""
    figures: dict[str, dict[str, Facts]] = {}
    for data, sizes in SIZES.items():
        for queries in sizes:
            size = str(queries or "all")
            entry = dict(kept.get(data, {}).get(size, {}))
            add_stored(store, data, queries, entry, values)
            sides = {family: values.get(f"{data}|{size}|{family}") for family in ("default", *GRIDS)}
            both, trees = values.get(f"{data}|{size}|{WITH_TREES}"), sides["lightgbm"]
            if both is not None and trees is not None:
                entry[WITH_TREES] = {
                    "test ndcg@10 by seed": both.nanmean(1).tolist(),
                    "− lightgbm": difference(both, trees, entry, "lightgbm"),
                    "− default": difference(both, sides["default"], entry, "lightgbm"),
                }
            for family in GRIDS if "default" in entry else ():
                if family in entry and (sides["default"] is not None or sides[family] is not None):
                    entry[f"default − {family}"] = difference(sides["default"], sides[family], entry, family)
            if entry:
                figures.setdefault(data, {})[size] = entry
    return figures


def compared(figures: Mapping[str, Mapping[str, Facts]]) -> dict[str, dict[str, Facts]]:
    """What has both sides."""
    both: dict[str, dict[str, Facts]] = {}
    for data, sizes in figures.items():
        for size, entry in sizes.items():
            if "default" in entry and "lightgbm" in entry:
                both.setdefault(data, {})[size] = entry
    return both


def read_values(path: Path) -> Values:
    """The values of every query that earlier reports kept."""
    if not path.is_file():
        return {}
    with np.load(path) as arrays:
        return {key: torch.from_numpy(arrays[key]).double() for key in arrays.files}


def write_page(store: Store, *, root: Path) -> None:
    """docs/large.md, its picture, and both files of figures."""
    file = root / "research" / "results" / "quality-large.json"
    values = read_values(file.with_name("quality-large-per-query.npz"))
    kept: Facts = json.loads(file.read_text(encoding="utf-8"))["sets"] if file.is_file() else {}
    figures = collect(store, kept, values)
    write_text(file, to_json({"machine": machine_facts(), "sets": figures}))
    arrays: dict[str, Any] = {key: found.float().numpy() for key, found in values.items()}
    with replacing(file.with_name("quality-large-per-query.npz")) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
    if shown := compared(figures):
        save_figure(picture(shown), root / "docs" / "images" / "quality-large.png", dpi=110)
        write_text(root / "docs" / "large.md", "\n\n".join(page(shown)) + "\n")


def page(figures: Mapping[str, Mapping[str, Facts]]) -> list[str]:
    """Its paragraphs."""
    parts = ["# Many training queries", *OPENING]
    for data, found in figures.items():
        some = next(iter(found.values()))["default"]
        counts = f"{some['queries']:,} test queries counted, {some['skipped'] or 'none'} skipped."
        parts += [f"## {data}", counts, _table(data, found, "lightgbm")]
        if any("xgboost" in entry for entry in found.values()):
            parts += [f"### {data}, XGBoost", _table(data, found, "xgboost")]
        if rows := [_trees_row(entry) for entry in found.values() if WITH_TREES in entry]:
            parts += [
                f"### {data}, LightGBM and local metrics in one model (`base=auto`)",
                markdown(TREES_COLUMNS, rows),
            ]
        if rows := [row for entry in found.values() for row in _search_rows(entry)]:
            parts += [f"### {data}, what was searched", markdown(SEARCH_COLUMNS, rows)]
        if rows := [row for entry in found.values() for row in _noise_rows(entry)]:
            parts += [f"### {data}, three times the features", markdown(NOISE_COLUMNS, rows)]
    parts += ["![NDCG over the number of training queries](images/quality-large.png)"]
    return parts + [path.read_text(encoding="utf-8").strip() for path in (NOTES, PROTOCOL) if path.is_file()]


OPENING = (
    "After this page you can judge how well the default ranks when there are 100 to 8,000 training queries.",
    "Written by `python -m research.quality.large`; figures in `research/results/quality-large.json`, values of every "
    "query in `quality-large-per-query.npz` beside it. NDCG@10 "
    "(gain 2^y − 1, discount 1/log2(i+1), ties in the order of the file) of test queries nobody trained on; ± is "
    "the standard deviation over seeds, brackets are 95% intervals over queries, and a difference without brackets is "
    "one of means, because the values of every query of one side were not kept. *Former grid*: settings that were not "
    "searched at that size. CPU seconds of one thread, preprocessing and early stopping included, beside other work.",
)


def _table(data: str, found: Mapping[str, Facts], family: str) -> str:
    rows = []
    for size, facts in found.items():
        if family not in facts:
            continue
        ours, trees = facts["default"], facts[family]
        gap = facts[f"default − {family}"] if f"default − {family}" in facts else facts[DIFFERENCE]
        verdict = ""
        if data == "debian" and family == "lightgbm":
            limit = LIMITS.get(size, 0.0)
            verdict = f"at least {limit:+.3f}: {target_word(gap[0] >= limit)}"
        former = "" if f"{family} searched" in facts else ", former grid"
        valid = [statistics.fmean(s["valid by seed"]) for s in (ours, trees)]
        rows.append([
            f"{facts['training queries']:,}", _cell(ours), _cell(trees),
            f"{LABELS[trees['system']]} ({_point(facts[f'{family} chosen'])}{former})", _signed(gap), verdict,
            f"{valid[0]:.4f} / {valid[1]:.4f}", f"{_seconds(ours):.0f} / {_seconds(trees):.0f}",
            str(len(ours["test ndcg@10 by seed"])),
        ])  # fmt: skip
    columns = [
        "training queries", "default", LABELS[family], "which (leaves, rate, smallest leaf)",
        f"default − {LABELS[family]}", "asked for", "validation, ours / theirs", "CPU s, ours / theirs", "seeds",
    ]  # fmt: skip
    return markdown(columns, rows)


def _point(point: Mapping[str, Any]) -> str:
    """Leaves, rate, and the smallest leaf or what XGBoost has instead."""
    smallest = next(value for key, value in point.items() if key.startswith("min_"))
    return f"{point['num_leaves']}, {point['learning_rate']}, {smallest}"


SEARCH_COLUMNS = ["training queries", "system", "chosen (leaves, rate, smallest leaf)", "validation", "fits", "CPU s"]


def _search_rows(entry: Facts) -> list[list[str]]:
    rows = []
    for family in GRIDS:
        for name, found in entry.get(f"{family} searched", {}).items():
            rows.append([
                f"{entry['training queries']:,}", LABELS[name], _point(found["chosen"]), f"{found['valid']:.4f}",
                str(found["fits"]), f"{found['cpu seconds']:,.0f}",
            ])  # fmt: skip
    return rows


TREES_COLUMNS = ["training queries", "default + LightGBM", "minus LightGBM, tuned", "minus the default", "seeds"]


def _trees_row(entry: Facts) -> list[str]:
    both = entry[WITH_TREES]
    gaps = [_signed(both[name]) for name in ("− lightgbm", "− default")]
    return [f"{entry['training queries']:,}", _cell(both), *gaps, str(len(both["test ndcg@10 by seed"]))]


NOISE_COLUMNS = [
    "training queries", "noise", "default, with noise", "LightGBM, with noise", "loss of the default",
    "loss of LightGBM", "ours beyond LightGBM's", "CPU s, ours / LightGBM",
]  # fmt: skip


def _noise_rows(facts: Facts) -> list[list[str]]:
    rows = []
    for kind, found in facts.get("noise", {}).items():
        both = found["default"], found["lightgbm"]
        losses = (found[name] for name in ("loss of the default", "loss of LightGBM", "beyond LightGBM's"))
        rows.append([
            f"{facts['training queries']:,}", kind, *map(_cell, both), *map(_signed, losses),
            " / ".join(f"{_seconds(s):.0f}" for s in both),
        ])  # fmt: skip
    return rows


def _cell(facts: Facts) -> str:
    """Mean over queries and seeds, and the spread over seeds."""
    values = facts["test ndcg@10 by seed"]
    return f"{statistics.fmean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def _seconds(facts: Facts) -> float:
    return float(statistics.median(facts["cpu seconds by seed"]))


def _three(found: Interval) -> list[float]:
    return [found.mean, found.low, found.high]


def _signed(three: Sequence[float | None]) -> str:
    mean, low, high = three
    return f"{mean:+.4f}" if low is None else f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"


def picture(figures: Mapping[str, Mapping[str, Facts]]) -> Any:
    """NDCG@10 over training queries, with intervals where they are kept, and CPU seconds of a fit beside it."""
    panels = []
    for data, found in figures.items():
        sizes = [float(facts["training queries"]) for facts in found.values()]
        quality, seconds = [], []
        for label, name in (("L-GMML (default)", "default"), ("LightGBM, tuned", "lightgbm")):
            sides = [facts[name] for facts in found.values()]
            means = [statistics.fmean(s["test ndcg@10 by seed"]) for s in sides]
            ranges = [s.get("test ndcg@10 [mean, low, high]") for s in sides]
            low, high = ([r[place] if r else m for r, m in zip(ranges, means, strict=True)] for place in (1, 2))
            quality.append(Line(label, sizes, means, low, high))
            seconds.append(Line(label, sizes, [_seconds(s) for s in sides]))
        panels.append(Panel(f"{data}: test queries", quality, y="NDCG@10"))
        panels.append(Panel(f"{data}: one fit", seconds, y="CPU seconds"))
    return lines_picture(panels, x="training queries", y="")
