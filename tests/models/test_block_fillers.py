"""Blocks keep what they prepared for distances, and prepare it anew when the metrics change."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch

from lgmml_torch.functional import distance
from lgmml_torch.functional.distance import local_distances
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock


def block(count: int = 4, dim: int = 8, seed: int = 0) -> tuple[MetricBlock, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(300, dim, generator=g)
    return MetricBlock(
        x[:count].clone(), torch.randn(count, dim, dim, generator=g), scales=torch.arange(1, count + 1)
    ), x


@pytest.mark.parametrize("norm", ["mahalanobis", "trace"])
@pytest.mark.parametrize("many", [10, 10_000])
def test_distances_are_divided_by_the_scales(norm: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "MANY_ROWS", many)
    metrics, x = block()
    expected = local_distances(x.double(), metrics.anchors, metrics.factors, norm=norm) / metrics.scales
    found = metrics.distances(x, norm=norm)
    assert ((found - expected).abs() <= 1e-4 * expected.median(dim=0).values).all()
    assert (found.diagonal() == 0).all()


def test_changed_metrics_change_the_distances() -> None:
    for change in ["in place", "load", "replace", "float64"]:
        metrics, x = block()
        other, _ = block(seed=1)
        metrics.distances(x)
        if change == "in place":
            metrics.factors.copy_(other.factors)
            metrics.anchors.copy_(other.anchors)
        elif change == "load":
            metrics.load_state_dict(other.state_dict())
        elif change == "replace":
            metrics.factors, metrics.anchors = other.factors, other.anchors
        else:
            metrics, x, other = metrics.double(), x.double(), deepcopy(metrics).double()
        torch.testing.assert_close(metrics.distances(x), other.distances(x))


def test_blocks_can_be_copied_and_pickled_after_use() -> None:
    metrics, x = block()
    bank = LocalMetrics([metrics], num_features=8)
    expected = bank(x)
    assert torch.equal(pickle.loads(pickle.dumps(bank))(x), expected)
    assert torch.equal(deepcopy(bank)(x), expected)


def test_models_used_in_inference_mode_work_outside_it() -> None:
    with torch.inference_mode():
        metrics, x = block()
        inside = metrics.distances(x)
    assert torch.equal(metrics.distances(x.clone()), inside.clone())


def test_features_that_need_gradients_give_distances_without() -> None:
    metrics, x = block()
    assert not metrics.distances(x.requires_grad_()).requires_grad


def by_hand(metrics: MetricBlock, x: torch.Tensor) -> list[list[float]]:
    pairs = zip(metrics.anchors, metrics.support, strict=True)
    columns = [((x[:, own] - anchor) ** 2).sum(1).sqrt() for anchor, own in pairs]
    return torch.stack(columns, dim=1).tolist()
