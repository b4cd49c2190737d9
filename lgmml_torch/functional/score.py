"""The score, minus the Φ-weighted sum of a kernel of the local distances, and what a list looks like through it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import (
    DataError,
    DegenerateScoresWarning,
    LGMMLError,
    NumericsWarning,
    check_choice,
    check_finite,
    check_offsets,
    check_shape,
)
from lgmml_torch.inputs import fingerprint
from lgmml_torch.segments import (
    argsort_segments,
    row_slices,
    segment_ids,
    segment_max,
    segment_min,
    segment_std,
    segment_sum,
)

_CHUNK_ENTRIES = 1_048_576  # numbers of a block of rows whose scores are computed together

KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "paper": lambda d: d * torch.exp(-d),
    "distance": lambda d: d,
    "rbf": lambda d: -torch.exp(-d),
}
"""κ by name. ``paper`` rises up to d = 1 and falls after it; ``distance`` and ``rbf`` rise everywhere.

A kernel needs derivatives by autograd, and values of one sign: scores that differ by rounding alone are told by that.
"""


def kernel(dists: Tensor, name: str = "paper", *, overwrite: bool = False) -> Tensor:  # (...) -> (...)
    """κ(d): ``paper`` d·e^(−d) (Eq. evaluation_function), ``distance`` d, ``rbf`` −e^(−d).

    Limits: at d = 0 they are 0, 0 and −1; for d → ∞ they are 0, ∞ and 0. With ``overwrite`` the distances may be
    lost, which makes the first a quarter faster.

    >>> kernel(torch.tensor([0.0, 1.0]), "rbf")
    tensor([-1.0000, -0.3679])
    """
    check_choice("kernel", name, KERNELS)
    if overwrite and name == "paper":
        return dists.mul_(dists.neg().exp_())
    return KERNELS[name](dists)


def score(
    values: Tensor,  # (N, K)
    phi: Tensor,  # (Q, K), (1, K) or (K,)
    offsets: Tensor,  # (Q+1,)
    *,
    kernel: str | None = None,
) -> Tensor:  # (N,)
    r"""Score every document of every list.

    .. math:: f_q(p) = -\sum_r \Phi_q[r]\, \kappa(d_r(p))

    ``values`` are κ already, or scaled distances when ``kernel`` names the κ to apply; they may be stored in a narrower
    dtype than Φ, whose dtype the scores have. Φ has a row for each query, or one row (or no row dimension) for all.
    Kernel and product are fused in blocks of rows. Gradients flow to Φ and to ``values``.

    >>> score(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([1.0, 0.5]), torch.tensor([0, 2]), kernel="distance")
    tensor([-2., -0.])
    """
    if kernel is not None:
        check_choice("kernel", kernel, KERNELS)
    check_shape("values", values, (None, None))
    num, width = values.shape
    check_offsets(offsets, num)
    rows = phi.reshape(1, -1) if phi.dim() == 1 else phi
    if rows.dim() != 2 or rows.shape[1] != width or len(rows) not in (1, len(offsets) - 1):
        raise LGMMLError(
            f"`phi` must have shape ({len(offsets) - 1}, {width}), (1, {width}) or ({width},), got {tuple(phi.shape)}"
        )
    owner = None if len(rows) == 1 else segment_ids(offsets)
    parts = []
    for some in row_slices(num, width, _CHUNK_ENTRIES):
        kappa = values[some].to(phi.dtype)
        if kernel is not None:
            kappa = KERNELS[kernel](kappa)
        if owner is None:
            parts.append(-(kappa @ rows[0]))
        else:
            parts.append(-torch.einsum("nk,nk->n", kappa, rows[owner[some]]))
    if not parts:
        return phi.new_empty(0)
    return torch.cat(parts)


def tie_equal_rows(scores: Tensor, features: Tensor, offsets: Tensor) -> Tensor:  # (N,), (N, D), (Q+1,) -> (N,)
    """The scores with equal documents of a list, by raw features on the CPU, level with the first of them.

    A vector loop and its remainder, or two blocks of a product, may round differently, so that a row's score depends on
    its place in the last bits; a tie would then be broken by chance. Only rows whose scores lie within 1e-4 of a
    neighbour's are looked at: rounding cannot move them further, since the terms of a score have one sign.

    >>> x = torch.tensor([[1.0], [1.0], [2.0]])
    >>> tie_equal_rows(torch.tensor([0.5, 0.5000001, 0.5]), x, torch.tensor([0, 3]))
    tensor([0.5000, 0.5000, 0.5000])
    """
    check_shape("features", features, (len(scores), None))
    if len(scores) < 2:
        return scores
    ids, order = segment_ids(offsets), argsort_segments(scores, offsets)
    ordered = scores[order]
    near = torch.isclose(ordered[1:], ordered[:-1], rtol=1e-4, atol=0.0) & (ids.diff() == 0)
    pad = near.new_zeros(1)
    rows = order[torch.cat([near, pad]) | torch.cat([pad, near])].sort().values
    if not len(rows):
        return scores
    out = scores.clone()
    out[rows] = scores[rows[first_equal_rows(features[rows.cpu()], ids[rows])]]
    return out


def first_equal_rows(features: Tensor, ids: Tensor) -> Tensor:  # (N, D), (N,) the list of each row, ascending -> (N,)
    """For every row the first row of its list with the same features.

    >>> first_equal_rows(torch.tensor([[1.0], [2.0], [1.0], [1.0]]), torch.tensor([0, 0, 0, 1]))
    tensor([0, 1, 0, 3])
    """
    values, lists = features.cpu().numpy(), ids.cpu().numpy()
    keys = fingerprint(values)
    order = np.lexsort((keys, lists))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(lists[order]) != 0) | (keys[order][1:] != keys[order][:-1])
    heads = order[np.flatnonzero(new)][np.cumsum(new) - 1]
    # Rows that only share their fingerprint stay apart.
    heads = np.where((values[order] == values[heads]).all(axis=1), heads, order)
    first = np.empty_like(order)
    first[order] = heads
    return torch.from_numpy(first).to(ids.device)


def warn_if_degenerate(scores: Tensor, offsets: Tensor) -> float:  # (N,), (Q+1,)
    """Warn when more than half of the lists are flat; returns their share among lists of two documents or more.

    A list is flat when its highest and lowest score differ by at most 1e-5 of the larger magnitude: a few units in the
    last place of float32, so that rounding decides the order. NaN when no list has two documents.

    >>> warn_if_degenerate(torch.tensor([1.0, 1.0, 1.0, 2.0]), torch.tensor([0, 2, 4]))
    0.5
    """
    check_shape("scores", scores, (None,))
    check_offsets(offsets, len(scores))
    values = scores.detach().double()
    spread = segment_max(values, offsets) - segment_min(values, offsets)
    flat = spread <= 1e-5 * segment_max(values.abs(), offsets)
    share = float(flat[offsets.diff() > 1].double().mean())
    if share > 0.5:
        warnings.warn(
            f"scores are nearly constant within {share:.0%} of the lists, so their order is close to arbitrary; "
            "try another bandwidth, or check that Φ is not all zero",
            DegenerateScoresWarning,
            stacklevel=2,
        )
    return share


def median_scales(dists: Tensor) -> Tensor:  # (N, K) -> (K,)
    """What each local distance is divided by: its median over the documents.

    The median is the lower middle value, so it is one of the distances. Where half of the documents sit on the anchor
    it is 0; the mean takes its place there (1 when that is 0 too), with a warning.

    Raises:
        DataError: There are no documents.

    >>> median_scales(torch.tensor([[1.0, 4.0], [2.0, 5.0], [9.0, 6.0]]))
    tensor([2., 5.])
    """
    check_shape("dists", dists, (None, None))
    if len(dists) == 0:
        raise DataError("`dists` must have at least one row to take medians of, got 0")
    check_finite("dists", dists)
    scales = dists.T.contiguous().median(dim=1).values
    zero = scales == 0
    if bool(zero.any()):
        means = dists[:, zero].mean(dim=0, dtype=torch.float64).to(scales.dtype)
        scales[zero] = torch.where(means > 0, means, 1.0)
        warnings.warn(
            f"{int(zero.sum())} of {len(scales)} metrics have a median distance of 0 (many documents on the anchor); "
            "they are scaled by the mean distance (1 when that is 0) instead",
            NumericsWarning,
            stacklevel=2,
        )
    return scales


SPREAD_FLOOR = 1e-4


def list_summary(kappa: Tensor, offsets: Tensor) -> Tensor:  # (N, K), (Q+1,) -> (Q, 2K)
    """Mean and log-spread of the kernel values of each list, metric by metric.

    The first K columns are the means over the list, the last K are log(`SPREAD_FLOOR` + standard deviation). An empty
    list has zeros for means; it has no deviation, nor has a list of one document.

    >>> list_summary(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 2]))
    tensor([[2.0000e+00, 1.0001e-04]])
    """
    check_shape("kappa", kappa, (None, None))
    check_offsets(offsets, len(kappa))
    mean = segment_sum(kappa, offsets) / offsets.diff().clamp_min(1)[:, None]
    return torch.cat([mean, (segment_std(kappa, offsets) + SPREAD_FLOOR).log()], dim=1)
