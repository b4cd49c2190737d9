"""What the settings of a run may be: one table, gone through before data is read and before torch is imported.

Settings of a part (``local_metrics``, ``phi``, ``loss``, ``loader``, …) are the part's own affair: the estimator needs
the same rules, so they stand where the part is made, and `lgmml_torch.app.compose` tries every part before data is
read. The table has all others.
"""

from __future__ import annotations

from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lgmml_torch.checks import (
    ConfigError,
    LGMMLError,
    check_each,
    check_number,
    check_positive,
    check_seed,
    check_whole,
)
from lgmml_torch.rules import (
    Rule,
    at_least,
    count_or_all,
    counts_from_zero,
    each,
    flag,
    flag_or,
    from_zero,
    one_of,
    optional,
    text,
)

ABSENT = object()


def devices(name: str, value: Any) -> None:
    """How many, which, all (-1), or auto."""
    if isinstance(value, str):
        if value != "auto" and not value.replace(",", "").replace("-1", "1").isdigit():
            raise LGMMLError(f"`{name}` must be 'auto', a number of devices or a list of them, got {value!r}")
    elif isinstance(value, int):
        count_or_all(name, value)
    else:
        check_each(name, value, counts_from_zero)


SETTINGS: dict[str, Rule] = {
    "seed": check_seed,
    "threads": optional(check_whole),
    "search.margin": each(check_positive),
    "search.init": each(from_zero),
    "search.policy": optional(text),
    "evaluation.metrics": each(text),
    "evaluation.all_policies": flag,
    "evaluation.ideal": flag,
    "resume": optional(text),
    "warm_start": optional(text),
    "grow": flag,
    "measure": text,
    "base": optional(text),
    "paths.data_dir": optional(text),
    "optimizer.lr": check_positive,
    "optimizer.weight_decay": from_zero,
    "optimizer.momentum": from_zero,
    "optimizer.eps": from_zero,
    "optimizer.nesterov": flag,
    "optimizer.amsgrad": flag,
    "trainer.accelerator": one_of(("auto", "cpu", "gpu", "cuda", "mps", "tpu")),
    "trainer.devices": devices,
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
    "trainer.enable_progress_bar": optional(flag),
    "trainer.enable_model_summary": optional(flag),
    "trainer.use_distributed_sampler": flag,
    "trainer.inference_mode": flag,
    "trainer.deterministic": optional(flag_or(one_of(["warn"]))),
    "callbacks.early_stopping.patience": counts_from_zero,
    "callbacks.early_stopping.min_delta": check_number,
    "callbacks.early_stopping.mode": one_of(("min", "max")),
    "callbacks.early_stopping.monitor": text,
    "callbacks.learning_rate.logging_interval": optional(one_of(("step", "epoch"))),
    "callbacks.story.pictures": flag,
}


PARTS = (
    "data", "preprocess", "local_metrics", "phi", "loss", "optimizer", "step_size", "trainer",
    "loader", "dropout", "search", "evaluation", "paths",
)  # fmt: skip
"""Groups of settings a run cannot do without; ``callbacks`` and ``logger`` may be null."""


def check_settings(cfg: DictConfig) -> None:
    """Go through the table.

    Raises:
        ConfigError: the first setting that is missing or breaks its rule: its full name, the rule and the value.
    """
    try:
        for name in _missing(OmegaConf.to_container(cfg, resolve=False)):
            raise ConfigError(f"`{name}` must be given, e.g. {name}=...")
        for name in PARTS:
            if not isinstance(part := cfg.get(name), DictConfig):
                raise ConfigError(f"`{name}` must be one of its choices or a group of settings, got {part!r}")
        for name, rule in SETTINGS.items():
            value = OmegaConf.select(cfg, name, default=ABSENT)
            if value is not ABSENT:
                rule(name, value)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    except LGMMLError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def _missing(node: Any, prefix: str = "") -> list[str]:
    """Full names of what the configuration leaves to be given; nothing is looked up that only a run can say."""
    if not isinstance(node, dict):
        return [prefix.rstrip(".")] if node == MISSING else []
    return [name for key, child in node.items() for name in _missing(child, f"{prefix}{key}.")]
