"""Model files that are made up to be read wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lgmml_torch.checks import CheckpointError
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, read_model


@pytest.mark.parametrize("version", ["9" * 5000, "²", "-1", "1.0", "", "１２"])
def test_a_version_that_is_no_small_number(version: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(1)}, file, metadata={"format": FORMAT, "version": version, "spec": "{}"})
    with pytest.raises(CheckpointError, match=r"has format version .{0,20}; this release reads up to 1"):
        read_model(file)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
def test_tensors_that_no_model_holds(kind: torch.dtype, tmp_path: Path) -> None:
    spec, tensors = read_model(next((Path(__file__).parent.parent / "fixtures").rglob("*.safetensors")))
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    file = tmp_path / "model.safetensors"
    metadata = {"format": FORMAT, "version": "1", "spec": json.dumps(spec)}
    save_file({**tensors, name: tensors[name].to(kind)}, file, metadata=metadata)
    with pytest.raises(CheckpointError, match=rf"is damaged: {name} holds {kind}"):
        LGMML.load(file)
    torch.save({FORMAT: {"version": 1, "spec": spec}, "state_dict": {f"model.{name}": "text"}}, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=f"is damaged: {name} holds str"):
        LGMML.load(tmp_path / "last.ckpt")
