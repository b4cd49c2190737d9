"""One of each thing that can be added, added where docs/architecture.md says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers.logger import DummyLogger

from lgmml_torch.checks import LGMMLError, check_whole
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.fitting.bank import Bank, BankBuilder
from lgmml_torch.functional.presets import PRESETS, Preset, describe
from lgmml_torch.functional.score import KERNELS
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import POLICIES, RULES, Policy
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import LogModel
from lgmml_torch.training.loggers import LOGGER_OUTPUTS, LoggerOutput
from lgmml_torch.training.recipe import Recipe, TrainerSettings
from lgmml_torch.training.stages import prepare, train_phi
from tests.doors import small_data, small_model


def test_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(KERNELS, "cauchy", lambda d: -1 / (1 + d.square()))
    model, data = small_model(kernel="cauchy"), small_data(seed=2)
    dists = model.distances(data.features, data.offsets)
    expected = (model.phi.table.weight / (1 + dists.square())).sum(1)
    torch.testing.assert_close(model.score(data), expected.detach(), rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "model.safetensors")
    assert torch.equal(LGMML.load(tmp_path / "model.safetensors").score(data), model.score(data))
    found = model.explain(data, qid=data.qids[-1], document=0, over=0)
    assert found.difference == pytest.approx(0, abs=1e-12)


def random_metrics(
    data: RankingData, valid: RankingData | None = None, *, seed: int = 0, on_round: Any = None, count: int = 3
) -> Bank:
    generator = torch.Generator().manual_seed(seed)
    anchors = data.features[torch.randint(data.num_documents, (count,), generator=generator)]
    factors = torch.randn(count, data.num_features, 2, generator=generator)
    return Bank(LocalMetrics([MetricBlock(anchors, factors)], num_features=data.num_features), "rbf", torch.ones(count))


def test_a_bank_builder(tmp_path: Path) -> None:
    recipe = Recipe(list_rank_features, random_metrics)
    splits = {"train": small_data(20, seed=1), "valid": small_data(20, seed=2)}
    trained = train_phi(prepare(splits, recipe), recipe, TrainerSettings(tmp_path, {"max_epochs": 1}))
    assert (trained.model.kernel, trained.model.metrics.num_metrics) == ("rbf", 3)
    assert bool(torch.isfinite(trained.model.score(splits["valid"])).all())


def test_a_bank_builder_may_refuse_its_settings_early() -> None:
    @dataclass(frozen=True)
    class RandomBuilder(BankBuilder):
        count: int = 3

        def __post_init__(self) -> None:
            check_whole("count", self.count)

        def fit(self, data: RankingData, valid: RankingData | None, *, seed: int, on_round: Any) -> Bank:
            return random_metrics(data, valid, seed=seed, count=self.count)

    with pytest.raises(LGMMLError, match="`count` must be positive, got 0"):
        RandomBuilder(0)
    prepared = prepare({"train": small_data(20, seed=1)}, Recipe(list_rank_features, RandomBuilder(2)))
    assert prepared.bank.metrics.num_metrics == 2


def test_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "ours", Preset("ours", gain="linear", no_relevant=1.0))
    assert describe("ndcg@10", "ours").startswith("ndcg@10 (ours): gain y, ")
    found = evaluate(small_model(), small_data(seed=2), metrics=["ndcg@10"], preset="ours")
    assert found.skipped["ndcg@10"] == 0


def test_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the shared weights: another scale, the same order."""
    monkeypatch.setitem(RULES, "double", Policy(lambda phi, _: 2 * phi.table.weight))
    monkeypatch.setitem(POLICIES, "shared", (*POLICIES["shared"], "double"))
    model, data = small_model(), small_data(seed=2)
    torch.testing.assert_close(model.score(data, policy="double"), 2 * model.score(data))


def test_a_logger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[str] = []

    class Album(LoggerOutput):
        shows_pictures = True

        def picture(self, tag: str, figure: Any, step: int) -> None:
            shown.append(tag)

    monkeypatch.setitem(LOGGER_OUTPUTS, DummyLogger, Album)
    recipe = Recipe(list_rank_features, random_metrics)
    around = TrainerSettings(tmp_path, {"max_epochs": 1}, callbacks=(LogModel(),), loggers=(DummyLogger(),))
    train_phi(prepare({"train": small_data(20, seed=1)}, recipe), recipe, around)
    assert shown == ["metrics/spectrum", "metrics/learned", "metrics/learned"]  # before training, and what was kept
