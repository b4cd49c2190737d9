"""Several processes as one: the process group, all lists of a set, and those that processes share.

Everything here is written against ``torch.distributed``: torchrun, SLURM and Ray set the same environment variables.
With one process nothing is sent.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.files import scratch_array, write_bytes
from lgmml_torch.segments import argsort_segments, gather_segments, list_blocks, offsets_from_sizes, positions

if TYPE_CHECKING:
    from lgmml_torch.ragged import RankingData

TIMEOUT = timedelta(minutes=30)  # how long one process waits for the others, e.g. while they read their data
_JOINED = "LGMML_JOINED"  # environment variable: the process that called `join`
_ROWS_AT_ONCE = 4096  # of features that are made at once
_Make = Callable[[slice, Tensor], Tensor]  # features of some rows, by where the lists begin among them
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
class AllLists:
    """All lists of a set. They are all here, so nothing is exchanged; `SharedLists` answers for several processes."""

    sizes: Tensor  # (Q,) documents of every list

    shared: ClassVar[bool] = False  # whether processes share them, or they are in files: they may exceed memory

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def offsets(self) -> Tensor:  # (Q+1,)
        """Where each list begins, if one process has all."""
        return offsets_from_sizes(self.sizes)

    @property
    def num_documents(self) -> int:
        """Number of documents of all lists."""
        return int(self.sizes.sum())

    @cached_property
    def own(self) -> Tensor:  # (q,)
        """Numbers of the lists that are here."""
        return torch.arange(len(self.sizes))

    def take(self, values: Tensor, rows: Tensor) -> Tensor:  # (n, ...), (M,) -> (M, ...)
        """Values of the documents at some rows of the set, in their order; the same bits on every process."""
        return values[rows.to(values.device)]

    def here(self, rows: Tensor) -> Tensor:  # (M,) -> (m,)
        """Of some rows of the set those that are here, as rows of the documents that are here, in the order given."""
        return rows

    def per_query(self, values: Tensor) -> Tensor:  # (q, ...) -> (Q, ...)
        """One value for every list of the set, on every process, from those of the lists that are here."""
        return values

    def ids(self, own: tuple[Any, ...]) -> tuple[Any, ...]:
        """The id of every list of the set, from those of the lists that are here."""
        return own

    def all_reduce(self, values: Tensor, operation: str) -> Tensor:
        """The "sum", "min" or "max" over processes that have different lists, in place."""
        return values

    def all_gather(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays, or tuples of arrays, of every process that has different lists; for small ones."""
        return [arrays]

    def of_rank(self, lists: Tensor, rank: int, world_size: int) -> Tensor:  # (B,) bool
        """Which lists of a batch a rank trains on: every ``world_size``-th, where each rank has all."""
        return torch.arange(len(lists)) % world_size == rank

    def in_blocks(self, make: _Make, offsets: Tensor, folder: Path | None = None, rows: int = _ROWS_AT_ONCE) -> Tensor:
        """New features of lists: made together, or block by block in a file in ``folder`` if they may exceed memory."""
        return make(slice(None), offsets)


@dataclass(frozen=True, eq=False)
class SharedLists(AllLists):
    """A set whose lists several processes share: how long every list is, and which process has it.

    Lists are numbered as they would be on one process. A process keeps the documents of its own lists, one list after
    the other in the order of their numbers.
    """

    owner: Tensor  # (Q,) the process that has each list
    rank: int = 0  # of this process
    traffic: Counter[str] = field(default_factory=Counter)  # what was sent: ``calls`` and ``bytes``

    shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.sizes.shape != self.owner.shape:
            raise LGMMLError(f"`owner` must name a process for each of {len(self.sizes)} lists, got {len(self.owner)}")

    @staticmethod
    def owners(sizes: Tensor, processes: int | None = None) -> Tensor:  # (n,) -> (n,)
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

    def take(self, values: Tensor, rows: Tensor) -> Tensor:
        """See `AllLists`; each process sends what it has of them."""
        return self.exchange(values[self.here(rows).to(values.device)], self.owner[self._lists(rows)])

    def here(self, rows: Tensor) -> Tensor:
        """See `AllLists`; the documents of this process."""
        lists = self._lists(rows)
        mine = self.owner[lists] == self.rank
        return rows[mine] + self._shift[lists[mine]]

    def _lists(self, rows: Tensor) -> Tensor:  # (M,)
        return torch.bucketize(rows, self.offsets, right=True) - 1

    def per_query(self, values: Tensor) -> Tensor:
        """See `AllLists`; each process sends those of its lists."""
        return self.exchange(values, self.owner)

    def ids(self, own: tuple[Any, ...]) -> tuple[Any, ...]:
        """See `AllLists`; each process sends those of its lists."""
        each = list(map(iter, all_gather(own)))
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
        """`all_gather` over processes, counted in `traffic`."""
        if world_size() > 1:
            size = 0
            for one in arrays:
                parts = one if isinstance(one, tuple) else (one,)
                for part in parts:
                    size += part.nbytes
            self.traffic.update(calls=1, bytes=size)
        return all_gather(arrays)

    def of_rank(self, lists: Tensor, rank: int, world_size: int) -> Tensor:
        """See `AllLists`; those that this process has."""
        return self.owner[lists] == self.rank

    def in_blocks(self, make: _Make, offsets: Tensor, folder: Path | None = None, rows: int = _ROWS_AT_ONCE) -> Tensor:
        """See `AllLists`; ``rows`` bounds a block, but for a longer list."""
        none = make(slice(0), offsets[:1])
        found = torch.from_numpy(scratch_array((int(offsets[-1]), none.shape[1]), none.numpy().dtype, folder))
        for first, last in list_blocks(offsets, rows):
            start, stop = int(offsets[first]), int(offsets[last])
            found[start:stop] = make(slice(start, stop), offsets[first : last + 1] - start)
        return found

    def part(self, lists: Tensor) -> SharedLists:  # (C,) numbers of lists, rising
        """Some of the lists as a set of their own."""
        return SharedLists(self.sizes[lists], self.owner[lists], self.rank, self.traffic)

    def exchange(
        self,
        values: Tensor,  # (m, ...) what this process has of them, in order
        owner: Tensor,  # (M,) the process that has each of them
    ) -> Tensor:  # (M, ...)
        """Values of which every process has some, all of them on every process, in their order."""
        size = world_size()
        if size == 1 or not len(owner):
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


def limit_documents(data: RankingData, documents: int, *, seed: int = 0, folder: Path | None = None) -> RankingData:
    """A random sample of whole lists with at most ``documents`` documents, but at least one list.

    The sample does not depend on the number of processes. A list stays on its process; features of shared lists are
    copied to a file in ``folder``.
    """
    sizes, shared = data.all_lists.sizes, data.shared_lists
    if int(sizes.sum()) <= documents:
        return data
    drawn = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    within = sizes[drawn].cumsum(0) <= documents
    within[0] = True
    queries = drawn[within].sort().values
    if shared is None:
        return data.select(queries)
    own = torch.isin(shared.own, queries).nonzero()[:, 0]
    rows, offsets = gather_segments(data.offsets, own)
    part = data.replace(features=data.features[:, :0]).select(own)
    return part.replace(
        features=shared.in_blocks(lambda some, _: data.features[rows[some]], offsets, folder),
        feature_names=data.feature_names,
        categories=data.categories,
        shared_lists=shared.part(queries),
    )


def gather_lists(data: RankingData, folder: Path | None = None) -> RankingData:
    """All lists on every process; features of shared lists are copied to a file in ``folder``."""
    whole = data.shared_lists
    if whole is None:
        return data
    if world_size() == 1:
        return data.replace(shared_lists=None)
    offsets = whole.offsets
    rows = torch.arange(int(offsets[-1]))
    order = torch.empty_like(data.order)  # of the documents of a list, as the caller gave them
    order[argsort_segments(data.order, data.offsets)] = positions(data.offsets)
    weights = data.query_weights
    if weights is not None:
        weights = whole.per_query(weights)

    def gathered(values: Tensor) -> Tensor:
        if values is data.features:
            return whole.in_blocks(lambda some, _: whole.take(values, rows[some]), offsets, folder)
        return whole.take(values, rows)

    return data.replace(
        **data.of_documents(gathered),
        offsets=offsets,
        qids=tuple(range(len(offsets) - 1)),
        order=whole.take(order, rows) + offsets[:-1].repeat_interleave(offsets.diff()),
        doc_ids=None,
        query_weights=weights,
        shared_lists=None,
    )
