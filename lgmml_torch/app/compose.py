"""From a configuration to the objects it describes; whatever is wrong with it is said before any fit starts."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from pytorch_lightning.callbacks import Callback, EarlyStopping, LearningRateMonitor, ProgressBar

from lgmml_torch.app.config import load_config
from lgmml_torch.checks import ConfigError, DataError, LGMMLError, check_choice
from lgmml_torch.data.cache import Cache
from lgmml_torch.functional.ranking.presets import find_preset, parse_metric
from lgmml_torch.models.tree_base import TreeBase
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.module import Dropout
from lgmml_torch.training.stages import PhiSettings, Recipe, Surroundings, quiet_lightning, rehearse
from lgmml_torch.training.ways import Way, choose_way, find_budget

log = logging.getLogger(__name__)

DISTANCES = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}  # None: the model's own


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


def load_splits(cfg: DictConfig) -> dict[str, RankingData]:
    """The configured data: ``train`` and, where there are any, ``valid`` and ``test``."""
    splits: dict[str, RankingData] = build(cfg.data)
    for name, data in splits.items():
        log.info("%s: %s", name, data)
    if "train" not in splits:
        raise DataError(f"`data` must have a training part, got {', '.join(splits)}")
    return splits


def load_base(cfg: DictConfig, splits: Mapping[str, RankingData]) -> TreeBase | None:
    """The trees that ours shall be added to, where the configuration names any; tried before anything is fitted.

    Raises:
        LGMMLError: a file that is no such model, trees of other features, a missing library, nothing to weigh them by.
    """
    if cfg.base is None:
        return None
    if "valid" not in splits:
        raise ConfigError("`base` needs validation queries to choose the weights by, and the data has none")
    base = TreeBase.read(str(cfg.base))
    base.check(splits["train"].num_features, splits["train"].feature_names)
    return base


# Parts of the configuration that say what is fitted: who sets one of them is not chosen for.
DECISIVE = ("experiment", "local_metrics", "preprocess", "phi", "loss", "optimizer", "step_size")


def settle(cfg: DictConfig, asked: Sequence[str] | None, train: RankingData) -> DictConfig:
    """The configuration with what the size of the data decides, unless the overrides ``asked`` for have decided it.

    Whatever was asked for stays as it is; `chosen` says what came of it and why. None: all of it was asked for.
    """
    if asked is None:
        return cfg
    parts = {text.lstrip("+~").split("=")[0].split("@")[0].split(".")[0] for text in asked}
    decided = [part for part in DECISIVE if part in parts]
    if decided or cfg.warm_start:
        return _with_reason(cfg, f"as configured ({', '.join(decided) or 'warm_start'})")
    way = choose_way(train.num_queries, train.num_documents, train.num_features, cfg.budget)
    log.info("%s", way.reason)
    return _with_reason(load_config([*way_overrides(way), *asked]), way.reason)


def _with_reason(cfg: DictConfig, reason: str) -> DictConfig:
    found = cfg.copy()
    OmegaConf.update(found, "chosen", reason)
    return found


def way_overrides(way: Way) -> list[str]:
    """What one would type to have this way fitted."""
    if way.bank == "boosted":
        return [f"local_metrics.rounds={way.rounds}"]
    return [
        "experiment=trained",
        f"local_metrics.num_metrics={way.num_metrics}",
        f"local_metrics.rank={way.rank}",
        f"preprocess.ramps={way.ramps}",
        f"trainer.max_epochs={way.epochs}",
        f"dropout.features={way.dropout.features}",
        f"dropout.metrics={way.dropout.metrics}",
    ]


def make_recipe(cfg: DictConfig) -> Recipe:
    """What the configuration wants fitted.

    Raises:
        LGMMLError: for parts that do not exist, do not take their settings, or do not go together.
    """
    check_choice("distances", cfg.distances, DISTANCES)
    find_budget(cfg.budget, 0, 0)
    for name in cfg.evaluation.metrics:
        parse_metric(name)
    find_preset(cfg.evaluation.preset)
    rule = build(cfg.step_size)
    recipe = Recipe(
        preprocess=functools.partial(build, cfg.preprocess),
        fit_bank=build(cfg.local_metrics, _convert_="all"),
        make_phi=build(cfg.phi),
        phi=PhiSettings(
            loss=build(cfg.loss),
            loader=OmegaConf.to_container(cfg.loader, resolve=True),  # type: ignore[arg-type]
            optimizer=build(cfg.optimizer),
            step_size=rule,
            dropout=Dropout(**cfg.dropout),
            deviation_penalty=cfg.deviation_penalty,
            keep=cfg.keep,
            preset=cfg.evaluation.preset,
            distances=DISTANCES[cfg.distances],
        ),
        seed=cfg.seed,
    )
    rehearse(recipe)
    recipe.preprocess()
    return recipe


def make_surroundings(cfg: DictConfig, folder: Path, loggers: list[Any], *, validated: bool) -> Surroundings:
    """Where and under whose eyes Φ is trained."""
    return Surroundings(
        folder=folder,
        trainer=build(cfg.trainer),
        callbacks=make_callbacks(cfg, validated=validated),
        loggers=loggers,
        cache=None if cfg.paths.cache_dir is False else Cache(cfg.paths.cache_dir),
        resume=None if cfg.resume is None else Path(cfg.resume),
    )


def check_trainer(cfg: DictConfig) -> None:
    """Make Lightning's trainer once for nothing: a device that is not there should not cost a fit.

    Raises:
        ConfigError: what Lightning has to say.
    """
    try:
        with quiet_lightning():
            build(cfg.trainer)(callbacks=make_callbacks(cfg, validated=True), logger=False, enable_checkpointing=False)
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise ConfigError(f"`trainer`: {' '.join(str(error).split())}") from error


def make_loggers(cfg: DictConfig, **place: str) -> list[Any]:
    """The configured loggers; ``place`` keeps candidates of a search apart where a logger knows of versions."""
    parts = [part for part in cfg.logger.values() if part]
    return [build(part, **{key: value for key, value in place.items() if key in part}) for part in parts]


def make_callbacks(cfg: DictConfig, *, validated: bool) -> list[Any]:
    """The configured callbacks that have something to do.

    Watching the step needs a logger, stopping early needs validation, and a bar may be switched off.
    """
    made = [build(part) for part in cfg.callbacks.values() if part]
    idle: tuple[type[Callback], ...] = () if cfg.logger else (LearningRateMonitor,)
    idle += () if validated else (EarlyStopping,)
    idle += () if cfg.trainer.get("enable_progress_bar", True) else (ProgressBar,)
    return [item for item in made if not isinstance(item, idle)]
