"""Parquet where it lies: one file, or a folder, a pattern or the address of a store, whose files are one table.

The files of a table are read in the order of their names. A folder called ``day=2024-01-31`` gives the rows below it a
column ``day``. Rows of a query may stand in several files: the column of queries of all files is read first.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from lgmml_torch.checks import DataError
from lgmml_torch.data.arrow import ArrowSource, open_arrow_table, readable
from lgmml_torch.data.columns import check_same_names, inner, is_list, no_number, require_arrow
from lgmml_torch.data.letor import SPLITS
from lgmml_torch.data.source import PathLike, ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

_ENDING = ".parquet"
_BUFFER = 1 << 16  # bytes of each column of a local file that are read at a time
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_HIDDEN = re.compile(r"(?:^|/)[_.]")


@dataclass(frozen=True)
class ParquetFiles:
    """The Parquet files that a path stands for, in the order of their names.

    Attributes:
        system: the file system of pyarrow that they lie in.
        root: the folder that they lie in.
        infos: what the file system says of each.
        scheme: the start of their addresses; empty for local files.
    """

    system: Any
    root: str
    infos: Sequence[Any]
    scheme: str = ""

    @classmethod
    def find(cls, path: PathLike) -> ParquetFiles:
        """List the files; those in a folder, or called, ``_…`` or ``.…`` are left out.

        Raises:
            DataError: there are none, or the store cannot be reached.
        """
        require_arrow()
        from pyarrow import fs

        text, scheme = os.fspath(path), ""
        with readable(text, "Parquet"):
            system, place = fs.LocalFileSystem(), text
            if "://" in text:
                scheme = text.partition("://")[0] + "://"
                system, place = fs.FileSystem.from_uri(text)
            infos = system.get_file_info([place])
            if infos[0].is_file:
                return cls(system, place, infos, scheme)
            if "*" not in place:
                place = f"{place.rstrip('/')}/**/*{_ENDING}"
            pattern = place.removeprefix("./")
            root = pattern.partition("*")[0].rpartition("/")[0]
            infos = system.get_file_info(fs.FileSelector(root or ".", allow_not_found=True, recursive=True))
        found = []
        for info in infos:
            name = info.path.removeprefix("./")
            if info.is_file and _matches(name, pattern) and not _HIDDEN.search(name.removeprefix(root)):
                found.append(info)
        if not found:
            raise DataError(f"{path}: there are no Parquet files")
        return cls(system, root, sorted(found, key=lambda info: info.path), scheme)

    @classmethod
    def local(cls, paths: Sequence[Path]) -> ParquetFiles:
        """Some local files, in the order given."""
        from pyarrow import fs

        system = fs.LocalFileSystem()
        return cls(system, "", system.get_file_info(list(map(str, paths))))

    @property
    def names(self) -> list[str]:
        """What messages call each file."""
        return [self.scheme + info.path for info in self.infos]

    @property
    def state(self) -> list[Any]:
        """Name, size and time of each file, which change when it does."""
        return [[name, info.size, info.mtime_ns] for name, info in zip(self.names, self.infos, strict=True)]

    def keys(self, number: int) -> dict[str, str | None]:
        """The columns that the folders of a file stand for, with their value."""
        found: dict[str, str | None] = {}
        for part in self.infos[number].path.removeprefix(self.root).split("/")[:-1]:
            name, mark, value = part.partition("=")
            if mark:
                found[unquote(name)] = None if value == _NO_VALUE else unquote(value)
        return found

    def open(self, number: int) -> Any:
        """One of the files, as pyarrow reads it."""
        from pyarrow import parquet

        stream = self.system.open_input_file(self.infos[number].path)
        if self.scheme:
            return parquet.ParquetFile(stream, pre_buffer=True)  # few large requests
        return parquet.ParquetFile(stream, buffer_size=_BUFFER)


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
        self._opened: tuple[int, Any] = (-1, None)
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
        if self._opened[0] != number:
            self._opened = number, self.files.open(number)
        return self._opened[1]

    def _with_keys(self, schema: pa.Schema, number: int) -> pa.Schema:
        """The columns of a file, and those that its folders stand for; a column of the file comes first."""
        import pyarrow as pa

        for name in list(self._keys[number]):
            if name in schema.names:
                del self._keys[number][name]
                continue
            words = [keys.get(name) or "0" for keys in self._keys]
            whole = all(re.fullmatch(r"-?\d{1,18}", word) for word in words)
            schema = schema.append(pa.field(name, pa.int64() if whole else pa.string()))
        return schema

    def pieces(self, first: int, columns: list[str], step: int) -> Iterator[Any]:
        """Some columns from a group on, see `ArrowSource`."""
        import pyarrow as pa

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
        if self._opened[1] is not None:
            self._opened[1].close()


def _check_alike(schema: pa.Schema, like: pa.Schema, name: str, first: str) -> None:
    """Require the columns of the first file, in any order, each of the same kind."""
    try:
        check_same_names(schema.names, like.names, name, model=False)
    except DataError as error:
        raise DataError(f"{error}; all files must have the columns of {first}") from error
    for column in like.names:
        got, want = _kind(schema, column), _kind(like, column)
        if got != want and str(schema.types[schema.names.index(column)]) != "null":  # nothing but gaps suits every kind
            raise DataError(f"{name}: column {column!r} must hold {want} as in {first}, got {got}")


def _kind(schema: pa.Schema, column: str) -> str:
    """What a column holds; whole numbers and fractions are alike."""
    dtype = schema.types[schema.names.index(column)]  # names may come twice until that is refused
    lists = ""
    while is_list(dtype):
        lists, dtype = lists + "lists of ", inner(dtype)
    return lists + (no_number(dtype) or "numbers")


def open_parquet(path: PathLike, options: ReadOptions) -> ArrowSource:
    """The Parquet files at a path as one table; ``-`` is standard input."""
    require_arrow()
    if str(path) != "-":
        return open_files(ParquetFiles.find(path), options, str(path))
    from pyarrow import parquet

    with readable("<stdin>", "Parquet"):
        table = parquet.ParquetFile(BytesIO(sys.stdin.buffer.read())).read(use_threads=False)
    return open_arrow_table(table, options, "<stdin>")


def open_files(files: ParquetFiles, options: ReadOptions, name: str = "") -> ArrowSource:
    """Parquet files as one table; row groups that hold nothing that is asked for are not decoded."""
    groups = _Groups(files)
    if not name or len(files.names) == 1:
        name = files.names[0]
    owners = [files.names[number] for number, _ in groups.places]
    with readable(name, "Parquet"):
        return ArrowSource(name, "Parquet", options, groups.schema, groups.sizes, groups.pieces, groups.close, owners)


def table_parts(path: PathLike) -> dict[str, str]:
    """The parts of a folder of Parquet: its files or folders are called ``train`` and, perhaps, ``valid``, ``test``."""
    files = ParquetFiles.find(path)
    known: dict[str, str] = {}
    for split, aliases in SPLITS.items():
        known.update(dict.fromkeys((split, *aliases), split))
    found: dict[str, str] = {}
    address, mark, query = str(path).partition("?")
    for info in files.infos:
        head = info.path.removeprefix(files.root).lstrip("/").partition("/")[0]
        part = known.get(head.removesuffix(_ENDING))
        if part is None:
            return {}
        found[part] = f"{address.rstrip('/')}/{head}{mark}{query}"
    if "train" not in found:
        return {}
    return {split: found[split] for split in SPLITS if split in found}  # training first: others follow its columns
