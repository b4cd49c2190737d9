"""Lightning among processes that somebody else has started: torchrun, SLURM, Ray or a test."""

from __future__ import annotations

import os
from typing import Any

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy

from lgmml_torch import distributed


class Joined(ClusterEnvironment):
    """What Lightning asks about the processes, answered from the variables that every launcher sets."""

    @property
    def creates_processes_externally(self) -> bool:
        """They are all there already."""
        return True

    @property
    def main_address(self) -> str:
        """Where the first process is."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Its port."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Only where it is asked for."""
        return False

    def world_size(self) -> int:
        """How many processes there are."""
        return distributed.place()[1]

    def set_world_size(self, size: int) -> None:
        """It is fixed."""

    def global_rank(self) -> int:
        """The number of this process."""
        return distributed.place()[0]

    def set_global_rank(self, rank: int) -> None:
        """It is fixed."""

    def local_rank(self) -> int:
        """Its number on this machine."""
        return int(os.environ.get("LOCAL_RANK", "0")) % local_size()

    def node_rank(self) -> int:
        """The number of this machine."""
        return self.global_rank() // local_size()


def local_size() -> int:
    """Processes on this machine, where every machine has the same number; otherwise each counts as a machine."""
    here, size = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), distributed.place()[1]
    return here if size % here == 0 else 1


def trainer_settings() -> dict[str, Any]:
    """What a trainer must be told where other processes are there already; nothing otherwise."""
    if not distributed.joined():
        return {}
    size = distributed.place()[1]
    strategy = DDPStrategy(broadcast_buffers=False)  # they are equal from the start
    return {"strategy": strategy, "devices": local_size(), "num_nodes": size // local_size(), "plugins": [Joined()]}
