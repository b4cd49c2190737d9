"""The page of the large sets and its picture, from figures that are kept; the store adds what it has to them.

Fits fill gigabytes of hours, figures a few kilobytes: ``research/results/quality-large.json`` holds all that the page
needs, so that it can be written where the fits of an earlier run are gone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lgmml_torch.files import write_text
from lgmml_torch.functional.significance import Interval
from lgmml_torch.plots import save_figure
from research.plots import Line, Panel, lines_picture
from research.protocol import large_fold
from research.quality.large import (
    NOISY,
    SEEDS,
    SIZES,
    Place,
    better_trees,
    chosen_point,
    fit_job,
    kept_choice,
    point_job,
    points,
    variants,
)
from research.stats import gain, interval, markdown, target_word
from research.store import Record, Store, machine_facts, to_json

PROTOCOL, NOTES = (Path(__file__).with_name(name) for name in ("large.md", "large_notes.md"))
LIMITS = {"500": -0.005, "2000": -0.005, "all": 0.0}  # what the default may lie below LightGBM
LABELS = {"lightgbm": "LightGBM", "lightgbm+ranks": "LightGBM + list ranks"}

Facts = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """One system at one size."""

    name: str
    records: list[Record]  # by seed

    @property
    def per_query(self) -> Tensor:  # (Q,)
        """Mean over seeds."""
        return torch.stack([record.tensor(self.name) for record in self.records]).mean(0)

    def facts(self) -> Facts:
        """For the file of figures."""
        return {
            "system": self.name,
            "test ndcg@10 by seed": [record.mean(self.name) for record in self.records],
            "test ndcg@10 [mean, low, high]": _three(interval(self.per_query)),
            "queries": int((~self.per_query.isnan()).sum()), "skipped": int(self.per_query.isnan().sum()),
            "valid by seed": [r.info["valid"] for r in self.records],
            "cpu seconds by seed": [r.info["fit seconds"] for r in self.records],
        }  # fmt: skip


def side(store: Store, data: str, queries: int | None, name: str, noise: str | None = None) -> Side | None:
    """What is stored of a system, as far as seeds follow one another."""
    records = []
    for seed in range(SEEDS):
        found = store.find(fit_job(store, Place(data, queries, 0 if queries is None else seed, noise), name, seed))
        if found is None:
            break
        records.append(found)
    return Side(name, records) if records else None


def _chosen(store: Store, data: str, queries: int | None) -> bool:
    """Whether all points of the grid are there, so that asking for the best does no work."""
    for size in SIZES[data][: SIZES[data].index(queries) + 1]:
        if kept_choice(data, size) is not None:
            continue
        for name in variants(store, data, size):
            tried = [point_job(Place(data, size), name, point) for point in points(store, data, size, name)]
            if any(store.find(job) is None for job in tried):
                return False
    return True


def stored_facts(store: Store, data: str) -> dict[str, Facts]:
    """Figures of the default and the better LightGBM, at the sizes for which the store has both."""
    found = {}
    for queries in SIZES[data]:
        if not _chosen(store, data, queries):
            continue
        trees_name = better_trees(store, data, queries)
        both = [side(store, data, queries, name) for name in ("default", trees_name)]
        ours, trees = both
        if ours is None or trees is None:
            continue
        count = min(len(ours.records), len(trees.records))
        ours, trees = (Side(s.name, s.records[:count]) for s in (ours, trees))
        found[str(queries or "all")] = {
            "default": ours.facts(), "lightgbm": trees.facts(),
            "difference [mean, low, high]": _three(gain(ours.per_query, trees.per_query).difference),
            "lightgbm chosen": chosen_point(store, data, queries, trees_name),
            "training queries": queries or large_fold(data).train.num_queries,
            "features": large_fold(data).train.num_features,
            "noise": noise_facts(store, data, queries, (ours, trees)),
        }  # fmt: skip
    return found


def noise_facts(store: Store, data: str, queries: int | None, clean: tuple[Side, Side]) -> dict[str, Facts]:
    """What noise costs both, where all seeds are there."""
    found = {}
    for kind in NOISY.get(data, {}).get(queries, ()):
        noisy = [side(store, data, queries, s.name, kind) for s in clean]
        whole = [s for s in noisy if s is not None and len(s.records) == SEEDS]
        if len(whole) < 2:
            continue
        losses = [a.per_query - b.per_query for a, b in zip(clean, whole, strict=True)]
        found[kind] = {
            "default": whole[0].facts(), "lightgbm": whole[1].facts(),
            "loss of the default": _three(interval(losses[0])), "loss of LightGBM": _three(interval(losses[1])),
            "beyond LightGBM's": _three(gain(*losses).difference),
        }  # fmt: skip
    return found


def write_page(store: Store, *, root: Path) -> None:
    """docs/large.md, its picture and research/results/quality-large.json."""
    file = root / "research" / "results" / "quality-large.json"
    before: Facts = json.loads(file.read_text(encoding="utf-8"))["sets"] if file.is_file() else {}
    figures = {}
    for data in SIZES:
        kept, new = before.get(data, {}), stored_facts(store, data)
        # What was run once stays as it was run; fits without noise beside those with it are no second table.
        merged = {
            size: {**new.get(size, {}), **kept.get(size, {}), "noise": (new.get(size) or kept[size]).get("noise", {})}
            for size in _sizes(data)
            if size in kept | new
        }
        if merged:
            figures[data] = merged
    write_text(file, to_json({"machine": machine_facts(), "sets": figures}))
    save_figure(picture(figures), root / "docs" / "images" / "quality-large.png", dpi=110)
    parts = [
        "# Many training queries",
        "After this page you can judge how well the default ranks when there are 500 to 8,000 training queries.",
        "Written by `python -m research.quality.large`; figures in `research/results/quality-large.json`. NDCG@10 "
        "(gain 2^y − 1, discount 1/log2(i+1), ties in the order of the file) of test queries nobody trained on; ± is "
        "the standard deviation over seeds, brackets are 95% intervals over queries. CPU seconds of one thread, "
        "preprocessing and early stopping included, beside another process.",
    ]
    for data, found in figures.items():
        some = next(iter(found.values()))["default"]
        counts = f"{some['queries']:,} test queries counted, {some['skipped'] or 'none'} skipped."
        parts += [f"## {data}", counts, _table(data, found)]
        if rows := [row for facts in found.values() for row in _noise_rows(facts)]:
            parts += [f"### {data}, three times the features", markdown(NOISE_COLUMNS, rows)]
    parts += ["![NDCG over the number of training queries](images/quality-large.png)"]
    parts += [path.read_text(encoding="utf-8").strip() for path in (NOTES, PROTOCOL) if path.is_file()]
    write_text(root / "docs" / "large.md", "\n\n".join(parts) + "\n")


def _sizes(data: str) -> list[str]:
    return [str(queries or "all") for queries in SIZES[data]]


def _table(data: str, found: Mapping[str, Facts]) -> str:
    rows = []
    for size, facts in found.items():
        ours, trees, gap = facts["default"], facts["lightgbm"], facts["difference [mean, low, high]"]
        limit = LIMITS.get(size, 0.0)
        verdict = f"at least {limit:+.3f}: {target_word(gap[0] >= limit)}" if data == "debian" else ""
        point = ", ".join(str(value) for value in facts["lightgbm chosen"].values())
        valid = [statistics.fmean(s["valid by seed"]) for s in (ours, trees)]
        rows.append([
            f"{facts['training queries']:,}", _cell(ours), _cell(trees),
            f"{LABELS[trees['system']]} ({point})", _signed(gap), verdict,
            f"{valid[0]:.4f} / {valid[1]:.4f}", f"{_seconds(ours):.0f} / {_seconds(trees):.0f}",
            str(len(ours["test ndcg@10 by seed"])),
        ])  # fmt: skip
    columns = [
        "training queries", "default", "LightGBM", "which (leaves, rate, smallest leaf)", "default − LightGBM",
        "asked for", "validation, ours / LightGBM", "CPU s, ours / LightGBM", "seeds",
    ]  # fmt: skip
    return markdown(columns, rows)


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


def _signed(three: list[float]) -> str:
    return f"{three[0]:+.4f} [{three[1]:+.4f}, {three[2]:+.4f}]"


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
