"""Rows of Φ that stay with the process that has their list, and how they get to the disk and back.

A row of Φ gets gradients from its own query only, so processes that share the training lists need not share the table:
each has the rows of its own lists, nothing of them is reduced, and no process ever holds them all. In a checkpoint the
rows of a process are a file of its own beside it; whoever goes on, with any number of processes, takes from these files
the rows of the lists that it has by then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from lgmml_torch import distributed
from lgmml_torch.checks import CheckpointError
from lgmml_torch.distributed import Spread
from lgmml_torch.files import scratch_array, write_bytes
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, MODEL_PREFIX, VERSION, load_checkpoint, seal_of, write_checkpoint
from lgmml_torch.training.checkpoints import CheckpointFiles

AT_ONCE = 1 << 24  # bytes of rows that are sent in one call
LISTED = "rows"  # where a checkpoint names the files of its rows
FILE = "{stem}.{step}.{rank}-of-{size}.rows"
_FILE = re.compile(r"(?P<stem>.+)\.\d+\.\d+-of-\d+\.rows")


class OwnRows:
    """Which tensors of a model have a row for each training list, and whose lists they are.

    Args:
        model: with rows for the lists of this process.
        spread: who has which of the training lists.
    """

    def __init__(self, model: LGMML, spread: Spread) -> None:
        self.spread = spread
        self.names = tuple(f"phi.{name}" for name in model.phi.rows_by_query)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.parameters = [number for number, name in enumerate(trained) if name in self.names]
        self.shares_nothing = len(self.parameters) == len(trained)

    def shared(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those tensors of a model that all processes have alike."""
        return {name: tensor for name, tensor in state.items() if name not in self.names}

    def save(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write a checkpoint together with all other processes: rows first, then what names them."""
        rank, size = distributed.place()
        stem = {"stem": path.stem, "step": checkpoint["global_step"], "size": size}
        rows = {label: holder[key].detach() for label, holder, key in self._places(checkpoint)}
        own = path.with_name(FILE.format(rank=rank, **stem))
        write_checkpoint(own, {FORMAT: {"version": VERSION}, "lists": self.spread.own, LISTED: rows})
        seals = distributed.of_each(seal_of(own))
        files = {FILE.format(rank=number, **stem): seal for number, seal in enumerate(seals)}
        if rank == 0:
            for _, holder, key in self._places(checkpoint):
                holder[key] = holder[key][:0].clone()
            checkpoint[LISTED] = files
            for holder, key in ((checkpoint[FORMAT], "spec"), (checkpoint["hyper_parameters"], "model_spec")):
                holder[key] = {**holder[key], "qids": [], "phi": {**holder[key]["phi"], "num_queries": 0}}
            write_checkpoint(path, checkpoint)
        distributed.of_each(None)  # the new one is in its place: the one before is not needed any more
        for file in row_files(path):
            if file.name not in files:
                file.unlink(missing_ok=True)

    def load(self, path: Path) -> dict[str, Any]:
        """A checkpoint, whoever wrote it, with the rows of the lists that this process has."""
        content = load_checkpoint(path)
        listed = content.pop(LISTED, None)
        found = {} if listed is None else self._fetch(path, listed)
        for label, holder, key in self._places(content):
            whole = holder[key]
            holder[key] = whole[self.spread.own] if listed is None else found.get(label, whole)
        return content

    def read(self, path: Path) -> dict[str, Tensor]:
        """The rows of this process's lists in a checkpoint of this run, by their names in the model.

        Its own file is enough: a process need not see the checkpoint itself.
        """
        content = load_checkpoint(path) if path.is_file() else {}
        listed = distributed.agreed(content.get(LISTED))
        if listed is None:
            return {name: content["state_dict"][MODEL_PREFIX + name][self.spread.own] for name in self.names}
        found = self._fetch(path, listed)
        return {name: found[name] for name in self.names}

    def _places(self, checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, dict[Any, Any], Any]]:
        """Where rows stand in a checkpoint: a label, and the mapping and key that hold them."""
        for name in self.names:
            yield name, checkpoint["state_dict"], MODEL_PREFIX + name
        for number, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
            for parameter in self.parameters:
                remembered = dict(optimizer["state"].get(parameter, {}))  # a copy: the optimizer's own must stay
                optimizer["state"] |= {parameter: remembered} if remembered else {}
                for key, value in list(remembered.items()):
                    if isinstance(value, Tensor) and value.dim() == 2:
                        yield f"optimizer.{number}.{parameter}.{key}", remembered, key

    def _fetch(self, path: Path, listed: Mapping[str, str]) -> dict[str, Tensor]:
        """The rows of this process's lists, from files that any of the processes may have."""
        own, rank = self.spread.own, distributed.place()[0]
        found: dict[str, Tensor] = {}
        for name, seal in listed.items():
            file = path.with_name(name)
            there = distributed.of_each(file.is_file() and seal_of(file) == seal)
            if not any(there):
                raise CheckpointError(f"{path} needs {name} beside it, with the rows of some queries; it is not there")
            source = there.index(True)
            content = load_checkpoint(file) if rank == source else None
            lists = distributed.tensor_of(source, None if content is None else content["lists"])
            place = torch.searchsorted(own, lists).clamp(max=max(0, len(own) - 1))
            mine = own[place] == lists if len(own) else torch.zeros(len(lists), dtype=torch.bool)
            labels = distributed.agreed(None if content is None else list(content[LISTED]), source)
            for label in labels:
                rows = None if content is None else content[LISTED][label]
                for start, block in _blocks(rows, len(lists), source):
                    part = slice(start, start + len(block))
                    table = found.setdefault(label, block.new_zeros(len(own), block.shape[1]))
                    table[place[part][mine[part]]] = block[mine[part]]
        return found

    def whole(self, model: LGMML, folder: Path) -> LGMML:
        """On the first process the model with the rows of all lists, mapped from a file; elsewhere as it is."""
        if distributed.place()[1] == 1:
            return model
        state = model.state_dict()
        tables = {name: self._collected(state[name].cpu(), folder) for name in self.names}
        ids = [iter(part) for part in distributed.of_each(list(model.qids))]
        if distributed.place()[0]:
            return model
        phi = deepcopy(model.phi)
        phi.num_queries = len(self.spread.sizes)
        for name in phi.rows_by_query:
            table = tables[f"phi.{name}"]
            holder, _, last = name.rpartition(".")
            if holder:
                setattr(phi, holder, nn.Embedding.from_pretrained(table, freeze=False, sparse=phi.sparse))  # type: ignore[no-untyped-call]
            else:
                setattr(phi, last, table)
        phi.mean_of_all = None
        everyone = tuple(next(ids[owner]) for owner in self.spread.owner.tolist())
        found = LGMML(
            model.preprocess,
            model.metrics,
            phi,
            kernel=model.kernel,
            qids=everyone,
            feature_names=model.feature_names,
            encoder=model.encoder,
            base=model.base,
        )
        return found.eval()

    def _collected(self, rows: Tensor, folder: Path) -> Tensor:
        """All rows, in the order of the lists, written block by block to a file without a name."""
        count, width = len(self.spread.sizes), rows.shape[1]
        first = distributed.place()[0] == 0
        step = max(1, AT_ONCE // max(1, width * rows.element_size()))
        table = torch.from_numpy(scratch_array((count, width), rows.numpy().dtype, folder)) if first else rows[:0]
        for start in range(0, count, step):
            owner = self.spread.owner[start : start + step]
            here = (self.spread.own >= start) & (self.spread.own < start + step)
            block = self.spread.exchange(rows[here], owner)
            if first:
                table[start : start + len(block)] = block
        return table


class OwnRowsFiles(CheckpointFiles):
    """Checkpoints of which every process reads, and where there are several writes, its own rows."""

    def __init__(self, rows: OwnRows) -> None:
        self.rows = rows

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write one; with several processes all of them must be here."""
        if distributed.place()[1] == 1:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            self.rows.save(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Read one."""
        return self.rows.load(Path(path))


class OwnRowsStrategy(DDPStrategy):
    """DDP that leaves rows of Φ where they are: all processes write checkpoints, and none wraps nothing.

    Args:
        shares_nothing: whether all that is trained are such rows.
        **settings: of `DDPStrategy`.
    """

    def __init__(self, *, shares_nothing: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.shares_nothing = shares_nothing

    def configure_ddp(self) -> None:
        """Reduce gradients, where any are to be reduced."""
        if not self.shares_nothing:
            super().configure_ddp()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on all processes."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)


def copy_checkpoint(source: Path, target: Path) -> None:
    """A checkpoint under another name, with those files of its rows that are there."""
    content = load_checkpoint(source)
    if LISTED not in content:
        write_bytes(target, source.read_bytes())
        return
    names = {name: name.replace(source.stem, target.stem, 1) for name in content[LISTED]}
    for old, new in names.items():
        if source.with_name(old).is_file():
            write_bytes(target.with_name(new), source.with_name(old).read_bytes())
    content[LISTED] = {names[name]: seal for name, seal in content[LISTED].items()}
    write_checkpoint(target, content)


def row_files(path: Path) -> list[Path]:
    """The files with rows that lie beside a checkpoint, of this or an earlier moment."""
    found = ((file, _FILE.fullmatch(file.name)) for file in path.parent.glob("*.rows"))
    return [file for file, match in found if match is not None and match["stem"] == path.stem]


def _blocks(rows: Tensor | None, count: int, source: int) -> Iterator[tuple[int, Tensor]]:
    """The rows that one process has, on all of them, some at a time, and where each block begins."""
    width, size = distributed.agreed(None if rows is None else (rows.shape[1], rows.element_size()), source)
    step = max(1, AT_ONCE // max(1, width * size))
    for start in range(0, count, step):
        yield start, distributed.tensor_of(source, None if rows is None else rows[start : start + step])
