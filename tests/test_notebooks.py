"""The notebooks run from top to bottom, without errors, and stay small enough to be read in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 3


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_notebooks_are_small_and_clean(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert len(text) < 200_000
    assert not re.search(r'"/(home|root|tmp|Users|work)/', text), "a path of some machine"
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    kinds = {output["output_type"] for cell in notebook.cells for output in cell.get("outputs", [])}
    assert kinds <= {"stream", "display_data", "execute_result"}


def figures(cell: Any) -> int:
    """How many pictures a cell shows; text may come in more or fewer pieces."""
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


def answers(cell: Any) -> list[str]:
    """The yes and no that a cell prints; its numbers depend on the processor."""
    printed = "".join(output.get("text", "") for output in cell.get("outputs", []) if output.get("name") == "stdout")
    return re.findall(r"True|False", printed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the Jupyter client, which lives in another process
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for variable in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # the user's own may not be writable
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(FOLDER / name, as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    runner = client.NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    runner.execute()  # raises the cell's error
    stored = nbformat.read(FOLDER / name, as_version=4)
    assert [figures(cell) for cell in notebook.cells] == [figures(cell) for cell in stored.cells]
    assert [answers(cell) for cell in notebook.cells] == [answers(cell) for cell in stored.cells]
