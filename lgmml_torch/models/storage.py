"""Model files: safetensors with a versioned description, or the checkpoint of a training run.

Both hold tensors and primitives only. Reading never executes anything: safetensors cannot, and Lightning's
checkpoints are read with ``weights_only=True``.

Damage is noticed on load. A model file holds a SHA-256 of its description and tensors. A checkpoint is a zip archive,
which holds a CRC-32 of each entry; PyTorch does not compare it, so it is compared here. Files of release 0.1 have no
SHA-256 and are read as they are; files of release 0.2 have one over all bytes of the file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lgmml_torch.checks import CheckpointError
from lgmml_torch.files import write_bytes

FORMAT = "lgmml-torch"
VERSION = 2  # 1: releases 0.1 and 0.2
_MODEL_PREFIX = "model."  # where the Lightning module keeps the model

_DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
}  # fmt: skip
_ENTRIES = {"format", "version", "spec", "checksum", "sha256"}  # of a model file's metadata
_CHUNK = 1 << 20  # bytes hashed in one call


def write_model(path: str | os.PathLike[str], spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a model file atomically."""
    copies = {}
    for name, tensor in tensors.items():  # clones: safetensors refuses tensors that share memory
        copies[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    text = json.dumps(spec)
    metadata = {"format": FORMAT, "version": str(VERSION), "spec": text, "checksum": _checksum(text, copies)}
    write_bytes(path, save(copies, metadata))


def write_checkpoint(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a training checkpoint, of tensors and primitives, atomically."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    write_bytes(path, buffer.getvalue())


def read_model(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a model file or training checkpoint.

    Raises:
        CheckpointError: when there is no such file, or it is foreign, damaged, or of a newer version.
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"no model file at {file}")
    if is_archive(file):
        return _read_checkpoint(file)
    return _read_safetensors(file)


def is_archive(file: str | os.PathLike[str]) -> bool:
    """Whether a file is a zip archive, as checkpoints are; one with a damaged end is none."""
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:
        return False


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The whole content of a training checkpoint, checked to be one of ours.

    Raises:
        CheckpointError: when there is no such file, or it is foreign, damaged, or of a newer version.
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"no checkpoint at {file}")
    with file.open("rb") as stream:  # a path ending in .safetensors would be read as that
        content = load_archive(stream, file)
    header = content.get(FORMAT) if isinstance(content, dict) else None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} was not written by this package")
    check_header(file, FORMAT, header.get("version"))
    return dict(content)


def load_archive(stream: IO[bytes], name: object) -> Any:
    """What `write_checkpoint` wrote; ``name`` stands in the error.

    Raises:
        CheckpointError: the archive is damaged, or holds more than tensors and primitives.
    """
    check_archive(stream, name)
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch's reader relies on what it reads, and may fail in any way
        raise _damaged(name, error) from error


def check_archive(stream: IO[bytes], name: object) -> None:
    """Require the CRC-32 of every entry of a zip archive; the stream is at its beginning afterwards."""
    try:
        with zipfile.ZipFile(stream) as archive:
            wrong = archive.testzip()
    except Exception as error:  # the reader relies on the directory of the archive, which may be damaged
        raise _damaged(name, error) from error
    if wrong is not None:
        raise _damaged(name, f"the CRC-32 of {wrong} does not match")
    stream.seek(0)


def check_header(file: Path | str, name: object, version: object) -> None:
    """Require this package's format, of a version this release can read."""
    if name != FORMAT:
        raise CheckpointError(f"{file} was not written by this package")
    if not re.fullmatch("[0-9]{1,9}", str(version)) or int(str(version)) > VERSION:
        raise CheckpointError(f"{file} has format version {str(version)[:20]}; this release reads up to {VERSION}")


def plain_qid(qid: Hashable) -> int | float | str:
    """The id of a query as JSON has it."""
    if isinstance(qid, (int, float, str)):
        return qid
    return repr(qid)


def tensors_digest(tensors: Iterable[Tensor]) -> str:
    """A fingerprint of types, shapes and values, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        array = tensor.detach().cpu().contiguous().numpy()
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()


def _read_safetensors(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = {}
    try:
        with safe_open(file, framework="pt") as content:
            header = content.metadata() or {}
            for name in content.keys():  # noqa: SIM118 - not a mapping
                tensors[name] = content.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a model file, or it is damaged: {error}") from error
    check_header(file, header.get("format"), header.get("version"))
    if unknown := header.keys() - _ENTRIES:
        raise CheckpointError(f"{file} is damaged: its header has the unknown entries {sorted(unknown)}")
    _check_tensors(file, tensors)
    try:
        spec = json.loads(header["spec"])
    except (KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} is damaged: its description cannot be read ({error})") from error
    _check_checksum(file, header, tensors)
    return spec, tensors


def _read_checkpoint(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    content = load_checkpoint(file)
    header, state = content[FORMAT], content.get("state_dict", {})
    if "spec" not in header or not isinstance(state, Mapping):
        raise CheckpointError(f"{file} is damaged: its description cannot be read")
    tensors = {}
    for key, value in state.items():
        if key.startswith(_MODEL_PREFIX):
            tensors[key.removeprefix(_MODEL_PREFIX)] = value
    _check_tensors(file, tensors)
    return header["spec"], tensors


def _check_tensors(file: Path, tensors: Mapping[str, Any]) -> None:
    """Require tensors in a precision that models compute in, which the small floats of 8 bits are not."""
    for name, tensor in tensors.items():
        found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        if found not in _DTYPES:
            raise CheckpointError(f"{file} is damaged: {name} holds {found}, which no model of this package does")


def _checksum(spec: str, tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the description and of all tensors with their names, types and shapes."""
    digest = hashlib.sha256(spec.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.nbytes:
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_checksum(file: Path, header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    wrong = False
    if "checksum" in header or header["version"] == str(VERSION):
        wrong = header.get("checksum") != _checksum(header["spec"], tensors)
    elif "sha256" in header:
        wrong = header["sha256"] != _whole_digest(file, header["sha256"])
    if wrong:
        raise CheckpointError(f"{file} is damaged: its content does not match its checksum")


def _whole_digest(file: Path, written: str) -> str:
    """The SHA-256 of a file of release 0.2, taken while its own place in the header held zeros."""
    with file.open("rb") as stream:
        length = stream.read(8)
        text = length + stream.read(int.from_bytes(length, "little"))
        digest = hashlib.sha256(text.replace(f'"sha256":"{written}"'.encode(), f'"sha256":"{"0" * 64}"'.encode()))
        while block := stream.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _damaged(name: object, reason: object) -> CheckpointError:
    return CheckpointError(f"{name} is not a checkpoint of this package, or it is damaged: {reason}")
