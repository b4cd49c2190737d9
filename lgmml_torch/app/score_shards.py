"""Scoring a folder of shards: a file of scores for each, by several processes; an interrupted command continues.

A file of scores has a row per document in the order of its shard: ``qid``, ``place`` (of the document in its list, from
0, in the order of the source of the shards), ``docid`` where there are ids, and ``score``. Its metadata says which
model, settings and shard it belongs to; one that belongs to the same is not made again.
"""

from __future__ import annotations

import json
import os
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np

from lgmml_torch import __version__
from lgmml_torch.app.commands.common import chosen_part, load_model
from lgmml_torch.app.commands.score import score_batches
from lgmml_torch.checks import DataError, LGMMLError, check_positive
from lgmml_torch.data.cache import Cache, digest
from lgmml_torch.data.shards import (
    SHARD_COLUMNS,
    Manifest,
    Shard,
    check_content,
    check_files,
    document_keys,
    read_manifest,
)
from lgmml_torch.data.source import open_source
from lgmml_torch.data.write import save_parquet
from lgmml_torch.files import SUFFIX, sweep
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.progress import progress_bar

MARK = b"lgmml_scores"  # in the metadata of a file of scores: what it was made from
_model: list[LGMML] = []  # of a process that was started to score


@dataclass(frozen=True)
class Work:
    """What is scored, by what, and where the scores go.

    Attributes:
        args: the words on the command line.
        source: the folder of shards.
        target: the folder of scores.
        model: digest of the model's file.
    """

    args: Namespace
    source: Path
    target: Path
    model: str

    def mark(self, shard: Shard) -> bytes:
        """What the scores of a shard are made from."""
        facts = {"model": self.model, "shard": shard.sha256, "policy": self.args.policy}
        return json.dumps({**facts, "known_queries": self.args.known_queries, "version": __version__}).encode()

    def is_done(self, shard: Shard) -> bool:
        """Whether the scores of a shard are there, of this model and this shard."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            found = parquet.read_metadata(self.target / shard.file)
        except (FileNotFoundError, pa.ArrowException):
            return False
        return found.num_rows == shard.documents and (found.metadata or {}).get(MARK) == self.mark(shard)


def score_folder(args: Namespace, folders: dict[str, Path]) -> str:
    """Score the shards whose scores are not there yet, and say how many and how fast."""
    if args.output == "-" or args.format is not None:
        raise LGMMLError("`output` must name a folder, without `format`: every shard gets a Parquet file there")
    check_positive("jobs", args.jobs)
    source = chosen_part(folders, args.split)
    manifest = read_manifest(source)
    check_files(source, manifest, manifest.shards)
    model = load_model(args)
    work = Work(args, source, Path(args.output), digest(Path(args.model)))
    _check_target(work.target, manifest)
    todo, total = list[Shard](), 0
    for shard in manifest.shards:
        if not work.is_done(shard):
            todo.append(shard)
            total += shard.documents
    started, done = time.monotonic(), 0
    with progress_bar("Scoring", total) as report:
        jobs = min(args.jobs, len(todo))
        for scored in _score_shards(work, todo, jobs, model):
            report(done := done + scored)
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


def _score_shards(work: Work, shards: Sequence[Shard], jobs: int, model: LGMML) -> Iterator[int]:
    if jobs > 1:
        yield from _in_processes(work, shards, jobs)
    else:
        for shard in shards:
            yield _score_shard(work, shard, model)


def _score_shard(work: Work, shard: Shard, model: LGMML) -> int:
    """Write the scores of one shard and answer how many they are."""
    import pyarrow as pa

    check_content(work.source, [shard], Cache(), progress=False)
    file = work.source / shard.file
    with open_source(
        file,
        kind="parquet",
        num_features=model.num_features,
        feature_names=model.feature_names,
        columns=SHARD_COLUMNS,
        dtype=model.dtype,
    ) as lists:
        found = []
        for _, scores in score_batches(model, lists, work.args):
            found.append(scores)
    table = pa.table({**document_keys(file), "score": np.concatenate(found)}, metadata={MARK: work.mark(shard)})
    save_parquet(table, work.target / shard.file)
    return shard.documents


def _in_processes(work: Work, shards: Sequence[Shard], jobs: int) -> Iterator[int]:
    """Each process has the model and one thread, and takes the next shard that is left."""
    alone = Namespace(**{**vars(work.args), "threads": 1})
    # Fresh processes: a copy of this one may wait for ever on threads of torch that were not copied.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _start, (alone,))
    try:
        for future in as_completed([pool.submit(_score, work, shard) for shard in shards]):
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


def _score(work: Work, shard: Shard) -> int:
    return _score_shard(work, shard, _model[0])
