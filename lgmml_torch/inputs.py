"""Matrices, sparse matrices, frames, labels and query ids as numpy arrays, and the canonical order of rows.

Frames of all libraries are read through narwhals, which is imported when the first frame is.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import DataError, DataWarning

if TYPE_CHECKING:
    import narwhals as nw

MISSING_POLICIES = ("error", "zero", "query-min", "query-mean")  # what stands in for missing values
MISSING_HINT = "`missing=` says what to put there (on the command line: --missing; in training: data.missing=)"
_VALUES_AT_ONCE = 1 << 21  # numbers of which a fingerprint is taken together


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


_STEPS = 1 << 17  # of float32 within the range of a feature; with more of them none is lost that matters


def flattened(
    features: NDArray[Any],  # (N, D) as they were cast
    # called with the number of a feature, gives its values before the cast; None where it was no number
    original: Callable[[int], NDArray[Any] | None],
) -> list[int]:
    """Features whose values float32 cannot tell apart, because they are large and close together, as timestamps are.

    Only features in whose range there are few numbers of float32 are looked at.
    """
    if features.dtype != np.float32 or not features.size:
        return []
    with np.errstate(invalid="ignore", over="ignore"):
        low, high = np.fmin.reduce(features, axis=0), np.fmax.reduce(features, axis=0)
        step = np.spacing(np.maximum(np.abs(low), np.abs(high)))
        narrow = np.flatnonzero((step > 0) & (high.astype(np.float64) - low < _STEPS * step.astype(np.float64)))
    found = []
    for place in narrow.tolist():
        if _is_flattened(original(place), features[:, place]):
            found.append(place)
    return found


def _is_flattened(given: NDArray[Any] | None, cast: NDArray[Any]) -> bool:
    """Whether values that differ by more than float64 rounds have become equal."""
    if given is None or given.dtype.kind not in "iuf" or given.dtype in (np.float32, np.float16):
        return False
    values = np.unique(given[~np.isnan(cast)])
    if len(values) < 2 or float(values[-1] - values[0]) < 1e-12 * float(np.abs(values).max()):
        return False
    return len(np.unique(values.astype(np.float32))) < len(values)


def warn_if_flattened(columns: Sequence[int], names: Sequence[str] | None, where: str = "") -> None:
    """Warn of features that `flattened` has found; the same sentence for the same features, which Python shows once."""
    if not columns:
        return
    called = [str(column + 1) for column in columns]
    if names is not None:
        called = [repr(names[column]) for column in columns]
    plural = "s" if len(called) > 1 else ""
    warnings.warn(
        f"{where}float32 cannot tell all values of feature{plural} {', '.join(called[:5])} apart: take "
        '`precision="float64"` (of a reader, `dtype=torch.float64`), or subtract what all values have in common',
        DataWarning,
        stacklevel=3,
    )


def original_column(X: Any, column: int) -> NDArray[Any] | None:
    """One feature as it was handed in; None where it was no number, or is float32 already."""
    if getattr(X, "dtype", None) in (np.float32, torch.float32):
        return None
    if (frame := as_frame(X)) is not None:
        try:
            return numeric_column(frame[:, column], column)
        except DataError:
            return None
    if isinstance(X, Tensor):
        return X[:, column].detach().cpu().numpy()
    if hasattr(X, "toarray"):
        return np.asarray(X[:, [column]].toarray())[:, 0]
    if isinstance(X, np.ndarray):
        return np.asarray(X)[:, column]
    return np.array([row[column] for row in X])


_STEEPEST_LABEL = 31  # the highest that XGBoost takes; the gain 2^y - 1 of a higher one exceeds four billion


def warn_if_steep(highest: float) -> None:
    """Warn of labels whose exponential gain leaves nothing of all others."""
    if highest > _STEEPEST_LABEL:
        warnings.warn(
            f"the highest label is {highest:g}, and its gain 2^y - 1 is {2.0**highest:.0e}: documents with the highest "
            "labels alone decide. Counts are no grades: make grades of them, such as 0 to 4, or their logarithm; to "
            'measure, a preset with linear gain does as well (preset="sklearn")',
            DataWarning,
            stacklevel=3,
        )


def check_distinct(names: Sequence[str] | None, where: str = "") -> None:
    """Require names of features to differ."""
    seen: set[str] = set()
    for name in names or ():
        if name in seen:
            raise DataError(f"{where}column {name!r} is named twice")
        seen.add(name)


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


_LAST_PLACE = 65_535  # where a document may have been shown; a table of biases has an entry up to the last one seen


def place_vector(name: str, values: Any, count: int) -> NDArray[np.int64]:
    """Where each row was shown: whole numbers from 0 to `_LAST_PLACE`."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    places = np.asarray(values)
    check_length(name, len(places), count)
    if places.ndim != 1 or places.dtype.kind not in "iufb":
        raise DataError(f"`{name}` must be a list of whole numbers, got {places.dtype} of shape {places.shape}")
    good = (places >= 0) & (places <= _LAST_PLACE)
    good &= places == np.floor(np.where(good, places, 0))
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        rule = f"whole numbers from 0 to {_LAST_PLACE:,}"
        raise DataError(f"`{name}` must hold {rule}, got {places[row]} at row {row + 1} (from 1)")
    return places.astype(np.int64)


def first_bad(features: NDArray[Any], *, missing: bool = False) -> tuple[int, int] | None:
    """Row and column of the first value that is not finite; ``missing`` lets NaN pass."""
    # A product with zero is NaN exactly where an entry is not finite; row sums keep the scan in one pass.
    with np.errstate(invalid="ignore"):
        rows = np.flatnonzero(~np.isfinite(np.einsum("nd,d->n", features, np.zeros(features.shape[1], features.dtype))))
    for row in rows.tolist():
        bad = ~np.isfinite(features[row])
        if missing:
            bad = np.isinf(features[row])
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
        named = hint = ""
        if names is not None:
            named = f" ({names[column]!r})"
        if np.isnan(value):
            hint = f"; {MISSING_HINT}"
        raise DataError(f"`X` must be finite, got {value} at row {row + 1} (from 1), feature {column + 1}{named}{hint}")
    bad_labels = np.flatnonzero(~np.isfinite(labels))
    if len(bad_labels):
        raise DataError(f"`y` must be finite, got {labels[bad_labels[0]]} at row {int(bad_labels[0]) + 1} (from 1)")


def query_codes(qid: Any, group: Any, rows: int) -> tuple[NDArray[np.int64], list[Hashable]]:
    """An integer code per row, numbered by first appearance, and the ids behind the codes."""
    if (qid is None) == (group is None):
        got = "neither" if qid is None else "both"
        raise DataError(f"give either `qid` (one id per row) or `group` (sizes of consecutive queries), got {got}")
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
    if isinstance(group, Tensor):
        group = group.detach().cpu()
    sizes = np.asarray(group)
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


def as_frame(X: Any) -> nw.DataFrame[Any] | None:
    """A frame or table of any library that narwhals knows (pandas, polars, pyarrow, …), None for anything else.

    Raises:
        DataError: two columns have the same name.
    """
    if not (hasattr(X, "columns") or hasattr(X, "column_names")):
        return None
    import narwhals as nw

    try:
        frame = nw.from_native(X, eager_only=True, pass_through=True)
        if isinstance(frame, nw.DataFrame):
            frame.columns  # noqa: B018 - some libraries check the names only now
            return frame
    except nw.exceptions.DuplicateError:
        check_distinct(list(getattr(X, "column_names", X.columns)), "frame: ")
    return None


def feature_names(X: Any) -> tuple[str, ...] | None:
    """Names of the columns of a frame, if all of them are text."""
    frame = as_frame(X)
    if frame is None or not all(isinstance(name, str) for name in frame.columns):
        return None
    return tuple(frame.columns)


def numeric_column(values: nw.Series[Any], name: object) -> NDArray[Any]:
    """The numbers of one column of a frame; true and false are 1 and 0, missing values are NaN.

    Raises:
        DataError: for text, dates and categories, naming the column.
    """
    import narwhals as nw

    dtype = values.dtype
    if dtype == nw.Boolean or dtype == nw.Unknown or dtype.is_decimal():
        return values.cast(nw.Float64).to_numpy()
    if dtype.is_numeric():
        return values.to_numpy()
    if dtype == nw.Object or values.null_count() == len(values):
        listed = values.to_list()
        if all(value is None or isinstance(value, numbers.Real) for value in listed):
            return np.array(listed, dtype=np.float64)
    if dtype.is_temporal():
        raise DataError(no_numbers(name, "dates", dtype))
    if dtype in (nw.Categorical, nw.Enum):
        raise DataError(no_numbers(name, "categories", dtype))
    raise DataError(no_numbers(name, "text", dtype))


def no_numbers(name: object, word: str, dtype: object) -> str:
    """The sentence about a column that holds no numbers, with what to do about it."""
    ways = {
        "dates": "turn them into a number such as an age in days",
        "text": f"name it in `categories` if its words are categories (data.categories=[{name}])",
        "categories": "score it by a model that was trained on it",
    }
    return f"column {name!r} must hold numbers, got {word} ({dtype}); leave it out, or {ways[word]}"


def _qid_sort_key(qid: Hashable) -> tuple[str, Any]:
    """Numbers by value, strings alphabetically, other types by name and then by their text."""
    if isinstance(qid, (int, float)) and not isinstance(qid, bool):
        return ("", qid)
    if isinstance(qid, str):
        return ("str", qid)
    return (type(qid).__name__, repr(qid))


def canonical_ranks(qids: Sequence[Hashable]) -> NDArray[np.int64]:  # (Q,)
    """The place of each query among the sorted ids."""
    rank = np.empty(len(qids), dtype=np.int64)
    rank[sorted(range(len(qids)), key=lambda i: _qid_sort_key(qids[i]))] = np.arange(len(qids))
    return rank


def canonical_order(
    features: NDArray[Any],
    labels: NDArray[np.float32],
    codes: NDArray[np.int64],
    qids: Sequence[Hashable],
    doc_ids: Sequence[str] | None,
    extras: Sequence[NDArray[Any] | None] = (),
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row order, and the place of each query code among the sorted ids; equal rows are told apart by ``extras``."""
    rank = canonical_ranks(qids)
    keys: list[Any] = [fingerprint(features), labels, rank[codes]]
    if doc_ids is not None:
        keys.insert(0, np.asarray(doc_ids, dtype=str))
    given = [values for values in extras if values is not None]
    return np.lexsort([*given, *keys]).astype(np.int64), rank


def fingerprint(features: NDArray[Any]) -> NDArray[np.uint64]:
    """A 64-bit number per row that depends on the bytes of its features only, so that sorting by it sorts rows.

    Comparing whole rows would take D comparisons each. Every 32-bit word is multiplied by an odd number of its
    column's own; the high half is folded into the low one, because round numbers end in zero bits.
    """
    multipliers = _multipliers(features.shape[1] * features.itemsize // 4)
    out = np.empty(len(features), dtype=np.uint64)
    step = max(1, _VALUES_AT_ONCE // max(1, features.shape[1]))
    for start in range(0, len(features), step):
        block = features[start : start + step] + 0.0  # −0.0 and 0.0 are the same number
        mixed = (block.view(np.uint32).astype(np.uint64) + 1) * multipliers
        mixed ^= mixed >> np.uint64(32)
        out[start : start + step] = mixed.sum(axis=1, dtype=np.uint64)
    return out


@lru_cache(maxsize=16)
def _multipliers(words: int) -> NDArray[np.uint64]:
    return np.random.default_rng(20170807).integers(1, 2**63, words, dtype=np.uint64) * 2 + 1
