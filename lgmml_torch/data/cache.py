"""A folder of arrays that were expensive to make: parsed files, local distances.

An entry is named by what it was made from (content and settings), written beside its place and moved there when
complete, memory-mapped when read, and checked byte for byte before it is trusted. Nothing is pickled.

Layout of a file: 8 bytes magic · 8 bytes length of the header · 32 bytes digest of the header · header · arrays. The
arrays start at multiples of 64 bytes. The header holds the SHA-256 of all that follows it, in order, so any change is
noticed: a flipped bit, pages that have changed places, a block that stands twice. Processors have instructions for
this hash; it reads 1 to 1.5 GB/s with them and about 0.35 GB/s without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import CheckpointError, DataWarning
from lgmml_torch.files import SUFFIX, replacing, write_text
from lgmml_torch.ragged import RankingData

VERSION = 2
_MAGIC = b"LGMMLarr"
_FIXED = 48
_ALIGNMENT = 64
_AT_ONCE = 1 << 20  # bytes hashed in one call


class OtherVersionError(CheckpointError):
    """The file is intact, but was written in another version of the format."""


def write_arrays(
    path: Path,
    key: str,
    spec: Mapping[str, tuple[tuple[int, ...], Any]],
    fill: Callable[[dict[str, NDArray[Any]]], None],
) -> None:
    """Put a file with arrays of the given shapes and types in place when ``fill`` has written into them."""
    arrays, size = [], 0
    for name, (shape, dtype) in spec.items():
        kind = np.dtype(dtype)
        if kind.hasobject or kind.names:
            raise CheckpointError(f"array {name!r} must hold plain numbers, got dtype {kind}")
        arrays.append({"name": name, "dtype": kind.str, "shape": list(shape), "start": size})
        size += -(-int(np.prod(shape, dtype=np.int64)) * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
    header = {"version": VERSION, "key": key, "arrays": arrays, "size": size, "sha256": "0" * 64}
    start = _FIXED + len(_encode(header))
    with replacing(path, size=start + size) as temporary:
        with temporary.open("wb") as file:
            # Reserved now, so that a full disk is an error here and not a fault while writing through the map.
            os.posix_fallocate(file.fileno(), 0, start + size)
        payload: NDArray[np.uint8] = np.empty(0, np.uint8)
        if size:
            payload = np.memmap(temporary, np.uint8, "r+", offset=start, shape=(size,))
        fill(_views(payload, arrays))
        header["sha256"] = _content_digest(payload)
        if isinstance(payload, np.memmap):
            payload.flush()
        text = _encode(header)
        with temporary.open("r+b") as file:
            file.write(_MAGIC + len(text).to_bytes(8, "little") + _digest(text) + text)


def read_arrays(path: Path, key: str) -> dict[str, NDArray[Any]]:
    """Map the arrays of a file, copy-on-write.

    Raises:
        CheckpointError: if the file is not what `write_arrays` made of this key, down to the last byte.
        OtherVersionError: if another version of this package wrote it.
    """
    if path.is_dir():
        raise CheckpointError(f"cache file {path} is a folder")
    with path.open("rb") as file:
        fixed = file.read(_FIXED)
        length = int.from_bytes(fixed[8:16], "little")
        total = path.stat().st_size
        if len(fixed) < _FIXED or fixed[:8] != _MAGIC or _FIXED + length > total:
            raise CheckpointError(f"cache file {path} is damaged: no header")
        text = file.read(length)
    if _digest(text) != fixed[16:]:
        raise CheckpointError(f"cache file {path} is damaged: the header does not match its checksum")
    header = json.loads(text)
    if header["version"] != VERSION:
        raise OtherVersionError(f"cache file {path} has format {header['version']}, this is {VERSION}")
    if header["key"] != key:
        raise CheckpointError(f"cache file {path} was made for something else")
    start = _FIXED + length
    if total != start + header["size"]:
        raise CheckpointError(f"cache file {path} is damaged: {total} bytes instead of {start + header['size']}")
    payload: NDArray[np.uint8] = np.empty(0, np.uint8)
    if header["size"]:
        payload = np.memmap(path, np.uint8, "c", offset=start, shape=(header["size"],))
    if _content_digest(payload) != header["sha256"]:
        raise CheckpointError(f"cache file {path} is damaged: the arrays do not match their checksum")
    return _views(payload, header["arrays"])


def _views(payload: NDArray[np.uint8], arrays: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    views = {}
    plain = payload.view(np.ndarray)
    for entry in arrays:
        kind, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        end = entry["start"] + int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        views[entry["name"]] = plain[entry["start"] : end].view(kind).reshape(shape)
    return views


def _encode(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return text + b" " * (-(_FIXED + len(text)) % _ALIGNMENT)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def _content_digest(payload: NDArray[np.uint8]) -> str:
    """Of what is mapped, so that what is checked is what is used; pages are read as they are needed."""
    digest, content = hashlib.sha256(), payload.view(np.ndarray).data
    for start in range(0, len(content), _AT_ONCE):
        digest.update(content[start : start + _AT_ONCE])
    return digest.hexdigest()


logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]
_ABANDONED = 24 * 3600.0  # seconds after which a temporary file without a lock has lost its writer
_SETTLED = 50_000_000  # nanoseconds: a file changed later than that before it was hashed may change unnoticed


def default_folder() -> Path:
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
            return read_arrays(path, _text(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OtherVersionError as error:
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
        self._sweep_unlocked()
        write_arrays(self.path(key), _text(key), spec, fill)

    def _sweep_unlocked(self) -> None:
        """Release 0.1 wrote temporary files without a lock; only their age tells that nobody needs them."""
        for old in self.folder.glob("*.tmp"):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > _ABANDONED:
                    old.unlink()

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
            with suppress(OSError):
                write_text(note, json.dumps({"seen": seen, "sha256": digest, "check": _check(seen, digest)}))
        return digest

    def clear(self) -> int:
        """Remove every entry and answer how many bytes that freed."""
        freed = 0
        for path in [each for end in (".lgc", ".source", ".tmp", SUFFIX) for each in self.folder.glob(f"*{end}")]:
            with suppress(FileNotFoundError):
                freed += path.stat().st_size
                path.unlink()
        return freed


def resolve(cache: bool | str | os.PathLike[str] | Cache) -> Cache | None:
    """The cache a loader's argument means: True is the default folder, False is none."""
    if isinstance(cache, bool):
        return Cache() if cache else None
    return cache if isinstance(cache, Cache) else Cache(cache)


def _check(seen: list[int], digest: str) -> str:
    return hashlib.blake2b(json.dumps([seen, digest]).encode(), digest_size=8).hexdigest()


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, allow_nan=False)


_TENSORS = ("features", "labels", "offsets", "order", "query_weights", "document_weights", "positions")
_DESCRIPTIONS = ("feature_names", "categories")  # of each feature, as JSON


def to_arrays(data: RankingData) -> dict[str, NDArray[Any]]:
    """Arrays of numbers only; query ids must all be whole numbers or all be strings without a newline."""
    arrays: dict[str, NDArray[Any]] = {}
    for name in _TENSORS:
        tensor = getattr(data, name)
        if tensor is not None:
            arrays[name] = tensor.numpy()
    if all(isinstance(qid, int) for qid in data.qids):
        arrays["qids"] = np.array(data.qids, dtype=np.int64)
    else:
        arrays["qid_text"] = _pack([str(qid) for qid in data.qids])
    if data.doc_ids is not None:
        arrays["doc_text"] = _pack(data.doc_ids)
    for name in _DESCRIPTIONS:
        if (value := getattr(data, name)) is not None:
            arrays[name] = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
    return arrays


def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> RankingData:
    """The inverse of `to_arrays`; the tensors share the arrays' memory."""
    tensors: dict[str, Any] = {name: torch.from_numpy(arrays[name]) for name in _TENSORS if name in arrays}
    qids: Sequence[Any] = arrays["qids"].tolist() if "qids" in arrays else _unpack(arrays["qid_text"])
    doc_ids = tuple(_unpack(arrays["doc_text"])) if "doc_text" in arrays else None
    about: dict[str, Any] = {
        name: tuple(tuple(entry) if isinstance(entry, list) else entry for entry in json.loads(arrays[name].tobytes()))
        for name in _DESCRIPTIONS
        if name in arrays
    }
    return RankingData(qids=tuple(qids), doc_ids=doc_ids, **tensors, **about)


def _pack(words: Sequence[str]) -> NDArray[np.uint8]:
    return np.frombuffer("\n".join(words).encode(), dtype=np.uint8)


def _unpack(text: NDArray[np.uint8]) -> list[str]:
    return text.tobytes().decode().split("\n")
