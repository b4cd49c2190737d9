"""Bags: the merged bank scores as the mean of its members, and one member as the bank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.fitting import bagged
from lgmml_torch.fitting.bagged import SEED_STEP, fit_bagged, query_share, score_spread
from lgmml_torch.fitting.bank import Bank, merge_banks
from lgmml_torch.fitting.boosted import fit_boosted
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

SETTINGS: dict[str, Any] = {"rounds": 6, "candidates": 6, "evaluate_every": 2}


@pytest.fixture(scope="module")
def data() -> tuple[RankingData, RankingData]:
    raw = letor_like(24, 6, num_documents=300, seed=2)
    return tuple(  # type: ignore[return-value]
        part.replace(features=list_rank_features().fit_transform(part.features, part.offsets))
        for part in raw.split((0.7, 0.3), seed=0)
    )


def test_the_merged_bank_scores_as_the_mean_of_its_standardised_members(data: tuple[RankingData, RankingData]) -> None:
    train, valid = data
    bag = fit_bagged(train, valid, seed=3, members=3, **SETTINGS)
    expected = torch.zeros(valid.num_documents, dtype=torch.float64)
    for member in range(3):
        bank = fit_boosted(train, valid, seed=3 + SEED_STEP * member, **SETTINGS)
        spread = score_spread(bank.score(train.features), train.offsets)
        expected += bank.score(valid.features).double() / spread / 3
    torch.testing.assert_close(bag.score(valid.features).double(), expected, rtol=1e-4, atol=1e-5)
    assert bag.history["members"] == 3
    assert len(bag.history["best_round"]) == 3
    assert bag.phi is not None
    assert bool((bag.phi >= 0).all())
    shapes = [tuple(block.factors.shape[1:]) for block in bag.metrics.iter_blocks()]
    assert len(shapes) == len(set(shapes))  # members share blocks: as many calls to score as one member needs


def test_one_member_ranks_as_the_boosted_bank(data: tuple[RankingData, RankingData]) -> None:
    train, valid = data
    alone, bag = fit_boosted(train, valid, seed=1, **SETTINGS), fit_bagged(train, valid, seed=1, members=1, **SETTINGS)
    assert torch.equal(alone.score(valid.features).argsort(), bag.score(valid.features).argsort())


def test_the_same_seed_gives_the_same_bag_and_shares_give_another(data: tuple[RankingData, RankingData]) -> None:
    train, _ = data
    first = fit_bagged(train, seed=5, members=2, share=0.5, **SETTINGS)
    again = fit_bagged(train, seed=5, members=2, share=0.5, **SETTINGS)
    whole = fit_bagged(train, seed=5, members=2, **SETTINGS)
    assert torch.equal(first.score(train.features), again.score(train.features))
    assert not torch.equal(first.score(train.features), whole.score(train.features))
    assert first.history["best_valid_ndcg"] is None


def test_a_bag_is_saved_and_scored_as_one_model(data: tuple[RankingData, RankingData], tmp_path: Any) -> None:
    raw = letor_like(12, 6, num_documents=150, seed=4)
    features = list_rank_features()
    bag = fit_bagged(raw.replace(features=features.fit_transform(raw.features, raw.offsets)), members=2, **SETTINGS)
    assert bag.phi is not None
    phi = Phi(raw.num_queries, bag.metrics.num_metrics, init=bag.phi)
    model = LGMML(features, bag.metrics, phi)
    model.save(tmp_path / "bag.safetensors")
    assert torch.equal(LGMML.load(tmp_path / "bag.safetensors").score(raw), model.score(raw))


def test_rounds_are_counted_over_all_members(data: tuple[RankingData, RankingData]) -> None:
    told: list[tuple[int, int]] = []
    fit_bagged(data[0], members=2, on_round=lambda done, info: told.append((done, info.total)), **SETTINGS)
    assert told == [(done, 12) for done in range(1, 13)]


def test_a_share_keeps_whole_queries_in_order(data: tuple[RankingData, RankingData]) -> None:
    part = query_share(data[0], 0.5, seed=0)
    assert part.num_queries == round(0.5 * data[0].num_queries)
    assert list(part.qids) == sorted(part.qids, key=list(data[0].qids).index)
    assert query_share(data[0], 1e-9, seed=0).num_queries == 1


def test_members_see_queries_of_their_own(
    data: tuple[RankingData, RankingData], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, tuple[Any, ...]]] = []

    def watched(part: RankingData, valid: RankingData | None, *, seed: int, **settings: Any) -> Bank:
        assert valid is data[1]
        seen.append((seed, part.qids))
        return fit_boosted(part, valid, seed=seed, **settings)

    monkeypatch.setattr(bagged, "fit_boosted", watched)
    fit_bagged(*data, seed=7, members=3, share=0.5, **SETTINGS)
    assert [seed for seed, _ in seen] == [7, 7 + SEED_STEP, 7 + 2 * SEED_STEP]
    assert len({qids for _, qids in seen}) == 3
    assert {len(qids) for _, qids in seen} == {round(0.5 * data[0].num_queries)}
    seen.clear()
    fit_bagged(*data, members=2, **SETTINGS)
    assert [qids for _, qids in seen] == [data[0].qids] * 2


def test_members_differ_and_the_bag_is_judged_as_one(data: tuple[RankingData, RankingData]) -> None:
    bag = fit_bagged(*data, members=2, **SETTINGS)
    alone = [fit_boosted(*data, seed=seed, **SETTINGS) for seed in (0, SEED_STEP)]
    assert bag.history["best_round"] == [bank.history["best_round"] for bank in alone]
    assert bag.history["spreads"] == [score_spread(bank.score(data[0].features), data[0].offsets) for bank in alone]
    assert bag.history["best_valid_ndcg"] == mean_ndcg(bag.score(data[1].features), data[1])
    assert not torch.equal(alone[0].score(data[1].features), alone[1].score(data[1].features))


def test_the_spread_is_around_the_means_of_lists() -> None:
    scores = torch.tensor([5.0, 5.0, 1.0, 3.0, 8.0], dtype=torch.float64)
    offsets = torch.tensor([0, 2, 2, 5])  # the first list says nothing, the second is empty
    around = sum((x - 4.0) ** 2 for x in (1.0, 3.0, 8.0)) / 5
    assert score_spread(scores, offsets) == pytest.approx(around**0.5)


def test_full_and_subspace_metrics_merge() -> None:
    full = MetricBlock(torch.zeros(1, 2), torch.eye(2)[None])
    small = MetricBlock(torch.ones(2, 1), torch.ones(2, 1, 1), support=torch.tensor([[0], [1]]))
    first = Bank(LocalMetrics([full], num_features=2), "paper", torch.tensor([1.0]))
    second = Bank(LocalMetrics([small, full], num_features=2), "paper", torch.tensor([2.0, 3.0, 4.0]))
    merged = merge_banks([first, second], [1.0, 0.5])
    assert merged.phi is not None
    assert merged.phi.tolist() == [1.0, 2.0, 1.0, 1.5]
    data = RankingData.from_arrays([[0.3, 2.0], [1.0, 1.0]], [0, 1], qid=[0, 0])
    expected = first.score(data.features) + 0.5 * second.score(data.features)
    torch.testing.assert_close(merged.score(data.features), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 0}, "`members` must be"),
        ({"share": 0.0}, "`share` must be"),
        ({"share": 1.5}, r"`share` must lie in \[0, 1\]"),
        ({"round": 3}, "`round` is no setting of fit_boosted"),
    ],
)
def test_wrong_settings_are_refused(
    data: tuple[RankingData, RankingData], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LGMMLError, match=message):
        fit_bagged(data[0], **options)


def test_a_merged_bank_keeps_what_its_blocks_have() -> None:
    def bank(size: float, norm: str = "trace", kernel: str = "rbf") -> Bank:
        block = MetricBlock(
            torch.full((1, 2), size),
            size * torch.eye(2)[None],
            scales=torch.tensor([size]),
            quality=torch.tensor([size]),
        )
        return Bank(LocalMetrics([block], num_features=2, norm=norm), kernel, torch.ones(1))

    merged = merge_banks([bank(1.0), bank(2.0)], [1.0, 3.0])
    assert (merged.kernel, merged.metrics.norm) == ("rbf", "trace")
    assert merged.metrics.scales.tolist() == merged.metrics.quality.tolist() == [1.0, 2.0]
    for other in (bank(1.0, norm="mahalanobis"), bank(1.0, kernel="paper")):
        with pytest.raises(LGMMLError, match="`banks` must agree on features, norm and kernel"):
            merge_banks([bank(1.0), other], [1.0, 1.0])


def test_without_weights_all_metrics_count_alike() -> None:
    block = MetricBlock(torch.tensor([[0.0], [1.0]]), torch.ones(2, 1, 1))
    bank = Bank(LocalMetrics([block], num_features=1), "distance")
    assert bank.score(torch.tensor([[3.0], [0.0]])).tolist() == [-5.0, -1.0]
    weighed = Bank(bank.metrics, "distance", torch.tensor([1.0, 2.0]))
    assert weighed.score(torch.tensor([[3.0], [0.0]])).tolist() == [-7.0, -2.0]
    with pytest.raises(LGMMLError, match=r"`phi` must have shape \(2,\)"):
        Bank(bank.metrics, "distance", torch.ones(3))
    with pytest.raises(LGMMLError, match="`kernel` must be one of"):
        Bank(bank.metrics, "cosine")


def test_banks_that_do_not_fit_together_are_refused() -> None:
    one = Bank(
        LocalMetrics([MetricBlock(torch.zeros(1, 2), torch.eye(2)[None])], num_features=2), "paper", torch.ones(1)
    )
    wide = Bank(
        LocalMetrics([MetricBlock(torch.zeros(1, 3), torch.eye(3)[None])], num_features=3), "paper", torch.ones(1)
    )
    with pytest.raises(LGMMLError, match="`weights` must be one for each"):
        merge_banks([one], [])
    with pytest.raises(LGMMLError, match="`banks` must agree on features, norm and kernel"):
        merge_banks([one, wide], [1.0, 1.0])
    with pytest.raises(LGMMLError, match="`banks` must have weights Φ"):
        merge_banks([Bank(one.metrics)], [1.0])
    with pytest.raises(DataError, match="scores all documents of every training list alike"):
        score_spread(torch.ones(3), torch.tensor([0, 3]))


def test_a_bag_has_five_members_unless_told(data: tuple[RankingData, RankingData]) -> None:
    bag = fit_bagged(data[0], rounds=1, candidates=3)
    assert (bag.history["members"], len(bag.history["spreads"])) == (5, 5)
