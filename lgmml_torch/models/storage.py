"""Model files: safetensors with a versioned description, or the checkpoint of a training run.

Both hold tensors and primitives only. Reading never executes anything: safetensors cannot, and Lightning's
checkpoints are read with ``weights_only=True``.

Both carry the SHA-256 of all their other bytes, in order, so that any change is noticed before a byte is trusted. In a
model file it is an entry of the metadata, taken while its own place holds zeros; in a checkpoint, which is a zip
archive, it is the archive's comment. Files of release 0.1 have none and are read as they are.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lgmml_torch.checks import CheckpointError
from lgmml_torch.files import write_bytes

FORMAT = "lgmml-torch"
VERSION = 1
NAMES = {  # what safetensors calls the precisions that models compute in
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
MODEL_PREFIX = "model."  # where the Lightning module keeps the model

_ENTRIES = {"format", "version", "spec", "sha256"}  # of a model file's metadata
_UNSEALED = "0" * 64
_SEAL = f"{FORMAT} sha256 ".encode()  # what the comment of a checkpoint begins with
_ZIP_END = 22  # bytes of the record that ends an archive, the last two of which tell how long the comment is
_AT_ONCE = 1 << 20  # bytes hashed in one call


def write_model(path: str | os.PathLike[str], spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a model file atomically."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    entries = {"format": FORMAT, "version": str(VERSION), "spec": json.dumps(spec), "sha256": _UNSEALED}
    header, parts = _safetensors(contiguous, entries)
    digest = hashlib.sha256(header)
    for part in parts:
        digest.update(part)
    write_bytes(path, _with_digest(header, _UNSEALED, digest.hexdigest()), *parts)


def _safetensors(tensors: Mapping[str, Tensor], entries: Mapping[str, str]) -> tuple[bytes, list[memoryview]]:
    """The parts of a safetensors file: what stands before the tensors, and their bytes where they are.

    The library's own writer would copy them all, and a table of Φ may be mapped from a file larger than memory.
    """
    described: dict[str, Any] = {"__metadata__": dict(entries)}
    parts, end = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):  # aligned
        start, end = end, end + tensor.nbytes
        described[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        if tensor.nbytes:
            parts.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, parts


def write_checkpoint(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a training checkpoint, of tensors and primitives, atomically."""
    write_bytes(path, *sealed(content))


def sealed(content: Mapping[str, Any]) -> tuple[memoryview, bytes]:
    """Tensors and primitives as torch writes them, and the digest that goes behind."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    buffer.seek(-2, os.SEEK_END)
    buffer.write((len(_SEAL) + len(_UNSEALED)).to_bytes(2, "little"))
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    return buffer.getbuffer(), _SEAL + digest.encode()


def read_model(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a model file or training checkpoint.

    Raises:
        CheckpointError: when there is no such file, or it is foreign, damaged, or of a newer version.
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"no model file at {file}")
    return _read_checkpoint(file) if is_archive(file) else _read_safetensors(file)


def is_archive(file: str | os.PathLike[str]) -> bool:
    """Whether a file is a zip archive, as checkpoints are; one with a damaged end is none."""
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:
        return False


def _read_safetensors(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as content:
            header = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a model file, or it is damaged: {error}") from error
    check_header(file, header.get("format"), header.get("version"))
    _check_model_digest(file, header)
    try:
        return json.loads(header["spec"]), check_tensors(file, tensors)
    except (KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} is damaged: its description cannot be read ({error})") from error


def _read_checkpoint(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    content = load_checkpoint(file)
    header, state = content[FORMAT], content.get("state_dict", {})
    if "spec" not in header or not isinstance(state, Mapping):
        raise CheckpointError(f"{file} is damaged: its description cannot be read")
    tensors = {key.removeprefix(MODEL_PREFIX): value for key, value in state.items() if key.startswith(MODEL_PREFIX)}
    return header["spec"], check_tensors(file, tensors)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The whole content of a training checkpoint, checked to be one of ours."""
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"no checkpoint at {file}")
    try:
        with file.open("rb") as stream:  # a path ending in .safetensors would be read as that
            content = load_sealed(stream, file)
    except CheckpointError:
        raise
    except Exception as error:  # PyTorch's reader relies on what it reads, and may fail in any way on damage
        raise CheckpointError(f"{file} is not a checkpoint of this package, or it is damaged: {error}") from error
    header = content.get(FORMAT) if isinstance(content, dict) else None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} was not written by this package")
    check_header(file, FORMAT, header.get("version"))
    return dict(content)


def load_sealed(stream: IO[bytes], name: object, *, required: bool = False) -> Any:
    """What `sealed` was given; the arguments are those of `check_seal`."""
    check_seal(stream, name, required=required)
    return torch.load(stream, map_location="cpu", weights_only=True)


def check_seal(stream: IO[bytes], name: object, *, required: bool = False) -> None:
    """Require that a checkpoint is, byte for byte, what was written; the stream is at its beginning afterwards.

    Args:
        stream: of the file.
        name: of the file, for the error.
        required: whether a file without a digest, as release 0.1 wrote them, is refused as well.

    Raises:
        CheckpointError: the bytes were changed.
    """
    length = len(_SEAL) + len(_UNSEALED)
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - length))
    end = stream.read()
    bare = end[-_ZIP_END:].startswith(b"PK\5\6") and end.endswith(b"\0\0")
    stream.seek(0)
    if (required or not bare) and end[-length:] != _SEAL + _digest(b"", stream, size - length).encode():
        raise CheckpointError(f"{name} is not a checkpoint of this package, or its bytes were changed")
    stream.seek(0)


def seal_of(file: Path) -> str:
    """The digest that stands at the end of a checkpoint; whether it is right is found out by reading it."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - len(_UNSEALED)))
        return stream.read().decode(errors="replace")


def _check_model_digest(file: Path, header: Mapping[str, str]) -> None:
    if unknown := header.keys() - _ENTRIES:
        raise CheckpointError(f"{file} is damaged: its header has the unknown entries {sorted(unknown)}")
    if (written := header.get("sha256")) is None:
        return  # of release 0.1
    with file.open("rb") as stream:
        size = file.stat().st_size
        length = stream.read(8)
        text = length + stream.read(int.from_bytes(length, "little"))
        found = _digest(_with_digest(text, written, _UNSEALED), stream, size - len(text))
    if found != written:
        raise CheckpointError(f"{file} is damaged: its bytes do not match their checksum")


def _with_digest(header: bytes, old: str, new: str) -> bytes:
    """The header with another digest; quotes within the description are escaped, so only one place can match."""
    return header.replace(f'"sha256":"{old}"'.encode(), f'"sha256":"{new}"'.encode())


def _digest(start: bytes, stream: IO[bytes], count: int) -> str:
    """Of some bytes, and of as many as asked for that follow in the stream."""
    digest = hashlib.sha256(start)
    while count > 0 and (block := stream.read(min(count, _AT_ONCE))):
        digest.update(block)
        count -= len(block)
    return digest.hexdigest()


def check_header(file: Path | str, name: object, version: object) -> None:
    """Require this package's format, of a version this release can read."""
    if name != FORMAT:
        raise CheckpointError(f"{file} was not written by this package")
    if not re.fullmatch("[0-9]{1,9}", str(version)) or int(str(version)) > VERSION:
        raise CheckpointError(f"{file} has format version {str(version)[:20]}; this release reads up to {VERSION}")


def check_tensors(file: Path, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Require tensors in a precision that models compute in, which the small floats of 8 bits are not."""
    for name, tensor in tensors.items():
        found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        if found not in NAMES:
            raise CheckpointError(f"{file} is damaged: {name} holds {found}, which no model of this package does")
    return dict(tensors)


def tensors_digest(tensors: Iterable[Tensor]) -> str:
    """A fingerprint of types, shapes and values, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        array = tensor.detach().cpu().contiguous().numpy()
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()
