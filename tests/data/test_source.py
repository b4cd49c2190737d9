from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.data.letor import load_letor
from lgmml_torch.data.write import save_letor
from lgmml_torch.ragged import RankingData
from lgmml_torch.streaming.arrays import ArrayLists
from lgmml_torch.streaming.base import Lists
from lgmml_torch.streaming.opening import open_lists
from lgmml_torch.streaming.table import Columns
from tests.doors import FEATURES, small_data


def write(data: RankingData, folder: Path, kind: str) -> Path:
    """The data in the caller's order, in one of the formats."""
    X, y = data.in_caller_order(data.features).numpy(), data.in_caller_order(data.labels).numpy()
    qid = [data.qids[q] for q in data.in_caller_order(data.query_index).tolist()]
    if kind == "npz":
        file = folder / "data.npz"
        np.savez(file, X=X, y=y, qid=np.array(qid))
    elif kind in ("csv", "tsv"):
        file, mark = folder / f"data.{kind}", "," if kind == "csv" else "\t"
        rows = [mark.join(["f1", "qid", "f2", "label", "f3", "f4", "f5"])]
        rows += [mark.join(map(str, [x[0], q, x[1], g, *x[2:]])) for x, g, q in zip(X, y, qid, strict=True)]
        file.write_text("\n".join(rows) + "\n")
    else:
        file = folder / f"data.{kind}"
        save_letor(data, file)
    return file


def gathered(lists: Lists, documents: int) -> tuple[np.ndarray, np.ndarray, list[object]]:
    """Features, labels and query of every row of the file, from all batches."""
    features = np.full((lists.num_rows, FEATURES), np.nan)
    labels, qids = np.full(lists.num_rows, np.nan), [None] * lists.num_rows
    for batch in lists.batches(documents):
        data = batch.data
        features[batch.rows] = data.in_caller_order(data.features)
        labels[batch.rows] = data.in_caller_order(data.labels)
        for row, query in zip(batch.rows.tolist(), data.in_caller_order(data.query_index).tolist(), strict=True):
            assert qids[row] is None  # each row once
            qids[row] = data.qids[query]
    return features, labels, qids


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "csv", "tsv", "npz"])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("documents", [1, 7, 10_000])
def test_every_row_comes_once_with_its_whole_list(tmp_path: Path, kind: str, shuffled: bool, documents: int) -> None:
    data = small_data(shuffled=shuffled)
    with open_lists(write(data, tmp_path, kind), num_features=FEATURES) as lists:
        assert lists.in_order is not shuffled
        assert lists.has_labels
        features, labels, qids = gathered(lists, documents)
        np.testing.assert_array_equal(features, data.in_caller_order(data.features).numpy())
        np.testing.assert_array_equal(labels, data.in_caller_order(data.labels).numpy())
        assert qids == [data.qids[q] for q in data.in_caller_order(data.query_index).tolist()]
        for batch in lists.batches(documents):
            sizes = dict(zip(data.qids, data.sizes.tolist(), strict=True))
            assert all(sizes[q] == n for q, n in zip(batch.data.qids, batch.data.sizes.tolist(), strict=True))


def test_agrees_with_the_loader(tmp_path: Path) -> None:
    file = write(small_data(shuffled=True), tmp_path, "txt")
    whole = load_letor(file, cache=False)
    with open_lists(file, num_features=FEATURES) as lists:
        (batch,) = lists.batches(10_000)
    for name in ("features", "labels", "offsets", "order"):
        torch.testing.assert_close(getattr(batch.data, name), getattr(whole, name), rtol=0, atol=0)
    assert (batch.data.qids, batch.data.doc_ids) == (whole.qids, whole.doc_ids)


def test_one_query(tmp_path: Path) -> None:
    data = small_data(shuffled=True)
    with open_lists(write(data, tmp_path, "txt.gz"), num_features=FEATURES) as lists:
        found = lists.only("13")
        torch.testing.assert_close(found.features, data.select([3]).features)
        with pytest.raises(DataError, match=r"data.txt.gz: there is no query '99'; there are \d+, "):
            lists.only("99")


def test_odd_but_lawful_letor(tmp_path: Path) -> None:
    file = tmp_path / "odd.txt"
    file.write_bytes(
        b"\xef\xbb\xbf# a comment\n\n1 qid:b 2:1e-1#x\r\n  0\tqid:a  1:+2  \n\n# another qid:z\n2 qid:b 1:3 5:4 # y z"
    )
    with open_lists(file, num_features=FEATURES) as lists:
        features, labels, qids = gathered(lists, 1)
        ids = [batch.data.doc_ids for batch in lists.batches(1)]
    np.testing.assert_allclose(features, [[0, 0.1, 0, 0, 0], [2, 0, 0, 0, 0], [3, 0, 0, 0, 4]], rtol=1e-6)
    assert labels.tolist() == [1, 0, 2]
    assert qids == ["b", "a", "b"]
    assert ids == [("x", "y z"), None]


def test_letor_without_labels(tmp_path: Path) -> None:
    file = tmp_path / "new.txt"
    file.write_text("qid:1 1:2\nqid:2 5:1\nqid:1 1:3\n")
    with open_lists(file, num_features=FEATURES) as lists:
        assert not lists.has_labels
        features, labels, qids = gathered(lists, 10)
    assert features[:, 0].tolist() == [2, 0, 3]
    assert labels.tolist() == [0, 0, 0]
    assert qids == [1, 2, 1]
    file.write_text("qid:1 1:2\n1 qid:1 1:3\n")
    with pytest.raises(DataError, match=r"new.txt:2: missing qid"):
        open_lists(file, num_features=FEATURES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 qid:1 1:1\n\n1 qid:2 6:1\n", r"bad.txt:3: feature index 6 is .* 5; the model was trained on 5 features"),
        ("1 qid:1 1:1\n1 1:1\n", r"bad.txt:2: missing qid"),
        ("1 qid:1 1:1\n1 qid:2 1:x\n1 qid:1 1:1\n", r"bad.txt:2: the value of feature 1 must be a number, got 'x'"),
        ("1 qid:1 1:1\n1 qid:1 1:nan\n", r"bad.txt:2: the value of feature 1 is missing"),
        ("1 qid:1 1:1 2:1\n1 qid:1 1:1 2:1\n1 qid:1 1:1", r"bad.txt:3: the last line is cut: it has 1 features"),
        ("# nothing\n\n", r"bad.txt:1: the file holds no documents"),
    ],
)
def test_bad_letor_is_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_text(text)
    with pytest.raises(DataError, match=message), open_lists(file, num_features=FEATURES) as lists:
        list(lists.batches())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q,a,b\n1,2,3\n", r"bad.csv:1: the header must name a column 'qid'"),
        ("qid,a,b,c\n1,2,3,4\n", r"bad.csv:1: the model was trained on 2 features, but the header names 3"),
        ("qid,a\n1,2\n", r"bad.csv:1: the model was trained on 2 features, but the header names 1"),
        ("qid,a,b\n1,2,3\n1,2\n", r"bad.csv:3: the header has 3 columns, got 2"),
        ("qid,a,b\n1,2,3\n,2,3\n", r"bad.csv:3: column 'qid' must not be empty"),
        ("qid,a,b\n1,2,3\n2,2,x\n", r"bad.csv:3: column 'b' must be a finite number, got 'x'"),
        ("qid,a,b\n1,2,3\n2,2,inf\n", r"bad.csv:3: column 'b' must be a finite number, got 'inf'"),
        ("qid,a,b\n1,2,3\n2,,3\n", r"bad.csv:3: column 'a' is missing; `missing` says what to put there"),
        ("qid,a,b,label\n1,2,3,\n", r"bad.csv:2: column 'label' must be a finite number, got ''"),
        ('qid,a,b\n1,2,"3\n', r"bad.csv:2: not a line of CSV"),
        ("qid,a,b\n", r"bad.csv:1: the file holds no documents"),
    ],
)
def test_bad_csv_is_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=message), open_lists(file, num_features=2) as lists:
        list(lists.batches())


def test_csv_columns_and_missing_values(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    file.write_text('query,"a, b",b,doc\nx y,1,4,D1\nz,NULL,5,D2\nx y,,6,D3\n')
    columns = Columns(qid="query", doc_id="doc")
    with open_lists(file, num_features=2, columns=columns, missing="query-mean") as lists:
        assert not lists.has_labels
        (batch,) = lists.batches()
    assert batch.data.qids == ("x y", "z")
    assert batch.data.in_caller_order(batch.data.features).tolist() == [[1, 4], [0, 5], [1, 6]]
    assert set(batch.data.doc_ids or ()) == {"D1", "D2", "D3"}


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_data(shuffled=True)
    for kind in ("txt", "txt.gz"):
        content = write(data, tmp_path, kind).read_bytes()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        with open_lists("-", num_features=FEATURES) as lists:
            assert lists.name == "<stdin>"
            features, _, _ = gathered(lists, 5)
        np.testing.assert_array_equal(features, data.in_caller_order(data.features).numpy())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(write(data, tmp_path, "npz").read_bytes())))
    with open_lists("-", num_features=FEATURES, kind="npz") as lists:
        assert lists.num_rows == data.num_documents


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.txt: no such file"):
        open_lists(tmp_path / "none.txt", num_features=2)
    with pytest.raises(LGMMLError, match=r"`kind` must be one of 'letor', 'csv', 'npz', got 'xls'"):
        open_lists(tmp_path / "none.txt", num_features=2, kind="xls")
    cut = tmp_path / "cut.txt.gz"
    cut.write_bytes(gzip.compress(b"1 qid:1 1:1\n" * 1000)[:-12])
    with pytest.raises(DataError, match=r"cut.txt.gz: the compressed file is damaged or cut"):
        open_lists(cut, num_features=2)
    junk = tmp_path / "junk.npz"
    junk.write_bytes(b"junk")
    with pytest.raises(DataError, match=r"junk.npz: not a readable .npz file"):
        open_lists(junk, num_features=2)
    np.savez(junk, X=np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"junk.npz: there must be an array 'qid', got X"):
        open_lists(junk, num_features=2)
    np.savez(junk, X=np.zeros((2, 3)), qid=[1, 1])
    with pytest.raises(DataError, match=r"junk.npz: the model was trained on 2 features, but `X` has 3"):
        open_lists(junk, num_features=2)
    np.savez(junk, X=np.zeros((2, 2)), qid=[1])
    with pytest.raises(DataError, match=r"junk.npz: `qid` must have one entry per row, 2, got 1"):
        open_lists(junk, num_features=2)
    np.savez(junk, X=np.array([[0, np.nan]]), qid=[1])
    with pytest.raises(DataError, match=r"junk.npz: `X` must be finite, got nan at row 0, feature 2"):
        open_lists(junk, num_features=2)


def test_loaded_data_can_be_streamed_too() -> None:
    data = small_data(shuffled=True)
    lists = ArrayLists.from_data(data, "set", num_features=FEATURES)
    features, labels, _ = gathered(lists, 4)
    np.testing.assert_array_equal(features, data.in_caller_order(data.features).numpy())
    np.testing.assert_array_equal(labels, data.in_caller_order(data.labels).numpy())
    assert lists.only("12").doc_ids == data.select([2]).doc_ids
    assert not ArrayLists("set", np.zeros((1, 2)), None, [1], num_features=2).has_labels


@pytest.mark.slow
def test_memory_stays_below_the_file(tmp_path: Path) -> None:
    """A file of 40 MB, its queries interleaved, is read in batches of 2,000 documents with less than half of that."""
    import tracemalloc

    file, width, rows = tmp_path / "big.txt", 60, 60_000
    values = " ".join(f"{j + 1}:0.123456{j}" for j in range(width))
    with file.open("w") as stream:
        for row in range(rows):
            stream.write(f"{row % 3} qid:{row % 500} {values}\n")
    tracemalloc.start()
    with open_lists(file, num_features=width) as lists:
        count = sum(batch.data.num_documents for batch in lists.batches(2_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == rows
    assert peak < file.stat().st_size / 2
