"""LETOR, MSLR and Yahoo lines with ``qid:``, LightGBM files with a ``.query`` file beside them, and `load_file`.

A line is ``label qid:7 1:0.5 2:0 … #docid = x``: blanks or tabs between the parts, indices rising from 1, features that
are not mentioned are 0. The loaders parse text once; after that the data is memory-mapped from the cache.
"""

from __future__ import annotations

import io
import re
import tempfile
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.categories import Asked, WordColumns
from lgmml_torch.checks import DataError, DataWarning
from lgmml_torch.data.cache import Cache, cached
from lgmml_torch.data.columns import Columns
from lgmml_torch.data.source import DataSource, PathLike, ReadOptions, SourceRows, kind_of, open_file, sizes_file
from lgmml_torch.data.svmlight import Block, Rules, TextFile, parse, query_ids, shown
from lgmml_torch.inputs import flattened
from lgmml_torch.ragged import RankingData

SPLITS = {"train": ("train",), "valid": ("vali", "valid", "validation"), "test": ("test",)}
_BLOCK_BYTES = 1 << 18  # temporary arrays of a block then fit into the processor's cache
_IN_MEMORY = 1 << 22  # bytes of a text file whose numbers are kept in memory
_DOC_ID = re.compile(rb"docid\s*=\s*(\S+)")


class LetorSource(DataSource):
    """``label qid:7 1:0.5 …``, or lines without ``qid:`` and a file of sizes; no labels if the first line has none."""

    gap = "absent"

    def __init__(
        self,
        path: PathLike,
        options: ReadOptions,  # ``num_features`` is how many there may be at most
        *,
        sizes: Path | None = None,  # with the number of documents of each query, for lines without ``qid:``
        first_index: int = 1,  # the smallest feature index
    ) -> None:
        if options.categories.known:
            names = ", ".join(options.categories.known)
            raise DataError(f"{path}: LETOR lines hold numbers only, but these columns are categories: {names}")
        self.text = TextFile(path)
        super().__init__(self.text.name, options)
        self.sizes, self.feature_names = sizes, options.feature_names
        self._absent = 0.0
        if options.absent == "missing":
            self._absent = np.nan
        self._told = False
        self._seen = 0  # features of the rows that were read
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

    @classmethod
    def of_lightgbm(cls, path: PathLike, options: ReadOptions) -> LetorSource:
        """Lines without ``qid:``; the sizes of the queries stand in the file beside them."""
        return cls(path, options, sizes=sizes_file(path))

    def _first_words(self) -> tuple[int, list[bytes]]:
        for line, block in self.text.blocks(1):
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

    def _parse(self, keep: Callable[[Block], None]) -> _Documents:
        """All documents, by one pass over the file; ``keep`` gets the features, a block at a time."""
        documents, rules, line, text = _Documents(self.rules), self.rules, 1, b""
        for line, text in self.text.blocks(_BLOCK_BYTES, progress=self.options.progress):
            block = parse(text, rules, path=self.name, line=line)
            documents.append(block)
            keep(block)
        line += text.count(b"\n")
        if not documents.count:
            raise DataError(f"{self.name}:1: the file holds no documents")
        if not (documents.width or rules.num_features):
            raise DataError(f"{self.name}:{line}: no line up to here gives a feature")
        if not text.endswith(b"\n"):
            documents.check_last(f"{self.name}:{line}")
        self._seen = documents.width
        if rules.qid:
            self._queries = np.concatenate(documents.codes), query_ids(list(documents.qids))
        else:
            assert self.sizes is not None
            sizes = _read_sizes(self.sizes)
            total, rows = int(sizes.sum()), documents.count
            if total != rows:
                where = f"{self.sizes}:{len(sizes)}"
                raise DataError(f"{where}: the sizes add up to {total}, but {self.name} has {rows} documents")
            self._queries = np.repeat(np.arange(len(sizes)), sizes), range(len(sizes))
        return documents

    def _index(self) -> tuple[NDArray[np.int64], Sequence[Hashable]]:
        _ = self._stored
        return self._queries

    def _whole(self) -> SourceRows:
        """By a single pass: every block goes into the array it stays in, which grows."""
        count, out = 0, np.empty((0, self.rules.num_features or 0), self.rules.kind)

        def keep(block: Block) -> None:
            nonlocal count, out
            part = self._dense(block, out.shape[1])
            if (width := part.shape[1]) > out.shape[1]:
                wider = np.full((len(out), width), self._absent, self.rules.kind)
                wider[:, : out.shape[1]] = out
                out = wider
            if count + len(part) > len(out):
                out.resize((count + len(part) + count // 4, width), refcheck=False)
            out[count : count + len(part)] = part
            count += len(part)

        documents = self._parse(keep)
        out.resize((count, out.shape[1]), refcheck=False)
        return SourceRows(out, documents.all_labels, documents.doc_ids)

    def _dense(self, block: Block, width: int = 0) -> NDArray[Any]:
        """The features of a block: as many as it has, at least ``width``, or as many as asked for."""
        rows, first = len(block.labels), self.rules.first_index
        width = self.rules.num_features or max(width, int(block.index.max(initial=first - 1)) - first + 1)
        if (block.counts == width).all():  # increasing indices without a gap
            values = block.values.reshape(rows, width)
            out: NDArray[Any] = values.astype(self.rules.kind)
            self._flat.update(flattened(out, lambda column: values[:, column]))
            return out
        out = np.full((rows, width), self._absent, self.rules.kind)
        out[np.repeat(np.arange(rows), block.counts), block.index - first] = block.values
        return out

    @cached_property
    def _stored(self) -> tuple[_Documents, NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]:
        """The documents, where the features of each begin, and all indices and values; of large files on the disk."""
        make: Callable[[], IO[bytes]] = tempfile.TemporaryFile
        if self.text.size <= _IN_MEMORY and not self.text.zipped:
            make = io.BytesIO
        with make() as indices, make() as values:  # the maps outlive them

            def keep(block: Block) -> None:
                indices.write(block.index.astype(np.int32).tobytes())
                values.write(block.values.tobytes())

            documents = self._parse(keep)
            ends = np.cumsum(np.concatenate([[0], *documents.given]))
            return documents, ends, _mapped(indices, np.int32), _mapped(values, np.float64)

    def _read(self, rows: NDArray[np.int64]) -> SourceRows:
        documents, ends, index, values = self._stored
        counts = ends[rows + 1] - ends[rows]
        places = np.repeat(ends[rows] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        block = Block(np.zeros(len(rows), np.float32), [], counts, index[places], values[places], None)
        part = SourceRows(np.empty((documents.count, 0)), documents.all_labels, documents.doc_ids).take(rows)
        part.features = self._dense(block, documents.width)
        return part

    def place(self, row: int) -> str:
        """``file:line``."""
        for line, block in self.text.blocks(_BLOCK_BYTES):
            for number, text in enumerate(block.split(b"\n"), line):
                if text.partition(b"#")[0].split():
                    if row == 0:
                        return f"{self.name}:{number}"
                    row -= 1
        return self.name


class _Documents:
    """What a file says of its documents besides the features; grows by blocks."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.count = self.width = 0
        self.labels: list[NDArray[np.float32]] = []
        self.given: list[NDArray[np.int64]] = []  # features of each document
        self.codes: list[NDArray[np.int64]] = []
        self.qids: dict[bytes, int] = {}
        self.doc_ids: list[str] | None = None

    def append(self, block: Block) -> None:
        """Add a block."""
        rows, first = len(block.labels), self.rules.first_index
        self.width = max(self.width, int(block.index.max(initial=first - 1)) - first + 1)
        codes = [self.qids.setdefault(qid, len(self.qids)) for qid in block.qids]
        self.codes.append(np.array(codes, dtype=np.int64))
        self.labels.append(block.labels)
        self.given.append(block.counts)
        if block.comments is not None and self.doc_ids is None:
            self.doc_ids = [""] * self.count
        if self.doc_ids is not None:
            self.doc_ids.extend(map(_doc_id, block.comments or [b""] * rows))
        self.count += rows

    @cached_property
    def all_labels(self) -> NDArray[np.float32] | None:
        """``(N,)`` the labels; None where the lines have none."""
        if not self.rules.labels:
            return None
        return np.concatenate(self.labels)

    def check_last(self, where: str) -> None:
        """Refuse a last line that is cut off: it has fewer features than all others, or no comment."""
        counts = np.concatenate(self.given)
        last, others = int(counts[-1]), counts[:-1]
        if len(others) < 2:
            return
        if (others == others[0]).all() and last < others[0]:
            raise DataError(f"{where}: the last line is cut: it has {last} features, all others {int(others[0])}")
        if self.doc_ids is not None and all(self.doc_ids[:-1]) and not self.doc_ids[-1]:
            raise DataError(f"{where}: the last line is cut: it ends without a comment, which all others have")


def _read_sizes(path: Path) -> NDArray[np.int64]:
    """The number of documents of each query, one per line."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; it must give the number of documents of each query")
    sizes = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        if not re.fullmatch(rb"[0-9]{1,18}", word) or int(word) == 0:
            raise DataError(f"{path}:{number}: the size of a query must be a positive whole number, got {shown(word)}")
        sizes.append(int(word))
    return np.array(sizes, dtype=np.int64)


def _mapped(file: IO[bytes], kind: type[Any]) -> NDArray[Any]:
    """The numbers in a file, memory-mapped; an empty file cannot be."""
    if not file.tell():
        return np.empty(0, kind)
    if isinstance(file, io.BytesIO):
        return np.frombuffer(file.getvalue(), kind)
    file.flush()
    return np.memmap(file, kind, "r")


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
    return _load(path, "letor", ReadOptions(num_features, None, missing, absent, dtype, progress=progress), cache)


def load_lightgbm(
    path: PathLike,
    *,
    query: PathLike | None = None,
    zero_based: bool = False,
    cache: bool | PathLike | Cache = True,
    **options: Any,
) -> RankingData:
    """Load a file without ``qid:`` whose queries are consecutive lines, their numbers in a second file.

    Args:
        path: the file, ``label index:value …``.
        query: the file with the number of documents of each query; by default ``path`` + ``.query``.
        zero_based: whether indices start at 0 instead of 1. (LightGBM itself counts from 0 always.)
        cache: see `load_letor`.
        options: the others of `load_letor`.

    Raises:
        DataError: ``file:line: what is wrong``, also if the sizes do not add up to the number of lines.
    """
    sizes = sizes_file(path) if query is None else Path(query)
    return _load(path, "lightgbm", ReadOptions(**options), cache, sizes, first_index=int(not zero_based))


def _load(
    path: PathLike,
    kind: str,
    options: ReadOptions,
    cache: bool | PathLike | Cache,
    sizes: Path | None = None,
    *,
    first_index: int = 1,
) -> RankingData:
    lines = kind in ("letor", "lightgbm")
    reading = replace(options, progress=True)  # what the numbers depend on
    if lines:
        reading = replace(reading, feature_names=None)

    def parse_file() -> RankingData:
        how = replace(reading, progress=options.progress)
        if sizes is not None:
            _read_sizes(sizes)  # what is wrong with it should not cost a pass over the data
        source: DataSource
        if lines:
            source = LetorSource(path, how, sizes=sizes, first_index=first_index)
        else:
            source = open_file(path, how, kind=kind)
        with source:
            return source.read(labelled=True)

    if not lines and kind not in ("csv", "tsv"):  # others are read about as fast as the cache
        return parse_file()
    files = list(filter(None, [Path(path), sizes]))
    facts = {"kind": kind, "first_index": first_index, "options": repr(reading)}
    data = cached(cache, files, facts, parse_file, options.table(named=not lines))
    if lines:
        return data.replace(feature_names=options.feature_names)
    return data


def load_file(
    path: PathLike,
    *,
    kind: str | None = None,
    feature_names: Sequence[str] | None = None,
    columns: Columns | None = None,
    categories: Asked = None,
    cache: bool | PathLike | Cache = True,
    **options: Any,
) -> RankingData:
    """Load a file of any format to train on; text is parsed once and kept in the cache.

    Args:
        path: the file.
        kind: its format, one of `FORMATS`; by default what its name says.
        feature_names: names they must have (in a table, in any order), or get (in LETOR lines).
        columns: which columns of a table are no features.
        categories: which hold words, see `lgmml_torch.open_source`.
        cache: see `lgmml_torch.load_letor`.
        options: the others of `lgmml_torch.load_letor`.

    Raises:
        DataError: the file, the place and what is wrong; also where there are no labels.
    """
    kind = kind_of(path) if kind is None else kind
    names = None if feature_names is None else tuple(feature_names)
    words = WordColumns.of(categories)
    reading = ReadOptions(feature_names=names, columns=columns or Columns(), categories=words, **options)
    return _load(path, kind, reading, cache, sizes_file(path) if kind == "lightgbm" else None)
