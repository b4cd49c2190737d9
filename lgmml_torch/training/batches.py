"""Training batches of lists and of sampled triplets, made in loader workers, the same for any number of them.

Every draw is a pure function of (seed, epoch, batch): a worker is told which batch to make, and makes it from a
generator seeded with these three numbers. A loader remembers only the next batch it owes, so a run resumed in the
middle of an epoch goes on with exactly the batches it would have had.

Processes that train together share each batch: all of them draw the whole of it, and each takes its part, the lists it
has, or every n-th where all have all of them. So the batches, and what is learned from them, do not depend on how many
processes there are, and a run may go on with another number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, multiprocessing
from torch.utils.data import DataLoader, Dataset, Sampler

from lgmml_torch.checks import ConfigError, DataError, LoaderError, check_choice, check_whole
from lgmml_torch.functional.warp import Among, Draws, negative_table, sample_list_draws, sample_triplets
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import gather_segments, list_blocks, segment_max

BATCHING = ("lists", "triplets")
_WITHOUT_WORKERS = "with loader.num_workers=0 the run makes its batches itself"


class Whole(NamedTuple):
    """How large a batch is that processes share."""

    lists: int
    rows: int
    tuples: int


class TrainingBatch(NamedTuple):
    """Some lists, and for losses that draw, P tuples of (list, positive, T drawn negatives) of them.

    Documents are named by their place in ``rows``. Triplets are lists too: the positive and its draws, each with the
    weights Φ of its query. Where processes share a batch, this is the share of one of them.

    Attributes:
        rows: ``(M,)`` documents the batch needs, as rows of the training data.
        lists: ``(B,)`` the query of each list, numbered in the whole training data.
        list_offsets: ``(B+1,)`` where each list stands in ``rows``.
        list_weights: ``(B,)`` of the queries.
        labels: ``(M,)``.
        document_weights: ``(M,)``, or empty where documents have none; ``weights`` has those of the positives in it.
        positives: ``(P,)`` place of the positive in ``rows``.
        negatives: ``(P, T)`` places of the drawn negatives.
        num_negatives: ``(P,)`` how many documents they were drawn from.
        num_draws: ``(P,)`` how many of the T draws count.
        weights: ``(P,)``.
        places: ``(M,)`` where the documents stand in the whole batch.
        whole: sizes of the whole batch.
    """

    rows: Tensor
    lists: Tensor
    list_offsets: Tensor
    list_weights: Tensor
    labels: Tensor
    document_weights: Tensor
    positives: Tensor
    negatives: Tensor
    num_negatives: Tensor
    num_draws: Tensor
    weights: Tensor
    places: Tensor
    whole: Whole

    @property
    def relevance_weights(self) -> Tensor | None:  # (M,)
        """What the relevance of each document counts; None where nobody says."""
        return self.document_weights if len(self.document_weights) == len(self.rows) else None

    @property
    def queries(self) -> Tensor:  # (P,)
        """The query of each tuple."""
        return self.lists[torch.bucketize(self.positives, self.list_offsets, right=True) - 1]


class TrainingBatches(Dataset[TrainingBatch]):
    """All batches of all epochs; item ``(epoch, batch)`` is made on demand.

    Args:
        data: training data; labels, offsets and, where there are any, weights are used.
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
        check_whole("batch_size", batch_size)
        for name, value in (("max_draws", max_draws), ("batches_per_epoch", batches_per_epoch)):
            if value is not None:
                check_whole(name, value)
        if batching == "triplets" and not draws:
            raise ConfigError("`batching` must be 'lists' for a loss of whole lists, got 'triplets'")
        self.table = negative_table(data.labels, data.offsets, negatives=negatives)
        self.share = (0, 1)
        self.offsets, self.labels, self.query_weights = data.offsets, data.labels, data.query_weights
        self.document_weights = data.document_weights
        self.batching, self.batch_size, self.max_draws, self.seed = batching, batch_size, max_draws, seed
        self.draws = draws
        self.spread = data.spread
        self.sizes = data.all_sizes
        if self.spread is not None and batching == "triplets":
            raise ConfigError("`batching` must be 'lists' for data that processes share, got 'triplets'")
        self.num_positives = data.of_all_queries(self.table.positive_offsets.diff())
        most = segment_max(self.table.count.double(), data.offsets, empty=0.0).long()
        self.most_negatives = data.of_all_queries(most)
        self.queries = self.num_positives.nonzero()[:, 0]
        if not len(self.queries):
            raise DataError(
                "nothing to learn from: no query has a relevant document and a less relevant one; are all labels equal?"
            )
        items = len(self.queries) if batching == "lists" else len(self.table.positives)
        whole = -(-items // batch_size)
        self.batches_per_epoch = whole if batching == "lists" else batches_per_epoch or whole

    def shared_by(self, rank: int, world_size: int) -> TrainingBatches:
        """The same batches, of which process ``rank`` of ``world_size`` gets its part."""
        mine = copy(self)
        mine.share = (rank, world_size)
        return mine

    def __getitem__(self, item: tuple[int, int]) -> TrainingBatch:
        epoch, batch = item
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch, batch))
        if self.batching == "triplets":
            draws = sample_triplets(self.table, self.batch_size, max_draws=self.max_draws, generator=generator)
            return self._triplets(draws)
        shuffled = torch.randperm(
            len(self.queries), generator=torch.Generator().manual_seed(mixed_seed(self.seed, epoch, -1))
        )
        chosen = shuffled[batch * self.batch_size : (batch + 1) * self.batch_size]
        return self._lists(self.queries[chosen], generator)

    def _own(self, lists: Tensor) -> Tensor:
        """Which of the lists of a batch are for this process."""
        if self.spread is not None:
            return self.spread.owner[lists] == self.spread.rank
        rank, world_size = self.share
        return torch.arange(len(lists)) % world_size == rank

    def _weights_of(self, queries: Tensor) -> Tensor:
        if self.query_weights is None:
            return torch.ones(len(queries), dtype=torch.float64)
        return self.query_weights[queries].double()

    def _of_documents(self, rows: Tensor) -> Tensor:
        """Weights of documents, empty where there are none."""
        return torch.empty(0) if self.document_weights is None else self.document_weights[rows]

    def _of_tuples(self, draws: Draws, weights: Tensor) -> Tensor:
        """What each tuple counts: its own weight, its query's, and its positive's."""
        found = draws.weights * weights
        return found if self.document_weights is None else found * self.document_weights[draws.positives].double()

    def _triplets(self, drawn: Draws) -> TrainingBatch:
        """Every positive and negative is a row of its own: most are different, and looking for doubles costs more."""
        rank, world_size = self.share
        draws = Draws(*(getattr(drawn, field.name)[rank::world_size] for field in fields(drawn)))
        (count, width), all_of_them = draws.negatives.shape, len(drawn.negatives)
        rows = torch.cat([draws.positives[:, None], draws.negatives], dim=1).reshape(-1)
        places = torch.arange(count * (width + 1)).view(count, width + 1)
        weights = self._weights_of(draws.queries)
        return TrainingBatch(
            rows,
            draws.queries,
            torch.arange(count + 1) * (width + 1),
            weights,
            self.labels[rows],
            self._of_documents(rows),
            places[:, 0].contiguous(),
            places[:, 1:],
            draws.num_negatives,
            draws.num_draws,
            self._of_tuples(draws, weights),
            torch.arange(all_of_them * (width + 1)).view(-1, width + 1)[rank::world_size].reshape(-1),
            Whole(all_of_them, all_of_them * (width + 1), all_of_them),
        )

    def _lists(self, chosen: Tensor, generator: torch.Generator) -> TrainingBatch:
        own = self._own(chosen)
        queries = chosen[own]
        lists = queries if self.spread is None else torch.searchsorted(self.spread.own, queries)
        counts = self.num_positives[chosen] * self.draws
        most = int(self.most_negatives[chosen].max()) if len(chosen) and self.draws else 0
        among = Among(own.repeat_interleave(counts).nonzero()[:, 0], int(counts.sum()), most)
        asked = lists if self.draws else lists[:0]
        draws = sample_list_draws(self.table, asked, max_draws=self.max_draws, generator=generator, among=among)
        rows, list_offsets = gather_segments(self.offsets, lists)
        shift = list_offsets[:-1] - self.offsets[lists]  # from a row of the data to its place in the batch
        owner = torch.empty(len(self.offsets) - 1, dtype=torch.long)
        owner[lists] = torch.arange(len(lists))
        moved = shift[owner[draws.queries]]
        weights = self._weights_of(lists)
        sizes = self.sizes[chosen]
        return TrainingBatch(
            rows,
            queries,
            list_offsets,
            weights,
            self.labels[rows],
            self._of_documents(rows),
            draws.positives + moved,
            draws.negatives + moved[:, None],
            draws.num_negatives,
            draws.num_draws,
            self._of_tuples(draws, weights[owner[draws.queries]]),
            own.repeat_interleave(sizes).nonzero()[:, 0],
            Whole(len(chosen), int(sizes.sum()), among.total),
        )


class BatchLoader:
    """Iterates over one epoch of `TrainingBatches` at a time, from where it stands; Lightning stores where that is.

    Args:
        batches: what to load.
        num_workers: processes that make batches; 0 makes them here.
        rank: of this process among those that train together.
        world_size: how many there are; they share every batch.
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
        """What comes from the workers, as long as whole batches come: one may die while it sends."""
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
        """Go on from there."""
        self.epoch, self.position = state["epoch"], state["position"]

    def close(self) -> None:
        """Stop the workers now instead of when the object is collected."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        self._loader._iterator = None


def _try_handles(count: int) -> None:
    """What PyTorch will ask for; where that fails within it, its half-made iterator adds a traceback.

    Raises:
        OSError: there are not that many.
    """
    queues: list[Any] = [multiprocessing.Queue() for _ in range(count)]
    for queue in queues:
        queue.close()


def _as_arrays(batch: TrainingBatch) -> tuple[NDArray[Any], ...]:
    """What workers send: bytes in a pipe. Tensors would each take a file handle and a piece of shared memory.

    Where one of these runs out, tensors are lost on the way, and the loader waits for them for ever.
    """
    return tuple(np.asarray(part) for part in batch)


@contextmanager
def telling_loader_failures() -> Iterator[None]:
    """Around a fit: say in one sentence that workers died or could not be started.

    PyTorch notices their end by a signal, so its error may come from anywhere in the fit.

    Raises:
        LoaderError: that sentence.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        what = str(error).splitlines()[0].rstrip(". ")
        raise LoaderError(f"{what}; {_WITHOUT_WORKERS}") from error


class _Upcoming(Sampler[tuple[int, int]]):
    """The items that are left of the loader's current epoch."""

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
        """Begin that epoch, unless the loader is in it: a run that goes on after a whole epoch has a new loader."""
        if epoch != self._owner.epoch:
            self._owner.epoch, self._owner.position = epoch, 0


class ListBlocks(Dataset[Tensor]):
    """Runs of whole lists for evaluation: item i is the tensor (first query, last query + 1).

    With several processes, process ``rank`` of ``world_size`` takes every ``world_size``-th run: each list is
    evaluated exactly once, none is repeated to even out the counts. A process without a list has an empty run: it must
    be there when results are put together.
    """

    def __init__(self, offsets: Tensor, *, documents: int = 32_768, rank: int = 0, world_size: int = 1) -> None:
        self.blocks = list(list_blocks(offsets, documents, at_least=world_size))[rank::world_size] or [(0, 0)]

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
