"""From stored fits to values per query, means, paired differences, and whether what was asked for was found."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lgmml_torch import __version__
from lgmml_torch.functional.significance import Interval
from research.protocol import NOISES
from research.quality.work import Plan, fit_job, time_job
from research.stats import gains, signed, target_word
from research.store import Record, Store

DEFAULT, BOOSTED, START, TREES = "default", "boosted+warp", "boosted", "lightgbm+ranks"
NOISY_BOOSTED, NOISY_TREES = "boosted noise+warp", "lightgbm noise"
PAPER = ("published ones", "published mean", "published knn")


@dataclass(frozen=True)
class Row:
    """One row of the table on one set: NDCG@10 of every test query under every seed that is complete."""

    values: Tensor  # (S, Q), NaN where a query has no relevant document
    valid: tuple[float, ...]  # the mean over folds on validation, by seed
    seconds: float  # CPU seconds of one fit
    release: str = __version__  # that was measured

    @property
    def per_query(self) -> Tensor:  # (Q,)
        """Mean over seeds."""
        return self.values.mean(0)

    @property
    def by_seed(self) -> list[float]:
        """Mean over queries, for each seed."""
        return [float(values.nanmean()) for values in self.values]

    @property
    def mean(self) -> float:
        """Over queries and seeds."""
        return float(self.per_query.nanmean())


Table = dict[tuple[str, str, str | None], Row]  # (row, set, noise)


def collect(store: Store, plan: Plan) -> Table:
    """Everything that is stored; a seed counts only when all its folds, and those of the seeds before it, are there."""
    table: Table = {}
    for system in plan.systems:
        for name in plan.sets:
            for noise in system.noises or (None,):
                done = []
                for seed in range(min(plan.seeds, system.seeds)):
                    found = [store.find(fit_job(store, plan, system, name, fold, noise, seed)) for fold in plan.folds]
                    done.append([record for record in found if record is not None])
                whole = list(takewhile(lambda found: len(found) == len(plan.folds), done))
                for row in system.rows if whole else ():
                    table[row, name, noise] = _row(row, whole)
    return table


def _row(row: str, seeds: Sequence[Sequence[Record]]) -> Row:
    values = [torch.cat([record.tensor(row) for record in found]) for found in seeds]
    valid = tuple(statistics.fmean(record.info["valid"][row] for record in found) for found in seeds)
    seconds = statistics.median(record.info["fit seconds"] for found in seeds for record in found)
    return Row(torch.stack(values), valid, seconds)


def compare_rows(
    table: Table, first: str, second: str, sets: Sequence[str], seeds: int | None = None
) -> dict[str, Interval]:
    """Paired differences of two rows on the sets that have both, over the (first so many) seeds both have.

    A row with one seed is compared with all seeds of the other: nothing is random in it.
    """
    both = [name for name in sets if (first, name, None) in table and (second, name, None) in table]
    return gains({name: _same_seeds(table[first, name, None], table[second, name, None], seeds) for name in both})


def _same_seeds(first: Row, second: Row, seeds: int | None) -> tuple[Tensor, Tensor]:
    common = min(len(first.values), len(second.values))
    count = seeds if common == 1 else min(common, seeds or common)
    return first.values[:count].mean(0), second.values[:count].mean(0)


def noise_losses(table: Table, clean: str, noisy: str, kind: str, sets: Sequence[str]) -> dict[str, Tensor]:
    """Clean minus noisy for every query, over the seeds both have; of one release."""
    found = {}
    for name in sets:
        a, b = table.get((clean, name, None)), table.get((noisy, name, kind))
        if a is not None and b is not None and a.release == b.release:
            seeds = min(len(a.values), len(b.values))
            found[name] = a.values[:seeds].mean(0) - b.values[:seeds].mean(0)
    return found


RENAMED = {f"paper {policy}": f"published {policy}" for policy in ("ones", "mean", "knn")}  # since release 0.1


def read_figures(results: Path, name: str) -> dict[str, Any]:
    """What an earlier report found; nothing where there is none."""
    file = results / f"{name}.json"
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def read_table(results: Path, name: str) -> Table:
    """The rows of an earlier report, from its values of every query and its figures; none where there is no report."""
    table: Table = {}
    content = read_figures(results, name)
    if not content:
        return table
    with np.load(results / f"{name}-per-query.npz") as stored:
        for key in stored.files:
            row, data, *noise = key.split("|")
            place = f"{data}, {noise[0]} noise" if noise else data
            found = content["rows"][row][place]
            values = torch.from_numpy(stored[key]).double()
            valid, seconds = tuple(found["validation by seed"]), found["cpu seconds of a fit"]
            release = found.get("release", content["machine"]["release"])
            table[RENAMED.get(row, row), data, noise[0] if noise else None] = Row(values, valid, seconds, release)
    return table


def best_policy(table: Table, sets: Sequence[str]) -> str | None:
    """The policy of the paper's model with the highest mean over sets."""
    whole = [row for row in PAPER if all((row, name, None) in table for name in sets)]
    return max(whole, key=lambda row: statistics.fmean(table[row, name, None].mean for name in sets), default=None)


def time_ratios(store: Store, plan: Plan) -> dict[str, Any]:
    """Medians over folds and rounds of what was timed in turn."""
    found = {}
    for name in plan.sets:
        records = [store.find(time_job(store, plan, name, fold)) for fold in plan.folds]
        timed = [record.info for record in records if record is not None]
        if not timed:
            continue
        entry: dict[str, float] = {}
        for stage, unit, scale in (("train", "s", 1.0), ("score", "us", 1e6)):
            pairs = [
                (ours, theirs, info["documents"])
                for info in timed
                for ours, theirs in zip(info[stage]["default"], info[stage]["lightgbm"], strict=True)
            ]
            entry[f"{stage} ratio"] = statistics.median(ours / theirs for ours, theirs, _ in pairs)
            for who, place in (("default", 0), ("lightgbm", 1)):
                per = [pair[place] * scale / (pair[2] if stage == "score" else 1) for pair in pairs]
                entry[f"{who} {stage} {unit}"] = statistics.median(per)
        found[name] = entry
    return found


LINEAR = 1.1


@dataclass(frozen=True)
class Verdict:
    """A target, what was found, and whether that meets it (None: not measured)."""

    target: str
    found: str
    met: bool | None

    @property
    def word(self) -> str:
        """For tables."""
        return "not measured" if self.met is None else target_word(self.met)


def verdicts(
    table: Table, times: Mapping[str, Any], growth: Mapping[str, Any] | None, sets: Sequence[str]
) -> list[Verdict]:
    """Every target, in the order of the plan."""
    found = [_against(table, sets, "default − LightGBM + list ranks", TREES, -0.003, 0.0)]
    paper = best_policy(table, sets) or ""
    label = f"default − paper's model (best policy: {paper.removeprefix('published ')})"
    found.append(_against(table, sets, label, paper, 0.0, 0.05, strict=False))
    gap = compare_rows(table, "boosted bag+warp", "lightgbm bag", sets)
    text = "bag − bag of LightGBM: at least −.003 on average"
    whole = len(gap) > len(sets)
    found.append(Verdict(text, signed(gap["mean"]), gap["mean"].mean >= -0.003) if whole else Verdict(text, "", None))
    found.append(_noise(table, sets))
    for key, limit, text in (("train ratio", 8.0, "training time"), ("score ratio", 2.0, "scoring time per document")):
        values = {name: times[name][key] for name in times}
        listed = ", ".join(f"{name} {value:.1f}" for name, value in values.items())
        met = max(values.values()) <= limit if values else None
        found.append(Verdict(f"{text}: at most {limit:g}x LightGBM's on each set", listed, met))
    if growth is not None:
        exponents = {stage: growth[f"{stage} exponent"] for stage in ("train", "score")}
        listed = ", ".join(f"{stage} {value:.2f}" for stage, value in exponents.items())
        target = f"time linear in documents: exponent at most {LINEAR:g}"
        found.append(Verdict(target, listed, max(exponents.values()) <= LINEAR))
    return found


def _against(
    table: Table, sets: Sequence[str], label: str, other: str, each: float, mean: float, *, strict: bool = True
) -> Verdict:
    gap = compare_rows(table, DEFAULT, other, sets)
    text = f"{label}: at least {each:g} on each set, {'above' if strict else 'at least'} {mean:g} on average"
    if len(gap) <= len(sets):
        return Verdict(text, "", None)
    listed = ", ".join(f"{name} {value.mean:+.4f}" for name, value in gap.items())
    enough = gap["mean"].mean > mean if strict else gap["mean"].mean >= mean
    return Verdict(text, listed, enough and min(gap[name].mean for name in sets) >= each)


def _noise(table: Table, sets: Sequence[str]) -> Verdict:
    text = "loss with three times the features: at most LightGBM's, mean over sets and kinds of noise"
    ours = [noise_losses(table, BOOSTED, NOISY_BOOSTED, kind, sets) for kind in NOISES]
    theirs = [noise_losses(table, TREES, NOISY_TREES, kind, sets) for kind in NOISES]
    if any(name not in losses for losses in (*ours, *theirs) for name in sets):
        return Verdict(text, "", None)
    # The kinds share their queries, so a query is one value: its mean over them.
    extra = gains({name: (_mean_of(ours, name), _mean_of(theirs, name)) for name in sets})["mean"]
    return Verdict(text, f"ours beyond theirs {signed(extra)}", extra.mean <= 0)


def _mean_of(losses: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    return torch.stack([loss[name] for loss in losses]).mean(0)
