from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.ragged import RankingData


def random_arrays(seed: int, rows: int = 60, features: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    # Few distinct values on purpose: duplicate rows and ties.
    X = rng.integers(0, 3, (rows, features)).astype(np.float32)
    return X, rng.integers(0, 3, rows).astype(np.float32), rng.integers(0, 9, rows)


def same(a: RankingData, b: RankingData) -> bool:
    return (
        torch.equal(a.features, b.features)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.offsets, b.offsets)
        and a.qids == b.qids
    )


@pytest.mark.parametrize(("seed", "dtype"), [(0, torch.float32), (1, torch.float32), (2, torch.float64)])
def test_shuffled_rows_give_the_same_canonical_data(seed: int, dtype: torch.dtype) -> None:
    X, y, qid = random_arrays(seed)
    shuffled = np.random.default_rng(seed + 100).permutation(len(y))
    one = RankingData.from_arrays(X, y, qid=qid, dtype=dtype)
    other = RankingData.from_arrays(X[shuffled], y[shuffled], qid=qid[shuffled], dtype=dtype)
    assert same(one, other)
    assert np.array_equal(one.in_caller_order(one.features).numpy(), X)
    assert np.array_equal(other.in_caller_order(other.features).numpy(), X[shuffled])


def test_canonical_order_is_by_query_then_label() -> None:
    X, y, qid = random_arrays(1)
    data = RankingData.from_arrays(X, y, qid=qid)
    assert list(data.qids) == sorted(set(qid.tolist()))
    for q in range(data.num_queries):
        labels = data.labels[data.offsets[q] : data.offsets[q + 1]]
        assert (labels.diff() >= 0).all()


def test_negative_zero_is_zero() -> None:
    one = RankingData.from_arrays([[0.0, 1.0], [0.0, 2.0]], [0, 0], qid=[1, 1])
    other = RankingData.from_arrays([[-0.0, 2.0], [-0.0, 1.0]], [0, 0], qid=[1, 1])
    assert torch.equal(one.features, other.features)


def test_any_hashable_query_id() -> None:
    ids: list[list] = [
        ["b", "a", "b"],
        [("x", 2), ("x", 1), ("x", 2)],
        [2**60, 1, 2**60],
        [2.5, -1.0, 2.5],
        ["b", 1, "b"],
    ]
    for qid in ids:
        data = RankingData.from_arrays(np.eye(3), [0, 1, 2], qid=qid, query_weights=[7.0, 3.0])  # by first appearance
        assert set(data.qids) == set(qid)
        assert data.sizes.tolist() == [1, 2]
        assert data.query_weights is not None
        assert dict(zip(data.qids, data.query_weights.tolist(), strict=True)) == {qid[0]: 7.0, qid[1]: 3.0}


def test_sources_agree() -> None:
    pd = pytest.importorskip("pandas")
    X, y, qid = random_arrays(2)
    base = RankingData.from_arrays(X, y, qid=qid)
    frame = pd.DataFrame(X, columns=list("abcd"))
    assert same(base, RankingData.from_arrays(frame, pd.Series(y), qid=pd.Series(qid)))
    assert RankingData.from_arrays(frame, y, qid=qid).feature_names == tuple("abcd")
    assert RankingData.from_arrays(pd.DataFrame(X), y, qid=qid).feature_names is None  # named by numbers
    for library in ("polars", "pyarrow"):
        make = pytest.importorskip(library)
        table = (make.table if library == "pyarrow" else make.DataFrame)({"qid": qid, "y": y})
        other = (make.table if library == "pyarrow" else make.DataFrame)(dict(zip("abcd", X.T, strict=True)))
        found = RankingData.from_arrays(other, table["y"], qid=table["qid"])
        assert same(base, found)
        assert found.feature_names == tuple("abcd")
    assert same(base, RankingData.from_arrays(sparse.csr_matrix(X), y.tolist(), qid=qid.tolist()))
    assert same(base, RankingData.from_arrays(torch.from_numpy(X), torch.from_numpy(y), qid=torch.from_numpy(qid)))


def test_group_sizes() -> None:
    data = RankingData.from_arrays(np.eye(4), [0, 1, 0, 1], group=[3, 1], query_weights=[2.0, 5.0])
    assert data.qids == (0, 1)
    assert data.offsets.tolist() == [0, 3, 4]
    assert data.query_weights is not None
    assert data.query_weights.tolist() == [2.0, 5.0]


@pytest.mark.parametrize("seed", range(2))
def test_splits_never_share_a_query(seed: int) -> None:
    X, y, qid = random_arrays(seed, rows=200)
    data = RankingData.from_arrays(X, y, qid=qid, doc_ids=[f"d{i}" for i in range(200)])
    parts = data.split((0.5, 0.25, 0.25), seed=seed)
    ids = [set(part.qids) for part in parts]
    assert set().union(*ids) == set(data.qids)
    assert sum(map(len, ids)) == data.num_queries
    assert same(RankingData.merge(parts), data)
    assert [p.qids for p in parts] == [p.qids for p in data.split((0.5, 0.25, 0.25), seed=seed)]
    assert [p.qids for p in parts] != [p.qids for p in data.split((0.5, 0.25, 0.25), seed=seed + 1)]
    held: set = set()
    for rest, fold in data.kfold(3, seed=seed):
        assert not set(rest.qids) & set(fold.qids)
        held |= set(fold.qids)
    assert held == set(data.qids)


def test_select_keeps_the_callers_order() -> None:
    X, y, qid = random_arrays(3)
    data = RankingData.from_arrays(X, y, qid=qid, doc_ids=[str(i) for i in range(len(y))])
    part = data.select([4, 1])
    wanted = np.flatnonzero(np.isin(qid, [data.qids[4], data.qids[1]]))
    assert np.array_equal(part.in_caller_order(part.features).numpy(), X[wanted])
    assert part.doc_ids is not None
    by_row = part.in_caller_order(torch.tensor([int(d) for d in part.doc_ids]))
    assert by_row.tolist() == wanted.tolist()


def test_statistics_and_repr() -> None:
    data = RankingData.from_arrays([[1, 0], [1, 2], [1, 3]], [0, 2, 0], qid=[1, 1, 2])
    stats = data.statistics()
    assert data.to(dtype=torch.float64).features.dtype == torch.float64
    assert stats["labels"] == {0.0: 2, 2.0: 1}
    assert stats["queries without a relevant document"] == 1
    assert stats["constant features"] == 1
    assert repr(data) == "RankingData(2 queries, 3 documents, 2 features, labels 0–2, 1–2 documents per query)"
    empty = RankingData.from_arrays(np.zeros((0, 5)), [], qid=[])
    assert "0 queries" in repr(empty)
    assert empty.statistics()["documents"] == 0


def test_bad_arrays_are_named() -> None:
    refused: list[tuple[dict, str]] = [
        (dict(qid=None), "got neither"),
        (dict(group=[1]), "got both"),
        (dict(y=[1, 2]), "`y` must have one entry per row, 1, got 2"),
        (dict(qid=[1, 2]), "`qid` must have one entry per row"),
        (dict(qid=None, group=[2]), "add up to the number of rows, 1, got 2"),
        (dict(qid=None, group=[0.5]), "whole numbers"),
        (dict(X=[[1.0, float("nan")]]), "got nan at row 1 .from 1., feature 2"),
        (dict(X=[[float("inf")]], missing="zero"), "`X` must be finite, got inf at row 1 .from 1., feature 1"),
        (dict(X=[[np.nan]], feature_names=["price"]), r"row 1 .from 1., feature 1 \('price'\); `mis"),
        (dict(y=[float("nan")]), "`y` must be finite, got nan at row 1"),
        (dict(qid=[None]), "`qid` must not be missing, got None at row 1"),
        (dict(qid=[[1]]), "`qid` must be hashable, got list at row 1"),
        (dict(X=[["a"]]), "`X` must be numeric"),
        (dict(X=[1.0]), r"`X` must have shape \(rows, features\)"),
        (dict(y=["a"]), "`y` must be numeric"),
        (dict(y=[[1]]), "`y` must be 1-D"),
        (dict(qid=np.zeros((1, 1))), "`qid` must be 1-D"),
        (dict(doc_ids=[]), "`doc_ids` must have one entry per row"),
        (dict(query_weights=[1, 2]), "`query_weights` must have one entry per query"),
        (dict(dtype=torch.float16), "`dtype` must be"),
        (dict(feature_names=["a", "b"]), "`feature_names` must have one entry per feature, 1"),
    ]
    for arguments, message in refused:
        with pytest.raises(DataError, match=message):
            RankingData.from_arrays(**{"X": [[1.0]], "y": [1], "qid": [1], **arguments})


@pytest.mark.parametrize(
    ("missing", "filled"), [("zero", [1, 0, 3, 0]), ("query-min", [1, 1, 3, 0]), ("query-mean", [1, 2, 3, 0])]
)
def test_gaps_are_filled_by_the_named_rule(missing: str, filled: list[float]) -> None:
    X = np.array([[1.0], [np.nan], [3.0], [np.nan]], np.float32)
    data = RankingData.from_arrays(X, [0, 1, 2, 0], qid=[1, 1, 1, 2], missing=missing)
    assert data.in_caller_order(data.features)[:, 0].tolist() == filled
    assert np.isnan(X).sum() == 2  # the caller's own
    with pytest.raises(LGMMLError, match=r"`missing` must be one of 'error', 'zero', .*did you mean 'zero'"):
        RankingData.from_arrays(X, [0, 1, 2, 0], qid=[1, 1, 1, 2], missing="zeros")


def test_names_of_features_go_along() -> None:
    X, y, qid = random_arrays(2)
    data = RankingData.from_arrays(X, y, qid=qid, feature_names=list("abcd"))
    assert data.feature_names == tuple("abcd")
    for kept in (data.select([1]), data.to(dtype=torch.float64), *data.split((1, 1)), data.replace(labels=data.labels)):
        assert kept.feature_names == tuple("abcd")
    assert RankingData.merge(data.split((1, 1))).feature_names == tuple("abcd")
    assert data.replace(features=data.features[:, :2]).feature_names is None  # they would be wrong
    one, other = data.split((1, 1))
    assert RankingData.merge([one, other.replace(feature_names=None)]).feature_names is None
    with pytest.raises(DataError, match="`parts` must have the same names of features in the same order"):
        RankingData.merge([one, other.replace(feature_names=tuple("abdc"))])


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_columns_of_frames(library: str) -> None:
    import datetime

    make = pytest.importorskip(library)
    build = make.table if library == "pyarrow" else make.DataFrame
    good = {"yes": [True, False, True], "n": [1, 2, 3], "gap": [1.5, None, 2.5], "few": [1, None, 3], "no": [None] * 3}
    data = RankingData.from_arrays(build(good), [0, 1, 2], qid=[1, 1, 1], missing="query-min")
    assert data.features.tolist() == [[1, 1, 1.5, 1, 0], [0, 2, 1.5, 1, 0], [1, 3, 2.5, 3, 0]]
    with pytest.raises(DataError, match=r"got nan at row 2 .from 1., feature 2 \('gap'\); `missing=` says"):
        RankingData.from_arrays(build({"n": good["n"], "gap": good["gap"]}), [0, 1, 2], qid=[1, 1, 1])
    day = datetime.datetime(2020, 1, 1)
    category = {
        "pandas": lambda: make.Categorical(["a", "b", "a"]),
        "polars": lambda: make.Series(["a", "b", "a"], dtype=make.Categorical),
        "pyarrow": lambda: make.array(["a", "b", "a"]).dictionary_encode(),
    }[library]()
    for values, word in ((["x", "y", "z"], "text"), ([day] * 3, "dates")):
        with pytest.raises(DataError, match=rf"column 'odd' must hold numbers, got {word} \("):
            RankingData.from_arrays(build({"x": [1.0, 2.0, 3.0], "odd": values}), [0, 1, 2], qid=[1, 1, 1])
    frame = build({"x": [1.0, 2.0, 3.0], "odd": category})
    data = RankingData.from_arrays(frame, [0, 1, 2], qid=[1, 1, 1])
    assert data.categories == (None, ("a", "b"))
    assert data.features[:, 1].tolist() == [0, 1, 0]
    with pytest.raises(
        DataError, match=r"column 'odd' must hold numbers, got categories \(.*; leave it out, or score it by a model"
    ):
        RankingData.from_arrays(frame, [0, 1, 2], qid=[1, 1, 1], categories={})


def test_missing_query_ids_in_frames() -> None:
    pd = pytest.importorskip("pandas")
    for column in (pd.Series(["a", None]), pd.Series([1, None], dtype="Int64"), pd.Series([1.0, np.nan])):
        with pytest.raises(DataError, match=r"`qid` must not be missing, got .* at row 2"):
            RankingData.from_arrays(np.eye(2), [0, 1], qid=column)


def test_bad_selections_are_named() -> None:
    data = RankingData.from_arrays(np.eye(2), [0, 1], qid=[1, 2])
    with pytest.raises(DataError, match="indices below 2, got 2"):
        data.select([2])
    with pytest.raises(DataError, match=r"`folds` must lie in \[2, number of queries = 2\], got 3"):
        list(data.kfold(3))
    with pytest.raises(LGMMLError, match="`fractions` must be at least 0, got -1"):
        data.split((1, -1))
    with pytest.raises(LGMMLError, match=r"`fractions` must be above 0 for some part, got \[0, 0\]"):
        data.split((0, 0))
    assert [part.num_queries for part in data.split((1, 0))] == [2, 0]
    with pytest.raises(DataError, match="must not share queries, got qid 1 twice"):
        RankingData.merge([data, data])
    with pytest.raises(DataError, match="same number of features"):
        RankingData.merge([data, RankingData.from_arrays(np.eye(3), [0, 0, 0], qid=[7, 7, 7])])
    with pytest.raises(DataError, match="at least one data set"):
        RankingData.merge([])
    with pytest.raises(DataError, match="`values` must have one entry per row"):
        data.in_caller_order(torch.zeros(3))
