"""Parquet where it lies: a folder, a pattern or a store gives what one table in memory gives."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.data.catalog import open_table
from lgmml_torch.data.source import open_source
from lgmml_torch.ragged import RankingData

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def assert_same_lists(found: RankingData, expected: RankingData) -> None:
    """Bit for bit; of the caller's order what it says within each list."""
    for name in ("qids", "doc_ids", "feature_names", "categories", "table"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.features.numpy().tobytes() == expected.features.numpy().tobytes()
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.offsets, expected.offsets)
    assert torch.equal(found.order.sort().values, torch.arange(found.num_documents))
    for start, stop in pairwise(expected.offsets.tolist()):
        assert torch.equal(found.order[start:stop].argsort(), expected.order[start:stop].argsort())


def table_of(queries: int = 30, *, text: bool = False, seed: int = 0) -> Any:
    """A row per document; the rows of each query are scattered over the whole table.

    Ids ascend: equal rows, which gaps may give, stand by id in memory and by row where ids are not read.
    """
    rng = np.random.default_rng(seed)
    qid = rng.integers(0, queries, queries * 8)
    columns = {
        "qid": [f"q{number}" for number in qid] if text else qid,
        "label": rng.integers(0, 3, len(qid)).astype(float),
        "docid": [f"d{row:04d}" for row in range(len(qid))],
        "price": rng.normal(size=len(qid)),
        "sold": rng.integers(0, 9, len(qid)),
    }
    return pa.table(columns)


def write_files(table: Any, folder: Path, files: int = 5, *, keys: str = "") -> Path:
    """The rows one after the other in several files, in folders of their own where ``keys`` says so."""
    step = -(-len(table) // files)
    for number in range(files):
        place = folder / keys.format(number)
        place.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(number * step, step), place / f"part-{number}.parquet", row_group_size=13)
    return folder


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("keys", ["", "deep/a{}"])
def test_a_folder_is_the_table_it_was_cut_from(tmp_path: Path, keys: str, text: bool) -> None:
    table = table_of(text=text)
    folder = write_files(table, tmp_path / "set", keys=keys)
    (folder / "_SUCCESS").touch()
    (folder / "_old").mkdir()
    (folder / "_old" / "x.parquet").write_text("not read")
    with open_source(table) as source:
        expected = source.read()
        batches = list(source.batches(20))
    for path in (folder, f"{folder}/", f"{folder}/**/*.parquet", folder.as_uri()):
        with open_source(path) as source:
            assert_same_lists(source.read(), expected)
            assert torch.equal(source.read().order, expected.order)
            for one, other in zip(source.batches(20), batches, strict=True):
                assert_same_lists(one.data, other.data)
                assert np.array_equal(one.rows, other.rows)


def test_patterns_choose_files(tmp_path: Path) -> None:
    table = table_of()
    write_files(table, tmp_path, files=4)
    with open_source(f"{tmp_path}/part-[!x]*".replace("[!x]", "")) as source:
        assert source.num_rows == len(table)
    with open_source(f"{tmp_path}/*-1.parquet") as source:
        assert source.num_rows == 60
        assert source.name.endswith("part-1.parquet")
    with pytest.raises(DataError, match=r"/\*\.csv: only Parquet is read from folders, patterns and stores, got 'csv'"):
        open_source(f"{tmp_path}/*.csv")
    with pytest.raises(DataError, match=r"none-\*: there are no Parquet files"):
        open_source(f"{tmp_path}/none-*")


@pytest.mark.parametrize("stream", [False, True])
def test_folders_named_after_values_give_columns(tmp_path: Path, stream: bool) -> None:
    table = table_of()
    folder = write_files(table, tmp_path / "set", keys="year=202{0}/part=%61b")
    step = len(table) // 5
    whole = table.append_column("year", pa.array(2020 + np.arange(len(table)) // step))
    pq.write_table(whole, tmp_path / "whole.parquet")
    with pytest.raises(DataError, match=r"column 'part' must hold numbers, got text"):
        open_source(folder)
    found = open_table(folder, drop=["part"], cache=tmp_path / "cache", stream=stream)
    for name, part in open_table(tmp_path / "whole.parquet").items():
        assert found[name].feature_names == ("price", "sold", "year")
        assert_same_lists(found[name].replace(doc_ids=None), part.replace(doc_ids=None, table=found[name].table))


@pytest.mark.parametrize("missing", ["error", "query-mean"])
@pytest.mark.parametrize("layout", ["cut", "column", "folders"])
def test_streamed_parts_are_those_in_memory(tmp_path: Path, layout: str, missing: str) -> None:
    """From the cache and without, and again from the cache."""
    table, words = table_of(text=True), ["train", "valid", "test", "train"]
    settings: dict[str, Any] = {"missing": missing, "categories": ["colour"]}
    colours = pa.array([f"c{int(value) % 3}" for value in table["sold"].to_pylist()])
    table = table.append_column("colour", colours)
    if missing != "error":
        gaps = pa.array(np.arange(len(table)) % 7 == 0)
        table = table.set_column(3, "price", pa.compute.if_else(gaps, None, table["price"]))
    parts = pa.array([words[int(str(qid)[1:]) % 4] for qid in table["qid"].to_pylist()])
    if layout == "column":
        table, settings["split"] = table.append_column("part", parts), "part"
    path = tmp_path / "set"
    if layout == "folders":
        for word in words:
            write_files(table.filter(pa.compute.equal(parts, word)), path / word)
    else:
        write_files(table, path)
    expected = open_table(path, **settings)
    for cache in (tmp_path / "cache", False, tmp_path / "cache"):
        found = open_table(path, stream=True, cache=cache, **settings)
        assert list(found) == list(expected)
        for name, part in expected.items():
            assert_same_lists(found[name], part.replace(doc_ids=None))
            shared = found[name].shared_lists
            assert shared is not None
            assert torch.equal(shared.sizes, part.sizes)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    folder = write_files(table_of(), tmp_path / "set")
    first = open_table(folder, stream=True, cache=tmp_path / "cache")
    pq.write_table(table_of(seed=1).slice(0, 48), folder / "part-0.parquet")
    second = open_table(folder, stream=True, cache=tmp_path / "cache")
    expected = open_table(folder)
    assert_same_lists(second["train"], expected["train"].replace(doc_ids=None))
    assert not torch.equal(first["train"].features.sum(), second["train"].features.sum())


class TestFilesMustAgree:
    @staticmethod
    def refused(tmp_path: Path, change: Any) -> str:
        table = table_of()
        folder = write_files(table, tmp_path / "set", files=3)
        pq.write_table(change(table.slice(0, 10)), folder / "part-1.parquet")
        with pytest.raises(DataError) as caught, open_source(folder) as source:
            source.read()
        return str(caught.value).replace(f"{folder}/", "")

    def test_names(self, tmp_path: Path) -> None:
        gone = self.refused(tmp_path, lambda table: table.drop_columns(["price"]))
        assert gone == "part-1.parquet: column 'price' is missing; all files must have the columns of part-0.parquet"
        new = self.refused(tmp_path, lambda table: table.append_column("more", table["price"]))
        assert new.startswith("part-1.parquet: there should be no column 'more'; all files")

    def test_kinds(self, tmp_path: Path) -> None:
        def as_text(table: Any) -> Any:
            return table.set_column(4, "sold", table["sold"].cast(pa.string()))

        expected = "part-1.parquet: column 'sold' must hold numbers as in part-0.parquet, got text"
        assert self.refused(tmp_path, as_text) == expected

    def test_whole_numbers_and_fractions_are_numbers(self, tmp_path: Path) -> None:
        table = table_of()
        folder = write_files(table, tmp_path / "set", files=3)
        turned = table.slice(80, 80).select(["sold", "price", "docid", "qid", "label"])
        pq.write_table(turned.set_column(0, "sold", turned["sold"].cast(pa.float64())), folder / "part-1.parquet")
        with open_source(folder) as found, open_source(table) as expected:
            assert_same_lists(found.read(), expected.read())

    def test_gaps_are_named_by_file_and_row(self, tmp_path: Path) -> None:
        def with_gap(table: Any) -> Any:
            return table.set_column(3, "price", pa.array([1.0, None, *[2.0] * 8]))

        assert self.refused(tmp_path, with_gap).startswith("part-1.parquet: row 2 (from 1): column 'price' is missing")

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        folder = write_files(table_of(), tmp_path / "set")
        (folder / "part-3.parquet").write_bytes(b"PAR1 and nothing else PAR1")
        with pytest.raises(DataError, match=r"part-3.parquet: not a readable Parquet file"):
            open_source(folder)


def test_lists_of_a_row_each_in_several_files(tmp_path: Path) -> None:
    """With a row per query, a query in two files is one list."""
    for number in (0, 1):
        nested = pa.table({"qid": [7, 8 + number], "label": [[1.0, 0.0], [2.0]], "x": [[1.0, 2.0], [3.0 + number]]})
        pq.write_table(nested, tmp_path / f"{number}.parquet")
    with open_source(tmp_path) as source:
        data = source.read()
    assert data.qids == (7, 8, 9)
    assert data.sizes.tolist() == [4, 1, 1]
    assert data.in_caller_order(data.features)[:, 0].tolist() == [1, 2, 3, 1, 2, 4]


def test_what_cannot_be_streamed_or_reached(tmp_path: Path) -> None:
    folder = write_files(table_of(), tmp_path / "set")
    with pytest.raises(DataError, match="`stream` has no place for weights and positions"):
        open_table(folder, weight="sold", stream=True)
    with pytest.raises(DataError, match="training needs labels"):
        open_table(folder, label="grade", stream=True, cache=False)
    with pytest.raises(DataError, match=r"nowhere://x: not a readable Parquet file: Unrecognized filesystem type"):
        open_source("nowhere://x")


def test_text_is_streamed_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [f"{row % 3} qid:{row % 20} 1:{rng.random():.3f} 3:{row}" for row in range(200)]
    (tmp_path / "all.txt").write_text("\n".join(lines) + "\n")
    found = open_table(tmp_path / "all.txt", stream=True, cache=tmp_path / "cache")
    for name, part in open_table(tmp_path / "all.txt", cache=False).items():
        assert_same_lists(found[name], part)


def all_rows(folder: str, cache: str) -> Any:
    data: RankingData = open_table(folder, stream=True, cache=cache)["train"]
    assert data.shared_lists is not None
    return {"qids": list(data.qids), "all": data.take(data.features, torch.arange(int(data.all_offsets[-1])))}
