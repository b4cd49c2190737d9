"""What is fitted by default: by the size of the data and a budget, and what the configuration makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lgmml_torch.app.compose import recipe_of, settle
from lgmml_torch.app.config import load_config
from lgmml_torch.checks import LGMMLError
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.models.encode import CategorySettings
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.defaults import BUDGETS, Sizes, choose_defaults
from lgmml_torch.training.defaults import make_recipe as estimator_recipe
from lgmml_torch.training.losses import Warp


def test_the_size_decides() -> None:
    cases = {
        (471, 9_630, 46): "boosted",  # a fold of MQ2008
        (199, 900_000, 46): "boosted",  # few queries, however long
        (500, 49_318, 110): "trained",
        (7_274, 722_339, 110): "trained",
        (1, 1, 1): "boosted",
    }
    for given, bank in cases.items():
        sizes = Sizes(*given)
        chosen = choose_defaults(sizes)
        assert chosen.bank == bank
        assert f"{sizes}, budget normal: {bank} metrics (chosen for" in chosen.reason
        assert choose_defaults(sizes, {"bank": "trained"}).bank == "trained"
        assert choose_defaults(sizes, start="sampled").bank == "sampled"
    assert str(Sizes(1_000, 20_000, 5)) == "1,000 training queries with 20,000 documents of 5 features"


def test_more_data_means_fewer_epochs_larger_batches_and_less_dropout() -> None:
    found = [choose_defaults(Sizes(size // 100, size, 110)) for size in (50_000, 200_000, 700_000, 4_000_000)]
    epochs = [chosen.epochs for chosen in found]
    dropouts = [(chosen.dropout.features, chosen.dropout.metrics) for chosen in found]
    assert epochs == sorted(epochs, reverse=True)
    for shares in zip(*dropouts, strict=True):
        assert list(shares) == sorted(shares, reverse=True)
        assert shares[-1] > 0
    assert epochs[0] > epochs[1] >= epochs[2] > epochs[3]
    assert dropouts[0] > dropouts[2]
    batches = [chosen.batch_size for chosen in found]
    assert batches == sorted(batches)
    assert batches[1] < batches[2]
    assert found[0].ramps < found[1].ramps
    for chosen in found:
        assert f"{chosen.epochs} epochs" in chosen.reason
        assert 5 <= chosen.epochs / chosen.validate_every < 10
        assert f", one validation per {chosen.validate_every} epochs" in chosen.reason or chosen.validate_every == 1
    assert found[0].validate_every > 1
    assert choose_defaults(Sizes(500, 50_000, 110), {"epochs": 15}).validate_every == 1


def test_the_reason_leaves_out_what_was_asked_for() -> None:
    large, small = Sizes(7_274, 722_339, 110), Sizes(471, 9_630, 46)
    for sizes, asked, words in (
        (large, {"epochs": 2}, "epochs"),
        (large, {"bank": "trained", "num_metrics": 9}, "of rank"),
        (large, {"feature_dropout": 0.5}, "of features,"),
        (small, {"rounds": 5}, "rounds"),
    ):
        assert words in f"{choose_defaults(sizes).reason},"
        assert words not in f"{choose_defaults(sizes, asked).reason.partition(': ')[2]},"


def test_columns_keep_within_width_and_memory() -> None:
    """At most 1,000 columns and 4 GiB, and not fewer than these allow."""
    for documents in (30_000, 700_000, 1_073_741, 1_073_742, 4_000_000):
        columns = choose_defaults(Sizes(10_000, documents, 110)).max_columns
        assert columns <= 1_000
        assert columns * 4 * documents <= 4 << 30
        assert columns == 1_000 or (columns + 1) * 4 * documents > 4 << 30


def test_budgets_grow() -> None:
    sizes = Sizes(5_000, 500_000, 100)
    fast, normal, thorough = (choose_defaults(sizes, {"budget": name}) for name in BUDGETS)
    assert fast.num_metrics * fast.rank < normal.num_metrics * normal.rank < thorough.num_metrics * thorough.rank
    assert fast.epochs < normal.epochs < thorough.epochs
    rounds = [choose_defaults(Sizes(10, 100, 5), {"budget": name}).rounds for name in BUDGETS]
    assert rounds[0] < rounds[1] < rounds[2]
    for documents in (20_000, 1_000_000_000):  # where the least and the most epochs hold
        sizes = Sizes(5_000, documents, 100)
        epochs = [choose_defaults(sizes, {"budget": name}).epochs for name in BUDGETS]
        assert 0 < epochs[0] < epochs[1] < epochs[2]


def test_whoever_fits_refuses_lists_of_nothing() -> None:
    """They have defaults all the same."""
    for bank in ("boosted", "trained"):
        chosen = choose_defaults(Sizes(0, 0, 0), {"bank": bank, "budget": "10m"})
        assert chosen.epochs > 0
        assert chosen.max_columns == 1_000


def test_a_time_buys_the_largest_budget_it_covers() -> None:
    def bought(time: str) -> str:  # 3 columns and 6 ramps for each of 100 features
        rounds = choose_defaults(Sizes(7_000, 700_000, 100), {"budget": time}).rounds
        return next(name for name, budget in BUDGETS.items() if budget.rounds == rounds)

    assert [bought(time) for time in ("1s", "20m", "2h", "7200s", "120.0m")] == ["fast", "normal", *["thorough"] * 3]
    for name, budget in BUDGETS.items():
        assert bought(f"{budget.seconds_for(700_000, 900) + 1:.0f}s") == name


def test_a_time_pays_for_the_ramps_of_features() -> None:
    """Three views and up to six ramps of each of 100 features."""
    for features, columns in ((100, 900), (250, 1_000), (500, 1_500)):  # in a thousand columns, or without ramps
        needed, sizes = BUDGETS["thorough"].seconds_for(700_000, columns), Sizes(5_000, 700_000, features)
        bought = [choose_defaults(sizes, {"budget": f"{needed + extra:.0f}s"}).epochs for extra in (-60, 60)]
        assert bought[0] < bought[1] == choose_defaults(sizes, {"budget": "thorough"}).epochs


@pytest.mark.parametrize("budget", ["quick", "-5s", 60])
def test_a_budget_that_is_none_is_refused(budget: Any) -> None:
    sentence = "`budget` must be fast, normal, thorough, or a time such as 60s or 10m, got"
    with pytest.raises(LGMMLError, match=sentence):
        choose_defaults(Sizes(10, 100, 5), {"budget": budget})
    with pytest.raises(LGMMLError, match=sentence):
        recipe_of(load_config([f"budget='{budget}'" if isinstance(budget, str) else f"budget={budget}"]))


def test_trained_metrics_fill_the_directions_of_their_budget() -> None:
    for name, budget in BUDGETS.items():
        chosen = choose_defaults(Sizes(5_000, 500_000, 100), {"budget": name})
        assert chosen.rank > 0
        assert chosen.num_metrics * chosen.rank == budget.directions
        recipe = estimator_recipe(LGMMLRanker(budget=name).get_params(), chosen, 0)
        settings = recipe.phi.optimizer([torch.nn.Parameter(torch.zeros(1))]).defaults
        assert settings["lr"] > 0
        assert settings["weight_decay"] > 0


def test_a_setting_of_other_metrics_is_explained_and_an_unknown_one_is_unknown() -> None:
    for words, sentence in (
        (["local_metrics.num_metrics=5"], "belongs to one kind of metrics, so name it: bank='sampled'"),
        (["local_metrics.colour=5"], "belongs to one kind of metrics, so name it: bank='boosted'"),
        (["local_metrics=boosted", "local_metrics.num_metrics=5"], "has no effect on boosted metrics"),
        (["local_metrics=boosted", "local_metrics.colour=5"], "unknown setting 'local_metrics.colour'"),
        (["experiment=paper", "local_metrics.rounds=5"], "unknown setting 'local_metrics.rounds'"),
        (["loss.colour=5"], "unknown setting 'loss.colour'"),
    ):
        with pytest.raises(LGMMLError, match=sentence):
            load_config(words)


class TestSettle:
    """The configuration follows the data, and what a user asks for comes first."""

    @staticmethod
    def settled(*asked: str, queries: int = 200) -> Any:
        data = RankingData.from_arrays(
            torch.rand(100 * queries, 2), torch.arange(100 * queries) % 3, group=[100] * queries
        )
        return settle(load_config(asked), asked, {"train": data})

    def test_the_data_decide(self) -> None:
        cfg = self.settled("seed=3")
        assert cfg.local_metrics["_target_"].endswith("TrainedBuilder")
        assert cfg.preprocess["_target_"].endswith("all_views")
        chosen = choose_defaults(Sizes(200, 20_000, 2))
        assert (cfg.seed, cfg.trainer.max_epochs, cfg.chosen) == (3, chosen.epochs, chosen.reason)
        small = self.settled(queries=4)
        assert small.local_metrics["_target_"].endswith("BoostedBuilder")
        assert "boosted metrics" in small.chosen
        typed = load_config(  # what is chosen can be typed
            [
                "experiment=trained",
                f"local_metrics.num_metrics={chosen.num_metrics}",
                f"local_metrics.rank={chosen.rank}",
                f"trainer.max_epochs={chosen.epochs}",
                f"trainer.check_val_every_n_epoch={chosen.validate_every}",
                f"dropout.features={chosen.dropout.features}",
                f"dropout.metrics={chosen.dropout.metrics}",
                f"preprocess.ramps={chosen.ramps}",
                f"preprocess.max_columns={chosen.max_columns}",
                f"loader.batch_size={chosen.batch_size}",
            ]
        )
        typed.chosen = chosen.reason
        assert self.settled() == typed

    def test_what_was_asked_for_stays(self) -> None:
        cfg = self.settled("trainer.max_epochs=3", "dropout.metrics=0.5", "+trainer.max_time=1", "preprocess=norm2")
        assert (cfg.trainer.max_epochs, cfg.dropout.metrics, cfg.trainer.max_time) == (3, 0.5, 1)
        assert cfg.dropout.features == choose_defaults(Sizes(200, 20_000, 2)).dropout.features
        assert cfg.preprocess == load_config(["preprocess=norm2"]).preprocess
        assert self.settled("local_metrics=sampled").local_metrics["_target_"].endswith("SampledBuilder")
        named = self.settled("local_metrics=boosted", "local_metrics.rounds=3")
        assert named.local_metrics.rounds == 3
        paper = self.settled("experiment=paper")
        assert paper.chosen == "as configured"


def test_what_was_asked_for_is_in_the_recipe() -> None:
    asked = {"max_one_hot": 3, "measure": "map", "features": "all", "phi": "per_query", "policy": "knn", "margin": 0.3}
    asked |= {"batch_size": 5, "max_draws": 4, "learning_rate": 0.25, "kernel": "rbf", "num_metrics": 9}
    for bank, sparse in (("sampled", True), ("trained", False)):
        chosen = choose_defaults(Sizes(500, 50_000, 10), {"bank": bank})
        recipe = estimator_recipe(LGMMLRanker(bank=bank, loss="warp", **asked).get_params(), chosen, 7)
        assert (recipe.seed, recipe.measure, recipe.features) == (7, "map", "all")
        assert recipe.categories == CategorySettings(3)
        assert recipe.phi.loss == Warp(0.3)
        assert recipe.phi.loader == {"batch_size": 5, "max_draws": 4}
        assert recipe.phi.optimizer([torch.nn.Parameter(torch.zeros(1))]).defaults["lr"] == 0.25
        phi = recipe.make_phi(6, 9)
        assert (phi.mode, phi.policy, phi.sparse) == ("per_query", "knn", sparse)
        assert (recipe.builder.num_metrics, recipe.builder.kernel) == (9, "rbf")  # type: ignore[attr-defined]
