from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError, NumericsWarning
from research.by_example.sets import (
    ExampleSet,
    evaluate_examples,
    example_metrics,
    location_distances,
    location_weights,
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


@pytest.mark.parametrize("seed", range(6))
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


@pytest.mark.parametrize("block", [1, 3, 100])
def test_blocks_do_not_change_the_result(block: int) -> None:
    data = random_set(0)
    whole = example_metrics(squared_distances(data.queries, data.database), *data.masks())
    blocks = evaluate_examples(squared_distances, data, max_elements=11 * block)
    for name in ("map", "auc"):
        assert torch.equal(whole[name].nan_to_num(-1), blocks[name].nan_to_num(-1))


def test_no_queries_give_no_values() -> None:
    none = random_set(0).select(torch.zeros(0, dtype=torch.long))
    found = evaluate_examples(squared_distances, none)
    assert {name: len(values) for name, values in found.items()} == {"map": 0, "auc": 0}


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


@pytest.mark.parametrize("method", ["auto", "expand", "form"])
@pytest.mark.parametrize(("Q", "N", "K"), [(4, 9, 3), (1, 6, 20), (0, 5, 2), (3, 0, 2)])
def test_location_distances_equal_the_written_out_metric(method: str, Q: int, N: int, K: int) -> None:
    g = torch.Generator().manual_seed(Q + N)
    randn = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    queries, database, factors = randn(Q, 4) + 100, randn(N, 4) + 100, randn(K, 4, 3)
    weights = torch.softmax(randn(Q, K), dim=1)
    found = location_distances(queries, database, factors, weights, method=method)
    expected = [
        [reference.location_distance(q, x, factors, w) for x in database] for q, w in zip(queries, weights, strict=True)
    ]
    assert found.shape == (Q, N)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64).reshape(Q, N), rtol=1e-9, atol=1e-9)


def test_one_metric_or_all_weight_on_one_is_the_plain_distance(generator: torch.Generator) -> None:
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    factors = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    weights = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(6, 2)
    assert torch.allclose(location_distances(x, x, factors, weights), squared_distances(x, x, factors[1]), atol=1e-10)


def test_distances_are_never_negative_and_zero_at_the_point() -> None:
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(3)) + 1000
    assert (squared_distances(x, x) >= 0).all()
    assert float(squared_distances(x, x).diagonal().max()) < 1e-3


def test_location_weights_limits() -> None:
    dists = torch.tensor([[3.0, 1.0, 2.0], [9e8, 8e8, 7e8]])
    assert torch.allclose(location_weights(dists, torch.ones(3), 0.0), torch.full((2, 3), 1 / 3))
    assert location_weights(dists, torch.ones(3), 1e6).argmax(1).tolist() == [1, 2]
    far = location_weights(dists, torch.tensor([1.0, 2.0, 4.0]), 50.0)
    assert torch.allclose(far.sum(1), torch.ones(2))
    expected = [math.exp(-d / m) for d, m in ((3, 1), (1, 2), (2, 4))]
    found = location_weights(dists[:1], torch.tensor([1.0, 2.0, 4.0]), 2.0)[0]
    assert found.tolist() == pytest.approx([e / sum(expected) for e in expected])


def test_exponential_weights_are_proportional_to_softmax_weights(generator: torch.Generator) -> None:
    dists, scales = 3 * torch.rand(6, 4, generator=generator), torch.rand(4, generator=generator) + 0.5
    for rho in (0.0, 1.0, 7.0):
        plain = location_weights(dists, scales, rho, normalise=False)
        expected = [[math.exp(-rho / 2 * float(d / s)) for d, s in zip(row, scales, strict=True)] for row in dists]
        torch.testing.assert_close(plain, torch.tensor(expected))
        torch.testing.assert_close(plain / plain.sum(1, keepdim=True), location_weights(dists, scales, rho))


def test_exponential_weights_underflow_at_1e_70_and_say_so() -> None:
    """−(ρ/2)·d = −161.2 is a weight of 1e-70: a number in float64, zero in float32, and none of softmax's concern."""
    near, far = [0.5, 1.0, 1.5], [161.18, 161.68, 162.18]
    dists = torch.tensor([near, far], dtype=torch.float64)
    ones = torch.ones(3)
    double = location_weights(dists, ones.double(), 2.0, normalise=False)
    assert float(double[1, 0]) == pytest.approx(1e-70, rel=0.01)
    with pytest.warns(NumericsWarning, match=r"the weights of 1 of 2 queries underflow .* -161\.2 in torch.float32"):
        single = location_weights(dists.float(), ones, 2.0, normalise=False)
    assert single[1].tolist() == [0.0, 0.0, 0.0]
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    factors = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(1))
    kept, lost = location_weights(dists.float(), ones, 2.0), single
    assert len(location_distances(x[:2], x, factors, kept)[1].unique()) == 5
    assert location_distances(x[:2], x, factors, lost)[1].tolist() == [0.0] * 5  # nothing is left to rank by
    with pytest.warns(NumericsWarning, match=r"1 of 2 queries underflow"):
        location_weights(5 * dists, ones.double(), 2.0, normalise=False)  # float64 only puts it off


def test_no_metrics_and_no_queries_have_no_weights() -> None:
    assert location_weights(torch.zeros(0, 3), torch.ones(3), 1.0, normalise=False).shape == (0, 3)
    assert location_weights(torch.zeros(2, 0), torch.ones(0), 1.0, normalise=False).shape == (2, 0)


def test_weighted_scatter_equals_the_sum_over_pairs(generator: torch.Generator) -> None:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, x, c = randn(3, 4), randn(5, 4), randn(3, 5)
    expected = sum(c[a, b] * torch.outer(q[a] - x[b], q[a] - x[b]) for a in range(3) for b in range(5))
    assert torch.allclose(weighted_scatter(q, x, c), expected)
    assert torch.allclose(weighted_scatter(q + 1e4, x + 1e4, c), expected, atol=1e-6)


def test_errors_name_argument_rule_and_value() -> None:
    x, none = torch.zeros(3, 2), torch.zeros(0, dtype=torch.long)
    with pytest.raises(LGMMLError, match=r"`queries` must have shape \(\*, 2\), got \(1, 3\)"):
        ExampleSet(x, torch.zeros(1, 3), none, torch.tensor([0, 0]))
    with pytest.raises(DataError, match="`relevant` must hold rows of the database, 0 to 2, got 3"):
        ExampleSet(x, x, torch.tensor([3]), torch.tensor([0, 1, 1, 1]))
    with pytest.raises(DataError, match="`own_rows` must hold rows of the database, -1 to 2, got -2"):
        ExampleSet(x, x, none, torch.tensor([0, 0, 0, 0]), torch.tensor([-2, 0, 1]))
    with pytest.raises(DataError, match="`relevant` must not name a row twice"):
        ExampleSet(x, x[:1], torch.tensor([1, 1]), torch.tensor([0, 2]))
    with pytest.raises(DataError, match="`relevant` must not name the query's own row"):
        ExampleSet(x, x[:1], torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([1]))
    with pytest.raises(LGMMLError, match=r"`offsets` must have shape \(4,\), got \(2,\)"):
        ExampleSet(x, x, none, torch.tensor([0, 0]))
    with pytest.raises(LGMMLError, match="`query_labels` must be given along with `queries`"):
        ExampleSet.from_labels(x, torch.zeros(3), x)
    with pytest.raises(LGMMLError, match="`database` must be finite, got nan at position"):
        ExampleSet(x * float("nan"), x, none, torch.tensor([0, 0, 0, 0]))
    with pytest.raises(LGMMLError, match="`distances` must be finite"):
        example_metrics(torch.tensor([[float("nan")]]), torch.tensor([[True]]), torch.tensor([[False]]))
    with pytest.raises(LGMMLError, match="`rho` must be at least 0, got -1"):
        location_weights(x, torch.ones(2), -1.0)
    with pytest.raises(LGMMLError, match=r"`scales` must be positive, got 0\.0"):
        location_weights(x, torch.tensor([1.0, 0.0]), 1.0)
    with pytest.raises(LGMMLError, match="`method` must be one of"):
        location_distances(x, x, torch.zeros(1, 2, 2), torch.ones(3, 1), method="fast")
    with pytest.raises(LGMMLError, match=r"`weights` must have shape \(3, 1\), got \(3, 2\)"):
        location_distances(x, x, torch.zeros(1, 2, 2), torch.ones(3, 2))
    with pytest.raises(LGMMLError, match="`max_elements` must be positive, got 0"):
        evaluate_examples(squared_distances, random_set(0), max_elements=0)
