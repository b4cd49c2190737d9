"""The search for a list's own Φ, step by step against loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.functional.ranking.measures import rank_data
from lgmml_torch.functional.score import score
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_ids
from lgmml_torch.training import ideal
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.ideal import _Best, _descend, _first_equal, ideal_scores
from lgmml_torch.training.losses import Warp


def lists(K: int = 3, sizes: tuple[int, ...] = (5, 1, 6), seed: int = 0) -> tuple[Tensor, RankingData]:
    g = torch.Generator().manual_seed(seed)
    kappa = torch.rand(sum(sizes), K, generator=g, dtype=torch.float64)
    labels = torch.randint(0, 3, (sum(sizes),), generator=g)
    data = RankingData.from_arrays(kappa, labels, group=list(sizes), dtype=torch.float64)
    return data.features, data


def make_best(K: int = 3, start: list[float] | None = None, k: int = 10, seed: int = 0) -> _Best:
    kappa, data = lists(K, seed=seed)
    return _Best(kappa, data, kappa, torch.tensor(start or [1.0] * K, dtype=torch.float64), k)


def ndcg(scores: Tensor, data: RankingData, k: int = 10) -> Tensor:
    return rank_data(scores, data, metrics=[f"ndcg@{k}"])[f"ndcg@{k}"]


class Asked(Exception):  # noqa: N818 - ends the search where a test has seen enough
    pass


@pytest.fixture
def unstable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting as a device may do it: equal values come in their order only where that is asked for."""
    real = torch.Tensor.argsort

    def argsort(values: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
        if stable:
            return real(values, dim=dim, descending=descending, stable=True)
        return values.shape[dim] - 1 - real(values.flip(dim), dim=dim, descending=descending, stable=True)

    monkeypatch.setattr(torch.Tensor, "argsort", argsort)


class TestPlan:
    def seen(self, name: str, monkeypatch: pytest.MonkeyPatch, start: list[float], **settings: Any) -> tuple[Any, ...]:
        """The arguments of the first call of a part."""
        asked: list[Any] = []

        def note(*args: Any) -> None:
            asked.append(args)
            raise Asked

        owner: Any = _Best if hasattr(_Best, name) else ideal
        monkeypatch.setattr(owner, name, note)
        kappa, data = lists(len(start))
        with pytest.raises(Asked):
            ideal_scores(kappa, data, torch.tensor(start, dtype=torch.float64), kernel="distance", **settings)
        return tuple(asked[0])

    def test_steps_and_margin_are_in_units_of_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        best, start, loss, steps, seed = self.seen("_descend", monkeypatch, [1.0, 3.0, 2.0])
        assert loss.margin == pytest.approx(0.2)
        assert steps == pytest.approx([0.5 * 2.0 / math.sqrt(number) for number in range(1, 61)])
        assert (start.tolist(), seed, best.measure) == ([1.0, 3.0, 2.0], 0, "ndcg@10")
        best, _, loss, steps, seed = self.seen(
            "_descend", monkeypatch, [0.0, 0.0, 0.0], margin=0.3, step=2.0, passes=2, seed=5, k=4
        )
        assert (loss.margin, steps, seed) == (0.3, [2.0, pytest.approx(2.0 / math.sqrt(2))], 5)
        assert best.measure == "ndcg@4"

    def test_equal_weights_are_tried_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, phi = self.seen("try_weights", monkeypatch, [1.0, 3.0, 2.0])
        assert torch.equal(phi, torch.ones(3, 3, dtype=torch.float64))

    @pytest.mark.usefixtures("unstable")
    def test_single_metrics_from_the_largest_weight_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, metrics = self.seen("try_singles", monkeypatch, [1.0, 3.0, 2.0, 3.0], passes=0)
        assert metrics.tolist() == [1, 3, 2, 0]

    def test_rounds_of_single_weights_reach_further_each_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[list[float]] = []
        monkeypatch.setattr(_Best, "try_coordinates", lambda self, coordinates, ratios: asked.append(ratios))
        kappa, data = lists()
        ideal_scores(kappa, data, torch.ones(3, dtype=torch.float64), kernel="distance", passes=1)
        tried = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
        assert asked == [pytest.approx([ratio * factor for ratio in tried]) for factor in (1.0, 1.7, 1.7 * 1.7)]

    def test_the_work_is_bounded_as_it_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """2 + 256 + passes + 288 rankings, whatever the number of metrics."""
        count: list[int] = []
        monkeypatch.setattr(
            _Best, "_judge", lambda self, scores: count.append(1) or torch.zeros(self.data.num_queries).double()
        )
        kappa, data = lists(300, sizes=(3,))
        ideal_scores(kappa, data, torch.ones(300, dtype=torch.float64), kernel="distance")
        assert len(count) == 2 + 256 + 60 + 16 * 6 * 3

    def test_blocks_of_lists_go_through_it_one_after_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []

        def blocks(offsets: Tensor, documents: int) -> list[tuple[int, int]]:
            asked.append(documents)
            return [(0, 1), (1, 3)]

        monkeypatch.setattr(ideal, "ROUNDS", 1)
        kappa, data = lists()
        start = torch.ones(3, dtype=torch.float64)
        with monkeypatch.context() as patched:
            patched.setattr(ideal, "list_blocks", blocks)
            found = ideal_scores(kappa, data, start, kernel="distance", passes=2)
        assert asked == [8192]
        parts = [data.select(chosen) for chosen in ([0], [1, 2])]
        each = [ideal_scores(part.features, part, start, kernel="distance", passes=2) for part in parts]
        assert torch.equal(found, torch.cat(each))


class TestOffers:
    def test_the_start(self) -> None:
        best = make_best(start=[1.0, 0.5, 2.0], k=3)
        assert best.phi.tolist() == [[1.0, 0.5, 2.0]] * 3
        expected = score(best.kappa, best.phi, best.data.offsets)
        assert torch.equal(best.scores, expected)
        torch.testing.assert_close(best.ndcg, ndcg(expected, best.data, 3), equal_nan=True)

    def test_each_list_keeps_what_is_better_for_it(self) -> None:
        best = make_best()
        labels = best.data.labels.double()
        before, first = best.scores.clone(), best.data.offsets[1]
        mixed = torch.cat([labels[:first], -labels[first:]])  # right for the first list, wrong for the others
        better, found = best.offer(mixed)
        assert better.tolist() == [True, False, False]
        assert torch.equal(best.scores[:first], mixed[:first])
        assert torch.equal(best.scores[first:], before[first:])
        torch.testing.assert_close(found, ndcg(mixed, best.data), equal_nan=True)
        torch.testing.assert_close(best.ndcg[0], found[0])
        assert best.ndcg[2] > found[2]

    def test_only_where_it_may(self) -> None:
        best = make_best()
        labels = best.data.labels.double()
        better, _ = best.offer(labels, torch.tensor([False, True, True]))
        assert better.tolist() == [False, False, True]

    def test_what_is_as_good_is_not_better(self) -> None:
        best = make_best()
        before = best.scores.clone()
        for among in (None, torch.ones(3, dtype=torch.bool)):
            better, _ = best.offer(3 * before, among)
            assert not bool(better.any())
            assert torch.equal(best.scores, before)

    def test_weights_are_noted_where_they_are_better(self) -> None:
        best = make_best(seed=1)
        order = ndcg(-best.kappa[:, 1], best.data) > best.ndcg
        assert 0 < int(order.sum()) < 3
        phi = torch.tensor([[0.0, 0.5, 0.0]] * 3, dtype=torch.float64)
        best.try_weights(phi)
        assert best.phi.tolist() == [[0.0, 0.5, 0.0] if one else [1.0, 1.0, 1.0] for one in order.tolist()]

    def test_no_weights_at_all_are_never_better(self) -> None:
        kappa = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
        data = RankingData.from_arrays(kappa, [0, 1, 2], qid=[0, 0, 0], dtype=torch.float64)
        data = data.replace(order=torch.tensor([2, 1, 0]))  # the caller's order is the right one
        best = _Best(kappa, data, kappa, torch.ones(1, dtype=torch.float64), 10)
        assert float(ndcg(torch.zeros(3), data)) == 1.0 > float(best.ndcg)
        best.try_weights(torch.zeros(1, 1, dtype=torch.float64))
        assert best.phi.tolist() == [[1.0]]
        assert float(best.ndcg) < 1.0

    def test_equal_documents_share_the_score_of_the_first(self) -> None:
        best = make_best()
        best.twins = torch.arange(12)
        best.twins[1] = 0
        labels = best.data.labels.double() + torch.linspace(0, 0.1, 12)
        best.offer(labels)
        assert best.scores[1] == best.scores[0] == labels[0]

    def test_singles_are_one_metric_each(self) -> None:
        best = make_best(seed=1)
        start = best.ndcg.clone()
        alone = torch.stack([ndcg(-best.kappa[:, r], best.data) for r in (2, 0, 1)])  # (3, Q)
        order = best.try_singles(torch.tensor([2, 0, 1]))
        for q in range(3):
            values = alone[:, q].nan_to_num(-1.0).tolist()
            ranked = sorted(range(3), key=lambda place: -values[place])
            assert order[:, q].tolist() == [(2, 0, 1)[place] for place in ranked]
            if values[ranked[0]] > float(start[q]):
                expected = [0.0, 0.0, 0.0]
                expected[int(order[0, q])] = 1.0
                assert best.phi[q].tolist() == expected
            else:
                assert best.phi[q].tolist() == [1.0, 1.0, 1.0]

    def test_the_few_best_singles_go_on(self) -> None:
        kappa, data = lists(20)
        best = _Best(kappa, data, kappa, torch.ones(20, dtype=torch.float64), 10)
        assert best.try_singles(torch.arange(20)).shape == (16, 3)

    @pytest.mark.usefixtures("unstable")
    def test_a_list_that_does_not_count_leaves_the_order_as_it_is(self) -> None:
        kappa, data = lists()
        flat = data.replace(labels=torch.zeros(12))
        best = _Best(kappa, flat, kappa, torch.ones(3, dtype=torch.float64), 10)
        assert best.try_singles(torch.tensor([2, 0, 1]))[:, 0].tolist() == [2, 0, 1]


class TestSpreads:
    def test_the_deviation_within_each_list(self) -> None:
        best = make_best()
        values = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        expected = [float(values[a:b].std(unbiased=False)) for a, b in ((0, 5), (5, 6), (6, 12))]
        assert best._spread(values).tolist() == pytest.approx(expected)

    def test_of_an_empty_list_it_is_zero(self) -> None:
        best = make_best()
        best.data = best.data.replace(offsets=torch.tensor([0, 5, 5, 12]))
        best.owner = segment_ids(best.data.offsets)
        assert best._spread(torch.arange(12.0).double()).tolist() == pytest.approx([math.sqrt(2), 0.0, 2.0])

    @pytest.mark.parametrize("seed", range(4))
    def test_one_weight_at_a_time_by_a_loop(self, seed: int) -> None:
        """Each list by itself: what every ratio would give, and the best so far."""
        start, ratios = [1.0, 0.5, 2.0], [0.0, 0.5, 2.0]
        best = make_best(start=start, seed=seed)
        coordinates = torch.tensor([[0, 1, 2], [2, 2, 0]])
        kappa, data = best.kappa, best.data
        phi, scores, value = best.phi.clone(), best.scores.clone(), best.ndcg.clone()
        for metric in coordinates.tolist():
            rest, sizes, spans = scores.clone(), [0.0] * 3, [0.0] * 3
            for q, (a, b) in enumerate(((0, 5), (5, 6), (6, 12))):
                own = kappa[a:b, metric[q]]
                rest[a:b] = scores[a:b] + phi[q, metric[q]] * own
                sizes[q], spans[q] = float(rest[a:b].std(unbiased=False)), float(own.std(unbiased=False))
            mixed = [sizes[q] > 0 for q in range(3)]
            for ratio in ratios:
                tried = rest.clone()
                weights = [ratio * sizes[q] / max(spans[q], 1e-12) for q in range(3)]
                for q, (a, b) in enumerate(((0, 5), (5, 6), (6, 12))):
                    tried[a:b] = rest[a:b] - weights[q] * kappa[a:b, metric[q]]
                found = ndcg(tried, data)
                for q, (a, b) in enumerate(((0, 5), (5, 6), (6, 12))):
                    if mixed[q] and float(found[q]) > float(value[q]):
                        value[q], scores[a:b], phi[q, metric[q]] = found[q], tried[a:b], weights[q]
        before = best.ndcg.clone()
        best.try_coordinates(coordinates, ratios)
        torch.testing.assert_close(best.scores, scores)
        torch.testing.assert_close(best.phi, phi)
        torch.testing.assert_close(best.ndcg, value, equal_nan=True)
        assert seed or bool((best.ndcg > before).any())

    @pytest.mark.parametrize(("share", "mixed"), [(0.0, False), (0.7e-3, False), (1.5e-3, True), (0.5, True)])
    def test_where_a_metric_is_all_there_is_the_rest_is_rounding(self, share: float, mixed: bool) -> None:
        """``share`` is the size of the rest beside that of all scores."""
        g = torch.Generator().manual_seed(0)
        kappa, data = lists(2, sizes=(8,))
        kappa = torch.rand(8, 2, generator=g, dtype=torch.float64)
        kappa[:, 1] = kappa[:, 0].flip(0)  # of the same spread
        best = _Best(kappa, data, kappa, torch.tensor([1.0, share], dtype=torch.float64), 10)
        beside = float(best._spread(share * kappa[:, 1]) / best._spread(best.scores))
        assert (beside > 1e-3) == mixed
        asked: list[list[bool]] = []
        best.offer = lambda scores, among: (asked.append(among.tolist()), (torch.zeros(1).bool(), None))[1]  # type: ignore[assignment,method-assign]
        best.try_coordinates(torch.tensor([[0]]), [1.0])
        assert asked == [[mixed]]


class TestDescent:
    def test_passes_by_a_loop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        best = make_best(seed=2)
        start, steps, loss = torch.tensor([1.0, 0.1, 2.0], dtype=torch.float64), [0.7, 0.4, 0.2], Warp(0.3)
        tried: list[Tensor] = []
        monkeypatch.setattr(best, "try_weights", lambda phi: tried.append(phi.clone()))
        _descend(best, start, loss, steps, 4)
        batches = TrainingBatches(best.data, batch_size=3, seed=4)
        phi = start.expand(3, -1).clone()
        for number, step in enumerate(steps):
            batch = batches[number, 0]
            owner = segment_ids(batch.list_offsets)
            kappa = best.kappa[batch.rows]
            scores = torch.stack([-(kappa[i] * phi[batch.lists[owner[i]]]).sum() for i in range(len(kappa))])
            outcome = loss.outcome(batch, scores)
            gradient = torch.zeros_like(phi)
            for place, violator in enumerate(outcome.violator.tolist()):
                if violator >= 0:
                    worst = batch.negatives[place, violator]
                    gap = kappa[batch.positives[place]] - kappa[worst]
                    gradient[batch.queries[place]] += outcome.weight[place] * gap
            phi = (phi - step * gradient).clamp_min(0)
            torch.testing.assert_close(tried[number], phi)
        assert len(tried) == 3
        assert bool((phi == 0).any())

    def test_all_lists_are_in_every_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[dict[str, int]] = []
        real = ideal.TrainingBatches
        monkeypatch.setattr(ideal, "TrainingBatches", lambda data, **how: asked.append(how) or real(data, **how))
        _descend(make_best(), torch.ones(3, dtype=torch.float64), Warp(), [0.1], 9)
        assert asked == [{"batch_size": 3, "seed": 9}]

    def test_where_nothing_can_be_ordered_nothing_is_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        best = make_best()
        best.data = best.data.replace(labels=torch.ones(12))
        monkeypatch.setattr(best, "try_weights", lambda phi: pytest.fail("tried"))
        _descend(best, torch.ones(3, dtype=torch.float64), Warp(), [0.1], 0)


def test_equal_rows_of_a_list_point_to_the_first() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 1.0], [1.0, 2.0], [1.0, 2.0], [1.0, 3.0], [1.0, 2.0], [2.0, 1.0]])
    owner = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    assert _first_equal(features, owner).tolist() == [0, 1, 0, 3, 4, 3, 6]
