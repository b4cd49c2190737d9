"""Pictures of benchmark results."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


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

    >>> bars = ratios_picture({"ours": 1.0, "theirs": 4.0}, unit="seconds")
    >>> [text.get_text() for text in bars.axes[0].texts]
    [' 1', ' 4 (4x)']
    """
    figure = Figure(figsize=(8, 1.0 + 0.4 * len(values)), layout="constrained")
    axis = figure.subplots()
    axis.barh(list(values), list(values.values()), color=[COLOURS[0], *[COLOURS[1]] * (len(values) - 1)])
    first = next(iter(values.values()))
    for place, value in enumerate(values.values()):
        ratio = f" ({value / first:.3g}x)" if place else ""
        shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        axis.text(value, place, f" {shown}{ratio}", va="center", fontsize=8)
    axis.set_xlim(0, 1.25 * max(values.values()))
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.set_title(title, fontsize=10)
    return figure
