"""CSV and TSV files with a header, read by pyarrow into a temporary Arrow file."""

from __future__ import annotations

import csv
import re
import tempfile
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import DataError
from lgmml_torch.data.arrow import ArrowSource
from lgmml_torch.data.columns import lay_out, read_batches, require_arrow
from lgmml_torch.data.source import PathLike, ReadOptions
from lgmml_torch.data.svmlight import TextFile, query_ids, shown

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_BYTES = 1 << 20  # of text that is converted at a time
_MISSING = ["", "NULL", "Null", "null", "nan", "NaN", "NAN"]
_TRUE, _FALSE = ["1", "true", "True", "TRUE"], ["0", "false", "False", "FALSE"]
_FLAGS = ("true", "false")
_BAD_VALUE = re.compile(r"In CSV column #(\d+): Row #(\d+): [\w ]*: (?:invalid value '(.*)'|(.*))$", re.DOTALL)
_BAD_ROW = re.compile(r"CSV parse error: Row #(\d+): Expected \d+ columns, got (\d+)")


def open_csv(path: PathLike, options: ReadOptions) -> _CsvSource:
    """A header, then one document per line."""
    return _CsvSource(path, options, ",")


def open_tsv(path: PathLike, options: ReadOptions) -> _CsvSource:
    """The same with tabs."""
    return _CsvSource(path, options, "\t")


class _CsvSource(ArrowSource):
    """A text table. It is converted once, when it is opened; after that it is read like an Arrow file.

    Args:
        path: the file.
        options: how to read it.
        delimiter: between two cells.
    """

    what = "the header"

    def __init__(self, path: PathLike, options: ReadOptions, delimiter: str) -> None:
        require_arrow("for CSV files")
        self._text = TextFile(path)
        self._delimiter = delimiter
        self.name, self.options = self._text.name, options
        try:
            self.header, self._header_line = self._read_header()
            lay_out(self.header, options, self._head, what=self.what)
            reader = self._convert()
            sizes, pieces = read_batches(reader)
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
                (cells,) = csv.reader([text.decode().rstrip("\r\n")], delimiter=self._delimiter, strict=True)
            except (csv.Error, UnicodeDecodeError) as error:
                raise DataError(f"{self.name}:{line}: not a line of CSV: {error}") from error
            return list(map(str.strip, cells)), line
        raise DataError(f"{self.name}:1: the file holds no documents")

    def _convert(self) -> pa.RecordBatchFileReader:
        """The table as an Arrow file, mapped; the file has no name any more."""
        import pyarrow as pa

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
        import pyarrow as pa

        columns = self.options.columns
        text = {columns.qid, columns.doc_id, *columns.left_out}
        types = {}
        for name in self.header:
            types[name] = pa.float64()
            if name in text or self.options.categories.holds(name, typed=False):
                types[name] = pa.string()
        return types

    def _table(self, block: bytes, line: int, types: dict[str, Any]) -> pa.Table:
        """Some whole lines, the first of them number ``line``."""
        import pyarrow as pa

        lines = _Lines(block, line, skip=self._header_line)
        for number, text in lines.suspicious():
            if b"\r" in text.removesuffix(b"\r"):
                raise DataError(f"{self.name}:{number}: not a line of CSV: it holds a carriage return")
            if text.count(b'"') % 2:
                raise DataError(f"{self.name}:{number}: not a line of CSV: a quotation mark is not closed")
        flags: set[str] = set()  # columns of numbers that hold true and false
        while True:
            try:
                table = self._parse(lines.text, {**types, **dict.fromkeys(flags, pa.bool_())})
                break
            except pa.ArrowInvalid as error:
                flags.add(self._flag(str(error), lines, flags))
        qids = table.column(self.options.columns.qid).to_pylist()
        if not all(qids):
            bad = lines.number(qids.index(""))
            raise DataError(f"{self.name}:{bad}: column {self.options.columns.qid!r} must not be empty")
        return table

    def _parse(self, text: bytes, types: dict[str, Any]) -> pa.Table:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        if not text:
            return pa.schema(types).empty_table()
        return arrow_csv.read_csv(
            pa.BufferReader(text),
            # Without threads, pyarrow names the row of an error.
            arrow_csv.ReadOptions(column_names=self.header, block_size=len(text) + 1, use_threads=False),
            arrow_csv.ParseOptions(delimiter=self._delimiter),
            arrow_csv.ConvertOptions(column_types=types, null_values=_MISSING, true_values=_TRUE, false_values=_FALSE),
        )

    def _flag(self, message: str, lines: _Lines, flags: set[str]) -> str:
        """The column that holds true or false and is read as numbers.

        Raises:
            DataError: anything else that pyarrow found wrong.
        """
        if bad := _BAD_ROW.match(message):
            where = f"{self.name}:{lines.number(int(bad[1]) - 1)}"
            raise DataError(f"{where}: the header has {len(self.header)} columns, got {bad[2]}")
        bad = _BAD_VALUE.match(message)
        if bad is None:
            raise DataError(f"{self.name}:{lines.number(0)}: not a line of CSV: {message}")
        name, where = self.header[int(bad[1])], f"{self.name}:{lines.number(int(bad[2]) - 1)}"
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
            lines = _Lines(block, line, skip=self._header_line)
            if row < len(lines):
                return f"{self.name}:{lines.number(row)}"
            row -= len(lines)
        return self.name


class _Lines:
    """The lines of a block that are not empty, with their numbers; those up to number ``skip`` are left out."""

    def __init__(self, block: bytes, line: int, skip: int) -> None:
        self._rows: list[tuple[int, bytes]] = []
        for number, text in enumerate(block.split(b"\n"), line):
            if number > skip and text.strip():
                self._rows.append((number, text))
        self.text = b"".join([text + b"\n" for _, text in self._rows])

    def __len__(self) -> int:
        return len(self._rows)

    def suspicious(self) -> list[tuple[int, bytes]]:
        """Number and text of each line, if any of them may hold a line break inside a cell."""
        if b'"' in self.text or self.text.count(b"\r") != self.text.count(b"\r\n"):
            return self._rows
        return []

    def number(self, row: int) -> int:
        """The number of a line in the file, from 1."""
        return self._rows[row][0]
