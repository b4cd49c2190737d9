from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.features import (
    block_moments,
    block_ranges,
    interpolate_knots,
    list_ids,
    list_rank_percentiles,
    mid_rank_knots,
    pad_knots,
    ramp_knots,
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
    for budget in (131_072, 4000):
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
        for kept in (torch.float32, torch.float64):
            other = interpolate_knots(torch.from_numpy(x).to(dtype), knots.to(kept), levels.to(kept))
            assert other.dtype == dtype  # that of the features, whatever that of the knots
            np.testing.assert_allclose(other.numpy(), got.numpy(), atol=1e-6)


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


def moments(x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of the columns of ``x``, whose rows come in blocks of these sizes."""
    blocks = x.split(sizes)
    return block_moments(blocks, len(x), block_ranges(blocks, x[0]))


def test_moments_are_those_of_float64_whatever_the_scale(generator: torch.Generator) -> None:
    x = torch.randn(500, 6, generator=generator, dtype=torch.float64)
    x[:, 1] = x[:, 1] * 1e-12 + 5.0
    x[:, 2] *= 1e300
    x[:, 3] = 1e16
    x[:, 4] = torch.sign(x[:, 4] - 2) * 1.7e308
    x[:, 5] = x[:, 5].exp() * 1e-300
    mean, deviation = moments(x, [1, 199, 300])
    wide = x.numpy().astype(np.longdouble)
    np.testing.assert_allclose(mean.numpy(), wide.mean(0).astype(float), rtol=1e-12, atol=0)
    np.testing.assert_allclose(deviation.numpy(), wide.std(0).astype(float), rtol=1e-3, atol=0)
    np.testing.assert_allclose(deviation[[0, 2, 4, 5]].numpy(), wide.std(0)[[0, 2, 4, 5]].astype(float), rtol=1e-11)
    assert deviation[3] == 0
    assert mean[3] == 1e16


def test_moments_do_not_depend_on_the_order_of_rows_or_blocks(generator: torch.Generator) -> None:
    x = torch.randn(300, 4, generator=generator) * torch.tensor([1.0, 1e-20, 1e20, 3.0])
    first = moments(x, [300])
    for sizes in ([1] * 300, [150, 150], [299, 1]):
        shuffled = x[torch.randperm(300, generator=generator)]
        for found, expected in zip(moments(shuffled, sizes), first, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_moments_of_processes_are_put_together(generator: torch.Generator) -> None:
    x = torch.randn(300, 4, generator=generator)
    ranges = block_ranges([x], x[0])
    sent: list[torch.Tensor] = []

    def first(parts: torch.Tensor, how: str) -> torch.Tensor:
        sent.append(parts)
        return parts

    block_moments([x[100:]], 300, ranges, first)
    found = block_moments([x[:100]], 300, ranges, lambda parts, how: parts + sent.pop(0))
    for ours, expected in zip(found, block_moments([x], 300, ranges), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)


def test_ranges_of_processes_are_put_together() -> None:
    """What is in the hands of one process is combined with what others found, before anything is refused."""
    others = {"min": torch.tensor([-4.0]), "max": torch.tensor([10.0])}
    asked = []

    def combine(values: torch.Tensor, how: str) -> torch.Tensor:
        asked.append(how)
        if values.dim() == 0:  # whether all is finite
            return values
        return {"min": torch.minimum, "max": torch.maximum}[how](values, others[how].double())

    middle, half = block_ranges([torch.tensor([[1.0], [3.0]])], torch.zeros(1), combine)
    assert (middle.item(), half.item()) == (3.0, 7.0)
    assert asked == ["min", "min", "max"]
    nothing = block_ranges([], torch.zeros(1), combine)
    assert (nothing[0].item(), nothing[1].item()) == (3.0, 7.0)
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(LGMMLError, match="`features` must be finite"):
            block_ranges([torch.tensor([[bad], [1.0]])], torch.zeros(1))
        for row in ([bad], [bad, 1.0]):
            with pytest.raises(LGMMLError, match="`features` must be finite"):
                block_ranges([torch.tensor([row])], torch.zeros(len(row)))


def test_ramps_end_at_quantiles_and_at_the_commonest_value() -> None:
    rng = np.random.default_rng(3)
    column = rng.normal(size=1001).astype(np.float32)
    found = ramp_knots(column, 4)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.sort(column)[[0, 250, 500, 750, 1000]])
    column[:400] = 7.0  # more than a quarter
    rest = np.sort(column[400:])
    np.testing.assert_array_equal(ramp_knots(column, 4), np.sort([*rest[[0, 200, 400, 600]], 7.0]).astype(np.float32))
    few = np.array([1.0, 1.0, 2.0, 5.0, 5.0])
    np.testing.assert_array_equal(ramp_knots(few, 2), [1.0, 2.0, 5.0])
    np.testing.assert_array_equal(ramp_knots(np.array([1.0, 2.0, 3.0, 4.0]), 2), [1.0, 2.0, 4.0])
    # A value that has just its share is no commoner than the others.
    np.testing.assert_array_equal(ramp_knots(np.array([0.0, 0.0, 1.0, 2.0]), 2), [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(ramp_knots(np.array([0.0, 0.0, 1.0, 2.0, 3.0, 4.0]), 3), [0.0, 2.0, 4.0])


def test_tables_of_knots_are_as_wide_as_a_power_of_two() -> None:
    columns = [np.array([1.0, 2.0, 3.0]), np.array([5.0])]
    assert pad_knots(columns, torch.float64).tolist() == [[1.0, 2.0, 3.0, 3.0], [5.0] * 4]
    assert pad_knots([np.arange(4.0)], torch.float64).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert pad_knots([np.arange(1.0)], torch.float32).dtype == torch.float32
    assert pad_knots([], torch.float32).shape == (0, 1)


class _Views(torch.nn.Module):
    """Both views of a feature, as preprocessing exports them."""

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        knots, levels = torch.tensor([[0.0, 1.0, 2.0, 4.0]] * 2), torch.tensor([[0.0, 0.5, 0.75, 1.0]] * 2)
        return torch.cat([list_rank_percentiles(x, offsets), interpolate_knots(x, knots, levels)], dim=1)


def test_exported_views_take_lists_of_any_length(generator: torch.Generator) -> None:
    def lists(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(sum(sizes), 2, generator=generator).mul(3).round(), offsets_from_sizes(torch.tensor(sizes))

    any_rows, any_lists = torch.export.Dim("rows", min=2), torch.export.Dim("lists", min=2)
    exported = torch.export.export(_Views(), lists(4, 3), dynamic_shapes=({0: any_rows}, {0: any_lists})).module()
    for sizes in ((4, 3), (1, 0, 9, 2), (30,)):
        data = lists(*sizes)
        torch.testing.assert_close(exported(*data), _Views()(*data))
