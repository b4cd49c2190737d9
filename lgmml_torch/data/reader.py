"""From a LETOR or LightGBM file, plain or gzipped, to one dense array, block by block."""

from __future__ import annotations

import gzip
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import DataError
from lgmml_torch.data.svmlight import Block, Rules, parse_block, parse_lines
from lgmml_torch.progress import progress_bar

BLOCK_BYTES = 1 << 18  # temporary arrays of a block then fit into the processor's cache
_DOC_ID = re.compile(rb"docid\s*=\s*(\S+)")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass
class Table:
    """Rows of a file in the order of its lines."""

    features: NDArray[Any]  # (N, D), NaN where missing
    labels: NDArray[np.float32]  # (N,)
    codes: NDArray[np.int64]  # (N,) index into qids
    qids: list[bytes]  # by first appearance, as written; empty for files without
    doc_ids: list[str] | None  # (N,) empty where a line has no comment


def read_table(path: Path, rules: Rules, *, absent: float = 0.0, progress: bool = True) -> Table:
    """Read a whole file.

    Args:
        path: the file; gzip is recognised by its first bytes.
        rules: what the file may hold.
        absent: the value of features a line does not mention.
        progress: whether a bar may be shown.

    Raises:
        DataError: ``file:line: what is wrong``.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    rows = _Rows(rules, absent, path)
    line, chunk = 1, b""
    size = path.stat().st_size
    with path.open("rb") as raw, progress_bar(f"Reading {path.name}", size, enabled=progress) as report:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if zipped else raw  # type: ignore[assignment]
        while more := _read_lines(stream, path):
            chunk = more.removeprefix(_BYTE_ORDER_MARK) if line == 1 else more
            block = parse_block(chunk, rules)
            if block is None:
                block = parse_lines(chunk, rules, path=path, line=line)
            rows.append(block, expected=None if zipped else size / len(more))
            line += chunk.count(b"\n")
            report(raw.tell())
    if not rows.count:
        raise DataError(f"{path}:1: the file holds no documents")
    if not (rows.width or rules.num_features):
        raise DataError(f"{path}:{line}: no line up to here gives a feature")
    if not chunk.endswith(b"\n"):
        rows.check_last(f"{path}:{line}")
    return rows.table()


def _read_lines(stream: IO[bytes], path: Path) -> bytes:
    try:
        return stream.read(BLOCK_BYTES) + stream.readline()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the compressed file is damaged or cut: {error}") from error


def line_of_row(path: Path, row: int) -> int:
    """The line on which a row stands; for error messages, so it may be slow."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    with gzip.open(path) if zipped else path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            row -= bool(line.partition(b"#")[0].strip())
            if row < 0:
                return number
    raise IndexError(row)


class _Rows:
    """Grows by blocks; memory is asked for once, from the size of the file, and touched only when filled."""

    def __init__(self, rules: Rules, absent: float, path: Path) -> None:
        self.rules, self.absent, self.path = rules, absent, path
        self.count = self.width = 0
        self.data: NDArray[Any] = np.empty((0, rules.num_features or 0), rules.kind)
        self.labels: list[NDArray[np.float32]] = []
        self.given: list[NDArray[np.int64]] = []
        self.codes: list[NDArray[np.int64]] = []
        self.qids: dict[bytes, int] = {}
        self.doc_ids: list[str] | None = None

    def append(self, block: Block, expected: float | None) -> None:
        """Add a block; ``expected`` is the number of such blocks the file has room for."""
        rows = len(block.labels)
        if not rows:
            return
        widest = int(block.index.max()) - self.rules.first_index + 1 if len(block.index) else 0
        self._make_room(rows, widest, expected)
        target = self.data[self.count : self.count + rows]
        if (block.counts == target.shape[1]).all():  # increasing indices without a gap
            target[...] = block.values.reshape(target.shape)
        else:
            target[...] = self.absent
            target[np.repeat(np.arange(rows), block.counts), block.index - self.rules.first_index] = block.values
        known = self.qids
        self.codes.append(np.array([known.setdefault(qid, len(known)) for qid in block.qids], dtype=np.int64))
        self.labels.append(block.labels)
        self.given.append(block.counts.astype(np.int32))
        if block.comments is not None and self.doc_ids is None:
            self.doc_ids = [""] * self.count
        if self.doc_ids is not None:
            self.doc_ids.extend(map(_doc_id, block.comments or [b""] * rows))
        self.count += rows

    def _make_room(self, rows: int, widest: int, expected: float | None) -> None:
        self.width = max(self.width, widest)
        capacity, columns = self.data.shape
        if self.width > columns:
            # A margin, because the indices of a sparse file may go on rising, and every widening is a copy.
            columns = self.width if self.count == 0 else max(self.width, columns + columns // 4)
            wider = np.empty((capacity, columns), self.rules.kind)
            wider[: self.count, : self.data.shape[1]] = self.data[: self.count]
            wider[: self.count, self.data.shape[1] :] = self.absent
            self.data = wider
        if self.count + rows > capacity:
            if capacity == 0 and expected is not None:
                self.data = np.empty((int(rows * expected * 1.02) + rows, columns), self.rules.kind)
            else:
                self.data.resize((self.count + rows + self.count // 4, columns), refcheck=False)

    def check_last(self, where: str) -> None:
        """A last line without a newline may be the rest of one; a dense file, or one with comments, shows it."""
        given = np.concatenate(self.given)
        last, others = int(given[-1]), given[:-1]
        if len(others) < 2:
            return
        if (others == others[0]).all() and last < others[0]:
            raise DataError(f"{where}: the last line is cut: it has {last} features, all others {int(others[0])}")
        if self.doc_ids is not None and not self.doc_ids[-1] and all(self.doc_ids[:-1]):
            raise DataError(f"{where}: the last line is cut: it ends without a comment, which all others have")

    def table(self) -> Table:
        """What was read; the builder is empty after that."""
        columns = self.rules.num_features or self.width
        data, self.data = self.data, np.empty((0, 0), self.rules.kind)
        if data.shape[1] == columns:
            data.resize((self.count, columns), refcheck=False)
        else:
            data = np.ascontiguousarray(data[: self.count, :columns])
        return Table(data, np.concatenate(self.labels), np.concatenate(self.codes), list(self.qids), self.doc_ids)


def _doc_id(comment: bytes) -> str:
    found = _DOC_ID.search(comment)
    return (found[1] if found else comment).decode("utf-8", "backslashreplace")
