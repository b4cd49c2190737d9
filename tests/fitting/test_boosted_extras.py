"""Boosting with more than lists and labels: a bank to go on from, a measure, places shown, weights of documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataWarning, DivergedError, LGMMLError
from lgmml_torch.fitting.bank import Bank, check_builder
from lgmml_torch.fitting.boosted import (
    BoostState,
    RoundInfo,
    check_scores,
    evaluated,
    fit,
    fit_boosted,
    initial_state,
    one_round,
    round_info,
    scored_again,
)
from lgmml_torch.fitting.learners import BoostConfig, Learners
from lgmml_torch.fitting.round import (
    any_relevant,
    draw_bag,
    first_prior,
    make_problem,
    round_generator,
    usable_queries,
    weighted_rows,
)
from lgmml_torch.functional.boosting import feature_prior
from lgmml_torch.functional.losses import ideal_dcg, lambda_gradients
from lgmml_torch.functional.positions import bias_of, position_curve, position_step
from lgmml_torch.functional.ranking.measures import ndcg, rank_metrics
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.ragged import RankingData
from tests.fitting.test_boosted import make

SMALL: dict[str, Any] = {"rounds": 4, "candidates": 6, "evaluate_every": 2}


@pytest.fixture(scope="module")
def data() -> RankingData:
    return make(0, queries=16, size=10)


@pytest.fixture(scope="module")
def valid() -> RankingData:
    return make(1, queries=8, size=10)


@pytest.fixture(scope="module")
def start(data: RankingData) -> Bank:
    return fit_boosted(data, seed=5, rounds=3, candidates=6)


def mean_ndcg(scores: Tensor, part: RankingData, k: int = 10) -> float:
    return float(ndcg(scores, part.labels, part.offsets, k=k))


class TestGrowing:
    def test_no_rounds_give_the_bank_back(self, data: RankingData, start: Bank) -> None:
        same = fit_boosted(data, start=start, rounds=0)
        assert same.metrics is start.metrics
        assert same.phi is start.phi
        assert same.history == {"rounds": [], "train_ndcg": [], "valid_ndcg": [], "best_round": 0}
        check_builder(fit_boosted)
        with pytest.raises(LGMMLError, match="`rounds` must be positive, got 0"):
            fit_boosted(data, rounds=0)
        with pytest.raises(LGMMLError, match="`batch` must be positive, got 0"):
            fit_boosted(data, start=start, rounds=0, batch=0)
        with pytest.raises(LGMMLError, match="`rounds` must be positive, got -1"):
            fit_boosted(data, start=start, rounds=-1)
        assert fit_boosted(data, start=start, rounds=1, candidates=6).history["best_round"] == 1

    def test_rounds_are_added_to_its_scores(self, data: RankingData) -> None:
        told: list[RoundInfo] = []
        judges, start = data.select(range(10)), fit_boosted(data, seed=5, rounds=1, batch=1, sizes=(1,), candidates=1)
        grown = fit_boosted(data, judges, start=start, smooth=1, on_round=lambda _, info: told.append(info), **SMALL)
        history = grown.history
        assert history["rounds"] == [0, 2, 4]
        assert history["best_round"] > 0
        assert history["train_ndcg"][0] == pytest.approx(mean_ndcg(start.score(data.features), data), abs=1e-4)
        assert history["valid_ndcg"][0] == pytest.approx(mean_ndcg(start.score(judges.features), judges), abs=1e-4)
        best = history["rounds"].index(history["best_round"])
        reached = mean_ndcg(grown.score(judges.features), judges)
        assert history["valid_ndcg"][best] == pytest.approx(reached, abs=1e-4)
        state = told[-1].state
        kept = state.learners.select(state.learners.rounds <= history["best_round"])
        assert grown.metrics.num_metrics == start.metrics.num_metrics + len(kept)
        added = -(kept.kernels(data.features, "paper") @ kept.phi)
        torch.testing.assert_close(grown.score(data.features), start.score(data.features) + added, rtol=1e-4, atol=1e-5)

    def test_a_start_that_is_best_stays_as_it_is(self, data: RankingData, valid: RankingData, start: Bank) -> None:
        """By a measure that likes all rankings alike no round is better than none."""

        def nothing(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
            return torch.zeros(len(offsets) - 1)

        same = fit_boosted(data, valid, start=start, smooth=1, measure=nothing, **SMALL)
        assert (same.history["best_round"], same.history["best_measure"]) == (0, 0.0)
        assert same.history["rounds"] == [0, 2, 4]
        assert same.metrics is start.metrics
        assert same.phi is start.phi
        assert same.position_bias is None
        shown = data.replace(positions=torch.arange(data.num_documents) % 3)
        biased = fit_boosted(shown, valid, start=start, smooth=1, measure=nothing, **SMALL)
        assert biased.metrics is start.metrics
        assert biased.position_bias is not None
        assert biased.position_bias.tolist() == [0.0] * 3
        assert biased.history["position_bias"] == {0: 0.0, 1: 0.0, 2: 0.0}

    def test_it_starts_where_the_bank_stands(self, data: RankingData, valid: RankingData, start: Bank) -> None:
        problem = make_problem(data, valid, BoostConfig(), 0, start)
        state = initial_state(problem)
        torch.testing.assert_close(state.scores, start.score(problem.data.features).double())
        assert problem.valid is not None
        torch.testing.assert_close(state.valid_scores, start.score(problem.valid.features).double())
        assert (state.round, state.evaluated, state.best_round) == (0, (0,), 0)
        alone = initial_state(make_problem(data, None, BoostConfig(), 0, start))
        assert (alone.valid_scores.shape, alone.valid_ndcg) == ((0,), ())
        plain = initial_state(make_problem(data, valid, BoostConfig(), 0))
        assert (plain.evaluated, plain.scores.abs().max().item(), plain.scores.dtype) == ((), 0.0, torch.float64)
        assert plain.valid_scores.tolist() == [0.0] * valid.num_documents
        assert plain.learners.support.shape == (0, 3)

    def test_a_bank_of_double_precision_joins_the_rounds(self, data: RankingData, start: Bank) -> None:
        assert start.phi is not None
        precise = replace(start, phi=start.phi.double())
        grown = fit_boosted(data, start=precise, rounds=1, candidates=6)
        assert grown.phi is not None
        assert grown.phi.dtype == torch.float32
        torch.testing.assert_close(
            grown.score(data.features),
            fit_boosted(data, start=start, rounds=1, candidates=6).score(data.features),
        )

    def test_banks_that_cannot_go_on(self, data: RankingData, start: Bank) -> None:
        with pytest.raises(LGMMLError, match="`start` must have weights Φ to go on from, got none"):
            fit_boosted(data, start=replace(start, phi=None), **SMALL)
        with pytest.raises(LGMMLError, match="`kernel` must be that of the metrics to go on from, 'paper', got 'rbf'"):
            fit_boosted(data, start=start, kernel="rbf", **SMALL)
        block = MetricBlock(torch.zeros(1, 2), torch.eye(2)[None])
        other = Bank(LocalMetrics([block], num_features=2), "paper", torch.ones(1))
        with pytest.raises(LGMMLError, match="`start` must look at 6 features, got 2"):
            fit_boosted(data, start=other, **SMALL)

    def test_a_fit_is_known_by_all_that_it_depends_on(self, data: RankingData, valid: RankingData, start: Bank) -> None:
        from lgmml_torch.functional.ranking.custom import Measure

        def identity(*parts: Any, config: BoostConfig | None = None, seed: int = 0, **more: Any) -> str:
            return make_problem(*parts, config or BoostConfig(), seed, **more).identity

        found = [
            identity(data, None),
            identity(data, valid),
            identity(valid, None),
            identity(data, data),
            identity(data, None, seed=1),
            identity(data, None, config=BoostConfig(rounds=3)),
            identity(data, None, start=start),
            identity(data, None, start=replace(start, phi=start.phi * 2)),  # type: ignore[operator]
            identity(data, None, measure=Measure.of("mrr")),
        ]
        assert len(set(found)) == len(found)
        assert identity(data, None) == identity(data, None)
        assert "data=(160, 6) valid=(80, 6)" in found[1]


class TestMeasure:
    @pytest.mark.parametrize("measure", ["mrr", "precision@3"])
    def test_it_decides_which_round_is_kept(self, data: RankingData, valid: RankingData, measure: str) -> None:
        bank = fit_boosted(data, valid, measure=measure, smooth=1, rounds=8, candidates=6, evaluate_every=1)
        history = bank.history
        assert history["measure"] == measure
        assert history["best_valid_ndcg"] is None
        assert history["best_measure"] == max(history["valid_measure"])
        assert len(history["valid_measure"]) == len(history["valid_ndcg"]) == 8
        first = history["valid_measure"].index(history["best_measure"])
        assert history["best_round"] == history["rounds"][first]
        values = rank_metrics(bank.score(valid.features), valid.labels, valid.offsets, metrics=[measure])[measure]
        assert float(values.nanmean()) == pytest.approx(history["best_measure"], abs=1e-4)

    def test_a_function_of_ones_own(self, data: RankingData, valid: RankingData) -> None:
        def worst(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
            """Turns everything round."""
            return -ndcg(scores, labels, offsets, k=10, reduction="none")

        bank = fit_boosted(data, valid, measure=worst, smooth=1, rounds=4, candidates=6, evaluate_every=1)
        assert bank.history["measure"] == "worst"
        assert bank.history["valid_measure"] == pytest.approx([-value for value in bank.history["valid_ndcg"]])
        assert bank.history["best_measure"] == max(bank.history["valid_measure"])

    def test_without_validation_nothing_is_measured(self, data: RankingData) -> None:
        history = fit_boosted(data, measure="mrr", **SMALL).history
        assert (history["measure"], history["valid_measure"], history["best_measure"]) == ("mrr", [], None)
        plain = fit_boosted(data, **SMALL).history
        assert "measure" not in plain
        assert plain["best_valid_ndcg"] is None

    def test_unknown_measures_are_refused_at_once(self, data: RankingData) -> None:
        with pytest.raises(LGMMLError, match="ndgc"):
            fit_boosted(data, measure="ndgc@10")
        with pytest.raises(LGMMLError, match="a measure must be a name or a function"):
            fit_boosted(data, measure=3)  # type: ignore[arg-type]


class TestPositions:
    @pytest.fixture
    def shown(self, data: RankingData) -> RankingData:
        """Places from 1; a document's label is more often 2 where it was shown first."""
        return data.replace(positions=torch.arange(data.num_documents) % 5 + 1)

    def test_a_step_for_the_biases_in_every_round(self, shown: RankingData) -> None:
        config = BoostConfig(shrinkage=0.3, position_ridge=0.2, candidates=6)
        problem = make_problem(shown, None, config, 0)
        assert problem.num_positions == 6
        state = initial_state(problem)
        assert state.position_bias is not None
        assert state.position_bias.tolist() == [0.0] * 6
        for _ in range(2):
            assert state.position_bias is not None
            seen = state.scores + bias_of(state.position_bias, problem.data.positions)  # type: ignore[arg-type]
            bag, wide = draw_bag(problem, seen, round_generator(0, state.round))
            assert wide is bag
            assert wide.positions is not None
            expected = position_step(
                state.position_bias, wide.positions, wide.gradients, wide.hessians, shrinkage=0.3, ridge=0.2
            )
            state = one_round(state, problem)
            assert state.position_bias is not None
            torch.testing.assert_close(state.position_bias, expected)
        assert state.position_bias[1:].abs().max() > 0

    def test_positions_go_with_their_documents(self, shown: RankingData) -> None:
        problem = make_problem(shown, None, BoostConfig(subsample=1.0), 0)
        bag, _ = draw_bag(problem, torch.zeros(shown.num_documents), torch.Generator().manual_seed(0))
        assert shown.positions is not None
        place = dict(zip(map(tuple, shown.features.tolist()), shown.positions.tolist(), strict=True))
        assert bag.positions is not None
        assert bag.positions.tolist() == [place[tuple(row)] for row in bag.features.tolist()]
        plain, _ = draw_bag(
            make_problem(shown.replace(positions=None), None, BoostConfig(), 0), torch.zeros(160), torch.Generator()
        )
        assert plain.positions is None

    def test_lists_are_judged_where_they_were_shown(self, shown: RankingData, valid: RankingData) -> None:
        judges = valid.replace(positions=torch.arange(valid.num_documents) % 5 + 1)
        problem = make_problem(shown, judges, BoostConfig(), 0)
        state = replace(initial_state(problem), position_bias=torch.tensor([0.0, 5.0, 4.0, 3.0, 2.0, 1.0]).double())
        found = evaluated(state, problem)
        for part, name in ((problem.data, "train_ndcg"), (problem.valid, "valid_ndcg")):
            assert part is not None
            assert part.positions is not None
            assert getattr(found, name) == (pytest.approx(mean_ndcg(6.0 - part.positions, part)),)
        blind = evaluated(state, replace(problem, valid=problem.valid.replace(positions=None)))  # type: ignore[union-attr]
        assert blind.valid_ndcg != found.valid_ndcg

    def test_the_biases_of_the_best_round_are_kept(self, shown: RankingData, valid: RankingData) -> None:
        told: dict[int, BoostState] = {}

        def keep(done: int, info: RoundInfo) -> None:
            told[done] = info.state

        options: dict[str, Any] = {"rounds": 8, "candidates": 6, "evaluate_every": 1, "smooth": 1}
        bank = fit_boosted(shown, valid, on_round=keep, **options)
        best = told[bank.history["best_round"]]
        assert bank.position_bias is not None
        assert best.position_bias is not None
        assert torch.equal(bank.position_bias, best.position_bias)
        assert bank.history["position_bias"] == position_curve(bank.position_bias, shown)
        last = fit_boosted(shown, on_round=keep, **options)
        assert torch.equal(last.position_bias, told[8].position_bias)  # type: ignore[arg-type]
        assert fit_boosted(shown.replace(positions=None), **SMALL).position_bias is None

    def test_growing_keeps_the_biases_of_its_rounds(self, shown: RankingData, start: Bank) -> None:
        grown = fit_boosted(shown, start=start, **SMALL)
        assert grown.position_bias is not None
        assert len(grown.position_bias) == 6


class TestWeights:
    def test_documents_of_no_weight_are_no_better_half_of_a_pair(self) -> None:
        labels = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 1.0])
        plain = RankingData.from_arrays(torch.eye(6), labels, group=[2, 2, 2])
        rows = plain.labels

        def usable(weights: Any = None, **more: Any) -> list[int]:
            part = plain.replace(document_weights=None if weights is None else torch.tensor(weights), **more)
            return usable_queries(part, ideal_dcg(part.labels, part.offsets, truncation=30)).tolist()

        assert rows.tolist() == [0, 1, 0, 2, 1, 1]
        assert usable() == [0, 1]
        assert usable([1.0, 0.0, 1.0, 1.0, 1.0, 1.0]) == [1]
        assert usable([0.0, 1.0, 1.0, 0.5, 1.0, 1.0]) == [0, 1]
        assert usable(query_weights=torch.tensor([0.0, 0.5, 1.0])) == [1]
        negative = plain.replace(labels=torch.tensor([-1.0, 0.0, 0.0, 2.0, 1.0, 1.0]))
        assert usable_queries(negative, torch.tensor([0.0, 0.5, 1.0])).tolist() == [1]

    def test_gradients_are_weighed_document_by_document(self, data: RankingData) -> None:
        weights = torch.rand(data.num_documents, generator=torch.Generator().manual_seed(1)) + 0.5
        weighed = data.replace(document_weights=weights)
        problem = make_problem(weighed, None, BoostConfig(subsample=1.0), 0)
        scores = torch.randn(data.num_documents, generator=torch.Generator().manual_seed(2))
        bag, _ = draw_bag(problem, scores, torch.Generator().manual_seed(0))
        part = problem.data
        g, h = lambda_gradients(
            scores, part.labels.float(), part.offsets, truncation=30, floor=0.05, weights=part.document_weights
        )
        want = {
            tuple(x): (a, b) for x, a, b in zip(part.features.tolist(), g.tolist(), h.tolist(), strict=True) if b > 0
        }
        assert len(bag.gradients) == len(want)
        for x, a, b in zip(bag.features.tolist(), bag.gradients.tolist(), bag.hessians.tolist(), strict=True):
            assert (a, b) == pytest.approx(want[tuple(x)], rel=1e-4, abs=1e-6)

    @pytest.mark.parametrize("weights", [None, "queries", "documents"])
    def test_the_prior_comes_from_the_first_gradients(self, data: RankingData, weights: str | None) -> None:
        g = torch.Generator().manual_seed(3)
        if weights == "queries":
            data = data.replace(query_weights=torch.rand(16, generator=g))
        elif weights == "documents":
            data = data.replace(document_weights=torch.rand(160, generator=g))
        config = BoostConfig(prior_power=2.0, truncation=3)
        found = first_prior(data, config, 4)
        gradients, _ = lambda_gradients(
            torch.zeros(160), data.labels.float(), data.offsets, truncation=3, weights=data.document_weights
        )
        if data.query_weights is not None:
            gradients = gradients * data.query_weights[data.query_index]
        generator = torch.Generator().manual_seed(round_generator(4, -2).initial_seed())
        want = feature_prior(data.features, gradients, data.offsets, power=2.0, generator=generator)
        torch.testing.assert_close(found, want)
        problem = make_problem(data, None, config, 4)
        assert problem.prior is not None
        assert make_problem(data, None, BoostConfig(), 4).prior is None


class TestPieces:
    @pytest.mark.parametrize(("seed", "step"), [(0, 0), (3, 5), (3, -2), (-3, 5)])
    def test_draws_come_from_the_seed_and_the_step(self, seed: int, step: int) -> None:
        mixed = np.random.SeedSequence([abs(seed), step + 2]).generate_state(1, np.uint64)[0]
        assert round_generator(seed, step).initial_seed() == int(mixed) // 2

    def test_the_order_of_equals_is_drawn_before_the_rounds(self, data: RankingData) -> None:
        problem = make_problem(data, None, BoostConfig(), 7)
        order = torch.randperm(160, generator=round_generator(7, -1)).tolist()
        wanted = sorted(order, key=lambda row: int(data.query_index[row]))
        assert torch.equal(problem.data.features, data.features[wanted])
        assert torch.equal(problem.data.labels, data.labels[wanted])
        assert problem.data.doc_ids is None

    def test_relevance_anywhere(self) -> None:
        empty = RankingData(torch.zeros(2, 1), torch.zeros(2), torch.tensor([0, 2, 2]), (1, 2), torch.arange(2))
        assert not any_relevant(empty)
        assert any_relevant(empty.replace(labels=torch.tensor([0.0, 0.5])))
        assert not any_relevant(empty.replace(labels=torch.tensor([-1.0, 0.0])))

    def test_chances_by_hand(self) -> None:
        """A row that is sure leaves places to the others; three times what is left is shared out again."""
        sizes = torch.tensor([100.0, 30.0, 10.0, 3.0, *[0.1] * 40]).double()
        cap, count = 10, len(sizes)
        chance = [min(1.0, cap * (float(size / sizes.sum()) + 1 / count) / 2) for size in sizes]
        for _ in range(3):
            sure = sum(value >= 1 for value in chance)
            rest = sum(value for value in chance if value < 1)
            chance = [1.0 if value >= 1 else min(1.0, value * (cap - sure) / rest) for value in chance]
        assert sum(chance) == pytest.approx(cap)
        draws = torch.rand(count, generator=torch.Generator().manual_seed(5)).double()
        rows, weights = weighted_rows(sizes, cap, torch.Generator().manual_seed(5))
        assert rows.tolist() == [row for row in range(count) if float(draws[row]) < chance[row]]
        assert weights.tolist() == pytest.approx([1 / chance[row] for row in rows.tolist()])
        assert weighted_rows(sizes, count, torch.Generator())[1].tolist() == [1.0] * count

    def test_a_report_of_a_round(self, data: RankingData, valid: RankingData) -> None:
        problem = make_problem(data, valid, BoostConfig(evaluate_every=2, candidates=6, rounds=9), 0)
        first = one_round(initial_state(problem), problem)
        info = round_info(first, 9)
        assert (info.total, info.train_ndcg, info.valid_ndcg, info.best_round) == (9, None, None, 0)
        assert (info.num_metrics, info.state) == (len(first.learners), first)
        second = one_round(first, problem)
        info = round_info(second, 9)
        assert (info.train_ndcg, info.valid_ndcg) == (second.train_ndcg[-1], second.valid_ndcg[-1])
        third = one_round(second, problem)
        assert round_info(third, 9).train_ndcg is None
        fourth = one_round(third, problem)
        assert round_info(fourth, 9).valid_ndcg == fourth.valid_ndcg[1] != fourth.valid_ndcg[0]
        alone = make_problem(data, None, BoostConfig(evaluate_every=1, candidates=6), 0)
        assert round_info(one_round(initial_state(alone), alone), 3).valid_ndcg is None

    def test_the_last_round_is_always_judged(self, data: RankingData) -> None:
        history = fit_boosted(data, rounds=5, candidates=6, evaluate_every=2).history
        assert history["rounds"] == [2, 4, 5]

    def test_scores_are_added_up_again(self, data: RankingData, valid: RankingData) -> None:
        problem = make_problem(data, valid, BoostConfig(candidates=6), 0)
        state = initial_state(problem)
        for _ in range(3):
            state = one_round(state, problem)
        lost = replace(state, scores=torch.full_like(state.scores, 7.0), valid_scores=state.valid_scores + 3)
        again = scored_again(lost, problem)
        assert torch.equal(again.scores, state.scores)
        assert torch.equal(again.valid_scores, state.valid_scores)

    def test_every_score_must_be_finite(self, data: RankingData) -> None:
        problem = make_problem(data, None, BoostConfig(candidates=6), 0)
        state = one_round(initial_state(problem), problem)
        broken = state.scores.clone()
        broken[3] = torch.nan
        for field in ({"scores": broken}, {"valid_scores": torch.tensor([0.0, torch.inf]).double()}):
            with pytest.raises(DivergedError, match=r"in round 1 of boosting; .* `ridge` \(now 0.05\)"):
                check_scores(replace(state, **field), problem.config)

    def test_a_round_that_diverges_ends_the_fit(self, data: RankingData, monkeypatch: pytest.MonkeyPatch) -> None:
        real = fit.find_learners

        def wild(*words: Any) -> Learners:
            found = real(*words)
            return replace(found, phi=torch.full_like(found.phi, torch.inf))

        monkeypatch.setattr(fit, "find_learners", wild)
        with pytest.raises(DivergedError, match="scores are not finite any more in round 1 of boosting"):
            fit_boosted(data, **SMALL)

    def test_learners_of_several_sizes(self) -> None:
        learners = Learners(
            support=torch.tensor([[4, -1], [0, 2], [2, -1]]),
            anchors=torch.tensor([[1.0, 0.0], [0.5, 0.25], [2.0, 0.0]]),
            factors=torch.stack([torch.diag(torch.tensor(d)) for d in ([1.0, 0.0], [1.0, 2.0], [3.0, 0.0])]),
            scales=torch.tensor([1.0, 2.0, 0.5]),
            phi=torch.tensor([1.0, 2.0, 3.0]),
            rounds=torch.tensor([1, 1, 2]),
        )
        assert learners.widths.tolist() == [1, 2, 1]
        x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
        dists = torch.stack(
            [
                (x[:, 4] - 1).abs(),
                ((x[:, 0] - 0.5) ** 2 + 4 * (x[:, 2] - 0.25) ** 2).sqrt() / 2,
                3 * (x[:, 2] - 2).abs() / 0.5,
            ],
            dim=1,
        )
        for kernel, kappa in (("distance", dists), ("paper", dists * torch.exp(-dists))):
            torch.testing.assert_close(learners.kernels(x, kernel), kappa, rtol=1e-5, atol=1e-6)
        metrics, phi = learners.local_metrics(5)
        assert phi.tolist() == [1.0, 3.0, 2.0]
        assert metrics.num_features == 5
        torch.testing.assert_close(metrics(x), dists[:, [0, 2, 1]], rtol=1e-5, atol=1e-6)
        assert len(learners.select(learners.rounds == 1)) == 2
        assert len(Learners.cat([learners, learners])) == 6
        none = Learners.empty(4, x)
        assert len(none) == 0
        assert [tuple(t.shape) for t in (none.support, none.anchors, none.factors, none.scales, none.rounds)] == [
            (0, 4), (0, 4), (0, 4, 4), (0,), (0,)
        ]  # fmt: skip
        assert (none.support.dtype, none.rounds.dtype, none.anchors.dtype) == (torch.long, torch.long, torch.float32)

    def test_a_state_without_what_came_later(self, data: RankingData) -> None:
        state = initial_state(make_problem(data, None, BoostConfig(), 0))
        exported = state.export()
        assert set(exported).isdisjoint({"scores", "valid_scores"})
        exported.pop("valid_measure")
        again = BoostState.load(exported)
        assert again.valid_measure == ()
        assert (again.scores.shape, again.scores.dtype) == ((0,), torch.float64)
        assert (again.round, again.best_round, again.idle, again.best_value) == (0, 0, 0, float("-inf"))

    def test_validation_without_relevance_is_told(self, data: RankingData, valid: RankingData) -> None:
        barren = valid.replace(labels=torch.zeros_like(valid.labels))
        with pytest.warns(DataWarning, match="no validation query has a relevant document"):
            problem = make_problem(data, barren, BoostConfig(), 0)
        assert problem.valid is None
        broken = valid.features.clone()
        broken[0, 0] = torch.inf
        with pytest.raises(LGMMLError, match=r"`valid.features` must be finite, got inf at position \(0, 0\)"):
            make_problem(data, valid.replace(features=broken), BoostConfig(), 0)
