"""``lgmml completion``: a script with which a shell completes commands and options."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

import shtab

_EXAMPLES = """
examples:
  eval "$(lgmml completion bash)"                                for this shell; in ~/.bashrc, for every new one
  lgmml completion zsh > ~/.zfunc/_lgmml                         a folder of $fpath
Settings of `lgmml train` are completed by Hydra: python train.py --hydra-help says how.
"""


def add_options(parser: ArgumentParser) -> None:
    """Arguments and options of the command."""
    parser.epilog = _EXAMPLES
    parser.set_defaults(execute=run)
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="the shell to write the script for")


def run(args: Namespace) -> None:
    """Write the script to standard output."""
    from lgmml_torch.app.cli import build_parser  # which imports this module

    sys.stdout.write(f"{shtab.complete(build_parser(), args.shell)}\n")
