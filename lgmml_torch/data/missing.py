"""What stands in for values a file does not give."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

POLICIES = ("error", "zero", "query-min", "query-mean")


def fill_missing(
    features: NDArray[Any],  # (N, D), NaN where missing
    queries: NDArray[np.int64],  # (N,) the query of each row
    policy: str,
) -> None:
    """Replace NaN in place.

    ``zero`` puts 0; ``query-min`` the smallest value the feature has in the same query (LETOR's own rule for
    ``NULL``), ``query-mean`` its mean there; 0 where a query never gives the feature. None of them looks at other
    queries, so training and new data are treated alike.

    >>> x = np.array([[1.0], [3.0], [np.nan], [np.nan]])
    >>> fill_missing(x, np.array([0, 0, 0, 1]), "query-mean")
    >>> x[:, 0].tolist()
    [1.0, 3.0, 2.0, 0.0]
    """
    missing = np.isnan(features)
    size = int(queries.max(initial=-1)) + 1
    for column in np.flatnonzero(missing.any(axis=0)):
        gaps = missing[:, column]
        values, given = features[:, column], ~gaps
        stand_in = np.zeros(size)
        if policy == "query-min":
            lowest = np.full(size, np.inf)
            np.minimum.at(lowest, queries[given], values[given])
            stand_in = np.where(np.isfinite(lowest), lowest, 0.0)
        elif policy == "query-mean":
            counts = np.bincount(queries[given], minlength=size)
            totals = np.bincount(queries[given], weights=values[given].astype(np.float64), minlength=size)
            stand_in = totals / np.maximum(counts, 1)
        values[gaps] = stand_in[queries[gaps]]
