"""The file format of the cache: named arrays behind a JSON header, every byte of which is accounted for.

Layout: 8 bytes magic · 8 bytes length of the header · 32 bytes digest of the header · header · arrays. The arrays start
at multiples of 64 bytes. Their checksum is the digest of the sums, modulo 2⁶⁴, of the 64-bit words of each block of
64 KiB: one changed byte changes the sum of its block, and the sums run at the speed of memory, which a
cryptographic hash of the data itself would not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import CheckpointError

VERSION = 1
_MAGIC = b"LGMMLarr"
_FIXED = 48
_ALIGNMENT = 64
_BLOCK_WORDS = 8192


class OtherVersionError(CheckpointError):
    """The file is intact, but was written in another version of the format."""


def write(
    path: Path,
    key: str,
    spec: Mapping[str, tuple[tuple[int, ...], Any]],
    fill: Callable[[dict[str, NDArray[Any]]], None],
) -> None:
    """Create a file with arrays of the given shapes and types and let ``fill`` write into them."""
    arrays, size = [], 0
    for name, (shape, dtype) in spec.items():
        kind = np.dtype(dtype)
        if kind.hasobject or kind.names:
            raise CheckpointError(f"array {name!r} must hold plain numbers, got dtype {kind}")
        arrays.append({"name": name, "dtype": kind.str, "shape": list(shape), "start": size})
        size += -(-int(np.prod(shape, dtype=np.int64)) * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
    header = {"version": VERSION, "key": key, "arrays": arrays, "size": size, "sum": "0" * 64}
    start = _FIXED + len(_encode(header))
    with path.open("wb") as file:
        # Reserved now, so that a full disk is an error here and not a fault while writing through the map.
        os.posix_fallocate(file.fileno(), 0, start + size)
    if size:
        payload = np.memmap(path, np.uint8, "r+", offset=start, shape=(size,))
        fill(_views(payload, arrays))
        header["sum"] = _checksum(payload)
        payload.flush()
    else:
        fill(_views(np.empty(0, np.uint8), arrays))
        header["sum"] = _checksum(np.empty(0, np.uint8))
    text = _encode(header)
    with path.open("r+b") as file:
        file.write(_MAGIC + len(text).to_bytes(8, "little") + _digest(text) + text)


def read(path: Path, key: str) -> dict[str, NDArray[Any]]:
    """Map the arrays of a file, copy-on-write.

    Raises:
        CheckpointError: if the file is not what `write` made of this key, down to the last byte.
        OtherVersionError: if another version of this package wrote it.
    """
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
    if _checksum(payload) != header["sum"]:
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


def _checksum(payload: NDArray[np.uint8]) -> str:
    words = payload.view(np.ndarray).view(np.uint64)
    whole = len(words) - len(words) % _BLOCK_WORDS
    sums = words[:whole].reshape(-1, _BLOCK_WORDS).sum(axis=1, dtype=np.uint64)
    rest = words[whole:].sum(dtype=np.uint64)
    return _digest(sums.tobytes() + rest.tobytes()).hex()
