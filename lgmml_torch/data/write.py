"""Writing ranking data as text that the loaders, and other people's, read back to the same numbers."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.data.loading import PathLike
from lgmml_torch.ragged import RankingData


def save_letor(data: RankingData, path: PathLike, *, sparse: bool = False) -> None:
    """Write ``label qid:… 1:… 2:… #docid = …`` lines in the caller's order; gzipped if the name ends in ``.gz``.

    Numbers are written with as few digits as give back the same bits.

    Args:
        data: what to write. Query ids become text.
        path: the file.
        sparse: leave zeros out (also −0, which then comes back as 0).

    Raises:
        DataError: if an id cannot stand in such a line.
    """
    words = [_query_word(qid) for qid in data.qids]
    queries = data.in_caller_order(data.query_index).tolist()
    _save(data, path, [f" qid:{words[query]}" for query in queries], sparse)


def save_lightgbm(data: RankingData, path: PathLike, *, sparse: bool = True) -> None:
    """Write lines without ``qid`` and the sizes of the queries to ``path`` + ``.query``.

    Raises:
        DataError: if the rows of a query are not next to each other in the caller's order.
    """
    queries = data.in_caller_order(data.query_index)
    runs, sizes = torch.unique_consecutive(queries, return_counts=True)
    if len(runs) != data.num_queries:
        raise DataError("the rows of each query must follow one another to be saved with group sizes")
    _save(data, path, [""] * data.num_documents, sparse)
    file = Path(path)
    file.with_name(file.name.removesuffix(".gz") + ".query").write_text("".join(f"{n}\n" for n in sizes.tolist()))


def _save(data: RankingData, path: PathLike, queries: list[str], sparse: bool) -> None:
    file = Path(path)
    with file.open("wb") as raw:
        # No time stamp inside: the same data gives the same file.
        stream = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if file.suffix == ".gz" else raw
        with stream, io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
            text.writelines(_lines(data, queries, sparse))


def _lines(data: RankingData, queries: list[str], sparse: bool) -> Iterator[str]:
    rows = data.in_caller_order(torch.arange(data.num_documents)).tolist()
    names = [f"{column + 1}:" for column in range(data.num_features)]
    for query, row in zip(queries, rows, strict=True):
        values = data.features[row].numpy()
        columns = np.flatnonzero(values) if sparse else range(data.num_features)
        features = "".join(f" {names[column]}{_number(values[column])}" for column in columns)
        comment = "" if data.doc_ids is None else _comment(data.doc_ids[row])
        yield f"{_number(data.labels[row].numpy()[()])}{query}{features}{comment}\n"


def _number(value: Any) -> str:
    """The shortest text whose float64 rounds to the same number; whole numbers without a point."""
    if abs(value) < 1e15 and value == np.trunc(value):
        return str(int(value)) if value or not np.signbit(value) else "-0"
    text = str(value)
    # Shortest for float32 means read as float32; by way of float64 it could in principle be rounded twice.
    return text if type(value)(float(text)) == value else repr(float(value))


def _query_word(qid: object) -> str:
    word = str(qid)
    if not word or not word.isascii() or not word.isprintable() or any(mark in word for mark in " :#"):
        raise DataError(f"a query id must be printable ASCII without blanks, ':' and '#' to be saved, got {qid!r}")
    return word


def _comment(doc_id: str) -> str:
    if not doc_id:
        return ""
    if len(doc_id.split()) != 1:
        raise DataError(f"a document id must be one word to be saved, got {doc_id!r}")
    return f" #docid = {doc_id}"
