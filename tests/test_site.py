"""The site builds with every warning an error, and has what it should."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sphinx")
ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "api").glob("*.md"))]
PAGES += [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "notebooks").glob("*.ipynb"))]


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of docs/_site by its name."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def recipe() -> list[str]:
    """What ``make docs`` calls, without where to."""
    made = re.search(
        r"^docs:.*\n\t\$\(PY\) (.*) -d build/doctrees \. build/site$", (ROOT / "Makefile").read_text(), re.M
    )
    assert made is not None
    return made[1].split()


@pytest.mark.slow
def test_the_strict_build_passes(tmp_path: Path) -> None:
    words = recipe()
    assert {"-W", "-n", "-E"} <= set(words)
    command = [sys.executable, *words, "-d", str(tmp_path / "doctrees"), ".", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    for page in PAGES:
        assert (site / page.relative_to(ROOT).with_suffix(".html")).is_file(), page
    assert "docs/index.html" in (site / "index.html").read_text(encoding="utf-8")
    assert "geometric" in (site / "searchindex.js").read_text(encoding="utf-8")
    method = (site / "docs" / "method.html").read_text(encoding="utf-8")
    assert "<math" in method
    assert "../README.html" in (site / "docs" / "index.html").read_text(encoding="utf-8")
    html = "".join(page.read_text(encoding="utf-8") for page in site.rglob("*.html"))
    assert "mailto:" not in html
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//', html), "a page needs the network"


def test_dead_references_are_noticed(part: Any) -> None:
    reference = part("reference")
    assert reference.exists("RankingData", "lgmml_torch", "")
    assert reference.exists("fit", "lgmml_torch", "LGMMLRanker")
    assert reference.exists("lgmml_torch.functional.score.kernel", "lgmml_torch", "")
    assert reference.exists("torch.nn.Embedding", "lgmml_torch", "")
    assert not reference.exists("fit_everything", "lgmml_torch", "")
    assert not reference.exists("lgmml_torch.functional.score.kernels", "lgmml_torch", "")


def test_names_and_measures_stay_as_they_are_written(part: Any) -> None:
    lines = [":ivar model_: the best by NDCG@10", ">>> evaluate(metrics=['ndcg@10'])"]
    part("reference").as_written(None, "class", "", None, None, lines)
    assert lines == [r":ivar model\_: the best by NDCG\@10", ">>> evaluate(metrics=['ndcg@10'])"]


def test_a_notebook_becomes_a_page(part: Any) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "text"]},
        {
            "cell_type": "code",
            "source": "print('```')",
            "outputs": [
                {"output_type": "stream", "text": ["\x1b[31mred\x1b[0m\n"]},
                {"output_type": "display_data", "data": {"image/png": "iVBO\nRw==", "text/plain": "<Figure>"}},
            ],
        },
    ]
    notebook = json.loads(json.dumps({"cells": cells}))
    title, code, told, picture = part("notebook_pages").to_markdown(notebook)
    assert title == "# A title\ntext"
    assert code == "````python\nprint('```')\n````"
    assert told == "```text\nred\n```"
    assert picture.endswith("(data:image/png;base64,iVBORw==)")


def test_a_formula_that_cannot_be_written_is_told(part: Any, caplog: pytest.LogCaptureFixture) -> None:
    from docutils import nodes

    formulas = part("formulas")
    assert formulas.to_mathml(nodes.math("", r"\frac{1}{2}"), as_block=False).startswith("<math")
    assert formulas.to_mathml(nodes.math("", r"\nonsense"), as_block=False) == r"<code>\nonsense</code>"
