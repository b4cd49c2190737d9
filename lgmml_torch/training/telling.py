"""Lines about how a fit goes, for whoever asked to be told: rounds of building metrics, and epochs of training."""

from __future__ import annotations

import logging
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from lgmml_torch.training.callbacks import KeepCheckpoints

log = logging.getLogger(__name__)
LINES = 10  # about so many for all rounds together


def tell_rounds(done: int, info: Any) -> None:
    """Tell about ten of the rounds, and the last, with the figures the fit has of them; see `OnRound`."""
    total = int(info.total)
    if done % max(1, total // LINES) and done != total:
        return
    figures = [f"{name} {value:.4f}" for name, value in vars(info).items() if isinstance(value, float)]
    log.info("%s", ", ".join([f"local metrics: {done} of {total}", *figures]))


class TellEpochs(Callback):
    """Tells the end of every epoch, with what it is worth on validation where there is validation."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called before checkpoints are kept, after validation."""
        epoch = trainer.current_epoch + 1
        keeper = next(one for one in trainer.checkpoint_callbacks if isinstance(one, KeepCheckpoints))
        called = keeper.monitor.removeprefix("val/").replace("ndcg", "NDCG")
        figures = [f"validation {called} {keeper.curve[epoch]:.4f}"] if epoch in keeper.curve else []
        log.info("%s", ", ".join([f"epoch {epoch} of {trainer.max_epochs}", *figures]))
