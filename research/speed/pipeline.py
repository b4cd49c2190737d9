"""Our training, stage by stage, with time and memory of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from lgmml_torch.data.cache import Cache
from lgmml_torch.data.generated import LetorLike
from lgmml_torch.fitting.sampled import fit_sampled
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.steps import Quantile, RemoveConstant, Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.distances import compute_distances
from lgmml_torch.training.stages import prepare, train_phi
from research.speed.harness import watched

VALID_SHARE = 0.1  # validation lists, beside the training lists


@dataclass(frozen=True)
class Shape:
    """Training documents, lists and features of a set."""

    documents: int
    queries: int
    features: int

    def part(self, fraction: float) -> Shape:
        """The same kind of set with a share of the lists."""
        return Shape(max(2, round(self.documents * fraction)), max(2, round(self.queries * fraction)), self.features)


SHAPES = {
    "web10k": Shape(723_412, 6_000, 136),
    "web30k": Shape(2_270_296, 18_919, 136),
    "yahoo1": Shape(473_134, 19_944, 519),
    "small": Shape(20_000, 300, 46),
}


def generate(shape: Shape, *, seed: int = 0) -> tuple[RankingData, RankingData]:
    """Training and validation lists; the validation lists are further lists of the same world."""
    train = LetorLike(shape.queries, shape.features, num_documents=shape.documents, seed=seed)
    features = np.empty((shape.documents, shape.features), dtype=np.float32)
    labels = np.empty(shape.documents, dtype=np.float32)
    train.fill(features, labels)
    held = max(20, round(VALID_SHARE * shape.queries))
    mean = shape.documents / shape.queries
    more = LetorLike(
        shape.queries + held, shape.features, num_documents=round((shape.queries + held) * mean), seed=seed
    )
    lists = [more.query(index) for index in range(shape.queries, shape.queries + held)]
    valid = RankingData.from_arrays(
        np.concatenate([part.features for part in lists]),
        np.concatenate([part.labels for part in lists]),
        group=np.array([len(part.labels) for part in lists]),
    )
    return RankingData.from_arrays(features, labels, group=train.sizes), valid


BATCH_LISTS = 32
LEARNING_RATE = 1e-3
MOVED = (0.5, 1.0, 2.0, 4.0)  # how far anchors may be moved away from the negatives


@dataclass
class Stages:
    """Seconds and peak memory of each stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)  # of all threads; tells a busy machine from slow code
    memory: dict[str, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        start, cpu = time.perf_counter(), time.process_time()
        with watched() as most:
            yield
        self.seconds[name], self.cpu_seconds[name] = time.perf_counter() - start, time.process_time() - cpu
        self.memory[name] = most

    @property
    def total(self) -> float:
        """All stages together."""
        return sum(self.seconds.values())


class EpochClock(Callback):
    """When each epoch of Φ was validated, in seconds since training Φ began."""

    def __init__(self) -> None:
        self.start, self.at = 0.0, dict[int, float]()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the time."""
        self.at[trainer.current_epoch + 1] = time.perf_counter() - self.start


@dataclass
class Trained:
    """What a run of the pipeline leaves."""

    model: LGMML
    stages: Stages
    valid_ndcg: dict[int, float]  # by pass, 0 before the first
    seconds_at: dict[int, float]  # whole training time up to the end of each pass
    bank: dict[str, Any]


def train(
    data: RankingData,
    valid: RankingData,
    *,
    folder: Path,
    metrics: int = 500,
    passes: int = 20,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Trained:
    """Preprocessing, local metrics, distances (memory-mapped) and Φ on whole lists."""
    stages = Stages()
    preprocess = Chain([RemoveConstant(), Quantile(output="normal"), Standardize()])
    with stages.stage("preprocessing and metrics"):
        fit_bank = partial(fit_sampled, num_metrics=metrics, alphas=MOVED)
        prepared = prepare(data, valid, preprocess=preprocess, fit_bank=fit_bank, seed=seed)
        make_phi = partial(Phi, mode="shared")
        model = prepared.model(make_phi)
    cache = Cache(folder / "distances")
    with stages.stage("distances"):
        for name, part in prepared.splits.items():
            prepared.dists[name] = compute_distances(model, part, cache=cache, dtype=dtype)
    clock = EpochClock()
    with stages.stage("weights"):
        module, keeper, _ = train_phi(
            prepared,
            make_phi=make_phi,
            folder=folder / "checkpoints",
            loader={"batching": "lists", "batch_size": BATCH_LISTS},
            optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
            trainer={"max_epochs": passes, "log_every_n_steps": 50},
            callbacks=[clock],
            seed=seed,
        )
    before = stages.total - stages.seconds["weights"]
    at = {epoch: before + seconds for epoch, seconds in clock.at.items()}
    return Trained(module.model, stages, dict(keeper.curve), {0: before, **at}, prepared.bank.history)
