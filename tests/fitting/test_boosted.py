from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, DataError, DataWarning, DivergedError, LGMMLError
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.fitting.boosted import (
    BoostState,
    RoundInfo,
    check_scores,
    fit_boosted,
    initial_state,
    make_config,
    one_round,
)
from lgmml_torch.fitting.learners import BoostConfig
from lgmml_torch.fitting.round import Bag, find_learners, make_problem, weighted_rows
from lgmml_torch.functional.ranking.measures import ndcg
from lgmml_torch.ragged import RankingData

SMALL: dict[str, Any] = {"rounds": 12, "candidates": 6, "evaluate_every": 3}


def make(seed: int, queries: int = 40, size: int = 15, width: int = 6) -> RankingData:
    """Relevance falls with the distance from a point in two of the features; the others are noise."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(queries * size, width, generator=gen)
    centre = torch.tensor([0.5, -0.5])
    near = -(x[:, :2] - centre).norm(dim=1) + 0.3 * torch.randn(len(x), generator=gen)
    labels = (near > -0.7).float() + (near > -1.2).float()
    return RankingData.from_arrays(x, labels, qid=torch.arange(len(x)) % queries)


def scores(bank: Bank, data: RankingData) -> Tensor:
    assert bank.phi is not None
    dists = bank.metrics(data.features)
    return -(dists * torch.exp(-dists)) @ bank.phi


def same(a: Bank, b: Bank) -> bool:
    assert a.phi is not None
    assert b.phi is not None
    tensors = zip(a.metrics.state_dict().values(), b.metrics.state_dict().values(), strict=True)
    equal = all(torch.equal(x, y) or bool(x.isnan().all() and y.isnan().all()) for x, y in tensors)
    return equal and torch.equal(a.phi, b.phi) and a.history == b.history


@pytest.fixture(scope="module")
def train() -> RankingData:
    return make(0)


@pytest.fixture(scope="module")
def valid() -> RankingData:
    return make(1, queries=25)


@pytest.mark.parametrize("metric", ["gmml", "gmml-pooled", "identity"])
def test_learns_to_rank_unseen_queries(train: RankingData, valid: RankingData, metric: str) -> None:
    bank = fit_boosted(train, valid, metric=metric, rounds=40)
    test = make(2)
    assert bank.phi is not None
    assert bool((bank.phi > 0).all())
    reached = float(ndcg(scores(bank, test), test.labels, test.offsets, k=10))
    chance = float(ndcg(torch.rand(test.num_documents, generator=torch.Generator()), test.labels, test.offsets, k=10))
    assert reached > 0.85 > chance + 0.1


def test_the_bank_reproduces_the_curve_it_reports(train: RankingData, valid: RankingData) -> None:
    bank = fit_boosted(train, valid, **SMALL)
    history = bank.history
    value = history["valid_ndcg"][history["rounds"].index(history["best_round"])]
    assert float(ndcg(scores(bank, valid), valid.labels, valid.offsets, k=10)) == pytest.approx(value, abs=1e-4)
    assert {block.anchors.shape[1] for block in bank.metrics.iter_blocks()} <= {1, 2, 3}


def test_same_seed_same_bank_and_another_seed_another(train: RankingData, valid: RankingData) -> None:
    bank = fit_boosted(train, valid, seed=3, **SMALL)
    assert same(bank, fit_boosted(train, valid, seed=3, **SMALL))
    assert not same(bank, fit_boosted(train, valid, seed=4, **SMALL))


def test_row_order_does_not_matter(train: RankingData, valid: RankingData) -> None:
    mixed = torch.randperm(train.num_documents, generator=torch.Generator().manual_seed(0))
    again = RankingData.from_arrays(train.features[mixed], train.labels[mixed], qid=train.query_index[mixed])
    plain = RankingData.from_arrays(train.features, train.labels, qid=train.query_index)
    assert same(fit_boosted(plain, valid, **SMALL), fit_boosted(again, valid, **SMALL))


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_a_resumed_fit_ends_bit_for_bit_the_same(train: RankingData, valid: RankingData, stop: int) -> None:
    kept: dict[int, dict[str, Any]] = {}

    def keep(done: int, info: RoundInfo) -> None:
        kept[done] = info.state.export()

    whole = fit_boosted(train, valid, on_round=keep, **SMALL)
    file = io.BytesIO()
    torch.save(kept[stop], file)
    file.seek(0)
    state = BoostState.load(torch.load(file, weights_only=True))
    assert same(whole, fit_boosted(train, valid, resume=state, **SMALL))


def test_a_state_of_another_fit_is_refused(train: RankingData, valid: RankingData) -> None:
    states: list[BoostState] = []
    fit_boosted(train, valid, on_round=lambda _, info: states.append(info.state), **SMALL)
    with pytest.raises(
        ConfigError, match=r"`resume` must belong to this fit .*seed=9.* got a state of another .*seed=0"
    ):
        fit_boosted(train, valid, seed=9, resume=states[0], **SMALL)


def test_reports_every_round(train: RankingData, valid: RankingData) -> None:
    seen: list[tuple[int, RoundInfo]] = []
    bank = fit_boosted(train, valid, on_round=lambda done, info: seen.append((done, info)), **SMALL)
    assert [done for done, _ in seen] == list(range(1, 13))
    assert [done for done, info in seen if info.valid_ndcg is not None] == bank.history["rounds"] == [3, 6, 9, 12]
    assert [info.train_ndcg for _, info in seen if info.train_ndcg is not None] == bank.history["train_ndcg"]
    assert seen[-1][1].num_metrics >= bank.metrics.num_metrics


def test_stops_when_validation_stops_improving(train: RankingData) -> None:
    labels = make(5).labels[torch.randperm(600, generator=torch.Generator().manual_seed(1))]
    nonsense = replace(make(5), labels=labels)
    rounds: list[int] = []
    bank = fit_boosted(train, nonsense, patience=10, on_round=lambda done, _: rounds.append(done))
    assert rounds[-1] < 200
    assert bank.history["best_round"] <= rounds[-1] - 10


def test_without_validation_all_rounds_are_kept(train: RankingData) -> None:
    bank = fit_boosted(train, **SMALL)
    assert bank.history["best_round"] == 12
    assert bank.history["valid_ndcg"] == []


def test_validation_without_a_relevant_document_is_no_validation(train: RankingData, valid: RankingData) -> None:
    barren = replace(valid, labels=torch.zeros_like(valid.labels))
    with pytest.warns(DataWarning, match="no validation query has a relevant document"):
        bank = fit_boosted(train, barren, **SMALL)
    assert torch.equal(bank.phi, fit_boosted(train, **SMALL).phi)


def test_documents_above_the_cap_are_left_to_other_rounds(train: RankingData, valid: RankingData) -> None:
    bank = fit_boosted(train, valid, cap=100, rounds=40)
    assert float(ndcg(scores(bank, valid), valid.labels, valid.offsets, k=10)) > 0.8


def test_queries_of_weight_zero_do_not_count(train: RankingData, valid: RankingData) -> None:
    weights = torch.ones(40)
    weights[20:] = 0
    spoilt = train.labels.clone()
    spoilt[train.offsets[20] :] = spoilt[train.offsets[20] :].flip(0)
    banks = [
        fit_boosted(replace(train, query_weights=weights, labels=labels), valid, **SMALL)
        for labels in (train.labels, spoilt)
    ]
    assert torch.equal(scores(banks[0], valid), scores(banks[1], valid))
    with pytest.raises(DataError, match="`data` must have a query with documents of different labels, got none"):
        fit_boosted(replace(train, query_weights=torch.zeros(40)), valid)


def test_the_feature_prior_keeps_to_features_that_matter(valid: RankingData) -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(1500, 30, generator=gen)
    data = RankingData.from_arrays(x, (x[:, 0] > 0.8).long(), qid=torch.arange(1500) % 100)
    shares = []
    for power in (0.0, 4.0):
        bank = fit_boosted(data, rounds=10, prior_power=power, batch=12)
        drawn = torch.cat([block.support.flatten() for block in bank.metrics.iter_blocks()])
        shares.append(float((drawn == 0).double().mean()))
    assert shares[1] > shares[0]


def test_odd_lists_are_no_obstacle() -> None:
    x = torch.randn(70, 3, generator=torch.Generator().manual_seed(0))
    qid = [0] * 60 + [1] + [2] * 9  # one long list, one document alone, one without relevant documents
    labels = (x[:, 0] > 0).float()
    labels[60:] = 0
    bank = fit_boosted(RankingData.from_arrays(x, labels, qid=qid), cap=20, **SMALL)
    assert bank.metrics.num_metrics > 0


def test_a_list_far_above_the_cap_keeps_its_first_places() -> None:
    x = torch.randn(5000, 4, generator=torch.Generator().manual_seed(0))
    data = RankingData.from_arrays(x, (x[:, 0] > 1.5).long(), group=[5000])
    bank = fit_boosted(data, cap=100, rounds=20)
    assert bank.history["train_ndcg"][-1] > 0.9


def test_a_sample_without_positives_finds_nothing(train: RankingData) -> None:
    n = 6
    bag = Bag(train.features[:n], -torch.ones(n), torch.ones(n), torch.tensor([0, n]))
    assert len(find_learners(bag, bag, None, BoostConfig(), torch.Generator())) == 0


def test_errors(train: RankingData, valid: RankingData) -> None:
    with pytest.raises(ConfigError, match="`shrinkag` is no setting of fit_boosted; did you mean 'shrinkage'"):
        fit_boosted(train, shrinkag=0.1)
    flat = replace(train, labels=torch.zeros_like(train.labels))
    with pytest.raises(DataError, match="`data` must have a query with documents of different labels, got none"):
        fit_boosted(flat)
    constant = replace(train, features=torch.zeros_like(train.features))
    with pytest.raises(DataError, match="`data` must have a feature that tells documents of a query apart"):
        fit_boosted(constant, valid, **SMALL)
    with pytest.raises(LGMMLError, match="`valid` must have 6 features as `data` has, got 4"):
        fit_boosted(train, make(0, width=4))
    broken = train.features.clone()
    broken[3, 2] = float("nan")
    with pytest.raises(LGMMLError, match=r"`features` must be finite, got nan at position \(3, 2\)"):
        fit_boosted(replace(train, features=broken))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metric": "gmlm"}, "`metric` must be one of .* did you mean 'gmml'"),
        ({"t": 1.5}, r"`t` must lie in \[0, 1\], got 1.5"),
        ({"subsample": 0.0}, "`subsample` must be positive, got 0"),
        ({"hessian_floor": 0.0}, "`hessian_floor` must be positive, got 0"),
        ({"lam": -1.0}, "`lam` must be at least 0, got -1"),
        ({"sizes": ()}, r"`sizes` must hold positive numbers, got \[\]"),
        ({"bandwidths": [0.0]}, r"`bandwidths` must hold positive numbers, got \[0.0\]"),
        ({"candidates": 2}, "`candidates` must be at least one for each of the 3 sizes, got 2"),
    ],
)
def test_config_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        BoostConfig(**settings)


def test_rows_drawn_by_size_keep_every_sum_on_average() -> None:
    """Few rows are most of the sum: they are nearly always drawn, and weights make up for the rest."""
    g = torch.Generator().manual_seed(0)
    sizes, other = torch.rand(2000, generator=g) ** 20, torch.randn(2000, generator=g)
    counts, sums, others = [], [], []
    for _ in range(400):
        rows, weights = weighted_rows(sizes, 200, g)
        counts.append(len(rows))
        sums.append(float((sizes[rows] * weights).sum()))
        others.append(float((other[rows] * weights).sum()))
        assert (rows.diff() > 0).all()
    assert sum(counts) / 400 == pytest.approx(200, rel=0.05)
    uniform = 400**-0.5 * float(sizes.std()) * 2000 / 200**0.5  # the error of a mean of uniform draws
    assert abs(sum(sums) / 400 - float(sizes.sum())) < uniform
    assert abs(sum(others) / 400 - float(other.sum())) < 4 * 400**-0.5 * float(torch.tensor(others).std())
    rows, weights = weighted_rows(sizes, 5000, g)
    assert torch.equal(rows, torch.arange(2000))
    assert (weights == 1).all()
    rows, weights = weighted_rows(torch.zeros(2000), 100, g)
    assert 50 < len(rows) < 150


@pytest.mark.parametrize("settings", [{"draw": "gradient"}, {"phi_cap": 800}, {"draw": "gradient", "phi_cap": 800}])
def test_draws_by_gradient_and_wide_weights_fit_too(settings: dict[str, Any]) -> None:
    train, valid = make(0, size=30), make(1)
    plain, other, again = (
        fit_boosted(train, valid, rounds=20, cap=200, **options) for options in ({}, settings, settings)
    )
    assert not torch.equal(plain.phi, other.phi)
    assert torch.equal(other.phi, again.phi)
    assert other.history["best_valid_ndcg"] > plain.history["best_valid_ndcg"] - 0.05


def test_scores_that_are_no_numbers_end_the_fit(train: RankingData, valid: RankingData) -> None:
    problem = make_problem(train, valid, make_config(rounds=3, candidates=6), 0)
    state = one_round(initial_state(problem), problem)
    check_scores(state, problem.config)
    huge = replace(state.learners, phi=torch.full_like(state.learners.phi, 2e38))
    for broken in (replace(state, learners=huge), replace(state, valid_scores=state.valid_scores / 0)):
        with pytest.raises(DivergedError, match=r"not finite any more in round 1 .* `shrinkage` \(now 0.1\)"):
            check_scores(broken, problem.config)


@pytest.mark.parametrize(
    "settings",
    [{"ridge": 1e-300, "hessian_floor": 1e-300}, {"sigma": 1e30}, {"lam": 1e30}, {"bandwidths": (1e-300,)},
     {"bandwidths": (1e300,)}, {"steps": (1e300,)}, {"feature_floor": 1e30}, {"sigma": 1e300}],
    ids=str,
)  # fmt: skip
def test_extreme_settings_give_finite_scores_or_an_error(settings: dict[str, Any], train: RankingData) -> None:
    try:
        bank = fit_boosted(train, rounds=2, candidates=6, **settings)
    except LGMMLError:
        return
    assert bool(bank.score(train.features).isfinite().all())
