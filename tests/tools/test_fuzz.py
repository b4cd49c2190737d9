"""The fuzzer: every seed is a file that its reader takes, and a reader that differs from the naive one is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lgmml_torch.checks import LGMMLError
from tests.reference import letor as naive
from tools.fuzz import LETOR, TARGETS, read_letor


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read_and_what_does_not_begin_like_them_is_refused(name: str, tmp_path: Path) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow")
    make, read, ending = TARGETS[name]
    file = tmp_path / f"file.{ending}"
    file.write_bytes(make())
    read(file)
    file.write_bytes(b"\0" + make())
    with pytest.raises(LGMMLError):
        read(file)


FOUND = Path(__file__).parent.parent / "fixtures" / "fuzz"


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("parquet", "fewer-rows.parquet", "it has fewer rows than it says"),
        ("parquet", "no-text.parquet", "not a readable Parquet file: 'utf-8' codec can't decode"),
        ("parquet", "other-rows.parquet", "the file is damaged: it has 0 rows, and says 2"),
        ("arrow", "places.arrow", "not a readable Arrow file: In column 0: Invalid: Buffer #1 too small"),
        ("arrow", "no-text.arrow", "not a readable Arrow file: 'utf-8' codec can't decode"),
        ("arrow", "no-entries.arrow", "column 'features' must hold features, got lists without entries"),
        ("checkpoint", "stack.ckpt", "not a checkpoint of this package, or it is damaged"),
        ("checkpoint", "damaged-end.ckpt", "not a model file, or it is damaged"),
        ("model", "unknown-setting.safetensors", "its description does not fit"),
    ],
)
def test_what_was_found_is_refused_in_a_sentence(name: str, file: str, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        TARGETS[name][1](FOUND / file)


def test_a_difference_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "file.txt", naive.read
    file.write_bytes(LETOR)
    monkeypatch.setattr(naive, "read", lambda data: read(data.replace(b"0.25", b"0.26")))
    with pytest.raises(AssertionError, match="different numbers"):
        read_letor(file)
    monkeypatch.setattr(naive, "read", lambda data: read(b""))
    with pytest.raises(AssertionError, match="the naive reader does not"):
        read_letor(file)
