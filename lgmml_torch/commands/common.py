"""What the commands share: loading the model, opening the data, writing the result."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from lgmml_torch.checks import LGMMLError, check_choice, check_positive
from lgmml_torch.data.catalog import CATALOG, open_dataset
from lgmml_torch.data.letor import load_lightgbm
from lgmml_torch.files import replacing
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.streaming.arrays import ArrayLists
from lgmml_torch.streaming.base import Lists
from lgmml_torch.streaming.opening import open_lists
from lgmml_torch.streaming.table import Columns

SPLITS = {"valid": "vali", "validation": "vali"}


def load_model(args: Namespace) -> LGMML:
    """The model, on the device asked for; options that do not suit it are refused before any data is read."""
    if args.threads is not None:
        check_positive("threads", args.threads)
        torch.set_num_threads(args.threads)
    check_positive("batch-documents", args.batch_documents)
    device = find_device(args.device)
    model = LGMML.load(args.model)
    if args.policy is not None:
        check_choice("policy", args.policy, POLICIES[model.phi.mode])
    if args.known_queries:
        model.known_rows(())
    return model.to(device)


def find_device(name: str) -> torch.device:
    """The device of that name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LGMMLError(f"`device` {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def open_data(args: Namespace, model: LGMML) -> Lists:
    """The lists to rank, from a file, a folder or a data set known by name."""
    name, width, dtype = args.data, model.num_features, model.metrics.scales.dtype
    if name in CATALOG or (name != "-" and Path(name).is_dir()):
        parts = open_dataset(name, fold=args.fold, num_features=width, missing=args.missing, dtype=dtype)
        split = SPLITS.get(args.split, args.split)
        check_choice("split", split, parts)
        return ArrayLists.from_data(parts[split], f"{name}, {split}", num_features=width)
    sizes = Path(name.removesuffix(".gz") + ".query")
    if name != "-" and args.input_format is None and sizes.is_file():
        data = load_lightgbm(name, num_features=width, missing=args.missing, dtype=dtype, cache=False)
        return ArrayLists.from_data(data, name, num_features=width)
    return open_lists(
        name,
        num_features=width,
        kind=args.input_format,
        columns=Columns(args.qid_column, args.label_column, args.docid_column),
        dtype=dtype,
        missing=args.missing,
    )


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
