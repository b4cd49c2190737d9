"""Files as they are written: numbers, ids, zeros left out, the same bytes for the same data."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.data.write import _number, save_letor, save_table
from lgmml_torch.ragged import RankingData

DATA = RankingData.from_arrays(
    [[0.5, 0.0, -2.0], [1e20, 3.0, 0.0], [0.1, 1.0, 7.0]], [1, 0.5, 2], qid=[7, 3, 7], doc_ids=["a", "", "c"]
)


def test_numbers() -> None:
    for value, text in [
        (0.0, "0"),
        (-0.0, "-0"),
        (1.0, "1"),
        (-3.0, "-3"),
        (0.1, "0.1"),
        (1.5, "1.5"),
        (-2.25, "-2.25"),
        (1e-30, "1e-30"),
        (16777216.0, "16777216"),
    ]:
        for kind in [np.float32, np.float64]:
            assert _number(kind(value)) == text
            assert kind(float(text)) == kind(value)


def test_numbers_at_the_bound_of_whole_ones() -> None:
    assert _number(np.float64(1e15 - 1)) == "999999999999999"
    assert _number(np.float64(1e15 - 0.5)) == "999999999999999.5"
    assert _number(np.float64(1e15)) == "1000000000000000.0"
    assert _number(np.float64(-(1e15 - 1))) == "-999999999999999"
    assert _number(np.float64(7e14)) == "700000000000000"
    assert _number(np.float64(1e16)) == "1e+16"
    assert _number(np.float32(1e20)) == "1e+20"


def test_lines_by_hand(tmp_path: Path) -> None:
    save_letor(DATA, tmp_path / "a.txt")
    dense = ["1 qid:7 1:0.5 2:0 3:-2 #docid = a", "0.5 qid:3 1:1e+20 2:3 3:0", "2 qid:7 1:0.1 2:1 3:7 #docid = c"]
    assert (tmp_path / "a.txt").read_text().splitlines() == dense
    save_letor(DATA, tmp_path / "a.txt", sparse=True)
    sparse = ["1 qid:7 1:0.5 3:-2 #docid = a", "0.5 qid:3 1:1e+20 2:3", "2 qid:7 1:0.1 2:1 3:7 #docid = c"]
    assert (tmp_path / "a.txt").read_text().splitlines() == sparse


def test_the_same_data_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.txt.gz", "b.csv.gz"):
        save = save_letor if name == "a.txt.gz" else save_table
        save(DATA, tmp_path / name)
        raw = (tmp_path / name).read_bytes()
        assert raw[:2] == b"\x1f\x8b"
        assert raw[3:8] == bytes(5)  # neither a name nor a time
    save_letor(DATA, tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_bytes().startswith(b"1 qid:7")


def test_queries_that_no_line_can_hold(tmp_path: Path) -> None:
    for qid in ["a b", "", "a#", "a:b", "é", "a\t", "\x7f"]:
        data = RankingData.from_arrays(np.eye(2), [0, 1], qid=[qid, "ok"])
        with pytest.raises(DataError, match="a query id must be printable ASCII without blanks"):
            save_letor(data, tmp_path / "a.txt")
        assert not list(tmp_path.iterdir())
    save_letor(RankingData.from_arrays(np.eye(2), [0, 1], qid=["a-b_~!", "ok"]), tmp_path / "a.txt")


def test_tables_by_hand(tmp_path: Path) -> None:
    save_table(DATA, tmp_path / "a.csv")
    lines = ["qid,label,docid,f1,f2,f3", "7,1,a,0.5,0,-2", "3,0.5,,1e+20,3,0", "7,2,c,0.1,1,7"]
    assert (tmp_path / "a.csv").read_bytes().decode().split("\n") == [*lines, ""]
    named = DATA.replace(doc_ids=None, feature_names=("x,1", "y", "z"))
    save_table(named, tmp_path / "a.TSV.gz")
    text = gzip.decompress((tmp_path / "a.TSV.gz").read_bytes()).decode()
    assert text.splitlines()[:2] == ["qid\tlabel\tx,1\ty\tz", "7\t1\t0.5\t0\t-2"]
    for name in ("a.parquet.gz", "a.txt", "a", "a.csv.zip"):
        with pytest.raises(DataError, match=r"`path` must end in .parquet, .arrow, .feather, .csv or .tsv, got"):
            save_table(DATA, tmp_path / name)


@pytest.mark.parametrize("name", ["qid", "label", "docid"])
def test_names_of_other_columns(tmp_path: Path, name: str) -> None:
    data = DATA.replace(feature_names=("a", name, "b"))
    with pytest.raises(DataError, match=f"a feature must not be called '{name}' to be saved, that is another column"):
        save_table(data, tmp_path / "a.csv")


@pytest.mark.parametrize("mark", ["\n", "\r"])
def test_ids_of_several_lines(tmp_path: Path, mark: str) -> None:
    message = "an id must stand on one line to be saved, got"
    with pytest.raises(DataError, match=message):
        save_table(DATA.replace(doc_ids=("a", f"b{mark}c", "d")), tmp_path / "a.csv")
    with pytest.raises(DataError, match=message):
        save_table(DATA.replace(qids=("x", f"y{mark}z")), tmp_path / "a.csv")
    with pytest.raises(DataError, match="a document id must be one word to be saved"):
        save_letor(DATA.replace(doc_ids=("a", f"b{mark}c", "d")), tmp_path / "a.txt")
    assert not list(tmp_path.iterdir())


def test_a_row_per_query(tmp_path: Path) -> None:
    pa, feather = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.feather")

    def saved(data: RankingData) -> Any:
        save_table(data, tmp_path / "lists.arrow")
        return feather.read_table(tmp_path / "lists.arrow", memory_map=False)

    data = RankingData.from_arrays(
        [[float(row), 0.5] for row in range(40)],
        [row % 3 for row in range(40)],
        qid=[(row * 7) % 5 for row in range(40)],
        doc_ids=[f"d{row}" for row in range(40)],
    )
    table = saved(data).to_pydict()
    assert list(table) == ["qid", "label", "features", "docid"]
    assert table["qid"] == [0, 2, 4, 1, 3]  # as they first appear
    for place, query in enumerate(table["qid"]):
        own = [row for row in range(40) if (row * 7) % 5 == query]
        assert table["label"][place] == [row % 3 for row in own]
        assert table["features"][place] == [[row, 0.5] for row in own]
        assert table["docid"][place] == [f"d{row}" for row in own]
    for qids, kind in (((0, 1, 2, 3, 4), pa.int64()), (("0", 1, 2, 3, 4), pa.string()), (tuple("abcde"), pa.string())):
        made = saved(data.replace(qids=qids, doc_ids=None))
        assert made.schema.field("qid").type == kind
        assert made.column_names == ["qid", "label", "features"]
    named = saved(data.replace(feature_names=("x", "y")))
    assert named.schema.metadata == {b"feature_names": b'["x", "y"]'}
    assert saved(data).schema.metadata is None
    wide = saved(data.to(dtype=torch.float64)).schema.field("features").type
    assert wide.value_type.value_type == pa.float64()


def test_arrow_files_as_they_are_stored(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    many = RankingData.from_arrays(torch.zeros(2049, 1), torch.zeros(2049), group=[1] * 2049)
    save_table(many, tmp_path / "a.parquet")
    stored = pq.ParquetFile(tmp_path / "a.parquet").metadata
    assert [stored.row_group(group).num_rows for group in range(stored.num_row_groups)] == [2048, 1]
    assert stored.row_group(0).column(0).compression == "ZSTD"
    for name in ("a.arrow", "a.feather"):
        save_table(many, tmp_path / name)
        before = pa.total_allocated_bytes()
        with pa.memory_map(str(tmp_path / name)) as mapped:
            assert pa.ipc.open_file(mapped).read_all().num_rows == 2049
            assert pa.total_allocated_bytes() == before  # nothing had to be unpacked
