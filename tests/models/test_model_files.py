"""The bytes of model files and checkpoints: what stands where, what the digest covers, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lgmml_torch.checks import CheckpointError
from lgmml_torch.models import storage
from lgmml_torch.models.storage import (
    FORMAT,
    check_header,
    check_seal,
    is_archive,
    load_checkpoint,
    load_sealed,
    read_model,
    seal_of,
    sealed,
    tensors_digest,
    write_checkpoint,
    write_model,
)

TENSORS = {
    "b.half": torch.arange(3, dtype=torch.float16),
    "wide": torch.tensor([[1.5, -2.0]], dtype=torch.float64),
    "a.flags": torch.tensor([True, False, True]),
    "whole": torch.arange(4),
    "single": torch.tensor(2.5),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "none": torch.zeros(0, 3),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "brief": torch.ones(2, dtype=torch.bfloat16),
    "small": torch.ones(3, dtype=torch.int32),
}
EMPTY_ZIP = b"PK\5\6" + bytes(18)


def header_of(file: Path) -> tuple[dict[str, Any], bytes, bytes]:
    """The description, its text, and the bytes behind it."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 : 8 + length], content[8 + length :]


class TestModelFiles:
    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        write_model(tmp_path / "m", {"kernel": 'a "sha256":"b"', "numbers": [1, 2.5, None]}, TENSORS)
        spec, tensors = read_model(tmp_path / "m")
        assert spec == {"kernel": 'a "sha256":"b"', "numbers": [1, 2.5, None]}
        assert tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name], tensor)
        assert load_file(tmp_path / "m").keys() == TENSORS.keys()  # any reader of the format takes it

    def test_the_header_says_what_the_file_is(self, tmp_path: Path) -> None:
        write_model(tmp_path / "m", {"x": 1}, TENSORS)
        described, _, _ = header_of(tmp_path / "m")
        metadata = described["__metadata__"]
        assert (metadata["format"], metadata["version"], metadata["spec"]) == ("lgmml-torch", "1", '{"x": 1}')

    def test_wide_numbers_come_first_and_names_decide_among_equals(self, tmp_path: Path) -> None:
        write_model(tmp_path / "m", {}, TENSORS)
        described, _, behind = header_of(tmp_path / "m")
        names = [name for name in described if name != "__metadata__"]
        assert names == [
            "whole", "wide", "none", "single", "small", "turned", "b.half", "brief", "a.flags", "bytes",
        ]  # fmt: skip
        end = 0
        for name in names:
            start, end = described[name]["data_offsets"][0], described[name]["data_offsets"][1]
            assert start % TENSORS[name].element_size() == 0
            assert end - start == TENSORS[name].nbytes
        assert end == len(behind)

    @pytest.mark.parametrize("length", range(16))
    def test_the_header_fills_whole_words_and_no_more(self, length: int, tmp_path: Path) -> None:
        write_model(tmp_path / "m", {"x": "y" * length}, {"t": torch.ones(1)})
        _, text, _ = header_of(tmp_path / "m")
        assert len(text) % 8 == 0
        assert len(text) - len(text.rstrip()) < 8

    def test_the_digest_is_that_of_the_file_with_zeros_in_its_place(self, tmp_path: Path) -> None:
        write_model(tmp_path / "m", {"x": 1}, TENSORS)
        written = header_of(tmp_path / "m")[0]["__metadata__"]["sha256"]
        content = (tmp_path / "m").read_bytes()
        assert content.count(written.encode()) == 1
        assert hashlib.sha256(content.replace(written.encode(), b"0" * 64)).hexdigest() == written

    def test_any_changed_byte_of_the_tensors_is_noticed(self, tmp_path: Path) -> None:
        write_model(tmp_path / "m", {}, {"t": torch.ones(3, dtype=torch.uint8)})
        content = (tmp_path / "m").read_bytes()
        for place in (-3, -2, -1):
            changed = bytearray(content)
            changed[place] = 7
            (tmp_path / "m").write_bytes(changed)
            with pytest.raises(CheckpointError, match="is damaged: its bytes do not match their checksum"):
                read_model(tmp_path / "m")

    def test_only_the_header_is_held_while_the_digest_is_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_model(tmp_path / "m", {}, {"t": torch.ones(100, dtype=torch.float64)})
        seen, real = [], storage._digest

        def counted(start: bytes, stream: Any, count: int) -> str:
            seen.append(count)
            return real(start, stream, count)

        monkeypatch.setattr(storage, "_digest", counted)
        read_model(tmp_path / "m")
        assert seen == [800]

    def test_a_file_without_a_digest_is_of_an_earlier_release(self, tmp_path: Path) -> None:
        save_file({"t": torch.ones(1)}, tmp_path / "m", metadata={"format": FORMAT, "version": "1", "spec": "{}"})
        assert read_model(tmp_path / "m")[0] == {}

    def test_unknown_entries_and_missing_descriptions_are_refused(self, tmp_path: Path) -> None:
        known = {"format": FORMAT, "version": "1", "spec": "{}"}
        for metadata, message in (
            ({**known, "more": "x", "also": "y"}, r"its header has the unknown entries \['also', 'more'\]"),
            ({"format": FORMAT, "version": "1"}, r"its description cannot be read \('spec'\)"),
            ({**known, "spec": "{"}, "its description cannot be read"),
            ({**known, "format": "other"}, "was not written by this package"),
            (None, "was not written by this package"),
        ):
            save_file({"t": torch.ones(1)}, tmp_path / "m", metadata=metadata)
            with pytest.raises(CheckpointError, match=message):
                read_model(tmp_path / "m")

    def test_there_must_be_a_file(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "none"):
            with pytest.raises(CheckpointError, match=r"^no model file at "):
                read_model(path)
            with pytest.raises(CheckpointError, match=r"^no checkpoint at "):
                load_checkpoint(path)


class Recorded(io.BytesIO):
    """Remembers how much was read at once."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.most = 0

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self.most = max(self.most, len(found))
        return found


CONTENT: dict[str, Any] = {
    FORMAT: {"version": 1, "spec": {"x": 1}},
    "state_dict": {"model.t": torch.ones(2), "loss.u": torch.ones(1)},
}


class TestCheckpoints:
    def whole(self, content: Any = None) -> bytes:
        return b"".join(sealed(CONTENT if content is None else content))

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "last.ckpt", CONTENT)
        found = load_checkpoint(tmp_path / "last.ckpt")
        assert found[FORMAT] == CONTENT[FORMAT]
        spec, tensors = read_model(tmp_path / "last.ckpt")
        assert spec == {"x": 1}
        assert list(tensors) == ["t"]  # the model's own, under their own names
        assert torch.equal(tensors["t"], torch.ones(2))

    def test_the_digest_is_the_comment_of_a_sound_archive(self, tmp_path: Path) -> None:
        whole = self.whole()
        digest = whole[-64:].decode()
        assert hashlib.sha256(whole[: -len(b"lgmml-torch sha256 ") - 64]).hexdigest() == digest
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            assert archive.comment == f"lgmml-torch sha256 {digest}".encode()
        (tmp_path / "c").write_bytes(whole)
        assert seal_of(tmp_path / "c") == digest
        assert is_archive(tmp_path / "c")

    @pytest.mark.parametrize("place", [0, 1, 40, -1, -64, -70, -84])
    def test_any_changed_byte_is_noticed(self, place: int) -> None:
        changed = bytearray(self.whole())
        changed[place] ^= 1
        with pytest.raises(
            CheckpointError, match=r"^x is not a checkpoint of this package, or its bytes were changed$"
        ):
            check_seal(io.BytesIO(changed), "x")

    @pytest.mark.parametrize("required", [False, True])
    def test_the_stream_is_at_its_beginning_afterwards(self, required: bool) -> None:
        stream = io.BytesIO(self.whole())
        check_seal(stream, "x", required=required)
        assert stream.tell() == 0
        assert load_sealed(stream, "x", required=required)[FORMAT]["version"] == 1

    def test_a_digest_may_be_missing_unless_it_is_required(self) -> None:
        buffer = io.BytesIO()
        torch.save(CONTENT, buffer)
        buffer.seek(5)
        check_seal(buffer, "x")
        assert buffer.tell() == 0
        assert load_sealed(buffer, "x")[FORMAT]["version"] == 1
        for check in (check_seal, load_sealed):
            with pytest.raises(CheckpointError, match="or its bytes were changed"):
                check(buffer, "x", required=True)

    def test_a_cut_digest_is_no_missing_one(self) -> None:
        whole = self.whole()
        for cut in (whole[:-83], whole[:-1], whole[:-64], whole[:50], b"", bytes(100), bytes(10)):
            with pytest.raises(CheckpointError, match="or its bytes were changed"):
                check_seal(io.BytesIO(cut), "x")

    def test_the_smallest_archive_has_no_digest(self) -> None:
        check_seal(io.BytesIO(EMPTY_ZIP), "x")
        with pytest.raises(CheckpointError, match="or its bytes were changed"):
            check_seal(io.BytesIO(EMPTY_ZIP), "x", required=True)

    def test_large_files_are_read_in_pieces(self) -> None:
        stream = Recorded(self.whole({FORMAT: {}, "large": torch.zeros(3 << 20, dtype=torch.uint8)}))
        check_seal(stream, "x", required=True)
        assert 0 < stream.most <= 2 << 20

    @pytest.mark.parametrize("rest", [0, 1, 2, 7])
    def test_pieces_of_any_size_give_the_same_digest(self, rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = self.whole()
        monkeypatch.setattr(storage, "_AT_ONCE", len(whole) - 83 - rest)
        check_seal(io.BytesIO(whole), "x", required=True)

    def test_foreign_archives_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "c"
        for content in ([1], {"a": 1}, {FORMAT: "text"}, {FORMAT: None}):
            torch.save(content, file)
            with pytest.raises(CheckpointError, match="was not written by this package"):
                load_checkpoint(file)
        file.write_bytes(EMPTY_ZIP)
        with pytest.raises(CheckpointError, match="is not a checkpoint of this package, or it is damaged: "):
            load_checkpoint(file)

    def test_a_checkpoint_without_a_description_is_no_model(self, tmp_path: Path) -> None:
        for content in ({FORMAT: {"version": 1}}, {FORMAT: {"version": 1, "spec": {}}, "state_dict": [1]}):
            torch.save(content, tmp_path / "c")
            assert load_checkpoint(tmp_path / "c") == content
            with pytest.raises(CheckpointError, match="is damaged: its description cannot be read"):
                read_model(tmp_path / "c")

    def test_a_checkpoint_of_a_newer_version_is_refused(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "c", {FORMAT: {"version": 2, "spec": {}}})
        with pytest.raises(CheckpointError, match="has format version 2; this release reads up to 1"):
            load_checkpoint(tmp_path / "c")

    def test_objects_are_never_made(self, tmp_path: Path) -> None:
        torch.save({FORMAT: {"version": 1}, "place": PurePosixPath("somewhere")}, tmp_path / "c")
        with pytest.raises(CheckpointError, match="is not a checkpoint of this package, or it is damaged: "):
            load_checkpoint(tmp_path / "c")

    def test_an_archive_with_a_damaged_end_is_none(self, tmp_path: Path) -> None:
        locator = struct.pack("<4sLQL", b"PK\x06\x07", 1, 0, 1)  # on the second of several disks
        (tmp_path / "c").write_bytes(locator + EMPTY_ZIP)
        assert not is_archive(tmp_path / "c")
        with pytest.raises(CheckpointError, match="is not a model file, or it is damaged"):
            read_model(tmp_path / "c")

    def test_the_end_of_a_short_or_strange_file(self, tmp_path: Path) -> None:
        (tmp_path / "c").write_bytes(b"short")
        assert seal_of(tmp_path / "c") == "short"
        (tmp_path / "c").write_bytes(b"a" * 10 + b"\xff" * 64)
        assert seal_of(tmp_path / "c") == "\ufffd" * 64


@pytest.mark.parametrize("version", [1, "1", 0, "0"])
def test_versions_up_to_this_ones_are_read(version: object) -> None:
    check_header("m", FORMAT, version)


@pytest.mark.parametrize("version", [2, "10", "x", None, -1])
def test_other_versions_are_not(version: object) -> None:
    with pytest.raises(CheckpointError, match=f"^m has format version {version}; this release reads up to 1$"):
        check_header("m", FORMAT, version)


class TestDigestOfTensors:
    def test_it_is_that_of_types_shapes_and_values_in_order(self) -> None:
        tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor([True])]
        naive = hashlib.blake2b(digest_size=16)
        for tensor in tensors:
            naive.update(f"{tensor.numpy().dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        assert tensors_digest(tensors) == naive.hexdigest()
        assert len(naive.hexdigest()) == 32

    def test_each_of_them_matters(self) -> None:
        base = torch.zeros(2, 3)
        others = [base.reshape(3, 2), base.int(), base + 1, torch.zeros(2, 4)]
        found = {tensors_digest([tensor]) for tensor in (base, *others)}
        assert len(found) == 5
        assert tensors_digest([base, base + 1]) != tensors_digest([base + 1, base])
        assert tensors_digest([base.T.contiguous().T]) == tensors_digest([base])
