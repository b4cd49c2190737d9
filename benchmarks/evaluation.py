"""Ranking evaluation against torchmetrics' NDCG: many equal lists, and lists of 1 to 2,000 documents.

Both sides compute NDCG@10 by torchmetrics' own definition (linear gain, averaged ties, 0 for lists without a relevant
document) and must agree before they are timed; 21 metrics in one call are timed as well. The target holds for the equal
lists: torchmetrics' loop over queries costs little when lists are few and long. Run with ``python -m
benchmarks.core --only evaluation``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics.retrieval import RetrievalNormalizedDCG

from benchmarks.harness import print_table, time_interleaved, verdict
from lgmml_torch.functional.ranking import METRICS, rank_metrics
from lgmml_torch.segments import offsets_from_sizes, segment_ids

MANY = tuple(f"{kind}@{k}" for kind in METRICS for k in (1, 5, 10))
WANTED_RATIO = 50.0


def run(rounds: int = 5) -> dict[str, Any]:
    """Time both sides on one thread, print the table and return the figures."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = [
            _case("8000 lists of 40", torch.full((8000,), 40), WANTED_RATIO, rounds),
            _case("500 lists of 1 to 2000", _mixed_sizes(500), None, rounds),
        ]
    finally:
        torch.set_num_threads(threads)
    rows = [
        (case["lists"], *case["milliseconds"].values(), case["torchmetrics_over_ours"], _target(case["met"]))
        for case in figures
    ]
    columns = ("lists", "torchmetrics ms", "ours ms", "ours, 21 metrics ms", "torchmetrics/ours", "target")
    print_table(f"NDCG@10, one thread (target: torchmetrics/ours >= {WANTED_RATIO:g})", columns, rows)
    return {"figures": figures}


def _target(met: bool | None) -> str:
    return "none" if met is None else verdict(met)


def _mixed_sizes(count: int) -> Tensor:  # (count,)
    """Log-uniform lengths, both ends included: many short lists, a few long ones, as in real collections."""
    sizes = torch.logspace(0, torch.log10(torch.tensor(2000.0)).item(), count).round().long()
    return sizes[torch.randperm(count, generator=torch.Generator().manual_seed(0))]


def _case(lists: str, sizes: Tensor, wanted: float | None, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    offsets = offsets_from_sizes(sizes)
    total = int(offsets[-1])
    scores = torch.randn(total, generator=generator)
    labels = torch.randint(0, 5, (total,), generator=generator)
    indexes = segment_ids(offsets)

    def theirs() -> Tensor:
        metric = RetrievalNormalizedDCG(top_k=10)
        metric.update(scores, labels, indexes=indexes)
        value: Tensor = metric.compute()
        return value

    def ours() -> Tensor:
        return rank_metrics(scores, labels, offsets, metrics=["ndcg@10"], preset="torchmetrics")["ndcg@10"].mean()

    def many() -> Tensor:
        return rank_metrics(scores, labels, offsets, metrics=MANY, max_grade=4)["ndcg@10"].nanmean()

    gap = abs(float(theirs()) - float(ours()))
    if gap > 1e-5:
        raise AssertionError(f"the two sides must agree to 1e-5 before they are timed, got a gap of {gap:.3g}")
    times = time_interleaved({"torchmetrics": theirs, "ours": ours, "ours, 21 metrics": many}, rounds=rounds)
    ratio = times["torchmetrics"].ratio(times["ours"])
    return {
        "lists": lists,
        "documents": total,
        "milliseconds": {name: 1000 * time.median for name, time in times.items()},
        "torchmetrics_over_ours": ratio,
        "difference": gap,
        "met": None if wanted is None else ratio >= wanted,
    }
