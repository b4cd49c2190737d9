"""The stages of training, one after the other; what `train.py` and `LGMMLRanker` both compose.

A `Recipe` says what is fitted, `Surroundings` where and under whose eyes; both are fixed before the first stage starts,
and `rehearse` finds out what of a recipe cannot work before any time is spent on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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

from lgmml_torch import distributed
from lgmml_torch.checks import ConfigError, LGMMLError, check_choice, check_positive, check_whole
from lgmml_torch.data.cache import Cache
from lgmml_torch.fitting.bank import (
    Bank,
    BankBuilder,
    OnRound,
    check_builder,
    grows,
    takes_measure,
    takes_positions,
    takes_spread,
    trains_metrics,
)
from lgmml_torch.functional.positions import num_positions, position_curve
from lgmml_torch.functional.ranking.custom import Function, Measure
from lgmml_torch.functional.ranking.measures import mean_measure
from lgmml_torch.models.encode import CategoryEncoder, CategorySettings, encode_splits
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.progress import progress_bar
from lgmml_torch.ragged import RankingData
from lgmml_torch.sharing import gather_lists
from lgmml_torch.training.batches import TrainingBatches, telling_loader_failures
from lgmml_torch.training.callbacks import KeepCheckpoints, Story, in_order
from lgmml_torch.training.checkpoints import CheckpointFiles
from lgmml_torch.training.datamodule import RankingDataModule
from lgmml_torch.training.distances import compute_distances
from lgmml_torch.training.kept import bring_best, keep_start, take_kept
from lgmml_torch.training.losses import Loss, Warp
from lgmml_torch.training.module import (
    DEFAULT_OPTIMIZER,
    Dropout,
    LGMMLModule,
    OptimizerFactory,
    make_optimizer,
)
from lgmml_torch.training.processes import trainer_settings
from lgmml_torch.training.quiet import QUIET, quiet_lightning
from lgmml_torch.training.rows import OwnRows, OwnRowsFiles, OwnRowsStrategy
from lgmml_torch.training.start import Start
from lgmml_torch.training.step_size import StepSize
from lgmml_torch.training.unfinished import Unfinished
from lgmml_torch.training.views import Views, fit_through, sample_of, seen_through

log = logging.getLogger(__name__)

MakePhi = Callable[..., Phi]
KEPT = ("best", "last")
USUAL = "ndcg@10"  # the measure that decides unless another one is asked for


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
        categories: how they become numbers, where the data has any.
        measure: what decides on validation lists when to stop and what to keep, by name or as a function.
        grows: whether the metrics are added to those of an earlier model.
    """

    preprocess: Callable[[], Preprocess]
    fit_bank: BankBuilder
    make_phi: MakePhi = Phi
    phi: PhiSettings = field(default_factory=PhiSettings)
    seed: int = 0
    categories: CategorySettings = field(default_factory=CategorySettings)
    measure: str | Function | Measure = USUAL
    grows: bool = False

    @property
    def own_measure(self) -> Measure | None:
        """The measure, where it is not the usual one."""
        found = Measure.of(self.measure)
        return None if found == Measure(USUAL) else found

    def build_bank(self, start: Bank | None = None) -> BankBuilder:
        """The builder with all it shall know beside the data."""
        builder: Callable[..., Bank] = self.fit_bank
        if self.own_measure is not None and takes_measure(builder):
            builder = partial(builder, measure=self.own_measure)
        return builder if start is None else partial(builder, start=start)


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
        splits: raw lists, with numbers in place of categories.
        inputs: of the splits so far: distances, or preprocessed features where the metrics are trained.
        encoder: what made numbers of categories, where there were any.
    """

    preprocess: Preprocess
    bank: Bank
    splits: Mapping[str, RankingData]
    inputs: dict[str, Tensor | Views] = field(default_factory=dict)
    encoder: CategoryEncoder | None = None

    def model(self, make_phi: MakePhi) -> LGMML:
        """A ranker with fresh weights: the bank's own Φ₀ where it has one."""
        train = self.splits["train"]
        start = {} if self.bank.phi is None else {"init": self.bank.phi}
        phi = make_phi(train.num_queries, self.bank.metrics.num_metrics, **start)
        elsewhere = train.spread is not None and distributed.place()[1] > 1
        if elsewhere and phi.policy == "knn":
            raise ConfigError("`phi.policy` 'knn' needs all training queries in one process; 'mean' and 'ones' do not")
        if elsewhere and not phi.rows_by_query:
            phi.num_queries = len(train.all_sizes)
        metrics = self.bank.metrics
        if self.bank.trained:  # on a copy: the bank may be the start of several models
            metrics = deepcopy(metrics)
            metrics.train_metrics_()
        model = LGMML(
            self.preprocess,
            metrics,
            phi,
            kernel=self.bank.kernel,
            qids=() if elsewhere and not phi.rows_by_query else train.qids,
            feature_names=train.feature_names,
            encoder=self.encoder,
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
        """The ranker; of several processes that share the training queries, each has the rows of its own."""
        return self.module.model

    def whole_model(self, folder: Path) -> LGMML:
        """The ranker with the rows of all queries on the first process; ``folder`` has room for them."""
        rows = self.module.rows
        return self.model if rows is None else rows.whole(self.model, folder)

    @property
    def position_bias(self) -> dict[int, float] | None:
        """What being shown at each position added to a score in training; None without positions."""
        bias = self.module.position_bias
        return None if bias is None else position_curve(bias, self.module.data_of("train"))


def rehearse(recipe: Recipe) -> None:
    """Try the parts of a recipe that need no data worth the name, so that a mistake in them costs no fit.

    Raises:
        LGMMLError: what is wrong.
    """
    if recipe.grows and not (grows(recipe.fit_bank) or trains_metrics(recipe.fit_bank)):
        raise ConfigError("`grow` must be false for metrics that are neither boosted nor trained, got true")
    growing = recipe.grows and grows(recipe.fit_bank)
    builder: Callable[..., Bank] = recipe.build_bank()
    check_builder(partial(builder, start=True) if growing else builder)
    phi = recipe.make_phi(1, 1)
    try:
        make_optimizer(recipe.phi.optimizer, list(phi.parameters()), sparse=phi.sparse)
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, LGMMLError) else ConfigError(f"`optimizer`: {error}") from error
    check_positive("deviation_penalty", recipe.phi.deviation_penalty, zero=True)
    smallest = RankingData.from_arrays([[0.0], [1.0]], [0, 1], qid=[0, 0])
    mean_measure(smallest.labels, smallest, recipe.measure)
    settings = dict(recipe.phi.loader)
    check_whole("num_workers", settings.pop("num_workers", 0), zero=True)
    try:
        TrainingBatches(smallest, draws=recipe.phi.loss.draws, **settings)
    except TypeError as error:
        raise ConfigError(f"`loader`: {error}") from error


def prepare(
    splits: Mapping[str, RankingData],
    recipe: Recipe,
    on_round: OnRound | None = None,
    unfinished: Path | None = None,
    start: Start | None = None,
) -> Prepared:
    """Make numbers of categories, fit the preprocessing on the training lists, then build the local metrics.

    ``unfinished`` is a folder for how far a fit has come: one that was killed goes on from there when it is repeated.
    With a ``start``, its preprocessing stays, and metrics are added to its own.

    The preprocessing, and all metrics but boosted ones, are fitted on a sample of the lists where they have more than
    `SAMPLE_VALUES` values: the same one in memory, from shards, and on any number of processes.
    """
    rehearse(recipe)
    if start is None:
        splits, encoder = encode_splits(splits, recipe.categories)
    else:
        start.check_growing()
        splits, encoder = start.read(splits, recipe.categories), start.encoder
    preprocess = recipe.preprocess() if start is None else start.preprocess
    train = splits["train"]
    check_positions(train, takes_positions(recipe.fit_bank) or trains_metrics(recipe.fit_bank))
    fitted, seen = _through(preprocess, splits, recipe, unfinished, known=start is not None)
    log.info("%d features after preprocessing, of %d", fitted.num_features, train.num_features)
    earlier = None if start is None else start.bank
    state = Unfinished(unfinished, recipe.build_bank(), fitted, seen, recipe.seed, earlier)
    with progress_bar("local metrics", total=1.0) as report:

        def tell(done: int, info: Any) -> None:
            report(done / max(info.total, 1))
            state.keep(info)
            if on_round is not None:
                on_round(done, info)

        bank = recipe.build_bank(earlier)(fitted, seen, seed=recipe.seed, on_round=tell, **state.found())
    state.done()
    log.info("%d local metrics", bank.metrics.num_metrics)
    inputs: dict[str, Tensor | Views] = {}
    for name, part in (("train", fitted), ("valid", seen)):
        if bank.trained and part is not None and splits[name].spread is None and len(part) == len(splits[name]):
            inputs[name] = part.features
    return Prepared(preprocess, bank, dict(splits), inputs, encoder)


def check_positions(train: RankingData, fitted: bool) -> None:
    """Refuse positions where nothing would learn what they add to a score.

    Raises:
        ConfigError: the metrics are neither boosted nor trained now.
    """
    if train.positions is not None and not fitted:
        raise ConfigError("positions need metrics that are boosted or trained in this fit, got others")


def _through(
    preprocess: Preprocess, splits: Mapping[str, RankingData], recipe: Recipe, folder: Path | None, *, known: bool
) -> tuple[RankingData, RankingData | None]:
    """Training and validation lists as the builder shall see them; the preprocessing is fitted unless it is known."""
    train, valid = splits["train"], splits.get("valid")
    trains, everywhere = trains_metrics(recipe.fit_bank), takes_spread(recipe.fit_bank)
    shown = sample_of(train, recipe.seed, folder)
    wanted = train if everywhere and not trains else shown
    fitted = seen_through(preprocess, wanted, folder) if known else fit_through(preprocess, shown, wanted, folder)
    if not everywhere:
        fitted = gather_lists(fitted, folder)
    if valid is None or (trains and valid.spread is not None):
        return fitted, None
    judged = valid if everywhere else gather_lists(sample_of(valid, recipe.seed, folder), folder)
    return fitted, seen_through(preprocess, judged, folder)


def add_inputs(prepared: Prepared, model: LGMML, cache: Cache | None = None, dtype: torch.dtype | None = None) -> None:
    """What training needs of every split that has nothing yet: distances, kept in ``dtype``, or features."""
    for name, data in prepared.splits.items():
        if name in prepared.inputs:
            continue
        if prepared.bank.trained:
            views = Views(data.features, prepared.preprocess, model.metrics.scales.dtype)
            prepared.inputs[name] = views if data.spread is not None else views.of(slice(None), data.offsets)
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
    measure = Measure.of(recipe.measure)
    keeper = KeepCheckpoints(around.folder, monitor=f"val/{measure.name}", every_n_steps=around.every_n_steps)
    if around.resume is not None:
        bring_best(around.resume, keeper.best_file)
    with quiet_lightning(), telling_loader_failures():
        lightning = make_trainer(around, keeper, module.rows, validated="valid" in splits)
        lightning.fit(module, data_module, ckpt_path=around.resume, weights_only=True)
    if lightning.max_epochs == 0:
        keep_start(module, keeper, splits.get("valid"), measure)
    if lightning.max_epochs:
        take_kept(module, keeper.best_file if settings.keep == "best" else keeper.last_file, keeper.run)
    module.model.metrics.train_metrics_(False)
    module.model.eval()
    kept = keeper.best_epoch if settings.keep == "best" else lightning.current_epoch
    for story in (callback for callback in around.callbacks if isinstance(callback, Story)):
        story.show_kept(lightning, module, kept)
    return Trained(module, keeper, lightning)


def make_module(prepared: Prepared, recipe: Recipe, cache: Cache | None = None) -> LGMMLModule:
    """The Lightning module of a fresh model, with what it needs of every split attached."""
    model, settings = prepared.model(recipe.make_phi), recipe.phi
    train, bias = prepared.splits["train"], prepared.bank.position_bias
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
        num_positions=len(bias) if bias is not None else num_positions(train),
        measure=recipe.own_measure,
    )
    if bias is not None and module.position_bias is not None:
        module.position_bias.data.copy_(bias)
    for name, data in prepared.splits.items():
        module.attach(name, data, prepared.inputs[name])
    spread = prepared.splits["train"].spread
    if spread is not None and model.phi.rows_by_query:
        module.keep_rows(OwnRows(model, spread))
    return module


def make_trainer(
    around: Surroundings, keeper: KeepCheckpoints, rows: OwnRows | None = None, *, validated: bool
) -> pl.Trainer:
    """Lightning's trainer; without validation queries it must not ask for any.

    Raises:
        ConfigError: gradients are to be clipped whose size no process knows.
    """
    make: Callable[..., pl.Trainer] = (
        around.trainer if callable(around.trainer) else partial(pl.Trainer, **{**QUIET, **around.trainer})
    )
    settings = trainer_settings() | ({} if validated else {"limit_val_batches": 0})
    if rows is not None and "strategy" in settings:
        settings["strategy"] = OwnRowsStrategy(shares_nothing=rows.shares_nothing)
    trainer = make(callbacks=in_order([*around.callbacks, keeper]), logger=list(around.loggers), **settings)
    if rows is not None and trainer.world_size > 1 and trainer.gradient_clip_val:
        raise ConfigError(
            "`trainer.gradient_clip_val` must be null where each process has the rows of Φ of its own queries, "
            f"got {trainer.gradient_clip_val}"
        )
    trainer.strategy.checkpoint_io = CheckpointFiles() if rows is None else OwnRowsFiles(rows)
    distributed.leave_in_the_end()  # Lightning, which may start processes by itself, does so for NCCL only
    return trainer
