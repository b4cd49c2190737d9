"""Pieces of training by themselves: what a recipe refuses, how a way is sized, what Φ sees before it is trained."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lgmml_torch.training.ways import choose_way, trained_recipe

from lgmml_torch.checks import LGMMLError
from lgmml_torch.fitting.sampled import fit_sampled
from lgmml_torch.functional.score import kernel, list_summary
from lgmml_torch.models.phi import Phi
from lgmml_torch.training.callbacks import OneCycle
from lgmml_torch.training.module import Dropout, LGMMLModule
from lgmml_torch.training.stages import PhiSettings, Recipe, rehearse
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
        with pytest.raises(LGMMLError, match="`num_metrics` must be"):
            rehearse(replace(tiny.recipe(), fit_bank=partial(fit_sampled, num_metrics=0)))

    def test_weights_to_come_back_with(self) -> None:
        with pytest.raises(LGMMLError, match="`keep` must be one of"):
            PhiSettings(keep="first")


class TestWays:
    @pytest.mark.parametrize(
        ("documents", "budget", "metrics", "rank", "epochs", "dropout"),
        [
            (20_000, "fast", 64, 8, 10, Dropout(0.3, 0.2)),
            (99_999, "normal", 128, 8, 15, Dropout(0.3, 0.2)),
            (100_000, "normal", 128, 8, 15, Dropout(0.15, 0.2)),
            (399_999, "thorough", 128, 16, 20, Dropout(0.15, 0.2)),
            (400_000, "thorough", 128, 16, 20, Dropout(0.1, 0.1)),
            (750_000, "normal", 128, 8, 10, Dropout(0.1, 0.1)),
            (1_500_000, "thorough", 128, 16, 13, Dropout(0.1, 0.1)),
            (9_000_000, "normal", 128, 8, 6, Dropout(0.1, 0.1)),
            (9_000_000, "fast", 64, 8, 4, Dropout(0.1, 0.1)),
        ],
    )
    def test_sizes(self, documents: int, budget: str, metrics: int, rank: int, epochs: int, dropout: Dropout) -> None:
        way = choose_way(200, documents, 40, budget)
        assert (way.bank, way.num_metrics, way.rank, way.epochs) == ("trained", metrics, rank, epochs)
        assert way.dropout == dropout

    def test_a_time_buys_work_on_all_columns(self) -> None:
        """Of 9 columns a feature, 900: 11 epochs of 700,000 documents in 1024 directions are 946 seconds."""
        found = [choose_way(200, 700_000, 100, budget).num_metrics for budget in ("940s", "950s")]
        assert found == [64, 128]

    def test_shares_of_a_cycle_are_shares(self) -> None:
        for wrong in ({"start": 1.5}, {"warmup": -0.5}):
            with pytest.raises(LGMMLError, match=rf"`{next(iter(wrong))}` must lie in \[0, 1\]"):
                OneCycle(**wrong)

    def test_where_training_begins(self) -> None:
        found = [choose_way(q, n, 40).bank for q, n in ((200, 20_000), (199, 20_000), (200, 19_999))]
        assert found == ["trained", "boosted", "boosted"]
        assert choose_way(10, 100, 40, trained=True).bank == "trained"
        assert [choose_way(10, 100, 40, budget).rounds for budget in ("fast", "normal", "thorough")] == [100, 200, 400]

    def test_the_recipe_of_a_way(self) -> None:
        way = choose_way(200, 20_000, 40, "fast")
        recipe = trained_recipe(way, 7, options={"start": "ratio"}, loader={"batch_size": 5}, sparse=False)
        assert recipe.seed == 7
        assert recipe.fit_bank.keywords == {"num_metrics": 64, "rank": 8, "start": "ratio"}  # type: ignore[attr-defined]
        settings = recipe.phi
        assert (settings.loader, settings.step_size, settings.dropout) == ({"batch_size": 5}, OneCycle(), way.dropout)
        for given, rate in ((None, 2e-3), (0.5, 0.5)):
            made = trained_recipe(way, 7, rate=given).phi.optimizer([torch.nn.Parameter(torch.zeros(1))])
            assert isinstance(made, torch.optim.AdamW)
            assert (made.defaults["lr"], made.defaults["weight_decay"]) == (rate, 0.3)


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
