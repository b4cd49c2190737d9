"""The one protocol of all experiments: which queries train, validate and test in each fold of a set, and noise.

Ranking sets that come in official folds (or one split) keep them. All others are pooled: their files one after the
other, queries numbered in that order, one permutation drawn once and for all, five parts; fold i tests on part i,
validates on part i+1 and trains on the other three. Query-by-example sets are drawn anew in each fold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, check_choice, check_positive
from lgmml_torch.data.catalog import CATALOG, data_folder, load_parts, open_dataset
from lgmml_torch.data.generated import letor_like
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.ragged import RankingData
from research.by_example.data import (
    SYNTHETIC_CONDITION,
    Examples,
    digits_examples,
    find_examples,
    open_examples,
    synthetic_classes,
)
from research.by_example.sets import ExampleSet

OFFICIAL_FOLDS = ("mq2008", "ohsumed", "mslr", "mslr-web10k", "mslr-web30k")
ONE_SPLIT = ("yahoo1", "yahoo2")
NUM_FOLDS = 5
TOY = "toy"  # generated, for tests
NOISES = ("normal", "permuted")
CONDITION_TEXT = f"covariances of condition number {SYNTHETIC_CONDITION:,.0f}"  # of Synthetic-C, beside its figures


class Noise(NamedTuple):
    """Features that mean nothing: of which kind, and how many for each real one."""

    kind: str
    times: int


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

    def each(self, change: Callable[[RankingData], RankingData]) -> RankingFold:
        """The fold with every part changed in the same way, training part first."""
        return RankingFold(change(self.train), change(self.valid), change(self.test))

    def prepared(self, step: Preprocess) -> RankingFold:
        """The fold with its features preprocessed; the step is fitted on the training part."""
        step.fit(self.train.features, self.train.offsets)
        return self.each(lambda part: part.replace(features=step(part.features, part.offsets)))


@lru_cache(maxsize=3)
def ranking_fold(name: str, fold: int, data_dir: str | None = None, *, noise: Noise | None = None) -> RankingFold:
    """Fold number ``fold``, from 0, of a ranking set; with ``noise``, with features that mean nothing.

    Besides the names of the catalogue and folders, ``generated-Q-D`` is a set like LETOR's with Q queries and D
    features, and ``toy`` a small one.
    """
    last = 0 if name in ONE_SPLIT else NUM_FOLDS - 1
    if not 0 <= fold <= last:
        raise DataError(f"`fold` must lie in [0, {last}] for {name!r}, got {fold}")
    if noise is not None:
        return noisy_ranking(ranking_fold(name, fold, data_dir), noise, seed=100 + fold)
    if name in ONE_SPLIT or name in OFFICIAL_FOLDS:
        parts = open_dataset(name, data_dir, fold=None if name in ONE_SPLIT else fold + 1, progress=False)
        return RankingFold(parts["train"], parts["valid"], parts["test"])
    whole = _pooled(name, data_dir)
    shuffled = np.random.default_rng(0).permutation(whole.num_queries)
    cut = [np.sort(shuffled[part::NUM_FOLDS]) for part in range(NUM_FOLDS)]
    test, valid = cut[fold], cut[(fold + 1) % NUM_FOLDS]
    train = np.setdiff1d(shuffled, np.concatenate([test, valid]))
    return RankingFold(*(whole.select(torch.from_numpy(queries)) for queries in (train, valid, test)))


LARGE = ("debian", "moby")  # one split each; smaller training sets are drawn from it


@lru_cache(maxsize=2)
def large_fold(name: str, queries: int | None = None, draw: int = 0, data_dir: str | None = None) -> RankingFold:
    """A large set's own split, its training part cut to so many queries; ``draw`` says which."""
    check_choice("name", name, LARGE)
    if queries is None:
        parts = open_dataset(name, data_dir, progress=False)
        return RankingFold(parts["train"], parts["valid"], parts["test"])
    whole = large_fold(name, data_dir=data_dir)
    if queries >= whole.train.num_queries:
        raise DataError(f"`queries` must be below the {whole.train.num_queries} of {name!r}, got {queries}")
    chosen = np.random.default_rng(draw).permutation(whole.train.num_queries)[:queries]
    return replace(whole, train=whole.train.select(torch.from_numpy(np.sort(chosen))))


@lru_cache(maxsize=2)
def _pooled(name: str, data_dir: str | None) -> RankingData:
    """All files of a set as one, queries numbered in the order of the files."""
    if name == TOY:
        return letor_like(40, 8, num_documents=400, noise=0.2)
    if match := re.fullmatch(r"generated-(\d+)-(\d+)", name):
        return letor_like(int(match[1]), int(match[2]), seed=0)
    if name == "lgbm-rank":  # the catalogue would cut its training file
        files = {part: data_folder(data_dir) / name / f"rank.{part}" for part in ("train", "test")}
        parts = load_parts(files, kind="lightgbm", progress=False)
    else:
        parts = open_dataset(name, data_dir, progress=False)
    found = [(part.in_caller_order(part.features), part.in_caller_order(part.labels)) for part in parts.values()]
    features, labels = (torch.cat(columns) for columns in zip(*found, strict=True))
    sizes = torch.cat([_sizes_in_file(part) for part in parts.values()])
    return RankingData.from_arrays(features, labels, group=sizes)


def _sizes_in_file(data: RankingData) -> Tensor:  # (Q,)
    """Lengths of the lists as they follow one another in the file: where the query changes a new list begins."""
    queries = data.in_caller_order(data.query_index)
    starts = torch.cat([torch.tensor([0]), (queries.diff() != 0).nonzero()[:, 0] + 1, torch.tensor([len(queries)])])
    return starts.diff()


@lru_cache(maxsize=4)
def example_fold(
    name: str,
    fold: int,
    data_dir: str | None = None,
    *,
    dim: int = 20,
    points: int = 40,
    condition: float = SYNTHETIC_CONDITION,
) -> ExampleFold:
    """Fold number ``fold``, from 0, of ``digits``, ``digits-N`` (N items), ``synthetic-C`` or a folder like CAL10K's.

    Digits are cut 40/30/30 by class into database, validation and test queries, anew in each fold. Synthetic-C is drawn
    anew: half of the points are the database, a quarter validation queries, a quarter test queries; ``dim``, ``points``
    and ``condition`` (of its covariances) are for it alone.
    """
    if match := re.fullmatch(r"synthetic-(\d+)", name):
        return _halved(synthetic_classes(int(match[1]), dim, points, seed=fold, condition=condition), seed=fold)
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


def folds_of(name: str, folds: int = NUM_FOLDS) -> range:
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
    if name in CATALOG:
        return any((home / place).is_dir() for place in CATALOG[name])
    return find_examples(name, data_dir) is not None


def split_name(name: str) -> str:
    """How a set is cut, for the notes below a table."""
    if name in OFFICIAL_FOLDS:
        return "official folds"
    if name in ONE_SPLIT:
        return "official split"
    if name.startswith("synthetic-"):
        return f"drawn anew per fold, {CONDITION_TEXT}; database 50%, validation 25%, test 25%"
    if name.startswith("digits"):
        return "drawn anew per fold; database 40%, validation 30%, test 30%"
    return "five folds over all queries, one fixed permutation, 60/20/20"


def noise_columns(
    features: Tensor,  # (N, D)
    noise: Noise,
    generator: np.random.Generator,
) -> Tensor:  # (N, D·(1+times))
    """The features, and beside them columns of noise: standard normal, or each real one's values shuffled over rows."""
    check_choice("kind", noise.kind, NOISES)
    check_positive("times", noise.times, zero=True)
    N, D = features.shape
    columns = [features]
    for _ in range(noise.times):
        if noise.kind == "normal":
            columns.append(torch.from_numpy(generator.standard_normal((N, D))).to(features.dtype))
        else:
            rows = np.stack([generator.permutation(N) for _ in range(D)], axis=1)
            columns.append(features.gather(0, torch.from_numpy(rows)))
    return torch.cat(columns, dim=1)


def noisy_ranking(fold: RankingFold, noise: Noise, seed: int) -> RankingFold:
    """The same lists with noise, drawn for training, validation and test part by itself."""
    generator = np.random.default_rng(seed)
    return fold.each(lambda part: part.replace(features=noise_columns(part.features, noise, generator)))


def noisy_examples(fold: ExampleFold, noise: Noise, seed: int) -> ExampleFold:
    """The same items, scaled to a root mean square deviation of one, with noise for the database and both queries."""
    generator = np.random.default_rng(seed)
    scale = fold.train.database.std(0, correction=0).square().mean().sqrt()
    database, valid, test = (
        noise_columns(rows / scale, noise, generator)
        for rows in (fold.train.database, fold.valid.queries, fold.test.queries)
    )
    return ExampleFold(
        replace(fold.train, database=database, queries=database),
        replace(fold.valid, database=database, queries=valid),
        replace(fold.test, database=database, queries=test),
    )
