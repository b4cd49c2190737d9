"""Run experiments: ``python -m research.paper NAME|all|page|list [size=toy|reduced|full] [setting=value …]``.

``page`` writes docs/results.md and docs/results/ from what is stored.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from lgmml_torch.app.config import load_config
from lgmml_torch.checks import LGMMLError, check_choice, check_positive
from research.paper import (
    by_example,
    datasets,
    dimension,
    framework,
    global_local,
    large_scale,
    num_metrics,
    robustness,
    scoring_time,
)
from research.paper.outcome import Outcome, write_page
from research.store import Store

log = logging.getLogger("research.paper")
CONF = Path(__file__).parent.parent / "conf"
SIZES = ("toy", "reduced", "full")
# All experiments, in the order they are run; each has its settings in research/conf/figure.
FIGURES: dict[str, Callable[[Any, Store], Outcome]] = {
    "framework": framework.run,
    "datasets": datasets.run,
    "global_local": global_local.run,
    "num_metrics": num_metrics.run,
    "dimension": dimension.run,
    "by_example": by_example.run,
    "large_scale": large_scale.run,
    "scoring_time": scoring_time.run,
    "robustness": robustness.run,
}


def by_size(toy: Any, reduced: Any, full: Any, *, _root_: DictConfig) -> Any:
    """``${by_size:a,b,c}`` in a configuration: a for ``size=toy``, b for ``size=reduced``, c for ``size=full``."""
    return dict(zip(SIZES, (toy, reduced, full), strict=True))[_root_.size]


def figure_settings(name: str, overrides: Sequence[str] = ()) -> SimpleNamespace:
    """The settings of one experiment as attributes; lists and mappings inside are plain.

    Raises:
        ConfigError: for an unknown experiment or setting, with a suggestion.
    """
    OmegaConf.register_new_resolver("by_size", by_size, replace=True)
    cfg = load_config([f"figure={name}", *overrides], name="paper", folder=CONF)
    check_choice("size", str(cfg.size), SIZES)
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    plain["threads"] = plain["threads"] or torch.get_num_threads()
    check_positive("threads", plain["threads"])
    return SimpleNamespace(**plain)


def run_figure(name: str, overrides: Sequence[str] = ()) -> tuple[Outcome, Path]:
    """Run one experiment, or read what is stored of it, and write its files; the folder they are in comes back."""
    cfg = figure_settings(name, overrides)
    folder = Path(cfg.results_dir) / cfg.size / name
    before = torch.get_num_threads()
    torch.set_num_threads(cfg.threads)
    try:
        started = time.perf_counter()
        store = Store(Path(cfg.results_dir) / "raw")
        with threadpool_limits(cfg.threads):  # numpy's own threads would wait for one another on a busy machine
            outcome = FIGURES[name](cfg, store)
        outcome.write(folder, store.cost)
        log.info("%s: %.0f s, files in %s", name, time.perf_counter() - started, folder)
    finally:
        torch.set_num_threads(before)
    return outcome, folder


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 2 for a mistake in it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("lgmml_torch").setLevel(logging.WARNING)
    log.setLevel(logging.INFO)
    if sys.stderr.isatty():  # the progress bars say the same
        logging.getLogger("research.store").setLevel(logging.WARNING)
    if not words or words[0] in ("-h", "--help"):
        sys.stderr.write(f"{__doc__}\nNAME: {', '.join(FIGURES)}\n")
        return 0 if words else 2
    name, overrides = words[0], words[1:]
    try:
        check_choice("NAME", name, [*FIGURES, "all", "page", "list"])
        if name == "list":
            sys.stdout.write("\n".join(FIGURES) + "\n")
        elif name == "page":
            cfg = figure_settings(next(iter(FIGURES)), overrides)
            log.info("%s", write_page(Path(cfg.results_dir) / cfg.size, Path(cfg.page), list(FIGURES), cfg.size))
        else:
            for figure in FIGURES if name == "all" else [name]:
                run_figure(figure, overrides)
    except LGMMLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
