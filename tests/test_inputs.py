"""Missing values are filled from their own query; columns of frames of any library give the same numbers."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from lgmml_torch.checks import DataError
from lgmml_torch.inputs import as_frame, feature_names, fill_missing, numeric_column


def test_gaps_equal_the_loop() -> None:
    for policy in ["zero", "query-min", "query-mean"]:
        for dtype in [np.float32, np.float64]:
            g = np.random.default_rng(0)
            queries = np.array(
                [2, 0, 0, 1, 2, 0, 2, 0, 3, 0]
            )  # in any order; the last feature is never given in query 3
            x = g.integers(-9, 10, (10, 4)).astype(dtype)
            x[g.random((10, 4)) < 0.4] = np.nan
            x[:, 0] = np.arange(10)  # nothing missing
            x[8, 3] = np.nan
            want = x.copy()
            for row, column in np.argwhere(np.isnan(x)):
                given = [value for value in x[queries == queries[row], column] if not np.isnan(value)]
                rules = {
                    "zero": 0.0,
                    "query-min": min(given, default=0.0),
                    "query-mean": sum(given) / max(len(given), 1),
                }
                want[row, column] = rules[policy]
            assert np.isnan(x).any()
            fill_missing(x, queries, policy)
            np.testing.assert_allclose(x, want, rtol=1e-6)


def test_nothing_to_fill() -> None:
    for x in (np.zeros((0, 2)), np.ones((3, 2)), np.ones((3, 0))):
        before = x.copy()
        fill_missing(x, np.zeros(len(x), dtype=np.int64), "query-mean")
        np.testing.assert_array_equal(x, before)


NUMBERS: dict[str, list[Any]] = {
    "whole": [1, 2, 3],
    "gap": [1, None, 3],
    "real": [0.5, None, 2.0],
    "flag": [True, False, True],
    "flag with gap": [True, None, False],
    "nothing": [None, None, None],
    "decimal": [Decimal("1.5"), None, Decimal("2")],
}
OTHERS: dict[str, tuple[list[Any], str]] = {
    "text": (["a", "b", "c"], "text"),
    "day": ([datetime.datetime(2020, 1, day) for day in (1, 2, 3)], "dates"),
}


def frame_of(library: str, columns: dict[str, list[Any]]) -> Any:
    module = pytest.importorskip(library)
    return module.table(columns) if library == "pyarrow" else module.DataFrame(columns)


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_columns_of_frames(library: str) -> None:
    columns = {name: values for name, values in NUMBERS.items() if (library, name) != ("pandas", "decimal")}
    X = frame_of(library, columns)
    frame = as_frame(X)
    assert frame is not None
    for place, (name, values) in enumerate(columns.items()):
        want = np.array([np.nan if value is None else float(value) for value in values])
        np.testing.assert_array_equal(numeric_column(frame[:, place], name).astype(np.float64), want)
    assert feature_names(X) == tuple(columns)
    others = as_frame(frame_of(library, {name: values for name, (values, _) in OTHERS.items()}))
    assert others is not None
    for place, (name, (_, word)) in enumerate(OTHERS.items()):
        with pytest.raises(DataError, match=rf"column '{name}' must hold numbers, got {word} \(.*leave it out, or"):
            numeric_column(others[:, place], name)


def test_columns_of_pandas() -> None:
    pd = pytest.importorskip("pandas")
    X = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": pd.Series([1, 2.5], dtype=object)})
    X["c"] = pd.Series(["u", "v"], dtype="category")
    frame = as_frame(X)
    assert frame is not None
    np.testing.assert_array_equal(numeric_column(frame[:, 0], "a"), [1, np.nan])
    np.testing.assert_array_equal(numeric_column(frame[:, 1], "b"), [1, 2.5])
    with pytest.raises(DataError, match=r"column 'c' must hold numbers, got categories .*score it by a model"):
        numeric_column(frame[:, 2], "c")
    plain = pd.DataFrame([[1.0, 2.0]])
    assert feature_names(plain) is None
    with pytest.raises(DataError, match="column 'a' is named twice"):
        as_frame(pd.DataFrame([[1.0, 2.0]], columns=["a", "a"]))
    assert [as_frame(other) for other in (np.eye(2), [[1.0]], None)] == [None] * 3
