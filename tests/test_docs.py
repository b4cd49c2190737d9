"""What the documentation says must work: its Python runs, its commands compose, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lgmml_torch.app.cli import build_parser
from lgmml_torch.app.config import check_overrides
from lgmml_torch.functional.ranking.presets import PRESETS

ROOT = Path(__file__).parent.parent
PAGES = ["../README.md", "method.md", "metrics.md", "data.md", "configuration.md", "troubleshooting.md"]
RESULTS = ["performance.md", "quality.md", "results.md"]  # their Python needs a trained model


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith(("python train.py", "lgmml "))]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("command", commands())
def test_commands_are_accepted(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "lgmml":
        build_parser().parse_args(words[1:])
        return
    if any("optuna" in word for word in words):
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    check_overrides([word for word in words if "=" in word])


@pytest.mark.parametrize("page", [*PAGES, *RESULTS])
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / "docs" / page
    text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = file if not name else file.parent / name
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), target


def headings(file: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    found = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def test_every_preset_and_file_named_exists() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"^\| `([a-z0-9-]+)` \|", text, flags=re.MULTILINE) if name in PRESETS] == [
        *PRESETS
    ]
    method = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:functional|models|fitting|training|data|app|evaluation)/[\w/]+(?:\.py|/))`", method):
        assert (ROOT / "lgmml_torch" / name).exists(), name
