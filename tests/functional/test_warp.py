"""Sampled WARP: loops, autograd, the hand formula, the law of the draws, and the two ways to batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.functional import warp
from lgmml_torch.functional.score import score
from lgmml_torch.functional.warp import (
    Draws,
    NegativeTable,
    WarpOutcome,
    rank_weight_table,
    warp_loss,
)
from tests.reference import warp as reference

# Every count below divides 12, so a grid of 12 midpoints enumerates each choice evenly.
LABELS = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 3.0, 0.0, 2.0, 2.0, 0.0, 1.0, 1.0])
OFFSETS = torch.tensor([0, 4, 6, 7, 9, 12])
GRID = (torch.arange(12, dtype=torch.float64) + 0.5) / 12
MARGIN = 0.2


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(k: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """κ of every document, Φ of every query, scores."""
    kappa = torch.rand(12, k, generator=seeded(1), dtype=torch.float64)
    phi = torch.rand(5, k, generator=seeded(2), dtype=torch.float64)
    return kappa, phi, score(kappa, phi, OFFSETS)


def run(draws: Draws, scores: Tensor) -> WarpOutcome:
    return warp_loss(
        scores[draws.positives], scores[draws.negatives], draws.num_negatives,
        margin=MARGIN, weights=draws.weights, num_draws=draws.num_draws,
    )  # fmt: skip


def gradient(draws: Draws, scores: Tensor, kappa: Tensor) -> Tensor:
    found = run(draws, scores)
    violators = draws.negatives.gather(1, found.violator.clamp_min(0)[:, None])[:, 0]
    return reference.warp_phi_gradient(found, draws.queries, kappa[draws.positives], kappa[violators], num_queries=5)


def test_rank_weight_equals_the_sum() -> None:
    ranks = torch.tensor([[0, 1, 2], [7, 30, 3]])
    expected = torch.tensor([[reference.rank_weight(int(k)) for k in row] for row in ranks], dtype=torch.float64)
    torch.testing.assert_close(rank_weight_table(30)[ranks], expected)


def test_loss_equals_the_loop() -> None:
    for seed in range(5):
        for size, width in [(0, 3), (1, 1), (40, 6), (5, 0)]:
            g = seeded(seed)
            pos = torch.randn(size, generator=g, dtype=torch.float64)
            neg = torch.randn(size, width, generator=g, dtype=torch.float64) - 1
            count = torch.randint(0, 20, (size,), generator=g)
            weights, limit = (
                torch.rand(size, generator=g, dtype=torch.float64),
                torch.randint(0, 9, (size,), generator=g),
            )
            for w, cap in ((None, None), (weights, None), (weights, limit)):
                found = warp_loss(pos, neg, count, margin=0.3, weights=w, num_draws=cap)
                for i in range(size):
                    weight, most = (1.0 if w is None else float(w[i])), (None if cap is None else int(cap[i]))
                    expected = reference.warp(float(pos[i]), neg[i].tolist(), int(count[i]), 0.3, weight, most)
                    assert float(found.loss[i]) == pytest.approx(expected[0])
                    assert (int(found.violator[i]), int(found.draws[i]), int(found.rank[i])) == expected[1:]
                table = warp_loss(pos, neg, count, margin=0.3, weights=w, num_draws=cap, table=rank_weight_table(20))
                torch.testing.assert_close(table.loss, found.loss)


def test_a_draw_exactly_at_the_margin_does_not_violate() -> None:
    found = warp_loss(torch.tensor([1.0]), torch.tensor([[0.5, 0.75]]), torch.tensor([2]), margin=0.5)
    assert found.violator.tolist() == [1]


def test_the_loss_does_not_depend_on_the_order_of_tuples() -> None:
    _, _, scores = model()
    draws = NegativeTable.of(LABELS, OFFSETS).sample_triplets(50, generator=seeded())
    order = torch.randperm(50, generator=seeded(1))
    turned = Draws(*(getattr(draws, name)[order] for name in Draws.__dataclass_fields__))
    assert torch.equal(run(turned, scores).loss, run(draws, scores).loss[order])


def test_gradient_equals_autograd_and_the_hand_formula() -> None:
    kappa, phi, _ = model()
    phi.requires_grad_()
    draws = NegativeTable.of(LABELS, OFFSETS).sample_triplets(64, max_draws=3, generator=seeded())
    scores = score(kappa, phi, OFFSETS)
    run(draws, scores).loss.sum().backward()
    found = run(draws, scores.detach())
    assert 0 < (found.violator >= 0).sum() < 64  # tuples with and without a violator
    torch.testing.assert_close(gradient(draws, scores.detach(), kappa), phi.grad)
    hand = torch.zeros_like(phi)
    for i in range(64):
        if found.violator[i] >= 0:
            p, n = kappa[draws.positives[i]], kappa[draws.negatives[i, found.violator[i]]]
            hand[draws.queries[i]] += reference.rank_weight(int(found.rank[i])) * (p - n)
    torch.testing.assert_close(phi.grad, hand)


def test_a_step_against_the_gradient_widens_the_margin() -> None:
    """The sign: Φ grows where the violator's κ is larger, so f(p⁺) − f(p⁻) grows."""
    kappa, phi, scores = model()
    draws = NegativeTable.of(LABELS, OFFSETS).sample_triplets(200, generator=seeded())
    before = run(draws, scores).loss.sum()
    phi = (phi - 1e-4 * gradient(draws, scores, kappa)).clamp_min(0)
    assert run(draws, score(kappa, phi, OFFSETS)).loss.sum() < before


def test_a_query_drawn_twice_gets_both_updates() -> None:
    kappa = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [0.0, 0.0]])
    phi = torch.zeros(3, 2, requires_grad=True)
    scores = -(kappa * phi[[1, 1, 1, 1]]).sum(1)
    warp_loss(scores[:2], scores[2:, None], torch.tensor([1, 1]), margin=1.0).loss.sum().backward()
    expected = torch.zeros(3, 2)
    expected[1] = (kappa[0] - kappa[2]) + (kappa[1] - kappa[3])
    assert torch.equal(phi.grad, expected)


def test_negative_table_equals_the_loop() -> None:
    for kind in ["lower", "zero"]:
        for seed in range(4):
            g = seeded(seed)
            offsets = torch.tensor([0, 1, 1, 9, 20, 23, 31])
            labels = torch.randint(-1 if seed == 3 else 0, 4, (31,), generator=g).float()
            labels[20:23] = 2.0  # all equal
            table = NegativeTable.of(labels, offsets, negatives=kind)
            usable = []
            for q in range(6):
                rows = range(int(offsets[q]), int(offsets[q + 1]))
                positives = []
                for i in rows:
                    expected = reference.negatives_of(i, labels.tolist(), rows, kind)
                    start, count = int(table.start[i]), int(table.count[i])
                    assert sorted(table.order[start : start + count].tolist()) == expected
                    positives += [i] if expected else []
                a, b = table.positive_offsets[q : q + 2]
                assert table.positives[int(a) : int(b)].tolist() == positives
                usable += [q] if positives else []
            assert table.queries.tolist() == usable


def test_tables_and_lists_of_nothing() -> None:
    for labels, offsets in ((torch.zeros(0), [0]), (torch.zeros(0), [0, 0]), (torch.ones(3), [0, 2, 3])):
        table = NegativeTable.of(labels, torch.tensor(offsets))
        assert len(table.positives) == len(table.queries) == 0
        chosen = torch.arange(len(offsets) - 1)
        draws = table.sample_list_draws(chosen, generator=seeded())
        assert draws.negatives.shape == (0, 10)
        assert table.sample_list_draws(chosen, max_draws=None, generator=seeded()).negatives.shape == (0, 0)


def check_members(draws: Draws, labels: Tensor) -> None:
    owner = torch.bucketize(torch.arange(12), OFFSETS[1:], right=True)
    assert (owner[draws.positives] == draws.queries).all()
    assert (owner[draws.negatives] == draws.queries[:, None]).all()
    assert (labels[draws.negatives] < labels[draws.positives][:, None]).all()


def test_draws_are_lower_labelled_documents_of_the_same_query() -> None:
    for max_draws in [1, 5, None]:
        table = NegativeTable.of(LABELS, OFFSETS)
        for draws in (
            table.sample_triplets(300, max_draws=max_draws, generator=seeded()),
            table.sample_list_draws(torch.tensor([4, 0, 2, 0]), max_draws=max_draws, generator=seeded()),
        ):
            check_members(draws, LABELS)
            expected = draws.num_negatives if max_draws is None else torch.full_like(draws.num_negatives, max_draws)
            assert torch.equal(draws.num_draws, expected)
        assert draws.queries.tolist() == [4, 4, 0, 0, 0, 0]  # query 2 has one document, query 0 comes twice


def with_uniforms(numbers: list[Tensor], draw: Callable[[], Draws]) -> Draws:
    """Draws by given numbers in [0, 1), in place of those of the generator."""
    given = iter(numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warp, "_rand", lambda *_: next(given))
        return draw()


def test_uniforms_at_the_edges_stay_inside() -> None:
    table = NegativeTable.of(LABELS, OFFSETS)
    for u in (0.0, 1 - 2**-53, 1.0):  # 1.0 itself can come of a conversion to float32
        edge = torch.full((3, 2), u, dtype=torch.float64)
        for both in (edge, edge.float()):
            draws = with_uniforms([both, both], lambda: table.sample_triplets(3, max_draws=2, generator=seeded()))
            check_members(draws, LABELS)


def test_same_generator_same_result_and_another_another() -> None:
    table = NegativeTable.of(LABELS, OFFSETS)

    def same(a: Draws, b: Draws) -> bool:
        return all(torch.equal(getattr(a, name), getattr(b, name)) for name in Draws.__dataclass_fields__)

    assert same(table.sample_triplets(30, generator=seeded(3)), table.sample_triplets(30, generator=seeded(3)))
    assert not same(table.sample_triplets(30, generator=seeded(3)), table.sample_triplets(30, generator=seeded(4)))
    lists = torch.tensor([0, 4])
    one, two, three = (table.sample_list_draws(lists, generator=seeded(s)) for s in (3, 3, 4))
    assert same(one, two)
    assert not same(one, three)


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    table = NegativeTable.of(LABELS, OFFSETS)
    table.sample_triplets(5, generator=seeded())
    table.sample_list_draws(torch.tensor([0]), generator=seeded())
    assert torch.equal(before, torch.get_rng_state())


def chi_square(seen: Tensor, expected: Tensor) -> float:
    return float(((seen - expected) ** 2 / expected).sum())


def test_draws_follow_the_truncated_geometric_law() -> None:
    """P(n = j) = (1 − s)^{j−1} s for j ≤ T, and (1 − s)^T for none; s = share of violators among 10 negatives."""
    for violators, bound in [(1, 24.3), (3, 24.3), (7, 24.3)]:
        T, total = 6, 40_000
        labels, offsets = torch.cat([torch.zeros(10), torch.ones(1)]), torch.tensor([0, 11])
        scores = torch.full((11,), -5.0)
        scores[:violators], scores[10] = 1.0, 0.0
        draws = NegativeTable.of(labels, offsets).sample_triplets(total, max_draws=T, generator=seeded(7))
        found = warp_loss(scores[draws.positives], scores[draws.negatives], draws.num_negatives, margin=0.1)
        s = violators / 10
        law = torch.tensor([(1 - s) ** (j - 1) * s for j in range(1, T + 1)] + [(1 - s) ** T])
        outcome = torch.where(found.violator >= 0, found.violator, T)
        seen = torch.bincount(outcome, minlength=T + 1).float()
        # 7 classes, 6 degrees of freedom: a chi-square above 22.5 has probability .001, above 24.3 about .0005.
        assert chi_square(seen, law * total) < bound
        hit = found.violator >= 0
        which = draws.negatives[hit].gather(1, found.violator[hit][:, None])[:, 0]
        share = torch.bincount(which, minlength=violators).float()
        assert len(share) == violators  # only violators are found, each as often as the others
        assert chi_square(share, torch.full((violators,), float(hit.sum()) / violators)) < bound


def test_queries_and_positives_are_drawn_evenly() -> None:
    table = NegativeTable.of(LABELS, OFFSETS)
    draws = table.sample_triplets(30_000, max_draws=1, generator=seeded(5))
    assert table.queries.tolist() == [0, 1, 4]  # the third has one document, the fourth equal labels
    sizes = table.positive_offsets.diff()
    owner = torch.bucketize(table.positives, OFFSETS[1:], right=True)
    expected = 30_000 / (3 * sizes[owner].float())
    seen = torch.bincount(draws.positives, minlength=12)[table.positives].float()
    assert chi_square(seen, expected) < 20.5  # 4 degrees of freedom, p = .0004


def every_triplet(table: NegativeTable, max_draws: int) -> Draws:
    mesh = torch.cartesian_prod(*[GRID] * (2 + max_draws))
    numbers = [mesh[:, :2], mesh[:, 2:]]
    return with_uniforms(numbers, lambda: table.sample_triplets(len(mesh), max_draws=max_draws, generator=seeded()))


def test_both_ways_to_batch_have_exactly_the_expected_gradient() -> None:
    """Every choice is enumerated on a grid that all counts divide, so the means are the expectations themselves."""
    kappa, _, scores = model()
    table, T = NegativeTable.of(LABELS, OFFSETS), 2
    expected = reference.expected_gradient(scores, kappa, LABELS, OFFSETS, MARGIN, T)
    assert expected.abs().sum() > 0
    draws = every_triplet(table, T)
    torch.testing.assert_close(gradient(draws, scores, kappa) / len(draws.queries), expected)
    mesh = torch.cartesian_prod(GRID, GRID)
    lists = torch.zeros_like(expected)
    for u in mesh:
        numbers = [u.expand(len(table.positives), 2)]
        batch = with_uniforms(numbers, lambda: table.sample_list_draws(table.queries, max_draws=2, generator=seeded()))
        lists += gradient(batch, scores, kappa)
    torch.testing.assert_close(lists / (len(mesh) * len(table.queries)), expected)


def test_both_ways_to_batch_agree_in_a_seeded_simulation() -> None:
    kappa, _, scores = model()
    table, T = NegativeTable.of(LABELS, OFFSETS), 4
    expected = reference.expected_gradient(scores, kappa, LABELS, OFFSETS, MARGIN, T)
    num = 60_000
    triplets = gradient(table.sample_triplets(num, max_draws=T, generator=seeded(1)), scores, kappa) / num
    queries = table.queries[torch.randint(0, 3, (num,), generator=seeded(2))]
    draws = table.sample_list_draws(queries, max_draws=T, generator=seeded(3))
    lists = gradient(draws, scores, kappa) / num
    for found in (triplets, lists):
        assert (found - expected).abs().max() < 5 * 2.0 / math.sqrt(num)  # terms are below 2 in size


def test_the_expectation_does_not_depend_on_the_order_of_documents() -> None:
    kappa, _, scores = model()
    order = torch.tensor([3, 1, 0, 2, 5, 4, 6, 8, 7, 11, 9, 10])  # within queries
    draws = every_triplet(NegativeTable.of(LABELS, OFFSETS), 1)
    turned = every_triplet(NegativeTable.of(LABELS[order], OFFSETS), 1)
    torch.testing.assert_close(gradient(draws, scores, kappa), gradient(turned, scores[order], kappa[order]))


def test_errors_name_argument_rule_and_value() -> None:
    pos, neg, count = torch.zeros(2), torch.zeros(2, 3), torch.tensor([3, 3])
    with pytest.raises(LGMMLError, match=r"`margin` must be positive, got 0"):
        warp_loss(pos, neg, count, margin=0)
    with pytest.raises(LGMMLError, match=r"`pos_scores` must have shape \(\*,\), got \(2, 3\)"):
        warp_loss(neg, neg, count, margin=1)
    with pytest.raises(LGMMLError, match=r"`neg_scores` must have shape \(2, \*\), got \(1, 3\)"):
        warp_loss(pos, neg[:1], count, margin=1)
    with pytest.raises(LGMMLError, match=r"`num_negatives` must have shape \(2,\), got \(1,\)"):
        warp_loss(pos, neg, count[:1], margin=1)
    with pytest.raises(LGMMLError, match=r"`num_draws` must have shape \(2,\), got \(1,\)"):
        warp_loss(pos, neg, count, margin=1, num_draws=count[:1])
    with pytest.raises(LGMMLError, match=r"`weights` must have shape \(2,\), got \(1,\)"):
        warp_loss(pos, neg, count, margin=1, weights=torch.ones(1))
    with pytest.raises(LGMMLError, match=r"`pos_scores` must be finite, got nan"):
        warp_loss(pos * torch.nan, neg, count, margin=1)
    with pytest.raises(LGMMLError, match=r"`neg_scores` must be finite, got nan"):
        warp_loss(pos, neg * torch.nan, count, margin=1)
    with pytest.raises(LGMMLError, match=r"`max_rank` must be at least 0, got -1"):
        rank_weight_table(-1)
    with pytest.raises(LGMMLError, match=r"`negatives` must be one of 'lower', 'zero', got 'low'"):
        NegativeTable.of(LABELS, OFFSETS, negatives="low")
    with pytest.raises(LGMMLError, match=r"`offsets` must start at 0, got 1"):
        NegativeTable.of(LABELS, torch.tensor([1, 12]))
    table = NegativeTable.of(LABELS, OFFSETS)
    with pytest.raises(LGMMLError, match=r"`max_draws` must be positive, got 0"):
        table.sample_triplets(1, max_draws=0, generator=seeded())
    with pytest.raises(LGMMLError, match=r"`num` must be at least 0, got -1"):
        table.sample_triplets(-1, generator=seeded())
    empty = NegativeTable.of(torch.ones(2), torch.tensor([0, 2]))
    with pytest.raises(DataError, match="no query has a positive and a lower-labelled document"):
        empty.sample_triplets(1, generator=seeded())
