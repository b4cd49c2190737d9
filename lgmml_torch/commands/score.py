"""``lgmml score``: a score for every row of a file, or a TREC run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.commands.common import load_model, open_data, output
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.streaming.base import Batch, Lists

FORMATS = {".npy": "npy", ".run": "trec", ".trec": "trec"}

Scored = tuple[Batch, NDArray[Any]]


def run(args: Namespace) -> None:
    """Read, score, write; whole lists at a time."""
    model = load_model(args)
    form = args.format or FORMATS.get(Path(args.output).suffix, "text")
    with open_data(args, model) as lists, output(args.output) as stream:
        scored = score_batches(model, lists, args)
        if form == "trec":
            write_trec(stream, scored, args.tag)
        elif form == "text" and lists.in_order:
            for _, scores in scored:
                write_text(stream, scores)
        else:
            scores = in_file_order(scored, lists.num_rows)
            if form == "text":
                write_text(stream, scores)
            else:
                np.save(stream, scores, allow_pickle=False)


def score_batches(model: LGMML, lists: Lists, args: Namespace) -> Iterator[Scored]:
    """Each batch with its scores, in the order of its rows in the file."""
    for batch in lists.batches(args.batch_documents):
        scores = model.score(
            batch.data,
            known_queries=args.known_queries,
            policy=args.policy,
            documents_at_once=args.batch_documents,
        )
        yield batch, scores.numpy()


def in_file_order(scored: Iterator[Scored], rows: int) -> NDArray[Any]:
    """All scores; only these have to fit into memory."""
    out: NDArray[Any] | None = None
    for batch, scores in scored:
        if out is None:
            out = np.empty(rows, scores.dtype)
        out[batch.rows] = scores
    assert out is not None  # a file without documents was refused
    return out


def write_text(stream: IO[bytes], scores: NDArray[Any]) -> None:
    """One score per line, with as few digits as give back the same number."""
    stream.write("".join(f"{score!s}\n" for score in scores).encode())


def write_trec(stream: IO[bytes], scored: Iterator[Scored], tag: str) -> None:
    """``qid Q0 docid rank score tag``, best first; a document without an id goes by its row in the file, from 1."""
    for batch, scores in scored:
        data = batch.data
        order = data.order.argsort()  # canonical rows in the file's order
        ids = data.doc_ids
        names = [
            (ids[row] if ids is not None else "") or str(batch.rows[i] + 1) for i, row in enumerate(order.tolist())
        ]
        queries = data.in_caller_order(data.query_index)
        best = torch.from_numpy(scores).argsort(descending=True, stable=True)
        best = best[queries[best].argsort(stable=True)]
        lines, rank, previous = [], 0, -1
        for place, query in zip(best.tolist(), queries[best].tolist(), strict=True):
            rank = rank + 1 if query == previous else 1
            previous = query
            lines.append(f"{word(data.qids[query])} Q0 {word(names[place])} {rank} {scores[place]!s} {word(tag)}\n")
        stream.write("".join(lines).encode())


def word(value: object) -> str:
    """One word: a TREC line is cut at blanks."""
    return "_".join(str(value).split()) or "_"
