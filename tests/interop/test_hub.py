"""Models in a folder laid out as on the Hugging Face Hub; nothing here reaches a network."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard

from lgmml_torch.checks import CheckpointError, MissingDependencyError
from lgmml_torch.interop.hub import HubModel
from tests.doors import small_data, small_model


def test_a_folder_holds_the_model_file_and_its_card(tmp_path: Path) -> None:
    model, data = small_model(mode="per_query"), small_data(seed=3)
    HubModel(model, licence="apache-2.0").save_pretrained(tmp_path / "ranker")
    assert sorted(path.name for path in (tmp_path / "ranker").iterdir()) == ["README.md", "model.safetensors"]
    again = HubModel.from_pretrained(tmp_path / "ranker").model
    torch.testing.assert_close(again.score(data), model.score(data), rtol=0, atol=0)
    card = ModelCard.load(tmp_path / "ranker" / "README.md")
    card.validate  # noqa: B018 - it would ask the Hub
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "lgmml-torch")


def test_what_is_pushed_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: dict[str, list[str]] = {}

    class Repo:
        repo_id = "me/ranker"

    def upload(self: HfApi, *, repo_id: str, folder_path: Path, **options: object) -> str:
        pushed[repo_id] = sorted(path.name for path in Path(folder_path).iterdir())
        return "done"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, **options: Repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert HubModel(small_model()).push_to_hub("me/ranker") == "done"
    assert pushed == {"me/ranker": ["README.md", "model.safetensors"]}


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model file at"):
        HubModel.from_pretrained(tmp_path)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "lgmml_torch.interop.hub")
    with pytest.raises(
        MissingDependencyError, match=r"`huggingface_hub` is needed .* pip install 'lgmml-torch\[hub\]'"
    ):
        importlib.import_module("lgmml_torch.interop.hub")
