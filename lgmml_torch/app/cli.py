"""``lgmml COMMAND``: parses the command line, runs the command, and reports an error in one sentence.

Only the file of the command that is run is imported: help should come at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lgmml_torch import __version__
from lgmml_torch.app.start import Interrupted, Watch, wait_quietly
from lgmml_torch.app.start import main as train

# What each command does, and the function in lgmml_torch/app/commands that adds its options and names its run().
_COMMANDS = {
    "train": ("", "train a model (the same as train.py: Hydra overrides such as data=mq2008)"),
    "score": ("score.add_options", "score the documents of a file"),
    "evaluate": ("evaluate.add_options", "rank the lists of a labelled file and measure the result"),
    "explain": ("explain.add_options", "why one document stands above another"),
    "merge": ("model.add_merge_options", "make one model of several: the weighted sum of their scores"),
    "export": ("model.add_export_options", "write a model for other programs: ONNX, or a program of torch"),
    "card": ("model.add_card_options", "write a model card: data, figures, settings, limits, licence"),
    "sweep": ("sweep.add_options", "search for good settings by validation; an interrupted search can be resumed"),
    "convert": ("convert.add_options", "write data as a folder of shards, for large sets and several processes"),
    "compare": ("compare.add_options", "two models or runs on the same lists, query by query"),
    "report": ("report.add_options", "make the page of a training run (again), or one for other data"),
    "info": ("model.add_info_options", "what is in a model file"),
    "completion": ("completion.add_options", "write a script with which a shell completes commands and options"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 after an error, which is one sentence on standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    wait_quietly()
    if words[:1] == ["train"]:
        with _plain_warnings():
            return _train(words[1:])
    with _plain_warnings(), Watch():
        try:
            arguments = build_parser(words[:1]).parse_args(words)
            arguments.execute(arguments)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe
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


def build_parser(commands: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser of the command line, with the options of these commands; None: of all."""
    parser = argparse.ArgumentParser(
        prog="lgmml",
        description="Learning to rank with localized geometric-mean metrics.",
        epilog="`lgmml COMMAND --help` says more, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, about) in _COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if function and (commands is None or name in commands):
            file, _, add_options = function.partition(".")
            getattr(importlib.import_module(f"lgmml_torch.app.commands.{file}"), add_options)(subparser)
    return parser


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
