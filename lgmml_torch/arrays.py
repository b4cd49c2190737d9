"""Turning what callers hand in (arrays, tensors, frames, ids) into checked numpy arrays and a canonical order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import DataError


def check_length(name: str, got: int, want: int, *, per: str = "row") -> None:
    """Require one entry per row (or per query)."""
    if got != want:
        raise DataError(f"`{name}` must have one entry per {per}, {want}, got {got}")


def dense_features(X: Any, dtype: torch.dtype) -> NDArray[Any]:
    """Features as a C-contiguous array of the given type, copied only when they have to be."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    if dtype not in (torch.float32, torch.float64):
        raise DataError(f"`dtype` must be torch.float32 or torch.float64, got {dtype}")
    if isinstance(X, Tensor):
        X = X.detach().cpu().numpy()
    elif hasattr(X, "toarray"):
        X = X.astype(kind).toarray()
    try:
        array = np.ascontiguousarray(X, dtype=kind)
    except (TypeError, ValueError) as error:
        raise DataError(f"`X` must be numeric, got {type(X).__name__}: {error}") from error
    if array.ndim != 2:
        raise DataError(f"`X` must have shape (rows, features), got {array.shape}")
    return array


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


def check_values(features: NDArray[Any], labels: NDArray[np.float32]) -> None:
    """Require finite features and labels; the error names the row and the feature."""
    # A product with zero is NaN exactly where an entry is not finite; row sums keep the scan in one pass.
    with np.errstate(invalid="ignore"):
        bad_rows = np.flatnonzero(
            ~np.isfinite(np.einsum("nd,d->n", features, np.zeros(features.shape[1], features.dtype)))
        )
    if len(bad_rows):
        row = int(bad_rows[0])
        column = int(np.flatnonzero(~np.isfinite(features[row]))[0])
        raise DataError(f"`X` must be finite, got {features[row, column]} at row {row}, feature {column + 1}")
    bad_labels = np.flatnonzero(~np.isfinite(labels))
    if len(bad_labels):
        raise DataError(f"`y` must be finite, got {labels[bad_labels[0]]} at row {int(bad_labels[0])}")


def query_codes(qid: Any, group: Any, rows: int) -> tuple[NDArray[np.int64], list[Hashable]]:
    """An integer code per row, numbered by first appearance, and the ids behind the codes."""
    if (qid is None) == (group is None):
        raise DataError(
            "give either `qid` (one id per row) or `group` (sizes of consecutive queries), got "
            + ("neither" if qid is None else "both")
        )
    if group is not None:
        sizes = np.asarray(group.detach().cpu() if isinstance(group, Tensor) else group)
        if sizes.ndim != 1 or not (np.issubdtype(sizes.dtype, np.integer) or (sizes == sizes.astype(np.int64)).all()):
            raise DataError(f"`group` must be a list of whole numbers, got {sizes.dtype} of shape {sizes.shape}")
        if (sizes < 0).any() or sizes.sum() != rows:
            raise DataError(f"`group` must be sizes that add up to the number of rows, {rows}, got {int(sizes.sum())}")
        return np.repeat(np.arange(len(sizes)), sizes.astype(np.int64)), list(range(len(sizes)))
    if isinstance(qid, Tensor):
        qid = qid.detach().cpu().numpy()
    if hasattr(qid, "to_numpy"):
        qid = qid.to_numpy()
    check_length("qid", len(qid), rows)
    if isinstance(qid, np.ndarray):
        if qid.ndim != 1:
            raise DataError(f"`qid` must be 1-D, got shape {qid.shape}")
        qid = qid.tolist()
    codes = np.empty(rows, dtype=np.int64)
    seen: dict[Hashable, int] = {}
    for row, value in enumerate(qid):
        if value is None or value != value:  # NaN differs from itself
            raise DataError(f"`qid` must not be missing, got {value!r} at row {row}")
        try:
            codes[row] = seen.setdefault(value, len(seen))
        except TypeError:
            raise DataError(f"`qid` must be hashable, got {type(value).__name__} at row {row}") from None
    return codes, list(seen)


def qid_sort_key(qid: Hashable) -> tuple[str, Any]:
    """Numbers by value, strings alphabetically, other types by name and then by their text."""
    if isinstance(qid, (int, float)) and not isinstance(qid, bool):
        return ("", qid)
    if isinstance(qid, str):
        return ("str", qid)
    return (type(qid).__name__, repr(qid))


def canonical_order(
    features: NDArray[Any],
    labels: NDArray[np.float32],
    codes: NDArray[np.int64],
    qids: list[Hashable],
    doc_ids: Sequence[str] | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row order, and the place of each query code among the sorted ids."""
    rank = np.empty(len(qids), dtype=np.int64)
    rank[sorted(range(len(qids)), key=lambda i: qid_sort_key(qids[i]))] = np.arange(len(qids))
    keys: list[Any] = [fingerprint(features), labels, rank[codes]]
    if doc_ids is not None:
        keys.insert(0, np.asarray(doc_ids, dtype=str))
    return np.lexsort(keys).astype(np.int64), rank


def fingerprint(features: NDArray[Any]) -> NDArray[np.uint64]:
    """A 64-bit number per row that depends on the bytes of its features only, so that sorting by it sorts rows.

    Comparing whole rows would take D comparisons each. Every 32-bit word is multiplied by an odd number of its
    column's own; the high half is folded into the low one, because round numbers end in zero bits.
    """
    words_per_row = features.shape[1] * features.itemsize // 4
    multipliers = np.random.default_rng(20170807).integers(1, 2**63, words_per_row, dtype=np.uint64) * 2 + 1
    out = np.empty(len(features), dtype=np.uint64)
    for start in range(0, len(features), 16384):
        block = features[start : start + 16384] + 0.0  # −0.0 and 0.0 are the same number
        mixed = (block.view(np.uint32).astype(np.uint64) + 1) * multipliers
        mixed ^= mixed >> np.uint64(32)
        out[start : start + 16384] = mixed.sum(axis=1, dtype=np.uint64)
    return out
