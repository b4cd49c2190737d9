"""TREC's two file formats: runs (who ranked what, by which score) and qrels (what was judged how relevant).

    run:    qid Q0 docid rank score tag
    qrels:  qid 0 docid relevance

Ids are text. A line is cut at blanks, so no id can hold one: ``red shoes`` is written as ``red%20shoes``.
Files may be gzipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import DataError
from lgmml_torch.data.source import Batch, PathLike
from lgmml_torch.data.svmlight import TextFile

_READ = 1 << 20  # bytes at a time
_BLANK = re.compile(r"\s|%(?=[0-9A-Fa-f]{2})")  # what is escaped in ids
_Value = TypeVar("_Value", int, float)


def read_run(path: PathLike) -> dict[str, dict[str, float]]:
    """The scores of a run by query and document. Ranks must be whole numbers; they are ignored, as trec_eval does.

    Raises:
        DataError: with ``file:line``: a line that has not six words, a rank or score that is no number, a document
            that a query has twice.
    """

    def value(words: list[str], where: str) -> float:
        _whole("rank", words[3], where)
        try:
            score = float(words[4])
        except ValueError:
            score = math.nan
        if math.isnan(score):
            raise DataError(f"{where}: the score must be a number, got {words[4]!r}")
        return score

    return _read(path, "qid Q0 docid rank score tag", value)


def read_qrels(path: PathLike) -> dict[str, dict[str, int]]:
    """The judgements of a qrels file by query and document; below 0 is what some collections call spam.

    Raises:
        DataError: with ``file:line``: a line that has not four words, a relevance that is no whole number, a document
            that a query has twice.
    """
    return _read(path, "qid 0 docid relevance", lambda words, where: _whole("relevance", words[3], where))


def run_lines(batch: Batch, scores: NDArray[Any], tag: str) -> Iterator[str]:  # (n,) in the order of the file
    """The lines of a run, best first, with the tag as the last word; equal scores in the order of the rows."""
    names, queries = _document_names(batch), batch.data.in_caller_order(batch.data.query_index)
    best = torch.from_numpy(scores).argsort(descending=True, stable=True)
    best = best[queries[best].argsort(stable=True)]
    rank, previous = 0, -1
    for place, query in zip(best.tolist(), queries[best].tolist(), strict=True):
        if query != previous:
            rank, previous = 0, query
        rank += 1
        yield f"{word(batch.data.qids[query])} Q0 {names[place]} {rank} {scores[place]!s} {word(tag)}\n"


def qrels_lines(batch: Batch) -> Iterator[str]:
    """The lines of a qrels file, in the order of the rows."""
    data, names = batch.data, _document_names(batch)
    queries, labels = data.in_caller_order(data.query_index).tolist(), data.in_caller_order(data.labels).tolist()
    for query, name, label in zip(queries, names, labels, strict=True):
        if label != int(label):
            raise DataError(f"labels must be whole numbers to be written as qrels, got {label:g} in {data.qids[query]}")
        yield f"{word(data.qids[query])} 0 {name} {int(label)}\n"


def _document_names(batch: Batch) -> list[str]:
    """A word for each row of a batch, in the order of the file: its id, or else its row in the file, from 1."""
    ids = batch.data.doc_ids
    rows = batch.data.order.argsort().tolist()  # canonical rows in the file's order
    if ids is None:
        return list(map(word, batch.rows + 1))
    return [word(ids[row] or batch.rows[place] + 1) for place, row in enumerate(rows)]


def word(value: object) -> str:
    """One word for each value: a TREC line is cut at blanks, so blanks are written as in addresses of the web.

    >>> word("two words"), word("two_words"), word(7), word("100%"), word("a%20b")
    ('two%20words', 'two_words', '7', '100%', 'a%2520b')
    """
    return _BLANK.sub(lambda found: quote(found[0]), str(value)) or "%00"


def _read(path: PathLike, form: str, value: Callable[[list[str], str], _Value]) -> dict[str, dict[str, _Value]]:
    found: dict[str, dict[str, _Value]] = {}
    with closing(TextFile(path)) as file:
        for number, line in _lines(file):
            words, where = line.split(), f"{file.name}:{number}"
            if not words:
                continue
            if len(words) != len(form.split()):
                raise DataError(f"{where}: a line must read `{form}`, got {len(words)} words")
            own = found.setdefault(words[0], {})
            if words[2] in own:
                raise DataError(f"{where}: query {words[0]} has document {words[2]} twice")
            own[words[2]] = value(words, where)
    if not found:
        raise DataError(f"{file.name}:1: the file holds no documents")
    return found


def _lines(file: TextFile) -> Iterable[tuple[int, str]]:
    for first, block in file.blocks(_READ):
        for number, line in enumerate(block.split(b"\n"), first):
            try:
                yield number, line.decode()
            except UnicodeDecodeError as error:
                raise DataError(f"{file.name}:{number}: the line is not UTF-8: {error.reason}") from error


def _whole(name: str, text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise DataError(f"{where}: the {name} must be a whole number, got {text!r}") from None


def as_arrays(
    run: Mapping[str, Mapping[str, float]], qrels: Mapping[str, Mapping[str, int]]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_], list[int]]:
    """Scores, labels and whether a document was ranked, one judged query after the other, and the sizes of the queries.

    Documents are those that were ranked or judged. Scores are single precision, and documents of a query stand by
    falling id, which is how trec_eval breaks ties. Labels are 0 where nothing was judged or the judgement is negative.
    """
    scores: list[float] = []
    labels: list[int] = []
    ranked: list[bool] = []
    sizes: list[int] = []
    for qid, judged in qrels.items():
        own = run.get(qid, {})
        names = sorted({*own, *judged}, reverse=True)
        for name in names:
            scores.append(own.get(name, -math.inf))
            labels.append(max(judged.get(name, 0), 0))
            ranked.append(name in own)
        sizes.append(len(names))
    with np.errstate(over="ignore"):  # beyond single precision is infinite there, too
        single = np.array(scores, dtype=np.float64).astype(np.float32)
    return single, np.array(labels, np.float32), np.array(ranked, bool), sizes
