"""Metrics from labelled rows in closed form, with the habits of scikit-learn and metric-learn: `GMML`, `LocalGMML`.

Similar pairs are two rows of one class, dissimilar pairs two rows of different classes. All pairs count, and none is
looped over; no tensor is (Q, N, D).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.cluster import KMeans
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError, check_finite, check_positive, check_shape, check_whole
from lgmml_torch.functional.distance import local_distances
from lgmml_torch.functional.gmml import gmml
from lgmml_torch.functional.measures import average_precision
from lgmml_torch.functional.score import median_scales

_RHOS = (0.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # what "auto" chooses from
_MOST_JUDGED = 1000  # rows that are held out to choose ρ


class _MetricLearner(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """What both have: checked rows and pairs, and the closed form."""

    def __sklearn_tags__(self) -> Any:
        """Labels are needed."""
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def _labelled(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:  # (N, D), (N,)
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        classes, codes, counts = np.unique(y, return_inverse=True, return_counts=True)
        if len(classes) < 2:
            raise DataError(f"`y` must hold at least two classes, got one class: {classes[0]!r}")
        if counts.max() < 2:
            raise DataError(f"`y` must hold a class of at least two rows, got {len(classes)} classes of one row each")
        return torch.tensor(X), torch.tensor(codes)

    def _rows(self, X: Any) -> Tensor:  # (N, D)
        check_is_fitted(self)
        return torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))

    def _gaps(self, pairs: Any) -> tuple[Tensor, Tensor]:  # (P, D) twice
        """The first of each pair, and the second less the first."""
        check_is_fitted(self)
        both = torch.tensor(np.asarray(pairs, dtype=np.float64))
        check_shape("pairs", both, (None, 2, self.n_features_in_))
        check_finite("pairs", both)
        return both[:, 0], both[:, 1] - both[:, 0]

    def _factor(self, similar: Tensor, dissimilar: Tensor) -> Tensor:  # (..., D, D)
        return gmml(similar, dissimilar, self.t, lam=self.lam, method=self.method).factor


@dataclass(kw_only=True, eq=False, repr=False)
class GMML(_MetricLearner):
    """One Mahalanobis metric from labelled rows, in closed form: M = S⁻¹ ♯ₜ D.

    S is the mean of (x − z)(x − z)ᵀ over all pairs of one class, D over all pairs of different classes. At t = ½ and
    λ = 0 the metric solves M S M = D. The work grows with the number of rows, not of pairs. Features of different
    units want scikit-learn's ``StandardScaler`` first.

    Args:
        t: weight in [0, 1] on the geodesic from S⁻¹ (0) to D (1).
        lam: λ, at least 0, relative to the scale of S and D: a large one gives the Euclidean metric.
        method: ``"cholesky"`` or ``"eigh"``, see `lgmml_torch.functional.spd.geometric_mean`.

    Attributes:
        components_: ``(D, D)``, the linear map C with M = CᵀC.
        n_features_in_: number of features.
        feature_names_in_: their names, when ``X`` was a frame with text as column names.

    >>> X, y = np.array([[0.0, 0.0], [0.0, 4.0], [1.0, 0.0], [1.0, 4.0]]), ["a", "a", "b", "b"]
    >>> M = GMML().fit(X, y).get_mahalanobis_matrix()
    >>> bool(M[0, 0] > M[1, 1])  # classes differ in feature 0, their rows in feature 1
    True
    """

    t: float = 0.5
    lam: float = 0.1
    method: str = "cholesky"

    def fit(self, X: Any, y: Any) -> Self:
        """Take the geometric mean over the pairs of ``X`` (N, D), with classes ``y`` (N,).

        Raises:
            DataError: for labels without similar or without dissimilar pairs.
            LGMMLError: for a parameter outside its range.
            NotSPDError: for rows that are all equal, or for λ=0 and a scatter that is singular beyond repair.
        """
        rows, classes = self._labelled(X, y)
        everything = torch.ones(len(rows), dtype=torch.bool)
        self.components_ = self._factor(*_class_scatter(rows, classes, everything)).mT.contiguous().numpy()
        return self

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def transform(self, X: Any) -> NDArray[np.float64]:  # (N, D)
        """Rows whose Euclidean distances are the learned ones: X Cᵀ."""
        return np.asarray(self._rows(X).numpy() @ self.components_.T)

    def pair_distance(self, pairs: Any) -> NDArray[np.float64]:  # (P,)
        """√((x − z)ᵀM(x − z)) of pairs ``(P, 2, D)``."""
        _, gaps = self._gaps(pairs)
        return np.asarray(np.linalg.norm(gaps.numpy() @ self.components_.T, axis=1))

    def get_mahalanobis_matrix(self) -> NDArray[np.float64]:  # (D, D)
        """M."""
        check_is_fitted(self)
        return np.asarray(self.components_.T @ self.components_)


@dataclass(eq=False, repr=False)
class LocalGMML(_MetricLearner):
    """A metric that depends on where the query lies: M(q) = Σᵣ w_r(q)·M_r, for query by example.

    Each region r has the metric M_r of the pairs whose first row lies in it, and the mean of its rows as anchor. The
    weights are the softmax over r of −(ρ/2)·d_r(q)/median(d_r), with d_r the distance to the anchor under M_r. A query
    that was never seen needs nothing more.

    No linear map has these distances. `transform` gives the distances to the training rows instead, so that in a
    pipeline ``KNeighborsClassifier(metric="precomputed")`` may follow.

    Args:
        n_regions: number of k-means cells; each class is a region when None.
        t: weight in [0, 1] on the geodesic from S⁻¹ (0) to D (1).
        lam: λ, at least 0, relative to the scale of S and D of the region.
        rho: ρ, at least 0: 0 weighs all metrics alike, a large one takes that of the nearest anchor. ``"auto"`` holds
            a fifth of the rows out, ranks the others for each of them, and takes the ρ of the best mean average
            precision from 0, 3, 10, 30, 100, 300 and 1,000; then all rows are fitted.
        method: ``"cholesky"`` or ``"eigh"``, see `lgmml_torch.functional.spd.geometric_mean`.
        random_state: of k-means and of the rows that are held out: a seed, a `numpy.random.RandomState`, or None for a
            different one each time.

    Attributes:
        anchors_: ``(K, D)``.
        components_: ``(K, D, D)``, linear maps C_r with M_r = C_rᵀC_r.
        scales_: ``(K,)``, medians of the training rows' distances to the anchors.
        rho_: ρ as given or chosen.
        rows_: ``(N, D)``, the training rows.

    >>> X, y = np.array([[0.0, 0.0], [0.0, 4.0], [1.0, 0.0], [1.0, 4.0]]), ["a", "a", "b", "b"]
    >>> LocalGMML(rho=1.0).fit(X, y).rank([0.0, 2.0], [[1.0, 2.0], [0.0, 3.0]])  # a step in feature 1 counts less
    array([1, 0])
    """

    n_regions: int | None = None
    _: KW_ONLY
    t: float = 0.5
    lam: float = 0.1
    rho: float | Literal["auto"] = "auto"
    method: str = "cholesky"
    random_state: Any = None

    def fit(self, X: Any, y: Any) -> Self:
        """Fit the metric of each region, and choose ρ when it is ``"auto"``; data and errors as in `GMML.fit`."""
        if self.n_regions is not None:
            check_whole("n_regions", self.n_regions)
        if self.rho != "auto":
            check_positive("rho", self.rho, zero=True)
        rows, classes = self._labelled(X, y)
        random = check_random_state(self.random_state)
        self.rho_ = self._best_rho(rows, classes, random) if self.rho == "auto" else float(self.rho)
        anchors, factors, scales = self._regions(rows, classes, random)
        self.anchors_, self.components_, self.scales_ = anchors.numpy(), factors.mT.contiguous().numpy(), scales.numpy()
        self.rows_ = rows.numpy()
        return self

    def _regions(self, rows: Tensor, classes: Tensor, random: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Anchors (K, D), factors (K, D, D) and scales (K,)."""
        cells = classes
        if self.n_regions is not None:
            most = min(self.n_regions, len(np.unique(rows.numpy(), axis=0)))
            cells = torch.tensor(KMeans(most, n_init=4, random_state=random).fit_predict(rows.numpy()))
        masks = [cells == cell for cell in torch.unique(cells)]
        scatters = [_class_scatter(rows, classes, mask) for mask in masks]
        factors = self._factor(*map(torch.stack, zip(*scatters, strict=True)))
        anchors = torch.stack([rows[mask].mean(0) for mask in masks])
        return anchors, factors, median_scales(local_distances(rows, anchors, factors))

    def _best_rho(self, rows: Tensor, classes: Tensor, random: Any) -> float:
        order = torch.tensor(random.permutation(len(rows)))
        count = min(max(len(rows) // 5, 1), _MOST_JUDGED)
        queries, rest = order[:count], order[count:]
        relevant = classes[queries, None] == classes[rest]
        if not bool(relevant.any()) or bool(relevant.all()):
            raise LGMMLError(f"`rho` must be a number for so few rows: {len(rows)} leave nothing to choose it by")
        anchors, factors, scales = self._regions(rows[rest], classes[rest], random)
        dists = local_distances(rows[queries], anchors, factors)
        offsets = torch.arange(len(queries) + 1) * len(rest)
        values = []
        for rho in _RHOS:
            squares = location_distances(rows[queries], rows[rest], factors, location_weights(dists, scales, rho))
            values.append(float(average_precision(-squares.flatten(), relevant.flatten().long(), offsets)))
        return _RHOS[int(np.argmax(values))]

    @property
    def _n_features_out(self) -> int:
        return len(self.rows_)

    def _located(self, queries: Tensor) -> tuple[Tensor, Tensor]:  # (K, D, D), (Q, K)
        """Factors of the metrics, and their weights at each query."""
        factors = torch.tensor(self.components_).mT
        dists = local_distances(queries, torch.tensor(self.anchors_), factors)
        return factors, location_weights(dists, torch.tensor(self.scales_), self.rho_)

    def transform(self, X: Any) -> NDArray[np.float64]:  # (Q, N)
        """Distances of each row q to all training rows x, √((q − x)ᵀM(q)(q − x))."""
        queries = self._rows(X)
        return np.asarray(location_distances(queries, torch.tensor(self.rows_), *self._located(queries)).sqrt())

    def pair_distance(self, pairs: Any) -> NDArray[np.float64]:  # (P,)
        """√((q − x)ᵀM(q)(q − x)) of pairs ``(P, 2, D)``, q the first of each: the order within a pair matters."""
        queries, gaps = self._gaps(pairs)
        factors, weights = self._located(queries)
        squares = local_distances(gaps, torch.zeros_like(factors[:, 0]), factors).square()
        return np.asarray((weights * squares).sum(1).sqrt())

    def get_mahalanobis_matrix(self, X: Any) -> NDArray[np.float64]:  # (Q, D, D)
        """M(q) at each row."""
        factors, weights = self._located(self._rows(X))
        return np.asarray(torch.einsum("qk,kde->qde", weights, factors @ factors.mT))

    def rank(self, query: Any, documents: Any) -> NDArray[np.int64]:  # (N,) or (Q, N)
        """Row numbers of the documents, nearest to the query first; equal documents keep their order.

        Args:
            query: ``(D,)``, or ``(Q, D)`` for a row of the result each.
            documents: ``(N, D)``, training rows or new ones.
        """
        single = np.ndim(query) == 1
        if single:
            query = np.reshape(query, (1, -1))
        queries = self._rows(query)
        # A product rounds by the place of a row, so equal rows go into it once.
        distinct, place = torch.unique(self._rows(documents), dim=0, return_inverse=True)
        squares = location_distances(queries, distinct, *self._located(queries))[:, place]
        order = np.asarray(squares.argsort(dim=1, stable=True))
        return order[0] if single else order


def _class_scatter(
    X: Tensor,  # (N, D)
    classes: Tensor,  # (N,) codes from 0
    first: Tensor,  # (N,) bool
) -> tuple[Tensor, Tensor]:  # (D, D) twice
    """Mean of (x − z)(x − z)ᵀ over pairs of one class and over pairs of two, x among ``first``, z any other row.

    About the mean of a class the mixed terms of its pairs vanish: Σ (x − z)(x − z)ᵀ = n·Σ xxᵀ + m·Σ zzᵀ, with n rows z
    and m rows x. The same holds for all rows about their mean, and what is not similar is dissimilar.
    """
    X = X - X[0]  # features that are constant become zeros, not rounding
    counts = torch.bincount(classes).to(X.dtype)
    inside = torch.bincount(classes[first], minlength=len(counts)).to(X.dtype)
    means = X.new_zeros(len(counts), X.shape[1]).index_add_(0, classes, X) / counts.clamp_min(1)[:, None]
    within, about = X - means[classes], X - X.mean(0)
    sizes, chosen = counts[classes], first.to(X.dtype)
    similar = within.mT @ (within * (sizes * chosen + inside[classes])[:, None])
    every = about.mT @ (about * (len(X) * chosen + chosen.sum())[:, None])
    num_similar, num_every = chosen @ (sizes - 1), chosen.sum() * (len(X) - 1)
    return similar / num_similar.clamp_min(1), (every - similar) / (num_every - num_similar).clamp_min(1)


def location_weights(
    dists: Tensor,  # (Q, K) distances of the queries to the anchors (roots)
    scales: Tensor,  # (K,) medians of the training distances
    rho: float,
) -> Tensor:  # (Q, K)
    """w_r(q) = softmax over r of −(ρ/2)·d_r(q)/median(d_r).

    ρ=0 weighs all metrics alike; ρ→∞ leaves the one whose anchor is nearest. Normalised in the exponent, so it does
    not underflow far from all anchors.

    >>> location_weights(torch.tensor([[1e4, 1e4 + 2.0]]), torch.ones(2), rho=1.0)
    tensor([[0.7311, 0.2689]])
    """
    check_positive("rho", rho, zero=True)
    return torch.softmax(-(rho / 2) * (dists / scales), dim=1)


def location_distances(
    queries: Tensor,  # (Q, D)
    database: Tensor,  # (N, D)
    factors: Tensor,  # (K, D, R), M_r = F_r F_rᵀ
    weights: Tensor,  # (Q, K)
) -> Tensor:  # (Q, N) squared
    """(q−x)ᵀM(q)(q−x) with M(q) = Σᵣ w_r(q)·M_r.

    Two ways, and the one of fewer operations is taken. Many queries never form M(q): xᵀM_r x is a table (N, K), M(q)q a
    vector per query, and what is left are two products of cost Q·N·(K+D). Few queries with many metrics form each M(q),
    which does not cancel near the query.

    >>> F = torch.stack([torch.eye(2), 2 * torch.eye(2)])
    >>> location_distances(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), F, torch.tensor([[0.5, 0.5]]))
    tensor([[62.5000]])
    """
    check_shape("weights", weights, (len(queries), len(factors)))
    (Q, D), N, K = queries.shape, len(database), len(factors)
    centre = database.mean(0) if N else 0.0
    a, b = queries - centre, database - centre
    if Q * (K + N) * D * D < (Q + N) * K * D * D + Q * N * (K + D):
        metrics, out = factors @ factors.mT, b.new_empty((Q, N))
        for i in range(Q):
            gaps = a[i] - b
            out[i] = (gaps @ torch.einsum("k,kde->de", weights[i], metrics) * gaps).sum(1)
        return out
    table, squares, vectors = b.new_empty((K, N)), a.new_zeros(Q), torch.zeros_like(a)
    for r in range(K):
        fa = a @ factors[r]
        table[r] = (b @ factors[r]).square().sum(1)
        squares += weights[:, r] * fa.square().sum(1)
        vectors.addmm_(weights[:, r, None] * fa, factors[r].mT)
    return torch.addmm(squares[:, None] + weights @ table, vectors, b.mT, alpha=-2).clamp_min_(0)
