"""What is fitted where nobody says: by the size of the data and a budget, and told."""

from __future__ import annotations

from typing import Any

import pytest
from lgmml_torch.training.ways import BUDGETS, budget_seconds, choose_way, find_budget

from lgmml_torch.app.compose import make_recipe, settle, way_overrides
from lgmml_torch.app.config import load_config
from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.training import ways
from lgmml_torch.training.module import Dropout


@pytest.mark.parametrize(
    ("queries", "documents", "features", "bank"),
    [
        (471, 9_630, 46, "boosted"),  # a fold of MQ2008
        (63, 9_219, 45, "boosted"),  # OHSUMED
        (53, 5_500, 136, "boosted"),
        (199, 900_000, 46, "boosted"),  # few queries, however long
        (500, 49_318, 110, "trained"),
        (7_274, 722_339, 110, "trained"),
        (1, 1, 1, "boosted"),
    ],
)
def test_the_size_decides(queries: int, documents: int, features: int, bank: str) -> None:
    way = choose_way(queries, documents, features)
    assert way.bank == bank
    assert f"{queries:,} training queries with {documents:,} documents of {features} features" in way.reason
    assert choose_way(queries, documents, features, trained=True).bank == "trained"


def test_more_data_means_fewer_epochs_and_less_dropout() -> None:
    found = [choose_way(documents // 100, documents, 110) for documents in (50_000, 200_000, 700_000, 4_000_000)]
    assert [way.epochs for way in found] == [15, 15, 11, 6]
    assert [way.dropout for way in found] == [
        Dropout(0.3, 0.2),
        Dropout(0.15, 0.2),
        Dropout(0.1, 0.1),
        Dropout(0.1, 0.1),
    ]


@pytest.mark.parametrize(
    ("documents", "features", "ramps"),
    [(700_000, 110, 6), (700_000, 46, 6), (700_000, 136, 4), (500_000, 700, 0), (4_000_000, 110, 0)],
)
def test_ramps_keep_within_width_and_memory(documents: int, features: int, ramps: int) -> None:
    assert choose_way(10_000, documents, features).ramps == ramps


def test_budgets_grow() -> None:
    fast, normal, thorough = (choose_way(5_000, 500_000, 100, name) for name in BUDGETS)
    assert fast.num_metrics * fast.rank < normal.num_metrics * normal.rank < thorough.num_metrics * thorough.rank
    assert fast.epochs < normal.epochs < thorough.epochs
    assert [choose_way(10, 100, 5, name).rounds for name in BUDGETS] == [100, 200, 400]


def test_a_time_buys_the_largest_budget_it_covers() -> None:
    def bought(time: str) -> str:
        found = find_budget(time, 700_000, 1_000)
        return next(name for name, budget in BUDGETS.items() if budget == found)

    assert [bought(time) for time in ("1s", "20m", "2h", "7200s", "120.0m")] == ["fast", "normal", *["thorough"] * 3]


@pytest.mark.parametrize("budget", ["quick", "60", "ten minutes", "-5s", "", 60])
def test_a_budget_that_is_none_is_refused(budget: Any) -> None:
    with pytest.raises(LGMMLError, match="`budget` must be fast, normal, thorough, or a time such as 60s or 10m, got"):
        budget_seconds(budget)
    with pytest.raises(LGMMLError, match="`budget` must be"):
        make_recipe(load_config([f"budget='{budget}'" if isinstance(budget, str) else f"budget={budget}"]))


class TestSettle:
    """The configuration follows the data, and people come first."""

    @pytest.fixture(autouse=True)
    def small_is_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ways, "TRAINED_DOCUMENTS", 100)
        monkeypatch.setattr(ways, "TRAINED_QUERIES", 10)

    @staticmethod
    def settled(*asked: str, queries: int = 20) -> Any:
        return settle(load_config(asked), asked, letor_like(queries, 4, num_documents=20 * queries))

    def test_large_data_is_trained_on(self) -> None:
        cfg = self.settled("seed=3")
        assert cfg.local_metrics["_target_"].endswith("start_trained")
        assert cfg.preprocess["_target_"].endswith("all_views")
        assert (cfg.seed, cfg.dropout.features, cfg.trainer.max_epochs) == (3, 0.3, 15)
        assert "trained by gradient for 15 epochs" in cfg.chosen

    def test_small_data_is_boosted_on(self) -> None:
        cfg = self.settled(queries=4)
        assert cfg.local_metrics["_target_"].endswith("fit_boosted")
        assert "boosted metrics, at most 200 rounds" in cfg.chosen

    def test_what_was_asked_for_stays(self) -> None:
        cfg = self.settled("trainer.max_epochs=3", "dropout.metrics=0.5", "+trainer.max_time=1")
        assert (cfg.trainer.max_epochs, cfg.dropout.metrics, cfg.dropout.features) == (3, 0.5, 0.3)

    @pytest.mark.parametrize(
        "asked",
        ["local_metrics=sampled", "local_metrics.rounds=3", "experiment=paper", "phi=per_query", "loss=softmax",
         "optimizer.lr=0.1", "preprocess=norm2", "+local_metrics.cap=10"],
    )  # fmt: skip
    def test_who_decides_is_not_chosen_for(self, asked: str) -> None:
        cfg, plain = self.settled(asked), load_config([asked])
        assert cfg.chosen.startswith("as configured (")
        cfg.chosen = None
        assert cfg == plain

    def test_what_a_way_does_can_be_typed(self) -> None:
        way = choose_way(20, 400, 4)
        assert self.settled() == settle(load_config([]), [], letor_like(20, 4, num_documents=400))
        typed = load_config(way_overrides(way))
        typed.chosen = way.reason
        assert self.settled() == typed
