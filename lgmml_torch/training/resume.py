"""What a run leaves to start from: checkpoints, the parts of a model, and the state of a fit that was killed."""

from __future__ import annotations

import hashlib
import io
import logging
import math
import pickle
import time
import uuid
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lgmml_torch import distributed
from lgmml_torch.checks import CheckpointError, ConfigError, DataWarning, LGMMLError
from lgmml_torch.files import sweep, write_bytes
from lgmml_torch.fitting.bank import Bank, BankBuilder
from lgmml_torch.functional.measures import Measure
from lgmml_torch.models.encode import CategoryEncoder, CategorySettings, encode_splits
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import load_archive, load_checkpoint, read_model, tensors_digest, write_checkpoint
from lgmml_torch.ragged import RankingData

if TYPE_CHECKING:
    from lgmml_torch.training.module import LGMMLModule

log = logging.getLogger(__name__)

_ROUNDING = 1e-9  # a mean over queries may differ by less than this with the number of processes
STATE_SECONDS = 10.0  # between two states on disk, each of a few hundred kB


@dataclass(frozen=True)
class Start:
    """The parts of an earlier model that a new fit starts from; copies, so that the model does not change."""

    preprocess: Preprocess  # fitted
    bank: Bank  # the metrics and, as Φ₀, the mean of the model's weights
    encoder: CategoryEncoder | None  # turns categories into numbers; None without categories
    feature_names: tuple[str, ...] | None  # of the encoded features; None without names
    shared: bool  # whether all queries share the model's weights
    based: bool  # whether the model adds its scores to those of a tree model

    @classmethod
    def of(cls, model: LGMML) -> Start:
        """The parts of a model."""
        rows = model.phi.table.weight.detach()
        phi = rows.mean(0)
        if not len(rows):  # as in some checkpoints of release 0.2
            phi = rows.new_ones(rows.shape[1])
        bank = Bank(deepcopy(model.metrics), model.kernel, phi)
        shared = model.phi.mode == "shared" and not model.phi.deviations
        return cls(deepcopy(model.preprocess), bank, model.encoder, model.feature_names, shared, model.base is not None)

    @property
    def kind(self) -> str:
        """Of the metrics: trained ones look at all features through factors of low rank, others can be boosted."""
        for block in self.bank.metrics.iter_blocks():
            if not block.is_full or block.factors.shape[2] >= block.factors.shape[1]:
                return "boosted"
        return "trained"

    def check_growing(self) -> None:
        """Require a model that metrics can be added to: without weights for single queries, or trees."""
        if not self.shared:
            raise LGMMLError("the model to add rounds to must have weights Φ shared by all queries, got others")
        if self.based:
            raise LGMMLError("the model to add rounds to must stand alone, got one that adds to a tree model")

    def read(self, splits: Mapping[str, RankingData], settings: CategorySettings) -> dict[str, RankingData]:
        """All splits with the categories and feature names of the model; other features are refused."""
        splits, encoder = encode_splits(splits, settings, self.encoder)
        train, width = splits["train"], self.preprocess.num_features_in
        if train.num_features != width or encoder is not self.encoder:
            raise ConfigError(f"the model to start from has {width} features, the data has {train.num_features}")
        names = train.feature_names
        if names is None:
            return {name: part.replace(feature_names=self.feature_names) for name, part in splits.items()}
        if self.feature_names is not None and names != self.feature_names:
            unknown = sorted(set(names) - set(self.feature_names))[:3]
            reason = f"unknown {unknown}"
            if set(names) == set(self.feature_names):
                reason = "the same names in another order"
            raise ConfigError(f"the data must have the features of the model to start from, in order, got {reason}")
        return dict(splits)


class KeepCheckpoints(Checkpoint):
    """Writes ``best.ckpt`` whenever validation improves, the untrained Φ of epoch 0 included, and ``last.ckpt``.

    The higher the ``monitor``, a validation metric, the better. ``last.ckpt`` is written every so many steps, and at
    the end of an epoch. A run is resumed with the same seed only.
    """

    def __init__(self, folder: Path, *, monitor: str, every_n_steps: int, seed: int) -> None:
        self.best_file, self.last_file = folder / "best.ckpt", folder / "last.ckpt"
        self.monitor, self.every_n_steps, self.seed = monitor, every_n_steps, seed
        self.best, self.best_epoch = -math.inf, -1
        self.curve: dict[int, float] = {}
        self.run = uuid.uuid4().hex  # so that a file of another run is noticed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate the starting weights, unless this run resumes from a checkpoint."""
        self.run = trainer.strategy.broadcast(self.run)
        if not self.curve and trainer.enable_validation:
            self._validate(trainer, pl_module, 0)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Write ``last.ckpt`` in the middle of an epoch."""
        if trainer.global_step % self.every_n_steps == 0:
            trainer.save_checkpoint(self.last_file, weights_only=False)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the epoch that has just ended with the best one."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            value = float(trainer.callback_metrics.get(self.monitor, math.nan))
            self._judge(trainer, trainer.current_epoch + 1, value)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write ``last.ckpt``; the last epoch is validated, or without validation lists the best one."""
        epoch = trainer.current_epoch + 1
        if not trainer.enable_validation:
            self.best, self.best_epoch = math.nan, epoch
            trainer.save_checkpoint(self.best_file, weights_only=False)
        elif epoch not in self.curve and _ends(trainer):
            self._validate(trainer, pl_module, epoch)
        trainer.save_checkpoint(self.last_file, weights_only=False)

    def _validate(self, trainer: pl.Trainer, pl_module: pl.LightningModule, epoch: int) -> None:
        """Judge weights at a moment at which Lightning does not validate."""
        lists = trainer.val_dataloaders
        if lists is None:
            lists = trainer.datamodule.val_dataloader()  # type: ignore[attr-defined]
        values = cast("LGMMLModule", pl_module).validate_now(lists)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        self._judge(trainer, epoch, values.get(self.monitor, math.nan))

    def _judge(self, trainer: pl.Trainer, epoch: int, value: float) -> None:
        self.curve[epoch] = value
        undecided = math.isnan(value) and self.best == -math.inf  # no validation query has a relevant document
        if value > self.best + _ROUNDING:
            self.best = value
        elif not undecided:
            return
        self.best_epoch = epoch
        trainer.save_checkpoint(self.best_file, weights_only=False)

    def state_dict(self) -> dict[str, Any]:
        """For resuming."""
        names = ("best", "best_epoch", "run", "seed")
        return {"curve": dict(self.curve), **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """For resuming; a checkpoint of a run with another seed is refused."""
        seed = state_dict.get("seed", self.seed)
        if seed != self.seed:
            raise ConfigError(f"`seed` must be {seed}, as of the run that is resumed, got {self.seed}")
        self.best, self.best_epoch = state_dict["best"], state_dict["best_epoch"]
        self.curve = dict(state_dict["curve"])
        self.run = state_dict.get("run", self.run)

    def continue_from(self, checkpoint: Path, loss: str) -> None:
        """Go on from a checkpoint: its best weights so far, which this run may never beat, come to this folder.

        Another loss is refused, and best weights of another run. Of functions, a checkpoint keeps the names.
        """
        earlier_loss = load_checkpoint(checkpoint)["hyper_parameters"].get("loss", {}).get("name", loss)
        if earlier_loss != loss:
            raise ConfigError(f"`loss` must be {earlier_loss!r}, as of the run that is resumed, got {loss!r}")
        for folder in checkpoint.parents[:2]:  # of checkpoints and of the whole run
            sweep(folder)
        earlier = self.best_file
        if not earlier.exists():
            earlier = checkpoint.parent / earlier.name
        if not earlier.is_file():
            log.warning("There is no %s beside %s: its weights count as the best so far.", earlier.name, checkpoint)
            earlier = checkpoint
        _check_same_run(earlier, _run_of(checkpoint))
        if earlier != self.best_file:
            write_bytes(self.best_file, earlier.read_bytes())

    def load_kept(self, module: LGMMLModule, keep: str) -> None:
        """Load the ``"best"`` or the ``"last"`` weights on all processes; only rank 0 needs the file."""
        model, file = module.model, self.last_file
        if keep == "best":
            file = self.best_file
        if file.exists() or distributed.rank() == 0:
            _check_same_run(file, self.run)
            model.load_state_dict(read_model(file)[1])
            if module.position_bias is not None:
                module.position_bias.data.copy_(load_checkpoint(file)["state_dict"]["position_bias"])
        distributed.broadcast_tensors(model.state_dict())

    def keep_start(self, module: LGMMLModule, lists: DataLoader[Tensor] | list[Any]) -> None:
        """For training with no epochs: the starting weights are the model, judged by the validation lists, if any."""
        module.on_fit_start()
        self.best_epoch = 0
        if not isinstance(lists, list):
            self.best = self.curve[0] = module.validate_now(lists)[self.monitor]


def _ends(trainer: pl.Trainer) -> bool:
    """Whether the epoch that ends is the last one."""
    steps = 0 < trainer.max_steps <= trainer.global_step
    return trainer.should_stop or steps or trainer.current_epoch + 1 == trainer.max_epochs


def _run_of(file: Path) -> str | None:
    """The id of the run that wrote a checkpoint; None for checkpoints of release 0.1."""
    states = load_checkpoint(file).get("callbacks", {})
    return cast("str | None", states.get(KeepCheckpoints.__qualname__, {}).get("run"))


def _check_same_run(file: Path, run: str | None) -> None:
    """Require that a checkpoint is of a run, where both ids are known."""
    written = _run_of(file)
    if None not in (written, run) and written != run:
        raise CheckpointError(f"{file} belongs to another run; put back the file of the run that is resumed")


class Unfinished:
    """The state of an unfinished fit of a bank, kept on disk so that a killed run resumes when it is repeated.

    A state belongs to the builder with its settings, the seed and the data.
    """

    def __init__(
        self,
        folder: Path | None,  # of all states; None keeps nothing
        builder: BankBuilder,  # of the bank; only some can resume
        data: RankingData,  # preprocessed training lists
        valid: RankingData | None,  # and validation lists
        seed: int,  # of the fit
        start: Bank | None = None,  # the bank that the fit adds to
        measure: Measure | None = None,  # what decides when the fit stops, where it is not the usual one
    ) -> None:
        self._builder = builder
        self._written = time.monotonic()
        self.path: Path | None = None
        if folder is not None and builder.resumes:
            parts = [data]
            if valid is not None:
                parts.append(valid)
            tensors = [part.offsets for part in parts]
            for part in parts:
                tensors += part.of_documents(lambda values: values).values()
                if part.query_weights is not None:
                    tensors.append(part.query_weights)
            text = f"{builder} {measure and measure.name} {seed} {distributed.world_size()} {tensors_digest(tensors)}"
            if start is not None:
                text += f" {start.digest}"
            name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            self.path = folder / f"{distributed.broadcast(name)}.bank"

    def arguments(self) -> dict[str, Any]:
        """The builder's ``resume`` argument, if an earlier run has left a state."""
        if self.path is None:
            return {}
        # That of rank 0: another machine may have an older one.
        content = None
        if self.path.is_file():
            content = self.path.read_bytes()
        content = distributed.broadcast(content)
        if content is None:
            return {}
        try:
            kept = load_archive(io.BytesIO(content), self.path.name)
            if kept["fit"] != self.path.stem:
                raise CheckpointError("it belongs to another fit")
            state = self._builder.load_state(kept["state"])
        except (CheckpointError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:100]
            warnings.warn(
                f"{self.path} is damaged ({reason}); the fit starts from the beginning", DataWarning, stacklevel=2
            )
            return {}
        log.info("the fit of local metrics resumes after round %d of an earlier run", state.round)
        return {"resume": state}

    def keep(self, info: Any) -> None:
        """Write the state on rank 0, if the last one is some seconds old."""
        if self.path is None or distributed.rank() or time.monotonic() - self._written < STATE_SECONDS:
            return
        write_checkpoint(self.path, {"fit": self.path.stem, "state": info.state.export()})
        self._written = time.monotonic()

    def done(self) -> None:
        """Remove the state of a fit that has finished."""
        if self.path is not None and distributed.rank() == 0:
            self.path.unlink(missing_ok=True)
