"""``lgmml COMMAND``: hands the words on the command line to their command, and tells errors in one sentence."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lgmml_torch.app.signals import Interrupted, Watch
from lgmml_torch.app.start import main as train
from lgmml_torch.app.start import wait_quietly
from lgmml_torch.app.words import build_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 after an error, which standard error tells in one sentence."""
    words = list(sys.argv[1:] if argv is None else argv)
    wait_quietly()
    if words[:1] == ["train"]:
        with _plain_warnings():
            return _train(words[1:])
    with _plain_warnings(), Watch():
        try:
            arguments = build_parser().parse_args(words)
            importlib.import_module(f"lgmml_torch.app.commands.{arguments.command}").run(arguments)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except Interrupted as stop:
            sys.stderr.write(f"lgmml: {stop}\n")
            return stop.code
        except (ValueError, OSError) as error:
            from lgmml_torch.checks import LGMMLError, sentence

            if not isinstance(error, (LGMMLError, OSError)):
                raise
            sys.stderr.write(f"lgmml: error: {sentence(error)}\n")
            return 2
    return 0


def _train(overrides: list[str]) -> int:
    before, sys.argv = sys.argv, ["lgmml train", *overrides]
    try:
        train()
    finally:
        sys.argv = before
    return 0


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as one line on standard error, without the line of source that gave them."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"lgmml: warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


if __name__ == "__main__":
    sys.exit(main())
