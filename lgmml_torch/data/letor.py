"""LETOR, MSLR and Yahoo lines with ``qid:``, and LightGBM files with a ``.query`` file beside them.

A line is ``label qid:7 1:0.5 2:0 … #docid = x``: blanks or tabs between the parts, indices rising from 1, features that
are not mentioned are 0. The loaders parse a file once; after that the data is memory-mapped from the cache.
"""

from __future__ import annotations

import re
import warnings
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import DataError, DataWarning
from lgmml_torch.data.cache import Cache
from lgmml_torch.data.source import DataSource, PathLike, ReadOptions, SourceRows, cached, sizes_file
from lgmml_torch.data.svmlight import Block, Rules, parse, parse_block, parse_lines
from lgmml_torch.data.text import TextFile, query_ids, read_sizes
from lgmml_torch.inputs import flattened
from lgmml_torch.ragged import RankingData

SPLITS = {"train": ("train",), "valid": ("vali", "valid", "validation"), "test": ("test",)}
BLOCK_BYTES = 1 << 18  # temporary arrays of a block then fit into the processor's cache
INDEX_BYTES = 1 << 20  # of text that is searched for lines at a time
_DOC_ID = re.compile(rb"docid\s*=\s*(\S+)")
_LAST_INDEX = re.compile(rb"([0-9]{1,9}):[^\s:]*\s*$")


@dataclass
class _Places:
    """Where the documents of a file stand: an entry for each."""

    qids: dict[bytes, int] = field(default_factory=dict)
    codes: array[int] = field(default_factory=lambda: array("q"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    numbers: array[int] = field(default_factory=lambda: array("q"))  # of lines, from 1

    def add(self, qid: bytes, start: int, end: int, number: int) -> None:
        """Add one document."""
        self.codes.append(self.qids.setdefault(qid, len(self.qids)))
        self.starts.append(start)
        self.ends.append(end)
        self.numbers.append(number)


class LetorSource(DataSource):
    """``label qid:7 1:0.5 …``, or lines without ``qid:`` and a file of sizes; no labels if the first line has none.

    Args:
        path: the file.
        options: how to read it; ``num_features`` is how many there may be at most.
        sizes: the file with the number of documents of each query, for lines without ``qid:``.
        first_index: the smallest feature index.
    """

    gap = "absent"

    def __init__(
        self, path: PathLike, options: ReadOptions, *, sizes: Path | None = None, first_index: int = 1
    ) -> None:
        if options.categories.known:
            names = ", ".join(options.categories.known)
            raise DataError(f"{path}: LETOR lines hold numbers only, but these columns are categories: {names}")
        self.text = TextFile(path)
        super().__init__(self.text.name, options)
        self._last_read = -1  # the row up to which `_texts` has read
        self.sizes, self.feature_names = sizes, options.feature_names
        self._absent = 0.0
        if options.absent == "missing":
            self._absent = np.nan
        self._told = False
        self._seen = 0  # features of the rows that were read
        self._counts, self._noted, self._widest = array("i"), bytearray(), 0  # of each document: features, a comment
        try:
            self._first_line, words = self._first_words()
        except BaseException:
            self.close()
            raise
        self.has_labels = sizes is not None or not words[:1] or not words[0].startswith(b"qid:")
        width = options.num_features
        because = "`num_features` says so"
        if options.model:
            because = f"the model was trained on {width} features"
        missing = options.missing != "error"
        self.rules = Rules(sizes is None, first_index, width, missing, options.kind, self.has_labels, because)

    def _first_words(self) -> tuple[int, list[bytes]]:
        for line, _, block in self.text.blocks(1):
            if words := block.partition(b"#")[0].split():
                return line, words
        return 1, []

    def _unlabelled(self) -> str:
        return f"{self.name}:{self._first_line}: the line starts without a label, and training needs labels"

    def _column(self, column: int) -> str:
        return f"feature {column + self.rules.first_index}"

    def _all_seen(self) -> None:
        """Lines may leave zeros out, so a feature that is gone looks like one that is always 0: say so once."""
        super()._all_seen()
        width, seen = self.options.num_features, self._seen
        if self.options.model and width is not None and seen < width and not self._told:
            self._told = True
            gone = f"features {seen + 1} to {width} count"
            if seen == width - 1:
                gone = f"feature {width} counts"
            asked = f"the highest feature index is {seen}, the model was trained on {width} features"
            warnings.warn(f"{self.name}: {asked}: {gone} as 0 everywhere", DataWarning, stacklevel=3)

    def close(self) -> None:
        """Close the file."""
        self.text.close()

    @cached_property
    def _places(self) -> _Places:
        """The place and the query of each line, by a pass over the file."""
        places = _Places()
        for line, place, block in self.text.blocks(INDEX_BYTES, progress=self.options.progress):
            self._scan(block, line, place, places)
        if not places.codes:
            raise DataError(f"{self.name}:1: the file holds no documents")
        return places

    def _index(self) -> tuple[NDArray[np.int64], Sequence[Hashable]]:
        places = self._places
        if self.sizes is not None:
            return self._grouped(len(places.codes))
        return np.array(places.codes, np.int64), query_ids(list(places.qids))

    def _texts(self, rows: NDArray[np.int64]) -> tuple[list[bytes], list[int]]:
        """The lines of the given rows, and their numbers."""
        places = self._places
        if not self.in_order or rows[0] < self._last_read:  # going back would decompress all of it again
            self.text.unzip()
        self._last_read = int(rows[-1])
        starts, ends = np.frombuffer(places.starts, np.int64), np.frombuffer(places.ends, np.int64)
        numbers = np.frombuffer(places.numbers, np.int64)
        return self.text.texts(starts[rows], ends[rows]), numbers[rows].tolist()

    def place(self, row: int) -> str:
        """``file:line``."""
        return f"{self.name}:{self._places.numbers[row]}"

    def _grouped(self, rows: int) -> tuple[NDArray[np.int64], Sequence[Hashable]]:
        """Consecutive lists of the sizes that the second file gives."""
        assert self.sizes is not None
        sizes = read_sizes(self.sizes)
        if sizes.sum() != rows:
            total, where = int(sizes.sum()), f"{self.sizes}:{len(sizes)}"
            raise DataError(f"{where}: the sizes add up to {total}, but {self.name} has {rows} documents")
        return np.repeat(np.arange(len(sizes)), sizes), range(len(sizes))

    def _scan(self, block: bytes, line: int, place: int, places: _Places) -> None:
        start, rules = place, self.rules
        at = int(rules.labels)
        for number, raw in enumerate(_lines(block), line):
            end = start + len(raw)
            text, _, comment = raw.partition(b"#")
            words = text.split(None, 2)
            word = words[at] if len(words) > at else b""
            if not words or (rules.qid and not word.startswith(b"qid:")):
                parse_lines(raw, rules, path=self.name, line=number)  # raises, unless the line is empty
            else:
                places.add(word[4:] if rules.qid else b"", start, end, number)
                self._counts.append(text.count(b":") - rules.qid)
                self._noted.append(bool(comment.strip()))
                if rules.num_features is None and (last := _LAST_INDEX.search(text)):
                    self._widest = max(self._widest, int(last[1]) - rules.first_index + 1)
            start = end
        self._complete, self._last_line = block.endswith(b"\n"), line + block.count(b"\n")

    def _read(self, rows: NDArray[np.int64]) -> SourceRows:
        texts, numbers = self._texts(rows)
        rules = self.rules
        if rules.num_features is None and self._widest <= Rules().last_index:
            if not self._widest:
                raise DataError(f"{self.name}:{self._last_line}: no line up to here gives a feature")
            rules = replace(rules, num_features=self._widest)
        joined = b"".join(texts)
        block = parse_block(joined, rules)
        if block is None:
            for text, number in zip(texts, numbers, strict=True):
                parse_lines(text, rules, path=self.name, line=number)
            block = parse_lines(joined, rules, path=self.name)
        if rows[-1] == self.num_rows - 1 and not self._complete:
            check_last(np.array(self._counts), np.array(self._noted, bool), f"{self.name}:{self._last_line}")
        table = _Rows(rules, self._absent)
        table.append(block, expected=None)
        self._seen = max(self._seen, table.width)
        self._flat |= table.flat
        return table.rows()

    def _whole(self) -> SourceRows:
        """A single pass: every block is parsed straight into the array it stays in."""
        rows, rules, block = _Rows(self.rules, self._absent), self.rules, b""
        line = 1
        for line, _, block in self.text.blocks(BLOCK_BYTES, progress=self.options.progress):
            expected = None
            if not self.text.zipped:
                expected = self.text.size / len(block)
            rows.append(parse(block, rules, path=self.name, line=line), expected)
        line += block.count(b"\n")
        if not rows.count:
            raise DataError(f"{self.name}:1: the file holds no documents")
        if not (rows.width or rules.num_features):
            raise DataError(f"{self.name}:{line}: no line up to here gives a feature")
        if not block.endswith(b"\n"):
            noted = np.array(list(map(bool, rows.doc_ids or [""] * rows.count)))
            check_last(np.concatenate(rows.given), noted, f"{self.name}:{line}")
        self._seen, self._flat = rows.width, rows.flat
        if rules.qid:
            self._queries = np.concatenate(rows.codes), query_ids(list(rows.qids))
        else:
            self._queries = self._grouped(rows.count)
        return rows.rows()


def open_lightgbm(path: PathLike, options: ReadOptions) -> LetorSource:
    """Lines without ``qid:``; the sizes of the queries stand in the file beside them."""
    return LetorSource(path, options, sizes=sizes_file(path))


def _lines(block: bytes) -> list[bytes]:
    """Lines by newline alone: a carriage return inside one is an error that the parser names."""
    if b"\r" not in block:
        return block.splitlines(keepends=True)
    lines = [line + b"\n" for line in block.split(b"\n")]
    last = lines.pop()
    if last != b"\n":
        lines.append(last[:-1])
    return lines


def check_last(counts: NDArray[Any], noted: NDArray[np.bool_], where: str) -> None:
    """A last line without a newline may be the rest of one; a dense file, or one with comments, shows it."""
    last, others = int(counts[-1]), counts[:-1]
    if len(others) < 2:
        return
    if (others == others[0]).all() and last < others[0]:
        raise DataError(f"{where}: the last line is cut: it has {last} features, all others {int(others[0])}")
    if noted[:-1].all() and not noted[-1]:
        raise DataError(f"{where}: the last line is cut: it ends without a comment, which all others have")


class _Rows:
    """Grows by blocks; memory is asked for once, from the size of the file, and touched only when filled."""

    def __init__(self, rules: Rules, absent: float) -> None:
        self.rules, self.absent = rules, absent
        self.count = self.width = 0
        self.data: NDArray[Any] = np.empty((0, rules.num_features or 0), rules.kind)
        self.labels: list[NDArray[np.float32]] = []
        self.given: list[NDArray[np.int64]] = []
        self.codes: list[NDArray[np.int64]] = []
        self.qids: dict[bytes, int] = {}
        self.doc_ids: list[str] | None = None
        self.flat: set[int] = set()  # features that float32 flattens

    def append(self, block: Block, expected: float | None) -> None:
        """Add a block; ``expected`` is the number of such blocks the file has room for."""
        rows = len(block.labels)
        if not rows:
            return
        widest = int(block.index.max(initial=self.rules.first_index - 1)) - self.rules.first_index + 1
        self._make_room(rows, widest, expected)
        target = self.data[self.count : self.count + rows]
        if (block.counts == target.shape[1]).all():  # increasing indices without a gap
            values = block.values.reshape(target.shape)
            target[...] = values
            self.flat.update(flattened(target, lambda column: values[:, column]))
        else:
            target[...] = self.absent
            target[np.repeat(np.arange(rows), block.counts), block.index - self.rules.first_index] = block.values
        codes = [self.qids.setdefault(qid, len(self.qids)) for qid in block.qids]
        self.codes.append(np.array(codes, dtype=np.int64))
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

    def rows(self) -> SourceRows:
        """What was read; the builder is empty after that."""
        columns = self.rules.num_features or self.width
        data, self.data = self.data, np.empty((0, 0), self.rules.kind)
        if data.shape[1] == columns:
            data.resize((self.count, columns), refcheck=False)
        else:
            data = np.ascontiguousarray(data[: self.count, :columns])
        part = SourceRows(data, None, self.doc_ids)
        if self.rules.labels:
            part.labels = np.concatenate(self.labels)
        return part


def _doc_id(comment: bytes) -> str:
    found = _DOC_ID.search(comment)
    if found:
        comment = found[1]
    return comment.decode("utf-8", "backslashreplace")


def load_letor(
    path: PathLike,
    *,
    num_features: int | None = None,
    missing: str = "error",
    absent: str = "zero",
    dtype: torch.dtype = torch.float32,
    cache: bool | PathLike | Cache = True,
    progress: bool = True,
) -> RankingData:
    r"""Load a file in LETOR/SVMlight format, plain or gzipped.

    Query ids become whole numbers if all of them are, strings otherwise; a ``#docid = x`` or any other
    comment becomes the document's id. Every value is ``float(text)`` rounded to ``dtype``.

    Args:
        path: the file.
        num_features: how many features there are; by default the largest index in the file.
        missing: what ``NULL`` and ``nan`` stand for: ``"error"``, ``"zero"``, ``"query-min"`` or ``"query-mean"``.
        absent: features a line does not mention: ``"zero"``, or ``"missing"`` to treat them as ``missing`` says.
        dtype: of the features, float32 or float64.
        cache: False, True for the default folder (``LGMML_CACHE``), or a folder.
        progress: show a bar if it takes more than two seconds.

    Raises:
        DataError: ``file:line: what is wrong``.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "train.txt"
    >>> _ = file.write_text("1 qid:7 1:0.5 3:2 #docid = b\n0 qid:7 2:1 #docid = a\n")
    >>> data = load_letor(file, cache=False)
    >>> data.features.tolist(), data.doc_ids
    ([[0.0, 1.0, 0.0], [0.5, 0.0, 2.0]], ('a', 'b'))
    """
    options = ReadOptions(num_features, None, missing, absent, dtype, progress=progress)
    return _load(Path(path), options, cache)


def load_lightgbm(
    path: PathLike,
    *,
    query: PathLike | None = None,
    zero_based: bool = False,
    num_features: int | None = None,
    missing: str = "error",
    absent: str = "zero",
    dtype: torch.dtype = torch.float32,
    cache: bool | PathLike | Cache = True,
    progress: bool = True,
) -> RankingData:
    """Load a file without ``qid:`` whose queries are consecutive lines, their numbers in a second file.

    Args:
        path: the file, ``label index:value …``.
        query: the file with the number of documents of each query; by default ``path`` + ``.query``.
        zero_based: whether indices start at 0 instead of 1. (LightGBM itself counts from 0 always.)
        num_features: as in `load_letor`, like the arguments after it.
        missing: see `load_letor`.
        absent: see `load_letor`.
        dtype: see `load_letor`.
        cache: see `load_letor`.
        progress: see `load_letor`.

    Raises:
        DataError: ``file:line: what is wrong``, also if the sizes do not add up to the number of lines.
    """
    options = ReadOptions(num_features, None, missing, absent, dtype, progress=progress)
    sizes = sizes_file(path) if query is None else Path(query)
    return _load(Path(path), options, cache, sizes, first_index=int(not zero_based))


def _load(
    file: Path,
    options: ReadOptions,
    cache: bool | PathLike | Cache,
    sizes: Path | None = None,
    *,
    first_index: int = 1,
) -> RankingData:
    facts = {
        "qid": sizes is None,
        "first_index": first_index,
        "num_features": options.num_features,
        "missing": options.missing,
        "absent": options.absent,
        "dtype": str(options.dtype),
    }

    def parse_file() -> RankingData:
        if sizes is not None:
            read_sizes(sizes)  # what is wrong with it should not cost a pass over the data
        with LetorSource(file, options, sizes=sizes, first_index=first_index) as source:
            return source.read(labelled=True)

    return cached(cache, list(filter(None, [file, sizes])), facts, parse_file, options.table())


def load_letor_splits(folder: PathLike, *, num_features: int | None = None, **options: Any) -> dict[str, RankingData]:
    """Load ``train``, ``valid`` and ``test`` of a folder, with the same number of features in all of them.

    The files are ``train.txt``, ``vali.txt`` (or ``valid.txt``, ``validation.txt``) and ``test.txt``, or these with
    ``.gz``. Those that are not there are left out, but one must be. ``options`` are those of `load_letor`.
    """
    present = {}
    for split, names in SPLITS.items():
        if (file := find_file(folder, names)) is not None:
            present[split] = file
    if not present:
        hint = "pieces of one table are opened with data=table data.path=FOLDER"
        raise DataError(f"no train.txt, vali.txt or test.txt in {Path(folder)}; {hint}")
    return load_agreed(load_letor, present, num_features=num_features, **options)


def load_agreed(
    load: Callable[..., RankingData], files: dict[str, Path], *, num_features: int | None = None, **options: Any
) -> dict[str, RankingData]:
    """Load several files with one number of features: the given one, or the largest found in any of them."""
    parts = {}
    for split, file in files.items():
        parts[split] = load(file, num_features=num_features, **options)
    widest = max([part.num_features for part in parts.values()])
    for split, part in parts.items():
        if part.num_features < widest:
            parts[split] = load(files[split], num_features=widest, **options)
    return parts


def find_file(folder: PathLike, names: Sequence[str], suffix: str = ".txt") -> Path | None:
    """The first of ``names`` that exists in ``folder``, plain or gzipped."""
    for name in names:
        for ending in (suffix, suffix + ".gz"):
            file = Path(folder) / (name + ending)
            if file.is_file():
                return file
    return None
