"""What the documentation says must work: its Python and its commands run, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lgmml_torch.app.cli import build_parser
from lgmml_torch.app.config import check_command
from lgmml_torch.functional.presets import PRESETS
from tests.documented import (
    FENCE,
    REFUSED,
    ROOT,
    Command,
    blocks,
    commands,
    make_targets,
    provide,
    tiny,
    write_datasets,
)

PRINTED = ["../README.md", "tutorial.md"]  # tests/test_tutorial.py runs them as they stand
PAGES = ["guide.md", "method.md", "metrics.md", "data.md", "shards.md", "configuration.md", "monitoring.md"]
PAGES += ["report.md", "troubleshooting.md", "from_lightgbm.md", "serving.md", "clicks.md", "index.md", "releases.md"]
PAGES += ["gallery.md", "metric_learning.md", "robust.md", "calibration.md"]
# Their Python needs a trained model.
RESULTS = [
    "performance.md",
    "quality.md",
    "large.md",
    "starts.md",
    "results.md",
    "architecture.md",
    "reliability.md",
    "distributed.md",
    "ecosystem.md",
    "commands.md",
    *(f"api/{page.name}" for page in sorted((ROOT / "docs" / "api").glob("*.md"))),
]
ALL = [*PRINTED, *PAGES, *RESULTS]
COMMANDS = commands(ALL)

SMALLER = {  # sizes in the blocks of Python
    "random((3_000, 6))": "random((600, 6))",
    "arange(150)": "arange(30)",
    '"rounds": 60, "epochs": 3': '"rounds": 5, "epochs": 1',
}


def runnable() -> list[Command]:
    """The commands of the guide and the first one of each other page, and what these need to run before them.

    Exports take seconds and have tests of their own.
    """
    chosen: list[Command] = []
    for command in COMMANDS:
        pages = {other.page for other in chosen}
        if command.page in PRINTED or command.kind not in ("train", "lgmml"):
            continue
        makes = command.words[1] == "convert"  # later commands read the shards
        if makes or command.page in ("guide.md", "index.md") or command.page not in pages:
            chosen.append(command)
    return chosen


RUN = runnable()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        for size, smaller in SMALLER.items():
            block = block.replace(size, smaller)
        exec(compile(block, page, "exec"), names)


def test_every_block_says_what_it_is() -> None:
    """A block without a language is one that no test looks at."""
    for page in ALL:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        shown = {"bash", "python", "math", "text", "yaml", "csv"}
        filled = {"{toctree}", "{api}", "{commands}"}  # by the site, which fails where it cannot
        assert {label for label, _ in FENCE.findall(text)} <= shown | filled, page
        assert text.count("\n```") == 2 * len(FENCE.findall(text)), page


def test_every_command_is_covered() -> None:
    """Each is one of the kinds that the tests below accept and run; those of the README and the guide are all there."""
    assert [str(command) for command in COMMANDS if command.kind is None] == []
    for page, kinds in (("../README.md", {"pip", "lgmml", "make"}), ("guide.md", {"train", "lgmml", "export"})):
        found = [command for command in COMMANDS if command.page == page]
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        lines = re.findall(r"^(?:python|lgmml|make|export|pip|git|cd) .*$", text, flags=re.MULTILINE)
        assert len(found) == len(lines) >= 5, page
        assert {command.kind for command in found} == kinds, page


def test_every_page_opens_with_what_the_reader_can_do() -> None:
    """In one sentence below the title."""
    for page in set(ALL) - {"../README.md"}:
        title, opening, _ = (ROOT / "docs" / page).read_text(encoding="utf-8").split("\n\n", 2)
        assert title.startswith("# "), page
        assert re.fullmatch(r"After (this page|these ten minutes) you can [^.]+\.", opening), (page, opening)


def test_every_page_is_looked_at() -> None:
    """By the tests of this module."""
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages == set(ALL) - {"../README.md"}


def overrides(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if "=" in word and not word.startswith("-"))


def test_commands_are_accepted() -> None:
    parser = build_parser()
    composed: set[tuple[str, ...]] = set()
    for command in COMMANDS:
        words = command.words
        if command.kind == "lgmml" and words[1] != "train":
            parser.parse_args(words[1:])
        elif command.kind == "make":
            assert set(words[1:]) <= make_targets(), command
        elif command.kind == "module":
            assert importlib.util.find_spec(words[2]) is not None, command
        elif command.kind == "pip":
            extras = set(re.findall(r"[\w-]+", words[-1]))
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert extras <= set(project["optional-dependencies"]), command
        elif command.kind == "export":
            assert words[1].partition("=")[0] in ("LGMML_DATA", "LGMML_CACHE"), command
        else:
            assert command.kind != "torchrun" or "train.py" in words, command
            composed.add(overrides(words))
    for page in ALL:
        text = re.sub(FENCE, "", (ROOT / "docs" / page).read_text(encoding="utf-8"))
        for target in re.findall(r"`make ([\w-]+)[^`]*`", text):
            assert target in make_targets(), target
        for module in re.findall(r"`python -m ([\w.]+)[^`]*`", text):
            assert importlib.util.find_spec(module) is not None, module
        for line in re.findall(r"`(?:python train\.py|lgmml train) ([^`…]*)`", text):
            composed.add(overrides(line.split()))
    composed.remove(overrides(REFUSED))
    for words in sorted(composed):
        check_command(words)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Command, dict[str, Any]]:
    """Every command run once, in the order of the pages: some go on from what an earlier one has left."""
    folder = tmp_path_factory.mktemp("documented")
    write_datasets(folder / "datasets")
    todo = []
    for command in RUN:
        provide(command, folder)
        words = list(command.words)
        todo.append([*words[:2], *tiny(command.words)] if command.trains else words)
    (folder / "todo.json").write_text(json.dumps(todo))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "LGMML_DATA": str(folder / "datasets"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.documented", "todo.json", "results.json"],
        capture_output=True, text=True, cwd=folder, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "results.json").read_text())
    return dict(zip(RUN, found, strict=True))


@pytest.mark.xdist_group("documented commands")
def test_commands_run(outcomes: dict[Command, dict[str, Any]]) -> None:
    for command, outcome in outcomes.items():
        assert outcome["code"] == 0, (str(command), outcome["told"])
        if command.kind == "train" and not any(word.startswith("--") for word in command.words):
            assert "model, report and logs are in" in outcome["told"], str(command)
        elif not {"--output", "-o"} & set(command.words):
            assert outcome["told"].strip(), str(command)


def test_links_lead_somewhere() -> None:
    for page in ALL:
        file = ROOT / "docs" / page
        text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            linked = file if not name else file.parent / name
            assert linked.exists(), (page, target)
            assert not anchor or anchor in headings(linked), (page, target)


def headings(file: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    found = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def test_every_preset_and_file_named_exists() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"^\| `([a-z0-9_-]+)` \|", text, flags=re.MULTILINE) if name in PRESETS] == [
        *PRESETS
    ]
    method = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:functional|models|fitting|training|data|app|evaluation)/[\w/]+(?:\.py|/))`", method):
        assert (ROOT / "lgmml_torch" / name).exists(), name
