"""Model cards: what a model is, what it was trained on, how well it ranks and where it should not be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lgmml_torch import __version__
from lgmml_torch.checks import DataError
from lgmml_torch.evaluation.tables import OWN_LABELS, markdown_table
from lgmml_torch.models.ranker import LGMML

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
    """The evaluations of the run, with counts and definitions; not those with weights fitted to the labels measured."""
    evaluations = [one for one in evaluations if OWN_LABELS not in one["split"]]
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
