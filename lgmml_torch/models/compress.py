"""Smaller models that score almost alike: fewer metrics, of lower rank, with weights fitted to the old scores."""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, check_positive, check_shape
from lgmml_torch.functional.boosting import nonnegative_solve
from lgmml_torch.functional.quantile import list_rank_percentiles
from lgmml_torch.functional.ranking import ndcg
from lgmml_torch.models.low_rank import LowRank, distance_cost
from lgmml_torch.models.phi import Phi
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_ids, segment_sum

if TYPE_CHECKING:
    from lgmml_torch.models.ranker import LGMML

REFERENCE_DOCUMENTS = 16_384  # for a few hundred weights; with fewer, the error beyond them is clearly larger
SHARES = (2.0, 1.0, 0.5, 0.25, 0.0)  # of the tolerance, that truncating one metric may cost; 0 leaves the ranks alone


@dataclass(frozen=True)
class Compressed:
    """A smaller model and what it lost, measured on the data it was made with.

    Attributes:
        model: scores like the old one, up to a constant within each list.
        score_error: root mean square change of the scores within lists, relative to their spread within lists.
        rank_correlation: Spearman's, mean over the lists whose old scores vary.
        ndcg_before: NDCG@10 of the old model; NaN without labels that differ.
        ndcg_after: of the new one.
        metrics_before: K.
        metrics_after: what is left of it.
        cost_before: multiply–adds of all distances of one document, in the plain form.
        cost_after: of the new model.
        ranks: how many metrics are left of each rank.
    """

    model: LGMML
    score_error: float
    rank_correlation: float
    ndcg_before: float
    ndcg_after: float
    metrics_before: int
    metrics_after: int
    cost_before: int
    cost_after: int
    ranks: dict[int, int]

    @property
    def ndcg_lost(self) -> float:
        """NDCG@10 before minus after; negative when the smaller model ranks better."""
        return self.ndcg_before - self.ndcg_after


@torch.no_grad()
def compress(model: LGMML, tol: float, data: RankingData) -> Compressed:
    r"""The cheapest model whose scores differ by at most ``tol`` of their spread within lists.

    Each metric's factor is turned to the principal directions of its images, so that leading columns are the best
    factor of any lower rank. Then metrics are taken up one by one, each time the one that explains most of the
    scores still missing, with weights :math:`g \ge 0` on all of them fitted anew,

    .. math:: \min_{g \ge 0} \sum_{q, p} \Big(f_q(p) + \sum_r g_r \Phi_q[r]\, \tilde\kappa_r(p)\Big)^2

    (both centred within lists), until the tolerance is met. This is done for several shares of the tolerance spent on
    truncation; the result with the least work wins. Policies that look at the list (``"knn"``, ``"amortized"``) see
    fewer metrics afterwards and may give other weights, beyond the tolerance; the report says what came of it.

    Args:
        model: stays as it is. A model whose new queries get ``"ones"`` becomes one with a shared Φ.
        tol: relative root mean square error allowed; 0 drops only what does not count at all.
        data: lists to be alike on, raw features. Of more than 16,384 documents, a part is fitted and held to the
            tolerance; the report is about all of them.

    Raises:
        LGMMLError: a negative tolerance.
        DataError: no documents, or scores that are constant within all lists.
    """
    check_positive("tol", tol, zero=True)
    device = model.metrics.scales.device
    model = model if device.type == "cpu" else deepcopy(model).cpu()
    sample = _reference(data)
    offsets = sample.offsets
    features = model.preprocess(sample.features.to(model.metrics.scales), offsets)
    bank = LowRank(model.metrics, features, model.kernel)
    kappa = bank.kernels()
    weights = model.weights(kappa, offsets)
    weights = weights if len(weights) == 1 else weights[segment_ids(offsets)]
    target = _centred(-weights * kappa, offsets).sum(dim=1)
    if not bool(target.square().sum() > 0):
        raise DataError("scores must vary within some list to be compared, got constant ones in all of them")
    best: tuple[int, Tensor, Tensor, Tensor] | None = None
    for share in SHARES:
        ranks, columns = bank.truncate(share * tol, weights, lambda values: _centred(values, offsets))
        found = _select(columns, target, bank.costs(ranks), tol)
        if found is not None and (best is None or found[0] < best[0]):
            best = (*found, ranks)
    if best is None:  # rounding keeps the greedy fit from a tolerance near 0: all metrics as they are
        everything = torch.arange(len(ranks))
        best = (0, everything, torch.ones(len(ranks), dtype=torch.float64), ranks)
    _, chosen, gains, ranks = best
    metrics, order = bank.bank(chosen, ranks[chosen])
    if model.phi.policy == "ones":  # which has no weights that gains could be multiplied with
        phi = Phi(model.phi.num_queries, len(order), mode="shared", init=gains[order]).to(model.phi.table.weight)
    else:
        phi = scaled_phi(model.phi, chosen[order], gains[order])
    small = type(model)(deepcopy(model.preprocess), metrics, phi, kernel=model.kernel, qids=model.qids)
    return _judged(model, small.eval().to(device), data)


def scaled_phi(
    phi: Phi,
    columns: Tensor,  # (C,)
    gains: Tensor,  # (C,)
) -> Phi:
    """Weights of some metrics only, each multiplied by its gain; mode and policy stay."""
    gains = gains.to(phi.table.weight)
    small = Phi.from_spec({**phi.spec(), "num_metrics": len(columns)}).to(phi.table.weight)
    both = torch.cat([columns, columns + phi.num_metrics])
    with torch.no_grad():
        small.table.weight.copy_(phi.table.weight[:, columns] * gains)
        if small.deviation is not None and phi.deviation is not None:
            small.deviation.weight.copy_(phi.deviation.weight[:, columns] * gains)
        for name in ("summaries", "summary_mean", "summary_spread"):
            setattr(small, name, getattr(phi, name)[..., both].clone())
        if small.gate is not None and phi.gate is not None:
            small.gate.first.weight.copy_(phi.gate.first.weight[:, both])
            small.gate.first.bias.copy_(phi.gate.first.bias)
            small.gate.last.weight.copy_(phi.gate.last.weight[columns])
            small.gate.last.bias.copy_(phi.gate.last.bias[columns])
    return small


def rank_correlation(
    before: Tensor,  # (N,)
    after: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
) -> float:
    """Spearman's rank correlation, mean over the lists where ``before`` varies; constant ``after`` counts as 0.

    >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 3]))
    0.5
    """
    check_shape("after", after, before.shape)
    a, b = (list_rank_percentiles(values[:, None].double(), offsets)[:, 0] for values in (before, after))
    products = segment_sum(torch.stack([a * b, a * a, b * b], dim=1), offsets)
    varies = products[:, 1] > 0
    both = products[varies & (products[:, 2] > 0)]
    return float((both[:, 0] / (both[:, 1] * both[:, 2]).sqrt()).sum() / varies.sum())


def _reference(data: RankingData) -> RankingData:
    """Every n-th list, so that about enough documents are left."""
    if data.num_documents == 0:
        raise DataError("`data` must have documents, got none")
    step = -(-data.num_documents // REFERENCE_DOCUMENTS)
    return data if step == 1 else data.select(torch.arange(0, data.num_queries, step))


def _centred(values: Tensor, offsets: Tensor) -> Tensor:
    """Float64 values minus the mean of their list: only differences within lists rank."""
    wide = values.double()
    means = segment_sum(wide, offsets) / offsets.diff().clamp_min(1).unsqueeze(1)
    return wide - means[segment_ids(offsets)]


def _select(
    columns: Tensor,  # (N, K) contributions, centred
    target: Tensor,  # (N,)
    costs: Tensor,  # (K,)
    tol: float,
) -> tuple[int, Tensor, Tensor] | None:
    """Cost, columns and gains of a nonnegative combination within the tolerance; None where greed finds none."""
    gram, pull, total = columns.T @ columns, columns.T @ target, float(target.square().sum())
    size = gram.diagonal()
    useful = size > 1e-18 * total
    chosen = torch.zeros(0, dtype=torch.long)
    gains = torch.zeros(len(gram), dtype=gram.dtype)
    limit = max(tol, 1e-6) ** 2 * total
    while total - 2 * float(pull @ gains) + float(gains @ gram @ gains) > limit:
        missing = pull - gram @ gains
        # What a metric would explain by itself, per unit of work.
        promise = torch.where(useful & (missing > 0), missing.square() / size / costs, -math.inf)
        promise[chosen] = -math.inf
        # One by one while each matters, then a few at a time: the fit costs the cube of their number.
        new = promise.topk(min(len(promise), 1 + len(chosen) // 16)).indices
        new = new[promise[new] > 0]
        if len(new) == 0:
            return None
        chosen = torch.cat([chosen, new])
        part = gram[chosen[:, None], chosen]
        ridge = 1e-12 * part.diagonal().mean()
        gains = torch.zeros_like(gains)
        gains[chosen] = nonnegative_solve(part + ridge * torch.eye(len(part), dtype=part.dtype), pull[chosen])
    left = gains.nonzero()[:, 0]
    return int(costs[left].sum()), left, gains[left]


def _judged(old: LGMML, new: LGMML, data: RankingData) -> Compressed:
    before, after = (model.score(data)[data.order].double() for model in (old, new))
    change, spread = (_centred(values[:, None], data.offsets) for values in (after - before, before))
    ranks: Counter[int] = Counter()
    for block in new.metrics.iter_blocks():
        ranks[block.factors.shape[2]] += block.num_metrics
    quality = [float(ndcg(s, data.labels, data.offsets, k=10, tie_order=data.order)) for s in (before, after)]
    return Compressed(
        model=new,
        score_error=float(change.norm() / spread.norm()),
        rank_correlation=rank_correlation(before, after, data.offsets),
        ndcg_before=quality[0],
        ndcg_after=quality[1],
        metrics_before=old.metrics.num_metrics,
        metrics_after=new.metrics.num_metrics,
        cost_before=distance_cost(old.metrics),
        cost_after=distance_cost(new.metrics),
        ranks=dict(sorted(ranks.items())),
    )
