"""The trace of a small command, and figures that are known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lgmml_torch.data.write import save_letor
from tests.doors import small_data, small_model

ROOT = Path(__file__).parents[2]


def test_scoring_a_file_preprocesses_and_scores_each_document_once(tmp_path: Path) -> None:
    data = small_data(seed=2)
    small_model().save(tmp_path / "model.safetensors")
    save_letor(data, tmp_path / "new.txt")
    words = ["lgmml", "score", str(tmp_path / "model.safetensors"), str(tmp_path / "new.txt")]
    line = [sys.executable, "-m", "tools.trace", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT)
    figures = dict(row.split(": ") for row in done.stdout.splitlines() if ": " in row)
    assert figures["documents read"] == figures["documents scored"] == str(data.num_documents)
    assert figures["… for the rest"] == figures["documents scored"]
    assert 0 < int(figures["modules entered before data"]) < int(figures["modules entered"])
