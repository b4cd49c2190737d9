"""Training batches of lists or of sampled triplets, and their loaders for Lightning.

Every draw is a pure function of (seed, epoch, batch), so batches do not depend on the number of loader workers. Ranks
share each batch: every rank draws the whole batch and takes its part of it. So batches do not depend on the number of
ranks either, and a run may be resumed with another number. A loader stores only the position of the next batch, so a
run that is resumed within an epoch gets the batches it would have had.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor, multiprocessing
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils import signal_handling

from lgmml_torch.checks import ConfigError, DataError, LoaderError, check_choice, check_whole, sentence
from lgmml_torch.functional.warp import Among, Draws, NegativeTable
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import gather_segments, list_blocks, segment_max
from lgmml_torch.training.losses import TrainingBatch, Whole

_BATCHING = ("lists", "triplets")
_EVALUATED = 32_768  # documents of the lists that are evaluated together, at most
_WITHOUT_WORKERS = "with loader.num_workers=0 the run makes its batches itself"


class TrainingBatches(Dataset[TrainingBatch]):
    """All batches of all epochs; item ``(epoch, batch)`` is made on demand.

    Raises:
        DataError: when no query has a positive and something lower to draw.
    """

    def __init__(
        self,
        data: RankingData,  # training data; labels, offsets and, where there are any, weights are used
        *,
        # ``"lists"``: whole lists, each once per epoch in random order, draws for all their positives. ``"triplets"``:
        # queries and positives drawn independently, as in the paper
        batching: str = "lists",
        batch_size: int = 32,  # lists, or triplets, per batch
        max_draws: int | None = 10,  # draws per positive; None allows as many as it has negatives (the paper's limit)
        negatives: str = "lower",  # ``"lower"`` labelled than the positive, or ``"zero"`` labelled only
        seed: int = 0,  # of all draws
        # for triplets; by default an epoch has one triplet for each positive document
        batches_per_epoch: int | None = None,
        draws: bool = True,  # whether negatives are drawn; losses of whole lists need none
    ) -> None:
        check_choice("batching", batching, _BATCHING)
        check_whole("batch_size", batch_size)
        for name, value in (("max_draws", max_draws), ("batches_per_epoch", batches_per_epoch)):
            if value is not None:
                check_whole(name, value)
        if batching == "triplets" and not draws:
            raise ConfigError("`batching` must be 'lists' for a loss of whole lists, got 'triplets'")
        self.table = NegativeTable.of(data.labels, data.offsets, negatives=negatives)
        self.share = (0, 1)
        self.offsets, self.labels = data.offsets, data.labels
        self.query_weights = _or_ones(data.query_weights, data.num_queries).double()
        self.document_weights = _or_ones(data.document_weights, data.num_documents)
        self.batching, self.batch_size, self.max_draws, self.seed = batching, batch_size, max_draws, seed
        self.draws = draws
        self.all_lists = data.all_lists
        if self.all_lists.shared and batching == "triplets":
            raise ConfigError("`batching` must be 'lists' for data that processes share, got 'triplets'")
        self.num_positives = self.all_lists.per_query(self.table.positive_offsets.diff())
        most = segment_max(self.table.count.double(), data.offsets, empty=0.0).long()
        self.most_negatives = self.all_lists.per_query(most)
        self.queries = self.num_positives.nonzero()[:, 0]
        if not len(self.queries):
            raise DataError(
                "nothing to learn from: no query has a relevant document and a less relevant one; are all labels equal?"
            )
        items = len(self.queries) if batching == "lists" else len(self.table.positives)
        self.batches_per_epoch = -(-items // batch_size)
        if batching == "triplets" and batches_per_epoch is not None:
            self.batches_per_epoch = batches_per_epoch

    def shared_by(self, rank: int, world_size: int) -> TrainingBatches:
        """The same batches, of which ``rank`` gets its part."""
        part = copy(self)
        part.share = (rank, world_size)
        return part

    def __getitem__(self, item: tuple[int, int]) -> TrainingBatch:
        epoch, batch = item
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch, batch))
        if self.batching == "triplets":
            draws = self.table.sample_triplets(self.batch_size, max_draws=self.max_draws, generator=generator)
            return self._triplets(draws)
        shuffled = torch.randperm(
            len(self.queries), generator=torch.Generator().manual_seed(mixed_seed(self.seed, epoch, -1))
        )
        chosen = shuffled[batch * self.batch_size : (batch + 1) * self.batch_size]
        return self._lists(self.queries[chosen], generator)

    def _tuple_weights(self, draws: Draws) -> Tensor:
        """The weight of each tuple: its own times its query's and its positive's."""
        return draws.weights * self.query_weights[draws.queries] * self.document_weights[draws.positives].double()

    def _triplets(self, drawn: Draws) -> TrainingBatch:
        """Every positive and negative is a row: most are different, so duplicates are not looked for."""
        rank, world_size = self.share
        draws = Draws(*(getattr(drawn, field.name)[rank::world_size] for field in fields(drawn)))
        (count, width), total = draws.negatives.shape, len(drawn.negatives)
        rows = torch.cat([draws.positives[:, None], draws.negatives], dim=1).reshape(-1)
        places = torch.arange(count * (width + 1)).view(count, width + 1)
        return TrainingBatch(
            rows,
            draws.queries,
            torch.arange(count + 1) * (width + 1),
            self.query_weights[draws.queries],
            self.labels[rows],
            self.document_weights[rows],
            places[:, 0].contiguous(),
            places[:, 1:],
            draws.num_negatives,
            draws.num_draws,
            self._tuple_weights(draws),
            torch.arange(total * (width + 1)).view(-1, width + 1)[rank::world_size].reshape(-1),
            Whole(total, total * (width + 1), total),
        )

    def _lists(self, chosen: Tensor, generator: torch.Generator) -> TrainingBatch:
        own = self.all_lists.of_rank(chosen, *self.share)
        queries = chosen[own]
        lists = torch.searchsorted(self.all_lists.own, queries)
        counts = self.num_positives[chosen] * self.draws
        drawn = lists[: len(lists) * self.draws]
        places, most = own.repeat_interleave(counts).nonzero()[:, 0], int(self.most_negatives[chosen].max())
        among = Among(places, int(counts.sum()), most)
        draws = self.table.sample_list_draws(drawn, max_draws=self.max_draws, generator=generator, among=among)
        rows, list_offsets = gather_segments(self.offsets, lists)
        shift = list_offsets[:-1] - self.offsets[lists]  # from a row of the data to its place in the batch
        owner = torch.empty_like(self.offsets)
        owner[lists] = torch.arange(len(lists))
        moved = shift[owner[draws.queries]]
        sizes = self.all_lists.sizes[chosen]
        return TrainingBatch(
            rows,
            queries,
            list_offsets,
            self.query_weights[lists],
            self.labels[rows],
            self.document_weights[rows],
            draws.positives + moved,
            draws.negatives + moved[:, None],
            draws.num_negatives,
            draws.num_draws,
            self._tuple_weights(draws),
            own.repeat_interleave(sizes).nonzero()[:, 0],
            Whole(len(chosen), int(sizes.sum()), among.total),
        )


def _or_ones(weights: Tensor | None, count: int) -> Tensor:
    if weights is None:
        return torch.ones(count)
    return weights


def mixed_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers, so that neighbouring ones give unrelated streams.

    >>> mixed_seed(0, 1, 2) != mixed_seed(0, 2, 1)
    True
    """
    state = np.random.SeedSequence([number % 2**63 for number in numbers]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


class RankingDataModule(pl.LightningDataModule):
    """Training, validation and test queries as loaders.

    Batches hold row numbers; features and distances stay where they are. The same seed gives the same batches for any
    number of workers, and every list is evaluated exactly once.

    Args:
        train: training queries.
        valid: validation queries, which choose the best epoch.
        test: test queries.
        num_workers: processes that make training batches.
        **batches: settings of `TrainingBatches`.
    """

    def __init__(
        self,
        train: RankingData,
        valid: RankingData | None = None,
        test: RankingData | None = None,
        *,
        num_workers: int = 0,
        **batches: Any,
    ) -> None:
        super().__init__()
        self.splits = {"train": train, "valid": valid, "test": test}
        widths = {}
        for name, data in self.splits.items():
            if data is not None:
                widths[name] = data.num_features
        if len(set(widths.values())) > 1:
            raise DataError(f"the splits must have the same number of features, got {widths}")
        self.num_workers = num_workers
        self.batches = TrainingBatches(train, **batches)
        self._loader: BatchLoader | None = None

    def train_dataloader(self) -> BatchLoader:
        """Sampled batches; the loader can be resumed in the middle of an epoch."""
        rank, world_size = self._ranks()
        self._loader = BatchLoader(self.batches, num_workers=self.num_workers, rank=rank, world_size=world_size)
        return self._loader

    def val_dataloader(self) -> DataLoader[Tensor] | list[DataLoader[Tensor]]:
        """Runs of whole validation lists."""
        if self.splits["valid"] is None:
            return []
        return self._lists("valid")

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Runs of whole test lists."""
        return self._lists("test")

    def teardown(self, stage: str) -> None:
        """Stop the workers when the stage ends."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _lists(self, name: str) -> DataLoader[Tensor]:
        """Runs of whole lists, each (first query, last query + 1): every ``world_size``-th for a rank."""
        data = self.splits[name]
        if data is None:
            names = [split for split, lists in self.splits.items() if lists]
            raise DataError(f"there are no {name!r} queries; this run has {names}")
        rank, world_size = 0, 1
        if not data.all_lists.shared:  # otherwise this rank has its own lists only
            rank, world_size = self._ranks()
        runs = list(list_blocks(data.offsets, _EVALUATED, at_least=world_size))[rank::world_size]
        # A rank without a list has an empty run, since it takes part when results are put together.
        blocks = [torch.tensor(run) for run in runs or [(0, 0)]]
        return DataLoader(blocks, batch_size=None)  # type: ignore[arg-type]  # a list is a data set, too

    def _ranks(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size


class BatchLoader:
    """Iterates over the rest of an epoch of `TrainingBatches`; Lightning stores its position.

    Of ``num_workers`` processes that make batches, 0 makes them in this one. All ranks share every batch.
    """

    def __init__(self, batches: TrainingBatches, *, num_workers: int = 0, rank: int = 0, world_size: int = 1) -> None:
        check_whole("num_workers", num_workers, zero=True)
        self.epoch, self.position = 0, 0
        self.length = batches.batches_per_epoch
        self.sampler = _Upcoming(self)  # where Lightning looks for `set_epoch`
        self._loader = DataLoader(
            batches.shared_by(rank, world_size),
            batch_size=None,
            sampler=self.sampler,
            num_workers=num_workers,
            persistent_workers=bool(num_workers),
            worker_init_fn=_end_with_parent,
            collate_fn=_as_arrays,  # type: ignore[arg-type]  # of one item where `batch_size` is None
        )

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[TrainingBatch]:
        for arrays in self._received():
            self.position += 1
            if self.position == self.length:
                self.epoch, self.position = self.epoch + 1, 0
            *parts, whole = arrays
            yield TrainingBatch._make([*map(torch.from_numpy, parts), Whole(*whole.tolist())])

    def _received(self) -> Iterator[tuple[NDArray[Any], ...]]:
        """The batches of the workers, which may not start, or die while one sends a batch."""
        workers = self._loader.num_workers
        what = f"the {workers} processes that make batches could not be started"
        try:
            if workers and self._loader._iterator is None:
                _try_handles(2 * workers + 3)
                if not callable(signal.getsignal(signal.SIGCHLD)):  # Lightning takes it away at the end of a fit
                    signal_handling._SIGCHLD_handler_set = False
            arrays = iter(self._loader)
            what = "a DataLoader worker ended while it sent a batch"
            yield from arrays
        except (EOFError, OSError) as error:
            if not workers:
                raise
            raise LoaderError(f"{what} ({sentence(error)}); {_WITHOUT_WORKERS}") from error

    def state_dict(self) -> dict[str, int]:
        """Where the next batch comes from."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from there."""
        self.epoch, self.position = state["epoch"], state["position"]

    def close(self) -> None:
        """Stop the workers now instead of when the object is collected."""
        iterator: Any = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


def _try_handles(count: int) -> None:
    """Make the queues that PyTorch will need: if file handles run out within PyTorch, it prints a traceback as well."""
    queues: list[Any] = [multiprocessing.Queue() for _ in range(count)]
    for queue in queues:
        queue.close()


def _end_with_parent(_: int) -> None:
    """End a worker if its parent is killed: one that waits for room in its pipe would stay for ever."""
    parent = os.getppid()  # from Python 3.14 on a server of forks, which ends with the program

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _as_arrays(batch: TrainingBatch) -> tuple[NDArray[Any], ...]:
    """A batch as workers send it, in a pipe.

    Tensors would each take a file handle and shared memory; without these, the loader waits for ever.
    """
    return tuple(map(np.asarray, batch))


@contextmanager
def loader_failures_in_a_sentence() -> Iterator[None]:
    """Turn the error of a dead loader worker, which may come from anywhere in a fit, into one sentence."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        what = str(error).splitlines()[0].rstrip(". ")
        raise LoaderError(f"{what}; {_WITHOUT_WORKERS}") from error


class _Upcoming(Sampler[tuple[int, int]]):
    """The remaining items of the loader's epoch."""

    def __init__(self, loader: BatchLoader) -> None:
        self._owner = loader

    def __iter__(self) -> Iterator[tuple[int, int]]:
        owner = self._owner
        epoch = owner.epoch
        for position in range(owner.position, owner.length):
            yield epoch, position

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch, unless the loader is in it: a resumed run has a new loader."""
        if epoch != self._owner.epoch:
            self._owner.epoch, self._owner.position = epoch, 0
