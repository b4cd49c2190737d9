"""Several processes as one: the process group, and lists of a set that processes share.

Everything here is written against ``torch.distributed``: torchrun, SLURM and Ray set the same environment variables.
With one process nothing is sent.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.files import scratch_array, write_bytes
from lgmml_torch.segments import argsort_segments, gather_segments, offsets_from_sizes, positions

if TYPE_CHECKING:
    from lgmml_torch.ragged import RankingData

TIMEOUT = timedelta(minutes=30)  # how long one process waits for the others, e.g. while they read their data
_JOINED = "LGMML_JOINED"  # environment variable: the process that called `join`
_ROWS_AT_ONCE = 4096  # rows of features that are copied at once
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def join() -> None:
    """Initialize the process group if RANK and WORLD_SIZE are set; Ray Train has done so already.

    Raises:
        ConfigError: the other processes could not be reached.
    """
    if dist.is_initialized():
        os.environ[_JOINED] = str(os.getpid())
        return
    own, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if own is None or size is None:
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
    try:
        if int(size) < 2:
            return
        dist.init_process_group(backend, rank=int(own), world_size=int(size), timeout=TIMEOUT)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"process {own} of {size} could not join the others: {reason}") from error
    os.environ[_JOINED] = str(os.getpid())
    leave_at_exit()


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_at_exit() -> None:
    """Destroy the process group before the program ends: gloo's threads would abort it."""
    atexit.unregister(leave)
    atexit.register(leave)


def joined() -> bool:
    """Whether `join` found other processes; false for processes that Lightning starts in a fit."""
    return dist.is_initialized() and os.environ.get(_JOINED) == str(os.getpid())


def rank() -> int:
    """The rank of this process.

    >>> rank(), world_size()
    (0, 1)
    """
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def broadcast(value: Any) -> Any:
    """The value of rank 0, on all processes: text, numbers, or lists of these."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_gather(value: Any) -> list[Any]:
    """The value of every process, in the order of ranks; for small values."""
    size = world_size()
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value)
    return values


def all_reduce(values: Tensor, operation: str) -> Tensor:
    """The "sum", "min" or "max" over processes, in place."""
    if world_size() > 1:
        dist.all_reduce(values, _OPERATIONS[operation])
    return values


def broadcast_tensors(tensors: dict[str, Tensor]) -> None:
    """Overwrite tensors by those of rank 0."""
    if world_size() == 1:
        return
    for name in sorted(tensors):
        if tensors[name].numel():
            dist.broadcast(tensors[name], src=0)


def broadcast_file(path: Path) -> None:
    """Give the file of rank 0 to processes that have none, or another one, under the same name."""
    if world_size() == 1:
        return
    held = b""
    if path.is_file():
        held = path.read_bytes()
    digests = all_gather(hashlib.sha256(held).hexdigest())
    if len(set(digests)) == 1:
        return
    content = broadcast(held if rank() == 0 else None)
    if content and content != held:
        write_bytes(path, content)


@dataclass(frozen=True, eq=False)
class SharedLists:
    """A set whose lists several processes share: how long every list is, and which process has it.

    Lists are numbered as they would be on one process. A process keeps the documents of its own lists, one list after
    the other in the order of their numbers.
    """

    sizes: Tensor  # (Q,) documents of every list
    owner: Tensor  # (Q,) the process that has it
    rank: int = 0  # of this process
    traffic: Counter[str] = field(default_factory=Counter)  # what was sent: ``calls`` and ``bytes``

    def __post_init__(self) -> None:
        if self.sizes.shape != self.owner.shape:
            raise LGMMLError(f"`owner` must name a process for each of {len(self.sizes)} lists, got {len(self.owner)}")

    @staticmethod
    def owners(
        sizes: Tensor,  # (n,)
        processes: int | None = None,
    ) -> Tensor:  # (n,)
        """The process that has each of some pieces: runs of pieces with about the same number of documents.

        Every process works this out alike. With fewer pieces than processes some have none.
        """
        middles = 2 * sizes.cumsum(0) - sizes  # twice, so that they are whole numbers
        return middles * (processes or world_size()) // (2 * max(1, int(sizes.sum())))

    @cached_property
    def own(self) -> Tensor:  # (q,)
        """Numbers of the lists that this process has."""
        return (self.owner == self.rank).nonzero()[:, 0]

    @cached_property
    def offsets(self) -> Tensor:  # (Q+1,)
        """Where each list would begin if one process had all."""
        return offsets_from_sizes(self.sizes)

    @cached_property
    def most(self) -> int:
        """Documents of the process that has most."""
        if not len(self.owner):
            return 0
        return int(torch.bincount(self.owner, self.sizes.double()).max())

    @cached_property
    def own_rows(self) -> Tensor:  # (n,)
        """For each document of this process, its row if one process had all."""
        sizes = self.sizes[self.own]
        starts = self.offsets[self.own] - offsets_from_sizes(sizes)[:-1]
        return starts.repeat_interleave(sizes) + torch.arange(int(sizes.sum()))

    @cached_property
    def _shift(self) -> Tensor:  # (Q,) from a row of the whole set to a row of its owner
        starts = torch.empty_like(self.sizes)
        for owner in set(self.owner.tolist()):
            lists = self.owner == owner
            starts[lists] = offsets_from_sizes(self.sizes[lists])[:-1]
        return starts - self.offsets[:-1]

    def take(
        self,
        values: Tensor,  # (n, ...) of the documents of this process
        rows: Tensor,  # (M,) of the whole set, the same on every process
    ) -> Tensor:  # (M, ...)
        """The values of some documents, wherever they are, in the order asked for; the same bits on every process."""
        owner = self.owner[self._lists(rows)]
        return self.exchange(values[self.here(rows).to(values.device)], owner)

    def here(
        self,
        rows: Tensor,  # (M,) of the whole set
    ) -> Tensor:  # (m,)
        """Those of the rows that this process has, as rows of its own, in the order given."""
        lists = self._lists(rows)
        mine = self.owner[lists] == self.rank
        return rows[mine] + self._shift[lists[mine]]

    def _lists(self, rows: Tensor) -> Tensor:  # (M,)
        return torch.bucketize(rows, self.offsets, right=True) - 1

    def per_query(
        self,
        values: Tensor,  # (q, ...) one for each list of this process
    ) -> Tensor:  # (Q, ...)
        """One value for every list of the set, on every process."""
        return self.exchange(values, self.owner)

    def all_ids(self, ids: Sequence[Any]) -> tuple[Any, ...]:
        """The id of every list of the set, of which this process has those of its own lists."""
        each = list(map(iter, all_gather(list(ids))))
        return tuple([next(each[owner]) for owner in self.owner.tolist()])

    def collect(
        self,
        values: Tensor,  # (n, C) of the documents of this process
        receiver: int,
    ) -> Tensor:  # (N, C), or nothing
        """Values of all documents, in the order of the whole set, on one process; the others get no rows."""
        if world_size() == 1:
            return values
        if self.rank != receiver:
            if len(values):
                dist.send(values.contiguous(), receiver)
                self.traffic.update(calls=1, bytes=values.nbytes)
            return values[:0]
        owner = self.owner.repeat_interleave(self.sizes)
        whole = values.new_empty((len(owner), *values.shape[1:]))
        for source, count in enumerate(torch.bincount(owner).tolist()):
            if not count:
                continue
            part = values
            if source != self.rank:
                part = values.new_empty((count, *values.shape[1:]))
                dist.recv(part, source)
            whole[(owner == source).to(whole.device)] = part
        return whole

    def all_reduce(self, values: Tensor, operation: str) -> Tensor:
        """`all_reduce` over processes, counted in `traffic`."""
        if world_size() > 1:
            self.traffic.update(calls=1, bytes=values.nbytes)
        return all_reduce(values, operation)

    def all_gather(self, arrays: Sequence[Any]) -> list[Any]:
        """`all_gather` of arrays, or of tuples of arrays, counted in `traffic`; for small ones."""
        if world_size() > 1:
            size = 0
            for one in arrays:
                parts = one if isinstance(one, tuple) else (one,)
                for part in parts:
                    size += part.nbytes
            self.traffic.update(calls=1, bytes=size)
        return all_gather(arrays)

    def part(
        self,
        lists: Tensor,  # (C,) numbers of lists, rising
    ) -> SharedLists:
        """Some of the lists as a set of their own."""
        return SharedLists(self.sizes[lists], self.owner[lists], self.rank, self.traffic)

    def exchange(
        self,
        values: Tensor,  # (m, ...) what this process has of them, in order
        owner: Tensor,  # (M,) the process that has each of them
    ) -> Tensor:  # (M, ...)
        """Values of which every process has some, all of them on every process, in their order."""
        size = world_size()
        if size == 1:
            return values
        counts = torch.bincount(owner, minlength=size).tolist()
        sent = values.new_zeros((max(counts), *values.shape[1:]))
        sent[: len(values)] = values
        received = [torch.empty_like(sent) for _ in range(size)]
        dist.all_gather(received, sent)
        self.traffic.update(calls=1, bytes=sent.nbytes)
        whole = values.new_empty((len(owner), *values.shape[1:]))
        for source, part in enumerate(received):
            whole[(owner == source).to(whole.device)] = part[: counts[source]]
        return whole


def query_numbers(data: RankingData) -> Tensor:  # (q,)
    """The numbers of these queries in the whole set."""
    if data.shared_lists is None:
        return torch.arange(data.num_queries)
    return data.shared_lists.own


def all_qids(data: RankingData) -> tuple[Hashable, ...]:
    """The ids of all queries of the whole set."""
    if data.shared_lists is None:
        return data.qids
    return data.shared_lists.all_ids(data.qids)


def limit_documents(data: RankingData, documents: int, *, seed: int = 0, folder: Path | None = None) -> RankingData:
    """A random sample of whole lists with at most ``documents`` documents, but at least one list.

    The sample does not depend on the number of processes. A list stays on its process; features of shared lists are
    copied to a file in ``folder``.
    """
    sizes = data.all_sizes
    if int(sizes.sum()) <= documents:
        return data
    drawn = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    within = sizes[drawn].cumsum(0) <= documents
    within[0] = True
    queries = drawn[within].sort().values
    if data.shared_lists is None:
        return data.select(queries)
    own = torch.isin(data.shared_lists.own, queries).nonzero()[:, 0]
    rows = gather_segments(data.offsets, own)[0]
    part = data.replace(features=data.features[:, :0]).select(own)
    return part.replace(
        features=_copied(data, rows, lambda some: data.features[some], folder),
        feature_names=data.feature_names,
        categories=data.categories,
        shared_lists=data.shared_lists.part(queries),
    )


def gather_lists(data: RankingData, folder: Path | None = None) -> RankingData:
    """All lists on every process; features of shared lists are copied to a file in ``folder``."""
    if data.shared_lists is None:
        return data
    if world_size() == 1:
        return data.replace(shared_lists=None)
    offsets = data.all_offsets
    rows = torch.arange(int(offsets[-1]))
    order = torch.empty_like(data.order)  # of the documents of a list, as the caller gave them
    order[argsort_segments(data.order, data.offsets)] = positions(data.offsets)
    weights = data.query_weights
    if weights is not None:
        weights = data.of_all_queries(weights)

    def gathered(values: Tensor) -> Tensor:
        if values is data.features:
            return values
        return data.take(values, rows)

    others = data.of_documents(gathered)
    return data.replace(
        **{**others, "features": _copied(data, rows, lambda some: data.take(data.features, some), folder)},
        offsets=offsets,
        qids=tuple(range(len(offsets) - 1)),
        order=data.take(order, rows) + offsets[:-1].repeat_interleave(offsets.diff()),
        doc_ids=None,
        query_weights=weights,
        shared_lists=None,
    )


def _copied(data: RankingData, rows: Tensor, features_of: Callable[[Tensor], Tensor], folder: Path | None) -> Tensor:
    """Features of some documents in a memory-mapped file, copied block by block."""
    kept = torch.from_numpy(scratch_array((len(rows), data.num_features), data.features.numpy().dtype, folder))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        kept[start : start + _ROWS_AT_ONCE] = features_of(rows[start : start + _ROWS_AT_ONCE])
    return kept
