"""Query by example: the query is a vector in document space, and documents are ranked by distance to it.

All functions work on whole blocks of queries and never hold a (Q, N, D) tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lgmml_torch.checks import (
    DataError,
    LGMMLError,
    NumericsWarning,
    check_finite,
    check_offsets,
    check_positive,
    check_shape,
)
from lgmml_torch.functional.gmml import pair_scatter
from lgmml_torch.segments import gather_segments, offsets_from_sizes, segment_ids


@dataclass(frozen=True, eq=False)
class ExampleSet:
    """Queries and a database in one space, with the database rows relevant to each query (ragged).

    Relevance is whatever the rows say: it need be neither symmetric nor transitive. A query that is itself a row of
    the database names it in ``own_rows``; that row is then left out of the query's ranking.

    >>> data = ExampleSet.from_labels(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1]))
    >>> data.relevant, data.offsets, data.usable
    (tensor([1, 0]), tensor([0, 1, 2, 2]), tensor([ True,  True, False]))
    """

    database: Tensor  # (N, D)
    queries: Tensor  # (Q, D)
    relevant: Tensor  # (M,) rows of the database
    offsets: Tensor  # (Q+1,)
    own_rows: Tensor | None = None  # (Q,) row of the database, -1 for none

    def __post_init__(self) -> None:
        check_shape("database", self.database, (None, None))
        check_shape("queries", self.queries, (None, self.database.shape[1]))
        check_shape("relevant", self.relevant, (None,))
        check_offsets(self.offsets, len(self.relevant))
        check_shape("offsets", self.offsets, (len(self.queries) + 1,))
        check_finite("database", self.database)
        check_finite("queries", self.queries)
        self._check_rows("relevant", self.relevant, lowest=0)
        pairs = segment_ids(self.offsets) * len(self.database) + self.relevant
        if bool((pairs.sort().values.diff() == 0).any()):
            raise DataError("`relevant` must not name a row twice for one query")
        if self.own_rows is not None:
            check_shape("own_rows", self.own_rows, (len(self.queries),))
            self._check_rows("own_rows", self.own_rows, lowest=-1)
            if bool((self.own_rows[segment_ids(self.offsets)] == self.relevant).any()):
                raise DataError("`relevant` must not name the query's own row, which is left out of its ranking")

    def _check_rows(self, name: str, rows: Tensor, *, lowest: int) -> None:
        bad = (rows < lowest) | (rows >= len(self.database))
        if bool(bad.any()):
            raise DataError(
                f"`{name}` must hold rows of the database, {lowest} to {len(self.database) - 1}, "
                f"got {int(rows[bad][0])}"
            )

    @classmethod
    def from_labels(
        cls,
        database: Tensor,  # (N, D)
        labels: Tensor,  # (N,)
        queries: Tensor | None = None,  # (Q, D)
        query_labels: Tensor | None = None,  # (Q,)
    ) -> ExampleSet:
        """Relevant means: of the query's class. Without ``queries`` every row of the database is one."""
        check_shape("labels", labels, (len(database),))
        own = torch.arange(len(database), device=database.device) if queries is None else None
        if queries is None:
            queries, query_labels = database, labels
        if query_labels is None:
            raise LGMMLError("`query_labels` must be given along with `queries`")
        check_shape("query_labels", query_labels, (len(queries),))
        same = query_labels[:, None] == labels
        if own is not None:
            same.fill_diagonal_(False)
        return cls(database, queries, same.nonzero()[:, 1], offsets_from_sizes(same.sum(1)), own)

    @property
    def num_queries(self) -> int:
        """Q."""
        return len(self.queries)

    @property
    def usable(self) -> Tensor:  # (Q,) bool
        """Whether a query has both a relevant and another document, without which no order is wrong."""
        others = len(self.database) - self.offsets.diff()
        if self.own_rows is not None:
            others = others - (self.own_rows >= 0).long()
        return (self.offsets.diff() > 0) & (others > 0)

    def select(
        self,
        chosen: Tensor,  # (C,) indices or (Q,) bool
    ) -> ExampleSet:
        """The same database with some of the queries."""
        index = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen
        rows, offsets = gather_segments(self.offsets, index)
        own = None if self.own_rows is None else self.own_rows[index]
        return ExampleSet(self.database, self.queries[index], self.relevant[rows], offsets, own)

    def to(self, dtype: torch.dtype) -> ExampleSet:
        """The same set with vectors of another precision."""
        return replace(self, database=self.database.to(dtype), queries=self.queries.to(dtype))

    def masks(self, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:  # (q, N), (q, N) bool
        """Relevant and other documents of the queries ``start:stop``; the query's own row is in neither."""
        stop = self.num_queries if stop is None else min(stop, self.num_queries)
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        relevant = self.database.new_zeros((stop - start, len(self.database)), dtype=torch.bool)
        relevant[segment_ids(self.offsets[start : stop + 1] - first), self.relevant[first:last]] = True
        others = ~relevant
        if self.own_rows is not None:
            own = self.own_rows[start:stop]
            others[(own >= 0).nonzero()[:, 0], own[own >= 0]] = False
        return relevant, others


def example_metrics(
    distances: Tensor,  # (Q, N)
    relevant: Tensor,  # (Q, N) bool
    others: Tensor,  # (Q, N) bool
) -> dict[str, Tensor]:  # (Q,) each
    """Average precision and area under the curve of ranking each row by rising distance.

    AP = mean over relevant documents of (relevant ranked at or above it)/(its rank); equal distances keep the order
    of the rows. AUC = share of (relevant, other) pairs in the right order, ties one half. Documents in neither mask
    are not ranked. A query without a relevant or without another document is skipped: NaN in both.

    >>> example_metrics(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[True, False, True]]),
    ...                 torch.tensor([[False, True, False]]))
    {'map': tensor([0.8333]), 'auc': tensor([0.5000])}
    """
    check_finite("distances", distances)
    n_pos, n_neg = relevant.sum(1), others.sum(1)
    ordered, order = distances.masked_fill(~(relevant | others), torch.inf).sort(dim=1, stable=True)
    hits, misses = relevant.gather(1, order), others.gather(1, order)
    ranks = torch.arange(1, distances.shape[1] + 1, device=distances.device)
    precision = hits.cumsum(1) / ranks.to(distances.dtype)
    average = (precision * hits).sum(1) / n_pos
    # Half the sum of others strictly before, and before or level with, each relevant document; padding counts none.
    place = hits.sort(dim=1, descending=True, stable=True).indices[:, : int(n_pos.max()) if len(n_pos) else 0]
    level = ordered.gather(1, place).masked_fill(~hits.gather(1, place), -torch.inf)
    before = torch.nn.functional.pad(misses.cumsum(1), (1, 0))
    strictly, until = (torch.searchsorted(ordered, level, right=right) for right in (False, True))
    discordant = (before.gather(1, strictly) + before.gather(1, until)).sum(1).to(distances.dtype) / 2
    auc = 1 - discordant / (n_pos * n_neg)
    skipped = (n_pos == 0) | (n_neg == 0)
    return {"map": average.masked_fill(skipped, torch.nan), "auc": auc.masked_fill(skipped, torch.nan)}


def evaluate_examples(
    distances: Callable[[Tensor, Tensor], Tensor],
    examples: ExampleSet,
    *,
    max_elements: int = 1 << 23,
) -> dict[str, Tensor]:  # (Q,) each
    """:func:`example_metrics` of all queries, in blocks of about ``max_elements`` distances.

    Args:
        distances: maps (queries (q, D), database (N, D)) to distances (q, N).
        examples: what to rank and what is relevant.
        max_elements: bound on q·N of one block.
    """
    check_positive("max_elements", max_elements)
    block = max(1, max_elements // max(1, len(examples.database)))
    parts = [
        example_metrics(
            distances(examples.queries[start : start + block], examples.database),
            *examples.masks(start, start + block),
        )
        for start in range(0, max(1, examples.num_queries), block)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def squared_distances(
    queries: Tensor,  # (Q, D)
    database: Tensor,  # (N, D)
    factor: Tensor | None = None,  # (D, R), M = F Fᵀ
) -> Tensor:  # (Q, N)
    """(q−x)ᵀM(q−x) = ‖Fᵀ(q−x)‖²; Euclidean without a factor.

    >>> squared_distances(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), torch.diag(torch.tensor([2.0, 1.0])))
    tensor([[52.]])
    """
    centre = database.mean(0) if len(database) else 0.0  # differences do not change, cancellation does
    a, b = queries - centre, database - centre
    if factor is not None:
        a, b = a @ factor, b @ factor
    squares = a.square().sum(1)[:, None] + b.square().sum(1)
    return torch.addmm(squares, a, b.mT, alpha=-2).clamp_min_(0)


def weighted_scatter(
    queries: Tensor,  # (Q, D)
    database: Tensor,  # (N, D)
    coefficients: Tensor,  # (Q, N)
) -> Tensor:  # (D, D)
    """Σ over q, i of c_qi·(x_q−x_i)(x_q−x_i)ᵀ, without a loop over pairs: O(Q·N·D + N·D²).

    >>> weighted_scatter(torch.zeros(1, 1), torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 0.5]]))
    tensor([[3.]])
    """
    centre = database.mean(0) if len(database) else 0.0
    a, b = queries - centre, database - centre
    left, right = (a.mT * coefficients.sum(1)) @ a, (b.mT * coefficients.sum(0)) @ b
    return pair_scatter(left, right, a.mT @ (coefficients @ b))


def exponential_weights(
    dists: Tensor,  # (Q, K) distances of the queries to the anchors (roots)
    scales: Tensor,  # (K,) medians of the training distances
    rho: float,
) -> Tensor:  # (Q, K)
    """w_r(q) = exp(−(ρ/2)·d_r(q)/median(d_r)), Eq. smooth_weight_function.

    A factor for each query is all that sets them apart from `lgmml_torch.metric_learning.location_weights`, and it
    changes no ranking, until the weights underflow: that is warned of.

    >>> exponential_weights(torch.tensor([[0.0, 2.0]]), torch.ones(2), rho=1.0)
    tensor([[1.0000, 0.3679]])
    """
    exponents = -(rho / 2) * (dists / scales)
    weights = exponents.exp()
    # Below the smallest normal number digits go missing, soon all of them.
    lost = weights.amax(1) < torch.finfo(weights.dtype).tiny
    if bool(lost.any()):
        warnings.warn(
            f"the weights of {int(lost.sum())} of {len(lost)} queries underflow (largest exponent down to "
            f"{float(exponents.amax(1).min()):.4g} in {weights.dtype}): their order is arbitrary; use softmax weights "
            "or a smaller rho",
            NumericsWarning,
            stacklevel=2,
        )
    return weights
