"""What an experiment hands back (tables, pictures, claims), how it is written, and the page made of all of them."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lgmml_torch.checks import DataError, check_choice
from lgmml_torch.files import replacing, write_text
from lgmml_torch.plots import save_figure
from research.plots import Figure
from research.stats import markdown
from research.store import machine_facts, to_json

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
        body = markdown(self.columns, self.rows)
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
            "claims": [asdict(claim) for claim in self.claims], "machine": machine_facts(), "cost": dict(cost or {}),
        }  # fmt: skip
        files.append(folder / "outcome.json")
        write_text(files[-1], to_json(content))
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


MAIN_CLAIM = "L-GMML as published ranks better than λ-MART"
HEAD = """# Results: the paper's claims, checked

After this page you can say which claims of the paper hold on the data at hand.

Made by `python -m research.paper page size={size}` from the stored results of `make {target}`; not edited by
hand. Every number stands with its metric's definition, the queries it counts and skips, the split and the seed, in the
table it comes from. “Holds” and “does not hold” are decided by 95% intervals where the claim is about quality, by plain
ratios where it is about time; “not decided” means the interval contains zero; “not tested” means the data is not at
hand. The paper's numbers come from other implementations of the metrics and are never compared with ours as numbers.

{main}Claims in all: {summary}.

Size of this run: **{size}**, on Python {python}, torch {torch}, {cores} cores. Re-running goes on where it stopped.
The reduced size is made for 15 minutes on two idle cores. The full size (ten folds, three seeds, whole grids, long time
caps for R-MLR) is made for a night, about 12 hours, most of it R-MLR and the paper's grid for Φ: an estimate from the
reduced size, not a measurement.

{times}"""


def write_page(results: Path, page: Path, names: Sequence[str], size: str) -> Path:
    """Write the page, and beside it a folder of the same name with tables and pictures.

    Raises:
        DataError: when nothing is stored for this size.
    """
    outcomes = [read_outcome(results / name) for name in names if (results / name / "outcome.json").is_file()]
    if not outcomes:
        raise DataError(f"no results in {results}; run: python -m research.paper all size={size}")
    missing = [name for name in names if name not in {outcome["name"] for outcome in outcomes}]
    parts = [_head(outcomes, size), _claim_table(outcomes)]
    for outcome in outcomes:
        parts.append(_section(outcome, page))
        _copy(results / outcome["name"], page.parent / page.stem, outcome)
    if missing:
        parts.append("## Not run\n\n" + "\n".join(f"- {name}" for name in missing) + "\n")
    write_text(page, "\n".join(parts))
    return page


def _head(outcomes: list[dict[str, Any]], size: str) -> str:
    verdicts = Counter(claim["verdict"] for outcome in outcomes for claim in outcome["claims"])
    summary = ", ".join(f"{verdicts[v]} × {v}" for v in VERDICTS if verdicts[v])
    main = [c["verdict"] for outcome in outcomes for c in outcome["claims"] if MAIN_CLAIM in c["statement"]]
    sentence = ""
    if main:
        sets = f"holds on {main.count('holds')} of {len(main)} sets at hand"
        sentence = f"The paper's main claim, that its model ranks new queries better than λ-MART, {sets}.\n"
    facts = {key: outcomes[0]["machine"][key] for key in ("python", "torch", "cores")}
    target = "paper-full" if size == "full" else "paper"
    return HEAD.format(size=size, target=target, main=sentence, summary=summary, times=_times(outcomes), **facts)


def _times(outcomes: list[dict[str, Any]]) -> str:
    rows = [
        [o["title"], f"{c['wall clock']:,.0f}", f"{c['processor']:,.0f}",
         f"{c['lowest load']:.1f} to {c['highest load']:.1f}"]
        for o in outcomes
        if (c := o["cost"]) and c["wall clock"]
    ]  # fmt: skip
    columns = ["experiment", "wall clock, s", "processor, s", "load average of the machine meanwhile"]
    notes = ["all the work an experiment uses; the ranking experiments share theirs"]
    return Table("times", "Computing time", columns, rows, notes).markdown()


def _claim_table(outcomes: list[dict[str, Any]]) -> str:
    rows = [
        [f"[{outcome['title']}](#{_anchor(outcome['title'])})", c["statement"], c["paper"], c["ours"],
         f"**{c['verdict']}**", c["why"]]
        for outcome in outcomes
        for c in outcome["claims"]
    ]  # fmt: skip
    columns = ["experiment", "claim", "paper", "ours", "reproduced", "why"]
    return "## Claims\n\n" + Table("claims", "Claim by claim", columns, rows).markdown()


def _section(outcome: dict[str, Any], page: Path) -> str:
    name = outcome["name"]
    lines = [f"## {outcome['title']}", "", f"`python -m research.paper {name}`", ""]
    if outcome["about"]:
        lines += [outcome["about"], ""]
    lines += [f"![{outcome['title']}]({page.stem}/{picture}.png)\n" for picture in outcome["pictures"]]
    for table in outcome["tables"]:
        lines += [Table(**table).markdown(), f"[CSV]({page.stem}/{table['name']}.csv)", ""]
    return "\n".join(lines)


def _copy(source: Path, target: Path, outcome: dict[str, Any]) -> None:
    files = [f"{table['name']}.csv" for table in outcome["tables"]]
    files += [f"{picture}.png" for picture in outcome["pictures"]]
    for file in files:
        with replacing(target / file) as temporary:
            shutil.copyfile(source / file, temporary)


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")
