"""Whatever ranks, by the name of its file: our models, trees of LightGBM and XGBoost, TREC runs."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lgmml_torch.checks import CheckpointError, DataError
from lgmml_torch.data.trec import read_run
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.trees import TreeBase, file_kind
from lgmml_torch.ragged import RankingData

MODEL = "model.safetensors"  # of a run's folder


@dataclass(frozen=True, eq=False)
class Ranker:
    """Something that scores lists.

    Attributes:
        name: what it is called: the folder of a run, or its file.
        kind: ``"lgmml"``, ``"LightGBM"``, ``"XGBoost"`` or ``"run"``.
        score: gives ``(N,)`` scores in the order of the rows.
        num_features: that documents must have; None where it does not matter.
        model: ours, where it is one.
    """

    name: str
    kind: str
    score: Callable[[RankingData], Tensor]
    num_features: int | None = None
    model: LGMML | None = None


def open_ranker(path: str | Path) -> Ranker:
    """Open a model file, checkpoint, folder of a run, tree model or TREC run.

    Raises:
        CheckpointError: there is no such file, or it is none of these.
        DataError: a TREC run with a line that is not one.
    """
    file = Path(path)
    name = file.parent.name if file.name == MODEL and file.parent.name else file.name
    if file.is_dir():
        name, file = file.resolve().name, file / MODEL
    if not file.is_file():
        raise CheckpointError(f"no model file at {file}")
    if file.suffix == ".safetensors" or zipfile.is_zipfile(file):
        model = LGMML.load(file)
        return Ranker(name, "lgmml", _by_name(model), model.reading["num_features"], model)
    if file_kind(file.read_bytes()) is not None:
        trees = TreeBase.read(file)
        return Ranker(name, trees.title, _checked(trees), trees.num_features)
    if file.suffix in (".gz", ".run", ".trec", ".txt"):
        scores = read_run(file)
        return Ranker(name, "run", lambda data: run_scores(scores, data, name))
    raise CheckpointError(f"{file} is neither a model of this package, LightGBM's or XGBoost's, nor a TREC run (.run)")


def _by_name(model: LGMML) -> Callable[[RankingData], Tensor]:
    """The score of a model that finds its columns by name among those of other models."""
    own = model.reading["feature_names"]

    def score(data: RankingData) -> Tensor:
        given = data.feature_names
        if own is None or given is None or given in (own, model.feature_names) or not set(own) <= set(given):
            return model.score(data)
        columns, categories = [given.index(name) for name in own], None
        if data.categories is not None:
            categories = tuple(data.categories[column] for column in columns)
        if categories is not None and not any(categories):
            categories = None
        return model.score(data.replace(features=data.features[:, columns], feature_names=own, categories=categories))

    return score


def _checked(trees: TreeBase) -> Callable[[RankingData], Tensor]:
    def score(data: RankingData) -> Tensor:
        trees.check(data.num_features, data.feature_names)
        return trees.predict(data.features)

    return score


def run_scores(run: dict[str, dict[str, float]], data: RankingData, name: str) -> Tensor:  # (N,)
    """What a run gives the documents, which it knows by id or by row of the file, from 1; those it lacks come last.

    Raises:
        DataError: none of the documents is in the run.
    """
    queries, order = data.query_index.tolist(), data.order.tolist()
    found = torch.full((data.num_documents,), -math.inf, dtype=torch.float64)
    for row, query in enumerate(queries):
        own = (data.doc_ids[row] if data.doc_ids is not None else "") or str(order[row] + 1)
        found[row] = run.get(str(data.qids[query]), {}).get(own, -math.inf)
    if not bool(found.isfinite().any()):
        raise DataError(f"{name}: none of the documents of the data is in this run")
    return found
