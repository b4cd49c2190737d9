"""Ctrl-C and SIGTERM: a run stops where it can go on from, says how to in one sentence, and exits with 130 or 143."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The process was asked to stop; no ``except Exception`` on the way swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}")
        self.code = 128 + number  # what a shell calls a process that a signal ended


class Watch:
    """While entered, SIGINT and SIGTERM raise `Interrupted`: at once, or, while it ``waits``, where work is ready.

    A second signal is impatient and raises at once.

    Attributes:
        asked: the signal that has come, None so far.
        waits: whether somebody looks at ``asked`` often enough, so that nothing has to be torn apart.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.waits = False
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in WATCHED}
        self.listen()
        return self

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Take the signals, also from whoever has taken them in the meantime."""
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            for number in WATCHED:
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


def _command_to_go_on(program: str, words: Sequence[str], checkpoint: Path | None) -> str:
    r"""What to type: the same words again, going on from the checkpoint where there is one.

    >>> _command_to_go_on("train.py", ["data=mq2008", "resume=old.ckpt"], None)
    'python train.py data=mq2008 resume=old.ckpt'
    >>> _command_to_go_on("lgmml train", ["data=mq2008", "resume=old.ckpt"], Path("a b/last.ckpt"))
    'lgmml train data=mq2008 \'resume="a b/last.ckpt"\''
    >>> _command_to_go_on("lgmml train", ["data=mine", "--config-dir", "my"], Path("last.ckpt"))
    'lgmml train data=mine resume=last.ckpt --config-dir my'
    """
    words = list(words)
    if checkpoint is not None:
        place = str(checkpoint)
        if not re.fullmatch(r"[\w./:%@+-]+", place):  # Hydra would cut it
            place = '"' + place.replace("\\", "\\\\").replace('"', '\\"') + '"'
        words = [word for word in words if not word.lstrip("+").startswith("resume=")]
        overrides = [i for i, word in enumerate(words) if "=" in word and not word.startswith("-")]
        # Beside the others: Hydra takes overrides from one place of the command line only.
        words.insert(overrides[-1] + 1 if overrides else len(words), f"resume={place}")
    start = f"python {shlex.quote(program)}" if program.endswith(".py") else program
    return " ".join([start, *(shlex.quote(word) for word in words)])


def say_goodbye(stop: Interrupted, checkpoint: Path | None = None) -> int:
    """Tell how to go on, ignore further signals while the process ends, and give the exit code."""
    for number in WATCHED:
        signal.signal(number, signal.SIG_IGN)
    if os.environ.get("LOCAL_RANK", "0") == "0" == os.environ.get("NODE_RANK", "0"):
        sweep = any(word in ("-m", "--multirun") for word in sys.argv)
        there = None if sweep or checkpoint is None or not checkpoint.is_file() else _short(checkpoint)
        command = _command_to_go_on(sys.argv[0], sys.argv[1:], there)
        how = "what was trained is kept" if there is not None else "nothing has been trained yet"
        sys.stderr.write(f"{stop}; {'' if sweep else how + ', '}go on with: {command}\n")
    return stop.code


def _short(path: Path) -> Path:
    """As seen from here, where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
