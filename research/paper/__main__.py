"""Run experiments: ``python -m research.paper NAME|all|page|list [size=toy|reduced|full] [setting=value …]``.

``page`` writes docs/results.md and docs/results/ from what is stored.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from hydra.utils import get_method
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from lgmml_torch.checks import LGMMLError, check_choice
from research.paper.config import figure_names, figure_settings
from research.paper.outcome import Outcome
from research.paper.page import write_page
from research.store import Store

log = logging.getLogger("research.paper")


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
            outcome: Outcome = get_method(cfg.run)(cfg, store)
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
        sys.stderr.write(f"{__doc__}\nNAME: {', '.join(figure_names())}\n")
        return 0 if words else 2
    name, overrides = words[0], words[1:]
    try:
        check_choice("NAME", name, [*figure_names(), "all", "page", "list"])
        if name == "list":
            sys.stdout.write("\n".join(figure_names()) + "\n")
        elif name == "page":
            cfg = figure_settings(figure_names()[0], overrides)
            log.info("%s", write_page(Path(cfg.results_dir) / cfg.size, Path(cfg.page), figure_names(), cfg.size))
        else:
            for figure in figure_names() if name == "all" else [name]:
                run_figure(figure, overrides)
    except LGMMLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
