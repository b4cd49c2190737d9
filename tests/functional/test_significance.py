from __future__ import annotations

import math

import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.significance import bootstrap_interval, compare


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_interval_is_that_of_the_normal_law_for_many_queries() -> None:
    values = torch.rand(800, generator=seeded(), dtype=torch.float64)
    found = bootstrap_interval(values, generator=seeded(1), resamples=4000)
    half = 1.96 * float(values.std()) / math.sqrt(len(values))
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.low == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.1 * half)
    assert (found.counted, found.skipped, found.confidence) == (800, 0, 0.95)


def test_intervals_cover_the_true_mean_about_as_often_as_they_say() -> None:
    hits = 0
    for seed in range(150):
        sample = torch.rand(60, generator=seeded(seed), dtype=torch.float64)
        found = bootstrap_interval(sample, generator=seeded(seed), resamples=400, confidence=0.8)
        hits += found.low <= 0.5 <= found.high
    assert 105 <= hits <= 135  # 120 expected, standard deviation 5


def test_same_generator_same_interval_and_global_state_is_left_alone() -> None:
    values = torch.rand(50, generator=seeded())
    before = torch.random.get_rng_state()
    assert bootstrap_interval(values, generator=seeded(3)) == bootstrap_interval(values, generator=seeded(3))
    assert bootstrap_interval(values, generator=seeded(3)) != bootstrap_interval(values, generator=seeded(4))
    assert torch.equal(before, torch.random.get_rng_state())


def test_one_query_and_equal_values_have_no_width() -> None:
    for values in (torch.tensor([0.3]), torch.full((20,), 0.3)):
        found = bootstrap_interval(values, generator=seeded(), resamples=50)
        assert (found.low, found.high) == pytest.approx((found.mean, found.mean))


def test_skipped_queries_are_left_out_and_counted() -> None:
    values = torch.tensor([0.1, math.nan, 0.9, 0.5, math.nan])
    found = bootstrap_interval(values, generator=seeded())
    alone = bootstrap_interval(values[~values.isnan()], generator=seeded())
    assert (found.low, found.high) == (alone.low, alone.high)
    assert (found.counted, found.skipped) == (3, 2)
    assert found.mean == pytest.approx(0.5)


def test_comparison_counts_wins_ties_and_losses_over_common_queries() -> None:
    nan = math.nan
    a = torch.tensor([0.9, 0.5, 0.2, nan, 0.3, 0.7], dtype=torch.float64)
    b = torch.tensor([0.1, 0.5, 0.4, 0.8, nan, 0.7 + 1e-14], dtype=torch.float64)
    found = compare(a, b, generator=seeded())
    assert (found.wins, found.ties, found.losses) == (1, 2, 1)
    assert (found.difference.counted, found.difference.skipped) == (4, 2)
    assert found.mean_a == pytest.approx((0.9 + 0.5 + 0.2 + 0.7) / 4)
    assert found.mean_b == pytest.approx((0.1 + 0.5 + 0.4 + 0.7) / 4)
    assert found.difference.mean == pytest.approx(found.mean_a - found.mean_b)
    assert not found.significant


def test_comparison_turned_round_changes_sign() -> None:
    a, b = torch.rand(2, 80, generator=seeded(), dtype=torch.float64)
    there, back = compare(a, b, generator=seeded(1)), compare(b, a, generator=seeded(1))
    assert (there.wins, there.losses) == (back.losses, back.wins)
    assert there.difference.low == pytest.approx(-back.difference.high)
    assert there.difference.high == pytest.approx(-back.difference.low)


def test_pairing_sees_a_small_steady_gain_that_two_intervals_would_not() -> None:
    b = torch.rand(100, generator=seeded(), dtype=torch.float64)
    a = b + 0.01 + 0.005 * torch.randn(100, generator=seeded(1), dtype=torch.float64)
    assert compare(a, b, generator=seeded(2), resamples=500).significant
    alone = bootstrap_interval(a, generator=seeded(2), resamples=500)
    assert alone.low < float(b.mean()) < alone.high


GOOD = torch.tensor([0.1, 0.2])


def test_interval_refuses() -> None:
    for values, options, message in [
        (torch.zeros(2, 2), {}, r"`values` must have shape \(\*,\), got \(2, 2\)"),
        (torch.tensor([math.nan]), {}, r"`values` must hold at least one query that is not skipped \(NaN\), got 1"),
        (torch.zeros(0), {}, r"`values` must hold at least one query .*, got 0 queries"),
        (torch.tensor([math.inf]), {}, r"`values` must not be infinite, got inf"),
        (GOOD, {"confidence": 1.0}, r"`confidence` must lie between 0 and 1, got 1.0"),
        (GOOD, {"resamples": 0}, r"`resamples` must be at least 1, got 0"),
    ]:
        with pytest.raises(LGMMLError, match=message):
            bootstrap_interval(values, generator=seeded(), **options)


def test_comparison_refuses() -> None:
    for a, b, options, message in [
        (GOOD, torch.zeros(3), {}, r"`b` must have shape \(2,\), got \(3,\)"),
        (torch.zeros(()), GOOD, {}, r"`a` must have shape \(\*,\), got \(\)"),
        (GOOD, torch.tensor([-math.inf, 0.0]), {}, r"`b` must not be infinite, got -inf"),
        (torch.tensor([math.nan, 0.1]), torch.tensor([0.1, math.nan]), {}, r"`a` must hold at least one query"),
        (GOOD, GOOD, {"tolerance": -1.0}, r"`tolerance` must be at least 0, got -1.0"),
    ]:
        with pytest.raises(LGMMLError, match=message):
            compare(a, b, generator=seeded(), **options)


def test_many_resamples_are_drawn_some_at_a_time() -> None:
    """More draws than are held at once are the draws of one generator all the same."""
    values = torch.rand(1000, generator=seeded(), dtype=torch.float64)
    generator, means = seeded(5), []
    for _ in range(10_000):
        means.append(values[torch.randint(1000, (1000,), generator=generator)].mean())
    low, high = torch.quantile(torch.stack(means), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    found = bootstrap_interval(values, generator=seeded(5))
    assert (found.low, found.high) == pytest.approx((low, high))


def test_an_interval_that_ends_at_zero_decides_nothing() -> None:
    worse = torch.tensor([0.0, 1.0])
    for a, b in ((worse, torch.ones(2)), (torch.ones(2), worse)):
        found = compare(a, b, generator=seeded(0), resamples=500)
        assert 0 in (found.difference.low, found.difference.high)
        assert not found.significant
