"""Labelled rows and query by example: scatter of the pairs of classes, and metrics that depend on where a query lies.

M(q) = Σᵣ w_r(q)·M_r, one M_r per anchor. No function loops over pairs or holds a (Q, N, D) tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lgmml_torch.checks import check_positive, check_shape


def class_scatter(
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
