"""The cache: entries are complete or not there, stale and damaged ones are built again, writers may run at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import CheckpointError, DataWarning
from lgmml_torch.data.cache import Cache, cached, check_cache
from lgmml_torch.data.letor import load_letor
from lgmml_torch.ragged import RankingData

KEY = {"what": "test", "number": 1}
ARRAYS = {
    "x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "flag": np.array([True, False]),
    "none": np.empty((0, 4), dtype=np.int64),
    "scalar": np.array(2.5),
}


def assert_equal(got: dict[str, np.ndarray] | None, want: dict[str, np.ndarray]) -> None:
    assert got is not None
    assert list(got) == list(want)
    for name, array in want.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(got[name], array)


class Builder:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return ARRAYS


def test_entries_are_built_once_by_key(tmp_path: Path) -> None:
    cache, build = Cache(tmp_path / "new" / "folder"), Builder()
    assert cache.get(KEY) is None
    for key in (KEY, KEY, {"number": 1, "what": "test"}):
        assert_equal(cache.get_or_build(key, build), ARRAYS)
    assert build.calls == 1
    cache.get_or_build({**KEY, "number": 2}, build)
    assert build.calls == 2
    assert cache.get_or_build({"empty": 1}, dict) == {} == cache.get({"empty": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        cache.path({"a": float("nan")})


def test_arrays_are_private_and_writable(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    first = cache.get_or_build(KEY, Builder())["x"]
    torch.from_numpy(first)[0, 0] = 99
    assert first[0, 0] == 99
    assert ARRAYS["x"][0, 0] == 0
    assert_equal(cache.get(KEY), ARRAYS)


def test_filling_in_place(tmp_path: Path) -> None:
    cache, calls = Cache(tmp_path), []

    def fill(arrays: dict[str, np.ndarray]) -> None:
        calls.append(arrays["d"].any())
        arrays["d"][...] = np.arange(1000)[:, None]

    for _ in range(2):
        got = cache.get_or_fill(KEY, {"d": ((1000, 7), np.float32)}, fill)
        assert np.array_equal(got["d"], np.repeat(np.arange(1000, dtype=np.float32)[:, None], 7, 1))
    assert calls == [False]


def damage(entry: Path, kind: str) -> None:
    """Damage that opening an entry notices."""
    array, key = entry / "x.npy", entry / "key.json"
    if kind == "cut":
        array.write_bytes(array.read_bytes()[:-1])
    elif kind == "longer":
        array.write_bytes(array.read_bytes() + b"\0")
    elif kind == "header":
        array.write_bytes(b"\0" * array.stat().st_size)
    elif kind == "missing":
        array.unlink()
    elif kind == "key":
        key.write_text(key.read_text()[:-9])
    elif kind == "list":
        key.write_text("[]")
    elif kind == "arrays":
        key.write_text(json.dumps({**json.loads(key.read_text()), "arrays": {"x": {}}}))
    elif kind == "version":
        key.write_text(json.dumps({**json.loads(key.read_text()), "version": 4}))
    else:  # an entry of release 0.2 was one file
        for file in entry.iterdir():
            file.unlink()
        entry.rmdir()
        entry.write_bytes(b"LGMMLarr")


def test_a_damaged_or_old_entry_is_built_again_with_one_warning(tmp_path: Path) -> None:
    cache, build = Cache(tmp_path), Builder()
    cache.get_or_build(KEY, build)
    kinds = ("cut", "longer", "header", "missing", "key", "list", "arrays", "version", "file")
    for number, kind in enumerate(kinds, 2):
        damage(cache.path(KEY), kind)
        assert len(check_cache(tmp_path)) == 1, kind
        with pytest.warns(DataWarning, match=r"cache entry .*\.lgc .*; building it again") as caught:
            assert_equal(cache.get_or_build(KEY, build), ARRAYS)
        assert (len(caught), build.calls) == (1, number)
        assert_equal(cache.get_or_build(KEY, build), ARRAYS)
        assert build.calls == number
    damage(cache.path(KEY), "version")
    with pytest.warns(DataWarning, match=r"has format 4, this release reads format 3; building it again"):
        assert cache.get(KEY) is None


def test_every_changed_byte_is_noticed_on_demand(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.get_or_build(KEY, Builder())
    cache.get_or_build({"other": 1}, Builder())
    assert check_cache(tmp_path) == []
    for file in cache.path(KEY).glob("*.npy"):
        good = file.read_bytes()
        for place in range(len(good)):
            file.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
            (told,) = check_cache(tmp_path)
            assert told.startswith(f"cache entry {cache.path(KEY)} is damaged: ")
        file.write_bytes(good)
    assert check_cache(tmp_path) == []


def test_an_entry_of_another_key_is_not_used(tmp_path: Path) -> None:
    cache, build = Cache(tmp_path), Builder()
    cache.get_or_build(KEY, build)
    cache.path(KEY).rename(cache.path({"renamed": True}))
    with pytest.warns(DataWarning, match="belongs to another key; building it again"):
        cache.get_or_build({"renamed": True}, build)
    assert build.calls == 2
    assert cache.get(KEY) is None


def test_failures_leave_nothing_behind(tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def broken(arrays: dict[str, np.ndarray]) -> None:
        arrays["d"][0] = 1
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        cache.get_or_fill(KEY, {"c": ((2,), np.int8), "d": ((10,), np.float32)}, broken)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_build(KEY, lambda: {"x": np.array(1 // 0)})
    for array in (np.zeros(2, dtype=[("a", "f4")]), np.array([None])):
        with pytest.raises(CheckpointError, match="array 'x' must hold plain numbers, got dtype"):
            cache.get_or_build(KEY, lambda array=array: {"x": array})  # type: ignore[misc]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(DataWarning, match=r"cannot cache in .*/file/cache: ") as caught:
        assert_equal(Cache(tmp_path / "file" / "cache").get_or_build(KEY, Builder()), ARRAYS)
    assert len(caught) == 1


def test_an_entry_without_its_last_file_is_not_there(tmp_path: Path) -> None:
    """What a killed writer leaves is no damage: it is written again without a warning."""
    cache, build = Cache(tmp_path), Builder()
    cache.get_or_build(KEY, build)
    (cache.path(KEY) / "key.json").unlink()
    (cache.path(KEY) / "x.npy").write_bytes(b"half")
    assert_equal(cache.get_or_build(KEY, build), ARRAYS)
    assert build.calls == 2


def test_content_follows_the_file(tmp_path: Path) -> None:
    cache, file = Cache(tmp_path / "cache"), tmp_path / "a"
    file.write_bytes(b"one")
    first = cache.content(file)
    assert not list(cache.folder.glob("*.source"))  # just changed: the time may not show the next change
    time.sleep(0.1)
    assert cache.content(file) == first
    (note,) = cache.folder.glob("*.source")
    false = {**json.loads(note.read_text()), "sha256": "0" * 64}
    note.write_text(json.dumps(false))
    assert cache.content(file) == "0" * 64  # nothing was hashed again
    status = file.stat()
    file.write_bytes(b"two")  # the same size, and the old time put back
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = cache.content(file)
    assert second not in (first, "0" * 64)
    note.write_text("damaged")
    assert cache.content(file) == second


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LGMML_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Cache().folder == tmp_path / "home" / ".cache" / "lgmml_torch"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache().folder == tmp_path / "lgmml_torch"
    monkeypatch.setenv("LGMML_CACHE", str(tmp_path / "mine"))
    store = Cache()
    assert store.folder == tmp_path / "mine"
    assert (Cache.of(False), Cache.of(store)) == (None, store)
    assert Cache.of(True).folder == Cache.of(tmp_path / "mine").folder == store.folder  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("qids", "kept"), [([7, 5, 5], (5, 7)), (["b", "a", "a"], ("a", "b")), (["a", 7, 7], ("7", "a"))]
)
def test_ranking_data_survives(qids: list[object], kept: tuple[object, ...], tmp_path: Path) -> None:
    data = RankingData.from_arrays(np.eye(3), [0, 1, 2], qid=qids, doc_ids=["x", "", "ü"], positions=[3, 1, 2])
    weighed = data.weighed([1.0, 2.0, 3.0]).replace(
        feature_names=("a", "b\nü", ""), categories=(None, ("u", "v"), None)
    )
    (tmp_path / "file").write_text("parsed")
    for number, given in enumerate((data, data.replace(doc_ids=None, query_weights=torch.tensor([1.0, 2.0])), weighed)):
        cached(tmp_path, [tmp_path / "file"], {"n": number}, lambda given=given: given)  # type: ignore[misc]
        back = cached(tmp_path, [tmp_path / "file"], {"n": number}, pytest.fail)
        assert sorted(map(str, back.qids)) == sorted(map(str, kept))
        assert {type(qid) for qid in back.qids} == {type(qid) for qid in kept}
        assert (back.doc_ids, back.feature_names) == (given.doc_ids, given.feature_names)
        assert back.categories == given.categories
        for name in ("features", "labels", "offsets", "order", "query_weights", "document_weights", "positions"):
            assert (getattr(back, name) is None) == (getattr(given, name) is None), name
            assert getattr(given, name) is None or torch.equal(getattr(back, name), getattr(given, name)), name


def test_the_loader_notices_changed_files_and_settings(tmp_path: Path) -> None:
    file, cache = tmp_path / "a.txt", tmp_path / "cache"
    for value in (1, 2):
        file.write_text(f"0 qid:1 1:{value}\n")
        assert load_letor(file, cache=cache).features.tolist() == [[value]]
    assert load_letor(file, cache=cache, num_features=2).features.tolist() == [[2, 0]]
    assert load_letor(file, cache=cache, dtype=torch.float64).features.dtype == torch.float64
    assert load_letor(file, cache=cache).features.dtype == torch.float32
    assert len(list(cache.glob("*.lgc"))) == 4


RACE = """
import sys, time
from pathlib import Path
from lgmml_torch.data.letor import load_letor
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
    command = [sys.executable, "-W", "error", "-c", RACE, str(tmp_path)]
    runs = [subprocess.Popen([*command, me], stderr=subprocess.PIPE) for me in "ab"]
    for run in runs:
        _, errors = run.communicate()
        assert run.returncode == 0, errors.decode()
    assert len(list((tmp_path / "cache").glob("*.lgc"))) == 8
    assert not any("tmp" in path.name for path in (tmp_path / "cache").rglob("*"))
    assert check_cache(tmp_path / "cache") == []


def test_a_file_that_was_just_changed_is_hashed_again(tmp_path: Path) -> None:
    """A copy may keep the old time of its content: what counts is the later of both times."""
    file, store = tmp_path / "a", Cache(tmp_path / "cache")
    file.write_text("1")
    os.utime(file, (1, 1))
    first = store.content(file)
    assert not list(store.folder.glob("*.source"))
    file.write_text("2")
    os.utime(file, (1, 1))
    assert store.content(file) != first
