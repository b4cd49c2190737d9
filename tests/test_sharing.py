"""Lists of a set that processes share: some of them, and all in one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.data.generated import letor_like
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import argsort_segments
from lgmml_torch.sharing import gather_lists, pick_lists, sample_lists
from tests.processes import in_processes, own_part

DATA = letor_like(24, 9, seed=3, num_documents=200)


class TestSharedData:
    """The same lists and values for any number of processes."""

    def test_a_sample_is_all_where_there_is_no_more(self) -> None:
        assert sample_lists(DATA, 200) is DATA
        assert sample_lists(own_part(DATA), 200).num_documents == 200

    @pytest.mark.parametrize(("count", "owner"), [(1, None), (2, None), (3, [0] * 20 + [2] * 4)])
    def test_a_sample_does_not_depend_on_processes(self, count: int, owner: list[int] | None) -> None:
        data = DATA.replace(query_weights=torch.arange(24.0), positions=torch.arange(200))
        expected = sample_lists(data, 120, seed=5)
        assert 0 < expected.num_documents <= 120
        for found in in_processes(count, sampled, owner) if count > 1 else [sampled(owner)]:
            assert found["own"] == found["expected"]
            for name in ("features", "labels", "offsets", "query_weights", "positions"):
                assert found[name].equal(getattr(expected, name)), name

    def test_a_sample_has_a_list(self) -> None:
        data = DATA.select([0, 1, 2])
        for seed in range(6):
            for lists in (data, own_part(data)):
                assert sample_lists(lists, 1, seed=seed).num_queries == 1

    def test_ties_are_broken_as_in_one_place(self) -> None:
        """By the order in which documents were handed in, which is not that of the rows."""
        data = RankingData.from_arrays(torch.zeros(40, 2), torch.arange(40) * 7 % 3, qid=torch.arange(40) % 4)
        expected = argsort_segments(torch.zeros(40), data.offsets, tie_order=data.order)
        assert expected.tolist() != list(range(40))
        for found in in_processes(2, tied):
            assert found.equal(expected)

    def test_words_and_names_stay(self) -> None:
        data = DATA.replace(feature_names=tuple("abcdefghi"), categories=(*(None,) * 8, ("x", "y")))
        part = pick_lists(own_part(data), torch.tensor([1, 3]))
        assert (part.feature_names, part.categories) == (data.feature_names, data.categories)

    def test_one_place_stays_one(self) -> None:
        assert gather_lists(DATA) is DATA
        assert gather_lists(own_part(DATA)).spread is None


def tied() -> Tensor:
    data = RankingData.from_arrays(torch.zeros(40, 2), torch.arange(40) * 7 % 3, qid=torch.arange(40) % 4)
    whole = gather_lists(own_part(data))
    return argsort_segments(torch.zeros(40), whole.offsets, tie_order=whole.order)


def sampled(owner: list[int] | None) -> dict[str, Any]:
    data = own_part(DATA.replace(query_weights=torch.arange(24.0), positions=torch.arange(200)), owner)
    part = sample_lists(data, 120, seed=5)
    assert part.spread is not None
    assert part.feature_names == data.feature_names
    whole: RankingData = gather_lists(part)
    expected = part.spread.own
    return {
        "own": part.sizes.tolist(),
        "expected": part.spread.sizes[expected].tolist(),
        **{name: getattr(whole, name) for name in ("features", "labels", "offsets", "query_weights", "positions")},
    }
