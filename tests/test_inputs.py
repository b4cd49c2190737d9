"""Missing values are filled from their own query, feature by feature."""

from __future__ import annotations

import numpy as np
import pytest

from lgmml_torch.inputs import fill_missing


@pytest.mark.parametrize("policy", ["zero", "query-min", "query-mean"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gaps_equal_the_loop(policy: str, dtype: type) -> None:
    g = np.random.default_rng(0)
    queries = np.array([2, 0, 0, 1, 2, 0, 2, 0, 3, 0])  # in any order; the last feature is never given in query 3
    x = g.integers(-9, 10, (10, 4)).astype(dtype)
    x[g.random((10, 4)) < 0.4] = np.nan
    x[:, 0] = np.arange(10)  # nothing missing
    x[8, 3] = np.nan
    want = x.copy()
    for row, column in np.argwhere(np.isnan(x)):
        given = [value for value in x[queries == queries[row], column] if not np.isnan(value)]
        rules = {"zero": 0.0, "query-min": min(given, default=0.0), "query-mean": sum(given) / max(len(given), 1)}
        want[row, column] = rules[policy]
    assert np.isnan(x).any()
    fill_missing(x, queries, policy)
    np.testing.assert_allclose(x, want, rtol=1e-6)


def test_nothing_to_fill() -> None:
    for x in (np.zeros((0, 2)), np.ones((3, 2)), np.ones((3, 0))):
        before = x.copy()
        fill_missing(x, np.zeros(len(x), dtype=np.int64), "query-mean")
        np.testing.assert_array_equal(x, before)
