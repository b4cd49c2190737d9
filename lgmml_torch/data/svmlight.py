"""Text files, and parsing SVMlight/LETOR lines: thousands of numbers at a time, or one by one to say what is wrong.

A line reads ``label qid:7 1:0.5 2:0 … #docid = x``. `_parse_block` handles every well-formed block with numpy and
answers None for anything else; `_parse_lines` then goes through that block line by line and names the culprit.

A decimal of at most 15 digits is a whole number below 2⁵³ over a power of ten up to 10¹⁵; both are exact in float64,
so their quotient is the correctly rounded one, the same bits as ``float(text)``. Longer numbers and those with
an exponent are few, and go through ``float`` itself.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import DataError
from lgmml_torch.data.source import PathLike
from lgmml_torch.files import check_unpacked
from lgmml_torch.inputs import MISSING_HINT
from lgmml_torch.progress import progress_bar

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WHOLE = re.compile(rb"0|-?[1-9][0-9]{0,17}")
_MOST_LINE = 1 << 24  # bytes of one line
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MISSING = frozenset({b"null", b"nan"})  # compared in lower case
_MAX_FEATURES = 100_000  # rows are dense: a larger index is far more often a damaged file than data

_SPACE, _COLON, _NEWLINE, _MINUS, _DOT = b" :\n-."
_LAST_PRINTABLE = ord("~")
_MAX_DIGITS = 15
# One step of reading a decimal is `number = number * SCALE[byte] + DIGIT[byte]`; a foreign byte makes it NaN.
_DIGIT = np.full(256, np.nan)
_DIGIT[48:58] = np.arange(10)
_DIGIT[_DOT] = 0.0
_SCALE = np.full(256, 10.0)
_SCALE[_DOT] = 1.0
_POWERS = np.array([float(f"1e{min(k, 22)}") for k in range(256)])

_BEFORE_TEXT = re.compile(rb"^[ \t]*(?=[^\s#])", re.MULTILINE)  # where a line's label would stand

_Ints = NDArray[np.int64]


class TextFile:
    """The bytes of a text file, decompressed; gzip is recognised by its first bytes. ``-`` is standard input."""

    def __init__(self, path: PathLike) -> None:
        self._file: IO[bytes]
        if str(path) == "-":
            self.name = "<stdin>"
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is read more than once, and closed with the source
            if sys.stdin.buffer.seekable():
                sys.stdin.buffer.seek(0)
            shutil.copyfileobj(sys.stdin.buffer, self._file, 1 << 20)
        elif not Path(path).is_file():
            raise DataError(f"{path}: no such file")
        else:
            self.name, self._file = str(path), Path(path).open("rb")  # noqa: SIM115 - `close` does
        self._file.seek(0)
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


@dataclass(frozen=True)
class Rules:
    """What a file may hold."""

    qid: bool = True  # whether every line names its query
    first_index: int = 1  # the smallest feature index allowed
    num_features: int | None = None  # the largest number of features allowed, None for up to `_MAX_FEATURES`
    missing: bool = False  # whether ``NULL`` and ``nan`` are allowed as values
    kind: type[np.float32] | type[np.float64] = np.float32  # of the values; a number too large for it is an error
    labels: bool = True  # whether every line starts with a label; it is 0 where not
    because: str = "`num_features` says so"  # why there may be no more features, for messages

    @property
    def last_index(self) -> int:
        """The largest feature index allowed."""
        limit = self.num_features
        if limit is None:
            limit = _MAX_FEATURES
        return limit + self.first_index - 1


@dataclass
class Block:
    """Rows of one block of text; features as a ragged list of (index, value)."""

    labels: NDArray[np.float32]  # (n,)
    qids: list[bytes]  # (n,) as written; empty for files without
    counts: _Ints  # (n,) features given in each row
    index: _Ints  # (m,) from `first_index`, increasing within a row
    values: NDArray[np.float64]  # (m,) NaN where missing
    comments: list[bytes] | None  # (n,) without the hash, stripped; empty where there is none


def parse(block: bytes, rules: Rules, *, path: object, line: int = 1) -> Block:
    """Parse whole lines, the first of them number ``line`` of the file ``path``."""
    return _parse_block(block, rules) or _parse_lines(block, rules, path=path, line=line)


def _parse_block(block: bytes, rules: Rules) -> Block | None:
    """Parse whole lines (the last one with or without its newline), or answer None when that needs a closer look."""
    if not rules.labels:
        block = _BEFORE_TEXT.sub(b"0 ", block)
    clean, comments, found = block, None, None
    if block.endswith(b"\n") and b"#" not in block and b"\r" not in block and b"\t" not in block:
        found = _tokens(clean, rules.qid)
    if found is None:
        clean, comments = _normalise(block)
        if not clean:
            none = np.empty(0, np.int64)
            return Block(np.empty(0, np.float32), [], none, none, np.empty(0), None)
        found = _tokens(clean, rules.qid)
    if found is None:
        return None
    data, starts, ends, first = found
    is_feature = np.ones(len(ends), dtype=bool)
    is_feature[first] = False
    qids: list[bytes] = []
    if rules.qid:
        is_feature[first + 1] = is_feature[first + 2] = False
        name = starts[first + 1]
        if not ((ends[first + 1] - name == 3).all() and (data[name[:, None] + np.arange(3)] == list(b"qid")).all()):
            return None
        qids = [clean[a:b] for a, b in zip(starts[first + 2].tolist(), ends[first + 2].tolist(), strict=True)]
    counts = (np.append(first[1:], len(ends)) - first - (1 + 2 * rules.qid)) // 2
    labels = _decimals(clean, data, starts[first], ends[first], kind=np.float32, missing=False)
    starts, ends = starts[is_feature], ends[is_feature]
    index = _indices(data, starts[0::2], ends[0::2], counts, rules)
    values = _decimals(clean, data, starts[1::2], ends[1::2], kind=rules.kind, missing=rules.missing)
    if index is None or labels is None or values is None:
        return None
    return Block(labels.astype(np.float32), qids, counts, index, values, comments)


def _normalise(block: bytes) -> tuple[bytes, list[bytes] | None]:
    """Single spaces, no empty lines, no comments; the comments apart."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").removesuffix(b"\r")
    comments = None
    if b"#" in block:
        texts, found = [], []
        for line in block.split(b"\n"):
            text, _, comment = line.partition(b"#")
            if text.strip(b" \t"):
                texts.append(text)
                found.append(comment.strip())
        block = b"\n".join(texts)
        if any(found):
            comments = found
    block = block.replace(b"\t", b" ")
    while b"  " in block:
        block = block.replace(b"  ", b" ")
    block = block.replace(b" \n", b"\n").replace(b"\n ", b"\n")
    while b"\n\n" in block:
        block = block.replace(b"\n\n", b"\n")
    block = block.strip(b" \n")
    if block:
        block += b"\n"
    return block, comments


def _tokens(clean: bytes, qid: bool) -> tuple[NDArray[np.uint8], _Ints, _Ints, _Ints] | None:
    """Bytes, token starts and ends, and the first token of each line, if every line is separated by ``" :" * n``."""
    data = np.frombuffer(clean, np.uint8)
    ends = np.flatnonzero((data <= _SPACE) | (data == _COLON))
    separators = data[ends]
    if (data > _LAST_PRINTABLE).any():
        return None
    newline = separators == _NEWLINE
    inner = separators[~newline]
    if len(inner) % 2 or (inner[0::2] != _SPACE).any() or (inner[1::2] != _COLON).any():
        return None
    last = np.flatnonzero(newline)
    first = np.concatenate([[0], last[:-1] + 1])
    widths = last - first
    starts = np.concatenate([[0], ends[:-1] + 1])
    if (ends == starts).any() or (widths % 2).any() or (qid and widths.min() < 2):
        return None
    return data, starts, ends, first


def _indices(data: NDArray[np.uint8], starts: _Ints, ends: _Ints, counts: _Ints, rules: Rules) -> _Ints | None:
    """Feature indices, if all are whole numbers within the limits that increase along each row."""
    if not len(starts):
        return np.empty(0, dtype=np.int64)
    lengths = ends - starts
    if (longest := int(lengths.max())) > 9:
        return None
    index = np.zeros(len(starts), dtype=np.int64)
    for k in range(longest):
        digit = data[np.minimum(starts + k, len(data) - 1)] - np.uint8(48)
        inside = lengths > k
        if (digit[inside] > 9).any():
            return None
        index = np.where(inside, index * 10 + digit, index)
    rising = np.append(True, index[1:] > index[:-1])
    heads = (np.cumsum(counts) - counts)[counts > 0]
    rising[heads] = index[heads] >= rules.first_index
    if not rising.all() or index.max() > rules.last_index:
        return None
    return index


def _decimals(
    clean: bytes, data: NDArray[np.uint8], starts: _Ints, ends: _Ints, *, kind: type[Any], missing: bool
) -> NDArray[np.float64] | None:
    """Numbers between ``starts`` and ``ends``, NaN where missing; None if one is no number or infinite as ``kind``."""
    if not len(starts):
        return np.empty(0)
    negative = data[starts] == _MINUS
    begin = starts + negative
    # Longest first: the tokens that still have a k-th byte are then a prefix of the arrays.
    lengths = np.minimum(ends - begin, 255).astype(np.uint8)
    order = np.argsort(~lengths, kind="stable")
    begin, lengths = begin[order], lengths[order]
    number = np.zeros(len(order))
    dots, places = np.zeros((2, len(order)), dtype=np.uint8)
    lasting = len(order) - np.cumsum(np.bincount(lengths, minlength=256))
    for k in range(min(int(lengths[0]), _MAX_DIGITS + 1)):
        n = int(lasting[k])
        byte = data[begin[:n] + k]
        number[:n] *= _SCALE[byte]
        number[:n] += _DIGIT[byte]
        places[:n] += dots[:n]
        dots[:n] += byte == _DOT
    digits = lengths - dots
    odd = np.isnan(number) | (dots > 1) | (digits < 1) | (digits > _MAX_DIGITS)
    values = np.empty(len(order))
    values[order] = number / _POWERS[places]
    np.negative(values, out=values, where=negative)
    for token in order[odd].tolist():
        value = _decimal(clean[starts[token] : ends[token]])
        if value is None or (np.isnan(value) and not missing):
            return None
        values[token] = value
    with np.errstate(over="ignore"):
        if np.isinf(values.astype(kind)).any():
            return None
    return values


def _decimal(text: bytes) -> float | None:
    """``float(text)``, NaN for a missing value, None for anything that is not a plain decimal number."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if text.lower() in _MISSING:
        return float("nan")
    return None


_FOREIGN = re.compile(rb"[^\t\x20-\x7e]")
_SHOWN = 40


def _parse_lines(block: bytes, rules: Rules, *, path: object, line: int = 1) -> Block:
    """As `parse`, line by line."""
    labels: list[float] = []
    qids: list[bytes] = []
    counts: list[int] = []
    index: list[int] = []
    values: list[float] = []
    comments: list[bytes] = []
    for offset, raw in enumerate(block.removesuffix(b"\n").split(b"\n")):
        text, _, comment = raw.removesuffix(b"\r").partition(b"#")
        where = f"{path}:{line + offset}"
        if foreign := _FOREIGN.search(text):
            byte, column = foreign[0][0], foreign.start() + 1
            raise DataError(f"{where}: not plain text, found byte 0x{byte:02x} at column {column}")
        tokens = text.split()
        if not tokens:
            continue
        if not rules.labels:
            tokens.insert(0, b"0")
        labels.append(_label(tokens[0], where))
        if rules.qid:
            qids.append(_qid(b"".join(tokens[1:2]), where))
        features = tokens[1 + rules.qid :]
        previous = rules.first_index - 1
        for token in features:
            previous = _index(token, previous, where, rules)
            index.append(previous)
            values.append(_value(token, where, rules))
        counts.append(len(features))
        comments.append(comment.strip())
    return Block(
        np.array(labels, dtype=np.float32),
        qids,
        np.array(counts, dtype=np.int64),
        np.array(index, dtype=np.int64),
        np.array(values),
        comments if any(comments) else None,
    )


def shown(text: bytes) -> str:
    """A piece of the file for an error message: printable, and never long."""
    if len(text) > _SHOWN:
        text = text[:_SHOWN] + b"..."
    return repr(text.decode("ascii", "backslashreplace"))


def _fits(value: float, kind: type[np.float32] | type[np.float64]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(kind(value)))


def _label(token: bytes, where: str) -> float:
    value = _decimal(token)
    if value is None or not _fits(value, np.float32):
        raise DataError(f"{where}: the label must be a finite number, got {shown(token)}")
    return value


def _qid(token: bytes, where: str) -> bytes:
    name, colon, value = token.partition(b":")
    if name != b"qid" or not colon:
        got = "but the line ends"
        if token:
            got = f"got {shown(token)}"
        raise DataError(f"{where}: missing qid: `qid:…` must follow the label, {got}")
    if not value or b":" in value:
        raise DataError(f"{where}: `qid:` must be followed by the id of the query, got {shown(token)}")
    return value


def _index(token: bytes, previous: int, where: str, rules: Rules) -> int:
    text, colon, value = token.partition(b":")
    if not (colon and text and value):
        raise DataError(f"{where}: expected index:value, got {shown(token)}; is the line cut?")
    if text == b"qid":
        raise DataError(f"{where}: unexpected {shown(token)}: the id of the query comes once, after the label")
    if not text.isdigit():
        raise DataError(f"{where}: the feature index must be a whole number, got {shown(text)}")
    index = int(text) if len(text) <= 18 else 10**18
    if index < rules.first_index:
        raise DataError(f"{where}: feature indices start at {rules.first_index}, got {shown(token)}")
    if index == previous:
        raise DataError(f"{where}: feature {index} is given twice")
    if index < previous:
        raise DataError(f"{where}: feature indices must increase, got {index} after {previous}")
    if index > rules.last_index:
        hint = rules.because
        if rules.num_features is None:
            hint = "pass `num_features` if there really are so many"
        raise DataError(f"{where}: feature index {index} is beyond the largest allowed, {rules.last_index}; {hint}")
    return index


def _value(token: bytes, where: str, rules: Rules) -> float:
    name, _, text = token.partition(b":")
    feature = f"the value of feature {int(name)}"
    value = _decimal(text)
    if value is None:
        raise DataError(f"{where}: {feature} must be a number, got {shown(text)}")
    if np.isnan(value):
        if rules.missing:
            return value
        raise DataError(f"{where}: {feature} is missing, got {shown(text)}; {MISSING_HINT}")
    if not _fits(value, rules.kind):
        raise DataError(f"{where}: {feature} must be finite as {rules.kind.__name__}, got {shown(text)}")
    return value
