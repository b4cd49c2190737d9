"""The pictures of times: stages, growth, scoring, and the race for validation NDCG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from research.plots import COLOURS, look


def stages_picture(
    runs: Mapping[str, Mapping[str, float]],  # run → stage → seconds
) -> Figure:
    """One bar for each run, the stages one after the other.

    >>> stages_picture({"small": {"metrics": 2.0, "distances": 1.0}}).axes[0].get_xlabel()
    'seconds'
    """
    figure = Figure(figsize=(8, 1.2 + 0.6 * len(runs)), layout="constrained")
    axis = figure.subplots()
    stages = list(dict.fromkeys(stage for seconds in runs.values() for stage in seconds))
    start = np.zeros(len(runs))
    for number, stage in enumerate(stages):
        width = np.array([seconds.get(stage, 0.0) for seconds in runs.values()])
        axis.barh(list(runs), width, left=start, label=stage, color=COLOURS[number % len(COLOURS)])
        start += width
    axis.set_xlabel("seconds")
    axis.legend(ncols=len(stages), fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def scaling_picture(
    seconds: Mapping[str, Mapping[int, Mapping[str, float]]],  # size → value → stage → seconds
    exponents: Mapping[str, Mapping[str, float]],  # size → stage
) -> Figure:
    """Seconds of each stage over each size, both logarithmic, with the fitted exponent in the legend.

    >>> points = {"documents": {10: {"all": 1.0}, 20: {"all": 2.0}}}
    >>> len(scaling_picture(points, {"documents": {"all": 1.0}}).axes)
    1
    """
    figure = Figure(figsize=(4.4 * len(seconds), 4.2), layout="constrained")
    for axis, (size, points) in zip(np.atleast_1d(figure.subplots(1, len(seconds))), seconds.items(), strict=True):
        for number, (stage, exponent) in enumerate(exponents[size].items()):
            values = [found[stage] for found in points.values()]
            style = {"color": "black", "linewidth": 2} if stage == "all" else {"color": COLOURS[number % len(COLOURS)]}
            axis.loglog(list(points), values, marker="o", markersize=4, label=f"{stage}: {exponent:.2f}", **style)
        axis.set_xlabel(size)
        axis.set_ylabel("seconds")
        axis.set_xticks(list(points), [f"{value:,}" for value in points], minor=False)
        axis.minorticks_off()
        axis.set_yticks(_marks(points))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.legend(title="exponents", fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    return figure


def _marks(points: Mapping[int, Mapping[str, float]]) -> list[float]:
    """1, 2 and 5 times powers of ten within the seconds shown."""
    values = [seconds for found in points.values() for seconds in found.values()]
    steps = [digit * 10.0**power for power in range(-4, 6) for digit in (1, 2, 5)]
    return [step for step in steps if 0.8 * min(values) <= step <= 1.25 * max(values)]


def ratios_picture(
    values: Mapping[str, float],
    *,
    unit: str,
    title: str = "",
) -> Figure:
    """Horizontal bars with their values, the first one as the yardstick of the others.

    Bars that begin with the same word are of one family: shades of one colour, the first the darkest.

    >>> bars = ratios_picture({"ours": 1.0, "theirs": 4.0}, unit="seconds")
    >>> [text.get_text() for text in bars.axes[0].texts]
    [' 1', ' 4 (4x)']
    """
    figure = Figure(figsize=(8, 1.0 + 0.4 * len(values)), layout="constrained")
    axis = figure.subplots()
    axis.barh(list(values), list(values.values()), color=shades(list(values)))
    first = next(iter(values.values()))
    for place, value in enumerate(values.values()):
        ratio = f" ({value / first:.3g}x)" if place else ""
        axis.text(value, place, f" {_seconds(value)}{ratio}", va="center", fontsize=9)
    axis.set_xlim(0, 1.25 * max(values.values()))
    axis.invert_yaxis()
    axis.set_xlabel(f"{unit}; in brackets, times the first row")
    axis.set_title(title, fontsize=10)
    return figure


def shades(labels: Sequence[str]) -> list[tuple[float, ...]]:
    """The colour of each label's system, paler from one label of a system to the next.

    >>> first, paler, other = shades(["ours, full rank", "ours, low rank", "LightGBM"])
    >>> first < paler, first == to_rgb(look("ours")[0]), other == to_rgb(look("LightGBM")[0])
    (True, True, True)
    """
    families = [label.split(",")[0] for label in labels]
    found = []
    for place, family in enumerate(families):
        pale = 0.65 * families[:place].count(family) / max(1, families.count(family) - 1)
        found.append(tuple(part + pale * (1 - part) for part in to_rgb(look(family)[0])))
    return found


@dataclass(frozen=True)
class Heat:
    """What is to be reached, and who needs how many seconds for it; None: not reached."""

    goal: str
    seconds: Mapping[str, float | None]  # ours first


def race_picture(
    measured: Mapping[str, Mapping[float, float]],  # system → seconds → NDCG@10
    projected: Mapping[str, float],  # system → seconds
    heats: Sequence[Heat],
) -> Figure:
    """Left, validation NDCG@10 over seconds of training, with projected times as lines; right, seconds to equal goals.

    Hollow points on the right are projections.
    """
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    for label, curve in measured.items():
        colour, marker = look(label)
        style: dict[str, Any] = (
            {"markersize": 4, "linestyle": "-"} if len(curve) > 1 else {"markersize": 9, "linestyle": ""}
        )
        style |= {"color": colour, "marker": marker, "markevery": 1 if len(curve) < 50 else 10, "linewidth": 1.8}
        left.plot(list(curve), list(curve.values()), label=label, **style)
    for label, seconds in projected.items():
        text = f"{label}: {_seconds(seconds)} s (projection; NDCG not measured)"
        left.axvline(seconds, color=look(label)[0], linestyle=":", linewidth=1.8, label=text)
    left.set_ylabel("validation NDCG@10")
    left.set_title("NDCG reached, over time", fontsize=11)
    for place, heat in enumerate(heats):
        _draw_heat(right, place, heat, projected)
    right.set_yticks(range(len(heats)), [heat.goal for heat in heats], fontsize=9)
    right.set_ylim(len(heats) - 0.5, -0.5)
    right.set_title("Time to equal NDCG; hollow: projection", fontsize=11)
    for axis in (left, right):
        _log_seconds(axis)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    return figure


def _draw_heat(axis: Axes, place: int, heat: Heat, projected: Mapping[str, float]) -> None:
    """A point for each system, joined; how many times sooner or later than ours each rival is there."""
    known = {label: seconds for label, seconds in heat.seconds.items() if seconds is not None}
    axis.plot([min(known.values()), max(known.values())], [place, place], color="#bbbbbb", linewidth=1.2, zorder=1)
    ours = next(iter(known.values()))
    for number, (label, seconds) in enumerate(known.items()):
        colour, marker = look(label)
        face = "white" if label in projected else colour
        axis.plot([seconds], [place], marker, color=colour, markerfacecolor=face, markersize=9, zorder=2)
        ratio = f"{seconds / ours:.2g}x later" if seconds > ours else f"{ours / seconds:.2g}x sooner"
        times = f"\n{ratio}" if number else ""
        above = number % 2 == 0
        axis.annotate(
            f"{label.split(',')[0]} {_seconds(seconds)} s{times}", (seconds, place), fontsize=9, ha="center",
            xytext=(0, 8 if above else -8), textcoords="offset points", va="bottom" if above else "top", color=colour,
        )  # fmt: skip
    if len(known) < len(heat.seconds):
        missing = ", ".join(label for label in heat.seconds if label not in known)
        axis.text(0.98, place, f"not reached: {missing}", fontsize=9, ha="right", transform=axis.get_yaxis_transform())


def _log_seconds(axis: Axes) -> None:
    axis.set_xscale("log")
    axis.margins(x=0.17)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("seconds of training (log scale)")
    axis.grid(alpha=0.3)


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
