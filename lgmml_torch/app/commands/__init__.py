"""The commands of ``lgmml``. Each file has a table ``COMMANDS`` of its own, by name."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """What a command takes and does."""

    add_options: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]
    epilog: str  # of its help
