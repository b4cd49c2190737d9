"""Ranking evaluation against torchmetrics' NDCG: many equal lists, and lists of 1 to 2,000 documents.

Both sides compute NDCG@10 by torchmetrics' own definition (linear gain, averaged ties, 0 for lists without a relevant
document) and must agree before they are timed. A further row times seven metrics at three cutoffs at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchmetrics.retrieval import RetrievalNormalizedDCG

from lgmml_torch.functional.ranking import METRICS, rank_metrics
from lgmml_torch.segments import offsets_from_sizes, segment_ids

MANY = tuple(f"{kind}@{k}" for kind in METRICS for k in (1, 5, 10))
WANTED_RATIO = 50.0


def run() -> dict[str, Any]:
    """Time both sides by turns on one thread; returns seconds and ratios, and prints a table."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = {
            "8000 lists of 40": _case(torch.full((8000,), 40)),
            "500 lists of 1 to 2000": _case(_mixed_sizes(500)),
        }
    finally:
        torch.set_num_threads(threads)
    _print(results)
    return results


def _mixed_sizes(count: int) -> Tensor:  # (count,)
    """Log-uniform lengths, both ends included: many short lists, a few long ones, as in real collections."""
    sizes = torch.logspace(0, torch.log10(torch.tensor(2000.0)).item(), count).round().long()
    return sizes[torch.randperm(count, generator=torch.Generator().manual_seed(0))]


def _case(sizes: Tensor, rounds: int = 5) -> dict[str, Any]:
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
    seconds = _by_turns({"torchmetrics": theirs, "ours": ours, "ours, 21 metrics": many}, rounds)
    ratio = seconds["torchmetrics"] / seconds["ours"]
    return {"documents": total, "seconds": seconds, "ratio": ratio, "wanted": WANTED_RATIO, "gap": gap}


def _by_turns(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Best time of each call; taking turns exposes all of them to the same disturbances."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def _print(results: dict[str, Any]) -> None:
    table = Table("lists", "side", "ms", "torchmetrics / side", title="NDCG@10, one thread")
    for case, result in results.items():
        for side, seconds in result["seconds"].items():
            ratio = result["seconds"]["torchmetrics"] / seconds
            table.add_row(case, side, f"{1e3 * seconds:.1f}", f"{ratio:.0f}x")
    Console().print(table)


if __name__ == "__main__":
    run()
