from __future__ import annotations

import csv
import io
from pathlib import Path

from research.paper.outcome import Claim, Outcome, Table, write_page
from research.plots import Line, Panel, bars_picture, lines_picture

TABLE = Table("numbers", "Some numbers", ["data", "a|b"], [["x, y", 0.5], ["z", None]], ["a note"])


def test_table_is_the_same_in_markdown_and_csv() -> None:
    assert TABLE.markdown() == (
        "**Some numbers**\n\n| data | a\\|b |\n| --- | --- |\n| x, y | 0.5 |\n| z |  |\n\n- a note\n"
    )
    assert list(csv.reader(io.StringIO(TABLE.csv()))) == [["data", "a|b"], ["x, y", "0.5"], ["z", ""]]


def outcome() -> Outcome:
    line = Line("L-GMML", [1, 10], [0.5, 0.6], [0.4, 0.5], [0.6, 0.7], hollow=[False, True])
    bars = bars_picture(["x"], {"GMML": [(float("nan"), 0.0, 0.0)], "L-GMML": [(120.0, 1.0, 2.0)]}, y="y", log_y=True)
    pictures = {"lines": lines_picture([Panel("p", [line])], x="x", y="y"), "bars": bars}
    claims = [Claim("it works", "yes", "0.5", "holds", "seen"), Claim("it flies", "yes", "–", "not tested", "no wings")]
    return Outcome("demo", "A demo", [TABLE], pictures, claims, about="About it.")


def test_page_is_made_from_what_was_written(tmp_path: Path) -> None:
    files = outcome().write(tmp_path / "toy" / "demo")
    assert sorted(file.name for file in files) == [
        "bars.png", "bars.svg", "lines.png", "lines.svg", "numbers.csv", "numbers.md", "outcome.json",
    ]  # fmt: skip
    page = write_page(tmp_path / "toy", tmp_path / "docs" / "results.md", ["demo", "other"], "toy")
    text = page.read_text()
    for expected in (
        "1 × holds, 1 × not tested", "| [A demo](#a-demo) | it works | yes | 0.5 | **holds** | seen |",
        "![A demo](results/lines.png)", "## Not run\n\n- other", "About it.", "- a note",
    ):  # fmt: skip
        assert expected in text
    assert {file.name for file in (tmp_path / "docs" / "results").iterdir()} == {"bars.png", "lines.png", "numbers.csv"}
