from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.gmml import pooled_scatter
from lgmml_torch.functional.regions import Regions
from lgmml_torch.metric_learning import _class_scatter, location_distances, location_weights
from lgmml_torch.segments import offsets_from_sizes
from tests.reference import examples as reference

CLASSES = torch.tensor([0, 2, 1, 0, 2, 2, 1, 0, 3, 2, 2, 0])  # one of a single row


def rows(shift: float = 0.0) -> Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.randn(len(CLASSES), 4, generator=g, dtype=torch.float64) + CLASSES[:, None] + shift


def looped(X: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of (x − z)(x − z)ᵀ, pair by pair."""
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i in first.nonzero()[:, 0].tolist():
        for j in range(len(X)):
            if i != j:
                sides[int(CLASSES[i] != CLASSES[j])].append(torch.outer(X[i] - X[j], X[i] - X[j]))
    similar, dissimilar = (torch.stack(side).mean(0) if side else torch.zeros(4, 4).double() for side in sides)
    return similar, dissimilar


@pytest.mark.parametrize(
    "first", [CLASSES >= 0, CLASSES == 2, CLASSES == 3, torch.arange(12) < 5, torch.arange(12) == 8]
)
def test_class_scatter_is_the_mean_over_pairs(first: Tensor) -> None:
    for found, expected in zip(_class_scatter(rows(), CLASSES, first), looped(rows(), first), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_class_scatter_of_all_rows_is_the_pooled_scatter_of_the_classes() -> None:
    same = torch.arange(4)[:, None] == CLASSES
    regions = Regions(
        torch.arange(4), torch.arange(5),
        same.nonzero()[:, 1], offsets_from_sizes(same.sum(1)),
        (~same).nonzero()[:, 1], offsets_from_sizes((~same).sum(1)),
    )  # fmt: skip
    expected = pooled_scatter(rows(), regions)
    for ours, theirs in zip(_class_scatter(rows(), CLASSES, CLASSES >= 0), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_class_scatter_forgets_where_the_rows_lie() -> None:
    near, far = (_class_scatter(rows(shift), CLASSES, CLASSES == 2) for shift in (0.0, 1e6))
    torch.testing.assert_close(far, near, rtol=1e-8, atol=1e-8)


def test_location_weights_from_all_alike_to_the_nearest() -> None:
    dists, scales = torch.tensor([[1.0, 4.0, 2.0]]), torch.tensor([1.0, 1.0, 4.0])
    torch.testing.assert_close(location_weights(dists, scales, 0.0), torch.full((1, 3), 1 / 3))
    torch.testing.assert_close(location_weights(dists, scales, 1e4), torch.tensor([[0.0, 0.0, 1.0]]))  # 2/4 < 1/1
    with pytest.raises(LGMMLError, match="`rho` must be at least 0, got -1"):
        location_weights(dists, scales, -1.0)


@pytest.mark.parametrize(("Q", "N", "K"), [(4, 9, 3), (40, 9, 3), (1, 9, 20), (0, 5, 2), (3, 0, 2)])
def test_location_distances_equal_the_written_out_metric(Q: int, N: int, K: int) -> None:
    g = torch.Generator().manual_seed(Q + N)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    queries, database, factors = randn(Q, 4) + 100, randn(N, 4) + 100, randn(K, 4, 3)
    weights = torch.softmax(randn(Q, K), dim=1)
    found = location_distances(queries, database, factors, weights)
    expected = [
        [reference.location_distance(q, x, factors, w) for x in database] for q, w in zip(queries, weights, strict=True)
    ]
    assert found.shape == (Q, N)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64).reshape(Q, N), rtol=1e-9, atol=1e-9)
