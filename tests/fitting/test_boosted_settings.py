"""Each setting of boosting does what it promises, on a round or a piece of one where the wrong choice would show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.fitting.boosted import IDLE_ROUNDS, BoostState, finished, fit_boosted, initial_state, one_round
from lgmml_torch.fitting.learners import BoostConfig, Learners
from lgmml_torch.fitting.round import (
    LEAST_SCATTER,
    Bag,
    best_of_subspaces,
    draw_bag,
    draw_rows,
    find_learners,
    make_problem,
    round_generator,
    subspace_factors,
    weighted_rows,
)
from lgmml_torch.functional.boosting import NewtonRows, list_scatter
from lgmml_torch.functional.losses import lambda_gradients
from lgmml_torch.functional.ranking.measures import ndcg
from lgmml_torch.ragged import RankingData
from tests.fitting.test_boosted import make

# One candidate, so that a setting changes numbers and not what is chosen.
ONE: dict[str, Any] = {"sizes": (1,), "candidates": 1, "batch": 1, "anchors": 1, "steps": (), "bandwidths": (1.0,)}


@pytest.fixture(scope="module")
def data() -> RankingData:
    return make(0, queries=20, size=12)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def first_round(data: RankingData, **settings: Any) -> BoostState:
    problem = make_problem(data, None, BoostConfig(**settings), 0)
    return one_round(initial_state(problem), problem)


def bags(data: RankingData, seed: int = 0, scores: Tensor | None = None, **settings: Any) -> tuple[Bag, Bag]:
    problem = make_problem(data, None, BoostConfig(**settings), 0)
    scores = torch.zeros(data.num_documents) if scores is None else scores
    return draw_bag(problem, scores, gen(seed))


def gradient_of(bag: Bag) -> dict[tuple[float, ...], tuple[float, float]]:
    """By document: features tell them apart."""
    both = zip(bag.gradients.tolist(), bag.hessians.tolist(), strict=True)
    return {tuple(row): found for row, found in zip(bag.features.tolist(), both, strict=True)}


def owner_of(data: RankingData) -> dict[tuple[float, ...], int]:
    return dict(zip(map(tuple, data.features.tolist()), data.query_index.tolist(), strict=True))


class TestSteps:
    def test_shrinkage_is_the_share_of_the_newton_step(self, data: RankingData) -> None:
        small, large = (first_round(data, shrinkage=value) for value in (0.1, 0.3))
        assert torch.equal(small.learners.support, large.learners.support)
        assert torch.equal(small.learners.anchors, large.learners.anchors)
        torch.testing.assert_close(large.learners.phi, 3 * small.learners.phi)
        torch.testing.assert_close(large.scores, 3 * small.scores, rtol=1e-5, atol=1e-6)

    def test_scores_fall_by_the_weighted_kernels(self, data: RankingData) -> None:
        problem = make_problem(data, make(3, queries=5), BoostConfig(), 0)
        state = one_round(initial_state(problem), problem)
        for part, scores in ((problem.data, state.scores), (problem.valid, state.valid_scores)):
            assert part is not None
            expected = -(state.learners.kernels(part.features, "paper") @ state.learners.phi)
            torch.testing.assert_close(scores, expected.double(), rtol=1e-5, atol=1e-6)
        assert state.learners.rounds.tolist() == [1] * len(state.learners)
        again = one_round(state, problem)
        assert again.learners.rounds.tolist() == [1] * len(state.learners) + [2] * (
            len(again.learners) - len(state.learners)
        )

    def test_a_ridge_makes_steps_smaller(self, data: RankingData) -> None:
        phi = [float(first_round(data, ridge=value, **ONE).learners.phi) for value in (0.01, 0.1, 1.0)]
        assert phi[0] > phi[1] > phi[2] > 0

    def test_the_best_few_are_added(self, data: RankingData) -> None:
        one, three = (first_round(data, batch=count).learners for count in (1, 3))
        assert (len(one), len(three)) == (1, 3)
        assert torch.equal(one.support[0], three.support[0])
        assert torch.equal(one.anchors[0], three.anchors[0])

    def test_kernels_that_hardly_vary_are_rejected(self, data: RankingData) -> None:
        assert len(first_round(data, min_deviation=0.01).learners) > 0
        state = first_round(data, min_deviation=0.9)  # κ = d·exp(−d) never varies so much
        assert (len(state.learners), state.idle) == (0, 1)

    def test_what_helps_nothing_is_not_added(self, data: RankingData) -> None:
        """Of two documents at the same place one should rise and one fall: no metric can tell them apart."""
        bag = Bag(torch.ones(2, 6), torch.tensor([1.0, -1.0]), torch.ones(2), torch.tensor([0, 2]))
        assert len(find_learners(bag, bag, None, BoostConfig(), gen())) == 0

    @pytest.mark.parametrize("kernel", ["paper", "rbf", "distance"])
    def test_the_curve_is_that_of_the_kernel(self, data: RankingData, kernel: str) -> None:
        bank = fit_boosted(data, rounds=4, candidates=6, evaluate_every=2, kernel=kernel)
        assert bank.kernel == kernel
        reached = float(ndcg(bank.score(data.features), data.labels, data.offsets, k=10))
        assert bank.history["train_ndcg"][-1] == pytest.approx(reached, abs=1e-6)

    @pytest.mark.parametrize("k", [1, 3])
    def test_k_is_the_depth_of_the_curve(self, data: RankingData, k: int) -> None:
        valid = make(1, queries=10)
        bank = fit_boosted(data, valid, rounds=1, candidates=3, k=k)
        for part, name in ((data, "train_ndcg"), (valid, "valid_ndcg")):
            reached = ndcg(bank.score(part.features), part.labels, part.offsets, k=k)
            assert bank.history[name] == [pytest.approx(float(reached), abs=1e-6)]


class TestBags:
    @pytest.mark.parametrize(("share", "lists"), [(1.0, 20), (0.5, 10), (0.26, 5), (1e-6, 1)])
    def test_subsample_is_the_share_of_the_queries(self, data: RankingData, share: float, lists: int) -> None:
        owner = owner_of(data)
        drawn = [{owner[row] for row in gradient_of(bags(data, seed, subsample=share)[0])} for seed in (0, 1)]
        assert [len(queries) for queries in drawn] == [lists, lists]
        assert (drawn[0] == drawn[1]) == (share == 1.0)  # each round has a draw of its own

    @pytest.mark.parametrize(
        "settings", [{}, {"truncation": 1}, {"truncation": 3}, {"sigma": 2.0}, {"hessian_floor": 0.5}], ids=str
    )
    def test_gradients_are_those_of_whole_lists(self, data: RankingData, settings: dict[str, Any]) -> None:
        problem = make_problem(data, None, BoostConfig(**settings), 0)
        scores = torch.randn(data.num_documents, generator=gen(7))
        floor = settings.get("hessian_floor", 0.05)
        options = {"truncation": settings.get("truncation", 30), "sigma": settings.get("sigma", 1.0), "floor": floor}
        g, h = lambda_gradients(scores, problem.data.labels.float(), problem.data.offsets, **options)
        kept = h > 0
        everything = Bag(problem.data.features[kept], g[kept], h[kept], torch.zeros(0))
        for cap in (10_000, 60):
            few, wide = bags(data, scores=scores, subsample=1.0, cap=cap, **settings)
            assert wide is few
            assert len(few.gradients) == min(cap, int(kept.sum()))
            whole = gradient_of(everything)
            assert all(found == pytest.approx(whole[row]) for row, found in gradient_of(few).items())
        owners = [owner_of(data)[tuple(row)] for row in few.features.tolist()]
        sizes = torch.unique_consecutive(torch.tensor(owners), return_counts=True)[1]
        assert few.offsets.tolist() == [0, *sizes.cumsum(0).tolist()]

    def test_lists_of_four_times_the_cap_at_most(self, data: RankingData) -> None:
        owner = owner_of(data)
        for cap, lists in ((12, 4), (11, 3), (1, 1)):  # of 12 documents each; one list there must be
            few, _ = bags(data, subsample=1.0, cap=cap)
            assert len(few.gradients) == cap
            drawn = [bags(data, seed, subsample=1.0, cap=cap)[0] for seed in range(6)]
            assert max(len({owner[row] for row in gradient_of(bag)}) for bag in drawn) <= lists

    def test_weights_can_be_fitted_to_more(self, data: RankingData) -> None:
        few, wide = bags(data, subsample=1.0, cap=30, phi_cap=100)
        assert (len(few.gradients), len(wide.gradients)) == (30, 100)
        few, wide = bags(data, subsample=1.0, cap=30, phi_cap=30)
        assert wide is few

    def test_the_weights_are_those_of_the_wider_bag(self, data: RankingData) -> None:
        config = BoostConfig(shrinkage=0.5, batch=2)
        bag, wide = bags(data, subsample=1.0, cap=40, phi_cap=150)
        found = find_learners(bag, wide, None, config, gen())
        newton = NewtonRows(wide.gradients, wide.hessians, wide.offsets, ridge=config.ridge)
        torch.testing.assert_close(found.phi, 0.5 * newton.weights(found.kernels(wide.features, "paper")))

    def test_queries_count_by_their_weights(self, data: RankingData) -> None:
        weights = torch.arange(data.num_queries).float()  # the first counts nothing
        plain = gradient_of(bags(data, subsample=1.0)[0])
        weighed = gradient_of(bags(replace(data, query_weights=weights), subsample=1.0)[0])
        owner = owner_of(data)
        assert {owner[row] for row in weighed} == set(range(1, data.num_queries))
        for row, found in weighed.items():
            expected = tuple(float(weights[owner[row]]) * value for value in plain[row])
            assert found == pytest.approx(expected, rel=1e-5)

    def test_what_sure_rows_leave_over_goes_to_the_others(self) -> None:
        sizes = torch.ones(40)
        sizes[:3] = 100.0  # drawn in any case; the other 37 share the 7 places left
        for seed in range(5):
            rows, weights = weighted_rows(sizes, 10, gen(seed))
            assert rows[:3].tolist() == [0, 1, 2]
            assert weights[:3].tolist() == [1.0, 1.0, 1.0]
            torch.testing.assert_close(weights[3:], torch.full((len(rows) - 3,), 37 / 7))

    def test_few_rows_are_taken_as_they_are_and_many_by_hessian(self) -> None:
        h = torch.full((100,), 0.01)
        h[[3, 50]] = 100.0
        assert draw_rows(h, 100, gen()).tolist() == list(range(100))
        uniform = [draw_rows(h, 25, gen(seed)) for seed in range(40)]
        by_size = [draw_rows(h, 24, gen(seed)) for seed in range(40)]  # more than four times as many
        for drawn in (*uniform, *by_size):
            assert (drawn.diff() > 0).all()
        shares = [sum(50 in drawn.tolist() for drawn in some) / 40 for some in (uniform, by_size)]
        assert shares[0] < 0.6
        assert shares[1] > 0.9


class TestTies:
    def test_documents_of_equal_score_are_in_random_order(self, data: RankingData) -> None:
        problem, other = (make_problem(data, data, BoostConfig(), seed) for seed in (0, 1))
        canonical = data.labels
        for part in (problem.data, problem.valid):
            assert part is not None
            assert torch.equal(part.offsets, data.offsets)
            for q in range(data.num_queries):
                rows = slice(int(data.offsets[q]), int(data.offsets[q + 1]))
                assert sorted(part.features[rows].tolist()) == sorted(data.features[rows].tolist())
                assert torch.equal(part.labels[rows].sort().values, canonical[rows])
            assert not torch.equal(part.labels, canonical)
            # The canonical order would have the worst first: here first places are as good as others.
            assert float(part.labels[part.offsets[:-1]].mean()) > float(canonical[data.offsets[:-1]].mean()) + 0.2
        assert not torch.equal(problem.data.features, other.data.features)

    def test_rows_keep_what_belongs_to_them(self, data: RankingData) -> None:
        label = dict(zip(map(tuple, data.features.tolist()), data.labels.tolist(), strict=True))
        place = dict(zip(map(tuple, data.features.tolist()), data.order.tolist(), strict=True))
        mixed = make_problem(data, None, BoostConfig(), 0).data
        assert [label[tuple(row)] for row in mixed.features.tolist()] == mixed.labels.tolist()
        assert [place[tuple(row)] for row in mixed.features.tolist()] == mixed.order.tolist()

    def test_every_round_has_draws_of_its_own(self) -> None:
        drawn = {
            (seed, step): round_generator(seed, step).initial_seed() for seed in range(4) for step in range(-2, 30)
        }
        assert len(set(drawn.values())) == len(drawn)
        assert round_generator(-3, 0).initial_seed() == round_generator(3, 0).initial_seed()


class TestSubspaces:
    def test_sizes_and_candidates_bound_what_is_tried(self, data: RankingData) -> None:
        found = first_round(data, sizes=(1, 2), candidates=7, batch=100).learners
        assert 0 < int((found.widths == 1).sum()) <= 3
        assert 0 < int((found.widths == 2).sum()) <= 3
        assert set(first_round(data, sizes=(2,), candidates=8, batch=8).learners.widths.tolist()) == {2}

    def test_features_that_say_nothing_are_drawn_by_the_floor(self, data: RankingData) -> None:
        supports = [
            fit_boosted(data, rounds=6, sizes=(1,), candidates=8, batch=8, feature_floor=floor, evaluate_every=6)
            for floor in (1e-3, 100.0)
        ]
        noise = [
            float(torch.cat([block.support for block in bank.metrics.iter_blocks()]).ge(2).double().mean())
            for bank in supports
        ]
        assert noise[0] < noise[1]

    @pytest.mark.parametrize("bandwidths", [(0.5,), (0.3, 1.0, 3.0)])
    def test_anchor_and_bandwidth_have_the_largest_gain(self, data: RankingData, bandwidths: tuple[float, ...]) -> None:
        bag, _ = bags(data, subsample=1.0)
        newton = NewtonRows(bag.gradients, bag.hessians, bag.offsets)
        support = torch.tensor([[0, 1], [2, 3], [1, 4], [0, 5]])

        def best(widths: tuple[float, ...]) -> tuple[Learners, Tensor]:
            return best_of_subspaces(bag, newton, support, BoostConfig(bandwidths=widths), gen(1))

        learners, gain = best(bandwidths)
        assert learners.support.tolist() == [[*row, -1] for row in support.tolist()]
        # What is handed back is what was judged: anchor, factor and scale belong together.
        torch.testing.assert_close(newton.gains(learners.kernels(bag.features, "paper")), gain, rtol=1e-4, atol=1e-5)
        alone = torch.stack([best((width,))[1] for width in bandwidths])
        assert torch.equal(gain, alone.amax(0))
        unscaled = replace(learners, scales=torch.ones(4))
        mean = unscaled.kernels(bag.features, "distance").mean(0)
        ratio = (learners.scales / mean).tolist()
        assert all(any(value == pytest.approx(width, rel=1e-4) for width in bandwidths) for value in ratio)

    def test_more_anchors_and_steps_gain_no_less(self, data: RankingData) -> None:
        bag, _ = bags(data, subsample=1.0)
        newton = NewtonRows(bag.gradients, bag.hessians, bag.offsets)
        support = torch.arange(6)[:, None]
        gains = {
            (anchors, steps): best_of_subspaces(
                bag, newton, support, BoostConfig(anchors=anchors, steps=steps, sizes=(1,)), gen(1)
            )[1].sum()
            for anchors in (1, 12)
            for steps in ((), (2.0, 8.0))
        }
        assert gains[1, ()] < gains[12, ()]
        assert gains[1, ()] < gains[1, (2.0, 8.0)] <= gains[12, (2.0, 8.0)]

    def test_metrics_are_geometric_means_of_their_scatters(self, data: RankingData) -> None:
        bag, _ = bags(data, subsample=1.0)
        values = bag.features[:, torch.tensor([[0, 1], [2, 5]])]
        positive, negative = bag.gradients.clamp_min(0), (-bag.gradients).clamp_min(0)

        def metric(**settings: Any) -> Tensor:
            F = subspace_factors(values, positive, negative, bag.offsets, BoostConfig(**settings)).double()
            return F @ F.mT

        eye = torch.eye(2).double()
        pooled = bag.offsets[[0, -1]]
        for name, lists in (("gmml", bag.offsets), ("gmml-pooled", pooled)):
            S, D = (x.double() + LEAST_SCATTER * eye for x in list_scatter(values, positive, negative, lists))
            M = metric(metric=name, lam=0.0)
            torch.testing.assert_close(M @ S @ M, D, rtol=1e-4, atol=1e-5)  # Riccati's equation
            torch.testing.assert_close(metric(metric=name, lam=0.0, t=0.0), S.inverse(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(metric(metric=name, lam=0.0, t=1.0), D, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(metric(), metric(metric="gmml-pooled"), rtol=1e-3)
        torch.testing.assert_close(metric(method="eigh"), metric(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(metric(lam=1e9), eye.expand(2, 2, 2), rtol=1e-4, atol=1e-4)
        assert torch.equal(metric(metric="identity"), eye.expand(2, 2, 2))

    def test_one_feature_needs_no_metric(self, data: RankingData) -> None:
        values = data.features[:, :3, None]
        ones = torch.ones(len(values))
        factors = subspace_factors(values, ones, ones, data.offsets, BoostConfig())
        assert torch.equal(factors, torch.ones(3, 1, 1))


class TestStopping:
    def state(self, data: RankingData, **fields: Any) -> BoostState:
        return replace(initial_state(make_problem(data, data, BoostConfig(), 0)), **fields)

    @pytest.mark.parametrize(
        ("smooth", "best", "value"),
        [(1, 2, 0.9), (2, 3, 0.75), (3, 4, 0.7), (4, 5, 0.675)],
    )
    def test_the_best_average_of_the_last_evaluations_counts(
        self, data: RankingData, smooth: int, best: int, value: float
    ) -> None:
        state = self.state(data)
        for done, found in enumerate((0.1, 0.9, 0.6, 0.6, 0.6, 0.2), 1):
            state = replace(state, round=done).evaluated_with(done / 10, found, smooth=smooth)
        assert state.valid_ndcg == (0.1, 0.9, 0.6, 0.6, 0.6, 0.2)
        assert state.train_ndcg == (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
        assert state.evaluated == (1, 2, 3, 4, 5, 6)
        # Averages of 2: .1 .5 .75 .6 .6 .4; of 3: .1 .5 .533 .7 .6 .467; of 4: .1 .5 .533 .55 .675 .5
        assert (state.best_round, state.best_value) == (best, pytest.approx(value))

    def test_the_first_of_equal_averages_is_kept(self, data: RankingData) -> None:
        state = self.state(data)
        for done in (1, 2, 3):
            state = replace(state, round=done).evaluated_with(0.5, 0.5, smooth=1)
        assert state.best_round == 1
        without = replace(self.state(data), round=7).evaluated_with(0.5, None, smooth=1)
        assert (without.best_round, without.valid_ndcg) == (7, ())

    def test_patience_is_counted_in_rounds(self, data: RankingData) -> None:
        config = BoostConfig(patience=7)
        waiting = self.state(data, round=17, best_round=10, valid_ndcg=(0.5,))
        assert not finished(waiting, config)
        assert finished(replace(waiting, round=18), config)
        assert not finished(replace(waiting, round=18, valid_ndcg=()), config)  # nothing to be impatient about
        assert finished(replace(waiting, round=200, best_round=200), config)
        assert not finished(replace(waiting, idle=IDLE_ROUNDS - 1), config)
        assert finished(replace(waiting, idle=IDLE_ROUNDS), config)

    def test_a_fit_ends_when_patience_does(self, data: RankingData) -> None:
        mixed = data.labels[torch.randperm(data.num_documents, generator=gen(1))]
        rounds: list[int] = []
        settings: dict[str, Any] = {"sizes": (1,), "candidates": 2, "evaluate_every": 2}
        bank = fit_boosted(
            data, replace(data, labels=mixed), patience=6, on_round=lambda done, _: rounds.append(done), **settings
        )
        assert rounds[-1] == bank.history["best_round"] + 7 < 200
        assert bank.metrics.num_metrics <= 4 * bank.history["best_round"]

    def test_a_state_from_a_file_of_lists_is_the_same_state(self, data: RankingData) -> None:
        state = self.state(data, evaluated=(5,), train_ndcg=(0.5,), valid_ndcg=(0.25,))
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in state.export().items()}
        again = BoostState.load(lists)
        assert (again.evaluated, again.train_ndcg, again.valid_ndcg) == ((5,), (0.5,), (0.25,))

    def test_idle_rounds_are_counted_in_a_row(self, data: RankingData) -> None:
        problem = make_problem(data, None, BoostConfig(), 0)
        state = one_round(replace(initial_state(problem), idle=3), problem)
        assert state.idle == 0
        flat = replace(problem, data=replace(problem.data, features=torch.zeros_like(problem.data.features)))
        assert one_round(replace(initial_state(problem), idle=3), flat).idle == 4


@pytest.mark.parametrize("ridge", [0.01, 2.0])
def test_the_weights_of_a_wider_bag_have_the_ridge_of_the_settings(data: RankingData, ridge: float) -> None:
    bag, wide = bags(data, subsample=1.0, cap=40, phi_cap=150)
    found = find_learners(bag, wide, None, BoostConfig(batch=2, ridge=ridge), gen())
    newton = NewtonRows(wide.gradients, wide.hessians, wide.offsets, ridge=ridge)
    torch.testing.assert_close(found.phi, 0.1 * newton.weights(found.kernels(wide.features, "paper")))


def test_half_of_the_chance_follows_the_size_and_half_is_the_same_for_all() -> None:
    sizes = torch.tensor([3.0, 1.0]).repeat(20)
    by_size = {3.0: 10 * (3 / 80 + 1 / 40) / 2, 1.0: 10 * (1 / 80 + 1 / 40) / 2}  # of 10 places
    for seed in range(3):
        rows, weights = weighted_rows(sizes, 10, gen(seed))
        expected = torch.tensor([1 / by_size[size] for size in sizes[rows].tolist()])
        torch.testing.assert_close(weights, expected)


def test_grades_of_yes_and_no_can_judge(data: RankingData) -> None:
    """Which a warning would deny, were grade 1 not relevant."""
    judges = replace(make(3, queries=5), labels=(make(3, queries=5).labels > 1).to(data.labels))
    assert float(judges.labels.max()) == 1.0
    bank = fit_boosted(data, judges, rounds=4, candidates=6, evaluate_every=2, smooth=1)
    assert bank.history["best_valid_ndcg"] == max(bank.history["valid_ndcg"])
    assert fit_boosted(data, rounds=2, candidates=6).history["best_valid_ndcg"] is None
