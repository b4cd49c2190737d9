"""Training batches of lists and of sampled triplets, made in loader workers, the same for any number of them.

Every draw is a pure function of (seed, epoch, batch): a worker is told which batch to make, and makes it from a
generator seeded with these three numbers. A loader remembers only the next batch it owes, so a run resumed in the
middle of an epoch goes on with exactly the batches it would have had.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lgmml_torch.checks import ConfigError, DataError, check_choice, check_positive
from lgmml_torch.functional.warp import Draws, negative_table, sample_list_draws, sample_triplets
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import gather_segments, list_blocks

BATCHING = ("lists", "triplets")


class TrainingBatch(NamedTuple):
    """Some lists, and for losses that draw, P tuples of (list, positive, T drawn negatives) of them.

    Documents are named by their place in ``rows``. Triplets are lists too: the positive and its draws, each with the
    weights Φ of its query.

    Attributes:
        rows: ``(M,)`` documents the batch needs, as rows of the training data.
        lists: ``(B,)`` the query of each list.
        list_offsets: ``(B+1,)`` where each list stands in ``rows``.
        list_weights: ``(B,)`` of the queries.
        labels: ``(M,)``.
        positives: ``(P,)`` place of the positive in ``rows``.
        negatives: ``(P, T)`` places of the drawn negatives.
        num_negatives: ``(P,)`` how many documents they were drawn from.
        num_draws: ``(P,)`` how many of the T draws count.
        weights: ``(P,)``.
    """

    rows: Tensor
    lists: Tensor
    list_offsets: Tensor
    list_weights: Tensor
    labels: Tensor
    positives: Tensor
    negatives: Tensor
    num_negatives: Tensor
    num_draws: Tensor
    weights: Tensor

    @property
    def queries(self) -> Tensor:  # (P,)
        """The query of each tuple."""
        return self.lists[torch.bucketize(self.positives, self.list_offsets, right=True) - 1]


class TrainingBatches(Dataset[TrainingBatch]):
    """All batches of all epochs; item ``(epoch, batch)`` is made on demand.

    Args:
        data: training data; labels, offsets and, where there are any, query weights are used.
        batching: ``"lists"``: whole lists, each once per epoch in random order, draws for all their positives.
            ``"triplets"``: queries and positives drawn independently, as in the paper.
        batch_size: lists, or triplets, per batch.
        max_draws: draws per positive; None allows as many as it has negatives (the paper's limit).
        negatives: ``"lower"`` labelled than the positive, or ``"zero"`` labelled only.
        seed: of all draws.
        batches_per_epoch: for triplets; by default an epoch has one triplet for each positive document.
        draws: whether negatives are drawn; losses of whole lists need none.

    Raises:
        DataError: when no query has a positive and something lower to draw.
    """

    def __init__(
        self,
        data: RankingData,
        *,
        batching: str = "lists",
        batch_size: int = 32,
        max_draws: int | None = 10,
        negatives: str = "lower",
        seed: int = 0,
        batches_per_epoch: int | None = None,
        draws: bool = True,
    ) -> None:
        check_choice("batching", batching, BATCHING)
        check_positive("batch_size", batch_size)
        if batching == "triplets" and not draws:
            raise ConfigError("`batching` must be 'lists' for a loss of whole lists, got 'triplets'")
        self.table = negative_table(data.labels, data.offsets, negatives=negatives)
        if not len(self.table.queries):
            raise DataError(
                "nothing to learn from: no query has a relevant document and a less relevant one; are all labels equal?"
            )
        self.offsets, self.labels, self.query_weights = data.offsets, data.labels, data.query_weights
        self.batching, self.batch_size, self.max_draws, self.seed = batching, batch_size, max_draws, seed
        self.draws = draws
        items = len(self.table.queries) if batching == "lists" else len(self.table.positives)
        whole = -(-items // batch_size)
        self.batches_per_epoch = whole if batching == "lists" else batches_per_epoch or whole
        check_positive("batches_per_epoch", self.batches_per_epoch)

    def __getitem__(self, item: tuple[int, int]) -> TrainingBatch:
        epoch, batch = item
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch, batch))
        if self.batching == "triplets":
            draws = sample_triplets(self.table, self.batch_size, max_draws=self.max_draws, generator=generator)
            return self._triplets(draws)
        shuffled = torch.randperm(
            len(self.table.queries), generator=torch.Generator().manual_seed(mixed_seed(self.seed, epoch, -1))
        )
        chosen = shuffled[batch * self.batch_size : (batch + 1) * self.batch_size]
        lists = self.table.queries[chosen]
        asked = lists if self.draws else lists[:0]
        return self._lists(lists, sample_list_draws(self.table, asked, max_draws=self.max_draws, generator=generator))

    def _weights_of(self, queries: Tensor) -> Tensor:
        if self.query_weights is None:
            return torch.ones(len(queries), dtype=torch.float64)
        return self.query_weights[queries].double()

    def _triplets(self, draws: Draws) -> TrainingBatch:
        """Every positive and negative is a row of its own: most are different, and looking for doubles costs more."""
        count, width = draws.negatives.shape
        rows = torch.cat([draws.positives[:, None], draws.negatives], dim=1).reshape(-1)
        places = torch.arange(count * (width + 1)).view(count, width + 1)
        weights = self._weights_of(draws.queries)
        return TrainingBatch(
            rows,
            draws.queries,
            torch.arange(count + 1) * (width + 1),
            weights,
            self.labels[rows],
            places[:, 0].contiguous(),
            places[:, 1:],
            draws.num_negatives,
            draws.num_draws,
            draws.weights * weights,
        )

    def _lists(self, lists: Tensor, draws: Draws) -> TrainingBatch:
        rows, list_offsets = gather_segments(self.offsets, lists)
        shift = list_offsets[:-1] - self.offsets[lists]  # from a row of the data to its place in the batch
        owner = torch.empty(len(self.offsets) - 1, dtype=torch.long)
        owner[lists] = torch.arange(len(lists))
        moved = shift[owner[draws.queries]]
        weights = self._weights_of(lists)
        return TrainingBatch(
            rows,
            lists,
            list_offsets,
            weights,
            self.labels[rows],
            draws.positives + moved,
            draws.negatives + moved[:, None],
            draws.num_negatives,
            draws.num_draws,
            draws.weights * weights[owner[draws.queries]],
        )


class BatchLoader:
    """Iterates over one epoch of `TrainingBatches` at a time, from where it stands; Lightning stores where that is.

    Args:
        batches: what to load.
        num_workers: processes that make batches; 0 makes them here.
        rank: of this process among those that train together.
        world_size: how many there are; together they see each batch once.
    """

    def __init__(self, batches: TrainingBatches, *, num_workers: int = 0, rank: int = 0, world_size: int = 1) -> None:
        check_positive("num_workers", num_workers, zero=True)
        self.batches, self.rank, self.world_size = batches, rank, world_size
        self.epoch, self.position = 0, 0
        # Leaves out a last round that would not have a batch for every process.
        self.length = max(1, batches.batches_per_epoch // world_size)
        self.sampler = _Upcoming(self)  # where Lightning looks for `set_epoch`
        self._loader = DataLoader(
            batches,
            batch_size=None,
            sampler=self.sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[TrainingBatch]:
        for batch in self._loader:
            self.position += 1
            if self.position == self.length:
                self.epoch, self.position = self.epoch + 1, 0
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch comes from."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.epoch, self.position = state["epoch"], state["position"]

    def close(self) -> None:
        """Stop the workers now instead of when the object is collected."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        self._loader._iterator = None


class _Upcoming(Sampler[tuple[int, int]]):
    """The items that are left of the loader's current epoch."""

    def __init__(self, loader: BatchLoader) -> None:
        self._owner = loader

    def __iter__(self) -> Iterator[tuple[int, int]]:
        owner = self._owner
        epoch = owner.epoch
        for position in range(owner.position, owner.length):
            yield epoch, position * owner.world_size + owner.rank

    def __len__(self) -> int:
        return self._owner.length - self._owner.position

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch, unless the loader is in it: a run that goes on after a whole epoch has a new loader."""
        if epoch != self._owner.epoch:
            self._owner.epoch, self._owner.position = epoch, 0


class ListBlocks(Dataset[Tensor]):
    """Runs of whole lists for evaluation: item i is the tensor (first query, last query + 1).

    With several processes, process ``rank`` of ``world_size`` takes every ``world_size``-th run: each list is
    evaluated exactly once, none is repeated to even out the counts.
    """

    def __init__(self, offsets: Tensor, *, documents: int = 32_768, rank: int = 0, world_size: int = 1) -> None:
        self.blocks = list(list_blocks(offsets, documents, at_least=world_size))[rank::world_size]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.blocks[index])


def mixed_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers, so that neighbouring ones give unrelated streams.

    >>> mixed_seed(0, 1, 2) != mixed_seed(0, 2, 1)
    True
    """
    state = np.random.SeedSequence([number % 2**63 for number in numbers]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
