"""`RankingData`: documents of many queries as flat tensors, in one canonical order.

Queries are ordered by id, documents within a query by label and then by their features, so that the same data
gives the same tensors in whatever order its rows arrive. `RankingData.order` remembers the caller's order: scores
go back in it, and equal scores are ranked by it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lgmml_torch import categories as vocabularies
from lgmml_torch import inputs, segments
from lgmml_torch.categories import Asked, Categories
from lgmml_torch.checks import DataError, check_choice, check_positive
from lgmml_torch.distributed import AllLists, SharedLists

_Value = TypeVar("_Value")
_ROWS_AT_ONCE = 4096  # of features that may be more than memory holds
_PER_DOCUMENT = ("features", "labels", "document_weights", "positions")  # tensors with a row for each document


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
        shared_lists: which of the set's lists these are, where processes share it; None: all. See `all_lists`.
        categories: for each feature the words its codes stand for, None for numbers; None where all are numbers.
        document_weights: ``(N,)`` how often the relevance of each document counts, or None.
        positions: ``(N,)`` where each document was shown when its clicks were logged, or None.
        table: how the rows were read, for the model: the rule for missing values, the names of other columns.
    """

    features: Tensor
    labels: Tensor
    offsets: Tensor
    qids: tuple[Hashable, ...]
    order: Tensor
    doc_ids: tuple[str, ...] | None = None
    query_weights: Tensor | None = None
    feature_names: tuple[str, ...] | None = None
    shared_lists: SharedLists | None = None
    categories: Categories | None = None
    document_weights: Tensor | None = None
    positions: Tensor | None = None
    table: Mapping[str, Any] | None = None

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
        categories: Asked = None,
        document_weights: ArrayLike | Tensor | None = None,
        positions: ArrayLike | Tensor | None = None,
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
            categories: columns of a frame that hold words, besides those whose type says so; or, as of a model, the
                words of each of them. Words that are not known become `lgmml_torch.categories.OTHER`.
            document_weights: one weight per row, at least 0: what the relevance of the document counts.
            positions: where each row was shown, whole numbers from 0 to 65,535.

        Raises:
            DataError: for anything that does not fit together, naming the row where it can.

        >>> data = RankingData.from_arrays([[1.0], [2.0], [3.0]], [1, 0, 0], qid=["b", "a", "b"])
        >>> data.qids, data.offsets.tolist(), data.labels.tolist()
        (('a', 'b'), [0, 1, 3], [0.0, 0.0, 1.0])
        >>> data.in_caller_order(data.features[:, 0]).tolist()
        [1.0, 2.0, 3.0]
        """
        check_choice("missing", missing, inputs.MISSING_POLICIES)
        asked = vocabularies.WordColumns.of(categories)
        features, words = vocabularies.coded_features(X, dtype, asked)
        labels = inputs.float_vector("y", y)
        rows = len(features)
        inputs.check_length("y", len(labels), rows)
        names = inputs.feature_names(X) if feature_names is None else tuple(feature_names)
        inputs.check_distinct(names)
        if names is not None:
            inputs.check_length("feature_names", len(names), features.shape[1], per="feature")
        inputs.check_values(features, labels, names, missing=missing != "error")
        inputs.warn_if_flattened(inputs.flattened(features, lambda column: inputs.original_column(X, column)), names)
        codes, qids = inputs.query_codes(qid, group, rows)
        if doc_ids is not None:
            inputs.check_length("doc_ids", len(doc_ids), rows)
        weights = row_weights = places = None
        if query_weights is not None:
            weights = inputs.check_weights("query_weights", query_weights, len(qids), per="query")
        if document_weights is not None:
            row_weights = inputs.check_weights("document_weights", document_weights, rows)
        if positions is not None:
            places = inputs.place_vector("positions", positions, rows)
        if missing != "error" and np.isnan(features).any():
            features = features.copy()  # it may be the caller's own
            vocabularies.fill_words(features, words)
            inputs.fill_missing(features, codes, missing)
        if asked.closed:
            vocabularies.check_words(vocabularies.unknown_words(features, words, names), rows)
        return cls.from_codes(
            features, labels, codes, qids, doc_ids=doc_ids, weights=weights, feature_names=names, categories=words,
            document_weights=row_weights, positions=places, table={"missing": missing},
        )  # fmt: skip

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
        categories: Categories | None = None,
        document_weights: NDArray[np.float32] | None = None,  # (N,)
        positions: NDArray[np.int64] | None = None,  # (N,)
        table: Mapping[str, Any] | None = None,
    ) -> Self:
        """Sort rows that were checked already; row ``i`` belongs to the query ``qids[codes[i]]``."""
        extras = (positions, document_weights)
        order, rank = inputs.canonical_order(features, labels, codes, qids, doc_ids, extras)
        sizes = np.bincount(rank[codes], minlength=len(qids))
        by_rank = np.argsort(rank)
        if not np.array_equal(order, np.arange(len(order))):
            features = features[order]
        return cls(
            features=torch.from_numpy(features),
            labels=torch.from_numpy(labels[order]),
            offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)),
            qids=_picked(qids, by_rank),
            order=torch.from_numpy(order),
            doc_ids=None if doc_ids is None else _picked(doc_ids, order),
            query_weights=_as_tensor(weights, by_rank),
            feature_names=feature_names,
            categories=categories,
            document_weights=_as_tensor(document_weights, order),
            positions=_as_tensor(positions, order),
            table=table,
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

    @cached_property
    def all_lists(self) -> AllLists:
        """All lists of the set; these, unless several processes share it."""
        return AllLists(self.sizes) if self.shared_lists is None else self.shared_lists

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
        for name in ("feature_names", "categories"):
            values = changes.get(name, getattr(self, name))
            if values is not None and len(values) != changes.get("features", self.features).shape[1]:
                changes[name] = None
        return replace(self, **changes)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move to a device; ``dtype`` is that of the features."""
        moved = self.of_documents(lambda values: values.to(device=device))
        moved["features"] = self.features.to(device=device, dtype=dtype)
        if self.query_weights is not None:
            moved["query_weights"] = self.query_weights.to(device=device)
        return self.replace(**moved, offsets=self.offsets.to(device=device), order=self.order.to(device=device))

    def of_documents(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """What there is of every document (features, labels, weights, positions), each changed in the same way."""
        changed = {}
        for name in _PER_DOCUMENT:
            values = getattr(self, name)
            if values is not None:
                changed[name] = change(values)
        return changed

    def weighed(self, weights: Any, *, name: str = "weights") -> Self:
        """With one weight for each row, in the caller's order.

        Where all rows of each query have the same one, these are weights of queries, otherwise of documents: what a
        query's weight multiplies is what the weights of all its documents multiply.

        Raises:
            DataError: for weights that are negative, not finite or all zero.

        >>> data = RankingData.from_arrays([[1.0], [2.0], [3.0]], [0, 1, 0], qid=["b", "b", "a"])
        >>> data.weighed([2.0, 2.0, 0.5]).query_weights, data.weighed([2.0, 1.0, 0.5]).document_weights
        (tensor([0.5000, 2.0000]), tensor([0.5000, 2.0000, 1.0000]))
        """
        rows = torch.from_numpy(inputs.check_weights(name, weights, self.num_documents))[self.order]
        low, high = segments.segment_min(rows, self.offsets), segments.segment_max(rows, self.offsets)
        if not bool((high > 0).any()):
            raise DataError(f"`{name}` must be above 0 for some query, got 0 for all")
        if bool((low == high).all()):
            return self.replace(query_weights=high)
        return self.replace(document_weights=rows)

    def in_caller_order(self, values: Tensor) -> Tensor:  # (N, ...) -> (N, ...)
        """Put one value per document back into the order in which the rows were given."""
        inputs.check_length("values", len(values), self.num_documents)
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
        parts: dict[str, Any] = self.of_documents(lambda values: values[rows])
        if self.doc_ids is not None:
            parts["doc_ids"] = _picked(self.doc_ids, rows)
        if self.query_weights is not None:
            parts["query_weights"] = self.query_weights[chosen]
        return self.replace(**parts, offsets=offsets, qids=_picked(self.qids, chosen), order=order, shared_lists=None)

    def split(self, fractions: Sequence[float], *, seed: int = 0) -> tuple[Self, ...]:
        """Cut into parts by query, never by row, in the given proportions; a share of 0 gives an empty part.

        >>> data = RankingData.from_arrays(torch.rand(10, 2), torch.zeros(10), qid=list(range(10)))
        >>> [len(part) for part in data.split((0.6, 0.2, 0.2), seed=1)]
        [6, 2, 2]
        """
        for fraction in fractions:
            check_positive("fractions", fraction, zero=True)
        if not sum(fractions):
            raise DataError(f"`fractions` must be above 0 for some part, got {list(fractions)}")
        shuffled = torch.randperm(self.num_queries, generator=torch.Generator().manual_seed(seed))
        shares = np.cumsum(fractions) / np.sum(fractions) * self.num_queries
        cuts = [0, *map(round, shares.tolist())]
        return tuple([self.select(shuffled[a:b].sort().values) for a, b in pairwise(cuts)])

    def kfold(self, folds: int, *, seed: int = 0) -> Iterator[tuple[Self, Self]]:
        """Pairs of (rest, held-out fold); every query is held out exactly once."""
        if not 2 <= folds <= self.num_queries:
            raise DataError(f"`folds` must lie in [2, number of queries = {self.num_queries}], got {folds}")
        shuffled = torch.randperm(self.num_queries, generator=torch.Generator().manual_seed(seed))
        fold_of = torch.empty_like(shuffled)
        fold_of[shuffled] = torch.arange(self.num_queries) % folds
        for held in range(folds):
            yield self.select((fold_of != held).nonzero()[:, 0]), self.select((fold_of == held).nonzero()[:, 0])

    @classmethod
    def merge(cls, parts: Sequence[RankingData]) -> Self:
        """One data set from several with the same features and no query in common.

        The caller's order becomes that of the parts, one after the other; queries without documents are dropped, and
        positions and names of features are kept when every part has them. Where one part has weights, those of a part
        without are 1. Vocabularies are united.
        """
        if not parts:
            raise DataError("`parts` must hold at least one data set, got none")
        names = _check_alike(parts)
        words = vocabularies.united([part.categories for part in parts])
        table = parts[0].table
        features, qids = [], list[Hashable]()
        weights: dict[Hashable, float] = {}
        for part in parts:
            if part.table != table:  # read in different ways
                table = None
            features.append(vocabularies.recoded(part.in_caller_order(part.features), part.categories, words))
            qids.extend(_picked(part.qids, part.in_caller_order(part.query_index)))
            weights.update(zip(part.qids, _or_ones(part.query_weights, part.num_queries).tolist(), strict=True))
        merged = cls.from_arrays(
            torch.cat(features),
            torch.cat([part.in_caller_order(part.labels) for part in parts]),
            qid=qids,
            dtype=parts[0].features.dtype,
            feature_names=names,
            **_joined_extras(parts),
        ).replace(categories=words, table=table)
        if not _count(parts, "query_weights"):
            return merged
        return merged.replace(query_weights=torch.tensor([weights[qid] for qid in merged.qids]))

    def statistics(self) -> dict[str, Any]:
        """Counts people ask for first: sizes, labels, queries without a relevant document, constant features.

        Of lists that processes share, only those that each of them knows.
        """
        sizes = self.all_lists.sizes
        extent = (int(sizes.min()), int(sizes.median()), int(sizes.max())) if len(sizes) else (0, 0, 0)
        found: dict[str, Any] = {"queries": len(sizes), "documents": int(sizes.sum()), "features": self.num_features}
        found |= {"labels": {}, "documents per query (min, median, max)": extent}
        if self.all_lists.shared:
            return found
        values, counts = torch.unique(self.labels, return_counts=True)
        found["labels"] = dict(zip(values.tolist(), counts.tolist(), strict=True))
        constant = torch.ones(self.num_features, dtype=torch.bool, device=self.features.device)
        for start in range(0, self.num_documents, _ROWS_AT_ONCE):  # whole columns of a mapped file would be read often
            constant &= (self.features[start : start + _ROWS_AT_ONCE] == self.features[0]).all(0)
        irrelevant = segments.segment_max(self.labels, self.offsets, empty=0.0) <= 0
        found["queries without a relevant document"] = int(irrelevant.sum())
        return {**found, "constant features": int(constant.sum())}


def _or_ones(weights: Tensor | None, count: int) -> Tensor:
    return torch.ones(count) if weights is None else weights


def _joined_extras(parts: Sequence[RankingData]) -> dict[str, Any]:
    """Document weights, positions and ids of several sets, in the caller's order; those that there are."""
    weights, places = [], []
    ids: list[str] = []
    for part in parts:
        weights.append(part.in_caller_order(_or_ones(part.document_weights, part.num_documents)))
        if part.positions is not None:
            places.append(part.in_caller_order(part.positions))
        if part.doc_ids is not None:
            ids.extend(_picked(part.doc_ids, part.order.argsort()))
    found: dict[str, Any] = {}
    if _count(parts, "document_weights"):
        found["document_weights"] = torch.cat(weights)
    if _count(parts, "positions") == len(parts):
        found["positions"] = torch.cat(places)
    if _count(parts, "doc_ids") == len(parts):
        found["doc_ids"] = ids
    return found


def _count(parts: Sequence[RankingData], name: str) -> int:
    """The number of sets that have an optional attribute."""
    return sum(getattr(part, name) is not None for part in parts)


def _check_alike(parts: Sequence[RankingData]) -> tuple[str, ...] | None:
    """Require the same features and no query in common; returns the names of the features that all have."""
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
    return names.pop() if len(names) == 1 else None


def _picked(values: Sequence[_Value], places: Tensor | NDArray[np.int64]) -> tuple[_Value, ...]:
    return tuple([values[place] for place in places.tolist()])


def _as_tensor(values: NDArray[Any] | None, rows: NDArray[np.int64]) -> Tensor | None:
    return None if values is None else torch.from_numpy(values[rows])
