"""Tables and model cards in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lgmml_torch import __version__
from lgmml_torch.checks import DataError

if TYPE_CHECKING:
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


def evaluation_markdown(evaluations: Iterable[Mapping[str, Any]]) -> str:
    """The table with intervals, see `results_table`, and the definitions below."""
    header, rows, definitions = results_table(evaluations)
    table = markdown_table(header, rows, text=2)
    text = f"{table}\n\nIn brackets: 95% bootstrap interval of the mean over queries.\n\n"
    for definition in definitions:
        text += f"- {definition}\n"
    return text


def results_table(
    evaluations: Iterable[Mapping[str, Any]], *, intervals: bool = True
) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and definitions of a table: a row for each evaluation, a column for each measure.

    ``evaluations`` are as `Evaluation.to_dict` gives them and ``report.json`` holds them.
    """
    evaluations = list(evaluations)
    names, texts = dict[str, None](), list[str]()  # the first is a set in order
    for each in evaluations:
        for name, measured in each["metrics"].items():
            names[name] = None
            texts.append(measured["definition"])
    rows = []
    for each in evaluations:
        means = [_mean(each["metrics"].get(name), intervals) for name in names]
        rows.append([each["split"], each["policy"], *means, _counts(each, "counted"), _counts(each, "skipped")])
    return ["data", "weights", *names, "queries", "skipped"], rows, _merge_definitions(texts)


def _mean(measured: Mapping[str, Any] | None, interval: bool) -> str:
    if measured is None or measured["mean"] is None:
        return "–"
    text = f"{measured['mean']:.4f}"
    if interval and measured.get("interval"):
        text += " [{:.4f}, {:.4f}]".format(*measured["interval"])
    return text


def _counts(evaluation: Mapping[str, Any], key: str) -> str:
    """One number where the measures agree, otherwise each measure's own."""
    counts, texts = set[int](), list[str]()
    for name, measured in evaluation["metrics"].items():
        counts.add(measured[key])
        texts.append(f"{measured[key]} ({name})")
    if len(counts) == 1:
        return str(counts.pop())
    return ", ".join(texts)


def _merge_definitions(texts: Iterable[str]) -> list[str]:
    """Each definition once, with all measures that share it.

    >>> _merge_definitions(["ndcg@1 (mslr): gain y", "map (mslr): hits", "ndcg@5 (mslr): gain y", "map (mslr): hits"])
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
    header, rows, _ = results_table(evaluations, intervals=False)
    for row, each in zip(rows, evaluations, strict=True):
        row.append(str(each["seed"]))
    text = markdown_table([*header, "seed"], rows, text=2) + "\n"
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
