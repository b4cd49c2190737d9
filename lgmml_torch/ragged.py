"""`RankingData`: documents of many queries as flat tensors, in one canonical order.

Queries are ordered by id, documents within a query by label and then by their features, so that the same data
gives the same tensors in whatever order its rows arrive. `RankingData.order` remembers the caller's order: scores
go back in it, and equal scores are ranked by it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch import segments
from lgmml_torch.checks import DataError, check_choice, check_positive
from lgmml_torch.inputs import (
    POLICIES,
    check_length,
    check_values,
    dense_features,
    fill_missing,
    float_vector,
    query_codes,
)
from lgmml_torch.inputs import (
    feature_names as names_of,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


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
    qids: Sequence[Hashable],
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


@dataclass(frozen=True, eq=False)
class RankingData:
    """Ragged ranking data in canonical order.

    Build it with `from_arrays`, `lgmml_torch.load_letor` or a named data set; the constructor trusts its arguments.

    Attributes:
        features: ``(N, D)`` one row per document.
        labels: ``(N,)`` relevance, higher is better; fractions are fine.
        offsets: ``(Q+1,)`` documents of query ``q`` are rows ``offsets[q]:offsets[q+1]``.
        qids: the ids of the queries.
        order: ``(N,)`` the caller's position of each row: ties are broken by it.
        doc_ids: an id for each document, or None.
        query_weights: ``(Q,)`` or None.
        feature_names: a name for each feature, or None.
    """

    features: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    offsets: Tensor = field(repr=False)
    qids: tuple[Hashable, ...] = field(repr=False)
    order: Tensor = field(repr=False)
    doc_ids: tuple[str, ...] | None = field(default=None, repr=False)
    query_weights: Tensor | None = field(default=None, repr=False)
    feature_names: tuple[str, ...] | None = field(default=None, repr=False)

    @classmethod
    def from_arrays(
        cls,
        X: Any,
        y: ArrayLike | Tensor,
        *,
        qid: Sequence[Hashable] | NDArray[Any] | Tensor | None = None,
        group: ArrayLike | Tensor | None = None,
        doc_ids: Sequence[str] | None = None,
        query_weights: ArrayLike | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        missing: str = "error",
        feature_names: Sequence[str] | None = None,
    ) -> Self:
        """Group rows by query.

        Args:
            X: ``(N, D)`` numpy, torch, scipy sparse, or a frame of pandas, polars or pyarrow.
            y: ``(N,)`` labels.
            qid: the query of each row, in any order and of any hashable type.
            group: sizes of consecutive queries instead of ``qid``; the ids become 0, 1, ….
            doc_ids: an id for each row.
            query_weights: one weight per query: in order of first appearance of ``qid``, or of ``group``.
            dtype: of the features.
            missing: what NaN stands for: ``"error"``, ``"zero"``, ``"query-min"`` or ``"query-mean"``.
            feature_names: a name for each column; by default those of a frame whose columns are all named by text.

        Raises:
            DataError: for anything that does not fit together, naming the row where it can.

        >>> data = RankingData.from_arrays([[1.0], [2.0], [3.0]], [1, 0, 0], qid=["b", "a", "b"])
        >>> data.qids, data.offsets.tolist(), data.labels.tolist()
        (('a', 'b'), [0, 1, 3], [0.0, 0.0, 1.0])
        >>> data.in_caller_order(data.features[:, 0]).tolist()
        [1.0, 2.0, 3.0]
        """
        check_choice("missing", missing, POLICIES)
        features, labels = dense_features(X, dtype), float_vector("y", y)
        rows = len(features)
        check_length("y", len(labels), rows)
        names = names_of(X) if feature_names is None else tuple(feature_names)
        if names is not None:
            check_length("feature_names", len(names), features.shape[1], per="feature")
        check_values(features, labels, names, missing=missing != "error")
        codes, qids = query_codes(qid, group, rows)
        if doc_ids is not None:
            check_length("doc_ids", len(doc_ids), rows)
        weights = None if query_weights is None else float_vector("query_weights", query_weights)
        if weights is not None:
            check_length("query_weights", len(weights), len(qids), per="query")
        if missing != "error" and np.isnan(features).any():
            features = features.copy()  # it may be the caller's own
            fill_missing(features, codes, missing)
        return cls.from_codes(features, labels, codes, qids, doc_ids=doc_ids, weights=weights, feature_names=names)

    @classmethod
    def from_codes(
        cls,
        features: NDArray[Any],  # (N, D)
        labels: NDArray[np.float32],  # (N,)
        codes: NDArray[np.int64],  # (N,)
        qids: Sequence[Hashable],
        *,
        doc_ids: Sequence[str] | None = None,
        weights: NDArray[np.float32] | None = None,  # (Q,)
        feature_names: tuple[str, ...] | None = None,
    ) -> Self:
        """Sort rows that were checked already; row ``i`` belongs to the query ``qids[codes[i]]``."""
        order, rank = canonical_order(features, labels, codes, qids, doc_ids)
        sizes = np.bincount(rank[codes], minlength=len(qids))
        by_rank = np.argsort(rank)
        in_place = bool(np.array_equal(order, np.arange(len(order))))
        return cls(
            features=torch.from_numpy(features if in_place else features[order]),
            labels=torch.from_numpy(labels[order]),
            offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)),
            qids=tuple(qids[i] for i in by_rank),
            order=torch.from_numpy(order),
            doc_ids=None if doc_ids is None else tuple(doc_ids[i] for i in order),
            query_weights=None if weights is None else torch.from_numpy(weights[by_rank]),
            feature_names=feature_names,
        )

    @property
    def num_queries(self) -> int:
        """Number of queries, ``Q``."""
        return len(self.offsets) - 1

    @property
    def num_documents(self) -> int:
        """Number of documents, ``N``."""
        return len(self.labels)

    @property
    def num_features(self) -> int:
        """Number of features, ``D``."""
        return self.features.shape[1]

    @property
    def sizes(self) -> Tensor:
        """``(Q,)`` documents per query."""
        return self.offsets.diff()

    @property
    def query_index(self) -> Tensor:
        """``(N,)`` the query each document belongs to, as an index."""
        return segments.segment_ids(self.offsets)

    def __len__(self) -> int:
        return self.num_queries

    def __repr__(self) -> str:
        if not self.num_queries:
            return f"RankingData(0 queries, 0 documents, {self.num_features} features)"
        low, high = float(self.labels.min()), float(self.labels.max())
        sizes = self.sizes
        return (
            f"RankingData({self.num_queries:,} queries, {self.num_documents:,} documents, "
            f"{self.num_features:,} features, labels {low:g}–{high:g}, "
            f"{int(sizes.min())}–{int(sizes.max())} documents per query)"
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields exchanged, e.g. preprocessed features; names are kept while their number fits."""
        names = changes.get("feature_names", self.feature_names)
        if names is not None and len(names) != changes.get("features", self.features).shape[1]:
            changes["feature_names"] = None
        return replace(self, **changes)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move to a device; ``dtype`` is that of the features."""
        weights = self.query_weights
        return self.replace(
            features=self.features.to(device=device, dtype=dtype),
            labels=self.labels.to(device=device),
            offsets=self.offsets.to(device=device),
            order=self.order.to(device=device),
            query_weights=None if weights is None else weights.to(device=device),
        )

    def in_caller_order(
        self,
        values: Tensor,  # (N, ...)
    ) -> Tensor:  # (N, ...)
        """Put one value per document back into the order in which the rows were given."""
        check_length("values", len(values), self.num_documents)
        out = torch.empty_like(values)
        out[self.order.to(values.device)] = values
        return out

    def select(self, queries: Sequence[int] | Tensor) -> Self:
        """The chosen queries (indices, not ids), in the order chosen; the caller's order is kept among their rows."""
        chosen = torch.as_tensor(queries, dtype=torch.long, device=self.offsets.device)
        if chosen.numel() and not bool(((chosen >= 0) & (chosen < self.num_queries)).all()):
            bad = int(chosen[(chosen < 0) | (chosen >= self.num_queries)][0])
            raise DataError(f"`queries` must be indices below {self.num_queries}, got {bad}")
        rows, offsets = segments.gather_segments(self.offsets, chosen)
        order = torch.empty_like(rows)
        order[self.order[rows].argsort(stable=True)] = torch.arange(len(rows), device=rows.device)
        return self.replace(
            features=self.features[rows],
            labels=self.labels[rows],
            offsets=offsets,
            qids=tuple(self.qids[i] for i in chosen.tolist()),
            order=order,
            doc_ids=None if self.doc_ids is None else tuple(self.doc_ids[i] for i in rows.tolist()),
            query_weights=None if self.query_weights is None else self.query_weights[chosen],
        )

    def split(self, fractions: Sequence[float], *, seed: int = 0) -> tuple[Self, ...]:
        """Cut into parts by query, never by row, in the given proportions.

        >>> data = RankingData.from_arrays(torch.rand(10, 2), torch.zeros(10), qid=list(range(10)))
        >>> [len(part) for part in data.split((0.6, 0.2, 0.2), seed=1)]
        [6, 2, 2]
        """
        for fraction in fractions:
            check_positive("fractions", fraction)
        shuffled = torch.randperm(self.num_queries, generator=torch.Generator().manual_seed(seed))
        shares = np.cumsum(fractions) / np.sum(fractions) * self.num_queries
        cuts = [0, *(round(float(share)) for share in shares)]
        return tuple(self.select(shuffled[a:b].sort().values) for a, b in pairwise(cuts))

    def kfold(self, folds: int, *, seed: int = 0) -> Iterator[tuple[Self, Self]]:
        """Pairs of (rest, held-out fold); every query is held out exactly once."""
        if not 2 <= folds <= self.num_queries:
            raise DataError(f"`folds` must lie in [2, number of queries = {self.num_queries}], got {folds}")
        shuffled = torch.randperm(self.num_queries, generator=torch.Generator().manual_seed(seed))
        fold_of = torch.empty_like(shuffled)
        fold_of[shuffled] = torch.arange(self.num_queries) % folds
        for held in range(folds):
            yield (
                self.select((fold_of != held).nonzero()[:, 0]),
                self.select((fold_of == held).nonzero()[:, 0]),
            )

    @classmethod
    def merge(cls, parts: Sequence[RankingData]) -> Self:
        """One data set from several with the same features and no query in common.

        The caller's order becomes that of the parts, one after the other; queries without documents are dropped, and
        weights are kept when every part has them, and so are the names of features.
        """
        if not parts:
            raise DataError("`parts` must hold at least one data set, got none")
        widths = {part.num_features for part in parts}
        if len(widths) > 1:
            raise DataError(f"`parts` must have the same number of features, got {sorted(widths)}")
        names = {part.feature_names for part in parts}
        if len(names - {None}) > 1:
            raise DataError("`parts` must have the same names of features in the same order, got several")
        seen: set[Hashable] = set()
        for part in parts:
            for qid in part.qids:
                if qid in seen:
                    raise DataError(f"`parts` must not share queries, got qid {qid!r} twice")
                seen.add(qid)
        caller = [part.in_caller_order(part.query_index).tolist() for part in parts]
        ids = None
        if all(part.doc_ids is not None for part in parts):
            ids = [part.doc_ids[row] for part in parts for row in part.order.argsort().tolist() if part.doc_ids]
        merged = cls.from_arrays(
            torch.cat([part.in_caller_order(part.features) for part in parts]),
            torch.cat([part.in_caller_order(part.labels) for part in parts]),
            qid=[part.qids[q] for part, index in zip(parts, caller, strict=True) for q in index],
            doc_ids=ids,
            dtype=parts[0].features.dtype,
            feature_names=parts[0].feature_names if len(names) == 1 else None,
        )
        weights = {
            qid: weight
            for part in parts
            if part.query_weights is not None
            for qid, weight in zip(part.qids, part.query_weights.tolist(), strict=True)
        }
        if len(weights) < merged.num_queries:
            return merged
        return merged.replace(query_weights=torch.tensor([weights[qid] for qid in merged.qids]))

    def statistics(self) -> dict[str, Any]:
        """Counts people ask for first: sizes, labels, queries without a relevant document, constant features."""
        values, counts = torch.unique(self.labels, return_counts=True)
        sizes = self.sizes
        some = self.num_documents > 0
        spread = self.features.amax(0) - self.features.amin(0) if some else self.features.new_zeros(self.num_features)
        return {
            "queries": self.num_queries,
            "documents": self.num_documents,
            "features": self.num_features,
            "labels": {float(v): int(c) for v, c in zip(values, counts, strict=True)},
            "documents per query (min, median, max)": (
                (int(sizes.min()), int(sizes.median()), int(sizes.max())) if len(sizes) else (0, 0, 0)
            ),
            "queries without a relevant document": int(
                (segments.segment_max(self.labels, self.offsets, empty=0.0) <= 0).sum()
            ),
            "constant features": int((spread == 0).sum()),
        }
