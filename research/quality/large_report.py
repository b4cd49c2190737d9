"""The page of the large sets, its figures and its picture, from what is stored."""

from __future__ import annotations

import statistics
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
from research.quality.large import SEEDS, SIZES, Place, better_trees, chosen_point, fit_job, point_job, points, variants
from research.stats import gain, interval, markdown, signed, target_word
from research.store import Record, Store, machine_facts, to_json

PROTOCOL, NOTES = (Path(__file__).with_name(name) for name in ("large.md", "large_notes.md"))
LIMITS = {500: -0.005, 2000: -0.005, None: 0.0}  # what the default may lie below LightGBM
LABELS = {"lightgbm": "LightGBM", "lightgbm+ranks": "LightGBM + list ranks"}


@dataclass(frozen=True)
class Side:
    """One system at one size."""

    name: str
    records: list[Record]  # by seed

    @property
    def per_query(self) -> Tensor:  # (Q,)
        """Mean over seeds."""
        return torch.stack([record.tensor(self.name) for record in self.records]).mean(0)

    @property
    def by_seed(self) -> list[float]:
        """Mean over queries, for each seed."""
        return [record.mean(self.name) for record in self.records]

    def cell(self) -> str:
        """Mean over queries and seeds, and the spread over seeds."""
        spread = f" ± {statistics.stdev(self.by_seed):.4f}" if len(self.records) > 1 else ""
        return f"{statistics.fmean(self.by_seed):.4f}{spread}"

    def facts(self) -> dict[str, Any]:
        """For the file of figures."""
        return {
            "system": self.name, "test ndcg@10 by seed": self.by_seed, "queries": int((~self.per_query.isnan()).sum()),
            "skipped": int(self.per_query.isnan().sum()), "valid by seed": [r.info["valid"] for r in self.records],
            "cpu seconds by seed": [r.info["fit seconds"] for r in self.records],
        }  # fmt: skip


def side(store: Store, data: str, queries: int | None, name: str) -> Side | None:
    """What is stored of a system, as far as seeds follow one another."""
    records = []
    for seed in range(SEEDS):
        found = store.find(fit_job(store, Place(data, queries, 0 if queries is None else seed), name, seed))
        if found is None:
            break
        records.append(found)
    return Side(name, records) if records else None


def sides(store: Store, data: str) -> dict[int | None, tuple[Side, Side]]:
    """The default and the better LightGBM, at the sizes that have both."""
    found = {}
    for queries in SIZES[data]:
        if _chosen(store, data, queries):
            ours, trees = (side(store, data, queries, name) for name in ("default", better_trees(store, data, queries)))
            if ours is not None and trees is not None:
                found[queries] = (ours, trees)
    return found


def _chosen(store: Store, data: str, queries: int | None) -> bool:
    """Whether all points of the grid are there, so that asking for the best does no work."""
    for size in SIZES[data][: SIZES[data].index(queries) + 1]:
        for name in variants(store, data, size):
            tried = [point_job(Place(data, size), name, point) for point in points(store, data, size, name)]
            if any(store.find(job) is None for job in tried):
                return False
    return True


def write_page(store: Store, *, root: Path) -> None:
    """docs/large.md, its picture and research/results/quality-large.json."""
    every = {data: sides(store, data) for data in SIZES}
    every = {data: found for data, found in every.items() if found}
    content = {"machine": machine_facts(), "sets": {data: _facts(store, data, found) for data, found in every.items()}}
    write_text(root / "research" / "results" / "quality-large.json", to_json(content))
    save_figure(picture(every), root / "docs" / "images" / "quality-large.png", dpi=110)
    parts = [
        "# Many training queries",
        "Written by `python -m research.quality.large`; figures in `research/results/quality-large.json`. NDCG@10 "
        "(gain 2^y − 1, discount 1/log2(i+1), ties in the order of the file) of test queries nobody trained on; ± is "
        "the standard deviation over seeds, brackets are 95% intervals over queries. CPU seconds of one thread, "
        "preprocessing and early stopping included, beside another process.",
    ]
    for data, found in every.items():
        parts += [f"## {data}", _counts(data), _table(store, data, found)]
    parts += ["![NDCG over the number of training queries](images/quality-large.png)"]
    parts += [path.read_text(encoding="utf-8").strip() for path in (NOTES, PROTOCOL) if path.is_file()]
    write_text(root / "docs" / "large.md", "\n\n".join(parts) + "\n")


def _counts(data: str) -> str:
    test = large_fold(data).test
    return f"{test.num_queries:,} test queries counted, none skipped; {large_fold(data).train.num_features} features."


def _table(store: Store, data: str, found: dict[int | None, tuple[Side, Side]]) -> str:
    rows = []
    for queries, (ours, trees) in found.items():
        gap, limit = _gap(ours, trees), LIMITS[queries]
        verdict = f"at least {limit:+.3f}: {target_word(gap.mean >= limit)}" if data == "debian" else ""
        point = chosen_point(store, data, queries, trees.name)
        trees_name = f"{LABELS[trees.name]} ({', '.join(str(value) for value in point.values())})"
        seconds = [statistics.median(r.info["fit seconds"] for r in s.records) for s in (ours, trees)]
        valid = [statistics.fmean(r.info["valid"] for r in s.records) for s in (ours, trees)]
        rows.append([
            f"{queries or large_fold(data).train.num_queries:,}", ours.cell(), trees.cell(), trees_name, signed(gap),
            verdict, f"{valid[0]:.4f} / {valid[1]:.4f}", f"{seconds[0]:.0f} / {seconds[1]:.0f}",
            str(min(len(ours.records), len(trees.records))),
        ])  # fmt: skip
    columns = [
        "training queries", "default", "LightGBM", "which (leaves, rate, smallest leaf)", "default − LightGBM",
        "asked for", "validation, ours / LightGBM", "CPU s, ours / LightGBM", "seeds",
    ]  # fmt: skip
    return markdown(columns, rows)


def _gap(ours: Side, trees: Side) -> Interval:
    count = min(len(ours.records), len(trees.records))
    first, second = (Side(s.name, s.records[:count]).per_query for s in (ours, trees))
    return gain(first, second).difference


def _facts(store: Store, data: str, found: dict[int | None, tuple[Side, Side]]) -> dict[str, Any]:
    content = {}
    for queries, (ours, trees) in found.items():
        gap = _gap(ours, trees)
        content[str(queries or "all")] = {
            "default": ours.facts(), "lightgbm": trees.facts(),
            "difference [mean, low, high]": [gap.mean, gap.low, gap.high],
            "lightgbm chosen": chosen_point(store, data, queries, trees.name),
        }  # fmt: skip
    return content


def picture(every: dict[str, dict[int | None, tuple[Side, Side]]]) -> Any:
    """NDCG@10 over training queries, and CPU seconds of a fit beside it."""
    panels = []
    for data, found in every.items():
        sizes = [float(queries or large_fold(data).train.num_queries) for queries in found]
        quality, seconds = [], []
        for label, place in (("L-GMML (default)", 0), ("LightGBM, tuned", 1)):
            values = [interval(pair[place].per_query) for pair in found.values()]
            quality.append(
                Line(label, sizes, [v.mean for v in values], [v.low for v in values], [v.high for v in values])
            )
            times = [statistics.median(r.info["fit seconds"] for r in pair[place].records) for pair in found.values()]
            seconds.append(Line(label, sizes, times))
        panels.append(Panel(f"{data}: test queries", quality, y="NDCG@10"))
        panels.append(Panel(f"{data}: one fit", seconds, y="CPU seconds"))
    return lines_picture(panels, x="training queries", y="")
