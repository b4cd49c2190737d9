"""``lgmml sweep``: search for settings, or tell what runs that are there reached together."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lgmml_torch.app.runs import means_markdown
from lgmml_torch.app.sweep import read_search, run_search, study_rows
from lgmml_torch.checks import ConfigError


def run(args: Namespace) -> None:
    """Run the trials that are still to be run, and print all of them; or print a table of means."""
    if args.table is not None:
        if args.overrides:
            raise ConfigError(f"`--table` reads runs that are there and takes no settings, got {args.overrides[0]!r}")
        sys.stdout.write(means_markdown(Path(args.table)))
        return
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    folder = Path(args.folder)
    search = read_search(args.overrides, None if args.space is None else Path(args.space))
    header, rows = study_rows(run_search(folder, search, args.trials))
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(table)
    console.print(
        f"the best trial: {folder / rows[0][0]}; all of them: {folder / 'study.md'}, study.png", soft_wrap=True
    )
