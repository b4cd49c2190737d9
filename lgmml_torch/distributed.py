"""Several processes as one: which lists of a set each of them has, and what they tell one another.

Written against ``torch.distributed`` alone: torchrun, SLURM and Ray set the same environment variables, and nothing
here knows which of them it was. With one process nothing is sent.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.files import write_bytes
from lgmml_torch.segments import offsets_from_sizes

PATIENCE = timedelta(minutes=30)  # how long one process waits for the others, e.g. while they read their data

GLANCE = timedelta(seconds=10)  # the longest wait in which a signal is not heard
MET = "met"  # counts the processes that have come

JOINED = "LGMML_JOINED"  # set by `join`: the process that did it


def join() -> None:
    """Become one of several processes, if whoever started this one says so by RANK and WORLD_SIZE.

    Ray Train has joined its workers already; that counts.

    Raises:
        ConfigError: numbers that cannot be, or nobody to meet.
    """
    if dist.is_initialized():
        os.environ[JOINED] = str(os.getpid())
        return
    found = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    if None in found or int(found[1] or 1) < 2:
        return
    try:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"  # what is fitted may be in files
        rank, size = (int(number or 0) for number in found)
        dist.init_process_group(backend, store=_meeting(rank, size), rank=rank, world_size=size, timeout=PATIENCE)
        os.environ[JOINED] = str(os.getpid())
        leave_in_the_end()
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"process {found[0]} of {found[1]} could not join the others: {' '.join(str(error).split())[:300]}"
        ) from error


def _meeting(rank: int, size: int) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT, once all processes have come to it.

    PyTorch would wait in one call, in which no signal is heard; here a process sleeps between short questions.

    Raises:
        RuntimeError: some did not come within `PATIENCE`; ValueError for an address that is none.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise ValueError("MASTER_ADDR and MASTER_PORT do not say where to meet")
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun has the store
    store: Any = None
    end, come = time.monotonic() + PATIENCE.total_seconds(), 0
    while time.monotonic() < end:
        if store is not None and (come := store.add(MET, 0)) >= size:
            store.set_timeout(PATIENCE)
            return store
        if store is None and (hosts or _is_open(address, int(port))):
            served = dist.TCPStore(  # type: ignore[attr-defined]
                address, int(port), None, hosts, timeout=GLANCE, wait_for_workers=False, multi_tenant=True
            )
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.PrefixStore(f"lgmml {attempt}", served)  # type: ignore[attr-defined]
            store.add(MET, 1)
        time.sleep(0.05)
    there = "nobody was there" if store is None else f"{come} of {size} processes had come"
    raise RuntimeError(f"after {PATIENCE.total_seconds() / 60:g} minutes at {address}:{port}, {there}")


def _is_open(address: str, port: int) -> bool:
    """Whether anybody listens there: PyTorch's store fills the screen where nobody does."""
    try:
        with socket.create_connection((address, port), timeout=GLANCE.total_seconds()):
            return True
    except OSError:
        return False


def leave() -> None:
    """Be one process again; nothing to do for one that is alone."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_in_the_end() -> None:
    """Leave the others before the program ends: gloo's threads, still there at the very end, would abort it."""
    atexit.unregister(leave)
    atexit.register(leave)


def joined() -> bool:
    """Whether `join` found others to join, as opposed to processes that Lightning starts by itself in a fit."""
    return dist.is_initialized() and os.environ.get(JOINED) == str(os.getpid())


def place() -> tuple[int, int]:
    """The number of this process, and how many there are.

    >>> place()
    (0, 1)
    """
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def agreed(value: Any, source: int = 0) -> Any:
    """What the first process says, or another one, on all of them: text, numbers, or lists of these."""
    if place()[1] == 1:
        return value
    told = [value]
    dist.broadcast_object_list(told, src=source)
    return told[0]


def tensor_of(source: int, tensor: Tensor | None) -> Tensor:
    """The tensor that one process has, on all of them; the others need not know what it looks like."""
    if place()[1] == 1:
        assert tensor is not None
        return tensor
    shape, dtype = agreed(None if tensor is None else (list(tensor.shape), str(tensor.dtype)[6:]), source)
    told = torch.empty(shape, dtype=getattr(torch, dtype)) if tensor is None else tensor.contiguous()
    if told.numel():
        dist.broadcast(told, src=source)
    return told


def of_each(value: Any) -> list[Any]:
    """What every process says, in their order; for small things."""
    size = place()[1]
    if size == 1:
        return [value]
    told: list[Any] = [None] * size
    dist.all_gather_object(told, value)
    return told


def combined(values: Tensor, how: str) -> Tensor:
    """The sum ("sum"), or the least or largest ("min", "max"), of what the processes have, in place."""
    if place()[1] > 1:
        dist.all_reduce(values, {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[how])
    return values


def copy_of_first(tensors: dict[str, Tensor]) -> None:
    """Overwrite tensors by those of the first process, so that all have the same bits."""
    if place()[1] > 1:
        for name in sorted(tensors):
            if tensors[name].numel():
                dist.broadcast(tensors[name], src=0)


def file_of_first(path: Path) -> None:
    """Give a file of the first process to those that do not have it, or another one, under the same name."""
    if place()[1] == 1:
        return
    held = path.read_bytes() if path.is_file() else b""
    digests = of_each(hashlib.sha256(held).hexdigest())
    if len(set(digests)) > 1:
        content = agreed(held if place()[0] == 0 else None)
        if content and content != held:
            write_bytes(path, content)


@dataclass
class Traffic:
    """What one process has sent to others so far."""

    calls: int = 0
    bytes: int = 0


@dataclass(frozen=True, eq=False)
class Spread:
    """A set whose lists are spread over processes: how long every list is, and who has it.

    Lists are numbered as they would be on one process. A process keeps the documents of its own lists, one list after
    the other in the order of their numbers.

    Attributes:
        sizes: ``(Q,)`` documents of every list.
        owner: ``(Q,)`` the process that has it.
        rank: of this process.
        traffic: what was sent.
    """

    sizes: Tensor
    owner: Tensor
    rank: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        if self.sizes.shape != self.owner.shape:
            raise LGMMLError(f"`owner` must name a process for each of {len(self.sizes)} lists, got {len(self.owner)}")

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
        return int(torch.bincount(self.owner, self.sizes.double()).max()) if len(self.owner) else 0

    @cached_property
    def own_rows(self) -> Tensor:  # (n,)
        """For each document of this process, its row if one process had all."""
        sizes = self.sizes[self.own]
        starts = self.offsets[self.own] - offsets_from_sizes(sizes)[:-1]
        return starts.repeat_interleave(sizes) + torch.arange(int(sizes.sum()))

    @cached_property
    def _shift(self) -> Tensor:  # (Q,) from a row of the whole set to a row of its owner
        starts = torch.empty_like(self.sizes)
        for rank in range(int(self.owner.max()) + 1 if len(self.owner) else 0):
            lists = self.owner == rank
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
        each = [iter(part) for part in of_each(list(ids))]
        return tuple([next(each[rank]) for rank in self.owner.tolist()])

    def collect(
        self,
        values: Tensor,  # (n, C) of the documents of this process
        receiver: int,
    ) -> Tensor:  # (N, C), or nothing
        """Values of all documents, in the order of the whole set, on one process; the others get no rows."""
        rank, size = place()
        if size == 1:
            return values
        if rank != receiver:
            if len(values):
                dist.send(values.contiguous(), receiver)
                self.traffic.calls += 1
                self.traffic.bytes += values.nbytes
            return values[:0]
        owner = self.owner.repeat_interleave(self.sizes)
        found = values.new_empty((len(owner), *values.shape[1:]))
        for source, count in enumerate(torch.bincount(owner, minlength=size).tolist()):
            part = values
            if source != rank and count:
                part = values.new_empty((count, *values.shape[1:]))
                dist.recv(part, source)
            if count:
                found[(owner == source).to(found.device)] = part
        return found

    def combined(self, values: Tensor, how: str) -> Tensor:
        """`combined` of all processes, which counts as sent."""
        if place()[1] > 1:
            self.traffic.calls += 1
            self.traffic.bytes += values.nbytes
        return combined(values, how)

    def told_by_each(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays, or tuples of them, that every process has found, on all of them; for small ones."""
        if place()[1] > 1:
            parts = [part for one in arrays for part in (one if isinstance(one, tuple) else (one,))]
            self.traffic.calls += 1
            self.traffic.bytes += sum(part.nbytes for part in parts)
        return of_each(arrays)

    def part(
        self,
        lists: Tensor,  # (C,) numbers of lists, rising
    ) -> Spread:
        """Some of the lists as a set of their own."""
        return Spread(self.sizes[lists], self.owner[lists], self.rank, self.traffic)

    def exchange(
        self,
        values: Tensor,  # (m, ...) what this process has of them, in order
        owner: Tensor,  # (M,) the process that has each of them
    ) -> Tensor:  # (M, ...)
        """Values of which every process has some, all of them on every process, in their order."""
        size = place()[1]
        if size == 1:
            return values
        counts = torch.bincount(owner, minlength=size).tolist()
        sent = values.new_zeros((max(counts), *values.shape[1:]))
        sent[: len(values)] = values
        told = [torch.empty_like(sent) for _ in range(size)]
        dist.all_gather(told, sent)
        self.traffic.calls += 1
        self.traffic.bytes += sent.numel() * sent.element_size()
        found = values.new_empty((len(owner), *values.shape[1:]))
        for rank, part in enumerate(told):
            found[(owner == rank).to(found.device)] = part[: counts[rank]]
        return found
