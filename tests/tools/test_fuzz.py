"""The fuzzer: every seed is a file that its reader takes, and a reader that differs from the naive one is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lgmml_torch.checks import LGMMLError
from tests.reference import letor as naive
from tools.fuzz import LETOR, TARGETS, read_letor


def test_seeds_are_read_and_what_does_not_begin_like_them_is_refused(tmp_path: Path) -> None:
    for make, read, ending in TARGETS.values():
        file = tmp_path / f"file.{ending}"
        file.write_bytes(make())
        read(file)
        file.write_bytes(b"\0" + make())
        with pytest.raises(LGMMLError):
            read(file)


FOUND = Path(__file__).parent.parent / "fixtures" / "fuzz"


def test_files_that_once_crashed_a_reader_are_refused() -> None:
    kinds = {"parquet": "parquet", "arrow": "arrow", "ckpt": "checkpoint", "safetensors": "model"}
    files = sorted(FOUND.iterdir())
    assert len(files) >= 9
    for file in files:
        with pytest.raises(LGMMLError, match=r"damaged|not a |column|fewer rows|does not fit"):
            TARGETS[kinds[file.suffix[1:]]][1](file)


def test_a_difference_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "file.txt", naive.read
    file.write_bytes(LETOR)
    monkeypatch.setattr(naive, "read", lambda data: read(data.replace(b"0.25", b"0.26")))
    with pytest.raises(AssertionError, match="different numbers"):
        read_letor(file)
    monkeypatch.setattr(naive, "read", lambda data: read(b""))
    with pytest.raises(AssertionError, match="the naive reader does not"):
        read_letor(file)
