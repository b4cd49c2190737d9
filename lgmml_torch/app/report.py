"""What runs leave behind: the model, tables for people and programs, the final figures, means over several runs."""

from __future__ import annotations

import json
import logging
import math
import platform
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import Logger

from lgmml_torch import __version__
from lgmml_torch.app.commands.common import print_evaluations
from lgmml_torch.app.compose import measuring_rules
from lgmml_torch.app.config import parse_overrides
from lgmml_torch.app.page import make_page
from lgmml_torch.app.page_data import PageData
from lgmml_torch.app.rankers import Ranker
from lgmml_torch.checks import DataError
from lgmml_torch.evaluation.evaluate import OWN_PHI, Evaluation, evaluate_scores
from lgmml_torch.evaluation.tables import evaluation_markdown, fill_template, markdown_table, preprocessing_steps
from lgmml_torch.files import write_text
from lgmml_torch.functional.score import warn_if_degenerate
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.trees import TreeBase
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.loggers import LoggerOutput
from lgmml_torch.training.resume import KeepCheckpoints
from lgmml_torch.training.stages import Prepared, Trained

log = logging.getLogger(__name__)

_LABELS = 20  # different ones that a report counts
_MOST_PLACES = 20  # epochs or rounds that a report lists
_OWN = "this model: "  # before the weights, in a table with other rankers
_ATTACHED = ("model.safetensors", "report.md", "report.json", "report.html")


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a run found and leaves behind."""

    folder: Path
    model: LGMML
    splits: Mapping[str, RankingData]  # what it was trained and measured on
    evaluations: Sequence[Evaluation]  # how well it ranks them
    keeper: KeepCheckpoints  # the validation curve, and the epoch kept
    bank_history: dict[str, Any]  # how building the metrics went
    seconds: Mapping[str, float]  # of each stage
    settings: Any  # the whole configuration, as primitives
    others: Sequence[Ranker] = ()  # what to compare the model with

    @property
    def best_valid(self) -> float:
        """What the weights that were kept are worth on validation queries."""
        return self.keeper.best

    def write(self) -> None:
        """Write the model, ``report.md``, ``report.json`` and ``report.html``, and print the table."""
        settings, content = self.settings, self.content()
        self.model.about = _about(content)
        self.model.save(self.folder / "model.safetensors")
        print_evaluations(self.evaluations)
        split, data = reported_part(self.splits)
        paired = [other.beside(self.model, data, split, settings) for other in self.others]
        content["comparisons"] = [each.to_dict() for each in paired]
        sentences = [f"{each.first} against {each.second}, {split}: {each.sentence()}" for each in paired]
        for sentence in sentences:
            log.info("%s", sentence)
        write_text(self.folder / "report.md", _run_markdown(content, sentences))
        write_text(self.folder / "report.json", json.dumps(content, indent=2, default=str))
        page = make_page(content, PageData(content, self.model, data, split), paired)
        write_text(self.folder / "report.html", page)

    def tell(self, loggers: Sequence[Logger]) -> None:
        """Tell every logger the settings, the final figures and, where it has a place for them, the run's files."""
        files = [self.folder / name for name in _ATTACHED if (self.folder / name).is_file()]
        for output in map(LoggerOutput.of, loggers):
            output.outcome(self.comparable_settings(), self.figures())
            output.attach(files)
            output.close()
        log.info("model, report and logs are in %s", self.folder)

    def figures(self) -> dict[str, float]:
        """``final/test/ndcg@10``: the means of the model as it is used; of other ways to rank, their name is added."""
        found = {}
        for e in self.evaluations:
            part = {"training queries": "train"}.get(e.split, e.split.partition(":")[0])
            policy = e.policy.removeprefix(_OWN)
            own = policy == self.model.phi.policy or policy.startswith((OWN_PHI, "together"))
            if not own:
                part += f"-{policy.replace(' ', '_')}"
            for name, mean in e.means.items():
                if not math.isnan(mean):
                    found[f"final/{part}/{name}"] = mean
        return found

    def comparable_settings(self) -> dict[str, Any]:
        """Settings to tell runs apart by: dotted names, a part by the name of what it makes, no folders."""
        return {key: value for key, value in _flat(self.settings, "").items() if not _INCOMPARABLE.match(key)}

    def content(self) -> dict[str, Any]:
        """What ``report.json`` holds: all that the page needs besides the model and the lists."""
        model = self.model
        versions = {"lgmml-torch": __version__, "python": platform.python_version()}
        for name in ("torch", "numpy", "pytorch-lightning"):
            versions[name] = version(name)
        adds_to = None
        if model.base is not None:
            adds_to = f"a {model.base.title} model"
        return {
            "evaluations": list(map(Evaluation.to_dict, self.evaluations)),
            "validation curve": {str(epoch): value for epoch, value in self.keeper.curve.items()},
            "best epoch": self.keeper.best_epoch,
            "bank": self.bank_history,
            "data": {name: _statistics(part) for name, part in self.splits.items()},
            "model": {
                "metrics": model.metrics.num_metrics,
                "kernel": model.kernel,
                "preprocessing": preprocessing_steps(model.preprocess),
                "columns after preprocessing": model.metrics.num_features,
                "weights": f"{model.phi.mode}, new queries: {model.phi.policy}",
                "adds to": adds_to,
            },
            "seconds": dict(self.seconds),
            "versions": versions,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": self.settings,
        }


def evaluate_model(
    cfg: DictConfig,
    trained: Trained,
    prepared: Prepared,
    base: TreeBase | None = None,
    others: Sequence[Evaluation] = (),
) -> list[Evaluation]:
    """Two kinds of number, kept apart: training queries, and unseen ones.

    With trees added, unseen queries are also ranked by ours and by the trees alone. ``others`` are those of references,
    which stand below.
    """
    splits, model, options = prepared.splits, trained.model, measuring_rules(cfg)
    own = model.phi.mode == "per_query" or model.phi.deviations
    policies: Sequence[str] = (model.phi.policy,)
    if cfg.evaluation.all_policies:
        policies = POLICIES[model.phi.mode]
    title = "{}"
    if base is not None:
        title = "together ({})"  # ours and the trees
    found = [_evaluate_split(trained, "train", title, options, own_rows=own)]
    for name in ("valid", "test"):
        if name not in splits:
            continue
        for policy in policies:
            found.append(_evaluate_split(trained, name, title, options, policy=policy))
        if base is not None:
            data, split = trained.module.data_of(name), found[-1].split
            theirs = base.predict(data.features, data.offsets)
            alone = {"ours alone": model.score(data, alone=True), "base alone": theirs}
            for label, scores in alone.items():
                found.append(evaluate_scores(scores, data, split=split, policy=label, **options))
    if others:
        found = [replace(each, policy=f"{_OWN}{each.policy}") for each in found]
    return [*found, *others]


def _evaluate_split(
    trained: Trained,
    name: str,
    title: str,
    options: Mapping[str, Any],
    *,
    own_rows: bool = False,
    policy: str | None = None,
) -> Evaluation:
    """One split, from the inputs of training; the weights are named as ``title`` has it."""
    scores, data = trained.score(name, own_rows=own_rows, policy=policy), trained.module.data_of(name)
    warn_if_degenerate(scores, data.offsets)
    split, weights = f"{name}: unseen queries", policy or trained.model.phi.policy
    if name == "train":
        split = "training queries"
    if own_rows:
        weights = OWN_PHI
    if own_rows and not trained.moved:
        weights += ", not trained"
    return evaluate_scores(scores, data, split=split, policy=title.format(weights), **options)


def _statistics(data: RankingData) -> dict[str, Any]:
    """`RankingData.statistics` with the most frequent labels only: fractions may all be different."""
    found = data.statistics()
    common = Counter(found["labels"]).most_common(_LABELS)
    return {**found, "labels": dict(sorted(common))}


def _about(content: Mapping[str, Any]) -> dict[str, Any]:
    """The few facts of a report that travel in the model file."""
    train, config = content["data"]["train"], content["config"]
    trained_on = {"name": config["name"]}
    for key in ("queries", "documents", "features"):
        trained_on[key] = train[key]
    validation = dict[str, float | None]()
    for item in content["evaluations"]:
        for name, measured in item["metrics"].items():
            if item["split"].startswith("valid") and name not in validation:  # the first of several
                validation[name] = measured["mean"] and round(measured["mean"], 4)
    return {
        "version": 1,
        "written by": f"lgmml-torch {__version__}",
        "trained on": trained_on,
        "settings": {"seed": config["seed"], "budget": config["budget"], "chosen": config["chosen"]},
        "validation": validation,
    }


def reported_part(splits: Mapping[str, RankingData]) -> tuple[str, RankingData]:
    """The part of the data that says most about new queries: test, or validation, or what there is."""
    split = "train"
    for name in ("valid", "test"):
        if name in splits and len(splits[name]):
            split = name
    return split, splits[split]


def _run_markdown(content: Mapping[str, Any], comparisons: Sequence[str]) -> str:
    """The report of a run: what it reached, what was fitted and why, how validation went, how long it took."""
    config, bank, curve, epochs, rounds = content["config"], content["bank"], content["validation curve"], "", ""
    kept, values = content["best epoch"], bank.get("valid_measure") or bank.get("valid_ndcg")
    if curve:
        epochs = _curve_table("epoch", list(curve), list(curve.values()), kept, config.get("measure"))
    if bank.get("rounds") and values:
        rounds = _curve_table("round", bank["rounds"], values, bank["best_round"], bank.get("measure"))
    return fill_template(
        Path(__file__).with_name("report.jinja"),
        config=config,
        evaluations=evaluation_markdown(content["evaluations"]).rstrip(),
        comparisons=comparisons,
        kept=kept,
        epochs=epochs,
        rounds=rounds,
        positions=bank.get("position_bias"),
        seconds=content["seconds"],
        settings=_flat(config, ""),
    )


def _curve_table(what: str, places: Sequence[Any], values: Sequence[float], kept: int, measure: str | None) -> str:
    """Validation by epoch or round; of many, evenly spaced ones and the one that was kept."""
    step = max((len(places) - 1) / (_MOST_PLACES - 1), 1)
    spaced = {round(number * step) for number in range(_MOST_PLACES)}
    rows = []
    for number, (place, value) in enumerate(zip(places, values, strict=True)):
        if str(place) == str(kept):
            rows.append((place, f"{value:.4f} (kept)"))
        elif number in spaced:
            rows.append((place, f"{value:.4f}"))
    return markdown_table((what, f"validation {(measure or 'ndcg@10').replace('ndcg', 'NDCG')}"), rows)


# Settings that say where and how a run runs, but not what it fits.
_INCOMPARABLE = re.compile(
    r"(paths|callbacks|logger|evaluation|trainer(?!\.max_epochs))\b|(name|chosen|resume|threads|.*\.(num_workers|data_dir|cache))$"
)


def _flat(settings: Any, prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "_target_":
            out[prefix.removesuffix(".")] = value.rpartition(".")[2]
        elif isinstance(value, dict):
            out.update(_flat(value, f"{prefix}{key}."))
        elif value not in (None, [], "") and not key.startswith("_"):
            out[f"{prefix}{key}"] = _readable(value)
    return out


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return Path(value).name if "/" in value else value
    if isinstance(value, list):
        return ", ".join(map(str, map(_readable, value)))
    if isinstance(value, dict):  # of a list: a step of the preprocessing, say
        rest = []
        for key, item in value.items():
            if not key.startswith("_"):
                rest.append(f"{key}={_readable(item)}")
        return f"{value.get('_target_', '').rpartition('.')[2]}({', '.join(rest)})"
    return value


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
    kept = []
    for word, item in zip(words, parse_overrides(words), strict=True):
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
