"""The paper's fit against a bank built by loops, and what each of its settings must change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.fitting.sampled import GLOBAL_LAM, MEDIAN_DOCUMENTS, _global_metric, fit_sampled
from lgmml_torch.models.local_metrics import MetricBlock
from lgmml_torch.ragged import RankingData
from tests.reference import sampled as reference

FLAT = 2  # queries of every data set here that no region can be made of


def lists(seed: int, queries: int = 9, features: int = 3) -> RankingData:
    """Lists of 8 to 14 documents, grades 0 to 4 that follow the features loosely; the last two lists have one grade."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(8, 15, (queries,), generator=g)
    qid = torch.arange(queries).repeat_interleave(sizes)
    X = torch.randn(len(qid), features, generator=g, dtype=torch.float64) @ torch.diag(
        torch.tensor([1.0, 3.0, 0.5]).double()
    )
    noise = torch.randn(len(qid), generator=g, dtype=torch.float64)
    y = (1.5 + X[:, 0] - 0.3 * X[:, 1].square() / 3 + noise).clamp(0, 4).round()
    y[qid >= queries - FLAT] = 0.0
    return RankingData.from_arrays(X, y, qid=qid, dtype=torch.float64)


def block_of(bank: Bank) -> MetricBlock:
    (block,) = bank.metrics.iter_blocks()
    return block


def metrics_of(bank: Bank) -> Tensor:
    return block_of(bank).factors @ block_of(bank).factors.mT


def groups(bank: Bank, pool: int) -> list[list[int]]:
    queries = bank.history["regions"]
    return [queries[i : i + pool] for i in range(0, len(queries), pool)]


def assert_equals_the_loops(
    bank: Bank, data: RankingData, judges: RankingData, *, pool: int = 1, **settings: Any
) -> reference.Found:
    """Anchors, metrics, scales, qualities and the judging of bandwidths are those of the naive fit."""
    want = reference.fit(data, judges, groups(bank, pool), **settings)
    block = block_of(bank)
    torch.testing.assert_close(metrics_of(bank), torch.stack(want.metrics), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(block.anchors, torch.stack(want.anchors), rtol=0, atol=1e-12)
    torch.testing.assert_close(block.quality, torch.tensor(want.quality, dtype=torch.float64), rtol=0, atol=1e-10)
    scales = torch.tensor(want.medians, dtype=torch.float64) * want.bandwidth
    torch.testing.assert_close(block.scales, scales, rtol=1e-8, atol=0)
    assert bank.history["bandwidth"] == want.bandwidth
    if len(want.judged) > 1:
        assert bank.history["ndcg@10 by bandwidth"] == pytest.approx({str(b): v for b, v in want.judged.items()})
    return want


SETTINGS: list[dict[str, Any]] = [
    {},
    {"lam": 0.7, "t": 0.2},
    {"relative": False, "lam": 3.0, "t": 1.0},
    {"reduction": "sum"},
    {"candidates": "top", "kernel": "rbf"},
    {"alphas": [1.0], "norm": "trace", "candidates": "top", "pool": 2},
    {"pool": 2, "bandwidth": [2.0], "alphas": [0.5, 2.0]},
]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_bank_is_that_of_the_loops(seed: int) -> None:
    data, valid = lists(seed), lists(seed + 100, queries=7)
    for settings in SETTINGS:
        bank = fit_sampled(data, valid, num_metrics=3, seed=seed, **settings)
        assert_equals_the_loops(bank, data, valid, **settings)
        assert bank.metrics.norm == settings.get("norm", "mahalanobis")
        assert bank.kernel == settings.get("kernel", "paper")
        assert bank.phi is None


class TestBandwidth:
    def fitted(self, **settings: Any) -> tuple[Bank, RankingData, RankingData]:
        data, valid = lists(4), lists(104)
        return fit_sampled(data, valid, num_metrics=4, **settings), data, valid

    def test_the_best_on_validation_is_kept(self) -> None:
        bank, data, valid = self.fitted()
        judged = assert_equals_the_loops(bank, data, valid).judged
        assert bank.history["bandwidth"] == max(judged, key=lambda width: judged[width])
        assert judged[bank.history["bandwidth"]] > min(judged.values()) + 0.01

    def test_training_queries_would_have_chosen_another(self) -> None:
        bank, data, valid = self.fitted()
        on_training = reference.fit(data, data, groups(bank, 1))
        assert bank.history["bandwidth"] == reference.fit(data, valid, groups(bank, 1)).bandwidth
        assert bank.history["bandwidth"] != on_training.bandwidth
        alone = fit_sampled(data, num_metrics=4)  # with nothing else to go by, they do
        assert alone.history["bandwidth"] == on_training.bandwidth

    def test_a_wider_one_makes_distances_smaller(self) -> None:
        data = lists(5)
        narrow, wide = (fit_sampled(data, num_metrics=3, bandwidth=value) for value in (0.5, 2.0))
        torch.testing.assert_close(block_of(wide).scales, 4 * block_of(narrow).scales)
        torch.testing.assert_close(wide.metrics(data.features), narrow.metrics(data.features) / 4)
        medians = narrow.metrics(data.features).median(0).values
        torch.testing.assert_close(medians, torch.full_like(medians, 2.0))  # the median over .5
        assert narrow.history["ndcg@10 by bandwidth"] == {}


class TestAnchors:
    def test_they_are_judged_in_the_norm_of_the_distances(self) -> None:
        data = lists(0)
        bank = fit_sampled(data, num_metrics=7, norm="trace", bandwidth=1.0)
        want = assert_equals_the_loops(bank, data, data, norm="trace", bandwidth=[1.0])
        other = reference.fit(data, data, groups(bank, 1), bandwidth=[1.0])
        assert any(not torch.equal(a, b) for a, b in zip(want.anchors, other.anchors, strict=True))

    def test_the_real_document_stays_where_it_is_best(self) -> None:
        data = lists(1)
        bank = fit_sampled(data, num_metrics=7, alphas=[4.0, 8.0], bandwidth=1.0)
        want = assert_equals_the_loops(bank, data, data, alphas=[4.0, 8.0], bandwidth=[1.0])
        assert 0.0 in want.alphas
        assert set(want.alphas) != {0.0}
        unmoved = fit_sampled(data, num_metrics=7, bandwidth=1.0)
        assert bool((block_of(bank).quality >= block_of(unmoved).quality - 1e-9).all())


class TestRegions:
    def test_the_seed_draws_them(self) -> None:
        data = lists(3, queries=20)
        banks = [fit_sampled(data, num_metrics=4, bandwidth=1.0, seed=seed) for seed in (0, 0, 1, 2)]
        drawn = [bank.history["regions"] for bank in banks]
        assert drawn[0] == drawn[1]
        assert len({tuple(sorted(queries)) for queries in drawn}) == 3
        assert torch.equal(block_of(banks[0]).anchors, block_of(banks[1]).anchors)
        assert not torch.equal(block_of(banks[0]).anchors, block_of(banks[2]).anchors)

    def test_no_more_metrics_than_usable_queries(self, caplog: pytest.LogCaptureFixture) -> None:
        data = lists(3)
        with caplog.at_level("INFO"):
            bank = fit_sampled(data, num_metrics=500, bandwidth=1.0)
        assert sorted(bank.history["regions"]) == reference.usable(data) == list(range(9 - FLAT))
        assert bank.metrics.num_metrics == 9 - FLAT
        assert "7 local metrics instead of 500" in caplog.text
        caplog.clear()
        with caplog.at_level("INFO"):
            fit_sampled(data, num_metrics=7, bandwidth=1.0)
        assert "instead of" not in caplog.text
        assert_equals_the_loops(bank, data, data, bandwidth=[1.0])

    def test_pools_join_different_queries(self) -> None:
        data = lists(3, queries=14)
        bank = fit_sampled(data, num_metrics=4, pool=3, bandwidth=1.0)
        assert len(bank.history["regions"]) == len(set(bank.history["regions"])) == 12
        assert_equals_the_loops(bank, data, data, pool=3, bandwidth=[1.0])

    def test_nothing_to_tell_apart_is_an_error(self) -> None:
        flat = lists(0).select([7, 8])
        with pytest.raises(DataError, match="none of the 2 queries has documents of two different labels"):
            fit_sampled(flat)

    def test_progress_is_told(self) -> None:
        seen: list[tuple[int, int]] = []
        fit_sampled(lists(0), num_metrics=5, bandwidth=1.0, on_round=lambda done, info: seen.append((done, info.total)))
        assert seen[-1] == (5, 5)


class TestMedians:
    """Of an odd number m of documents, (m − 1)/2 lie beyond their median: the share tells how many were looked at."""

    def test_few_documents_are_all_looked_at(self) -> None:
        data = lists(6)
        N = data.num_documents
        found = fit_sampled(data, num_metrics=3, bandwidth=1.0).history["share of distances beyond 1"]
        assert found == pytest.approx((N - 1 - (N - 1) // 2) / N)

    def test_of_many_only_some_from_everywhere(self) -> None:
        """The first lists lie near, the others far: medians of the first rows would be near."""
        g = torch.Generator().manual_seed(0)
        count = 2 * MEDIAN_DOCUMENTS
        near = torch.arange(count) < count // 2
        x = torch.rand(count, 1, generator=g) + torch.where(near, 0.0, 1000.0)[:, None]
        labels = torch.zeros(count)
        labels[0] = 1
        data = RankingData.from_arrays(x, labels, group=[8] * (count // 8))
        with torch.random.fork_rng():
            banks = []
            for before in (0, 1):
                torch.manual_seed(before)  # draws of others do not matter
                banks.append(fit_sampled(data, num_metrics=1, bandwidth=1.0))
        assert torch.equal(banks[0].metrics.scales, banks[1].metrics.scales)
        looked_at = banks[0].history["share of distances beyond 1"] * MEDIAN_DOCUMENTS
        assert looked_at == pytest.approx(round(looked_at), abs=1e-3)
        below = float((banks[0].metrics(data.features) < 1).double().mean())
        assert below == pytest.approx(0.5, abs=0.02)
        assert below != 0.5


class TestPrior:
    def test_eigh_and_cholesky_give_the_same_bank(self) -> None:
        data, valid = lists(0), lists(100)
        banks = [fit_sampled(data, valid, num_metrics=5, method=method) for method in ("cholesky", "eigh")]
        torch.testing.assert_close(metrics_of(banks[0]), metrics_of(banks[1]), rtol=1e-9, atol=1e-10)
        assert not torch.equal(block_of(banks[0]).factors, block_of(banks[1]).factors)  # two routes, not one
        assert torch.equal(block_of(banks[0]).anchors, block_of(banks[1]).anchors)
        torch.testing.assert_close(block_of(banks[0]).scales, block_of(banks[1]).scales, rtol=1e-9, atol=0)

    @pytest.mark.parametrize("t", [0.3, 0.5])
    def test_global_is_one_metric_of_all_pairs(self, t: float) -> None:
        data = lists(1)
        want = reference.global_metric(data, t, GLOBAL_LAM)
        for method in ("cholesky", "eigh"):
            torch.testing.assert_close(_global_metric(data, t=t, method=method), want, rtol=1e-9, atol=1e-10)
        bank = fit_sampled(data, num_metrics=4, prior="global", t=t)
        assert_equals_the_loops(bank, data, data, prior=want, t=t)
        plain = fit_sampled(data, num_metrics=4, t=t)
        assert not torch.allclose(metrics_of(bank), metrics_of(plain), rtol=1e-3)

    def test_a_large_lambda_gives_the_prior(self) -> None:
        data = lists(2)
        given = torch.diag(torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64))
        for prior, want in (("identity", torch.eye(3).double()), ("global", _global_metric(data)), (given, given)):
            bank = fit_sampled(data, num_metrics=3, lam=1e9, prior=prior)
            torch.testing.assert_close(metrics_of(bank), want.expand(3, 3, 3), rtol=1e-6, atol=1e-7)

    def test_a_region_like_the_whole_keeps_the_global_metric(self) -> None:
        """M (S + cM⁻¹) M = D + cM: towards its own metric a region is hardly pulled, whatever λ."""
        g = torch.Generator().manual_seed(0)
        X, y = torch.randn(120, 3, generator=g, dtype=torch.float64), torch.arange(120) % 2
        X[y == 1] *= torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
        one = RankingData.from_arrays(X, y, qid=[0] * 120, dtype=torch.float64)
        towards = _global_metric(one)
        for lam in (0.1, 1.0, 10.0):
            bank, plain = (
                fit_sampled(one, num_metrics=1, prior=prior, lam=lam, bandwidth=1.0) for prior in ("global", "identity")
            )
            away, further = (float((metrics_of(each)[0] - towards).abs().max()) for each in (bank, plain))
            assert away < 0.15 < 0.5 < further

    def test_a_matrix_for_each_region(self) -> None:
        data = lists(3)
        priors = torch.stack([torch.eye(3) * size for size in (1.0, 4.0)]).double()
        metrics = metrics_of(fit_sampled(data, num_metrics=2, lam=1e9, prior=priors))
        torch.testing.assert_close(metrics, priors, rtol=1e-6, atol=1e-7)
        with pytest.raises(LGMMLError, match=r"`prior` must have shape \(3, 3, 3\), got \(2, 3, 3\)"):
            fit_sampled(data, num_metrics=3, prior=priors)
