"""Tables, reports of runs and model cards, in Markdown; tables of evaluations for terminals, too."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lgmml_torch import __version__
from lgmml_torch.checks import DataError

if TYPE_CHECKING:
    from lgmml_torch.evaluation.evaluate import Evaluation
    from lgmml_torch.models.preprocess.base import Preprocess
    from lgmml_torch.models.ranker import LGMML


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, text: int = 0) -> str:
    """A table in Markdown; after the first ``text`` columns come numbers, which stand to the right.

    >>> print(markdown_table(["data", "ndcg"], [["test", 0.5]], text=1))
    | data | ndcg |
    | --- | ---: |
    | test | 0.5 |
    """
    lines = []
    for row in (header, ["---"] * text + ["---:"] * (len(header) - text), *rows):
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def evaluation_markdown(evaluations: Sequence[Evaluation]) -> str:
    """One line for each evaluation, one column for each metric with its interval, and the definitions below."""
    table = markdown_table(_header(evaluations), _rows(evaluations, intervals=True), text=2)
    text = f"{table}\n\nIn brackets: 95% bootstrap interval of the mean over queries.\n\n"
    for definition in _definitions(evaluations):
        text += f"- {definition}\n"
    return text


def print_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """The same table without intervals, and the definitions, to standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    data, weights, *figures = _header(evaluations)
    for column in (data, weights):
        table.add_column(column, overflow="fold")
    for column in figures:
        table.add_column(column, justify="right", overflow="fold")
    for row in _rows(evaluations):
        table.add_row(*row)
    # Cut to the width of a terminal, but never to that of a pipe: a program may read it.
    width = None
    if not sys.stdout.isatty():
        width = 200
    console = Console(file=sys.stdout, width=width, highlight=False)
    console.print(table)
    for text in _definitions(evaluations):
        console.print(text, soft_wrap=True, markup=False)


_MOST_POSITIONS = 30  # that a report lists


def run_markdown(
    evaluations: Sequence[Evaluation],
    curve: Mapping[int, float],
    best_epoch: int,
    name: str = "run",
    chosen: str | None = None,
    *,
    bank: Mapping[str, Any] | None = None,
    measure: str = "ndcg@10",
    comparisons: Sequence[str] = (),
    seconds: Mapping[str, float] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The report of a training run: what it reached, what was fitted and why, how validation went, how long it took.

    ``curve`` is the validation ``measure`` of each epoch, ``bank`` the history of `lgmml_torch.fitting.bank.Bank`.
    """
    validation = _curve_table("epoch", curve, best_epoch, measure)
    if not curve:
        validation = f"No validation queries: the weights of the last epoch ({best_epoch}) were kept."
    bank = bank or {}
    rounds = _bank_curve(bank)
    parts = [f"# {name}", evaluation_markdown(evaluations).rstrip()]
    if comparisons:
        parts.append("## Comparison\n\n" + "\n".join(f"- {each}." for each in comparisons))
    if chosen:
        parts.append(f"## What was fitted\n\n{chosen[0].upper()}{chosen[1:]}.")
    parts.append(f"## Validation\n\n{validation}")
    if rounds:
        parts.append(f"### Rounds of boosting\n\n{rounds}")
    if bank.get("position_bias"):
        parts.append(_positions(bank["position_bias"]))
    if seconds:
        parts.append(f"## Time\n\n{_times(seconds)}")
    if settings:
        lines = "\n".join(f"{key}: {value}" for key, value in settings.items())
        parts.append(f"## Settings\n\n```yaml\n{lines}\n```")
    return "\n\n".join(parts) + "\n"


def _positions(biases: Mapping[int, float]) -> str:
    """What being shown at a position added to the score of a document while training."""
    rows = []
    for position, bias in list(biases.items())[:_MOST_POSITIONS]:
        rows.append((position, f"{bias:.3f}"))
    text = f"### Positions\n\n{markdown_table(('position', 'added to the score'), rows)}"
    if len(biases) > _MOST_POSITIONS:
        text += f"\n\nand {len(biases) - _MOST_POSITIONS} more"
    return text


def _curve_table(what: str, curve: Mapping[int, float], kept: int, measure: str, most: int = 20) -> str:
    """Validation by epoch or round; of many, evenly spaced ones and the one that was kept."""
    places = list(curve)
    if len(places) > most:
        spaced = {places[round(i * (len(places) - 1) / (most - 1))] for i in range(most)}
        places = [place for place in places if place in spaced or place == kept]
    rows = []
    for place in places:
        mark = ""
        if place == kept:
            mark = " (kept)"
        rows.append((place, f"{curve[place]:.4f}{mark}"))
    return markdown_table((what, f"validation {measure.replace('ndcg', 'NDCG')}"), rows)


def _bank_curve(bank: Mapping[str, Any]) -> str:
    rounds, values = bank.get("rounds"), bank.get("valid_measure") or bank.get("valid_ndcg")
    if not rounds or not values:
        return ""
    measure = bank.get("measure", "ndcg@10")
    return _curve_table("round", dict(zip(rounds, values, strict=True)), bank["best_round"], measure)


def _times(seconds: Mapping[str, float]) -> str:
    stages = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    return f"{sum(seconds.values()):.1f} s: {stages}."


def _header(evaluations: Sequence[Evaluation]) -> list[str]:
    return ["data", "weights", *_names(evaluations), "queries", "skipped"]


def _mean(evaluation: Evaluation, name: str, interval: bool) -> str:
    if name not in evaluation.means:
        return ""
    text = f"{evaluation.means[name]:.4f}"
    found = None
    if interval:
        found = evaluation.interval(name)
    if found is not None:
        text += f" [{found.low:.4f}, {found.high:.4f}]"
    return text


def _rows(evaluations: Sequence[Evaluation], *, intervals: bool = False) -> list[list[str]]:
    names = _names(evaluations)
    rows = []
    for e in evaluations:
        row = [e.split, e.policy]
        for name in names:
            row.append(_mean(e, name, intervals))
        rows.append([*row, _counts(e.counted), _counts(e.skipped)])
    return rows


def _counts(counts: Mapping[str, int]) -> str:
    """One number where the metrics agree, otherwise each metric's own."""
    if len(set(counts.values())) == 1:
        return str(next(iter(counts.values())))
    return ", ".join(f"{count} ({name})" for name, count in counts.items())


def _names(evaluations: Sequence[Evaluation]) -> list[str]:
    names: dict[str, Any] = {}  # in the order of the first evaluation that has them
    for evaluation in evaluations:
        names |= evaluation.means
    return list(names)


def _definitions(evaluations: Sequence[Evaluation]) -> list[str]:
    texts: list[str] = []
    for evaluation in evaluations:
        texts += evaluation.definitions.values()
    return merge_definitions(texts)


def merge_definitions(texts: Iterable[str]) -> list[str]:
    """Each definition once, with all measures that share it.

    >>> merge_definitions(["ndcg@1 (mslr): gain y", "map (mslr): hits", "ndcg@5 (mslr): gain y", "map (mslr): hits"])
    ['ndcg@1, ndcg@5 (mslr): gain y', 'map (mslr): hits']
    """
    names: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        name, _, rules = text.partition(" ")
        names.setdefault(rules, []).append(name)
    merged = []
    for rules, shared in names.items():
        merged.append(f"{', '.join(shared)} {rules}")
    return merged


def preprocessing_steps(preprocess: Preprocess | Mapping[str, Any]) -> str:
    """The steps in one line: ``remove_constant → (quantile + list_rank) → standardize``."""
    spec = preprocess
    if not isinstance(spec, Mapping):
        spec = spec.spec()
    inner = list(map(preprocessing_steps, spec["args"].get("steps", [])))
    if spec["name"] == "chain":
        return " → ".join(inner) or "none"
    if spec["name"] == "concat":
        return f"({' + '.join(inner)})"
    return str(spec["name"])


_TAGS = ("learning-to-rank", "ranking", "metric-learning", "tabular")
_SETTINGS = ("seed", "budget", "preprocess", "local_metrics", "phi", "loss", "optimizer", "keep")
_LIMITS = """
- Scores order the documents of one list. They are no probabilities, and scores of different lists do not compare.
- A document's score may depend on the rest of its list, so whole lists belong in one call.
- The features must be those of the training data, in the same units and, where they have no names, in the same order.
- The model repeats what its labels say: clicks favour what was shown on top, judges have habits.
- Figures hold for queries like those they were measured on. Measure on your own before you rely on them.
"""


def read_report(file: Path) -> dict[str, Any]:
    """The ``report.json`` of a training run.

    Raises:
        DataError: when it is no such file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content["evaluations"], content["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} must be the report.json of a training run: {error}") from error
    return dict(content)


def model_card(
    model: LGMML, *, report: Mapping[str, Any] | None = None, name: str = "model", licence: str | None = None
) -> str:
    """A model card in Markdown, with the front matter that the Hugging Face Hub reads.

    Args:
        model: to be described.
        report: of its training run, see `read_report`; without it the card has no figures and says so.
        name: the title.
        licence: of the model, e.g. ``"apache-2.0"``; the card says that none was given when None.
    """
    report = report or {"evaluations": [], "config": {}}
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(report, name, licence), sort_keys=False, allow_unicode=True)}---\n",
        f"# {name}\n\n{_about_model(model)}\n",
        f"## Data\n\n{_about_data(model, report['config'])}\n",
        f"## Figures\n\n{_figures(report['evaluations'])}\n",
        f"## Settings\n\n{_settings(report['config'])}\n",
        f"## Limits\n{_LIMITS}",
        f"## Licence\n\n{licence or 'None was given. That of the training data may bind the model too.'}\n",
        f"## How to use\n\n{_usage(model)}\n",
    ]
    return "\n".join(parts)


def _front_matter(report: Mapping[str, Any], name: str, licence: str | None) -> dict[str, Any]:
    """What the Hub shows and searches; the figures of unseen test queries as its evaluation results."""
    found: dict[str, Any] = {"library_name": "lgmml-torch", "tags": list(_TAGS)}
    if licence is not None:
        found = {"license": licence, **found}
    measured = [one for one in report["evaluations"] if one["split"].startswith("test: unseen")]
    if measured:
        data = str(report["config"].get("name", "test queries"))
        found["metrics"] = list(measured[0]["metrics"])
        results = []
        for metric, value in measured[0]["metrics"].items():
            results.append({"type": metric, "name": value["definition"], "value": round(value["mean"], 4)})
        kind = {"type": "learning-to-rank", "name": "Learning to rank"}
        place = {"type": data, "name": data, "split": "test"}
        found["model-index"] = [{"name": name, "results": [{"task": kind, "dataset": place, "metrics": results}]}]
    return found


def _about_model(model: LGMML) -> str:
    """What it is, in a paragraph."""
    trees = ""
    if model.base is not None:
        trees = f" Its scores are added to those of a {model.base.title} model inside."
    return (
        "Ranks the documents of a list, best first, by the weighted sum of their distances to learned ideal documents: "
        f"{model.metrics.num_metrics} local metrics on {model.reading['num_features']} features, weights of the kind "
        f"{model.phi.mode!r}, kernel {model.kernel!r}, {str(model.dtype).removeprefix('torch.')}; "
        f"written by lgmml-torch {__version__}.{trees}"
    )


def _about_data(model: LGMML, config: Mapping[str, Any]) -> str:
    """Where it was trained, and on which features."""
    told = []
    for key, value in _shown(config.get("data", {})).items():
        if value is not None and key != "kind":
            told.append(f"{key}: {value}")
    reading, features = model.reading, "without names"
    if reading["feature_names"] is not None:
        features = ", ".join(f"`{name}`" for name in reading["feature_names"])
    return (
        f"- training set: {'; '.join(told) or 'not known'}\n- training queries: {len(model.qids) or 'not known'}\n"
        f"- features: {reading['num_features']}, {features}"
    )


def _figures(evaluations: list[dict[str, Any]]) -> str:
    """The evaluations of the run, with counts and definitions."""
    if not evaluations:
        return "None: there was no report of a training run beside the model. `lgmml evaluate` measures it."
    measures = list(evaluations[0]["metrics"])
    head = ["data", "weights", *measures, "queries counted", "skipped", "seed"]
    rows = []
    for one in evaluations:
        values = [f"{one['metrics'][name]['mean']:.4f}" for name in measures]
        counts = one["metrics"][measures[0]]
        rows.append([one["split"], one["policy"], *values, counts["counted"], counts["skipped"], one["seed"]])
    text = markdown_table(head, rows, text=2) + "\n"
    for entry in evaluations[0]["metrics"].values():
        text += f"\n- {entry['definition']}"
    return text


def _settings(config: Mapping[str, Any]) -> str:
    """The settings that decide what is fitted; no paths."""
    if not config:
        return "Not known."
    chosen = ""
    if config.get("chosen"):
        chosen = f"{config['chosen']}.\n\n"
    told = _shown({name: config[name] for name in _SETTINGS if name in config})
    return f"{chosen}```yaml\n{yaml.safe_dump(told, sort_keys=False, allow_unicode=True)}```"


def _usage(model: LGMML) -> str:
    """The first lines of code and commands."""
    return (
        "```bash\npip install lgmml-torch\nlgmml score model.safetensors lists.csv\n```\n\n```python\n"
        "from lgmml_torch import LGMML, RankingData\n\n"
        'model = LGMML.load("model.safetensors")\n'
        f"data = RankingData.from_arrays(X, y, qid=qid)  # X: (documents, {model.reading['num_features']})\n"
        "scores = model.score_in_caller_order(data)\n```"
    )


def _shown(values: Any) -> Any:
    """Settings without what only Hydra needs, and without places on somebody's disk."""
    if not isinstance(values, Mapping):
        return values
    kept = {}
    if "_target_" in values:
        kept["kind"] = values["_target_"].rpartition(".")[2]
    for key, value in values.items():
        on_disk = isinstance(value, str) and value.startswith("/")
        if not on_disk and not str(key).startswith("_"):
            kept[key] = _shown(value)
    return kept
