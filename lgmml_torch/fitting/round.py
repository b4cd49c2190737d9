"""Settings of boosting, and one round: draw documents, try candidate metrics, keep the best few and weigh them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import (
    DataError,
    DataWarning,
    LGMMLError,
    check_choice,
    check_each,
    check_finite,
    check_number,
    check_positive,
    check_unit_interval,
    check_whole,
)
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.functional.boosting import Learners, NewtonRows, list_scatter
from lgmml_torch.functional.gmml import gmml
from lgmml_torch.functional.losses import bias_of, lambda_gradients
from lgmml_torch.functional.measures import Measure
from lgmml_torch.functional.score import KERNELS, kernel
from lgmml_torch.functional.spd import METHODS
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import gather_segments, offsets_from_sizes, segment_ids, segment_max, segment_min

_METRIC_KINDS = ("gmml", "gmml-pooled", "identity")
LARGEST = 1e30  # its square, and its product with a feature, are still numbers


@dataclass(frozen=True)
class BoostConfig:
    """Settings of `fit_boosted`; the defaults are the recipe of the method, not tuned any further."""

    rounds: int = 200  # largest number of rounds
    batch: int = 4  # metrics added in each round
    shrinkage: float = 0.1  # ν, the share of a Newton step that is taken
    candidates: int = 24  # subspaces tried in each round, shared out evenly over ``sizes``
    sizes: tuple[int, ...] = (1, 2, 3)  # numbers of features of the subspaces
    anchors: int = 6  # documents tried as anchors in each subspace
    # how far the mean anchor is moved away from the negatives, further anchors to try
    steps: tuple[float, ...] = (2.0, 8.0)
    bandwidths: tuple[float, ...] = (0.3, 1.0, 3.0)  # times the mean distance, what distances are divided by
    kernel: str = "paper"  # κ of the score, see `lgmml_torch.functional.score.kernel`
    # ``"gmml"`` (pairs within queries), ``"gmml-pooled"`` (pairs of all queries) or ``"identity"``
    metric: str = "gmml"
    lam: float = 0.1  # λ, regularisation of both scatters relative to their trace
    t: float = 0.5  # weight on the geodesic from S⁻¹ to D
    method: str = "cholesky"  # how the geometric mean is computed, ``"cholesky"`` or ``"eigh"``
    ridge: float = 0.05  # of the Newton system, relative to the total Hessian
    min_deviation: float = 0.01  # kernels that vary less over the documents are rejected
    subsample: float = 0.7  # share of the queries a round looks at
    cap: int = 2500  # documents a round fits to; the gradients come from whole lists of at most four times as many
    truncation: int = 30  # LambdaRank pairs need a document among the first ``truncation`` places
    sigma: float = 1.0  # slope of LambdaRank
    hessian_floor: float = 0.05  # added to p(1 - p); without it a step has no bound
    feature_floor: float = 0.05  # smallest sampling weight of a feature, relative to the mean
    # L2 penalty on the biases of positions, where the data has any, relative to their mean Hessian
    position_ridge: float = 0.01
    evaluate_every: int = 5  # rounds between two looks at NDCG
    k: int = 10  # cutoff of that NDCG
    smooth: int = 3  # evaluations averaged before they are compared
    patience: int = 40  # rounds without a better average after which to stop

    def __post_init__(self) -> None:
        for name in ("sizes", "steps", "bandwidths"):
            check_each(name, getattr(self, name), check_number)
            # A configuration file gives lists; equal settings should compare equal.
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("metric", self.metric, _METRIC_KINDS)
        check_choice("method", self.method, METHODS)
        for name in ("t", "subsample", "shrinkage"):
            check_unit_interval(name, getattr(self, name))
        for name in (
            "batch", "candidates", "anchors", "cap", "truncation", "evaluate_every", "k", "smooth", "patience"
        ):  # fmt: skip
            check_whole(name, getattr(self, name))
        positive = (
            "shrinkage", "ridge", "subsample", "sigma", "hessian_floor", "feature_floor", "min_deviation",
            "position_ridge",
        )  # fmt: skip
        for name in (*positive, "lam"):
            check_positive(name, getattr(self, name), zero=name not in positive)
            if getattr(self, name) > LARGEST:
                raise LGMMLError(f"`{name}` must be at most {LARGEST:g}, got {getattr(self, name)}")
        check_whole("rounds", self.rounds, zero=True)
        for name in ("sizes", "bandwidths"):
            values = getattr(self, name)
            if not values or min(values) <= 0:
                raise LGMMLError(f"`{name}` must hold positive numbers, got {list(values)}")
        check_each("sizes", self.sizes, check_whole)
        if self.candidates < len(self.sizes):
            raise LGMMLError(
                f"`candidates` must be at least one for each of the {len(self.sizes)} sizes, got {self.candidates}"
            )


@dataclass(frozen=True)
class Problem:
    """What stays the same from round to round; where processes share the data, queries are those of all of them."""

    data: RankingData
    valid: RankingData | None
    usable: Tensor  # (U,) queries with different labels
    weights: Tensor | None  # (Q,)
    config: BoostConfig
    seed: int
    start: Bank | None = None
    measure: Measure | None = None

    @classmethod
    def of(
        cls,
        data: RankingData,
        valid: RankingData | None,
        config: BoostConfig,
        seed: int,
        start: Bank | None = None,
        measure: Measure | None = None,
    ) -> Self:
        """Check and reorder the data, and compute what every round needs."""
        check_finite("features", data.features)
        if start is not None:
            _check_start(start, data, config)
        if valid is not None:
            valid = _to_validate_on(valid, data.num_features)
        data = cls._shuffled(data, seed)
        if valid is not None:
            valid = cls._shuffled(valid, seed)
        usable = _usable_queries(data)
        weights = data.query_weights
        if weights is not None:
            weights = data.all_lists.per_query(weights)
        return cls(data, valid, usable, weights, config, seed, start, measure)

    @staticmethod
    def generator(seed: int, step: int) -> torch.Generator:
        """Random numbers that depend on the seed and the step alone."""
        mixed = np.random.SeedSequence([abs(seed), step + 2]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(mixed >> np.uint64(1)))

    @classmethod
    def _shuffled(cls, data: RankingData, seed: int) -> RankingData:
        """The data with the documents of each query in random order, by which equal scores are ranked.

        The canonical order would rank the worst first among equals, and the caller's would make the fit depend on it.
        """
        order = data.all_lists.here(torch.randperm(data.all_lists.num_documents, generator=cls.generator(seed, -1)))
        order = order.to(data.offsets.device)
        order = order[segment_ids(data.offsets)[order].argsort(stable=True)]
        return data.replace(**data.of_documents(lambda values: values[order]), order=data.order[order], doc_ids=None)

    @property
    def identity(self) -> str:
        """What a state must belong to for a fit of this problem to go on from it."""
        valid = None if self.valid is None else _shape(self.valid)
        asked = f"{self.config} seed={self.seed} data={_shape(self.data)} valid={valid}"
        if self.measure is not None:
            asked += f" measure={self.measure.name}"
        if self.start is not None:
            asked += f" start={self.start.digest}"
        return asked

    def seen(self, scores: Tensor, data: RankingData, bias: Tensor | None) -> Tensor:  # (N,), (P,) -> (N,)
        """The scores that the loss sees: with what being shown where it was adds to each document."""
        if bias is not None and data.positions is not None:
            scores = scores + bias_of(bias, data.positions)
        return scores.to(data.features.dtype)

    def draw_bag(self, scores: Tensor, generator: torch.Generator) -> Bag:  # (N,)
        """Some queries, their gradients from whole lists, and at most ``cap`` of their documents.

        Where processes share the data, each sends what it has of the drawn lists, and all draw and find the same.
        """
        data, everything, config, usable = self.data, self.data.all_lists, self.config, self.usable
        drawn = usable[torch.randperm(len(usable), generator=generator).to(usable.device)]
        drawn = drawn[: max(1, round(config.subsample * len(usable)))]
        fits = everything.sizes[drawn].cumsum(0) <= 4 * config.cap
        fits[0] = True
        queries = drawn[fits].sort().values
        rows, offsets = gather_segments(everything.offsets, queries)
        dtype = data.features.dtype
        gradients, hessians = lambda_gradients(
            everything.take(scores, rows).to(dtype),
            everything.take(data.labels, rows).to(dtype),
            offsets,
            truncation=config.truncation,
            sigma=config.sigma,
            floor=config.hessian_floor,
            weights=None if data.document_weights is None else everything.take(data.document_weights, rows),
        )
        query = segment_ids(offsets)
        if self.weights is not None:
            weight = self.weights.to(gradients)[queries][query]
            gradients, hessians = gradients * weight, hessians * weight
        kept = (hessians > 0).nonzero()[:, 0]
        some = kept[_draw_rows(hessians[kept], config.cap, generator)]
        sizes = torch.bincount(query[some])
        shown = None if data.positions is None else everything.take(data.positions, rows[some])
        features = everything.take(data.features, rows[some])
        return Bag(features, gradients[some], hessians[some], offsets_from_sizes(sizes[sizes > 0]), shown)


def _shape(data: RankingData) -> tuple[int, int]:
    return data.all_lists.num_documents, data.num_features


def _check_start(start: Bank, data: RankingData, config: BoostConfig) -> None:
    """Require a bank that rounds can be added to."""
    if start.phi is None:
        raise LGMMLError("`start` must have weights Φ to go on from, got none")
    if start.kernel != config.kernel:
        raise LGMMLError(f"`kernel` must be that of the metrics to go on from, {start.kernel!r}, got {config.kernel!r}")
    if start.metrics.num_features != data.num_features:
        raise LGMMLError(f"`start` must look at {data.num_features} features, got {start.metrics.num_features}")


def _to_validate_on(valid: RankingData, num_features: int) -> RankingData | None:
    """The queries to validate on, features finite and of one width; None where no process has a relevant document."""
    check_finite("valid.features", valid.features)
    if valid.num_features != num_features:
        raise LGMMLError(f"`valid` must have {num_features} features as `data` has, got {valid.num_features}")
    relevant = segment_max(valid.labels, valid.offsets, empty=0.0) > 0
    if bool(valid.all_lists.per_query(relevant.byte()).any()):
        return valid
    warnings.warn(
        "no validation query has a relevant document, so all rounds are run and kept", DataWarning, stacklevel=3
    )
    return None


def _usable_queries(data: RankingData) -> Tensor:  # (U,)
    """Queries with a pair to order: different labels, some gain, and a weight above 0."""
    labels, weights = data.labels, data.document_weights
    counted = labels  # as the better of a pair
    if weights is not None:
        counted = labels.masked_fill(weights == 0, -torch.inf)
    best = segment_max(labels, data.offsets)
    usable = (segment_max(counted, data.offsets) > segment_min(labels, data.offsets)) & (best > 0)
    if data.query_weights is not None:
        usable &= data.query_weights > 0
    usable = data.all_lists.per_query(usable.byte())
    if not bool(usable.any()):
        raise DataError("`data` must have a query with documents of different labels, got none")
    return usable.nonzero()[:, 0]


_TINY = 1e-12
# Added to both scatters: features are standardised, and one that is constant within lists has no scatter at all.
LEAST_SCATTER = 1e-4


@dataclass(frozen=True)
class Bag:
    """The documents one round fits to, grouped by list."""

    features: Tensor  # (M, D)
    gradients: Tensor  # (M,)
    hessians: Tensor  # (M,)
    offsets: Tensor  # (Q+1,)
    positions: Tensor | None = None  # (M,)

    def find_learners(self, config: BoostConfig, generator: torch.Generator) -> Learners:
        """The best few candidates with their share φ of a Newton step; none if nothing helps."""
        if not (bool((self.gradients > 0).any()) and bool((self.gradients < 0).any())):
            return Learners.empty(max(config.sizes), self.features)  # nothing to tell apart among these documents
        newton = NewtonRows(self.gradients, self.hessians, self.offsets, ridge=config.ridge)
        weights = self.feature_weights(config.feature_floor)
        each = weights.cpu().expand(config.candidates // len(config.sizes), -1)
        parts, gains = [], []
        for size in config.sizes:
            drawn = torch.multinomial(each, min(size, len(weights)), generator=generator)
            support = drawn.to(weights.device)
            learners, gain = self.best_of_subspaces(newton, support, config, generator)
            parts.append(learners)
            gains.append(gain)
        gain = torch.cat(gains)
        order = gain.argsort(descending=True, stable=True)[: config.batch]
        chosen = Learners.cat(parts).select(order[gain[order] > 0])
        if not len(chosen):
            return chosen
        chosen = replace(chosen, phi=config.shrinkage * newton.weights(chosen.kernels(self.features, config.kernel)))
        return chosen.select(chosen.phi > 0)

    def best_of_subspaces(
        self,
        newton: NewtonRows,
        support: Tensor,  # (C, s)
        config: BoostConfig,
        generator: torch.Generator,
    ) -> tuple[Learners, Tensor]:  # C learners, (C,)
        """For each subspace the anchor and bandwidth of the largest gain, all of them tried."""
        values = self.features[:, support]  # (M, C, s)
        factors, anchors = self.subspace_factors(values, config), self.candidate_anchors(values, config, generator)
        image = factors.mT @ values.permute(1, 2, 0).contiguous()  # (C, r, M)
        centres = anchors @ factors  # (C, A, r)
        squares = image.new_zeros(*anchors.shape[:2], len(values))
        for r in range(factors.shape[2]):  # differences first: products would cancel next to an anchor
            gap = image[:, r, None] - centres[:, :, r, None]
            squares.addcmul_(gap, gap)
        dists = squares.sqrt_().flatten(0, 1)  # (C * A, M)
        base, dists = dists.mean(dim=1).clamp_min(1e-3), dists.T.contiguous()  # (C * A,), (M, C * A)
        columns = []
        for bandwidth in config.bandwidths:  # one at a time stays in the cache
            kernels = kernel(dists / (base * bandwidth), config.kernel, overwrite=True)
            columns.append(newton.gains(kernels, min_deviation=config.min_deviation))
        scales = base * base.new_tensor(config.bandwidths)[:, None]  # (B, C * A)
        # Candidates first: (B, C * A) -> (C, B * A)
        shape = (len(config.bandwidths), *anchors.shape[:2])
        gains = torch.stack(columns).reshape(shape).transpose(0, 1).flatten(1)
        scales = scales.reshape(shape).transpose(0, 1).flatten(1)
        gain, best = gains.max(dim=1)
        each = torch.arange(len(support), device=best.device)
        width, pad = support.shape[1], max(config.sizes) - support.shape[1]
        return Learners(
            support=torch.nn.functional.pad(support, (0, pad), value=-1),
            anchors=torch.nn.functional.pad(anchors[each, best % anchors.shape[1]], (0, pad)),
            factors=torch.nn.functional.pad(factors, (0, pad, 0, max(config.sizes) - width)),
            scales=scales[each, best],
            phi=torch.zeros_like(gain),
            rounds=torch.zeros_like(best),
        ), gain

    def position_step(self, bias: Tensor, config: BoostConfig) -> Tensor:  # (P,) -> (P,)
        r"""The biases of positions after a damped Newton step on what documents shown there want together.

        With :math:`G_p, H_p` the gradients and Hessians summed over position p and λ = ``position_ridge`` times the
        mean of H over the positions that occur,

        .. math:: b_p \leftarrow b_p + \mathrm{shrinkage} \cdot (G_p - \lambda b_p) / (H_p + \lambda)

        so a position that nothing is known about goes back to 0, and positions that differ in nothing keep 0.
        """
        if self.positions is None:
            return bias
        pull = torch.zeros_like(bias).index_add_(0, self.positions, self.gradients.to(bias))
        stiff = torch.zeros_like(bias).index_add_(0, self.positions, self.hessians.to(bias))
        least = config.position_ridge * stiff.sum() / (stiff > 0).sum().clamp_min(1)
        return bias + config.shrinkage * (pull - least * bias) / (stiff + least).clamp_min(1e-12)

    def feature_weights(self, floor: float) -> Tensor:  # (D,)
        r"""How often each feature should be drawn: :math:`|x^\top g| / \sqrt{\sum h x^2}`, over its mean.

        It is at least ``floor``, which keeps features alive that say nothing by themselves; where no feature says
        anything, all get the same.
        """
        slope, curvature = self.gradients @ self.features, self.hessians @ self.features.square()
        strength = slope.abs() / curvature.clamp_min(_TINY).sqrt()
        return (strength / strength.mean().clamp_min(_TINY)).clamp_min(floor)

    @property
    def _sides(self) -> tuple[Tensor, Tensor]:  # (M,), (M,)
        """Weights of the documents as positives, which should rise, and as negatives."""
        return self.gradients.clamp_min(0), (-self.gradients).clamp_min(0)

    def candidate_anchors(
        self,
        values: Tensor,  # (M, C, s)
        config: BoostConfig,
        generator: torch.Generator,
    ) -> Tensor:  # (C, anchors + 1 + len(steps), s)
        """Ideal documents to try: positives drawn by weight, their mean, and that mean moved away from the negatives.

        ``config.steps`` are lengths along the direction from the mean of the negatives to that of the positives. The
        same documents serve all candidates.
        """
        positive, negative = self._sides
        p, n = positive / positive.sum().clamp_min(_TINY), negative / negative.sum().clamp_min(_TINY)
        mean, away = torch.einsum("m,mcs->cs", p, values), torch.einsum("m,mcs->cs", p - n, values)
        away = away / away.norm(dim=1, keepdim=True).clamp_min(1e-6)
        drawn = torch.multinomial(p.cpu(), config.anchors, replacement=True, generator=generator).to(values.device)
        moved = [mean + step * away for step in config.steps]
        return torch.cat([values[drawn], torch.stack([mean, *moved])]).transpose(0, 1)

    def subspace_factors(self, values: Tensor, config: BoostConfig) -> Tensor:  # (M, C, s) -> (C, s, s)
        """Factor of each subspace's metric."""
        eye = torch.eye(values.shape[2], dtype=values.dtype, device=values.device)
        if config.metric == "identity" or values.shape[2] == 1:  # in one dimension every metric is a scale
            return eye.expand(values.shape[1], -1, -1)
        offsets = self.offsets
        if config.metric != "gmml":
            offsets = offsets[[0, -1]]
        S, D = list_scatter(values, *self._sides, offsets)
        S, D = S.double(), D.double()
        least = LEAST_SCATTER * eye.double()
        S, D = (S + S.mT) / 2 + least, (D + D.mT) / 2 + least
        return gmml(S, D, config.t, lam=config.lam, method=config.method).factor.to(values.dtype)


def _draw_rows(hessians: Tensor, cap: int, generator: torch.Generator) -> Tensor:  # (M,) -> (min(M, cap),)
    """At most ``cap`` rows, in order."""
    count = len(hessians)
    if count <= cap:
        return torch.arange(count, device=hessians.device)
    if count <= 4 * cap:
        drawn = torch.randperm(count, generator=generator)[:cap]
    else:
        # One huge list: the few documents in its first places are in every pair, and uniform draws would miss them.
        drawn = torch.multinomial((hessians + hessians.mean()).cpu(), cap, generator=generator)
    return drawn.sort().values.to(hessians.device)
