"""Bags: the merged bank scores as the mean of its members, and one member as the bank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.fitting.bagged import SEED_STEP, BaggedBuilder, query_share, score_spread
from lgmml_torch.fitting.boosted import fit_boosted
from lgmml_torch.functional.losses import position_curve
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

SETTINGS: dict[str, Any] = {"rounds": 6, "candidates": 6, "evaluate_every": 2}


@pytest.fixture(scope="module")
def data() -> list[RankingData]:
    raw = letor_like(24, 6, num_documents=300, seed=2)
    return [
        part.replace(features=list_rank_features().fit_transform(part.features, part.offsets))
        for part in raw.split((0.7, 0.3), seed=0)
    ]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_merged_bank_scores_as_the_mean_of_its_standardised_members(data: list[RankingData], share: float) -> None:
    """Each of another seed, and of queries of its own where it has a share of them; the bag is judged as one."""
    train, valid = data
    train = train.replace(positions=torch.arange(train.num_documents) % 4 + 1)
    told: list[tuple[int, int]] = []
    bag = BaggedBuilder(members=3, share=share, **SETTINGS)(
        train, valid, seed=3, on_round=lambda done, info: told.append((done, info.total)), measure="mrr"
    )
    seeds = [3, 3 + SEED_STEP, 3 + 2 * SEED_STEP]
    parts = [train if share == 1 else query_share(train, share, seed) for seed in seeds]
    assert len({part.qids for part in parts}) == (1 if share == 1 else 3)
    banks = [
        fit_boosted(part, valid, seed=seed, measure="mrr", **SETTINGS) for part, seed in zip(parts, seeds, strict=True)
    ]
    spreads = [score_spread(bank.score(train.features), train.offsets) for bank in banks]
    expected = sum(
        bank.score(valid.features).double() / spread / 3 for bank, spread in zip(banks, spreads, strict=True)
    )
    torch.testing.assert_close(bag.score(valid.features).double(), expected, rtol=1e-4, atol=1e-5)
    bias = sum(bank.position_bias / (3 * spread) for bank, spread in zip(banks, spreads, strict=True))  # type: ignore[operator]
    assert bag.position_bias is not None
    torch.testing.assert_close(bag.position_bias, bias)
    assert bag.history == {
        "members": 3,
        "spreads": pytest.approx(spreads),
        "best_round": [bank.history["best_round"] for bank in banks],
        "best_valid_ndcg": mean_ndcg(bag.score(valid.features), valid),
        "position_bias": position_curve(bag.position_bias, train),
    }
    assert told == [(done, 18) for done in range(1, 19)]
    shapes = [tuple(block.factors.shape[1:]) for block in bag.metrics.iter_blocks()]
    assert len(shapes) == len(set(shapes))  # members share blocks: as many calls to score as one member needs


def test_one_member_ranks_as_the_boosted_bank(data: list[RankingData]) -> None:
    train, valid = data
    alone, bag = fit_boosted(train, seed=1, **SETTINGS), BaggedBuilder(members=1, **SETTINGS)(train, seed=1)
    assert torch.equal(alone.score(valid.features).argsort(), bag.score(valid.features).argsort())
    assert bag.history["best_valid_ndcg"] is None
    assert "position_bias" not in bag.history
    assert BaggedBuilder(rounds=1, candidates=3)(train).history["members"] > 1


def test_a_bag_is_saved_and_scored_as_one_model(tmp_path: Path) -> None:
    raw = letor_like(12, 6, num_documents=150, seed=4)
    features = list_rank_features()
    bag = BaggedBuilder(members=2, **SETTINGS)(raw.replace(features=features.fit_transform(raw.features, raw.offsets)))
    assert bag.phi is not None
    model = LGMML(features, bag.metrics, Phi(raw.num_queries, bag.metrics.num_metrics, init=bag.phi))
    model.save(tmp_path / "bag.safetensors")
    assert torch.equal(LGMML.load(tmp_path / "bag.safetensors").score(raw), model.score(raw))


def test_a_share_keeps_whole_queries_in_order(data: list[RankingData]) -> None:
    part = query_share(data[0], 0.5, seed=0)
    assert part.num_queries == round(0.5 * data[0].num_queries)
    assert list(part.qids) == sorted(part.qids, key=list(data[0].qids).index)
    assert part.qids != query_share(data[0], 0.5, seed=1).qids
    assert part.qids == query_share(data[0], 0.5, seed=0).qids
    assert query_share(data[0], 1e-9, seed=0).num_queries == 1


def test_the_spread_is_around_the_means_of_lists() -> None:
    scores = torch.tensor([5.0, 5.0, 1.0, 3.0, 8.0], dtype=torch.float64)
    offsets = torch.tensor([0, 2, 2, 5])  # the first list says nothing, the second is empty
    around = sum((x - 4.0) ** 2 for x in (1.0, 3.0, 8.0)) / 5
    assert score_spread(scores, offsets) == pytest.approx(around**0.5)
    assert score_spread(torch.tensor([0.0, 1e-4]), torch.tensor([0, 2])) == pytest.approx(5e-5)
    with pytest.raises(DataError, match="scores all documents of every training list alike"):
        score_spread(torch.ones(3), torch.tensor([0, 3]))
