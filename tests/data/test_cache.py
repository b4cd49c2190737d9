"""The cache: never trusts a damaged or stale file, never leaves half of one, and survives concurrent writers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lgmml_torch.checks import CheckpointError, DataWarning
from lgmml_torch.data import cache as cache_module
from lgmml_torch.data.cache import Cache, default_folder, from_arrays, resolve, to_arrays
from lgmml_torch.data.letor import load_letor
from lgmml_torch.files import SUFFIX
from lgmml_torch.ragged import RankingData

KEY = {"what": "test", "number": 1}
ARRAYS = {
    "x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "flag": np.array([True, False]),
    "none": np.empty((0, 4), dtype=np.int64),
    "scalar": np.array(2.5),
}


def assert_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert list(got) == list(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        assert np.array_equal(got[name], array)


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return ARRAYS


def test_builds_once_and_maps_after(tmp_path: Path) -> None:
    cache, build = Cache(tmp_path / "new" / "folder"), Builder()
    for _ in range(3):
        assert_equal(cache.get_or_build(KEY, build), ARRAYS)
    assert build.calls == 1
    assert_equal(cache.get_or_build({"number": 1, "what": "test"}, build), ARRAYS)
    assert build.calls == 1
    cache.get_or_build({**KEY, "number": 2}, build)
    assert build.calls == 2
    assert cache.get({"other": 1}) is None
    assert cache.clear() > 0
    assert list(cache.folder.iterdir()) == []


def test_arrays_are_mapped_private_and_writable(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    got = cache.get_or_build(KEY, Builder())["x"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = torch.from_numpy(got)
    tensor[0, 0] = 99
    assert got[0, 0] == 99
    assert_equal(cache.get(KEY) or {}, ARRAYS)


def test_filling_in_place(tmp_path: Path) -> None:
    cache, calls = Cache(tmp_path), []

    def fill(arrays: dict[str, np.ndarray]) -> None:
        calls.append(1)
        assert not arrays["d"].any()
        for row in range(1000):
            arrays["d"][row] = row

    for _ in range(2):
        got = cache.get_or_fill({"distances": 1}, {"d": ((1000, 7), np.float32)}, fill)
        assert np.array_equal(got["d"], np.repeat(np.arange(1000, dtype=np.float32)[:, None], 7, 1))
    assert len(calls) == 1


def test_no_arrays_at_all(tmp_path: Path) -> None:
    assert Cache(tmp_path).get_or_build(KEY, dict) == {}
    assert Cache(tmp_path).get(KEY) == {}


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.get_or_build(KEY, Builder())
    path = cache.path(KEY)
    good = path.read_bytes()
    assert len(good) < 1000
    for position in range(len(good)):
        for mask in (0x01, 0x80, 0xFF):
            bad = bytearray(good)
            bad[position] ^= mask
            path.unlink()
            path.write_bytes(bad)
            with pytest.warns(DataWarning, match=r"cache file .* is damaged: .*; building it again"):
                assert cache.get(KEY) is None


def test_every_truncation_and_extension_is_noticed(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.get_or_build(KEY, Builder())
    path = cache.path(KEY)
    good = path.read_bytes()
    for size in [*range(len(good)), len(good) + 1, len(good) + 64]:
        path.unlink()
        path.write_bytes(good.ljust(size, b"\0")[:size])
        with pytest.warns(DataWarning, match="is damaged"):
            assert cache.get(KEY) is None


@pytest.mark.parametrize("position", [0, 60, -1])
def test_a_damaged_entry_is_rebuilt_with_one_warning(position: int, tmp_path: Path) -> None:
    cache, build = Cache(tmp_path), Builder()
    cache.get_or_build(KEY, build)
    data = bytearray(cache.path(KEY).read_bytes())
    data[position] ^= 1
    cache.path(KEY).write_bytes(data)
    with pytest.warns(DataWarning, match="is damaged") as caught:
        assert_equal(cache.get_or_build(KEY, build), ARRAYS)
    assert len(caught) == 1
    assert build.calls == 2
    assert_equal(cache.get_or_build(KEY, build), ARRAYS)
    assert build.calls == 2


def test_large_entries_are_checked_to_the_end(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    big = np.random.default_rng(0).integers(0, 255, 300_001, dtype=np.uint8)
    cache.get_or_build(KEY, lambda: {"big": big})
    path = cache.path(KEY)
    good = path.read_bytes()
    for position in np.random.default_rng(1).integers(0, len(good), 100).tolist():
        bad = bytearray(good)
        bad[position] ^= 16
        path.unlink()
        path.write_bytes(bad)
        with pytest.warns(DataWarning, match="is damaged"):
            assert cache.get(KEY) is None
    swapped = good[:1024] + good[1024 + 65536 : 1024 + 2 * 65536] + good[1024 : 1024 + 65536] + good[1024 + 2 * 65536 :]
    path.write_bytes(swapped)
    with pytest.warns(DataWarning, match="is damaged"):
        assert cache.get(KEY) is None


def test_entries_of_other_keys_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, build = Cache(tmp_path), Builder()
    cache.get_or_build(KEY, build)
    cache.path(KEY).rename(cache.path({"renamed": True}))
    with pytest.warns(DataWarning, match="was made for something else"):
        assert cache.get({"renamed": True}) is None
    cache.get_or_build(KEY, build)
    monkeypatch.setattr(cache_module, "VERSION", 3)
    assert_equal(cache.get_or_build(KEY, build), ARRAYS)  # quietly: an update is no accident
    assert build.calls == 3


def test_failures_leave_nothing_behind(tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def broken(arrays: dict[str, np.ndarray]) -> None:
        arrays["d"][0] = 1
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        cache.get_or_fill(KEY, {"d": ((10,), np.float32)}, broken)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_build(KEY, lambda: {"x": np.array(1 // 0)})
    with pytest.raises(CheckpointError, match="array 'x' must hold plain numbers, got dtype object"):
        cache.get_or_build(KEY, lambda: {"x": np.array([object()])})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.warns(DataWarning, match="cannot cache in .*/file/cache: ") as caught:
        assert_equal(cache.get_or_build(KEY, Builder()), ARRAYS)
    assert len(caught) == 1


def test_abandoned_temporary_files_are_swept_up(tmp_path: Path) -> None:
    old, new = tmp_path / "old.tmp", tmp_path / "new.tmp"
    old.write_text("")
    new.write_text("")
    os.utime(old, (0, 0))
    Cache(tmp_path).get_or_build(KEY, Builder())
    assert not old.exists()
    assert new.exists()


def test_content_follows_the_file(tmp_path: Path) -> None:
    cache, file = Cache(tmp_path / "cache"), tmp_path / "a"
    file.write_bytes(b"one")
    first = cache.content(file)
    time.sleep(0.1)
    assert cache.content(file) == first
    notes = list(cache.folder.glob("*.source"))
    assert len(notes) == 1
    status = file.stat()
    file.write_bytes(b"two")  # the same size, and the old time put back
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = cache.content(file)
    assert second != first
    for position in range(0, notes[0].stat().st_size, 7):  # a damaged note is not believed
        data = bytearray(notes[0].read_bytes())
        data[position] ^= 2
        notes[0].unlink()
        notes[0].write_bytes(data)
        assert cache.content(file) == second
        time.sleep(0.001)


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LGMML_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "lgmml_torch"
    monkeypatch.setenv("LGMML_CACHE", str(tmp_path / "mine"))
    assert Cache().folder == tmp_path / "mine"
    assert resolve(False) is None
    assert resolve(True).folder == resolve(tmp_path / "mine").folder == tmp_path / "mine"


@pytest.mark.parametrize("qids", [[3, 1, 1], ["b", "a", "a"]])
@pytest.mark.parametrize("doc_ids", [None, ["x", "", "ü"]])
def test_ranking_data_survives(qids: list, doc_ids: list | None, tmp_path: Path) -> None:
    data = RankingData.from_arrays(np.eye(3), [0, 1, 2], qid=qids, doc_ids=doc_ids, query_weights=[1, 2])
    back = from_arrays(Cache(tmp_path).get_or_build(KEY, lambda: to_arrays(data)))
    assert (back.qids, back.doc_ids, back.feature_names) == (data.qids, data.doc_ids, None)
    named = data.replace(feature_names=("a", "b\nü", ""))
    assert from_arrays(to_arrays(named)).feature_names == named.feature_names
    for name in ("features", "labels", "offsets", "order", "query_weights"):
        assert torch.equal(getattr(back, name), getattr(data, name))


def test_loader_notices_changed_files_and_settings(tmp_path: Path) -> None:
    file, cache = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("0 qid:1 1:1\n")
    assert load_letor(file, cache=cache).features.tolist() == [[1]]
    file.write_text("0 qid:1 1:2\n")
    assert load_letor(file, cache=cache).features.tolist() == [[2]]
    assert load_letor(file, cache=cache, num_features=2).features.tolist() == [[2, 0]]
    assert load_letor(file, cache=cache, dtype=torch.float64).features.dtype == torch.float64
    assert load_letor(file, cache=cache).features.dtype == torch.float32
    assert len(list(cache.glob("*.lgc"))) == 4


RACE = """
import sys, time
from pathlib import Path
from lgmml_torch.data.letor import load_letor
from lgmml_torch.files import SUFFIX
folder, me = Path(sys.argv[1]), sys.argv[2]
(folder / f"ready{me}").touch()
while len(list(folder.glob("ready*"))) < 2:
    time.sleep(0.001)
for number in range(8):
    data = load_letor(folder / f"{number}.txt", cache=folder / "cache")
    assert data.features[0, 0] == number, data.features
"""


@pytest.mark.slow
def test_two_processes_building_at_once(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"0 qid:1 1:{number}\n" * 2000)
    runs = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", RACE, str(tmp_path), me], stderr=subprocess.PIPE)
        for me in "ab"
    ]
    for run in runs:
        _, errors = run.communicate()
        assert run.returncode == 0, errors.decode()
    names = [path.suffix for path in (tmp_path / "cache").iterdir()]
    assert names.count(".lgc") == 8
    assert not any("tmp" in name for name in names)


@pytest.mark.parametrize("step", [-1, 1])
def test_entries_of_older_and_newer_versions_are_built_again(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Cache(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "VERSION", cache_module.VERSION + step)
        store.get_or_build({"a": 1}, lambda: {"x": np.zeros(2)})
    assert store.get_or_build({"a": 1}, lambda: {"x": np.ones(2)})["x"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("settled", "notes"), [(10**18, 0), (-(10**18), 1)])
def test_a_file_that_has_just_changed_is_hashed_again(
    settled: int, notes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change once more within the same tick of the clock."""
    monkeypatch.setattr(cache_module, "_SETTLED", settled)
    file = tmp_path / "a.txt"
    file.write_text("1")
    Cache(tmp_path / "store").content(file)
    assert len(list((tmp_path / "store").glob("*.source"))) == notes


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, bool])
def test_arrays_start_at_multiples_of_64_bytes(tmp_path: Path, dtype: type) -> None:
    """The layout that the first lines of the module describe, byte by byte."""
    given = {"a": np.arange(3).astype(dtype), "b": np.arange(65).astype(dtype), "c": np.ones((2, 2), dtype)}
    cache = Cache(tmp_path)
    cache.get_or_build(KEY, lambda: given)
    raw = cache.path(KEY).read_bytes()
    assert raw[:8] == b"LGMMLarr"
    length = int.from_bytes(raw[8:16], "little")
    text = raw[48 : 48 + length]
    assert (48 + length) % 64 == 0
    assert text.rstrip().decode() == text.decode().rstrip(" ")
    assert raw[16:48] == hashlib.blake2b(text, digest_size=32).digest()
    header = json.loads(text)
    assert list(header) == ["version", "key", "arrays", "size", "sha256"]
    assert (header["version"], json.loads(header["key"])) == (2, KEY)
    payload = raw[48 + length :]
    assert header["sha256"] == hashlib.sha256(payload).hexdigest()
    assert header["size"] == len(payload)
    start = 0
    for entry, (name, array) in zip(header["arrays"], given.items(), strict=True):
        assert entry == {"name": name, "dtype": array.dtype.str, "shape": list(array.shape), "start": start}
        assert payload[start : start + array.nbytes] == array.tobytes()
        start += (array.nbytes + 63) // 64 * 64
    assert start == len(payload)


def test_room_on_the_disk_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda file, a, b: asked.append((a, b)) or real(file, a, b))
    sizes: list[int | None] = []
    replacing = cache_module.replacing
    monkeypatch.setattr(
        cache_module, "replacing", lambda path, *, size=None: sizes.append(size) or replacing(path, size=size)
    )
    cache = Cache(tmp_path)
    cache.get_or_build(KEY, Builder())
    size = cache.path(KEY).stat().st_size
    assert asked == [(0, size)]
    assert sizes == [size]


def test_contents_longer_than_one_piece_are_hashed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_AT_ONCE", 100)
    cache = Cache(tmp_path)
    big = np.arange(1000, dtype=np.uint8)
    cache.get_or_build(KEY, lambda: {"big": big})
    monkeypatch.undo()
    assert_equal(cache.get(KEY) or {}, {"big": big})


def test_structured_and_object_arrays_are_refused(tmp_path: Path) -> None:
    for array in (np.zeros(2, dtype=[("a", "f4")]), np.array([None])):
        with pytest.raises(CheckpointError, match="array 'x' must hold plain numbers, got dtype"):
            Cache(tmp_path).get_or_build(KEY, lambda array=array: {"x": array})  # type: ignore[misc]


def test_a_file_that_is_a_folder_is_told(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.path(KEY).mkdir()
    with pytest.warns(DataWarning, match="is a folder; building it again"):
        assert cache.get(KEY) is None


def test_shapes_without_elements_and_large_counts(tmp_path: Path) -> None:
    given = {"none": np.empty((0, 5), np.float32), "row": np.ones((1, 3)), "also": np.empty((3, 0), np.int64)}
    cache = Cache(tmp_path)
    cache.get_or_build(KEY, lambda: given)
    assert_equal(cache.get(KEY) or {}, given)


def test_keys_must_be_numbers_and_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        Cache(tmp_path).path({"a": float("nan")})
    assert Cache(tmp_path).path({"b": 1, "a": 2}) == Cache(tmp_path).path({"a": 2, "b": 1})
    assert Cache(tmp_path).path(KEY).suffix == ".lgc"


@pytest.mark.parametrize(("age", "kept"), [(23.9 * 3600, True), (24.1 * 3600, False)])
def test_temporary_files_are_abandoned_after_a_day(tmp_path: Path, age: float, kept: bool) -> None:
    file = tmp_path / "old.tmp"
    file.write_text("")
    then = time.time() - age
    os.utime(file, (then, then))
    Cache(tmp_path).get_or_build(KEY, Builder())
    assert file.exists() is kept


def test_clearing_counts_the_bytes_of_everything(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.get_or_build(KEY, Builder())
    for name in ("a.source", "b.tmp", f"c{SUFFIX}"):
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "mine.txt").write_text("kept")
    size = cache.path(KEY).stat().st_size
    assert cache.clear() == size + 15
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert cache.clear() == 0


def test_what_cannot_be_read_back_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    monkeypatch.setattr(cache_module, "write_arrays", lambda *args: None)
    with pytest.raises(CheckpointError, match="could not be read back after it was written"):
        cache.get_or_fill(KEY, {"d": ((2,), np.float32)}, lambda arrays: None)
    assert_equal(cache.get_or_build(KEY, Builder()), ARRAYS)


def test_entries_are_mapped_not_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    built = np.arange(4.0)
    found = cache.get_or_build(KEY, lambda: {"x": built})["x"]
    assert not np.shares_memory(found, built)
    found[0] = 9
    assert built[0] == 0


def test_the_home_folder_is_the_last_resort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LGMML_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_folder() == Cache().folder == tmp_path / ".cache" / "lgmml_torch"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_folder() == tmp_path / ".cache" / "lgmml_torch"
    store = Cache(tmp_path / "x")
    assert resolve(store) is store


def note_of(cache: Cache) -> Path:
    (note,) = cache.folder.glob("*.source")
    return note


def test_a_note_is_believed_while_nothing_was_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_SETTLED", -(10**18))
    cache, file = Cache(tmp_path / "cache"), tmp_path / "a"
    file.write_bytes(b"one")
    true = hashlib.sha256(b"one").hexdigest()
    assert cache.content(file) == true
    known = json.loads(note_of(cache).read_text())
    status = file.stat()
    assert known["seen"] == [3, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    false = "0" * 64
    good = cache_module._check(known["seen"], false)
    note_of(cache).write_text(json.dumps({**known, "sha256": false, "check": good}))
    assert cache.content(file) == false  # nothing was hashed again
    note_of(cache).write_text(json.dumps({**known, "sha256": false}))
    assert cache.content(file) == true
    other = [*known["seen"][:3], 1]
    note_of(cache).write_text(
        json.dumps({"seen": other, "sha256": false, "check": cache_module._check(known["seen"], false)})
    )
    assert cache.content(file) == true
    assert json.loads(note_of(cache).read_text()) == known


@pytest.mark.parametrize(("modified", "after", "notes"), [
    (-(10**12), 50_000_000, 0),  # the older time does not decide
    (-(10**12), 50_000_001, 1),
    (10**10, 10**9, 0),
    (10**10, 10**10 + 50_000_000, 0),
    (10**10, 10**10 + 50_000_001, 1),
])  # fmt: skip
def test_either_time_may_be_too_fresh(
    tmp_path: Path, modified: int, after: int, notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of a file and of its hashing, from the time at which its status changed."""
    file, cache = tmp_path / "a", Cache(tmp_path / "cache")
    file.write_bytes(b"one")
    real = Path.stat

    def stat(path: Path, **options: bool) -> object:
        found = real(path, **options)
        if path.name != "a":
            return found
        times = {"st_mtime_ns": found.st_ctime_ns + modified, "st_ctime_ns": found.st_ctime_ns}
        return SimpleNamespace(st_size=found.st_size, st_ino=found.st_ino, **times)

    now = file.stat().st_ctime_ns + after
    monkeypatch.setattr(cache_module.time, "time_ns", lambda: now)
    monkeypatch.setattr(Path, "stat", stat)
    cache.content(file)
    monkeypatch.undo()
    assert len(list(cache.folder.glob("*.source"))) == notes


def test_all_tensors_and_ids_survive(tmp_path: Path) -> None:
    data = RankingData.from_arrays(
        np.eye(3), [0, 1, 2], qid=[5, 5, 7], positions=[3, 1, 2], doc_ids=["a", "b", "c"]
    ).weighed([1.0, 2.0, 3.0])
    arrays = to_arrays(data)
    assert arrays["qids"].dtype == np.int64
    assert "query_weights" not in arrays
    back = from_arrays(Cache(tmp_path).get_or_build(KEY, lambda: arrays))
    for name in ("features", "labels", "offsets", "order", "document_weights", "positions"):
        assert torch.equal(getattr(back, name), getattr(data, name)), name
    assert (back.qids, back.doc_ids, back.query_weights) == (data.qids, data.doc_ids, None)
    mixed = data.replace(qids=("a", 7))
    assert from_arrays(to_arrays(mixed)).qids == ("a", "7")


def test_keys_of_any_length_fit_into_the_header(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for length in range(65):
        found = cache.get_or_build({"a": "x" * length}, lambda: {"v": np.arange(3)})
        assert found["v"].tolist() == [0, 1, 2]
        assert cache.get({"a": "x" * length}) is not None


def test_an_entry_of_another_version_is_noted_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    cache.get_or_build(KEY, Builder())
    monkeypatch.setattr(cache_module, "VERSION", 7)
    with caplog.at_level("INFO"):
        assert cache.get(KEY) is None
    assert "has format 2, this is 7; building it again" in caplog.text
