"""What was asked for beforehand, and whether it was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from research.quality.data import NOISES
from research.quality.store import Cells
from research.quality.tables import Table, Values, compare_rows, gaps, noise_losses
from research.speed.harness import verdict

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
        return "not measured" if self.met is None else verdict(self.met)


def verdicts(
    table: Table, times: Mapping[str, Any], growth: Mapping[str, Any] | None, sets: Sequence[str], paper: str | None
) -> list[Verdict]:
    """Every target, in the order of the plan."""
    found = [_against(table, sets, "default − LightGBM + list ranks", "boosted+warp", "lightgbm+ranks", -0.003, 0.0)]
    label = f"default − paper's model (best policy: {(paper or '').removeprefix('paper ')})"
    found.append(_against(table, sets, label, "boosted+warp", paper or "", 0.0, 0.05, strict=False))
    gap = compare_rows(table, "boosted bag+warp", "lightgbm bag", sets)
    found.append(_mean_only("bag − bag of LightGBM: at least −.003 on average", gap, len(sets), -0.003))
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
    table: Table,
    sets: Sequence[str],
    label: str,
    first: str,
    second: str,
    each: float,
    mean: float,
    strict: bool = True,
) -> Verdict:
    gap = compare_rows(table, first, second, sets)
    text = f"{label}: at least {each:g} on each set, {'above' if strict else 'at least'} {mean:g} on average"
    if len(gap) <= len(sets):
        return Verdict(text, "", None)
    listed = ", ".join(f"{name} {value.mean:+.4f}" for name, value in gap.items())
    enough = gap["mean"].mean > mean if strict else gap["mean"].mean >= mean
    return Verdict(text, listed, bool(enough and min(gap[name].mean for name in sets) >= each))


def _mean_only(text: str, gap: Mapping[str, Any], count: int, least: float) -> Verdict:
    if len(gap) <= count:
        return Verdict(text, "", None)
    return Verdict(text, str(gap["mean"]), bool(gap["mean"].mean >= least))


def _noise(table: Table, sets: Sequence[str]) -> Verdict:
    text = "loss with three times the features: at most LightGBM's, mean over sets and kinds of noise"
    ours = [noise_losses(table, "boosted+warp", "boosted noise+warp", kind, sets) for kind in NOISES]
    theirs = [noise_losses(table, "lightgbm+ranks", "lightgbm noise", kind, sets) for kind in NOISES]
    if any(name not in losses for losses in (*ours, *theirs) for name in sets):
        return Verdict(text, "", None)
    # The kinds share their queries, so a query is one value: its mean over them.
    extra = gaps({name: (_mean_of(ours, name), _mean_of(theirs, name)) for name in sets})["mean"]
    return Verdict(text, f"ours beyond theirs {extra}", bool(extra.mean <= 0))


def _mean_of(losses: Sequence[Mapping[str, Values]], name: str) -> Values:
    return np.asarray(np.mean([loss[name] for loss in losses], axis=0))


def time_ratios(cells: Cells, sets: Sequence[str], folds: Sequence[int]) -> dict[str, Any]:
    """Medians over folds and rounds of what was timed in turn."""
    found = {}
    for name in sets:
        timed = [cell for fold in folds if (cell := cells.find("time", name, fold)) is not None]
        if not timed:
            continue
        entry: dict[str, float] = {}
        for stage, unit, scale in (("train", "s", 1.0), ("score", "us", 1e6)):
            pairs = [
                (ours, theirs, cell["documents"])
                for cell in timed
                for ours, theirs in zip(cell[stage]["boosted"], cell[stage]["lightgbm"], strict=True)
            ]
            entry[f"{stage} ratio"] = float(np.median([ours / theirs for ours, theirs, _ in pairs]))
            for who, place in (("boosted", 0), ("lightgbm", 1)):
                per = [pair[place] * scale / (pair[2] if stage == "score" else 1) for pair in pairs]
                entry[f"{who} {stage} {unit}"] = float(np.median(per))
        found[name] = entry
    return found
