"""One run, from data to report; reads like the way the data flows."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import hydra
import pytorch_lightning as pl
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor

from lgmml_torch.app.config import check_overrides, config_dir
from lgmml_torch.app.report import write_report
from lgmml_torch.checks import ConfigError, DataError, LGMMLError, check_choice
from lgmml_torch.data.cache import Cache
from lgmml_torch.evaluation.evaluate import Evaluation, evaluate, evaluate_scores
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import KeepCheckpoints, bank_curve
from lgmml_torch.training.ideal import ideal_scores
from lgmml_torch.training.module import LGMMLModule
from lgmml_torch.training.stages import Prepared, prepare, quiet_lightning, train_phi

log = logging.getLogger(__name__)

DISTANCES = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}  # None: the model's own


@dataclass
class RunResult:
    """What a run leaves behind."""

    model: LGMML
    evaluations: list[Evaluation]
    folder: Path
    best_epoch: int
    best_valid: float
    bank_history: dict[str, Any] = field(default_factory=dict)


def train(cfg: DictConfig) -> RunResult | None:
    """Data → preprocessing → local metrics → distances → Φ → evaluation → checkpoint and report.

    Returns None in helper processes of a distributed run.
    """
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    distance_dtype(cfg)  # a wrong word should not cost a fit
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    folder = Path(cfg.paths.output_dir)
    splits = load_splits(cfg)
    if "valid" not in splits and len(search_points(cfg)) > 1:
        raise ConfigError("`search` needs validation queries to choose by, and the data has none")
    loggers = make_loggers(cfg)
    prepared = reuse(cfg, splits) if cfg.resume or cfg.warm_start else fit_metrics(cfg, splits, loggers)
    module, keeper, trainer = train_best_phi(cfg, prepared, loggers, folder)
    if "test" in splits:
        with quiet_lightning():
            trainer.test(module, trainer.datamodule, verbose=False)  # type: ignore[attr-defined]
    if not trainer.is_global_zero:
        return None
    evaluations = evaluate_run(cfg, module, prepared)
    result = RunResult(module.model, evaluations, folder, keeper.best_epoch, keeper.best, prepared.bank.history)
    settings = OmegaConf.to_container(cfg, resolve=True)
    write_report(folder, module.model, evaluations, keeper, prepared.bank.history, settings, loggers)
    return result


def load_splits(cfg: DictConfig) -> dict[str, RankingData]:
    """The configured data: ``train`` and, where there are any, ``valid`` and ``test``."""
    splits: dict[str, RankingData] = build(cfg.data)
    for name, data in splits.items():
        log.info("%s: %s", name, data)
    if "train" not in splits:
        raise DataError(f"`data` must have a training part, got {', '.join(splits)}")
    return splits


def make_loggers(cfg: DictConfig, **place: str) -> list[Any]:
    """The configured loggers; ``place`` keeps candidates of a search apart where a logger knows of versions."""
    parts = [part for part in cfg.logger.values() if part]
    return [build(part, **{key: value for key, value in place.items() if key in part}) for part in parts]


def make_callbacks(cfg: DictConfig, *, validated: bool) -> list[Any]:
    """The configured callbacks; watching the step needs a logger, and stopping early needs validation."""
    made = [build(part) for part in cfg.callbacks.values() if part]
    idle = (() if cfg.logger else (LearningRateMonitor,)) + (() if validated else (EarlyStopping,))
    return [item for item in made if not isinstance(item, idle)]


def fit_metrics(cfg: DictConfig, splits: dict[str, RankingData], loggers: list[Any]) -> Prepared:
    """Fit preprocessing and local metrics; how that went goes to the loggers."""
    prepared = prepare(
        splits["train"],
        splits.get("valid"),
        preprocess=build(cfg.preprocess),
        fit_bank=build(cfg.local_metrics, _convert_="all"),
        kernel=cfg.kernel,
        seed=cfg.seed,
        on_round=bank_curve(loggers),
    )
    prepared.splits.update({name: data for name, data in splits.items() if name not in prepared.splits})
    return prepared


def reuse(cfg: DictConfig, splits: dict[str, RankingData]) -> Prepared:
    """Preprocessing, metrics and Φ₀ of an earlier run; only Φ is trained."""
    model = LGMML.load(cfg.resume or cfg.warm_start)
    width = splits["train"].num_features
    if width != model.num_features:
        raise ConfigError(f"the model to start from has {model.num_features} features, the data has {width}")
    start = model.phi.table.weight.detach().mean(0)
    return Prepared(model.preprocess, Bank(model.metrics, start), model.kernel, dict(splits))


def search_points(cfg: DictConfig) -> list[tuple[float | None, float]]:
    """Starting values and margins to try; the first alone where validation could not tell them apart."""
    points = list(product(list(cfg.search.init) or [None], list(cfg.search.margin) or [cfg.warp.margin]))
    if len(points) > 1 and (cfg.search.policy or cfg.phi.policy) == "ones":
        log.info("new queries get ones, so validation cannot tell the %d candidates apart: the first", len(points))
        return points[:1]
    return points


def train_best_phi(
    cfg: DictConfig, prepared: Prepared, loggers: list[Any], folder: Path
) -> tuple[LGMMLModule, KeepCheckpoints, pl.Trainer]:
    """Train Φ; of several margins and starting values, validation keeps one."""
    candidates = search_points(cfg)
    only = len(candidates) == 1
    reused = bool(cfg.resume or cfg.warm_start)  # whose weights one candidate is meant to start from
    if list(cfg.search.init) and prepared.bank.phi is not None and not (only and reused):
        raise ConfigError("`search.init` needs metrics without weights of their own; these come with a starting Φ")
    cache = None if cfg.paths.cache_dir is False else Cache(cfg.paths.cache_dir)
    queries = prepared.splits["train"].num_queries
    rule = build(cfg.step_size)
    found = []
    for number, (init, margin) in enumerate(candidates):
        place = folder / "checkpoints" / ("" if only else f"candidate-{number}")
        make_phi = build(cfg.phi, **({} if init is None else {"init": init}))
        outcome = train_phi(
            prepared,
            make_phi=make_phi,
            folder=place,
            loader=OmegaConf.to_container(cfg.loader, resolve=True),  # type: ignore[arg-type]
            margin=margin,
            deviation_penalty=cfg.warp.deviation_penalty,
            optimizer=build(cfg.optimizer),
            step_size=rule(queries) if callable(rule) else None,
            keep=cfg.warp.keep,
            callbacks=make_callbacks(cfg, validated="valid" in prepared.splits),
            loggers=loggers if only else make_loggers(cfg, version=f"candidate-{number}"),
            trainer=build(cfg.trainer),
            seed=cfg.seed,
            resume=cfg.resume,
            preset=cfg.evaluation.preset,
            cache=cache,
            distances=distance_dtype(cfg),
        )
        if only:
            return outcome
        judged = judge(outcome[0], prepared, cfg.search.policy)
        log.info("margin %g, starting weight %s: validation NDCG@10 %.4f", margin, init, judged)
        found.append((judged, -number, outcome))
    return max(found, key=lambda item: item[:2])[2]


def distance_dtype(cfg: DictConfig) -> torch.dtype | None:
    """What distances are kept in while Φ is trained; None for the model's dtype."""
    check_choice("distances", cfg.distances, DISTANCES)
    return DISTANCES[cfg.distances]


def judge(module: LGMMLModule, prepared: Prepared, policy: str | None) -> float:
    """Validation NDCG@10 under a policy."""
    data = prepared.splits["valid"]
    return evaluate(module.model, data, split="valid", metrics=("ndcg@10",), policy=policy).means["ndcg@10"]


def evaluate_run(cfg: DictConfig, module: LGMMLModule, prepared: Prepared) -> list[Evaluation]:
    """The three kinds of number, kept apart: training queries, unseen queries, unseen queries with ideal Φ."""
    model, splits = module.model, prepared.splits
    options = {"metrics": tuple(cfg.evaluation.metrics), "preset": cfg.evaluation.preset, "seed": cfg.seed}
    own = model.phi.mode == "per_query" or model.phi.deviations
    found = [evaluate(model, splits["train"], split="training queries", known_queries=own, **options)]
    for name in ("valid", "test"):
        if name in splits:
            policies = POLICIES[model.phi.mode] if cfg.evaluation.all_policies else (model.phi.policy,)
            for policy in policies:
                found.append(evaluate(model, splits[name], split=f"{name}: unseen queries", policy=policy, **options))
    if cfg.evaluation.ideal and "test" in splits:
        data, dists = splits["test"], prepared.dists["test"]
        start = model.phi.table.weight.detach().mean(0)
        scores = ideal_scores(dists, data.labels, data.offsets, start, kernel=model.kernel, seed=cfg.seed)
        found.append(evaluate_scores(scores, data, split="test: ideal Φ (upper bound)", policy="ideal", **options))
    return found


def build(part: Any, **arguments: Any) -> Any:
    """Make what a part of the configuration describes.

    Raises:
        LGMMLError: what went wrong, without Hydra's wrapping.
    """
    try:
        made = instantiate(part, **arguments)
        if isinstance(made, functools.partial):  # would fail only when it is called, perhaps minutes later
            inspect.signature(made.func).bind_partial(*made.args, **made.keywords)
        return made
    except MissingMandatoryValue as error:
        raise ConfigError(f"`{error.full_key}` must be given, e.g. {error.full_key}=...") from error
    except TypeError as error:
        raise ConfigError(f"{part.get('_target_')}: {error}") from error
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, LGMMLError):
            raise cause from None
        raise ConfigError(" ".join(str(error).split())) from error


@hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")
def _app(cfg: DictConfig) -> float | None:
    try:
        result = train(cfg)
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
