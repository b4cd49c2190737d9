"""One version, the same Pythons everywhere, and a workflow that calls what is there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lgmml_torch
from tests.documented import make_targets

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
JOB = WORKFLOW["jobs"]["check"]


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "lgmml_torch/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", lgmml_torch.__version__)
    done = subprocess.run(
        [sys.executable, "-m", "lgmml_torch.app.cli", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == f"lgmml {lgmml_torch.__version__}\n"


def test_pythons_are_the_same_everywhere() -> None:
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert classified == JOB["strategy"]["matrix"]["python"]
    beyond = int(classified[-1].removeprefix("3.")) + 1
    assert PROJECT["project"]["requires-python"] == f">={classified[0]},<3.{beyond}"
    page = (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")
    assert all(version in page for version in classified)


def test_the_workflow_calls_what_is_there() -> None:
    called = [step["run"].split()[1] for step in JOB["steps"] if step.get("run", "").startswith("make ")]
    assert called == ["setup", "lint", "test", "docs", "build"]
    newest = [step["run"] for step in WORKFLOW["jobs"]["newest"]["steps"] if "run" in step]
    assert newest == ["make test-newest"]
    assert {*called, "test-newest"} <= make_targets()
    for step in [*JOB["steps"], *WORKFLOW["jobs"]["newest"]["steps"]]:
        assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", step["uses"]), step


def test_the_wheel_has_the_configuration_and_not_the_laboratory() -> None:
    build = PROJECT["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["force-include"] == {"conf": "lgmml_torch/conf"}
    assert build["wheel"]["packages"] == ["lgmml_torch"]
    assert {"research", "tools"} <= set(build["sdist"]["exclude"])
