"""Parquet where it lies: one file, or a folder, a pattern or the address of a store, whose files are one table.

The files of a table are read in the order of their names. A folder called ``day=2024-01-31`` gives the rows below it a
column ``day``. Rows of a query may stand in several files: the column of queries of all files is read first.

Lists that need not fit into memory are decoded once into a file of the cache, by `decode_lists`. They stand there in
the order of their ids, and their documents in canonical order, as `DataSource.read` gives them.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.categories import Asked, WordColumns, vocabularies
from lgmml_torch.checks import DataError
from lgmml_torch.data.arrow import ArrowSource
from lgmml_torch.data.cache import Arrays, Cache
from lgmml_torch.data.columns import check_same_names, inner, is_list, no_number, pa, readable
from lgmml_torch.data.letor import SPLITS
from lgmml_torch.data.source import DataSource, PathLike, ReadOptions, is_folder, open_file
from lgmml_torch.distributed import SharedLists
from lgmml_torch.inputs import canonical_ranks
from lgmml_torch.progress import progress_bar
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import argsort_segments, offsets_from_sizes, positions

if TYPE_CHECKING:
    from pyarrow import Schema

_ENDING = ".parquet"
_BUFFER = 1 << 16  # bytes of each column of a local file that are read at a time
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_HIDDEN = re.compile(r"(?:^|/)[_.]")
_VALUES_AT_ONCE = 1 << 22  # features that are decoded and sorted together


@dataclass(frozen=True)
class ParquetFiles:
    """The Parquet files that a path stands for, in the order of their names."""

    system: Any  # the file system of pyarrow that they lie in
    root: str  # the folder that they lie in
    infos: Sequence[Any]  # what the file system says of each
    scheme: str = ""  # the start of their addresses; empty for local files

    @classmethod
    def find(cls, path: PathLike) -> ParquetFiles:
        """List the files; those in a folder, or called, ``_…`` or ``.…`` are left out.

        Raises:
            DataError: there are none, or the store cannot be reached.
        """
        text, scheme = os.fspath(path), ""
        with readable(text, "Parquet"):
            system, place = pa.fs.LocalFileSystem(), text
            if "://" in text:
                scheme = text.partition("://")[0] + "://"
                system, place = pa.fs.FileSystem.from_uri(text)
            infos = system.get_file_info([place])
            if infos[0].is_file:
                return cls(system, place, infos, scheme)
            if "*" not in place:
                place = f"{place.rstrip('/')}/**/*{_ENDING}"
            pattern = place.removeprefix("./")
            root = pattern.partition("*")[0].rpartition("/")[0]
            infos = system.get_file_info(pa.fs.FileSelector(root or ".", allow_not_found=True, recursive=True))
        found = []
        for info in infos:
            name = info.path.removeprefix("./")
            if info.is_file and _matches(name, pattern) and not _HIDDEN.search(name.removeprefix(root)):
                found.append(info)
        if not found:
            raise DataError(f"{path}: there are no Parquet files")
        return cls(system, root, sorted(found, key=lambda info: info.path), scheme)

    @classmethod
    def open(cls, path: PathLike, options: ReadOptions) -> ArrowSource:
        """The files at a path as one table; ``-`` is standard input."""
        if str(path) != "-":
            return cls.find(path).source(options, str(path))
        with readable("<stdin>", "Parquet"):
            table = pa.parquet.ParquetFile(BytesIO(sys.stdin.buffer.read())).read()
        return ArrowSource.of_table(table, options, "<stdin>")

    @cached_property
    def names(self) -> list[str]:
        """What messages call each file."""
        return [self.scheme + info.path for info in self.infos]

    def keys(self, number: int) -> dict[str, str | None]:
        """The columns that the folders of a file stand for, with their value."""
        found: dict[str, str | None] = {}
        for part in self.infos[number].path.removeprefix(self.root).split("/")[:-1]:
            name, mark, value = part.partition("=")
            if mark:
                found[unquote(name)] = None if value == _NO_VALUE else unquote(value)
        return found

    def parts(self, path: PathLike) -> dict[str, str]:
        """Where the files at a path are or lie in folders called ``train`` and, perhaps, ``valid``, ``test``: those."""
        known = {alias: split for split, aliases in SPLITS.items() for alias in aliases}
        found: dict[str, str] = {}
        address, mark, query = str(path).partition("?")
        for info in self.infos:
            head = info.path.removeprefix(self.root).lstrip("/").partition("/")[0]
            part = known.get(head.removesuffix(_ENDING))
            if part is None:
                return {}
            found[part] = f"{address.rstrip('/')}/{head}{mark}{query}"
        if "train" not in found:
            return {}
        return {split: found[split] for split in SPLITS if split in found}  # training first: others follow its columns

    def source(self, options: ReadOptions, name: str = "") -> ArrowSource:
        """The files as one table; row groups that hold nothing that is asked for are not decoded."""
        table = _Groups(self)
        if not name or len(self.names) == 1:
            name = self.names[0]
        owners = [self.names[number] for number, _ in table.places]
        with readable(name, "Parquet"):
            return ArrowSource(name, "Parquet", options, table.schema, table.sizes, table.pieces, table.close, owners)


def _matches(name: str, pattern: str) -> bool:
    """Whether a name is meant: ``*`` stands for any part of a name, ``**/`` for any folders.

    >>> [_matches(name, "a/**/*.parquet") for name in ("a/b.parquet", "a/x=1/b.parquet", "a/b.txt")]
    [True, True, False]
    """
    rules = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    words = re.split(r"(\*\*/|\*\*|\*)", pattern)
    return re.fullmatch("".join([rules.get(word) or re.escape(word) for word in words]), name) is not None


class _Groups:
    """The row groups of all files, which must have the same columns."""

    def __init__(self, files: ParquetFiles) -> None:
        self.files, self.sizes = files, list[int]()
        self.places: list[tuple[int, int]] = []  # file and row group
        self._opened: dict[int, Any] = {}  # the file that was read last, by its number
        self._keys = list(map(files.keys, range(len(files.names))))
        for number, name in enumerate(files.names):
            with readable(name, "Parquet"):
                file = self._file(number)
                schema = self._with_keys(file.schema_arrow, number)
                for group in range(file.num_row_groups):
                    self.places.append((number, group))
                    self.sizes.append(file.metadata.row_group(group).num_rows)
            if number == 0:
                self.schema = schema
            _check_alike(schema, self.schema, name, files.names[0])

    def _file(self, number: int) -> Any:
        if number not in self._opened:
            self.close()
            stream = self.files.system.open_input_file(self.files.infos[number].path)
            how: dict[str, Any] = {"buffer_size": _BUFFER}
            if self.files.scheme:
                how = {"pre_buffer": True}  # few large requests
            self._opened = {number: pa.parquet.ParquetFile(stream, **how)}
        return self._opened[number]

    def _with_keys(self, schema: Schema, number: int) -> Schema:
        """The columns of a file, and those that its folders stand for; a column of the file comes first."""
        for name in list(self._keys[number]):
            if name in schema.names:
                del self._keys[number][name]
                continue
            schema = schema.append(pa.field(name, self._key_types[name]))
        return schema

    @cached_property
    def _key_types(self) -> dict[str, Any]:
        """Of the columns that folders stand for: whole numbers where all values are, otherwise text."""
        types: dict[str, Any] = {}
        for keys in self._keys:
            for name, value in keys.items():
                types.setdefault(name, pa.int64())
                if not re.fullmatch(r"-?\d{1,18}", value or "0"):
                    types[name] = pa.string()
        return types

    def pieces(self, first: int, columns: list[str], step: int) -> Iterator[Any]:
        """Some columns from a group on, see `ArrowSource`."""
        for number, group in self.places[first:]:
            keys = self._keys[number]
            own = [name for name in columns if name not in keys]
            with readable(self.files.names[number], "Parquet"):
                for batch in self._file(number).iter_batches(step, row_groups=[group], columns=own, use_threads=False):
                    arrays = []
                    for name in columns:
                        if name in keys:
                            value = pa.scalar(keys[name]).cast(self.schema.field(name).type)
                            arrays.append(pa.repeat(value, batch.num_rows))
                        else:
                            arrays.append(batch.column(name))  # `a` also brings `a.b`
                    yield pa.RecordBatch.from_arrays(arrays, columns)
            pa.default_memory_pool().release_unused()  # Arrow would keep what the largest group took

    def close(self) -> None:
        """Let go of the file that was read last."""
        for file in self._opened.values():
            file.close(force=True)  # the stream is our own


def _check_alike(schema: Schema, like: Schema, name: str, first: str) -> None:
    """Require the columns of the first file, in any order, each of the same kind."""
    try:
        check_same_names(schema.names, like.names, name, model=False)
    except DataError as error:
        raise DataError(f"{error}; all files must have the columns of {first}") from error
    for column in like.names:
        got, want = _kind(schema, column), _kind(like, column)
        if got != want and str(schema.types[schema.names.index(column)]) != "null":  # nothing but gaps suits every kind
            raise DataError(f"{name}: column {column!r} must hold {want} as in {first}, got {got}")


def _kind(schema: Schema, column: str) -> str:
    """What a column holds; whole numbers and fractions are alike."""
    dtype = schema.types[schema.names.index(column)]  # names may come twice until that is refused
    lists = ""
    while is_list(dtype):
        lists, dtype = lists + "lists of ", inner(dtype)
    return lists + (no_number(dtype) or "numbers")


def places_of(data: RankingData) -> Tensor:  # (N,) int32
    """Where each document stands in its list in the caller's order, from 0."""
    places = torch.empty(data.num_documents, dtype=torch.int32)
    places[argsort_segments(data.order, data.offsets)] = positions(data.offsets).int()
    return places


def decode_lists(
    source: DataSource,
    starts: Tensor,  # (Q,)
    store: Cache | None,
    key: Mapping[str, Any],
    *,
    places: NDArray[np.int32] | None = None,  # (N,)
) -> Arrays:
    """Features, labels and places (see `places_of`) of all documents; in memory without a cache.

    Lists are numbered in the order of their ids; ``starts`` is the row of the first document of each. ``places`` are
    those of the rows of the source, where they do not follow from the order of the rows.
    """
    width, total = source.num_features, source.num_rows
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "features": ((total, width), np.dtype(source.options.kind)),
        "labels": ((total,), np.dtype(np.float32)),
        "place": ((total,), np.dtype(np.int32)),
    }

    def fill(targets: Arrays) -> None:
        query = done = 0
        with progress_bar("Decoding", total, enabled=source.options.progress) as report:
            for batch in source.batches(max(1, _VALUES_AT_ONCE // width), by_id=True):
                data = batch.data
                place = places_of(data)
                if places is not None:
                    place = torch.from_numpy(places[batch.rows])[data.order]
                firsts = starts[query : query + data.num_queries].repeat_interleave(data.sizes)
                rows = (firsts + positions(data.offsets)).numpy()
                for name, values in (("features", data.features), ("labels", data.labels), ("place", place)):
                    targets[name][rows] = values.numpy()
                query += data.num_queries
                report(done := done + data.num_documents)

    if store is None:
        return Cache.in_memory(shapes, fill)
    return store.get_or_fill(key, shapes, fill)


def _numbered_lists(source: DataSource) -> RankingData:
    """The lists of a source without features and labels; their ids are their places among the sorted ids."""
    ranks = canonical_ranks(source.qids)[source.codes]
    sizes = np.bincount(ranks)
    return RankingData(
        features=torch.empty(len(ranks), 0),
        labels=torch.zeros(len(ranks)),
        offsets=offsets_from_sizes(torch.from_numpy(sizes)),
        qids=tuple(range(len(sizes))),
        order=torch.from_numpy(np.argsort(ranks, kind="stable")),
    )


def shared_data(arrays: Arrays, start: int, shared: SharedLists, qids: Sequence[Hashable], **rest: Any) -> RankingData:
    """The lists of this process, which stand together in ``arrays`` (see `decode_lists`) from row ``start`` on."""
    sizes = shared.sizes[shared.own]
    offsets = offsets_from_sizes(sizes)
    rows = slice(start, start + int(offsets[-1]))
    return RankingData(
        features=torch.from_numpy(arrays["features"][rows]),
        labels=torch.from_numpy(arrays["labels"][rows]),
        offsets=offsets,
        qids=tuple(qids),
        order=offsets[:-1].repeat_interleave(sizes) + torch.from_numpy(arrays["place"][rows]),
        shared_lists=shared,
        **rest,
    )


def stream_table(
    parts: Mapping[str, PathLike],
    cut: Callable[[RankingData], Mapping[str, RankingData]],
    *,
    cache: bool | PathLike | Cache = True,
    categories: Asked = None,
    **options: Any,
) -> dict[str, RankingData]:
    """The parts of a table; of each the lists of this process, as `lgmml_torch.data.shards.open_shards` gives them.

    All have the features and the words of the first. ``cut`` puts each of the `_numbered_lists` of a part without a
    name into one of the parts. ``options`` are those of `ReadOptions`.
    """
    found: dict[str, RankingData] = {}
    for name, path in parts.items():
        reading = ReadOptions(**options, categories=WordColumns.of(categories), doc_ids=False)
        found.update(_stream_part(path, reading, cut, Cache.of(cache), name))
        first = next(iter(found.values()))
        options["feature_names"] = first.feature_names
        categories = vocabularies(first.feature_names, first.categories) or categories
    return found


def _stream_part(
    path: PathLike,
    options: ReadOptions,
    cut: Callable[[RankingData], Mapping[str, RankingData]],
    store: Cache | None,
    only: str,
) -> dict[str, RankingData]:
    with open_file(path, options) as source:
        source.check_labelled()
        parts: Mapping[str, RankingData] = {only: _numbered_lists(source)}
        if not only:
            parts = cut(parts[only])
        lists = torch.cat([torch.tensor(part.qids, dtype=torch.long) for part in parts.values()])
        starts = torch.empty_like(lists)
        starts[lists] = offsets_from_sizes(torch.cat([part.sizes for part in parts.values()]))[:-1]
        if distributed.rank() > 0:
            distributed.all_gather(None)  # the first process fills the cache
        try:
            arrays = decode_lists(source, starts, store, _key(path, source, lists))
        finally:  # what fails in one process fails in the others, too
            if distributed.rank() == 0:
                distributed.all_gather(None)
        ids = np.argsort(canonical_ranks(source.qids))
        about = {"feature_names": source.feature_names, "categories": source.categories, "table": source.table}
        found, start = {}, 0
        for name, part in parts.items():
            shared = SharedLists(part.sizes, SharedLists.owners(part.sizes), distributed.rank())
            qids = [source.qids[ids[part.qids[number]]] for number in shared.own.tolist()]
            before = int(part.sizes[shared.owner < shared.rank].sum())
            found[name] = shared_data(arrays, start + before, shared, qids, **about)
            start += part.num_documents
        return found


def _key(path: PathLike, source: DataSource, lists: Tensor) -> dict[str, Any]:
    """What the numbers depend on: names, sizes and times of the files, how they are read, and the cut."""
    if is_folder(path):
        files = ParquetFiles.find(path)
        state = [[name, info.size, info.mtime_ns] for name, info in zip(files.names, files.infos, strict=True)]
    else:
        status = Path(path).stat()
        state = [[os.fspath(path), status.st_size, status.st_mtime_ns]]
    cut = hashlib.sha256(lists.numpy().tobytes()).hexdigest()
    return {"stream": 1, "files": state, "options": repr(source.options), "cut": cut}
