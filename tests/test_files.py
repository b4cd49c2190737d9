from __future__ import annotations

from pathlib import Path

import pytest

from lgmml_torch import files


def test_success_replaces_and_failure_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "a.txt"
    files.write_text(target, "old")

    def fail() -> None:
        with files.replacing(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        fail()
    assert target.read_text() == "old"
    files.write_bytes(target, b"new")
    assert target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["a.txt"]
