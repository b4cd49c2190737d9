"""``lgmml sweep``: search for settings, or tell what runs that are there reached together."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lgmml_torch.app.runs import means_markdown
from lgmml_torch.app.sweep import read_search, run_search, study_rows
from lgmml_torch.checks import ConfigError

_EXAMPLES = """
settings:
  as for `lgmml train`; one with several values is searched, beside those of conf/hparams_search/optuna.yaml:
  interval(a,b), tag(log,interval(a,b)), int(interval(a,b)), range(a,b), choice(x,y)
The study stands in FOLDER/study.db: the same command again goes on, also after a kill, until --trials are done.
examples:
  lgmml sweep data=mq2008 --trials 20 --folder outputs/search
  lgmml sweep experiment=quick 'loss.margin=choice(0.05,0.1)' --space my_space.yaml
  lgmml sweep --table multirun/2026-01-31_12-00-00            means over the runs of python train.py -m data.fold=1,2,3
"""


def add_options(parser: ArgumentParser) -> None:
    """Arguments and options of the command."""
    parser.epilog = _EXAMPLES
    parser.set_defaults(execute=run)
    parser.add_argument("overrides", nargs="*", metavar="SETTING", help="key=value, see below")
    add = parser.add_argument
    help_ = "how many to have in all, those of earlier calls included (default: 20)"
    add("--trials", type=int, default=20, metavar="N", help=help_)
    help_ = "for the study, and a folder for each trial (default: outputs/sweep)"
    add("--folder", default="outputs/sweep", metavar="FOLDER", help=help_)
    add("--space", metavar="FILE", help="a YAML file with `space: {key: distribution}` instead of the one above")
    add("--table", metavar="FOLDER", help="search nothing: print means over the runs below a folder")


def run(args: Namespace) -> None:
    """Run the trials that are still to be run, and print all of them; or print a table of means."""
    if args.table is not None:
        if args.overrides:
            raise ConfigError(f"`--table` reads runs that are there and takes no settings, got {args.overrides[0]!r}")
        sys.stdout.write(means_markdown(Path(args.table)))
        return
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    folder = Path(args.folder)
    space, width = None, None
    if args.space is not None:
        space = Path(args.space)
    if not sys.stdout.isatty():
        width = 200
    search = read_search(args.overrides, space)
    header, rows = study_rows(run_search(folder, search, args.trials))
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout, width=width, highlight=False)
    console.print(table)
    console.print(
        f"the best trial: {folder / rows[0][0]}; all of them: {folder / 'study.md'}, study.png", soft_wrap=True
    )
