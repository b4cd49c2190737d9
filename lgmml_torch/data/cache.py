"""A folder of arrays that take long to compute: parsed files, local distances.

An entry is a folder: one ``.npy`` file per array, and ``key.json`` with the key, the sizes and the checksums. The last
file to be written is ``key.json``, so an entry without it is incomplete. The arrays are memory-mapped. Opening an entry
compares the key and the sizes of the files. `check_cache` also compares the checksums. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from lgmml_torch.checks import CheckpointError, DataError, DataWarning
from lgmml_torch.files import as_tuples, replacing, write_text
from lgmml_torch.ragged import RankingData

Arrays = dict[str, NDArray[Any]]
_Shapes = Mapping[str, tuple[tuple[int, ...], Any]]  # shape and dtype of each array

_VERSION = 3
_KEY = "key.json"
_PARSER = 2  # part of the key of every parsed file: raise it when the same text comes to mean other numbers
_SETTLED = 50_000_000  # nanoseconds: a file that was changed later than this before hashing may change unnoticed
_TENSORS = ("features", "labels", "offsets", "order", "query_weights", "document_weights", "positions")
_DESCRIPTIONS = ("qids", "doc_ids", "feature_names", "categories")  # stored as JSON


def _default_folder() -> Path:
    """``LGMML_CACHE``, else ``lgmml_torch`` in the user's cache folder."""
    if chosen := os.environ.get("LGMML_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lgmml_torch"


class Cache:
    """Arrays on disk by key.

    A key is a mapping of JSON values: everything the arrays depend on. Use `content` for files they come from.

    >>> import tempfile
    >>> cache = Cache(tempfile.mkdtemp())
    >>> cache.get_or_build({"squares": 3}, lambda: {"y": np.arange(3) ** 2})["y"].tolist()
    [0, 1, 4]
    >>> cache.get_or_build({"squares": 3}, lambda: {})["y"].tolist()  # not built again
    [0, 1, 4]
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = _default_folder() if folder is None else Path(folder)

    @classmethod
    def of(cls, asked: bool | str | os.PathLike[str] | Cache) -> Cache | None:
        """The cache that a loader's argument means: True is the default folder, False is none."""
        if isinstance(asked, Cache):
            return asked
        if isinstance(asked, bool):
            return cls() if asked else None
        return cls(asked)

    def path(self, key: Mapping[str, Any]) -> Path:
        """The folder of an entry, whether it exists or not."""
        return self.folder / f"{hashlib.blake2b(_text(key).encode(), digest_size=16).hexdigest()}.lgc"

    def get(self, key: Mapping[str, Any]) -> Arrays | None:
        """The memory-mapped arrays of an entry. None if there is no entry, or with a warning if it cannot be used.

        Writing to the arrays changes them in the memory of this process only.
        """
        entry = self.path(key)
        try:
            return _open(entry, _text(key))
        except (CheckpointError, OSError) as error:
            if entry.is_file() or (entry / _KEY).exists():  # else it is being written, or its writer was killed
                warnings.warn(f"{error}; building it again", DataWarning, stacklevel=3)
        return None

    def get_or_build(self, key: Mapping[str, Any], build: Callable[[], Mapping[str, NDArray[Any]]]) -> Arrays:
        """The arrays of an entry. If there is none, ``build`` is called and the result is stored.

        If the folder cannot be written to, the built arrays are returned as they are, with a warning.
        """
        stored = self.get(key)
        if stored is not None:
            return stored
        built = {name: np.asarray(array) for name, array in build().items()}

        def copy(targets: Arrays) -> None:
            for name, array in built.items():
                targets[name][...] = array

        return self._filled(key, {name: (array.shape, array.dtype) for name, array in built.items()}, copy)

    def get_or_fill(self, key: Mapping[str, Any], shapes: _Shapes, fill: Callable[[Arrays], None]) -> Arrays:
        """As `get_or_build`, for arrays that need not fit into memory: ``fill`` writes into the mapped files.

        It is called with arrays of zeros of these shapes; they are in memory if the folder cannot be written to.
        """
        stored = self.get(key)
        if stored is not None:
            return stored
        return self._filled(key, shapes, fill)

    def _filled(self, key: Mapping[str, Any], shapes: _Shapes, fill: Callable[[Arrays], None]) -> Arrays:
        """Write an entry and map it; arrays in memory, with a warning, if the folder cannot be written to."""
        try:
            _write(self.path(key), _text(key), shapes, fill)
            return _open(self.path(key), _text(key))
        except OSError as error:
            sentence = f"cannot cache in {self.folder}: {error}; working without a cache"
            warnings.warn(sentence, DataWarning, stacklevel=3)
        return self.in_memory(shapes, fill)

    @staticmethod
    def in_memory(shapes: _Shapes, fill: Callable[[Arrays], None]) -> Arrays:
        """What `get_or_fill` gives, without a cache."""
        arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
        fill(arrays)
        return arrays

    def content(self, path: str | os.PathLike[str]) -> str:
        """The SHA-256 of a file. It is stored, and computed again only when the file was changed."""
        source = Path(path).resolve()
        note = self.folder / f"{hashlib.blake2b(str(source).encode(), digest_size=16).hexdigest()}.source"
        status = source.stat()
        seen = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        with suppress(OSError, ValueError, TypeError, KeyError):
            known = json.loads(note.read_text())
            if known["seen"] == seen:
                return str(known["sha256"])
        now = time.time_ns()
        content = digest(source)
        if max(status.st_mtime_ns, status.st_ctime_ns) < now - _SETTLED:
            with suppress(OSError):  # without a note the file is only hashed again
                write_text(note, json.dumps({"seen": seen, "sha256": content}))
        return content


def check_cache(folder: str | os.PathLike[str] | None = None) -> list[str]:
    """A sentence for each damaged entry of a cache, by default that of `_default_folder`, by bytes and checksums.

    It is safe to remove such an entry.
    """
    damage = []
    for entry in sorted(Cache(folder).folder.glob("*.lgc")):
        try:
            about = _read_key(entry)
            _open(entry, about["key"])
            for name, facts in about["arrays"].items():
                if digest(entry / f"{name}.npy") != facts["sha256"]:
                    raise CheckpointError(f"cache entry {entry} is damaged: {name!r} does not match its checksum")
        except (CheckpointError, OSError) as error:
            damage.append(str(error))
    return damage


def _write(entry: Path, key: str, shapes: _Shapes, fill: Callable[[Arrays], None]) -> None:
    """Write an entry. The files appear when all of them are complete, ``key.json`` last."""
    if entry.is_file():  # of release 0.2
        entry.unlink()
    if (entry / _KEY).exists():
        with suppress(CheckpointError, OSError):
            _open(entry, key)
            return  # another process has written it meanwhile
        (entry / _KEY).unlink(missing_ok=True)
    arrays: Arrays = {}
    files: dict[str, Path] = {}
    try:
        with ExitStack() as stack:
            for name, (shape, dtype) in shapes.items():
                kind = np.dtype(dtype)
                if kind.hasobject or kind.names:
                    raise CheckpointError(f"array {name!r} must hold plain numbers, got dtype {kind}")
                size = math.prod(shape) * int(kind.itemsize) + 128  # about, for the header
                files[name] = stack.enter_context(replacing(entry / f"{name}.npy", size=size))
                arrays[name] = open_memmap(files[name], "w+", kind, shape)
                with files[name].open("r+b") as stream:  # a full disk is an error here, not a crash later
                    os.posix_fallocate(stream.fileno(), 0, files[name].stat().st_size)
            fill(arrays)
            facts = {}
            for name, file in files.items():
                facts[name] = {"bytes": file.stat().st_size, "sha256": digest(file)}
        write_text(entry / _KEY, json.dumps({"version": _VERSION, "key": key, "arrays": facts}))
    finally:
        with suppress(OSError):  # a folder that holds nothing after an error
            entry.rmdir()


def _read_key(entry: Path) -> dict[str, Any]:
    """The content of ``key.json``."""
    try:
        about: dict[str, Any] = json.loads((entry / _KEY).read_text())
        version = about["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cache entry {entry} is damaged or of an older release: {error}") from error
    if version != _VERSION:
        raise CheckpointError(f"cache entry {entry} has format {version}, this release reads format {_VERSION}")
    return about


def _open(entry: Path, key: str) -> Arrays:
    """Map the arrays of an entry, copy-on-write."""
    about = _read_key(entry)
    if about["key"] != key:
        raise CheckpointError(f"cache entry {entry} belongs to another key")
    arrays: Arrays = {}
    try:
        for name, facts in about["arrays"].items():
            file = entry / f"{name}.npy"
            size = file.stat().st_size
            if size != facts["bytes"]:
                raise ValueError(f"{file.name} has {size} bytes instead of {facts['bytes']}")
            arrays[name] = np.load(file, mmap_mode="c", allow_pickle=False).view(np.ndarray)
    except Exception as error:  # numpy parses the header of a file: damage there raises any error
        raise CheckpointError(f"cache entry {entry} is damaged: {error}") from error
    return arrays


def digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, allow_nan=False)


def cached(
    cache: bool | str | os.PathLike[str] | Cache,
    files: Sequence[Path],
    facts: Mapping[str, Any],
    parse: Callable[[], RankingData],
    table: Mapping[str, Any] | None = None,
) -> RankingData:
    """What ``parse`` makes of the files, from the cache if they were parsed before with the same ``facts``."""
    store = Cache.of(cache)
    if store is None or not all(map(Path.is_file, files)):
        return parse()
    key = {"parser": _PARSER, "content": list(map(store.content, files)), **facts}

    def build() -> dict[str, NDArray[Any]]:
        before = list(map(_state, files))
        arrays = _to_arrays(parse())
        for file, state in zip(files, before, strict=True):
            if _state(file) != state:
                raise DataError(f"{file}: the file was changed while it was being read")
        return arrays

    return _from_arrays(store.get_or_build(key, build)).replace(table=table)


def _state(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _to_arrays(data: RankingData) -> Arrays:
    """Arrays of numbers only; ids and names are JSON."""
    tensors = {name: getattr(data, name) for name in _TENSORS}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}
    words = {name: getattr(data, name) for name in _DESCRIPTIONS}
    if not all(isinstance(qid, int) for qid in data.qids):
        words["qids"] = list(map(str, data.qids))
    arrays["words"] = np.frombuffer(json.dumps(words).encode(), dtype=np.uint8)
    return arrays


def _from_arrays(arrays: Mapping[str, NDArray[Any]]) -> RankingData:
    """The inverse of `_to_arrays`; the tensors share the arrays' memory."""
    words = json.loads(arrays["words"].tobytes())
    parts: dict[str, Any] = dict(zip(words, map(as_tuples, words.values()), strict=True))
    for name in set(_TENSORS) & set(arrays):
        parts[name] = torch.from_numpy(arrays[name])
    return RankingData(**parts)
