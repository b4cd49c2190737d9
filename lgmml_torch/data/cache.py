"""A folder of arrays that were expensive to make: parsed files, local distances.

An entry is named by what it was made from (content and settings), written to a temporary file and moved into place
when complete, memory-mapped when read, and checked byte for byte before it is trusted. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import CheckpointError, DataWarning
from lgmml_torch.data import container

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]
_ABANDONED = 24 * 3600.0  # seconds after which a temporary file has lost its writer
_SETTLED = 50_000_000  # nanoseconds: a file changed later than that before it was hashed may change unnoticed


def default_folder() -> Path:
    """``LGMML_CACHE``, else ``lgmml_torch`` in the user's cache folder."""
    if chosen := os.environ.get("LGMML_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lgmml_torch"


class Cache:
    """Arrays on disk by key.

    A key is a mapping of JSON values: everything the arrays depend on. Use `content` for files they come from.

    >>> cache = Cache(tempfile.mkdtemp())
    >>> cache.get_or_build({"squares": 3}, lambda: {"y": np.arange(3) ** 2})["y"].tolist()
    [0, 1, 4]
    >>> cache.get_or_build({"squares": 3}, lambda: {})["y"].tolist()  # not built again
    [0, 1, 4]
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of an entry, whether it exists or not."""
        return self.folder / f"{hashlib.blake2b(_text(key).encode(), digest_size=16).hexdigest()}.lgc"

    def get(self, key: Mapping[str, Any]) -> Arrays | None:
        """The memory-mapped arrays of an entry; None if there is none, or after a warning, if it is damaged.

        The arrays may be written to; that changes them in this process's memory only.
        """
        path = self.path(key)
        try:
            return container.read(path, _text(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except container.OtherVersionError as error:
            logger.info("%s; building it again", error)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"{error}; building it again", DataWarning, stacklevel=3)
        return None

    def get_or_build(self, key: Mapping[str, Any], build: Callable[[], Mapping[str, NDArray[Any]]]) -> Arrays:
        """The arrays of an entry, built, stored and memory-mapped if they are not there.

        If the folder cannot be written to, the built arrays are handed out as they are, after a warning.
        """
        found = self.get(key)
        if found is not None:
            return found
        built = {name: np.asarray(array) for name, array in build().items()}
        spec = {name: (array.shape, array.dtype) for name, array in built.items()}

        def copy(targets: Arrays) -> None:
            for name, array in built.items():
                targets[name][...] = array

        try:
            self._write(key, spec, copy)
        except OSError as error:
            warnings.warn(f"cannot cache in {self.folder}: {error}", DataWarning, stacklevel=2)
            return built
        return self.get(key) or built

    def get_or_fill(
        self,
        key: Mapping[str, Any],
        spec: Mapping[str, tuple[tuple[int, ...], Any]],
        fill: Callable[[Arrays], None],
    ) -> Arrays:
        """As `get_or_build`, for arrays that need not fit into memory: ``fill`` writes into the mapped file.

        Args:
            key: what the arrays depend on.
            spec: shape and dtype of each array.
            fill: called with zeroed arrays of these shapes.
        """
        found = self.get(key)
        if found is not None:
            return found
        self._write(key, spec, fill)
        written = self.get(key)
        if written is None:
            raise CheckpointError(f"{self.path(key)} could not be read back after it was written")
        return written

    def _write(
        self, key: Mapping[str, Any], spec: Mapping[str, tuple[tuple[int, ...], Any]], fill: Callable[[Arrays], None]
    ) -> None:
        with _temporary(self.folder, self.path(key)) as file:
            container.write(file, _text(key), spec, fill)

    def content(self, path: str | os.PathLike[str]) -> str:
        """A hash of a file's bytes, remembered for as long as the file is not touched."""
        source = Path(path).resolve()
        note = self.folder / f"{hashlib.blake2b(str(source).encode(), digest_size=16).hexdigest()}.source"
        status = source.stat()
        seen = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        with suppress(OSError, ValueError, TypeError, KeyError):
            known = json.loads(note.read_text())
            digest = str(known["sha256"])
            if known["seen"] == seen and known["check"] == _check(seen, digest):
                return digest
        now = time.time_ns()
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if max(status.st_mtime_ns, status.st_ctime_ns) < now - _SETTLED:
            # A note that cannot be written only costs hashing the file again.
            with suppress(OSError), _temporary(self.folder, note) as temporary:
                temporary.write_text(json.dumps({"seen": seen, "sha256": digest, "check": _check(seen, digest)}))
        return digest

    def clear(self) -> int:
        """Remove every entry and answer how many bytes that freed."""
        freed = 0
        for path in [*self.folder.glob("*.lgc"), *self.folder.glob("*.source"), *self.folder.glob("*.tmp")]:
            with suppress(FileNotFoundError):
                freed += path.stat().st_size
                path.unlink()
        return freed


def resolve(cache: bool | str | os.PathLike[str] | Cache) -> Cache | None:
    """The cache a loader's argument means: True is the default folder, False is none."""
    if isinstance(cache, bool):
        return Cache() if cache else None
    return cache if isinstance(cache, Cache) else Cache(cache)


@contextmanager
def _temporary(folder: Path, destination: Path) -> Iterator[Path]:
    """A file beside its destination, moved there on success and removed on failure."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.tmp"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _ABANDONED:
                old.unlink()
    handle, name = tempfile.mkstemp(suffix=".tmp", dir=folder)
    os.close(handle)
    path = Path(name)
    try:
        yield path
        _sync(path)
        path.replace(destination)
        _sync(folder)
    finally:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check(seen: list[int], digest: str) -> str:
    return hashlib.blake2b(json.dumps([seen, digest]).encode(), digest_size=8).hexdigest()


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, allow_nan=False)
