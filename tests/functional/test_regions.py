"""Regions and anchors against plain loops, with ties, single positives and pools."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.functional import regions as module
from lgmml_torch.functional.regions import (
    Regions,
    choose_anchors,
    regions_from_queries,
    sample_regions,
    usable_queries,
)
from lgmml_torch.segments import offsets_from_sizes
from tests.reference import anchors as reference

TWO = torch.tensor([0, 2])
GRADES = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0])


def ragged(seed: int, num_queries: int = 8, most: int = 14, dim: int = 3):
    g = torch.Generator().manual_seed(seed)
    offsets = offsets_from_sizes(torch.randint(0, most, (num_queries,), generator=g))
    num = int(offsets[-1])
    labels = GRADES[torch.randint(0, len(GRADES), (num,), generator=g)]
    features = torch.randn(num, dim, generator=g, dtype=torch.float64)
    if seed % 2:  # duplicate documents, so that distances tie
        features = features.round()
    return features, labels, offsets


def parts(values: Tensor, offsets: Tensor) -> list[list[int]]:
    return [values[int(a) : int(b)].tolist() for a, b in itertools.pairwise(offsets)]


def draw(labels: Tensor, offsets: Tensor, count: int = 5, pool: int = 1, seed: int = 0) -> Regions:
    return sample_regions(labels, offsets, count, pool=pool, generator=torch.Generator().manual_seed(seed))


def test_regions_equal_the_loop() -> None:
    for seed in range(6):
        for pool in [1, 3]:
            _, labels, offsets = ragged(seed)
            regions = draw(labels, offsets, count=4, pool=pool, seed=seed)
            groups = parts(regions.queries, regions.query_offsets)
            highs, lows = (
                parts(regions.positives, regions.positive_offsets),
                parts(regions.negatives, regions.negative_offsets),
            )
            for queries, high, low in zip(groups, highs, lows, strict=True):
                expected_high, expected_low = [], []
                for q in queries:
                    start, end = int(offsets[q]), int(offsets[q + 1])
                    up, down = reference.high_and_low(labels[start:end].tolist())
                    expected_high += [start + i for i in up]
                    expected_low += [start + i for i in down]
                assert (high, low) == (expected_high, expected_low)
                assert high
                assert low
                assert not set(high) & set(low)


def test_high_and_low_relevance_by_hand() -> None:
    for labels, high, low in [
        ([0, 1], [1], [0]),
        ([0, 0, 1, 2, 2], [3, 4], [0, 1]),  # median 1.5
        ([0, 1, 2], [1, 2], [0]),  # only one document above 1.5: all positives
        ([1, 2, 3, 3], [2, 3], [0]),  # no zeros: the lowest label
        ([0, 1, 2, 3, 4, 4], [3, 4, 5], [0]),  # median 2.5
        ([0, 1, 2, 3, 3], [2, 3, 4], [0]),  # median 2
        ([0.0, 0.25, 0.75, 0.75], [2, 3], [0]),  # fractional labels
        ([-1, 0, 1], [1, 2], [0]),
    ]:
        y, offsets = torch.tensor(labels, dtype=torch.float32), torch.tensor([0, len(labels)])
        regions = regions_from_queries(y, offsets, torch.tensor([0]), torch.tensor([0, 1]))
        assert (regions.positives.tolist(), regions.negatives.tolist()) == (high, low)


def test_a_region_of_no_queries_is_empty_wherever_it_stands() -> None:
    found = regions_from_queries(torch.tensor([0.0, 1.0]), TWO, torch.tensor([0]), torch.tensor([0, 0, 1, 1]))
    assert len(found) == 3
    assert parts(found.positives, found.positive_offsets) == [[], [1], []]
    assert parts(found.negatives, found.negative_offsets) == [[], [0], []]


def test_regions_do_not_depend_on_the_order_of_documents() -> None:
    _, labels, offsets = ragged(2)
    g = torch.Generator().manual_seed(9)
    shuffle = torch.cat([int(a) + torch.randperm(int(b - a), generator=g) for a, b in itertools.pairwise(offsets)])
    one, two = draw(labels, offsets), draw(labels[shuffle], offsets)
    assert torch.equal(one.queries, two.queries)
    for a, b in zip(
        parts(one.positives, one.positive_offsets), parts(shuffle[two.positives], two.positive_offsets), strict=True
    ):
        assert set(a) == set(b)


def test_usable_queries_have_two_labels() -> None:
    labels = torch.tensor([1.0, 2.0, 2.0, 0.0, 1.0, 0.0, 0.0])
    found = usable_queries(labels, torch.tensor([0, 1, 3, 3, 5, 7]))
    assert found.tolist() == [False, False, False, True, False]
    assert usable_queries(torch.zeros(0), torch.tensor([0])).shape == (0,)


def test_no_query_is_used_twice_while_there_are_enough() -> None:
    labels, offsets = torch.tensor([0.0, 1.0] * 20), torch.arange(0, 41, 2)
    assert sorted(draw(labels, offsets, count=99).queries.tolist()) == list(range(20))  # fewer regions, none twice
    assert len(draw(labels, offsets, count=7)) == 7
    pooled = draw(labels, offsets, count=5, pool=4)
    assert sorted(pooled.queries.tolist()) == list(range(20))


def test_pools_beyond_the_queries_are_different_and_hold_different_queries() -> None:
    labels, offsets = torch.tensor([0.0, 1.0] * 4), torch.arange(0, 9, 2)
    regions = draw(labels, offsets, count=50, pool=3)
    groups = parts(regions.queries, regions.query_offsets)
    assert len(groups) == 4  # all there are
    assert len({tuple(group) for group in groups}) == 4
    assert all(len(set(group)) == 3 for group in groups)
    assert len(draw(labels, offsets, count=50, pool=9)) == 1


def test_same_generator_same_regions() -> None:
    _, labels, offsets = ragged(0, num_queries=30)
    assert torch.equal(draw(labels, offsets, seed=4).queries, draw(labels, offsets, seed=4).queries)
    assert not torch.equal(draw(labels, offsets, seed=4).queries, draw(labels, offsets, seed=5).queries)


def test_queries_are_drawn_evenly() -> None:
    labels, offsets = torch.tensor([0.0, 1.0] * 5 + [0.0]), torch.tensor([0, 2, 4, 6, 8, 10, 11])
    g = torch.Generator().manual_seed(0)
    hits = torch.zeros(6)
    for _ in range(1000):
        hits[sample_regions(labels, offsets, 1, generator=g).queries] += 1
    assert hits[5] == 0
    assert ((hits[:5] - 200) ** 2 / 200).sum() < 18.5  # chi-square with 4 degrees of freedom, p = .001


def test_anchors_equal_the_loop() -> None:
    for seed in range(8):
        for pool, candidates in [(1, "positives"), (3, "positives"), (3, "top")]:
            features, labels, offsets = ragged(seed)
            regions = draw(labels, offsets, pool=pool, seed=seed)
            F = torch.randn(len(regions), 3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            found = choose_anchors(features, labels, offsets, regions, F, k=4, candidates=candidates)
            groups = parts(regions.queries, regions.query_offsets)
            for r, chosen in enumerate(parts(regions.positives, regions.positive_offsets)):
                if candidates == "top":
                    chosen = [i for i in chosen if labels[i] == max(labels[j] for j in chosen)]
                tried = [
                    reference.quality(features[i], i, features, labels, offsets, groups[r], F[r], 4) for i in chosen
                ]
                best = reference.first_best(tried)
                assert int(found.rows[r]) == chosen[best]
                assert float(found.ndcg[r]) == pytest.approx(tried[best], nan_ok=True)
            assert torch.equal(found.points, features[found.rows])


def test_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels, offsets = ragged(1)
    regions = draw(labels, offsets, pool=3)
    F = torch.eye(3).expand(len(regions), 3, 3)
    whole = choose_anchors(features, labels, offsets, regions, F)
    monkeypatch.setattr(module, "_BLOCK", 7)
    small = choose_anchors(features, labels, offsets, regions, F)
    assert torch.equal(whole.rows, small.rows)
    torch.testing.assert_close(whole.ndcg, small.ndcg, equal_nan=True)


def test_a_single_positive_is_its_own_anchor_and_cannot_be_judged() -> None:
    features, labels, offsets = torch.randn(3, 2), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0, 3])
    found = choose_anchors(features, labels, offsets, draw(labels, offsets), torch.eye(2)[None])
    assert found.rows.tolist() == [2]
    assert found.ndcg.isnan().all()


def test_equal_candidates_are_decided_by_row_order() -> None:
    features = torch.tensor([[0.0], [5.0], [5.0], [5.0]])
    labels, offsets = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 4])
    found = choose_anchors(features, labels, offsets, draw(labels, offsets), torch.ones(1, 1, 1))
    assert found.rows.tolist() == [1]


def test_distances_equal_on_paper_are_a_tie() -> None:
    """|0.4 − 0.3| and |0.3 − 0.2| differ in the last bit; the earlier row must come first all the same."""
    for places in [(0.2, 0.4), (0.4, 0.2)]:
        for first_label in [0.0, 1.0]:
            x = torch.tensor([[places[0]], [places[1]], [0.3]], dtype=torch.float64)
            y, offsets = torch.tensor([first_label, 1 - first_label, 2.0]), torch.tensor([0, 3])
            assert abs(x[0] - x[2]) != abs(x[1] - x[2])
            region = regions_from_queries(y, offsets, torch.tensor([0]), torch.tensor([0, 1]))
            found = choose_anchors(x, y, offsets, region, torch.ones(1, 1, 1, dtype=torch.float64), candidates="top")
            assert found.rows.tolist() == [2]
            assert found.ndcg.item() == pytest.approx(1.0 if first_label else 1 / math.log2(3))


def test_equal_qualities_are_a_tie_whatever_their_last_bit() -> None:
    best = [
        int(module._first_best(torch.tensor(values, dtype=torch.float64)))
        for values in (
            [0.3, 0.7, 0.7 + 2e-16, 0.7],
            [0.3, 0.7, 0.7 + 1e-9],
            [math.nan, 0.0, 0.0],
            [math.nan, math.nan],
        )
    ]
    assert best == [1, 2, 1, 0]


def test_anchors_follow_their_documents_when_rows_are_permuted() -> None:
    features, labels, offsets = ragged(4)  # no ties
    regions = draw(labels, offsets)
    shuffle = torch.cat([int(a) + torch.arange(int(b - a)).flip(0) for a, b in itertools.pairwise(offsets)])
    F = torch.randn(len(regions), 3, 2, generator=torch.Generator().manual_seed(1))
    other = regions_from_queries(labels[shuffle], offsets, regions.queries, regions.query_offsets)
    one = choose_anchors(features, labels, offsets, regions, F, k=20)
    two = choose_anchors(features[shuffle], labels[shuffle], offsets, other, F, k=20)
    torch.testing.assert_close(one.ndcg, two.ndcg, equal_nan=True)


def test_the_norm_decides_the_order() -> None:
    features, labels, offsets = ragged(2, num_queries=30)
    regions = draw(labels, offsets, count=20)
    F = torch.randn(len(regions), 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    trace = choose_anchors(features, labels, offsets, regions, F, norm="trace")
    direct = choose_anchors(features, labels, offsets, regions, F @ F.mT)
    torch.testing.assert_close(trace.ndcg, direct.ndcg, equal_nan=True)


def test_extrapolated_anchors_equal_the_loop() -> None:
    for seed in range(4):
        features, labels, offsets = ragged(seed)
        regions = draw(labels, offsets, seed=seed)
        F = torch.randn(len(regions), 3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        real = choose_anchors(features, labels, offsets, regions, F)
        alphas = (0.0, 0.5, 2.0)
        moved = choose_anchors(features, labels, offsets, regions, F, alphas=alphas[1:])
        groups = parts(regions.queries, regions.query_offsets)
        lows = parts(regions.negatives, regions.negative_offsets)
        for r in range(len(regions)):
            row = int(real.rows[r])
            places = [features[row] + a * (features[row] - features[lows[r]].mean(dim=0)) for a in alphas]
            tried = [reference.quality(p, row, features, labels, offsets, groups[r], F[r], 10) for p in places]
            best = reference.first_best(tried)
            torch.testing.assert_close(moved.points[r], places[best])
            assert float(moved.ndcg[r]) == pytest.approx(tried[best], nan_ok=True)
        assert torch.equal(moved.rows, real.rows)


def test_extrapolation_never_ranks_worse_than_the_real_document() -> None:
    features, labels, offsets = ragged(6, num_queries=30)
    regions = draw(labels, offsets, count=20)
    F = torch.eye(3).expand(len(regions), 3, 3)
    real = choose_anchors(features, labels, offsets, regions, F)
    moved = choose_anchors(features, labels, offsets, regions, F, alphas=(0.5, 1.0, 2.0, 4.0))
    fine = ~real.ndcg.isnan()
    assert (moved.ndcg >= real.ndcg - 1e-12)[fine].all()
    assert not torch.equal(moved.points, real.points)
    still = choose_anchors(features, labels, offsets, regions, F, alphas=(0.0,))
    assert torch.equal(still.points, real.points)
    torch.testing.assert_close(still.ndcg, real.ndcg, equal_nan=True)


def test_no_regions() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    start = torch.zeros(1, dtype=torch.long)
    regions = Regions(empty, start, empty, start, empty, start)
    features, labels, offsets = torch.zeros(0, 3), torch.zeros(0), torch.tensor([0])
    found = choose_anchors(features, labels, offsets, regions, torch.zeros(0, 3, 3))
    assert found.points.shape == (0, 3)
    again = choose_anchors(features, labels, offsets, regions, torch.zeros(0, 3, 3), alphas=(0.5,))
    assert again.points.shape == (0, 3)


def test_errors_name_argument_rule_and_value(generator: torch.Generator) -> None:
    flat, offsets = torch.ones(4), torch.tensor([0, 2, 4])
    with pytest.raises(DataError, match="none of the 2 queries has documents of two different labels"):
        sample_regions(flat, offsets, 3, generator=generator)
    with pytest.raises(DataError, match="none of the 0 queries"):
        sample_regions(flat[:0], offsets[:1], 3, generator=generator)
    with pytest.raises(DataError, match=r"`queries` must have a positive and a lower-labelled document, got 1"):
        regions_from_queries(torch.tensor([0.0, 1, 1, 1]), offsets, torch.tensor([0, 1]), torch.tensor([0, 1, 2]))
    with pytest.raises(LGMMLError, match=r"`num_regions` must be positive, got 0"):
        sample_regions(flat, offsets, 0, generator=generator)
    with pytest.raises(LGMMLError, match=r"`pool` must be positive, got -1"):
        sample_regions(flat, offsets, 1, pool=-1, generator=generator)
    with pytest.raises(LGMMLError, match=r"`labels` must be finite, got nan at position \(1,\)"):
        usable_queries(torch.tensor([0.0, torch.nan]), torch.tensor([0, 2]))
    with pytest.raises(LGMMLError, match=r"`offsets` must end at the number of rows, 4, got 3"):
        usable_queries(flat, torch.tensor([0, 3]))
    with pytest.raises(LGMMLError, match=r"`query_offsets` must end at the number of rows, 1, got 2"):
        regions_from_queries(flat, offsets, torch.tensor([0]), torch.tensor([0, 2]))
    x, y, o = torch.randn(4, 2), torch.tensor([0.0, 1, 0, 1]), offsets
    regions, F = draw(y, o, count=2), torch.eye(2).expand(2, 2, 2)
    with pytest.raises(LGMMLError, match=r"`candidates` must be one of 'positives', 'top', got 'all'"):
        choose_anchors(x, y, o, regions, F, candidates="all")
    with pytest.raises(LGMMLError, match=r"`features` must have shape \(4, \*\), got \(3, 2\)"):
        choose_anchors(x[:3], y, o, regions, F)
    with pytest.raises(LGMMLError, match=r"`factors` must have shape \(2, 2, \*\), got \(1, 2, 2\)"):
        choose_anchors(x, y, o, regions, F[:1])
    with pytest.raises(LGMMLError, match=r"`features` must be finite, got inf"):
        choose_anchors(x.abs() / 0, y, o, regions, F)
    with pytest.raises(LGMMLError, match=r"`factors` must be finite, got nan"):
        choose_anchors(x, y, o, regions, F * torch.nan)
    with pytest.raises(LGMMLError, match=r"`k` must be positive, got 0"):
        choose_anchors(x, y, o, regions, F, k=0)
    with pytest.raises(LGMMLError, match=r"`alphas` must be finite, got inf at position \(1,\)"):
        choose_anchors(x, y, o, regions, F, alphas=(0.0, math.inf))


def test_thresholds_are_medians_of_distinct_positive_labels() -> None:
    """One positive label is its own median; equal labels count once; X₊ holds what reaches the median."""
    cases = [
        ([0, 3, 3], [3, 3]),
        ([1, 1, 2, 5, 5], [5, 5]),
        ([0, 1, 2, 2, 4], [2, 2, 4]),
        ([0, 1, 3, 4, 5, 5], [4, 5, 5]),
    ]
    for labels, expected in cases:
        one, values = torch.tensor([0, 1]), torch.tensor(labels).float()
        found = regions_from_queries(values, torch.tensor([0, len(labels)]), one[:1], one)
        assert values[found.positives].tolist() == expected


def test_more_regions_than_queries_are_one_of_each_query() -> None:
    labels, offsets = torch.tensor([0.0, 1.0]).repeat(30), torch.arange(0, 61, 2)
    for count in (30, 31, 40):
        found = sample_regions(labels, offsets, count, generator=torch.Generator().manual_seed(count))
        assert sorted(found.positives.tolist()) == list(range(1, 60, 2))
