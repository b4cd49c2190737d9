"""Batches and their loaders, each part against a loop or a number worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lgmml_torch.checks import ConfigError, LGMMLError, LoaderError
from lgmml_torch.distributed import Spread
from lgmml_torch.ragged import RankingData
from lgmml_torch.training import batches as module
from lgmml_torch.training.batches import (
    BatchLoader,
    ListBlocks,
    TrainingBatch,
    TrainingBatches,
    Whole,
    _try_handles,
    mixed_seed,
    telling_loader_failures,
)
from lgmml_torch.training.datamodule import RankingDataModule

# More workers than this machine may have cores; none of them is started here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def data(**more: Any) -> RankingData:
    """Lists of 3, 2, 4 and 3 documents; the second has nothing to learn from."""
    labels = [0, 1, 2, 0, 0, 0, 0, 1, 1, 0, 1, 2]
    X = torch.arange(24.0).view(12, 2)
    return RankingData.from_arrays(X, labels, group=[3, 2, 4, 3], **more)


def weighed() -> RankingData:
    return data(query_weights=[1.0, 2.0, 3.0, 5.0]).replace(document_weights=torch.arange(1.0, 13.0))


LOWER = {1: 1, 2: 2, 7: 2, 8: 2, 10: 1, 11: 2}  # documents below each positive


class TestLists:
    @pytest.mark.parametrize("max_draws", [None, 3])
    def test_every_part_by_a_loop(self, max_draws: int | None) -> None:
        lists = weighed()
        batches = TrainingBatches(lists, batch_size=2, max_draws=max_draws, seed=5)
        assert batches.batches_per_epoch == 2
        for index in range(2):
            batch = batches[0, index]
            rows, positives, owners, weights = list[int](), list[int](), list[int](), list[float]()
            for q in batch.lists.tolist():
                own = list(range(int(lists.offsets[q]), int(lists.offsets[q + 1])))
                rows += own
                good = [row for row in own if row in LOWER]
                positives, owners = positives + good, owners + [q] * len(good)
                weights += [float(lists.query_weights[q]) * (row + 1) / len(good) for row in good]  # type: ignore[index]
            assert batch.rows.tolist() == rows
            assert batch.rows[batch.positives].tolist() == positives
            assert batch.queries.tolist() == owners
            assert batch.num_negatives.tolist() == [LOWER[row] for row in positives]
            width = max(LOWER[row] for row in positives) if max_draws is None else max_draws
            assert batch.negatives.shape == (len(positives), width)
            assert batch.num_draws.tolist() == [min(width, LOWER[p]) if max_draws is None else width for p in positives]
            for row, q, drawn in zip(positives, owners, batch.rows[batch.negatives].tolist(), strict=True):
                assert all(int(lists.offsets[q]) <= one < row for one in drawn)
            assert batch.weights.tolist() == pytest.approx(weights)
            assert batch.labels.tolist() == lists.labels[rows].tolist()
            assert batch.list_weights.tolist() == lists.query_weights[batch.lists].tolist()  # type: ignore[index]
            assert batch.list_weights.dtype == torch.float64
            assert batch.document_weights.tolist() == [row + 1.0 for row in rows]
            assert batch.relevance_weights is batch.document_weights
            assert batch.list_offsets.tolist() == [0, *torch.tensor([[3, 2, 4, 3][q] for q in batch.lists]).cumsum(0)]
            assert batch.places.tolist() == list(range(len(rows)))
            assert batch.whole == Whole(len(batch.lists), len(rows), len(positives))

    def test_without_weights(self) -> None:
        batch = TrainingBatches(data())[0, 0]
        assert batch.list_weights.tolist() == [1.0] * 3
        assert batch.list_weights.dtype == torch.float64
        assert len(batch.document_weights) == 0
        assert batch.relevance_weights is None

    def test_an_epoch_has_each_list_once_and_after_it_there_is_nothing(self) -> None:
        batches = TrainingBatches(data(), batch_size=2)
        assert sorted(batches[0, 0].lists.tolist() + batches[0, 1].lists.tolist()) == [0, 2, 3]
        nothing = batches[0, 2]
        assert (len(nothing.rows), len(nothing.positives), nothing.whole) == (0, 0, (0, 0, 0))
        nothing = TrainingBatches(data(), batch_size=2, max_draws=None)[0, 7]
        assert nothing.negatives.shape == (0, 0)

    def test_a_loss_of_whole_lists_has_no_tuples(self) -> None:
        batch = TrainingBatches(data(), draws=False, max_draws=None)[0, 0]
        assert sorted(batch.lists.tolist()) == [0, 2, 3]
        assert batch.negatives.shape == (0, 0)
        assert (len(batch.positives), batch.whole) == (0, (3, 10, 0))

    def test_the_list_with_the_most_negatives_decides_how_many_draws_there_are(self) -> None:
        lists = RankingData.from_arrays(torch.arange(6.0)[:, None], [0, 1, 0, 0, 0, 1], group=[2, 4])
        batch = TrainingBatches(lists, max_draws=None)[0, 0]
        assert batch.negatives.shape == (2, 3)
        assert sorted(batch.num_draws.tolist()) == [1, 3]

    def test_negatives_may_be_those_labelled_zero_only(self) -> None:
        batch = TrainingBatches(data(), negatives="zero")[0, 0]
        found = dict(zip(batch.rows[batch.positives].tolist(), batch.num_negatives.tolist(), strict=True))
        assert found == {1: 1, 2: 1, 7: 2, 8: 2, 10: 1, 11: 1}

    def test_a_share_is_every_so_many_th_list(self) -> None:
        whole = TrainingBatches(data())
        every = whole[1, 0].lists.tolist()
        assert [whole.shared_by(rank, 2)[1, 0].lists.tolist() for rank in range(2)] == [every[::2], every[1::2]]
        assert whole.share == (0, 1)

    def test_lists_that_are_elsewhere_are_somebody_elses(self) -> None:
        """Owned by 1, 0, 1 and 0: this process, the second, has the first and the third list."""
        lists = data()
        spread = Spread(lists.sizes, torch.tensor([1, 0, 1, 0]), 1)
        here = lists.select(spread.own).replace(spread=spread)
        # As many positives as the most negatives of one of them: the same numbers of all processes, for both questions.
        object.__setattr__(spread, "per_query", lambda values: torch.tensor([2, 0, 2, 2]))
        batch = TrainingBatches(here, batch_size=9)[0, 0]
        assert sorted(batch.lists.tolist()) == [0, 1]
        assert batch.whole == (3, 10, 6)
        order = TrainingBatches(lists, batch_size=9)[0, 0].lists.tolist()
        assert batch.lists.tolist() == [{0: 0, 2: 1}[q] for q in order if q != 3]


class TestTriplets:
    @pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (2, 3)])
    def test_every_part_by_a_loop(self, rank: int, world_size: int) -> None:
        lists = weighed()
        whole = TrainingBatches(lists, batching="triplets", batch_size=5, max_draws=3)
        batch, all_of_them = whole.shared_by(rank, world_size)[0, 0], whole[0, 0]
        count = len(range(rank, 5, world_size))
        assert batch.rows.tolist() == all_of_them.rows.view(5, 4)[rank::world_size].reshape(-1).tolist()
        assert batch.places.tolist() == torch.arange(20).view(5, 4)[rank::world_size].reshape(-1).tolist()
        assert batch.whole == (5, 20, 5)
        assert batch.list_offsets.tolist() == list(range(0, 4 * count + 1, 4))
        assert batch.positives.tolist() == list(range(0, 4 * count, 4))
        assert batch.negatives.tolist() == [[4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(count)]
        assert batch.labels.tolist() == lists.labels[batch.rows].tolist()
        assert batch.document_weights.tolist() == [row + 1.0 for row in batch.rows.tolist()]
        assert batch.num_draws.tolist() == [3] * count
        for place, row in enumerate(batch.rows[batch.positives].tolist()):
            q = int(batch.lists[place])
            assert int(lists.offsets[q]) <= row < int(lists.offsets[q + 1])
            assert int(batch.num_negatives[place]) == LOWER[row]
            weight = float(lists.query_weights[q])  # type: ignore[index]
            assert float(batch.list_weights[place]) == weight
            assert float(batch.weights[place]) == pytest.approx(weight * (row + 1))
        assert batch.queries.tolist() == batch.lists.tolist()

    def test_as_many_draws_as_there_are_negatives(self) -> None:
        batch = TrainingBatches(data(), batching="triplets", batch_size=40, max_draws=None)[0, 0]
        assert batch.negatives.shape == (40, 2)
        assert batch.num_draws.tolist() == batch.num_negatives.tolist()


class TestSettings:
    def test_what_nobody_says(self) -> None:
        found = TrainingBatches(data())
        assert (found.batching, found.batch_size, found.max_draws, found.seed) == ("lists", 32, 10, 0)
        assert found.draws is True
        assert TrainingBatches(data())[0, 0].negatives.shape == (6, 10)

    @pytest.mark.parametrize("name", ["max_draws", "batches_per_epoch", "batch_size"])
    def test_numbers_are_positive(self, name: str) -> None:
        with pytest.raises(LGMMLError, match=f"`{name}` must be positive, got 0"):
            TrainingBatches(data(), **{name: 0})  # type: ignore[arg-type]
        TrainingBatches(data(), **{name: 1})  # type: ignore[arg-type]

    def test_triplets_need_draws(self) -> None:
        with pytest.raises(ConfigError, match="`batching` must be 'lists' for a loss of whole lists, got 'triplets'"):
            TrainingBatches(data(), batching="triplets", draws=False)

    def test_batches_of_an_epoch_are_a_setting_of_triplets(self) -> None:
        assert TrainingBatches(data(), batch_size=2, batches_per_epoch=7).batches_per_epoch == 2
        triplets = [TrainingBatches(data(), batching="triplets", batch_size=4, batches_per_epoch=n) for n in (None, 7)]
        assert [found.batches_per_epoch for found in triplets] == [2, 7]


class TestSeeds:
    def test_they_stay_what_they_are_from_release_to_release(self) -> None:
        """A run that goes on with a newer release has the batches it would have had."""
        assert [mixed_seed(0), mixed_seed(0, 1, -1), mixed_seed(2**63 + 5, 3), mixed_seed(5, 3)] == SEEDS
        assert SEEDS[2] == SEEDS[3]
        lists = TrainingBatches(data(), batch_size=2, seed=1)
        assert [lists[0, 0].lists.tolist(), lists[1, 0].lists.tolist(), lists[2, 0].lists.tolist()] == ORDERS
        assert lists[0, 0].rows[lists[0, 0].negatives][:2, :6].tolist() == NEGATIVES
        assert all(0 <= mixed_seed(a, b) < 2**63 for a in range(20) for b in range(20))

    def test_the_order_of_an_epoch_is_drawn_by_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[int, ...]] = []
        real = module.mixed_seed
        monkeypatch.setattr(module, "mixed_seed", lambda *numbers: asked.append(numbers) or real(*numbers))
        TrainingBatches(data(), batch_size=1, seed=4)[3, 2]
        assert asked == [(4, 3, 2), (4, 3, -1)]


SEEDS = [7896617691693857887, 2077540515353368693, 4032576983210384345, 4032576983210384345]
ORDERS = [[2, 3], [0, 2], [0, 2]]
NEGATIVES = [[6, 5, 6, 6, 5, 6], [6, 5, 5, 5, 6, 6]]


class Workers:
    """A DataLoader that starts nothing."""

    def __init__(self, workers: int, arrays: Any = ()) -> None:
        self.num_workers, self._iterator, self.arrays = workers, None, arrays

    def __iter__(self) -> Iterator[Any]:
        self._iterator = self  # type: ignore[assignment]
        if isinstance(self.arrays, Exception):
            raise self.arrays
        return iter(self.arrays)


class TestLoader:
    def loader(self, workers: int = 0, arrays: Any = ()) -> BatchLoader:
        found = BatchLoader(TrainingBatches(data(), batch_size=2))
        found._loader = Workers(workers, arrays)  # type: ignore[assignment]
        return found

    def test_what_nobody_says(self) -> None:
        found = BatchLoader(TrainingBatches(data(), batch_size=2))
        assert (len(found), found.state_dict()) == (2, {"epoch": 0, "position": 0})
        assert found._loader.dataset.share == (0, 1)  # type: ignore[attr-defined]
        assert found._loader.num_workers == 0

    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_workers_stay_for_all_epochs(self, workers: int) -> None:
        found = BatchLoader(TrainingBatches(data()), num_workers=workers)._loader
        assert (found.num_workers, found.persistent_workers) == (workers, workers > 0)

    def test_there_are_no_fewer_than_none(self) -> None:
        with pytest.raises(LGMMLError, match="`num_workers` must be"):
            BatchLoader(TrainingBatches(data()), num_workers=-1)

    def test_batches_are_those_of_the_share(self) -> None:
        batches = TrainingBatches(data(), batch_size=2)
        for rank in range(2):
            share = batches.shared_by(rank, 2)
            for index, found in enumerate(BatchLoader(batches, rank=rank, world_size=2)):
                assert isinstance(found, TrainingBatch)
                assert isinstance(found.whole, Whole)
                assert found.whole == share[0, index].whole
                assert found.lists.tolist() == share[0, index].lists.tolist()

    def test_it_knows_where_it_stands(self) -> None:
        loader = BatchLoader(TrainingBatches(data(), batch_size=1))
        seen = [dict(loader.state_dict()) for _ in loader]
        assert seen == [{"epoch": 0, "position": 1}, {"epoch": 0, "position": 2}, {"epoch": 1, "position": 0}]
        loader.load_state_dict({"epoch": 6, "position": 2})
        assert [dict(loader.state_dict()) for _ in loader] == [{"epoch": 7, "position": 0}]

    def test_handles_are_tried_before_workers_are_started_and_only_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[int] = []
        monkeypatch.setattr(module, "_try_handles", tried.append)
        for workers, expected in ((0, []), (2, [7]), (5, [13])):
            tried.clear()
            loader = self.loader(workers)
            for _ in range(2):
                list(loader)
            assert tried == expected

    def test_handles_that_were_tried_are_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed: list[int] = []
        queues = iter(range(10))

        def queue() -> Any:
            number = next(queues)
            return SimpleNamespace(close=lambda: closed.append(number))

        monkeypatch.setattr(module.multiprocessing, "Queue", queue)
        _try_handles(4)
        assert closed == [0, 1, 2, 3]

    def test_too_few_of_them_is_one_sentence(self) -> None:
        sentence = r"the 0 processes that make batches could not be started \(no more\); with loader.num_workers=0"
        with pytest.raises(LoaderError, match=sentence):
            list(self.loader(0, OSError(24, "no more")))

    @pytest.mark.parametrize("error", [OSError("broken"), EOFError("end")])
    def test_what_a_worker_breaks_off_is_told_and_what_goes_wrong_here_is_left(self, error: Exception) -> None:
        def broken() -> Iterator[Any]:
            raise error
            yield

        with pytest.raises(LoaderError, match=f"a DataLoader worker ended while it sent a batch .{error}.; with load"):
            list(self.loader(1, broken()))
        with pytest.raises(type(error), match=str(error)) as caught:
            list(self.loader(0, broken()))
        assert caught.value is error

    def test_closing_stops_the_workers(self) -> None:
        loader, stopped = self.loader(2), list[str]()
        loader.close()  # nothing runs yet
        loader._loader._iterator = SimpleNamespace(_shutdown_workers=lambda: stopped.append("now"))  # type: ignore[assignment]
        loader.close()
        assert (stopped, loader._loader._iterator) == (["now"], None)
        loader._loader._iterator = SimpleNamespace()  # type: ignore[assignment]  # one that works here
        loader.close()
        assert loader._loader._iterator is None

    def test_failures_of_workers_are_told_and_others_are_left(self) -> None:
        sentence = r"^DataLoader worker \(pid 7\) is killed; with loader\.num_workers=0 the run"
        with pytest.raises(LoaderError, match=sentence), telling_loader_failures():
            raise RuntimeError("DataLoader worker (pid 7) is killed. \nmore of it")
        with pytest.raises(RuntimeError, match="something else") as caught, telling_loader_failures():
            raise RuntimeError("something else")
        assert not isinstance(caught.value, LoaderError)


class TestBlocks:
    def test_as_many_documents_as_fit(self) -> None:
        assert ListBlocks(torch.tensor([0, 16384, 32768])).blocks == [(0, 2)]
        assert ListBlocks(torch.tensor([0, 16385, 32769])).blocks == [(0, 1), (1, 2)]
        found = ListBlocks(torch.tensor([0, 16385, 32769]))
        assert (len(found), found[1].tolist()) == (2, [1, 2])

    def test_who_has_none_has_an_empty_one(self) -> None:
        offsets = torch.tensor([0, 2, 4])
        found = [ListBlocks(offsets, rank=rank, world_size=3).blocks for rank in range(3)]
        assert found == [[(0, 1)], [(1, 2)], [(0, 0)]]


class TestDataModule:
    def test_loaders(self) -> None:
        lists = data()
        module = RankingDataModule(lists, lists.select([0, 1]), lists.select([2]), num_workers=2, batch_size=2)
        found = module.train_dataloader()
        assert (found._loader.num_workers, found._loader.dataset.share) == (2, (0, 1))  # type: ignore[attr-defined]
        assert [block.tolist() for block in module.val_dataloader()] == [[0, 2]]
        assert [block.tolist() for block in module.test_dataloader()] == [[0, 1]]
        assert module.split("valid").num_queries == 2
        assert RankingDataModule(lists).val_dataloader() == []
        assert RankingDataModule(lists).train_dataloader()._loader.num_workers == 0

    def test_each_process_has_its_part_of_lists_that_all_have(self) -> None:
        lists = data()
        spread = Spread(lists.sizes, torch.zeros(4, dtype=torch.long), 0)
        module = RankingDataModule(lists, lists, lists.replace(spread=spread))
        module.trainer = SimpleNamespace(global_rank=1, world_size=2)  # type: ignore[assignment]
        assert [block.tolist() for block in module.val_dataloader()] == [[2, 3]]
        assert [block.tolist() for block in module.test_dataloader()] == [[0, 4]]
        assert module.train_dataloader()._loader.dataset.share == (1, 2)  # type: ignore[attr-defined]

    def test_workers_end_with_the_stage(self) -> None:
        module, closed = RankingDataModule(data()), list[int]()
        module.teardown("fit")
        module._loader = SimpleNamespace(close=lambda: closed.append(1))  # type: ignore[assignment]
        module.teardown("fit")
        module.teardown("fit")
        assert closed == [1]
