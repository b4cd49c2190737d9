"""CSV and TSV files: the fast and the slow reader say the same, columns are found by name, bad lines are named."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.data import table
from lgmml_torch.data.catalog import load_file
from lgmml_torch.data.source import Columns, ReadOptions, open_source
from lgmml_torch.data.table import CsvSource, lay_out
from tests.data.test_letor import assert_same
from tests.data.test_source import BOTH_WAYS, in_order, write
from tests.doors import FEATURES, small_data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q,a,b\n1,2,3\n", r"bad.csv:1: the header must name a column 'qid'; there are 'q', 'a', 'b'"),
        ("qd,a,b\n1,2,3\n", r"bad.csv:1: the header must name a column 'qid'; did you mean 'qd'\?"),
        ("qid,a,b,c\n1,2,3,4\n", r"bad.csv:1: the model was trained on 2 features, but the header names 3"),
        ("qid,a\n1,2\n", r"bad.csv:1: the model was trained on 2 features, but the header names 1"),
        ("qid,a,a\n1,2,3\n", r"bad.csv:1: column 'a' is named twice"),
        ("qid,a,b\n1,2,3\n1,2\n", r"bad.csv:3: the header has 3 columns, got 2"),
        ("qid,a,b\n1,2,3\n\n1,2,3,4\n", r"bad.csv:4: the header has 3 columns, got 4"),
        ("qid,a,b\n1,2,3\n,2,3\n", r"bad.csv:3: column 'qid' must not be empty"),
        ("qid,a,b\n1,2,3\n2,2,x\n", r"bad.csv:3: column 'b' must be a finite number, got 'x'"),
        ("qid,a,b\n1,2,3\n2,2,1_0\n", r"bad.csv:3: column 'b' must be a finite number, got '1_0'"),
        ("qid,a,b\n1,2,3\n2,2,inf\n", r"bad.csv:3: column 'b' must be a finite number, got 'inf'"),
        ("qid,a,b\n1,2,3\n2,2,1e39\n", r"bad.csv:3: column 'b' must be a finite number, got '1e39'"),
        ("qid,a,b\n1,2,3\n2,,3\n", r"bad.csv:3: column 'a' is missing; `missing=` says what .*data\.missing="),
        ("qid,a,b,label\n1,2,3,\n", r"bad.csv:2: column 'label' must be a finite number, got ''"),
        ('qid,a,b\n1,2,"3\n', r"bad.csv:2: not a line of CSV"),
        ("qid,a,b\n1,2,\xff3\n", r"bad.csv:2: not a line of CSV"),
        ("qid,a,b\n", r"bad.csv:1: the file holds no documents"),
        ("", r"bad.csv:1: the file holds no documents"),
    ],
)
@BOTH_WAYS
@pytest.mark.parametrize("fast", [True, False])
def test_bad_csv_is_named_by_line(
    tmp_path: Path, text: str, message: str, way: Any, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:
        monkeypatch.setattr(table, "find_spec", lambda name: None)
    file = tmp_path / "bad.csv"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=message) as caught, open_source(file, num_features=2) as source:
        way(source)
    assert "\n" not in str(caught.value)


def test_csv_columns_and_missing_values(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    file.write_text('query,"a, b",b,doc\nx y,1,4,D1\nz,NULL,5,D2\nx y,,6,D3\n')
    columns = Columns(qid="query", doc_id="doc")
    with open_source(file, num_features=2, columns=columns, missing="query-mean") as source:
        assert not source.has_labels
        assert source.feature_names == ("a, b", "b")
        (batch,) = source.batches()
        assert_same(source.read(), batch.data)
    assert batch.data.qids == ("x y", "z")
    assert batch.data.in_caller_order(batch.data.features).tolist() == [[1, 4], [0, 5], [1, 6]]
    assert set(batch.data.doc_ids or ()) == {"D1", "D2", "D3"}


CELLS = [
    "1",
    "-2.5",
    "+3",
    "1e-3",
    ".5",
    "7.",
    " 8 ",
    "0x1",
    "nan",
    "NULL",
    "nUlL",
    "",
    "inf",
    "1e400",
    "1_0",
    "٣",
    "a",
]
ODD_ROWS = ["", "  ", "1,2", '1,"2",3', "q\r", "1,2,3,4", '"a,b",1,2', 'a"b,1,2', '"a"b,1,2', "\t", "1,2,3\r\r"]


@pytest.mark.parametrize("seed", range(150))
def test_fast_and_slow_say_the_same(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    rng = random.Random(seed)
    good = CELLS[:7] if seed % 3 else CELLS[:12]
    rows = [f"{rng.choice('abc')},{rng.choice(good)},{rng.choice(good)}" for _ in range(rng.randint(1, 6))]
    for _ in range(rng.choice((0, 0, 1))):
        odd = rng.choice([*ODD_ROWS, *(f"a,1,{cell}" for cell in CELLS)])
        rows.insert(rng.randrange(len(rows) + 1), odd)
    file = tmp_path / "data.csv"
    file.write_bytes(("qid,x,y\n" + rng.choice(("\n", "\r\n")).join(rows) + rng.choice(("", "\n"))).encode())
    options = ReadOptions(missing=rng.choice(("error", "zero", "query-min")))

    def outcome(batches: bool) -> object:
        try:
            with CsvSource(file, options) as source:
                data = next(iter(source.batches())).data if batches else source.read()
        except DataError as error:
            return str(error)
        X, _, queries, _ = in_order(data)
        return X.tobytes(), queries

    found = [outcome(False), outcome(True)]
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    found += [outcome(False), outcome(True)]
    assert found[1:] == found[:-1]


def _random_number(rng: random.Random) -> str:
    """Decimals of up to 25 digits, exponents to both ends of float64, and doubles in their shortest form."""
    kind = rng.randrange(5)
    if kind == 0:
        return repr(rng.uniform(-1, 1) * 10 ** rng.randint(-30, 30))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 25)))
    if kind == 1:
        return digits
    point = rng.randint(0, len(digits))
    number = f"{rng.choice(('', '-', '+'))}{digits[:point]}.{digits[point:]}"
    number += f"{rng.choice('eE')}{rng.choice(('', '-', '+'))}{rng.randint(0, 30)}" if kind > 2 else ""
    return number + " " * (kind == 4 and rng.randrange(3))


@pytest.mark.parametrize("seed", range(24))
def test_fast_and_slow_give_the_same_bits(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any lawful text: both readers give what Python's own ``float`` gives, and the same ids."""
    pytest.importorskip("pyarrow")
    rng = random.Random(seed)
    comma, ending = ("\t", ".tsv") if seed % 4 == 3 else (",", ".csv")
    qids = ["007", "7", "0", "1"] if seed % 2 else ["12", "3"]
    docs = ["x", "a:b;c", "NULL", "", "ü", "#1", "1e5"] + ([f'"p{comma}q"', '"say ""x"""'] if seed % 3 == 0 else [])
    gaps = ["", "NULL", "nan"] if seed % 5 == 0 else []
    cells = [[rng.choice(qids), rng.choice("0123"), rng.choice(docs)] for _ in range(40)]
    numbers = [[rng.choice([_random_number(rng), *gaps]) for _ in range(4)] for _ in cells]
    lines = [comma.join(["qid", "label", "docid", *"abcd"])]
    lines += [comma.join(first + rest) for first, rest in zip(cells, numbers, strict=True)]
    content = rng.choice(("\n", "\r\n")).join(lines).encode() + rng.choice((b"", b"\n"))
    content = rng.choice((b"", b"\xef\xbb\xbf")) + content
    file = tmp_path / f"t{ending}{'.gz' if seed % 3 == 1 else ''}"
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)

    def read() -> list[Any]:
        with open_source(file, dtype=torch.float64, missing="zero") as source:
            found = [source.read(), next(source.batches()).data]
        return [(X.tobytes(), queries, ids) for X, _, queries, ids in map(in_order, found)]

    fast = read()
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    assert read() == fast
    want = [[0.0 if not word.strip() or word in gaps else float(word) for word in row] for row in numbers]
    assert fast[0][0] == np.array(want).tobytes()
    assert [str(qid) for qid in fast[0][1]] == [row[0] for row in cells]
    plain = {f'"p{comma}q"': f"p{comma}q", '"say ""x"""': 'say "x"'}
    assert fast[0][2] == [plain.get(row[2], row[2]) for row in cells]


@pytest.mark.parametrize("block", [1, 64, 1 << 22])
def test_blocks_of_any_size(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "BLOCK_BYTES", block)
    monkeypatch.setattr("lgmml_torch.data.text.INDEX_BYTES", block)
    data = small_data(shuffled=True)
    file = write(data, tmp_path, "csv")
    file.write_bytes(b"\xef\xbb\xbf\n" + file.read_bytes().replace(b"\n", b"\r\n\r\n"))
    with open_source(file) as source:
        (batch,) = source.batches()
        for got in (source.read(), batch.data):
            assert_same(got, data)
        assert source.column("docid") == in_order(data)[3]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "kind", ["csv", "parquet", "lists.parquet", "nested.parquet", "arrow", "npz", "pandas", "polars"]
)
def test_permuted_columns_are_matched_by_name(tmp_path: Path, kind: str) -> None:
    data = small_data().replace(feature_names=tuple("abcde"))
    order = [3, 0, 4, 1, 2]
    names = tuple("abcde"[i] for i in order)
    mixed = data.replace(features=data.features[:, order], feature_names=names)
    X, y, qid, ids = in_order(mixed)
    what: Any = tmp_path / f"data.{kind}"
    columns = {"qid": qid, "label": y, "docid": ids} | dict(zip(names, X.T, strict=True))
    if kind in ("pandas", "polars"):
        what = pytest.importorskip(kind).DataFrame(columns)
    elif kind == "csv":
        pytest.importorskip("pandas").DataFrame(columns).to_csv(what, index=False)
    elif kind == "npz":
        np.savez(what, X=X, y=y, qid=qid, docid=ids, feature_names=names)
    elif kind == "nested.parquet":
        from lgmml_torch.data.write import save_table

        save_table(mixed, what)
    else:
        pa, pq, feather = (pytest.importorskip(f"pyarrow{name}") for name in ("", ".parquet", ".feather"))
        flat = pa.table(columns)
        if kind == "lists.parquet":
            flat = flat.group_by("qid", use_threads=False).aggregate(
                [(name, "list") for name in columns if name != "qid"]
            )
            flat = flat.rename_columns([name.removesuffix("_list") for name in flat.column_names])
        pq.write_table(flat, what) if kind.endswith("parquet") else feather.write_feather(flat, str(what))
    with open_source(what, feature_names="abcde") as source:
        assert_same(source.read(), data)
        assert source.feature_names == tuple("abcde")
        (batch,) = source.batches()
        assert_same(batch.data, data)
    with pytest.raises(DataError, match=r"column 'z' is missing, and the model was trained on no column 'e'"):
        open_source(what, feature_names="abcdz")
    with pytest.raises(DataError, match=r"the model was trained on no column 'd', 'e'"):
        open_source(what, feature_names="abc")
    with pytest.raises(DataError, match=r"columns 'f', 'g' are missing"):
        open_source(what, feature_names="abcdefg")


def test_which_columns_are_features() -> None:
    plan = lay_out(["b", "qid", "a", "label", "title"], ReadOptions(columns=Columns(drop=("title",))), "file")
    assert (plan.qid, plan.label, plan.doc_id, plan.features, plan.names) == (1, 3, None, (0, 2), ("b", "a"))
    with pytest.raises(DataError, match=r"file: the header must name a column 'titel'; did you mean 'title'\?"):
        lay_out(["qid", "title"], ReadOptions(columns=Columns(drop=("titel",))), "file")
    with pytest.raises(DataError, match="file: the header names no feature"):
        lay_out(["qid", "label"], ReadOptions(), "file")
    with pytest.raises(DataError, match="file: `num_features` asks for 3 features, but the header names 1"):
        lay_out(["qid", "x"], ReadOptions(num_features=3), "file")


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
    with pytest.raises(
        DataError, match=r"csv.gz:1: the header names no column 'lable', and training needs labels; did"
    ):
        load_file(file, cache=cache, columns=Columns(label="lable", drop=("label",)))
