"""What is fitted, and where: the settings that `train.py` and `LGMMLRanker` hand to the stages of training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.callbacks import Callback, ProgressBar
from pytorch_lightning.loggers import Logger
from pytorch_lightning.strategies import DDPStrategy

from lgmml_torch import distributed
from lgmml_torch.checks import CheckpointError, ConfigError, LGMMLError, check_choice, check_positive, check_whole
from lgmml_torch.data.cache import Cache
from lgmml_torch.fitting.bank import Bank, BankBuilder, as_builder
from lgmml_torch.functional.measures import Function, Measure, mean_measure
from lgmml_torch.models.encode import CategorySettings
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.storage import load_checkpoint, write_checkpoint
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.callbacks import QUIET, StepSize
from lgmml_torch.training.losses import Loss, Warp
from lgmml_torch.training.module import DEFAULT_OPTIMIZER, Dropout, OptimizerFactory, make_optimizer
from lgmml_torch.training.resume import KeepCheckpoints

_TRIED = 64  # rows and columns of a product that is tried: small ones do not take the fast routines
MakePhi = Callable[..., Phi]
_KEEP = ("best", "last")
_FEATURES = ("auto", "all")  # which raw features metrics see
CHOOSING_BANKS = ("boosted", "trained")  # kinds of metrics whose features are chosen
_USUAL = "ndcg@10"  # the measure that decides unless another one is asked for


@dataclass(frozen=True)
class PhiSettings:
    """How Φ is trained."""

    loss: Loss = field(default_factory=Warp)  # what is minimised, see `build_loss`
    loader: Mapping[str, Any] = field(default_factory=dict)  # settings of `RankingDataModule`
    optimizer: OptimizerFactory = DEFAULT_OPTIMIZER  # see `LGMMLModule`
    step_size: StepSize | None = None  # see `LGMMLModule`
    dropout: Dropout = field(default_factory=Dropout)  # see `LGMMLModule`
    deviation_penalty: float = 0.0  # see `LGMMLModule`
    keep: str = "best"  # the weights of the result: ``"best"`` by validation, or ``"last"``
    preset: str = "default"  # metric definitions of the curves
    distances: torch.dtype | None = None  # dtype distances are kept in: the model's when None, or a half precision

    def __post_init__(self) -> None:
        check_choice("keep", self.keep, _KEEP)


@dataclass(frozen=True)
class Recipe:
    """What is fitted, part by part."""

    preprocess: Callable[[], Preprocess]  # makes an unfitted preprocessing
    fit_bank: BankBuilder | Callable[..., Bank]  # builds the local metrics
    # called with the numbers of queries and metrics and, where the bank has weights, with ``init``
    make_phi: MakePhi = Phi
    phi: PhiSettings = field(default_factory=PhiSettings)  # how Φ is trained
    seed: int = 0  # of all draws
    categories: CategorySettings = field(default_factory=CategorySettings)  # settings of the encoder of categories
    # decides on validation lists when to stop and what to keep; a name or a function
    measure: str | Function | Measure = _USUAL
    grows: bool = False  # whether the metrics are added to those of an earlier model
    # ``"auto"`` sets raw features aside that mean nothing, see `choose_features`, for boosted and trained metrics;
    # ``"all"`` keeps them
    features: str = "auto"

    def __post_init__(self) -> None:
        check_choice("features", self.features, _FEATURES)

    @property
    def chooses_features(self) -> bool:
        """Whether raw features may be set aside."""
        return self.features == "auto" and self.builder.kind in CHOOSING_BANKS

    @property
    def own_measure(self) -> Measure | None:
        """The measure, where it is not the usual one."""
        found = Measure.of(self.measure)
        if found == Measure(_USUAL):
            return None
        return found

    @property
    def builder(self) -> BankBuilder:
        """`fit_bank` as a builder."""
        return as_builder(self.fit_bank)

    def builder_arguments(self, start: Bank | None = None) -> dict[str, Any]:
        """What the builder shall know beside the data."""
        arguments: dict[str, Any] = {}
        if self.builder.takes_measure:
            arguments["measure"] = self.own_measure
        if start is not None:
            arguments["start"] = start
        return arguments


@dataclass(frozen=True)
class TrainerSettings:
    """Output folder, trainer, callbacks, loggers and cache of training."""

    folder: Path  # for ``best.ckpt`` and ``last.ckpt``
    # settings of `pytorch_lightning.Trainer`, or something that makes one of callbacks and loggers
    trainer: Mapping[str, Any] | Callable[..., pl.Trainer] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()  # further ones
    loggers: Sequence[Logger] = ()  # e.g. TensorBoard
    cache: Cache | None = None  # where distances are kept; in memory when None
    resume: Path | None = None  # a ``last.ckpt`` to resume from
    every_n_steps: int = 500  # how often ``last.ckpt`` is written within an epoch

    def make_trainer(self, keeper: KeepCheckpoints, *, validated: bool) -> pl.Trainer:
        """Lightning's trainer."""
        make: Callable[..., pl.Trainer] = pl.Trainer
        settings = _process_settings()
        if not validated:
            settings["limit_val_batches"] = 0
        if callable(self.trainer):
            make = self.trainer
        else:
            settings = {**QUIET, **self.trainer, **settings}
        callbacks = _in_order([*self.callbacks, keeper])
        trainer = make(callbacks=callbacks, logger=list(self.loggers), **settings)
        trainer.strategy.checkpoint_io = _CheckpointFiles()
        distributed.leave_at_exit()  # Lightning does so for NCCL only
        return trainer


class _EpochValues(Callback):
    """Reduce the logged values of an epoch on all ranks, before a progress bar asks for them on the first rank alone.

    Lightning reduces a value when it is first read, which is a collective call: a bar that reads it on one rank would
    wait for ever. Other callbacks may log as well, so this one stands behind them and before the bars.
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read them."""
        dict(trainer.callback_metrics)


def _in_order(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks with the progress bars last, and `_EpochValues` before these."""
    bars, others = [], []
    for callback in callbacks:
        if isinstance(callback, ProgressBar):
            bars.append(callback)
        else:
            others.append(callback)
    return [*others, _EpochValues(), *bars]


class _CheckpointFiles(TorchCheckpointIO):
    """Lightning's checkpoints as files: written atomically, read without running code."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint; an earlier one of that name survives any failure."""
        write_checkpoint(path, checkpoint)

    def load_checkpoint(self, path: str | os.PathLike[str], *_: Any, **__: Any) -> dict[str, Any]:
        """Read a checkpoint into main memory."""
        content = load_checkpoint(path)
        if "rows" in content:
            raise CheckpointError(f"{path} keeps rows of Φ in other files, which only release 0.2 reads; train again")
        return content


def rehearse(recipe: Recipe) -> None:
    """Check the parts of a recipe without data, so that a mistake costs no time."""
    builder = recipe.builder
    if recipe.grows and not (builder.grows or builder.trains_metrics):
        raise ConfigError("`grow` must be false for metrics that are neither boosted nor trained, got true")
    growing = {}
    if recipe.grows and builder.grows:
        growing["start"] = True
    builder.check_call(**recipe.builder_arguments(), **growing)
    phi = recipe.make_phi(1, 1)
    try:
        make_optimizer(recipe.phi.optimizer, list(phi.parameters()), sparse=phi.sparse)
    except LGMMLError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`optimizer`: {error}") from error
    check_positive("deviation_penalty", recipe.phi.deviation_penalty, zero=True)
    smallest = RankingData.from_arrays([[0.0], [1.0]], [0, 1], qid=[0, 0])
    mean_measure(smallest.labels, smallest, recipe.measure)
    settings = dict(recipe.phi.loader)
    check_whole("num_workers", settings.pop("num_workers", 0), zero=True)
    try:
        TrainingBatches(smallest, draws=recipe.phi.loss.draws, **settings)
    except TypeError as error:
        raise ConfigError(f"`loader`: {error}") from error


def check_precision(trainer: pl.Trainer) -> None:
    """Refuse a trainer's precision that the processor cannot compute a product and its gradient in."""
    device = trainer.strategy.root_device
    values = torch.ones((_TRIED, _TRIED), device=device, requires_grad=True)
    try:
        with trainer.precision_plugin.forward_context():
            torch.autograd.grad((values @ values).sum(), values)
    except RuntimeError as error:
        raise ConfigError(
            f"`trainer.precision` must be one that {device} can compute in, got {trainer.precision!r} ({error}); "
            "use 32-true"
        ) from error


class _Ranks(TorchElasticEnvironment):
    """The ranks that a launcher has started, as Lightning asks for them."""

    def local_rank(self) -> int:
        """Below the number of devices, also where machines have different numbers of processes."""
        return super().local_rank() % _local_world_size()


def _local_world_size() -> int:
    """Processes on this machine; 1 where machines have different numbers of them."""
    here, size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), distributed.world_size()
    return here if size % here == 0 else 1


def _process_settings() -> dict[str, Any]:
    """Settings of a trainer whose processes a launcher has started; none otherwise."""
    if not distributed.joined():
        return {}
    devices = _local_world_size()
    return {
        "strategy": DDPStrategy(broadcast_buffers=False),  # buffers are equal from the start
        "devices": devices,
        "num_nodes": distributed.world_size() // devices,
        "plugins": [_Ranks()],
    }
