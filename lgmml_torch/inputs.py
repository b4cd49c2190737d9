"""What callers hand in, as numpy arrays: matrices, sparse matrices, frames of three libraries, labels and query ids.

Nothing here imports pandas, polars or pyarrow before somebody hands in one of their frames.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import DataError, DataWarning

POLICIES = ("error", "zero", "query-min", "query-mean")  # what stands in for missing values
MISSING_HINT = "`missing=` says what to put there (on the command line: --missing; in training: data.missing=)"


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


def check_length(name: str, got: int, want: int, *, per: str = "row") -> None:
    """Require one entry per row (or per query)."""
    if got != want:
        raise DataError(f"`{name}` must have one entry per {per}, {want}, got {got}")


def dense_features(X: Any, dtype: torch.dtype) -> NDArray[Any]:
    """Features as a C-contiguous array of the given type, copied only when they have to be."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    if dtype not in (torch.float32, torch.float64):
        raise DataError(f"`dtype` must be torch.float32 or torch.float64, got {dtype}")
    with np.errstate(over="ignore"):  # a number too large becomes infinite, which is refused by row and column
        if isinstance(X, Tensor):
            X = X.detach().cpu().numpy()
        elif hasattr(X, "toarray"):
            X = X.astype(kind).toarray()
        if getattr(getattr(X, "dtype", None), "kind", "") == "c":
            raise DataError(f"`X` must hold real numbers, got {X.dtype}: Complex data not supported")
        try:
            array = np.ascontiguousarray(X, dtype=kind)
        except (TypeError, ValueError) as error:
            raise DataError(f"`X` must be numeric, got {type(X).__name__}: {error}") from error
    if array.ndim != 2:
        raise DataError(f"`X` must have shape (rows, features), got {array.shape}")
    return array


STEPS = 1 << 17  # of float32 within the range of a feature; from so many on, none is lost that matters


def warn_if_flattened(
    X: Any,
    features: NDArray[Any],  # (N, D) the same, cast
    names: tuple[str, ...] | None = None,
) -> None:
    """Warn of features whose values, large and close together as timestamps are, float32 cannot tell apart.

    Only features in whose range there are few numbers of float32 are looked at. The same sentence for the same
    features, so that Python shows it once.
    """
    if features.dtype != np.float32 or not features.size or getattr(X, "dtype", None) in (np.float32, torch.float32):
        return
    with np.errstate(invalid="ignore", over="ignore"):
        low, high = np.fmin.reduce(features, axis=0), np.fmax.reduce(features, axis=0)
        step = np.spacing(np.maximum(np.abs(low), np.abs(high)))
        narrow = np.flatnonzero((step > 0) & (high.astype(np.float64) - low < STEPS * step.astype(np.float64)))
    flat = [place for place in narrow.tolist() if _is_flattened(_original(X, place), features[:, place])]
    if flat:
        told = ", ".join(str(place + 1) if names is None else repr(names[place]) for place in flat[:5])
        warnings.warn(
            f"float32 cannot tell all values of feature{'s' if len(flat) > 1 else ''} {told} apart: take "
            '`precision="float64"` (of a reader, `dtype=torch.float64`), or subtract what all values have in common',
            DataWarning,
            stacklevel=3,
        )


def _original(X: Any, column: int) -> NDArray[Any] | None:
    """One feature as it was handed in; None where it was no number."""
    if frame_library(X) is not None:
        try:
            return numeric_column(frame_column(X, column), column)
        except DataError:
            return None
    if isinstance(X, Tensor):
        return X[:, column].detach().cpu().numpy()
    if hasattr(X, "toarray"):
        return np.asarray(X[:, [column]].toarray())[:, 0]
    return np.asarray(X)[:, column] if isinstance(X, np.ndarray) else np.array([row[column] for row in X])


def _is_flattened(given: NDArray[Any] | None, cast: NDArray[Any]) -> bool:
    """Whether values that differ by more than float64 rounds have become equal."""
    if given is None or given.dtype.kind not in "iuf" or given.dtype in (np.float32, np.float16):
        return False
    values = np.unique(given[~np.isnan(cast)])
    if len(values) < 2 or float(values[-1] - values[0]) < 1e-12 * float(np.abs(values).max()):
        return False
    return len(np.unique(values.astype(np.float32))) < len(values)


def float_vector(name: str, values: Any) -> NDArray[np.float32]:
    """One float32 number per row."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"`{name}` must be numeric: {error}") from error
    if array.ndim != 1:
        raise DataError(f"`{name}` must be 1-D, got shape {array.shape}")
    return array


def check_weights(name: str, values: Any, count: int, *, per: str = "row") -> NDArray[np.float32]:
    """One weight per row (or per query), finite and at least 0."""
    weights = float_vector(name, values)
    check_length(name, len(weights), count, per=per)
    bad = np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))
    if len(bad):
        raise DataError(f"`{name}` must be finite and at least 0, got {weights[bad[0]]:g}")
    return weights


LAST_PLACE = 65_535  # where a document may have been shown; a table of biases has an entry up to the last one seen


def place_vector(name: str, values: Any, count: int) -> NDArray[np.int64]:
    """Where each row was shown: whole numbers from 0 to `LAST_PLACE`."""
    places = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    check_length(name, len(places), count)
    if places.ndim != 1 or places.dtype.kind not in "iufb":
        raise DataError(f"`{name}` must be a list of whole numbers, got {places.dtype} of shape {places.shape}")
    good = (places >= 0) & (places <= LAST_PLACE)
    good &= places == np.floor(np.where(good, places, 0))
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        rule = f"whole numbers from 0 to {LAST_PLACE:,}"
        raise DataError(f"`{name}` must hold {rule}, got {places[row]} at row {row + 1} (from 1)")
    return places.astype(np.int64)


def first_bad(features: NDArray[Any], *, missing: bool = False) -> tuple[int, int] | None:
    """Row and column of the first value that is not finite; ``missing`` lets NaN pass."""
    # A product with zero is NaN exactly where an entry is not finite; row sums keep the scan in one pass.
    with np.errstate(invalid="ignore"):
        rows = np.flatnonzero(~np.isfinite(np.einsum("nd,d->n", features, np.zeros(features.shape[1], features.dtype))))
    for row in rows.tolist():
        bad = np.isinf(features[row]) if missing else ~np.isfinite(features[row])
        if bad.any():
            return row, int(np.flatnonzero(bad)[0])
    return None


def check_values(
    features: NDArray[Any], labels: NDArray[np.float32], names: tuple[str, ...] | None = None, *, missing: bool = False
) -> None:
    """Require finite features and labels; the error names the row, from 1, and the feature. ``missing`` allows NaN."""
    if (bad := first_bad(features, missing=missing)) is not None:
        row, column = bad
        value = features[row, column]
        called = "" if names is None else f" ({names[column]!r})"
        hint = f"; {MISSING_HINT}" if np.isnan(value) else ""
        raise DataError(
            f"`X` must be finite, got {value} at row {row + 1} (from 1), feature {column + 1}{called}{hint}"
        )
    bad_labels = np.flatnonzero(~np.isfinite(labels))
    if len(bad_labels):
        raise DataError(f"`y` must be finite, got {labels[bad_labels[0]]} at row {int(bad_labels[0]) + 1} (from 1)")


def query_codes(qid: Any, group: Any, rows: int) -> tuple[NDArray[np.int64], list[Hashable]]:
    """An integer code per row, numbered by first appearance, and the ids behind the codes."""
    if (qid is None) == (group is None):
        raise DataError(
            "give either `qid` (one id per row) or `group` (sizes of consecutive queries), got "
            + ("neither" if qid is None else "both")
        )
    if group is not None:
        return _group_codes(group, rows)
    if isinstance(qid, Tensor):
        qid = qid.detach().cpu().numpy()
    if hasattr(qid, "to_numpy"):
        qid = qid.to_numpy()
    check_length("qid", len(qid), rows)
    if isinstance(qid, np.ndarray):
        if qid.ndim != 1:
            raise DataError(f"`qid` must be 1-D, got shape {qid.shape}")
        if qid.dtype.kind in "iu":
            return _whole_codes(qid)
        qid = qid.tolist()
    codes = np.empty(rows, dtype=np.int64)
    seen: dict[Hashable, int] = {}
    for row, value in enumerate(qid):
        if is_missing(value):
            raise DataError(f"`qid` must not be missing, got {value!r} at row {row + 1} (from 1)")
        try:
            codes[row] = seen.setdefault(value, len(seen))
        except TypeError:
            raise DataError(f"`qid` must be hashable, got {type(value).__name__} at row {row + 1} (from 1)") from None
    return codes, list(seen)


def _group_codes(group: Any, rows: int) -> tuple[NDArray[np.int64], list[Hashable]]:
    sizes = np.asarray(group.detach().cpu() if isinstance(group, Tensor) else group)
    if sizes.ndim != 1 or not (np.issubdtype(sizes.dtype, np.integer) or (sizes == sizes.astype(np.int64)).all()):
        raise DataError(f"`group` must be a list of whole numbers, got {sizes.dtype} of shape {sizes.shape}")
    if (sizes < 0).any() or sizes.sum() != rows:
        raise DataError(f"`group` must be sizes that add up to the number of rows, {rows}, got {int(sizes.sum())}")
    return np.repeat(np.arange(len(sizes)), sizes.astype(np.int64)), list(range(len(sizes)))


def _whole_codes(qid: NDArray[Any]) -> tuple[NDArray[np.int64], list[Hashable]]:
    values, first, inverse = np.unique(qid, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse], values[order].tolist()


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN or NA."""
    try:
        return value is None or bool(value != value)  # NaN differs from itself
    except TypeError:  # pandas.NA neither differs from itself nor does not
        return True


def frame_library(X: Any) -> str | None:
    """``"pandas"``, ``"polars"`` or ``"pyarrow"`` for a frame (or table) of that library, None for anything else."""
    if not (hasattr(X, "columns") or hasattr(X, "column_names")):
        return None
    homes = (cls.__module__.partition(".")[0] for cls in type(X).__mro__)
    return next((home for home in homes if home in ("pandas", "polars", "pyarrow")), None)


def frame_columns(X: Any) -> list[Any]:
    """The names of a frame's columns, of whatever type they are."""
    return list(X.column_names if frame_library(X) == "pyarrow" else X.columns)


def frame_column(X: Any, position: int) -> Any:
    """One column of a frame, by position, because names may come twice."""
    library = frame_library(X)
    return X.iloc[:, position] if library == "pandas" else X[:, position] if library == "polars" else X.column(position)


def drop_column(X: Any, position: int) -> tuple[Any, Any]:
    """A frame without one of its columns, and that column."""
    library, column = frame_library(X), frame_column(X, position)
    if library == "pandas":
        return X.iloc[:, [place for place in range(X.shape[1]) if place != position]], column
    return X.drop(X.columns[position]) if library == "polars" else X.remove_column(position), column


def feature_names(X: Any) -> tuple[str, ...] | None:
    """Names of the columns of a frame, if all of them are text."""
    if frame_library(X) is None:
        return None
    names = frame_columns(X)
    return tuple(names) if all(isinstance(name, str) for name in names) else None


def numeric_column(values: Any, name: object) -> NDArray[Any]:
    """The numbers of one column of a frame; yes and no are 1 and 0, what is missing is NaN.

    Raises:
        DataError: for text, dates and categories, naming the column.
    """
    library = type(values).__module__.partition(".")[0]
    if library == "pyarrow":
        return _arrow_numbers(values, name)
    if library == "polars":
        return _polars_numbers(values, name)
    kind = getattr(values.dtype, "kind", "O")
    if kind in "biuf":
        numpy_type = isinstance(values.dtype, np.dtype)
        out: NDArray[Any] = values.to_numpy() if numpy_type else values.to_numpy(dtype=np.float64, na_value=np.nan)
        return out
    if values.dtype == object and all(value is None or isinstance(value, numbers.Real) for value in values):
        return np.array([np.nan if value is None else float(value) for value in values])
    word = "dates" if kind in "mM" else "categories" if str(values.dtype) == "category" else "text"
    raise DataError(refusal(name, word, values.dtype))


def refusal(name: object, word: str, dtype: object) -> str:
    """The sentence about a column that holds no numbers, with what to do about it."""
    ways = {
        "dates": "turn them into a number such as an age in days",
        "text": f"name it in `categories` if its words are categories (data.categories=[{name}])",
        "categories": "score it by a model that was trained on it",
    }
    return f"column {name!r} must hold numbers, got {word} ({dtype}); leave it out, or {ways[word]}"


def arrow_word(dtype: Any) -> str | None:
    """What a column of pyarrow holds if not numbers, in a word; None for numbers, yes and no, and nothing at all."""
    from pyarrow import types

    if any(is_it(dtype) for is_it in (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal)):
        return None
    if types.is_null(dtype):
        return None
    return "dates" if types.is_temporal(dtype) else "categories" if types.is_dictionary(dtype) else "text"


def _arrow_numbers(values: Any, name: object) -> NDArray[Any]:
    import pyarrow as pa

    word = arrow_word(values.type)
    if word is not None:
        raise DataError(refusal(name, word, values.type))
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    elif pa.types.is_decimal(values.type) or pa.types.is_null(values.type):
        values = values.cast(pa.float64())
    out: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return out


def _polars_numbers(values: Any, name: object) -> NDArray[Any]:
    import polars as pl

    dtype = values.dtype
    if dtype == pl.Boolean or dtype == pl.Null or dtype.is_decimal() or (dtype.is_integer() and values.null_count()):
        values = values.cast(pl.Float64)
    elif not dtype.is_numeric():
        category = isinstance(dtype, (pl.Categorical, pl.Enum))
        word = "dates" if dtype.is_temporal() else "categories" if category else "text"
        raise DataError(refusal(name, word, dtype))
    out: NDArray[Any] = values.to_numpy()
    return out
