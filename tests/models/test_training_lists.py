"""What a preprocessing asks of its training lists: the same in memory, from files, and of several processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.functional.features import OrderlessSum, block_moments, block_ranges
from lgmml_torch.models.preprocess import base
from lgmml_torch.models.preprocess.base import Preprocess, TrainingLists
from lgmml_torch.models.preprocess.compose import Chain, Concat, all_views, list_rank_features
from lgmml_torch.models.preprocess.steps import (
    PCA,
    Clip,
    ListStandardize,
    Norm2,
    Quantile,
    Ramps,
    RemoveConstant,
    SignedLog1p,
    Standardize,
)
from lgmml_torch.ragged import RankingData
from tests.processes import in_processes, own_part
from tests.reference.preprocess import exact_moments

pytestmark = pytest.mark.usefixtures("one_thread")


def column_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return TrainingLists(x, torch.tensor([0, len(x)])).moments


def rows(seed: int, shape: tuple[int, int], scale: float = 1.0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape) * scale)


class TestOrderlessSum:
    def test_it_is_the_sum(self) -> None:
        for count in [1, 2, 3, 100, 5000]:
            values = rows(count, (count, 3)).clamp(-1, 1)
            total = OrderlessSum(count, values[0])
            total.add(values)
            exact = [float(sum(Fraction(value) for value in column)) for column in values.mT.tolist()]
            torch.testing.assert_close(total.total, torch.tensor(exact, dtype=torch.float64), rtol=1e-15, atol=1e-19)

    def test_order_and_groups_do_not_matter(self) -> None:
        values = rows(0, (1000, 4)).clamp(-1, 1) * torch.tensor([1.0, 1e-8, 1e-15, 1.0])
        values[:, 3] = torch.tensor([1.0, -1.0]).repeat(500) * (1 - 2.0**-53)
        found = set()
        for seed in range(20):
            order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))
            total = OrderlessSum(1000, values[0])
            for part in values[order].split(1 + 37 * seed):
                total.add(part)
            found.add(tuple(total.total.tolist()))
        assert len(found) == 1
        assert found.pop()[3] == 0

    def test_nothing_is_rounded_at_the_limit(self) -> None:
        """As many ones as were announced: the largest sums there can be are whole numbers that float64 knows."""
        for count in (1, 2, 3, 4, 1023, 1024, 1025):
            total = OrderlessSum(count, torch.zeros(1))
            total.add(torch.ones(count, 1, dtype=torch.float64))
            assert total.total.item() == count
            assert float(total.parts.abs().max()) < 2.0**53


class TestMoments:
    def test_they_are_those_of_exact_arithmetic(self) -> None:
        for dtype in [torch.float32, torch.float64]:
            for columns in [
                [0.0, 1.0, 2.0],
                [1e8, 1e8 + 64, 1e8 - 64],
                [-1e30, 1e30, 1.0],
                [1e-30, 2e-30, 3e-30],
                [5.0],
                [0.1, 0.1, 0.1],
                [0.0] * 999 + [1.0],
                [1.6e8, *([1.0] * 500)],
            ]:
                x = torch.tensor(columns, dtype=dtype)[:, None]
                mean, deviation = column_moments(x)
                expected = exact_moments(x[:, 0].tolist())
                assert float(mean) == pytest.approx(expected[0], rel=1e-14, abs=1e-15 * float(x.abs().max()))
                assert float(deviation) == pytest.approx(expected[1], rel=1e-9)
                assert (float(deviation) == 0) == (len(set(x[:, 0].tolist())) == 1)

    def test_the_largest_numbers_do_not_overflow(self) -> None:
        most = torch.finfo(torch.float64).max
        mean, deviation = column_moments(torch.tensor([[most], [-most]], dtype=torch.float64))
        assert (float(mean), float(deviation)) == (0.0, most)

    def test_order_does_not_matter(self) -> None:
        x = rows(2, (2000, 5), 1e3).float()
        order = torch.randperm(2000, generator=torch.Generator().manual_seed(1))
        for one, other in zip(column_moments(x), column_moments(x[order]), strict=True):
            assert one.equal(other)

    def test_blocks_do_not_matter(self) -> None:
        for sizes in [[7, 1, 0, 12], [20], [1] * 20]:
            x = rows(3, (20, 3)).float()
            blocks = [block for block in x.split(sizes) if len(block)]
            found = block_moments(blocks, 20, block_ranges(blocks, x[0]))
            torch.testing.assert_close(found, column_moments(x), rtol=1e-14, atol=1e-15)

    def test_weighted_sums_over_several_blocks(self) -> None:
        g = torch.Generator().manual_seed(0)
        x, weights = torch.rand(400_000, 7, generator=g), torch.rand(400_000, generator=g)
        lists = TrainingLists(x, torch.tensor([0, len(x)]))
        assert len(list(lists.blocks())) > 1
        torch.testing.assert_close(lists.weighted_sum(weights), weights.double() @ x.double(), rtol=1e-10, atol=0)

    def test_weighted_sums(self) -> None:
        x, weights = rows(4, (30, 4), 100.0).float(), rows(5, (30, 1))[:, 0]
        x[:, 3] = 0
        found = TrainingLists(x, torch.tensor([0, 30])).weighted_sum(weights)
        torch.testing.assert_close(found, weights @ x.double(), rtol=1e-12, atol=1e-10)
        assert found[3] == 0
        assert TrainingLists(x, torch.tensor([0, 30])).weighted_sum(0 * weights).eq(0).all()


DATA = letor_like(24, 9, seed=3, num_documents=200)
STEPS: dict[str, Callable[[], Preprocess]] = {
    "norm2": Norm2,
    "standardize": Standardize,
    "constant": RemoveConstant,
    "quantile": Quantile,
    "normal": lambda: Quantile("normal", max_knots=16),
    "ramps": lambda: Ramps(3),
    "list ranks": list_rank_features,
    "all views": lambda: all_views(ramps=2),
    "mixed": lambda: Chain([SignedLog1p(), Concat([Standardize(), ListStandardize()]), RemoveConstant(), Clip(2.0)]),
    "empty": lambda: Chain([]),
}


def fitted(name: str, owner: list[int] | None, block: int, column: int) -> dict[str, Any]:
    base.BLOCK_VALUES, base.COLUMN_VALUES = block, column
    data = own_part(DATA, owner)
    preprocess = STEPS[name]().fit_lists(TrainingLists.of(data))
    return dict(preprocess.state_dict())


class TestSharedLists:
    @pytest.fixture(autouse=True)
    def sizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that `fitted` sets in this process are set back."""
        for name in ("BLOCK_VALUES", "COLUMN_VALUES"):
            monkeypatch.setattr(base, name, getattr(base, name))

    def test_from_files_as_in_memory(self) -> None:
        for name in STEPS:
            for block, column in [(1, 1), (200, 500), (1 << 20, 1 << 23)]:
                expected = STEPS[name]().fit(DATA.features, DATA.offsets).state_dict()
                found = fitted(name, None, block, column)
                assert found.keys() == expected.keys()
                torch.testing.assert_close(found, dict(expected))

    def test_of_several_processes_as_of_one(self) -> None:
        for count, owner in [(2, None), (3, [0] * 20 + [2] * 4), (4, [3, 1, 2, 0] * 6)]:
            expected = {name: make().fit(DATA.features, DATA.offsets).state_dict() for name, make in STEPS.items()}
            for found in in_processes(count, every_step, owner):
                for name, state in found.items():
                    torch.testing.assert_close(state, dict(expected[name]))

    def test_principal_components_agree_up_to_rounding(self) -> None:
        expected = PCA(4).fit(DATA.features, DATA.offsets)
        found = in_processes(2, components)
        assert found[0].equal(found[1])
        torch.testing.assert_close(found[0], expected.directions, rtol=1e-4, atol=1e-5)

    def test_bad_values_end_all_processes_with_the_same_words(self) -> None:
        said = "`features` must be finite, got values that are not"
        assert in_processes(2, said_of_bad_values) == [said] * 2

    def test_what_a_step_made_infinite_is_noticed_by_the_next(self) -> None:
        for then in [Quantile, Ramps, PCA, Norm2, RemoveConstant]:
            x = torch.tensor([[3.4e38], *[[-3.4e38]] * 9])
            lists = RankingData.from_arrays(x, torch.zeros(10), group=[4, 6])
            shared = own_part(lists)
            for data in (lists, shared):
                with pytest.raises(LGMMLError, match="`features` must be finite"):
                    Chain([Standardize(), then()]).fit_lists(TrainingLists.of(data))

    def test_columns_are_shared_out(self) -> None:
        for documents, features, owner, widths in [
            (10, 136, [0, 1, 2, 3], [34] * 4),
            (300, 7, [0, 1, 2, 3], [2, 2, 2, 1]),
            (300, 40, [1] * 4, [10] * 4),
        ]:
            found = in_processes(4, columns_looked_at, documents, features, owner)
            assert found == widths

    def test_no_rows_anywhere(self) -> None:
        none = own_part(DATA.select([]))
        with pytest.raises(LGMMLError, match="must have rows and columns to fit 'norm2'"):
            Norm2().fit_lists(TrainingLists.of(none))


def every_step(owner: list[int] | None) -> dict[str, Any]:
    return {name: fitted(name, owner, 300, 450) for name in STEPS}


def columns_looked_at(documents: int, features: int, owner: list[int]) -> int:
    x = torch.arange(4.0 * documents * features).view(4 * documents, features)
    data = own_part(RankingData.from_arrays(x, torch.zeros(len(x)), group=[documents] * 4), owner)
    seen: list[float] = []
    lists = TrainingLists.of(data)
    found = lists.per_column(lambda column: seen.append(column[0]) or np.array([column.sum()]))  # type: ignore[func-returns-value]
    assert np.concatenate(found).tolist() == x.sum(0).tolist()
    return len(seen)


def components() -> Tensor:
    data = own_part(DATA)
    return PCA(4).fit_lists(TrainingLists.of(data)).directions


def said_of_bad_values() -> str:
    features = DATA.features.clone()
    features[-1, 2] = math.inf
    data = own_part(DATA.replace(features=features))
    try:
        Norm2().fit_lists(TrainingLists.of(data))
    except LGMMLError as error:
        return str(error)
    return "nothing"
