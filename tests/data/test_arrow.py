"""Parquet, Arrow and pyarrow tables: layouts, types, streaming by row groups, and what is wrong with a file."""

from __future__ import annotations

import datetime
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError, MissingDependencyError
from lgmml_torch.data import arrow
from lgmml_torch.data.columns import Columns
from lgmml_torch.data.source import open_source
from lgmml_torch.data.write import save_table
from lgmml_torch.ragged import RankingData
from tests.data.test_letor import assert_same
from tests.data.test_source import BOTH_WAYS, in_order, table_of
from tests.doors import small_data

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def parquet(folder: Path, columns: Any, **options: Any) -> Path:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), folder / "t.parquet", **options)
    return folder / "t.parquet"


@BOTH_WAYS
def test_bad_tables(tmp_path: Path, way: Any) -> None:
    for columns, message in [
        ({"q": [1], "x": [1.0]}, r"the schema must name a column 'qid'; there are 'q', 'x'"),
        ({"qidd": [1], "x": [1.0]}, r"the schema must name a column 'qid'; did you mean 'qidd'\?"),
        ({"qid": [1], "x": ["a"]}, r"column 'x' must hold numbers, got text \(string\); leave it out"),
        ({"qid": [1], "x": [datetime.date(2020, 1, 1)]}, r"column 'x' must hold numbers, got dates \(date32"),
        ({"qid": [1, None], "x": [1.0, 2.0]}, r"row 2 \(from 1\): column 'qid' must not be empty"),
        ({"qid": [1, 2], "x": [1.0, None]}, r"row 2 \(from 1\): column 'x' is missing; `missing=` says what"),
        ({"qid": [1, 2], "x": [1.0, float("nan")]}, r"row 2 \(from 1\): column 'x' is missing; `missing=` says what"),
        ({"qid": [1, 2], "x": [1.0, 1e300]}, r"row 2 \(from 1\): column 'x' must be a finite number, got inf"),
        (
            {"qid": [1, 2], "label": [1.0, None], "x": [1.0, 2.0]},
            r"row 2 \(from 1\): the label must be a finite number",
        ),
        ({"qid": pa.array([], pa.int64()), "x": pa.array([], pa.float64())}, r"there are no documents"),
        (
            {"qid": [1], "label": [[1.0]], "x": [[1.0, 2.0]]},
            r"row 1 \(from 1\): column 'x' has 2 entries for 1 documents",
        ),
        ({"qid": [1], "label": [[1.0]], "x": [1.0]}, r"column 'x' must hold lists like 'label', got double"),
        ({"qid": [1, 2], "label": [[1.0], None], "x": [[1.0], [2.0]]}, r"row 2 .*: the list in column 'label' is miss"),
        ({"qid": [1], "label": [[1, 0]], "features": [[[1.0, 2.0], [3.0]]]}, r"row 2 .* has 1 features, elsewhere 2"),
        ({"qid": [1], "label": [["a"]], "x": [[1.0]]}, r"column 'label' must hold numbers, got text"),
    ]:
        file = parquet(tmp_path, columns)
        with pytest.raises(DataError, match=rf"t.parquet: {message}") as caught, open_source(file) as source:
            way(source)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_damaged_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    save_table(small_data(), file)
    good = file.read_bytes()
    word = "Parquet" if "parquet" in name else "Arrow"
    for content in (b"", b"junk", good[: len(good) // 2], good[:-3], good[5:]):
        file.unlink()
        file.write_bytes(content)
        with (
            pytest.raises(DataError, match=rf"{name}: not a readable {word} file: ") as caught,
            open_source(file) as source,
        ):
            source.read()
        assert "\n" not in str(caught.value)


def test_a_page_that_is_damaged_is_no_traceback(tmp_path: Path) -> None:
    file = parquet(tmp_path, table_of(small_data()), compression="zstd", use_dictionary=False)
    content = bytearray(file.read_bytes())
    content[40:600] = bytes(560)
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"t.parquet: not a readable Parquet file: "), open_source(file) as source:
        source.read()


def test_row_groups_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in [1, 3, 8192]:
        for group in [1, 4, 1000]:
            for shuffled in [False, True]:
                monkeypatch.setattr(arrow, "_STEP", step)
                data = small_data(shuffled=shuffled)
                with open_source(parquet(tmp_path, table_of(data), row_group_size=group)) as source:
                    for documents in (5, 1, 1000):
                        for batch in source.batches(documents):
                            rows = np.isin(in_order(data)[2], batch.data.qids)
                            assert np.array_equal(in_order(batch.data)[0], in_order(data)[0][rows])
                    assert_same(source.read(), data)


def test_types_and_layouts(tmp_path: Path) -> None:
    data = RankingData.from_arrays([[1, 0], [2, 1], [3, 1]], [0, 1, 0.5], qid=["b", "a", "b"], feature_names=("x", "y"))
    base = {"qid": ["b", "a", "b"], "label": [0, 1, 0.5]}
    vectors = pa.array([[1.0, 0.0], [2.0, 1.0], [3.0, 1.0]])
    for columns in (
        base | {"x": pa.array([1, 2, 3], pa.int8()), "y": [False, True, True]},
        base | {"x": pa.array([1, 2, 3], pa.uint64()), "y": pa.array([0, 1, 1]).cast(pa.decimal128(23, 2))},
        base | {"qid": pa.array(base["qid"]).dictionary_encode(), "x": [1.0, 2.0, 3.0], "y": [0, 1, 1]},
        base | {"features": vectors},
        base | {"features": vectors.cast(pa.list_(pa.float32(), 2))},
    ):
        for what in (pa.table(columns), parquet(tmp_path, columns)):
            with open_source(what) as source:
                assert_same(source.read(labelled=True), data)
                assert source.feature_names in (("x", "y"), None)
    dotted = base | {"x": [1, 2, 3], "x.y": [0, 1, 1]}
    with open_source(parquet(tmp_path, dotted)) as source:
        assert_same(source.read(), data)
    lists = {
        "qid": ["b", "e", "a", "b"],
        "label": [[0.0], [], [1], [0.5]],
        "features": [[[1.0, 0]], [], [[2, 1]], [[3, 1]]],
    }
    with open_source(parquet(tmp_path, lists)) as source:
        assert source.qids == ["b", "a"]  # a query with an empty list has no documents
        assert torch.equal(source.read().features, data.features)
        assert [batch.rows.tolist() for batch in source.batches(1)] == [[0, 2], [1]]


def test_nulls_follow_the_rule(tmp_path: Path) -> None:
    columns = {"qid": [1, 1, 2], "x": [None, 3.0, None], "flag": [True, None, False], "n": [1, None, 3]}
    with open_source(parquet(tmp_path, columns), missing="query-mean") as source:
        assert in_order(source.read())[0].tolist() == [[3, 1, 1], [3, 1, 1], [0, 0, 3]]
    with open_source(parquet(tmp_path, columns), columns=Columns(drop=("x", "flag")), missing="zero") as source:
        assert source.feature_names == ("n",)


def test_saved_tables_come_back(tmp_path: Path) -> None:
    for name in ["t.parquet", "t.arrow", "t.feather", "t.csv", "t.tsv.gz"]:
        for ids in [True, False]:
            for named in [True, False]:
                data = small_data(ids=ids).replace(feature_names=("a", "b.c", 'd"e', "f,g", "ü") if named else None)
                save_table(data, tmp_path / name)
                with open_source(tmp_path / name) as source:
                    back = source.read(labelled=True)
                assert_same(back, data)
                text = name.startswith(("t.csv", "t.tsv"))
                assert back.feature_names == (data.feature_names or (("f1", "f2", "f3", "f4", "f5") if text else None))


def test_what_saving_keeps_and_refuses(tmp_path: Path) -> None:
    data = small_data(shuffled=True)
    save_table(data, tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.num_rows == data.num_queries
    assert table.schema.field("features").type.value_type.list_size == 5
    assert pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(0).column(0).compression == "ZSTD"
    assert table.column("qid").to_pylist() == list(dict.fromkeys(in_order(data)[2]))
    precise = data.to(dtype=torch.float64)
    save_table(precise, tmp_path / "p.parquet")
    with open_source(tmp_path / "p.parquet", dtype=torch.float64) as source:
        assert torch.equal(source.read().features.sort(0).values, precise.features.sort(0).values)
    with pytest.raises(DataError, match=r"`path` must end in .parquet, .arrow, .feather, .csv or .tsv, got '.*t.xls'"):
        save_table(data, tmp_path / "t.xls")
    with pytest.raises(DataError, match="a feature must not be called 'label' to be saved"):
        save_table(data.replace(feature_names=("a", "b", "c", "d", "label")), tmp_path / "t.csv")
    assert not list(tmp_path.glob("*tmp"))


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parquet(tmp_path, {"qid": [1], "x": [1.0]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (lambda: open_source(file), lambda: save_table(small_data(), file)):
        with pytest.raises(MissingDependencyError, match=r"`pyarrow` is needed .* pip install 'lgmml-torch\[arrow\]'"):
            call()


def test_a_closed_source_holds_nothing(tmp_path: Path) -> None:
    """What was decoded goes at once, not when the garbage collector comes by: many files may be read in turn."""
    save_table(small_data(queries=200), tmp_path / "t.parquet")
    gc.disable()
    try:
        before = pa.total_allocated_bytes()
        for _ in range(3):
            with open_source(tmp_path / "t.parquet") as source:
                next(iter(source.batches(20)))
            del source
        for _ in range(100):  # threads of Arrow may hold the last piece for a moment
            if pa.total_allocated_bytes() == before:
                break
            time.sleep(0.05)
        assert pa.total_allocated_bytes() == before
    finally:
        gc.enable()


def test_memory_is_asked_for_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later lists need no more room than the first ones."""
    rows = 400
    file = parquet(tmp_path, {"qid": np.arange(rows) // 10, "x": np.arange(rows) / 7.0, "y": np.ones(rows)})
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 100 * 2 * 4}
    with open_source(file) as source:
        expected = [batch.data.features.clone() for batch in source.batches(100)]
        monkeypatch.setattr(os, "sysconf", lambda name: pages[name])
        found = [batch.data.features for batch in source.batches(100)]
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
