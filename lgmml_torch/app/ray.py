"""``launcher=ray``: the processes of a run as workers of Ray Train.

Ray Train starts the workers, joins them into a process group and restarts all of them when one dies. Each worker runs
the same command in the same folder, which must be on a file system that all machines share, and resumes from the last
checkpoint there.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lgmml_torch import distributed
from lgmml_torch.checks import ConfigError, check_whole, require, sentence

_ENVIRONMENT = ("LGMML_", "OMP_", "MKL_", "PYTHONPATH")  # variables that workers on other machines need, too


@dataclass(frozen=True)
class RayLauncher:
    """Run a command on workers of Ray Train.

    Attributes:
        workers: number of processes.
        cpus: for each worker.
        failures: how often all workers are restarted from the last checkpoint after one died.
        address: of a running cluster; None: ``RAY_ADDRESS``, or a cluster of this machine for the duration of the run.
    """

    workers: int = 2
    cpus: int = 1
    failures: int = 3
    address: str | None = None

    def __post_init__(self) -> None:
        check_whole("launcher.workers", self.workers)
        check_whole("launcher.cpus", self.cpus)
        check_whole("launcher.failures", self.failures, zero=True)

    def __call__(self, overrides: Sequence[str], folder: Path) -> None:
        """Start the workers and wait for them.

        Raises:
            ConfigError: the command was refused, or more workers died than ``failures`` allows.
        """
        folder = folder.absolute()
        state = folder / "ray"
        with _cluster(self.address, self.workers * self.cpus):
            train, torch_train = _import("ray.train"), _import("ray.train.torch")
            trainer = torch_train.TorchTrainer(
                _run_worker,
                train_loop_config={"overrides": list(overrides), "folder": str(folder), "home": str(Path.cwd())},
                scaling_config=train.ScalingConfig(num_workers=self.workers, resources_per_worker={"CPU": self.cpus}),
                run_config=train.RunConfig(
                    name=folder.name,
                    storage_path=str(state),
                    failure_config=train.FailureConfig(max_failures=self.failures),
                    logging_config=train.LoggingConfig(log_level="ERROR"),
                ),
            )
            try:
                refused = trainer.fit().return_value
            except Exception as error:  # Ray has many kinds
                advice = "The same command with resume=auto continues from the last checkpoint"
                raise ConfigError(f"the run on Ray ended early: {sentence(error)}. {advice}") from error
        if refused is not None:
            raise ConfigError(refused)
        shutil.rmtree(state, ignore_errors=True)


def _run_worker(settings: dict[str, Any]) -> str | None:
    """Run the command in a worker; a refused command gives its message, because a restart would not help."""
    from lgmml_torch.app import cli  # the command line imports this module

    if Path(settings["home"]).is_dir():
        os.chdir(settings["home"])
    folder = Path(settings["folder"])
    restarted = distributed.broadcast((folder / "checkpoints" / "last.ckpt").is_file())
    overrides = []
    for text in settings["overrides"]:
        replaced = restarted and text.startswith("resume=")
        if not replaced and not text.lstrip("+").startswith("launcher"):
            overrides.append(text)
    if restarted:
        overrides.append("resume=auto")
    overrides.append(f"hydra.run.dir='{folder}'")
    try:
        cli.main(["train", *overrides])
    except SystemExit as end:
        distributed.leave()  # or the other workers would wait
        if end.code == 2 and isinstance(end.__context__, Exception):
            return sentence(end.__context__)
        raise ConfigError(f"the worker ended with exit code {end.code}") from end
    return None


@contextmanager
def _cluster(address: str | None, cpus: int) -> Iterator[None]:
    """Connect to a running cluster, or start one on this machine; an existing connection is used as it is."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change to come
    ray = _import("ray")
    if ray.is_initialized():
        yield
        return
    if address is None and not os.environ.get("RAY_ADDRESS"):
        settings: dict[str, Any] = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    else:
        passed = {}
        for name, value in os.environ.items():
            if name.startswith(_ENVIRONMENT):
                passed[name] = value
        settings = {"address": address, "runtime_env": {"env_vars": passed}}
    try:
        ray.init(**settings, logging_level=logging.ERROR)
    except Exception as error:  # Ray has many kinds
        ray.shutdown()
        raise ConfigError(
            f"cannot connect to the Ray cluster; check the address and the token: {sentence(error)}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _import(name: str) -> Any:
    return require(name, "to run on Ray", "ray")
