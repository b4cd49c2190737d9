"""A table as a shop has it: all its problems at once, and a command that trains on it."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from lgmml_torch.app import cli
from lgmml_torch.app.compose import load_splits
from lgmml_torch.app.config import load_config


def write_table(file: Path, *, label: str = "relevance") -> None:
    """With the index of pandas, other names for query and label, words, sentences, dates and an empty cell."""
    draw = random.Random(0)
    lines = [f",query_id,{label},price,brand name,title,added"]
    for row in range(300):
        price = "" if row == 7 else f"{draw.random():.3f}"
        words = f"{draw.choice(['red', 'blue', 'green'])},a good thing no. {row}"
        lines.append(f"{row},q{row // 10},{draw.randrange(3)},{price},{words},2026-01-{1 + row % 28:02d}")
    file.write_text("\n".join(lines) + "\n")


def test_all_problems_are_listed_and_the_command_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my products.csv"
    write_table(file)
    assert cli.main(["inspect", str(file)]) == 0
    *lines, command = capsys.readouterr().out.splitlines()
    problems = "\n".join(line for line in lines if line.startswith("problem: "))
    for piece in ("'qid'", "''", "training needs labels", "'brand name'", "'title'", "'added'", "missing"):
        assert piece in problems, piece
    words = shlex.split(command.removeprefix("train with: "))
    assert words[:3] == ["lgmml", "train", "data=table"]
    splits = load_splits(load_config([*words[2:], "paths.cache_dir=false"]))
    assert splits["train"].feature_names == ("price", "brand name")
    assert sum(part.num_documents for part in splits.values()) == 300


def test_what_no_setting_mends_is_said_with_all_that_came_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path / "t.csv", label="unheard_of")
    assert cli.main(["inspect", str(tmp_path / "t.csv")]) == 2
    said = capsys.readouterr().err
    assert "'qid'" in said
    assert "training needs labels" in said
    assert said.endswith("no setting mends the last of these problems\n")
    write_table(tmp_path / "t.csv", label="unheard_of")
    assert cli.main(["inspect", str(tmp_path / "t.csv"), "--label-column", "unheard_of"]) == 0
    assert "data.label=unheard_of" in capsys.readouterr().out.splitlines()[-1]
    assert cli.main(["inspect", str(tmp_path / "none.csv")]) == 2
    assert "none.csv: no such file" in capsys.readouterr().err
