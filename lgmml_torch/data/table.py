"""Tables: arrays, data sets and frames in memory, ``.npz`` files of arrays, and CSV and TSV files with a header.

Text is read by pyarrow into a temporary Arrow file.
"""

from __future__ import annotations

import csv
import re
import sys
import tempfile
import zipfile
from collections.abc import Hashable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch import inputs
from lgmml_torch.categories import Categories, WordColumns, coded_features
from lgmml_torch.checks import DataError, did_you_mean
from lgmml_torch.data.arrow import ArrowSource
from lgmml_torch.data.columns import check_same_names, lay_out, pa, require_arrow
from lgmml_torch.data.source import DataSource, PathLike, ReadOptions, SourceRows
from lgmml_torch.data.svmlight import TextFile, query_ids, shown
from lgmml_torch.files import check_unpacked
from lgmml_torch.ragged import RankingData

if TYPE_CHECKING:
    import narwhals as nw
    from pyarrow import RecordBatchFileReader, Table

_BLOCK_BYTES = 1 << 20  # of text that is converted at a time
_MISSING = ["", "NULL", "Null", "null", "nan", "NaN", "NAN"]
_TRUE, _FALSE = ["1", "true", "True", "TRUE"], ["0", "false", "False", "FALSE"]
_FLAGS = ("true", "false")
_BAD_VALUE = re.compile(r"In CSV column #(\d+): Row #(\d+): [\w ]*: (?:invalid value '(.*)'|(.*))$", re.DOTALL)
_BAD_ROW = re.compile(r"CSV parse error: Row #(\d+): Expected \d+ columns, got (\d+)")


class ArraySource(DataSource):
    """A matrix of features with the label, query and id of each row."""

    def __init__(
        self,
        name: str,
        options: ReadOptions,
        X: Any,  # (N, D), as `RankingData.from_arrays` takes them
        y: Any | None,  # (N,)
        *,
        qid: Any = None,  # (N,) or None with ``group``
        group: Any = None,  # sizes of consecutive queries
        doc_ids: Sequence[str] | None = None,
        names: tuple[str, ...] | None = None,  # by default those of a frame
        categories: Categories | None = None,  # the words behind the codes of each feature, where ``X`` holds codes
    ) -> None:
        super().__init__(name, options)
        self.has_labels = y is not None
        try:
            self._features, found = coded_features(X, options.dtype, options.categories)
            self.categories = found or categories
            self._labels: NDArray[np.float32] | None = None
            if y is not None:
                self._labels = inputs.float_vector("y", y)
            self._codes, self._ids = inputs.query_codes(qid, group, len(self._features))
            for word, values in (("y", self._labels), ("doc_ids", doc_ids)):
                if values is not None:
                    inputs.check_length(word, len(values), len(self._features))
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        self._doc_ids = doc_ids
        if names is None:
            names = inputs.feature_names(X)
        self._flat.update(inputs.flattened(self._features, lambda column: inputs.original_column(X, column)))
        self._arrange(names)
        if not len(self._features):
            raise DataError(f"{name}: there are no documents")

    def _arrange(self, names: tuple[str, ...] | None) -> None:
        """Put the features into the order asked for, by name where both sides have names."""
        wanted = self.options.feature_names
        if names is not None and len(names) != self._features.shape[1]:
            raise DataError(f"{self.name}: {self._features.shape[1]} features need as many names, got {len(names)}")
        inputs.check_distinct(names, f"{self.name}: ")
        if names is not None and wanted is not None and names != wanted:
            check_same_names(names, wanted, self.name, model=self.options.model)
            places = dict(zip(names, range(len(names)), strict=True))
            order = [places[name] for name in wanted]
            self._features = np.ascontiguousarray(self._features[:, order])
            if self.categories is not None:
                self.categories = tuple([self.categories[column] for column in order])
        self.options.check_width(self._features.shape[1], self.name, "`X` has")
        self.feature_names = names if wanted is None else wanted

    @classmethod
    def of_data(cls, data: RankingData, options: ReadOptions) -> ArraySource:
        """The lists of a data set that was loaded."""
        features, words = options.categories.applied(data.features, data.categories, data.feature_names)
        doc_ids = None
        if data.doc_ids is not None:
            doc_ids = [data.doc_ids[row] for row in data.order.argsort().tolist()]
        source = cls(
            "data",
            replace(options, dtype=data.features.dtype, categories=WordColumns()),
            data.in_caller_order(features),
            data.in_caller_order(data.labels),
            qid=[data.qids[query] for query in data.in_caller_order(data.query_index).tolist()],
            doc_ids=doc_ids,
            names=data.feature_names,
            categories=words,
        )
        source.table, source._closed = data.table, options.categories.closed
        return source

    @classmethod
    def of_frame(cls, frame: nw.DataFrame[Any], options: ReadOptions) -> ArraySource:
        """A frame with a column for the query."""
        name, header = "frame", list(map(str, frame.columns))
        plan = lay_out(header, options, name, what="the frame")
        labels = ids = None
        if plan.label is not None:
            try:
                labels = inputs.numeric_column(frame[:, plan.label], header[plan.label])
            except DataError as error:
                raise DataError(f"{name}: {error}") from error
        if plan.doc_id is not None:
            ids = ["" if inputs.is_missing(value) else str(value) for value in frame[:, plan.doc_id].to_list()]
        features = frame[:, list(plan.features)]
        features = features.rename(dict(zip(features.columns, plan.names, strict=True)))
        source = cls(name, options, features, labels, qid=frame[:, plan.qid], doc_ids=ids, names=plan.names)
        source.table = options.table(named=True)
        return source

    @classmethod
    def of_npz(cls, path: PathLike, options: ReadOptions) -> ArraySource:
        """Arrays ``X``, ``qid`` and, optionally, ``y``, ``docid`` and ``feature_names``; the file is read whole."""
        name = str(path)
        content: Path | BytesIO = Path(path)
        try:
            if name == "-":
                name = "<stdin>"
                content = BytesIO(sys.stdin.buffer.read())
            _check_zip(name, content)
            with np.load(content, allow_pickle=False) as arrays:
                found = dict(arrays)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{name}: not a readable .npz file: {str(error) or type(error).__name__}") from error
        for key in ("X", "qid"):
            if key not in found:
                there = ", ".join(sorted(found)) or "none"
                raise DataError(f"{name}: there must be an array {key!r}, got {there}{did_you_mean(key, list(found))}")
        texts: dict[str, Any] = {}
        if "docid" in found:
            texts["doc_ids"] = list(map(str, found["docid"].tolist()))
        if "feature_names" in found:
            texts["names"] = tuple(map(str, found["feature_names"].tolist()))
        return cls(name, options, found["X"], found.get("y"), qid=found["qid"], **texts)

    def _index(self) -> tuple[NDArray[np.int64], Sequence[Hashable]]:
        return self._codes, self._ids

    def _read(self, rows: NDArray[np.int64]) -> SourceRows:
        return SourceRows(self._features, self._labels, self._doc_ids).take(rows)

    def _whole(self) -> SourceRows:
        features = self._features
        if self.options.missing != "error":  # gaps are filled in place, but not in the caller's array
            features = features.copy()
        return SourceRows(features, self._labels, self._doc_ids)


def _check_zip(name: str, content: BytesIO | Path) -> None:
    """Look at the sizes that the archive gives: no array is unpacked beyond its own."""
    with zipfile.ZipFile(content) as archive:
        members = archive.infolist()
    packed = unpacked = 0
    for member in members:
        packed += member.compress_size
        unpacked += member.file_size
    check_unpacked(name, packed, unpacked)
    if isinstance(content, BytesIO):
        content.seek(0)


class CsvSource(ArrowSource):
    """A text table. It is converted once, when it is opened; after that it is read like an Arrow file."""

    what = "the header"
    delimiter = ","

    def __init__(self, path: PathLike, options: ReadOptions) -> None:
        require_arrow("for CSV files")
        self._text = TextFile(path)
        self.name, self.options = self._text.name, options
        try:
            self.header, self._header_line = self._read_header()
            lay_out(self.header, options, self._head, what=self.what)
            reader = self._convert()
            sizes, pieces = self.batches_of(reader)
            if not any(sizes):
                raise DataError(f"{self.name}:1: the file holds no documents")
        except BaseException:
            self._text.close()
            raise
        super().__init__(self.name, "CSV", options, reader.schema, sizes, pieces, self._text.close)

    @property
    def _head(self) -> str:
        return f"{self.name}:{self._header_line}"

    def _read_header(self) -> tuple[list[str], int]:
        for line, text in self._text.blocks(1):
            if not text.strip():
                continue
            try:
                (cells,) = csv.reader([text.decode().rstrip("\r\n")], delimiter=self.delimiter, strict=True)
            except (csv.Error, UnicodeDecodeError) as error:
                raise DataError(f"{self.name}:{line}: not a line of CSV: {error}") from error
            return list(map(str.strip, cells)), line
        raise DataError(f"{self.name}:1: the file holds no documents")

    def _convert(self) -> RecordBatchFileReader:
        """The table as an Arrow file, mapped; the file has no name any more."""
        types = self._types()
        schema = pa.schema(types)
        with tempfile.NamedTemporaryFile(suffix=".arrow") as file:
            with pa.ipc.new_file(file.name, schema) as writer:
                for line, block in self._text.blocks(_BLOCK_BYTES, progress=self.options.progress):
                    table = self._table(block, line, types)
                    writer.write_table(table.cast(schema))
            return pa.ipc.open_file(pa.memory_map(file.name))

    def _types(self) -> dict[str, Any]:
        """How the cells of each column are read: text, or numbers in the features and the label."""
        columns = self.options.columns
        text = {columns.qid, columns.doc_id, *columns.left_out}
        types = {}
        for name in self.header:
            types[name] = pa.float64()
            if name in text or self.options.categories.holds(name, typed=False):
                types[name] = pa.string()
        return types

    def _table(self, block: bytes, line: int, types: dict[str, Any]) -> Table:
        """Some whole lines, the first of them number ``line``."""
        lines = _numbered(block, line, skip=self._header_line)
        whole = b"".join([text + b"\n" for _, text in lines])
        if b'"' in whole or whole.count(b"\r") != whole.count(b"\r\n"):  # a cell may hold a line break
            for number, text in lines:
                if b"\r" in text.removesuffix(b"\r"):
                    raise DataError(f"{self.name}:{number}: not a line of CSV: it holds a carriage return")
                if text.count(b'"') % 2:
                    raise DataError(f"{self.name}:{number}: not a line of CSV: a quotation mark is not closed")
        flags: set[str] = set()  # columns of numbers that hold true and false
        while True:
            try:
                table = self._parse(whole, {**types, **dict.fromkeys(flags, pa.bool_())})
                break
            except pa.ArrowInvalid as error:
                flags.add(self._flag(str(error), lines, flags))
        qids = table.column(self.options.columns.qid).to_pylist()
        if not all(qids):
            bad = lines[qids.index("")][0]
            raise DataError(f"{self.name}:{bad}: column {self.options.columns.qid!r} must not be empty")
        return table

    def _parse(self, text: bytes, types: dict[str, Any]) -> Table:
        if not text:
            return pa.schema(types).empty_table()
        return pa.csv.read_csv(
            pa.BufferReader(text),
            # Without threads, pyarrow names the row of an error.
            pa.csv.ReadOptions(column_names=self.header, block_size=len(text), use_threads=False),
            pa.csv.ParseOptions(delimiter=self.delimiter),
            pa.csv.ConvertOptions(column_types=types, null_values=_MISSING, true_values=_TRUE, false_values=_FALSE),
        )

    def _flag(self, message: str, lines: list[tuple[int, bytes]], flags: set[str]) -> str:
        """The column that holds true or false and is read as numbers."""
        if bad := _BAD_ROW.match(message):
            where = f"{self.name}:{lines[int(bad[1]) - 1][0]}"
            raise DataError(f"{where}: the header has {len(self.header)} columns, got {bad[2]}")
        bad = _BAD_VALUE.match(message)
        if bad is None:
            raise DataError(f"{self.name}:{lines[0][0]}: not a line of CSV: {message}")
        name, where = self.header[int(bad[1])], f"{self.name}:{lines[int(bad[2]) - 1][0]}"
        if bad[3] is None:
            raise DataError(f"{where}: not a line of CSV: column {name!r} has {bad[4]}")
        if name in flags:
            raise DataError(f"{where}: column {name!r} must hold numbers or true and false, not both, got {bad[3]!r}")
        if bad[3].lower() in _FLAGS:
            return str(name)
        hint = ""
        if name != self.options.columns.label:
            hint = f"; if its words are categories, name it in `categories` (data.categories=[{name}])"
        raise DataError(f"{where}: column {name!r} must be a finite number, got {shown(bad[3].encode())}{hint}")

    def _index(self) -> tuple[NDArray[np.int64], Sequence[Hashable]]:
        codes, words = super()._index()
        return codes, query_ids([str(word).encode() for word in words])

    def place(self, row: int) -> str:
        """``file:line``."""
        for line, block in self._text.blocks(_BLOCK_BYTES):
            lines = _numbered(block, line, skip=self._header_line)
            if row < len(lines):
                return f"{self.name}:{lines[row][0]}"
            row -= len(lines)
        return self.name


class TsvSource(CsvSource):
    """The same with tabs."""

    delimiter = "\t"


def _numbered(block: bytes, line: int, skip: int) -> list[tuple[int, bytes]]:
    """The lines of a block that are not empty, with their numbers; those up to number ``skip`` are left out."""
    rows = []
    for number, text in enumerate(block.split(b"\n"), line):
        if number > skip and text.strip():
            rows.append((number, text))
    return rows
