"""Pieces of training by themselves: what a recipe refuses, how a way is sized, what Φ sees before it is trained."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import DummyLogger

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.fitting.boosted import BoostedBuilder, fit_boosted
from lgmml_torch.fitting.sampled import SampledBuilder
from lgmml_torch.fitting.trained import TrainedBuilder, start_trained
from lgmml_torch.functional.score import kernel, list_summary
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.training.callbacks import Horizon, OneCycle, bank_curve
from lgmml_torch.training.module import LGMMLModule
from lgmml_torch.training.recipe import PhiSettings, Recipe, TrainerSettings, rehearse
from lgmml_torch.training.resume import KeepCheckpoints, Start
from tests.training import tiny


class TestRehearsal:
    def recipe(self, **phi: Any) -> Recipe:
        plain = tiny.recipe()
        return replace(plain, phi=replace(plain.phi, **phi))

    def test_what_works_is_let_pass(self) -> None:
        rehearse(self.recipe())

    @pytest.mark.parametrize(
        ("phi", "message"),
        [
            ({"loader": {"batch_sise": 3}}, "`loader`: .*batch_sise"),
            ({"loader": {"batch_size": 0}}, "`batch_size` must be"),
            ({"loader": {"num_workers": -1}}, "`num_workers` must be"),
            ({"deviation_penalty": -1.0}, "`deviation_penalty` must be"),
            ({"optimizer": partial(torch.optim.SGD, rate=1.0)}, "`optimizer`: .*rate"),
            ({"optimizer": partial(torch.optim.SGD, lr=-1.0)}, "`optimizer`: .*learning rate"),
            ({"optimizer": partial(torch.optim.Adam, lr=1.0)}, "Adam takes no sparse gradients"),
        ],
    )
    def test_what_does_not_is_said_without_data(self, phi: dict[str, Any], message: str) -> None:
        with pytest.raises(LGMMLError, match=message):
            rehearse(self.recipe(**phi))

    def test_builders_are_asked(self) -> None:
        with pytest.raises(LGMMLError, match="`rounds` must be"):
            rehearse(replace(tiny.recipe(), fit_bank=BoostedBuilder(rounds=0)))

    def test_weights_to_come_back_with(self) -> None:
        with pytest.raises(LGMMLError, match="`keep` must be one of"):
            PhiSettings(keep="first")


def test_shares_of_a_cycle_are_shares() -> None:
    for wrong in ({"start": 1.5}, {"warmup": -0.5}):
        with pytest.raises(LGMMLError, match=rf"`{next(iter(wrong))}` must lie in \[0, 1\]"):
            OneCycle(**wrong)


@pytest.mark.parametrize("mode", ["amortized", "per_query", "shared"])
def test_before_training_lists_are_looked_at_where_weights_depend_on_them(mode: str) -> None:
    prepared = tiny.prepared()
    model = prepared.model(lambda queries, metrics: Phi(queries, metrics, mode=mode))
    module = LGMMLModule(model.spec(), model)
    data = tiny.splits()[0]
    dists = model.distances(data.features, data.offsets)
    module.attach("train", data, dists)
    module.on_fit_start()
    expected = list_summary(kernel(dists, model.kernel), data.offsets)
    torch.testing.assert_close(model.phi.summaries, expected if mode != "shared" else expected[:0])


def test_a_cycle_rises_and_falls_along_half_a_cosine_each() -> None:
    rule, horizon = OneCycle(warmup=0.2, start=0.1), Horizon(queries=3, updates=100)
    found = [rule(updates, horizon) for updates in (0, 10, 20, 60, 100, 150)]
    assert found == pytest.approx([0.1, 0.55, 1.0, 0.5, 0.0, 0.0], abs=1e-12)
    assert OneCycle(warmup=1.0)(100, horizon) == 1.0  # up to the end
    assert OneCycle()(0, Horizon(queries=3, updates=0)) > 0  # of no epochs
    usual = [OneCycle()(updates, horizon) for updates in (0, 5, 10, 50, 99)]
    assert 0 < usual[0] < usual[1] < usual[2] > usual[3] > usual[4] > 0


def test_bars_come_last_so_that_they_find_all_values(tmp_path: Path) -> None:
    bar, first, second = pl.callbacks.TQDMProgressBar(), pl.Callback(), pl.Callback()
    keeper = KeepCheckpoints(tmp_path, monitor="val/ndcg@10", every_n_steps=9, seed=0)
    settings = {"accelerator": "cpu", "enable_progress_bar": True}
    trainer = TrainerSettings(tmp_path, settings, [bar, first, second]).make_trainer(keeper, validated=True)
    own = [callback for callback in trainer.callbacks if callback in (bar, first, second)]
    assert own == [first, second, bar]
    assert trainer.callbacks.index(bar) > trainer.callbacks.index(second) + 1  # values are reduced between them


def test_a_cycle_needs_an_end() -> None:
    with pytest.raises(ConfigError, match="`max_epochs` must be a number for one cycle of the learning rate"):
        OneCycle()(3, Horizon(queries=3, updates=-10))


def test_numbers_of_rounds_go_to_every_logger() -> None:
    told: list[tuple[dict[str, float], int]] = []

    class Noting(DummyLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            told.append((metrics, step))

    send = bank_curve([Noting(), Noting()])
    send(1, SimpleNamespace(total=5))
    send(3, SimpleNamespace(total=5, valid_ndcg=0.5))
    assert told == [({"bank/valid_ndcg": 0.5}, 3)] * 2


def test_only_boosted_and_trained_metrics_grow() -> None:
    for builder in (BoostedBuilder(rounds=0), TrainedBuilder()):
        rehearse(replace(tiny.recipe("shared"), fit_bank=builder, grows=True))
    with pytest.raises(LGMMLError, match="`grow` must be false for metrics that are neither boosted nor trained"):
        rehearse(replace(tiny.recipe("shared"), fit_bank=SampledBuilder(), grows=True))


def test_what_an_earlier_models_metrics_are() -> None:
    data = tiny.splits()[0]
    banks = {
        "trained": start_trained(data, num_metrics=3, rank=2),
        "boosted": fit_boosted(data, rounds=1, candidates=3),
        "full rank": start_trained(data, num_metrics=3, rank=99),
    }
    for name, bank in banks.items():
        model = LGMML(Chain([]).fit(data.features, data.offsets), bank.metrics, Phi(1, bank.metrics.num_metrics))
        assert Start.of(model).kind == ("trained" if name == "trained" else "boosted"), name


def test_a_module_trains_as_it_comes() -> None:
    model = tiny.prepared().model(Phi)
    (group,) = LGMMLModule(model.spec(), model).configure_optimizers().param_groups
    assert group["lr"] > 0
