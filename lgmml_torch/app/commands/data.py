"""Commands on data: ``lgmml inspect`` and ``convert``, and ``lgmml score`` for a folder of shards.

A file of scores has a row per document in the order of its shard: ``qid``, ``place`` (of the document in its list, from
0, in the order of the source of the shards), ``docid`` where there are ids, and ``score``. Its metadata says which
model, settings and shard it belongs to; one that belongs to the same is not made again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lgmml_torch import __version__
from lgmml_torch.app.commands import Command
from lgmml_torch.app.commands.common import DATA_FORMATS, add_source, chosen_part, columns_of, is_set, load_model
from lgmml_torch.app.commands.score import score_batches
from lgmml_torch.app.start import hydra_value
from lgmml_torch.categories import vocabularies
from lgmml_torch.checks import DataError, LGMMLError, check_choice, check_positive
from lgmml_torch.data.cache import Cache, digest
from lgmml_torch.data.catalog import find_table, open_dataset, open_table
from lgmml_torch.data.letor import SPLITS
from lgmml_torch.data.shards import PLACE, SHARD_COLUMNS, Manifest, Shard, check_room, clear_folder
from lgmml_torch.data.source import ReadOptions, is_folder, open_file, open_source
from lgmml_torch.data.write import save_parquet, write_shards
from lgmml_torch.files import SUFFIX, sweep
from lgmml_torch.inputs import MISSING_HINT
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.progress import progress_bar
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


_MARK = b"lgmml_scores"  # in the metadata of a file of scores: what it was made from
_model: list[LGMML] = []  # of a process that was started to score


@dataclass(frozen=True)
class _Work:
    """What is scored, by what, and where the scores go."""

    args: Namespace  # the words on the command line
    source: Path  # the folder of shards
    target: Path  # the folder of scores
    model: str  # digest of the model's file

    def mark(self, shard: Shard) -> bytes:
        """What the scores of a shard are made from."""
        facts = {"model": self.model, "shard": shard.sha256, "policy": self.args.policy, "version": __version__}
        facts |= {"known_queries": self.args.known_queries, "calibrated": self.args.calibrated}
        return json.dumps(facts).encode()

    def is_done(self, shard: Shard) -> bool:
        """Whether the scores of a shard are there, of this model and this shard."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            found = parquet.read_metadata(self.target / shard.file)
        except (FileNotFoundError, pa.ArrowException):
            return False
        return found.num_rows == shard.documents and (found.metadata or {}).get(_MARK) == self.mark(shard)


def score_folder(args: Namespace, folders: dict[str, Path]) -> str:
    """Score the shards whose scores are not there yet, and say how many and how fast."""
    if args.output == "-" or args.format is not None:
        raise LGMMLError("`output` must name a folder, without `format`: every shard gets a Parquet file there")
    check_positive("jobs", args.jobs)
    source = chosen_part(folders, args.split)
    manifest = Manifest.read(source)
    manifest.check_files(source, manifest.shards)
    model = load_model(args)
    work = _Work(args, source, Path(args.output), digest(Path(args.model)))
    _check_target(work.target, manifest)
    todo, total = list[Shard](), 0
    for shard in manifest.shards:
        if not work.is_done(shard):
            todo.append(shard)
            total += shard.documents
    started, done = time.monotonic(), 0
    with progress_bar("Scoring", total) as report:
        scored: Iterator[int] = map(partial(_score_shard, work, model=model), todo)
        if (jobs := min(args.jobs, len(todo))) > 1:
            scored = _in_processes(work, todo, jobs)
        for documents in scored:
            report(done := done + documents)
    seconds = time.monotonic() - started
    kept, speed = len(manifest.shards) - len(todo), ""
    if done:
        speed = f" in {seconds:.1f} s, {done / max(seconds, 1e-9):,.0f} documents per second"
    return f"{work.target}: {len(todo)} shards scored, {kept} were there already; {done:,} documents{speed}"


def _check_target(target: Path, manifest: Manifest) -> None:
    """Refuse a folder with anything but scores of these shards: nobody could tell what belongs to it."""
    target.mkdir(parents=True, exist_ok=True)
    sweep(target)  # what a job that was killed has left; another one may be writing
    known = {shard.file for shard in manifest.shards}
    for path in sorted(target.iterdir()):
        if path.name not in known and not path.name.endswith(SUFFIX):
            raise DataError(f"{target}: scores of shards need a folder of their own, this one holds {path.name!r}")


def _score_shard(work: _Work, shard: Shard, model: LGMML | None = None) -> int:
    """Write the scores of one shard, by the model of the process by default, and answer how many they are."""
    import pyarrow as pa

    model = model or _model[0]
    shard.check_content(work.source, Cache())
    file = work.source / shard.file
    how = {**model.reading, "missing": "zero"}  # gaps were filled before; what is left is words without a meaning
    with open_source(file, kind="parquet", columns=SHARD_COLUMNS, dtype=model.dtype, **how) as lists:
        columns: dict[str, Any] = {SHARD_COLUMNS.qid: pa.array(lists.qids).take(pa.array(lists.codes))}
        columns[PLACE] = pa.array(map(int, lists.column(PLACE)), pa.int32())
        if SHARD_COLUMNS.doc_id in lists.header:
            columns[SHARD_COLUMNS.doc_id] = lists.column(SHARD_COLUMNS.doc_id)
        found = []
        for _, scores in score_batches(model, lists, work.args):
            found.append(scores)
        columns["score"] = np.concatenate(found)
    save_parquet(pa.table(columns, metadata={_MARK: work.mark(shard)}), work.target / shard.file)
    return shard.documents


def _in_processes(work: _Work, shards: Sequence[Shard], jobs: int) -> Iterator[int]:
    """Each process has the model and one thread, and takes the next shard that is left."""
    alone = Namespace(**{**vars(work.args), "threads": 1})
    # Fresh processes: a copy of this one may wait for ever on threads of torch that were not copied.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _start, (alone,))
    try:
        for future in as_completed([pool.submit(_score_shard, work, shard) for shard in shards]):
            yield future.result()
    except BrokenProcessPool as error:
        raise LGMMLError("a process ended before its shard was scored; the same command goes on from here") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(args: Namespace) -> None:
    """Get ready to score in a process of its own, which ends when the one that started it does."""
    threading.Thread(target=_follow, daemon=True).start()
    _model.append(load_model(args))


def _follow() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


COMMANDS = {
    "inspect": Command(_inspect_options, _inspect, _INSPECT_EXAMPLES),
    "convert": Command(_convert_options, _convert, DATA_FORMATS + _EXAMPLES),
}
