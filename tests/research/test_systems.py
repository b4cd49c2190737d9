from __future__ import annotations

import pytest
import torch

from lgmml_torch.checks import ConfigError
from lgmml_torch.functional.measures import mean_measure
from research.compare import PAPER_ONLY, SYSTEMS, find_system, with_list_ranks
from research.protocol import TOY, ranking_fold

SMALL = {  # options that make a fit quick; systems without need none
    "boosted": {"overrides": ["local_metrics.rounds=3", "trainer.max_epochs=1"]},
    "published": {"overrides": ["local_metrics.num_metrics=5", "search.init=[1.0]", "trainer.max_epochs=1"]},
    "sampled": {"overrides": ["trainer.max_epochs=1"]},
    "lightgbm": {"params": {"num_leaves": 4, "min_data_in_leaf": 2}, "num_rounds": 5},
    "gbrt": {"params": {"num_leaves": 4, "min_data_in_leaf": 2}, "num_rounds": 5},
    "xgboost": {"params": {"num_leaves": 4}, "num_rounds": 5},
}


def test_every_system_gives_the_rows_it_names() -> None:
    fold = ranking_fold(TOY, 0)
    chance = mean_measure(find_system("random").fit(fold, 0, {}).scores["random"](fold.train), fold.train)
    for system in (*SYSTEMS, *PAPER_ONLY):
        found = system.fit(fold, 0, SMALL.get(system.name.replace("+", " ").split()[0], {}))
        assert list(found.scores) == list(system.rows), system.name
        for score in found.scores.values():
            assert score(fold.test).shape == (fold.test.num_documents,), system.name
        learned = mean_measure(next(iter(found.scores.values()))(fold.train), fold.train)
        assert system.name == "random" or learned > chance, system.name


def test_names_are_one_each_and_a_wrong_one_is_refused() -> None:
    names = [system.name for system in (*SYSTEMS, *PAPER_ONLY)]
    assert len(names) == len(set(names))
    with pytest.raises(ConfigError, match="no ranking system 'boostd'; did you mean 'boosted'"):
        find_system("boostd")


def test_list_ranks_stand_beside_the_features() -> None:
    data = ranking_fold(TOY, 0).test
    both = with_list_ranks(data)
    assert torch.equal(both.features[:, : data.num_features], data.features)
    assert both.num_features == 2 * data.num_features
