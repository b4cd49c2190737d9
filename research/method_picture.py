"""The picture of the method, from a bank that is really fitted: ``python -m research.method_picture``.

Left, two anchors with their metrics and three documents; in the middle, the kernel that turns distances into what is
taken off; right, the same weighted and summed, which is the score.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lgmml_torch import fit_sampled
from lgmml_torch.functional.score import kernel
from lgmml_torch.models.local_metrics import MetricBlock
from lgmml_torch.plots import save_figure
from lgmml_torch.ragged import RankingData
from research.picture import two_queries
from research.plots import GREYS, LINES, RELEVANT, Axes, Figure, ellipse

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "method.png"
NAMES = ("A", "B", "C")
WORDS = ("not relevant", "relevant", "highly relevant")
PHI = torch.tensor([1.0, 0.6])  # chosen by hand, as the places of the documents are
RULER = 1.2


@dataclass(frozen=True)
class Scene:
    """What is drawn: lists, the bank's two metrics from left to right, three documents and how they are scored."""

    data: RankingData
    block: MetricBlock
    rows: list[int]
    points: Tensor  # (3, 2)
    dists: Tensor  # (3, 2)
    kappa: Tensor  # (3, 2)


def build_scene() -> Scene:
    """Fit two metrics; A and B are equally far from the first anchor on the ruler, A along its ellipse, B across."""
    data = two_queries()
    bank = fit_sampled(data, num_metrics=2, lam=0.005, t=0.2, bandwidth=1.0, seed=0)  # ellipses one can tell apart
    block = bank.metrics.iter_blocks()[0]
    rows = block.anchors[:, 0].argsort().tolist()
    factor = block.factors[rows[0]]
    along, across = torch.linalg.eigh(factor @ factor.T).eigenvectors.T  # the ellipse's long axis, and its short one
    start = block.anchors[rows[0]]
    a, b = start + RULER * along * along[1].sign(), start - RULER * across * across[0].sign()
    points = torch.stack([a, b, torch.tensor([-0.35, -1.55])])
    dists = bank.metrics(points)[:, rows]
    return Scene(data, block, rows, points, dists, kernel(dists, bank.kernel))


def draw_plane(axis: Axes, scene: Scene) -> None:
    """Documents, anchors, ellipses, and the distances of one document."""
    x, y = scene.data.features.numpy().T
    for label, (colour, word) in enumerate(zip((GREYS, *RELEVANT), WORDS, strict=True)):
        chosen = scene.data.labels.numpy() == label
        axis.scatter(x[chosen], y[chosen], s=11, color=colour, alpha=0.7, linewidths=0, zorder=1, label=word)
    for number in (1, 2):
        draw_anchor(axis, scene, number)
    for name, point in zip(NAMES, scene.points.tolist(), strict=True):
        disc(axis, name, *point)
    near, far = scene.dists[:2, 0].tolist()
    ruler = "By the ruler, A and B are equally far from the left ★."
    metric = f"By its metric A is nearer: $d_1$ = {near:.2f} against {far:.2f}"
    axis.text(0.02, 0.98, f"{ruler}\n{metric}", transform=axis.transAxes, va="top", fontsize=10, zorder=7)
    axis.legend(loc="lower center", ncols=3, fontsize=9, frameon=False, handletextpad=0.1, markerscale=1.6)
    axis.set(aspect="equal", xlim=(-5.6, 5.4), ylim=(-4.1, 4.6), xticks=[], yticks=[])
    axis.set(xlabel="one feature of the documents", ylabel="another feature")


def draw_anchor(axis: Axes, scene: Scene, number: int) -> None:
    """An anchor with its ellipses, and C's distance to it."""
    row, colour, place = scene.rows[number - 1], LINES[number - 1], scene.points[2]
    axis.fill(*ellipse(scene.block, row, 0.5), color=colour, alpha=0.10, linewidth=0, zorder=2)
    for distance, width in ((0.25, 2.0), (0.5, 1.4)):
        edge = ellipse(scene.block, row, distance)
        axis.plot(*edge, color=colour, linewidth=width, zorder=3)
        note(axis, f"d = {distance:g}", edge[:, edge[1].argmin()], (0, -1), colour, fontsize=8)
    anchor = scene.block.anchors[row]
    x, y = anchor.tolist()
    axis.scatter(x, y, marker="*", s=360, color=colour, edgecolors="white", linewidths=1.2, zorder=6)
    axis.plot(*zip(place.tolist(), (x, y), strict=True), color=colour, linestyle="--", zorder=4)
    shift = (-28, -26) if number == 1 else (44, -14)
    text = f"$d_{number}$(C) = {scene.dists[2, number - 1]:.2f}"
    note(axis, text, 0.72 * place + 0.28 * anchor, shift, colour, fontsize=11)


def note(axis: Axes, text: str, place: Any, shift: tuple[float, float], colour: str, *, fontsize: float) -> None:
    """Words on a white ground, in the colour of their anchor."""
    box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    axis.annotate(text, (float(place[0]), float(place[1])), xytext=shift, textcoords="offset points", ha="center",
                  va="center", color=colour, fontsize=fontsize, fontweight="bold", zorder=5, bbox=box)  # fmt: skip


def disc(axis: Axes, name: str, x: float, y: float, *, colour: str = "#222222", size: float = 240) -> None:
    """A document by its letter."""
    axis.scatter(x, y, s=size, color=colour, edgecolors="white", linewidths=1.2, zorder=8, clip_on=False)
    axis.text(x, y, name, color="white", ha="center", va="center", fontsize=size**0.42, fontweight="bold", zorder=9)


def draw_kernel(axis: Axes, scene: Scene) -> None:
    """κ over the distance, with a mark for each document and anchor."""
    d = torch.linspace(0, 2.6, 200)
    axis.plot(d.numpy(), kernel(d).numpy(), color="#555555", linewidth=1.8, zorder=2)
    for column, colour in enumerate(LINES):
        for name, distance, value in zip(NAMES, scene.dists[:, column], scene.kappa[:, column], strict=True):
            disc(axis, name, float(distance), float(value), colour=colour, size=170)
    axis.text(0.22, 0.0, "at the anchor: nothing", fontsize=9.5, color="#555555", va="center")
    axis.text(1.0, 0.405, "most at d = 1", fontsize=9.5, color="#555555", ha="center")
    axis.text(2.6, 0.13, "far away: less again,\nanother's region", fontsize=9.5, color="#555555", ha="right")
    axis.set(xlim=(-0.1, 2.65), ylim=(-0.02, 0.44), xlabel="local distance d", ylabel="κ(d) = d·exp(−d)")
    axis.spines[["top", "right"]].set_visible(False)


def draw_score(axis: Axes, scene: Scene) -> None:
    """Bars of Φκ, best document on top."""
    parts = scene.kappa * PHI
    totals = parts.sum(1)
    for place, document in enumerate(totals.argsort().tolist()):
        left = 0.0
        for column, colour in enumerate(LINES):
            width = float(parts[document, column])
            axis.barh(place, width, 0.54, left, color=colour, edgecolor="white")
            text = f"{PHI[column]:g} · {scene.kappa[document, column]:.2f}"
            axis.text(left + width / 2, place, text, color="white", fontsize=9, ha="center", va="center")
            left += width
        axis.text(left + 0.015, place, f"score −{totals[document]:.2f}", fontsize=10.5, va="center", fontweight="bold")
        disc(axis, NAMES[document], -0.05, place)
        axis.text(-0.1, place, f"{place + 1}.", fontsize=12, ha="right", va="center")
    for column, colour in enumerate(LINES):
        axis.text(0.31 * column, -0.52, f"Φ = {PHI[column]:g} for ★", color=colour, fontsize=10.5, fontweight="bold")
    axis.set(xlim=(-0.14, 0.8), ylim=(2.5, -0.7), yticks=[], xticks=[0, 0.2, 0.4, 0.6], xlabel="taken off in all")
    axis.spines[["top", "right", "left"]].set_visible(False)


def picture() -> Figure:
    """The three steps, and the formula they make."""
    scene = build_scene()
    figure = Figure(figsize=(11.8, 4.9))
    figure.set_layout_engine("constrained", rect=(0, 0.09, 1, 0.91), w_pad=0.12)
    plane, curve, bars = figure.subplots(1, 3, width_ratios=[1.5, 0.95, 1.05])
    draw_plane(plane, scene)
    draw_kernel(curve, scene)
    draw_score(bars, scene)
    heads = {
        plane: "1  Anchors (★) are ideal documents,\neach with a metric of its own: its ellipse",
        curve: "2  The kernel κ turns a distance\ninto what is taken off",
        bars: "3  Weighted by Φ and summed:\nleast taken off ranks first",
    }
    for axis, head in heads.items():
        axis.set_title(head, fontsize=12, loc="left")
    formula = r"$f(p) \;=\; -\,\sum_r\; \Phi_r\;\kappa(\,d_r(p)\,)$"
    figure.text(0.5, 0.045, formula, ha="center", va="center", fontsize=17)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=IMAGE, help="where to (default: docs/images)")
    args = parser.parse_args()
    save_figure(picture(), args.output, dpi=130)
    print(f"{args.output}: {args.output.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
