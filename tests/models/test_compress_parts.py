"""The parts of compression, each against its definition: lower ranks, costs, the greedy choice, the report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.functional.score import kernel
from lgmml_torch.models import compress as parts
from lgmml_torch.models.compress import LowRank, compress, distance_cost, rank_correlation
from lgmml_torch.models.encode import CategoryEncoder, CategorySettings
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from tests.doors import plain_chain, small_data, small_model
from tests.models.test_encode import lists as word_lists


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_metric(dim: int, rank: int, *, norm: str = "mahalanobis") -> tuple[LocalMetrics, Tensor]:
    block = MetricBlock(draw(1, dim), draw(1, dim, rank, seed=1), scales=torch.tensor([2.5]))
    return LocalMetrics([block], num_features=dim, norm=norm), draw(30, dim, seed=2)


class TestLowRank:
    @pytest.mark.parametrize(
        ("full", "ranks"),
        [
            (1, [1]),
            (4, [4]),
            (5, [2, 5]),
            (8, [2, 8]),
            (9, [2, 4, 9]),
            (16, [2, 4, 16]),
            (17, [2, 4, 8, 17]),
            (33, [2, 4, 8, 16, 33]),
        ],
    )
    def test_ranks_below_half_of_the_full_one_are_tried(self, full: int, ranks: list[int]) -> None:
        block = MetricBlock(draw(1, full), draw(1, full, full, seed=1))
        low = LowRank(LocalMetrics([block], num_features=full), draw(3, full, seed=2), "paper")
        assert sorted(low.values[0]) == sorted(low.stretch[0]) == ranks
        assert low.places == [(0, 0)]

    def test_the_ladder_doubles_up_to_256(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def plain(square: Tensor) -> SimpleNamespace:  # which directions lead does not matter here
            return SimpleNamespace(eigenvectors=torch.eye(len(square)).to(square))

        monkeypatch.setattr(torch.linalg, "eigh", plain)
        block = MetricBlock(draw(1, 2), draw(1, 2, 1025, seed=1))
        low = LowRank(LocalMetrics([block], num_features=2), draw(3, 2, seed=2), "paper")
        assert sorted(low.values[0]) == [2, 4, 8, 16, 32, 64, 128, 256, 1025]

    @pytest.mark.parametrize(
        ("full", "name", "norm"),
        [(5, "paper", "mahalanobis"), (8, "rbf", "mahalanobis"), (12, "paper", "trace"), (12, "rbf", "mahalanobis")],
    )
    def test_a_lower_rank_keeps_the_leading_directions_stretched(self, full: int, name: str, norm: str) -> None:
        bank, x = one_metric(full, full, norm=norm)
        low = LowRank(bank, x, name)
        block = bank.iter_blocks()[0]
        lens = block.factors[0] if norm == "mahalanobis" else block.metrics[0]
        images = (x - block.anchors[0]) @ lens
        turned = images @ torch.linalg.svd(images, full_matrices=False).Vh.T
        whole = turned.norm(dim=1)
        torch.testing.assert_close(low.values[0][full], kernel(whole / 2.5, name))
        assert low.stretch[0][full] == 1.0
        for rank in (rank for rank in (2, 4) if 2 * rank < full):
            part = turned[:, :rank].norm(dim=1)
            stretch = float((part * whole).sum() / (part * part).sum())
            assert stretch > 1
            assert low.stretch[0][rank] == pytest.approx(stretch)
            torch.testing.assert_close(low.values[0][rank], kernel(part * stretch / 2.5, name))
        torch.testing.assert_close(low.kernels(), kernel(bank(x), name))

    def test_narrow_factors_stay_bit_for_bit(self) -> None:
        bank, x = one_metric(6, 4)
        low = LowRank(bank, x, "paper")
        found, _ = low.bank(torch.tensor([0]), torch.tensor([4]))
        assert torch.equal(found.iter_blocks()[0].factors, bank.iter_blocks()[0].factors)

    def test_small_features_have_lower_ranks_too(self) -> None:
        block = MetricBlock(torch.zeros(1, 6).double(), 1e-3 * draw(1, 6, 6, seed=1))
        low = LowRank(LocalMetrics([block], num_features=6), 1e-3 * draw(5, 6), "paper")
        assert sorted(low.values[0]) == [2, 6]

    def test_documents_that_are_all_anchors_leave_only_the_full_rank(self) -> None:
        block = MetricBlock(torch.ones(1, 6), torch.eye(6)[None])
        low = LowRank(LocalMetrics([block], num_features=6), torch.ones(3, 6), "paper")
        assert sorted(low.values[0]) == [6]
        assert low.kernels().tolist() == [[0.0]] * 3

    def two_blocks(self) -> tuple[LocalMetrics, Tensor]:
        support = torch.tensor([[0, 3], [5, 1]])
        few = MetricBlock(draw(2, 2, seed=3), draw(2, 2, 2, seed=4), support=support, quality=torch.tensor([0.1, 0.2]))
        wide = MetricBlock(
            draw(3, 9, seed=5),
            draw(3, 9, 9, seed=6),
            scales=torch.tensor([1.0, 2.0, 3.0]),
            quality=torch.tensor([0.3, 0.4, 0.5]),
        )
        return LocalMetrics([few, wide], num_features=9), draw(20, 9, seed=7)

    def test_costs_are_multiplications_and_half_of_them_at_full_rank(self) -> None:
        bank, x = self.two_blocks()
        low = LowRank(bank, x, "paper")
        assert low.places == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
        assert low.costs(torch.tensor([2, 1, 9, 4, 2])).tolist() == [2, 2, 9 * 5, 9 * 4, 9 * 2]

    def test_a_bank_of_chosen_ranks(self) -> None:
        bank, x = self.two_blocks()
        low = LowRank(bank, x, "distance")
        columns, ranks = torch.tensor([4, 1, 2, 3]), torch.tensor([2, 2, 9, 2])
        found, order = low.bank(columns, ranks)
        assert order.tolist() == [1, 0, 3, 2]  # by block, then by rank
        assert [tuple(block.factors.shape) for block in found.iter_blocks()] == [(1, 2, 2), (2, 9, 2), (1, 9, 9)]
        assert (found.norm, found.num_features) == ("mahalanobis", 9)
        assert found.iter_blocks()[0].support.tolist() == [[5, 1]]
        expected = [low.values[column][rank] for column, rank in ((1, 2), (4, 2), (3, 2), (2, 9))]
        torch.testing.assert_close(found(x), torch.stack(expected, dim=1))
        torch.testing.assert_close(found.quality, bank.quality[columns[order]])
        stretch = torch.tensor([low.stretch[4][2], low.stretch[3][2]], dtype=torch.float64)
        torch.testing.assert_close(found.scales[1:3], torch.tensor([3.0, 2.0]).double() / stretch)

    @pytest.mark.parametrize("rows", [1, 20])
    def test_the_lowest_rank_within_the_limit_is_taken(self, rows: int) -> None:
        bank, x = self.two_blocks()
        low = LowRank(bank, x, "paper")
        weights = draw(rows, 5, seed=8).abs() + 0.1

        def centre(values: Tensor) -> Tensor:
            return values.double() - values.double().mean(0)

        errors = []
        for column, by_rank in enumerate(low.values):
            own = {rank: centre((weights[:, column] * value)[:, None])[:, 0] for rank, value in by_rank.items()}
            whole = own[max(own)]
            errors.append({rank: float((part - whole).norm() / whole.norm()) for rank, part in own.items()})
        for limit in (0.0, 0.05, 0.2, 0.5, *(error * 1.0001 for error in errors[2].values()), 1e9):
            ranks, contributions = low.truncate(limit, weights, centre)
            expected = [min(rank for rank, error in own.items() if error <= limit) for own in errors]
            assert ranks.tolist() == expected
            chosen = torch.stack([low.values[column][rank] for column, rank in enumerate(expected)], dim=1)
            torch.testing.assert_close(contributions, centre(-weights * chosen))
        assert ranks.tolist() == [2, 2, 2, 2, 2]
        limit = low.errors[3][4]
        assert int(low.truncate(limit, weights, centre)[0][3]) == 4  # at most that much

    def test_metrics_without_weight_are_cut_to_the_lowest_rank(self) -> None:
        bank, x = self.two_blocks()
        ranks, _ = LowRank(bank, x, "paper").truncate(0.0, torch.zeros(1, 5), lambda values: values.double())
        assert ranks.tolist() == [2, 2, 2, 2, 2]


def test_the_cost_of_a_bank_is_that_of_its_factors() -> None:
    support = torch.tensor([[0, 1], [1, 2], [2, 3]])
    few = MetricBlock(draw(3, 2), draw(3, 2, 1), support=support)
    wide = MetricBlock(draw(2, 5), draw(2, 5, 3))
    assert distance_cost(LocalMetrics([few, wide], num_features=5)) == 3 * 2 * 1 + 2 * 5 * 3
    assert distance_cost(LocalMetrics([few, wide], num_features=5, norm="trace")) == 3 * 2 * 2 + 2 * 5 * 5


class TestReference:
    def lists(self, sizes: list[int]) -> RankingData:
        rows = sum(sizes)
        return RankingData.from_arrays(torch.arange(float(rows))[:, None], torch.zeros(rows), group=sizes)

    @pytest.mark.parametrize(("most", "kept"), [(12, [0, 1, 2, 3]), (11, [0, 2]), (6, [0, 2]), (5, [0, 3]), (1, [0])])
    def test_every_so_many_lists_are_left(self, most: int, kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parts, "REFERENCE_DOCUMENTS", most)
        assert list(parts._reference(self.lists([3, 3, 3, 3])).qids) == kept

    def test_up_to_sixteen_thousand_documents_are_all_there(self) -> None:
        data = self.lists([8192, 8192])
        assert parts._reference(data) is data
        assert parts._reference(self.lists([8192, 8193])).num_queries == 1
        single = self.lists([1])
        assert parts._reference(single) is single


def test_values_are_centred_within_their_list() -> None:
    values = draw(6, 2).float()
    found = parts._centred(values, torch.tensor([0, 1, 1, 4, 6]))
    assert found.dtype == torch.float64
    wide = values.double()
    expected = torch.cat([rows - rows.mean(0) for rows in (wide[:1], wide[1:4], wide[4:])])
    torch.testing.assert_close(found, expected)
    assert not found[0].any()


class TestSelect:
    """Columns that are orthogonal, so that what each explains is known."""

    def select(
        self, columns: list[list[float]], target: list[float], tol: float, costs: list[int] | None = None
    ) -> tuple[int, list[int], list[float]] | None:
        wide = torch.tensor(columns, dtype=torch.float64).T
        price = torch.tensor([1] * len(columns) if costs is None else costs)
        found = parts._select(wide, torch.tensor(target, dtype=torch.float64), price, tol)
        return None if found is None else (found[0], found[1].tolist(), found[2].tolist())

    def test_what_explains_most_comes_first_until_the_tolerance_is_met(self) -> None:
        columns = [[1.0, 0, 0], [0, 2.0, 0], [0, 0, 1.0]]
        target = [3.0, 8.0, 0.5]  # gains 3, 4 and a half
        total = 9 + 64 + 0.25
        cases = [(((9.25 / total) ** 0.5), [1]), ((0.25 / total) ** 0.5, [0, 1]), (0.0, [0, 1, 2])]
        for left, expected in cases:
            found = self.select(columns, target, left * 1.001)
            assert found is not None
            assert found[1] == expected
            assert found[2] == pytest.approx([[3.0, 4.0, 0.5][place] for place in expected], rel=1e-9)
        assert self.select(columns, target, (9.25 / total) ** 0.5 * 0.999)[1] == [0, 1]
        assert self.select(columns, target, 1.0)[1] == []

    def test_a_tolerance_is_relative_to_the_size_of_the_scores(self) -> None:
        for size in (1e-3, 1.0, 1e3):
            columns = [[size, 0.0], [0.0, size]]
            target = [4.0 * size, 3.0 * size]
            assert self.select(columns, target, 0.61) == (1, [0], pytest.approx([4.0]))
            assert self.select(columns, target, 0.59) == (2, [0, 1], pytest.approx([4.0, 3.0]))

    def test_nothing_is_asked_below_a_millionth(self) -> None:
        columns = [[1.0, 0.0], [0.0, 1.0]]
        assert self.select(columns, [1.0, 0.7e-6], 0.0)[1] == [0]
        assert self.select(columns, [1.0, 1.5e-6], 0.0)[1] == [0, 1]

    def test_of_two_that_explain_alike_the_cheaper_is_taken(self) -> None:
        for costs, expected in (([5, 4], [1]), ([4, 5], [0])):
            for columns in ([[1.0, 0.0], [10.0, 0.0]], [[10.0, 0.0], [1.0, 0.0]]):
                found = self.select(columns, [2.0, 0.0], 0.1, costs)
                assert found is not None
                assert (found[0], found[1]) == (4, expected)

    def test_what_is_explained_counts_by_its_square(self) -> None:
        """The first explains 16 and the second 9: for 5 and 3 the first is the bargain, for 6 and 3 the second."""
        columns, target = [[1.0, 0.0], [0.0, 1.0]], [4.0, 3.0]
        assert self.select(columns, target, 0.9, [5, 3])[1] == [0]
        assert self.select(columns, target, 0.9, [6, 3])[1] == [1]

    def test_the_cost_is_the_sum_of_what_is_left(self) -> None:
        columns = [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]]
        assert self.select(columns, [1.0, 1.0, 0.0], 0.0, [2, 5, 7]) == (7, [0, 1], pytest.approx([1.0, 1.0]))

    def test_gains_are_never_negative(self) -> None:
        assert self.select([[1.0, 0.0]], [-1.0, 0.0], 0.5) is None
        found = self.select([[1.0, 0.0], [-1.0, 0.0]], [-0.1, 0.0], 0.5)
        assert found == (1, [1], pytest.approx([0.1]))

    def test_what_no_column_reaches_is_not_found(self) -> None:
        assert self.select([[1.0, 0.0], [2.0, 0.0]], [1.0, 1.0], 0.5) is None
        wide = draw(8, 3, seed=4)
        target = draw(8, seed=5)
        assert parts._select(wide * torch.sign(wide.T @ target), target, torch.ones(3), 0.01) is None

    def test_columns_of_no_size_are_not_looked_at(self) -> None:
        for scale in (1.0, 1e3):
            for share, known in ((0.7e-18, False), (1.5e-18, True)):
                tiny = scale * share**0.5
                found = self.select([[tiny, 0.0], [0.0, scale]], [scale, 0.0], 0.5)
                assert (found is not None) == known

    def test_weights_are_fitted_together(self) -> None:
        wide, gains = draw(40, 4, seed=1), torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=torch.float64)
        _, left, found = parts._select(wide, wide @ gains, torch.tensor([3, 1, 2, 1]), 1e-5)
        assert left.tolist() == [0, 1, 2, 3]
        torch.testing.assert_close(found, gains, rtol=1e-6, atol=1e-6)

    def test_many_are_taken_a_few_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fitted, real = [], parts.nonnegative_solve

        def solve(part: Tensor, pull: Tensor) -> Tensor:
            fitted.append(len(pull))
            return real(part, pull)

        monkeypatch.setattr(parts, "nonnegative_solve", solve)
        gains = torch.linspace(2, 1, 40, dtype=torch.float64)
        _, left, _ = parts._select(torch.eye(40, dtype=torch.float64), gains, torch.ones(40), 0.0)
        expected = [1]
        while expected[-1] < 40:
            expected.append(min(40, expected[-1] + 1 + expected[-1] // 16))
        assert fitted == expected
        assert left.tolist() == list(range(40))


def ones_for(data: RankingData, **options: Any) -> LGMML:
    """A model whose preprocessing, metrics and weights are all known."""
    return small_model(data=data, preprocess=plain_chain(), **options)


class TestCompress:
    def test_several_shares_of_the_tolerance_are_spent_on_truncation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limits, real = [], LowRank.truncate

        def truncate(bank: LowRank, limit: float, weights: Tensor, centre: Any) -> tuple[Tensor, Tensor]:
            limits.append(limit)
            return real(bank, limit, weights, centre)

        monkeypatch.setattr(LowRank, "truncate", truncate)
        data = small_data()
        compress(ones_for(data), 0.2, data)
        assert limits == pytest.approx([0.4, 0.2, 0.1, 0.05, 0.0])

    @pytest.mark.parametrize(
        ("costs", "winner"),
        [([5, 3, 3, 4, 9], 2), ([None, 7, None, 2, 2], 4), ([1, 2, 3, 4, 5], 1), ([9, 8, 7, 6, 5], 5)],
    )
    def test_the_first_of_the_cheapest_wins(
        self, costs: list[int | None], winner: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data, calls = small_data(), []
        model = ones_for(data)

        def select(*_: Any) -> tuple[int, Tensor, Tensor] | None:
            calls.append(costs[len(calls)])
            place = torch.tensor([len(calls)])
            return None if calls[-1] is None else (calls[-1], place, torch.tensor([0.5 * len(calls)]))

        monkeypatch.setattr(parts, "_select", select)
        found = compress(model, 0.2, data)
        assert len(calls) == 5
        assert found.metrics_after == 1
        expected = 0.5 * winner * model.phi.table.weight[0, winner]
        torch.testing.assert_close(found.model.phi.table.weight[0, 0], expected)

    def test_where_nothing_is_found_all_metrics_stay_as_they_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = small_data()
        model = ones_for(data)
        monkeypatch.setattr(parts, "_select", lambda *_: None)
        found = compress(model, 0.2, data)
        assert found.metrics_after == found.metrics_before == 7
        assert found.cost_after == found.cost_before
        torch.testing.assert_close(found.model.score(data), model.score(data), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(("norm", "name"), [("trace", "rbf"), ("mahalanobis", "distance")])
    def test_kernel_queries_and_names_are_kept(self, norm: str, name: str) -> None:
        data = small_data().replace(feature_names=("a", "b", "c", "d", "e"))
        model = ones_for(data, kernel=name, norm=norm)
        model.feature_names = data.feature_names
        found = compress(model, 0.05, data)
        assert (found.model.kernel, found.model.qids) == (name, data.qids)
        assert found.model.feature_names == data.feature_names
        assert found.score_error <= 0.0501
        assert not found.model.training

    def test_words_are_taken_as_the_model_takes_them(self) -> None:
        data = word_lists()
        encoder = CategoryEncoder.fit(data, CategorySettings(max_one_hot=3))
        numbers = encoder.encode(data)
        plain = ones_for(numbers)
        model = LGMML(plain.preprocess, plain.metrics, plain.phi, feature_names=encoder.columns, encoder=encoder)
        found = compress(model, 0.1, data)
        assert found.model.encoder is encoder
        assert found.model.feature_names == encoder.columns
        assert found.score_error <= 0.1001

    def test_weights_of_any_size_will_do(self) -> None:
        data = small_data()
        model = ones_for(data)
        large = compress(model, 0.1, data)
        with torch.no_grad():
            model.phi.table.weight.mul_(1e-4)
        small = compress(model, 0.1, data)
        assert small.metrics_after == large.metrics_after
        torch.testing.assert_close(small.model.phi.table.weight, 1e-4 * large.model.phi.table.weight)

    def test_a_policy_without_weights_becomes_a_row_for_all(self) -> None:
        data = small_data()
        model = ones_for(data, mode="per_query")
        found = compress(model, 0.4, data)
        assert (found.model.phi.mode, found.model.phi.num_queries) == ("shared", data.num_queries)
        assert found.metrics_after < 6
        assert found.score_error <= 0.4001
        assert float((found.model.phi.table.weight.detach() - 1).abs().max()) > 0.05  # weights make up for what is gone

    def test_the_report_is_about_both_models(self) -> None:
        data = small_data(30, seed=4)
        model = ones_for(data)
        found = compress(model, 0.3, data)
        before, after = model.score(data).double(), found.model.score(data).double()
        assert found.ndcg_before == pytest.approx(mean_ndcg(before, data))
        assert found.ndcg_after == pytest.approx(mean_ndcg(after, data))
        assert found.ndcg_before != found.ndcg_after
        assert found.ndcg_lost == pytest.approx(found.ndcg_before - found.ndcg_after)
        assert found.rank_correlation == pytest.approx(rank_correlation(before, after, data.offsets))
        assert (found.metrics_before, found.metrics_after) == (7, found.model.metrics.num_metrics)
        assert (found.cost_before, found.cost_after) == (4 * 4 + 3 * 10, distance_cost(found.model.metrics))
        sizes: dict[int, int] = {}
        for block in found.model.metrics.iter_blocks():
            sizes[block.factors.shape[2]] = sizes.get(block.factors.shape[2], 0) + block.num_metrics
        assert found.ranks == sizes
        assert list(found.ranks) == sorted(found.ranks)

    def test_the_model_itself_stays_as_it_is(self) -> None:
        data = small_data()
        model = ones_for(data)
        before = {name: value.nan_to_num() for name, value in model.state_dict().items()}
        found = compress(model, 0.3, data)
        found.model.preprocess.steps[0].mean.fill_(99)
        assert all(torch.equal(value.nan_to_num(), before[name]) for name, value in model.state_dict().items())

    def test_a_tolerance_may_be_zero(self) -> None:
        data = small_data()
        assert compress(ones_for(data), 0, data).score_error < 1e-4
        with pytest.raises(LGMMLError, match="`tol` must be at least 0"):
            compress(ones_for(data), -1e-9, data)

    def test_every_list_has_its_own_weights_where_the_policy_looks(self) -> None:
        data = small_data(20, seed=2)
        model = ones_for(data, mode="amortized")
        with torch.no_grad():
            model.phi.table.weight[:, 0] = 0.5
            model.phi.gate.last.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
        found = compress(model, 0.001, data)
        assert found.score_error < 0.05


def test_ranks_are_compared_list_by_list() -> None:
    """Spearman's formula by hand: 1 − 6Σd²/(n(n² − 1)) without ties."""
    before = torch.tensor([1.0, 2, 3, 4, 4, 3, 2, 1, 0])
    after = torch.tensor([2.0, 1, 3, 4, 1, 2, 3, 4, 0])
    found = rank_correlation(before, after, torch.tensor([0, 4, 8, 9]))
    assert found == pytest.approx(((1 - 6 * 2 / 60) + (1 - 6 * 20 / 60)) / 2)
    tied = rank_correlation(before[:4], torch.tensor([1.0, 1, 2, 2]), torch.tensor([0, 4]))
    assert tied == pytest.approx(4 / (5 * 4) ** 0.5)  # ranks −1.5, −0.5, 0.5, 1.5 and −1, −1, 1, 1
    with pytest.raises(LGMMLError, match=r"`after` must have shape \(9,\), got \(8,\)"):
        rank_correlation(before, after[:8], torch.tensor([0, 9]))


def test_lists_without_any_order_are_not_counted() -> None:
    offsets = torch.tensor([0, 2, 4, 6])
    before = torch.tensor([1.0, 2, 5, 5, 1, 2])
    assert rank_correlation(before, torch.tensor([1.0, 2, 1, 2, 3, 3]), offsets) == pytest.approx(0.5)
