"""Finding the configuration, telling people what is wrong with theirs in one sentence, and what Hydra calls in runs."""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import MISSING, DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from lgmml_torch.app.start import config_dir
from lgmml_torch.checks import (
    ConfigError,
    DataError,
    LGMMLError,
    Rule,
    at_least,
    check_each,
    check_flag,
    check_number,
    check_positive,
    check_seed,
    check_whole,
    count_or_all,
    counts_from_zero,
    did_you_mean,
    each,
    flag_or,
    from_zero,
    one_of,
    optional,
    text,
)

log = logging.getLogger(__name__)


def load_config(overrides: Sequence[str] = (), *, name: str = "train", folder: Path | None = None) -> DictConfig:
    """Compose the configuration ``name`` of a folder, this package's own by default, without running anything.

    Raises:
        ConfigError: for an unknown key or choice, with a suggestion.
    """
    GlobalHydra.instance().clear()
    if folder is None:
        folder = config_dir()
    with initialize_config_dir(str(folder), version_base="1.3"):
        try:
            return compose(name, overrides=_spelt_out(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_one_sentence(error, overrides, name, folder)) from error


def _spelt_out(words: Sequence[str]) -> list[str]:
    """The words with a loss that is the dotted name of a function as Hydra knows it: a part and its setting.

    >>> _spelt_out(["seed=1", "loss=shop.losses.spread"])
    ['seed=1', 'loss=function', 'loss.name=shop.losses.spread']
    """
    found = []
    for word in words:
        own = re.fullmatch(r"loss=(\w+(?:\.\w+)+)", word)
        if own is not None:
            found += ["loss=function", f"loss.name={own[1]}"]
        else:
            found.append(word)
    return found


def _explained_settings() -> str:
    """A line for each setting that a comment explains, in ``train.yaml`` and in the parts that are the default."""
    folder = config_dir()
    text = (folder / "train.yaml").read_text(encoding="utf-8").partition("\nhydra:\n")[0]
    lines = _commented(text, "")
    for group, choice in re.findall(r"^  - (\w+): (\w+)$", text, re.MULTILINE):
        if choice != "null":
            lines += _commented((folder / group / f"{choice}.yaml").read_text(encoding="utf-8"), f"{group}.")
    return "\n".join(lines).replace("$", "$$")  # which Hydra takes for a dollar


def _commented(text: str, prefix: str) -> list[str]:
    """``name=default`` and the comment, of the lines of a configuration file that have one."""
    found, above = [], ""
    for line in text.splitlines():
        parsed = re.match(r"( *)(\w+): *([^#]*?) *(?:# (.*))?$", line)
        if parsed is None:
            continue
        indent, key, value, comment = parsed.groups()
        name = f"{prefix}{above}{key}"
        if not indent:
            name, above = f"{prefix}{key}", f"{key}."
        if value and not value.startswith("$"):  # no group, and no value that is looked up
            name += f"={value}"
        if comment:
            found.append(textwrap.fill(f"{name:<34} {comment}", 120, subsequent_indent=" " * 35))
    return found


OmegaConf.register_new_resolver("explained_settings", _explained_settings, replace=True)  # for the help of Hydra


def check_command(words: Sequence[str]) -> list[str]:
    """Check the words of a command line before Hydra does, which would answer with a traceback; the words for Hydra.

    Settings are checked, too, except those of a sweep, which each of its runs checks.

    Raises:
        ConfigError: as in `load_config`, or for a setting that breaks its rule.
    """
    words = _spelt_out(words)
    args = get_args_parser().parse_args(words)
    if args.help or args.hydra_help or args.info or args.shell_completion or args.experimental_rerun:
        return words
    folder, places, kept = None, list[str](), list[str]()
    if args.config_dir is not None:
        if not Path(args.config_dir).is_dir():
            raise ConfigError(f"`--config-dir` must name an existing folder, got {args.config_dir}")
        places.append(f"file://{Path(args.config_dir).absolute()}")
    if args.config_path is not None:
        folder = Path(args.config_path).absolute()
    parsed = parse_overrides(args.overrides)
    for typed, item in zip(args.overrides, parsed, strict=True):
        if item.key_or_group == "hydra.searchpath":
            value = item.value()
            if not isinstance(value, list):
                value = [value]
            places += map(str, value)
        elif not item.is_sweep_override() and not item.key_or_group.startswith("hydra"):
            kept.append(typed)
    name = args.config_name or "train"
    cfg = load_config([*_search_path(places), *kept], name=name, folder=folder)
    if args.cfg is None and name == "train" and not any(item.is_sweep_override() for item in parsed):
        check_settings(cfg)
    return words


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """What Hydra makes of ``key=value``.

    Raises:
        ConfigError: words that it cannot read.
    """
    try:
        return OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def _search_path(places: Sequence[str]) -> list[str]:
    """What makes Hydra look for parts in further places."""
    if not places:
        return []
    quoted = ",".join("'" + place.replace("'", "\\'") + "'" for place in places)
    return [f"hydra.searchpath=[{quoted}]"]


def asked_for() -> list[str]:
    """The overrides of the run that Hydra has started, with the places where it looked for parts."""
    run = HydraConfig.get()
    own = ("hydra", "main", "schema")  # Hydra's, and the folder of this package
    places = []
    for source in run.runtime.config_sources:
        if source.provider not in own:
            places.append(f"{source.schema}://{source.path}")
    return [*_search_path(places), *run.overrides.task]


def _one_sentence(error: Exception, overrides: Sequence[str], name: str, folder: Path) -> str:
    text = " ".join(str(error).split())
    key = re.search(r"Could not override '([^']+)'", text)
    if key is not None:
        idle = _without_effect(key[1], overrides)
        return idle or f"unknown setting {key[1]!r}{_suggested(key[1], _known_keys(overrides, name, folder))}"
    choice = re.search(
        r"Could not find '([^']+)' Available options in '([^']+)': (.*?)(?: Config search path.*)?$", text
    )
    if choice is not None:
        options = choice[3].split()
        word = choice[1].rsplit("/", 1)[-1]
        return f"{choice[2]} has no choice {word!r}{did_you_mean(word, options)} (there are: {', '.join(options)})"
    return text


def _without_effect(key: str, overrides: Sequence[str]) -> str | None:
    """The sentence for a setting that other metrics have; None for one that no metrics have."""
    from lgmml_torch.training.defaults import why_unknown  # torch takes its time to import, and a mistake is rare

    parts = {}
    for word in overrides:
        if "=" in word:
            name, value = word.split("=", 1)
            parts[name] = value
    bank = parts.get("local_metrics")
    if parts.get("experiment") == "trained":
        bank = "trained"
    elif "experiment" in parts:
        return None
    return why_unknown(key, bank)


def _suggested(key: str, known: list[str]) -> str:
    """A key of the same name elsewhere, or else one spelt alike."""
    leaf = key.rpartition(".")[2]
    for other in known:
        if other.rpartition(".")[2] == leaf:
            return f"; did you mean {other!r}?"
    return did_you_mean(key, known)


def _known_keys(overrides: Sequence[str], name: str, folder: Path) -> list[str]:
    """Every dotted key there is, with the parts chosen that can be chosen."""
    groups = {path.name for path in folder.iterdir() if path.is_dir()}
    chosen = [text for text in overrides if text.split("=")[0] in groups]
    try:
        config = compose(name, overrides=chosen)
    except HydraException:
        config = compose(name)
    return [*groups, *_dotted(OmegaConf.to_container(config, resolve=False))]


def _dotted(node: Any, prefix: str = "") -> dict[str, Any]:
    """Every group and setting by its full name."""
    found: dict[str, Any] = {}
    for key, child in node.items():
        found[f"{prefix}{key}"] = child
        if isinstance(child, dict):
            found |= _dotted(child, f"{prefix}{key}.")
    return found


# Rules for settings that no part checks by itself: the estimator needs the same rules for parts, so they stand there.
_ABSENT = object()


def _devices(name: str, value: Any) -> None:
    """How many, which, all (-1), or auto."""
    if isinstance(value, str):
        if value != "auto" and not value.replace(",", "").replace("-1", "1").isdigit():
            raise LGMMLError(f"`{name}` must be 'auto', a number of devices or a list of them, got {value!r}")
    elif isinstance(value, int):
        count_or_all(name, value)
    else:
        check_each(name, value, counts_from_zero)


RUN_SETTINGS: dict[str, Rule] = {
    "seed": check_seed,
    "threads": optional(check_whole),
    "search.margin": each(check_positive),
    "search.init": each(from_zero),
    "search.policy": optional(text),
    "evaluation.metrics": each(text),
    "evaluation.all_policies": check_flag,
    "resume": optional(text),
    "warm_start": optional(text),
    "grow": check_flag,
    "measure": text,
    "base": optional(text),
    "paths.data_dir": optional(text),
    "optimizer.lr": check_positive,
    "optimizer.weight_decay": from_zero,
    "optimizer.momentum": from_zero,
    "optimizer.eps": from_zero,
    "optimizer.nesterov": check_flag,
    "optimizer.amsgrad": check_flag,
    "trainer.accelerator": one_of(("auto", "cpu", "gpu", "cuda", "mps", "tpu")),
    "trainer.devices": _devices,
    "trainer.num_nodes": check_whole,
    "trainer.strategy": text,
    "trainer.max_epochs": optional(at_least(-1, whole=True)),
    "trainer.min_epochs": optional(counts_from_zero),
    "trainer.max_steps": at_least(-1, whole=True),
    "trainer.num_sanity_val_steps": at_least(-1, whole=True),
    "trainer.check_val_every_n_epoch": optional(check_whole),
    "trainer.log_every_n_steps": optional(counts_from_zero),
    "trainer.accumulate_grad_batches": check_whole,
    "trainer.gradient_clip_val": optional(from_zero),
    "trainer.limit_train_batches": optional(from_zero),
    "trainer.limit_val_batches": optional(from_zero),
    "trainer.limit_test_batches": optional(from_zero),
    "trainer.overfit_batches": from_zero,
    "trainer.enable_progress_bar": optional(check_flag),
    "trainer.enable_model_summary": optional(check_flag),
    "trainer.use_distributed_sampler": check_flag,
    "trainer.inference_mode": check_flag,
    "trainer.deterministic": optional(flag_or(one_of(["warn"]))),
    "callbacks.early_stopping.patience": counts_from_zero,
    "callbacks.early_stopping.min_delta": check_number,
    "callbacks.early_stopping.mode": one_of(("min", "max")),
    "callbacks.early_stopping.monitor": text,
    "callbacks.learning_rate.logging_interval": optional(one_of(("step", "epoch"))),
    "callbacks.log_model.pictures": check_flag,
}


# Groups of settings a run cannot do without; `callbacks` and `logger` may be null.
_PARTS = (
    "data", "preprocess", "local_metrics", "phi", "loss", "optimizer", "step_size", "trainer",
    "loader", "dropout", "search", "evaluation", "paths",
)  # fmt: skip


def check_settings(cfg: DictConfig) -> None:
    """Go through the table.

    Raises:
        ConfigError: the first setting that is missing or breaks its rule: its full name, the rule and the value.
    """
    try:
        for name, value in _dotted(OmegaConf.to_container(cfg, resolve=False)).items():
            if value == MISSING:
                raise ConfigError(f"`{name}` must be given, e.g. {name}=...")
        for name in _PARTS:
            if not isinstance(part := cfg.get(name), DictConfig):
                raise ConfigError(f"`{name}` must be one of its choices or a group of settings, got {part!r}")
        for name, rule in RUN_SETTINGS.items():
            value = OmegaConf.select(cfg, name, default=_ABSENT)
            if value is not _ABSENT:
                rule(name, value)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    except LGMMLError as error:
        raise ConfigError(str(error)) from error


class MeansOfJobs(Callback):
    """After ``python train.py -m data.fold=1,2,3``: the table of means, in the log and in ``means.md``."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the table when all jobs are done."""
        from lgmml_torch.app.report import means_markdown  # Lightning takes seconds to import
        from lgmml_torch.files import write_text

        folder = Path(config.hydra.sweep.dir)
        try:
            table = means_markdown(folder)
        except DataError as error:
            log.warning("%s", error)
            return
        write_text(folder / "means.md", table)
        log.info("means over the runs (%s):\n%s", folder / "means.md", table)


class NewFolder(Callback):
    """Give every run, and every sweep, a folder of its own, also when several start in the same second.

    A folder without the time in its name was chosen by the user and is used as it is.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Create the folder; all processes of a run get that of the first."""
        _own_folder(config, config.hydra.run)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Create the folder of the jobs."""
        _own_folder(config, config.hydra.sweep)


def _own_folder(config: DictConfig, place: DictConfig) -> None:
    unresolved = OmegaConf.to_container(place, resolve=False)
    assert isinstance(unresolved, dict)
    if "${now:" not in unresolved["dir"]:
        return
    from lgmml_torch import distributed  # imports torch

    HydraConfig.instance().set_config(config)  # the name of the data, which is part of the path, is looked up there
    folder = Path(place.dir)
    if distributed.rank() == 0:
        with suppress(OSError):  # Hydra reports it when it creates the folder
            folder = _create(folder)
    with read_write(place):
        place.dir = distributed.broadcast(str(folder))


def _create(folder: Path) -> Path:
    """Create a folder that does not exist yet: this name, or the name with -2, -3 … appended."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free, number = folder, 1
    while True:
        try:
            free.mkdir()
            return free
        except FileExistsError:
            number += 1
            free = folder.with_name(f"{folder.name}-{number}")
