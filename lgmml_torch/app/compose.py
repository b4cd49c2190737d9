"""From a configuration to the objects it describes; whatever is wrong with it is said before any fit starts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from hydra.errors import HydraException, InstantiationException
from hydra.utils import get_object, instantiate
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from pytorch_lightning.callbacks import Callback, EarlyStopping, LearningRateMonitor, ProgressBar

from lgmml_torch.app.config import load_config
from lgmml_torch.checks import ConfigError, DataError, LGMMLError, check_choice
from lgmml_torch.fitting.bank import BankBuilder, as_builder
from lgmml_torch.functional.measures import Function, Measure, measures_of
from lgmml_torch.functional.presets import PRESETS
from lgmml_torch.models.encode import CategorySettings
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.storage import is_archive, load_checkpoint, read_model
from lgmml_torch.ragged import RankingData
from lgmml_torch.training import defaults
from lgmml_torch.training.callbacks import quiet_lightning
from lgmml_torch.training.losses import ListLoss, Loss
from lgmml_torch.training.module import Dropout
from lgmml_torch.training.recipe import PhiSettings, Recipe, check_precision, rehearse
from lgmml_torch.training.stages import choose_kind

log = logging.getLogger(__name__)

_DISTANCES = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}  # None: the model's own


def build(part: Any, **arguments: Any) -> Any:
    """Make what a part of the configuration describes.

    Raises:
        LGMMLError: what went wrong, without Hydra's wrapping.
    """
    _check_targets(part)
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


@contextmanager
def named(cfg: DictConfig, *parts: str) -> Iterator[None]:
    """Give the setting that an error starts with its full name: ``rounds`` becomes ``local_metrics.rounds``.

    Parts are also made without a configuration, where their arguments have no longer name.
    """
    try:
        yield
    except LGMMLError as error:
        name = re.match(r"`(\w+)", str(error))
        for part in parts:
            if name is not None and name[1] in (cfg.get(part) or ()):
                raise type(error)(f"`{part}.{str(error)[1:]}") from error
        raise


# What a configuration may name: it may come from somebody else, and a name is code to run.
TARGETS = ("lgmml_torch", "pytorch_lightning", "torch.optim")


def _check_targets(part: Any, allowed: Sequence[str] | None = None) -> None:
    """Refuse names of code that does not belong here, however they are spelt, before any of it runs.

    By default `TARGETS` are allowed; ``LGMML_TARGETS=mine,other.module`` in the environment allows more packages.

    Raises:
        ConfigError: the name.
    """
    if OmegaConf.is_list(part):
        for item in part:
            _check_targets(item, allowed)
    if not OmegaConf.is_dict(part):
        return
    for key in part:
        if not OmegaConf.is_missing(part, key):
            _check_targets(part[key], allowed)
    if part.get("_target_") is not None:
        _check_name("_target_", str(part["_target_"]), allowed)


def _check_name(setting: str, name: str, allowed: Sequence[str] | None = None) -> None:
    """Refuse the dotted name of code that does not belong here."""
    advice = ""
    if allowed is None:
        allowed = (*TARGETS, *filter(None, os.environ.get("LGMML_TARGETS", "").split(",")))
        advice = "; LGMML_TARGETS=package allows more"
    within = _inside(name, allowed)
    if within:  # a module that others are imported into would be a way to those
        with contextlib.suppress(ImportError, ValueError, HydraException):  # which instantiating will tell
            within = _inside(str(getattr(get_object(name), "__module__", name)), allowed)
    if not within:
        listed = ", ".join(allowed)
        raise ConfigError(f"`{setting}` must lie in one of {listed}, got {name!r}{advice}")


def find_measure(setting: str, name: str) -> Measure:
    """A built-in measure by its name, or a function by its dotted name, see `_find_function`.

    Raises:
        LGMMLError: there is none of that name, or its code does not belong here.
    """
    if "." not in name:
        try:
            return Measure.of(name)
        except LGMMLError as error:
            raise ConfigError(str(error).replace("`metrics`", f"`{setting}`")) from error
    return Measure(name, _find_function(setting, name, "measure"))


def _find_function(setting: str, name: str, what: str) -> Function:
    """A function ``(scores, labels, offsets) -> (Q,)`` by its dotted name, under the rule of `_check_targets`."""
    _check_name(setting, name)
    try:
        found: Function = get_object(name)
    except (ImportError, ValueError, HydraException) as error:
        raise ConfigError(f"`{setting}` must name a {what}, got {name!r}: {' '.join(str(error).split())}") from error
    if not callable(found):
        raise ConfigError(f"`{setting}` must name a function, got {name!r}, which is none")
    return found


def _build_loss(cfg: DictConfig) -> Loss:
    """The configured loss; a function is looked up by its dotted name, see `_find_function`."""
    with named(cfg, "loss"):
        loss: Loss = build(cfg.loss)
    if isinstance(loss, ListLoss) and loss.function is None:
        return ListLoss(loss.name, _find_function("loss", loss.name, "loss"))
    return loss


def measuring_rules(cfg: DictConfig) -> dict[str, Any]:
    """How every split is evaluated: by the configured measures and the one that decides, their rules, the seed."""
    found = [find_measure("evaluation.metrics", name) for name in cfg.evaluation.metrics]
    metrics = tuple(measures_of([*found, find_measure("measure", cfg.measure)]))
    return {"metrics": metrics, "preset": cfg.evaluation.preset, "seed": cfg.seed}


def _inside(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def load_splits(cfg: DictConfig, allowed: Sequence[str] | None = None) -> dict[str, RankingData]:
    """The configured data: ``train`` and, where there are any, ``valid`` and ``test``.

    ``allowed`` are the packages whose code may read it, see `_check_targets`.
    """
    _check_targets(cfg.data, allowed)
    with named(cfg, "data"):
        splits: dict[str, RankingData] = build(cfg.data)
    for name, data in splits.items():
        log.info("%s: %s", name, data)
    if "train" not in splits:
        raise DataError(f"`data` must have a training part, got {', '.join(splits)}")
    if "valid" not in splits:
        log.warning("there are no validation queries (vali.txt): nothing is stopped early, and the last epoch is kept")
    return splits


def settle(cfg: DictConfig, asked: Sequence[str] | None, splits: Mapping[str, RankingData]) -> DictConfig:
    """The configuration with the defaults that `choose_kind` has for this data; what was asked for stays.

    ``asked`` are the overrides of the user; None: all of the configuration was asked for. `chosen` says what is fitted
    and why.

    Raises:
        ConfigError: a setting that has no effect on what is fitted.
    """
    if asked is None:
        return cfg
    given = _asked_settings(asked)
    loss: Loss = build(cfg.loss)
    kind = _builder(cfg).kind
    experiment = given.get("experiment", "trained")
    if experiment != "trained" or not kind or cfg.warm_start:
        if kind:
            defaults.check_effect(given, kind, loss.name)
        return _with_reason(cfg, "as configured")
    if given.get("local_metrics", kind) not in defaults.BANKS:
        defaults.check_effect(given, kind, loss.name)
        return _with_reason(cfg, f"as configured (local_metrics={given['local_metrics']})")
    if "local_metrics" in given or "experiment" in given:
        given["bank"] = kind
    if "loss" in given:
        given["loss"] = loss
    chosen = _chosen(cfg, given, splits)
    log.info("%s", chosen.reason)
    settled = load_config([*_default_overrides(chosen, given), *asked])
    settled.resume = cfg.resume  # what resume=auto means has been found by now
    return _with_reason(settled, chosen.reason)


def _chosen(cfg: DictConfig, given: Mapping[str, Any], splits: Mapping[str, RankingData]) -> defaults.Defaults:
    """Of a run that is resumed, the kind of metrics that it has: more processes, or others, may choose otherwise."""
    chosen = choose_kind(splits, given, cfg.seed, measure=find_measure("measure", cfg.measure))
    if not cfg.resume or "bank" in given:
        return chosen
    kind = "trained" if read_model(cfg.resume)[0]["metrics"].get("trained") else "boosted"
    if kind == chosen.bank:
        return chosen
    return defaults.choose_defaults(defaults.Sizes.of(splits["train"]), given, start=kind)


def _asked_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The overrides by the names of `SETTINGS`; parts by their own.

    >>> _asked_settings(["loss.margin=0.5", "phi=shared", "+local_metrics.cap=9"])
    {'margin': '0.5', 'phi': 'shared', 'bank_options': '9'}
    """
    names = {}
    for name, setting in defaults.SETTINGS.items():
        names[setting.key] = name
    given: dict[str, Any] = {}
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        key = key.split("@")[0]
        if key.startswith("local_metrics.") and key not in (*names, "local_metrics.kernel"):
            key = "local_metrics.*"
        given[names.get(key, key)] = value
    return given


def _default_overrides(chosen: defaults.Defaults, given: Mapping[str, Any]) -> list[str]:
    """What one would type to have these defaults; parts and settings the user gave are left out."""
    if chosen.bank == "sampled":
        return []
    if chosen.bank == "boosted":
        return [f"local_metrics.rounds={chosen.rounds}"]
    found = [
        f"local_metrics.num_metrics={chosen.num_metrics}",
        f"local_metrics.rank={chosen.rank}",
        f"trainer.max_epochs={chosen.epochs}",
        f"dropout.features={chosen.dropout.features}",
        f"dropout.metrics={chosen.dropout.metrics}",
        f"loader.batch_size={chosen.batch_size}",
    ]
    if "trainer.val_check_interval" not in given:  # which counts within the epochs that are validated
        found.append(f"++trainer.check_val_every_n_epoch={chosen.validate_every}")
    if "preprocess" not in given:
        found += [f"preprocess.ramps={chosen.ramps}", f"preprocess.max_columns={chosen.max_columns}"]
    if given.get("phi") == "per_query":
        found.append("phi.sparse=false")  # AdamW takes no sparse gradients
    if "experiment" not in given:
        found.insert(0, "experiment=trained")
    return found


def fitted_metrics(overrides: Sequence[str]) -> tuple[str, bool]:
    """The kind of metrics that overrides fit, empty for a builder of another package, and whether they name it."""
    cfg, given = load_config(overrides), _asked_settings(overrides)
    if "local_metrics" in given or "experiment" in given:
        return _builder(cfg).kind, True
    return _chosen(cfg, given, load_splits(cfg)).bank, False


def _builder(cfg: DictConfig) -> BankBuilder:
    with named(cfg, "local_metrics"):
        return as_builder(build(cfg.local_metrics, _convert_="all"))


def _with_reason(cfg: DictConfig, reason: str) -> DictConfig:
    found = cfg.copy()
    OmegaConf.update(found, "chosen", reason)
    return found


def recipe_of(cfg: DictConfig) -> Recipe:
    """What the configuration wants fitted.

    Raises:
        LGMMLError: for parts that do not exist, do not take their settings, or do not go together.
    """
    check_choice("distances", cfg.distances, _DISTANCES)
    defaults.budget_seconds(cfg.budget)
    measuring_rules(cfg)
    with named(cfg, "evaluation"):
        check_choice("preset", cfg.evaluation.preset, PRESETS)
    with named(cfg, "step_size"):
        rule = build(cfg.step_size)
    recipe = Recipe(
        preprocess=functools.partial(build, cfg.preprocess),
        fit_bank=_builder(cfg),
        make_phi=build(cfg.phi),
        phi=PhiSettings(
            loss=_build_loss(cfg),
            loader=OmegaConf.to_container(cfg.loader, resolve=True),  # type: ignore[arg-type]
            optimizer=build(cfg.optimizer),
            step_size=rule,
            dropout=build({"_target_": f"{Dropout.__module__}.{Dropout.__name__}", **cfg.dropout}),
            deviation_penalty=cfg.deviation_penalty,
            keep=cfg.keep,
            preset=cfg.evaluation.preset,
            distances=_DISTANCES[cfg.distances],
        ),
        seed=cfg.seed,
        categories=CategorySettings(**cfg.categories),
        measure=find_measure("measure", cfg.measure),
        grows=cfg.grow,
        features=cfg.features,
    )
    with named(cfg, "local_metrics", "phi", "loader"):
        rehearse(recipe)
    with named(cfg, "preprocess"):
        recipe.preprocess()
    if cfg.search.policy is not None:
        check_choice("search.policy", cfg.search.policy, POLICIES[recipe.make_phi(1, 1).mode])
    return recipe


def check_parts(cfg: DictConfig) -> None:
    """Make every part once for nothing, and look at the files to start from: a mistake should not cost a fit.

    Raises:
        LGMMLError: what is wrong with a part or a file.
    """
    recipe_of(cfg)
    _check_trainer(cfg)
    if cfg.warm_start is not None:
        read_model(cfg.warm_start)
    elif cfg.grow:
        raise ConfigError("`grow` needs a model to add rounds to, warm_start=model.safetensors, got none")
    if cfg.resume is not None and not is_archive(cfg.resume):
        read_model(cfg.resume)  # says what is wrong with what is no model either
        raise ConfigError(
            f"`resume` must be a checkpoint of a run, such as its last.ckpt, got {cfg.resume}, which is a model file; "
            f"warm_start={cfg.resume} starts from it"
        )
    if cfg.resume is not None:
        load_checkpoint(cfg.resume)


def _check_trainer(cfg: DictConfig) -> None:
    """Refuse what Lightning refuses, such as a device that is not there, and a precision that cannot be computed in."""
    try:
        with quiet_lightning():
            callbacks = make_callbacks(cfg, validated=True)
            check_precision(build(cfg.trainer)(callbacks=callbacks, logger=False, enable_checkpointing=False))
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise ConfigError(f"`trainer`: {' '.join(str(error).split())}") from error


def make_loggers(cfg: DictConfig, **place: str) -> list[Any]:
    """The configured loggers; candidates of a search, in a ``place`` of their own, have those that know of places."""
    made = []
    for part in filter(None, (cfg.get("logger") or {}).values()):
        if all(key in part for key in place):
            made.append(build(part, **place))
    return made


def make_callbacks(cfg: DictConfig, *, validated: bool) -> list[Any]:
    """The configured callbacks that have something to do.

    Watching the step needs a logger, stopping early needs validation, and a bar may be switched off.
    """
    made = list(map(build, filter(None, (cfg.get("callbacks") or {}).values())))
    idle: list[type[Callback]] = []
    if not cfg.get("logger"):
        idle.append(LearningRateMonitor)
    if not validated:
        idle.append(EarlyStopping)
    if not cfg.trainer.get("enable_progress_bar", True):
        idle.append(ProgressBar)
    return [item for item in made if not isinstance(item, tuple(idle))]
