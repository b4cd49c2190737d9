"""CSV and TSV files: numbers and ids as written, columns found by name, and bad lines named."""

from __future__ import annotations

import gzip
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError, MissingDependencyError
from lgmml_torch.data import table
from lgmml_torch.data.columns import Columns, check_same_names, lay_out
from lgmml_torch.data.letor import load_file
from lgmml_torch.data.source import ReadOptions, open_source
from tests.data.test_letor import assert_same
from tests.data.test_source import in_order, write
from tests.doors import FEATURES, small_data

pytest.importorskip("pyarrow")

BAD = [
    ("q,a,b\n1,2,3\n", r"1: the header must name a column 'qid'; there are 'q', 'a', 'b'$"),
    ("qd,a,b\n1,2,3\n", r"1: the header must name a column 'qid'; did you mean 'qd'\?$"),
    ("qid,a\n1,2\n", r"1: the model was trained on 2 features, but the header names 1$"),
    ("qid,a,a\n1,2,3\n", r"1: column 'a' is named twice$"),
    ('qid,a,"b\n1,2,3\n', r"1: not a line of CSV: unexpected end of data$"),
    ("qid,a,b\n1,2,3\n1,2\n", r"3: the header has 3 columns, got 2$"),
    ("\n  \nqid,a,b\n1,2,3\n\n \t\n1,2,3,4\n", r"7: the header has 3 columns, got 4$"),
    ("qid,a,b\n1,2,3\n\n,2,3\n", r"4: column 'qid' must not be empty$"),
    ("qid,a,b\n1,2,3\n2,2,x\n", r"3: column 'b' must be a finite number, got 'x'; if its words .*=\[b\]\)$"),
    ("qid,a,b\n1,2,3\n2,2,1_0\n", r"3: column 'b' must be a finite number, got '1_0'; if"),
    ("qid,a,b\n1,2,3\n\n2,inf,2\n", r"4: column 'a' must be a finite number, got inf$"),
    ("qid,a,b\n1,2,3\n2,2,1e39\n", r"3: column 'b' must be a finite number, got inf$"),
    ("qid,a,b\n1,2,3\n2,,3\n", r"3: column 'a' is missing; `missing=` says what .*data\.missing="),
    ("qid,a,b,label\n1,2,3,x\n", r"2: column 'label' must be a finite number, got 'x'$"),
    ("qid,a,b,label\n1,2,3,\n", r"2: the label must be a finite number, got nan$"),
    ("qid,a,b\n1,true,3\n1,7,3\n", r"3: column 'a' must hold numbers or true and false, not both, got '7'$"),
    ('qid,a,b\n1,2,"3\n', r"2: not a line of CSV: a quotation mark is not closed$"),
    ("qid,a,b\n1,2,3\n1,2,3\r4,5,6\n", r"3: not a line of CSV: it holds a carriage return$"),
    ("qid,a,b\n\xff,2,3\n", r"2: not a line of CSV: column 'qid' has invalid UTF8 data$"),
    ("qid,a,b\n", r"1: the file holds no documents$"),
    ("\n", r"1: the file holds no documents$"),
]


def test_bad_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    for text, message in BAD:
        file.write_bytes(text.encode("latin-1"))
        for by_list in (False, True):
            match = rf"bad\.csv:{message}"
            with pytest.raises(DataError, match=match) as caught, open_source(file, num_features=2) as source:
                list(source.batches()) if by_list else source.read()
            assert "\n" not in str(caught.value)


def test_columns_cells_and_missing_values(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    file.write_text(' query ,"a, b",b,doc\n"x, y",1, 4 ,D1\nz,NULL,"5","say ""x"""\n\n"x, y",,6,\n')
    columns = Columns(qid="query", doc_id="doc")
    with open_source(file, num_features=2, columns=columns, missing="query-mean") as source:
        assert not source.has_labels
        assert source.feature_names == ("a, b", "b")
        (batch,) = source.batches()
        assert_same(source.read(), batch.data)
        assert source.place(2) == f"{file}:5"
        assert source.column("query") == ["x, y", "z", "x, y"]  # type: ignore[attr-defined]
    X, _, queries, ids = in_order(batch.data)
    assert X.tolist() == [[1, 4], [0, 5], [1, 6]]
    assert (queries, ids) == (["x, y", "z", "x, y"], ["D1", 'say "x"', ""])


@pytest.mark.parametrize("block", [1, 20, 1 << 20])
def test_true_and_false_are_numbers(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_BLOCK_BYTES", block)
    (tmp_path / "a.csv").write_text("qid,label,x,f\n1,0,2,true\n1,1,3,False\n1,true,,NULL\n1,0,4,TRUE\n")
    with open_source(tmp_path / "a.csv", missing="zero") as source:
        X, y, *_ = in_order(source.read())
    assert X.tolist() == [[2, 1], [3, 0], [0, 0], [4, 1]]
    assert y.tolist() == [0, 1, 1, 0]


def random_number(rng: random.Random) -> str:
    """Decimals of up to 25 digits, exponents to both ends of float64, and doubles in their shortest form."""
    kind = rng.randrange(5)
    if kind == 0:
        return repr(rng.uniform(-1, 1) * 10 ** rng.randint(-30, 30))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 25)))
    point = rng.randint(0, len(digits))
    number = f"{rng.choice(('', '-', '+'))}{digits[:point]}.{digits[point:]}"
    if kind > 2:
        number += f"{rng.choice('eE')}{rng.choice(('', '-', '+'))}{rng.randint(0, 30)}"
    return digits if kind == 1 else number + " " * (kind == 4 and rng.randrange(3))


def test_any_text_gives_the_numbers_and_ids_that_python_reads(tmp_path: Path) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        comma, ending = ("\t", ".tsv") if seed % 4 == 3 else (",", ".csv")
        qids = ["007", "7", "0", "1"] if seed % 2 else ["12", "3"]
        docs = ["x", "a:b;c", "NULL", "", "ü", "#1", "1e5"]
        gaps = ["", "NULL", "nan"] if seed % 5 == 0 else []
        cells = [[rng.choice(qids), rng.choice("0123"), rng.choice(docs)] for _ in range(40)]
        numbers = [[rng.choice([random_number(rng), *gaps]) for _ in range(4)] for _ in cells]
        lines = [comma.join(["qid", "label", "docid", *"abcd"])]
        lines += [comma.join(first + rest) for first, rest in zip(cells, numbers, strict=True)]
        content = rng.choice(("\n", "\r\n")).join(lines).encode() + rng.choice((b"", b"\n"))
        content = rng.choice((b"", b"\xef\xbb\xbf")) + content
        file = tmp_path / f"t{ending}{'.gz' if seed % 3 == 1 else ''}"
        file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
        with open_source(file, dtype=torch.float64, missing="zero") as source:
            X, y, queries, ids = in_order(source.read())
        want = [[0.0 if not word.strip() or word in gaps else float(word) for word in row] for row in numbers]
        assert np.array_equal(X, want)
        assert y.tolist() == [float(row[1]) for row in cells]
        assert queries == [row[0] if seed % 2 else int(row[0]) for row in cells]
        assert ids == [row[2] for row in cells]


@pytest.mark.parametrize("block", [1, 64, 1 << 20])
def test_blocks_of_any_size(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_BLOCK_BYTES", block)
    data = small_data(shuffled=True)
    file = write(data, tmp_path, "csv")
    file.write_bytes(b"\xef\xbb\xbf\n" + file.read_bytes().replace(b"\n", b"\r\n\r\n"))
    with open_source(file) as source:
        (batch,) = source.batches()
        for got in (source.read(), batch.data):
            assert_same(got, data)
        assert source.column("docid") == in_order(data)[3]  # type: ignore[attr-defined]
        assert source.place(3) == f"{file}:10"


def test_pyarrow_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(small_data(), tmp_path, "csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"`pyarrow` is needed for CSV files; .*'lgmml-torch\[arrow\]'"):
        open_source(file)


@pytest.mark.parametrize("kind", ["csv", "lists.parquet", "nested.parquet", "arrow", "npz", "pandas", "polars"])
def test_permuted_columns_are_matched_by_name(tmp_path: Path, kind: str) -> None:
    data = small_data().replace(feature_names=tuple("abcde"))
    order = [3, 0, 4, 1, 2]
    names = tuple("abcde"[i] for i in order)
    mixed = data.replace(features=data.features[:, order], feature_names=names)
    what = offered(tmp_path, kind, mixed, names)
    with open_source(what, feature_names="abcde") as source:
        assert_same(source.read(), data)
        assert source.feature_names == tuple("abcde")
        (batch,) = source.batches()
        assert_same(batch.data, data)
    with pytest.raises(DataError, match=r"column 'z' is missing, and the model was trained on no column 'e'"):
        open_source(what, feature_names="abcdz")


def offered(folder: Path, kind: str, data: Any, names: tuple[str, ...]) -> Any:
    from pyarrow import feather, parquet

    from lgmml_torch.data.write import save_table

    X, y, qid, ids = in_order(data)
    what = folder / f"data.{kind}"
    columns = {"qid": qid, "label": y, "docid": ids} | dict(zip(names, X.T, strict=True))
    if kind in ("pandas", "polars"):
        return pytest.importorskip(kind).DataFrame(columns)
    if kind == "npz":
        np.savez(what, X=X, y=y, qid=qid, docid=ids, feature_names=names)
    elif kind == "arrow":
        feather.write_feather(table_of(columns), str(what))
    elif kind == "lists.parquet":
        flat = table_of(columns).group_by("qid", use_threads=False)
        lists = flat.aggregate([(name, "list") for name in columns if name != "qid"])
        parquet.write_table(lists.rename_columns([name.removesuffix("_list") for name in lists.column_names]), what)
    else:
        save_table(data, what)
    return what


def table_of(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("pyarrow").table(columns)


def test_which_columns_are_features() -> None:
    plan = lay_out(["b", "qid", "a", "label", "title"], ReadOptions(columns=Columns(drop=("title",))), "f")
    assert (plan.qid, plan.label, plan.doc_id, plan.features, plan.names) == (1, 3, None, (0, 2), ("b", "a"))
    plan = lay_out(["x", "qid", "w", "p"], ReadOptions(columns=Columns(weight="w", position="p")), "f")
    assert (plan.names, plan.features, plan.label) == (("x",), (0,), None)
    many = [f"c{i}" for i in range(7)]
    for header, options, message in (
        (["qid", "title"], ReadOptions(columns=Columns(drop=("titel",))), r"a column 'titel'; did you mean 'title'\?$"),
        (["qid", "label"], ReadOptions(), "^f: the header names no feature$"),
        (["qid", "x"], ReadOptions(num_features=3), "`num_features` asks for 3 features, but the header names 1$"),
        (many, ReadOptions(), r"there are 'c0', 'c1', 'c2', 'c3', 'c4', 'c5', …$"),
        (many[:6], ReadOptions(), r"there are 'c0', 'c1', 'c2', 'c3', 'c4', 'c5'$"),
    ):
        with pytest.raises(DataError, match=message):
            lay_out(header, options, "f")


def test_names_that_are_missing_or_unknown() -> None:
    check_same_names("ab", "ba", "f", model=True)
    for found, wanted, model, message in (
        ("a", "ab", True, "column 'b' is missing"),
        ("a", "abc", True, "columns 'b', 'c' are missing"),
        ("abc", "a", False, "there should be no column 'b', 'c'"),
        ("ac", "ab", True, "column 'b' is missing, and the model was trained on no column 'c'"),
    ):
        with pytest.raises(DataError, match=rf"^f: {message}$"):
            check_same_names(found, wanted, "f", model=model)
    with pytest.raises(DataError, match=r"no column 'prices'; did you mean 'price'\?"):
        check_same_names(["prices"], ["price"], "f", model=True)


def test_text_tables_are_cached(tmp_path: Path) -> None:
    file, cache = write(small_data(shuffled=True), tmp_path, "csv.gz"), tmp_path / "cache"
    first = load_file(file, cache=cache)
    again = load_file(file, cache=cache)
    assert_same(first, again)
    assert first.feature_names == again.feature_names == ("f1", "f2", "f3", "f4", "f5")
    assert len(list(cache.glob("*.lgc"))) == 1
    assert load_file(file, cache=cache, dtype=torch.float64).features.dtype == torch.float64
    assert load_file(file, cache=cache, columns=Columns(drop=("f3",))).num_features == FEATURES - 1
    assert len(list(cache.glob("*.lgc"))) == 3
    message = r"csv.gz:1: the header names no column 'lable', and training needs labels; did"
    with pytest.raises(DataError, match=message):
        load_file(file, cache=cache, columns=Columns(label="lable", drop=("label",)))
