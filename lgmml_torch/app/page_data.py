"""Figures and texts for the page of a run, from its model and the lists it ranks.

Large sets are sampled with a seed, and the page says so: its size and the time it takes do not grow with the data. The
lists are scored once. Permutation importance and effects of features score them many times: they are made on request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lgmml_torch.evaluation.evaluate import label_by_score
from lgmml_torch.functional.calibration import Reliability, reliability
from lgmml_torch.functional.measures import rank_data
from lgmml_torch.functional.significance import Interval, bootstrap_interval
from lgmml_torch.models.explain import document_label, explain_pairs, largest_parts
from lgmml_torch.models.importance import (
    Importance,
    PartialEffect,
    PermutationImportance,
    pair_importance,
    partial_effect,
    permutation_importance,
    sample_lists,
)
from lgmml_torch.models.preprocess.base import feature_label
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import argsort_segments

LISTS, DOCUMENTS = 1_000, 60_000  # in the sample, at most
_ROWS = 6  # first documents of a query that are shown
_PAIR_DOCUMENTS, _EFFECT_DOCUMENTS = 10_000, 3_000  # in the samples for importance and for effects, at most
_SHUFFLED, _EFFECTS, _METRICS = 12, 6, 10  # features shuffled, features with an effect chart, metrics shown
_QUERIES, _BELOW, _PARTS = 3, 3, 3  # best and worst queries, relevant documents below the first ones, features of each

_Parts = tuple[tuple[str, float], ...]  # names of features, and what each adds to a score difference


@dataclass(frozen=True)
class _Document:
    """A row in the list of a query; ``parts`` are what features add over the document in the middle of the ranking."""

    rank: int
    label: float
    score: float
    name: str
    parts: _Parts


@dataclass(frozen=True)
class Query:
    """A list as the model ranks it; ``why`` explains which document of a lower label is ranked too high."""

    qid: str
    value: float
    size: int
    rows: tuple[_Document, ...]
    why: str

    def shown(self, score: float) -> str:
        """A score with as many digits as tell the documents apart."""
        scores = [row.score for row in self.rows]
        gap, digits = max(scores) - min(scores), 3
        if gap > 0:
            digits = min(max(2 - math.floor(math.log10(gap)), 0), 8)
        return f"{score:.{digits}f}"


class PageData:
    """What the page shows of a model and of the lists it ranks: all of them, or a sample.

    ``report`` is what ``report.json`` of the run holds; ``importance`` shuffles and moves features, too.
    """

    mean: Interval | None = None  # of the measure; None where no query counts
    pairs: Importance | None = None  # shares in score differences; None where no list has two documents
    metrics: Sequence[tuple[int, float, str]] = ()  # with the largest shares: number from 0, share, leading columns
    shuffled: PermutationImportance | None = None  # where it was asked for, and queries count
    effects: Sequence[PartialEffect] = ()  # of some features, where it was asked for
    effect_queries = 0  # lists behind the effects

    def __init__(
        self, report: Mapping[str, Any], model: LGMML, data: RankingData, split: str, *, importance: bool = False
    ) -> None:
        rules, seed = report["config"]["evaluation"], report["config"]["seed"]
        self.split, self.measure = split, _measure_of(rules["metrics"])  # part of the data; measured per query
        lists = model.encoded(_sample(data, DOCUMENTS, seed))
        few = _sample(lists, _PAIR_DOCUMENTS, seed)
        scores = model.score(lists)
        values = rank_data(scores, lists, metrics=[self.measure], preset=rules["preset"])[self.measure].cpu()
        self.values = tuple(values[~values.isnan()].tolist())  # of the queries that count
        self.names = tuple(feature_label(model.feature_names, feature) for feature in range(model.num_features))
        if self.values:
            self.mean = bootstrap_interval(values, generator=torch.Generator().manual_seed(seed))
        if bool((few.sizes > 1).any()):
            self.pairs = pair_importance(model, few, seed=seed)
            self.metrics = _leading_metrics(model, self.pairs)
        if importance and self.pairs is not None:
            self._measure_features(model, few, self.pairs, rules["preset"], seed)
        drawn = f"All {data.num_queries:,} queries of {split}, "
        if lists.num_queries < data.num_queries:
            drawn = f"{lists.num_queries:,} of the {data.num_queries:,} queries of {split}, drawn with seed {seed}; "
        self.sample = f"{drawn}{lists.num_documents:,} documents."  # what was ranked
        best, worst = _extremes(values, lists)
        described = []
        for query in (*best, *worst):
            described.append(_describe_query(model, lists, scores, query, float(values[query]), self.names))
        self.best, self.worst = described[: len(best)], described[len(best) :]
        self.top = float(lists.labels.max())  # the highest label of all
        self.calibration = label_by_score(scores, lists, seed=seed)
        self.reliability = _reliability(model, scores, lists.labels)  # None without chances to be relevant

    def _measure_features(self, model: LGMML, data: RankingData, pairs: Importance, preset: str, seed: int) -> None:
        """Shuffle, and move, the features with the largest shares in score differences."""
        features = [feature for feature, _ in pairs.leading(_SHUFFLED)]
        values = rank_data(model.score(data), data, metrics=[self.measure], preset=preset)[self.measure]
        if features and not bool(values.isnan().all()):
            self.shuffled = permutation_importance(
                model, data, features=features, n_repeats=2, measure=self.measure, preset=preset, seed=seed
            )
        few = _sample(data, _EFFECT_DOCUMENTS, seed)
        effects = []
        for feature in features[:_EFFECTS]:
            effects.append(partial_effect(model, few, feature, points=9, documents=1, seed=seed))
        self.effects, self.effect_queries = effects, few.num_queries


def _reliability(model: LGMML, scores: Tensor, labels: Tensor) -> Reliability | None:
    if model.grade_map is None or not model.grade_map.grades[0] < 1 <= model.grade_map.grades[-1]:
        return None
    return reliability(model.grade_map.at_least(scores), labels >= 1)


def _measure_of(names: Sequence[str]) -> str:
    """NDCG@10, or else the first measure that is built in: functions are known while training only."""
    built_in = [name for name in names if "." not in name]
    if not built_in or "ndcg@10" in built_in:
        return "ndcg@10"
    return built_in[0]


def _sample(data: RankingData, documents: int, seed: int) -> RankingData:
    """At most `LISTS` lists, with about ``documents`` documents at most."""
    mean = max(data.num_documents / max(data.num_queries, 1), 1.0)
    return sample_lists(data, max(1, min(LISTS, int(documents / mean))), seed=seed)


def _extremes(
    values: Tensor,  # (Q,)
    data: RankingData,
) -> tuple[list[int], list[int]]:
    """The best and the worst of the queries that count; of equal ones the longest lists, where ranking is hardest."""
    known = (~values.isnan()).nonzero()[:, 0].tolist()
    count = min(_QUERIES, (len(known) + 1) // 2)
    sizes = data.sizes.tolist()
    best = sorted(known, key=lambda query: (-float(values[query]), -sizes[query]))[:count]
    worst = sorted(known, key=lambda query: (float(values[query]), -sizes[query]))
    return best, [query for query in worst if query not in best][:count]


def _describe_query(
    model: LGMML, data: RankingData, scores: Tensor, query: int, value: float, names: tuple[str, ...]
) -> Query:
    """The first documents of a list, the relevant ones that stand below them, and what sets them apart."""
    part = data.select([query])
    own = scores[int(data.offsets[query]) : int(data.offsets[query + 1])]
    order = argsort_segments(own, part.offsets, descending=True, tie_order=part.order).tolist()
    labels = part.labels[order].tolist()  # by rank
    below = [rank for rank in range(_ROWS, len(order)) if labels[rank] > 0]
    below.sort(key=lambda rank: -labels[rank])
    ranks = [*range(min(_ROWS, len(order))), *sorted(below[:_BELOW])]
    middle = order[(len(order) - 1) // 2]
    pairs = [(order[rank], middle) for rank in ranks]
    wrong = _inversion(labels)
    if wrong is not None:
        pairs.append((order[wrong[0]], order[wrong[1]]))
    by_feature = explain_pairs(model, part, torch.tensor(pairs)).features @ model.preprocess.origins()
    parts = list[_Parts]()
    for row in by_feature:
        parts.append(tuple((names[feature], float(row[feature])) for feature in largest_parts(row, _PARTS)))
    rows = []
    for rank, own_parts in zip(ranks, parts, strict=False):
        name = document_label(part, order[rank])
        rows.append(_Document(rank + 1, labels[rank], float(own[order[rank]]), name, own_parts))
    why = ""
    if wrong is not None:
        why = _too_high(part, order, wrong, own, parts[-1])
    return Query(str(part.qids[0]), value, part.num_documents, tuple(rows), why)


def _inversion(labels: list[float]) -> tuple[int, int] | None:
    """Of labels in ranked order: the first rank below which a better document stands, and the first best one below.

    >>> _inversion([2, 0, 1, 1]), _inversion([0, 2, 1, 2]), _inversion([2, 1, 0])
    ((1, 2), (0, 1), None)
    """
    for rank, label in enumerate(labels):
        most = max(labels[rank + 1 :], default=label)
        if most > label:
            return rank, labels.index(most, rank + 1)
    return None


def _too_high(part: RankingData, order: list[int], wrong: tuple[int, int], scores: Tensor, parts: _Parts) -> str:
    """Why one document stands above a better one."""
    upper, lower = order[wrong[0]], order[wrong[1]]
    first = f"{document_label(part, upper)} (label {float(part.labels[upper]):g}, rank {wrong[0] + 1})"
    second = f"{document_label(part, lower)} (label {float(part.labels[lower]):g}, rank {wrong[1] + 1})"
    text = f"{first} stands above {second} by {float(scores[upper] - scores[lower]):.3g}"
    if parts:
        text += ", mostly by " + ", ".join(f"{name} {value:+.3g}" for name, value in parts)
    return f"{text}."


def _leading_metrics(model: LGMML, pairs: Importance) -> tuple[tuple[int, float, str], ...]:
    """The metrics with the largest shares, and the columns that count most in each."""
    sources = model.preprocess.sources()
    leading = []
    for metric in largest_parts(pairs.metrics, _METRICS):
        (block,) = model.metrics.select(torch.tensor([metric])).iter_blocks()
        diagonal = block.zoomed_factors[0].detach().square().sum(-1).cpu()
        columns = diagonal.argsort(descending=True, stable=True)[:3]
        if not block.is_full:
            columns = block.support[0].cpu()[columns]
        labels = dict.fromkeys(sources[column].called(model.feature_names) for column in columns.tolist())
        leading.append((metric, float(pairs.metrics[metric]), "; ".join(labels)))
    return tuple(leading)
