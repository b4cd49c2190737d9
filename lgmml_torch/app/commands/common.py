"""What several commands need: the model, the lists and a place to write to."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from lgmml_torch.checks import LGMMLError, check_choice, check_positive
from lgmml_torch.data.catalog import CATALOG, open_dataset
from lgmml_torch.data.columns import Columns
from lgmml_torch.data.source import Source, open_source
from lgmml_torch.files import replacing
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.ranker import LGMML


def load_model(args: Namespace) -> LGMML:
    """The model, on the device asked for; options that do not suit it are refused before any data is read."""
    check_positive("batch-documents", args.batch_documents)
    device = use_machine(args)
    model = LGMML.load(args.model)
    if args.policy is not None:
        check_choice("policy", args.policy, POLICIES[model.phi.mode])
    if args.known_queries:
        model.known_rows(())
    return model.to(device)


def use_machine(args: Namespace) -> torch.device:
    """As many threads as asked for, and the device."""
    if args.threads is not None:
        check_positive("threads", args.threads)
        torch.set_num_threads(args.threads)
    return find_device(args.device)


def find_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LGMMLError(f"`device` {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def columns_of(args: Namespace) -> Columns:
    """Which columns of a table are no features."""
    return Columns(args.qid_column, args.label_column, args.docid_column, tuple(args.drop_column))


def is_set(name: str) -> bool:
    """Whether data is a folder or a set known by name, which has parts, and not a file."""
    return name in CATALOG or (name != "-" and Path(name).is_dir())


def open_data(args: Namespace, model: LGMML | None, *, num_features: int | None = None) -> Source:
    """The lists to rank, from a file, a folder or a data set known by name; as wide as ``model`` needs them, or so."""
    name = args.data
    reading: dict[str, Any] = {"num_features": num_features, "feature_names": None} if model is None else model.reading
    dtype = torch.float32 if model is None else model.dtype
    how = {"missing": args.missing, "dtype": dtype, **reading}
    columns = columns_of(args)
    if is_set(name):
        if folders := shards_at(name):
            from lgmml_torch.data.shards import open_shards

            parts = {args.split: open_shards(chosen_part(folders, args.split), doc_ids=True)}
        else:
            parts = open_dataset(name, fold=args.fold, columns=columns, **how)
        check_choice("split", args.split, parts)
        source = open_source(
            parts[args.split], num_features=reading["num_features"], feature_names=reading["feature_names"]
        )
        source.name = f"{name}, {args.split}"
        return source
    return open_source(name, kind=args.input_format, columns=columns, **how)


def shards_at(name: str) -> dict[str, Path]:
    """The folders of a set of shards by part, see `lgmml_torch.data.shards.shard_folders`; none for anything else."""
    if name == "-" or not Path(name).is_dir():
        return {}
    from lgmml_torch.data.shards import shard_folders  # files are scored without it

    return shard_folders(name)


def chosen_part(folders: dict[str, Path], split: str) -> Path:
    """The part asked for of a set of shards, see `shard_folders`, or the only one there is."""
    if "" in folders:
        return folders[""]
    check_choice("split", split, folders)
    return folders[split]


@contextmanager
def output(path: str) -> Iterator[IO[bytes]]:
    """Where to write: standard output, or a file that appears only when all of it is there."""
    if path == "-":
        yield sys.stdout.buffer
    elif Path(path).exists() and not Path(path).is_file():  # a device or a pipe cannot be exchanged for a file
        with Path(path).open("wb") as stream:
            yield stream
    else:
        with replacing(path) as temporary, temporary.open("wb") as stream:
            yield stream
