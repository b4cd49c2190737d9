"""`RankingDataModule`: loaders of sampled training batches and of whole lists, for Lightning."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch.utils.data import DataLoader

from lgmml_torch.checks import DataError
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.batches import BatchLoader, ListBlocks, TrainingBatches


class RankingDataModule(pl.LightningDataModule):
    """Training, validation and test queries as loaders.

    Batches name documents by row; their features and distances stay where they are. The same seed gives the same
    batches for any number of workers, and every list is evaluated exactly once, also by several processes.

    Args:
        train: what Φ is trained on.
        valid: what the best epoch is chosen by.
        test: what is looked at once, at the end.
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
        widths = {name: data.num_features for name, data in self.splits.items() if data is not None}
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
            raise DataError(f"there are no {name!r} queries; this run has {[n for n, d in self.splits.items() if d]}")
        return data

    def train_dataloader(self) -> BatchLoader:
        """Sampled batches; the loader can be resumed in the middle of an epoch."""
        rank, world_size = self._place()
        self._loader = BatchLoader(self.batches, num_workers=self.num_workers, rank=rank, world_size=world_size)
        return self._loader

    def val_dataloader(self) -> DataLoader[Tensor] | list[DataLoader[Tensor]]:
        """Runs of whole validation lists."""
        return self._lists("valid") if self.splits["valid"] is not None else []

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
        rank, world_size = self._place() if data.spread is None else (0, 1)  # all of the lists that are here
        blocks = ListBlocks(data.offsets, rank=rank, world_size=world_size)
        return DataLoader(blocks, batch_size=None)

    def _place(self) -> tuple[int, int]:
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
