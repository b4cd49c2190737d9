"""One way in for every format, for training and for scoring, whole or list by list.

A `DataSource` knows the query of each of its rows and reads the rows it is asked for. Checks, missing values, batches
of whole lists and `RankingData` are the same for all formats. `open_source` picks the format; `FORMATS` lists them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch import inputs
from lgmml_torch.categories import Asked, Categories, WordColumns, check_words, fill_words, unknown_words
from lgmml_torch.checks import DataError, LGMMLError, check_choice, check_positive
from lgmml_torch.data.columns import Columns
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks, offsets_from_sizes

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Format:
    """How a kind of file is opened."""

    # Called with the path and `ReadOptions`; as text, ``"module:name"``, it is imported when it is needed.
    opener: str | Callable[..., DataSource]
    suffixes: tuple[str, ...] = ()  # of file names that mean this kind, in lower case; ``.gz`` may follow them


FORMATS = {
    "letor": Format("lgmml_torch.data.letor:LetorSource", (".txt",)),
    "lightgbm": Format("lgmml_torch.data.letor:LetorSource.of_lightgbm"),  # known by the file with the sizes beside it
    "csv": Format("lgmml_torch.data.table:CsvSource", (".csv",)),
    "tsv": Format("lgmml_torch.data.table:TsvSource", (".tsv",)),
    "npz": Format("lgmml_torch.data.table:ArraySource.of_npz", (".npz",)),
    "parquet": Format("lgmml_torch.data.folder:ParquetFiles.open", (".parquet",)),
    "arrow": Format("lgmml_torch.data.arrow:ArrowSource.of_ipc", (".arrow", ".feather")),
}


@dataclass(frozen=True)
class ReadOptions:
    """How to read, whatever the format."""

    num_features: int | None = None  # by default what the source says
    feature_names: tuple[str, ...] | None = None  # which they must have; columns are matched by name, in any order
    missing: str = "error"  # what ``NULL``, ``nan`` and empty cells stand for, see `lgmml_torch.inputs.fill_missing`
    absent: str = "zero"  # features a LETOR line does not mention; "missing" treats them as ``missing`` says
    dtype: torch.dtype = torch.float32  # of the features, or float64
    columns: Columns = field(default_factory=Columns)
    progress: bool = True  # show a bar if it takes more than two seconds
    model: bool = False  # whether the features asked for are those of a model, which messages then mention
    categories: WordColumns = field(default_factory=WordColumns)
    doc_ids: bool = True  # whether the ids of documents are read, where there are any

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, inputs.MISSING_POLICIES)
        check_choice("absent", self.absent, ("zero", "missing"))
        inputs.check_distinct(self.feature_names, "`feature_names`: ")
        if self.feature_names is not None and self.num_features is None:
            object.__setattr__(self, "num_features", len(self.feature_names))
        if self.num_features is not None:
            check_positive("num_features", self.num_features)
        if self.dtype not in (torch.float32, torch.float64):
            raise LGMMLError(f"`dtype` must be torch.float32 or torch.float64, got {self.dtype}")

    def table(self, *, named: bool = False) -> dict[str, Any]:
        """What a model remembers of the reading; ``named`` adds the names of the columns that are no features."""
        found: dict[str, Any] = {"missing": self.missing, "absent": self.absent}
        if named:
            found.update(self.columns.record())
        return found

    @property
    def kind(self) -> type[np.float32] | type[np.float64]:
        """The numpy type of the features."""
        if self.dtype == torch.float64:
            return np.float64
        return np.float32

    def check_width(self, width: int, where: str, what: str) -> None:
        """Require the number of features asked for, if one was; ``what`` they stand in, e.g. ``the header names``."""
        if self.num_features is not None and width != self.num_features:
            asked = "`num_features` asks for"
            if self.feature_names is not None:
                asked = "there are names for"
            if self.model:
                asked = "the model was trained on"
            raise DataError(f"{where}: {asked} {self.num_features} features, but {what} {width}")


@dataclass
class SourceRows:
    """Rows of a source, in the order asked for."""

    features: NDArray[Any]  # (n, D), NaN where missing
    labels: NDArray[np.float32] | None  # (n,)
    doc_ids: Sequence[str] | None  # (n,)

    def take(self, rows: NDArray[np.int64]) -> SourceRows:
        """Some of the rows."""
        part = SourceRows(np.array(self.features[rows]), None, None)
        if self.labels is not None:
            part.labels = self.labels[rows]
        if self.doc_ids is not None:
            part.doc_ids = [self.doc_ids[row] for row in rows.tolist()]
        return part


@dataclass(frozen=True)
class Batch:
    """Some whole lists."""

    data: RankingData  # its caller's order is the order of the rows in the source
    rows: NDArray[np.int64]  # (n,) the row of the source, from 0, of each document in that order


class DataSource(ABC):
    """The lists of one file, frame or set of arrays.

    A format gives `_index`, `_read` and, where they differ from the defaults, the attributes.
    """

    has_labels: bool = True  # whether it says how relevant the documents are; labels are 0 where it does not
    feature_names: tuple[str, ...] | None = None  # of the features
    categories: Categories | None = None  # the words of each feature, see `RankingData`; None where all are numbers
    header: Sequence[str] = ()  # the names of the columns of a table
    gap = "missing"  # what a value that is not there is called

    def __init__(self, name: str, options: ReadOptions) -> None:
        self.name, self.options = name, options  # what messages call it, and how it is read
        self.table: Mapping[str, Any] | None = options.table()  # see `RankingData`
        self._closed = options.categories.closed  # whether the vocabularies are those of training
        self._flat: set[int] = set()  # features that float32 flattens
        self._unknown: Counter[str] = Counter()  # rows with unknown words, by column
        self._read_rows = 0

    @abstractmethod
    def _index(self) -> tuple[NDArray[np.int64], Sequence[Hashable]]:
        """The query of each row, numbered by first appearance, and the id of each query."""

    @abstractmethod
    def _read(self, rows: NDArray[np.int64]) -> SourceRows:
        """The given rows, which ascend."""

    def _whole(self) -> SourceRows:
        """Every row; a format that can do better than `_index` and `_read` does, and sets ``_queries``."""
        return self._read(np.arange(self.num_rows))

    @cached_property
    def _queries(self) -> tuple[NDArray[np.int64], Sequence[Hashable]]:
        return self._index()

    @property
    def codes(self) -> NDArray[np.int64]:
        """``(N,)`` the query of each row, numbered by first appearance."""
        return self._queries[0]

    @property
    def qids(self) -> Sequence[Hashable]:
        """The id of each query."""
        return self._queries[1]

    def number_queries(self) -> None:
        """Give the queries the numbers of their first appearance as ids, so that they stand in that order."""
        self._queries = self.codes, range(len(self.qids))

    @property
    def num_rows(self) -> int:
        """Documents in the source."""
        return len(self.codes)

    @property
    def num_features(self) -> int:
        """Features of each document."""
        return int(self._read(np.arange(1)).features.shape[1])

    @property
    def in_order(self) -> bool:
        """Whether the rows of each query follow one another."""
        return bool((np.diff(self.codes) >= 0).all())

    def read(self, *, labelled: bool = False) -> RankingData:
        """Everything at once; ``labelled`` refuses a source without labels."""
        if labelled:
            self.check_labelled()
        part = self._whole()
        data = self._data(part, np.arange(self.num_rows))
        self._all_seen()
        return data

    def batches(self, documents: int = 32_768, *, by_id: bool = False) -> Iterator[Batch]:
        """Whole lists, about so many documents at a time, in the order in which their queries first appear.

        ``by_id`` goes through the queries in the order of their ids instead, which is that of `read`.
        """
        check_positive("documents", documents)
        codes, order = self.codes, None
        if by_id:
            codes = inputs.canonical_ranks(self.qids)[codes]
        if (np.diff(codes) < 0).any():
            order = np.argsort(codes, kind="stable")
        sizes = np.bincount(codes, minlength=len(self.qids))
        offsets = offsets_from_sizes(torch.from_numpy(sizes))
        for first, last in list_blocks(offsets, documents):
            start, stop = int(offsets[first]), int(offsets[last])
            rows = np.arange(start, stop)
            if order is not None:
                rows = np.sort(order[start:stop])
            yield Batch(self._data(self._read(rows), rows), rows)
        self._all_seen()

    def _all_seen(self) -> None:
        """Say what only the whole of the source shows."""
        inputs.warn_if_flattened(sorted(self._flat), self.feature_names, f"{self.name}: ")
        check_words(self._unknown, self._read_rows, f"{self.name}: ")
        self._flat, self._unknown, self._read_rows = set(), Counter(), 0

    def column(self, name: str) -> list[str]:
        """The text of a column in the header, document by document; empty where it is missing."""
        raise NotImplementedError

    def only(self, qid: str) -> RankingData:
        """The list of one query, by its id as text."""
        for code, known in enumerate(self.qids):
            if str(known) == qid:
                rows = np.flatnonzero(self.codes == code)
                return self._data(self._read(rows), rows)
        some = ", ".join(map(str, self.qids[:5]))
        if len(self.qids) > 5:
            some += ", …"
        raise DataError(f"{self.name}: there is no query {qid!r}; there are {some}")

    def place(self, row: int) -> str:
        """Where a row stands, for messages."""
        return f"{self.name}: row {row + 1} (from 1)"

    def check_labelled(self) -> None:
        """Refuse a source without labels."""
        if not self.has_labels:
            raise DataError(self._unlabelled())

    def _unlabelled(self) -> str:
        return f"{self.name}: there are no labels, and training needs them"

    def _column(self, column: int) -> str:
        if self.feature_names is None:
            return f"feature {column + 1}"
        return f"column {self.feature_names[column]!r}"

    def _check(self, part: SourceRows, rows: NDArray[np.int64]) -> None:
        if (bad := inputs.first_bad(part.features, missing=self.options.missing != "error")) is not None:
            value, where = part.features[bad], f"{self.place(int(rows[bad[0]]))}: {self._column(bad[1])}"
            if np.isnan(value):
                raise DataError(f"{where} is {self.gap}; {inputs.MISSING_HINT}")
            raise DataError(f"{where} must be a finite number, got {value}")
        if part.labels is not None and not np.isfinite(part.labels).all():
            row = int(np.flatnonzero(~np.isfinite(part.labels))[0])
            where = self.place(int(rows[row]))
            raise DataError(f"{where}: the label must be a finite number, got {part.labels[row]}")

    def _data(self, part: SourceRows, rows: NDArray[np.int64]) -> RankingData:
        """Checked, filled and sorted; ``part`` gives up its features, because sorting copies them."""
        self._check(part, rows)
        used, codes = np.unique(self.codes[rows], return_inverse=True)
        features, part.features = part.features, np.empty((0, 0))
        if self.options.missing != "error":
            fill_words(features, self.categories)
            inputs.fill_missing(features, codes, self.options.missing)
        if self._closed:
            self._unknown.update(unknown_words(features, self.categories, self.feature_names))
            self._read_rows += len(rows)
        labels = part.labels
        if labels is None:
            labels = np.zeros(len(rows), np.float32)
        qids = [self.qids[code] for code in used.tolist()]
        return RankingData.from_codes(
            features,
            labels,
            codes,
            qids,
            doc_ids=part.doc_ids,
            feature_names=self.feature_names,
            categories=self.categories,
            table=self.table,
        )

    def close(self) -> None:  # noqa: B027 - most sources hold no file
        """Let go of the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_source(
    what: Any,
    *,
    kind: str | None = None,
    y: Any = None,
    qid: Any = None,
    group: Any = None,
    doc_ids: Sequence[str] | None = None,
    columns: Columns | None = None,
    num_features: int | None = None,
    feature_names: Sequence[str] | None = None,
    missing: str = "error",
    absent: str = "zero",
    dtype: torch.dtype = torch.float32,
    categories: Asked = None,
) -> DataSource:
    """Open ranking data of any kind, to be read whole or list by list.

    Args:
        what: a file (``-`` for standard input), a folder, pattern (``*``) or address (``s3://…``) of Parquet files, a
            frame of pandas, polars or pyarrow, an array or sparse matrix with its ``qid`` or ``group``, or a
            `RankingData`.
        kind: the format of a file, one of `FORMATS`; by default what its name says. Other files are LETOR lines, which
            may lack the label; with a ``.query`` file beside them, LightGBM's.
        y: labels that belong to an array.
        qid: the query of each row of an array; a frame has a column for it.
        group: sizes of consecutive queries instead of ``qid``.
        doc_ids: ids that belong to the rows of an array.
        columns: names of the columns of a table that are no features; the label's and the document's may be absent.
        num_features: features of the model the data is for.
        feature_names: their names; columns are then matched by name, in any order.
        missing: what ``NULL``, ``nan`` and empty cells stand for: ``"error"``, ``"zero"``, ``"query-min"`` or
            ``"query-mean"``.
        absent: features a LETOR line does not mention: ``"zero"``, or ``"missing"``.
        dtype: of the features.
        categories: columns of a table that hold words, besides those whose type says so; or, as of a model, the words
            of each of them, which are then all there are.

    Raises:
        DataError: the file, the place and what is wrong.

    >>> source = open_source([[1.0], [2.0], [3.0]], y=[1, 0, 0], qid=["b", "a", "b"])
    >>> [(batch.data.qids, batch.rows.tolist()) for batch in source.batches(1)]
    [(('b',), [0, 2]), (('a',), [1])]
    """
    names = None if feature_names is None else tuple(feature_names)
    used, words = columns or Columns(), WordColumns.of(categories)
    options = ReadOptions(num_features, names, missing, absent, dtype, used, model=True, categories=words)
    if isinstance(what, (str, os.PathLike)):
        return open_file(what, options, kind=kind)
    from lgmml_torch.data.arrow import ArrowSource  # which are built on this module
    from lgmml_torch.data.table import ArraySource

    if isinstance(what, RankingData):
        return ArraySource.of_data(what, options)
    if (frame := inputs.as_frame(what)) is not None and qid is None and group is None:
        if frame.implementation.is_pyarrow():  # which may have a row per query
            return ArrowSource.of_table(what, options)
        return ArraySource.of_frame(frame, options)
    return ArraySource("arrays", options, what, y, qid=qid, group=group, doc_ids=doc_ids)


def open_file(path: PathLike, options: ReadOptions, *, kind: str | None = None) -> DataSource:
    """The source a file is, by ``kind`` or by its name."""
    if kind is None:
        kind = kind_of(path)
    check_choice("kind", kind, FORMATS)
    if is_folder(path) and kind != "parquet":
        raise DataError(f"{path}: only Parquet is read from folders, patterns and stores, got {kind!r}")
    if str(path) != "-" and not is_folder(path) and not Path(path).is_file():
        raise DataError(f"{path}: no such file")
    opener: Any = FORMATS[kind].opener
    if isinstance(opener, str):
        opener = resolve_name(opener)
    source: DataSource = opener(path, options)
    return source


def is_folder(path: PathLike) -> bool:
    """Whether a path stands for files in several places: a folder, a pattern with ``*``, the address of a store."""
    return "://" in str(path) or "*" in str(path) or Path(path).is_dir()


def kind_of(path: PathLike) -> str:
    """What the name of a file says about its format, and the files beside it."""
    suffix = Path(str(path).lower().removesuffix(".gz")).suffix
    kind = "parquet" if is_folder(path) else "letor"
    for name, form in FORMATS.items():
        if suffix in form.suffixes:
            kind = name
            break
    if kind == "letor" and sizes_file(path).is_file():
        return "lightgbm"
    return kind


def sizes_file(path: PathLike) -> Path:
    """Where LightGBM looks for the number of documents of each query."""
    return Path(os.fspath(path).removesuffix(".gz") + ".query")
