"""How well models rank: an evaluation with its definitions and counts, two rankings query by query, labels by score."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, DataWarning, check_positive, check_shape
from lgmml_torch.data.trec import as_arrays
from lgmml_torch.evaluation.tables import evaluation_markdown
from lgmml_torch.functional.features import list_rank_percentiles
from lgmml_torch.functional.measures import Function, Measure, measures_of, rank_data, rank_metrics
from lgmml_torch.functional.presets import REPORTED, Preset, describe
from lgmml_torch.functional.score import warn_if_degenerate
from lgmml_torch.functional.significance import Comparison, Interval, bootstrap_interval, compare
from lgmml_torch.models.explain import largest_parts
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import plain_qid
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import offsets_from_sizes

OWN_PHI = "own Φ"  # the weights of training queries that have rows of their own


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Means over queries, and what stands behind them.

    Attributes:
        split: what was ranked, e.g. ``"test"``.
        means: the mean of each metric over the queries it counts; NaN when it counts none.
        counted: how many queries that are.
        skipped: how many were left out, see `lgmml_torch.functional.presets`.
        definitions: each metric's rules in one line.
        per_query: ``(Q,)`` the values behind the means, NaN where a query is skipped.
        qids: the queries, in the order of ``per_query``.
        policy: where the weights Φ came from.
        documents: how many documents were ranked.
        seed: of the model, where it is known.
    """

    split: str
    means: dict[str, float]
    counted: dict[str, int]
    skipped: dict[str, int]
    definitions: dict[str, str]
    per_query: dict[str, Tensor] = field(repr=False)
    qids: tuple[Hashable, ...] = field(repr=False)
    policy: str
    documents: int
    seed: int | None = None

    def markdown(self) -> str:
        """The table and the definitions as Markdown."""
        return evaluation_markdown([self.to_dict()])

    def interval(self, name: str) -> Interval | None:
        """95% bootstrap interval over queries of the mean of one metric; None where it counts no query."""
        if not self.counted[name]:
            return None
        generator = torch.Generator().manual_seed(0)
        return bootstrap_interval(self.per_query[name], generator=generator, resamples=2_000)

    def to_dict(self, *, per_query: bool = False, intervals: bool = True) -> dict[str, Any]:
        """Primitives only; NaN becomes None, because JSON has no such number."""
        metrics = {}
        for name, mean in self.means.items():
            ends = None
            if intervals and (interval := self.interval(name)) is not None:
                ends = [interval.low, interval.high]
            metrics[name] = {
                "mean": _plain_number(mean),
                "interval": ends,
                "counted": self.counted[name],
                "skipped": self.skipped[name],
                "definition": self.definitions[name],
            }
        content: dict[str, Any] = {
            "split": self.split,
            "policy": self.policy,
            "seed": self.seed,
            "queries": len(self.qids),
            "documents": self.documents,
            "metrics": metrics,
        }
        if per_query:
            content["qids"] = list(map(plain_qid, self.qids))
            content["per_query"] = {}
            for name, values in self.per_query.items():
                content["per_query"][name] = list(map(_plain_number, values.tolist()))
        return content

    def to_json(self, *, per_query: bool = True) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(per_query=per_query), indent=2, ensure_ascii=False)


def evaluate(
    model: LGMML,
    data: RankingData | Iterable[RankingData],
    *,
    split: str = "data",
    metrics: Sequence[str | Function | Measure] = REPORTED,
    preset: str | Preset = "default",
    known_queries: bool = False,
    policy: str | None = None,
    seed: int | None = None,
    threshold: float | None = None,
    max_grade: float | None = None,
    documents_at_once: int = 32_768,
) -> Evaluation:
    """Rank every list and measure the result.

    Args:
        model: what ranks.
        data: raw features; several parts, each with whole lists, are evaluated one after the other, so that they need
            not be in memory together.
        split: what to call the data.
        metrics: names such as ``"ndcg@10"`` or ``"map"``, or functions ``(scores, labels, offsets) -> (Q,)`` with NaN
            for a query that does not count, see `lgmml_torch.functional.measures`.
        preset: metric definitions, see `lgmml_torch.functional.presets`.
        known_queries: use the trained Φ of queries whose id was in the training data.
        policy: what other queries get, instead of the model's own policy.
        seed: only recorded.
        threshold: label from which a document is relevant, instead of the preset's.
        max_grade: highest grade of the data set; ERR needs it.
        documents_at_once: see `LGMML.score`.

    Raises:
        DataError: when there is nothing to evaluate.
        LGMMLError: an unknown metric, preset or policy; features the model was not trained on.
    """
    rules: dict[str, Any] = {"metrics": metrics, "preset": preset, "threshold": threshold, "max_grade": max_grade}
    found: list[dict[str, Tensor]] = []
    qids: list[tuple[Hashable, ...]] = []
    documents = 0
    if isinstance(data, RankingData):
        data = [data]
    for part in data:
        scores = model.score(part, known_queries=known_queries, policy=policy, documents_at_once=documents_at_once)
        warn_if_degenerate(scores, part.offsets.cpu())
        found.append(_of_all(rank_data(scores, part, **rules), part))
        qids.append(part.all_lists.ids(part.qids))
        documents += part.all_lists.num_documents
    weights = policy or model.phi.policy
    if known_queries:
        weights = OWN_PHI
    return _summarise(found, tuple(chain(*qids)), documents, rules, split, weights, seed)


def evaluate_scores(
    scores: Tensor,  # (N,) in the order of the rows of `data`
    data: RankingData,
    *,
    split: str = "data",
    metrics: Sequence[str | Function | Measure] = REPORTED,
    policy: str = "",
    seed: int | None = None,
    **rules: Any,
) -> Evaluation:
    """Measure scores that are there already; ``rules`` are the preset, threshold and highest grade of `evaluate`.

    >>> data = RankingData.from_arrays([[1.0], [2.0]], [0, 1], qid=[7, 7])
    >>> evaluate_scores(torch.tensor([2.0, 1.0]), data, metrics=["ndcg@1", "map"]).means
    {'ndcg@1': 0.0, 'map': 0.5}
    """
    check_shape("scores", scores, (data.num_documents,))
    rules["metrics"] = metrics
    found, documents = _of_all(rank_data(scores, data, **rules), data), data.all_lists.num_documents
    return _summarise([found], data.all_lists.ids(data.qids), documents, rules, split, policy, seed)


def _of_all(values: dict[str, Tensor], data: RankingData) -> dict[str, Tensor]:
    """The values of all queries, where processes share them."""
    found = {}
    for name, column in values.items():
        found[name] = data.all_lists.per_query(column.cpu())
    return found


def _summarise(
    parts: list[dict[str, Tensor]],
    qids: tuple[Hashable, ...],
    documents: int,
    rules: dict[str, Any],
    split: str,
    policy: str,
    seed: int | None,
) -> Evaluation:
    """An evaluation from the values per query of each part of the data."""
    if not qids:
        raise DataError(f"there are no queries to evaluate in {split!r}")
    values, means = dict[str, Tensor](), dict[str, float]()
    counted, skipped = dict[str, int](), dict[str, int]()
    for name in parts[0]:
        values[name] = torch.cat([part[name] for part in parts]).cpu()
        means[name] = float(values[name].nanmean())
        counted[name] = int((~values[name].isnan()).sum())
        skipped[name] = len(qids) - counted[name]
    preset, definitions = rules.get("preset", "default"), dict[str, str]()
    for measure in measures_of(rules["metrics"]):
        definitions[measure.name] = measure.definition(preset, threshold=rules.get("threshold"))
    return Evaluation(split, means, counted, skipped, definitions, values, qids, policy, documents, seed)


def evaluate_run(
    run: Mapping[str, Mapping[str, float]],
    qrels: Mapping[str, Mapping[str, int]],
    *,
    split: str = "run",
    metrics: Sequence[str] = REPORTED,
    preset: str | Preset = "trec_eval",
    **rules: Any,
) -> Evaluation:
    """Measure a TREC run: the figures of trec_eval, or of any other preset.

    Every judged query counts: one that the run does not rank gets 0 (trec_eval's ``-c``, and what ir_measures does).
    Documents without a judgement are not relevant. Relevant ones that were not ranked count where all relevant
    documents do: in the best possible order, in recall and in what MAP divides by. Queries without judgements are left
    out, with a warning. Equal scores rank by falling document id.

    Run and judgements are as `lgmml_torch.data.trec.read_run` and `read_qrels` give them; the settings are those of
    `evaluate`.

    Raises:
        DataError: no query of the run was judged.

    >>> evaluate_run({"7": {"a": 2.0, "b": 1.0}}, {"7": {"b": 1, "c": 1}}, metrics=["map", "recall@1"]).means
    {'map': 0.25, 'recall@1': 0.0}
    """
    unknown = [qid for qid in run if qid not in qrels]
    if len(unknown) == len(run):
        raise DataError(f"no query of {split!r} was judged; it has {', '.join(list(run)[:3]) or 'none'}")
    if unknown:
        count = f"{len(unknown)} of {len(run)} queries of {split!r}"
        warnings.warn(f"{count} were not judged and are left out, e.g. {unknown[0]}", DataWarning, stacklevel=2)
    scores, labels, ranked, sizes = as_arrays(run, qrels)
    rules |= {"metrics": metrics, "preset": preset}
    found = rank_metrics(
        torch.from_numpy(scores),
        torch.from_numpy(labels),
        offsets_from_sizes(torch.tensor(sizes)),
        retrieved=torch.from_numpy(ranked),
        **rules,
    )
    evaluation = _summarise([found], tuple(qrels), int(ranked.sum()), rules, split, "", None)
    definitions = {}
    for name, text in evaluation.definitions.items():
        definitions[name] = text.replace("caller's order", "falling document id")
    return replace(evaluation, definitions=definitions)


@dataclass(frozen=True, eq=False)
class Paired:
    """What the first ranking is better by, per query and on average."""

    first: str  # what the first ranking is called
    second: str
    split: str  # what was ranked
    measure: str  # such as "ndcg@10"
    definition: str  # its rules in one line
    comparison: Comparison  # means, their difference with its interval, wins, ties and losses of the first
    values: Tensor = field(repr=False)  # (2, Q) the measure of both per query, NaN where skipped
    qids: tuple[Hashable, ...] = field(repr=False)
    seed: int = 0  # of the bootstrap

    @classmethod
    def of(
        cls,
        first: tuple[str, Tensor],  # a name, and (N,) scores in the order of the rows of `data`
        second: tuple[str, Tensor],
        data: RankingData,
        *,
        split: str = "data",
        measure: str = "ndcg@10",
        preset: str = "default",
        seed: int = 0,
    ) -> Self:
        """Measure both per query, and their mean difference with a bootstrap interval over queries.

        Raises:
            LGMMLError: an unknown measure, scores of another number of documents, no query that counts.

        >>> data = RankingData.from_arrays([[1.0], [2.0], [3.0], [4.0]], [0, 1, 1, 0], qid=[7, 7, 8, 8])
        >>> paired = Paired.of(("up", data.features[:, 0]), ("down", -data.features[:, 0]), data)
        >>> float(paired.gaps.sum().abs()) < 1e-6, paired.comparison.wins, paired.comparison.losses
        (True, 1, 1)
        """
        rows = []
        for _, scores in (first, second):
            rows.append(rank_data(scores, data, metrics=[measure], preset=preset)[measure])
        found = compare(rows[0], rows[1], generator=torch.Generator().manual_seed(seed))
        definition = describe(measure, preset)
        return cls(first[0], second[0], split, measure, definition, found, torch.stack(rows).cpu(), data.qids, seed)

    @property
    def gaps(self) -> Tensor:
        """``(Q,)`` first minus second, NaN where either skips the query."""
        return self.values[0] - self.values[1]

    def most_different(self, count: int = 5) -> list[int]:
        """The queries with the largest differences of either sign, as indices; equal ones are left out."""
        return largest_parts(self.gaps.nan_to_num(0.0), count)

    def rows(self, count: int) -> list[list[str]]:
        """Of the `most_different` queries: the id, both values and the difference, as texts."""
        rows = []
        for query in self.most_different(count):
            first, second = self.values[:, query].tolist()
            rows.append([str(self.qids[query]), f"{first:.4f}", f"{second:.4f}", f"{first - second:+.4f}"])
        return rows

    def sentence(self) -> str:
        """The comparison in words."""
        gap, found = self.comparison.difference, self.comparison
        verdict = "the interval holds 0"
        if found.significant:
            verdict = "the interval leaves out 0"
        return (
            f"{self.measure} {found.mean_a:.4f} against {found.mean_b:.4f}: {gap.mean:+.4f}, {gap.confidence:.0%} "
            f"interval [{gap.low:+.4f}, {gap.high:+.4f}] over {gap.counted} queries ({verdict}); {found.wins} won, "
            f"{found.ties} tied, {found.losses} lost, {gap.skipped} skipped"
        )

    def to_dict(self, *, per_query: bool = False) -> dict[str, Any]:
        """Primitives only."""
        found, gap = self.comparison, self.comparison.difference
        content: dict[str, Any] = {
            "first": self.first, "second": self.second, "split": self.split, "measure": self.measure,
            "definition": self.definition, "means": [found.mean_a, found.mean_b],
            "difference": {"mean": gap.mean, "low": gap.low, "high": gap.high, "confidence": gap.confidence},
            "counted": gap.counted, "skipped": gap.skipped, "wins": found.wins, "ties": found.ties,
            "losses": found.losses, "seed": self.seed,
        }  # fmt: skip
        if per_query:
            content["qids"] = list(map(plain_qid, self.qids))
            content["per_query"] = [list(map(_plain_number, row)) for row in self.values.tolist()]
        return content


def label_by_score(
    scores: Tensor,  # (N,) in the order of the rows of `data`
    data: RankingData,
    *,
    bins: int = 10,
    seed: int = 0,
) -> list[Interval | None]:
    """Cut each list into parts by the rank of its scores, and average the labels of each part.

    Scores of a ranker have no unit and mean nothing across lists, so their ranks within the list are looked at; equal
    scores share theirs. A good ranking rises from left to right.

    Returns:
        The mean label of each part with its bootstrap interval over queries, lowest scores first; a query counts once,
        and where it has no document in a part it is skipped. None where no query has one.

    Raises:
        LGMMLError: ``bins`` below 1, scores of another number of documents.
        DataError: no documents.

    >>> data = RankingData.from_arrays([[1.0], [2.0], [3.0], [4.0]], [0, 0, 1, 3], qid=[7] * 4)
    >>> [interval.mean for interval in label_by_score(data.features[:, 0], data, bins=2)]
    [0.0, 2.0]
    """
    check_positive("bins", bins)
    check_shape("scores", scores, (data.num_documents,))
    if not data.num_documents:
        raise DataError("there are no documents whose labels could be averaged")
    places = list_rank_percentiles(scores[:, None].double(), data.offsets)[:, 0] + 0.5
    cells = data.query_index * bins + (places * bins).long().clamp(0, bins - 1)
    shape = (data.num_queries, bins)
    sums = torch.zeros(shape[0] * bins, dtype=torch.float64).index_add(0, cells, data.labels.double()).view(shape)
    counts = torch.bincount(cells, minlength=shape[0] * bins).view(shape)
    means = sums / counts  # NaN where a query has no document there
    found: list[Interval | None] = []
    for column in means.unbind(1):
        interval = None
        if not bool(column.isnan().all()):
            generator = torch.Generator().manual_seed(seed)
            interval = bootstrap_interval(column, generator=generator, resamples=2_000)
        found.append(interval)
    return found


def _plain_number(value: float) -> float | None:
    """The value, or None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value
