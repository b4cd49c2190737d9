"""The sets and splits of the quality benchmark, and noise to add to them.

MQ2008 and OHSUMED come in official folds. The MSLR and LightGBM samples are pooled and cut into five parts by query,
with one permutation drawn once and for all: a fold tests on one part, validates on the next and trains
on the other three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.data.catalog import data_folder, open_dataset
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.letor import load_agreed, load_lightgbm
from lgmml_torch.ragged import RankingData
from research.protocol import RankingFold

SETS = ("mq2008", "ohsumed", "lgbm-rank", "mslr-sample")
OFFICIAL = ("mq2008", "ohsumed")
TOY = "toy"  # generated, for tests
NOISES = ("normal", "permuted")
NUM_FOLDS = 5
COPIES = 2  # noise columns for each real one: three times as many features


@dataclass(frozen=True)
class Arrays:
    """Features, labels and list lengths in the order of the file, as tree libraries want them."""

    features: NDArray[np.float32]
    labels: NDArray[np.float32]
    sizes: NDArray[np.int64]


@lru_cache(maxsize=3)
def load_fold(name: str, fold: int, noise: str | None = None) -> RankingFold:
    """One fold of a set, from 0; with ``noise``, two noise columns for each real one."""
    clean = _official(name, fold) if name in OFFICIAL else _cut(name, fold)
    return clean if noise is None else add_noise(clean, noise, seed=100 + fold)


def add_noise(fold: RankingFold, kind: str, *, seed: int, copies: int = COPIES) -> RankingFold:
    """Columns that say nothing: standard normal, or the real ones with their rows permuted within each split."""
    generator = np.random.default_rng(seed)
    return RankingFold(*(_noisy(part, kind, generator, copies) for part in (fold.train, fold.valid, fold.test)))


def as_arrays(data: RankingData) -> Arrays:
    """The data in the caller's order, queries one after the other."""
    index = data.in_caller_order(data.query_index).numpy()
    ends = np.flatnonzero(np.diff(index)) + 1
    sizes = np.diff(np.concatenate([[0], ends, [len(index)]]))
    features, labels = data.in_caller_order(data.features), data.in_caller_order(data.labels)
    return Arrays(features.float().numpy(), labels.float().numpy(), sizes)


def _official(name: str, fold: int) -> RankingFold:
    parts = open_dataset(name, fold=fold + 1, progress=False)
    return RankingFold(parts["train"], parts["valid"], parts["test"])


def _cut(name: str, fold: int) -> RankingFold:
    whole = _toy() if name == TOY else _pooled(name)
    shuffled = np.random.default_rng(0).permutation(whole.num_queries)
    parts = [np.sort(shuffled[part::NUM_FOLDS]) for part in range(NUM_FOLDS)]
    test, valid = parts[fold], parts[(fold + 1) % NUM_FOLDS]
    train = np.setdiff1d(shuffled, np.concatenate([test, valid]))
    return RankingFold(*(whole.select(torch.from_numpy(queries)) for queries in (train, valid, test)))


@lru_cache(maxsize=2)
def _pooled(name: str) -> RankingData:
    """All files of a set as one, queries numbered in the order of the files."""
    if name == "lgbm-rank":  # the catalog would split its training file
        files = {part: data_folder() / name / f"rank.{part}" for part in ("train", "test")}
        parts = load_agreed(load_lightgbm, files, progress=False)
    else:
        parts = open_dataset(name, progress=False)
    return _stack([as_arrays(part) for part in parts.values()])


def _stack(parts: Sequence[Arrays]) -> RankingData:
    return RankingData.from_arrays(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.labels for part in parts]),
        group=np.concatenate([part.sizes for part in parts]),
    )


def _toy() -> RankingData:
    return letor_like(40, 8, num_documents=400, noise=0.2)


def _noisy(data: RankingData, kind: str, generator: np.random.Generator, copies: int) -> RankingData:
    real = data.features
    columns = [real]
    for _ in range(copies):
        if kind == "normal":
            drawn = torch.from_numpy(generator.standard_normal(real.shape).astype(np.float32))
        else:
            rows = np.stack([generator.permutation(len(real)) for _ in range(real.shape[1])], axis=1)
            drawn = real.gather(0, torch.from_numpy(rows))
        columns.append(drawn)
    return data.replace(features=torch.cat(columns, dim=1))
