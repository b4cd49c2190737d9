"""The pieces of one boosting round: pair scatter, Newton gains, nonnegative weights, learners.

Rows are documents of a few lists, grouped by list: ``offsets`` marks the lists. ``gradients`` and ``hessians`` come
from `lgmml_torch.functional.losses`; a document with a positive gradient should rise. A candidate is one subspace
of ``s`` features; C candidates of one size are worked on together as ``values (M, C, s)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from scipy.optimize import nnls
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_positive, check_shape
from lgmml_torch.functional.distance import local_distances
from lgmml_torch.functional.gmml import pair_scatter
from lgmml_torch.functional.score import kernel as kappa_of
from lgmml_torch.segments import segment_ids, segment_sum

_TINY = 1e-12


def list_scatter(
    values: Tensor,  # (M, C, s)
    positive: Tensor,  # (M,)
    negative: Tensor,  # (M,)
    offsets: Tensor,  # (Q+1,)
) -> tuple[Tensor, Tensor]:  # (C, s, s), (C, s, s)
    r"""Similar and dissimilar scatter over pairs within lists, documents weighted by ``positive`` and ``negative``.

    With both weights scaled, list by list, to the smaller of their totals :math:`W_q`, so that a list counts for what
    it has of both,

    .. math:: S \propto \sum_q \frac{1}{W_q} \sum_{i \neq j \in q} p_i p_j (x_i - x_j)(x_i - x_j)^\top, \qquad
              D \propto \sum_q \frac{1}{W_q} \sum_{i, j \in q} p_i n_j (x_i - x_j)(x_i - x_j)^\top

    each divided by the total weight of its pairs: weighted means over pairs. One list (``offsets = [0, M]``) pools all
    pairs. No loop over pairs: sums over rows and over lists, ``O(M s^2)`` for each candidate.

    Limiting cases: ``S`` is zero when no list has two positives, and both are when no list has a positive and a
    negative; then the metric is the caller's regulariser.

    >>> x = torch.tensor([0.0, 2.0, 5.0]).reshape(3, 1, 1)
    >>> S, D = list_scatter(x, torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0, 3]))
    >>> S.item(), D.item()  # (0 - 2)², ((0 - 5)² + (2 - 5)²) / 2
    (4.0, 17.0)
    """
    check_shape("positive", positive, (len(values),))
    check_shape("negative", negative, (len(values),))
    query = segment_ids(offsets)
    p_total, n_total = segment_sum(positive, offsets), segment_sum(negative, offsets)
    w = torch.minimum(p_total, n_total)  # (Q,)
    w = w / w.sum().clamp_min(_TINY)
    p = positive * (w / p_total.clamp_min(_TINY))[query]
    n = negative * (w / n_total.clamp_min(_TINY))[query]
    inverse = 1 / w.clamp_min(_TINY)  # of lists that count; the sums of others are 0
    # Differences do not change when all rows move together; sums of large squares would cancel.
    x = (values - torch.einsum("m,mcs->cs", p, values)).permute(1, 0, 2)  # (C, M, s)
    rows = x.permute(1, 0, 2)
    sum_p = segment_sum(rows * p[:, None, None], offsets).permute(1, 0, 2)  # (C, Q, s)
    sum_n = segment_sum(rows * n[:, None, None], offsets).permute(1, 0, 2)
    gram_p, gram_n = x.mT @ (x * p[:, None]), x.mT @ (x * n[:, None])
    weighted = (sum_p * inverse[:, None]).mT
    similar = pair_scatter(gram_p, gram_p, weighted @ sum_p)
    pairs = 1 - (p.square() * inverse[query]).sum()  # a document is no pair with itself
    return similar * torch.where(pairs > 1e-6, 1 / pairs, 0.0), pair_scatter(gram_p, gram_n, weighted @ sum_n)


class NewtonRows:
    r"""Rows of one round prepared for Newton steps; candidates are columns ``kernels (M, B)`` to be *subtracted*.

    For the step :math:`f \leftarrow f - \phi\kappa` the second-order model of the loss falls by
    :math:`\phi b - \phi^2 a / 2` with κ centred and

    .. math:: b = -\kappa^\top g, \qquad a = \sum_i h_i \kappa_i^2 - \sum_q \frac{(\sum_{i \in q} h_i \kappa_i)^2}{
              \sum_{i \in q} h_i} + \mathrm{ridge} \cdot \mathrm{var}(\kappa) \sum_i h_i

    where the second term is there because a shift of a whole list changes no pair and must not count.

    Gradients and positive Hessians are ``(M,)``, no list is empty, and the ridge is relative to the total Hessian.
    """

    def __init__(self, gradients: Tensor, hessians: Tensor, offsets: Tensor, *, ridge: float = 0.05) -> None:
        check_shape("hessians", hessians, gradients.shape)
        check_positive("ridge", ridge)
        if not bool((hessians > 0).all()):
            raise LGMMLError(f"`hessians` must be positive, got {float(hessians.min())}")
        num = len(gradients)
        # Gradients of part of a list need not sum to zero; the kernels' mean is taken out of the product here.
        self._linear = torch.stack([gradients - gradients.mean(), torch.full_like(gradients, 1 / num)])  # (2, M)
        self._square = torch.stack([hessians, torch.full_like(hessians, 1 / num)])
        share = (hessians / segment_sum(hessians, offsets).sqrt()[segment_ids(offsets)]).contiguous()
        index = torch.stack([segment_ids(offsets), torch.arange(num, device=offsets.device)])
        self._lists = torch.sparse_coo_tensor(
            index, share, (len(offsets) - 1, num), is_coalesced=True, check_invariants=True
        )
        self._ridge = ridge * hessians.sum()

    def gains(self, kernels: Tensor, *, min_deviation: float = 0.01) -> Tensor:  # (M, B) -> (B,)
        """``b |b| / a`` of each column by itself; -1 for columns that vary less than ``min_deviation``."""
        b, mean = self._linear @ kernels
        curvature, square = self._square @ kernels.square()
        lists = torch.sparse.mm(self._lists, kernels)
        variance = (square - mean.square()).clamp_min(0)
        a = (curvature - lists.square().sum(0)).clamp_min(0) + self._ridge * variance
        gain = -b * b.abs() / a.clamp_min(_TINY)
        return torch.where(variance.sqrt() < min_deviation, -1.0, gain)

    def weights(self, kernels: Tensor) -> Tensor:  # (M, b) -> (b,)
        """Weights φ ≥ 0 of the columns together: the largest fall of the second-order model."""
        x = (kernels - kernels.mean(0)).double()
        lists = torch.sparse.mm(self._lists.double(), x)
        h = self._square[0].double()
        a = (x * h[:, None]).T @ x - lists.T @ lists
        a = a + torch.diag(self._ridge * x.square().mean(0) + 1e-9)
        b = -(self._linear[0].double() @ x)
        # With a = LLᵀ the minimiser of φᵀaφ/2 − bᵀφ is the nonnegative least-squares solution of Lᵀφ = L⁻¹b.
        factor = torch.linalg.cholesky(a)
        right = torch.linalg.solve_triangular(factor, b[:, None], upper=False)[:, 0]
        solution, _ = nnls(factor.T.cpu().numpy(), right.cpu().numpy())
        return torch.as_tensor(solution).to(kernels)


@dataclass(frozen=True)
class Learners:
    """Metrics in subspaces of different sizes, as tensors padded to the largest one."""

    support: Tensor  # (K, S) features, -1 beyond the metric's size
    anchors: Tensor  # (K, S), zero beyond it
    factors: Tensor  # (K, S, S), zero beyond it
    scales: Tensor  # (K,) what distances are divided by
    phi: Tensor  # (K,)
    rounds: Tensor  # (K,) the round each was added in

    @classmethod
    def empty(cls, width: int, like: Tensor) -> Self:
        """No metrics yet."""
        none = torch.empty(0, width, dtype=torch.long, device=like.device)
        zero = like.new_empty(0)
        return cls(none, like.new_empty(0, width), like.new_empty(0, width, width), zero, zero, none[:, 0])

    @classmethod
    def cat(cls, parts: Sequence[Learners]) -> Self:
        """All metrics of all parts, in order."""
        joined = {}
        for field in fields(cls):
            joined[field.name] = torch.cat([getattr(part, field.name) for part in parts])
        return cls(**joined)

    def __len__(self) -> int:
        return len(self.phi)

    def select(self, index: Tensor) -> Learners:
        """Some of the metrics, by position or mask."""
        return Learners(*(getattr(self, field.name)[index] for field in fields(self)))

    def double(self) -> Learners:
        """The same metrics in float64."""
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value.is_floating_point():
                value = value.double()
            values[field.name] = value
        return Learners(**values)

    @property
    def widths(self) -> Tensor:
        """``(K,)`` number of features of each metric."""
        return (self.support >= 0).sum(dim=1)

    def kernels(self, features: Tensor, kernel: str) -> Tensor:  # (N, D) -> (N, K)
        """κ of the scaled distances; only the columns of the features in use are copied."""
        used, place = torch.unique(self.support.clamp_min(0), return_inverse=True)
        dists = local_distances(features[:, used].to(self.phi.dtype), self.anchors, self.factors, support=place)
        return kappa_of(dists.div_(self.scales), kernel, overwrite=True)
