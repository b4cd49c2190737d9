"""`lgmml export` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lgmml_torch.app import cli
from lgmml_torch.app.commands import model as commands
from lgmml_torch.data.write import save_letor
from lgmml_torch.models.export import _Parity
from lgmml_torch.models.ranker import LGMML
from tests.doors import small_data, small_model
from tests.models.test_encode import lists, words_model


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    small_model(mode="amortized").save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_the_file_is_compared_with_the_model(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small_data(seed=4)
    save_letor(data, tmp_path / "test.txt")
    file = tmp_path / "model.pt2"
    assert cli.main(["export", str(model_file), str(file), "--data", str(tmp_path / "test.txt")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{file}: features of one list in, scores out; ")
    assert second.startswith(f"compared with the model on 12 lists, {data.num_documents} documents: largest difference")
    assert second.endswith(f"(torch {torch.__version__})")
    run = torch.export.load(file).module()
    found = torch.cat([run(rows) for rows in data.features.split(data.sizes.tolist())])
    torch.testing.assert_close(found, LGMML.load(model_file).score(data), rtol=1e-5, atol=1e-5)


def test_a_model_with_categories_is_compared_on_random_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words_model(lists()).save(tmp_path / "words.safetensors")
    assert cli.main(["export", str(tmp_path / "words.safetensors"), str(tmp_path / "words.pt2")]) == 0
    assert "compared with the model on 8 lists, 1,446 documents: largest difference" in capsys.readouterr().out


def test_a_file_that_gives_other_scores_is_not_kept(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "EXPORTERS", {".pt2": lambda model, path, **options: path.write_text("")})
    monkeypatch.setattr(commands, "compare_exported", lambda *given, **options: _Parity(0.5, 2.0, 8, 99, "torch 2"))
    file = tmp_path / "model.pt2"
    assert cli.main(["export", str(model_file), str(file), "--batch"]) == 2
    assert f"{file} was removed, because torch 2 gives other scores than the model: " in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.txt"], "`FILE` must end in .onnx or .pt2, got model.txt"),
        (["model.onnx", "--known-queries"], "`known-queries` must not be given: an exported file knows lists"),
        (["model.onnx", "--policy", "knn"], "`policy` must be one of 'amortized', 'shared', 'ones', got 'knn'"),
    ],
)
def test_what_cannot_be_exported_is_told(
    words: list[str], message: str, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(model_file), *words]) == 2
    assert message in capsys.readouterr().err
