"""What the page of a run shows of its model and of the lists it ranks: figures and words, no HTML yet.

Large sets are sampled with a seed, and the page says so: its size and the time it takes do not grow with the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.evaluation.calibration import Calibration, label_by_score
from lgmml_torch.functional.ranking.measures import rank_data
from lgmml_torch.functional.significance import Interval, bootstrap_interval
from lgmml_torch.models.explain import document_label, explain_pairs
from lgmml_torch.models.importance import (
    Importance,
    PartialEffect,
    PermutationImportance,
    feature_label,
    pair_importance,
    partial_effect,
    permutation_importance,
    sample_lists,
)
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import argsort_segments

LISTS, DOCUMENTS = 1_000, 60_000  # looked at, at most
SHUFFLED_DOCUMENTS, MOVED_DOCUMENTS = 10_000, 3_000  # of lists that are ranked again and again with features changed
SHUFFLED, EFFECTS, METRICS = 12, 6, 10  # features shuffled, features moved, metrics shown
QUERIES, ROWS, BELOW, PARTS = 3, 6, 3, 3  # best and worst queries, their first documents, relevant ones below, features


@dataclass(frozen=True)
class Document:
    """A row in the list of a query; ``parts`` are what features add over the document in the middle of the ranking."""

    rank: int
    label: float
    score: float
    name: str
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Query:
    """A list as the model ranks it, and in words which document of a lower label stands too high."""

    qid: str
    value: float
    size: int
    rows: tuple[Document, ...]
    why: str


@dataclass(frozen=True, eq=False)
class Look:
    """What was looked at, and what there was to see.

    Attributes:
        split: which part of the data.
        queries: of it.
        looked: how many of them were drawn.
        documents: of these.
        seed: of the draw.
        measure: of the ranking, per query.
        values: of the queries that count.
        mean: of them; None where no query counts.
        best: the queries that are ranked best.
        worst: and worst.
        top: the highest label of all.
        names: a name for each raw feature.
        pairs: shares of features and metrics in score differences; None where no list has two documents.
        metrics: for the metrics with the largest shares: number from 0, share, what they look at.
        shuffled: what shuffling costs; None where no query counts.
        effects: how scores change with some features.
        moved_queries: lists that were ranked for it.
        calibration: mean label by score.
    """

    split: str
    queries: int
    looked: int
    documents: int
    seed: int
    measure: str
    values: tuple[float, ...]
    mean: Interval | None
    best: tuple[Query, ...]
    worst: tuple[Query, ...]
    top: float
    names: tuple[str, ...]
    pairs: Importance | None
    metrics: tuple[tuple[int, float, str], ...]
    shuffled: PermutationImportance | None
    effects: tuple[PartialEffect, ...]
    moved_queries: int
    calibration: Calibration


def look_at(
    model: LGMML,
    data: RankingData,
    *,
    split: str,
    measure: str = "ndcg@10",
    preset: str = "default",
    seed: int = 0,
) -> Look:
    """Rank the lists, or a sample of them, and take down what is worth showing."""
    lists = bounded(data, LISTS, DOCUMENTS, seed)
    few = bounded(lists, LISTS, SHUFFLED_DOCUMENTS, seed)
    fewer = bounded(few, LISTS, MOVED_DOCUMENTS, seed)
    scores = model.score(lists)
    values = rank_data(scores, lists, metrics=[measure], preset=preset)[measure].cpu()
    known = values[~values.isnan()]
    names = tuple(feature_label(model.feature_names, feature) for feature in range(model.num_features))
    pairs = pair_importance(model, few, seed=seed) if bool((few.sizes > 1).any()) else None
    chosen = [] if pairs is None else [feature for feature, _ in pairs.leading(SHUFFLED)]
    best, worst = (
        tuple(describe_query(model, lists, scores, query, float(values[query]), names) for query in queries)
        for queries in extremes(values, lists)
    )
    return Look(
        split=split,
        queries=data.num_queries,
        looked=lists.num_queries,
        documents=lists.num_documents,
        seed=seed,
        measure=measure,
        values=tuple(known.tolist()),
        mean=bootstrap_interval(values, generator=torch.Generator().manual_seed(seed)) if len(known) else None,
        best=best,
        worst=worst,
        top=float(lists.labels.max()),
        names=names,
        pairs=pairs,
        metrics=() if pairs is None else leading_metrics(model, pairs, names),
        shuffled=shuffle(model, few, chosen, measure, preset, seed),
        effects=tuple(partial_effect(model, fewer, f, points=9, documents=1, seed=seed) for f in chosen[:EFFECTS]),
        moved_queries=fewer.num_queries,
        calibration=label_by_score(scores, lists, seed=seed),
    )


def shuffle(
    model: LGMML, data: RankingData, features: list[int], measure: str, preset: str, seed: int
) -> PermutationImportance | None:
    """What shuffling these features costs; None where there is none, or no query whose ranking could become worse."""
    values = rank_data(model.score(data), data, metrics=[measure], preset=preset)[measure]
    if not features or bool(values.isnan().all()):
        return None
    return permutation_importance(
        model, data, features=features, n_repeats=2, measure=measure, preset=preset, seed=seed
    )


def bounded(data: RankingData, lists: int, documents: int, seed: int) -> RankingData:
    """A sample of so many lists and about so many documents at most."""
    mean = max(data.num_documents / max(data.num_queries, 1), 1.0)
    return sample_lists(data, max(1, min(lists, int(documents / mean))), seed=seed)


def extremes(
    values: Tensor,  # (Q,)
    data: RankingData,
) -> tuple[list[int], list[int]]:
    """The best and the worst of the queries that count; of equal ones the longest lists, where ranking is hardest."""
    known = [query for query in range(len(values)) if not bool(values[query].isnan())]
    count = min(QUERIES, (len(known) + 1) // 2)
    sizes = data.sizes.tolist()
    best = sorted(known, key=lambda query: (-float(values[query]), -sizes[query]))[:count]
    worst = sorted(known, key=lambda query: (float(values[query]), -sizes[query]))
    return best, [query for query in worst if query not in best][:count]


def describe_query(
    model: LGMML, data: RankingData, scores: Tensor, query: int, value: float, names: tuple[str, ...]
) -> Query:
    """The first documents of a list, the relevant ones that stand below them, and what sets them apart."""
    part = data.select([query])
    own = scores[int(data.offsets[query]) : int(data.offsets[query + 1])]
    order = argsort_segments(own, part.offsets, descending=True, tie_order=part.order).tolist()
    labels = part.labels.tolist()
    below = sorted(
        (rank for rank in range(ROWS, len(order)) if labels[order[rank]] > 0), key=lambda r: -labels[order[r]]
    )
    ranks = [*range(min(ROWS, len(order))), *sorted(below[:BELOW])]
    middle = order[(len(order) - 1) // 2]
    pairs = [(order[rank], middle) for rank in ranks]
    wrong = inversion([labels[row] for row in order])
    if wrong is not None:
        pairs.append((order[wrong[0]], order[wrong[1]]))
    found = explain_pairs(model, part, torch.tensor(pairs))
    by_feature = found.features @ model.preprocess.origins()
    parts = [leading_parts(row, names) for row in by_feature]
    rows = tuple(
        Document(rank + 1, labels[order[rank]], float(own[order[rank]]), document_label(part, order[rank]), parts[i])
        for i, rank in enumerate(ranks)
    )
    why = "" if wrong is None else too_high(part, order, wrong, float(own[pairs[-1][0]] - own[pairs[-1][1]]), parts[-1])
    return Query(str(part.qids[0]), value, part.num_documents, rows, why)


def leading_parts(row: Tensor, names: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """The features with the largest parts of a difference, with these."""
    order = row.abs().argsort(descending=True, stable=True)[:PARTS].tolist()
    return tuple((names[feature], float(row[feature])) for feature in order if row[feature] != 0)


def inversion(labels: list[float]) -> tuple[int, int] | None:
    """Of labels in ranked order: the first place where a better document comes later, and the first best one after it.

    >>> inversion([2, 0, 1, 1]), inversion([2, 1, 0])
    ((1, 2), None)
    """
    for place, label in enumerate(labels):
        most = max(labels[place + 1 :], default=label)
        if most > label:
            return place, labels.index(most, place + 1)
    return None


def too_high(
    part: RankingData, order: list[int], wrong: tuple[int, int], gap: float, parts: tuple[tuple[str, float], ...]
) -> str:
    """Why one document stands above a better one, in words."""
    first, second = (
        f"{document_label(part, order[rank])} (label {float(part.labels[order[rank]]):g}, rank {rank + 1})"
        for rank in wrong
    )
    mostly = ", ".join(f"{name} {value:+.3g}" for name, value in parts)
    return f"{first} stands above {second} by {gap:.3g}" + (f", mostly by {mostly}." if mostly else ".")


def leading_metrics(model: LGMML, pairs: Importance, names: tuple[str, ...]) -> tuple[tuple[int, float, str], ...]:
    """The metrics with the largest shares, and the columns that count most in each."""
    sources = model.preprocess.sources()
    places = [(block, row) for block in model.metrics.iter_blocks() for row in range(block.num_metrics)]
    found = []
    for metric in pairs.metrics.argsort(descending=True, stable=True)[:METRICS].tolist():
        block, row = places[metric]
        diagonal = block.zoomed_factors[row].detach().square().sum(-1).cpu()
        columns = diagonal.argsort(descending=True, stable=True)[:3].tolist()
        columns = columns if block.is_full else block.support[row].cpu()[columns].tolist()
        words = [column_label(sources[column].feature, sources[column].view, names) for column in columns]
        if pairs.metrics[metric] > 0:
            found.append((metric, float(pairs.metrics[metric]), "; ".join(dict.fromkeys(words))))
    return tuple(found)


def column_label(feature: int, view: str, names: tuple[str, ...]) -> str:
    """What a preprocessed column is called: the raw feature and the view of it."""
    return ", ".join(part for part in (names[feature] if feature >= 0 else "", view) if part)
