"""The picture of the README, from generated data: ``python -m research.picture``.

Left, two local metrics in two dimensions, as the sampled way of fitting builds them; right, the validation curve of the
boosted way on a small generated set.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lgmml_torch import RankingData, fit_boosted, fit_sampled, list_rank_features, ndcg
from lgmml_torch.data.catalog import generated_splits
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.plots import save_figure

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "overview.png"
GREYS, RELEVANT = "#b8bec6", ("#f0b95b", "#c8502d")  # label 0; labels 1 and 2
LINES = ("#1f4e79", "#2a7f62")


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


def draw_metrics(axis: Any, data: RankingData) -> None:
    """The documents, and around each anchor the ellipses of equal local distance."""
    bank = fit_sampled(data, num_metrics=2, lam=0.05, bandwidth=1.0, seed=0)
    x, y = data.features.numpy().T
    for label, colour in enumerate((GREYS, *RELEVANT)):
        chosen = data.labels.numpy() == label
        axis.scatter(x[chosen], y[chosen], s=14, color=colour, linewidths=0, zorder=2)
    turns = torch.linspace(0, 2 * torch.pi, 200)
    circle = torch.stack([turns.cos(), turns.sin()])  # (2, 200)
    block = bank.metrics.iter_blocks()[0]
    order = block.anchors[:, 0].argsort().tolist()
    for colour, row in zip(LINES, order, strict=True):
        anchor, scale = block.anchors[row], block.scales[row]
        for share, width in ((0.2, 1.9), (0.4, 1.3), (0.6, 0.8)):
            # ‖Fᵀv‖ = share · median distance: v = F⁻ᵀ times a circle of that radius.
            edge = torch.linalg.solve(block.factors[row].T, share * scale * circle) + anchor[:, None]
            axis.plot(*edge.numpy(), color=colour, linewidth=width, zorder=3)
        axis.scatter(*anchor.numpy(), marker="*", s=190, color=colour, edgecolors="white", linewidths=1.0, zorder=4)
    handles = [
        Line2D([], [], marker="o", linestyle="", markersize=4, color=GREYS, label="not relevant"),
        Line2D([], [], marker="o", linestyle="", markersize=4, color=RELEVANT[0], label="relevant"),
        Line2D([], [], marker="o", linestyle="", markersize=4, color=RELEVANT[1], label="highly relevant"),
        Line2D([], [], marker="*", linestyle="", markersize=10, color=LINES[0], label="anchor: ideal document"),
        Line2D([], [], color=LINES[0], label="equal local distance"),
    ]
    axis.legend(handles=handles, fontsize=8, loc="lower center", ncols=3, frameon=False, bbox_to_anchor=(0.5, -0.17))
    axis.set_aspect("equal")
    axis.set_xlim(-6.0, 6.0)
    axis.set_ylim(-3.6, 3.6)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_title("Each region of the feature space has a metric of its own", fontsize=11)


def fit_curve(queries: int, rounds: int) -> tuple[Bank, float]:
    """A boosted bank on generated lists, and NDCG@10 of a random order of its validation lists."""
    splits = generated_splits(queries, 20, noise=0.8, seed=3)
    preprocess = list_rank_features()
    train, valid = splits["train"], splits["valid"]
    train = train.replace(features=preprocess.fit_transform(train.features, train.offsets))
    valid = valid.replace(features=preprocess(valid.features, valid.offsets))
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(valid.num_documents, generator=generator) for _ in range(20)]
    chance = float(np.mean([float(ndcg(scores, valid.labels, valid.offsets, k=10)) for scores in draws]))
    return fit_boosted(train, valid, rounds=rounds, patience=rounds, seed=0), chance


def draw_curve(axis: Any, bank: Bank, chance: float) -> None:
    """NDCG@10 by round, and the round that is kept."""
    history = bank.history
    best = history["best_round"]
    axis.plot(history["rounds"], history["train_ndcg"], color="#9aa5b1", linewidth=1.6)
    axis.plot(history["rounds"], history["valid_ndcg"], color=LINES[0], linewidth=2.2)
    value = history["valid_ndcg"][history["rounds"].index(best)]
    axis.axhline(chance, color="#9aa5b1", linestyle=":", linewidth=1.2)
    axis.axvline(best, color=RELEVANT[1], linestyle="--", linewidth=1.2)
    axis.scatter([best], [value], s=46, color=RELEVANT[1], zorder=4)
    last = history["rounds"][-1]
    axis.annotate("training queries", (last, history["train_ndcg"][-1]), xytext=(-4, -12), ha="right", fontsize=9,
                  textcoords="offset points", color="#6d7884")  # fmt: skip
    axis.annotate("unseen validation queries", (best, value), xytext=(-10, -24), ha="right",
                  textcoords="offset points", fontsize=9, color=LINES[0])  # fmt: skip
    axis.annotate("random order", (last, chance), xytext=(-4, 5), ha="right", textcoords="offset points", fontsize=9,
                  color="#6d7884")  # fmt: skip
    axis.annotate(f"kept: round {best}", (best, chance), xytext=(-6, 24), ha="right", textcoords="offset points",
                  fontsize=9, color=RELEVANT[1])  # fmt: skip
    axis.set_xlabel("boosting round")
    axis.set_ylabel("NDCG@10")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title("Metrics are added while unseen queries gain", fontsize=11)


def picture(queries: int = 120, rounds: int = 150) -> Figure:
    """Both panels."""
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    draw_metrics(left, two_queries())
    draw_curve(right, *fit_curve(queries, rounds))
    return figure


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
