"""Where things are in research: one door to training, one place for pictures, nothing looked up by name."""

from __future__ import annotations

import ast
import contextlib
import doctest
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from research import gallery, method_picture, picture, starts
from research.moby import __main__ as moby
from research.paper import __main__ as paper
from research.quality import __main__ as quality
from research.quality import large
from research.speed import climb, core, loading, processes, race, report, scale, scoring, training

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "research").rglob("*.py"))
HOMES = {  # what only these may import
    "lgmml_torch.app.train": ("systems.py", "crash.py"),
    "lgmml_torch.training.stages": ("systems.py",),
    "matplotlib": ("plots.py",),
    "lightgbm": (),
    "xgboost": (),
    "importlib": ("crash.py", "cover.py", "run.py", "supply.py"),  # they load code, or list what is installed
    "hydra": (),
}


def imports(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_keeps_to_its_room(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    for name in imports(tree):
        for package, homes in HOMES.items():
            if name == package or name.startswith(f"{package}."):
                assert path.name in homes, f"{path.name} imports {name}"
    assert "get_method" not in text
    assert text.count("\n") <= 450
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1
            assert lines <= 40, f"{path.name}: {node.name} has {lines} lines"


@pytest.mark.parametrize("path", [path for path in FILES if ">>>" in path.read_text()], ids=lambda path: path.stem)
def test_examples_in_docstrings_are_true(path: Path) -> None:
    module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0


COMMANDS: dict[str, Callable[[], object]] = {
    "paper": paper.main, "quality": quality.main, "quality.large": large.main, "starts": starts.main, "moby": moby.main,
    "picture": picture.main, "method_picture": method_picture.main, "gallery": gallery.main,
    "speed.climb": climb.main, "speed.core": core.main, "speed.processes": processes.main,
    "speed.loading": loading.main, "speed.scale": scale.main, "speed.race": race.main, "speed.scoring": scoring.main,
    "speed.training": training.main, "speed.report": report.main,
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_how_it_is_used(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    with contextlib.suppress(SystemExit):
        COMMANDS[name]()
    found = capsys.readouterr()
    assert f"python -m research.{name}" in found.out + found.err


def test_the_laboratory_is_not_in_the_help_of_train() -> None:
    done = subprocess.run([sys.executable, "train.py", "--help"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "local_metrics" in done.stdout
    assert "figure" not in done.stdout
    assert "research" not in done.stdout
