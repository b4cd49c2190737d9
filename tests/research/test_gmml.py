from __future__ import annotations

import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError, NumericsWarning
from lgmml_torch.functional.gmml import gmml
from research.by_example.sets import ExampleSet
from research.systems.gmml import GlobalGMML, LocationGMML, pair_means, sampled_regions
from tests.reference import examples as synthetic


def small_set(seed: int = 0) -> ExampleSet:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(3).repeat_interleave(6)
    return ExampleSet.from_labels(torch.randn(18, 4, generator=g, dtype=torch.float64) + y[:, None], y)


def test_pair_means_equal_the_loop_in_any_block_size() -> None:
    data = small_set()
    relevant, others = data.masks()
    for side, mask in enumerate((relevant, others)):
        pairs = [
            torch.outer(data.queries[q] - data.database[i], data.queries[q] - data.database[i])
            for q, i in mask.nonzero()
        ]
        expected = torch.stack(pairs).mean(0)
        assert torch.allclose(pair_means(data)[side], expected)
        assert torch.allclose(pair_means(data, max_elements=40)[side], expected)


def test_global_is_the_geometric_mean_of_all_pairs() -> None:
    data = small_set()
    similar, dissimilar = pair_means(data)
    system = GlobalGMML(t=0.3, lam=0.2).fit(data)
    assert torch.allclose(system.metric, gmml(similar, dissimilar, 0.3, lam=0.2).metric)
    assert system.chosen == {"t": 0.3, "lam": 0.2}
    q = data.queries[:1]
    gap = q - data.database
    assert torch.allclose(
        system.distances(q, data.database)[0].square(), ((gap @ system.metric) * gap).sum(1), atol=1e-9
    )


def test_sampled_regions_are_the_classes_themselves() -> None:
    data = small_set()
    anchors, similar, dissimilar = sampled_regions(data, 3, seed=5)
    by_class = {}
    for c in range(3):
        X, rest = data.database[6 * c : 6 * c + 6], torch.cat([data.database[: 6 * c], data.database[6 * c + 6 :]])
        same = torch.stack([torch.outer(a - b, a - b) for i, a in enumerate(X) for j, b in enumerate(X) if i != j])
        apart = torch.stack([torch.outer(a - b, a - b) for a in X for b in rest])
        by_class[c] = (X.mean(0), same.mean(0), apart.mean(0))
    for anchor, s, d in zip(anchors, similar, dissimilar, strict=True):
        near = min(by_class, key=lambda c: float((by_class[c][0] - anchor).norm()))  # coverage: each class once
        expected = by_class.pop(near)
        assert torch.allclose(anchor, expected[0])
        assert torch.allclose(s, expected[1])
        assert torch.allclose(d, expected[2])


def test_one_kmeans_region_is_the_global_metric() -> None:
    data = small_set()
    local = LocationGMML(1, regions="kmeans", rho=10.0).fit(data)
    test = small_set(1)
    expected = GlobalGMML().fit(data).distances(test.queries, test.database)
    assert torch.allclose(local.distances(test.queries, test.database), expected, atol=1e-6)


def test_one_region_is_the_papers_global_metric() -> None:
    data, test = small_set(), small_set(1)
    for seed in (0, 3):
        whole = GlobalGMML(t=0.4, pairs="region", seed=seed).fit(data)
        local = LocationGMML(1, t=0.4, rho=0.0, seed=seed).fit(data)
        assert torch.allclose(whole.metric, local.bank.factors[0] @ local.bank.factors[0].mT)
        expected = local.distances(test.queries, test.database)
        assert torch.allclose(whole.distances(test.queries, test.database), expected, atol=1e-6)
    assert not torch.allclose(whole.metric, GlobalGMML(t=0.4).fit(data).metric, rtol=0.01)
    assert not torch.allclose(whole.metric, GlobalGMML(t=0.4, pairs="region", seed=0).fit(data).metric, rtol=0.01)


def test_exponential_weights_rank_as_softmax_weights_until_they_underflow() -> None:
    train, _, test = synthetic.synthetic_splits(4, seed=0)
    for rho in (0.0, 10.0):
        soft, plain = (LocationGMML(4, rho=rho, weights=kind).fit(train) for kind in ("softmax", "exponential"))
        far, near = (system.distances(test.queries, test.database) for system in (soft, plain))
        assert torch.allclose(*(d / d.mean(1, keepdim=True) for d in (far, near)), rtol=1e-6)
        assert not soft.bank.weights(test.queries).sum(1).isclose(plain.bank.weights(test.queries).sum(1)).any()
    lost = LocationGMML(4, rho=3000.0, weights="exponential").fit(train)
    with pytest.warns(NumericsWarning, match="queries underflow"):
        assert bool((lost.distances(test.queries, test.database) == 0).all(1).any())


def test_rho_and_other_settings_are_chosen_on_validation() -> None:
    train, valid, _ = synthetic.synthetic_splits(4, seed=0)
    regions = "kmeans"
    system = LocationGMML([2, 4], regions=regions, lam=[0.01, 0.1], rho=[0.0, 30.0]).fit(train, valid)
    scores = {}
    for K in (2, 4):
        for lam in (0.01, 0.1):
            for rho in (0.0, 30.0):
                single = LocationGMML(K, regions=regions, lam=lam, rho=rho).fit(train)
                scores[K, lam, rho] = float(single.evaluate(valid)["map"].nanmean())
    chosen = system.chosen
    assert scores[chosen["num_regions"], chosen["lam"], chosen["rho"]] == max(scores.values())


@pytest.mark.parametrize(("num_classes", "regions"), [(10, "sampled"), (10, "kmeans")])
def test_local_metrics_beat_one_global_metric(num_classes: int, regions: str) -> None:
    train, valid, test = synthetic.synthetic_splits(num_classes, seed=0)
    K = num_classes if regions == "sampled" else 3 * num_classes
    local = LocationGMML(K, regions=regions, lam=0.01, rho=(0.0, 30.0, 100.0)).fit(train, valid)
    whole = GlobalGMML(lam=[0.01, 0.1]).fit(train, valid)
    gain = local.evaluate(test)["map"] - whole.evaluate(test)["map"]
    assert float(gain.mean()) > 0.15
    assert float(gain.mean()) > 5 * float(gain.std()) / len(gain) ** 0.5


def test_errors_name_argument_rule_and_value() -> None:
    data = small_set()
    with pytest.raises(LGMMLError, match="`regions` must be one of 'sampled', 'kmeans', got 'random'"):
        LocationGMML(regions="random")
    with pytest.raises(LGMMLError, match="`valid` must be given to choose among 7 combinations"):
        LocationGMML(2).fit(data)
    with pytest.raises(LGMMLError, match="`LocationGMML` must be fitted first"):
        LocationGMML().distances(data.queries, data.database)
    empty = ExampleSet(data.database, data.queries, torch.zeros(0, dtype=torch.long), torch.zeros(19, dtype=torch.long))
    with pytest.raises(DataError, match="`train` must have a query with both a relevant and another document"):
        GlobalGMML().fit(empty)
