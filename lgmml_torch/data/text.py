"""Text files, plain, gzipped or from standard input: whole lines in order, or lines by their place."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import DataError
from lgmml_torch.data.source import PathLike, check_unpacked
from lgmml_torch.progress import progress_bar

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WHOLE = re.compile(rb"0|-?[1-9][0-9]{0,17}")
_MOST_LINE = 1 << 24  # bytes of one line


class TextFile:
    """The bytes of a text file, decompressed; gzip is recognised by its first bytes."""

    def __init__(self, path: PathLike) -> None:
        self.name, self._file = _opened(path)
        self.zipped = self._file.read(2) == b"\x1f\x8b"
        self._file.seek(0)
        self._stream = self._file
        if self.zipped:
            self._stream = gzip.GzipFile(fileobj=self._file)  # type: ignore[assignment]
        self.size = os.fstat(self._file.fileno()).st_size  # compressed, if it is

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._file.close()

    def blocks(self, size: int, *, progress: bool = False) -> Iterator[tuple[int, bytes]]:
        """Whole lines from the start, about ``size`` bytes at a time: the number of the first one, and the text."""
        line = 1
        self._stream.seek(0)
        with progress_bar(f"Reading {Path(self.name).name}", self.size, enabled=progress) as report:
            while block := self._lines(size):
                if not block.endswith(b"\n") and len(block) >= size + _MOST_LINE:
                    at = line + block.count(b"\n")
                    rule = f"a line must have at most {_MOST_LINE:,} bytes, got a longer one"
                    raise DataError(f"{self.name}:{at}: {rule}")
                if line == 1:
                    block = block.removeprefix(_BYTE_ORDER_MARK)
                yield line, block
                line += block.count(b"\n")
                report(self._file.tell())

    def _lines(self, size: int) -> bytes:
        try:
            block = self._stream.read(size)
            if not block.endswith(b"\n"):
                block += self._stream.readline(_MOST_LINE)
            if self.zipped:
                check_unpacked(self.name, self.size, self._stream.tell())
            return block
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{self.name}: the compressed file is damaged or cut: {error}") from error


def query_ids(words: Sequence[bytes]) -> list[Hashable]:
    """Whole numbers if all ids are written as such, so that nothing is lost, otherwise text."""
    if all(map(_WHOLE.fullmatch, words)):
        return list(map(int, words))
    return [word.decode("utf-8", "backslashreplace") for word in words]


def read_sizes(path: Path) -> NDArray[np.int64]:
    """The number of documents of each query, one per line."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; it must give the number of documents of each query")
    sizes = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        if not re.fullmatch(rb"[0-9]{1,18}", word) or int(word) == 0:
            got = repr(word[:40].decode("ascii", "backslashreplace"))
            raise DataError(f"{path}:{number}: the size of a query must be a positive whole number, got {got}")
        sizes.append(int(word))
    return np.array(sizes, dtype=np.int64)


def _opened(path: PathLike) -> tuple[str, IO[bytes]]:
    """The name of a file for messages, and its bytes; ``-`` is standard input."""
    if str(path) == "-":
        return "<stdin>", _spool(sys.stdin.buffer)  # it is read more than once, like any other file
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file")
    return str(path), Path(path).open("rb")


def _spool(stream: IO[bytes]) -> IO[bytes]:
    """The stream in a temporary file that vanishes when it is closed."""
    copy: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the source
    if stream.seekable():
        stream.seek(0)
    shutil.copyfileobj(stream, copy, 1 << 20)
    copy.seek(0)
    return copy
