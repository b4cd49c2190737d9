"""Writing files so that a reader sees the old content or the new, never half of it.

A file is written beside its place, flushed to the disk, and renamed. Its writer holds a lock on it for as long as it
lives; what a killed writer left behind therefore has no lock, and the next writer in that folder removes it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.checks import DataError, FileError, NoSpaceError

SUFFIX = ".lgmml-tmp"  # of files on their way to their place
_MOST_TIMES, _MOST_UNPACKED = 100, 1 << 26  # bytes of a compressed file, both as a multiple and in all
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(path: str | os.PathLike[str], *, size: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it takes ``path``'s place, on failure it is removed.

    The content is on the disk before the name changes: the earlier file survives a kill or a power cut at any moment.
    Two processes may do this for the same path at once: each writes a file of its own, and the last one wins.
    ``size``, of the content in bytes where it is known, is named when the disk is full.

    Raises:
        NoSpaceError: the disk is full, or a quota or limit is reached.
        FileError: ``path`` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise FileError(f"{target} is a folder, and a file is to be written there; move it away")
    written = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent)
        with _temporary(target) as temporary:
            try:
                yield temporary
                _publish(temporary, target)
            except OSError:
                with suppress(OSError):
                    written = temporary.stat().st_size
                raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise NoSpaceError(_no_room(target, error, size, written)) from error


def sweep(folder: Path) -> None:
    """Remove what killed writers left in a folder; files whose writer is alive are locked, and stay."""
    for left in folder.glob(f".*{SUFFIX}"):
        # One that is gone, belongs to somebody else or lies where nothing can be locked is left alone.
        with suppress(OSError), left.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole text file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], *parts: bytes | memoryview) -> None:
    """Write a whole binary file, part after part, atomically."""
    with replacing(path, size=sum(map(len, parts))) as temporary, temporary.open("wb") as stream:
        stream.writelines(parts)


def npy_bytes(array: NDArray[Any]) -> bytes:
    """The content of an ``.npy`` file; numpy's own writing to a file does not say why it stopped on a full disk."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def scratch_array(shape: tuple[int, ...], dtype: Any, folder: Path | None = None) -> NDArray[Any]:
    """An array of zeros in a file without a name: memory holds only the part in use, and the rest goes with it."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".scratch.") as file:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        file.truncate(max(1, size))
        if not size:
            return np.zeros(shape, dtype)
        return np.memmap(file.name, dtype, "r+", shape=shape)


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A new, locked file beside its target; removed unless it was renamed."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=SUFFIX, dir=target.parent)
        path = Path(name)
        with suppress(OSError):  # some network folders know no locks: nothing is swept there
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            break
        os.close(handle)  # somebody swept it in the moment before it was locked
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _publish(temporary: Path, target: Path) -> None:
    _sync(temporary)
    umask = os.umask(0)
    os.umask(umask)
    temporary.chmod(0o666 & ~umask)  # mkstemp makes files only their owner can read
    temporary.replace(target)
    with suppress(PermissionError):  # a folder that may be written to but not read
        _sync(target.parent)  # else a power cut could undo the renaming


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _no_room(target: Path, error: OSError, size: int | None, written: int) -> str:
    from rich.filesize import decimal

    needs = f"more than {decimal(written)}"
    if size is not None:
        needs = decimal(size)
    free = decimal(shutil.disk_usage(target.parent).free)
    return f"no room for {target} ({os.strerror(error.errno or 0)}): it needs {needs}, and {free} are free there"


def check_unpacked(name: str, packed: int, unpacked: int) -> None:
    """Refuse a compressed file that unpacks to a multiple of its size that no data has.

    Raises:
        DataError: more than 64 MiB, and more than 100 times the size of the file.
    """
    if unpacked > max(_MOST_UNPACKED, _MOST_TIMES * packed):
        times = f"{packed:,} bytes unpack to more than {_MOST_TIMES} times as many"
        raise DataError(f"{name}: {times}; unpack it yourself if it is meant to be so")


def check_memory(name: str, rows: int, width: int, itemsize: int) -> None:
    """Refuse rows that cannot fit into the memory of this machine."""
    needed, there = rows * width * itemsize, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        room = f"{needed / 2**30:.1f} GiB of memory, and this machine has {there / 2**30:.1f}"
        hint = "data=folder reads less at a time"
        raise DataError(f"{name}: {rows:,} documents of {width:,} features need {room}; {hint}")


def as_tuples(value: Any) -> Any:
    """What was read from JSON, its lists as tuples."""
    if isinstance(value, list):
        return tuple(map(as_tuples, value))
    return value
