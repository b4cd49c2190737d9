"""Tables: of any rows in Markdown, of evaluations for terminals and Markdown, and the report of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from lgmml_torch.evaluation.evaluate import Evaluation
    from lgmml_torch.models.preprocess.base import Preprocess


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


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """One line for each evaluation and policy, one column for each metric."""
    from rich.table import Table

    table = Table()
    data, weights, *figures = _header(evaluations)
    for column in (data, weights):
        table.add_column(column, overflow="fold")
    for column in figures:
        table.add_column(column, justify="right", overflow="fold")
    for row in _rows(evaluations):
        table.add_row(*row)
    return table


def evaluation_markdown(evaluations: Sequence[Evaluation]) -> str:
    """The same table as Markdown, with intervals, and the definitions below it."""
    table = markdown_table(_header(evaluations), _rows(evaluations, intervals=True), text=2)
    text = f"{table}\n\nIn brackets: 95% bootstrap interval of the mean over queries.\n\n"
    for definition in _definitions(evaluations):
        text += f"- {definition}\n"
    return text


def print_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Table and definitions to standard output."""
    from rich.console import Console

    # Cut to the width of a terminal, but never to that of a pipe: a program may read it.
    width = None
    if not sys.stdout.isatty():
        width = 200
    console = Console(file=sys.stdout, width=width, highlight=False)
    console.print(evaluation_table(evaluations))
    for text in _definitions(evaluations):
        console.print(text, soft_wrap=True, markup=False)


OWN_LABELS = "Φ fitted to each list's own labels"
OWN_LABELS_NOTE = (
    f"*{OWN_LABELS}*: how much of the ranking the metrics can express. Optimistic, because a new list has no labels, "
    "and no bound, because the best Φ is searched for: never a result."
)
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

    Args:
        evaluations: what it reached.
        curve: what validation says of each epoch.
        best_epoch: the epoch that was kept.
        name: of the run.
        chosen: why this was fitted.
        bank: how the fit of the metrics went, see `lgmml_torch.fitting.bank.Bank`.
        measure: what validation goes by.
        comparisons: with other models, in words.
        seconds: of each stage.
        settings: all of them, flat.
    """
    validation = _curve_table("epoch", curve, best_epoch, measure)
    if not curve:
        validation = f"No validation queries: the weights of the last epoch ({best_epoch}) were kept."
    bank = bank or {}
    rounds = _bank_curve(bank)
    parts = [f"# {name}", evaluation_markdown(evaluations).rstrip()]
    if any(evaluation.split.endswith(OWN_LABELS) for evaluation in evaluations):
        parts.append(OWN_LABELS_NOTE)
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
    if not isinstance(rounds, list) or not values:  # bags have a curve for each member
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
