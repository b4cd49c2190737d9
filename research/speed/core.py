"""The mathematical core side by side with its peers: geometric means and evaluation of rankings.

Run with ``python -m research.speed.core``; the figures are saved to ``research/results/core.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pyriemann.geometry.geodesic import geodesic_riemann
from torch import Tensor
from torchmetrics.retrieval import RetrievalNormalizedDCG

from lgmml_torch.functional.gmml import gmml
from lgmml_torch.functional.measures import rank_metrics
from lgmml_torch.functional.presets import MEASURES
from lgmml_torch.functional.spd import geometric_mean
from lgmml_torch.segments import offsets_from_sizes, segment_ids
from research.speed.harness import print_table, save_result, time_interleaved
from research.stats import target_word

SIZES = ((46, 500), (136, 100), (519, 6))  # D and how many matrices
FASTER_THAN_PYRIEMANN = 2.0
SLOWER_THAN_EIGH = 1.9  # for D of 136 and more


def random_bank(dim: int, count: int, generator: torch.Generator) -> Tensor:  # (count, dim, dim)
    X = torch.randn(count, 2 * dim, dim, dtype=torch.float64, generator=generator)
    return X.mT @ X / dim


def run_means(rounds: int = 9) -> dict[str, Any]:
    """Time all sizes, print the table and return the figures."""
    generator = torch.Generator().manual_seed(0)
    figures, rows = [], []
    for dim, count in SIZES:
        A, B = (random_bank(dim, count, generator) for _ in "AB")
        difference = torch.linalg.matrix_norm(geometric_mean(A, B) - geodesic_riemann(A, B, 0.5)).max()
        calls: dict[str, Callable[[], object]] = {
            "mean": partial(geometric_mean, A, B),
            "pyriemann": partial(geodesic_riemann, A, B, 0.5),
            "factor": partial(gmml, A, B),
            "eigh": partial(torch.linalg.eigh, A),
        }
        times = time_interleaved(calls, rounds=rounds)
        faster, slower = times["pyriemann"].ratio(times["mean"]), times["factor"].ratio(times["eigh"])
        met = faster >= FASTER_THAN_PYRIEMANN and (dim < 136 or slower <= SLOWER_THAN_EIGH)
        milliseconds = {name: 1000 * time.median for name, time in times.items()}
        figures.append(
            {
                "dim": dim,
                "count": count,
                "milliseconds": milliseconds,
                "pyriemann_over_mean": faster,
                "factor_over_eigh": slower,
                "largest_difference": float(difference),
                "met": met,
            }
        )
        rows.append((f"{count}x{dim}", *milliseconds.values(), faster, slower, target_word(met)))
    columns = ("K x D, ms", "mean", "pyRiemann", "factor", "eigh", "pyR/mean", "fac/eigh", "target")
    print_table(
        f"Geometric means (targets: pyR/mean >= {FASTER_THAN_PYRIEMANN:g}, "
        f"fac/eigh <= {SLOWER_THAN_EIGH:g} from D=136)",
        columns,
        rows,
    )
    return {"figures": figures}


MANY = tuple(f"{kind}@{k}" for kind in MEASURES for k in (1, 5, 10))
WANTED_RATIO = 50.0


def run_evaluation(rounds: int = 5) -> dict[str, Any]:
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
    return "none" if met is None else target_word(met)


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


PARTS = {"means": run_means, "evaluation": run_evaluation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="run one part, without saving")
    arguments = parser.parse_args()
    # Threads that wait for each other turn seconds into minutes when another process has a core.
    torch.set_num_threads(1)
    parts = [arguments.only] if arguments.only else list(PARTS)
    result = {part: PARTS[part]() for part in parts}
    if not arguments.only:
        print(f"saved {save_result('core', result).name}")


if __name__ == "__main__":
    main()
