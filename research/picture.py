"""The picture of the README, from generated data: ``python -m research.picture``.

Left, two local metrics in two dimensions, as the sampled way of fitting builds them; right, the boosted way on a small
generated set: curves of training queries, of validation queries, which choose the round, and of test queries, which
choose nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lgmml_torch import RankingData, fit_boosted, fit_sampled, list_rank_features
from lgmml_torch.data.catalog import generated_splits
from lgmml_torch.fitting.boosted import RoundInfo
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.plots import save_figure
from research.plots import Figure, overview_picture
from research.protocol import RankingFold

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "overview.png"


def two_queries(documents: int = 170, seed: int = 3) -> RankingData:
    """Two lists in the plane; in each, relevant documents lie along a line, in its own direction."""
    rng = np.random.default_rng(seed)
    points, labels = [], []
    for centre, angle in (((-2.5, -0.1), 0.9), ((2.5, 0.1), -0.5)):
        along, across = rng.normal(0, 1.2, documents), rng.normal(0, 1.0, documents)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        points.append(np.stack([along, across], axis=1) @ turn.T + centre)
        distance = np.hypot(along / 3.5, across) + rng.normal(0, 0.05, documents)
        labels.append((distance < 0.6).astype(int) + (distance < 0.3))
    return RankingData.from_arrays(np.concatenate(points), np.concatenate(labels), group=[documents, documents])


def fit_curve(queries: int, rounds: int) -> tuple[dict[str, Any], float]:
    """The history of boosting on generated lists, with their test lists, and NDCG@10 of a random order of these."""
    fold = RankingFold(**generated_splits(queries, 20, noise=0.8, seed=3)).prepared(list_rank_features())
    test = fold.test
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(test.num_documents, generator=generator) for _ in range(20)]
    chance = float(np.mean([mean_measure(scores, test) for scores in draws]))
    seen: list[RoundInfo] = []
    settings: dict[str, Any] = {"rounds": rounds, "patience": rounds, "seed": 0}
    bank = fit_boosted(fold.train, fold.valid, on_round=lambda _, info: seen.append(info), **settings)
    learners = seen[-1].state.learners  # of all rounds; the bank ends with the round that validation chose
    kernels = learners.kernels(test.features, bank.kernel)
    kept = [learners.rounds <= number for number in bank.history["rounds"]]
    curve = [mean_measure(-(kernels[:, some] @ learners.phi[some]), test) for some in kept]
    return {**bank.history, "test_ndcg": curve}, chance


def picture(queries: int = 120, rounds: int = 150) -> Figure:
    """Both panels."""
    plane = two_queries()
    bank = fit_sampled(plane, num_metrics=2, lam=0.05, bandwidth=1.0, seed=0)
    history, chance = fit_curve(queries, rounds)
    return overview_picture(plane, bank, history, chance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=IMAGE, help="where to (default: docs/images)")
    parser.add_argument("--queries", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=150)
    args = parser.parse_args()
    save_figure(picture(args.queries, args.rounds), args.output, dpi=110)
    print(f"{args.output}: {args.output.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
