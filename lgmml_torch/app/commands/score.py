"""``lgmml score``: read, score, write, whole lists at a time."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.app.commands import Command
from lgmml_torch.app.commands.common import DATA_FORMATS, add_data, add_model, load_model, open_data, output, shards_at
from lgmml_torch.data.source import Batch, DataSource
from lgmml_torch.data.trec import run_lines
from lgmml_torch.files import npy_bytes
from lgmml_torch.models.ranker import LGMML

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
    add_model(parser)
    add_data(parser)
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
    if folders := shards_at(args.data):
        from lgmml_torch.app.commands.data import score_folder  # which is built on this module

        sys.stdout.write(f"{score_folder(args, folders)}\n")
        return
    model = load_model(args)
    form = args.format or _FORMATS.get(Path(args.output).suffix, "text")
    with open_data(args, model) as lists, output(args.output) as stream:
        scored = score_batches(model, lists, args)
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


def score_batches(model: LGMML, lists: DataSource, args: Namespace) -> Iterator[_Scored]:
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


COMMANDS = {"score": Command(_score_options, _score, DATA_FORMATS + _EXAMPLES)}
