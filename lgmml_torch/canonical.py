"""The canonical order of rows: queries by id, documents by label and then by their features.

The same data gives the same order in whatever order its rows arrive.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def qid_sort_key(qid: Hashable) -> tuple[str, Any]:
    """Numbers by value, strings alphabetically, other types by name and then by their text."""
    if isinstance(qid, (int, float)) and not isinstance(qid, bool):
        return ("", qid)
    if isinstance(qid, str):
        return ("str", qid)
    return (type(qid).__name__, repr(qid))


def canonical_ranks(qids: Sequence[Hashable]) -> NDArray[np.int64]:  # (Q,)
    """The place of each query among the sorted ids."""
    rank = np.empty(len(qids), dtype=np.int64)
    rank[sorted(range(len(qids)), key=lambda i: qid_sort_key(qids[i]))] = np.arange(len(qids))
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
    keys = [*(values for values in extras if values is not None), *keys]
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
