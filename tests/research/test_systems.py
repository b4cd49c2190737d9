from __future__ import annotations

import pytest
import torch

from lgmml_torch.app.compose import build
from lgmml_torch.app.config import load_config
from lgmml_torch.checks import ConfigError
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.models.preprocess.compose import list_rank_features
from research.compare import NO_RANKS, PAPER_ONLY, SYSTEMS, System, find_system, with_list_ranks
from research.protocol import TOY, ranking_fold

SMALL = {  # options that make a fit quick; systems without need none
    "boosted": {"overrides": ["local_metrics.rounds=3", "trainer.max_epochs=1"]},
    "published": {"overrides": ["local_metrics.num_metrics=5", "search.init=[1.0]", "trainer.max_epochs=1"]},
    "sampled": {"overrides": ["trainer.max_epochs=1"]},
    "lightgbm": {"params": {"num_leaves": 4, "min_data_in_leaf": 2}, "num_rounds": 5},
    "gbrt": {"params": {"num_leaves": 4, "min_data_in_leaf": 2}, "num_rounds": 5},
    "xgboost": {"params": {"num_leaves": 4}, "num_rounds": 5},
}


@pytest.mark.parametrize("system", [*SYSTEMS, *PAPER_ONLY], ids=lambda system: system.name)
def test_every_system_gives_the_rows_it_names(system: System) -> None:
    fold = ranking_fold(TOY, 0)
    found = system.fit(fold, 0, SMALL.get(system.name.replace("+", " ").split()[0], {}))
    assert list(found.scores) == list(system.rows)
    for score in found.scores.values():
        assert score(fold.test).shape == (fold.test.num_documents,)
        assert torch.equal(score(fold.test), score(fold.test))
    if system.name != "random":
        learned = mean_ndcg(next(iter(found.scores.values()))(fold.train), fold.train)
        assert learned > mean_ndcg(find_system("random").fit(fold, 0, {}).scores["random"](fold.train), fold.train)


def test_names_are_one_each_and_a_wrong_one_is_refused() -> None:
    names = [system.name for system in (*SYSTEMS, *PAPER_ONLY)]
    assert len(names) == len(set(names))
    with pytest.raises(ConfigError, match="no ranking system 'boostd'; did you mean 'boosted'"):
        find_system("boostd")


def test_published_scores_known_queries_with_their_own_weights() -> None:
    fold = ranking_fold(TOY, 0)
    found = find_system("published").fit(fold, 0, SMALL["published"])
    assert found.own is not None
    assert not torch.equal(found.own(fold.train), found.scores["published ones"](fold.train))
    assert find_system("boosted").fit(fold, 0, SMALL["boosted"]).own is None


def test_list_ranks_stand_beside_the_features() -> None:
    data = ranking_fold(TOY, 0).test
    both = with_list_ranks(data)
    assert torch.equal(both.features[:, : data.num_features], data.features)
    assert both.num_features == 2 * data.num_features


def test_the_features_without_list_ranks_are_otherwise_the_default_s() -> None:
    steps = list_rank_features().spec()["args"]["steps"]
    cfg = load_config([*NO_RANKS, "paths.output_dir=unused"])
    found = build(cfg.preprocess).spec()["args"]["steps"]
    assert [step["name"] for step in steps] == ["remove_constant", "concat", *(s["name"] for s in found[2:])]
    assert found[0] == steps[0]
    assert found[1]["name"] == "quantile"
    assert found[2:] == steps[2:]
