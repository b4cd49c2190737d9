"""Tables of evaluations: for terminals, for Markdown, for the report of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from lgmml_torch.evaluation.evaluate import Evaluation


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """One line for each evaluation and policy, one column for each metric."""
    from rich.table import Table

    table = Table()
    for position, column in enumerate(_header(evaluations)):
        table.add_column(column, justify="left" if position < 2 else "right", overflow="fold")
    for row in _rows(evaluations):
        table.add_row(*row)
    return table


def evaluation_markdown(evaluations: Sequence[Evaluation]) -> str:
    """The same table as Markdown, with the definitions below it."""
    header = _header(evaluations)
    lines = [header, ["---"] * 2 + ["---:"] * (len(header) - 2), *_rows(evaluations)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in lines)
    notes = "\n".join(f"- {text}" for text in _definitions(evaluations))
    return f"{table}\n\n{notes}\n"


def print_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """Table and definitions to standard output."""
    from rich.console import Console

    # Cut to the width of a terminal, but never to that of a pipe: a program may read it.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(evaluation_table(evaluations))
    for text in _definitions(evaluations):
        console.print(text, soft_wrap=True, markup=False)


OWN_LABELS = "Φ fitted to each list's own labels"
OWN_LABELS_NOTE = (
    f"*{OWN_LABELS}*: how much of the ranking the metrics can express. Optimistic, because a new list has no labels, "
    "and no bound, because the best Φ is searched for: never a result.\n\n"
)


def run_markdown(
    evaluations: Sequence[Evaluation],
    curve: Mapping[int, float],
    best_epoch: int,
    name: str = "run",
    chosen: str | None = None,
) -> str:
    """The report of a training run: what it reached, what was fitted and why, how validation went."""
    lines = [f"| {epoch} | {value:.4f}{' (kept)' if epoch == best_epoch else ''} |" for epoch, value in curve.items()]
    validation = "\n".join(["| epoch | validation NDCG@10 |", "|---:|---:|", *lines])
    if not curve:
        validation = f"No validation queries: the weights of the last epoch ({best_epoch}) were kept."
    note = OWN_LABELS_NOTE if any(e.split.endswith(OWN_LABELS) for e in evaluations) else ""
    fitted = f"## What was fitted\n\n{chosen[0].upper()}{chosen[1:]}.\n\n" if chosen else ""
    return f"# {name}\n\n{evaluation_markdown(evaluations)}\n{note}{fitted}## Validation\n\n{validation}\n"


def _header(evaluations: Sequence[Evaluation]) -> list[str]:
    return ["data", "weights", *_names(evaluations), "queries", "skipped"]


def _rows(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    names = _names(evaluations)
    return [
        [
            e.split,
            e.policy,
            *(f"{e.means[name]:.4f}" if name in e.means else "" for name in names),
            _counts(e.counted),
            _counts(e.skipped),
        ]
        for e in evaluations
    ]


def _counts(counts: Mapping[str, int]) -> str:
    """One number where the metrics agree, otherwise each metric's own."""
    if len(set(counts.values())) == 1:
        return str(next(iter(counts.values())))
    return ", ".join(f"{count} ({name})" for name, count in counts.items())


def _names(evaluations: Sequence[Evaluation]) -> list[str]:
    return list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.means))


def _definitions(evaluations: Sequence[Evaluation]) -> list[str]:
    return list(dict.fromkeys(text for evaluation in evaluations for text in evaluation.definitions.values()))
