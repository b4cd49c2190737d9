"""Arrow's layouts by hand: what a schema means, rows from any group, lengths of lists, names, and what is refused."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.data import arrow
from lgmml_torch.data.arrow import ArrowSource
from lgmml_torch.data.columns import Columns
from lgmml_torch.data.source import ReadOptions, open_source
from tests.data.test_source import in_order

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

# query, label, id and features of eight documents of four queries
ROWS = [
    ("a", 1.0, "d0", [0.0, 10.0]),
    ("a", 0.0, "d1", [1.0, 11.0]),
    ("a", 2.0, "d2", [2.0, 12.0]),
    ("b", 0.0, "d3", [3.0, 13.0]),
    ("c", 1.0, "d4", [4.0, 14.0]),
    ("c", 0.0, "d5", [5.0, 15.0]),
    ("d", 2.0, "d6", [6.0, 16.0]),
    ("d", 1.0, "d7", [7.0, 17.0]),
]
QUERIES = ["a", "b", "c", "d"]
KINDS = ["flat", "vectors", "fixed vectors", "lists", "lists of vectors", "lists of fixed vectors", "large lists"]

# One column of lists alone is a list of numbers per query, not a vector per document.
CASES = [
    (kind, without)
    for kind in KINDS
    for without in ((), ("label",), ("docid",), ("label", "docid"))
    if kind not in ("vectors", "fixed vectors") or len(without) < 2
]


def lists_of(place: int) -> list[list[Any]]:
    return [[row[place] for row in ROWS if row[0] == query] for query in QUERIES]


def columns_of(kind: str) -> dict[str, Any]:
    """The same documents, laid out in one of the ways."""
    flat = {"qid": [row[0] for row in ROWS], "label": [row[1] for row in ROWS], "docid": [row[2] for row in ROWS]}
    X = [row[3] for row in ROWS]
    nested = {"qid": QUERIES, "label": lists_of(1), "docid": lists_of(2)}
    each = lists_of(3)
    return {
        "flat": {**flat, "x": [row[0] for row in X], "y": [row[1] for row in X]},
        "vectors": {**flat, "features": X},
        "fixed vectors": {**flat, "features": pa.array(X, pa.list_(pa.float64(), 2))},
        "lists": {
            **nested, "x": [[row[0] for row in rows] for rows in each], "y": [[row[1] for row in rows] for rows in each]
        },
        "lists of vectors": {**nested, "features": each},
        "lists of fixed vectors": {**nested, "features": pa.array(each, pa.list_(pa.list_(pa.float32(), 2)))},
        "large lists": {
            "qid": QUERIES,
            "label": pa.array(lists_of(1), pa.large_list(pa.float64())),
            "docid": pa.array(lists_of(2), pa.large_list(pa.string())),
            "features": pa.array(each, pa.large_list(pa.large_list(pa.float64()))),
        },
    }[kind]  # fmt: skip


def stored(folder: Path, columns: dict[str, Any] | Any, way: str, group: int = 2) -> Any:
    table = pa.table(columns) if isinstance(columns, dict) else columns
    if way == "table":
        pieces = [table.slice(start, group) for start in range(0, len(table), group)]
        return pa.concat_tables(pieces)
    file = folder / f"t.{way}"
    if way == "parquet":
        pq.write_table(table, file, row_group_size=group)
    else:
        feather.write_feather(table, str(file), chunksize=group, compression="uncompressed")
    return file


WAYS = pytest.mark.parametrize("way", ["parquet", "arrow", "table"])


@WAYS
def test_every_layout_in_any_order(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, without in CASES:
        for step in [1, 3, 8192]:
            monkeypatch.setattr(arrow, "_STEP", step)
            columns = {name: values for name, values in columns_of(kind).items() if name not in without}
            with open_source(stored(tmp_path, columns, way)) as source:
                assert isinstance(source, ArrowSource)
                assert source.has_labels is ("label" not in without)
                assert (source.num_rows, list(source.qids)) == (8, QUERIES)
                X, y, queries, ids = in_order(source.read())
                assert X.tolist() == [row[3] for row in ROWS]
                assert y.tolist() == [0.0 if "label" in without else row[1] for row in ROWS]
                assert queries == [row[0] for row in ROWS]
                assert ids == (None if "docid" in without else [row[2] for row in ROWS])
                asked = QUERIES * 3
                random.Random(step).shuffle(asked)
                for query in asked:
                    own = [row for row in ROWS if row[0] == query]
                    X, y, _, ids = in_order(source.only(query))
                    assert X.tolist() == [row[3] for row in own]
                    assert y.tolist() == [0.0 if "label" in without else row[1] for row in own]
                    assert ids == (None if "docid" in without else [row[2] for row in own])
                assert [batch.rows.tolist() for batch in source.batches(4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
                assert source.feature_names == (("x", "y") if "x" in columns else None)


@WAYS
def test_the_first_query_that_is_asked_for(tmp_path: Path, way: str) -> None:
    for kind in ["flat", "lists", "vectors"]:
        for query in QUERIES:
            for group in (1, 3, 100):
                with open_source(stored(tmp_path, columns_of(kind), way, group)) as source:
                    own = [row for row in ROWS if row[0] == query]
                    X, y, _, ids = in_order(source.only(query))
                assert (X.tolist(), y.tolist(), ids) == (
                    [row[3] for row in own],
                    [row[1] for row in own],
                    [row[2] for row in own],
                )


@WAYS
@pytest.mark.parametrize("without", [(), ("label", "docid")])
def test_scattered_queries(tmp_path: Path, way: str, without: tuple[str, ...]) -> None:
    order = [3, 0, 6, 1, 4, 7, 5, 2]
    columns = {name: [values[i] for i in order] for name, values in columns_of("flat").items() if name not in without}
    with open_source(stored(tmp_path, columns, way)) as source:
        for query in ("d", "a", "b", "c"):
            own = [ROWS[i] for i in order if ROWS[i][0] == query]
            X, y, _, ids = in_order(source.only(query))
            assert X.tolist() == [row[3] for row in own]
            assert y.tolist() == [0.0 if without else row[1] for row in own]
            assert ids == (None if without else [row[2] for row in own])


def test_one_column_of_lists_alone(tmp_path: Path) -> None:
    with open_source(pa.table({"qid": [1, 2], "x": [[1.0, 2.0], [3.0]]})) as source:
        assert in_order(source.read())[0].tolist() == [[1], [2], [3]]
        assert source.feature_names == ("x",)
    with open_source(pa.table({"qid": [1, 2], "label": [0.0, 1.0], "x": [[1.0, 2.0], [3.0, 4.0]]})) as source:
        assert in_order(source.read())[0].tolist() == [[1, 2], [3, 4]]
    with open_source(pa.table({"qid": [1], "label": [[0.0, 1.0]], "x": [[1.0, 2.0]]})) as source:
        assert in_order(source.read())[0].tolist() == [[1], [2]]
    with open_source(pa.table({"qid": [1], "x": [[[1.0, 2.0], [3.0, 4.0]]]})) as source:
        assert in_order(source.read())[0].tolist() == [[1, 2], [3, 4]]
    with open_source(pa.table({"qid": [1, 1], "x": [[1.0], [2.0]], "z": [[3.0], [4.0]]})) as source:
        assert in_order(source.read())[0].tolist() == [[1, 3], [2, 4]]


def test_columns_that_do_not_count_decide_nothing() -> None:
    columns = Columns(drop=("t",), weight="w", position="p")
    table = pa.table(
        {"qid": [1, 2], "w": [1.0, 2.0], "p": [1, 2], "t": ["a", "b"], "label": [0.0, 1.0], "v": [[1.0], [2.0]]}
    )
    with open_source(table, columns=columns) as source:
        assert in_order(source.read())[0].tolist() == [[1], [2]]
        assert source.column("t") == ["a", "b"]  # type: ignore[attr-defined]
    nested = pa.table(
        {"qid": [1, 2], "w": [1.0, 2.0], "t": ["a", "b"], "label": [[0.0, 1.0], [1.0]], "x": [[1.0, 5.0], [2.0]]}
    )
    with open_source(nested, columns=Columns(drop=("t",), weight="w")) as source:
        assert in_order(source.read())[0].tolist() == [[1], [5], [2]]
        assert source.column("t") == ["a", "a", "b"]  # type: ignore[attr-defined]
        assert source.column("w") == ["1.0", "1.0", "2.0"]  # type: ignore[attr-defined]


def test_schemas_that_are_refused() -> None:
    for columns, message in [
        ({"qid": [1], "label": [0.0], "v": [[[1.0]]]}, r"column 'label' must hold lists like 'v', got double"),
        ({"qid": [1], "x": [[1.0]], "y": [1.0]}, r"column 'y' must hold lists like 'x', got double"),
        ({"qid": [1], "x": [["a"]]}, r"column 'x' must hold numbers, got text"),
        ({"qid": [1], "label": [0.0], "v": [["a"]]}, r"column 'v' must hold numbers, got text"),
        ({"qid": [1], "v": [[["a"]]]}, r"column 'v' must hold numbers, got text"),
        ({"qid": [1], "label": ["a"], "x": [1.0]}, r"column 'label' must hold numbers, got text"),
    ]:
        with pytest.raises(DataError, match=rf"^table: {message}"):
            open_source(pa.table(columns)).read()


@WAYS
def test_rows_that_are_refused(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in [1, 2, 8192]:
        for columns, message in [
            ({"qid": ["a", "b", "b", None], "x": [1.0] * 4}, r"row 4 \(from 1\): column 'qid' must not be empty"),
            ({"qid": [1.0, 2.0, np.nan, 3.0], "x": [1.0] * 4}, r"row 3 \(from 1\): column 'qid' must not be empty"),
            (
                {"qid": [1, 2, 3, 4], "label": [0.0] * 4, "v": [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [3.0]]},
                r"row 4 \(from 1\): column 'v' has 1 features, elsewhere 2",
            ),
            (
                {"qid": [1, 2, 3, 4], "label": [0.0] * 4, "v": [[1.0, 2.0], [1.0, 2.0], None, [3.0, 1.0]]},
                r"row 3 \(from 1\): column 'v' has 0 features, elsewhere 2",
            ),
            (
                {"qid": [1, 2, 3, 4], "label": [[0.0]] * 3 + [[1.0, 2.0]], "x": [[1.0]] * 4},
                r"row 4 \(from 1\): column 'x' has 1 entries for 2 documents",
            ),
            (
                {"qid": [1, 2, 3, 4], "label": [[0.0]] * 4, "x": [[1.0]] * 2 + [None, [1.0]]},
                r"row 3 \(from 1\): column 'x' has 0 entries for 1 documents",
            ),
            (
                {"qid": [1, 2, 3, 4], "label": [[0.0]] * 3 + [None], "x": [[1.0]] * 4},
                r"row 4 \(from 1\): the list in column 'label' is missing",
            ),
            (
                {"qid": [1, 2, 3, 4], "docid": [["a"], None, ["b"], ["c"]], "x": [[1.0]] * 4},
                r"row 2 \(from 1\): the list in column 'docid' is missing",
            ),
            (
                {"qid": [1, 2, 3, 4], "x": [[1.0], [1.0], [2.0], None]},
                r"row 4 \(from 1\): the list in column 'x' is missing",
            ),
            (
                {"qid": [1, 2, 3], "label": [[0, 0], [0], [0]], "v": [[[1.0], [2.0]], [[1.0]], [[1.0, 2.0]]]},
                r"row 4 \(from 1\): column 'v' has 2 features, elsewhere 1",
            ),
        ]:
            monkeypatch.setattr(arrow, "_STEP", step)
            with pytest.raises(DataError, match=message), open_source(stored(tmp_path, columns, way)) as source:
                source.read()


def named(names: list[str] | None, table: dict[str, Any]) -> Any:
    made = pa.table(table)
    return made if names is None else made.replace_schema_metadata({b"feature_names": json.dumps(names)})


@pytest.mark.parametrize("kind", ["vectors", "fixed vectors", "lists of vectors"])
def test_names_of_vectors(kind: str) -> None:
    columns = columns_of(kind)

    def read(names: list[str] | None, wanted: Any = None) -> tuple[Any, Any]:
        source = ArrowSource.of_table(named(names, columns), ReadOptions(feature_names=wanted))
        return source.feature_names, in_order(source.read())[0][0].tolist()

    assert read(None) == (None, [0, 10])
    assert read(["p", "q"]) == (("p", "q"), [0, 10])
    assert read(["p"]) == (None, [0, 10])  # names that do not fit say nothing
    assert read(["p", "q"], ("q", "p")) == (("q", "p"), [10, 0])
    assert read(["p", "q"], ("p", "q")) == (("p", "q"), [0, 10])
    assert read(None, ("q", "p")) == (("q", "p"), [0, 10])
    assert read(["p"], ("q", "p")) == (("q", "p"), [0, 10])
    with pytest.raises(DataError, match=r"^table: column 'z' is missing, and there should be no column 'q'$"):
        read(["p", "q"], ("p", "z"))
    with pytest.raises(DataError, match=r"^table: there are names for 3 features, but column 'features' holds 2$"):
        read(None, ("a", "b", "c"))
    model = ReadOptions(feature_names=("p", "z"), model=True)
    with pytest.raises(DataError, match=r"and the model was trained on no column 'q'$"):
        ArrowSource.of_table(named(["p", "q"], columns), model)


def test_the_first_vector_that_is_there_gives_the_width() -> None:
    table = pa.table({"qid": [1, 2], "label": [0.0, 1.0], "v": pa.array([None, [1.0, 2.0]])})
    with pytest.raises(DataError, match=r"row 1 \(from 1\): column 'v' has 0 features, elsewhere 2"):
        open_source(table).read()
    empty = pa.table(
        {
            "qid": pa.array([], pa.int64()),
            "label": pa.array([], pa.float64()),
            "v": pa.array([], pa.list_(pa.float64())),
        }
    )
    with pytest.raises(DataError, match=r"^table: there are no documents$"):
        open_source(empty).read()
    hollow = pa.table(
        {"qid": [1], "label": pa.array([[]], pa.list_(pa.float64())), "x": pa.array([[]], pa.list_(pa.float64()))}
    )
    with pytest.raises(DataError, match=r"^table: there are no documents$"):
        open_source(hollow).read()


def test_labels_that_are_missing_are_named(tmp_path: Path) -> None:
    table = pa.table({"qid": [1], "labels": [1.0], "x": [2.0]})
    message = r"^table: the schema names no column 'label', and training needs labels; did you mean 'labels'\?$"
    with pytest.raises(DataError, match=message):
        open_source(table).read(labelled=True)


def source_of(table: Any, sizes: list[int], close: Any, pieces: Any = None) -> ArrowSource:
    def all_of(first: int, columns: list[str], step: int) -> Any:
        yield from table.select(columns).to_batches(step)

    return ArrowSource("t", "Arrow", ReadOptions(), table.schema, sizes, pieces or all_of, close)


def test_the_file_is_let_go() -> None:
    closed: list[int] = []
    table = pa.table(columns_of("flat"))
    with source_of(table, [8], lambda: closed.append(1)) as source:
        source.read()
        assert not closed
    assert closed == [1]
    assert len(source._held.features) == 0
    with pytest.raises(DataError, match="must name a column 'qid'"):
        source_of(pa.table({"x": [1.0]}), [1], lambda: closed.append(2))
    assert closed == [1, 2]


def test_files_that_promise_more_rows_than_they_have() -> None:
    table = pa.table(columns_of("flat"))

    def fewer(first: int, columns: list[str], step: int) -> Any:
        whole = columns == ["qid"]
        yield from (table if whole else table.slice(0, 5)).select(columns).to_batches(step)

    with pytest.raises(DataError, match=r"^t: the file is damaged: it has fewer rows than it says$"):
        source_of(table, [8], lambda: None, fewer).read()


def test_standard_input_may_be_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("parquet", "arrow"):
        content = stored(tmp_path, columns_of("flat"), way).read_bytes()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        with open_source("-", kind=way) as source:
            assert source.name == "<stdin>"
            assert in_order(source.read())[0].tolist() == [row[3] for row in ROWS]


def test_numbers_beyond_single_precision_are_infinite_there() -> None:
    for columns in (
        {"qid": [1], "label": [0.0], "x": [1e300]},
        {"qid": [1], "label": [0.0], "v": [[1e300]]},
    ):
        with pytest.raises(DataError, match=r"must be a finite number, got inf"):
            open_source(pa.table(columns)).read()
        assert open_source(pa.table(columns), dtype=torch.float64).read().features.item() == 1e300


def test_queries_are_numbered_as_they_appear() -> None:
    for qid in (["b", "a", "b", "c"], pa.array(["b", "a", "b", "c"]).dictionary_encode(), [2, 1, 2, 3]):
        source = open_source(pa.table({"qid": qid, "x": [1.0, 2.0, 3.0, 4.0]}))
        assert source.codes.tolist() == [0, 1, 0, 2]
    chunks = pa.chunked_array([["b", "a"], ["c", "b"], ["d", "a"]])
    source = open_source(pa.table({"qid": chunks, "x": range(6)}))
    assert (source.codes.tolist(), list(source.qids)) == ([0, 1, 2, 0, 3, 1], ["b", "a", "c", "d"])
    nested = pa.table({"qid": ["a", "b", "a"], "x": pa.array([[1.0], [], [2.0, 3.0]])})
    assert (open_source(nested).codes.tolist(), list(open_source(nested).qids)) == ([0, 0, 0], ["a"])
