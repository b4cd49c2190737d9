"""Tables and model cards in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import Template

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


def fill_template(file: Path, **facts: Any) -> str:
    """The text of a template of Jinja with these facts in it; nothing is escaped."""
    text = file.read_text(encoding="utf-8")
    return str(Template(text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).render(facts))


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
    config, evaluations = report["config"], report["evaluations"]
    header, rows, _ = results_table(evaluations, intervals=False)
    for row, each in zip(rows, evaluations, strict=True):
        row.append(str(each["seed"]))
    data = []
    for key, value in _shown(config.get("data", {})).items():
        if value is not None and key != "kind":
            data.append(f"{key}: {value}")
    return fill_template(
        Path(__file__).with_name("card.jinja"),
        front=_yaml(_front_matter(report, name, licence)),
        name=name,
        model=model,
        reading=model.reading,
        version=__version__,
        data=data,
        evaluations=evaluations,
        figures=markdown_table([*header, "seed"], rows, text=2),
        config=config,
        settings=_yaml(_shown({name: config[name] for name in _SETTINGS if name in config})),
        licence=licence,
    )


def _yaml(content: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


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
