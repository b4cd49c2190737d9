"""Connecting to Ray, quietly: for runs (`launch_ray`) and for scoring (`score_shards`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lgmml_torch.checks import ConfigError, require, sentence

RULES = {  # of Ray, where the environment has no other
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # seconds until a dead worker is seen; Ray's own are 2
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",  # and until those that waited for it are let go, 30
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # a busy machine needs more than Ray's own 60
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it, there is a warning about a change to come
    "RAY_worker_niceness": "0",  # Ray's own 15 would let any other process go first
}
TOLD = ("LGMML_", "OMP_", "MKL_", "PYTHONPATH")  # variables that workers elsewhere need, too


def ray_part(name: str) -> Any:
    """Ray, one of its modules, or what it brings along.

    Raises:
        MissingDependencyError: it is not installed.
    """
    return require(name, "to run on Ray", "ray")


@contextmanager
def cluster(address: str | None, cpus: int) -> Iterator[Any]:
    """Ray, connected to a cluster: one that is running, or one of this machine, which ends with the context.

    Who is connected already stays so.
    """
    for name, value in RULES.items():
        os.environ.setdefault(name, value)
    ray = ray_part("ray")
    if ray.is_initialized():
        yield ray
        return
    if address is None and not os.environ.get("RAY_ADDRESS"):
        settings: dict[str, Any] = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    else:
        told = {name: value for name, value in os.environ.items() if name.startswith(TOLD)}
        settings = {"address": address, "runtime_env": {"env_vars": told}}
    try:
        ray.init(**settings, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # Ray raises many kinds, and some that are no more than that
        ray.shutdown()  # what has started already
        raise ConfigError(
            f"no Ray cluster could be reached (is it there, and its token here?): {sentence(error)}"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()
