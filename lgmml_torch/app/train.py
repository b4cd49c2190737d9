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

import hydra
import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from lgmml_torch.app.compose import (
    check_trainer,
    load_base,
    load_splits,
    make_loggers,
    make_recipe,
    make_surroundings,
    settle,
)
from lgmml_torch.app.config import check_overrides, config_dir
from lgmml_torch.app.report import write_report
from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.evaluation.evaluate import Evaluation, evaluate, evaluate_scores
from lgmml_torch.evaluation.tables import OWN_LABELS
from lgmml_torch.fitting.bank import Bank, trains_metrics
from lgmml_torch.functional.combine import combination_weights
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.tree_base import TreeBase
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import bank_curve
from lgmml_torch.training.distances import compute_distances
from lgmml_torch.training.ideal import ideal_scores
from lgmml_torch.training.losses import Warp
from lgmml_torch.training.stages import Prepared, Recipe, Trained, prepare, quiet_lightning, train_phi

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


def train(cfg: DictConfig, asked: Sequence[str] | None = None) -> RunResult | None:
    """Data → preprocessing → local metrics → distances → Φ → evaluation → checkpoint and report.

    ``asked`` are the overrides of the configuration: what none of them says, the data may decide, see `settle`. Returns
    None in helper processes of a distributed run.
    """
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    make_recipe(cfg)  # what is wrong with it should not wait for the data
    check_trainer(cfg)
    splits = load_splits(cfg)
    base = load_base(cfg, splits)
    cfg = settle(cfg, asked, splits["train"])
    recipe = make_recipe(cfg)
    folder = Path(cfg.paths.output_dir)
    candidates = search_recipes(cfg, recipe, validated="valid" in splits)
    loggers = make_loggers(cfg)
    prepared = (
        reuse(cfg, splits, recipe) if cfg.resume or cfg.warm_start else prepare(splits, recipe, bank_curve(loggers))
    )
    trained = train_best_phi(cfg, prepared, candidates, loggers, folder)
    if "test" in splits:
        with quiet_lightning():
            trained.trainer.test(trained.module, trained.trainer.datamodule, verbose=False)  # type: ignore[attr-defined]
    if not trained.trainer.is_global_zero:
        return None
    if base is not None:
        add_base(trained.model, base, splits["valid"])
    evaluations = evaluate_run(cfg, trained.model, prepared, base)
    keeper, history = trained.keeper, prepared.bank.history
    settings = OmegaConf.to_container(cfg, resolve=True)
    write_report(folder, trained.model, evaluations, keeper, history, settings, loggers)
    return RunResult(trained.model, evaluations, folder, keeper.best_epoch, keeper.best, history)


def reuse(cfg: DictConfig, splits: Mapping[str, RankingData], recipe: Recipe) -> Prepared:
    """Preprocessing, metrics and Φ₀ of an earlier run; metrics are trained only where the recipe trains its own."""
    model = LGMML.load(cfg.resume or cfg.warm_start)
    width = splits["train"].num_features
    if width != model.num_features:
        raise ConfigError(f"the model to start from has {model.num_features} features, the data has {width}")
    start = model.phi.table.weight.detach().mean(0)
    bank = Bank(model.metrics, model.kernel, start, trained=trains_metrics(recipe.fit_bank))
    return Prepared(model.preprocess, bank, dict(splits))


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
        make_phi = recipe.make_phi if init is None else partial(recipe.make_phi, init=init)
        phi = recipe.phi if margin is None else replace(recipe.phi, loss=Warp(margin))
        found.append(replace(recipe, make_phi=make_phi, phi=phi))
    return found


def train_best_phi(
    cfg: DictConfig, prepared: Prepared, candidates: list[Recipe], loggers: list[Any], folder: Path
) -> Trained:
    """Train Φ; of several margins and starting values, validation keeps one."""
    only = len(candidates) == 1
    reused = bool(cfg.resume or cfg.warm_start)  # whose weights one candidate is meant to start from
    if list(cfg.search.init) and prepared.bank.phi is not None and not (only and reused):
        raise ConfigError("`search.init` needs metrics without weights of their own; these come with a starting Φ")
    found = []
    for number, recipe in enumerate(candidates):
        place = folder / "checkpoints" / ("" if only else f"candidate-{number}")
        watching = loggers if only else make_loggers(cfg, version=f"candidate-{number}")
        around = make_surroundings(cfg, place, watching, validated="valid" in prepared.splits)
        trained = train_phi(prepared, recipe, around)
        if only:
            return trained
        valid = prepared.splits["valid"]
        judged = mean_ndcg(trained.model.score(valid, policy=cfg.search.policy), valid)
        log.info("candidate %d, %s: validation NDCG@10 %.4f", number, recipe.phi.loss.spec(), judged)
        found.append((judged, -number, trained))
    return max(found, key=lambda item: item[:2])[2]


def add_base(model: LGMML, base: TreeBase, valid: RankingData) -> None:
    """Put the trees beside ours, with the weights by which the validation queries are ranked best."""
    scores = torch.stack([model.own_score(valid).double(), base.predict(valid.features)])
    own, theirs = combination_weights(scores, valid.labels, valid.offsets, tie_order=valid.order).tolist()
    log.info("by validation, the score is %.4g · ours + %.4g · the %s model's", own, theirs, base.title)
    if theirs == 0:
        log.info("the %s model gets no weight and is left out: the model is ours alone", base.title)
        return
    base.own_weight, base.weight = own, theirs
    model.base = base


def evaluate_run(cfg: DictConfig, model: LGMML, prepared: Prepared, base: TreeBase | None = None) -> list[Evaluation]:
    """Three kinds of number, kept apart: training queries, unseen ones, and these with Φ fitted to their own labels.

    With trees added, unseen queries are also ranked by ours and by the trees alone.
    """
    splits = prepared.splits
    options = {"metrics": tuple(cfg.evaluation.metrics), "preset": cfg.evaluation.preset, "seed": cfg.seed}
    own = model.phi.mode == "per_query" or model.phi.deviations
    found = [evaluate(model, splits["train"], split="training queries", known_queries=own, **options)]
    for name in ("valid", "test"):
        if name in splits:
            policies = POLICIES[model.phi.mode] if cfg.evaluation.all_policies else (model.phi.policy,)
            unseen = f"{name}: unseen queries"
            there = [evaluate(model, splits[name], split=unseen, policy=policy, **options) for policy in policies]
            found += there if base is None else beside_each_alone(there, model, base, splits[name], options)
    if cfg.evaluation.ideal and "test" in splits:
        data = splits["test"]
        dists = compute_distances(model, data) if prepared.bank.trained else prepared.inputs["test"]
        start = model.phi.table.weight.detach().mean(0)
        scores = ideal_scores(dists, data, start, kernel=model.kernel, seed=cfg.seed)
        found.append(evaluate_scores(scores, data, split=f"test: {OWN_LABELS}", policy="own labels", **options))
    return found


def beside_each_alone(
    together: list[Evaluation], model: LGMML, base: TreeBase, data: RankingData, options: Mapping[str, Any]
) -> list[Evaluation]:
    """What ours and the trees reach together, called so, then ours alone and the trees alone on the same queries."""
    found = [replace(evaluation, policy=f"together ({evaluation.policy})") for evaluation in together]
    for label, scores in (("ours alone", model.own_score(data)), ("base alone", base.predict(data.features))):
        found.append(evaluate_scores(scores, data, split=together[0].split, policy=label, **options))
    return found


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")
def _app(cfg: DictConfig) -> float | None:
    try:
        result = train(cfg, HydraConfig.get().overrides.task)
    except (LGMMLError, MisconfigurationException) as error:
        _fail(error)
    return None if result is None else result.best_valid


def _fail(error: object) -> None:
    sys.stderr.write(f"error: {error}\n")
    sys.exit(2)


def main() -> None:
    """The command line: ``python train.py`` and ``lgmml train``."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    try:
        check_overrides([word for word in words if "=" in word])
    except ConfigError as error:
        _fail(error)
    _app()
