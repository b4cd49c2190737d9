"""A cache answers with what is in the files now, whatever their size and times say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lgmml_torch.checks import DataError
from lgmml_torch.data.cache import cached
from lgmml_torch.data.letor import load_file
from lgmml_torch.ragged import RankingData

TEXTS = {
    "a.txt": ("1 qid:1 1:3\n0 qid:1 1:1\n", "1 qid:1 1:3\n0 qid:1 1:2\n"),
    "a.csv": ("label,qid,f0\n1,1,3\n0,1,1\n", "label,qid,f0\n1,1,3\n0,1,2\n"),
    "a.tsv": ("label\tqid\tf0\n1\t1\t3\n0\t1\t1\n", "label\tqid\tf0\n1\t1\t3\n0\t1\t2\n"),
}


def rewrite(file: Path, text: str) -> None:
    """Other bytes under the old size and time, as a hurried editor or a copy may leave them."""
    before = file.stat()
    assert len(text) == before.st_size
    file.write_text(text)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", TEXTS)
def test_a_changed_file_is_read_again(name: str, tmp_path: Path) -> None:
    file, cache = tmp_path / name, tmp_path / "cache"
    first, second = TEXTS[name]
    file.write_text(first)
    for _ in range(2):
        assert sorted(load_file(file, cache=cache).features.flatten().tolist()) == [1.0, 3.0]
    rewrite(file, second)
    assert sorted(load_file(file, cache=cache).features.flatten().tolist()) == [2.0, 3.0]
    assert len(list(cache.glob("*.lgc"))) == 2


def test_another_file_of_the_same_content_is_the_same_entry(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXTS["a.txt"][0])
        load_file(tmp_path / name, cache=cache)
    assert len(list(cache.glob("*.lgc"))) == 1


def test_sizes_beside_a_file_belong_to_it(tmp_path: Path) -> None:
    file, sizes, cache = tmp_path / "a.txt", tmp_path / "a.txt.query", tmp_path / "cache"
    file.write_text("1 1:3\n0 1:1\n0 1:2\n")
    for text, lists in (("1\n2\n", [1, 2]), ("2\n1\n", [2, 1])):
        rewrite(sizes, text) if sizes.exists() else sizes.write_text(text)
        assert load_file(file, cache=cache).offsets.diff().tolist() == lists


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text("longer than before\n"),
        lambda file: os.utime(file, ns=(1, 1)),
        lambda file: (
            file.rename(file.with_suffix(".old")),
            file.write_text("0 qid:1 1:1\n"),
            os.utime(file, ns=(5, 5)),
        ),
    ],
    ids=["size", "time", "another file"],
)
def test_a_file_that_changes_while_it_is_read_is_refused(change: Callable[[Path], object], tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("0 qid:1 1:1\n")
    os.utime(file, ns=(5, 5))

    def parse() -> RankingData:
        change(file)
        return RankingData.from_arrays([[1.0]], [0], qid=[1])

    with pytest.raises(DataError, match=r"a\.txt: the file was changed while it was being read"):
        cached(tmp_path / "cache", [file], {"kind": "test"}, parse)
    assert not list((tmp_path / "cache").glob("*.lgc"))


def test_facts_are_part_of_the_key(tmp_path: Path) -> None:
    file, made = tmp_path / "a.txt", []

    def parse() -> RankingData:
        made.append(1)
        return RankingData.from_arrays([[float(len(made))]], [0], qid=[1])

    file.write_text("0 qid:1 1:1\n")
    values = [
        cached(tmp_path / "cache", [file], {"missing": rule}, parse).features.item()
        for rule in ("zero", "error", "zero")
    ]
    assert values == [1.0, 2.0, 1.0]
    assert cached(False, [file], {"missing": "zero"}, parse).features.item() == 3.0
