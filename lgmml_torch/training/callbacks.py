"""What happens around training: figures for loggers, lines for the log, stopping, learning rates."""

from __future__ import annotations

import logging
import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger

from lgmml_torch import plots
from lgmml_torch.checks import ConfigError, check_unit_interval
from lgmml_torch.training.loggers import LoggerOutput
from lgmml_torch.training.resume import KeepCheckpoints

if TYPE_CHECKING:
    from lgmml_torch.app.start import Watch
    from lgmml_torch.training.module import LGMMLModule

log = logging.getLogger(__name__)

_LINES = 10  # log lines for all rounds of a fit, about

# Settings of a trainer that prints no tables, bars and advice.
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
_QUIET_LOGGERS = (
    "pytorch_lightning.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "pytorch_lightning.trainer.connectors.signal_connector",
)
_QUIET_WARNINGS = (
    ".*does not have many workers.*",
    ".*is smaller than the logging interval.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    "`broadcast_buffers` is deprecated",
)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hide advice of Lightning that does not apply: loaders here send row numbers, which is cheap."""
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for message in _QUIET_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


class Horizon(NamedTuple):
    """The length of training, for rules of the learning rate."""

    queries: int
    updates: int  # single updates in all: batches times their size


StepSize = Callable[[int, Horizon], float]
"""Factor on the learning rate after a number of single updates."""


def constant() -> None:
    """No rule: the optimizer's learning rate stays as it is."""


@dataclass(frozen=True)
class Logistic:
    """μ_t = 1/(1 + exp(t/(100·Q))): half at the start, then falling within a few hundred updates per query.

    >>> Logistic()(0, Horizon(queries=10, updates=100))
    0.5
    """

    def __call__(self, updates: int, horizon: Horizon) -> float:
        """The factor after that many single updates."""
        # exp overflows beyond 709; the step is zero in any float long before.
        return 1 / (1 + math.exp(min(updates / (100 * horizon.queries), 700.0)))


@dataclass(frozen=True)
class OneCycle:
    """A rise along half a cosine over the share ``warmup`` of all updates, then a fall along the other half to zero.

    >>> rule, horizon = OneCycle(warmup=0.25, start=0.0), Horizon(queries=10, updates=100)
    >>> [round(rule(t, horizon), 3) for t in (0, 25, 100)]
    [0.0, 1.0, 0.0]
    """

    warmup: float = 0.15
    start: float = 0.04

    def __post_init__(self) -> None:
        check_unit_interval("warmup", self.warmup)
        check_unit_interval("start", self.start)

    def __call__(self, updates: int, horizon: Horizon) -> float:
        """The factor after that many single updates."""
        if horizon.updates < 0:
            raise ConfigError("`max_epochs` must be a number for one cycle of the learning rate, got none")
        done = min(1.0, updates / max(1, horizon.updates))
        if done < self.warmup:
            return self.start + (1 - self.start) * (1 - math.cos(math.pi * done / self.warmup)) / 2
        return (1 + math.cos(math.pi * (done - self.warmup) / max(1e-9, 1 - self.warmup))) / 2


class LogModel(Callback):
    """Logs Φ, statistics of the metrics and the throughput; figures only to loggers that show them."""

    def __init__(self, *, pictures: bool = True) -> None:
        self.pictures = pictures
        self._started, self._tuples = 0.0, 0
        self._steps: dict[int, int] = {0: 0}  # at the end of each epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the metrics of the start."""
        bank = cast("LGMMLModule", pl_module).model.metrics
        spectra, conditions = bank.spectra()
        quality = bank.quality[~bank.quality.isnan()]
        for output in _outputs(trainer):
            output.histogram("metrics/log10_relative_eigenvalues", spectra.clamp_min(1e-16).log10(), 0)
            output.histogram("metrics/log10_condition", conditions.log10(), 0)
            if len(quality):
                output.histogram("metrics/anchor_ndcg", quality, 0)
        if self.pictures:
            _show(trainer, "metrics/spectrum", lambda: plots.spectrum_picture(bank), 0)
        self._show_phi(trainer, pl_module, trainer.global_step)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._started, self._tuples = time.perf_counter(), 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the tuples."""
        self._tuples += len(batch.queries)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log Φ and the tuples per second of all processes."""
        seconds = time.perf_counter() - self._started
        pl_module.log("train/tuples_per_second", self._tuples / seconds, reduce_fx="sum", sync_dist=True)
        phi = cast("LGMMLModule", pl_module).model.phi.table.weight.detach()
        pl_module.log("phi/share_zero", (phi == 0).float().mean(), sync_dist=True)
        pl_module.log("phi/mean", phi.mean(), sync_dist=True)
        self._steps[trainer.current_epoch + 1] = trainer.global_step
        for output in _outputs(trainer):
            output.histogram("phi/values", phi, trainer.global_step)

    def show_kept(self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch: int) -> None:
        """Show the metrics with the weights that were kept, at the step where their epoch ended."""
        self._show_phi(trainer, pl_module, self._steps.get(epoch, trainer.global_step))

    def _show_phi(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int) -> None:
        if not self.pictures:
            return
        model = cast("LGMMLModule", pl_module).model
        names = [source.called(model.feature_names) for source in model.preprocess.sources()]
        weights = model.phi.mean_row()[0].detach()

        def draw() -> Any:
            return plots.metrics_picture(model.metrics, weights, names=names, panels=4)  # boards show it small

        _show(trainer, "metrics/learned", draw, step)


def _show(trainer: pl.Trainer, tag: str, draw: Callable[[], Any], step: int) -> None:
    """Draw a figure once and give it to every logger that shows figures; without such a logger, do not draw it."""
    outputs = [output for output in _outputs(trainer) if output.shows_pictures]
    if outputs:
        figure = draw()
        for output in outputs:
            output.picture(tag, figure, step)


def _outputs(trainer: pl.Trainer) -> list[LoggerOutput]:
    if not trainer.is_global_zero:
        return []
    return list(map(LoggerOutput.of, trainer.loggers))


def _figures(info: Any) -> dict[str, float]:
    """The numbers that a fit reports of a round."""
    figures = {}
    for name, value in vars(info).items():
        if isinstance(value, float):
            figures[name] = value
    return figures


def bank_curve(loggers: Sequence[Logger]) -> Callable[[int, Any], None]:
    """An ``on_round`` callback that sends the numbers of a round to the loggers, e.g. the validation curve."""

    def send(done: int, info: Any) -> None:
        numbers = {f"bank/{name}": value for name, value in _figures(info).items()}
        if numbers:
            for logger in loggers:
                logger.log_metrics(numbers, step=done)

    return send


def log_rounds(done: int, info: Any) -> None:
    """An ``on_round`` callback that logs about ten of the rounds, and the last one."""
    total = int(info.total)
    if done % max(1, total // _LINES) and done != total:
        return
    figures = [f"{name} {value:.4f}" for name, value in _figures(info).items()]
    log.info("%s", ", ".join([f"local metrics: {done} of {total}", *figures]))


class LogEpochs(Callback):
    """Logs the end of every epoch, with its validation measure."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning calls this after validation."""
        epoch = trainer.current_epoch + 1
        line = f"epoch {epoch} of {trainer.max_epochs}"
        for keeper in trainer.checkpoint_callbacks:
            if isinstance(keeper, KeepCheckpoints) and epoch in keeper.curve:
                measure = keeper.monitor.removeprefix("val/").replace("ndcg", "NDCG")
                line += f", validation {measure} {keeper.curve[epoch]:.4f}"
        log.info("%s", line)


class StopAtStep(Callback):
    """Ends training when it is asked to, with a ``last.ckpt`` of that very step.

    At the last batch of an epoch it lets the epoch end: validation belongs to it, and ``last.ckpt`` is written then
    anyway. Lightning's own handling of SIGTERM and Ctrl-C, which saves nothing, is replaced.
    """

    _step: int

    def __init__(self, stopper: Watch) -> None:
        self._stopper = stopper

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on a signal waits for the next step."""
        self._stopper.listen()
        self._stopper.waits = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop between epochs: everything is saved."""
        if self._asked(trainer):
            self._stopper.stop()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Note the step before the batch: accumulated gradients are in no checkpoint."""
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
        """After training, a signal may interrupt immediately."""
        self._stopper.waits = False
        self._stopper.stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """After training, a signal may interrupt immediately."""
        self._stopper.waits = False

    def _asked(self, trainer: pl.Trainer) -> bool:
        """Whether any process has been asked: all must stop at the same step."""
        asked = self._stopper.asked is not None
        any_asked = bool(trainer.strategy.reduce_boolean_decision(asked, all=False))
        if any_asked and not asked:
            self._stopper.asked = signal.SIGTERM
        return any_asked
