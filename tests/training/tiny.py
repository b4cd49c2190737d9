"""A small problem and its trained model, for tests; also run as a program that tests kill and resume.

python -m tests.training.tiny FOLDER RESULT [--resume] [--workers N] [--die-at STEP] [--devices N] [--mode MODE]
    [--dense] [--deviations] [--optimizer NAME] [--momentum M] [--accumulate N] [--epochs N]
    [--rate R] [--init PHI]
"""

from __future__ import annotations

import argparse
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lgmml_torch.data.generated import letor_like
from lgmml_torch.fitting.sampled import fit_sampled
from lgmml_torch.fitting.trained import TrainedBuilder
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.steps import RemoveConstant, Standardize
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import LogModel, OneCycle
from lgmml_torch.training.losses import Loss, Softmax, Warp
from lgmml_torch.training.module import Dropout
from lgmml_torch.training.recipe import PhiSettings, Recipe, TrainerSettings
from lgmml_torch.training.stages import Prepared, Trained, prepare, quiet_lightning, train_phi


def splits(dtype: torch.dtype = torch.float32) -> tuple[RankingData, ...]:
    data = letor_like(40, 8, seed=1, dtype=dtype)
    return data.split((0.5, 0.25, 0.25), seed=0)


def trained_recipe(loader: dict[str, Any] | None = None, **phi: Any) -> Recipe:
    """Metrics that are trained, too, with everything random that training has."""
    settings = PhiSettings(
        loader={"batch_size": 3, **(loader or {})},
        step_size=OneCycle(),
        dropout=Dropout(0.2, 0.2),
        **{**phi, "loss": Softmax(), "optimizer": partial(torch.optim.AdamW, lr=0.01)},
    )
    fit_bank = TrainedBuilder(num_metrics=6, rank=2)
    return Recipe(lambda: Chain([RemoveConstant(), Standardize()]), fit_bank, partial(Phi, mode="shared"), settings)


def recipe(
    mode: str = "per_query",
    loader: dict[str, Any] | None = None,
    *,
    sparse: bool | None = None,
    deviations: bool = False,
    init: float = 1.0,
    **phi: Any,
) -> Recipe:
    if mode == "trained":
        return trained_recipe(loader, **phi)
    rate = 0.1 if mode == "per_query" else 0.01
    sparse = mode == "per_query" if sparse is None else sparse
    rows: dict[str, Any] = {"mode": mode, "sparse": sparse, "deviations": deviations, "init": init}
    if mode == "per_query":
        rows["policy"] = "mean"  # a checkpoint does not know what validation chooses in the end
    return Recipe(
        preprocess=lambda: Chain([RemoveConstant(), Standardize()]),
        fit_bank=lambda data, valid=None, *, seed=0, on_round=None: fit_sampled(data, valid, num_metrics=6, seed=seed),
        make_phi=partial(Phi, **rows),
        phi=PhiSettings(
            loader={"batch_size": 3, **(loader or {})},
            optimizer=phi.pop("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=rate)),
            **phi,
        ),
    )


def prepared(dtype: torch.dtype = torch.float32, mode: str = "per_query") -> Prepared:
    return prepare(dict(zip(("train", "valid", "test"), splits(dtype), strict=True)), recipe(mode))


class DieAt(pl.Callback):
    """Kills the process the hard way after a number of steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path,
    *,
    mode: str = "per_query",
    workers: int = 0,
    epochs: int = 3,
    every_n_steps: int = 2,
    callbacks: tuple[pl.Callback, ...] = (),
    resume: bool = False,
    dtype: torch.dtype = torch.float32,
    batching: str = "lists",
    loss: Loss | None = None,
    found: Prepared | None = None,
    loader: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **phi: Any,
) -> Trained:
    around = TrainerSettings(
        folder=folder,
        trainer={"max_epochs": epochs, "accelerator": "cpu", **(trainer or {})},
        callbacks=callbacks,
        resume=folder / "last.ckpt" if resume else None,
        every_n_steps=every_n_steps,
    )
    settings = recipe(
        mode, {"num_workers": workers, "batching": batching, **(loader or {})}, loss=loss or Warp(), **phi
    )
    return train_phi(found or prepared(dtype, mode), settings, around)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--mode", default="per_query")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--deviations", action="store_true")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--momentum", type=float)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--init", type=float, default=1.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    extra = {"devices": options.devices, "strategy": "ddp"} if options.devices > 1 else {}
    remembered = {} if options.momentum is None else {"momentum": options.momentum}
    trained = train(
        options.folder,
        mode=options.mode,
        sparse=False if options.dense else None,
        deviations=options.deviations,
        init=options.init,
        optimizer=partial(getattr(torch.optim, options.optimizer), lr=options.rate, **remembered),
        workers=options.workers,
        epochs=options.epochs,
        resume=options.resume,
        keep="last",
        callbacks=(LogModel(pictures=False), *(() if options.die_at is None else (DieAt(options.die_at),))),
        trainer={"accumulate_grad_batches": options.accumulate, **extra},
    )
    module, trainer = trained.module, trained.trainer
    with quiet_lightning():
        found = trainer.test(module, trainer.datamodule, verbose=False)[0]
    counted, curve = module.counts["test"], trained.keeper.curve
    if trainer.is_global_zero:
        content = {"phi": module.model.state_dict(), "test": found, "curve": curve, "counted": counted}
        torch.save(content, options.result)


if __name__ == "__main__":
    main()
