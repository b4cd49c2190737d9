"""``lgmml convert``: any data as a folder of shards."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lgmml_torch.app.commands.common import DATA_FORMATS, add_source, columns_of, is_set
from lgmml_torch.checks import DataError, check_choice
from lgmml_torch.data.catalog import open_dataset
from lgmml_torch.data.letor import SPLITS
from lgmml_torch.data.source import ReadOptions, open_file
from lgmml_torch.data.write import check_room, clear_folder, write_shards

_EXAMPLES = """
FOLDER gets Parquet files of whole lists and manifest.json, which counts them; a data set with parts gets folders
train, valid and test. Files are read list by list; a data set is loaded as it is for training.
examples:
  lgmml convert train.txt.gz shards
  lgmml convert clicks.parquet shards --qid-column query --documents 100000
  lgmml convert mq2008 shards --fold 1                           train, valid and test; --split for one of them
"""


def add_options(parser: ArgumentParser) -> None:
    """Arguments and options of the command."""
    parser.epilog = DATA_FORMATS + _EXAMPLES
    parser.set_defaults(execute=run)
    parser.add_argument("data", metavar="DATA", help="see below")
    parser.add_argument("folder", metavar="FOLDER", help="where to; shards that are there already are replaced")
    help_ = "documents in a shard, at most; a longer list has one of its own (default: 50000)"
    parser.add_argument("--documents", type=int, default=50_000, metavar="N", help=help_)
    add = add_source(parser, None)
    add("--num-features", type=int, metavar="N", help="how many features there are (default: what the data says)")


def run(args: Namespace) -> None:
    """Write the shards and print what is in them."""
    home = Path(args.folder)
    if args.data != "-" and home.resolve() in Path(args.data).resolve().parents:
        raise DataError(f"{home}: the folder for the shards must not be the one that {args.data} lies in")
    if is_set(args.data):
        _convert_set(args, home)
        return
    options = ReadOptions(num_features=args.num_features, missing=args.missing or "error", columns=columns_of(args))
    with open_file(args.data, options, kind=args.input_format) as source:
        sys.stdout.write(f"{home}: {write_shards(source, home, documents=args.documents)}\n")


def _convert_set(args: Namespace, home: Path) -> None:
    """The parts of a set into folders of their own, or the one that was asked for into the folder itself."""
    if args.split is not None:
        check_choice("split", args.split, SPLITS)
        check_room(home)
    elif home.is_dir() and (other := sorted({path.name for path in home.iterdir()} - set(SPLITS))):
        raise DataError(f"{home}: the parts of a set need a folder of their own, this one holds {other[0]!r}")
    reading = {"num_features": args.num_features, "missing": args.missing or "error", "columns": columns_of(args)}
    parts = open_dataset(args.data, fold=args.fold, **reading)
    if args.split is not None:
        check_choice("split", args.split, parts)
        parts = {"": parts[args.split]}
    for name in parts:
        clear_folder(home / name)  # all of them first: a set that is not written to the end is seen to lack a part
    for name, data in parts.items():
        sys.stdout.write(f"{home / name}: {write_shards(data, home / name, documents=args.documents)}\n")
