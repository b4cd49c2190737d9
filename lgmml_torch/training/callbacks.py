"""What happens around training: the best model is kept, epoch 0 included, and the loggers are told the story."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, Checkpoint, ProgressBar
from pytorch_lightning.loggers import Logger

from lgmml_torch import plots
from lgmml_torch.checks import CheckpointError
from lgmml_torch.models.storage import load_checkpoint
from lgmml_torch.training.loggers import Sink, sink_of
from lgmml_torch.training.module import LGMMLModule

ROUNDING = 1e-9  # a mean over queries may differ by less with the number of processes that add it up


class KeepCheckpoints(Checkpoint):
    """Writes ``best.ckpt`` whenever validation improves, the untrained Φ of epoch 0 included, and ``last.ckpt``.

    Args:
        folder: where to.
        monitor: a validation metric, higher is better.
        every_n_steps: how often ``last.ckpt`` is written within an epoch; it is always written at its end.
    """

    def __init__(self, folder: str | Path, *, monitor: str = "val/ndcg@10", every_n_steps: int = 500) -> None:
        self.best_file, self.last_file = Path(folder) / "best.ckpt", Path(folder) / "last.ckpt"
        self.monitor, self.every_n_steps = monitor, every_n_steps
        self.best, self.best_epoch = -math.inf, -1
        self.curve: dict[int, float] = {}
        self.run = uuid.uuid4().hex  # a file of another run that was put in the place of ours shall not pass for it

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge the starting weights, unless this run goes on from a checkpoint."""
        self.run = trainer.strategy.broadcast(self.run)
        if not self.curve and trainer.val_dataloaders:
            values = cast(LGMMLModule, pl_module).validate_now(trainer.val_dataloaders)
            for logger in trainer.loggers:
                logger.log_metrics(values, step=0)
            self._judge(trainer, 0, values.get(self.monitor, math.nan))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Keep a place to go on from in the middle of an epoch."""
        if trainer.global_step % self.every_n_steps == 0:
            trainer.save_checkpoint(self.last_file, weights_only=False)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge the epoch that has just ended."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            value = float(trainer.callback_metrics.get(self.monitor, math.nan))
            self._judge(trainer, trainer.current_epoch + 1, value)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep a place to go on from; without validation the last epoch is the best there is."""
        if not trainer.val_dataloaders:
            self.best, self.best_epoch = math.nan, trainer.current_epoch + 1
            trainer.save_checkpoint(self.best_file, weights_only=False)
        trainer.save_checkpoint(self.last_file, weights_only=False)

    def _judge(self, trainer: pl.Trainer, epoch: int, value: float) -> None:
        self.curve[epoch] = value
        undecided = math.isnan(value) and self.best == -math.inf  # no validation query has a relevant document
        if value > self.best + ROUNDING or undecided:
            self.best, self.best_epoch = (self.best if undecided else value), epoch
            trainer.save_checkpoint(self.best_file, weights_only=False)

    def state_dict(self) -> dict[str, Any]:
        """For resuming."""
        return {"best": self.best, "best_epoch": self.best_epoch, "curve": dict(self.curve), "run": self.run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """For resuming."""
        self.best, self.best_epoch = state_dict["best"], state_dict["best_epoch"]
        self.curve = dict(state_dict["curve"])
        self.run = state_dict.get("run", self.run)


def run_of(file: Path) -> str | None:
    """Which run wrote a checkpoint; None where release 0.1 did."""
    states = load_checkpoint(file).get("callbacks", {})
    return cast("str | None", states.get(KeepCheckpoints.__qualname__, {}).get("run"))


def check_same_run(file: Path, run: str | None) -> None:
    """Require that a checkpoint is of a run, as far as both can be told.

    Raises:
        CheckpointError: it is of another one.
    """
    written = run_of(file)
    if None not in (written, run) and written != run:
        raise CheckpointError(f"{file} is of another run than the one that goes on here; put its own file there")


class EpochValues(Callback):
    """Reduce the logged values of an epoch on all ranks, before a progress bar asks for them on the first rank alone.

    Lightning reduces a value when it is first read, which is a collective call: a bar that reads it on one rank would
    wait for ever. Other callbacks may log as well, so this one stands behind them and before the bars.
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read them."""
        dict(trainer.callback_metrics)


def in_order(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks with the progress bars last, and `EpochValues` before these."""
    bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
    others = [callback for callback in callbacks if callback not in bars]
    return [*others, EpochValues(), *bars]


class Story(Callback):
    """Φ, the metrics and the throughput, told to every logger in what it can show."""

    def __init__(self, *, pictures: bool = True) -> None:
        self.pictures = pictures
        self._started, self._tuples = 0.0, 0
        self._steps: dict[int, int] = {0: 0}  # at the end of each epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What the metrics look like; training does not change them."""
        bank = cast(LGMMLModule, pl_module).model.metrics
        spectra, conditions = plots.metric_spectra(bank)
        quality = bank.quality[~bank.quality.isnan()]
        for sink in _sinks(trainer):
            sink.histogram("metrics/log10_relative_eigenvalues", spectra.clamp_min(1e-16).log10(), 0)
            sink.histogram("metrics/log10_condition", conditions.log10(), 0)
            sink.numbers({"metrics/median_condition": float(conditions.median())}, 0)
            if len(quality):
                sink.histogram("metrics/anchor_ndcg", quality, 0)
                sink.numbers({"metrics/mean_anchor_ndcg": float(quality.mean())}, 0)
        if self.pictures:
            show(trainer, "metrics/spectrum", lambda: plots.spectrum_picture(bank), 0)
        self._picture_phi(trainer, pl_module, trainer.global_step)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._started, self._tuples = time.perf_counter(), 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the work."""
        self._tuples += len(batch.queries)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tuples per second of all processes, and what has become of Φ."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        pl_module.log("train/tuples_per_second", self._tuples / seconds, reduce_fx="sum", sync_dist=True)
        rows = cast(LGMMLModule, pl_module).model.phi
        phi = (rows.table.weight if len(rows.table.weight) else rows.mean_row()).detach()
        pl_module.log("phi/share_zero", (phi == 0).float().mean(), sync_dist=True)
        pl_module.log("phi/mean", phi.mean(), sync_dist=True)
        self._steps[trainer.current_epoch + 1] = trainer.global_step
        for sink in _sinks(trainer):
            sink.histogram("phi/values", phi, trainer.global_step)

    def show_kept(self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch: int) -> None:
        """The metrics with the weights that were kept, at the step where their epoch ended."""
        self._picture_phi(trainer, pl_module, self._steps.get(epoch, trainer.global_step))

    def _picture_phi(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int) -> None:
        if self.pictures:
            model = cast(LGMMLModule, pl_module).model
            names = [str(source).removeprefix("feature ") for source in model.preprocess.sources()]
            weights = model.phi.mean_row()[0].detach()
            draw = partial(plots.metrics_picture, model.metrics, weights, names=names, panels=4)  # boards show it small
            show(trainer, "metrics/learned", draw, step)


def show(trainer: pl.Trainer, tag: str, draw: Callable[[], Any], step: int) -> None:
    """Draw a picture once and show it to every logger that has a place for it; where none has, do not draw it."""
    places = [sink for sink in _sinks(trainer) if sink.shows_pictures]
    if places:
        figure = draw()
        for sink in places:
            sink.picture(tag, figure, step)


def bank_curve(loggers: Sequence[Logger]) -> Callable[[int, Any], None]:
    """A callback for fitting that sends what it is told to the loggers, e.g. the validation curve of boosting."""

    def tell(done: int, info: Any) -> None:
        numbers = {f"bank/{name}": value for name, value in vars(info).items() if isinstance(value, float)}
        if numbers:
            for logger in loggers:
                logger.log_metrics(numbers, step=done)

    return tell


def _sinks(trainer: pl.Trainer) -> list[Sink]:
    return [sink_of(logger) for logger in trainer.loggers] if trainer.is_global_zero else []
