"""Atomic writes: the old file or the new one, whatever fails, and nothing left lying about."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lgmml_torch import files
from lgmml_torch.app import cli
from lgmml_torch.checks import DataWarning, FileError, NoSpaceError
from lgmml_torch.data.cache import Cache
from lgmml_torch.data.write import save_letor
from lgmml_torch.models.storage import write_checkpoint
from tests.doors import small_data, small_model
from tests.full_disk import room_for


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    files.write_bytes(target, b"n", memoryview(b"ew"))
    assert target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["a.txt"]
    umask = os.umask(0)
    os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~umask


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the renaming must not find an empty file, nor undo the renaming."""
    target, events = tmp_path / "a", []
    real = os.fsync

    def fsync(handle: int) -> None:
        place = Path(f"/proc/self/fd/{handle}").readlink()
        events.append(("folder" if place == tmp_path else place.read_bytes(), target.exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_bytes(target, b"content")
    assert events == [(b"content", False), ("folder", True)]


def test_what_killed_writers_left_is_swept_and_living_ones_are_spared(tmp_path: Path) -> None:
    dead, alive = (tmp_path / f".model.{word}{files.SUFFIX}" for word in ("dead", "alive"))
    foreign = tmp_path / ".other.tmp"
    for path in (dead, alive, foreign):
        path.write_text("half")
    with alive.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        files.write_text(tmp_path / "a", "1")
        assert names(tmp_path) == sorted([alive.name, foreign.name, "a"])
        with files.replacing(tmp_path / "b") as outer:
            files.write_text(tmp_path / "c", "2")  # sweeps while the outer one is being written
            outer.write_text("3")
        assert (tmp_path / "b").read_text() == "3"
    files.sweep(tmp_path)
    assert names(tmp_path) == sorted([foreign.name, "a", "b", "c"])
    files.sweep(tmp_path / "missing")


def test_a_file_swept_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = fcntl.flock, []

    def flock(handle: Any, how: int) -> None:
        if not calls:  # another process sweeps in the one moment in which it can
            next(iter(tmp_path.glob(f".*{files.SUFFIX}"))).unlink()
        calls.append(how)
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    files.write_text(tmp_path / "a", "1")
    assert len(calls) == 2
    assert names(tmp_path) == ["a"]


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(FileError, match="/a is a folder, and a file is to be written there; move it away"):
        files.write_text(tmp_path / "a", "1")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(("code", "call"), [(errno.ENOSPC, "fsync"), (errno.EDQUOT, "write"), (errno.ENOSPC, "rename")])
def test_no_room_is_one_sentence(code: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a"
    files.write_text(target, "old")

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    elif call == "rename":
        monkeypatch.setattr(Path, "replace", full)

    def write() -> None:
        if call == "write":
            with files.replacing(target) as temporary:
                temporary.write_bytes(b"12345")
                full()
        else:
            files.write_bytes(target, b"x" * 12_345)

    needs = "more than 5 bytes" if call == "write" else "12.3 kB"
    sentence = rf"no room for .*/a \({os.strerror(code)}\): it needs {needs}, and [\d.]+ .?B are free there$"
    with pytest.raises(NoSpaceError, match=sentence):
        write()
    assert names(tmp_path) == ["a"]
    assert target.read_text() == "old"


def test_other_failures_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error") as caught:
        files.write_text(tmp_path / "a", "1")
    assert not isinstance(caught.value, FileError)
    assert names(tmp_path) == []


def score(path: Path) -> None:
    """By the command, whose error comes back as such."""
    model, lists = path.parent / "in" / "model", path.parent / "in" / "lists.txt"
    if not lists.exists():
        small_model(mode="shared").save(model)
        save_letor(small_data(seed=7), lists)
    if cli.main(["score", str(model), str(lists), "-o", str(path)]):
        raise NoSpaceError("no room, said the command")


WRITERS: dict[str, Callable[[Path], object]] = {
    "model": lambda path: small_model(mode="shared").save(path),
    "checkpoint": lambda path: write_checkpoint(path, {"state_dict": {"a": np.arange(300).tolist()}}),
    "data": lambda path: save_letor(small_data(seed=7), path),
    "scores.txt": score,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_at_every_write(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever writing stops, the earlier file is whole and nothing else is there."""
    target, write = tmp_path / kind, WRITERS[kind]
    write(target)
    size, before = target.stat().st_size, names(tmp_path)
    target.write_bytes(b"the earlier one")
    limits = sorted({0, 1, size // 2, size - 1, *np.random.default_rng(0).integers(0, size, 2).tolist()})
    for limit in limits:
        with room_for(limit), pytest.raises(NoSpaceError, match="no room"):
            write(target)
        assert target.read_bytes() == b"the earlier one"
        assert names(tmp_path) == before
    if kind.startswith("scores"):
        told = capsys.readouterr().err.splitlines()
        assert len(told) == len(limits)
        assert all(line.startswith(f"lgmml: error: no room for {target} (File too large): it needs") for line in told)
    with room_for(size):
        write(target)
    assert target.stat().st_size == size


def test_a_cache_on_a_full_disk(tmp_path: Path) -> None:
    """The cache is optional: what cannot be kept is used from memory, and a warning says so."""
    cache, key, x = Cache(tmp_path), {"x": 1}, np.arange(1000)
    with room_for(4000), pytest.warns(DataWarning, match=r"cannot cache in .*: no room for .*: it needs 8\.\d kB, and"):
        assert np.array_equal(cache.get_or_build(key, lambda: {"x": x})["x"], x)

    def fill(arrays: dict[str, np.ndarray]) -> None:
        arrays["x"][...] = x

    with room_for(4000), pytest.warns(DataWarning, match="working without a cache"):
        assert np.array_equal(cache.get_or_fill(key, {"x": (x.shape, x.dtype)}, fill)["x"], x)
    assert names(tmp_path) == []
