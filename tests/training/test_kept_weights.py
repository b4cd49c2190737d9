"""Nothing that was trained is thrown away in silence, and nothing untrained is reported as if it were."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

from lgmml_torch.app.config import load_config
from lgmml_torch.app.train import train
from lgmml_torch.data.generated import letor_like
from lgmml_torch.estimator import LGMMLRanker

SMALL = ["data=generated_small", "local_metrics=sampled", "local_metrics.num_metrics=20", "loader.num_workers=0"]
QUIET = ["callbacks.progress=null", "logger=none", "name=t", "trainer.accelerator=cpu", "optimizer.lr=0.1"]


def run(folder: Path, *words: str) -> tuple[torch.Tensor, str, list[str]]:
    asked = [*SMALL, *QUIET, *words, f"paths.output_dir='{folder}'"]
    result = train(load_config(asked), asked)
    assert result is not None
    labels = [evaluation.policy for evaluation in result.evaluations]
    return result.model.phi.table.weight.detach(), (folder / "report.md").read_text(), labels


def test_weights_of_training_queries_are_kept_where_validation_cannot_judge_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New queries get ones, whatever is trained."""
    with caplog.at_level(logging.WARNING):
        weights, _, labels = run(tmp_path, "phi=per_query", "phi.policy=ones", "trainer.max_epochs=8")
    assert "validation cannot judge the weights that are trained" in caplog.text
    assert (weights != 1).any()
    assert (weights >= 0).all()
    assert labels[0] == "own Φ"


def test_weights_that_did_not_move_are_not_called_trained(tmp_path: Path) -> None:
    weights, report, labels = run(tmp_path, "phi=per_query", "trainer.max_epochs=0")
    assert (weights == 1).all()
    assert labels[0] == "own Φ, not trained"
    assert "own Φ, not trained" in report


def test_validation_chooses_what_new_queries_get(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """``python train.py local_metrics=sampled phi=per_query``: the best policy on validation lists, by the log."""
    with caplog.at_level(logging.INFO):
        weights, _, labels = run(tmp_path, "phi=per_query", "trainer.max_epochs=2", "keep=last")
    assert "cannot judge" not in caplog.text
    figures = re.search(r"Φ of new queries, validation ndcg@10: (.*)", caplog.text)
    assert figures is not None
    judged = dict(each.split(" ") for each in figures[1].split(", "))
    assert set(judged) == {"mean", "knn", "amortized", "ones"}
    assert judged[labels[1]] == max(judged.values())
    assert (weights != 1).any()


def test_the_estimator_keeps_them_or_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    data = letor_like(40, 5, num_documents=800, seed=1)
    settings = {"bank": "sampled", "num_metrics": 10, "phi": "per_query", "epochs": 3, "random_state": 0}
    ranker = LGMMLRanker(**settings, policy="ones", learning_rate=0.1)
    ranker.fit(data.features, data.labels, group=data.sizes)
    assert (ranker.model_.phi.table.weight != 1).any()
    chosen = LGMMLRanker(**settings, learning_rate=0.1).fit(data.features, data.labels, group=data.sizes)
    moved = bool((chosen.model_.phi.table.weight != 1).any())
    assert moved != ("The weights kept are those before training" in caplog.text)
