"""Which features matter: by the model's own structure, by its score differences, by what shuffling them costs.

Three answers to three questions. `structural_importance` looks at the model alone, `pair_importance` at what lies
between documents of a list, and `permutation_importance` at the quality of the ranking, which is the only one of them
that knows labels. `partial_effect` shows which values of a feature are good for a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError, check_choice, check_positive
from lgmml_torch.functional.measures import rank_data
from lgmml_torch.functional.presets import describe
from lgmml_torch.functional.significance import Interval, bootstrap_interval
from lgmml_torch.models.explain import explain_pairs, largest_parts
from lgmml_torch.models.phi import RULES
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import argsort_segments, segment_std

_WITHIN = ("lists", "all")


class _Scorer(Protocol):
    """Whatever gives each document of some lists a score, in the order of the rows."""

    def score(self, data: RankingData) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Importance:
    """Shares of the raw features and of the local metrics; each add up to 1, together with ``base``.

    Attributes:
        features: ``(D,)`` of the raw features.
        metrics: ``(K,)`` of the local metrics.
        base: of trees that the model adds to, where they were looked at; 0 otherwise.
    """

    features: Tensor
    metrics: Tensor
    base: float = 0.0

    def leading(self, count: int = 10) -> list[tuple[int, float]]:
        """The features with the largest shares, from 0, with these; those without any are left out."""
        return [(feature, float(self.features[feature])) for feature in largest_parts(self.features, count)]


def structural_importance(model: LGMML) -> Importance:
    r"""How much of the distances that the score is made of comes from each feature, without looking at any data.

    .. math:: I_j \propto \sum_r \Phi[r] \, M_r[j, j] / \operatorname{tr} M_r

    over the columns j of a feature. Two documents that differ by one unit in a column, and in nothing else, are
    M[j, j] apart in squared distance: the share is exact for columns of the same spread that vary independently, which
    standardising makes true of the spread. Correlated features share what they say in ways only data can tell: see
    `pair_importance` and `permutation_importance`. Weights Φ are those of a new query; where they depend on the list,
    the mean over the training queries. Trees that the model adds to are not looked at.

    >>> from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
    >>> from lgmml_torch.models.phi import Phi
    >>> from lgmml_torch.models.preprocess.steps import Standardize
    >>> view = Standardize().fit(torch.tensor([[1.0, 2.0], [3.0, 1.0]]), torch.tensor([0, 2]))
    >>> factor = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]])
    >>> bank = LocalMetrics([MetricBlock(torch.zeros(1, 2), factor)], num_features=2)
    >>> structural_importance(LGMML(view, bank, Phi(1, 1))).features
    tensor([0.9000, 0.1000], dtype=torch.float64)
    """
    policy = model.phi.policy
    phi: Tensor = model.phi.table.weight
    if not RULES[policy].looks:
        phi = model.phi.for_new(None, 1, policy)
    phi = phi.detach().double().cpu().mean(0)
    columns = model.metrics.shares(phi)
    return Importance(columns @ model.preprocess.origins(), phi / phi.sum().clamp_min(1e-300))


def sample_lists(data: RankingData, count: int, *, seed: int = 0) -> RankingData:
    """At most ``count`` lists, drawn with a seed, in their order; all of them where there are not more."""
    if data.num_queries <= count:
        return data
    drawn = torch.randperm(data.num_queries, generator=torch.Generator().manual_seed(seed))[:count]
    return data.select(drawn.sort().values)


def pair_importance(
    model: LGMML, data: RankingData, *, lists: int = 64, pairs: int = 8, seed: int = 0, policy: str | None = None
) -> Importance:
    """How much of the score differences between documents of a list comes from each feature and each metric.

    For two documents, `explain` splits the difference of their scores exactly over features and over metrics. The
    importance is the mean size of a feature's part over drawn pairs, divided by the sum over all features: features
    that always pull together with others are not counted less for it. Exact for the pairs drawn; columns that mix
    features, such as principal components, are shared out by `Preprocess.origins`. The features of a model with
    categories are the columns of its encoder, ``model.feature_names``.

    Args:
        model: what ranks.
        data: raw features, whole lists; labels are not looked at.
        lists: largest number of lists to score.
        pairs: drawn from each.
        seed: of the draws.
        policy: as in `LGMML.score`.

    Raises:
        LGMMLError: no list of two documents or more, ``lists`` or ``pairs`` below 1.
    """
    check_positive("lists", lists)
    check_positive("pairs", pairs)
    data = model.encoded(data)
    useful = data.select((data.sizes > 1).nonzero()[:, 0])
    if not useful.num_queries:
        raise LGMMLError("`data` must have a list of at least two documents, got none")
    useful = sample_lists(useful, lists, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    origins = model.preprocess.origins()
    features, metrics, base = origins.new_zeros(model.num_features), origins.new_zeros(model.metrics.num_metrics), 0.0
    for query, size in enumerate(useful.sizes.tolist()):
        first = torch.randint(size, (pairs,), generator=generator)
        other = (first + torch.randint(1, size, (pairs,), generator=generator)) % size
        parts = explain_pairs(model, useful.select([query]), torch.stack([first, other], dim=1), policy=policy)
        features += (parts.features @ origins).abs().sum(0)
        metrics += parts.metrics.abs().sum(0)
        base += float(parts.base.abs().sum())
    total, by_metric = float(features.sum()) + base, float(metrics.sum()) + base
    return Importance(features / max(total, 1e-300), metrics / max(by_metric, 1e-300), base / max(total, 1e-300))


@dataclass(frozen=True, eq=False)
class PermutationImportance:
    """What the ranking loses, per query, when the values of a feature are shuffled.

    Attributes:
        features: the features that were shuffled, from 0.
        drops: ``(F, Q)`` measure as it is minus measure with the feature shuffled, mean over the repeats; NaN where a
            query is skipped.
        intervals: of the mean drop of each feature over the queries.
        baseline: the measure as it is.
        measure: its name.
        definition: its rules in one line.
        within: ``"lists"`` or ``"all"``, see `permutation_importance`.
        n_repeats: shuffles of each feature.
        seed: of the shuffles.
    """

    features: tuple[int, ...]
    drops: Tensor
    intervals: tuple[Interval, ...]
    baseline: Interval
    measure: str
    definition: str
    within: str
    n_repeats: int
    seed: int


def permutation_importance(
    model: _Scorer,
    data: RankingData,
    *,
    features: Sequence[int] | None = None,
    within: str = "lists",
    n_repeats: int = 5,
    measure: str = "ndcg@10",
    preset: str = "default",
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 2_000,
) -> PermutationImportance:
    """Shuffle a raw feature, rank again, and see what is lost; paired per query, with a bootstrap interval.

    Shuffling within lists leaves each list its own values and takes away only who has which: what the feature says of
    documents. Shuffling over all rows also takes away what it says of the query. Of features that say the same, each
    may be missed little when it is shuffled alone.

    Args:
        model: an `LGMML`, or anything with ``score(data)``.
        data: raw features and labels, whole lists; queries that were not trained on.
        features: to be shuffled, one after the other, from 0; all of them when None.
        within: ``"lists"``, or ``"all"`` rows.
        n_repeats: shuffles of each feature, whose drops are averaged.
        measure: such as ``"ndcg@10"``.
        preset: definitions, see `lgmml_torch.functional.presets`.
        seed: of shuffles and bootstrap; a feature's shuffles depend on it and the feature's number only.
        confidence: of the intervals.
        resamples: of the bootstrap.

    Raises:
        LGMMLError: a feature that does not exist, an unknown ``within`` or measure, no query that counts.
    """
    check_choice("within", within, _WITHIN)
    check_positive("n_repeats", n_repeats)
    if features is None:
        features = range(data.num_features)
    chosen = tuple(features)
    for feature in chosen:
        _check_feature(data, feature)

    def judge(lists: RankingData) -> Tensor:  # (Q,)
        return rank_data(model.score(lists), lists, metrics=[measure], preset=preset)[measure]

    before = judge(data)
    drops = before.new_zeros(len(chosen), data.num_queries)
    for place, feature in enumerate(chosen):
        generator = torch.Generator().manual_seed(seed + 1_000_003 * feature)
        for _ in range(n_repeats):
            shuffled = _shuffled(data, feature, within, generator)
            after = before
            if shuffled is not None:
                after = judge(shuffled)
            drops[place] += (before - after) / n_repeats
    baseline, *intervals = _intervals([before, *drops], seed, confidence, resamples)
    rules = describe(measure, preset)
    return PermutationImportance(chosen, drops, tuple(intervals), baseline, measure, rules, within, n_repeats, seed)


def _intervals(rows: Iterable[Tensor], seed: int, confidence: float, resamples: int) -> list[Interval]:
    """The bootstrap interval of each row of values per query, all with the same resamples."""
    found = []
    for row in rows:
        generator = torch.Generator().manual_seed(seed)
        found.append(bootstrap_interval(row, generator=generator, confidence=confidence, resamples=resamples))
    return found


def _check_feature(data: RankingData, feature: int) -> None:
    if not 0 <= feature < data.num_features:
        raise LGMMLError(f"`feature` must lie in [0, {data.num_features - 1}], got {feature}")


def _shuffled(data: RankingData, feature: int, within: str, generator: torch.Generator) -> RankingData | None:
    """The data with one feature shuffled; None when that changes nothing, as for one that is constant in each list."""
    draws = torch.rand(data.num_documents, generator=generator)
    order = draws.argsort() if within == "all" else argsort_segments(draws, data.offsets)
    column = data.features[:, feature]
    if torch.equal(column[order], column):
        return None
    features = data.features.clone()
    features[:, feature] = column[order]
    return data.replace(features=features)


@dataclass(frozen=True, eq=False)
class PartialEffect:
    """How the score of a document changes when one of its features takes other values.

    Attributes:
        feature: from 0.
        values: the values it was given: quantiles of the feature, without repetition.
        intervals: for each of them, the mean change of the score, over documents, then over queries.
        spread: mean standard deviation of the scores within a list: what to measure the changes by.
    """

    feature: int
    values: tuple[float, ...]
    intervals: tuple[Interval, ...]
    spread: float


def partial_effect(
    model: _Scorer,
    data: RankingData,
    feature: int,
    *,
    points: int = 11,
    documents: int = 3,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 2_000,
) -> PartialEffect:
    """Give one document of each list the quantiles of a feature, one after the other, and see how its score changes.

    All other documents and features stay as they are, so that its place among them, which list features see, changes as
    it would. The change is against the document's own score.

    Args:
        model: an `LGMML`, or anything with ``score(data)``.
        data: raw features, whole lists; labels are not looked at.
        feature: from 0.
        points: quantiles, from the lowest to the highest value; equal ones count once.
        documents: of each list that are tried, each alone.
        seed: of their draw and of the bootstrap over queries.
        confidence: of the intervals.
        resamples: of the bootstrap.

    Raises:
        LGMMLError: a feature that does not exist, ``points`` or ``documents`` below 1, no documents.
    """
    _check_feature(data, feature)
    check_positive("points", points)
    check_positive("documents", documents)
    data = data.select((data.sizes > 0).nonzero()[:, 0])
    if not data.num_queries:
        raise LGMMLError("`data` must have documents, got none")
    column = data.features[:, feature]
    values = np.unique(np.quantile(column.cpu().numpy(), np.linspace(0, 1, points), method="nearest"))
    generator = torch.Generator().manual_seed(seed)
    own = model.score(data).double()
    changes = own.new_zeros(len(values), data.num_queries)
    for _ in range(documents):
        rows = data.offsets[:-1] + (torch.rand(data.num_queries, generator=generator) * data.sizes).long()
        for place, value in enumerate(values.tolist()):
            features = data.features.clone()
            features[rows, feature] = value
            changes[place] += (model.score(data.replace(features=features))[rows] - own[rows]) / documents
    intervals = _intervals(changes, seed, confidence, resamples)
    spread = float(segment_std(own, data.offsets).mean())
    return PartialEffect(feature, tuple(values.tolist()), tuple(intervals), spread)
