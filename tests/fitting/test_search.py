"""One round of boosting, piece by piece, against the same rules written out in loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.fitting.learners import BoostConfig, Learners
from lgmml_torch.fitting.round import (
    LEAST_SCATTER,
    Bag,
    best_of_subspaces,
    draw_bag,
    draw_rows,
    find_learners,
    make_problem,
    subspace_factors,
    weighted_rows,
)
from lgmml_torch.functional.boosting import NewtonRows, candidate_anchors, draw_subspaces, feature_weights
from lgmml_torch.functional.losses import lambda_gradients
from lgmml_torch.functional.score import kernel as kappa
from lgmml_torch.ragged import RankingData
from tests.fitting.test_boosted import make


@pytest.fixture(scope="module")
def data() -> RankingData:
    return make(0, queries=20, size=12)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bag_of(data: RankingData, **settings: Any) -> tuple[Bag, Bag]:
    problem = make_problem(data, None, BoostConfig(subsample=1.0, **settings), 0)
    return draw_bag(problem, torch.zeros(data.num_documents), gen())


def newton_of(bag: Bag, ridge: float = 0.05) -> NewtonRows:
    return NewtonRows(bag.gradients, bag.hessians, bag.offsets, ridge=ridge)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kernel": "rbf", "bandwidths": (0.5,)},
        {"metric": "gmml-pooled", "anchors": 3, "steps": (1.0,)},
        {"metric": "identity", "min_deviation": 0.2},
        {"lam": 1.0, "t": 0.3, "bandwidths": (0.1, 2.0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_best_anchor_and_bandwidth_by_loops(data: RankingData, settings: dict[str, Any], width: int) -> None:
    config = BoostConfig(**settings)
    bag, _ = bag_of(data)
    newton = newton_of(bag)
    support = torch.tensor([[0, 1, 2], [3, 5, 4], [1, 4, 0], [5, 2, 1]])[:, :width]
    learners, gain = best_of_subspaces(bag, newton, support, config, gen(1))
    values = bag.features[:, support]
    positive, negative = bag.gradients.clamp_min(0), (-bag.gradients).clamp_min(0)
    factors = subspace_factors(values, positive, negative, bag.offsets, config)
    anchors = candidate_anchors(values, positive, negative, draws=config.anchors, steps=config.steps, generator=gen(1))
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
        found = learners.anchors[place, :width]
        assert any(
            torch.allclose(found, anchor, atol=1e-5) and float(learners.scales[place]) == pytest.approx(scale, rel=1e-4)
            for anchor, scale in near
        )
        torch.testing.assert_close(learners.factors[place, :width, :width], factors[place])
    pad = 3 - width
    assert torch.equal(learners.support, torch.cat([support, torch.full((4, pad), -1)], dim=1))
    assert learners.anchors.shape == (4, 3)
    assert not learners.anchors[:, width:].any()
    assert learners.factors.shape == (4, 3, 3)
    assert not learners.factors[:, width:].any()
    assert not learners.factors[:, :, width:].any()
    assert learners.phi.tolist() == [0.0] * 4
    assert learners.rounds.tolist() == [0] * 4


def test_distances_next_to_nothing_have_a_scale() -> None:
    features = torch.randn(12, 2, generator=gen()) * 1e-6
    bag = Bag(features, torch.tensor([1.0, -1.0] * 6), torch.ones(12), torch.tensor([0, 12]))
    config = BoostConfig(sizes=(1,), bandwidths=(0.5, 2.0), min_deviation=1e-12)
    learners, _ = best_of_subspaces(bag, newton_of(bag), torch.tensor([[0], [1]]), config, gen())
    for scale in learners.scales.tolist():
        assert any(scale == pytest.approx(1e-3 * bandwidth) for bandwidth in (0.5, 2.0))


@pytest.mark.parametrize(
    ("settings", "with_prior"),
    [
        ({}, False),
        ({"ridge": 2.0, "feature_floor": 3.0}, False),
        ({"shrinkage": 0.7, "batch": 2, "candidates": 9}, True),
        ({"sizes": (2, 1), "candidates": 5, "kernel": "rbf"}, True),
    ],
)
def test_the_best_few_by_loops(data: RankingData, settings: dict[str, Any], with_prior: bool) -> None:
    config = BoostConfig(**settings)
    bag, wide = bag_of(data, cap=60, phi_cap=150)
    prior = torch.tensor([5.0, 0.1, 3.0, 1.0, 0.5, 2.0]) if with_prior else None
    found = find_learners(bag, wide, prior, config, gen(2))
    g = gen(2)
    newton = newton_of(bag, config.ridge)
    weights = feature_weights(bag.features, bag.gradients, bag.hessians, floor=config.feature_floor)
    if prior is not None:
        weights = weights * prior
    tried: list[tuple[float, Learners]] = []
    for size in config.sizes:
        support = draw_subspaces(weights, config.candidates // len(config.sizes), size, generator=g)
        learners, gains = best_of_subspaces(bag, newton, support, config, g)
        tried += [(float(gain), learners.select(torch.tensor([i]))) for i, gain in enumerate(gains)]
    best = sorted(tried, key=lambda pair: -pair[0])[: config.batch]
    chosen = Learners.cat([learner for gain, learner in best if gain > 0])
    phi = config.shrinkage * newton_of(wide, config.ridge).weights(chosen.kernels(wide.features, config.kernel))
    assert torch.equal(found.support, chosen.support[phi > 0])
    torch.testing.assert_close(found.anchors, chosen.anchors[phi > 0])
    torch.testing.assert_close(found.phi, phi[phi > 0])
    assert bool((found.phi > 0).all())


@pytest.mark.parametrize("gradients", [[1.0, 2.0], [-1.0, -2.0], [0.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
def test_one_sign_alone_finds_nothing(gradients: list[float]) -> None:
    bag = Bag(torch.randn(2, 3, generator=gen()), torch.tensor(gradients), torch.ones(2), torch.tensor([0, 2]))
    found = find_learners(bag, bag, None, BoostConfig(sizes=(1, 3)), gen())
    assert (len(found), found.support.shape) == (0, (0, 3))


def test_small_gradients_of_both_signs_find_something() -> None:
    x = torch.randn(40, 3, generator=gen())
    gradients = torch.where(x[:, 0].abs() < 0.7, 0.002, -0.001)
    bag = Bag(x, gradients, torch.full((40,), 0.05), torch.tensor([0, 40]))
    config = BoostConfig(sizes=(1,))
    _, gains = best_of_subspaces(bag, newton_of(bag), torch.arange(3)[:, None], config, gen())
    assert 0 < float(gains.max()) < 1
    found = find_learners(bag, bag, None, config, gen())
    assert len(found) > 0
    assert float(found.phi.max()) < 1


@pytest.mark.parametrize(("count", "cap"), [(10, 10), (11, 10), (40, 10), (41, 10), (100, 7)])
def test_rows_are_drawn_by_the_generator(count: int, cap: int) -> None:
    hessians = torch.rand(count, generator=gen(9)) + 0.1
    rows = draw_rows(hessians, cap, gen(3))
    if count <= cap:
        want = torch.arange(count)
    elif count <= 4 * cap:
        want = torch.randperm(count, generator=gen(3))[:cap].sort().values
    else:
        want = torch.multinomial(hessians + hessians.mean(), cap, generator=gen(3)).sort().values
    assert torch.equal(rows, want)


@pytest.mark.parametrize("cap", [30, 10_000])
def test_documents_by_their_gradients(data: RankingData, cap: int) -> None:
    """The bag is what `weighted_rows` draws of the gradients of all lists, with what each of them counts."""
    config = BoostConfig(subsample=1.0, cap=cap, draw="gradient")
    problem = make_problem(data, None, config, 0)
    scores = torch.randn(data.num_documents, generator=gen(7))
    bag, wide = draw_bag(problem, scores, gen(4))
    assert wide is bag
    g = gen(4)
    drawn = problem.usable[torch.randperm(len(problem.usable), generator=g)]
    queries = drawn[: min(len(drawn), 4 * cap // 12)].sort().values
    rows = torch.cat([torch.arange(int(problem.data.offsets[q]), int(problem.data.offsets[q + 1])) for q in queries])
    part = problem.data
    gradients, hessians = lambda_gradients(
        scores[rows], part.labels[rows].float(), torch.arange(0, len(rows) + 1, 12), truncation=30, floor=0.05
    )
    kept = (hessians > 0).nonzero()[:, 0]
    chosen, weight = weighted_rows(gradients[kept].abs(), cap, g)
    some = kept[chosen]
    torch.testing.assert_close(bag.gradients, gradients[some] * weight)
    torch.testing.assert_close(bag.hessians, hessians[some] * weight)
    assert torch.equal(bag.features, part.features[rows[some]])


def test_the_wider_bag_decides_how_many_lists_there_are(data: RankingData) -> None:
    few, wide = bag_of(data, cap=5, phi_cap=50)
    assert (len(few.gradients), len(wide.gradients)) == (5, 50)
    few, wide = bag_of(data, cap=50, phi_cap=5)
    assert wide is few
    assert len(few.gradients) == 50


def test_lists_that_just_fit(data: RankingData) -> None:
    """Lists of 12: of four times 9, 36, three fit; of four times 8, 32, two."""
    owner = dict(zip(map(tuple, data.features.tolist()), data.query_index.tolist(), strict=True))
    for cap, lists in ((9, 3), (8, 2)):
        drawn: set[int] = set()
        problem = make_problem(data, None, BoostConfig(subsample=1.0, cap=cap), 0)
        order = problem.usable[torch.randperm(20, generator=gen(11))][:lists].tolist()
        bag, _ = draw_bag(problem, torch.zeros(240), gen(11))
        drawn |= {owner[tuple(row)] for row in bag.features.tolist()}
        assert drawn <= set(order)
    one = make_problem(data, None, BoostConfig(subsample=1e-9), 0)
    first = int(one.usable[torch.randperm(20, generator=gen(11))][0])
    bag, _ = draw_bag(one, torch.zeros(240), gen(11))
    assert {owner[tuple(row)] for row in bag.features.tolist()} == {first}


def test_scatters_have_a_little_of_the_identity() -> None:
    """Features that are constant within lists: both scatters are that little alone, and the metric is the identity."""
    values = torch.ones(6, 1, 2)
    ones = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    for t, size in ((0.5, 1.0), (1.0, LEAST_SCATTER), (0.0, 1 / LEAST_SCATTER)):
        F = subspace_factors(values, ones, 1 - ones, torch.tensor([0, 6]), BoostConfig(lam=0.0, t=t)).double()
        torch.testing.assert_close(F[0] @ F[0].mT, size * torch.eye(2).double(), rtol=1e-4, atol=0)
    assert LEAST_SCATTER == 1e-4


def test_factors_are_of_the_precision_of_the_features() -> None:
    values = torch.randn(8, 2, 2, generator=gen()).double()
    ones = torch.tensor([1.0, 0.0] * 4).double()
    for metric in ("gmml", "identity"):
        factors = subspace_factors(values, ones, 1 - ones, torch.tensor([0, 4, 8]), BoostConfig(metric=metric))
        assert (factors.dtype, factors.shape) == (torch.float64, (2, 2, 2))
    single: Tensor = subspace_factors(values[:, :, :1], ones, 1 - ones, torch.tensor([0, 8]), BoostConfig())
    assert (single.dtype, single.flatten().tolist()) == (torch.float64, [1.0, 1.0])
