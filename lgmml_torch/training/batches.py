"""Training batches of lists or of sampled triplets.

Every draw is a pure function of (seed, epoch, batch), so batches do not depend on the number of loader workers. Ranks
share each batch: every rank draws the whole batch and takes its part of it. So batches do not depend on the number of
ranks either, and a run may be resumed with another number.
"""

from __future__ import annotations

from copy import copy
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lgmml_torch.checks import ConfigError, DataError, check_choice, check_whole
from lgmml_torch.functional.warp import Among, Draws, negative_table, sample_list_draws, sample_triplets
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import gather_segments, segment_max

_BATCHING = ("lists", "triplets")


class Whole(NamedTuple):
    """Sizes of a batch that ranks share."""

    lists: int
    rows: int
    tuples: int


class TrainingBatch(NamedTuple):
    """Some lists, and for losses that draw, P tuples of (list, positive, T drawn negatives) of them.

    Documents are numbered by their place in ``rows``. Triplets are lists too: the positive and its draws, each with the
    weights Φ of its query. Where ranks share a batch, this is the part of one of them.

    Attributes:
        rows: ``(M,)`` documents the batch needs, as rows of the training data.
        lists: ``(B,)`` the query of each list, numbered in the whole training data.
        list_offsets: ``(B+1,)`` where each list stands in ``rows``.
        list_weights: ``(B,)`` of the queries.
        labels: ``(M,)``.
        document_weights: ``(M,)``, or empty where documents have none; ``weights`` has those of the positives in it.
        positives: ``(P,)`` place of the positive in ``rows``.
        negatives: ``(P, T)`` places of the drawn negatives.
        num_negatives: ``(P,)`` number of documents they were drawn from.
        num_draws: ``(P,)`` number of the T draws that count.
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
        """Weight of the relevance of each document; None without weights."""
        if len(self.document_weights) != len(self.rows):
            return None
        return self.document_weights

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
        check_choice("batching", batching, _BATCHING)
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
            draws = sample_triplets(self.table, self.batch_size, max_draws=self.max_draws, generator=generator)
            return self._triplets(draws)
        shuffled = torch.randperm(
            len(self.queries), generator=torch.Generator().manual_seed(mixed_seed(self.seed, epoch, -1))
        )
        chosen = shuffled[batch * self.batch_size : (batch + 1) * self.batch_size]
        return self._lists(self.queries[chosen], generator)

    def _own(self, lists: Tensor) -> Tensor:
        """Whether each list of a batch belongs to this rank."""
        if self.spread is not None:
            return self.spread.owner[lists] == self.spread.rank
        rank, world_size = self.share
        return torch.arange(len(lists)) % world_size == rank

    def _weights_of(self, queries: Tensor) -> Tensor:
        if self.query_weights is None:
            return torch.ones(len(queries), dtype=torch.float64)
        return self.query_weights[queries].double()

    def _of_documents(self, rows: Tensor) -> Tensor:
        """Weights of documents, empty without weights."""
        if self.document_weights is None:
            return torch.empty(0)
        return self.document_weights[rows]

    def _of_tuples(self, draws: Draws, weights: Tensor) -> Tensor:
        """The weight of each tuple: its own times its query's and its positive's."""
        total = draws.weights * weights
        if self.document_weights is not None:
            total = total * self.document_weights[draws.positives].double()
        return total

    def _triplets(self, drawn: Draws) -> TrainingBatch:
        """Every positive and negative is a row: most are different, so duplicates are not looked for."""
        rank, world_size = self.share
        draws = Draws(*(getattr(drawn, field.name)[rank::world_size] for field in fields(drawn)))
        (count, width), total = draws.negatives.shape, len(drawn.negatives)
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
            torch.arange(total * (width + 1)).view(-1, width + 1)[rank::world_size].reshape(-1),
            Whole(total, total * (width + 1), total),
        )

    def _lists(self, chosen: Tensor, generator: torch.Generator) -> TrainingBatch:
        own = self._own(chosen)
        queries = chosen[own]
        lists = queries
        if self.spread is not None:
            lists = torch.searchsorted(self.spread.own, queries)
        counts = self.num_positives[chosen] * self.draws
        drawn, most = lists[:0], 0
        if self.draws and len(chosen):
            drawn, most = lists, int(self.most_negatives[chosen].max())
        among = Among(own.repeat_interleave(counts).nonzero()[:, 0], int(counts.sum()), most)
        draws = sample_list_draws(self.table, drawn, max_draws=self.max_draws, generator=generator, among=among)
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


def mixed_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers, so that neighbouring ones give unrelated streams.

    >>> mixed_seed(0, 1, 2) != mixed_seed(0, 2, 1)
    True
    """
    state = np.random.SeedSequence([number % 2**63 for number in numbers]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
