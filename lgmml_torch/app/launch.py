"""Starting the processes of a run: here, by torchrun, or as a SLURM job; `launch_ray` does so on Ray.

Whoever starts them sets the same environment variables (RANK, WORLD_SIZE, MASTER_ADDR …), and each process then runs
the same command with ``launcher=local``; the rest of the code never knows who it was.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lgmml_torch import distributed
from lgmml_torch.app.start import STARTED, started
from lgmml_torch.checks import ConfigError, check_positive, require

log = logging.getLogger(__name__)

WATCHERS: list[Any] = []  # callbacks that a launcher wants in the processes it has started


def meet() -> None:
    """Join the other processes of a run, if there are any, and agree with them on its folder."""
    distributed.join()
    if distributed.joined():
        os.environ[STARTED] = distributed.broadcast(started())
        if distributed.rank():
            logging.getLogger("lgmml_torch").setLevel(logging.WARNING)  # the first one tells the story


def own_words(words: Sequence[str], folder: Path, *, auto: bool) -> list[str]:
    """What each process is told: the same, but to run here, in this folder; ``auto``: to go on where one stopped."""
    kept = [word for word in words if word.split("=")[0].split(".")[0].lstrip("+") != "launcher"]
    asked = any(word.startswith("resume=") for word in kept)
    return [*kept, "launcher=local", f"hydra.run.dir='{folder}'", *(["resume=auto"] if auto and not asked else [])]


@dataclass(frozen=True)
class Local:
    """No launcher: the run takes place in this process, and in those that have joined it."""

    def __call__(self, words: Sequence[str], folder: Path) -> bool:
        """Nothing to start."""
        return False


@dataclass(frozen=True)
class Torchrun:
    """torchrun on this machine, or on each of several that meet at an address.

    Attributes:
        processes: on this machine.
        nodes: machines; the same command is given on each.
        address: ``host:port`` of one of them, where they meet; needed with several.
        own_address: of this machine, where its name does not lead the others to it.
        restarts: how often all processes are started anew, from the last checkpoint, after one of them died.
    """

    processes: int = 2
    nodes: int = 1
    address: str | None = None
    own_address: str | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        check_positive("launcher.processes", self.processes)
        check_positive("launcher.nodes", self.nodes)
        check_positive("launcher.restarts", self.restarts, zero=True)
        if self.nodes > 1 and self.address is None:
            raise ConfigError(f"`launcher.address` must say where {self.nodes} machines meet, e.g. first-host:29400")

    def command(self, words: Sequence[str], folder: Path) -> list[str]:
        """What is run."""
        meeting = (
            ["--standalone"]
            if self.nodes == 1
            else ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.address}", "--rdzv-id=lgmml"]
        )
        if self.own_address is not None:
            hosts = int(str(self.address).rpartition(":")[0] == self.own_address)
            meeting += [f"--local-addr={self.own_address}", f"--rdzv-conf=is_host={hosts}"]
        numbers = [f"--nnodes={self.nodes}", f"--nproc-per-node={self.processes}", f"--max-restarts={self.restarts}"]
        entry = ["-m", "lgmml_torch.app.cli", "train", *own_words(words, folder, auto=self.restarts > 0)]
        return [sys.executable, "-m", "torch.distributed.run", *meeting, *numbers, *entry]

    def environment(self) -> dict[str, str]:
        """What the processes find around them: gloo must meet the others at this machine's own address, too.

        By itself it takes the address that the machine's name leads to, which may be one that only leads back here.
        """
        found = None if self.own_address is None else interface_of(self.own_address)
        return {**({} if found is None else {"GLOO_SOCKET_IFNAME": found}), **os.environ}

    def __call__(self, words: Sequence[str], folder: Path) -> bool:
        """Start the processes and wait for them.

        Raises:
            ConfigError: one of them died.
        """
        if distributed.joined():
            return False
        with subprocess.Popen(self.command(words, folder), env=self.environment()) as processes:
            try:
                code = processes.wait()
            except BaseException:
                processes.terminate()  # it tells those it has started
                raise
        if code:
            raise ConfigError(
                f"a process of the run died (torchrun ended with {code}); what it said stands above. "
                "The same command with resume=auto goes on from the last checkpoint"
            )
        return True


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address, on systems that tell; None where none does.

    >>> interface_of("192.0.2.1") is None
    True
    """
    asked = 0x8915  # SIOCGIFADDR
    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as talker:
            answer = fcntl.ioctl(talker.fileno(), asked, name.encode()[:15].ljust(256, b"\0"))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


@dataclass(frozen=True)
class Slurm:
    """A SLURM job through submitit, put back into the queue when its time is up, where it goes on.

    Attributes:
        processes: on each machine.
        nodes: machines.
        minutes: the job's time.
        partition: of the cluster; its default when None.
        memory: of a machine, in GiB.
        cpus: for each process.
        requeues: how often it may be put back when its time is up.
        cluster: ``slurm``; ``local`` or ``debug`` try the same on this machine.
        wait: whether to wait for the end.
    """

    processes: int = 1
    nodes: int = 2
    minutes: int = 60
    partition: str | None = None
    memory: int | None = None
    cpus: int | None = None
    requeues: int = 20
    cluster: str = "slurm"
    wait: bool = False

    def __post_init__(self) -> None:
        for name in ("processes", "nodes", "minutes"):
            check_positive(f"launcher.{name}", getattr(self, name))
        check_positive("launcher.requeues", self.requeues, zero=True)

    def executor(self, folder: Path) -> Any:
        """submitit's, with what was asked for."""
        submitit = require("submitit", "for launcher=slurm", "slurm")
        own = {} if self.cluster == "debug" else {f"{self.cluster}_max_num_timeout": self.requeues}
        try:
            executor = submitit.AutoExecutor(folder=folder / "slurm", cluster=self.cluster, **own)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"`launcher.cluster` {self.cluster!r} cannot be used here: {error}") from error
        asked: dict[str, Any] = {"timeout_min": self.minutes, "nodes": self.nodes, "tasks_per_node": self.processes}
        asked |= {"mem_gb": self.memory, "cpus_per_task": self.cpus, "slurm_partition": self.partition}
        asked["slurm_additional_parameters"] = {"requeue": True}  # some clusters are set up not to
        given = {name: value for name, value in asked.items() if value is not None}
        try:
            executor.update_parameters(name="lgmml", **given)
        except ValueError as error:
            raise ConfigError(f"`launcher.cluster` {self.cluster!r} cannot do what was asked for: {error}") from error
        return executor

    def __call__(self, words: Sequence[str], folder: Path) -> bool:
        """Hand the job in; with ``wait``, wait for it."""
        if distributed.joined():
            return False
        job = self.executor(folder).submit(Task(tuple(own_words(words, folder, auto=True))))
        log.info("job %s; its output is in %s", job.job_id, folder / "slurm")
        if self.wait or self.cluster == "debug":  # which does nothing before somebody asks for results
            self._wait(job, folder)
        return True

    def _wait(self, job: Any, folder: Path) -> None:
        submitit = require("submitit", "for launcher=slurm", "slurm")
        try:
            job.results()
        except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as error:
            raise ConfigError(f"job {job.job_id} failed; what it said is in {folder / 'slurm'}") from error


@dataclass(frozen=True)
class Task:
    """One process of a SLURM job; submitit calls it, and again after the job was put back into the queue.

    Attributes:
        words: of the command.
    """

    words: tuple[str, ...]

    def __call__(self) -> int:
        """Run the command as one of the job's processes."""
        submitit = require("submitit", "for launcher=slurm", "slurm")
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        from lgmml_torch.app import cli  # the command is what this module is part of

        code = cli.main(["train", *self.words])
        if code:
            raise ConfigError(f"the run ended with {code}; what it said stands above")
        return code

    def checkpoint(self) -> Any:
        """The same again: it goes on from the last checkpoint of its folder."""
        submitit = require("submitit", "for launcher=slurm", "slurm")
        return submitit.helpers.DelayedSubmission(self)
