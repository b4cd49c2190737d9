"""Model files: safetensors with a versioned description, or the checkpoint of a training run.

Both hold tensors and primitives only. Reading never executes anything: safetensors cannot, and Lightning's
checkpoints are read with ``weights_only=True``.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lgmml_torch.checks import CheckpointError
from lgmml_torch.files import write_bytes

FORMAT = "lgmml-torch"
VERSION = 1
MODEL_PREFIX = "model."  # where the Lightning module keeps the model


def write_model(path: str | os.PathLike[str], spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a model file atomically."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(contiguous, metadata={"format": FORMAT, "version": str(VERSION), "spec": json.dumps(spec)}))


def read_model(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a model file or training checkpoint.

    Raises:
        CheckpointError: when there is no such file, or it is foreign, damaged, or of a newer version.
    """
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"no model file at {file}")
    return _read_checkpoint(file) if zipfile.is_zipfile(file) else _read_safetensors(file)


def _read_safetensors(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as content:
            header = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not a model file, or it is damaged: {error}") from error
    check_header(file, header.get("format"), header.get("version"))
    try:
        return json.loads(header["spec"]), tensors
    except (KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} is damaged: its description cannot be read ({error})") from error


def _read_checkpoint(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    content = load_checkpoint(file)
    state = content.get("state_dict", {})
    tensors = {key.removeprefix(MODEL_PREFIX): value for key, value in state.items() if key.startswith(MODEL_PREFIX)}
    return content[FORMAT]["spec"], tensors


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The whole content of a training checkpoint, checked to be one of ours."""
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"no checkpoint at {file}")
    try:
        with file.open("rb") as stream:  # a path ending in .safetensors would be read as that
            content = torch.load(stream, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} is not a checkpoint of this package, or it is damaged: {error}") from error
    header = content.get(FORMAT) if isinstance(content, dict) else None
    check_header(file, FORMAT if isinstance(header, dict) else None, (header or {}).get("version"))
    return dict(content)


def check_header(file: Path | str, name: object, version: object) -> None:
    """Require this package's format, of a version this release can read."""
    if name != FORMAT:
        raise CheckpointError(f"{file} was not written by this package")
    if not str(version).isdigit() or int(str(version)) > VERSION:
        raise CheckpointError(f"{file} has format version {version}; this release reads up to {VERSION}")
