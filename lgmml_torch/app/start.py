"""The first thing a program does, and ``python train.py`` itself: nothing heavy is imported before it has to be.

Signals are watched from the first moment, threads are told to wait quietly before torch starts any, help comes without
torch, and a wrong setting is told before it is loaded.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lgmml_torch.app.signals import Interrupted, Watch, say_goodbye

if TYPE_CHECKING:
    from omegaconf import DictConfig


STARTED = "LGMML_STARTED"  # the moment that names the run folder of all processes


def started() -> str:
    """The moment a run began, the same in all of its processes: it names their folder."""
    return os.environ.get(STARTED) or time.strftime("%Y-%m-%d_%H-%M-%S")


def config_dir() -> Path:
    """The folder of the configuration: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def wait_quietly() -> None:
    """Let threads that wait for work sleep, unless the environment says otherwise; for before torch is imported.

    They would spin: on a machine with other work, or in a container with a share of a processor, two threads would then
    be several times slower than one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def set_threads(asked: int | None) -> None:
    """So many threads; by default as many as there are cores to run on, or what ``OMP_NUM_THREADS`` says."""
    import torch

    if asked is not None:
        torch.set_num_threads(asked)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), available_cores())))


def available_cores(groups: Path = Path("/proc/self/cgroup"), tree: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: those it may run on, or fewer where its container has a share of them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = groups.read_text().split()
    except OSError:
        return allowed
    shares = [share for line in lines for share in _shares(tree, *line.split(":", 2)[1:])]
    return max(1, min([allowed, *(math.ceil(share) for share in shares)]))


def _shares(tree: Path, controllers: str, group: str) -> list[float]:
    """The limits on a control group and on all above it, in cores; second version of the interface, or first."""
    if controllers and "cpu" not in controllers.split(","):
        return []
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
    tree = tree / "cpu" if controllers else tree
    found, inner = [], Path(group.lstrip("/"))
    for place in (inner, *inner.parents):
        try:
            quota, period = " ".join((tree / place / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota.isdigit() and period.isdigit() and int(period):  # else "max" or -1: no limit
            found.append(int(quota) / int(period))
    return found


def main() -> None:
    """The command line: ``python train.py`` and ``lgmml train``."""
    wait_quietly()
    watch = Watch()
    with watch:
        try:
            _train(watch)
        except Interrupted as stop:
            sys.exit(say_goodbye(stop))


def _train(watch: Watch) -> None:
    """Check the words, then let Hydra compose the configuration and call the run."""
    import hydra

    logging.raiseExceptions = False  # a log file on a full disk is no reason for a traceback with every line
    from lgmml_torch.app.config import check_command
    from lgmml_torch.checks import ConfigError

    try:
        check_command(sys.argv[1:])
        if "RANK" in os.environ:  # somebody has started several processes
            from lgmml_torch.app.launch import meet

            meet()
    except ConfigError as error:
        fail(error)

    def run(cfg: DictConfig) -> float | None:
        from lgmml_torch.app.train import run_and_tell

        return run_and_tell(cfg, watch)

    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(run)()


def fail(error: object) -> None:
    """Say what is wrong, and end."""
    sys.stderr.write(f"error: {error}\n")
    sys.exit(2)
