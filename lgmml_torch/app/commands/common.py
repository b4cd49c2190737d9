"""What several commands need: their options, the model, the lists and a place to write to."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from lgmml_torch.checks import LGMMLError, check_choice, check_positive
from lgmml_torch.data.catalog import CATALOG, find_table, open_dataset
from lgmml_torch.data.columns import Columns
from lgmml_torch.data.source import DataSource, open_source
from lgmml_torch.evaluation.tables import results_table
from lgmml_torch.files import replacing
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.ranker import LGMML

if TYPE_CHECKING:
    from lgmml_torch.evaluation.evaluate import Evaluation

DATA_FORMATS = """
data:
  a LETOR file (label qid:7 1:0.5 2:0 ... #docid = x), plain or gzipped; the label may be left out
  a CSV or TSV file with a header, plain or gzipped; every column but qid, label and docid is a feature
  (--qid-column and so on)
  a Parquet or Arrow (feather) file: a row per document, or a row per query with lists in its columns
  an .npz file with arrays X, qid and, optionally, y and docid
  a file without qid: beside which FILE.query gives the number of documents of each query (LightGBM's way)
  a folder of Parquet files, in folders or not, with --split if it has parts; also 'folder/*.parquet', s3://bucket/folder,
  gs://... and hdfs://...; rows of a query may stand in several files, which are read in the order of their names
  a folder or known data set (mq2008, ohsumed, ...; below LGMML_DATA), with --split and --fold
  a folder of shards, as lgmml convert writes them, with --split if it has parts
  - for standard input
Rows of a query need not follow one another; text, Parquet and Arrow files need not fit into memory.
"""


def add_model(parser: ArgumentParser, *, nargs: str | None = None) -> None:
    """The argument MODEL; with ``nargs="?"`` it may be left out."""
    parser.add_argument("model", metavar="MODEL", nargs=nargs, help="a model file, or a checkpoint of a run")


def add_source(parser: ArgumentParser, split: str | None) -> Callable[..., Any]:
    """Options of the data; returns how to add more. ``split`` is the part that is taken by default."""
    add = parser.add_argument_group("data").add_argument
    formats = ("letor", "lightgbm", "csv", "tsv", "npz", "parquet", "arrow")
    add("--input-format", choices=formats, help="by default what the name says, or else letor")
    default = "(default: {})" if split is None else "(default: the model's, or else {})"
    add("--qid-column", metavar="NAME", help=f"column of a table with the query {default.format('qid')}")
    add("--label-column", metavar="NAME", help=f"its column with the relevance {default.format('label')}")
    add("--docid-column", metavar="NAME", help=f"its column with the document's id {default.format('docid')}")
    help_ = "a column to leave out; may be given several times; those that training left out need not be named"
    add("--drop-column", action="append", default=[], metavar="NAME", help=help_)
    missing = ("error", "zero", "query-min", "query-mean")
    add("--missing", choices=missing, help=f"what NULL, nan and empty cells stand for {default.format('error')}")
    help_ = f"part of a data set: train, valid or test (default: {split or 'all of them'})"
    add("--split", default=split, metavar="PART", help=help_)
    add("--fold", type=int, metavar="N", help="fold of a data set that has folds")
    return add


def add_data(parser: ArgumentParser, name: str = "data", *, nargs: str | None = None, own_weights: bool = False,
             batches: bool = True) -> None:  # fmt: skip
    """The argument DATA, or an option, and how models read it.

    With ``own_weights`` every model is used with the weights it has: there is no --policy and no --known-queries.
    Without ``batches`` all data is read at once.
    """
    parser.add_argument(name, metavar="DATA", nargs=nargs, help="see below")
    add_source(parser, "test")
    add = parser.add_argument_group("model").add_argument
    if own_weights:
        parser.set_defaults(policy=None, known_queries=False)
    else:
        help_ = "weights of new queries (ones, mean, knn, shared, amortized) instead of its own"
        add("--policy", metavar="NAME", help=help_)
        add("--known-queries", action="store_true", help="use the trained weights of queries with the same id")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: cpu)")
    add("--threads", type=int, metavar="N", help="cores to use (default: all)")
    if batches:
        add("--batch-documents", type=int, default=32_768, metavar="N", help="documents at a time (default: 32768)")
    else:
        parser.set_defaults(batch_documents=32_768)


def load_model(args: Namespace) -> LGMML:
    """The model, on the device asked for; options that do not suit it are refused before any data is read."""
    check_positive("batch-documents", args.batch_documents)
    device = use_machine(args)
    model = LGMML.load(args.model)
    if args.policy is not None:
        check_choice("policy", args.policy, POLICIES[model.phi.mode])
    if args.known_queries:
        model.known_rows(())
    if vars(args).get("calibrated"):
        if args.policy or args.known_queries:
            raise LGMMLError("`calibrated` needs the model's own weights: no `policy` and no `known-queries`")
        model.calibrated.at_least(())
    return model.to(device)


def use_machine(args: Namespace) -> torch.device:
    """As many threads as asked for, and the device, if this machine has it."""
    if args.threads is not None:
        check_positive("threads", args.threads)
        torch.set_num_threads(args.threads)
    try:
        device = torch.device(args.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LGMMLError(f"`device` {args.device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def columns_of(args: Namespace, model: LGMML | None = None) -> Columns:
    """Which columns of a table are no features: those asked for, or else those of the model's training table."""
    known = Columns.of(None if model is None else model.table)
    return replace(
        known,
        qid=args.qid_column or known.qid,
        label=args.label_column or known.label,
        doc_id=args.docid_column or known.doc_id,
        drop=tuple(args.drop_column),
    )


def is_set(name: str, split: str | None) -> bool:
    """Whether data is a set known by name or a folder laid out like one, and not a file or Parquet files."""
    if name in CATALOG or shards_at(name):
        return True
    return name != "-" and Path(name).is_dir() and find_table(name, split) is None


def open_data(args: Namespace, model: LGMML | None, *, reading: dict[str, Any] | None = None) -> DataSource:
    """The lists to rank, from a file, a folder or a data set known by name; read as ``model`` needs them, or so."""
    name = args.data
    dtype = torch.float32
    if model is not None:
        reading, dtype = reading or model.reading, model.dtype
    how = {"dtype": dtype, **(reading or {"num_features": None, "feature_names": None})}
    if args.missing is not None:
        how["missing"] = args.missing
    columns = columns_of(args, model)
    if is_set(name, args.split):
        if folders := shards_at(name):
            from lgmml_torch.data.shards import open_shards

            parts = {args.split: open_shards(chosen_part(folders, args.split), doc_ids=True)}
        else:
            parts = open_dataset(name, fold=args.fold, columns=columns, **how)
        check_choice("split", args.split, parts)
        source = open_source(parts[args.split], num_features=how["num_features"], feature_names=how["feature_names"])
        source.name = f"{name}, {args.split}"
        return source
    return open_source(find_table(name, args.split) or name, kind=args.input_format, columns=columns, **how)


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


def print_tables(*parts: object, width: int = 160) -> None:
    """Print sentences and tables of rich; where standard output is no terminal, lines have up to ``width`` letters."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else width, highlight=False, markup=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def print_evaluations(evaluations: Iterable[Evaluation]) -> None:
    """Print the table of evaluations without intervals, and the definitions."""
    from rich.table import Table

    header, rows, definitions = results_table([each.to_dict(intervals=False) for each in evaluations])
    table = Table()
    for name in header:
        table.add_column(name, justify="right", overflow="fold")
    table.columns[0].justify = table.columns[1].justify = "left"
    for row in rows:
        table.add_row(*row)
    print_tables(table, *definitions, width=200)
