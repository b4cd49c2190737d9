"""What holds for every source: options, batches, refusals, bars of progress, limits and the key of the cache."""

from __future__ import annotations

import gzip
import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch import files
from lgmml_torch.checks import DataError, DataWarning, LGMMLError
from lgmml_torch.data import cache
from lgmml_torch.data.cache import Cache, cached
from lgmml_torch.data.catalog import open_dataset
from lgmml_torch.data.letor import LetorSource, load_file, load_letor
from lgmml_torch.data.source import (
    DataSource,
    ReadOptions,
    open_file,
    open_source,
)
from lgmml_torch.data.svmlight import TextFile
from lgmml_torch.data.table import ArraySource
from lgmml_torch.files import check_memory, check_unpacked
from lgmml_torch.ragged import RankingData
from tests.data.test_source import in_order
from tests.doors import small_data


def test_options_are_checked() -> None:
    assert ReadOptions(feature_names=("a", "b")).num_features == 2
    with pytest.raises(LGMMLError, match="`num_features` must be positive, got 0"):
        ReadOptions(feature_names=())
    with pytest.raises(LGMMLError, match="`absent` must be one of"):
        ReadOptions(absent="never")


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (ReadOptions(num_features=2), "`num_features` asks for 2"),
        (ReadOptions(feature_names=("a", "b")), "there are names for 2"),
        (ReadOptions(feature_names=("a", "b"), model=True), "the model was trained on 2"),
    ],
)
def test_the_number_of_features_is_checked_by_who_asks(options: ReadOptions, asked: str) -> None:
    options.check_width(2, "file", "`X` has")
    ReadOptions().check_width(2, "file", "`X` has")
    for width in (1, 3):
        with pytest.raises(DataError, match=rf"^file: {asked} features, but `X` has {width}$"):
            options.check_width(width, "file", "`X` has")


def arrays(qid: list[Any], **options: Any) -> DataSource:
    X = np.arange(2.0 * len(qid)).reshape(-1, 2)
    return open_source(X, y=np.arange(len(qid)), qid=qid, **options)


def test_batches_are_as_large_as_they_may_be() -> None:
    lists = arrays([0] * 3 + [1] * 2 + [2] * 1 + [3] * 4)
    sizes = {documents: [len(batch.rows) for batch in lists.batches(documents)] for documents in (1, 3, 5, 6, 10)}
    assert sizes == {1: [3, 2, 1, 4], 3: [3, 3, 4], 5: [5, 5], 6: [6, 4], 10: [10]}
    with pytest.raises(LGMMLError, match="`documents` must be positive, got 0"):
        next(lists.batches(0))
    many = arrays([0] * 32_767 + [1, 2])
    assert [len(batch.rows) for batch in many.batches()] == [32_768, 1]


def test_the_order_of_batches() -> None:
    for qid in [["b", "a", "c"], ["b", "a", "b"], ["b", "b", "a"], ["a", "a", "b"], ["a", "b", "a"], [2, 1, 1]]:
        lists = arrays(qid)
        first, sorted_ids = list(dict.fromkeys(qid)), sorted(set(qid))
        assert [batch.data.qids[0] for batch in lists.batches(1)] == first
        assert [batch.data.qids[0] for batch in lists.batches(1, by_id=True)] == sorted_ids
        for by_id in (False, True):
            for batch in lists.batches(1, by_id=by_id):
                own = [row for row, query in enumerate(qid) if query == batch.data.qids[0]]
                assert batch.rows.tolist() == own
                assert in_order(batch.data)[1].tolist() == own
        assert lists.in_order is (qid in (["b", "a", "c"], ["b", "b", "a"], ["a", "a", "b"], [2, 1, 1]))


def test_a_query_that_is_not_there_is_told_with_some_that_are() -> None:
    for count, told in ((1, "0"), (5, "0, 1, 2, 3, 4"), (6, "0, 1, 2, 3, 4, …")):
        with pytest.raises(DataError, match=rf"^arrays: there is no query '9'; there are {told}$"):
            arrays(list(range(count))).only("9")
    assert arrays([7, 8, 7]).only("7").num_documents == 2


def test_labels_are_checked_and_zero_where_there_are_none() -> None:
    with pytest.raises(DataError, match=r"row 3 \(from 1\): the label must be a finite number, got inf"):
        open_source(np.eye(3), y=[0, 1, np.inf], qid=[1, 1, 1]).read()
    with pytest.raises(DataError, match=r"row 2 \(from 1\): the label must be a finite number, got nan"):
        open_source(np.eye(3), y=[0, np.nan, np.nan], qid=[1, 1, 1]).read()
    assert open_source(np.eye(2), qid=[1, 1]).read().labels.tolist() == [0, 0]
    assert DataSource.has_labels


def test_values_that_are_infinite_are_refused_even_where_gaps_are_filled() -> None:
    X = np.array([[1.0, np.nan], [np.inf, 2.0]])
    with pytest.raises(DataError, match=r"row 2 \(from 1\): feature 1 must be a finite number, got inf"):
        open_source(X, qid=[1, 1], missing="zero").read()
    assert in_order(open_source(X[:1], qid=[1], missing="zero").read())[0].tolist() == [[1, 0]]


def test_frames_with_a_query_beside_them() -> None:
    frame = pytest.importorskip("pandas").DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})
    for more in ({"qid": [1, 2, 1]}, {"group": [1, 2]}):
        data = open_source(frame, y=[0, 1, 2], doc_ids=["x", "y", "z"], **more).read(labelled=True)
        assert data.feature_names == ("a", "b")
        assert data.num_queries == 2
        assert in_order(data)[3] == ["x", "y", "z"]
    with pytest.raises(DataError, match="the frame must name a column 'qid'"):
        open_source(frame)
    pa = pytest.importorskip("pyarrow")
    with open_source(pa.table({"a": [1.0, 2.0]}), qid=[1, 2]) as opened:
        assert opened.read().num_queries == 2


def test_lengths_of_what_belongs_to_rows() -> None:
    with pytest.raises(DataError, match=r"^arrays: `y` must have one entry per row, 2, got 3$"):
        open_source(np.eye(2), y=[1, 2, 3], qid=[1, 1])
    with pytest.raises(DataError, match=r"^arrays: `doc_ids` must have one entry per row, 2, got 1$"):
        open_source(np.eye(2), doc_ids=["a"], qid=[1, 1])
    with pytest.raises(DataError, match=r"^arrays: 2 features need as many names, got 3$"):
        ArraySource("arrays", ReadOptions(), np.eye(2), None, qid=[1, 1], names=("a", "b", "c"))
    with pytest.raises(DataError, match="arrays: there are no documents"):
        open_source(np.empty((0, 2)), qid=[])


def test_arrays_and_names_that_are_asked_for() -> None:
    def read(names: Any, wanted: Any) -> RankingData:
        options = ReadOptions(feature_names=wanted)
        return ArraySource("arrays", options, [[1.0, 2.0]], [0], qid=[1], names=names).read()

    assert (read(("a", "b"), ("b", "a")).features.tolist(), read(("a", "b"), ("b", "a")).feature_names) == (
        [[2, 1]],
        ("b", "a"),
    )
    assert (read(("a", "b"), ("a", "b")).features.tolist(), read(("a", "b"), None).feature_names) == (
        [[1, 2]],
        ("a", "b"),
    )
    assert (read(None, ("p", "q")).features.tolist(), read(None, ("p", "q")).feature_names) == ([[1, 2]], ("p", "q"))
    assert read(None, None).feature_names is None
    with pytest.raises(DataError, match=r"arrays: column 'c' is missing, and there should be no column 'b'"):
        read(("a", "b"), ("a", "c"))
    model = ReadOptions(feature_names=("a", "c"), model=True)
    with pytest.raises(DataError, match=r"and the model was trained on no column 'b'"):
        ArraySource("arrays", model, [[1.0, 2.0]], [0], qid=[1], names=("a", "b"))
    with pytest.raises(DataError, match=r"arrays: there are names for 3 features, but `X` has 2"):
        read(None, ("a", "b", "c"))


def test_data_that_was_loaded_keeps_its_precision_names_and_ids() -> None:
    X, y, qid, ids = in_order(small_data(shuffled=True))
    names = tuple("abcde")
    data = RankingData.from_arrays(X / 3.0, y, qid=qid, doc_ids=ids, feature_names=names, dtype=torch.float64)
    back = ArraySource.of_data(data, ReadOptions()).read(labelled=True)
    assert back.features.dtype == torch.float64
    assert (back.feature_names, back.doc_ids, back.qids) == (data.feature_names, data.doc_ids, data.qids)
    assert torch.equal(back.order, data.order)
    assert torch.equal(back.features, data.features)
    assert ArraySource.of_data(small_data(ids=False), ReadOptions()).read().doc_ids is None
    assert ArraySource.of_data(data, ReadOptions()).name == "data"
    turned = ArraySource.of_data(data, ReadOptions(feature_names=tuple("edcba"))).read()
    assert torch.equal(turned.in_caller_order(turned.features), data.in_caller_order(data.features.flip(1)))


def test_npz_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.npz"
    content = {"X": np.eye(2), "qid": ["a", "b"], "y": [1, 0], "docid": [7, 8], "feature_names": ["p", "q"]}
    np.savez(file, **content)
    data = open_source(file).read(labelled=True)
    assert (data.qids, data.doc_ids, data.feature_names) == (("a", "b"), ("7", "8"), ("p", "q"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert open_source("-", kind="npz").read().doc_ids == ("7", "8")
    np.savez(file, X=np.eye(2), qid=["a", "b"])
    bare = open_source(file)
    assert (bare.has_labels, bare.feature_names, bare.read().doc_ids) == (False, None, None)
    np.savez(file, x=np.eye(2), qid=["a", "b"])
    with pytest.raises(DataError, match=r"a.npz: there must be an array 'X', got qid, x$"):
        open_source(file)
    np.savez(file, X=np.eye(2), qids=["a", "b"])
    with pytest.raises(DataError, match=r"a.npz: there must be an array 'qid', got X, qids; did you mean 'qids'\?"):
        open_source(file)
    np.savez(file)
    with pytest.raises(DataError, match=r"a.npz: there must be an array 'X', got none$"):
        open_source(file)
    np.savez(file, X=np.array([[object()]]), qid=[1])
    with pytest.raises(DataError, match=r"a.npz: not a readable .npz file: Object arrays cannot be loaded"):
        open_source(file)
    monkeypatch.setattr(files, "_MOST_UNPACKED", 1 << 12)
    np.savez_compressed(file, X=np.zeros((40_000, 2)), qid=np.zeros(40_000, int))
    with pytest.raises(DataError, match=r"a.npz: .* bytes unpack to more than 100 times as many"):
        open_source(file)


def test_limits_of_unpacking_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_UNPACKED", 1000)
    for packed, unpacked in ((1, 1000), (10, 1000), (11, 1100), (20, 2000)):
        check_unpacked("f", packed, unpacked)
        with pytest.raises(DataError, match=rf"^f: {packed} bytes unpack to more than 100 times as many"):
            check_unpacked("f", packed, unpacked + 1)
    pages = {"SC_PAGE_SIZE": 1024, "SC_PHYS_PAGES": 1024**2}
    monkeypatch.setattr(os, "sysconf", lambda name: pages[name])
    check_memory("f", 2**18, 2**10, 4)
    message = r"^f: 262,145 documents of 1,024 features need 1.0 GiB of memory, and this machine has 1.0; data=fol"
    with pytest.raises(DataError, match=message):
        check_memory("f", 2**18 + 1, 2**10, 4)


def test_files_are_found_by_kind_or_refused(tmp_path: Path) -> None:
    (tmp_path / "table").write_text("qid,x\n1,2\n")
    with open_file(tmp_path / "table", ReadOptions(), kind="csv") as opened:
        assert opened.read().features.tolist() == [[2]]
    with pytest.raises(DataError, match=r"gone.csv: no such file"):
        open_file(tmp_path / "gone.csv", ReadOptions())
    with pytest.raises(DataError, match=r"only Parquet is read from folders, patterns and stores, got .csv."):
        open_file(tmp_path, ReadOptions(), kind="csv")
    with pytest.raises(LGMMLError, match="`kind` must be one of"):
        open_file(tmp_path / "table", ReadOptions(), kind="xls")
    with pytest.raises(DataError, match=r"gone: no such file"):
        TextFile(tmp_path / "gone")


def test_a_model_is_named_only_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("qid,label,x\n1,0,2\n")
    with pytest.raises(DataError, match="the model was trained on 2 features"):
        open_source(tmp_path / "a.csv", num_features=2)
    with pytest.raises(DataError, match="`num_features` asks for 2 features"):
        load_file(tmp_path / "a.csv", num_features=2, cache=False)


def test_cached_says_what_it_was_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def parse() -> RankingData:
        made.append(1)
        return RankingData.from_arrays([[float(len(made))]], [0], qid=[1])

    one, two, store = tmp_path / "one", tmp_path / "two", Cache(tmp_path / "cache")
    one.write_text("1")
    two.write_text("2")

    def value(*files: Path, **facts: Any) -> float:
        return cached(store, list(files), facts, parse).features.item()

    assert value(one, two) == value(one, two) == 1
    key = {"parser": 2, "content": [store.content(one), store.content(two)]}  # raised when text means other numbers
    assert store.path(key).is_dir()
    assert value(two, one) == 2
    assert value(one) == value(one) == 3
    two.write_text("3")
    assert value(one, two) == 4
    monkeypatch.setattr(cache, "_PARSER", 99)
    assert value(one, two) == 5
    assert value(one, tmp_path / "gone") == 6
    assert value(one, tmp_path / "gone") == 7  # a file that is not there is for the parser to name


def test_a_warning_of_fewer_features_counts_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 qid:1 1:1\n0 qid:2 2:1\n")
    with open_source(tmp_path / "a.txt", num_features=3) as opened:
        with pytest.warns(DataWarning, match=r"the highest feature index is 2, .*: feature 3 counts as 0 everywhere"):
            opened.read()
        assert opened.read().num_features == 3
    with LetorSource(tmp_path / "a.txt", ReadOptions(num_features=9)) as opened:
        assert opened.read().num_features == 9  # no model, no warning


def test_gzip_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"1 qid:1 1:1\n"))
    assert load_letor(tmp_path / "a.txt", cache=False).num_documents == 1
    (tmp_path / "b.txt.gz").write_bytes(b"1 qid:1 1:1\n")
    assert load_letor(tmp_path / "b.txt.gz", cache=False).num_documents == 1
    (tmp_path / "train.txt").write_bytes(gzip.compress(b"1 qid:1 1:1\n"))
    assert open_dataset(tmp_path, cache=False)["train"].num_documents == 1
