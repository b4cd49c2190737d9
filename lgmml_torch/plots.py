"""Pictures. Figures are built without pyplot, so nothing global is touched and no window opens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor

from lgmml_torch.files import replacing
from lgmml_torch.functional.significance import Interval
from lgmml_torch.models.importance import PartialEffect
from lgmml_torch.models.local_metrics import LocalMetrics


def save_figure(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 130) -> None:
    """Write a figure atomically; the format follows the file's ending."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=Path(path).suffix.removeprefix("."), dpi=dpi, bbox_inches="tight")


def metrics_picture(
    bank: LocalMetrics,
    phi: Tensor,  # (K,)
    *,
    names: Sequence[str] | None = None,
    panels: int = 8,
) -> Figure:
    """The heaviest metrics as matrices, and how much each feature counts over the whole bank."""
    figure = Figure(figsize=(1.5 * panels, 6.4), layout="constrained")
    top, bottom = np.asarray(figure.subfigures(2, 1, height_ratios=[1.1, 1])).ravel()
    shown = phi.argsort(descending=True, stable=True)[:panels].tolist()
    axes = np.atleast_1d(top.subplots(1, max(1, len(shown))))
    for axis, column in zip(axes, shown, strict=False):
        (block,) = bank.select(torch.tensor([column])).iter_blocks()
        factor = block.zoomed_factors[0].detach().cpu().double()
        matrix = (factor @ factor.T).numpy()
        limit = np.abs(matrix).max() or 1.0
        axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set_title(f"metric {column}\nΦ = {float(phi[column]):.3g}", fontsize=9)
        labels = list[str]()
        if not block.is_full and len(matrix) <= 12:
            labels = _names(names, block.support[0].tolist())
        axis.set_xticks(range(len(labels)), labels, fontsize=7, rotation=90)
        axis.set_yticks(range(len(labels)), labels, fontsize=7)
    top.suptitle("heaviest local metrics M = F Fᵀ (blue −, red +)")
    axis = bottom.subplots()
    weight = bank.shares(phi).numpy()
    order = np.argsort(-weight)[: 5 * panels]
    axis.bar(range(len(order)), weight[order], color="#4477aa")
    axis.set_xticks(range(len(order)), _names(names, order.tolist()), rotation=90, fontsize=7)
    axis.set(ylabel="share of Φ·diag(M)", title="features that count most")
    return figure


def curves_picture(
    curves: Mapping[str, Mapping[Any, float]], *, x: str, y: str, title: str = "", best: float | None = None
) -> Figure:
    """Lines over a common axis, e.g. a metric by epoch."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for label, points in curves.items():
        axis.plot(list(points), list(points.values()), marker="o", markersize=3, label=label)
    if best is not None:
        axis.axvline(best, color="grey", linestyle=":", label=f"kept: {best:g}")
    axis.set(xlabel=x, ylabel=y, title=title)
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def search_picture(
    values: Sequence[float], curves: Sequence[Mapping[int, float]], settings: Sequence[Mapping[str, Any]]
) -> Figure:
    """A search for settings: what the trials reached, their validation curves, and the values over each setting.

    Args:
        values: of each trial, NaN for one that was stopped early.
        curves: of each trial, by epoch.
        settings: of each trial, by name.
    """
    names = sorted(set().union(*settings))
    columns = 3
    rows = -(-(len(names) + 2) // columns)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    first, second, *others = figure.subplots(rows, columns, squeeze=False).ravel()
    best = None
    if not np.isnan(values).all():
        best = int(np.nanargmax(values))
    first.plot(values, "o", color="#4477aa", label="trial")
    first.plot(np.fmax.accumulate(np.asarray(values, dtype=float)), color="#cc6677", label="best so far")
    first.set_xlabel("trial")
    first.legend(fontsize=8)
    for number, curve in enumerate(curves):
        colour, line = "#4477aa", "-"
        if number == best:
            colour = "#cc6677"
        elif np.isnan(values[number]):
            colour, line = "grey", ":"
        second.plot(list(curve), list(curve.values()), color=colour, linestyle=line, alpha=0.7, marker=".")
    second.set_xlabel("epoch (red: the best trial; grey: stopped early)")
    for axis in (first, second):
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis, name in zip(others, names, strict=False):
        _plot_setting(axis, name, [chosen.get(name) for chosen in settings], values, best)
    for axis in others[len(names) :]:
        axis.set_axis_off()
    for axis in (first, second, *others[: len(names)]):
        axis.grid(alpha=0.3)
        axis.set_ylabel("validation NDCG@10", fontsize=8)
    return figure


def _plot_setting(axis: Any, name: str, chosen: Sequence[Any], values: Sequence[float], best: int | None) -> None:
    places, heights, colours = list[Any](), list[float](), list[str]()
    for number, place in enumerate(chosen):
        if place is not None:
            places.append(place)
            heights.append(values[number])
            colours.append("#cc6677" if number == best else "#4477aa")
    if all(isinstance(place, (int, float)) for place in places):
        if min(places) > 0 and max(places) > 10 * min(places):
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter(NullFormatter())
        else:
            axis.locator_params(axis="x", nbins=4)
    axis.scatter(places, heights, c=colours)
    axis.set_xlabel(name)


def importance_picture(
    values: Mapping[str, float], *, x: str, intervals: Mapping[str, Interval] | None = None, count: int = 20
) -> Figure:
    """Bars of the features with the largest values, largest on top, with intervals where there are any."""
    shown = sorted(values, key=lambda name: -values[name])[:count][::-1]
    figure = Figure(figsize=(7, 1 + 0.28 * len(shown)), layout="constrained")
    axis = figure.subplots()
    axis.barh(range(len(shown)), [values[name] for name in shown], color="#4477aa")
    for row, name in enumerate(shown):
        if intervals is not None:
            axis.plot([intervals[name].low, intervals[name].high], [row, row], color="black", linewidth=1.2)
    axis.set_yticks(range(len(shown)), shown, fontsize=8)
    axis.axvline(0, color="grey", linewidth=0.8)
    axis.set_xlabel(x)
    axis.grid(axis="x", alpha=0.3)
    return figure


def effect_picture(effects: Mapping[str, PartialEffect], *, columns: int = 3) -> Figure:
    """How the score changes with each of some features, in deviations of the scores within a list."""
    rows = -(-len(effects) // columns)
    figure = Figure(figsize=(3.6 * min(columns, len(effects)), 2.6 * rows), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, min(columns, len(effects)), sharey=True, squeeze=False)).ravel()
    for axis, (name, effect) in zip(axes, effects.items(), strict=False):
        unit = effect.spread or 1.0
        low, mean, high = list[float](), list[float](), list[float]()
        for interval in effect.intervals:
            low.append(interval.low / unit)
            mean.append(interval.mean / unit)
            high.append(interval.high / unit)
        axis.fill_between(effect.values, low, high, color="#4477aa", alpha=0.2, linewidth=0)
        axis.plot(effect.values, mean, color="#4477aa", marker="o", markersize=3)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    for axis in axes[len(effects) :]:
        axis.set_axis_off()
    figure.supylabel("change of score / spread within a list", fontsize=9)
    return figure


def differences_picture(gaps: Sequence[float], *, first: str, second: str, measure: str) -> Figure:
    """Differences per query, sorted: where the first is better and where the second is."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    ordered = np.sort(np.asarray(gaps))[::-1]
    for side, colour, name in ((ordered > 0, "#4477aa", first), (ordered < 0, "#cc6677", second)):
        axis.fill_between(range(len(ordered)), ordered, step="mid", where=side, color=colour, label=f"{name} better")
    axis.axhline(0, color="grey", linewidth=0.8)
    axis.axhline(float(ordered.mean()), color="black", linestyle=":", label=f"mean {ordered.mean():+.4f}")
    axis.set(xlabel="queries, by difference", ylabel=f"difference in {measure}")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def spectrum_picture(bank: LocalMetrics) -> Figure:
    """Eigenvalues of the metrics, each divided by its largest, and their condition numbers."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    spectra, conditions = bank.spectra()
    left.hist(np.log10(np.maximum(spectra.numpy(), 1e-16)), bins=40, color="#4477aa")
    left.set(xlabel="log₁₀ eigenvalue / largest of its metric", ylabel="eigenvalues")
    right.hist(np.log10(conditions.numpy()), bins=30, color="#cc6677")
    right.set(xlabel="log₁₀ condition number", ylabel="metrics")
    return figure


def _names(names: Sequence[str] | None, features: Sequence[int]) -> list[str]:
    """Names of features; without names their numbers from 1."""
    if names is None:
        return [str(feature + 1) for feature in features]
    return [names[feature] for feature in features]
