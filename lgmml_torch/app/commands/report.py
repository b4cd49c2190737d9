"""``lgmml report``: the page of a training run, made again from its folder."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from lgmml_torch.app.commands.common import open_data, use_machine
from lgmml_torch.app.rankers import MODEL, open_ranker
from lgmml_torch.checks import CheckpointError, ConfigError
from lgmml_torch.files import write_text
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

OURS = "lgmml_torch.data."  # a report is data: nothing else that it names is called


def run(args: Namespace) -> None:
    """Write the page, and print where it is."""
    from lgmml_torch.app.page.page import make_page
    from lgmml_torch.app.report import compare_with, look_at_run  # Lightning takes its time to import

    folder = Path(args.run)
    content, device = read_report(folder), use_machine(args)
    model = LGMML.load(folder / MODEL).to(device)
    place = args.compare or content["config"].get("compare")
    other = None if place is None else open_ranker(place)
    split, data = lists_of(args, content, model)
    paired = None if other is None else compare_with(model, other, data, split, content["config"])
    file = Path(args.output) if args.output else folder / "report.html"
    write_text(file, make_page(content, look_at_run(content, model, data, split), paired))
    sys.stdout.write(f"{file}\n")


def read_report(folder: Path) -> dict[str, Any]:
    """What the run says of itself.

    Raises:
        CheckpointError: there is no ``report.json``, or it is not one of a run.
    """
    file = folder / "report.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} is not the folder of a finished run: it has no report.json")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        for key in ("evaluations", "best epoch", "config"):
            content[key]
        content["config"]["evaluation"]["metrics"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not the report of a run, or it is damaged: {error}") from error
    return dict(content)


def lists_of(args: Namespace, content: dict[str, Any], model: LGMML) -> tuple[str, RankingData]:
    """The lists to look at and what they are called: those asked for, or those the run was tested on."""
    if args.data is not None:
        with open_data(args, model) as lists:
            return lists.name, lists.read(labelled=True)
    from omegaconf import OmegaConf

    from lgmml_torch.app.compose import load_splits
    from lgmml_torch.app.report import looked_at

    check_targets(content["config"].get("data"))
    return looked_at(load_splits(OmegaConf.create({"data": content["config"]["data"]})))


def check_targets(settings: Any) -> None:
    """Require that the settings of the data call this package's own readers only.

    Raises:
        ConfigError: what else they would call.
    """
    if isinstance(settings, dict):
        target = settings.get("_target_", OURS)
        if not str(target).startswith(OURS):
            raise ConfigError(f"report.json: `data` must be read by {OURS}*, got {target}; name the lists with --data")
        for value in settings.values():
            check_targets(value)
    elif isinstance(settings, list):
        for value in settings:
            check_targets(value)
