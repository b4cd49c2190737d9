"""The stages of training, which `train.py` and `LGMMLRanker` both call: `prepare`, then `train_phi`."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.data.cache import Cache
from lgmml_torch.distributed import gather_lists
from lgmml_torch.fitting.bank import Bank, OnRound
from lgmml_torch.functional.calibration import fit_grade_map
from lgmml_torch.functional.losses import num_positions, position_curve
from lgmml_torch.functional.measures import Function, Measure, mean_measure, rank_data
from lgmml_torch.inputs import warn_if_steep
from lgmml_torch.models.encode import CategoryEncoder, encode_splits
from lgmml_torch.models.phi import AUTO, POLICIES
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.steps import KeepColumns
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.progress import progress_bar
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks
from lgmml_torch.training.batches import RankingDataModule, loader_failures_in_a_sentence
from lgmml_torch.training.callbacks import LogModel, quiet_lightning
from lgmml_torch.training.defaults import Defaults, Sizes, check_loss, choose_defaults, make_recipe
from lgmml_torch.training.losses import ListLoss
from lgmml_torch.training.module import LGMMLModule
from lgmml_torch.training.preprocessed import (
    Views,
    compute_distances,
    fit_preprocess,
    preprocessed,
    sample_of,
    select_features,
    views_fit,
)
from lgmml_torch.training.recipe import MakePhi, Recipe, TrainerSettings, rehearse
from lgmml_torch.training.resume import KeepCheckpoints, Start, Unfinished

log = logging.getLogger(__name__)

_JUDGES = 20  # validation queries that decide on the kind of metrics, at least
_LARGEST_PHI = 2 << 30  # bytes of Φ of single queries, which every process holds


@dataclass(frozen=True)
class Prepared:
    """Fitted preprocessing and metrics, and the inputs of training."""

    preprocess: Preprocess  # fitted
    bank: Bank  # fitted, or the start of one that is trained
    splits: Mapping[str, RankingData]  # raw lists, with numbers in place of categories
    # of the splits so far: distances, or preprocessed features where the metrics are trained
    inputs: dict[str, Tensor | Views] = field(default_factory=dict)
    preprocessed: dict[str, Tensor] = field(default_factory=dict)  # features in memory, until `inputs` are made of them
    encoder: CategoryEncoder | None = None  # turned categories into numbers; None without categories
    set_aside: str = ""  # which raw features were set aside, and why; empty where all stay

    def model(self, make_phi: MakePhi) -> LGMML:
        """A ranker with fresh weights: the bank's own Φ₀ where it has one.

        Weights for each query of data that processes share are refused if they are too large for every process.
        """
        train, metrics = self.splits["train"], self.bank.metrics
        queries, qids = len(train.all_lists), train.qids
        if train.all_lists.shared and distributed.world_size() > 1:
            one = make_phi(1, metrics.num_metrics)
            state = one.state_dict()
            row = sum(state[name].nbytes for name in one.rows_by_query)  # that a query adds
            if row * queries > _LARGEST_PHI:
                raise ConfigError(
                    f"Φ of {queries:,} queries takes {row * queries / 2**30:.1f} GiB on every process, more than "
                    f"{_LARGEST_PHI / 2**30:g} GiB; use phi=shared"
                )
            qids = train.all_lists.ids(qids) if row else ()
        start = {}
        if self.bank.phi is not None:
            start["init"] = self.bank.phi
        phi = make_phi(queries, metrics.num_metrics, **start)
        if self.bank.trained:  # on a copy: the bank may be the start of several models
            metrics = deepcopy(metrics)
            metrics.train_metrics_()
        model = LGMML(
            self.preprocess,
            metrics,
            phi,
            kernel=self.bank.kernel,
            qids=qids,
            feature_names=train.feature_names,
            encoder=self.encoder,
            table=train.table,
        )
        return model.to(train.features.dtype).train()

    def module(self, recipe: Recipe, cache: Cache | None = None) -> LGMMLModule:
        """The Lightning module of a fresh model, with the inputs of every split attached."""
        model, settings = self.model(recipe.make_phi), recipe.phi
        train, bias = self.splits["train"], self.bank.position_bias
        count = num_positions(train) if bias is None else len(bias)
        if train.document_weights is not None and isinstance(settings.loss, ListLoss):
            raise ConfigError(f"the loss {settings.loss.name!r} is a function without weights of documents, got some")
        self.add_inputs(model, cache, settings.distances)
        rules = dict(vars(settings))
        for name in ("loader", "keep", "distances"):  # of other parts
            del rules[name]
        rules |= {"seed": recipe.seed, "num_positions": count, "measure": recipe.own_measure}
        module = LGMMLModule(model.spec(), model, **rules)
        if bias is not None and module.position_bias is not None:
            module.position_bias.data.copy_(bias)
        for name, data in self.splits.items():
            module.attach(name, data, self.inputs[name])
        return module

    def add_inputs(self, model: LGMML, cache: Cache | None = None, dtype: torch.dtype | None = None) -> None:
        """Add the missing inputs of splits: distances in ``dtype``, or features where the metrics are trained."""
        for name, data in self.splits.items():
            if name in self.inputs:
                continue
            features = self.preprocessed.pop(name, None)
            if not self.bank.trained:
                with progress_bar(f"distances, {name}", total=data.num_documents) as report:
                    self.inputs[name] = compute_distances(
                        model, data, features=features, cache=cache, dtype=dtype, progress=report
                    )
            elif features is not None:
                self.inputs[name] = features
            else:
                views = Views(data.features, self.preprocess, model.dtype)
                kept = name != "test" and views_fit(self.splits, self.preprocess.num_features_out, model.dtype)
                self.inputs[name] = views.of(slice(None), data.offsets) if kept else views


@dataclass(frozen=True)
class Trained:
    """A trained model, its validation curve, and Lightning's objects."""

    module: LGMMLModule  # with the weights that were kept
    keeper: KeepCheckpoints  # the validation curve, by epoch, and the epoch kept
    trainer: pl.Trainer
    moved: bool  # whether the weights differ from those before training

    @property
    def model(self) -> LGMML:
        """The ranker."""
        return self.module.model

    def score(self, split: str, *, own_rows: bool = False, policy: str | None = None) -> Tensor:  # (N,)
        """`LGMML.score` of a split, from the inputs of training: no document is preprocessed again.

        With ``own_rows`` each training query uses its own row of Φ; ``policy`` takes the place of the model's own.
        """
        module, model = self.module, self.model
        data = module.data_of(split)
        if module.inputs_of(split).dtype != model.dtype:  # distances in half precision
            return model.score(data, known_queries=own_rows, policy=policy)
        scores = torch.empty(data.num_documents, dtype=model.dtype)
        for first, last in list_blocks(data.offsets, 32_768):
            rows = slice(int(data.offsets[first]), int(data.offsets[last]))
            scores[rows] = module.block_scores(split, first, last, known=own_rows, policy=policy)
        if model.base is None:
            return scores
        return model.base.add_to(scores, data)

    def calibrate(self, valid: RankingData | None) -> None:
        """Fit the model's map from scores to chances of grades to the validation lists; where none fits, log why."""
        self.model.grade_map = None
        if valid is None:
            log.info("no chances of grades: there are no validation queries to fit them to")
            return
        parts = valid.all_lists.all_gather((self.score("valid"), valid.labels))
        scores, labels = map(torch.cat, zip(*parts, strict=True))
        try:
            self.model.grade_map = fit_grade_map(scores, labels)
        except LGMMLError as error:
            log.info("no chances of grades, by the validation queries: %s", error)

    @property
    def position_bias(self) -> dict[int, float] | None:
        """The bias of each position in training; None without positions."""
        bias = self.module.position_bias
        if bias is None:
            return None
        return position_curve(bias, self.module.data_of("train"))


def choose_kind(
    splits: Mapping[str, RankingData],
    asked: Mapping[str, Any],
    seed: int,
    *,
    measure: str | Function | Measure,
    start: str | None = None,
) -> Defaults:
    """`choose_defaults` for this data; where its size leaves the kind of metrics open, validation queries decide.

    Both kinds are fitted with the smallest budget and their usual settings. Metrics are trained if they rank the
    validation queries better by more than the standard error of the difference, and boosted otherwise. With positions
    or several processes, size decides.
    """
    train, valid, sizes = splits["train"], splits.get("valid"), Sizes.of(splits["train"])
    chosen, decides = choose_defaults(sizes, asked, start=start), Measure.of(measure)
    by_size = train.all_lists.shared or distributed.world_size() > 1 or train.positions is not None
    if valid is None or by_size or start is not None or not sizes.leave_kind_open(asked):
        return chosen
    counted = ~rank_data(valid.labels.float(), valid, metrics=[decides])[decides.name].isnan()
    queries = int(counted.sum())
    if queries < _JUDGES:
        return chosen
    log.info("%s leave open which metrics rank better: a short fit of both decides", sizes)
    values = {}
    for kind in ("boosted", "trained"):
        model = _short_fit({"train": train, "valid": valid}, kind, decides, seed)
        values[kind] = rank_data(model.score("valid"), valid, metrics=[decides])[decides.name][counted]
    difference = values["trained"] - values["boosted"]
    error = float(difference.std()) / math.sqrt(queries)
    better = "trained" if float(difference.mean()) > error else "boosted"
    figures = ", ".join(f"{kind} {float(each.mean()):.4f}" for kind, each in values.items())
    why = f"{queries} validation queries after short fits, {decides.name}: {figures}, standard error {error:.4f}"
    return choose_defaults(sizes, {**asked, "bank": better}, why=why)


def _short_fit(splits: Mapping[str, RankingData], kind: str, measure: Measure, seed: int) -> Trained:
    """Metrics of one kind, with the smallest budget; boosted ones rank as well without WARP."""
    chosen = choose_defaults(Sizes.of(splits["train"]), {"bank": kind, "budget": "fast"})
    trainer = chosen.trainer
    if kind == "boosted":
        trainer["max_epochs"] = 0
    return fit_chosen(splits, make_recipe({"measure": measure}, chosen, seed), trainer)[0]


def fit_chosen(
    splits: Mapping[str, RankingData],
    recipe: Recipe,
    trainer: Mapping[str, Any],
    *,
    on_round: OnRound | None = None,
    callbacks: Sequence[Callback] = (),
    start: Start | None = None,
) -> tuple[Trained, Bank]:
    """`prepare`, then `train_phi`; nothing stays on disk."""
    prepared = prepare(splits, recipe, on_round, start=start)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"accelerator": "cpu", **trainer, "default_root_dir": folder}
        try:
            return train_phi(prepared, recipe, TrainerSettings(Path(folder), settings, callbacks)), prepared.bank
        except SystemExit as end:
            if isinstance(end.__context__, KeyboardInterrupt):  # of which Lightning has made a SystemExit
                raise KeyboardInterrupt from None
            raise


def prepare(
    splits: Mapping[str, RankingData],
    recipe: Recipe,
    on_round: OnRound | None = None,
    unfinished: Path | None = None,
    start: Start | None = None,
    *,
    resumes: bool = False,
) -> Prepared:
    """Encode categories, fit the preprocessing on the training lists, then build the local metrics.

    ``unfinished`` is a folder for the state of a fit: a killed fit resumes from it when it is repeated. With a
    ``start``, its preprocessing stays. Metrics are added to its own if the recipe and the builder grow; otherwise they
    stay, too, and are trained further where the recipe trains its own. A run that ``resumes`` has fitted all of it.

    The preprocessing, and all metrics but boosted ones, are fitted on a sample of the lists if these have more than
    `SAMPLE_VALUES` values, or from fewer where metrics are trained. The sample does not depend on shards or the number
    of processes.
    """
    if start is not None and (resumes or not (recipe.grows and recipe.builder.grows)):
        return _reused(start, splits, recipe, resumes)
    rehearse(recipe)
    check_loss(recipe.builder.kind, recipe.phi.loss)
    labels = splits["train"].labels
    if len(labels):
        warn_if_steep(float(labels.max()))
    if start is None:
        splits, encoder = encode_splits(splits, recipe.categories)
        preprocess, earlier = recipe.preprocess(), None
    else:
        start.check_growing()
        splits, encoder = start.read(splits, recipe.categories), start.encoder
        preprocess, earlier = start.preprocess, start.bank
    train = splits["train"]
    _check_positions(train, recipe.builder.takes_positions or recipe.builder.trains_metrics)
    shown, reason = sample_of(train, recipe.seed, unfinished), ""
    if start is None and recipe.chooses_features:
        preprocess, reason = _without_noise(preprocess, shown)
    fitted, seen = _through(preprocess, splits, shown, recipe, unfinished, known=start is not None)
    log.info("%d features after preprocessing, of %d", fitted.num_features, train.num_features)
    state = Unfinished(unfinished, recipe.builder, fitted, seen, recipe.seed, earlier, recipe.own_measure)
    with progress_bar("local metrics", total=1.0) as report:

        def tell(done: int, info: Any) -> None:
            report(done / max(info.total, 1))
            state.keep(info)
            if on_round is not None:
                on_round(done, info)

        further = recipe.builder_arguments(earlier) | state.arguments()
        bank = recipe.builder(fitted, seen, seed=recipe.seed, on_round=tell, **further)
    state.done()
    log.info("%d local metrics", bank.metrics.num_metrics)
    known = {}
    for name, part in (("train", fitted), ("valid", seen)):
        if part is not None and not splits[name].all_lists.shared and len(part) == len(splits[name]):
            known[name] = part.features
    return Prepared(preprocess, bank, dict(splits), preprocessed=known, encoder=encoder, set_aside=reason)


def _without_noise(preprocess: Preprocess, shown: RankingData) -> tuple[Preprocess, str]:
    """The preprocessing of the raw features that mean something, and a sentence on the others; empty if all stay."""
    choice = select_features(shown)
    log.info("%s", choice.reason)
    if not choice.set_aside:
        return preprocess, ""
    listed = choice.names_set_aside(shown.feature_names)
    return Chain([KeepColumns(choice.kept.tolist()), preprocess]), f"{choice.reason}: {listed}"


def _reused(start: Start, splits: Mapping[str, RankingData], recipe: Recipe, resumes: bool) -> Prepared:
    """A start's own preprocessing and metrics; a run that resumes may have fitted biases of positions before."""
    trains = recipe.builder.trains_metrics
    splits = start.read(splits, recipe.categories)
    _check_positions(splits["train"], trains or resumes)
    return Prepared(start.preprocess, replace(start.bank, trained=trains), splits, encoder=start.encoder)


def _check_positions(train: RankingData, fitted: bool) -> None:
    """Refuse positions of documents if no biases are fitted."""
    if train.positions is not None and not fitted:
        raise ConfigError("Position debiasing works only with boosted or trained metrics")


def _through(
    preprocess: Preprocess,
    splits: Mapping[str, RankingData],
    shown: RankingData,
    recipe: Recipe,
    folder: Path | None,
    *,
    known: bool,
) -> tuple[RankingData, RankingData | None]:
    """Preprocessed training and validation lists for the builder; the preprocessing is fitted unless it is known."""
    train, valid = splits["train"], splits.get("valid")
    trains, everywhere = recipe.builder.trains_metrics, recipe.builder.takes_shared_lists
    if trains:
        shown = sample_of(train, recipe.seed, folder, start=True)
    wanted = train if everywhere and not trains else shown
    if not known:
        fitted = fit_preprocess(preprocess, shown, wanted, folder)
    else:
        fitted = preprocessed(preprocess, wanted, folder)
    if not everywhere:
        fitted = gather_lists(fitted, folder)
    if valid is None or trains:  # metrics that are trained start without validation lists
        return fitted, None
    if not everywhere:
        valid = gather_lists(sample_of(valid, recipe.seed, folder), folder)
    return fitted, preprocessed(preprocess, valid, folder)


def train_phi(prepared: Prepared, recipe: Recipe, around: TrainerSettings) -> Trained:
    """Train Φ in Lightning; the result has the weights that validation kept."""
    module = prepared.module(recipe, around.cache)
    splits, settings = prepared.splits, recipe.phi
    parts = (splits["train"], splits.get("valid"), splits.get("test"))
    data_module = RankingDataModule(*parts, seed=recipe.seed, draws=settings.loss.draws, **settings.loader)
    measure = Measure.of(recipe.measure)
    monitor = f"val/{measure.name}"
    keeper = KeepCheckpoints(around.folder, monitor=monitor, every_n_steps=around.every_n_steps, seed=recipe.seed)
    keep, around = _what_validation_sees(module, settings.keep, around)
    log.info("%s", _describe(module, recipe))
    start = _trained_tensors(module)
    if around.resume is not None:
        keeper.continue_from(around.resume, settings.loss.name)
    with quiet_lightning(), loader_failures_in_a_sentence():
        lightning = around.make_trainer(keeper, validated="valid" in splits)
        lightning.fit(module, data_module, ckpt_path=around.resume)
    if lightning.max_epochs == 0:
        keeper.keep_start(module, data_module.val_dataloader())
    else:
        keeper.load_kept(module, keep)
    moved = not all(map(torch.equal, start, _trained_tensors(module)))
    if not moved:
        untrained = "The weights kept are those before training: no epoch was better on validation."
        log.log(logging.WARNING if module.model.phi.mode == "per_query" else logging.INFO, untrained)
    module.model.metrics.train_metrics_(False)
    module.model.eval()
    trained = Trained(module, keeper, lightning, moved)
    if module.model.phi.policy == AUTO:
        module.model.phi.policy = _best_policy(trained, splits.get("valid"), measure)
    trained.calibrate(splits.get("valid"))
    kept = keeper.best_epoch if keep == "best" else lightning.current_epoch
    for callback in around.callbacks:
        if isinstance(callback, LogModel):
            callback.show_kept(lightning, module, kept)
    return trained


def _what_validation_sees(module: LGMMLModule, keep: str, around: TrainerSettings) -> tuple[str, TrainerSettings]:
    """What to keep, and the callbacks: validation cannot judge weights that new queries do not get."""
    if module.trains_metrics or module.model.phi.policy != "ones" or keep == "last":
        return keep, around
    log.warning(
        "New queries get ones, so validation cannot judge the weights that are trained: the weights of the last epoch "
        "are kept, and training does not stop early. With phi.policy=mean validation judges them."
    )
    callbacks = [callback for callback in around.callbacks if not isinstance(callback, EarlyStopping)]
    return "last", replace(around, callbacks=callbacks)


def _best_policy(trained: Trained, valid: RankingData | None, measure: Measure) -> str:
    """The policy for new queries that ranks the validation queries best; the mean without any."""
    judged = {"mean": 0.0}
    if valid is not None:
        for policy in POLICIES[trained.model.phi.mode]:
            judged[policy] = mean_measure(trained.score("valid", policy=policy), valid, measure)
        figures = ", ".join(f"{policy} {value:.4f}" for policy, value in judged.items())
        log.info("Φ of new queries, validation %s: %s", measure.name, figures)
    return max(judged, key=judged.__getitem__)


def _describe(module: LGMMLModule, recipe: Recipe) -> str:
    """What is trained, in one sentence for the log."""
    metrics, phi = module.model.metrics, module.model.phi
    kind = "in closed form, kept as buffers"
    if module.trains_metrics:
        kind = "trained by gradient"
    elif recipe.builder.kind == "boosted":
        kind = "in closed form, chosen by boosting, kept as buffers"
    rows, columns = phi.table.weight.shape
    workers = recipe.phi.loader.get("num_workers", 0)
    loss = recipe.phi.loss.name
    if recipe.phi.loss.draws:
        loss = f"sampled {loss.upper()}"
    return (
        f"{metrics.num_metrics} local metrics {kind}; Φ: a {rows} × {columns} embedding, kept ≥ 0 by projection; "
        f"loss: {loss}; {workers} loader workers"
    )


def _trained_tensors(module: LGMMLModule) -> list[Tensor]:
    return [parameter.detach().clone().cpu() for parameter in module.model.parameters()]
