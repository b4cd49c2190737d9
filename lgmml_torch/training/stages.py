"""The stages of training, one after the other; what `train.py` and `LGMMLRanker` both compose.

A `Recipe` says what is fitted, `Surroundings` where and under whose eyes; both are fixed before the first stage starts,
and `rehearse` finds out what of a recipe cannot work before any time is spent on it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger
from torch import Tensor

from lgmml_torch.checks import ConfigError, check_choice
from lgmml_torch.data.cache import Cache
from lgmml_torch.files import write_bytes
from lgmml_torch.fitting.bank import Bank, BankBuilder, OnRound, check_builder
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import read_model
from lgmml_torch.progress import progress_bar
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.callbacks import KeepCheckpoints
from lgmml_torch.training.datamodule import RankingDataModule
from lgmml_torch.training.distances import compute_distances
from lgmml_torch.training.losses import Loss, Warp
from lgmml_torch.training.module import (
    DEFAULT_OPTIMIZER,
    Dropout,
    LGMMLModule,
    OptimizerFactory,
    StepSize,
    make_optimizer,
)

log = logging.getLogger(__name__)

MakePhi = Callable[..., Phi]
KEPT = ("best", "last")


@dataclass(frozen=True)
class PhiSettings:
    """How Φ is trained.

    Attributes:
        loss: what is minimised.
        loader: settings of `RankingDataModule`.
        optimizer: see `LGMMLModule`.
        step_size: see `LGMMLModule`.
        dropout: see `LGMMLModule`.
        deviation_penalty: see `LGMMLModule`.
        keep: weights to come back with: ``"best"`` by validation NDCG@10, or ``"last"``.
        preset: metric definitions of the curves.
        distances: dtype distances are kept in: the model's when None, or a half precision.
    """

    loss: Loss = field(default_factory=Warp)
    loader: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerFactory = DEFAULT_OPTIMIZER
    step_size: StepSize | None = None
    dropout: Dropout = field(default_factory=Dropout)
    deviation_penalty: float = 0.0
    keep: str = "best"
    preset: str = "default"
    distances: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_choice("keep", self.keep, KEPT)


@dataclass(frozen=True)
class Recipe:
    """What is fitted, part by part.

    Attributes:
        preprocess: makes an unfitted preprocessing.
        fit_bank: builds the local metrics.
        make_phi: called with the numbers of queries and metrics and, where the bank has weights, with ``init``.
        phi: how Φ is trained.
        seed: of all draws.
    """

    preprocess: Callable[[], Preprocess]
    fit_bank: BankBuilder
    make_phi: MakePhi = Phi
    phi: PhiSettings = field(default_factory=PhiSettings)
    seed: int = 0


@dataclass(frozen=True)
class Surroundings:
    """Where Φ is trained, and who watches.

    Attributes:
        folder: for ``best.ckpt`` and ``last.ckpt``.
        trainer: settings of `pytorch_lightning.Trainer`, or something that makes one of callbacks and loggers.
        callbacks: further ones.
        loggers: e.g. TensorBoard.
        cache: where distances are kept; in memory when None.
        resume: a ``last.ckpt`` to go on from.
        every_n_steps: how often ``last.ckpt`` is written within an epoch.
    """

    folder: Path
    trainer: Mapping[str, Any] | Callable[..., pl.Trainer] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    loggers: Sequence[Logger] = ()
    cache: Cache | None = None
    resume: Path | None = None
    every_n_steps: int = 500


@dataclass(frozen=True)
class Prepared:
    """Preprocessing and metrics, fitted, and what training needs of every split.

    Attributes:
        preprocess: fitted.
        bank: fitted, or the start of one that is trained.
        splits: raw lists.
        inputs: of the splits so far: distances, or preprocessed features where the metrics are trained.
    """

    preprocess: Preprocess
    bank: Bank
    splits: Mapping[str, RankingData]
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def model(self, make_phi: MakePhi) -> LGMML:
        """A ranker with fresh weights: the bank's own Φ₀ where it has one."""
        train = self.splits["train"]
        start = {} if self.bank.phi is None else {"init": self.bank.phi}
        phi = make_phi(train.num_queries, self.bank.metrics.num_metrics, **start)
        metrics = self.bank.metrics
        if self.bank.trained:  # on a copy: the bank may be the start of several models
            metrics = deepcopy(metrics)
            metrics.train_metrics_()
        model = LGMML(
            self.preprocess,
            metrics,
            phi,
            kernel=self.bank.kernel,
            qids=train.qids,
            feature_names=train.feature_names,
        )
        return model.to(train.features.dtype).train()


@dataclass(frozen=True)
class Trained:
    """A model, how validation went, and what Lightning leaves.

    Attributes:
        module: with the weights that were kept.
        keeper: the validation curve, by epoch, and the epoch kept.
        trainer: Lightning's.
    """

    module: LGMMLModule
    keeper: KeepCheckpoints
    trainer: pl.Trainer

    @property
    def model(self) -> LGMML:
        """The ranker."""
        return self.module.model


def rehearse(recipe: Recipe) -> None:
    """Try the parts of a recipe that need no data worth the name, so that a mistake in them costs no fit.

    Raises:
        LGMMLError: what is wrong.
    """
    check_builder(recipe.fit_bank)
    phi = recipe.make_phi(1, 1)
    make_optimizer(recipe.phi.optimizer, list(phi.parameters()), sparse=phi.sparse)
    smallest = RankingData.from_arrays([[0.0], [1.0]], [0, 1], qid=[0, 0])
    settings = {name: value for name, value in recipe.phi.loader.items() if name != "num_workers"}
    try:
        TrainingBatches(smallest, draws=recipe.phi.loss.draws, **settings)
    except TypeError as error:
        raise ConfigError(f"`loader`: {error}") from error


def prepare(splits: Mapping[str, RankingData], recipe: Recipe, on_round: OnRound | None = None) -> Prepared:
    """Fit the preprocessing on the training lists, then build the local metrics."""
    rehearse(recipe)
    train, valid, preprocess = splits["train"], splits.get("valid"), recipe.preprocess()
    features = preprocess.fit_transform(train.features, train.offsets)
    fitted = train.replace(features=features)
    seen = None if valid is None else valid.replace(features=preprocess(valid.features, valid.offsets))
    log.info("%d features after preprocessing, of %d", features.shape[1], train.num_features)
    with progress_bar("local metrics", total=1.0) as report:

        def tell(done: int, info: Any) -> None:
            report(done / max(info.total, 1))
            if on_round is not None:
                on_round(done, info)

        bank = recipe.fit_bank(fitted, seen, seed=recipe.seed, on_round=tell)
    log.info("%d local metrics", bank.metrics.num_metrics)
    parts = {"train": fitted} if seen is None else {"train": fitted, "valid": seen}
    inputs = {name: part.features for name, part in parts.items()} if bank.trained else {}
    return Prepared(preprocess, bank, dict(splits), inputs)


def add_inputs(prepared: Prepared, model: LGMML, cache: Cache | None = None, dtype: torch.dtype | None = None) -> None:
    """What training needs of every split that has nothing yet: distances, kept in ``dtype``, or features."""
    for name, data in prepared.splits.items():
        if name in prepared.inputs:
            continue
        if prepared.bank.trained:
            prepared.inputs[name] = prepared.preprocess(data.features.to(model.metrics.scales), data.offsets)
            continue
        with progress_bar(f"distances, {name}", total=data.num_documents) as report:
            prepared.inputs[name] = compute_distances(model, data, cache=cache, dtype=dtype, progress=report)


def train_phi(prepared: Prepared, recipe: Recipe, around: Surroundings) -> Trained:
    """Train Φ in Lightning; the module comes back with the weights that validation kept."""
    module = make_module(prepared, recipe, around.cache)
    splits, settings = prepared.splits, recipe.phi
    data_module = RankingDataModule(
        splits["train"],
        splits.get("valid"),
        splits.get("test"),
        seed=recipe.seed,
        draws=settings.loss.draws,
        **settings.loader,
    )
    keeper = KeepCheckpoints(around.folder, every_n_steps=around.every_n_steps)
    if around.resume is not None:
        _bring_best(around.resume, keeper.best_file)
    with quiet_lightning():
        lightning = make_trainer(around, keeper, validated="valid" in splits)
        lightning.fit(module, data_module, ckpt_path=around.resume, weights_only=True)
    if lightning.max_epochs == 0:
        _keep_start(module, keeper, splits.get("valid"))
    file = keeper.best_file if settings.keep == "best" else keeper.last_file
    if file.exists() or (lightning.is_global_zero and lightning.max_epochs):
        _, tensors = read_model(file)
        module.model.load_state_dict(tensors)
    module.model.metrics.train_metrics_(False)
    module.model.eval()
    return Trained(module, keeper, lightning)


def make_module(prepared: Prepared, recipe: Recipe, cache: Cache | None = None) -> LGMMLModule:
    """The Lightning module of a fresh model, with what it needs of every split attached."""
    model, settings = prepared.model(recipe.make_phi), recipe.phi
    add_inputs(prepared, model, cache, settings.distances)
    module = LGMMLModule(
        model.spec(),
        model,
        loss=settings.loss,
        deviation_penalty=settings.deviation_penalty,
        optimizer=settings.optimizer,
        step_size=settings.step_size,
        dropout=settings.dropout,
        preset=settings.preset,
        seed=recipe.seed,
    )
    for name, data in prepared.splits.items():
        module.attach(name, data, prepared.inputs[name])
    return module


def make_trainer(around: Surroundings, keeper: KeepCheckpoints, *, validated: bool) -> pl.Trainer:
    """Lightning's trainer; without validation queries it must not ask for any."""
    make: Callable[..., pl.Trainer] = (
        around.trainer if callable(around.trainer) else partial(pl.Trainer, **{**QUIET, **around.trainer})
    )
    no_validation = {} if validated else {"limit_val_batches": 0}
    return make(callbacks=[*around.callbacks, keeper], logger=list(around.loggers), **no_validation)


def _keep_start(module: LGMMLModule, keeper: KeepCheckpoints, valid: RankingData | None) -> None:
    """No epochs were asked for: the starting weights are the model, and lists are summarised as a fit would."""
    module.on_fit_start()
    keeper.best_epoch = 0
    if valid is not None:
        keeper.best = mean_ndcg(module.model.eval().score(valid), valid)
        keeper.curve[0] = keeper.best


def _bring_best(resume: Path, best_file: Path) -> None:
    """A run resumed in another folder may never beat the best epoch so far: that model has to come along."""
    if best_file.exists() or not resume.is_file():
        return
    earlier = resume.parent / best_file.name
    if not earlier.is_file():
        log.warning("there is no %s beside %s: its own weights stand in for the best so far", best_file.name, resume)
    write_bytes(best_file, (earlier if earlier.is_file() else resume).read_bytes())


# What a library call should not do by itself: print tables, bars and advice.
QUIET: dict[str, Any] = {
    "accelerator": "auto",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "use_distributed_sampler": False,
    "inference_mode": False,
}


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Leave out advice that does not apply: loaders here hand out row numbers, which costs nothing worth a worker."""
    for name in ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")
        warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
        warnings.filterwarnings("ignore", message=".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*")
        yield
