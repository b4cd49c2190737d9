"""Settings of the experiments: ``research/conf/paper.yaml`` and one file per figure, in three sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from lgmml_torch.app.config import load_config
from lgmml_torch.checks import check_choice, check_positive

FOLDER = Path(__file__).parent.parent / "conf"
SIZES = ("toy", "reduced", "full")


def by_size(toy: Any, reduced: Any, full: Any, *, _root_: DictConfig) -> Any:
    """``${by_size:a,b,c}`` in a configuration: a for ``size=toy``, b for ``size=reduced``, c for ``size=full``."""
    return dict(zip(SIZES, (toy, reduced, full), strict=True))[_root_.size]


def figure_names() -> list[str]:
    """All experiments, in the order they are run."""
    order = ["framework", "datasets", "global_local", "num_metrics", "dimension", "by_example", "large_scale"]
    order += ["scoring_time", "robustness"]
    there = sorted(path.stem for path in (FOLDER / "figure").glob("*.yaml"))
    return [name for name in order if name in there] + [name for name in there if name not in order]


def figure_settings(name: str, overrides: Sequence[str] = ()) -> SimpleNamespace:
    """The settings of one experiment as attributes; lists and mappings inside are plain.

    Raises:
        ConfigError: for an unknown experiment or setting, with a suggestion.
    """
    OmegaConf.register_new_resolver("by_size", by_size, replace=True)
    cfg = load_config([f"figure={name}", *overrides], name="paper", folder=FOLDER)
    check_choice("size", str(cfg.size), SIZES)
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    plain["threads"] = plain["threads"] or torch.get_num_threads()
    check_positive("threads", plain["threads"])
    return SimpleNamespace(**plain)
