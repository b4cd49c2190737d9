"""The data of the experiments, by name: query-by-example sets in ten folds, ranking sets in five."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, DataError
from lgmml_torch.data.catalog import CATALOG, data_folder, open_dataset, open_examples
from lgmml_torch.data.examples import Examples, digits_examples, synthetic_classes
from lgmml_torch.data.generated import letor_like
from lgmml_torch.functional.examples import ExampleSet
from lgmml_torch.ragged import RankingData

OFFICIAL_FOLDS = ("mq2008", "ohsumed", "mslr", "mslr-web10k", "mslr-web30k")
ONE_SPLIT = ("yahoo1", "yahoo2")


@dataclass(frozen=True)
class ExampleFold:
    """Training queries are the database's own items; validation and test queries are not in the database."""

    train: ExampleSet
    valid: ExampleSet
    test: ExampleSet


@dataclass(frozen=True)
class RankingFold:
    """Lists of three disjoint sets of queries."""

    train: RankingData
    valid: RankingData
    test: RankingData


@lru_cache(maxsize=4)
def example_fold(name: str, fold: int, data_dir: str | None = None, *, dim: int = 20, points: int = 40) -> ExampleFold:
    """Fold number ``fold``, from 0, of ``digits``, ``digits-N`` (N items), ``synthetic-C`` or a folder like CAL10K's.

    Digits are cut 40/30/30 by class into database, validation and test queries, anew in each fold. Synthetic-C is drawn
    anew: half of the points are the database, a quarter validation queries, a quarter test queries.
    """
    if match := re.fullmatch(r"synthetic-(\d+)", name):
        return _halved(synthetic_classes(int(match[1]), dim, points, seed=fold), seed=fold)
    if match := re.fullmatch(r"digits(?:-(\d+))?", name):
        whole = digits_examples(queries=0.6, seed=fold)
        return _halved(_smaller(whole, int(match[1]), seed=fold) if match[1] else whole, seed=fold)
    items = open_examples(name, data_dir)
    if fold >= len(items.splits):
        raise DataError(f"`fold` must be below the number of splits, {len(items.splits)}, got {fold}")
    return _song_fold(items, fold)


def _halved(data: ExampleSet, seed: int) -> ExampleFold:
    """Every other query of each class for validation, the rest for the test."""
    labels, asked = class_labels(data)
    train = ExampleSet.from_labels(data.database, labels)
    order = torch.randperm(data.num_queries, generator=torch.Generator().manual_seed(seed))
    order = order[asked[order].argsort(stable=True)]
    return ExampleFold(train, data.select(order[::2].sort().values), data.select(order[1::2].sort().values))


def class_labels(data: ExampleSet) -> tuple[Tensor, Tensor]:  # (N,), (Q,)
    """A class for each row and each query of a set whose relevance means: of the same class."""
    relevant, _ = data.masks()
    rows, queries = relevant.float().argmax(0), relevant.float().argmax(1)
    return rows, rows[queries]


def _smaller(data: ExampleSet, items: int, seed: int) -> ExampleSet:
    """About ``items`` items, 40% of them database, each class cut alike."""
    labels, asked = class_labels(data)
    generator = torch.Generator().manual_seed(seed)
    kept = []
    for classes, share in ((labels, 0.4), (asked, 0.6)):
        order = torch.randperm(len(classes), generator=generator)
        order = order[classes[order].argsort(stable=True)]
        kept.append(order[:: max(1, round(len(classes) / (share * items)))])
    (rows, queries) = kept
    return ExampleSet.from_labels(data.database[rows], labels[rows], data.queries[queries], asked[queries])


def _song_fold(items: Examples, fold: int) -> ExampleFold:
    split = items.splits[fold]
    return ExampleFold(*(items.example_set(rows, split.train) for rows in (split.train, split.valid, split.test)))


@lru_cache(maxsize=2)
def ranking_fold(name: str, fold: int, data_dir: str | None = None, *, folds: int = 5) -> RankingFold:
    """Fold number ``fold``, from 0: the official one, or one of five over all queries, 60/20/20.

    ``generated-Q-D`` is a set like LETOR's with Q queries and D features.
    """
    if match := re.fullmatch(r"generated-(\d+)-(\d+)", name):
        return _cut(letor_like(int(match[1]), int(match[2]), seed=0), fold, folds)
    if name in ONE_SPLIT:
        if fold:
            raise DataError(f"{name!r} comes in one split, got fold {fold}")
        parts = open_dataset(name, data_dir)
    elif name in OFFICIAL_FOLDS:
        parts = open_dataset(name, data_dir, fold=fold + 1)
    else:
        parts = open_dataset(name, data_dir)
        renamed = [part.replace(qids=tuple(f"{key}-{q}" for q in part.qids)) for key, part in parts.items()]
        return _cut(RankingData.merge(renamed), fold, folds)
    return RankingFold(parts["train"], parts["valid"], parts["test"])


def _cut(data: RankingData, fold: int, folds: int) -> RankingFold:
    held = [test for _, test in data.kfold(folds, seed=0)]
    rest = [part for number, part in enumerate(held) if number not in (fold, (fold + 1) % folds)]
    return RankingFold(RankingData.merge(rest), held[(fold + 1) % folds], held[fold])


def folds_of(name: str, folds: int) -> range:
    """The folds to run: sets that come in one split have one."""
    return range(1 if name in ONE_SPLIT else folds)


def present(names: Sequence[str], data_dir: str | None) -> tuple[list[str], list[str]]:
    """Which of the sets have a folder, and which have none."""
    there = [name for name in names if has_folder(name, data_dir)]
    return there, [name for name in names if name not in there]


def has_folder(name: str, data_dir: str | None) -> bool:
    """Whether a set of the catalogue, or a folder, is there; nothing is read."""
    if Path(name).is_dir():
        return True
    try:
        home = data_folder(data_dir)
    except DataError:
        return False
    places = CATALOG[name].folders if name in CATALOG else (name,)
    return any((home / place).is_dir() for place in places)


def split_name(name: str) -> str:
    """How a set is cut, for the notes below a table."""
    if name in OFFICIAL_FOLDS:
        return "official folds"
    if name in ONE_SPLIT:
        return "official split"
    if name.startswith("synthetic-"):
        return "drawn anew per fold; database 50%, validation 25%, test 25%"
    if name.startswith("digits"):
        return "drawn anew per fold; database 40%, validation 30%, test 30%"
    return "five folds over all queries, 60/20/20"


def with_noise(features: Tensor, times: int, kind: str, seed: int) -> Tensor:  # (N, D·(1+times))
    """Append ``times`` as many features that mean nothing: standard normal, or each real one's values shuffled."""
    generator = torch.Generator().manual_seed(seed)
    N, D = features.shape
    parts = [features]
    for _ in range(times):
        if kind == "normal":
            parts.append(torch.randn(N, D, generator=generator).to(features.dtype))
        elif kind == "permuted":
            parts.append(features.gather(0, torch.rand(N, D, generator=generator).argsort(0)))
        else:
            raise ConfigError(f"`kind` of noise must be normal or permuted, got {kind!r}")
    return torch.cat(parts, dim=1)
