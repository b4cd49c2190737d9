"""What is in memory already: arrays, data sets and frames, and ``.npz`` files of arrays."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Hashable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.categories import Categories, WordColumns, coded_features, frame_values, with_words
from lgmml_torch.checks import DataError, did_you_mean
from lgmml_torch.data.columns import check_same_names, lay_out
from lgmml_torch.data.source import DataSource, PathLike, ReadOptions, SourceRows
from lgmml_torch.files import check_unpacked
from lgmml_torch.inputs import (
    as_frame,
    check_distinct,
    check_length,
    feature_names,
    flattened,
    float_vector,
    is_missing,
    numeric_column,
    original_column,
    query_codes,
)
from lgmml_torch.ragged import RankingData

if TYPE_CHECKING:
    import narwhals as nw


class ArraySource(DataSource):
    """A matrix of features with the label, query and id of each row.

    Args:
        name: what messages call it.
        options: how to read it.
        X: ``(N, D)`` features, as `RankingData.from_arrays` takes them.
        y: ``(N,)`` labels, or None.
        qid: the query of each row, or None with ``group``.
        group: sizes of consecutive queries.
        doc_ids: the id of each row, or None.
        names: the name of each feature; by default those of a frame.
        categories: the words behind the codes of each feature, where ``X`` holds codes.
    """

    def __init__(
        self,
        name: str,
        options: ReadOptions,
        X: Any,
        y: Any | None,
        *,
        qid: Any = None,
        group: Any = None,
        doc_ids: Sequence[str] | None = None,
        names: tuple[str, ...] | None = None,
        categories: Categories | None = None,
    ) -> None:
        super().__init__(name, options)
        self.has_labels = y is not None
        try:
            self._features, found = coded_features(X, options.dtype, options.categories)
            self.categories = found or categories
            self._labels: NDArray[np.float32] | None = None
            if y is not None:
                self._labels = float_vector("y", y)
            self._codes, self._ids = query_codes(qid, group, len(self._features))
            for word, values in (("y", self._labels), ("doc_ids", doc_ids)):
                if values is not None:
                    check_length(word, len(values), len(self._features))
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        self._doc_ids = doc_ids
        if names is None:
            names = feature_names(X)
        self._flat.update(flattened(self._features, lambda column: original_column(X, column)))
        self._arrange(names)
        if not len(self._features):
            raise DataError(f"{name}: there are no documents")

    def _arrange(self, names: tuple[str, ...] | None) -> None:
        """Put the features into the order asked for, by name where both sides have names."""
        wanted = self.options.feature_names
        if names is not None and len(names) != self._features.shape[1]:
            raise DataError(f"{self.name}: {self._features.shape[1]} features need as many names, got {len(names)}")
        check_distinct(names, f"{self.name}: ")
        if names is not None and wanted is not None and names != wanted:
            check_same_names(names, wanted, self.name, model=self.options.model)
            place = dict(zip(names, range(len(names)), strict=True))
            order = [place[name] for name in wanted]
            self._features = np.ascontiguousarray(self._features[:, order])
            if self.categories is not None:
                self.categories = tuple([self.categories[column] for column in order])
        self.options.check_width(self._features.shape[1], self.name, "`X` has")
        self.feature_names = names if wanted is None else wanted

    def _index(self) -> tuple[NDArray[np.int64], Sequence[Hashable]]:
        return self._codes, self._ids

    def _read(self, rows: NDArray[np.int64]) -> SourceRows:
        return SourceRows(self._features, self._labels, self._doc_ids).take(rows)

    def _whole(self) -> SourceRows:
        features = self._features
        if self.options.missing != "error":  # gaps are filled in place, but not in the caller's array
            features = features.copy()
        return SourceRows(features, self._labels, self._doc_ids)


def from_data(data: RankingData, options: ReadOptions, name: str = "data") -> ArraySource:
    """The lists of a data set that was loaded."""
    features, words = with_words(data.features, data.categories, data.feature_names, options.categories)
    doc_ids = None
    if data.doc_ids is not None:
        doc_ids = [data.doc_ids[row] for row in data.order.argsort().tolist()]
    source = ArraySource(
        name,
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


def open_npz(path: PathLike, options: ReadOptions) -> ArraySource:
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
    return ArraySource(name, options, found["X"], found.get("y"), qid=found["qid"], **texts)


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


class _FrameSource(ArraySource):
    """A frame with a column for the query of each row."""

    def __init__(self, frame: nw.DataFrame[Any], options: ReadOptions, *, name: str = "frame") -> None:
        self._frame, self.header = frame, list(map(str, frame.columns))
        plan = lay_out(self.header, options, name, what="the frame")
        labels = ids = None
        try:
            features, words = frame_values(frame, plan.features, plan.names, options.dtype, options.categories)
            if plan.label is not None:
                labels = numeric_column(frame[:, plan.label], self.header[plan.label])
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        if plan.doc_id is not None:
            ids = self.column(self.header[plan.doc_id])
        qid = frame[:, plan.qid]
        coded = replace(options, categories=WordColumns())
        super().__init__(name, coded, features, labels, qid=qid, doc_ids=ids, names=plan.names, categories=words)
        self.table, self._closed = options.table(named=True), options.categories.closed
        self._flat.update(flattened(features, lambda column: original_column(frame, plan.features[column])))

    def column(self, name: str) -> list[str]:
        """The text of one column, row by row; empty where it is missing."""
        words = []
        for value in self._frame[:, self.header.index(name)].to_list():
            if is_missing(value):
                words.append("")
            else:
                words.append(str(value))
        return words


def open_frame(frame: Any, options: ReadOptions) -> DataSource:
    """A frame of any library; a table of pyarrow may also have a row per query."""
    known = as_frame(frame)
    assert known is not None
    if known.implementation.is_pyarrow():
        from lgmml_torch.data.arrow import open_arrow_table

        return open_arrow_table(frame, options)
    return _FrameSource(known, options)
