"""Two rankings of the same lists, query by query."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lgmml_torch.checks import check_positive
from lgmml_torch.evaluation.evaluate import plain_number, plain_qid
from lgmml_torch.functional.ranking.measures import rank_data
from lgmml_torch.functional.ranking.presets import describe
from lgmml_torch.functional.significance import Comparison, compare
from lgmml_torch.ragged import RankingData


@dataclass(frozen=True, eq=False)
class Paired:
    """What the first ranking is better by, per query and on average.

    Attributes:
        first: what the first ranking is called.
        second: what the second is called.
        split: what was ranked.
        measure: such as ``"ndcg@10"``.
        definition: its rules in one line.
        comparison: means, their difference with its interval, wins, ties and losses of the first.
        values: ``(2, Q)`` the measure of both per query, NaN where skipped.
        qids: the queries.
        seed: of the bootstrap.
    """

    first: str
    second: str
    split: str
    measure: str
    definition: str
    comparison: Comparison
    values: Tensor = field(repr=False)
    qids: tuple[Hashable, ...] = field(repr=False)
    seed: int = 0

    @property
    def gaps(self) -> Tensor:
        """``(Q,)`` first minus second, NaN where either skips the query."""
        return self.values[0] - self.values[1]

    def most_different(self, count: int = 5) -> list[int]:
        """The queries with the largest differences of either sign, as indices; equal ones are left out."""
        sizes = self.gaps.abs().nan_to_num(0.0)
        order = sizes.argsort(descending=True, stable=True)[:count]
        queries: list[int] = order[sizes[order] > 0].tolist()
        return queries

    def sentence(self) -> str:
        """The comparison in words."""
        gap, found = self.comparison.difference, self.comparison
        verdict = "the interval holds 0"
        if found.significant:
            verdict = "the interval leaves out 0"
        return (
            f"{self.measure} {found.mean_a:.4f} against {found.mean_b:.4f}: {gap.mean:+.4f}, {gap.confidence:.0%} "
            f"interval [{gap.low:+.4f}, {gap.high:+.4f}] over {gap.counted} queries ({verdict}); {found.wins} won, "
            f"{found.ties} tied, {found.losses} lost, {gap.skipped} skipped"
        )

    def to_dict(self, *, per_query: bool = False) -> dict[str, Any]:
        """Primitives only."""
        found, gap = self.comparison, self.comparison.difference
        content: dict[str, Any] = {
            "first": self.first, "second": self.second, "split": self.split, "measure": self.measure,
            "definition": self.definition, "means": [found.mean_a, found.mean_b],
            "difference": {"mean": gap.mean, "low": gap.low, "high": gap.high, "confidence": gap.confidence},
            "counted": gap.counted, "skipped": gap.skipped, "wins": found.wins, "ties": found.ties,
            "losses": found.losses, "seed": self.seed,
        }  # fmt: skip
        if per_query:
            content["qids"] = list(map(plain_qid, self.qids))
            content["per_query"] = [list(map(plain_number, row)) for row in self.values.tolist()]
        return content


def compare_rankings(
    first: tuple[str, Tensor],  # a name, and (N,) scores in the order of the rows of `data`
    second: tuple[str, Tensor],
    data: RankingData,
    *,
    split: str = "data",
    measure: str = "ndcg@10",
    preset: str = "default",
    seed: int = 0,
    resamples: int = 10_000,
) -> Paired:
    """Measure both per query, and their mean difference with a bootstrap interval over queries.

    Raises:
        LGMMLError: an unknown measure, scores of another number of documents, no query that counts.

    >>> data = RankingData.from_arrays([[1.0], [2.0], [3.0], [4.0]], [0, 1, 1, 0], qid=[7, 7, 8, 8])
    >>> paired = compare_rankings(("up", data.features[:, 0]), ("down", -data.features[:, 0]), data)
    >>> float(paired.gaps.sum().abs()) < 1e-6, paired.comparison.wins, paired.comparison.losses
    (True, 1, 1)
    """
    check_positive("resamples", resamples)
    rows = []
    for _, scores in (first, second):
        rows.append(rank_data(scores, data, metrics=[measure], preset=preset)[measure])
    generator = torch.Generator().manual_seed(seed)
    found = compare(rows[0], rows[1], generator=generator, resamples=resamples)
    definition = describe(measure, preset)
    return Paired(first[0], second[0], split, measure, definition, found, torch.stack(rows).cpu(), data.qids, seed)
