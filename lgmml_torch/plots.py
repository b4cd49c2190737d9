"""Pictures. Figures are built without pyplot, so nothing global is touched and no window opens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lgmml_torch.files import replacing
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock


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
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    top, bottom = np.asarray(figure.subfigures(2, 1, height_ratios=[1.1, 1])).ravel()
    shown = _heaviest(bank, phi, panels)
    axes = np.atleast_1d(top.subplots(1, max(1, len(shown))))
    for axis, (column, block, row) in zip(axes, shown, strict=False):
        factor = block.zoomed_factors[row].detach().cpu().double()
        matrix = (factor @ factor.T).numpy()
        limit = np.abs(matrix).max() or 1.0
        axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set_title(f"metric {column}\nΦ = {float(phi[column]):.3g}", fontsize=9)
        ticks = range(len(matrix)) if not block.is_full and len(matrix) <= 12 else []
        labels = [_name(names, int(block.support[row, i])) for i in ticks]
        axis.set_xticks(list(ticks), labels, fontsize=7, rotation=90)
        axis.set_yticks(list(ticks), labels, fontsize=7)
    top.suptitle("heaviest local metrics M = F Fᵀ (blue −, red +)")
    axis = bottom.subplots()
    weight = feature_weight(bank, phi).cpu().numpy()
    order = np.argsort(-weight)[:40]
    axis.bar(range(len(order)), weight[order], color="#4477aa")
    axis.set_xticks(range(len(order)), [_name(names, int(i)) for i in order], rotation=90, fontsize=7)
    axis.set_ylabel("share of Φ·diag(M)")
    axis.set_title("features that count most", fontsize=10)
    return figure


def feature_weight(
    bank: LocalMetrics,
    phi: Tensor,  # (K,)
) -> Tensor:  # (D,)
    """How much each feature counts: Φ-weighted share of each metric's diagonal, summing to one."""
    total = torch.zeros(bank.num_features, dtype=torch.float64)
    start = 0
    for block in bank.iter_blocks():
        weights = phi[start : start + block.num_metrics].detach().cpu().double()
        diagonal = block.zoomed_factors.detach().square().sum(-1).cpu().double()
        share = diagonal / diagonal.sum(1, keepdim=True).clamp_min(1e-300) * weights[:, None]
        if block.is_full:
            total += share.sum(0)
        else:
            total.index_add_(0, block.support.cpu().reshape(-1), share.reshape(-1))
        start += block.num_metrics
    return total / total.sum().clamp_min(1e-300)


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
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def spectrum_picture(bank: LocalMetrics) -> Figure:
    """Eigenvalues of the metrics, each divided by its largest, and their condition numbers."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    spectra, conditions = metric_spectra(bank)
    left.hist(np.log10(np.maximum(spectra.numpy(), 1e-16)), bins=40, color="#4477aa")
    left.set_xlabel("log₁₀ eigenvalue / largest of its metric")
    left.set_ylabel("eigenvalues")
    right.hist(np.log10(conditions.numpy()), bins=30, color="#cc6677")
    right.set_xlabel("log₁₀ condition number")
    right.set_ylabel("metrics")
    return figure


def metric_spectra(bank: LocalMetrics) -> tuple[Tensor, Tensor]:
    """All eigenvalues relative to the largest of their metric, and the condition number of each metric."""
    spectra, conditions = [], []
    for block in bank.iter_blocks():
        values = torch.linalg.svdvals(block.zoomed_factors.detach().cpu().double()).square()
        relative = values / values.amax(-1, keepdim=True).clamp_min(1e-300)
        spectra.append(relative.reshape(-1))
        conditions.append(1 / relative.amin(-1).clamp_min(1e-16))
    return torch.cat(spectra), torch.cat(conditions)


def _heaviest(bank: LocalMetrics, phi: Tensor, count: int) -> list[tuple[int, MetricBlock, int]]:
    places = [(block, row) for block in bank.iter_blocks() for row in range(block.num_metrics)]
    columns = phi.argsort(descending=True, stable=True)[:count].tolist()
    return [(column, *places[column]) for column in columns]


def _name(names: Sequence[str] | None, index: int) -> str:
    return str(index + 1) if names is None else names[index]
