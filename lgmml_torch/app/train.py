"""One run, from data to report; reads like the way the data flows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.app.compose import (
    asked_measures,
    build,
    check_start_files,
    check_trainer,
    find_cache,
    load_base,
    load_splits,
    make_loggers,
    make_surroundings,
    named,
    recipe_of,
    settle,
)
from lgmml_torch.app.config import asked_for, check_settings
from lgmml_torch.app.rankers import Ranker, open_ranker
from lgmml_torch.app.report import Outcome, Stopwatch, reported_part, tell_loggers, write_report
from lgmml_torch.app.start import Interrupted, Watch, fail, say_goodbye, set_threads
from lgmml_torch.checks import ConfigError, LGMMLError, sentence
from lgmml_torch.evaluation.evaluate import OWN_PHI, Evaluation, evaluate, evaluate_scores
from lgmml_torch.evaluation.tables import OWN_LABELS
from lgmml_torch.functional.ranking.measures import mean_measure
from lgmml_torch.models.combine import combination_weights
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import read_model
from lgmml_torch.models.trees import TreeBase
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import StopAtStep, bank_curve, quiet_lightning
from lgmml_torch.training.ideal import ideal_scores
from lgmml_torch.training.losses import Warp
from lgmml_torch.training.preprocessed import compute_distances
from lgmml_torch.training.recipe import Recipe
from lgmml_torch.training.resume import Start
from lgmml_torch.training.stages import Prepared, Trained, check_positions, prepare, train_phi

log = logging.getLogger(__name__)


@dataclass
class RunResult:
    """What a run leaves behind."""

    model: LGMML
    evaluations: list[Evaluation]
    folder: Path
    best_epoch: int
    best_valid: float
    bank_history: dict[str, Any] = field(default_factory=dict)


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
    clock = Stopwatch()
    splits = load_splits(cfg)
    base = load_base(cfg, splits)
    other = _load_other(cfg, splits)
    clock.lap("data")
    cfg = settle(cfg, asked, splits["train"])
    recipe = recipe_of(cfg)
    folder = Path(cfg.paths.output_dir)
    candidates = search_recipes(cfg, recipe, validated="valid" in splits)
    loggers = make_loggers(cfg)
    prepared = _prepared_parts(cfg, splits, recipe, loggers)
    clock.lap("local metrics")
    if watch is not None:
        watchers = [*watchers, StopAtStep(watch)]
    trained = train_best_phi(cfg, prepared, candidates, loggers, folder, watchers)
    clock.lap("training" if prepared.bank.trained else "weights")
    if "test" in splits:
        with quiet_lightning():
            trained.trainer.test(trained.module, trained.trainer.datamodule, verbose=False)  # type: ignore[attr-defined]
    first, shared = trained.trainer.is_global_zero, any(part.spread is not None for part in splits.values())
    if not first and not shared:
        return None
    if base is not None:
        add_base(trained.model, base, prepared.splits["valid"])
    evaluations = _evaluate_model(cfg, trained.model, prepared, base)
    if not trained.moved and evaluations[0].policy == OWN_PHI:
        evaluations[0] = replace(evaluations[0], policy=f"{evaluations[0].policy}, not trained")
    if not first:
        return None
    clock.lap("evaluation")
    model, keeper, history = trained.model, trained.keeper, _history_of(prepared, trained)
    cfg.chosen = ". ".join(filter(None, (cfg.chosen, prepared.set_aside))) or None
    settings = OmegaConf.to_container(cfg, resolve=True)
    outcome = Outcome(model, prepared.splits, evaluations, keeper, history, clock.seconds, other)
    write_report(folder, outcome, settings)
    tell_loggers(folder, evaluations, model.phi.policy, settings, loggers)
    return RunResult(model, evaluations, folder, keeper.best_epoch, keeper.best, history)


def _checked(cfg: DictConfig) -> DictConfig:
    """The configuration with ``resume=auto`` resolved; errors in it are raised before data is read."""
    check_settings(cfg)
    recipe_of(cfg)
    check_trainer(cfg)
    cfg = resolve_resume(cfg)
    check_start_files(cfg)
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
    adds = recipe.grows and not recipe.builder.trains_metrics  # trained ones go on by themselves
    if cfg.resume or (cfg.warm_start and not adds):
        return _reuse(cfg, splits, recipe)
    start, folder = None, None
    if cfg.warm_start:
        start = Start.of(LGMML.load(cfg.warm_start))
    cache = find_cache(cfg)
    if cache is not None:
        folder = cache.folder / "unfinished"
    with named(cfg, "local_metrics"):
        return prepare(splits, recipe, bank_curve(loggers), folder, start)


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
        if (place == folder or _unfinished(place, folder)) and file.is_file():
            return str(file)
    return None


def _unfinished(place: Path, folder: Path) -> bool:
    """Whether a folder has a run of the same words as this one's that left no report."""
    return _words_of(place) == _words_of(folder) and not (place / "report.json").is_file()


def _words_of(run: Path) -> list[str]:
    """The overrides of a run, without those that say how it is started."""
    file = run / ".hydra" / "overrides.yaml"
    if not file.is_file():
        return ["?"]
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith(("- resume=", "- launcher"))]


def _load_other(cfg: DictConfig, splits: Mapping[str, RankingData]) -> Ranker | None:
    """What the model shall be compared with, where the configuration names it; tried before anything is fitted."""
    if cfg.compare is None:
        return None
    other = open_ranker(str(cfg.compare))
    lists = reported_part(splits)[1]
    if other.kind != "run":  # a run may lack any one list
        lists = lists.select([0])
    other.score(lists)
    return other


def _reuse(cfg: DictConfig, splits: Mapping[str, RankingData], recipe: Recipe) -> Prepared:
    """Preprocessing, metrics and Φ₀ of an earlier run; metrics are trained only where the recipe trains its own."""
    trains = recipe.builder.trains_metrics
    start = Start.of(LGMML.load(cfg.resume or cfg.warm_start), trained=trains)
    splits = start.read(splits, recipe.categories)
    check_positions(splits["train"], trains or bool(cfg.resume))
    if cfg.resume and trains != read_model(cfg.resume)[0]["metrics"].get("trained", False):
        was, way = "trained", "experiment=trained"
        if trains:
            was, way = "not trained", "local_metrics=boosted"
        raise ConfigError(f"`resume`: the metrics of {cfg.resume} were {was}; go on with the same settings, e.g. {way}")
    return Prepared(start.preprocess, start.bank, splits, encoder=start.encoder)


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
        around = make_surroundings(cfg, place, watching, validated="valid" in prepared.splits, watchers=watchers)
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


def _evaluate_model(
    cfg: DictConfig, model: LGMML, prepared: Prepared, base: TreeBase | None = None
) -> list[Evaluation]:
    """Three kinds of number, kept apart: training queries, unseen ones, and these with Φ fitted to their own labels.

    With trees added, unseen queries are also ranked by ours and by the trees alone.
    """
    splits = prepared.splits
    options = {"metrics": asked_measures(cfg), "preset": cfg.evaluation.preset, "seed": cfg.seed}
    own = model.phi.mode == "per_query" or model.phi.deviations
    seen = evaluate(model, splits["train"], split="training queries", known_queries=own, **options)
    found = [seen]
    policies: Sequence[str] = (model.phi.policy,)
    if cfg.evaluation.all_policies:
        policies = POLICIES[model.phi.mode]
    if base is not None:
        found = [_joint(seen)]
    for name in ("valid", "test"):
        if name in splits:
            found += _evaluate_unseen(model, splits[name], f"{name}: unseen queries", policies, base, options)
    if cfg.evaluation.ideal and "test" in splits:
        data = splits["test"]
        dists = prepared.inputs["test"]
        if prepared.bank.trained or not isinstance(dists, Tensor):
            dists = compute_distances(model, data)
        start = model.phi.mean_row()[0].detach()
        scores = ideal_scores(dists, data, start, kernel=model.kernel, seed=cfg.seed)
        found.append(evaluate_scores(scores, data, split=f"test: {OWN_LABELS}", policy="own labels", **options))
    return found


def _evaluate_unseen(
    model: LGMML,
    data: RankingData,
    split: str,
    policies: Sequence[str],
    base: TreeBase | None,
    options: Mapping[str, Any],
) -> list[Evaluation]:
    """Unseen queries by each policy; with trees added, also ours and the trees alone."""
    found = []
    for policy in policies:
        found.append(evaluate(model, data, split=split, policy=policy, **options))
    if base is None:
        return found
    return _beside_each_alone(found, model, base, data, options)


def _joint(evaluation: Evaluation) -> Evaluation:
    """Called what it is: ours and the trees together."""
    return replace(evaluation, policy=f"together ({evaluation.policy})")


def _beside_each_alone(
    together: list[Evaluation], model: LGMML, base: TreeBase, data: RankingData, options: Mapping[str, Any]
) -> list[Evaluation]:
    """What ours and the trees reach together, called so, then ours alone and the trees alone on the same queries."""
    found = list(map(_joint, together))
    for label, scores in (("ours alone", model.score(data, alone=True)), ("base alone", base.predict(data.features))):
        found.append(evaluate_scores(scores, data, split=together[0].split, policy=label, **options))
    return found


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
