"""Model cards: what they say, with and without the report of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lgmml_torch.app import cli
from lgmml_torch.checks import DataError
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.evaluation.tables import model_card, read_report
from tests.doors import small_data, small_model

HEADINGS = ["Data", "Figures", "Settings", "Limits", "Licence", "How to use"]


def report() -> dict[str, Any]:
    model, data = small_model(), small_data(seed=5)
    splits = ("training queries", "test: unseen queries")
    return {
        "evaluations": [evaluate(model, data, split=split, seed=4).to_dict() for split in splits],
        "config": {
            "name": "toys", "seed": 4, "chosen": "few queries: boosted metrics", "paths": {"data_dir": "/home/me"},
            "data": {"_target_": "lgmml_torch.open_dataset", "name": "toys", "fold": 2, "cache": "/home/me/cache"},
            "loss": {"_target_": "lgmml_torch.training.losses.Warp", "margin": 0.1},
        },
    }  # fmt: skip


def parts(card: str) -> tuple[dict[str, Any], str]:
    empty, front, text = card.split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(front), text


def test_a_card_tells_figures_with_definition_and_counts(tmp_path: Path) -> None:
    given = report()
    (tmp_path / "report.json").write_text(json.dumps(given))
    small_model().save(tmp_path / "model.safetensors")
    words = ["card", str(tmp_path / "model.safetensors"), "--name", "toy ranker", "--license", "mit"]
    assert cli.main([*words, "-o", str(tmp_path / "README.md")]) == 0
    front, text = parts((tmp_path / "README.md").read_text())
    assert (front["license"], front["library_name"]) == ("mit", "lgmml-torch")
    measured = given["evaluations"][1]["metrics"]
    (result,) = front["model-index"][0]["results"]
    assert [one["value"] for one in result["metrics"]] == [round(one["mean"], 4) for one in measured.values()]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == HEADINGS
    first = next(iter(measured.values()))
    values = " | ".join(f"{one['mean']:.4f}" for one in measured.values())
    assert f"| test: unseen queries | shared | {values} | {first['counted']} | {first['skipped']} | 4 |" in text
    assert all(one["definition"] in text for one in measured.values())
    assert "few queries: boosted metrics" in text
    assert "kind: Warp" in text
    assert "name: toys; fold: 2" in text
    assert "/home/me" not in text


def test_a_card_without_a_report_says_so() -> None:
    front, text = parts(model_card(small_model()))
    assert front == {"library_name": "lgmml-torch", "tags": front["tags"]}
    assert "None: there was no report of a training run" in text
    assert "None was given." in text


def test_a_foreign_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(DataError, match=r"report.json must be the report.json of a training run"):
        read_report(tmp_path / "report.json")
