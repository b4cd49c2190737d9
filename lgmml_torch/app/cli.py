"""``lgmml COMMAND``: parses the command line, runs the command, and reports an error in one sentence.

Only the file of the command that is run is imported: help should come at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lgmml_torch import __version__
from lgmml_torch.app import start
from lgmml_torch.app.commands import Command
from lgmml_torch.app.start import Interrupted, Watch, wait_quietly
from lgmml_torch.checks import LGMMLError, sentence

# The module of each command, whose table COMMANDS has it, and what the command does.
_KNOWN = {
    "train": ("", "train a model (the same as train.py: Hydra overrides such as data=mq2008)"),
    "inspect": ("commands.data", "list all problems of a table and print the command that trains on it"),
    "score": ("commands.score", "score the documents of a file"),
    "evaluate": ("commands.evaluate", "rank the lists of a labelled file and measure the result"),
    "explain": ("commands.model", "why one document stands above another"),
    "merge": ("commands.model", "make one model of several: the weighted sum of their scores"),
    "export": ("commands.model", "write a model for other programs: ONNX, or a program of torch"),
    "card": ("commands.model", "write a model card: data, figures, settings, limits, licence"),
    "sweep": ("sweep", "search for good settings by validation; an interrupted search can be resumed"),
    "convert": ("commands.data", "write data as a folder of shards, for large sets and several processes"),
    "compare": ("commands.evaluate", "two models or runs on the same lists, query by query"),
    "report": ("commands.evaluate", "make the page of a training run (again), or one for other data"),
    "info": ("commands.model", "what is in a model file"),
    "completion": ("cli", "write a script with which a shell completes commands and options"),
}

_COMPLETION_EXAMPLES = """
examples:
  eval "$(lgmml completion bash)"                                for this shell; in ~/.bashrc, for every new one
  lgmml completion zsh > ~/.zfunc/_lgmml                         a folder of $fpath
Settings of `lgmml train` are completed by Hydra: python train.py --hydra-help says how.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 after an error, which is one sentence on standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    wait_quietly()
    if words[:1] == ["train"]:
        with _plain_warnings():
            return _train(words[1:], start.program if argv is None else start.main)
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
        except (LGMMLError, OSError) as error:
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
    for name, (module, about) in _KNOWN.items():
        subparser = subparsers.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module and (commands is None or name in commands):
            command: Command = importlib.import_module(f"lgmml_torch.app.{module}").COMMANDS[name]
            command.add_options(subparser)
            subparser.epilog = command.epilog
            subparser.set_defaults(execute=command.run)
    return parser


def _completion_options(parser: argparse.ArgumentParser) -> None:
    import shtab

    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="the shell to write the script for")


def _complete(args: argparse.Namespace) -> None:
    """Write the script to standard output."""
    import shtab

    sys.stdout.write(f"{shtab.complete(build_parser(), args.shell)}\n")


def _train(overrides: list[str], run: Callable[[Sequence[str]], None]) -> int:
    before, sys.argv = sys.argv, ["lgmml train", *overrides]  # Hydra reads the overrides there
    try:
        run([before[0], "train", *overrides])
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


COMMANDS = {"completion": Command(_completion_options, _complete, _COMPLETION_EXAMPLES)}


if __name__ == "__main__":
    sys.exit(main())
