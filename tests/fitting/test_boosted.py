"""Boosted banks: they learn, resume, grow, stop where validation says, and heed weights, positions and a measure."""

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
    IDLE_ROUNDS,
    BoostedBuilder,
    BoostState,
    RoundInfo,
    _learned_bank,
    fit_boosted,
)
from lgmml_torch.fitting.round import BoostConfig, Problem
from lgmml_torch.functional.losses import position_curve
from lgmml_torch.functional.measures import mean_measure, ndcg, rank_metrics
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.ragged import RankingData

SMALL: dict[str, Any] = {"rounds": 12, "candidates": 6, "evaluate_every": 3}
FEW: dict[str, Any] = {"rounds": 4, "candidates": 6, "evaluate_every": 2}


def make(seed: int, queries: int = 40, size: int = 15, width: int = 6) -> RankingData:
    """Relevance falls with the distance from a point in two of the features; the others are noise."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(queries * size, width, generator=gen)
    centre = torch.tensor([0.5, -0.5])
    near = -(x[:, :2] - centre).norm(dim=1) + 0.3 * torch.randn(len(x), generator=gen)
    labels = (near > -0.7).float() + (near > -1.2).float()
    return RankingData.from_arrays(x, labels, qid=torch.arange(len(x)) % queries)


def same(a: Bank, b: Bank) -> bool:
    assert a.phi is not None
    assert b.phi is not None
    tensors = zip(a.metrics.state_dict().values(), b.metrics.state_dict().values(), strict=True)
    equal = all(torch.equal(x, y) or bool(x.isnan().all() and y.isnan().all()) for x, y in tensors)
    return equal and torch.equal(a.phi, b.phi) and a.history == b.history


def states(data: RankingData, valid: RankingData | None = None, **settings: Any) -> list[RoundInfo]:
    """What is reported after each round."""
    told: list[RoundInfo] = []
    fit_boosted(data, valid, on_round=lambda _, info: told.append(info), **settings)
    return told


@pytest.fixture(scope="module")
def train() -> RankingData:
    return make(0)


@pytest.fixture(scope="module")
def valid() -> RankingData:
    return make(1, queries=25)


@pytest.fixture(scope="module")
def few() -> RankingData:
    return make(0, queries=16, size=10)


@pytest.fixture(scope="module")
def start(few: RankingData) -> Bank:
    return fit_boosted(few, seed=5, rounds=3, candidates=6)


class TestFits:
    @pytest.mark.parametrize(
        "settings",
        [{"metric": "gmml"}, {"metric": "identity", "cap": 100}, {"metric": "gmml-pooled"}],
        ids=str,
    )
    def test_it_learns_to_rank_unseen_queries(
        self, train: RankingData, valid: RankingData, settings: dict[str, Any]
    ) -> None:
        bank = fit_boosted(train, valid, rounds=40, **settings)
        test = make(2)
        chance = mean_measure(torch.rand(test.num_documents, generator=torch.Generator()), test)
        assert mean_measure(bank.score(test.features), test) > 0.85 > chance + 0.1
        assert bank.phi is not None
        assert bool((bank.phi > 0).all())

    @pytest.mark.parametrize(("kernel", "k"), [("paper", 10), ("rbf", 1), ("distance", 3)])
    def test_the_bank_reproduces_the_curve_it_reports(
        self, train: RankingData, valid: RankingData, kernel: str, k: int
    ) -> None:
        bank = fit_boosted(train, valid, kernel=kernel, k=k, smooth=1, **SMALL)
        history = bank.history
        place = history["rounds"].index(history["best_round"])
        assert (bank.kernel, history["rounds"]) == (kernel, [3, 6, 9, 12])
        for part, name in ((train, "train_ndcg"), (valid, "valid_ndcg")):
            reached = float(ndcg(bank.score(part.features), part.labels, part.offsets, k=k))
            assert history[name][place] == pytest.approx(reached, abs=1e-4)
        assert history["best_valid_ndcg"] == max(history["valid_ndcg"]) == history["valid_ndcg"][place]
        assert {block.anchors.shape[1] for block in bank.metrics.iter_blocks()} <= {1, 2, 3}

    def test_seeds_and_the_order_of_rows(self, train: RankingData, valid: RankingData) -> None:
        bank = fit_boosted(train, valid, seed=3, **SMALL)
        assert not same(bank, fit_boosted(train, valid, seed=4, **SMALL))
        mixed = torch.randperm(train.num_documents, generator=torch.Generator().manual_seed(0))
        again = RankingData.from_arrays(train.features[mixed], train.labels[mixed], qid=train.query_index[mixed])
        plain = RankingData.from_arrays(train.features, train.labels, qid=train.query_index)
        assert same(fit_boosted(plain, valid, **SMALL), fit_boosted(again, valid, **SMALL))

    def test_every_round_is_reported(self, train: RankingData, valid: RankingData) -> None:
        told = states(train, valid, **SMALL)
        bank = fit_boosted(train, valid, **SMALL)
        assert [info.state.round for info in told] == list(range(1, 13))
        assert [info.state.round for info in told if info.valid_ndcg is not None] == bank.history["rounds"]
        assert [info.train_ndcg for info in told if info.train_ndcg is not None] == bank.history["train_ndcg"]
        assert [info.valid_ndcg for info in told if info.valid_ndcg is not None] == bank.history["valid_ndcg"]
        assert {info.total for info in told} == {12}
        for info in told:
            assert info.num_metrics == len(info.state.learners) <= 4 * info.state.round
        assert told[-1].state.learners.rounds.unique().tolist() == list(range(1, 13))
        assert bank.history["best_round"] == told[-1].state.best_round

    def test_without_validation_all_rounds_are_kept(self, train: RankingData, valid: RankingData) -> None:
        bank = fit_boosted(train, rounds=5, candidates=6, evaluate_every=2)
        assert (bank.history["best_round"], bank.history["rounds"]) == (5, [2, 4, 5])  # the last is always judged
        assert (bank.history["valid_ndcg"], bank.history["best_valid_ndcg"]) == ([], None)
        assert all(info.valid_ndcg is None for info in states(train, **FEW))
        barren = replace(valid, labels=torch.zeros_like(valid.labels))
        with pytest.warns(DataWarning, match="no validation query has a relevant document"):
            other = fit_boosted(train, barren, rounds=5, candidates=6, evaluate_every=2)
        assert same(bank, other)
        yes_and_no = replace(valid, labels=(valid.labels > 1).to(valid.labels))
        assert fit_boosted(train, yes_and_no, **FEW).history["best_valid_ndcg"] is not None

    def test_odd_lists_are_no_obstacle(self) -> None:
        x = torch.randn(70, 3, generator=torch.Generator().manual_seed(0))
        qid = [0] * 60 + [1] + [2] * 9  # one long list, one document alone, one without relevant documents
        labels = (x[:, 0] > 0).float()
        labels[60:] = 0
        bank = fit_boosted(RankingData.from_arrays(x, labels, qid=qid), cap=20, **SMALL)
        assert bank.metrics.num_metrics > 0

    def test_a_list_far_above_the_cap_keeps_its_first_places(self) -> None:
        x = torch.randn(5000, 4, generator=torch.Generator().manual_seed(0))
        data = RankingData.from_arrays(x, (x[:, 0] > 1.5).long(), group=[5000])
        assert fit_boosted(data, cap=100, rounds=20).history["train_ndcg"][-1] > 0.9

    def test_a_floor_decides_which_features_are_drawn(self) -> None:
        gen = torch.Generator().manual_seed(0)
        x = torch.randn(1500, 30, generator=gen)
        data = RankingData.from_arrays(x, (x[:, 0] > 0.8).long(), qid=torch.arange(1500) % 100)

        def share(**settings: Any) -> float:
            bank = fit_boosted(data, rounds=10, batch=12, **settings)
            drawn = torch.cat([block.support.flatten() for block in bank.metrics.iter_blocks()])
            return float((drawn == 0).double().mean())

        assert share() > share(feature_floor=100.0)

    def test_errors(self, train: RankingData, valid: RankingData) -> None:
        with pytest.raises(ConfigError, match="`shrinkag` is no setting of boosted metrics; did you mean 'shrinkage'"):
            fit_boosted(train, shrinkag=0.1)
        flat = replace(train, labels=torch.ones_like(train.labels))
        with pytest.raises(DataError, match="`data` must have a query with documents of different labels, got none"):
            fit_boosted(flat)
        constant = replace(train, features=torch.zeros_like(train.features))
        with pytest.raises(DataError, match="`data` must have a feature that tells documents of a query apart"):
            fit_boosted(constant, valid, **SMALL)
        with pytest.raises(LGMMLError, match="`valid` must have 6 features as `data` has, got 4"):
            fit_boosted(train, make(0, width=4))
        for name, parts in (("features", (1, 0)), ("valid.features", (0, 1))):
            broken = [part.features.clone() for part in (train, valid)]
            broken[parts[1]][3, 2] = float("nan")
            lists = [replace(part, features=x) for part, x in zip((train, valid), broken, strict=True)]
            with pytest.raises(LGMMLError, match=rf"`{name}` must be finite, got nan at position \(3, 2\)"):
                fit_boosted(*lists)

    @pytest.mark.parametrize(
        "settings", [{"ridge": 1e-300, "hessian_floor": 1e-300}, {"sigma": 1e30}, {"bandwidths": (1e300,)}], ids=str
    )
    def test_extreme_settings_give_finite_scores_or_an_error(
        self, settings: dict[str, Any], train: RankingData
    ) -> None:
        try:
            bank = fit_boosted(train, rounds=2, candidates=6, **settings)
        except LGMMLError:
            return
        assert bool(bank.score(train.features).isfinite().all())


class TestResuming:
    @pytest.mark.parametrize("stop", [1, 5])
    def test_a_resumed_fit_ends_bit_for_bit_the_same(self, train: RankingData, valid: RankingData, stop: int) -> None:
        shown = [part.replace(positions=torch.arange(part.num_documents) % 5) for part in (train, valid)]
        file = io.BytesIO()
        torch.save(states(*shown, **SMALL)[stop - 1].state.export(), file)
        file.seek(0)
        exported = torch.load(file, weights_only=True)
        assert set(exported).isdisjoint({"scores", "valid_scores"})
        state = BoostedBuilder(**SMALL).load_state(exported)
        whole, again = fit_boosted(*shown, **SMALL), fit_boosted(*shown, resume=state, **SMALL)
        assert same(whole, again)
        assert torch.equal(whole.position_bias, again.position_bias)  # type: ignore[arg-type]

    def test_a_state_of_an_earlier_release_and_of_lists(self, few: RankingData) -> None:
        exported = states(few, few, **FEW)[1].state.export()
        del exported["valid_measure"]
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in exported.items()}
        assert same(fit_boosted(few, few, resume=BoostState.load(lists), **FEW), fit_boosted(few, few, **FEW))

    def test_a_state_of_another_fit_is_refused(self, few: RankingData, valid: RankingData, start: Bank) -> None:
        state = states(few, valid, **FEW)[0].state
        refused = r"`resume` must belong to this fit .*seed=9.* got a state of another .*seed=0"
        with pytest.raises(ConfigError, match=refused):
            fit_boosted(few, valid, seed=9, resume=state, **FEW)
        others: list[dict[str, Any]] = [{"t": 0.4}, {"start": start}, {"measure": "mrr"}]
        for other in others:
            with pytest.raises(ConfigError, match="`resume` must belong to this fit"):
                fit_boosted(few, valid, resume=state, **other, **FEW)
        for parts in ((few, None), (few, few), (make(0, queries=17, size=10), valid)):
            with pytest.raises(ConfigError, match="`resume` must belong to this fit"):
                fit_boosted(*parts, resume=state, **FEW)

    def test_scores_that_are_no_numbers_end_the_fit(self, few: RankingData) -> None:
        state = states(few, **FEW)[0].state
        huge = replace(state.learners, phi=torch.full_like(state.learners.phi, 2e38))
        sentence = r"not finite any more in round 2 .* `shrinkage` \(now 0.1\) .* `ridge` \(now 0.05\)"
        with pytest.raises(DivergedError, match=sentence):
            fit_boosted(few, resume=replace(state, learners=huge), **FEW)
        state.check_scores(BoostConfig())
        broken = state.scores.clone()
        broken[3] = torch.nan
        for fields in ({"scores": broken}, {"valid_scores": torch.tensor([0.0, torch.inf])}):
            with pytest.raises(DivergedError, match="not finite any more in round 1"):
                replace(state, **fields).check_scores(BoostConfig())


class TestStopping:
    def test_the_best_average_of_the_last_evaluations_counts(self, few: RankingData) -> None:
        first = states(few, **FEW)[0].state
        fresh = replace(first, evaluated=(), train_ndcg=(), best_round=0)
        # Averages of 2: .1 .5 .75 .6 .6 .4; of 3: .1 .5 .533 .7 .6 .467
        for smooth, best, value in ((1, 2, 0.9), (2, 3, 0.75), (3, 4, 0.7)):
            state = fresh
            for done, found in enumerate((0.1, 0.9, 0.6, 0.6, 0.6, 0.2), 1):
                state = replace(state, round=done).evaluated_with(done / 10, found, smooth=smooth)
            assert state.valid_ndcg == (0.1, 0.9, 0.6, 0.6, 0.6, 0.2)
            assert state.train_ndcg == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
            assert state.evaluated == (1, 2, 3, 4, 5, 6)
            assert (state.best_round, state.best_value) == (best, pytest.approx(value))
        state = fresh
        for done in (1, 2, 3):  # the first of equal ones is kept
            state = replace(state, round=done).evaluated_with(0.5, 0.5, smooth=1)
        assert state.best_round == 1

    def test_patience_is_counted_in_rounds(self, few: RankingData) -> None:
        labels = few.labels[torch.randperm(few.num_documents, generator=torch.Generator().manual_seed(1))]
        settings: dict[str, Any] = {"sizes": (1,), "candidates": 2, "evaluate_every": 2, "patience": 6}
        nonsense = replace(few, labels=labels)
        bank = fit_boosted(few, nonsense, **settings)
        last = states(few, nonsense, **settings)[-1].state
        assert last.round == bank.history["best_round"] + 7 < 200
        kept = last.learners.select(last.learners.rounds <= bank.history["best_round"])
        assert bank.metrics.num_metrics == len(kept) < len(last.learners)

    def test_nothing_left_to_fit(self, few: RankingData) -> None:
        """κ = d·exp(−d) never varies by .9."""
        told: list[RoundInfo] = []
        with pytest.raises(DataError, match="must have a feature that tells documents of a query apart"):
            fit_boosted(few, min_deviation=0.9, on_round=lambda _, info: told.append(info))
        assert [info.state.idle for info in told] == list(range(1, IDLE_ROUNDS + 1))
        config, state = BoostConfig(patience=7), replace(told[0].state, idle=0)
        assert not replace(state, round=17, best_round=10, valid_ndcg=(0.5,)).finished(config)
        assert replace(state, round=18, best_round=10, valid_ndcg=(0.5,)).finished(config)
        assert not replace(state, round=18, best_round=10).finished(config)  # without validation there is no patience
        assert replace(state, round=200, best_round=200).finished(config)
        problem = Problem.of(few, None, BoostConfig(candidates=6), 0)
        assert replace(BoostState.first(problem), idle=3).one_round(problem).idle == 0  # in a row

    def test_shrinkage_is_the_share_of_a_newton_step(self, few: RankingData) -> None:
        small, large = (states(few, shrinkage=value, rounds=1)[0].state for value in (0.1, 0.3))
        assert torch.equal(small.learners.support, large.learners.support)
        torch.testing.assert_close(large.learners.phi, 3 * small.learners.phi, rtol=1e-5, atol=0)
        torch.testing.assert_close(large.scores, 3 * small.scores, rtol=1e-5, atol=1e-6)
        one, three = (states(few, batch=count, rounds=1)[0].state.learners for count in (1, 3))
        assert (len(one), len(three)) == (1, 3)
        assert torch.equal(one.support[0], three.support[0])


class TestGrowing:
    def test_no_rounds_give_the_bank_back(self, few: RankingData, start: Bank) -> None:
        given = fit_boosted(few, start=start, rounds=0)
        assert given.metrics is start.metrics
        assert given.phi is start.phi
        assert given.history == {"rounds": [], "train_ndcg": [], "valid_ndcg": [], "best_round": 0}
        with pytest.raises(LGMMLError, match="`rounds` must be positive, got 0"):
            fit_boosted(few, rounds=0)
        assert fit_boosted(few, start=start, rounds=1, candidates=6).history["best_round"] == 1

    def test_rounds_are_added_to_its_scores(self, few: RankingData) -> None:
        judges, start = few.select(range(10)), fit_boosted(few, seed=5, rounds=1, batch=1, sizes=(1,), candidates=1)
        assert start.phi is not None
        precise = replace(start, phi=start.phi.double())
        grown = fit_boosted(few, judges, start=precise, smooth=1, **FEW)
        history = grown.history
        assert history["rounds"] == [0, 2, 4]
        assert history["best_round"] > 0
        assert history["train_ndcg"][0] == pytest.approx(mean_measure(start.score(few.features), few), abs=1e-4)
        assert history["valid_ndcg"][0] == pytest.approx(mean_measure(start.score(judges.features), judges), abs=1e-4)
        best = history["valid_ndcg"][history["rounds"].index(history["best_round"])]
        assert best == pytest.approx(mean_measure(grown.score(judges.features), judges), abs=1e-4)
        state = states(few, judges, start=precise, smooth=1, **FEW)[-1].state
        kept = state.learners.select(state.learners.rounds <= history["best_round"])
        assert grown.metrics.num_metrics == start.metrics.num_metrics + len(kept)
        added = -(kept.kernels(few.features, "paper") @ kept.phi)
        torch.testing.assert_close(grown.score(few.features), start.score(few.features) + added, rtol=1e-4, atol=1e-5)
        assert grown.phi is not None
        assert grown.phi.dtype == torch.float32

    def test_a_start_that_is_best_stays_as_it_is(self, few: RankingData, valid: RankingData, start: Bank) -> None:
        """By a measure that likes all rankings alike no round is better than none."""

        def nothing(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
            return torch.zeros(len(offsets) - 1)

        shown = few.replace(positions=torch.arange(few.num_documents) % 3)
        for data, bias in ((few, None), (shown, {0: 0.0, 1: 0.0, 2: 0.0})):
            bank = fit_boosted(data, valid, start=start, smooth=1, measure=nothing, **FEW)
            assert (bank.history["best_round"], bank.history["best_measure"]) == (0, 0.0)
            assert bank.metrics is start.metrics
            assert bank.phi is start.phi
            assert bank.history.get("position_bias") == bias

    def test_banks_that_cannot_go_on(self, few: RankingData, start: Bank) -> None:
        with pytest.raises(LGMMLError, match="`start` must have weights Φ to go on from, got none"):
            fit_boosted(few, start=replace(start, phi=None), **FEW)
        with pytest.raises(LGMMLError, match="`kernel` must be that of the metrics to go on from, 'paper', got 'rbf'"):
            fit_boosted(few, start=start, kernel="rbf", **FEW)
        other = Bank(
            LocalMetrics([MetricBlock(torch.zeros(1, 2), torch.eye(2)[None])], num_features=2), phi=torch.ones(1)
        )
        with pytest.raises(LGMMLError, match="`start` must look at 6 features, got 2"):
            fit_boosted(few, start=other, **FEW)


class TestMeasure:
    def test_it_decides_which_round_is_kept(self, few: RankingData, valid: RankingData) -> None:
        bank = fit_boosted(few, valid, measure="mrr", smooth=1, rounds=8, candidates=6, evaluate_every=1)
        history = bank.history
        assert (history["measure"], history["best_valid_ndcg"]) == ("mrr", None)
        assert history["best_measure"] == max(history["valid_measure"])
        assert len(history["valid_measure"]) == len(history["valid_ndcg"]) == 8
        assert history["best_round"] == history["rounds"][history["valid_measure"].index(history["best_measure"])]
        values = rank_metrics(bank.score(valid.features), valid.labels, valid.offsets, metrics=["mrr"])["mrr"]
        assert float(values.nanmean()) == pytest.approx(history["best_measure"], abs=1e-4)

    def test_a_function_of_ones_own(self, few: RankingData, valid: RankingData) -> None:
        def worst(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
            """Turns everything round."""
            return -ndcg(scores, labels, offsets, k=10, reduction="none")

        history = fit_boosted(few, valid, measure=worst, smooth=1, **FEW).history
        assert history["measure"] == "worst"
        assert history["valid_measure"] == pytest.approx([-value for value in history["valid_ndcg"]])
        alone = fit_boosted(few, measure="mrr", **FEW).history
        assert (alone["measure"], alone["valid_measure"], alone["best_measure"]) == ("mrr", [], None)
        assert "measure" not in fit_boosted(few, **FEW).history
        with pytest.raises(LGMMLError, match="ndgc"):
            fit_boosted(few, measure="ndgc@10")


class TestPositions:
    @pytest.fixture
    def shown(self, few: RankingData) -> RankingData:
        return few.replace(positions=torch.arange(few.num_documents) % 5 + 1)

    def test_a_step_for_the_biases_in_every_round(self, shown: RankingData) -> None:
        config = BoostConfig(shrinkage=0.3, position_ridge=0.2, candidates=6)
        problem = Problem.of(shown, None, config, 0)
        assert problem.data.positions is not None
        bias, scores = torch.zeros(6).double(), torch.zeros(shown.num_documents).double()
        for done, info in enumerate(states(shown, rounds=2, shrinkage=0.3, position_ridge=0.2, candidates=6)):
            bag = problem.draw_bag(scores + bias[problem.data.positions], Problem.generator(0, done))
            assert bag.positions is not None
            bias = bag.position_step(bias, config)
            scores = info.state.scores
            assert info.state.position_bias is not None
            torch.testing.assert_close(info.state.position_bias, bias, rtol=1e-5, atol=1e-7)
        assert bias[1:].abs().min() > 0

    def test_lists_are_judged_where_they_were_shown(self, shown: RankingData, valid: RankingData) -> None:
        judges = valid.replace(positions=torch.arange(valid.num_documents) % 5 + 1)
        problem = Problem.of(shown, judges, BoostConfig(), 0)
        state = replace(BoostState.first(problem), position_bias=torch.tensor([0.0, 5.0, 4.0, 3.0, 2.0, 1.0]).double())
        found = state.evaluate(problem)
        for part, value in ((problem.data, found.train_ndcg), (problem.valid, found.valid_ndcg)):
            assert part is not None
            assert part.positions is not None
            expected = float(ndcg(6.0 - part.positions, part.labels, part.offsets, k=10))
            assert value == (pytest.approx(expected),)

    def test_the_biases_of_the_best_round_are_kept(self, shown: RankingData, valid: RankingData, start: Bank) -> None:
        options: dict[str, Any] = {"rounds": 8, "candidates": 6, "evaluate_every": 1, "smooth": 1}
        told = states(shown, valid, **options)
        bank, last = fit_boosted(shown, valid, **options), fit_boosted(shown, **options)
        assert bank.position_bias is not None
        assert torch.equal(bank.position_bias, told[bank.history["best_round"] - 1].state.position_bias)  # type: ignore[arg-type]
        assert bank.history["position_bias"] == position_curve(bank.position_bias, shown)
        assert torch.equal(last.position_bias, told[-1].state.position_bias)  # type: ignore[arg-type]
        grown = fit_boosted(shown, start=start, **FEW)
        assert grown.position_bias is not None
        assert len(grown.position_bias) == 6


class TestWeights:
    def test_queries_of_weight_zero_do_not_count(self, train: RankingData, valid: RankingData) -> None:
        weights = torch.ones(40)
        weights[20:] = 0
        spoilt = train.labels.clone()
        spoilt[train.offsets[20] :] = spoilt[train.offsets[20] :].flip(0)
        banks = [
            fit_boosted(replace(train, query_weights=weights, labels=labels), valid, **SMALL)
            for labels in (train.labels, spoilt)
        ]
        torch.testing.assert_close(banks[0].score(valid.features), banks[1].score(valid.features))
        with pytest.raises(DataError, match="`data` must have a query with documents of different labels, got none"):
            fit_boosted(replace(train, query_weights=torch.zeros(40)), valid)

    def test_documents_of_weight_zero_are_not_ranked_above_others(self) -> None:
        """Lists of two documents; in the third both are alike, in the last nothing is relevant."""
        labels = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 1.0, -1.0, 0.0])
        plain = RankingData.from_arrays(torch.eye(8), labels, group=[2, 2, 2, 2])
        assert plain.labels.tolist() == labels.tolist()
        cases: list[tuple[dict[str, Tensor], list[int]]] = [
            ({}, [0, 1]),
            ({"document_weights": torch.tensor([1.0, 0, 1, 1, 1, 1, 1, 1])}, [1]),
            ({"document_weights": torch.tensor([0.0, 1, 1, 0.5, 1, 1, 1, 1])}, [0, 1]),
            ({"query_weights": torch.tensor([0.0, 0.5, 1.0, 1.0])}, [1]),
        ]
        for given, usable in cases:
            assert Problem.of(plain.replace(**given), None, BoostConfig(), 0).usable.tolist() == usable


def test_the_scores_of_a_state_are_those_of_its_metrics(train: RankingData, valid: RankingData) -> None:
    """From zero on, of the validation lists, too; lists of a fit are in an order of their own."""
    last = states(train, valid, **SMALL)[-1].state
    bank = _learned_bank(last.learners, train.num_features, "paper")
    for data, found in ((train, last.scores), (valid, last.valid_scores)):
        expected = bank.score(data.features).double()
        torch.testing.assert_close(found.sort().values, expected.sort().values, rtol=1e-4, atol=1e-5)
