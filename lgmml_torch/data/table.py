"""Tables: which columns are features, and CSV and TSV files with a header.

pyarrow reads well-formed CSV about nine times as fast as Python's own reader. Where it is not installed, or where a
block holds anything it and the slow reader could understand differently, the slow one decides and names the line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.categories import codes_of, distinct, found_vocabulary, gathered
from lgmml_torch.checks import DataError, did_you_mean
from lgmml_torch.data.source import PathLike, ReadOptions, Rows
from lgmml_torch.data.svmlight import decimal, shown
from lgmml_torch.data.text import Places, TextSource, query_ids
from lgmml_torch.inputs import MISSING_HINT

BLOCK_BYTES = 1 << 22  # of text that is read at a time
_MISSING_WORDS = ["", "NULL", "Null", "null", "nan", "NaN", "NAN"]  # other spellings go through the slow reader
_TRUTH = {b"true": 1.0, b"false": 0.0}
_SHOWN = 6


@dataclass(frozen=True)
class Layout:
    """Positions of the columns of a table.

    Attributes:
        qid: the query.
        label: the relevance, None where there is none.
        doc_id: the document's id, None where there is none.
        features: the features, in the order in which they are wanted.
        names: and their names.
    """

    qid: int
    label: int | None
    doc_id: int | None
    features: tuple[int, ...]
    names: tuple[str, ...]


def lay_out(header: Sequence[str], options: ReadOptions, where: str, *, what: str = "the header") -> Layout:
    """Find the columns; every one that is not the query, label or document id and is not dropped is a feature.

    Raises:
        DataError: for a name that comes twice, a query column that is not there, or other features than asked for.
    """
    columns = options.columns
    place = {name: position for position, name in enumerate(header)}
    if len(place) < len(header):
        twice = next(name for position, name in enumerate(header) if place[name] != position)
        raise DataError(f"{where}: column {twice!r} is named twice")
    for name in (columns.qid, *columns.drop):
        if name not in place:
            hint = did_you_mean(name, list(header)) or f"; there are {_listed(header)}"
            raise DataError(f"{where}: {what} must name a column {name!r}{hint}")
    special = {columns.qid, columns.label, columns.doc_id, columns.weight, columns.position, *columns.drop}
    found = tuple(name for name in header if name not in special)
    wanted = options.feature_names
    if wanted is not None:
        check_names(found, wanted, where, model=options.model)
        found = wanted
    options.categories.check_present(found, where)
    options.check_width(len(found), where, f"{what} names")
    if not found:
        raise DataError(f"{where}: {what} names no feature")
    features = tuple(place[name] for name in found)
    return Layout(place[columns.qid], place.get(columns.label), place.get(columns.doc_id), features, found)


def check_names(found: Sequence[str], wanted: Sequence[str], where: str, *, model: bool) -> None:
    """Require the same names, in any order; the error lists those that are missing and those that are unknown."""
    gone = [name for name in wanted if name not in set(found)]
    new = [name for name in found if name not in set(wanted)]
    if not gone and not new:
        return
    known = "the model was trained on" if model else "there should be"
    parts = [f"column {_listed(gone)} is missing"] if len(gone) == 1 else [f"columns {_listed(gone)} are missing"]
    parts = parts if gone else []
    if new:
        hint = did_you_mean(new[0], gone) if gone else ""
        parts.append(f"{known} no column {_listed(new)}{hint}")
    raise DataError(f"{where}: {', and '.join(parts)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


@dataclass
class _Part:
    """Some lines: like `Rows`, and the query of each as it is written."""

    qids: list[bytes]
    rows: Rows


class CsvSource(TextSource):
    """A header, then one document per line."""

    def __init__(self, path: PathLike, options: ReadOptions, *, delimiter: str = ",") -> None:
        super().__init__(path, options)
        self.delimiter = delimiter
        try:
            self._take_header()
            self._find_words()
        except BaseException:
            self.close()
            raise

    def _take_header(self) -> None:
        for line, _, text in self.text.blocks(1):
            if text.strip():
                self.header, self._header_line = [name.strip() for name in self._cells(text, line)], line
                self.layout = lay_out(self.header, self.options, f"{self.name}:{line}")
                self.feature_names, self.has_labels = self.layout.names, self.layout.label is not None
                return
        raise DataError(f"{self.name}:1: the file holds no documents")

    def _find_words(self) -> None:
        """The vocabulary of each category, by a pass over the file where it is not known yet."""
        known, pairs = self.options.categories, zip(self.layout.features, self.layout.names, strict=True)
        # All of them before the first pass: what is a category must not be read as a number meanwhile.
        self._words = {
            position: known.vocabulary(name) or () for position, name in pairs if known.holds(name, typed=False)
        }
        for position in self._words:
            name = self.header[position]
            if known.vocabulary(name) is None:
                self._words[position] = found_vocabulary(self._distinct(position), name)
        self.categories = gathered([self._words.get(position) for position in self.layout.features])

    def _distinct(self, position: int) -> set[str | None]:
        return {word for part in self._column_blocks(position) for word in distinct(part)[0]}

    def _unlabelled(self) -> str:
        label = self.options.columns.label
        hint = did_you_mean(label, self.header)
        return f"{self.name}:{self._header_line}: the header names no column {label!r}, and training needs labels{hint}"

    def _blocks(self, size: int) -> Iterator[tuple[int, int, bytes]]:
        for line, place, block in super()._blocks(size):
            skip = 0
            while line <= self._header_line and skip < len(block):
                skip = (block.find(b"\n", skip) + 1) or len(block)
                line += 1
            yield line, place + skip, block[skip:]

    def _scan(self, block: bytes, line: int, place: int, places: Places) -> None:
        lines = block.split(b"\n")
        starts = np.cumsum([0, *(len(text) + 1 for text in lines)]).tolist()
        there = [i for i, text in enumerate(lines) if text.strip()]
        table = self._arrow_table(block, [self.layout.qid])
        qids = None if table is None else [qid.encode() for qid in table.column(0).to_pylist()]
        if qids is None or len(qids) != len(there) or not all(qids):
            qids = [self._checked(lines[i], line + i)[self.layout.qid].encode() for i in there]
        for qid, i in zip(qids, there, strict=True):
            places.add(qid, place + starts[i], place + min(starts[i + 1], len(block)), line + i)

    def _read(self, rows: NDArray[np.int64]) -> Rows:
        texts, numbers = self._texts(rows)
        found = self._fast(b"".join(texts))
        return (self._slow(texts, numbers) if found is None or len(found.qids) != len(rows) else found).rows

    def _whole(self) -> Rows:
        parts: list[_Part] = []
        for line, _, block in self._blocks(BLOCK_BYTES):
            part = self._fast(block)
            if part is None:
                numbered = [(text, number) for number, text in enumerate(block.split(b"\n"), line) if text.strip()]
                part = self._slow([text for text, _ in numbered], [number for _, number in numbered])
            if part.qids:
                parts.append(part)
        if not parts:
            raise DataError(f"{self.name}:1: the file holds no documents")
        known: dict[bytes, int] = {}
        codes = [known.setdefault(qid, len(known)) for part in parts for qid in part.qids]
        self._queries = np.array(codes, np.int64), query_ids(list(known))
        return _joined([part.rows for part in parts])

    def column(self, name: str) -> list[str]:
        """The text of one column that is no feature, row by row."""
        parts = self._column_blocks(self.header.index(name))
        return [word for part in parts for word in (part if isinstance(part, list) else part.to_pylist())]

    def _column_blocks(self, position: int) -> Iterator[Any]:
        """The text of one column, some lines at a time: a list, or a column of pyarrow."""
        for line, _, block in self._blocks(BLOCK_BYTES):
            table = self._arrow_table(block, [position])
            if table is not None:
                yield table.column(0)
            else:
                lines = enumerate(block.split(b"\n"), line)
                yield [self._checked(text, number)[position] for number, text in lines if text.strip()]

    def _fast(self, block: bytes) -> _Part | None:
        """What pyarrow makes of whole lines; None where the slow reader has to look."""
        plan = self.layout
        special = [position for position in (plan.qid, plan.label, plan.doc_id) if position is not None]
        table = self._arrow_table(block, [*special, *plan.features])
        if table is None:
            return None
        qids = table.column(0).to_pylist()
        labels = None if plan.label is None else self._arrow_numbers([table.column(1)], np.float32, missing=False)
        start = len(special)
        columns = [table.column(position) for position in range(start, start + len(plan.features))]
        features = self._arrow_features(columns)
        if features is None or not all(qids) or (labels is None and plan.label is not None):
            return None
        ids = None if plan.doc_id is None else table.column(start - 1).to_pylist()
        return _Part([qid.encode() for qid in qids], Rows(features, None if labels is None else labels[:, 0], ids))

    def _arrow_table(self, block: bytes, positions: Sequence[int]) -> Any:
        """These columns of whole lines as pyarrow reads them; None where it might read them differently."""
        if find_spec("pyarrow") is None or b'"' in block or block.count(b"\r") != block.count(b"\r\n"):
            return None
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        numbers = {
            self.header[position]
            for position in (*self.layout.features, self.layout.label)
            if position is not None and position not in self._words
        }
        try:
            return arrow_csv.read_csv(
                pa.BufferReader(block),
                arrow_csv.ReadOptions(column_names=self.header, block_size=len(block) + 1),
                arrow_csv.ParseOptions(delimiter=self.delimiter, quote_char=False),
                arrow_csv.ConvertOptions(
                    column_types={name: pa.float64() if name in numbers else pa.string() for name in self.header},
                    null_values=_MISSING_WORDS,
                    include_columns=[self.header[position] for position in positions],
                ),
            )
        except pa.ArrowException:
            return None

    def _arrow_features(self, columns: Sequence[Any]) -> NDArray[Any] | None:
        """Numbers and codes side by side; None where the slow reader has to look."""
        missing = self.options.missing != "error"
        if not self._words:
            return self._arrow_numbers(columns, self.options.kind, missing=missing)
        out = np.empty((len(columns[0]), len(columns)), self.options.kind)
        for place, (position, column) in enumerate(zip(self.layout.features, columns, strict=True)):
            if position in self._words:
                out[:, place] = codes_of(*distinct(column), self._words[position])
                continue
            numbers = self._arrow_numbers([column], self.options.kind, missing=missing)
            if numbers is None:
                return None
            out[:, place] = numbers[:, 0]
        return out

    @staticmethod
    def _arrow_numbers(columns: Sequence[Any], kind: Any, *, missing: bool) -> NDArray[Any] | None:
        out = np.empty((len(columns[0]), len(columns)), kind)
        for position, column in enumerate(columns):
            with np.errstate(over="ignore"):
                out[:, position] = column.to_numpy()
            gaps = column.null_count
            if (gaps and not missing) or int((~np.isfinite(out[:, position])).sum()) != gaps:
                return None
        return out

    def _slow(self, texts: Sequence[bytes], numbers: list[int]) -> _Part:
        """The same by Python's own reader, or what is wrong on which line."""
        plan = self.layout
        cells = [self._checked(text, number) for text, number in zip(texts, numbers, strict=True)]
        label = plan.label
        plain = all(text.isascii() and b"_" not in text for text in texts)
        features = self._slow_features(cells, numbers, plain)
        labels = None if label is None else self._numbers([[row[label]] for row in cells], [label], numbers, plain)
        ids = None if plan.doc_id is None else [row[plan.doc_id] for row in cells]
        rows = Rows(features, None if labels is None else labels[:, 0].astype(np.float32), ids)
        return _Part([row[plan.qid].encode() for row in cells], rows)

    def _slow_features(self, cells: list[list[str]], numbers: list[int], plain: bool) -> NDArray[Any]:
        places = [(place, at) for place, at in enumerate(self.layout.features) if at not in self._words]
        columns = [at for _, at in places]
        values = self._numbers([[row[at] for at in columns] for row in cells], columns, numbers, plain)
        if not self._words:
            return values
        out = np.empty((len(cells), len(self.layout.features)), self.options.kind)
        out[:, [place for place, _ in places]] = values
        for place, at in enumerate(self.layout.features):
            if at in self._words:
                out[:, place] = codes_of(*distinct([row[at] for row in cells]), self._words[at])
        return out

    def _numbers(self, cells: list[list[str]], columns: Sequence[int], numbers: list[int], plain: bool) -> NDArray[Any]:
        """Numbers of some columns; ``plain`` promises that Python's ``float`` is not more generous than we are."""
        kind = self.options.kind
        values = None
        if plain:
            with suppress(ValueError):
                values = np.array(cells, dtype=np.float64).reshape(len(cells), len(columns))
        with np.errstate(over="ignore"):
            if values is not None and np.isfinite(cast := values.astype(kind)).all():
                return cast
        out = np.empty((len(cells), len(columns)), kind)
        for row, number in enumerate(numbers):
            for place, column in enumerate(columns):
                out[row, place] = self._number(cells[row][place], column, number)
        return out

    def _number(self, text: str, column: int, number: int) -> float:
        word = text.strip().encode()
        value = decimal(word) if word else float("nan")
        where = f"{self.name}:{number}: column {self.header[column]!r}"
        with np.errstate(over="ignore"):
            if value is not None and np.isfinite(self.options.kind(value)):
                return value
        if value is None and word.lower() in _TRUTH:
            return _TRUTH[word.lower()]
        if value is None or not np.isnan(value) or column == self.layout.label:
            hint = "" if value is not None or column == self.layout.label else _word_hint(self.header[column])
            raise DataError(f"{where} must be a finite number, got {shown(word)}{hint}")
        if self.options.missing == "error":
            raise DataError(f"{where} is missing; {MISSING_HINT}")
        return value

    def _checked(self, text: bytes, number: int) -> list[str]:
        cells = self._cells(text, number)
        if len(cells) != len(self.header):
            raise DataError(f"{self.name}:{number}: the header has {len(self.header)} columns, got {len(cells)}")
        if not cells[self.layout.qid]:
            raise DataError(f"{self.name}:{number}: column {self.options.columns.qid!r} must not be empty")
        return cells

    def _cells(self, line: bytes, number: int) -> list[str]:
        try:
            return next(csv.reader([line.decode("utf-8").rstrip("\r\n")], delimiter=self.delimiter, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{self.name}:{number}: not a line of CSV: {error}") from error


def _word_hint(name: str) -> str:
    return f"; if its words are categories, name it in `categories` (data.categories=[{name}])"


def open_tsv(path: PathLike, options: ReadOptions) -> CsvSource:
    """The same with tabs."""
    return CsvSource(path, options, delimiter="\t")


def _joined(parts: list[Rows]) -> Rows:
    """One after the other; each part gives up its features as they are copied."""
    ids = None if parts[0].doc_ids is None else [word for part in parts for word in part.doc_ids or ()]
    labels = (
        None if parts[0].labels is None else np.concatenate([part.labels for part in parts if part.labels is not None])
    )
    out = np.empty((sum(len(part.features) for part in parts), parts[0].features.shape[1]), parts[0].features.dtype)
    start = 0
    for part in parts:
        features, part.features = part.features, np.empty((0, 0))
        out[start : start + len(features)] = features
        start += len(features)
    return Rows(out, labels, ids)
