"""Research and tools: one module that trains, doctests that hold, commands that explain themselves."""

from __future__ import annotations

import ast
import contextlib
import doctest
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("research", "tools") for path in (ROOT / folder).rglob("*.py"))
HOMES = {  # which files may import a package
    "lgmml_torch.app.train": ("compare.py", "crash.py"),
    "lgmml_torch.training.stages": ("compare.py",),
    "matplotlib": ("plots.py",),
    "lightgbm": ("trees.py",),
    "xgboost": ("trees.py",),
    "hydra": (),
}
COMMANDS = (
    "paper", "quality", "quality.large", "starts", "moby", "picture", "method_picture", "gallery", "speed.climb",
    "speed.core", "speed.processes", "speed.loading", "speed.scale", "speed.race", "speed.scoring", "speed.training",
    "speed.report", "ideal",
)  # fmt: skip


def test_imports_and_lengths() -> None:
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 450, path
        for node in ast.walk(ast.parse(text)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                for package, homes in HOMES.items():
                    outside = not f"{name}.".startswith(f"{package}.")
                    assert outside or path.name in homes, f"{path} imports {name}"


def test_examples_in_docstrings_are_true() -> None:
    for path in FILES:
        if ">>>" in path.read_text():
            module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
            assert found.attempted > 0, path
            assert found.failed == 0, path


def test_every_command_says_how_it_is_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    for name in COMMANDS:
        module = f"research.{name}"
        if (ROOT / module.replace(".", "/")).is_dir():
            module += ".__main__"
        with contextlib.suppress(SystemExit):
            import_module(module).main()
        assert f"python -m research.{name}" in "".join(capsys.readouterr()), name
