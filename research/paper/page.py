"""``docs/results.md``: every claim of the paper beside our number, made from the stored results alone."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lgmml_torch.checks import DataError
from lgmml_torch.files import replacing, write_text
from research.paper.outcome import VERDICTS, Table, read_outcome

HEAD = """# Results: the paper's claims, checked

Made by `python -m research.paper page size={size}` from the stored results of `make {target}`; not edited by
hand. Every number stands with its metric's definition, the queries it counts and skips, the split and the seed, in the
table it comes from. “Holds” and “does not hold” are decided by 95% intervals where the claim is about quality, by plain
ratios where it is about time; “not decided” means the interval contains zero; “not tested” means the data is not at
hand. The paper's numbers come from other implementations of the metrics and are never compared with ours as numbers.

Claims: {summary}.

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
    facts = {key: outcomes[0]["environment"][key] for key in ("python", "torch", "cores")}
    target = "paper-full" if size == "full" else "paper"
    return HEAD.format(size=size, target=target, summary=summary, times=_times(outcomes), **facts)


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
