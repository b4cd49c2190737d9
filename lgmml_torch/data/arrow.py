"""Parquet and Arrow IPC (feather) files and pyarrow tables, a row per document or a row per query.

With a row per query the other columns are lists: ``label: list<float>``, ``docid: list<string>`` and either one list
per feature or ``features: list<fixed_size_list<float>[D]>``, whose names the file's metadata may give. With a row per
document there may also be one column of vectors. Rows are decoded some thousand at a time; a file whose queries are
scattered is decoded once into a temporary file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.categories import Vocabulary, codes_of, gathered, word_of
from lgmml_torch.checks import DataError, did_you_mean
from lgmml_torch.data.columns import check_same_names, inner, is_list, lay_out, no_number, pa, readable
from lgmml_torch.data.source import DataSource, PathLike, ReadOptions, SourceRows
from lgmml_torch.files import check_memory
from lgmml_torch.inputs import check_distinct, flattened, is_missing, no_numbers

if TYPE_CHECKING:
    from pyarrow import RecordBatch, RecordBatchFileReader, Schema, Table

_Pieces = Callable[[int, list[str], int], Iterator[Any]]  # from a group on, some columns, that many rows at a time
_STEP = 8192  # documents decoded at a time, about
NAMES = b"feature_names"  # in the metadata: a JSON list


class ArrowSource(DataSource):
    """Columns in the types of Arrow."""

    what = "the schema"  # gives the names of the columns

    def __init__(
        self,
        name: str,
        word: str,  # what kind of file it is, for messages
        options: ReadOptions,
        schema: Schema,
        sizes: list[int],  # rows of each group; reading may start at any of them
        pieces: _Pieces,
        close: Callable[[], None] = lambda: None,  # lets go of the file
        files: Sequence[str] = (),  # the file of each group, where there are several
    ) -> None:
        super().__init__(name, options)
        self.table = options.table(named=True)
        self._files = files
        self._word, self._schema, self._close = word, schema, close
        self._rows_before = np.cumsum([0, *sizes])  # of each group, and the number of all rows
        self._all_pieces = pieces
        self._stream: Iterator[SourceRows] = iter(())
        self._order: list[int] | None = None
        self.header = list(schema.names)
        self._held, self._held_start = SourceRows(np.empty((0, 0)), None, None), -1  # the piece decoded last
        try:
            self._arrange()
        except BaseException:
            close()
            raise

    @classmethod
    def of_ipc(cls, path: PathLike, options: ReadOptions) -> ArrowSource:
        """An Arrow IPC file (feather, version 2), memory-mapped."""
        name = "<stdin>" if str(path) == "-" else str(path)
        with readable(name, "Arrow"):
            mapped = pa.BufferReader(sys.stdin.buffer.read()) if str(path) == "-" else pa.memory_map(str(path))
            reader = pa.ipc.open_file(mapped)
            return cls(name, "Arrow", options, reader.schema, *cls.batches_of(reader), mapped.close)

    @classmethod
    def of_table(cls, table: Table, options: ReadOptions, name: str = "table") -> ArrowSource:
        """A table in memory."""

        def pieces(first: int, columns: list[str], step: int) -> Iterator[Any]:
            yield from table.select(columns).to_batches(step)

        return cls(name, "Arrow", options, table.schema, [len(table)], pieces)

    @staticmethod
    def batches_of(reader: RecordBatchFileReader) -> tuple[list[int], _Pieces]:
        """The rows of each batch of an Arrow IPC file, and what reads its columns."""
        sizes = [reader.get_batch(group).num_rows for group in range(reader.num_record_batches)]

        def pieces(first: int, columns: list[str], step: int) -> Iterator[Any]:
            for group in range(first, reader.num_record_batches):
                batch = reader.get_batch(group).select(columns)
                batch.validate(full=True)  # its bytes are used as they are: lengths and places in them may be anything
                for start in range(0, len(batch), step):
                    yield batch.slice(start, step)

        return sizes, pieces

    def close(self) -> None:
        """Let go of the file, and of what was decoded last: the stream refers to this source, which refers to it."""
        self._stream, self._held, self._held_start = iter(()), SourceRows(np.empty((0, 0)), None, None), -1
        self._close()

    def _arrange(self) -> None:
        options, header, columns = self.options, self.header, self.options.columns
        rest, lists = self._choose_shape()
        if self._matrix is not None:
            self.layout = lay_out(header, ReadOptions(columns=columns), self._head, what=self.what)
            self._arrange_matrix(self._matrix)
        else:
            self.layout = lay_out(header, options, self._head, what=self.what)
            self.feature_names = self.layout.names
            self._read_names, self._width = list(self.layout.names), len(self.layout.names)
            self.categories = gathered(list(map(self._take_column, self._read_names)))
        if not options.doc_ids:
            self.layout = replace(self.layout, doc_id=None)
        self.has_labels = self.layout.label is not None
        if self.layout.label is not None:
            self._check_type(columns.label, self._entry_type(columns.label))
        odd = [name for name in rest if name not in lists]
        if self._nested and odd:
            got = self._type(odd[0])
            raise DataError(f"{self.name}: column {odd[0]!r} must hold lists like {lists[0]!r}, got {got}")

    def _choose_shape(self) -> tuple[list[str], list[str]]:
        """Set `_nested` and `_matrix`; returns the columns besides the query's, and those of them that hold lists."""
        columns = self.options.columns
        aside = {columns.qid, *columns.left_out}
        rest = [name for name in self._schema.names if name not in aside]
        lists = [name for name in rest if is_list(self._type(name))]
        others = [name for name in rest if name not in (columns.label, columns.doc_id)]
        self._nested, self._matrix = bool(lists), None
        self._measured = lists[0] if lists else ""  # its lists say how many documents a row has
        if len(others) == 1:
            # One column of lists may be one vector per document, or one list of vectors, or of numbers, per query.
            single = others == lists and len(rest) > 1
            deep = is_list(inner(self._type(others[0])))
            if deep or single:
                self._matrix = others[0]
            if single:
                self._nested = deep
        return rest, lists

    def _take_column(self, name: str) -> Vocabulary | None:
        """Check the type of a feature; its vocabulary, by a pass over the column, where it is a category."""
        dtype, known = self._entry_type(name), self.options.categories
        if not known.holds(name, typed=pa.types.is_dictionary(dtype)):
            self._check_type(name, dtype)
            return None
        if (vocabulary := known.vocabulary(name)) is not None:
            return vocabulary
        words: set[str | None] = set()
        try:
            for piece in self._pieces(0, [name]):
                words.update(_distinct_words(piece.column(0))[0])
            return known.found(words, name)
        except DataError as error:
            raise DataError(f"{self.name}: {error}") from error

    def _arrange_matrix(self, column: str) -> None:
        """All features in one column: their number and, where the metadata gives them, their names."""
        vector = self._entry_type(column)
        self._check_type(column, inner(vector))
        self._read_names = [column]
        text = (self._schema.metadata or {}).get(NAMES)
        names = None if text is None else tuple(json.loads(text))
        check_distinct(names, f"{self.name}: ")
        width = vector.list_size if pa.types.is_fixed_size_list(vector) else self._first_width(column)
        if width == 0:
            raise DataError(f"{self.name}: column {column!r} must hold features, got lists without entries")
        self._width = width or 0  # nothing was found where there are no documents, which is said elsewhere
        wanted = self.options.feature_names
        if names is not None and len(names) == self._width and wanted is not None:
            check_same_names(names, wanted, self.name, model=self.options.model)
            self._order = list(map(names.index, wanted))
        self.options.check_width(self._width, self.name, f"column {column!r} holds")
        self.feature_names = wanted
        if wanted is None and names is not None and len(names) == self._width:
            self.feature_names = names

    def _first_width(self, column: str) -> int | None:
        """The length of the first vector; None where there is none."""
        for piece in self._pieces(0, [column]):
            for row in piece.column(0):
                if row.is_valid:
                    return len(row)
        return None

    def _type(self, name: str) -> Any:
        return self._schema.types[self._schema.names.index(name)]  # names may come twice until that is refused

    def _entry_type(self, name: str) -> Any:
        """The type of the values of a column, one for each document."""
        return inner(self._type(name)) if self._nested else self._type(name)

    def _check_type(self, name: str, dtype: Any) -> None:
        word = no_number(dtype)
        if word is not None:
            raise DataError(f"{self.name}: {no_numbers(name, word, dtype)}")

    @property
    def _head(self) -> str:
        """Where the names of the columns stand, for messages."""
        return self.name

    def _unlabelled(self) -> str:
        label = self.options.columns.label
        hint = did_you_mean(label, self._schema.names)
        return f"{self._head}: {self.what} names no column {label!r}, and training needs labels{hint}"

    def _rows(self, first: int, columns: list[str], step: int = _STEP) -> Iterator[Any]:
        """Some columns from a group on, as they stand in the file."""
        with readable(self.name, self._word):
            yield from self._all_pieces(first, columns, step)

    def _pieces(self, first: int, columns: list[str], step: int = _STEP) -> Iterator[Any]:
        """Some columns from a group on, with a row per document."""
        if not self._nested:
            yield from self._rows(first, columns, step)
            return
        row = int(self._rows_before[first])
        for piece in self._rows(first, list(dict.fromkeys([self._measured, *columns])), step):
            yield self._flattened(piece, columns, row)
            row += len(piece)

    def _flattened(self, piece: RecordBatch, columns: list[str], row: int) -> RecordBatch:
        """The entries of lists, one per document, once all lists of a row are known to be equally long."""
        starts, lengths = self._rows_before, _lengths(piece.column(self._measured))
        if len(gone := np.flatnonzero(lengths < 0)):
            where = self._located(row + int(gone[0]), starts)
            raise DataError(f"{where}: the list in column {self._measured!r} is missing")
        arrays = []
        for name in columns:
            column = piece.column(name)
            if not is_list(column.type):
                arrays.append(column.take(pa.array(np.repeat(np.arange(len(piece)), lengths))))
                continue
            found = _lengths(column).clip(0)
            if len(odd := np.flatnonzero((found != lengths) | column.is_null().to_numpy(zero_copy_only=False))):
                where = self._located(row + int(odd[0]), starts)
                raise DataError(f"{where}: column {name!r} has {found[odd[0]]} entries for {lengths[odd[0]]} documents")
            arrays.append(column.flatten())
        return pa.RecordBatch.from_arrays(arrays, columns)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The first document of each group, and the end of the last."""
        starts = self._rows_before
        if self._nested:
            found = [_lengths(piece.column(0)).clip(0) for piece in self._rows(0, [self._measured])]
            lengths = np.concatenate([np.zeros(1, np.int64), *found])
            self._check_rows(len(lengths) - 1, starts)
            starts = np.cumsum(lengths)[starts]
        return starts

    def place(self, row: int) -> str:
        """The file and the row in it, from 1."""
        return self._located(row, self._starts)

    def _located(self, row: int, starts: NDArray[np.int64]) -> str:
        name, first = self.name, 0
        if self._files:
            name = self._files[int(np.searchsorted(starts, row, side="right")) - 1]
            first = int(starts[self._files.index(name)])
        return f"{name}: row {row - first + 1} (from 1)"

    def _check_rows(self, found: int, starts: NDArray[np.int64]) -> None:
        """Damaged files may have other rows than they say."""
        if found != starts[-1]:
            raise DataError(f"{self.name}: the file is damaged: it has {found} rows, and says {starts[-1]}")

    def _index(self) -> tuple[NDArray[np.int64], Sequence[Hashable]]:
        known: dict[Hashable, int] = {}
        codes = [np.empty(0, np.int64)]
        row = 0
        for piece in self._pieces(0, [self.options.columns.qid]):
            coded = piece.column(0)
            if not hasattr(coded, "dictionary"):
                coded = coded.dictionary_encode()
            ids = coded.dictionary.to_pylist()
            if coded.indices.null_count or any(map(is_missing, ids)):
                at = row + list(map(is_missing, coded.to_pylist())).index(True)
                raise DataError(f"{self.place(at)}: column {self.options.columns.qid!r} must not be empty")
            indices = coded.indices.to_numpy()
            order = indices[np.sort(np.unique(indices, return_index=True)[1])]  # by first appearance
            table = np.zeros(len(ids), np.int64)
            for place in order.tolist():
                table[place] = known.setdefault(ids[place], len(known))
            codes.append(table[indices])
            row += len(indices)
        self._check_rows(row, self._starts)
        if not row:
            raise DataError(f"{self.name}: there are no documents")
        return np.concatenate(codes), list(known)

    def _read(self, rows: NDArray[np.int64]) -> SourceRows:
        first, last = int(rows[0]), int(rows[-1]) + 1
        if last - first == len(rows):
            check_memory(self.name, last - first, self._width, np.dtype(self.options.kind).itemsize)
            return self._filled(np.empty((last - first, self._width), self.options.kind), first, last)
        return self._scattered.take(rows)

    @cached_property
    def _scattered(self) -> SourceRows:
        """All rows, the features in a temporary file: groups cannot be decoded again for every list."""
        with tempfile.TemporaryFile() as file:  # the map outlives it
            target = np.memmap(file, self.options.kind, "w+", shape=(self.num_rows, self._width))
        return self._filled(target, 0, self.num_rows)

    def _filled(self, features: NDArray[Any], first: int, last: int) -> SourceRows:
        """Decode rows into ``features``, going on from the last call where that is on the way."""
        held_end = self._held_start + len(self._held.features)
        group = int(np.searchsorted(self._starts, first, side="right")) - 1
        if self._held_start < 0 or first < self._held_start or self._starts[group] > held_end:
            self._stream = self._decoded(group)
            self._held, self._held_start = SourceRows(features[:0], None, None), int(self._starts[group])
        labels: list[NDArray[np.float32]] = []
        ids: list[str] = []
        done = first
        while done < last:
            held, start = self._held, self._held_start
            end = start + len(held.features)
            if done < end:
                cut = slice(done - start, min(last, end) - start)
                features[done - first : min(last, end) - first] = held.features[cut]
                if held.labels is not None:
                    labels.append(held.labels[cut])
                if held.doc_ids is not None:
                    ids.extend(held.doc_ids[cut])
                done = min(last, end)
            else:
                if (more := next(self._stream, None)) is None:
                    raise DataError(f"{self.name}: the file is damaged: it has fewer rows than it says")
                self._held, self._held_start = more, end
        part = SourceRows(features, None, None)
        if self.has_labels:
            part.labels = np.concatenate(labels)
        if self.layout.doc_id is not None:
            part.doc_ids = ids
        return part

    def _decoded(self, group: int) -> Iterator[SourceRows]:
        plan = self.layout
        special = [self.header[place] for place in (plan.label, plan.doc_id) if place is not None]
        document = int(self._starts[group])
        step = _STEP * int(self._rows_before[-1]) // max(int(self._starts[-1]), 1)  # a row may be a long list
        for piece in self._pieces(group, [*special, *self._read_names], max(step, 1)):
            columns, labels, ids = piece.columns, None, None
            if plan.label is not None:
                labels = _numbers(columns[0]).astype(np.float32)
            if plan.doc_id is not None:
                ids = list(map(_text, columns[len(special) - 1].to_pylist()))
            yield SourceRows(self._features(columns[len(special) :], document), labels, ids)
            document += len(columns[0])

    def _features(self, columns: list[Any], document: int) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            if self._matrix is not None:
                widths = _lengths(columns[0]).clip(0)
                if len(odd := np.flatnonzero(widths != self._width)):
                    where = f"{self.place(document + int(odd[0]))}: column {self._matrix!r}"
                    raise DataError(f"{where} has {int(widths[odd[0]])} features, elsewhere {self._width}")
                values = _numbers(columns[0].flatten()).reshape(-1, self._width)
                if self._order is not None:
                    values = values[:, self._order]
                whole: NDArray[Any] = values.astype(self.options.kind)
                self._flat.update(flattened(whole, lambda place: values[:, place]))
                return whole
            out = np.empty((len(columns[0]), len(columns)), self.options.kind)
            words = self.categories or (None,) * len(columns)
            for position, (column, known) in enumerate(zip(columns, words, strict=True)):
                if known is None:
                    out[:, position] = _numbers(column)
                else:
                    out[:, position] = codes_of(*_distinct_words(column), known)
        self._flat.update(flattened(out, lambda place: _numbers(columns[place]) if words[place] is None else None))
        return out

    def numbers(self, name: str) -> NDArray[Any]:
        """The numbers of one column, document by document."""
        return np.concatenate([_numbers(piece.column(0)) for piece in self._pieces(0, [name])])

    def column(self, name: str) -> list[str]:
        """The text of one column, document by document."""
        words: list[str] = []
        for piece in self._pieces(0, [name]):
            words.extend(map(sys.intern, map(_text, piece.column(0).to_pylist())))  # few words in many rows
        return words


def _numbers(column: Any) -> NDArray[Any]:
    """The numbers of a column; true and false are 1 and 0, missing values are NaN."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    elif pa.types.is_decimal(column.type) or pa.types.is_null(column.type):
        column = column.cast(pa.float64())
    out: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return out


def _distinct_words(column: Any) -> tuple[list[str | None], NDArray[np.int64]]:
    """The words that occur in a column, and for each row the place of its word among them."""
    if not hasattr(column, "dictionary"):
        column = column.dictionary_encode()
    used, places = np.unique(column.indices.fill_null(-1).to_numpy(), return_inverse=True)
    entries = [*column.dictionary.to_pylist(), None]  # the last is for −1, missing
    return [word_of(entries[place]) for place in used.tolist()], places.astype(np.int64)


def _lengths(column: Any) -> NDArray[np.int64]:
    """The length of each list, −1 where it is missing."""
    found: NDArray[np.int64] = pa.compute.list_value_length(column).fill_null(-1).to_numpy(zero_copy_only=False)
    return found.astype(np.int64)


def _text(value: object) -> str:
    return "" if value is None else str(value)
