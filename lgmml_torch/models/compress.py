"""Smaller models that score almost alike: fewer metrics, of lower rank, with weights fitted to the old scores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError, check_positive, check_shape
from lgmml_torch.functional.boosting import nonnegative_solve
from lgmml_torch.functional.distance import norm_factors
from lgmml_torch.functional.features import list_rank_percentiles
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.functional.score import kernel as kappa_of
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_ids, segment_sum

if TYPE_CHECKING:
    from lgmml_torch.models.ranker import LGMML

# Ranks tried, below half of the full one: above that the quadratic form of the full rank is cheaper. Few, so that
# metrics stand in few blocks.
LADDER = (2, 4, 8, 16, 32, 64, 128, 256)
NARROW = 4  # factors of this rank or less have no lower one on the ladder, and stay as they are


class LowRank:
    """Kernel values of some documents under every metric, at every rank of the ladder.

    A metric's images Fᵀ(x − a) are turned to their principal directions, which changes no distance; the first R
    columns of the turned factor are then the factor of rank R that keeps most of the mean squared distance. The
    distance that is left is stretched to fit the whole one by least squares.

    Args:
        metrics: the bank.
        features: ``(N, D)`` documents, preprocessed.
        kernel: κ.
    """

    def __init__(self, metrics: LocalMetrics, features: Tensor, kernel: str) -> None:
        self.metrics, self.kernel = metrics, kernel
        self.values: list[dict[int, Tensor]] = []  # for each column: rank → (N,) kernel values
        self.factors: list[Tensor] = []  # for each column: (s, R), turned
        self.stretch: list[dict[int, float]] = []
        self.errors: list[dict[int, float]] = []  # for each column: rank → relative change of its contribution
        self.places: list[tuple[int, int]] = []  # for each column: its block and its row there
        for number, block in enumerate(metrics.iter_blocks()):
            lenses = norm_factors(block.factors, metrics.norm)
            for row in range(block.num_metrics):
                rows = features if block.is_full else features[:, block.support[row]]
                self._add(rows - block.anchors[row], lenses[row], float(block.scales[row]))
                self.places.append((number, row))

    def _add(
        self,
        gaps: Tensor,  # (N, s)
        lens: Tensor,  # (s, R)
        scale: float,
    ) -> None:
        full = lens.shape[1]
        # From the gaps' second moments, a smaller matrix than the images and shared work for any rank.
        turned = lens
        if full > NARROW:
            wide = lens.double()
            moments = wide.T @ (gaps.T @ gaps).double() @ wide
            turned = (wide @ torch.linalg.eigh(moments).eigenvectors.flip(1)).to(lens)
        squares = (gaps @ turned).square_()
        whole = squares.sum(dim=1).sqrt()
        values, stretch = {full: kappa_of(whole / scale, self.kernel)}, {full: 1.0}
        for rank in (rank for rank in LADDER if 2 * rank < full):
            part = squares[:, :rank].sum(dim=1).sqrt()
            energy = float(part.square().sum())
            if energy > 0:
                stretch[rank] = float(part @ whole) / energy
                values[rank] = kappa_of(part * (stretch[rank] / scale), self.kernel)
        self.values.append(values)
        self.factors.append(turned)
        self.stretch.append(stretch)

    def kernels(self) -> Tensor:  # (N, K)
        """Kernel values of the documents under every metric at its full rank."""
        return torch.stack([by_rank[max(by_rank)] for by_rank in self.values], dim=1)

    def truncate(
        self,
        limit: float,
        weights: Tensor,  # (N, K) or (1, K)
        centre: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:  # (K,), (N, K)
        """Lowest rank of each metric whose contribution changes by at most ``limit`` of its size, and contributions.

        Both are measured after ``centre``, which takes the mean of every list away; weights and ``centre`` must be the
        same in every call.
        """
        if not self.errors:
            self.errors = [self._changes(by_rank, weights[:, r, None], centre) for r, by_rank in enumerate(self.values)]
        ranks = [min(rank for rank, error in errors.items() if error <= limit) for errors in self.errors]
        chosen = torch.stack([by_rank[rank] for by_rank, rank in zip(self.values, ranks, strict=True)], dim=1)
        return torch.tensor(ranks), centre(-weights * chosen)

    @staticmethod
    def _changes(by_rank: dict[int, Tensor], weights: Tensor, centre: Callable[[Tensor], Tensor]) -> dict[int, float]:
        """Relative change of one metric's contribution at each rank; exactly 0 at the full one."""
        ranks = sorted(by_rank)
        parts = centre(weights * torch.stack([by_rank[rank] for rank in ranks], dim=1))
        sizes = (parts - parts[:, -1:]).norm(dim=0) / parts[:, -1].norm().clamp_min(1e-300)
        return dict(zip(ranks, sizes.tolist(), strict=True))

    def costs(
        self,
        ranks: Tensor,  # (K,)
    ) -> Tensor:  # (K,)
        """Work of one distance under each metric: multiply–adds, half of them at full rank by the quadratic form."""
        widths = torch.tensor([len(factor) for factor in self.factors])
        return widths * torch.minimum(ranks, (widths + 1) // 2)

    def bank(
        self,
        columns: Tensor,  # (C,)
        ranks: Tensor,  # (C,)
    ) -> tuple[LocalMetrics, Tensor]:  # the bank and (C,) the place in ``columns`` of each of its metrics
        """The chosen metrics at the chosen ranks; those of one shape stand together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for place, (column, rank) in enumerate(zip(columns.tolist(), ranks.tolist(), strict=True)):
            groups.setdefault((self.places[column][0], rank), []).append(place)
        blocks, order = [], []
        for (number, rank), places in sorted(groups.items()):
            chosen = columns[places].tolist()
            block = self.metrics.iter_blocks()[number]
            rows = torch.tensor([self.places[column][1] for column in chosen], device=block.scales.device)
            stretch = torch.tensor([self.stretch[column][rank] for column in chosen]).to(block.scales)
            blocks.append(
                MetricBlock(
                    block.anchors[rows],
                    torch.stack([self.factors[column][:, :rank] for column in chosen]),
                    support=None if block.is_full else block.support[rows],
                    scales=block.scales[rows] / stretch,
                    quality=block.quality[rows],
                )
            )
            order.extend(places)
        bank = LocalMetrics(blocks, num_features=self.metrics.num_features, norm="mahalanobis")
        return bank, torch.tensor(order)


def distance_cost(metrics: LocalMetrics) -> int:
    """Multiply–adds of all distances of one document."""
    shapes = [norm_factors(block.factors[:1], metrics.norm).shape[1:].numel() for block in metrics.iter_blocks()]
    return sum(size * block.num_metrics for size, block in zip(shapes, metrics.iter_blocks(), strict=True))


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
        LGMMLError: a negative tolerance, or a model that adds to trees.
        DataError: no documents, or scores that are constant within all lists.
    """
    check_positive("tol", tol, zero=True)
    if model.base is not None:
        raise LGMMLError(
            f"`model` must not add to a {model.base.title} model to be compressed; compress ours alone, with "
            "`model.base = None`, and choose the weights anew"
        )
    device = model.metrics.scales.device
    model = model if device.type == "cpu" else deepcopy(model).cpu()
    data = model.encoded(data)
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
        phi = model.phi.select(chosen[order], gains[order])
    small = type(model)(
        deepcopy(model.preprocess), metrics, phi, kernel=model.kernel, qids=model.qids,
        feature_names=model.feature_names, encoder=model.encoder,
    )  # fmt: skip
    return _judged(model, small.eval().to(device), data)


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
        new = promise.topk(1 + len(chosen) // 16).indices
        new = new[promise[new] > 0]
        if len(new) == 0:
            return None
        chosen = torch.cat([chosen, new])
        part = gram[chosen[:, None], chosen]
        ridge = 1e-12 * part.diagonal().mean()
        gains[chosen] = nonnegative_solve(part + ridge * torch.eye(len(part), dtype=part.dtype), pull[chosen])
    left = gains.nonzero()[:, 0]
    return int(costs[left].sum()), left, gains[left]


def _judged(old: LGMML, new: LGMML, data: RankingData) -> Compressed:
    before, after = (model.score(data).double() for model in (old, new))
    change, spread = (_centred(values[:, None], data.offsets) for values in (after - before, before))
    ranks: Counter[int] = Counter()
    for block in new.metrics.iter_blocks():
        ranks[block.factors.shape[2]] += block.num_metrics
    quality = [mean_ndcg(scores, data) for scores in (before, after)]
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
