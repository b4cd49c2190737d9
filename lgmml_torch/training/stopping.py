"""Stopping in the middle of training, at a step that a checkpoint can go on from."""

from __future__ import annotations

import signal
from typing import Any, Protocol

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from lgmml_torch.training.callbacks import KeepCheckpoints


class Stopper(Protocol):
    """Somebody who may ask for an end at any moment, see `lgmml_torch.app.signals.Watch`."""

    asked: int | None
    waits: bool

    def listen(self) -> None:
        """Take the signals again that Lightning takes when it starts."""

    def stop(self) -> None:
        """Raise what has been asked for, if anything has."""


class StopAtStep(Callback):
    """Ends training when it is asked to, with a ``last.ckpt`` of that very step.

    At the last batch of an epoch it lets the epoch end: validation belongs to it, and ``last.ckpt`` is written then
    anyway. While it watches, Lightning's own ways with SIGTERM and Ctrl-C, which keep nothing, are out of force.
    """

    def __init__(self, stopper: Stopper) -> None:
        self._stopper = stopper
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on, steps are waited for."""
        self._stopper.listen()
        self._stopper.waits = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An epoch has ended, or none has begun: there is nothing to save that is not saved."""
        if self._asked(trainer):
            self._stopper.stop()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Note where the batch starts: accumulated gradients are in no checkpoint."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save this step and stop, if that is asked for."""
        last = batch_idx + 1 >= trainer.num_training_batches
        if not self._asked(trainer) or last or trainer.global_step == self._step:
            return
        for keeper in trainer.checkpoint_callbacks:
            if isinstance(keeper, KeepCheckpoints):
                trainer.save_checkpoint(keeper.last_file, weights_only=False)
        self._stopper.stop()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What comes after training can be torn apart."""
        self._stopper.waits = False
        self._stopper.stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Nobody looks any more."""
        self._stopper.waits = False

    def _asked(self, trainer: pl.Trainer) -> bool:
        """Whether any process has been asked: one alone would leave the others waiting for it."""
        asked = self._stopper.asked is not None
        if trainer.world_size == 1:
            return asked
        agreed = bool(trainer.strategy.reduce_boolean_decision(asked, all=False))
        if agreed and not asked:
            self._stopper.asked = signal.SIGTERM
        return agreed
