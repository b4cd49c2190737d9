"""What ranks: our models, trees of LightGBM and XGBoost and TREC runs by their files, and LightGBM fitted here."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import CheckpointError, DataError, require
from lgmml_torch.data.trec import read_run, word
from lgmml_torch.evaluation.evaluate import Paired
from lgmml_torch.functional.measures import Measure, mean_measure
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.trees import TreeBase, file_kind
from lgmml_torch.ragged import RankingData

MODEL = "model.safetensors"  # of a run's folder
FITTED = {"lgmml": "lgmml.safetensors", "lightgbm": "lightgbm.txt"}  # references that a run fits, and their files
TITLES = {"lgmml": "L-GMML", "lightgbm": "LightGBM"}
# LightGBM's usual settings, not tuned; validation decides on the number of trees.
_LIGHTGBM = {"objective": "lambdarank", "metric": "None", "learning_rate": 0.05, "num_leaves": 31, "verbose": -1}
_TREES, _PATIENCE = 1_000, 50
_LARGEST_LABEL, _LONGEST_LIST = 30, 10_000  # that its objective takes


@dataclass(frozen=True, eq=False)
class Ranker:
    """Something that scores lists."""

    name: str  # the folder of a run, or its file
    kind: str  # "lgmml", "LightGBM", "XGBoost" or "run"
    score: Callable[[RankingData], Tensor]  # (N,) in the order of the rows
    num_features: int | None = None  # that documents must have; None where it does not matter
    model: LGMML | None = None  # ours, where it is one

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a model file, checkpoint, folder of a run, tree model or TREC run.

        Raises:
            CheckpointError: there is no such file, or it is none of these.
            DataError: a TREC run with a line that is not one.
        """
        file = Path(path)
        name = file.name
        if name == MODEL:
            name = file.parent.name or name
        if file.is_dir():
            name, file = file.resolve().name, file / MODEL
        if not file.is_file():
            raise CheckpointError(f"no model file at {file}")
        if file.suffix == ".safetensors" or zipfile.is_zipfile(file):
            model = LGMML.load(file)
            return cls(name, "lgmml", _by_name(model), model.reading["num_features"], model)
        if file_kind(file.read_bytes()) is not None:
            return cls.of_trees(name, TreeBase.read(file))
        if file.suffix in (".gz", ".run", ".trec", ".txt"):
            scores = read_run(file)
            return cls(name, "run", lambda data: _run_scores(scores, data, name))
        raise CheckpointError(
            f"{file} is neither a model of this package, LightGBM's or XGBoost's, nor a TREC run (.run)"
        )

    @classmethod
    def of_trees(cls, name: str, trees: TreeBase) -> Self:
        """Trees as something that scores lists."""

        def score(data: RankingData) -> Tensor:
            trees.check(data.num_features, data.feature_names)
            return trees.predict(data.features, data.offsets)

        return cls(name, trees.title, score, trees.num_features)

    @classmethod
    def of_run(cls, folder: Path, setting: str | Sequence[str] | None) -> list[Self]:
        """The references of a run that has ended; those that it fitted lie in its folder."""
        found = []
        for name in reference_names(setting):
            if name not in FITTED:
                found.append(cls.open(name))
            elif (folder / FITTED[name]).is_file():  # LightGBM may have been missing
                found.append(replace(cls.open(folder / FITTED[name]), name=TITLES[name]))
        return found

    def beside(self, model: LGMML, data: RankingData, split: str, settings: Any) -> Paired:
        """A run's own model beside this on the same lists, by NDCG@10; ``settings`` are those of the run."""
        rules = {"preset": settings["evaluation"]["preset"], "seed": settings["seed"], "split": split}
        return Paired.of(("this model", model.score(data)), (self.name, self.score(data)), data, **rules)


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


def reference_names(setting: str | Sequence[str] | None) -> list[str]:
    """What the setting `reference` names: references that a run fits, and files.

    >>> reference_names("none"), reference_names("lgmml"), reference_names(["lgmml", "old.safetensors"])
    ([], ['lgmml'], ['lgmml', 'old.safetensors'])
    """
    if setting is None or setting == "none":
        return []
    if isinstance(setting, str):
        return [setting]
    return list(map(str, setting))


def fit_lightgbm(
    splits: Mapping[str, RankingData],
    measure: Measure,
    *,
    seed: int = 0,
    threads: int | None = None,
    list_ranks: bool = False,
) -> TreeBase:
    """LightGBM's LambdaMART with its usual settings; the number of trees is chosen by validation.

    With ``list_ranks``, trees also see each feature's rank percentile within its list.

    Raises:
        DataError: lists that LightGBM does not take: categories, labels that are no grades, very long lists, no
            validation lists.
        MissingDependencyError: it is not installed.
    """
    lightgbm = require("lightgbm", "to fit trees", "trees")
    if "valid" not in splits:
        raise DataError("LightGBM needs validation queries to choose the number of trees by, and the data has none")
    train, valid = splits["train"], splits["valid"]
    if train.categories is not None:
        raise DataError("LightGBM needs data of numbers only, and this data has categories")
    for part in (train, valid):
        _check_for_lightgbm(part)
    if list_ranks:
        widened = [TreeBase.with_list_ranks(part.features, part.offsets) for part in (train, valid)]
        train, valid = train.replace(features=widened[0]), valid.replace(features=widened[1])
    own = _as_lightgbm(lightgbm, train)

    def judge(scores: NDArray[Any], _: Any) -> tuple[str, float, bool]:
        return measure.name, mean_measure(torch.from_numpy(scores), valid, measure), True

    booster = lightgbm.train(
        {**_LIGHTGBM, "seed": seed, "num_threads": threads or 0},
        own,
        _TREES,
        valid_sets=[_as_lightgbm(lightgbm, valid, reference=own)],
        feval=judge,
        callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)],
    )
    content = booster.model_to_string(num_iteration=booster.best_iteration).encode()
    return TreeBase(content, kind="lightgbm", list_ranks=list_ranks)


def _check_for_lightgbm(data: RankingData) -> None:
    labels, longest = data.labels, int(data.offsets.diff().max())
    whole = bool((labels == labels.round()).all())
    if not whole or float(labels.min()) < 0 or float(labels.max()) > _LARGEST_LABEL:
        raise DataError(f"LightGBM needs whole labels from 0 to {_LARGEST_LABEL}")
    if longest > _LONGEST_LIST:
        raise DataError(f"LightGBM takes at most {_LONGEST_LIST:,} documents of a query, got {longest:,}")


def _as_lightgbm(lightgbm: Any, data: RankingData, **settings: Any) -> Any:
    return lightgbm.Dataset(data.features.numpy(), data.labels.numpy(), group=data.offsets.diff().numpy(), **settings)


def _run_scores(run: dict[str, dict[str, float]], data: RankingData, name: str) -> Tensor:  # (N,)
    """What a run gives the documents, which it knows by id or by row of the file, from 1; those it lacks come last."""
    queries, order = data.query_index.tolist(), data.order.tolist()
    found = torch.full((data.num_documents,), -math.inf, dtype=torch.float64)
    for row, query in enumerate(queries):
        own = (data.doc_ids[row] if data.doc_ids is not None else "") or str(order[row] + 1)
        found[row] = run.get(word(data.qids[query]), {}).get(word(own), -math.inf)
    if not bool(found.isfinite().any()):
        raise DataError(f"{name}: none of the documents of the data is in this run")
    return found
