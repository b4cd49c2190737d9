"""``lgmml inspect`` and ``convert``: what is wrong with a table, and data as a folder of shards."""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser, Namespace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lgmml_torch.app.commands import Command
from lgmml_torch.app.commands.common import DATA_FORMATS, add_source, columns_of, is_set
from lgmml_torch.app.start import hydra_value
from lgmml_torch.categories import vocabularies
from lgmml_torch.checks import DataError, check_choice
from lgmml_torch.data.catalog import find_table, open_dataset, open_table
from lgmml_torch.data.letor import SPLITS
from lgmml_torch.data.shards import check_room, clear_folder
from lgmml_torch.data.source import ReadOptions, is_folder, open_file
from lgmml_torch.data.write import write_shards
from lgmml_torch.inputs import MISSING_HINT
from lgmml_torch.ragged import RankingData

_INSPECT_EXAMPLES = """
A problem is mended by a setting of data=table, and the table is read again, until it can be read or no setting helps.
examples:
  lgmml inspect products.csv
  lgmml inspect s3://shop/clicks
  lgmml inspect clicks.parquet --qid-column session --label-column clicked
"""
# Usual names of the columns that every table must have, and what is said of a table without.
_USUAL = {
    "qid": ("qid", "query_id", "queryid", "query", "search_id", "srch_id", "session_id"),
    "label": ("label", "relevance", "relevance_label", "rel", "grade", "target", "click", "clicked", "y"),
}
_LACKING = {"qid": "must name a column", "label": "training needs"}
_FREE_TEXT = 0.1  # different words per document, from which a column of words is no category


def _inspect_options(parser: ArgumentParser) -> None:
    parser.add_argument("data", metavar="TABLE", help="a file, or a folder, pattern or address of Parquet files")
    parser.add_argument("--qid-column", metavar="NAME", help="column with the query (default: found by its name)")
    parser.add_argument("--label-column", metavar="NAME", help="column with the relevance (default: found by its name)")


def _inspect(args: Namespace) -> None:
    """Read the table, mending one problem after the other, and print the problems and the command."""
    settings: dict[str, Any] = {"qid": args.qid_column or "qid", "label": args.label_column or "label"}
    settings |= {"drop": [], "categories": []}
    problems, parts = dict[str, str](), None
    while parts is None:
        try:
            parts = _read_table(args.data, settings)
        except DataError as error:
            mended = _mend(settings, str(error))
            problems.setdefault(mended, str(error))
            if not mended:
                raise DataError(
                    "; ".join([*problems.values(), "no setting mends the last of these problems"])
                ) from error
    for problem in problems.values():
        sys.stdout.write(f"problem: {problem}\n")
    for name, part in parts.items():
        sys.stdout.write(f"{name}: {part}\n")
    words = [f"data.path={hydra_value(args.data)}"]
    for name, value in settings.items():
        if value:
            words.append(f"data.{name}={hydra_value(value)}")
    kind = "folder" if is_folder(args.data) else "table"
    sys.stdout.write(f"train with: lgmml train data={kind} {shlex.join(words)}\n")


def _read_table(path: str, settings: dict[str, Any]) -> dict[str, RankingData]:
    """The parts of the table; a category with about as many words as there are documents is refused, too."""
    with TemporaryDirectory() as cache:  # what is mapped from there stays until it is not needed
        parts = open_table(path, cache=cache, stream=is_folder(path), **settings)
    data = parts["train"]
    for name, words in vocabularies(data.feature_names, data.categories).items():
        if len(words) > _FREE_TEXT * data.num_documents:
            many = f"{len(words):,} words in {data.num_documents:,} documents"
            raise DataError(f"column {name!r} must have fewer different words to be a category, got {many}")
    return parts


def _mend(settings: dict[str, Any], problem: str) -> str:
    """Change the setting that a problem is about, and answer what was changed; empty where nothing helps."""
    for role, words in _LACKING.items():
        if words in problem:
            following = dict(pairwise(_USUAL[role]))
            if settings[role] not in following:
                return ""
            settings[role] = following[settings[role]]
            return role
    if MISSING_HINT in problem:
        settings["missing"] = "query-mean"
        return "missing"
    column = re.search(r"column (['\"])(.*?)\1", problem)
    if column is None or column[2] in settings["drop"]:
        return ""
    change, name = "drop", column[2]
    if name in settings["categories"]:
        settings["categories"].remove(name)
    elif "data.categories" in problem:
        change = "categories"
    settings[change].append(name)
    return f"{change} {name}"


_EXAMPLES = """
FOLDER gets Parquet files of whole lists and manifest.json, which counts them; a data set with parts gets folders
train, valid and test. Files are read list by list; a data set is loaded as it is for training.
examples:
  lgmml convert train.txt.gz shards
  lgmml convert clicks.parquet shards --qid-column query --documents 100000
  lgmml convert mq2008 shards --fold 1                           train, valid and test; --split for one of them
"""


def _convert_options(parser: ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="see below")
    parser.add_argument("folder", metavar="FOLDER", help="where to; shards that are there already are replaced")
    help_ = "documents in a shard, at most; a longer list has one of its own (default: 50000)"
    parser.add_argument("--documents", type=int, default=50_000, metavar="N", help=help_)
    add = add_source(parser, None)
    add("--num-features", type=int, metavar="N", help="how many features there are (default: what the data says)")


def _convert(args: Namespace) -> None:
    """Write the shards and print what is in them."""
    home = Path(args.folder)
    if args.data != "-" and home.resolve() in Path(args.data).resolve().parents:
        raise DataError(f"{home}: the folder for the shards must not be the one that {args.data} lies in")
    if is_set(args.data, args.split):
        _convert_set(args, home)
        return
    options = ReadOptions(num_features=args.num_features, missing=args.missing or "error", columns=columns_of(args))
    with open_file(find_table(args.data, args.split) or args.data, options, kind=args.input_format) as source:
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


COMMANDS = {
    "inspect": Command(_inspect_options, _inspect, _INSPECT_EXAMPLES),
    "convert": Command(_convert_options, _convert, DATA_FORMATS + _EXAMPLES),
}
