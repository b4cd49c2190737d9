"""The pictures of research: lines, bars, stages, differences, and the two panels of the README; times are in speed/."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes as Axes
from matplotlib.figure import Figure as Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from lgmml_torch.fitting.bank import Bank
from lgmml_torch.models.local_metrics import MetricBlock
from lgmml_torch.ragged import RankingData

# One system, one look, in every picture; the first word that a label starts with decides.
LOOKS = {
    "random": ("#bbbbbb", "."), "Euclidean": ("#777777", "X"), "linear": ("#997755", "P"), "GBRT": ("#ccaa22", "D"),
    "λ-MART": ("#aa3377", "s"), "MLR": ("#cc7788", "v"), "R-MLR": ("#ee6677", "s"), "GMML": ("#228833", "D"),
    "L-GMML as published": ("#66bbee", "v"), "L-GMML boosted": ("#332288", "^"), "L-GMML": ("#2b5c99", "o"),
    "boosted L-GMML": ("#332288", "^"), "LightGBM": ("#aa3377", "s"), "XGBoost": ("#cc6633", "D"),
    "ours": ("#2b5c99", "o"), "ours, boosted": ("#332288", "^"),
    "train": ("#2b5c99", "o"), "valid": ("#66bbee", "v"), "test": ("#ccaa22", "D"),
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One system: y over x, with a band or bars of what is not sure; ``hollow`` marks points that were cut short."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    hollow: Sequence[bool] | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines in one pair of axes."""

    title: str
    lines: Sequence[Line]
    y: str = ""  # of this panel alone
    marks: Mapping[str, float] = field(default_factory=dict)  # vertical lines by label


def lines_picture(
    panels: Sequence[Panel],
    *,
    x: str,
    y: str,
    log_x: bool = True,
    log_y: bool = False,
    columns: int = 4,
    bars: bool = False,
    title: str = "",
    note: str = "",
) -> Figure:
    """Panels side by side; x has a tick at every point, the legend is shared; ``bars`` draws bars in place of bands."""
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    wide = 6.4 if columns == 1 else 3.6
    figure = Figure(figsize=(wide * columns + 0.4, 3.2 * rows + 1.0), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, panel in zip(axes, panels, strict=False):
        for number, line in enumerate(panel.lines):
            _draw(axis, line, shift=0.05 * (number - (len(panel.lines) - 1) / 2) if bars else None)
        for label, place in panel.marks.items():
            axis.axvline(place, color="#444444", linestyle=":", linewidth=1.2, label=label, zorder=1)
        axis.set_title(panel.title, fontsize=11)
        axis.set_xlabel(x)
        axis.set_ylabel(panel.y or y)
        axis.grid(alpha=0.3)
        _ticks(axis, [list(line.x) for line in panel.lines], log_x)
        if log_y:
            _log_scale(axis)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    _legend(figure, list(axes[: len(panels)]))
    if title or note:
        figure.suptitle("\n".join(text for text in (title, note) if text), fontsize=10)
    return figure


def look(label: str) -> tuple[str, str]:
    """Colour and marker of a system: the longest known name its label starts with."""
    known = [name for name in LOOKS if label.startswith(name)]
    return LOOKS[max(known, key=len)] if known else ("#444444", "o")


def _draw(axis: Axes, line: Line, shift: float | None) -> None:
    colour, marker = look(line.label)
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.6}
    style |= {"linestyle": "--" if line.dashed else "-", "label": line.label}
    if shift is not None and line.low is not None and line.high is not None:
        below, above = np.subtract(line.y, line.low), np.subtract(line.high, line.y)
        axis.errorbar(np.add(line.x, shift), line.y, yerr=[below, above], capsize=3, elinewidth=1.1, **style)
        return
    axis.plot(line.x, line.y, **style)
    if line.low is not None and line.high is not None:
        axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    if line.hollow is not None and any(line.hollow):
        cut = [(a, b) for a, b, is_cut in zip(line.x, line.y, line.hollow, strict=True) if is_cut]
        axis.plot(
            *zip(*cut, strict=True), linestyle="none", marker="^", markersize=10, color="white",
            markeredgecolor=colour, markeredgewidth=1.6, zorder=5, label=f"{line.label}, cut at the time cap: more",
        )  # fmt: skip


def _ticks(axis: Axes, places: Sequence[Sequence[float]], log_x: bool) -> None:
    """A tick at every point where the lines share theirs, else at 1, 2, 5, 10, …."""
    values = sorted({value for line in places for value in line})
    if not log_x:
        axis.xaxis.set_major_locator(FixedLocator(values))
        return
    if any(set(line) != set(values) for line in places):
        steps = [step * 10.0**power for power in range(-3, 7) for step in (1, 2, 5)]
        values = [step for step in steps if values[0] <= step <= values[-1]]
    axis.set_xscale("log")
    kept: list[float] = []
    for value in values:  # labels closer than this would run into one another
        if not kept or value / kept[-1] > 1.9:
            kept.append(value)
    axis.xaxis.set_major_locator(FixedLocator(kept))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _log_scale(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axis.get_ylim()
    if high < 100 * low:  # less than two decades have too few ticks without those between
        axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""))
    else:
        axis.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(4, len(found)), fontsize=9)


def bars_picture(
    groups: Sequence[str],
    systems: Mapping[str, Sequence[tuple[float, float, float]]],
    *,
    y: str,
    title: str = "",
    note: str = "",
    log_y: bool = False,
    digits: int = 2,
) -> Figure:
    """A group of bars for each data set, one bar per system: (value, below, above) with error bars; NaN is left out."""
    bars = len(groups) * len(systems)
    figure = Figure(figsize=(max(6.0, 0.62 * bars + 2.2), 4.2), layout="constrained")
    axis = figure.subplots()
    _draw_bars(axis, groups, systems, log_y=log_y, digits=digits)
    axis.set_ylabel(y)
    figure.legend(loc="outside lower center", ncols=min(6, len(systems)), fontsize=9)
    if title or note:
        figure.suptitle("\n".join(text for text in (title, note) if text), fontsize=10)
    return figure


def _draw_bars(
    axis: Axes,
    groups: Sequence[str],
    systems: Mapping[str, Sequence[tuple[float, float, float]]],
    *,
    log_y: bool,
    digits: int,
) -> None:
    width = 0.84 / max(1, len(systems))
    for index, (label, values) in enumerate(systems.items()):
        place = np.arange(len(groups)) + (index - (len(systems) - 1) / 2) * width
        height = np.array([value for value, _, _ in values])
        errors = np.array([(below, above) for _, below, above in values]).T
        kept = ~np.isnan(height)
        axis.bar(place[kept], height[kept], width * 0.94, color=look(label)[0], label=label, zorder=2)
        if np.any(errors[:, kept]):
            style: dict[str, Any] = {"fmt": "none", "ecolor": "#222222", "capsize": 2.5, "linewidth": 1.1, "zorder": 3}
            axis.errorbar(place[kept], height[kept], yerr=np.abs(errors[:, kept]), **style)
        for x, value, above in zip(place[kept], height[kept], np.abs(errors[1, kept]), strict=True):
            top = value + above if value >= 0 else max(0.0, value + above)
            text = f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}" if log_y else f"{value:.{digits}f}"
            axis.annotate(
                text, (x, top), xytext=(0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=8,
            )  # fmt: skip
    axis.set_xticks(range(len(groups)), groups)
    axis.grid(axis="y", alpha=0.3, zorder=0)
    axis.margins(y=0.12)
    if log_y:
        _log_scale(axis)
    else:
        axis.axhline(0, color="#222222", linewidth=0.8)


@dataclass(frozen=True)
class Box:
    """A stage of the pipeline: where it stands on the grid, what it is called and what it does."""

    column: float
    row: float
    name: str
    text: str
    colour: str = "#dce8f5"


def pipeline_picture(boxes: Sequence[Box], arrows: Sequence[tuple[int, int, str]], *, title: str = "") -> Figure:
    """Boxes on a grid, arrows between them with a word each."""
    columns, rows = max(box.column for box in boxes) + 1, max(box.row for box in boxes) + 1
    figure = Figure(figsize=(3.05 * columns, 1.85 * rows + 0.5), layout="constrained")
    axis = figure.subplots()
    centres = [(3.0 * box.column, -1.9 * box.row) for box in boxes]
    half = (1.12, 0.62)
    for box, (x, y) in zip(boxes, centres, strict=True):
        axis.add_patch(
            FancyBboxPatch(
                (x - half[0], y - half[1]), 2 * half[0], 2 * half[1], boxstyle="round,pad=0.06,rounding_size=0.12",
                facecolor=box.colour, edgecolor="#33475b", linewidth=1.2,
            )
        )  # fmt: skip
        axis.text(x, y + 0.32, box.name, ha="center", va="center", fontsize=10.5, fontweight="bold")
        axis.text(x, y - 0.16, box.text, ha="center", va="center", fontsize=8.2, linespacing=1.35)
    for start, stop, word in arrows:
        a, b = centres[start], centres[stop]
        sideways = abs(b[0] - a[0]) > 0.1
        sign = math.copysign(1, b[0] - a[0]) if sideways else math.copysign(1, b[1] - a[1])
        shift = (sign * (half[0] + 0.08), 0.0) if sideways else (0.0, sign * (half[1] + 0.08))
        tail, head = (a[0] + shift[0], a[1] + shift[1]), (b[0] - shift[0], b[1] - shift[1])
        axis.add_patch(FancyArrowPatch(tail, head, arrowstyle="-|>", mutation_scale=14, color="#33475b", linewidth=1.3))
        x, y = (tail[0] + head[0]) / 2, (tail[1] + head[1]) / 2
        axis.text(
            x + (0.0 if sideways else 0.1), y + (0.1 if sideways else 0.0), word, ha="center" if sideways else "left",
            va="bottom" if sideways else "center", fontsize=7.6, color="#33475b",
        )  # fmt: skip
    axis.set_xlim(-1.4, 3.0 * (columns - 1) + 1.4)
    axis.set_ylim(-1.9 * (rows - 1) - 0.85, 0.85)
    axis.set_aspect("equal")
    axis.axis("off")
    if title:
        axis.set_title(title, fontsize=12)
    return figure


COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


Interval = tuple[float, float, float]  # mean, low, high


def differences_picture(
    rows: Mapping[str, Mapping[str, Interval]],  # system → set → interval
    *,
    reference: str,
    sets: Sequence[str],
) -> Figure:
    """One panel for each set, one line for each system: the paired difference to the reference and its interval.

    >>> rows = {"a": {"toy": (0.01, -0.01, 0.03)}}
    >>> differences_picture(rows, reference="b", sets=["toy"]).axes[0].get_title()
    'toy'
    """
    figure = Figure(figsize=(2.4 * len(sets) + 2.6, 0.28 * len(rows) + 1.4), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(sets), sharey=True))
    names = list(rows)
    for axis, name in zip(axes, sets, strict=True):
        axis.axvline(0, color="black", linewidth=0.8)
        for place, system in enumerate(names):
            if name not in rows[system]:
                continue
            mean, low, high = rows[system][name]
            colour = COLOURS[2] if low > 0 else COLOURS[1] if high < 0 else "#777777"
            axis.plot([low, high], [place, place], color=colour, linewidth=1.6)
            axis.plot([mean], [place], "o", color=colour, markersize=4)
        axis.set_title(name, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.locator_params(axis="x", nbins=4)
        axis.grid(axis="x", linewidth=0.3)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].invert_yaxis()
    figure.supxlabel(f"NDCG@10 minus that of {reference}, 95% over queries", fontsize=9)
    return figure


def noise_picture(
    groups: Sequence[str],
    losses: Mapping[str, Sequence[Interval]],  # system → by group
    extra: Sequence[Interval],  # by group
    *,
    title: str,
) -> Figure:
    """Above, what each system loses, with its interval; below, the first one's loss minus the second one's, paired."""
    figure = Figure(figsize=(1.2 * len(groups) + 1.6, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
    bars = {label: [(m, m - low, high - m) for m, low, high in found] for label, found in losses.items()}
    _draw_bars(above, groups, bars, log_y=False, digits=3)
    above.set_ylabel("loss of NDCG@10")
    mean, low, high = np.array(extra).T
    place = np.arange(len(groups))
    style: dict[str, Any] = {"fmt": "o", "color": "#222222", "capsize": 3, "markersize": 5, "linewidth": 1.4}
    below.errorbar(place, mean, yerr=[mean - low, high - mean], **style)
    below.axhline(0, color="#222222", linewidth=0.8)
    first, second = losses
    below.set_ylabel("difference of losses")
    below.set_title(f"{first} minus {second}: below zero, the first loses less", fontsize=10)
    below.grid(axis="y", alpha=0.3)
    for axis in (above, below):
        axis.tick_params(axis="x", labelbottom=True, labelsize=9)
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    figure.suptitle(f"{title}\nerror bars: 95% bootstrap over queries, paired per query", fontsize=10)
    return figure


GREYS, RELEVANT = "#b8bec6", ("#f0b95b", "#c8502d")  # label 0; labels 1 and 2
LINES = ("#1f4e79", "#2a7f62")


def overview_picture(data: RankingData, bank: Bank, history: Mapping[str, Any], chance: float) -> Figure:
    """Left, local metrics in the plane; right, the curves of boosting beside a random order's NDCG@10."""
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    draw_metrics(left, data, bank)
    draw_curve(right, history, chance)
    return figure


def draw_metrics(axis: Axes, data: RankingData, bank: Bank) -> None:
    """Documents in the plane, and around each anchor the ellipses of equal local distance."""
    x, y = data.features.numpy().T
    for label, colour in enumerate((GREYS, *RELEVANT)):
        chosen = data.labels.numpy() == label
        axis.scatter(x[chosen], y[chosen], s=14, color=colour, linewidths=0, zorder=2)
    block = bank.metrics.iter_blocks()[0]
    order = block.anchors[:, 0].argsort().tolist()
    for colour, row in zip(LINES, order, strict=True):
        for share, width in ((0.2, 1.9), (0.4, 1.3), (0.6, 0.8)):
            axis.plot(*ellipse(block, row, share), color=colour, linewidth=width, zorder=3)
        across, up = block.anchors[row].tolist()
        axis.scatter(across, up, marker="*", s=190, color=colour, edgecolors="white", linewidths=1.0, zorder=4)
    dots = zip((GREYS, *RELEVANT), ("not relevant", "relevant", "highly relevant"), strict=True)
    handles = [
        Line2D([], [], marker="o", linestyle="", markersize=4, color=colour, label=word) for colour, word in dots
    ]
    handles += [
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


def ellipse(block: MetricBlock, row: int, distance: float) -> Any:  # (2, 200)
    """Where the local distance to an anchor in the plane has one value: ‖Fᵀv‖ = distance · scale."""
    turns = torch.linspace(0, 2 * torch.pi, 200)
    circle = distance * block.scales[row] * torch.stack([turns.cos(), turns.sin()])
    return (torch.linalg.solve(block.factors[row].T, circle) + block.anchors[row][:, None]).numpy()


def draw_curve(axis: Axes, history: Mapping[str, Any], chance: float) -> None:
    """NDCG@10 of training, validation and test queries by round of boosting, and the round that is kept."""
    best = history["best_round"]
    place = history["rounds"].index(best)
    curves = {
        "train_ndcg": ("training queries", "#9aa5b1", 1.6),
        "valid_ndcg": ("validation queries, which choose the round", LINES[0], 2.0),
        "test_ndcg": ("test queries, which choose nothing", LINES[1], 2.0),
    }
    for name, (label, colour, width) in curves.items():
        axis.plot(history["rounds"], history[name], color=colour, linewidth=width, label=label)
        edge: dict[str, Any] = {"edgecolors": RELEVANT[1], "linewidths": 1.4, "zorder": 4}
        axis.scatter([best], [history[name][place]], s=40, color=colour, **edge)
    axis.axhline(chance, color="#9aa5b1", linestyle=":", linewidth=1.2)
    axis.axvline(best, color=RELEVANT[1], linestyle="--", linewidth=1.2)
    axis.annotate("random order, test queries", (history["rounds"][0], chance), xytext=(0, 5), ha="left",
                  textcoords="offset points", fontsize=9, color="#6d7884")  # fmt: skip
    axis.annotate(f"kept: round {best}", (best, chance), xytext=(-6, 24), ha="right", textcoords="offset points",
                  fontsize=9, color=RELEVANT[1])  # fmt: skip
    axis.set_xlabel("boosting round")
    axis.set_ylabel("NDCG@10")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=9, framealpha=1, edgecolor="white", loc="center right", bbox_to_anchor=(1.0, 0.38))
    axis.set_title("Metrics are added while validation queries gain", fontsize=11)
