"""How a run is started, by ``python train.py`` or on Ray: nothing heavy is imported before it has to be.

Signals are watched from the first moment, threads are told to wait quietly before torch starts any, help comes without
torch, and a wrong setting is told before it is loaded.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from lgmml_torch.checks import ConfigError, LGMMLError, check_whole, require, sentence

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


def main(command: Sequence[str] | None = None) -> None:
    """The command line: ``python train.py`` and ``lgmml train``.

    ``command`` starts the program again, as Lightning does for further processes; by default it is ``sys.argv``.
    """
    wait_quietly()
    watch = Watch()
    with watch:
        try:
            _train(watch, list(command or sys.argv))
        except Interrupted as stop:
            sys.exit(_say_goodbye(stop))


def program(command: Sequence[str] | None = None) -> None:
    """`main` as a whole program; one of several processes ends at once.

    PyTorch's DDP keeps the process group after it is destroyed, and a thread of the group that still has something to
    free aborts an interpreter that is taken down (seen once in about a hundred runs).
    """
    main(command)
    from lgmml_torch import distributed

    if distributed.world_size() > 1:
        distributed.leave()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _train(watch: Watch, command: list[str]) -> None:
    """Check the words, then let Hydra compose the configuration and call the run."""
    import hydra

    logging.raiseExceptions = False  # a log file on a full disk is no reason for a traceback with every line
    from lgmml_torch.app.config import check_command

    try:
        sys.argv[1:] = check_command(sys.argv[1:])
        if "RANK" in os.environ:  # torchrun or Ray has started several processes
            from lgmml_torch import distributed

            distributed.join()
            if distributed.rank():  # only the first one reports
                logging.getLogger("lgmml_torch").setLevel(logging.WARNING)
    except ConfigError as error:
        _fail(error)

    def run(cfg: DictConfig) -> float | None:
        """A run; what the weights that were kept are worth on validation, for a sweep of Hydra to compare."""
        from lightning_fabric.utilities.exceptions import MisconfigurationException

        from lgmml_torch.app.compose import build
        from lgmml_torch.app.config import asked_for
        from lgmml_torch.app.train import train
        from lgmml_torch.training.callbacks import StopAtStep

        sys.argv, result = command, None
        try:
            if cfg.get("launcher"):
                build(cfg.launcher)(asked_for(), Path(cfg.paths.output_dir))
            else:
                result = train(cfg, asked_for(), [StopAtStep(watch)])
        except (LGMMLError, MisconfigurationException) as error:
            _fail(error)
        except OSError as error:
            _fail(sentence(error))
        except Interrupted as stop:
            sys.exit(_say_goodbye(stop, Path(cfg.paths.output_dir) / "checkpoints" / "last.ckpt"))
        return None if result is None else result.best_valid

    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(run)()


def _fail(error: object) -> NoReturn:
    """Say what is wrong, and end."""
    sys.stderr.write(f"error: {error}\n")
    sys.exit(2)


_WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The process was asked to stop; no ``except Exception`` on the way swallows it."""

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            name = "Ctrl-C"
        super().__init__(f"stopped by {name}")
        self.code = 128 + number  # what a shell calls a process that a signal ended


class Watch:
    """While entered, SIGINT and SIGTERM raise `Interrupted`: at once, or, while it ``waits``, where work is ready.

    A second signal is impatient and raises at once.
    """

    def __init__(self) -> None:
        self.asked: int | None = None  # the signal that has come
        self.waits = False  # whether somebody looks at it often enough, so that nothing has to be torn apart
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in _WATCHED:
            self._before[number] = signal.getsignal(number)
        self.listen()
        return self

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Take the signals, also from whoever has taken them in the meantime."""
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            for number in _WATCHED:
                signal.signal(number, self._handle)

    def stop(self) -> None:
        """Raise what has been asked for, if anything has."""
        if self.asked is not None:
            raise Interrupted(self.asked)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a loader's worker: Ctrl-C reaches it, too, but its parent decides
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        impatient, self.asked = self.asked is not None, number
        if impatient or not self.waits:
            raise Interrupted(number)


def hydra_value(value: object) -> str:
    r"""A value as Hydra reads it on a command line; quoted where it would be cut.

    >>> hydra_value("a/b.csv"), hydra_value("a b"), hydra_value(["x", "y z"])
    ('a/b.csv', '"a b"', '[x,"y z"]')
    """
    if isinstance(value, list):
        return f"[{','.join(map(hydra_value, value))}]"
    text = str(value)
    if re.fullmatch(r"[\w./:%@+-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _command_to_go_on(program: str, words: Sequence[str], checkpoint: Path | None) -> str:
    r"""What to type: the same words again, going on from the checkpoint where there is one.

    >>> _command_to_go_on("train.py", ["data=mq2008", "resume=old.ckpt"], None)
    'python train.py data=mq2008 resume=old.ckpt'
    >>> _command_to_go_on("bin/lgmml", ["train", "data=mq2008", "resume=old.ckpt"], Path("a b/last.ckpt"))
    'lgmml train data=mq2008 \'resume="a b/last.ckpt"\''
    >>> _command_to_go_on("lgmml", ["train", "data=mine", "--config-dir", "my"], Path("last.ckpt"))
    'lgmml train data=mine resume=last.ckpt --config-dir my'
    """
    words = list(words)
    if checkpoint is not None:
        words = [word for word in words if not word.lstrip("+").startswith("resume=")]
        # Beside the other overrides: Hydra takes them from one place of the command line only.
        last = len(words)
        for number, word in enumerate(words, 1):
            if "=" in word and not word.startswith("-"):
                last = number
        words.insert(last, f"resume={hydra_value(checkpoint)}")
    start, interpreter = Path(program).name, "python"
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started it
        interpreter = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
    if words[:1] == ["train"]:
        start = "lgmml"
    elif program.endswith(".py"):
        start = f"{interpreter} {shlex.quote(program)}"
    return " ".join([start, *map(shlex.quote, words)])


def _say_goodbye(stop: Interrupted, checkpoint: Path | None = None) -> int:
    """Tell how to go on, ignore further signals while the process ends, and give the exit code."""
    for number in _WATCHED:
        signal.signal(number, signal.SIG_IGN)
    if os.environ.get("LOCAL_RANK", "0") == "0" == os.environ.get("NODE_RANK", "0"):
        there, how = None, "nothing has been trained yet, "
        if "-m" in sys.argv or "--multirun" in sys.argv:
            how = ""
        elif checkpoint is not None and checkpoint.is_file():
            there, how = checkpoint, "what was trained is kept, "
            if there.is_relative_to(Path.cwd()):
                there = there.relative_to(Path.cwd())
        command = _command_to_go_on(sys.argv[0], sys.argv[1:], there)
        sys.stderr.write(f"{stop}; {how}go on with: {command}\n")
    return stop.code


_ENVIRONMENT = ("LGMML_", "OMP_", "MKL_", "PYTHONPATH")  # variables that workers on other machines need, too


class RayLauncher:
    """``launcher=ray``: the processes of a run as workers of Ray Train.

    Ray Train starts the workers, joins them into a process group and restarts all of them when one dies. Each worker
    runs the same command in the same folder, which must be on a file system that all machines share, and resumes from
    the last checkpoint there.

    Args:
        workers: number of processes.
        cpus: for each worker.
        failures: how often all workers are restarted from the last checkpoint after one died.
        address: of a running cluster; None: ``RAY_ADDRESS``, or a cluster of this machine for the duration of the run.
    """

    def __init__(self, workers: int = 2, cpus: int = 1, failures: int = 3, address: str | None = None) -> None:
        check_whole("launcher.workers", workers)
        check_whole("launcher.cpus", cpus)
        check_whole("launcher.failures", failures, zero=True)
        self.workers, self.cpus, self.failures, self.address = workers, cpus, failures, address

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
    from lgmml_torch import distributed
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
