"""One run, from data to report; reads like the way the data flows."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from lgmml_torch import distributed
from lgmml_torch.app.compose import (
    build,
    check_parts,
    find_cache,
    find_measure,
    load_base,
    load_splits,
    make_loggers,
    make_trainer_settings,
    named,
    recipe_of,
    settle,
)
from lgmml_torch.app.config import asked_for, check_settings, load_config
from lgmml_torch.app.rankers import FITTED, TITLES, Ranker, fit_lightgbm, open_ranker, reference_names, tree_ranker
from lgmml_torch.app.report import (
    RunResult,
    beside_references,
    evaluate_model,
    measuring_rules,
    reported_part,
)
from lgmml_torch.app.start import Interrupted, Watch, fail, say_goodbye, set_threads
from lgmml_torch.checks import ConfigError, DataError, LGMMLError, MissingDependencyError, sentence
from lgmml_torch.evaluation.evaluate import Evaluation, evaluate_scores
from lgmml_torch.files import write_bytes
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.models.combine import combination_weights
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import read_model
from lgmml_torch.models.trees import TreeBase
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import StopAtStep, bank_curve
from lgmml_torch.training.losses import Warp
from lgmml_torch.training.recipe import Recipe
from lgmml_torch.training.resume import Start
from lgmml_torch.training.stages import Prepared, Trained, prepare, train_phi

log = logging.getLogger(__name__)


class _Stopwatch:
    """Seconds of the stages of a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, stage: str) -> None:
        """The stage that has just ended."""
        now = time.perf_counter()
        self.seconds[stage], self._since = round(now - self._since, 3), now


def train(
    cfg: DictConfig,
    asked: Sequence[str] | None = None,
    watch: Watch | None = None,
    watchers: Sequence[pl.Callback] = (),
) -> RunResult | None:
    """Data → preprocessing → local metrics → distances → Φ → evaluation → checkpoint and report.

    Args:
        cfg: the whole configuration.
        asked: the overrides of the user; the rest may follow from the data, see `settle`.
        watch: may ask training to stop.
        watchers: callbacks beside the configured ones.

    Returns:
        None on ranks other than 0.
    """
    cfg = _checked(cfg)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    set_threads(cfg.threads)
    clock = _Stopwatch()
    splits = load_splits(cfg)
    base = load_base(cfg, splits)
    files = _open_references(cfg, splits)
    clock.lap("data")
    cfg = settle(cfg, asked, splits["train"])
    recipe, folder = recipe_of(cfg), Path(cfg.paths.output_dir)
    if watch is not None:
        watchers = [*watchers, StopAtStep(watch)]
    references = _fit_references(cfg, splits, folder, watchers)
    clock.lap("references")
    candidates = search_recipes(cfg, recipe, validated="valid" in splits)
    loggers = make_loggers(cfg)
    prepared = _prepared_parts(cfg, splits, recipe, loggers)
    clock.lap("local metrics")
    trained = train_best_phi(cfg, prepared, candidates, loggers, folder, watchers)
    clock.lap("training" if prepared.bank.trained else "weights")
    first, shared = trained.trainer.is_global_zero, any(part.shared_lists is not None for part in splits.values())
    if not (first or shared):
        return None
    if base is not None:
        add_base(trained.model, base, prepared.splits["valid"])
        trained.calibrate(prepared.splits["valid"])  # scores are others now
    evaluations = evaluate_model(cfg, trained, prepared, base)
    if not first:
        return None
    clock.lap("evaluation")
    evaluations = beside_references(evaluations, [measured for _, measured in references])
    cfg.chosen = ". ".join(filter(None, (cfg.chosen, prepared.set_aside))) or None
    found = RunResult(
        folder, trained.model, prepared.splits, evaluations, trained.keeper, _history_of(prepared, trained),
        clock.seconds, OmegaConf.to_container(cfg, resolve=True), [*(ranker for ranker, _ in references), *files],
    )  # fmt: skip
    found.write()
    found.tell(loggers)
    return found


def _checked(cfg: DictConfig) -> DictConfig:
    """The configuration with ``resume=auto`` resolved; errors in it are raised before data is read."""
    check_settings(cfg)
    cfg = resolve_resume(cfg)
    check_parts(cfg)
    return cfg


def _history_of(prepared: Prepared, trained: Trained) -> dict[str, Any]:
    """How building the metrics went, and what training has made of the biases of positions."""
    history = dict(prepared.bank.history)
    if trained.position_bias is not None:
        history["position_bias"] = trained.position_bias
    return history


def _prepared_parts(
    cfg: DictConfig, splits: Mapping[str, RankingData], recipe: Recipe, loggers: Sequence[Any]
) -> Prepared:
    """Preprocessing and metrics: those of an earlier run, or fitted now."""
    start, folder = None, None
    if cfg.resume:
        _check_resumed(cfg.resume, trains=recipe.builder.trains_metrics)
    if cfg.resume or cfg.warm_start:
        start = Start.of(LGMML.load(cfg.resume or cfg.warm_start))
    cache = find_cache(cfg)
    if cache is not None:
        folder = cache.folder / "unfinished"
    with named(cfg, "local_metrics"):
        return prepare(splits, recipe, bank_curve(loggers), folder, start, resumes=bool(cfg.resume))


def _check_resumed(checkpoint: str, *, trains: bool) -> None:
    """Refuse to go on with other metrics: trained ones where they were not, or the reverse."""
    if trains != read_model(checkpoint)[0]["metrics"].get("trained", False):
        was, way = "trained", "experiment=trained"
        if trains:
            was, way = "not trained", "local_metrics=boosted"
        raise ConfigError(f"`resume`: the metrics of {checkpoint} were {was}; go on with the same settings, e.g. {way}")


def resolve_resume(cfg: DictConfig) -> DictConfig:
    """The configuration with the checkpoint that ``resume=auto`` means, the same for all processes, or none.

    It is that of the run's own folder, or of the newest run before it that was asked for alike and did not finish.
    """
    if cfg.resume is None:
        return cfg
    found = cfg.resume
    if found == "auto":
        found = distributed.broadcast(_last_checkpoint(Path(cfg.paths.output_dir)))
        log.info("resume=auto: %s", found or "there is nothing to go on from, so the run begins")
    if found is not None:
        distributed.broadcast_file(Path(found))
    resumed = cfg.copy()
    resumed.resume = found
    return resumed


def _last_checkpoint(folder: Path) -> str | None:
    """The checkpoint of this folder, or of the newest unfinished run of the same words beside it."""
    if not folder.parent.is_dir():
        return None
    for place in (folder, *sorted(folder.parent.glob("*"), reverse=True)):
        file = place / "checkpoints" / "last.ckpt"
        unfinished = _words_of(place) == _words_of(folder) and not (place / "report.json").is_file()
        if (place == folder or unfinished) and file.is_file():
            return str(file)
    return None


def _words_of(run: Path) -> list[str]:
    """The overrides of a run, without those that say how it is started."""
    file = run / ".hydra" / "overrides.yaml"
    if not file.is_file():
        return ["?"]
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith(("- resume=", "- launcher"))]


_Reference = tuple[Ranker, list[Evaluation]]  # fitted to compare with, and how well it ranks the same lists


def _open_references(cfg: DictConfig, splits: Mapping[str, RankingData]) -> list[Ranker]:
    """The files among the references; each is tried before anything is fitted."""
    found = []
    names = reference_names(cfg.reference)
    if names and any(part.shared_lists is not None for part in splits.values()):
        raise ConfigError("`reference` needs data in memory, got data=shards or data=folder")
    for name in names:
        if name in FITTED:
            continue
        ranker = open_ranker(name)
        lists = reported_part(splits)[1]
        if ranker.kind != "run":  # a run may lack any one list
            lists = lists.select([0])
        ranker.score(lists)
        found.append(ranker)
    return found


def _fit_references(
    cfg: DictConfig, splits: Mapping[str, RankingData], folder: Path, watchers: Sequence[pl.Callback]
) -> list[_Reference]:
    """The paper's own system and LightGBM, fitted on the same lists where `reference` names them."""
    found = []
    names = reference_names(cfg.reference)
    if "lgmml" in names:
        found.append(_fit_lgmml(cfg, splits, folder, watchers))
    if "lightgbm" in names:
        try:
            trees = fit_lightgbm(splits, find_measure("measure", cfg.measure), seed=cfg.seed, threads=cfg.threads)
        except (MissingDependencyError, DataError) as error:
            log.warning("no LightGBM to compare with: %s", error)
            return found
        write_bytes(folder / FITTED["lightgbm"], trees.content.numpy().tobytes())
        ranker = tree_ranker(TITLES["lightgbm"], trees)
        found.append((ranker, _evaluate_ranker(cfg, ranker, splits)))
    return found


# Parts of a run that its references share.
_SHARED = (
    "data", "name", "seed", "measure", "categories", "evaluation", "threads", "paths", "logger",
)  # fmt: skip


def _fit_lgmml(
    cfg: DictConfig, splits: Mapping[str, RankingData], folder: Path, watchers: Sequence[pl.Callback]
) -> _Reference:
    """The paper's system (`experiment=lgmml`): on its own training queries, and on new ones."""
    own = load_config(["experiment=lgmml"])
    for key in _SHARED:
        own[key] = cfg[key]
    own.trainer = {**cfg.trainer, "max_epochs": own.trainer.max_epochs, "gradient_clip_val": None}
    own.callbacks = {**cfg.callbacks, "early_stopping": None}
    own.loader.num_workers = cfg.loader.num_workers
    log.info("reference: L-GMML, the system of the paper (experiment=lgmml)")
    recipe, loggers = recipe_of(own), make_loggers(own, version="lgmml")
    prepared = prepare(splits, recipe, bank_curve(loggers))
    trained = train_best_phi(own, prepared, [recipe], loggers, folder / "lgmml", watchers)
    trained.model.save(folder / FITTED["lgmml"])
    evaluations = []
    for evaluation in evaluate_model(own, trained, prepared):
        evaluations.append(replace(evaluation, policy=f"L-GMML: {evaluation.policy}"))
    return Ranker(TITLES["lgmml"], "lgmml", trained.model.score, model=trained.model), evaluations


def _evaluate_ranker(cfg: DictConfig, ranker: Ranker, splits: Mapping[str, RankingData]) -> list[Evaluation]:
    """Unseen queries by another ranker."""
    found = []
    for name in ("valid", "test"):
        if name in splits:
            scores = ranker.score(splits[name])
            split = f"{name}: unseen queries"
            found.append(evaluate_scores(scores, splits[name], split=split, policy=ranker.name, **measuring_rules(cfg)))
    return found


def search_recipes(cfg: DictConfig, recipe: Recipe, *, validated: bool) -> list[Recipe]:
    """A recipe for every starting value and margin to try; the first alone where validation cannot tell them apart."""
    if list(cfg.search.margin) and not isinstance(recipe.phi.loss, Warp):
        raise ConfigError(f"`search.margin` needs the loss 'warp', got {recipe.phi.loss.name!r}")
    points = list(product(list(cfg.search.init) or [None], list(cfg.search.margin) or [None]))
    if len(points) > 1 and not validated:
        raise ConfigError("`search` needs validation queries to choose by, and the data has none")
    if len(points) > 1 and (cfg.search.policy or cfg.phi.policy) == "ones":
        log.info("new queries get ones, so validation cannot tell the %d candidates apart: the first", len(points))
        points = points[:1]
    found = []
    for init, margin in points:
        candidate = recipe
        if init is not None:
            candidate = replace(candidate, make_phi=partial(recipe.make_phi, init=init))
        if margin is not None:
            candidate = replace(candidate, phi=replace(recipe.phi, loss=Warp(margin)))
        found.append(candidate)
    return found


def train_best_phi(
    cfg: DictConfig,
    prepared: Prepared,
    candidates: list[Recipe],
    loggers: list[Any],
    folder: Path,
    watchers: Sequence[pl.Callback] = (),
) -> Trained:
    """Train Φ; of several margins and starting values, validation keeps one."""
    only = len(candidates) == 1
    reused = bool(cfg.resume or cfg.warm_start)  # whose weights one candidate is meant to start from
    if list(cfg.search.init) and prepared.bank.phi is not None and not (only and reused):
        raise ConfigError("`search.init` needs metrics without weights of their own; these come with a starting Φ")
    found = []
    for number, recipe in enumerate(candidates):
        place, watching = folder / "checkpoints", loggers
        if not only:
            place = place / f"candidate-{number}"
            watching = make_loggers(cfg, version=f"candidate-{number}")
        around = make_trainer_settings(cfg, place, watching, validated="valid" in prepared.splits, watchers=watchers)
        trained = train_phi(prepared, recipe, around)
        if only:
            return trained
        valid = prepared.splits["valid"]
        judged = mean_measure(trained.model.score(valid, policy=cfg.search.policy), valid, recipe.measure)
        log.info("candidate %d, %s: validation %s %.4f", number, recipe.phi.loss.spec(), cfg.measure, judged)
        found.append((judged, -number, trained))
    return max(found, key=lambda item: item[:2])[2]


def add_base(model: LGMML, base: TreeBase, valid: RankingData) -> None:
    """Put the trees beside ours, with the weights by which the validation queries are ranked best."""
    scores = torch.stack([model.score(valid, alone=True).double(), base.predict(valid.features)])
    own, theirs = combination_weights(scores, valid.labels, valid.offsets, tie_order=valid.order).tolist()
    log.info("by validation, the score is %.4g · ours + %.4g · the %s model's", own, theirs, base.title)
    if theirs == 0:
        log.info("the %s model gets no weight and is left out: the model is ours alone", base.title)
        return
    base.own_weight, base.weight = own, theirs
    model.base = base


def run_and_tell(cfg: DictConfig, watch: Watch) -> float | None:
    """A run of the command line: what is wrong is told in a sentence, and so is how to go on after an interruption.

    Returns:
        What the weights that were kept are worth on validation, by the measure that decides, for a sweep to compare.
    """
    try:
        words = asked_for()
        if cfg.get("launcher"):
            build(cfg.launcher)(words, Path(cfg.paths.output_dir))
            return None
        result = train(cfg, words, watch)
    except (LGMMLError, MisconfigurationException) as error:
        fail(error)
    except OSError as error:
        fail(sentence(error))
    except Interrupted as stop:
        sys.exit(say_goodbye(stop, Path(cfg.paths.output_dir) / "checkpoints" / "last.ckpt"))
    return None if result is None else result.best_valid
