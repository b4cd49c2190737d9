"""``lgmml score``: read, score, write, whole lists at a time.

Of a folder of shards, a file of scores has a row per document in the order of its shard: ``qid``, ``place`` (of the
document in its list, from 0, in the order of the source of the shards), ``docid`` where there are ids, and ``score``.
Its metadata says which model, settings and shard it belongs to; one that belongs to the same is not made again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch import __version__
from lgmml_torch.app.commands import Command, common
from lgmml_torch.checks import DataError, LGMMLError, check_positive
from lgmml_torch.data.cache import Cache, digest
from lgmml_torch.data.shards import PLACE, SHARD_COLUMNS, Manifest, Shard
from lgmml_torch.data.source import Batch, DataSource, open_source
from lgmml_torch.data.trec import run_lines
from lgmml_torch.data.write import save_parquet
from lgmml_torch.files import SUFFIX, npy_bytes, sweep
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.progress import progress_bar

_FORMATS = {".npy": "npy", ".run": "trec", ".trec": "trec"}

_Scored = tuple[Batch, NDArray[Any]]

_EXAMPLES = """
examples:
  lgmml score model.safetensors test.txt                         one score per row, in the file's order
  lgmml score model.safetensors test.csv.gz -o scores.npy        as a numpy array
  lgmml score last.ckpt test.txt -o test.run --format trec       a TREC run: qid Q0 docid rank score tag
  lgmml score model.safetensors test.txt --calibrated            the chance that a document is relevant
  zcat big.gz | lgmml score model.safetensors - > scores.txt     in a pipe
  lgmml score model.safetensors shards --output scores --jobs 4  a file of scores for each shard; to go on after a
                                                                 stop, give the same command again
"""


def _score_options(parser: ArgumentParser) -> None:
    common.add_model(parser)
    common.add_data(parser)
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="where to (default: standard output)")
    help_ = "text: a score per line; npy: a numpy array; trec: a run (by default what the output's name says, or text)"
    parser.add_argument("--format", choices=("text", "npy", "trec"), help=help_)
    help_ = "write the chance that a document is relevant, which means a label of at least 1, instead of its score"
    parser.add_argument("--calibrated", action="store_true", help=help_)
    parser.add_argument("--tag", default="lgmml", help="last column of a TREC run (default: lgmml)")
    help_ = "processes, of one thread each, that score a folder of shards (default: 1)"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=help_)


def _score(args: Namespace) -> None:
    """Read, score, write; whole lists at a time."""
    if folders := common.shards_at(args.data):
        sys.stdout.write(f"{_score_folder(args, folders)}\n")
        return
    model = common.load_model(args)
    form = args.format or _FORMATS.get(Path(args.output).suffix, "text")
    with common.open_data(args, model) as lists, common.output(args.output) as stream:
        scored = _score_batches(model, lists, args)
        if form == "trec":
            for batch, scores in scored:
                stream.write("".join(run_lines(batch, scores, args.tag)).encode())
        elif form == "text" and lists.in_order:
            for _, scores in scored:
                _write_score_lines(stream, scores)
        else:
            scores = _in_file_order(scored, lists.num_rows)
            if form == "text":
                _write_score_lines(stream, scores)
            else:
                stream.write(npy_bytes(scores))


def _score_batches(model: LGMML, lists: DataSource, args: Namespace) -> Iterator[_Scored]:
    """Each batch with its scores, in the order of its rows in the file."""
    for batch in lists.batches(args.batch_documents):
        scores = model.score_in_caller_order(
            batch.data, known_queries=args.known_queries, policy=args.policy, documents_at_once=args.batch_documents
        )
        if args.calibrated:
            scores = model.calibrated.at_least(scores).numpy()
        yield batch, scores


def _in_file_order(scored: Iterator[_Scored], rows: int) -> NDArray[Any]:
    """All scores; only these have to fit into memory."""
    out: NDArray[Any] | None = None
    for batch, scores in scored:
        if out is None:
            out = np.empty(rows, scores.dtype)
        out[batch.rows] = scores
    assert out is not None  # a file without documents was refused
    return out


def _write_score_lines(stream: IO[bytes], scores: NDArray[Any]) -> None:
    """One score per line, with as few digits as give back the same number."""
    stream.write("".join(f"{score!s}\n" for score in scores).encode())


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


def _score_folder(args: Namespace, folders: dict[str, Path]) -> str:
    """Score the shards whose scores are not there yet, and say how many and how fast."""
    if args.output == "-" or args.format is not None:
        raise LGMMLError("`output` must name a folder, without `format`: every shard gets a Parquet file there")
    check_positive("jobs", args.jobs)
    source = common.chosen_part(folders, args.split)
    manifest = Manifest.read(source)
    manifest.check_files(source, manifest.shards)
    model = common.load_model(args)
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
        for _, scores in _score_batches(model, lists, work.args):
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
    _model.append(common.load_model(args))


def _follow() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


COMMANDS = {"score": Command(_score_options, _score, common.DATA_FORMATS + _EXAMPLES)}
