"""Columns of words in every format: the same codes, the vocabulary asked for, gaps, caches and files written."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.categories import OTHER
from lgmml_torch.checks import DataError, DataWarning
from lgmml_torch.data.arrow import ArrowSource
from lgmml_torch.data.cache import cached
from lgmml_torch.data.catalog import load_parts, open_table
from lgmml_torch.data.columns import Columns
from lgmml_torch.data.letor import load_file
from lgmml_torch.data.source import open_source
from lgmml_torch.data.write import save_letor, save_table
from lgmml_torch.ragged import RankingData
from tests.data.test_source import in_order

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")

# Each query's rows follow one another, so that formats with a row per query keep the order.
ROWS = [
    ("a", 1.0, "red", 0.5, "x2", "d1"),
    ("a", 0.0, "blue", 1.5, "x1", "d2"),
    ("b", 2.0, "red", 2.5, "x3", "d3"),
    ("b", 0.0, "green", 3.5, "x1", "d4"),
    ("c", 1.0, "blue", 4.5, "x2", "d5"),
]
NAMES = ("colour", "size", "brand")
CODES = [[2, 0.5, 1], [0, 1.5, 0], [2, 2.5, 2], [1, 3.5, 0], [0, 4.5, 1]]
WORDS = (("blue", "green", "red"), None, ("x1", "x2", "x3"))
FORMATS = ["csv", "csv.gz", "tsv", "parquet", "typed.parquet", "lists.parquet", "lists.arrow", "feather"]
FORMATS += ["pandas", "typed pandas", "polars", "pyarrow", "data"]


def frame() -> Any:
    return pd.DataFrame(ROWS, columns=["qid", "label", *NAMES, "docid"])


def typed(rows: Any) -> Any:
    return rows.astype({"colour": "category", "brand": "category"})


def data() -> RankingData:
    rows = frame()
    ids = list(rows["docid"])
    return RankingData.from_arrays(typed(rows[list(NAMES)]), rows["label"], qid=list(rows["qid"]), doc_ids=ids)


def offered(folder: Path, kind: str, rows: Any = None) -> Any:
    rows, file = frame() if rows is None else rows, folder / f"t.{kind}"
    if kind.endswith(("csv", "tsv")):
        rows.to_csv(file, index=False, sep="\t" if kind == "tsv" else ",")
    elif kind == "csv.gz":
        file.write_bytes(gzip.compress(rows.to_csv(index=False).encode()))
    elif kind.startswith("lists"):
        save_table(data(), file)
    elif kind == "feather":
        typed(rows).to_feather(file)
    elif kind.endswith("parquet"):
        (typed(rows) if kind.startswith("typed") else rows).to_parquet(file, row_group_size=2)
    else:
        make: dict[str, Any] = {
            "pandas": lambda: rows,
            "typed pandas": lambda: typed(rows),
            "data": data,
            "pyarrow": lambda: pa.Table.from_pandas(rows),
            "polars": lambda: pytest.importorskip("polars").from_pandas(rows),
        }
        return make[kind]()
    return file


def test_codes_are_places_among_the_sorted_words(tmp_path: Path) -> None:
    for kind in FORMATS:
        what = offered(tmp_path, kind)
        asked = None if kind == "data" else ["colour", "brand"]
        with open_source(what, categories=asked) as source:
            assert source.categories == WORDS
            whole = source.read(labelled=True)
            parts = [batch.data for batch in source.batches(2)]
        assert whole.categories == WORDS
        assert whole.feature_names == NAMES
        X, y, queries, ids = in_order(whole)
        assert X.tolist() == CODES
        assert y.tolist() == [row[1] for row in ROWS]
        assert (queries, ids) == ([row[0] for row in ROWS], [row[-1] for row in ROWS])
        assert len(parts) == 3
        assert {part.categories for part in parts} == {WORDS}
        assert np.concatenate([in_order(part)[0] for part in parts]).tolist() == CODES


def test_a_known_vocabulary_decides(tmp_path: Path) -> None:
    """Words that it lacks are others, whatever the order of the columns."""
    for kind in FORMATS:
        what = offered(tmp_path, kind)
        known = {"brand": ["x3", "x2"], "colour": ["red"]}
        with open_source(what, categories=known, feature_names=("brand", "colour", "size")) as source:
            assert source.categories == (("x3", "x2"), ("red",), None)
            with pytest.warns(DataWarning, match=r"of 5 rows, some have words .*: 'brand' 2, 'colour' 3; they"):
                found = source.read()
            assert source.feature_names == found.feature_names == ("brand", "colour", "size")
        wanted = [[1, 0, 0.5], [OTHER, OTHER, 1.5], [0, 0, 2.5], [OTHER, OTHER, 3.5], [1, OTHER, 4.5]]
        assert in_order(found)[0].tolist() == wanted
        with (
            pytest.raises(DataError, match=r"(there must be a column 'price'|the data must have the categories)"),
            open_source(what, categories={**known, "price": ["1"]}),
        ):
            pass


def test_text_that_nobody_named_is_refused(tmp_path: Path) -> None:
    for kind in ["csv", "parquet", "pandas", "polars", "pyarrow"]:
        what = offered(tmp_path, kind)
        with pytest.raises(DataError, match=r"column 'colour' must .*`categories`"), open_source(what) as source:
            source.read()
        with pytest.raises(DataError, match=r"column 'brand' must"), open_source(what, categories=["colour"]) as source:
            source.read()


def test_a_type_may_say_it_too(tmp_path: Path) -> None:
    for kind in ["typed.parquet", "lists.parquet", "feather", "typed pandas", "data"]:
        with open_source(offered(tmp_path, kind)) as source:
            assert source.categories == WORDS
            assert in_order(source.read())[0].tolist() == CODES


def test_missing_words_are_others(tmp_path: Path) -> None:
    for kind in ["csv", "parquet", "typed.parquet", "pandas"]:
        for policy in ["zero", "query-min", "query-mean"]:
            rows = frame()
            rows.loc[3, "colour"] = None
            rows.loc[2, "size"] = None
            what = offered(tmp_path, kind, rows)
            options: dict[str, Any] = {"categories": ["colour", "brand"]}
            with open_source(what, missing=policy, **options) as source:
                X = in_order(source.read())[0].tolist()
            assert X[3] == [OTHER, 3.5, 0]
            assert X[2] == [1, 0.0 if policy == "zero" else 3.5, 2]  # green is gone, so red is the second word
            with (
                pytest.raises(DataError, match=r"column '(size|colour)' is missing"),
                open_source(what, **options) as source,
            ):
                source.read()


def test_features_that_are_all_words(tmp_path: Path) -> None:
    frame()[["qid", "label", "colour"]].to_csv(tmp_path / "t.csv", index=False)
    found = load_file(tmp_path / "t.csv", categories=["colour"], cache=False)
    assert in_order(found)[0].tolist() == [[2], [0], [2], [1], [0]]


def test_words_are_written_as_words(tmp_path: Path) -> None:
    for name in ["t.csv", "t.tsv.gz", "t.parquet", "t.arrow", "t.feather"]:
        given = data()
        given.features[given.features[:, 1] == 3.5, 0] = OTHER
        save_table(given, tmp_path / name)
        with open_source(tmp_path / name, categories=["colour", "brand"], missing="zero") as source:
            back = source.read(labelled=True)
        assert back.feature_names == NAMES
        assert back.categories == (("blue", "red"), None, WORDS[2])
        wanted = [[1, 0.5, 1], [0, 1.5, 0], [1, 2.5, 2], [OTHER, 3.5, 0], [0, 4.5, 1]]
        assert in_order(back)[0].tolist() == wanted
        assert back.doc_ids == given.doc_ids


def test_the_text_of_a_table_with_words(tmp_path: Path) -> None:
    save_table(data(), tmp_path / "t.csv")
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[:3] == ["qid,label,docid,colour,size,brand", "a,1,d1,red,0.5,x2", "a,0,d2,blue,1.5,x1"]
    schema = pytest.importorskip("pyarrow.parquet").read_schema
    save_table(data(), tmp_path / "t.parquet")
    names = schema(tmp_path / "t.parquet")
    assert names.names == ["qid", "label", *NAMES, "docid"]
    assert pa.types.is_dictionary(names.field("colour").type.value_type)
    assert b"feature_names" not in (names.metadata or {})


def test_lines_of_numbers_hold_no_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="`data` must hold numbers only to be saved in such lines, got categories"):
        save_letor(data(), tmp_path / "t.txt")
    (tmp_path / "t.txt").write_text("1 qid:1 1:1\n")
    with pytest.raises(DataError, match=r"t\.txt: LETOR lines hold numbers only, .* are categories: a, b"):
        open_source(tmp_path / "t.txt", categories=["a", "b"])
    with pytest.raises(DataError, match=r"t\.txt: LETOR lines hold numbers only, .* are categories: a"):
        load_file(tmp_path / "t.txt", categories=["a"], cache=False)


def test_a_cache_keeps_the_words(tmp_path: Path) -> None:
    given = data()
    (tmp_path / "file").write_text("parsed")
    cached(tmp_path, [tmp_path / "file"], {}, lambda: given)
    back = cached(tmp_path, [tmp_path / "file"], {}, pytest.fail)
    assert (back.categories, back.feature_names) == (WORDS, NAMES)
    assert torch.equal(back.features, given.features)


def test_words_are_part_of_the_key_of_a_table(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "t.csv", index=False)
    cache = tmp_path / "cache"
    open_words = load_file(tmp_path / "t.csv", categories=["colour", "brand"], cache=cache)
    with pytest.warns(DataWarning, match=r"'colour' 3, 'brand' 3"):
        closed = load_file(tmp_path / "t.csv", categories={"colour": ["red"], "brand": ["x1"]}, cache=cache)
    with pytest.warns(DataWarning, match=r"'colour' \d, 'brand' 3"):
        other = load_file(tmp_path / "t.csv", categories={"colour": ["blue"], "brand": ["x1"]}, cache=cache)
    again = load_file(tmp_path / "t.csv", categories=["colour", "brand"], cache=cache)
    assert [part.categories for part in (open_words, closed, other, again)] == [
        WORDS, (("red",), None, ("x1",)), (("blue",), None, ("x1",)), WORDS
    ]  # fmt: skip
    assert len(list(cache.glob("*.lgc"))) == 3


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_other_parts_have_the_words_of_the_first(tmp_path: Path, ending: str) -> None:
    rows = frame()
    files = {"train": tmp_path / f"train.{ending}", "test": tmp_path / f"test.{ending}"}
    for file, part in zip(files.values(), (rows[:2], rows[2:]), strict=True):
        part.to_csv(file, index=False) if ending == "csv" else part.to_parquet(file)
    options: dict[str, Any] = {"categories": ["colour", "brand"], "cache": False}
    with pytest.warns(DataWarning, match=rf"test.{ending}: of 3 rows, .* training never saw: 'colour' 1, 'brand' 1"):
        same = load_parts(files, **options)
    assert same["test"].categories == same["train"].categories == (("blue", "red"), None, ("x1", "x2"))
    assert in_order(same["test"])[0].tolist() == [[1, 2.5, OTHER], [OTHER, 3.5, 0], [0, 4.5, 1]]
    own = load_parts(files, same_words=False, **options)
    assert own["test"].categories == WORDS
    with pytest.warns(DataWarning, match="training never saw"):
        opened = open_table(tmp_path, **options)
    assert opened["test"].categories == same["train"].categories


def test_pieces_of_a_table_share_all_words(tmp_path: Path) -> None:
    rows = frame()
    for number, part in enumerate((rows[:2], rows[2:4], rows[4:])):
        part.to_csv(tmp_path / f"{number}.csv", index=False)
    parts = open_table(tmp_path, categories=["colour", "brand"], cache=False, fractions=(1, 1, 1))
    assert {part.categories for part in parts.values()} == {WORDS}
    X = {
        doc: row for part in parts.values() for doc, row in zip(part.doc_ids or (), part.features.tolist(), strict=True)
    }
    assert [X[row[-1]] for row in ROWS] == CODES


def test_too_many_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("typed.parquet", "lists.parquet"):
        file = offered(tmp_path, kind)
        with monkeypatch.context() as patch:
            patch.setattr("lgmml_torch.categories._MOST_WORDS", 2)
            with pytest.raises(DataError, match=rf"{file.name}: column 'colour' must have at most 2 different words"):
                open_source(file)


def test_dates_are_no_words(tmp_path: Path) -> None:
    rows = frame().assign(size=pd.Timestamp("2020-01-01"))
    rows.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t.parquet: column 'size' must hold numbers, got dates"):
        open_source(tmp_path / "t.parquet", categories=["colour", "brand"])


def test_columns_of_a_table_as_text(tmp_path: Path) -> None:
    for kind in ("csv", "parquet", "lists.parquet"):
        with open_source(offered(tmp_path, kind), categories=["colour", "brand"]) as source:
            assert source.column("docid") == [row[-1] for row in ROWS]  # type: ignore[attr-defined]
            assert source.column("qid") == [row[0] for row in ROWS]  # type: ignore[attr-defined]
    rows = frame()
    rows.loc[1, "docid"] = None
    rows.to_parquet(tmp_path / "gap.parquet")
    for what in (rows, tmp_path / "gap.parquet"):
        with open_source(what, categories=["colour", "brand"]) as source:
            assert in_order(source.read())[3] == ["d1", "", "d3", "d4", "d5"]
    with open_source(tmp_path / "gap.parquet", categories=["colour", "brand"]) as source:
        assert source.column("docid") == ["d1", "", "d3", "d4", "d5"]  # type: ignore[attr-defined]
    nested = pa.table(
        {"qid": ["a", "b"], "label": [[1.0, 0.0], [2.0]], "docid": [["d1", None], ["d3"]], "x": [[1, 2], [3]]}
    )
    with open_source(nested) as source:
        assert isinstance(source, ArrowSource)
        assert source.column("docid") == ["d1", "", "d3"]
        assert source.column("qid") == ["a", "a", "b"]
        assert in_order(source.read())[3] == ["d1", "", "d3"]


def test_weights_and_positions_are_no_features(tmp_path: Path) -> None:
    rows = frame()[["qid", "label", "size"]].assign(w=1.0, p=range(5))
    rows.to_csv(tmp_path / "t.csv", index=False)
    rows.to_parquet(tmp_path / "t.parquet")
    columns = Columns(weight="w", position="p")
    for what in (rows, tmp_path / "t.csv", tmp_path / "t.parquet"):
        with open_source(what, columns=columns) as source:
            assert source.feature_names == ("size",)
