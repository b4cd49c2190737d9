"""What an experiment hands back, and how it is written: tables, pictures and claims."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lgmml_torch.checks import DataError, check_choice
from lgmml_torch.files import write_text
from lgmml_torch.plots import save_figure
from research.store import environment

VERDICTS = ("holds", "holds in part", "does not hold", "not decided", "not tested")


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers under a title, with what a reader must know below."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """A Markdown table; numbers as they are shown in ``rows``.

        >>> print(Table("t", "A table", ["set", "MAP"], [["digits", 0.5]]).markdown())
        **A table**
        <BLANKLINE>
        | set | MAP |
        | --- | --- |
        | digits | 0.5 |
        <BLANKLINE>
        """
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        body = "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)
        notes = "".join(f"\n- {note}" for note in self.notes)
        return f"**{self.title}**\n\n{body}\n" + (notes + "\n" if notes else "")

    def csv(self) -> str:
        """The same rows, comma separated."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if value is None else value for value in row] for row in self.rows])
        return stream.getvalue()


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, its number, ours, and whether it holds."""

    statement: str
    paper: str
    ours: str
    verdict: str
    why: str

    def __post_init__(self) -> None:
        check_choice("verdict", self.verdict, VERDICTS)


@dataclass(frozen=True)
class Outcome:
    """Everything an experiment found."""

    name: str
    title: str
    tables: Sequence[Table]
    pictures: Mapping[str, Figure]
    claims: Sequence[Claim] = ()
    about: str = ""

    def write(self, folder: Path, cost: Mapping[str, float] | None = None) -> list[Path]:
        """Tables as Markdown and CSV, pictures as PNG and SVG, all of it for the results page as JSON."""
        files = []
        for table in self.tables:
            for ending, text in (("md", table.markdown()), ("csv", table.csv())):
                files.append(folder / f"{table.name}.{ending}")
                write_text(files[-1], text)
        for name, picture in self.pictures.items():
            for ending in ("png", "svg"):
                files.append(folder / f"{name}.{ending}")
                save_figure(picture, files[-1], dpi=110)
        content = {
            "name": self.name, "title": self.title, "about": self.about,
            "tables": [asdict(table) for table in self.tables], "pictures": list(self.pictures),
            "claims": [asdict(claim) for claim in self.claims], "environment": environment(), "cost": dict(cost or {}),
        }  # fmt: skip
        files.append(folder / "outcome.json")
        write_text(files[-1], json.dumps(content, indent=1, default=str))
        return files


def read_outcome(folder: Path) -> dict[str, Any]:
    """The JSON that `Outcome.write` left.

    Raises:
        DataError: when there is none, with the command that makes it.
    """
    path = folder / "outcome.json"
    if not path.is_file():
        raise DataError(f"{path}: no such file; run: python -m research.paper {folder.name}")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
