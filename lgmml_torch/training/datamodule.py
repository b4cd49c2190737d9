"""`RankingDataModule`: loaders of training batches and of whole lists, for Lightning.

A loader of training batches stores only the position of the next batch. So a run that is resumed within an epoch gets
the batches it would have had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor, multiprocessing
from torch.utils.data import DataLoader, Dataset, Sampler

from lgmml_torch.checks import DataError, LoaderError, check_whole
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks
from lgmml_torch.training.batches import TrainingBatch, TrainingBatches, Whole

_WITHOUT_WORKERS = "with loader.num_workers=0 the run makes its batches itself"


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

    def split(self, name: str) -> RankingData:
        """The data of one split.

        Raises:
            DataError: when there is none of that name.
        """
        data = self.splits.get(name)
        if data is None:
            names = [split for split, lists in self.splits.items() if lists]
            raise DataError(f"there are no {name!r} queries; this run has {names}")
        return data

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
        data = self.split(name)
        rank, world_size = 0, 1
        if data.spread is None:  # otherwise this rank has its own lists only
            rank, world_size = self._ranks()
        blocks = ListBlocks(data.offsets, rank=rank, world_size=world_size)
        return DataLoader(blocks, batch_size=None)

    def _ranks(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size


class BatchLoader:
    """Iterates over the rest of an epoch of `TrainingBatches`; Lightning stores its position.

    Args:
        batches: of all epochs.
        num_workers: processes that make batches; 0 makes them in this one.
        rank: of this process.
        world_size: number of ranks, which share every batch.
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
            persistent_workers=num_workers > 0,
            collate_fn=_as_arrays,  # type: ignore[arg-type]  # of one item where `batch_size` is None
        )

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[TrainingBatch]:
        for arrays in self._received(self._start()):
            self.position += 1
            if self.position == self.length:
                self.epoch, self.position = self.epoch + 1, 0
            *parts, whole = arrays
            yield TrainingBatch._make([*map(torch.from_numpy, parts), Whole(*whole.tolist())])

    def _start(self) -> Iterator[tuple[NDArray[Any], ...]]:
        workers = self._loader.num_workers
        try:
            if workers and self._loader._iterator is None:
                _try_handles(2 * workers + 3)
            return iter(self._loader)
        except OSError as error:
            raise LoaderError(
                f"the {workers} processes that make batches could not be started ({error.strerror}); {_WITHOUT_WORKERS}"
            ) from error

    def _received(self, arrays: Iterator[tuple[NDArray[Any], ...]]) -> Iterator[tuple[NDArray[Any], ...]]:
        """The batches of the workers; a worker may die while it sends one."""
        try:
            yield from arrays
        except (EOFError, OSError) as error:
            if not self._loader.num_workers:
                raise
            what = f"a DataLoader worker ended while it sent a batch ({error})"
            raise LoaderError(f"{what}; {_WITHOUT_WORKERS}") from error

    def state_dict(self) -> dict[str, int]:
        """Where the next batch comes from."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from there."""
        self.epoch, self.position = state["epoch"], state["position"]

    def close(self) -> None:
        """Stop the workers now instead of when the object is collected."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        self._loader._iterator = None


def _try_handles(count: int) -> None:
    """Make the queues that PyTorch will need: a failure within PyTorch prints a traceback as well.

    Raises:
        OSError: there are not enough file handles.
    """
    queues: list[Any] = [multiprocessing.Queue() for _ in range(count)]
    for queue in queues:
        queue.close()


def _as_arrays(batch: TrainingBatch) -> tuple[NDArray[Any], ...]:
    """A batch as workers send it, in a pipe.

    Tensors would each take a file handle and shared memory; without these, the loader waits for ever.
    """
    return tuple(map(np.asarray, batch))


@contextmanager
def loader_failures_in_a_sentence() -> Iterator[None]:
    """Turn the error of a dead loader worker, which may come from anywhere in a fit, into one sentence.

    Raises:
        LoaderError: a worker died.
    """
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

    def __len__(self) -> int:
        return self._owner.length - self._owner.position

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch, unless the loader is in it: a resumed run has a new loader."""
        if epoch != self._owner.epoch:
            self._owner.epoch, self._owner.position = epoch, 0


class ListBlocks(Dataset[Tensor]):
    """Runs of whole lists for evaluation: item i is the tensor (first query, last query + 1).

    Rank ``rank`` takes every ``world_size``-th run, so each list is evaluated exactly once. A rank without a list has
    an empty run, since it takes part when results are put together.
    """

    def __init__(self, offsets: Tensor, *, documents: int = 32_768, rank: int = 0, world_size: int = 1) -> None:
        self.blocks = list(list_blocks(offsets, documents, at_least=world_size))[rank::world_size] or [(0, 0)]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.blocks[index])
