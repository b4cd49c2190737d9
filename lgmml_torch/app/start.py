"""The first thing a program does, and ``python train.py`` itself: nothing heavy is imported before it has to be.

Signals are watched from the first moment, threads are told to wait quietly before torch starts any, help comes without
torch, and a wrong setting is told before it is loaded.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lgmml_torch.app.signals import Interrupted, Watch, say_goodbye

if TYPE_CHECKING:
    from omegaconf import DictConfig


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
    """Set the number of threads; the default is ``OMP_NUM_THREADS``, or the cores that this process may use."""
    import torch

    if asked is not None:
        torch.set_num_threads(asked)
    elif "OMP_NUM_THREADS" not in os.environ:
        import joblib

        torch.set_num_threads(max(1, min(torch.get_num_threads(), joblib.cpu_count())))


def meet() -> None:
    """Join the other processes of the run, if there are any; only the first one reports."""
    from lgmml_torch import distributed

    distributed.join()
    if distributed.rank():
        logging.getLogger("lgmml_torch").setLevel(logging.WARNING)


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
        if "RANK" in os.environ:  # torchrun or Ray has started several processes
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
