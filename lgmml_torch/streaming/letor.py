"""Lists from text files: the index of a file's rows, and the rows of a LETOR file."""

from __future__ import annotations

import gzip
import shutil
import sys
import tempfile
import zlib
from array import array
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import DataError
from lgmml_torch.data.loading import query_ids
from lgmml_torch.data.reader import Table, _doc_id
from lgmml_torch.data.svmlight import Rules, parse_block, parse_lines
from lgmml_torch.streaming.base import Lists, Rows

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TextLists(Lists):
    """A text file with one document per line; the first pass notes where each line stands and whose it is."""

    def __init__(self, path: str | Path, *, dtype: torch.dtype, missing: str) -> None:
        super().__init__(dtype=dtype, missing=missing)
        self.name = "<stdin>" if str(path) == "-" else str(path)
        self.kind: Any = np.float64 if dtype == torch.float64 else np.float32
        # Standard input is read twice like any other file, so it has to be kept.
        self._file: IO[bytes] = _spool(sys.stdin.buffer) if str(path) == "-" else Path(path).open("rb")  # noqa: SIM115
        zipped = self._file.read(2) == b"\x1f\x8b"
        self._file.seek(0)
        self._stream: IO[bytes] = gzip.GzipFile(fileobj=self._file) if zipped else self._file  # type: ignore[assignment]
        try:
            self._index()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._file.close()

    def _index(self) -> None:
        known: dict[bytes, int] = {}
        codes, starts, ends, numbers = (array("q") for _ in range(4))
        for number, start, line in self._lines():
            qid = self._qid(line, number)
            if qid is not None:
                codes.append(known.setdefault(qid, len(known)))
                starts.append(start)
                ends.append(start + len(line))
                numbers.append(number)
                self._complete = line.endswith(b"\n")
        if not codes:
            raise DataError(f"{self.name}:1: the file holds no documents")
        self.codes, self.numbers = np.array(codes, np.int64), np.array(numbers, np.int64)
        self.starts, self.ends = np.array(starts, np.int64), np.array(ends, np.int64)
        self.qids = _ids(list(known))
        if not self.in_order and isinstance(self._stream, gzip.GzipFile):
            copy = _spool(self._stream)  # compressed text cannot be read from the middle
            self.close()
            self._file = self._stream = copy

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Number, place and text of every line."""
        place = 0
        try:
            for number, line in enumerate(self._stream, start=1):
                mark = len(_BYTE_ORDER_MARK) if number == 1 and line.startswith(_BYTE_ORDER_MARK) else 0
                yield number, place + mark, line[mark:]
                place += len(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{self.name}: the compressed file is damaged or cut: {error}") from error

    def _qid(self, line: bytes, number: int) -> bytes | None:
        """The query of a line, None for a line without a document."""
        raise NotImplementedError

    def _texts(self, rows: NDArray[np.int64]) -> list[bytes]:
        """The lines of the given rows; neighbours are read together."""
        starts, ends = self.starts[rows], self.ends[rows]
        breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        texts: list[bytes] = []
        for run in np.split(np.arange(len(rows)), breaks):
            first = int(starts[run[0]])
            self._stream.seek(first)
            block = self._stream.read(int(ends[run[-1]]) - first)
            texts.extend(block[a:b] for a, b in zip(starts[run] - first, ends[run] - first, strict=True))
        return [text if text.endswith(b"\n") else text + b"\n" for text in texts]


class LetorLists(TextLists):
    """``label qid:7 1:0.5 …``; without labels when the first line has none."""

    def __init__(self, path: str | Path, num_features: int, *, dtype: torch.dtype, missing: str) -> None:
        self.num_features = num_features
        self.has_labels: bool = True
        self._seen = False
        super().__init__(path, dtype=dtype, missing=missing)
        self.rules = Rules(True, 1, num_features, missing != "error", self.kind)

    def _qid(self, line: bytes, number: int) -> bytes | None:
        words = line.split(None, 2)
        if not words or words[0].startswith(b"#"):
            return None
        if not self._seen:
            self._seen, self.has_labels = True, not words[0].startswith(b"qid:")
        word = (words[1] if len(words) > 1 else b"") if self.has_labels else words[0]
        if not word.startswith(b"qid:"):
            parse_lines(line if self.has_labels else b"0 " + line, Rules(), path=self.name, line=number)
        return word[4:].partition(b"#")[0]

    def _read(self, rows: NDArray[np.int64]) -> Rows:
        texts = self._texts(rows)
        if not self.has_labels:
            texts = [b"0 " + text for text in texts]
        joined = b"".join(texts)
        block = parse_block(joined, self.rules)
        if block is None:
            try:
                for text, number in zip(texts, self.numbers[rows].tolist(), strict=True):
                    parse_lines(text, self.rules, path=self.name, line=number)
            except DataError as error:
                model = f"the model was trained on {self.num_features} features"
                raise DataError(str(error).replace("`num_features` says so", model)) from None
            block = parse_lines(joined, self.rules, path=self.name)
        if rows[-1] == self.num_rows - 1 and not self._complete:
            self._check_last(block.counts)
        features = np.zeros((len(rows), self.num_features), self.kind)
        features[np.repeat(np.arange(len(rows)), block.counts), block.index - 1] = block.values
        ids = None if block.comments is None else [_doc_id(comment) for comment in block.comments]
        return Rows(features, block.labels if self.has_labels else None, ids)

    def _check_last(self, counts: NDArray[np.int64]) -> None:
        """A last line without a newline may be the rest of one; a dense file shows it."""
        others, last = counts[:-1], int(counts[-1])
        if len(others) > 1 and (others == others[0]).all() and last < others[0]:
            where = f"{self.name}:{self.numbers[-1]}"
            raise DataError(f"{where}: the last line is cut: it has {last} features, all others {int(others[0])}")


def _ids(words: list[bytes]) -> Sequence[Hashable]:
    """Ids by the rule of `lgmml_torch.load_letor`: whole numbers if all of them are."""
    table = Table(np.empty((0, 0)), np.empty(0, np.float32), np.arange(len(words)), words, None)
    try:
        ids = query_ids(table)
    except UnicodeDecodeError:
        return [word.decode("utf-8", "backslashreplace") for word in words]
    return ids.tolist() if isinstance(ids, np.ndarray) else ids


def _spool(stream: IO[bytes]) -> IO[bytes]:
    """The stream in a temporary file that vanishes when it is closed."""
    copy: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the lists
    if stream.seekable():
        stream.seek(0)
    shutil.copyfileobj(stream, copy, 1 << 20)
    copy.seek(0)
    return copy
