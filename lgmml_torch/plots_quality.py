"""Pictures of the quality benchmark: differences with their intervals, and what noise costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa7711", "#66ccee", "#aa3377")

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
        axis.tick_params(labelsize=7)
        axis.locator_params(axis="x", nbins=4)
        axis.grid(axis="x", linewidth=0.3)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].invert_yaxis()
    figure.supxlabel(f"NDCG@10 minus that of {reference}, 95% over queries", fontsize=9)
    return figure


def noise_picture(
    losses: Mapping[str, Mapping[str, float]],  # system → "set, kind" → loss
) -> Figure:
    """Bars side by side: how much NDCG@10 falls with three times as many features, two thirds of them noise.

    >>> len(noise_picture({"a": {"toy, normal": 0.02}, "b": {"toy, normal": 0.03}}).axes[0].patches)
    2
    """
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axis = figure.subplots()
    places = list(dict.fromkeys(place for found in losses.values() for place in found))
    width = 0.8 / max(1, len(losses))
    for number, (system, found) in enumerate(losses.items()):
        x = np.arange(len(places)) + (number - (len(losses) - 1) / 2) * width
        heights = [found.get(place, np.nan) for place in places]
        axis.bar(x, heights, width=width, label=system, color=COLOURS[number % len(COLOURS)])
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(places)), places, fontsize=7, rotation=20, ha="right")
    axis.set_ylabel("loss of NDCG@10")
    axis.legend(fontsize=8, frameon=False)
    return figure
