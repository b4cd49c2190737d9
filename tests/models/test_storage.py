"""Model files and checkpoints: what is written is read, and what is foreign, damaged or newer is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lgmml_torch.checks import CheckpointError
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import (
    FORMAT,
    check_header,
    is_archive,
    load_checkpoint,
    read_model,
    tensors_digest,
    write_checkpoint,
    write_model,
)

TENSORS = {
    "b.half": torch.arange(3, dtype=torch.float16),
    "wide": torch.tensor([[1.5, -2.0]], dtype=torch.float64),
    "a.flags": torch.tensor([True, False, True]),
    "single": torch.tensor(2.5),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "none": torch.zeros(0, 3),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "brief": torch.ones(2, dtype=torch.bfloat16),
}
CONTENT: dict[str, Any] = {
    FORMAT: {"version": 1, "spec": {"x": 1}},
    "state_dict": {"model.t": torch.ones(2), "loss.u": torch.ones(1)},
}
EMPTY_ZIP = b"PK\5\6" + bytes(18)


def test_a_model_file_keeps_description_and_tensors(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    write_model(
        tmp_path / "m", {"kernel": 'a "b"', "numbers": [1, 2.5, None]}, {**TENSORS, "x": shared, "y": shared[1:]}
    )
    spec, tensors = read_model(tmp_path / "m")
    assert spec == {"kernel": 'a "b"', "numbers": [1, 2.5, None]}
    for name, tensor in {**TENSORS, "x": shared, "y": shared[1:]}.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert load_file(tmp_path / "m").keys() == tensors.keys()  # any reader of the format takes it


def test_a_checkpoint_keeps_its_content(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "last.ckpt", CONTENT)
    assert is_archive(tmp_path / "last.ckpt")
    assert load_checkpoint(tmp_path / "last.ckpt")[FORMAT] == CONTENT[FORMAT]
    spec, tensors = read_model(tmp_path / "last.ckpt")
    assert spec == {"x": 1}
    assert list(tensors) == ["t"]  # the model's own, under their own names
    assert torch.equal(tensors["t"], torch.ones(2))


def test_changed_tensors_and_descriptions_are_noticed(tmp_path: Path) -> None:
    write_model(tmp_path / "m", {"x": 1}, {"t": torch.ones(3, dtype=torch.uint8)})
    content = (tmp_path / "m").read_bytes()
    for old, new in ((b"\1\1\1", b"\1\1\7"), (b'\\"x\\": 1', b'\\"x\\": 2'), (b'"t":', b'"s":')):
        assert old in content
        (tmp_path / "m").write_bytes(content.replace(old, new))
        with pytest.raises(CheckpointError, match="is damaged: its content does not match its checksum"):
            read_model(tmp_path / "m")
    write_checkpoint(tmp_path / "c", {**CONTENT, "bytes": torch.full((9,), 77, dtype=torch.uint8)})
    (tmp_path / "c").write_bytes((tmp_path / "c").read_bytes().replace(b"M" * 9, b"M" * 8 + b"N"))
    with pytest.raises(CheckpointError, match=r"or it is damaged: the CRC-32 of .*data/\d does not match"):
        load_checkpoint(tmp_path / "c")


def test_unknown_entries_and_missing_descriptions_are_refused(tmp_path: Path) -> None:
    known = {"format": FORMAT, "version": "1", "spec": "{}"}
    for metadata, message in (
        ({**known, "more": "x", "also": "y"}, r"its header has the unknown entries \['also', 'more'\]"),
        ({"format": FORMAT, "version": "1"}, r"its description cannot be read \('spec'\)"),
        ({**known, "spec": "{"}, "its description cannot be read"),
        ({**known, "version": "2"}, "its content does not match its checksum"),
        ({**known, "format": "other"}, "was not written by this package"),
        (None, "was not written by this package"),
    ):
        save_file({"t": torch.ones(1)}, tmp_path / "m", metadata=metadata)
        with pytest.raises(CheckpointError, match=message):
            read_model(tmp_path / "m")
    save_file({"t": torch.ones(1)}, tmp_path / "m", metadata=known)  # as release 0.1 wrote it
    assert read_model(tmp_path / "m")[0] == {}


def test_there_must_be_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=r"^no model file at "):
            read_model(path)
        with pytest.raises(CheckpointError, match=r"^no checkpoint at "):
            load_checkpoint(path)


def test_foreign_archives_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c"
    for content in ([1], {"a": 1}, {FORMAT: "text"}, {FORMAT: None}):
        torch.save(content, file)
        with pytest.raises(CheckpointError, match="was not written by this package"):
            load_checkpoint(file)
    torch.save({FORMAT: {"version": 1}, "place": PurePosixPath("somewhere")}, file)  # no object is ever made
    with pytest.raises(CheckpointError, match="is not a checkpoint of this package, or it is damaged: "):
        load_checkpoint(file)
    file.write_bytes(EMPTY_ZIP)
    with pytest.raises(CheckpointError, match="is not a checkpoint of this package, or it is damaged: "):
        load_checkpoint(file)
    file.write_bytes(struct.pack("<4sLQL", b"PK\x06\x07", 1, 0, 1) + EMPTY_ZIP)  # on the second of several disks
    assert not is_archive(file)
    with pytest.raises(CheckpointError, match="is not a model file, or it is damaged"):
        read_model(file)
    for content in ({FORMAT: {"version": 1}}, {FORMAT: {"version": 1, "spec": {}}, "state_dict": [1]}):
        torch.save(content, file)
        assert load_checkpoint(file) == content
        with pytest.raises(CheckpointError, match="is damaged: its description cannot be read"):
            read_model(file)


def test_versions_up_to_this_ones_are_read(tmp_path: Path) -> None:
    for version in (1, "1", 0, "2"):
        check_header("m", FORMAT, version)
    for version in (3, "10", "x", None, -1, "9" * 5000, "²", "1.0", "", "１２"):
        with pytest.raises(CheckpointError, match=r"^m has format version .{0,20}; this release reads up to 2$"):
            check_header("m", FORMAT, version)
    write_checkpoint(tmp_path / "c", {FORMAT: {"version": 3, "spec": {}}})
    with pytest.raises(CheckpointError, match="has format version 3; this release reads up to 2"):
        load_checkpoint(tmp_path / "c")


def test_tensors_that_no_model_holds(tmp_path: Path) -> None:
    spec, tensors = read_model(next((Path(__file__).parent.parent / "fixtures").rglob("model.safetensors")))
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    file = tmp_path / "model.safetensors"
    metadata = {"format": FORMAT, "version": "1", "spec": json.dumps(spec)}
    for kind in (torch.float8_e4m3fn, torch.complex64):
        save_file({**tensors, name: tensors[name].to(kind)}, file, metadata=metadata)
        with pytest.raises(CheckpointError, match=rf"is damaged: {name} holds {kind}"):
            LGMML.load(file)
    torch.save({FORMAT: {"version": 1, "spec": spec}, "state_dict": {f"model.{name}": "text"}}, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=f"is damaged: {name} holds str"):
        LGMML.load(tmp_path / "last.ckpt")


def test_a_digest_of_tensors_is_of_types_shapes_and_values_in_order() -> None:
    base = torch.zeros(2, 3)
    others = [base.reshape(3, 2), base.int(), base + 1, torch.zeros(2, 4)]
    assert len({tensors_digest([tensor]) for tensor in (base, *others)}) == 5
    assert tensors_digest([base, base + 1]) != tensors_digest([base + 1, base])
    assert tensors_digest([base.T.contiguous().T]) == tensors_digest([base])
