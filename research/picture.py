"""The picture of the README, from generated data: ``python -m research.picture``.

Left, two local metrics in two dimensions, as the sampled way of fitting builds them; right, the validation curve of the
boosted way on a small generated set.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from lgmml_torch import RankingData, fit_boosted, fit_sampled, list_rank_features, ndcg
from lgmml_torch.data.catalog import generated_splits
from lgmml_torch.fitting.bank import Bank
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


def fit_curve(queries: int, rounds: int) -> tuple[Bank, float]:
    """A boosted bank on generated lists, and NDCG@10 of a random order of its validation lists."""
    fold = RankingFold(**generated_splits(queries, 20, noise=0.8, seed=3)).prepared(list_rank_features())
    valid = fold.valid
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(valid.num_documents, generator=generator) for _ in range(20)]
    chance = float(np.mean([float(ndcg(scores, valid.labels, valid.offsets, k=10)) for scores in draws]))
    return fit_boosted(fold.train, valid, rounds=rounds, patience=rounds, seed=0), chance


def picture(queries: int = 120, rounds: int = 150) -> Figure:
    """Both panels."""
    plane = two_queries()
    bank = fit_sampled(plane, num_metrics=2, lam=0.05, bandwidth=1.0, seed=0)
    boosted, chance = fit_curve(queries, rounds)
    return overview_picture(plane, bank, boosted.history, chance)


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
