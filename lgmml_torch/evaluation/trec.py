"""How good somebody's run is by somebody's judgements: the figures of trec_eval, and any other preset's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lgmml_torch.checks import DataError, DataWarning
from lgmml_torch.data.trec import as_arrays
from lgmml_torch.evaluation.evaluate import Evaluation, summarise
from lgmml_torch.functional.ranking.measures import rank_metrics
from lgmml_torch.functional.ranking.presets import REPORTED, Preset
from lgmml_torch.segments import offsets_from_sizes


def evaluate_run(
    run: Mapping[str, Mapping[str, float]],
    qrels: Mapping[str, Mapping[str, int]],
    *,
    split: str = "run",
    metrics: Sequence[str] = REPORTED,
    preset: str | Preset = "trec_eval",
    threshold: float | None = None,
    max_grade: float | None = None,
) -> Evaluation:
    """Measure a run.

    Every judged query counts: one that the run does not rank gets 0 (trec_eval's ``-c``, and what ir_measures does).
    Documents that nobody judged are not relevant; relevant ones that were not ranked count where all relevant documents
    do: in the best possible order, in recall and in what MAP divides by. Queries that nobody judged are left out, with
    a warning. Equal scores rank by falling document id.

    Args:
        run: score by query and document, see `lgmml_torch.data.trec.read_run`.
        qrels: relevance by query and document, see `lgmml_torch.data.trec.read_qrels`.
        split: what to call it.
        metrics: names such as ``"ndcg@10"`` or ``"map"``.
        preset: metric definitions.
        threshold: label from which a document is relevant, instead of the preset's.
        max_grade: highest grade of the judgements; ERR needs it.

    Raises:
        DataError: no query of the run was judged.

    >>> evaluate_run({"7": {"a": 2.0, "b": 1.0}}, {"7": {"b": 1, "c": 1}}, metrics=["map", "recall@1"]).means
    {'map': 0.25, 'recall@1': 0.0}
    """
    unknown = [qid for qid in run if qid not in qrels]
    if len(unknown) == len(run):
        raise DataError(f"no query of {split!r} was judged; it has {', '.join(list(run)[:3]) or 'none'}")
    if unknown:
        told = f"{len(unknown)} of {len(run)} queries of {split!r} were not judged and are left out, e.g. {unknown[0]}"
        warnings.warn(told, DataWarning, stacklevel=2)
    scores, labels, ranked, sizes = as_arrays(run, qrels)
    rules: dict[str, Any] = {"metrics": metrics, "preset": preset, "threshold": threshold, "max_grade": max_grade}
    found = rank_metrics(
        torch.from_numpy(scores),
        torch.from_numpy(labels),
        offsets_from_sizes(torch.tensor(sizes)),
        retrieved=torch.from_numpy(ranked),
        **rules,
    )
    evaluation = summarise([found], tuple(qrels), int(ranked.sum()), rules, split, "", None)
    texts = evaluation.definitions.items()
    return replace(
        evaluation, definitions={n: text.replace("caller's order", "falling document id") for n, text in texts}
    )
