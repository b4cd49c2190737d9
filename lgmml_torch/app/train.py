"""One run, from data to report; reads like the way the data flows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import joblib
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf

from lgmml_torch import distributed
from lgmml_torch.app import compose
from lgmml_torch.app.config import check_settings, load_config
from lgmml_torch.app.rankers import FITTED, TITLES, Ranker, fit_lightgbm, reference_names
from lgmml_torch.app.report import RunResult, evaluate_model, reported_part
from lgmml_torch.checks import ConfigError, DataError, MissingDependencyError
from lgmml_torch.data.cache import Cache
from lgmml_torch.evaluation.evaluate import Evaluation, evaluate_scores
from lgmml_torch.files import write_bytes
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.models.combine import combination_weights
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import read_model
from lgmml_torch.models.trees import TreeBase
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import bank_curve
from lgmml_torch.training.losses import Warp
from lgmml_torch.training.recipe import Recipe, TrainerSettings
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
    cfg: DictConfig,  # the whole configuration
    asked: Sequence[str] | None = None,  # the overrides of the user; the rest may follow from the data, see `settle`
    watchers: Sequence[pl.Callback] = (),  # callbacks beside the configured ones
) -> RunResult | None:  # None on ranks other than 0
    """Data → preprocessing → local metrics → distances → Φ → evaluation → checkpoint and report."""
    check_settings(cfg)  # whatever is wrong is told before data is read
    cfg = _resolve_resume(cfg)
    compose.check_parts(cfg)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    _set_threads(cfg.threads)
    clock = _Stopwatch()
    splits = compose.load_splits(cfg)
    base = _load_base(cfg, splits)
    files = _open_references(cfg, splits)
    clock.lap("data")
    cfg = compose.settle(cfg, asked, splits)
    clock.lap("defaults")
    recipe, folder = compose.recipe_of(cfg), Path(cfg.paths.output_dir)
    references, measured = _fit_references(cfg, splits, folder, watchers)
    clock.lap("references")
    candidates = search_recipes(cfg, recipe, validated="valid" in splits)
    loggers = compose.make_loggers(cfg)
    prepared = _prepared_parts(cfg, splits, recipe, loggers)
    clock.lap("local metrics")
    trained = train_best_phi(cfg, prepared, candidates, loggers, folder, watchers)
    clock.lap("training" if prepared.bank.trained else "weights")
    first, shared = trained.trainer.is_global_zero, any(part.all_lists.shared for part in splits.values())
    if not (first or shared):
        return None
    if base is not None:
        add_base(trained.model, base, prepared.splits["valid"])
        trained.calibrate(prepared.splits["valid"])  # scores are others now
    evaluations = evaluate_model(cfg, trained, prepared, base, measured)
    if not first:
        return None
    clock.lap("evaluation")
    cfg.chosen = ". ".join(filter(None, (cfg.chosen, prepared.set_aside))) or None
    found = RunResult(
        folder, trained.model, prepared.splits, evaluations, trained.keeper, _history_of(prepared, trained),
        clock.seconds, OmegaConf.to_container(cfg, resolve=True), [*references, *files],
    )  # fmt: skip
    found.write()
    found.tell(loggers)
    return found


def _history_of(prepared: Prepared, trained: Trained) -> dict[str, Any]:
    """How building the metrics went, and what training has made of the biases of positions."""
    history = dict(prepared.bank.history)
    if trained.position_bias is not None:
        history["position_bias"] = trained.position_bias
    return history


def _set_threads(asked: int | None) -> None:
    """Set the number of threads; the default is ``OMP_NUM_THREADS``, or the cores that this process may use."""
    if asked is not None:
        torch.set_num_threads(asked)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), joblib.cpu_count())))


def _load_base(cfg: DictConfig, splits: Mapping[str, RankingData]) -> TreeBase | None:
    """The trees that ours shall be added to, where the configuration names any; tried before anything is fitted."""
    if cfg.base is None:
        return None
    _check_in_memory("base", splits)
    if "valid" not in splits:
        raise ConfigError("`base` needs validation queries to choose the weights by, and the data has none")
    if splits["train"].categories is not None:
        raise ConfigError("`base` needs data of numbers only, and this data has categories")
    if cfg.base == "auto":
        return _fit_trees(cfg, splits, list_ranks=True)
    base = TreeBase.read(str(cfg.base))
    base.check(splits["train"].num_features, splits["train"].feature_names)
    return base


def _fit_trees(cfg: DictConfig, splits: Mapping[str, RankingData], *, list_ranks: bool = False) -> TreeBase:
    measure = compose.find_measure("measure", cfg.measure)
    return fit_lightgbm(splits, measure, seed=cfg.seed, threads=cfg.threads, list_ranks=list_ranks)


def _check_in_memory(setting: str, splits: Mapping[str, RankingData]) -> None:
    if any(part.all_lists.shared for part in splits.values()):
        raise ConfigError(f"`{setting}` needs data in memory, got data=shards or data=folder")


def _find_cache(cfg: DictConfig) -> Cache | None:
    """Where things that were expensive to make are kept; None where the configuration wants nothing kept."""
    return None if cfg.paths.cache_dir is False else Cache(cfg.paths.cache_dir)


def _prepared_parts(
    cfg: DictConfig, splits: Mapping[str, RankingData], recipe: Recipe, loggers: Sequence[Any]
) -> Prepared:
    """Preprocessing and metrics: those of an earlier run, or fitted now."""
    start, folder, cache = None, None, _find_cache(cfg)
    if cfg.resume:
        _check_resumed(cfg.resume, trains=recipe.builder.trains_metrics)
    if cfg.resume or cfg.warm_start:
        start = Start.of(LGMML.load(cfg.resume or cfg.warm_start))
    if cache is not None:
        folder = cache.folder / "unfinished"
    with compose.named(cfg, "local_metrics"):
        return prepare(splits, recipe, bank_curve(loggers), folder, start, resumes=bool(cfg.resume))


def _check_resumed(checkpoint: str, *, trains: bool) -> None:
    """Refuse to go on with other metrics: trained ones where they were not, or the reverse."""
    if trains != read_model(checkpoint)[0]["metrics"].get("trained", False):
        was, way = "trained", "experiment=trained"
        if trains:
            was, way = "not trained", "local_metrics=boosted"
        raise ConfigError(f"`resume`: the metrics of {checkpoint} were {was}; go on with the same settings, e.g. {way}")


def _resolve_resume(cfg: DictConfig) -> DictConfig:
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


def _open_references(cfg: DictConfig, splits: Mapping[str, RankingData]) -> list[Ranker]:
    """The files among the references; each is tried before anything is fitted."""
    found = []
    names = reference_names(cfg.reference)
    if names:
        _check_in_memory("reference", splits)
    for name in names:
        if name in FITTED:
            continue
        ranker, lists = Ranker.open(name), reported_part(splits)[1]
        if ranker.kind != "run":  # a run may lack any one list
            lists = lists.select([0])
        ranker.score(lists)
        found.append(ranker)
    return found


def _fit_references(
    cfg: DictConfig, splits: Mapping[str, RankingData], folder: Path, watchers: Sequence[pl.Callback]
) -> tuple[list[Ranker], list[Evaluation]]:
    """The paper's own system and LightGBM where `reference` names them, and how well they rank the same lists."""
    rankers, measured = list[Ranker](), list[Evaluation]()
    names = reference_names(cfg.reference)
    if "lgmml" in names:
        ranker, measured = _fit_lgmml(cfg, splits, folder, watchers)
        rankers.append(ranker)
    if "lightgbm" in names:
        try:
            trees = _fit_trees(cfg, splits)
        except (MissingDependencyError, DataError) as error:
            log.warning("no LightGBM to compare with: %s", error)
            return rankers, measured
        write_bytes(folder / FITTED["lightgbm"], trees.content.numpy().tobytes())
        ranker = Ranker.of_trees(TITLES["lightgbm"], trees)
        rankers.append(ranker)
        for name in ("valid", "test"):
            if name in splits:
                rules = {"split": f"{name}: unseen queries", "policy": ranker.name, **compose.measuring_rules(cfg)}
                measured.append(evaluate_scores(ranker.score(splits[name]), splits[name], **rules))
    return rankers, measured


# Parts of a run that its references share.
_SHARED = ("data", "name", "seed", "measure", "categories", "evaluation", "threads", "paths", "logger")


def _fit_lgmml(
    cfg: DictConfig, splits: Mapping[str, RankingData], folder: Path, watchers: Sequence[pl.Callback]
) -> tuple[Ranker, list[Evaluation]]:
    """The paper's system (`experiment=lgmml`): on its own training queries, and on new ones."""
    own = load_config(["experiment=lgmml"])
    for key in _SHARED:
        own[key] = cfg[key]
    own.trainer = {**cfg.trainer, "max_epochs": own.trainer.max_epochs, "gradient_clip_val": None}
    own.callbacks = {**cfg.callbacks, "early_stopping": None}
    own.loader.num_workers = cfg.loader.num_workers
    log.info("reference: L-GMML, the system of the paper (experiment=lgmml)")
    recipe, loggers = compose.recipe_of(own), compose.make_loggers(own, version="lgmml")
    prepared = prepare(splits, recipe, bank_curve(loggers))
    trained = train_best_phi(own, prepared, [recipe], loggers, folder / "lgmml", watchers)
    trained.model.save(folder / FITTED["lgmml"])
    evaluations = []
    for evaluation in evaluate_model(own, trained, prepared):
        evaluations.append(replace(evaluation, policy=f"L-GMML: {evaluation.policy}"))
    return Ranker(TITLES["lgmml"], "lgmml", trained.model.score, model=trained.model), evaluations


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
    found, resume = [], None
    if cfg.resume is not None:
        resume = Path(cfg.resume)
    for number, recipe in enumerate(candidates):
        place, watching = folder / "checkpoints", loggers
        if not only:
            place = place / f"candidate-{number}"
            watching = compose.make_loggers(cfg, version=f"candidate-{number}")
        around = TrainerSettings(
            folder=place,
            trainer=compose.build(cfg.trainer),
            callbacks=[*compose.make_callbacks(cfg, validated="valid" in prepared.splits), *watchers],
            loggers=watching,
            cache=_find_cache(cfg),
            resume=resume,
        )
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
    scores = torch.stack([model.score(valid, alone=True).double(), base.predict(valid.features, valid.offsets)])
    own, theirs = combination_weights(scores, valid.labels, valid.offsets, tie_order=valid.order).tolist()
    log.info("by validation, the score is %.4g · ours + %.4g · the %s model's", own, theirs, base.title)
    if theirs == 0:
        log.info("the %s model gets no weight and is left out: the model is ours alone", base.title)
        return
    base.own_weight, base.weight = own, theirs
    model.base = base
