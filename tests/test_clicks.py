"""Models of clicks, simulated from known relevance under a mediocre policy, judged by that relevance on new queries."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, DataError, LGMMLError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.models.preprocess.steps import ListRank
from lgmml_torch.ragged import RankingData
from research.clicks import ClickLog, simulate_clicks

# Of NDCG@10, mean over the seeds; written down before these worlds were run. Smaller ones do not show it: with eight
# features one alone is all of the relevance, and the policy knows it; of some hundred clicks, inverse propensities are
# noise.
MARGIN = 0.02
SEEDS = (20, 21, 22)
WAYS: dict[str, dict[str, Any]] = {
    "boosted": {"bank": "boosted", "rounds": 40, "epochs": 1},
    "trained": {"bank": "trained", "epochs": 5, "bank_options": {"num_metrics": 16, "rank": 4}},
}


class World(NamedTuple):
    log: ClickLog
    test: RankingData


@cache
def world(seed: int) -> World:
    """1000 lists as a policy showed them that goes by one good feature and, twice as much, by one that says nothing."""
    data = letor_like(1150, 12, num_documents=23_000, regions=1, noise=0.3, seed=seed)
    train, test = data.select(range(1000)), data.select(range(1000, 1150))
    ranks = ListRank().fit_transform(train.features, train.offsets)
    ranks = (ranks - ranks.mean(0)) / ranks.std(0)
    says = (ranks * (train.labels - train.labels.mean())[:, None]).mean(0)
    good, dull = int(says.abs().argmax()), int(says.abs().argmin())
    policy = 0.5 * says[good].sign() * ranks[:, good] + ranks[:, dull]
    return World(simulate_clicks(train, policy, seed=seed), test)


def rows_of(data: RankingData) -> dict[str, Any]:
    return {"X": data.features, "y": data.labels, "group": data.sizes}


def learned(way: str, seed: int, **extras: Any) -> tuple[LGMMLRanker, float]:
    log, test = world(seed)
    ranker = LGMMLRanker(**WAYS[way], validation_fraction=0, random_state=seed).fit(**rows_of(log.data), **extras)
    return ranker, mean_measure(ranker.model_.score(test), test)


def inverse_propensities(log: ClickLog) -> Tensor:
    return torch.where(log.data.labels > 0, 1 / log.propensities, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_debiased_models_beat_the_biased_one(way: str) -> None:
    biased, by_position, by_weight = [], [], []
    for seed in SEEDS:
        log = world(seed).log
        biased.append(learned(way, seed)[1])
        ranker, value = learned(way, seed, position=log.data.positions)
        by_position.append(value)
        by_weight.append(learned(way, seed, sample_weight=inverse_propensities(log))[1])
        curve = ranker.position_bias_
        assert curve is not None
        assert list(curve) == list(range(1, 11))
        far, near = np.mean([curve[p] for p in range(6, 11)]), np.mean([curve[p] for p in (2, 3, 4)])
        assert far < near < curve[1] == 0
        assert near == pytest.approx(-np.log([2, 3, 4]).mean(), abs=0.8)  # people look at the second half as often
    base = np.mean(biased)
    assert np.mean(by_position) > base + MARGIN, (biased, by_position)
    assert np.mean(by_weight) > base + MARGIN, (biased, by_weight)


def test_positions_that_mean_nothing_change_little() -> None:
    log, _ = world(SEEDS[0])
    shuffled = torch.randint(1, 11, (log.data.num_documents,), generator=torch.Generator().manual_seed(0))
    ranker, value = learned("boosted", SEEDS[0], position=shuffled)
    assert max(abs(bias) for bias in ranker.position_bias_.values()) < 0.6
    assert value == pytest.approx(learned("boosted", SEEDS[0])[1], abs=0.03)


def test_scores_do_without_positions() -> None:
    ranker, _ = learned("boosted", SEEDS[0], position=world(SEEDS[0]).log.data.positions)
    test = world(SEEDS[0]).test
    again = ranker.predict(test.features, group=test.sizes)
    assert again.shape == (test.num_documents,)
    assert "position_bias" not in dict(ranker.model_.state_dict())


def test_held_out_lists_are_judged_where_they_were_shown() -> None:
    """Features that say nothing: clicks can be ranked by the places alone, and validation sees that they are."""
    log, _ = world(SEEDS[0])
    rows = {"group": log.data.sizes, "position": log.data.positions}
    settings = {"bank": "boosted", "rounds": 10, "epochs": 0, "random_state": 0}
    X = torch.randn(log.data.num_documents, 2, generator=torch.Generator().manual_seed(0))
    ranker = LGMMLRanker(**settings).fit(X, log.data.labels, **rows)
    assert ranker.bank_history_["valid_ndcg"][-1] > 0.6
    blind = LGMMLRanker(**settings).fit(X, log.data.labels, group=log.data.sizes)
    assert blind.bank_history_["valid_ndcg"][-1] < 0.55
    assert ranker.validation_curve_[0] > blind.validation_curve_[0]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([1, 2], r"`positions` must have one entry per row, 3, got 2"),
        ([1, 2, -1], r"`positions` must hold whole numbers from 0 to 65,535, got -1 at row 3"),
        ([1, 2.5, 1], r"`positions` must hold whole numbers from 0 to 65,535, got 2.5 at row 2"),
        ([1, np.nan, 1], r"`positions` must hold whole numbers from 0 to 65,535, got nan at row 2"),
        ([1, 70_000, 1], r"`positions` must hold whole numbers from 0 to 65,535, got 70000 at row 2"),
        (["a", "b", "c"], r"`positions` must be a list of whole numbers"),
    ],
)
def test_bad_positions(positions: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        RankingData.from_arrays([[1.0], [2.0], [3.0]], [0, 1, 0], qid=[1, 1, 1], positions=positions)


def test_sampled_metrics_know_nothing_of_positions() -> None:
    log = world(SEEDS[0]).log
    ranker = LGMMLRanker(bank="sampled", num_metrics=5, epochs=1)
    with pytest.raises(ConfigError, match="Position debiasing works only with boosted or trained metrics"):
        ranker.fit(**rows_of(log.data), position=log.data.positions)


def test_clicks_follow_the_model() -> None:
    data = RankingData.from_arrays(
        torch.zeros(40_000, 1), torch.arange(40_000) % 2, group=[2] * 20_000, feature_names=("x",)
    )
    log = simulate_clicks(data, data.labels, eta=1.0, noise=0.2, seed=1)  # the relevant document is always first
    clicks, shown = log.data.labels, log.data.positions
    assert shown is not None
    assert float(clicks[shown == 1].mean()) == pytest.approx(1.0)
    assert float(clicks[shown == 2].mean()) == pytest.approx(0.2 / 2, abs=0.01)
    assert torch.equal(log.propensities, 1 / shown.float())
    everything = simulate_clicks(data, -data.labels, eta=0.0, noise=0.0)
    assert float(everything.data.labels.mean()) == 0.5
    with pytest.raises(LGMMLError, match="`noise` must lie in"):
        simulate_clicks(data, data.labels, noise=2.0)
