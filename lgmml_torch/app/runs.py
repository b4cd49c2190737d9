"""Folders of runs: a new one for every run, and a table of means over several."""

from __future__ import annotations

import itertools
import json
import logging
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from lgmml_torch.checks import DataError
from lgmml_torch.evaluation.tables import markdown_table
from lgmml_torch.files import write_text

log = logging.getLogger(__name__)

_REPEATED = ("seed", "data.seed", "data.fold")  # settings in which runs of one kind differ


def means_markdown(folder: Path) -> str:
    """A table of the runs below a folder: a row for each kind of run and of data, means with standard deviations.

    Runs are of one kind when they differ in seed and fold only.

    Raises:
        DataError: there are no reports of runs.
    """
    files = sorted(folder.glob("*/report.json"), key=lambda file: (len(file.parent.name), file.parent.name))
    if not files:
        raise DataError(f"{folder}: there is no run with a report.json below it")
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    definitions: dict[str, str] = {}  # by measure
    overrides = [_overrides(file.parent) for file in files]
    shared = set(overrides[0]).intersection(*overrides)
    common = [text for text in overrides[0] if text in shared]
    for file, own in zip(files, overrides, strict=True):
        kind = ", ".join(text for text in own if text not in common) or "all"
        for evaluation in json.loads(file.read_text(encoding="utf-8"))["evaluations"]:
            rows[kind, evaluation["split"], evaluation["policy"]].append(evaluation["metrics"])
            for name, metric in evaluation["metrics"].items():
                definitions[name] = metric["definition"]
    header = ["runs of", "data", "weights", *definitions, "runs", "queries"]
    lines = []
    for key, runs in rows.items():
        queries, cells = 0, list[str]()
        for metrics in runs:
            queries += max((metric["counted"] for metric in metrics.values()), default=0)
        for name in definitions:
            cells.append(_cell(runs, name))
        lines.append([*key, *cells, str(len(runs)), str(queries)])
    table = markdown_table(header, lines, text=3)
    note = "Mean over runs of each run's mean over queries, ± the standard deviation between runs."
    notes = ""
    for text in sorted(definitions.values()):
        notes += f"- {text}\n"
    if common:
        table = f"All runs: {', '.join(common)}.\n\n{table}"
    return f"{table}\n\n{note}\n\n{notes}"


def _overrides(run: Path) -> list[str]:
    """The overrides of a run, without seed and fold."""
    file = run / ".hydra" / "overrides.yaml"
    if not file.is_file():
        return []
    words = list(map(str, OmegaConf.load(file)))
    items = OverridesParser.create().parse_overrides(words)
    kept = []
    for word, item in zip(words, items, strict=True):
        if item.get_key_element() not in _REPEATED:
            kept.append(word)
    return kept


def _cell(runs: Sequence[dict[str, Any]], name: str) -> str:
    values = []
    for metrics in runs:
        if name in metrics and metrics[name]["mean"] is not None:
            values.append(metrics[name]["mean"])
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.4f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.4f}"


class MeansOfJobs(Callback):
    """After ``python train.py -m data.fold=1,2,3``: the table of means, in the log and in ``means.md``."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the table when all jobs are done."""
        folder = Path(config.hydra.sweep.dir)
        try:
            table = means_markdown(folder)
        except DataError as error:
            log.warning("%s", error)
            return
        write_text(folder / "means.md", table)
        log.info("means over the runs (%s):\n%s", folder / "means.md", table)


class NewFolder(Callback):
    """Give every run, and every sweep, a folder of its own, also when several start in the same second.

    A folder without the time in its name was chosen by the user and is used as it is.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Create the folder; all processes of a run get that of the first."""
        _own_folder(config, config.hydra.run)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Create the folder of the jobs."""
        _own_folder(config, config.hydra.sweep)


def _own_folder(config: DictConfig, place: DictConfig) -> None:
    unresolved = OmegaConf.to_container(place, resolve=False)
    assert isinstance(unresolved, dict)
    if "${now:" not in unresolved["dir"]:
        return
    from lgmml_torch import distributed  # imports torch

    HydraConfig.instance().set_config(config)  # the name of the data, which is part of the path, is looked up there
    folder = Path(place.dir)
    if distributed.rank() == 0:
        with suppress(OSError):  # Hydra reports it when it creates the folder
            folder = _create(folder)
    with read_write(place):
        place.dir = distributed.broadcast(str(folder))


def _create(folder: Path) -> Path:
    """Create a folder that does not exist yet: this name, or the name with -2, -3 … appended."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        free = folder
        if number > 1:
            free = folder.with_name(f"{folder.name}-{number}")
        try:
            free.mkdir()
        except FileExistsError:
            continue
        return free
    raise AssertionError
