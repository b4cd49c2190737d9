"""One way in: the same data in every format, whole or list by list, and the same refusals either way."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import sparse

from lgmml_torch.checks import DataError, DataWarning, LGMMLError
from lgmml_torch.data.columns import Columns
from lgmml_torch.data.letor import load_letor
from lgmml_torch.data.source import FORMATS, DataSource, Format, ReadOptions, SourceRows, kind_of, open_source
from lgmml_torch.data.write import save_letor, save_table
from lgmml_torch.ragged import RankingData
from tests.doors import FEATURES, save_lightgbm, small_data

NAMES = ("f1", "f2", "f3", "f4", "f5")
FILES = ["txt", "txt.gz", "lightgbm", "csv", "tsv", "csv.gz", "npz", "parquet", "lists.parquet", "nested.parquet"]
FILES += ["arrow", "feather", "nested.arrow"]
OBJECTS = ["pandas", "polars", "pyarrow", "nested pyarrow", "arrays", "tensors", "sparse", "data"]
GROUPED = ("lightgbm", "lists", "nested")  # formats that put the rows of a query together


def in_order(data: RankingData) -> tuple[np.ndarray, np.ndarray, list[Hashable], list[str] | None]:
    """Features, labels, queries and ids in the caller's order."""
    queries = [data.qids[q] for q in data.in_caller_order(data.query_index).tolist()]
    ids = None if data.doc_ids is None else [data.doc_ids[row] for row in data.order.argsort().tolist()]
    return data.in_caller_order(data.features).numpy(), data.in_caller_order(data.labels).numpy(), queries, ids


def table_of(data: RankingData) -> dict[str, Any]:
    """The columns of a table, features among others."""
    X, y, qid, ids = in_order(data)
    table = {"f1": X[:, 0], "qid": np.array(qid), "f2": X[:, 1], "label": y}
    if ids is not None:
        table["docid"] = np.array(ids, dtype=object)
    return table | {name: X[:, column] for column, name in enumerate(NAMES) if column > 1}


def arrow_lists(data: RankingData) -> Any:
    """A row per query, a list column per feature."""
    pa = pytest.importorskip("pyarrow")
    queries = list(dict.fromkeys(in_order(data)[2]))
    rows: dict[Hashable, list[int]] = {q: [i for i, own in enumerate(in_order(data)[2]) if own == q] for q in queries}
    table = table_of(data)
    lists = {name: [values[rows[q]].tolist() for q in queries] for name, values in table.items() if name != "qid"}
    return pa.table({"qid": queries, **lists})


def write(data: RankingData, folder: Path, kind: str) -> Path:
    """The data in the caller's order, in one of the formats."""
    file = folder / f"data.{kind}"
    if kind == "npz":
        X, y, qid, ids = in_order(data)
        np.savez(file, X=X, y=y, qid=np.array(qid), **({} if ids is None else {"docid": np.array(ids)}))
    elif kind.removesuffix(".gz") in ("csv", "tsv"):
        mark, table = "," if "csv" in kind else "\t", table_of(data)
        rows = [mark.join(table), *(mark.join(map(str, row)) for row in zip(*table.values(), strict=True))]
        content = "".join(f"{row}\n" for row in rows).encode()
        file.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    elif kind == "lightgbm":
        save_lightgbm(data, file)
    elif kind.startswith("txt"):
        save_letor(data, file)
    elif kind.startswith("nested"):
        save_table(data, file)
    else:
        pa, pq, feather = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet", "pyarrow.feather"))
        table = arrow_lists(data) if kind.startswith("lists") else pa.table(table_of(data))
        if kind.endswith("parquet"):
            pq.write_table(table, file, row_group_size=9)
        else:
            feather.write_feather(table, str(file), chunksize=9)
    return file


def offered(data: RankingData, folder: Path, kind: str) -> tuple[Any, dict[str, Any]]:
    """What `open_source` is called with."""
    if kind in FILES:
        return write(data, folder, kind), {}
    if kind == "data":
        return data, {}
    if kind == "nested pyarrow":
        return arrow_lists(data), {}
    if kind in ("pandas", "polars", "pyarrow"):
        library = pytest.importorskip(kind)
        return (library.table if kind == "pyarrow" else library.DataFrame)(table_of(data)), {}
    X, y, qid, ids = in_order(data)
    make = {"arrays": np.asarray, "tensors": torch.from_numpy, "sparse": sparse.csr_matrix}[kind]
    return make(X), {"y": y, "qid": qid, "doc_ids": ids}


def gathered(source: DataSource, documents: int) -> tuple[np.ndarray, np.ndarray, list[Any], list[Any]]:
    """Features, labels, query and id of every row of the source, from all batches."""
    features = np.full((source.num_rows, FEATURES), np.nan, np.float32)
    labels, qids = np.full(source.num_rows, np.nan), [None] * source.num_rows
    ids = [None] * source.num_rows
    for batch in source.batches(documents):
        X, y, queries, names = in_order(batch.data)
        features[batch.rows], labels[batch.rows] = X, y
        for row, query, name in zip(batch.rows.tolist(), queries, names or [""] * len(X), strict=True):
            assert qids[row] is None  # each row once
            qids[row], ids[row] = query, name
    return features, labels, qids, ids


def bits(values: Any) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def test_every_format_gives_the_same_data(tmp_path: Path) -> None:
    for shuffled in [False, True]:
        for kind in [*FILES, *OBJECTS]:
            if kind == "lightgbm" and shuffled:
                continue  # its rows follow one another by definition
            data = small_data(shuffled=shuffled)
            what, more = offered(data, tmp_path, kind)
            with open_source(what, **more) as source:
                whole = source.read(labelled=True)
            grouped = kind.startswith(GROUPED)
            for name in ("features", "labels", "offsets", *(() if grouped else ("order",))):
                assert bits(getattr(whole, name)) == bits(getattr(data, name)), name
            assert whole.doc_ids == data.doc_ids
            assert whole.qids == (tuple(range(12)) if kind == "lightgbm" else data.qids)
            named = kind.startswith(
                ("csv", "tsv", "parquet", "lists", "arrow", "feather", "pandas", "polars", "pyarrow")
            )
            assert whole.feature_names == (NAMES if named or kind == "nested pyarrow" else None)
            sizes = dict(zip(whole.qids, whole.sizes.tolist(), strict=True))
            for documents in (1, 7, 10_000):
                with open_source(what, **more, num_features=FEATURES) as source:
                    assert source.in_order is (not shuffled or grouped)
                    assert source.has_labels
                    X, y, queries, ids = gathered(source, documents)
                    assert (bits(X), y.tolist(), queries, ids) == (
                        bits(in_order(whole)[0]),
                        *map(list, in_order(whole)[1:]),
                    )
                    for batch in source.batches(documents):
                        assert all(
                            sizes[q] == n for q, n in zip(batch.data.qids, batch.data.sizes.tolist(), strict=True)
                        )
                        assert batch.data.feature_names == whole.feature_names
            for field in ("features", "labels", "offsets", "order"):
                assert torch.equal(getattr(batch.data, field), getattr(whole, field)), field


@pytest.mark.parametrize("kind", [*FILES, *OBJECTS])
def test_float64_keeps_every_digit_a_format_has(tmp_path: Path, kind: str) -> None:
    what, more = offered(small_data(), tmp_path, kind)
    with open_source(what, **more, dtype=torch.float64) as source:
        data = source.read()
    assert data.features.dtype == (torch.float32 if kind == "data" else torch.float64)
    np.testing.assert_allclose(in_order(data)[0], in_order(small_data())[0], rtol=1e-6)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "7", "c d"]),
            st.integers(0, 4),
            st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_any_finite_numbers_survive_a_table(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("tables")
    data = RankingData.from_arrays([x for *_, x in rows], [y for _, y, _ in rows], qid=[q for q, *_ in rows])
    for name in ("a.csv", "a.tsv.gz", "a.parquet", "a.arrow"):
        save_table(data, folder / name)
        with open_source(folder / name) as source:
            back = source.read()
        if set(data.qids) == {"7"} and name.startswith(("a.csv", "a.tsv")):
            assert back.qids == (7,)  # text has no types: whole numbers are numbers
        else:
            assert back.qids == data.qids
        assert bits(back.features) == bits(data.features)
        assert bits(back.labels) == bits(data.labels)


def test_agrees_with_the_loader(tmp_path: Path) -> None:
    file = write(small_data(shuffled=True), tmp_path, "txt")
    whole = load_letor(file, cache=False)
    with open_source(file, num_features=FEATURES) as source:
        (batch,) = source.batches(10_000)
    for name in ("features", "labels", "offsets", "order"):
        torch.testing.assert_close(getattr(batch.data, name), getattr(whole, name), rtol=0, atol=0)
    assert (batch.data.qids, batch.data.doc_ids) == (whole.qids, whole.doc_ids)


def test_one_query(tmp_path: Path) -> None:
    for kind in ["txt.gz", "csv.gz", "parquet", "nested.parquet", "arrow", "npz", "pandas"]:
        for shuffled in [False, True]:
            data = small_data(shuffled=shuffled)
            what, _ = offered(data, tmp_path, kind)
            with open_source(what, num_features=FEATURES) as source:
                for query in (3, 9, 1):  # forwards and back
                    torch.testing.assert_close(source.only(str(10 + query)).features, data.select([query]).features)
                with pytest.raises(DataError, match=r": there is no query '99'; there are \d+, "):
                    source.only("99")


def read_whole(source: DataSource) -> None:
    source.read()


def read_lists(source: DataSource) -> None:
    list(source.batches(2))


BOTH_WAYS = pytest.mark.parametrize("way", [read_whole, read_lists])


def test_odd_but_lawful_letor(tmp_path: Path) -> None:
    file = tmp_path / "odd.txt"
    file.write_bytes(
        b"\xef\xbb\xbf# a comment\n\n1 qid:b 2:1e-1#x\r\n  0\tqid:a  1:+2  \n\n# another qid:z\n2 qid:b 1:3 5:4 # y z"
    )
    with open_source(file, num_features=FEATURES) as source:
        features, labels, qids, _ = gathered(source, 1)
        ids = [batch.data.doc_ids for batch in source.batches(1)]
        assert in_order(source.read())[3] == ["x", "", "y z"]
    np.testing.assert_allclose(features, [[0, 0.1, 0, 0, 0], [2, 0, 0, 0, 0], [3, 0, 0, 0, 4]], rtol=1e-6)
    assert labels.tolist() == [1, 0, 2]
    assert qids == ["b", "a", "b"]
    assert ids == [("x", "y z"), ("",)]


@BOTH_WAYS
def test_letor_without_labels(tmp_path: Path, way: Any) -> None:
    file = tmp_path / "new.txt"
    file.write_text("# head\nqid:1 1:2 #a\n\n  qid:2 5:1\nqid:1 1:3\n")
    with open_source(file, num_features=FEATURES) as source:
        assert not source.has_labels
        features, labels, qids, ids = gathered(source, 10)
        whole = source.read()
        with pytest.raises(DataError, match=r"new.txt:2: the line starts without a label, and training needs labels"):
            source.read(labelled=True)
    assert features[:, 0].tolist() == [2, 0, 3]
    assert labels.tolist() == [0, 0, 0]
    assert qids == [1, 2, 1]
    assert ids == ["a", "", ""]
    assert bits(in_order(whole)[0]) == bits(features)
    file.write_text("qid:1 1:2\n1 qid:1 1:3\n")
    with pytest.raises(DataError, match=r"new.txt:2: missing qid"), open_source(file, num_features=FEATURES) as source:
        way(source)
    with pytest.raises(DataError, match=r"new.txt:1: the line starts without a label"):
        load_letor(file, cache=False)


@BOTH_WAYS
def test_bad_letor_is_named_by_line(tmp_path: Path, way: Any) -> None:
    for text, message in [
        ("1 qid:1 1:1\n\n1 qid:2 6:1\n", r"bad.txt:3: feature index 6 is .* 5; the model was trained on 5 features"),
        ("1 qid:1 1:1\n1 1:1\n", r"bad.txt:2: missing qid"),
        ("1 qid:1 1:1\n1 qid:2 1:x\n1 qid:1 1:1\n", r"bad.txt:2: the value of feature 1 must be a number, got 'x'"),
        ("1 qid:1 1:1\n1 qid:1 1:nan\n", r"bad.txt:2: the value of feature 1 is missing"),
        ("1 qid:1 1:1 2:1\n1 qid:1 1:1 2:1\n1 qid:1 1:1", r"bad.txt:3: the last line is cut: it has 1 features"),
        ("1 qid:1 1:1#a\n1 qid:1 2:1#b\n1 qid:2 1:1", r"bad.txt:3: the last line is cut: it ends without a comment"),
        ("1 qid:1 1:1\n\x0b\n", r"bad.txt:2: not plain text, found byte 0x0b"),
        ("1 qid: 1:1\n", r"bad.txt:1: `qid:` must be followed by the id of the query"),
        ("# nothing\n\n", r"bad.txt:1: the file holds no documents"),
    ]:
        file = tmp_path / "bad.txt"
        for content in (text.encode(), gzip.compress(text.encode())):
            file.write_bytes(content)
            with pytest.raises(DataError, match=message), open_source(file, num_features=FEATURES) as source:
                way(source)


@BOTH_WAYS
def test_absent_features_are_the_same_either_way(tmp_path: Path, way: Any) -> None:
    file = tmp_path / "data.txt"
    file.write_text("1 qid:1 1:1 2:4\n\n0 qid:2 1:1 2:2\n1 qid:1 1:3\n")
    with open_source(file, absent="missing", missing="query-mean") as source:
        assert gathered_2d(source) == in_order(source.read())[0].tolist() == [[1, 4], [1, 2], [3, 4]]
    with pytest.raises(DataError, match=r"data.txt:4: feature 2 is absent; `missing=` says what to put there"):  # noqa: SIM117
        with open_source(file, absent="missing") as source:
            way(source)
    file.write_text("1 qid:1\n")
    with (
        pytest.raises(DataError, match=r"data.txt:\d: no line up to here gives a feature"),
        open_source(file) as source,
    ):
        way(source)


def gathered_2d(source: DataSource) -> list[list[float]]:
    rows: dict[int, list[float]] = {}
    for batch in source.batches(1):
        rows |= dict(zip(batch.rows.tolist(), in_order(batch.data)[0].tolist(), strict=True))
    return [rows[row] for row in sorted(rows)]


def test_a_letor_file_with_fewer_features_than_the_model_says_so(tmp_path: Path) -> None:
    """Lines leave zeros out, so it cannot be refused; both numbers are told, once, and only for a model."""
    file = tmp_path / "a.txt"
    file.write_text("1 qid:1 1:1 3:1\n0 qid:1 2:1\n0 qid:2 1:1\n")
    with open_source(file, num_features=5) as source:
        message = (
            r"a.txt: the highest feature index is 3, the model was trained on 5 features: features 4 to 5 count as 0"
        )
        with pytest.warns(DataWarning, match=message):
            assert len(list(source.batches(1))) == 2
        assert source.read().num_features == 5  # it has been told
    with open_source(file, num_features=4) as source, pytest.warns(DataWarning, match="feature 4 counts as 0 everyw"):
        source.read()
    with open_source(file, num_features=3) as source:
        assert len(list(source.batches(1))) == 2
    assert load_letor(file, num_features=9, cache=False).num_features == 9


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_data(shuffled=True)
    kinds = {"txt": None, "txt.gz": None, "csv": "csv", "tsv": "tsv", "npz": "npz", "parquet": "parquet"}
    for kind, said in {**kinds, "arrow": "arrow"}.items():
        content = write(data, tmp_path, kind).read_bytes()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        with open_source("-", num_features=FEATURES, kind=said) as source:
            assert source.name == "<stdin>"
            features, *_ = gathered(source, 5)
        np.testing.assert_array_equal(features, data.in_caller_order(data.features).numpy())


@BOTH_WAYS
def test_bad_files(tmp_path: Path, way: Any) -> None:
    def refused(file: Path, message: str) -> None:
        with pytest.raises(DataError, match=message) as caught, open_source(file, num_features=2) as source:
            way(source)
        assert "\n" not in str(caught.value)

    refused(tmp_path / "none.txt", r"none.txt: no such file")
    with pytest.raises(LGMMLError, match=r"`kind` must be one of 'letor', 'lightgbm', 'csv', .*, got 'xls'"):
        open_source(tmp_path / "none.txt", num_features=2, kind="xls")
    cut = tmp_path / "cut.txt.gz"
    cut.write_bytes(gzip.compress(b"1 qid:1 1:1\n" * 1000)[:-12])
    refused(cut, r"cut.txt.gz: the compressed file is damaged or cut")
    junk = tmp_path / "junk.npz"
    junk.write_bytes(b"junk")
    refused(junk, r"junk.npz: not a readable .npz file")
    np.savez(junk, X=np.zeros((2, 2)))
    refused(junk, r"junk.npz: there must be an array 'qid', got X")
    np.savez(junk, X=np.zeros((2, 3)), qid=[1, 1])
    refused(junk, r"junk.npz: the model was trained on 2 features, but `X` has 3")
    np.savez(junk, X=np.zeros((2, 2)), qid=[1])
    refused(junk, r"junk.npz: `qid` must have one entry per row, 2, got 1")
    np.savez(junk, X=np.array([[0, 1], [0, np.nan]]), qid=[1, 2])
    refused(junk, r"junk.npz: row 2 \(from 1\): feature 2 is missing; `missing=` says what to put there")
    np.savez(junk, X=np.array([[0, 1], [0, np.inf]]), qid=[1, 2])
    refused(junk, r"junk.npz: row 2 \(from 1\): feature 2 must be a finite number, got inf")
    np.savez(junk, X=np.array([[0, 1], [0, 1]]), y=[0, np.nan], qid=[1, 2])
    refused(junk, r"junk.npz: row 2 \(from 1\): the label must be a finite number, got nan")
    np.savez(junk, X=np.zeros((0, 2)), qid=[])
    refused(junk, r"junk.npz: there are no documents")


def test_loaded_data_can_be_streamed_too() -> None:
    data = small_data(shuffled=True)
    source = open_source(data, num_features=FEATURES)
    features, labels, *_ = gathered(source, 4)
    np.testing.assert_array_equal(features, data.in_caller_order(data.features).numpy())
    np.testing.assert_array_equal(labels, data.in_caller_order(data.labels).numpy())
    assert source.only("12").doc_ids == data.select([2]).doc_ids
    bare = open_source(np.zeros((1, 2)), qid=[1], num_features=2)
    assert not bare.has_labels
    with pytest.raises(DataError, match="arrays: there are no labels, and training needs them"):
        bare.read(labelled=True)


def test_filling_gaps_leaves_the_callers_array_alone() -> None:
    X = np.array([[1.0, np.nan], [3.0, 2.0]], np.float32)
    data = open_source(X, y=[0, 1], qid=[1, 1], missing="query-mean").read()
    assert data.features.tolist() == [[1, 2], [3, 2]]
    assert np.isnan(X[0, 1])


def test_what_a_name_says(tmp_path: Path) -> None:
    names = {"a.csv": "csv", "a.CSV.gz": "csv", "a.tsv": "tsv", "a.npz": "npz", "a.parquet": "parquet"}
    names |= {"a.arrow": "arrow", "a.feather": "arrow", "a.txt": "letor", "rank.train": "letor", "a": "letor"}
    for name, kind in names.items():
        assert kind_of(tmp_path / name) == kind
    (tmp_path / "odd.name.query").write_text("1\n")
    assert kind_of(tmp_path / "odd.name") == kind_of(tmp_path / "odd.name.gz") == "lightgbm"


class ToySource(DataSource):
    """``qid label values…``, nothing checked: as little as a format can be."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(str(path), options)
        self.lines = [line.split() for line in Path(path).read_text().splitlines()]

    def _index(self) -> tuple[NDArray[np.int64], Sequence[Hashable]]:
        known: dict[str, int] = {}
        codes = [known.setdefault(words[0], len(known)) for words in self.lines]
        return np.array(codes), list(known)

    def _read(self, rows: NDArray[np.int64]) -> SourceRows:
        values = np.array([self.lines[row][1:] for row in rows], dtype=np.float32)
        return SourceRows(values[:, 1:], values[:, 0], None)


def test_a_new_format_is_two_methods_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lgmml_torch.data.catalog import open_dataset, open_table

    monkeypatch.setitem(FORMATS, "toy", Format(ToySource, (".toy",)))
    file = tmp_path / "data.toy"
    file.write_text("".join(f"q{row % 7} {row % 3} {row} {-row}\n" for row in range(30)))
    with open_source(file) as source:
        assert source.read().num_queries == len(list(source.batches(1))) == 7
        assert source.only("q3").num_documents == 4
    assert sum(part.num_queries for part in open_table(file).values()) == 7
    file.rename(tmp_path / "train.toy")
    assert open_dataset(tmp_path)["train"].num_documents == 30
    (tmp_path / "train.toy").write_text("q 1 2 nan\n")
    with pytest.raises(DataError, match=r"train.toy: row 1 \(from 1\): feature 2 is missing"):
        open_dataset(tmp_path)


@pytest.mark.slow
def test_memory_stays_below_the_file(tmp_path: Path) -> None:
    """A file of tens of MB, also with its queries scattered, is read in batches with less than half of that."""
    for kind in ["txt", "csv", "parquet"]:
        for scattered in [False, True]:
            import tracemalloc

            file, width, rows = tmp_path / f"big.{kind}", 60, 60_000
            queries = [row % 500 if scattered else row // 120 for row in range(rows)]
            if kind == "parquet":
                pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
                values = np.random.default_rng(0).random((width, rows))
                pq.write_table(pa.table({"qid": queries, **{f"f{j}": values[j] for j in range(width)}}), file)
            else:
                numbers = [f"0.123456{j}" for j in range(width)]
                letor = " ".join(f"{j + 1}:{number}" for j, number in enumerate(numbers))
                with file.open("w") as stream:
                    if kind == "csv":
                        stream.write(",".join(["qid", *(f"f{j}" for j in range(width))]) + "\n")
                    for row, query in enumerate(queries):
                        stream.write(
                            f"{row % 3} qid:{query} {letor}\n" if kind == "txt" else f"{query},{','.join(numbers)}\n"
                        )
            tracemalloc.start()
            with open_source(file, num_features=width) as source:
                count = sum(batch.data.num_documents for batch in source.batches(2_000))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert count == rows
            assert peak < file.stat().st_size / 2


@pytest.mark.parametrize("kind", ["pandas", "pyarrow", "parquet"])
def test_names_that_come_twice(tmp_path: Path, kind: str) -> None:
    pd, pa, pq = (pytest.importorskip(name) for name in ("pandas", "pyarrow", "pyarrow.parquet"))
    names = ["qid", "a", "a"]
    table = pa.Table.from_arrays([pa.array([1, 2])] * 3, names=names)
    pq.write_table(table, tmp_path / "t.parquet")
    what = {"pandas": pd.DataFrame([[1, 1, 1]], columns=names), "pyarrow": table, "parquet": tmp_path / "t.parquet"}[
        kind
    ]
    with pytest.raises(DataError, match=r"(frame|table|t.parquet): column 'a' is named twice"):
        open_source(what)


def test_frames_are_refused_by_column() -> None:
    for kind in ("pandas", "polars"):
        frame = pytest.importorskip(kind).DataFrame({"qid": [1, 1], "x": [1.0, None], "t": ["a", "b"]})
        with pytest.raises(DataError, match="frame: column 't' must hold numbers, got text"):
            open_source(frame)
        with pytest.raises(DataError, match=r"frame: row 2 \(from 1\): column 'x' is missing; `missing=` says"):
            open_source(frame, columns=Columns(drop=("t",))).read()
        with pytest.raises(DataError, match="frame: the frame must name a column 'query'; there are 'qid', 'x', 't'"):
            open_source(frame, columns=Columns(qid="query"))


def test_columns_are_named_by_the_caller() -> None:
    frame = pytest.importorskip("pandas").DataFrame({"q": [1, 1], "grade": [0, 2], "id": ["a", "b"], "x": [1.5, 2.5]})
    columns = Columns(qid="q", label="grade", doc_id="id")
    data = open_source(frame, columns=columns).read(labelled=True)
    assert (data.qids, data.doc_ids, data.feature_names) == ((1,), ("a", "b"), ("x",))
    only_x = open_source(frame, columns=Columns(qid="q", drop=("grade", "id")))
    assert not only_x.has_labels
    assert only_x.feature_names == ("x",)
