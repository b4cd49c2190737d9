from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.metric_learning import location_weights
from research.by_example.sets import (
    ExampleSet,
    evaluate_examples,
    example_metrics,
    exponential_weights,
    squared_distances,
    weighted_scatter,
)
from tests.reference import examples as reference


def random_set(seed: int, Q: int = 7, N: int = 11, D: int = 3) -> ExampleSet:
    """Asymmetric relevance; some queries have none, some have everything, some are rows of the database."""
    g = torch.Generator().manual_seed(seed)
    database, queries = (torch.randn(n, D, generator=g, dtype=torch.float64) for n in (N, Q))
    mask = torch.rand(Q, N, generator=g) < 0.4
    mask[0], mask[1] = False, True
    own = torch.full((Q,), -1)
    own[2:5] = torch.tensor([3, 0, 10])
    queries[2:5] = database[own[2:5]]
    mask[torch.arange(2, 5), own[2:5]] = False
    return ExampleSet(database, queries, mask.nonzero()[:, 1], torch.tensor([0, *mask.sum(1).cumsum(0)]), own)


@pytest.mark.parametrize("seed", [0, 1])
def test_metrics_equal_the_definitions(seed: int) -> None:
    data = random_set(seed)
    dist = squared_distances(data.queries, data.database)
    if seed % 2:
        dist = dist.round()  # ties
    relevant, others = data.masks()
    found = example_metrics(dist, relevant, others)
    for q in range(data.num_queries):
        rel, oth = set(relevant[q].nonzero()[:, 0].tolist()), set(others[q].nonzero()[:, 0].tolist())
        if not rel or not oth:
            assert not data.usable[q]
            assert torch.isnan(found["map"][q])
            assert torch.isnan(found["auc"][q])
            continue
        assert data.usable[q]
        assert float(found["map"][q]) == pytest.approx(reference.average_precision(dist[q].tolist(), rel, oth))
        assert float(found["auc"][q]) == pytest.approx(reference.auc(dist[q].tolist(), rel, oth))


def test_blocks_do_not_change_the_result() -> None:
    data = random_set(0)
    whole = example_metrics(squared_distances(data.queries, data.database), *data.masks())
    blocks = evaluate_examples(squared_distances, data, max_elements=33)
    for name in ("map", "auc"):
        torch.testing.assert_close(whole[name], blocks[name], equal_nan=True)


def test_masks_leave_out_the_own_row() -> None:
    data = random_set(1)
    relevant, others = data.masks()
    assert not (relevant & others).any()
    neither = ~(relevant | others)
    assert neither.nonzero().tolist() == [[2, 3], [3, 0], [4, 10]]
    part = data.masks(2, 4)
    assert torch.equal(part[0], relevant[2:4])
    assert torch.equal(part[1], others[2:4])


def test_select_keeps_queries_and_their_rows() -> None:
    data = random_set(2)
    chosen = data.select(torch.tensor([4, 0]))
    relevant, others = data.masks()
    assert torch.equal(chosen.masks()[0], relevant[[4, 0]])
    assert torch.equal(chosen.masks()[1], others[[4, 0]])
    assert torch.equal(data.select(data.usable).queries, data.queries[data.usable])
    assert data.to(torch.float32).database.dtype == torch.float32


def test_from_labels_with_and_without_queries() -> None:
    X, y = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 2])
    inside = ExampleSet.from_labels(X, y)
    assert inside.relevant.tolist() == [2, 3, 0, 1]
    assert inside.usable.tolist() == [True, True, True, True, False]
    outside = ExampleSet.from_labels(X, y, X[:1], y[:1])
    assert outside.relevant.tolist() == [0, 2]
    assert outside.own_rows is None


def test_exponential_weights_are_proportional_to_softmax_weights(generator: torch.Generator) -> None:
    dists, scales = 3 * torch.rand(6, 4, generator=generator), torch.rand(4, generator=generator) + 0.5
    for rho in (0.0, 1.0, 7.0):
        plain = exponential_weights(dists, scales, rho)
        expected = [[math.exp(-rho / 2 * float(d / s)) for d, s in zip(row, scales, strict=True)] for row in dists]
        torch.testing.assert_close(plain, torch.tensor(expected))
        torch.testing.assert_close(plain / plain.sum(1, keepdim=True), location_weights(dists, scales, rho))


def test_weighted_scatter_equals_the_sum_over_pairs(generator: torch.Generator) -> None:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, x, c = randn(3, 4), randn(5, 4), randn(3, 5)
    expected = sum(c[a, b] * torch.outer(q[a] - x[b], q[a] - x[b]) for a in range(3) for b in range(5))
    assert torch.allclose(weighted_scatter(q, x, c), expected)
    assert torch.allclose(weighted_scatter(q + 1e4, x + 1e4, c), expected, atol=1e-6)


def test_errors_name_argument_rule_and_value() -> None:
    x, none = torch.zeros(3, 2), torch.zeros(0, dtype=torch.long)
    with pytest.raises(DataError, match="`relevant` must hold rows of the database, 0 to 2, got 3"):
        ExampleSet(x, x, torch.tensor([3]), torch.tensor([0, 1, 1, 1]))
    with pytest.raises(DataError, match="`relevant` must not name a row twice"):
        ExampleSet(x, x[:1], torch.tensor([1, 1]), torch.tensor([0, 2]))
    with pytest.raises(LGMMLError, match=r"`offsets` must have shape \(4,\), got \(2,\)"):
        ExampleSet(x, x, none, torch.tensor([0, 0]))
    with pytest.raises(LGMMLError, match="`distances` must be finite"):
        example_metrics(torch.tensor([[float("nan")]]), torch.tensor([[True]]), torch.tensor([[False]]))
