"""``lgmml report``: the page of a training run, made again from its folder."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from lgmml_torch.app.commands.common import DATA_FORMATS, add_data, open_data, use_machine
from lgmml_torch.app.rankers import MODEL, open_ranker, references_of_run
from lgmml_torch.checks import DataError
from lgmml_torch.evaluation.card import read_report
from lgmml_torch.files import write_text
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

_READERS = ("lgmml_torch.data",)  # a report may come from others: it must not run other code

_EXAMPLES = """
Without --data, the lists are those of the run's own settings, as its report.json has them.
examples:
  lgmml report outputs/mq2008/2026-01-31_12-00-00
  lgmml report outputs/run --compare outputs/earlier -o beside.html
  lgmml report outputs/run --data new.txt -o new.html
  lgmml report outputs/run --importance            the cost of shuffling features, and their effects
"""


def add_options(parser: ArgumentParser) -> None:
    """Arguments and options of the command."""
    parser.epilog = DATA_FORMATS + _EXAMPLES
    parser.set_defaults(execute=run)
    parser.add_argument("run", metavar="RUN", help="the folder of a training run")
    add_data(parser, "--data", own_weights=True, batches=False)
    add = parser.add_argument
    add("--compare", metavar="FILE", help="a model, run, tree model or TREC run to put beside it")
    add("--importance", action="store_true", help="also shuffle and move features; ranks the lists about 80 times")
    add("-o", "--output", metavar="FILE", help="where to (default: report.html in the run's folder)")


def run(args: Namespace) -> None:
    """Write the page, and print where it is."""
    from lgmml_torch.app.page import make_page
    from lgmml_torch.app.report import compare_with, page_data_of_run  # imports Lightning, which takes seconds

    folder = Path(args.run)
    content, device = _read_report(folder), use_machine(args)
    model = LGMML.load(folder / MODEL).to(device)
    others = references_of_run(folder, content["config"].get("reference"))
    if args.compare:
        others = [open_ranker(args.compare)]
    split, data = _lists(args, content, model)
    paired = [compare_with(model, other, data, split, content["config"]) for other in others]
    shown = page_data_of_run(content, model, data, split, importance=args.importance)
    file = folder / "report.html"
    if args.output:
        file = Path(args.output)
    write_text(file, make_page(content, shown, paired))
    sys.stdout.write(f"{file}\n")


def _read_report(folder: Path) -> dict[str, Any]:
    """The ``report.json`` of a run.

    Raises:
        DataError: there is none, or it is not that of a run.
    """
    file = folder / "report.json"
    if not file.is_file():
        raise DataError(f"{folder} is not the folder of a finished run: it has no report.json")
    content = read_report(file)
    try:
        content["best epoch"], content["config"]["evaluation"]["metrics"]
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} must be the report.json of a training run: {error}") from error
    return content


def _lists(args: Namespace, content: dict[str, Any], model: LGMML) -> tuple[str, RankingData]:
    """The lists of the page and their name: those of ``--data``, or those the run was tested on."""
    if args.data is not None:
        with open_data(args, model) as lists:
            return lists.name, lists.read(labelled=True)
    from omegaconf import OmegaConf

    from lgmml_torch.app.compose import check_targets, load_splits
    from lgmml_torch.app.report import reported_part

    settings = OmegaConf.create({"data": content["config"].get("data")})
    check_targets(settings, _READERS)
    return reported_part(load_splits(settings))
