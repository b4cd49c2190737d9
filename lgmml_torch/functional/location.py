"""Metrics that depend on where the query lies: M(q) = Σᵣ w_r(q)·M_r, one M_r per anchor."""

from __future__ import annotations

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_choice, check_positive, check_shape


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
    if not bool((scales > 0).all()):
        raise LGMMLError(f"`scales` must be positive, got {float(scales.min())}")
    return torch.softmax(-(rho / 2) * (dists / scales), dim=1)


def location_distances(
    queries: Tensor,  # (Q, D)
    database: Tensor,  # (N, D)
    factors: Tensor,  # (K, D, R), M_r = F_r F_rᵀ
    weights: Tensor,  # (Q, K)
    *,
    method: str = "auto",
) -> Tensor:  # (Q, N) squared
    """(q−x)ᵀM(q)(q−x) with M(q) = Σᵣ w_r(q)·M_r.

    ``"expand"`` never forms M(q): xᵀM_r x is a table (N, K), M(q)q a vector per query, and what is left are two
    products of cost Q·N·(K+D). ``"form"`` builds each M(q), which is less work for few queries and many metrics, and
    does not cancel near the query. ``"auto"`` counts the operations.

    >>> F = torch.stack([torch.eye(2), 2 * torch.eye(2)])
    >>> location_distances(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), F, torch.tensor([[0.5, 0.5]]))
    tensor([[62.5000]])
    """
    check_choice("method", method, ("auto", "expand", "form"))
    check_shape("weights", weights, (len(queries), len(factors)))
    (Q, D), N, K = queries.shape, len(database), len(factors)
    if method == "auto":
        form = Q * (K + N) * D * D
        method = "form" if form < (Q + N) * K * D * D + Q * N * (K + D) else "expand"
    centre = database.mean(0) if N else 0.0
    a, b = queries - centre, database - centre
    if method == "form":
        metrics = factors @ factors.mT
        rows = [((a[i] - b) @ torch.einsum("k,kde->de", weights[i], metrics) * (a[i] - b)).sum(1) for i in range(Q)]
        return torch.stack(rows) if rows else b.new_zeros((0, N))
    table, squares, vectors = b.new_empty((K, N)), a.new_zeros(Q), torch.zeros_like(a)
    for r in range(K):
        fa = a @ factors[r]
        table[r] = (b @ factors[r]).square().sum(1)
        squares += weights[:, r] * fa.square().sum(1)
        vectors.addmm_(weights[:, r, None] * fa, factors[r].mT)
    return torch.addmm(squares[:, None] + weights @ table, vectors, b.mT, alpha=-2).clamp_min_(0)
