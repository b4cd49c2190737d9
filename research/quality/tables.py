"""From stored fits to values per query, means, paired differences and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from research.quality.store import Cells
from research.quality.systems import System

RESAMPLES = 10_000
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One row of the table on one set: NDCG@10 of every test query under every seed that is complete."""

    values: Values  # (S, Q), NaN where a query has no relevant document
    valid: tuple[float, ...]  # the mean over folds on validation, by seed
    seconds: float  # CPU seconds of one fit

    @property
    def per_query(self) -> Values:  # (Q,)
        """Mean over seeds."""
        return np.asarray(self.values.mean(0))

    @property
    def by_seed(self) -> list[float]:
        """Mean over queries, for each seed."""
        return [float(np.nanmean(values)) for values in self.values]

    @property
    def mean(self) -> float:
        """Over queries and seeds."""
        return float(np.nanmean(self.per_query))


@dataclass(frozen=True)
class Gap:
    """A mean difference and its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"

    def numbers(self) -> list[float]:
        """For JSON."""
        return [round(value, 5) for value in (self.mean, self.low, self.high)]


Table = dict[tuple[str, str, str | None], Row]  # (row, set, noise)


def collect(cells: Cells, systems: Sequence[System], sets: Sequence[str], folds: Sequence[int], seeds: int) -> Table:
    """Everything that is stored; a seed counts only when all its folds, and those of the seeds before it, are there."""
    table: Table = {}
    for system in systems:
        for name in sets:
            for noise in system.noises or (None,):
                done = []
                for seed in range(min(seeds, system.seeds)):
                    found = [cells.find("test", system.name, name, fold, noise, seed) for fold in folds]
                    done.append([cell for cell in found if cell is not None])
                whole = list(takewhile(lambda found: len(found) == len(folds), done))
                for row in system.labels if whole else ():
                    table[row, name, noise] = _row(row, whole)
    return table


def _row(row: str, seeds: Sequence[Sequence[Mapping[str, Any]]]) -> Row:
    values = [np.concatenate([np.array(cell["values"][row], dtype=float) for cell in found]) for found in seeds]
    valid = tuple(float(np.mean([cell["valid"][row] for cell in found])) for found in seeds)
    seconds = float(np.median([cell["fit seconds"] for found in seeds for cell in found]))
    return Row(np.stack(values), valid, seconds)


def resampled_means(differences: Values, generator: np.random.Generator) -> Values:  # (RESAMPLES,)
    """Bootstrap means over queries."""
    draws = generator.integers(0, len(differences), (RESAMPLES, len(differences)))
    return np.asarray(differences[draws].mean(1))


def gaps(pairs: Mapping[str, tuple[Values, Values]], seed: int = 0) -> dict[str, Gap]:
    """Paired differences on each set, and under ``"mean"`` their mean over sets."""
    generator = np.random.default_rng(seed)
    found: dict[str, Gap] = {}
    means, draws = [], []
    for name, (first, second) in pairs.items():
        differences = first - second
        differences = differences[~np.isnan(differences)]
        drawn = resampled_means(differences, generator)
        found[name] = _gap(float(differences.mean()), drawn)
        means.append(float(differences.mean()))
        draws.append(drawn)
    if means:
        found["mean"] = _gap(float(np.mean(means)), np.mean(draws, axis=0))
    return found


def compare_rows(
    table: Table, first: str, second: str, sets: Sequence[str], seeds: int | None = None
) -> dict[str, Gap]:
    """Paired differences of two rows on the sets that have both, over the (first so many) seeds both have.

    A row with one seed is compared with all seeds of the other: nothing is random in it.
    """
    both = [name for name in sets if (first, name, None) in table and (second, name, None) in table]
    return gaps({name: _same_seeds(table[first, name, None], table[second, name, None], seeds) for name in both})


def _same_seeds(first: Row, second: Row, seeds: int | None) -> tuple[Values, Values]:
    common = min(len(first.values), len(second.values))
    count = seeds if common == 1 else min(common, seeds or common)
    return first.values[:count].mean(0), second.values[:count].mean(0)


def noise_losses(table: Table, clean: str, noisy: str, kind: str, sets: Sequence[str]) -> dict[str, Values]:
    """Clean minus noisy for every query, over the seeds both have."""
    found = {}
    for name in sets:
        a, b = table.get((clean, name, None)), table.get((noisy, name, kind))
        if a is not None and b is not None:
            seeds = min(len(a.values), len(b.values))
            found[name] = a.values[:seeds].mean(0) - b.values[:seeds].mean(0)
    return found


def best_policy(table: Table, sets: Sequence[str], rows: Sequence[str]) -> str | None:
    """The row with the highest mean over sets."""
    whole = [row for row in rows if all((row, name, None) in table for name in sets)]
    return max(whole, key=lambda row: np.mean([table[row, name, None].mean for name in sets]), default=None)


def _gap(mean: float, draws: Values) -> Gap:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Gap(mean, float(low), float(high))
