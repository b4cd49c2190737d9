from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing

from lgmml_torch.checks import ConfigError, DataError, LGMMLError
from lgmml_torch.distributed import SharedLists
from lgmml_torch.functional.warp import NegativeTable
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_max
from lgmml_torch.training.batches import BatchLoader, RankingDataModule, TrainingBatches, mixed_seed
from lgmml_torch.training.losses import TrainingBatch

# More workers than this machine may have cores: that is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def make_data(queries: int = 20, seed: int = 0) -> RankingData:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (queries,), generator=g)
    rows = int(sizes.sum())
    return RankingData.from_arrays(
        torch.randn(rows, 3, generator=g), torch.randint(0, 3, (rows,), generator=g), group=sizes
    )


def collect(loader: BatchLoader, epochs: int = 2) -> list[TrainingBatch]:
    found = [batch for _ in range(epochs) for batch in loader]
    loader.close()
    return found


def same(a: list[TrainingBatch], b: list[TrainingBatch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(torch.as_tensor(x), torch.as_tensor(y))
        for p, q in zip(a, b, strict=True)
        for x, y in zip(p, q, strict=True)
    )


@pytest.mark.parametrize("batching", ["lists", "triplets"])
def test_batches_do_not_depend_on_the_number_of_workers(batching: str) -> None:
    batches = TrainingBatches(make_data(), batching=batching, batch_size=4, seed=3)
    alone = collect(BatchLoader(batches))
    for workers in (1, 4):
        assert same(alone, collect(BatchLoader(batches, num_workers=workers)))


@pytest.mark.parametrize(("workers", "stop"), [(0, 1), (2, 3), (0, 6)])
def test_a_resumed_loader_goes_on_with_the_same_batches(workers: int, stop: int) -> None:
    batches = TrainingBatches(make_data(), batch_size=3, seed=1)
    whole = collect(BatchLoader(batches), epochs=3)
    first = BatchLoader(batches, num_workers=workers)
    iterator = iter(first)
    for _ in range(min(stop, len(first))):
        next(iterator)
    state = first.state_dict()
    del iterator
    first.close()
    second = BatchLoader(batches, num_workers=workers)
    second.load_state_dict(state)
    done = min(stop, len(first))
    rest = collect(second, epochs=2)
    assert same(whole[done : done + len(rest)], rest)


def children() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def test_workers_are_those_asked_for_and_stay_until_the_stage_ends() -> None:
    before, data = children(), make_data()
    for loader in (BatchLoader(TrainingBatches(data)), RankingDataModule(data).train_dataloader()):
        assert list(loader)
        assert children() == before
    module = RankingDataModule(data, num_workers=2, batch_size=2)
    loader, seen = module.train_dataloader(), []
    for _ in range(2):
        assert list(loader)
        seen.append(children() - before)
    assert len(seen[0]) == 2
    assert seen[0] == seen[1]
    module.teardown("fit")
    assert children() == before


def test_triplets_are_what_they_say() -> None:
    data = make_data()
    batch = TrainingBatches(data, batching="triplets", batch_size=50, max_draws=6)[0, 0]
    positives, negatives = batch.rows[batch.positives], batch.rows[batch.negatives]
    assert (data.labels[negatives] < data.labels[positives][:, None]).all()
    assert (data.query_index[positives] == batch.queries).all()
    assert (data.query_index[negatives] == batch.queries[:, None]).all()


def test_lists_are_what_they_say() -> None:
    data = make_data()
    batches = TrainingBatches(data, batch_size=6, max_draws=None)
    seen: list[int] = []
    for i in range(batches.batches_per_epoch):
        batch = batches[0, i]
        seen += batch.lists.tolist()
        positives, negatives = batch.rows[batch.positives], batch.rows[batch.negatives]
        assert torch.equal(batch.num_draws, batch.num_negatives)  # as many as there are
        counted = torch.arange(negatives.shape[1]) < batch.num_draws[:, None]
        assert (data.labels[negatives] < data.labels[positives][:, None])[counted].all()
        assert (data.query_index[positives] == batch.queries).all()
        expected = [r for q in batch.lists.tolist() for r in range(int(data.offsets[q]), int(data.offsets[q + 1]))]
        assert batch.rows.tolist() == expected
    assert sorted(seen) == batches.table.queries.tolist()
    assert TrainingBatches(data, max_draws=3)[0, 0].negatives.shape[1] == 3


def shares(data: RankingData, world_size: int, shared: bool, **settings: Any) -> list[TrainingBatches]:
    """The batches as each of the processes sees them."""
    if not shared:
        whole = TrainingBatches(data, **settings)
        return [whole.shared_by(rank, world_size) for rank in range(world_size)]
    owner = torch.randint(world_size, (data.num_queries,), generator=torch.Generator().manual_seed(1))
    found = []
    for rank in range(world_size):
        part = Pretend(data.sizes, owner, rank, whole=data)
        found.append(TrainingBatches(data.select(part.own).replace(shared_lists=part), **settings))
    return found


@dataclass(frozen=True, eq=False)
class Pretend(SharedLists):
    """Knows what the others would say of their queries, since it has all the data."""

    whole: RankingData | None = None

    def per_query(self, values: Tensor) -> Tensor:
        assert self.whole is not None
        table = NegativeTable.of(self.whole.labels, self.whole.offsets)
        counts = table.positive_offsets.diff()
        if torch.equal(values, counts[self.own]):
            return counts
        return segment_max(table.count.double(), self.whole.offsets, empty=0.0).long()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("settings", [{"max_draws": None}, {"draws": False}, {"batching": "triplets"}])
def test_processes_share_every_batch(settings: dict[str, Any], shared: bool) -> None:
    for world_size in (1, 3, 30):
        check_shares(world_size, settings, shared)


def check_shares(world_size: int, settings: dict[str, Any], shared: bool) -> None:
    if shared and "batching" in settings:
        with pytest.raises(ConfigError, match="`batching` must be 'lists' for data that processes share"):
            shares(make_data(), world_size, shared, **settings)
        return
    data = make_data()
    alone = TrainingBatches(data, batch_size=7, seed=2, **settings)
    parts = shares(data, world_size, shared, batch_size=7, seed=2, **settings)
    for item in [(0, 0), (0, alone.batches_per_epoch - 1), (4, 1)]:
        whole, found = alone[item], [part[item] for part in parts]
        assert {batch.whole for batch in found} == {whole.whole}
        assert whole.whole == (len(whole.lists), len(whole.rows), len(whole.positives))
        places = torch.cat([batch.places for batch in found])
        assert sorted(places.tolist()) == list(range(whole.whole.rows))
        assert torch.equal(torch.cat([batch.labels for batch in found]), whole.labels[places])
        tuples = {(int(p), *n) for p, n in zip(whole.positives, whole.negatives.tolist(), strict=True)}
        for batch in found:  # the same documents, each at its place in the whole batch
            at = batch.places
            mine = zip(at[batch.positives].tolist(), at[batch.negatives].tolist(), strict=True)
            tuples -= {(p, *n) for p, n in mine}
        assert not tuples


def test_an_epoch_of_triplets_is_as_long_as_asked_for() -> None:
    data, settings = make_data(), {"batch_size": 4, "batches_per_epoch": 3}
    assert TrainingBatches(data, batching="triplets", **settings).batches_per_epoch == 3
    lists = TrainingBatches(data, **settings)
    assert lists.batches_per_epoch == math.ceil(len(lists.queries) / 4)


def test_a_data_module_by_itself_has_all_lists() -> None:
    data = make_data()
    module = RankingDataModule(data, data, data)
    for loader in (module.val_dataloader(), module.test_dataloader()):
        assert [block.tolist() for block in loader] == [[0, 20]]
    assert RankingDataModule(data).val_dataloader() == []


@pytest.mark.parametrize("world_size", [1, 3, 7, 30])
def test_every_list_is_evaluated_exactly_once(world_size: int) -> None:
    data = make_data()
    module, seen = RankingDataModule(data, data, batch_size=4), list[int]()
    for rank in range(world_size):
        module.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)  # type: ignore[assignment]
        for block in module.val_dataloader():
            seen += range(*block.tolist())
    assert sorted(seen) == list(range(20))


def test_nothing_to_learn_from() -> None:
    flat = RankingData.from_arrays(torch.randn(4, 2), [1, 1, 2, 2], qid=[1, 1, 2, 2])
    with pytest.raises(DataError, match=r"nothing to learn from.*are all labels equal"):
        TrainingBatches(flat)


def test_bad_settings_are_named() -> None:
    data = make_data()
    with pytest.raises(LGMMLError, match="`batching` must be one of"):
        TrainingBatches(data, batching="pairs")
    with pytest.raises(LGMMLError, match="`batch_size` must be positive, got 0"):
        TrainingBatches(data, batch_size=0)
    other = RankingData.from_arrays(torch.randn(2, 5), [0, 1], qid=[1, 1])
    with pytest.raises(DataError, match=r"same number of features, got \{.train.: 3, .valid.: 5\}"):
        RankingDataModule(data, other)
    with pytest.raises(DataError, match=r"there are no 'test' queries; this run has \['train'\]"):
        RankingDataModule(data).test_dataloader()


def test_seeds_mix() -> None:
    seeds = {mixed_seed(a, b, c) for a in range(5) for b in range(5) for c in range(-1, 4)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({mixed_seed(seed) for seed in (0, 126, 2**40, 2**62)}) == 4


@pytest.mark.parametrize("batching", ["lists", "triplets"])
def test_query_weights_multiply_the_tuples(batching: str) -> None:
    data = make_data()
    weights = torch.arange(data.num_queries).float()
    plain = TrainingBatches(data, batching=batching)[0, 0]
    weighed = TrainingBatches(data.replace(query_weights=weights), batching=batching)[0, 0]
    assert torch.equal(weighed.weights, plain.weights * weights[plain.queries])
