"""One round of boosting, piece by piece, against the same rules written out in loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.fitting.boosted import BoostState, _learned_bank
from lgmml_torch.fitting.round import LEAST_SCATTER, Bag, BoostConfig, Problem, _draw_rows
from lgmml_torch.functional.boosting import Learners, NewtonRows, list_scatter
from lgmml_torch.functional.losses import lambda_gradients
from lgmml_torch.functional.score import kernel as kappa
from lgmml_torch.ragged import RankingData
from tests.fitting.test_boosted import make
from tests.reference import lambdarank


@pytest.fixture(scope="module")
def data() -> RankingData:
    return make(0, queries=20, size=12)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bag_of(data: RankingData, seed: int = 0, **settings: Any) -> Bag:
    problem = Problem.of(data, None, BoostConfig(**{"subsample": 1.0, **settings}), 0)
    return problem.draw_bag(torch.zeros(data.num_documents), gen(seed))


def rows_of(gradients: list[float], features: Tensor, hessians: list[float] | None = None) -> Bag:
    """The documents of one list, in the precision of their features."""
    g = torch.tensor(gradients).to(features)
    h = torch.ones_like(g) if hessians is None else torch.tensor(hessians).to(features)
    return Bag(features, g, h, torch.tensor([0, len(g)]))


def newton_of(bag: Bag, ridge: float = 0.05) -> NewtonRows:
    return NewtonRows(bag.gradients, bag.hessians, bag.offsets, ridge=ridge)


def owner_of(data: RankingData) -> dict[tuple[float, ...], int]:
    """The list of each document: features tell documents apart."""
    return dict(zip(map(tuple, data.features.tolist()), data.query_index.tolist(), strict=True))


class TestBags:
    @pytest.mark.parametrize(
        "settings",
        [{}, {"truncation": 3, "sigma": 2.0}, {"hessian_floor": 0.5}],
        ids=str,
    )
    def test_gradients_are_those_of_whole_lists(self, data: RankingData, settings: dict[str, Any]) -> None:
        weights = torch.arange(20).float()  # the first list counts nothing
        weighed = data.replace(query_weights=weights, positions=torch.arange(240) % 7)
        scores = torch.randn(240, generator=gen(7))
        given = {"truncation": 30, "sigma": 1.0, "hessian_floor": 0.05} | settings
        problem = Problem.of(weighed, None, BoostConfig(subsample=1.0, **settings), 0)
        part = problem.data
        g, h = lambdarank.lambda_gradients(
            scores.tolist(), part.labels.tolist(), part.offsets.tolist(),
            given["truncation"], given["sigma"], given["hessian_floor"],
        )  # fmt: skip
        times = weights[part.query_index].tolist()
        rows = zip(part.features.tolist(), g, h, times, part.positions.tolist(), strict=True)  # type: ignore[union-attr]
        whole = {tuple(x): (a * w, b * w, place) for x, a, b, w, place in rows if b * w > 0}
        for cap in (10_000, 60):
            capped = replace(problem, config=replace(problem.config, cap=cap))
            few = capped.draw_bag(scores, gen())
            assert len(few.gradients) == min(cap, len(whole))
            assert few.positions is not None
            drawn = zip(few.gradients.tolist(), few.hessians.tolist(), few.positions.tolist(), strict=True)
            for row, found in zip(few.features.tolist(), drawn, strict=True):
                assert found == pytest.approx(whole[tuple(row)], rel=1e-4, abs=1e-6)
            owners = torch.tensor([owner_of(data)[tuple(row)] for row in few.features.tolist()])
            sizes = torch.unique_consecutive(owners, return_counts=True)[1]
            assert few.offsets.tolist() == [0, *sizes.cumsum(0).tolist()]

    def test_documents_have_weights(self, data: RankingData) -> None:
        weights = torch.rand(240, generator=gen(1)) + 0.5
        problem = Problem.of(data.replace(document_weights=weights), None, BoostConfig(subsample=1.0), 0)
        scores, part = torch.randn(240, generator=gen(2)), problem.data
        bag = problem.draw_bag(scores, gen())
        g, h = lambda_gradients(
            scores, part.labels.float(), part.offsets, truncation=30, floor=0.05, weights=part.document_weights
        )
        assert torch.equal(bag.features, part.features[h > 0])
        torch.testing.assert_close(bag.gradients, g[h > 0], rtol=1e-5, atol=1e-7)

    def test_subsample_and_caps_decide_how_many_lists_there_are(self, data: RankingData) -> None:
        """Lists of 12: of four times the cap as many as fit; one list there must be."""
        owner = owner_of(data)

        def lists(seed: int, **settings: Any) -> set[int]:
            return {owner[tuple(row)] for row in bag_of(data, seed, **settings).features.tolist()}

        for share, count in ((1.0, 20), (0.5, 10), (0.26, 5), (1e-6, 1)):
            assert [len(lists(seed, subsample=share)) for seed in (0, 1)] == [count, count]
        assert lists(0, subsample=0.5) != lists(1, subsample=0.5)
        for cap, count in ((12, 4), (9, 3), (8, 2), (1, 1)):
            assert max(len(lists(seed, cap=cap)) for seed in range(12)) == count
        for cap in (5, 30, 50):
            assert len(bag_of(data, cap=cap).gradients) == cap


class TestRows:
    def test_few_rows_are_taken_as_they_are_and_many_by_hessian(self) -> None:
        h = torch.full((100,), 0.01)
        h[[3, 50]] = 100.0
        assert _draw_rows(h, 100, gen()).tolist() == list(range(100))
        uniform = [_draw_rows(h, 25, gen(seed)) for seed in range(60)]
        by_size = [_draw_rows(h, 24, gen(seed)) for seed in range(60)]  # more than four times as many
        for drawn, cap in ((uniform, 25), (by_size, 24)):
            assert all(len(rows) == cap and (rows.diff() > 0).all() for rows in drawn)
        shares = [sum(50 in rows.tolist() for rows in drawn) / 60 for drawn in (uniform, by_size)]
        assert shares[0] < 0.5
        assert shares[1] > 0.9
        assert len(torch.unique(torch.cat(by_size))) == 100  # no row is left out for good


class TestOrder:
    def test_documents_of_equal_score_are_in_random_order(self, data: RankingData) -> None:
        problem, other = (Problem.of(data, data, BoostConfig(), seed) for seed in (0, 1))
        label = dict(zip(map(tuple, data.features.tolist()), data.labels.tolist(), strict=True))
        place = dict(zip(map(tuple, data.features.tolist()), data.order.tolist(), strict=True))
        for part in (problem.data, problem.valid):
            assert part is not None
            assert torch.equal(part.offsets, data.offsets)
            assert [owner_of(data)[tuple(row)] for row in part.features.tolist()] == data.query_index.tolist()
            assert [label[tuple(row)] for row in part.features.tolist()] == part.labels.tolist()
            assert [place[tuple(row)] for row in part.features.tolist()] == part.order.tolist()
            # The canonical order would have the worst first: here first places are as good as others.
            first, canonical = part.labels[part.offsets[:-1]], data.labels[data.offsets[:-1]]
            assert float(first.mean()) > float(canonical.mean()) + 0.2
        assert not torch.equal(problem.data.features, other.data.features)

    def test_every_round_has_draws_of_its_own(self) -> None:
        drawn = {Problem.generator(seed, step).initial_seed() for seed in range(4) for step in range(-2, 30)}
        assert len(drawn) == 4 * 32
        assert Problem.generator(-3, 0).initial_seed() == Problem.generator(3, 0).initial_seed()


class TestFeatureWeights:
    def test_formula(self) -> None:
        x = torch.randn(27, 3, generator=gen(0), dtype=torch.float64)
        g = torch.randn(27, generator=gen(1), dtype=torch.float64)
        h = torch.rand(27, generator=gen(2), dtype=torch.float64) + 0.1
        strength = [abs(float(x[:, j] @ g)) / float(h @ x[:, j] ** 2) ** 0.5 for j in range(3)]
        want = [max(s / (sum(strength) / 3), 0.05) for s in strength]
        found = rows_of(g.tolist(), x, h.tolist()).feature_weights(0.05)
        torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64))

    def test_they_are_over_their_mean_and_not_below_the_floor(self) -> None:
        X = torch.tensor([[1.0, 1.0, 2.0], [-1.0, 1.0, 0.0]])
        bag, strength = rows_of([3.0, -3.0], X, [1.0, 4.0]), torch.tensor([6 / 5**0.5, 0, 6 / 4**0.5])
        torch.testing.assert_close(bag.feature_weights(0.25), (strength / strength.mean()).clamp_min(0.25))
        assert float(bag.feature_weights(0.05).min()) == pytest.approx(0.05)

    def test_where_nothing_says_anything_all_are_equal(self) -> None:
        assert rows_of([3.0, -3.0], torch.zeros(2, 2)).feature_weights(0.3).tolist() == pytest.approx([0.3, 0.3])
        assert rows_of([0.0, 0.0], torch.eye(2)).feature_weights(0.2).tolist() == pytest.approx([0.2, 0.2])

    def test_they_decide_what_is_drawn_and_a_subspace_holds_no_feature_twice(self) -> None:
        x = torch.randn(60, 3, generator=gen(), dtype=torch.float64)
        g = torch.where(x[:, 0].abs() < 0.6, 1.0, -0.5)
        bag = rows_of(g.tolist(), x + torch.tensor([1.0, 0.0, 0.0]))
        config = BoostConfig(sizes=(5,), batch=24)
        found = bag.find_learners(config, gen(3))
        assert found.support.sort().values.tolist() == [[-1, -1, 0, 1, 2]] * len(found)
        alone = BoostConfig(sizes=(1,), batch=300, candidates=300)
        supports: list[Tensor] = []
        weights = bag.feature_weights(alone.feature_floor)
        search = Bag.best_of_subspaces

        def watched(self: Bag, newton: NewtonRows, support: Tensor, *further: Any) -> tuple[Learners, Tensor]:
            supports.append(support)
            return search(self, newton, support, *further)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bag, "best_of_subspaces", watched)
            bag.find_learners(alone, gen(4))
        shares = torch.bincount(supports[0].flatten(), minlength=3) / 300
        torch.testing.assert_close(shares.double(), weights / weights.sum(), rtol=0, atol=0.1)


class TestAnchors:
    def test_the_mean_is_moved_by_lengths_in_every_subspace(self) -> None:
        values = torch.tensor([[[0.0, 0.0], [1.0, 1.0]], [[3.0, 4.0], [1.0, 5.0]], [[9.0, 9.0], [9.0, 9.0]]])
        config = BoostConfig(anchors=2, steps=(5.0, 10.0))
        found = rows_of([-2.0, 1.0, 0.0], values[:, 0]).candidate_anchors(values, config, gen())
        first, second = [[3.0, 4.0]] * 3, [[1.0, 5.0]] * 3  # drawn twice, and the mean: there is one positive
        assert found[0].tolist() == [*first, [6.0, 8.0], [9.0, 12.0]]
        assert found[1].tolist() == [*second, [1.0, 10.0], [1.0, 15.0]]

    def test_documents_are_drawn_among_the_positives(self) -> None:
        values = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, -5.0]], dtype=torch.float64).reshape(3, 1, 2)
        config = BoostConfig(anchors=5, steps=(2.0, 8.0))
        anchors = rows_of([1.0, 1.0, -3.0], values[:, 0]).candidate_anchors(values, config, gen())
        assert anchors.shape == (1, 8, 2)
        assert all(tuple(a) in {(0.0, 0.0), (2.0, 0.0)} for a in anchors[0, :5].tolist())
        torch.testing.assert_close(anchors[0, 5:], torch.tensor([[1.0, 0.0], [1.0, 2.0], [1.0, 8.0]]).double())

    def test_means_are_weighted(self) -> None:
        values = torch.tensor([0.0, 1.0, 4.0, 6.0]).view(4, 1, 1)
        config = BoostConfig(anchors=1, steps=(1.0,))
        found = rows_of([-1.0, -3.0, 1.0, 3.0], values[:, 0]).candidate_anchors(values, config, gen())
        assert found[0, 1:, 0].tolist() == [5.5, 6.5]

    def test_without_a_direction_nothing_moves(self) -> None:
        values = torch.tensor([2.0, 2.0]).view(2, 1, 1)
        config = BoostConfig(anchors=1, steps=(1.0,))
        found = rows_of([1.0, -1.0], values[:, 0]).candidate_anchors(values, config, gen())
        assert found.flatten().tolist() == [2.0, 2.0, 2.0]


class TestSubspaces:
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"kernel": "rbf", "bandwidths": (0.5,), "metric": "gmml-pooled", "anchors": 3, "steps": (1.0,)},
            {"lam": 1.0, "t": 0.3, "bandwidths": (0.1, 2.0), "min_deviation": 0.2},
        ],
        ids=str,
    )
    def test_the_anchor_and_bandwidth_of_the_largest_gain(self, data: RankingData, settings: dict[str, Any]) -> None:
        config = BoostConfig(**settings)
        bag = bag_of(data)
        newton = newton_of(bag)
        for width in (1, 2, 3):
            support = torch.tensor([[0, 1, 2], [3, 5, 4], [1, 4, 0], [5, 2, 1]])[:, :width]
            learners, gain = bag.best_of_subspaces(newton, support, config, gen(1))
            values = bag.features[:, support]
            factors = bag.subspace_factors(values, config)
            anchors = bag.candidate_anchors(values, config, gen(1))
            for place in range(len(support)):
                tried = []
                for anchor in anchors[place]:
                    dists = ((values[:, place] - anchor) @ factors[place]).square().sum(1).sqrt()
                    for bandwidth in config.bandwidths:
                        scale = max(float(dists.mean()), 1e-3) * bandwidth
                        column = kappa(dists / scale, config.kernel)[:, None]
                        tried.append((float(newton.gains(column, min_deviation=config.min_deviation)), anchor, scale))
                best = max(value for value, *_ in tried)
                assert float(gain[place]) == pytest.approx(best, rel=1e-3, abs=1e-5)
                near = [(anchor, scale) for value, anchor, scale in tried if value >= best - 1e-3 * abs(best) - 1e-5]
                found = learners.anchors[place, :width], float(learners.scales[place])
                assert any(
                    torch.allclose(found[0], anchor, atol=1e-5) and found[1] == pytest.approx(scale, rel=1e-4)
                    for anchor, scale in near
                )
                torch.testing.assert_close(learners.factors[place, :width, :width], factors[place])
            assert torch.equal(learners.support, torch.cat([support, torch.full((4, 3 - width), -1)], dim=1))
            assert (learners.anchors.shape, learners.factors.shape) == ((4, 3), (4, 3, 3))
            for beyond in (learners.anchors[:, width:], learners.factors[:, width:], learners.factors[:, :, width:]):
                assert not beyond.any()

    def test_distances_next_to_nothing_have_a_scale(self) -> None:
        features = torch.randn(12, 2, generator=gen()) * 1e-6
        bag = Bag(features, torch.tensor([1.0, -1.0] * 6), torch.ones(12), torch.tensor([0, 12]))
        config = BoostConfig(sizes=(1,), bandwidths=(0.5, 2.0), min_deviation=1e-12)
        learners, _ = bag.best_of_subspaces(newton_of(bag), torch.tensor([[0], [1]]), config, gen())
        for scale in learners.scales.tolist():
            assert any(scale == pytest.approx(1e-3 * bandwidth) for bandwidth in (0.5, 2.0))

    @pytest.mark.parametrize(
        "settings",
        [
            {"ridge": 2.0, "feature_floor": 3.0},
            {"shrinkage": 0.7, "batch": 2, "candidates": 9},
            {"sizes": (2, 1), "candidates": 5, "kernel": "rbf"},
        ],
    )
    def test_the_best_few_by_loops(self, data: RankingData, settings: dict[str, Any]) -> None:
        config = BoostConfig(**settings)
        bag = bag_of(data, cap=60)
        found = bag.find_learners(config, gen(2))
        g = gen(2)
        newton = newton_of(bag, config.ridge)
        weights = bag.feature_weights(config.feature_floor).expand(config.candidates // len(config.sizes), -1)
        tried: list[tuple[float, Learners]] = []
        for size in config.sizes:
            support = torch.multinomial(weights, size, generator=g)
            learners, gains = bag.best_of_subspaces(newton, support, config, g)
            tried += [(float(gain), learners.select(torch.tensor([i]))) for i, gain in enumerate(gains)]
        best = sorted(tried, key=lambda pair: -pair[0])[: config.batch]
        chosen = Learners.cat([learner for gain, learner in best if gain > 0])
        phi = config.shrinkage * newton.weights(chosen.kernels(bag.features, config.kernel))
        assert torch.equal(found.support, chosen.support[phi > 0])
        torch.testing.assert_close(found.anchors, chosen.anchors[phi > 0])
        torch.testing.assert_close(found.phi, phi[phi > 0])
        assert bool((found.phi > 0).all())

    @pytest.mark.parametrize("gradients", [[1.0, 2.0], [0.0, -1.0], [1.0, -1.0]])
    def test_what_helps_nothing_is_not_added(self, gradients: list[float]) -> None:
        """One sign alone, or two documents at the same place of which one should rise and one fall."""
        bag = Bag(torch.ones(2, 3), torch.tensor(gradients), torch.ones(2), torch.tensor([0, 2]))
        found = bag.find_learners(BoostConfig(sizes=(1, 3)), gen())
        assert (len(found), found.support.shape) == (0, (0, 3))

    def test_small_gradients_of_both_signs_find_something(self) -> None:
        x = torch.randn(40, 3, generator=gen())
        gradients = torch.where(x[:, 0].abs() < 0.7, 0.002, -0.001)
        bag = Bag(x, gradients, torch.full((40,), 0.05), torch.tensor([0, 40]))
        config = BoostConfig(sizes=(1,))
        _, gains = bag.best_of_subspaces(newton_of(bag), torch.arange(3)[:, None], config, gen())
        assert 0 < float(gains.max()) < 1
        found = bag.find_learners(config, gen())
        assert len(found) > 0
        assert float(found.phi.max()) < 1

    def test_metrics_are_geometric_means_of_their_scatters(self, data: RankingData) -> None:
        bag = bag_of(data)
        values = bag.features[:, torch.tensor([[0, 1], [2, 5]])]
        positive, negative = bag.gradients.clamp_min(0), (-bag.gradients).clamp_min(0)

        def metric(**settings: Any) -> Tensor:
            F = bag.subspace_factors(values, BoostConfig(**settings)).double()
            return F @ F.mT

        eye = torch.eye(2).double()
        for name, lists in (("gmml", bag.offsets), ("gmml-pooled", bag.offsets[[0, -1]])):
            S, D = (x.double() + LEAST_SCATTER * eye for x in list_scatter(values, positive, negative, lists))
            M = metric(metric=name, lam=0.0)
            torch.testing.assert_close(M @ S @ M, D, rtol=1e-4, atol=1e-5)  # Riccati's equation
            torch.testing.assert_close(metric(metric=name, lam=0.0, t=0.0), S.inverse(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(metric(metric=name, lam=0.0, t=1.0), D, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(metric(), metric(metric="gmml-pooled"), rtol=1e-3)
        torch.testing.assert_close(metric(method="eigh"), metric(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(metric(lam=1e9), eye.expand(2, 2, 2), rtol=1e-4, atol=1e-4)
        assert torch.equal(metric(metric="identity"), eye.expand(2, 2, 2))
        one = bag.subspace_factors(values[:, :, :1], BoostConfig())
        assert torch.equal(one, torch.ones(2, 1, 1))  # one feature needs no metric

    def test_scatters_have_a_little_of_the_identity(self) -> None:
        """Features that are constant within lists: both scatters are that little alone; without it nothing is left."""
        values = torch.ones(6, 1, 2, dtype=torch.float64)
        bag = rows_of([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], values[:, 0])
        for t, size in ((0.5, 1.0), (1.0, LEAST_SCATTER), (0.0, 1 / LEAST_SCATTER)):
            F = bag.subspace_factors(values, BoostConfig(lam=0.0, t=t))
            torch.testing.assert_close(F[0] @ F[0].mT, size * torch.eye(2).double(), rtol=1e-4, atol=0)
        assert 0 < LEAST_SCATTER < 0.01


def test_a_round_adds_the_best_few_of_its_documents(data: RankingData) -> None:
    config = BoostConfig(cap=40, rounds=3, evaluate_every=3)
    problem = Problem.of(data, None, config, 5)
    found = BoostState.first(problem).one_round(problem).learners
    generator = Problem.generator(5, 0)
    bag = problem.draw_bag(torch.zeros(240), generator)
    want = bag.find_learners(config, generator)
    assert len(want) > 0
    assert torch.equal(found.anchors, want.anchors)
    assert torch.equal(found.phi, want.phi)
    assert found.rounds.tolist() == [1] * len(want)


def test_learners_of_several_sizes() -> None:
    learners = Learners(
        support=torch.tensor([[4, -1], [0, 2], [2, -1]]),
        anchors=torch.tensor([[1.0, 0.0], [0.5, 0.25], [2.0, 0.0]]),
        factors=torch.stack([torch.diag(torch.tensor(d)) for d in ([1.0, 0.0], [1.0, 2.0], [3.0, 0.0])]),
        scales=torch.tensor([1.0, 2.0, 0.5]),
        phi=torch.tensor([1.0, 2.0, 3.0]),
        rounds=torch.tensor([1, 1, 2]),
    )
    assert learners.widths.tolist() == [1, 2, 1]
    x = torch.randn(7, 5, generator=gen())
    first, third = (x[:, 4] - 1).abs(), 3 * (x[:, 2] - 2).abs() / 0.5
    second = ((x[:, 0] - 0.5) ** 2 + 4 * (x[:, 2] - 0.25) ** 2).sqrt() / 2
    dists = torch.stack([first, second, third], dim=1)
    for kernel, expected in (("distance", dists), ("paper", dists * torch.exp(-dists))):
        torch.testing.assert_close(learners.kernels(x, kernel), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(learners.double().kernels(x, kernel), expected.double(), rtol=1e-5, atol=1e-6)
    bank = _learned_bank(learners, 5, "paper")
    assert bank.phi is not None
    assert bank.phi.tolist() == [1.0, 3.0, 2.0]
    assert bank.metrics.num_features == 5
    torch.testing.assert_close(bank.metrics(x), dists[:, [0, 2, 1]], rtol=1e-5, atol=1e-6)
    assert Learners.cat([learners, learners.select(learners.rounds == 1)]).phi.tolist() == [1, 2, 3, 1, 2]
    none = Learners.empty(2, x)
    assert len(Learners.cat([none, learners])) == 3
    assert none.factors.shape == (0, 2, 2)
