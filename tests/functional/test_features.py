from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.features import (
    interpolate_knots,
    list_ids,
    list_rank_percentiles,
    mid_rank_knots,
    pad_knots,
)
from lgmml_torch.segments import offsets_from_sizes, segment_ids
from tests.reference import preprocess as reference

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(SIZES)
def test_list_ids_agree_with_segments(sizes: list[int]) -> None:
    offsets = offsets_from_sizes(torch.tensor(sizes))
    assert torch.equal(list_ids(offsets, sum(sizes)), segment_ids(offsets))


@settings(deadline=None)
@given(SIZES, st.sampled_from([torch.float32, torch.float64]), st.integers(1, 40), st.data())
def test_rank_percentiles_match_loops(sizes: list[int], dtype: torch.dtype, budget: int, data: st.DataObject) -> None:
    values = st.sampled_from([-3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 2.0, 3e38])
    x = data.draw(hnp.arrays(np.float32, (sum(sizes), 3), elements=values))
    offsets = offsets_from_sizes(torch.tensor(sizes))
    got = list_rank_percentiles(torch.from_numpy(x).to(dtype), offsets, max_elements=budget)
    expected = reference.per_list(x, offsets.numpy(), reference.rank_percentile)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), torch.from_numpy(expected), atol=1e-7, rtol=1e-6)


def test_rank_percentiles_of_several_blocks_match_loops(generator: torch.Generator) -> None:
    """More documents than are sorted together, in lists that end within, at and beyond a block."""
    sizes = torch.tensor([3000, 5000, 192, 1, 0, 8192, 9000, 70])
    x = torch.randn(int(sizes.sum()), 3, generator=generator).mul(50).round()  # ties
    offsets = offsets_from_sizes(sizes)
    expected = reference.per_list(x.numpy(), offsets.numpy(), reference.rank_percentile)
    for budget in (None, 4000):
        got = list_rank_percentiles(x, offsets, max_elements=budget)
        torch.testing.assert_close(got.double(), torch.from_numpy(expected), atol=1e-7, rtol=1e-6)


def test_rank_percentiles_depend_on_the_own_list_only(generator: torch.Generator) -> None:
    x = torch.randn(400, 5, generator=generator).mul(2).round()
    offsets = torch.tensor([0, 1, 80, 80, 250, 400])
    whole = list_rank_percentiles(x, offsets)
    for a, b in ((0, 1), (1, 80), (80, 250), (250, 400)):
        assert torch.equal(list_rank_percentiles(x[a:b], torch.tensor([0, b - a])), whole[a:b])
    shuffled = torch.cat([a + torch.randperm(b - a, generator=generator) for a, b in ((0, 80), (80, 250), (250, 400))])
    shuffled[:80] = torch.cat([torch.tensor([0]), 1 + torch.randperm(79, generator=generator)])
    assert torch.equal(list_rank_percentiles(x[shuffled], offsets), whole[shuffled])


def test_rank_percentiles_are_exactly_zero_on_ties_and_symmetric() -> None:
    x = torch.cat([torch.full((7, 1), 0.1), torch.arange(4.0)[:, None], torch.ones(1, 1)])
    ranks = list_rank_percentiles(x, torch.tensor([0, 7, 11, 12])).flatten()
    assert ranks[:7].eq(0).all()
    assert ranks[11] == 0
    assert torch.equal(ranks[7:11], -ranks[7:11].flip(0))
    assert ranks.abs().max() < 0.5


def test_rank_percentiles_of_nothing_and_of_nan() -> None:
    assert list_rank_percentiles(torch.zeros(0, 3), torch.tensor([0, 0])).shape == (0, 3)
    ranks = list_rank_percentiles(torch.tensor([[1.0], [torch.nan]]), torch.tensor([0, 2])).flatten()
    assert ranks.isnan().tolist() == [False, True]


def test_rank_percentiles_refuse_foreign_offsets() -> None:
    with pytest.raises(LGMMLError, match="`offsets` must end at the number of rows, 3, got 2"):
        list_rank_percentiles(torch.zeros(3, 1), torch.tensor([0, 2]))


def test_interpolation_matches_numpy() -> None:
    for dtype in [torch.float32, torch.float64]:
        rng = np.random.default_rng(0)
        train = np.stack([rng.normal(size=300), rng.integers(0, 5, 300), np.full(300, 4.0)], 1).astype(np.float32)
        x = np.concatenate([train[:50], rng.normal(size=(50, 3)) * 3]).astype(np.float32)
        pairs = [mid_rank_knots(column, 512) for column in train.T]
        knots, levels = (pad_knots([pair[i] for pair in pairs], dtype) for i in (0, 1))
        got = interpolate_knots(torch.from_numpy(x).to(dtype), knots, levels)
        assert got.dtype == dtype
        np.testing.assert_allclose(got.numpy(), reference.quantiles(train, x), atol=1e-6)


def test_interpolation_survives_extremes() -> None:
    knots, levels = torch.tensor([[-3.4e38, 3.4e38]]), torch.tensor([[0.25, 0.75]])
    x = torch.tensor([[-torch.inf], [-3.4e38], [0.0], [3.4e38], [torch.inf], [torch.nan]])
    got = interpolate_knots(x, knots, levels).flatten()
    assert got[:5].tolist() == [0.25, 0.25, 0.5, 0.75, 0.75]
    assert got[5].isnan()


def test_interpolation_refuses_an_odd_table() -> None:
    with pytest.raises(LGMMLError, match="`knots` must be a power of two wide, got 3"):
        interpolate_knots(torch.zeros(1, 1), torch.zeros(1, 3), torch.zeros(1, 3))


def test_thinned_knots_keep_the_promised_bound() -> None:
    for max_knots in [4, 16, 17, 100]:
        for atom in [0.0, 0.3, 0.9]:
            rng = np.random.default_rng(1)
            sample = np.exp(3 * rng.normal(size=4000))
            sample[rng.random(4000) < atom] = 2.5
            values, levels = mid_rank_knots(sample, max_knots)
            assert len(values) <= max_knots
            exact_values, exact_levels = mid_rank_knots(sample, 10**6)
            miss = np.abs(np.interp(exact_values, values, levels) - exact_levels)
            assert miss.max() < 1 / (max_knots // 2 - 1)
            assert values[0] == sample.min()
            assert values[-1] == sample.max()
