"""The stages of training, one after the other; what `train.py` and `LGMMLRanker` have in common."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger
from torch import Tensor

from lgmml_torch.data.cache import Cache
from lgmml_torch.files import write_bytes
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import read_model
from lgmml_torch.progress import progress_bar
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import KeepCheckpoints
from lgmml_torch.training.datamodule import RankingDataModule
from lgmml_torch.training.distances import compute_distances
from lgmml_torch.training.module import LGMMLModule, OptimizerFactory

log = logging.getLogger(__name__)

FitBank = Callable[..., Bank]
MakePhi = Callable[..., Phi]


@dataclass
class Prepared:
    """Preprocessing and metrics, fitted, and the distances of every split: all that training Φ needs."""

    preprocess: Preprocess
    bank: Bank
    kernel: str
    splits: dict[str, RankingData]
    dists: dict[str, Tensor] = field(default_factory=dict)

    def model(self, make_phi: MakePhi) -> LGMML:
        """A ranker with fresh weights: the bank's own Φ₀ where it has one."""
        train = self.splits["train"]
        start = {} if self.bank.phi is None else {"init": self.bank.phi}
        phi = make_phi(train.num_queries, self.bank.metrics.num_metrics, **start)
        model = LGMML(self.preprocess, self.bank.metrics, phi, kernel=self.kernel, qids=train.qids)
        return model.to(train.features.dtype).train()


def prepare(
    train: RankingData,
    valid: RankingData | None,
    *,
    preprocess: Preprocess,
    fit_bank: FitBank,
    kernel: str = "paper",
    seed: int = 0,
    on_round: Callable[[int, Any], None] | None = None,
) -> Prepared:
    """Fit the preprocessing on the training lists, then build the local metrics in closed form."""
    features = preprocess.fit_transform(train.features, train.offsets)
    fitted = train.replace(features=features)
    seen = None if valid is None else valid.replace(features=preprocess(valid.features, valid.offsets))
    log.info("%d features after preprocessing, of %d", features.shape[1], train.num_features)
    with progress_bar("local metrics", total=1.0) as report:

        def tell(done: int, info: Any) -> None:
            report(done / max(info.total, 1))
            if on_round is not None:
                on_round(done, info)

        bank = fit_bank(fitted, seen, seed=seed, on_round=tell)
    log.info("%d local metrics", bank.metrics.num_metrics)
    splits = {"train": train} if valid is None else {"train": train, "valid": valid}
    return Prepared(preprocess, bank, kernel, splits)


def add_distances(
    prepared: Prepared, model: LGMML, cache: Cache | None = None, dtype: torch.dtype | None = None
) -> None:
    """Distances of every split that has none yet, kept in ``dtype``; see `compute_distances`."""
    for name, data in prepared.splits.items():
        if name not in prepared.dists:
            with progress_bar(f"distances, {name}", total=data.num_documents) as report:
                prepared.dists[name] = compute_distances(model, data, cache=cache, dtype=dtype, progress=report)


def train_phi(
    prepared: Prepared,
    *,
    make_phi: MakePhi,
    folder: str | Path,
    loader: Mapping[str, Any] | None = None,
    margin: float = 0.1,
    deviation_penalty: float = 0.0,
    optimizer: OptimizerFactory | None = None,
    step_size: Callable[[int], float] | None = None,
    keep: str = "best",
    every_n_steps: int = 500,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
    trainer: Mapping[str, Any] | Callable[..., pl.Trainer] | None = None,
    seed: int = 0,
    resume: str | Path | None = None,
    preset: str = "default",
    cache: Cache | None = None,
    distances: torch.dtype | None = None,
) -> tuple[LGMMLModule, KeepCheckpoints, pl.Trainer]:
    """Train Φ by sampled WARP in Lightning; the module comes back with the weights that validation kept.

    Args:
        prepared: from `prepare`.
        make_phi: called with the numbers of queries and metrics.
        folder: for ``best.ckpt`` and ``last.ckpt``.
        loader: settings of `RankingDataModule`.
        margin: ζ.
        deviation_penalty: see `LGMMLModule`.
        optimizer: see `LGMMLModule`.
        step_size: see `LGMMLModule`.
        keep: weights to come back with: ``"best"`` by validation NDCG@10, or ``"last"``.
        every_n_steps: how often ``last.ckpt`` is written within an epoch.
        callbacks: further ones.
        loggers: e.g. TensorBoard.
        trainer: settings of `pytorch_lightning.Trainer`, or something that makes one of callbacks and loggers.
        seed: of all draws.
        resume: a ``last.ckpt`` to go on from.
        preset: metric definitions.
        cache: where distances are kept; in memory when None.
        distances: dtype they are kept in: the model's when None, or a half precision.
    """
    model = prepared.model(make_phi)
    add_distances(prepared, model, cache, distances)
    module = LGMMLModule(
        model.spec(),
        model,
        margin=margin,
        deviation_penalty=deviation_penalty,
        optimizer=optimizer,
        step_size=step_size,
        preset=preset,
    )
    for name, data in prepared.splits.items():
        module.attach(name, data, prepared.dists[name])
    splits = prepared.splits
    data_module = RankingDataModule(
        splits["train"], splits.get("valid"), splits.get("test"), seed=seed, **(loader or {})
    )
    keeper = KeepCheckpoints(folder, every_n_steps=every_n_steps)
    if resume is not None:
        _bring_best(Path(resume), keeper.best_file)
    make: Callable[..., pl.Trainer] = (
        trainer if callable(trainer) else partial(pl.Trainer, **{**QUIET, **(trainer or {})})
    )
    with quiet_lightning():
        no_validation = {} if "valid" in splits else {"limit_val_batches": 0}
        lightning = make(callbacks=[*callbacks, keeper], logger=list(loggers), **no_validation)
        lightning.fit(module, data_module, ckpt_path=resume, weights_only=True)
    file = keeper.best_file if keep == "best" else keeper.last_file
    if lightning.is_global_zero or file.exists():
        _, tensors = read_model(file)
        module.model.load_state_dict(tensors)
    module.model.eval()
    return module, keeper, lightning


def _bring_best(resume: Path, best_file: Path) -> None:
    """A run resumed in another folder may never beat the best epoch so far: that model has to come along."""
    earlier = resume.parent / best_file.name
    if earlier.is_file() and not best_file.exists():
        write_bytes(best_file, earlier.read_bytes())


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
