"""``lgmml convert``: any data as a folder of shards."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from lgmml_torch.app.commands.common import columns_of, is_set
from lgmml_torch.checks import DataError, check_choice
from lgmml_torch.data.catalog import open_dataset
from lgmml_torch.data.letor import SPLITS
from lgmml_torch.data.shards import check_room, clear_folder, write_shards
from lgmml_torch.data.source import ReadOptions, open_file


def run(args: Namespace) -> None:
    """Write the shards and print what is in them."""
    home = Path(args.folder)
    if args.data != "-" and home.resolve() in Path(args.data).resolve().parents:
        raise DataError(f"{home}: the folder for the shards must not be the one that {args.data} lies in")
    if is_set(args.data):
        _convert_set(args, home)
        return
    options = ReadOptions(num_features=args.num_features, missing=args.missing, columns=columns_of(args))
    with open_file(args.data, options, kind=args.input_format) as source:
        sys.stdout.write(f"{home}: {write_shards(source, home, documents=args.documents)}\n")


def _convert_set(args: Namespace, home: Path) -> None:
    """The parts of a set into folders of their own, or the one that was asked for into the folder itself."""
    if args.split is not None:
        check_choice("split", args.split, SPLITS)
        check_room(home)
    elif home.is_dir() and (other := sorted({path.name for path in home.iterdir()} - set(SPLITS))):
        raise DataError(f"{home}: the parts of a set need a folder of their own, this one holds {other[0]!r}")
    parts = open_dataset(
        args.data, fold=args.fold, num_features=args.num_features, missing=args.missing, columns=columns_of(args)
    )
    if args.split is not None:
        check_choice("split", args.split, parts)
        parts = {"": parts[args.split]}
    for name in parts:
        clear_folder(home / name)  # all of them first: a set that is not written to the end is seen to lack a part
    for name, data in parts.items():
        sys.stdout.write(f"{home / name}: {write_shards(data, home / name, documents=args.documents)}\n")
