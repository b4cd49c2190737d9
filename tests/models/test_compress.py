"""Compressed models score like the ones they come from, within the tolerance, at a fraction of the work."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.models.compress import LowRank, compress, distance_cost, rank_correlation
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import POLICIES, Phi
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

DIM = 12


def lists(queries: int = 20, seed: int = 0) -> RankingData:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(5, 15, (queries,), generator=g)
    n = int(sizes.sum())
    # A few directions carry most of the variance, as in real features.
    x = torch.randn(n, DIM, generator=g) @ torch.diag(0.6 ** torch.arange(DIM)) @ torch.randn(DIM, DIM, generator=g)
    return RankingData.from_arrays(x, torch.randint(0, 3, (n,), generator=g), group=sizes)


def ranker(
    data: RankingData, *, count: int = 10, norm: str = "mahalanobis", narrow: bool = False, seed: int = 0, **options
) -> LGMML:
    g = torch.Generator().manual_seed(seed)
    prep = Chain([Standardize()]).fit(data.features, data.offsets)
    z = prep(data.features, data.offsets)
    full = MetricBlock(
        z[:count].clone(),
        torch.randn(count, DIM, DIM, generator=g) / DIM,
        quality=torch.rand(count, generator=g),
    )
    blocks = [full]
    if narrow:
        support = torch.stack([torch.randperm(DIM, generator=g)[:2] for _ in range(4)])
        blocks.append(MetricBlock(torch.randn(4, 2, generator=g), torch.randn(4, 2, 2, generator=g), support=support))
    bank = LocalMetrics(blocks, num_features=DIM, norm=norm)
    bank.set_scales(bank(z).median(dim=0).values)
    phi = Phi(data.num_queries, bank.num_metrics, init=torch.rand(bank.num_metrics, generator=g), **options)
    model = LGMML(prep, bank, phi, qids=data.qids).eval()
    model.summarize(model.distances(data.features, data.offsets), data.offsets)
    return model


def centred(model: LGMML, data: RankingData) -> torch.Tensor:
    scores = model.score(data).double()
    return torch.cat([part - part.mean() for part in scores.split(data.sizes.tolist())])


@pytest.mark.parametrize("norm", ["mahalanobis", "trace"])
@pytest.mark.parametrize("tol", [0.3, 0.1, 0.01])
def test_scores_stay_within_the_tolerance(norm: str, tol: float) -> None:
    data = lists()
    model = ranker(data, norm=norm, narrow=norm == "mahalanobis")
    found = model.compress(tol, data)
    before, after = centred(model, data), centred(found.model, data)
    error = float((after - before).norm() / before.norm())
    assert error <= tol * 1.001
    assert found.score_error == pytest.approx(error, abs=1e-6)
    assert found.cost_after < found.cost_before
    assert found.cost_after == distance_cost(found.model.metrics)
    assert found.metrics_after == found.model.metrics.num_metrics == sum(found.ranks.values())
    assert found.ndcg_lost == pytest.approx(found.ndcg_before - found.ndcg_after)


def test_a_smaller_tolerance_costs_more_and_loses_less() -> None:
    data = lists()
    model = ranker(data, count=30)
    loose, tight = model.compress(0.3, data), model.compress(0.02, data)
    assert loose.cost_after < tight.cost_after
    assert loose.rank_correlation < tight.rank_correlation <= 1


def test_no_tolerance_changes_nothing_but_idle_metrics() -> None:
    data = lists()
    model = ranker(data)
    with torch.no_grad():
        model.phi.table.weight[:, [2, 7]] = 0
    found = model.compress(0.0, data)
    assert (found.metrics_before, found.metrics_after) == (10, 8)
    torch.testing.assert_close(found.model.score(data), model.score(data), rtol=1e-3, atol=1e-5)
    assert found.rank_correlation == pytest.approx(1.0, abs=1e-3)


def test_no_tolerance_with_many_documents() -> None:
    data = lists(queries=300)  # enough for scoring by the quadratic form, whose rounding compression must not chase
    assert data.num_documents > 2048
    found = ranker(data).compress(0.0, data)
    assert found.score_error < 1e-4
    assert found.metrics_after == 10


def test_copies_of_a_metric_become_one_with_their_weights_together() -> None:
    data = lists()
    model = ranker(data, count=1)
    block = model.metrics.iter_blocks()[0]
    triple = LocalMetrics([block.select(torch.tensor([0, 0, 0]))], num_features=DIM)
    copied = LGMML(model.preprocess, triple, Phi(data.num_queries, 3, init=torch.tensor([1.0, 2.0, 3.0])))
    found = copied.compress(1e-4, data)
    assert found.metrics_after == 1
    assert float(found.model.phi.table.weight.detach().sum()) == pytest.approx(6.0, rel=1e-3)


def test_turned_factors_of_full_rank_keep_all_distances() -> None:
    data = lists()
    model = ranker(data, norm="trace", narrow=True)
    z = model.preprocess(data.features, data.offsets)
    low = LowRank(model.metrics, z, "paper")
    every = torch.arange(14)
    bank, order = low.bank(every, torch.tensor([DIM] * 10 + [2] * 4))
    torch.testing.assert_close(bank(z), model.metrics(z)[:, order], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(bank.quality[:10], model.metrics.quality[order][:10])


@pytest.mark.parametrize(
    ("mode", "policy"), [(mode, policy) for mode, policies in POLICIES.items() for policy in policies]
)
def test_every_way_of_weighing_new_queries(mode: str, policy: str) -> None:
    data = lists()
    model = ranker(data, mode=mode, policy=policy)
    with torch.no_grad():
        g = torch.Generator().manual_seed(5)
        model.phi.table.weight.add_(torch.rand(model.phi.table.weight.shape, generator=g))
        if model.phi.gate is not None:
            model.phi.gate.last.weight.normal_(0, 0.3, generator=g)
    found = model.compress(0.02, data)
    # Neighbours and gates look at distances too, so the tolerance is a guide there.
    assert found.score_error < (0.02 * 1.001 if policy not in ("knn", "amortized") else 0.2)
    assert found.rank_correlation > 0.95


def test_deviations_and_known_queries_are_kept() -> None:
    data = lists()
    model = ranker(data, deviations=True)
    with torch.no_grad():
        model.phi.deviation.weight.copy_(0.1 * torch.rand(20, 10, generator=torch.Generator().manual_seed(1)))
    columns = torch.tensor([3, 1])
    small = model.phi.select(columns, torch.tensor([2.0, 1.0]))
    queries = torch.arange(20)
    torch.testing.assert_close(small(queries), model.phi(queries)[:, columns] * torch.tensor([2.0, 1.0]))
    found = model.compress(0.001, data)
    assert found.model.score(data, known_queries=True).shape == (data.num_documents,)


def test_compressed_models_are_saved_and_loaded(tmp_path) -> None:
    data = lists()
    small = ranker(data, narrow=True).compress(0.1, data).model
    small.save(tmp_path / "small.model")
    assert torch.equal(LGMML.load(tmp_path / "small.model").score(data), small.score(data))


@pytest.mark.parametrize(("mode", "policy"), [("shared", "shared"), ("per_query", "mean")])
@pytest.mark.parametrize("known", [False, True])
def test_scoring_leaves_out_metrics_without_weight(mode: str, policy: str, known: bool, monkeypatch) -> None:
    data = lists()
    model = ranker(data, mode=mode, policy=policy, deviations=mode == "shared")
    with torch.no_grad():
        model.phi.table.weight[:, [0, 4]] = 0
        if model.phi.deviation is not None:
            model.phi.deviation.weight[3, 4] = 0.5  # one query does use it
    rows = model.known_rows(data.qids) if known else None
    expected = model(data.features, data.offsets, rows=rows)
    seen = []
    for name in ("forward", "weighted_sum"):
        inner = getattr(LocalMetrics, name)
        monkeypatch.setattr(
            LocalMetrics, name, lambda bank, *a, do=inner, **kw: seen.append(bank.num_metrics) or do(bank, *a, **kw)
        )
    torch.testing.assert_close(model.score(data, known_queries=known), expected)
    assert seen == [9 if mode == "shared" else 8]


def test_what_is_left_without_idle_metrics_is_kept_until_something_changes() -> None:
    data = lists()
    model = ranker(data)
    with torch.no_grad():
        model.phi.table.weight[:, 0] = 0
    small = model.without_idle("shared")
    assert small.metrics.num_metrics == 9
    assert model.without_idle("shared") is small
    model.metrics.set_scales(2 * model.metrics.scales)
    assert model.without_idle("shared") is not small
    torch.testing.assert_close(model.score(data), model(data.features, data.offsets))
    deepcopy(model).score(data)


def test_a_kept_model_follows_the_policy_of_the_whole_one() -> None:
    data = lists()
    model = ranker(data, mode="per_query", policy="knn")
    with torch.no_grad():
        model.phi.table.weight[:, 0] = 0
    expected = model.score(data, policy="mean")  # keeps a smaller model, made while "knn" was the policy
    model.phi.policy = "mean"
    assert torch.equal(model.score(data), expected)


def test_a_model_without_any_weight_still_scores() -> None:
    data = lists()
    model = ranker(data)
    with torch.no_grad():
        model.phi.table.weight.zero_()
    assert bool((model.score(data) == 0).all())


def test_rank_correlation_of_known_cases() -> None:
    offsets = torch.tensor([0, 3, 6, 7])
    rising = torch.tensor([1.0, 2, 3, 1, 2, 3, 9])
    assert rank_correlation(rising, rising.exp(), offsets) == pytest.approx(1)
    assert rank_correlation(rising, -rising, offsets) == pytest.approx(-1)
    half = torch.tensor([1.0, 2, 3, 5, 5, 5, 9])
    assert rank_correlation(rising, half, offsets) == pytest.approx(0.5)  # a constant list keeps no order
    assert rank_correlation(half, rising, offsets) == pytest.approx(1)  # and had none to keep


def test_errors_name_the_rule() -> None:
    data = lists()
    model = ranker(data)
    with pytest.raises(LGMMLError, match="`tol` must be at least 0, got -1"):
        compress(model, -1, data)
    with pytest.raises(DataError, match="`data` must have documents, got none"):
        compress(model, 0.1, data.select([]))
    with torch.no_grad():
        model.phi.table.weight.zero_()
    with pytest.raises(DataError, match="scores must vary within some list to be compared, got constant ones"):
        compress(model, 0.1, data)
