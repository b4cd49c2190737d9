"""Lists from CSV files with a header."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import DataError, did_you_mean
from lgmml_torch.data.svmlight import decimal, shown
from lgmml_torch.streaming.base import Rows
from lgmml_torch.streaming.letor import TextLists


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a CSV file that are no features."""

    qid: str = "qid"
    label: str = "label"
    doc_id: str = "docid"


class CsvLists(TextLists):
    """A header, then one document per line; every column that is not the query, label or document id is a feature."""

    def __init__(
        self, path: str | Path, num_features: int, columns: Columns, *, dtype: torch.dtype, missing: str
    ) -> None:
        self.num_features, self.columns = num_features, columns
        self.delimiter = "\t" if ".tsv" in Path(path).suffixes else ","
        self.header: list[str] = []
        super().__init__(path, dtype=dtype, missing=missing)

    def _qid(self, line: bytes, number: int) -> bytes | None:
        if not line.strip():
            return None
        cells = self._cells(line, number)
        if not self.header:
            self._take_header(cells)
            return None
        if len(cells) != len(self.header):
            raise DataError(f"{self.name}:{number}: the header has {len(self.header)} columns, got {len(cells)}")
        if not cells[self._query]:
            raise DataError(f"{self.name}:{number}: column {self.columns.qid!r} must not be empty")
        return cells[self._query].encode()

    def _take_header(self, names: list[str]) -> None:
        self.header = [name.strip() for name in names]
        place = {name: position for position, name in enumerate(self.header)}
        if self.columns.qid not in place:
            hint = did_you_mean(self.columns.qid, self.header)
            raise DataError(f"{self.name}:1: the header must name a column {self.columns.qid!r}{hint}")
        self._query, self._label = place[self.columns.qid], place.get(self.columns.label)
        self._doc = place.get(self.columns.doc_id)
        self.has_labels = self._label is not None
        special = {self._query, self._label, self._doc}
        self._features = [position for position in range(len(self.header)) if position not in special]
        if len(self._features) != self.num_features:
            raise DataError(
                f"{self.name}:1: the model was trained on {self.num_features} features, but the header names "
                f"{len(self._features)}"
            )

    def _read(self, rows: NDArray[np.int64]) -> Rows:
        texts, numbers = self._texts(rows), self.numbers[rows].tolist()
        cells = [self._cells(text, number) for text, number in zip(texts, numbers, strict=True)]
        label = self._label
        features = self._numbers([[row[column] for column in self._features] for row in cells], self._features, numbers)
        labels = None if label is None else self._numbers([[row[label]] for row in cells], [label], numbers)[:, 0]
        ids = None if self._doc is None else [row[self._doc] for row in cells]
        return Rows(features, None if labels is None else labels.astype(np.float32), ids)

    def _numbers(self, cells: list[list[str]], columns: Sequence[int], numbers: list[int]) -> NDArray[Any]:
        try:
            values = np.array(cells, dtype=np.float64)
        except ValueError:
            values = None
        with np.errstate(over="ignore"):
            if values is not None and np.isfinite(cast := values.astype(self.kind)).all():
                return cast
        out = np.empty((len(cells), len(columns)), self.kind)
        for row, number in enumerate(numbers):
            for place, column in enumerate(columns):
                out[row, place] = self._number(cells[row][place], self.header[column], number, column != self._label)
        return out

    def _number(self, text: str, column: str, number: int, may_miss: bool) -> float:
        word = text.strip().encode()
        value = decimal(word) if word else float("nan")
        if value is None or not np.isfinite(self.kind(value)):
            if value is not None and np.isnan(value) and may_miss:
                if self.missing != "error":
                    return value
                raise DataError(f"{self.name}:{number}: column {column!r} is missing; `missing` says what to put there")
            raise DataError(f"{self.name}:{number}: column {column!r} must be a finite number, got {shown(word)}")
        return value

    def _cells(self, line: bytes, number: int) -> list[str]:
        try:
            return next(csv.reader([line.decode("utf-8").rstrip("\r\n")], delimiter=self.delimiter, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{self.name}:{number}: not a line of CSV: {error}") from error
