"""Distances under metrics of low rank, with their gradients, against the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lgmml_torch.functional import distance
from lgmml_torch.functional.distance import DistanceTiles, local_distances, low_rank_distances
from tests.functional.test_distance import tiled
from tests.reference.low_rank import distances

SHAPES = [(7, 5, 3, 2), (1, 1, 1, 1), (9, 4, 2, 4), (6, 3, 5, 1), (3, 6, 1, 8)]


def case(count: int, width: int, metrics: int, rank: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((count, width), (metrics, width), (metrics, width, rank))
    x, a, F = (torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes)
    return x, a, F


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kept", [0, 1 << 25])
@pytest.mark.parametrize("tile", [1, 7, 1 << 19])
def test_values_and_slopes_are_those_of_the_plain_form(
    shape: tuple[int, int, int, int], kept: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distance, "TILE_IMAGES", tile)
    monkeypatch.setattr(distance, "_KEPT_IMAGES", kept)
    inputs = case(*shape)
    weights = torch.randn(shape[0], shape[2], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = distances(*inputs)
    found = low_rank_distances(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    slopes, wanted = (torch.autograd.grad((d * weights).sum(), inputs) for d in (found, expected))
    for one, other in zip(slopes, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_features_that_need_no_slope_get_none() -> None:
    x, a, F = case(4, 3, 2, 2)
    low_rank_distances(x.detach(), a, F).sum().backward()
    assert x.grad is None
    assert a.grad is not None
    assert F.grad is not None


def test_on_an_anchor_there_is_no_slope() -> None:
    _, a, F = case(2, 3, 2, 2)
    low_rank_distances(a, a, F).diagonal().sum().backward()
    for tensor in (a, F):
        torch.testing.assert_close(tensor.grad, torch.zeros_like(tensor), rtol=0, atol=1e-6)


def test_no_documents_are_no_distances() -> None:
    x, a, F = case(4, 3, 2, 2)
    found = low_rank_distances(x[:0], a, F)
    assert found.shape == (0, 2)
    found.sum().backward()
    assert F.grad is not None
    assert torch.equal(F.grad, torch.zeros_like(F))


def test_the_graph_may_be_walked_twice() -> None:
    x, a, F = case(5, 3, 2, 2)
    total = low_rank_distances(x, a, F).sum()
    first, second = (torch.autograd.grad(total, F, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_large_values_next_to_an_anchor_stay_finite() -> None:
    """Off by the rounding of the images, as the class says, never NaN."""
    a = torch.full((1, 3), 1e4)
    F = torch.eye(3)[None, :, :1]
    found = tiled(a + torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), a, F, method="stacked")
    torch.testing.assert_close(found, torch.tensor([[0.0], [1.0]]), rtol=0, atol=4e-3)


def test_stacked_factors_give_the_distances_of_one_metric_after_another() -> None:
    for shape in SHAPES:
        x, a, F = (tensor.detach() for tensor in case(*shape))
        torch.testing.assert_close(tiled(x, a, F, method="stacked"), local_distances(x, a, F))


def test_low_ranks_are_stacked() -> None:
    x, F = torch.zeros(4, 40), torch.zeros(2, 40, 40)
    assert DistanceTiles.method_for(x, F[:, :, :8], "mahalanobis") == "stacked"
    assert DistanceTiles.method_for(x, F[:, :, :8], "trace") == "factor"
    assert DistanceTiles.method_for(x, F, "mahalanobis") == "factor"
    assert DistanceTiles.method_for(torch.zeros(4096, 40), F, "mahalanobis") == "quadratic"
