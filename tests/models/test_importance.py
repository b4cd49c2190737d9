"""Importance: shares that add up, drops that a naive loop finds too, effects that follow the score."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.ranking.measures import rank_data
from lgmml_torch.models.explain import explain, explain_pairs
from lgmml_torch.models.importance import (
    feature_label,
    pair_importance,
    partial_effect,
    permutation_importance,
    sample_lists,
    structural_importance,
)
from lgmml_torch.models.preprocess.compose import Chain, Concat, list_rank_features
from lgmml_torch.models.preprocess.steps import PCA, ListRank, Quantile, RemoveConstant, Standardize
from lgmml_torch.models.trees import TreeBase
from lgmml_torch.plots import differences_picture, effect_picture, importance_picture
from lgmml_torch.ragged import RankingData
from tests.doors import FEATURES, small_data, small_model
from tests.models.test_trees import lightgbm_booster


class OneFeature:
    """Scores by the third feature alone."""

    def score(self, data: RankingData) -> torch.Tensor:
        return data.features[:, 2].double()


def test_structural_shares_add_up_and_leave_out_what_is_not_seen() -> None:
    for mode in ["shared", "per_query", "amortized"]:
        found = structural_importance(small_model(mode=mode))
        assert found.features.shape == (FEATURES,)
        assert float(found.features.sum()) == pytest.approx(1)
        assert float(found.metrics.sum()) == pytest.approx(1)
        assert found.features[-1] == 0  # constant, so dropped
        assert found.leading(2) == sorted(found.leading(9), key=lambda item: -item[1])[:2]
        assert all(share > 0 for _, share in found.leading(9))


def test_structural_shares_are_the_diagonals() -> None:
    model = small_model()
    phi = model.phi.for_new(None, 1, "shared")[0].double()
    expected = torch.zeros(FEATURES, dtype=torch.float64)
    sources, start = model.preprocess.sources(), 0
    for block in model.metrics.iter_blocks():
        for row in range(block.num_metrics):
            matrix = block.metrics[row].double()
            for place in range(len(matrix)):
                column = place if block.is_full else int(block.support[row, place])
                expected[sources[column].feature] += phi[start + row] * matrix[place, place] / matrix.trace()
        start += block.num_metrics
    torch.testing.assert_close(structural_importance(model).features, expected / expected.sum())


def test_origins_trace_columns_back() -> None:
    data = small_data()
    chain = list_rank_features().fit(data.features, data.offsets)
    origins = chain.origins()
    assert origins.argmax(1).tolist() == [source.feature for source in chain.sources()]
    mixed = Chain([RemoveConstant(), Concat([Standardize(), Chain([Quantile(), PCA(2)]), ListRank()])])
    mixed.fit(data.features, data.offsets)
    origins = mixed.origins()
    assert origins.shape == (mixed.num_features_out, FEATURES)
    torch.testing.assert_close(origins.sum(1), torch.ones(len(origins), dtype=torch.float64))
    assert (origins[4:6, :4] > 0).all()  # components belong to several
    assert (origins[:, -1] == 0).all()
    assert torch.equal(Chain([]).fit(data.features, data.offsets).origins(), torch.eye(FEATURES, dtype=torch.float64))


@pytest.mark.parametrize("norm", ["mahalanobis", "trace"])
def test_many_pairs_are_split_as_one_is(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lgmml_torch.models.explain.PAIR_VALUES", 20)  # several chunks
    model, data = small_model(norm=norm), small_data()
    part = data.select([int(data.sizes.argmax())])
    pairs = torch.tensor([[0, 1], [2, 0], [1, 1], [3, 2]])
    found = explain_pairs(model, part, pairs)
    scores = model.score(part).double()
    for place, (a, b) in enumerate(pairs.tolist()):
        one = explain(model, part, qid=part.qids[0], document=int(part.order[a]), over=int(part.order[b]))
        torch.testing.assert_close(found.metrics[place], one.metrics)
        torch.testing.assert_close(found.features[place], one.features.sum(0))
        assert float(found.features[place].sum()) == pytest.approx(float(scores[a] - scores[b]), abs=1e-5)


def test_pair_shares_add_up_and_follow_the_seed() -> None:
    model, data = small_model(), small_data(40, seed=3)
    found = pair_importance(model, data, lists=10, seed=1)
    assert float(found.features.sum()) == pytest.approx(1)
    assert float(found.metrics.sum()) == pytest.approx(1)
    assert found.base == 0
    assert found.features[-1] == 0
    assert torch.equal(found.features, pair_importance(model, data, lists=10, seed=1).features)
    assert not torch.equal(found.features, pair_importance(model, data, lists=10, seed=2).features)
    single = data.select((data.sizes == 1).nonzero()[:, 0])
    with pytest.raises(LGMMLError, match="`data` must have a list of at least two documents, got none"):
        pair_importance(model, single)


def test_trees_have_a_share_of_the_differences_but_not_of_the_structure(tmp_path: Path) -> None:
    lightgbm_booster().save_model(tmp_path / "trees.txt")
    model, data = small_model(), small_data(20)
    alone = pair_importance(model, data)
    structure = structural_importance(model).features
    model.base = TreeBase.read(tmp_path / "trees.txt")
    found = pair_importance(model, data)
    assert 0 < found.base < 1
    assert float(found.features.sum()) + found.base == pytest.approx(1)
    torch.testing.assert_close(found.features / found.features.sum(), alone.features)
    assert torch.equal(structural_importance(model).features, structure)


def test_shuffling_costs_what_a_loop_says() -> None:
    for within in ["lists", "all"]:
        data = small_data(30, seed=5, shuffled=True)
        found = permutation_importance(OneFeature(), data, within=within, n_repeats=4, seed=3, resamples=200)
        assert [i for i, interval in enumerate(found.intervals) if interval.mean != 0] == [2]
        before = rank_data(OneFeature().score(data), data, metrics=["ndcg@10"])["ndcg@10"]
        generator, after = torch.Generator().manual_seed(3 + 2 * 1_000_003), []
        for _ in range(4):
            draws = torch.rand(data.num_documents, generator=generator)
            column = data.features[:, 2].clone()
            groups = [slice(0, data.num_documents)]
            if within == "lists":
                groups = [slice(int(a), int(b)) for a, b in zip(data.offsets, data.offsets[1:], strict=False)]
            for rows in groups:
                column[rows] = data.features[rows, 2][draws[rows].argsort()]
            after.append(rank_data(column.double(), data, metrics=["ndcg@10"])["ndcg@10"])
        torch.testing.assert_close(found.drops[2], before - torch.stack(after).mean(0), equal_nan=True)
        assert found.intervals[2].low <= found.intervals[2].mean <= found.intervals[2].high
        assert found.intervals[2].counted + found.intervals[2].skipped == data.num_queries
        assert found.definition.startswith("ndcg@10 (default): gain")


def test_a_features_shuffles_do_not_depend_on_the_others() -> None:
    model, data = small_model(), small_data(20)
    every = permutation_importance(model, data, n_repeats=2, resamples=50)
    two = permutation_importance(model, data, features=[3, 1], n_repeats=2, resamples=50)
    torch.testing.assert_close(two.drops, every.drops[[3, 1]], equal_nan=True)
    assert two.features == (3, 1)
    assert float(every.drops[-1].nan_to_num().abs().sum()) == 0  # a constant feature


def test_permutation_errors() -> None:
    data = small_data()
    with pytest.raises(LGMMLError, match=r"`feature` must lie in \[0, 4\], got 5"):
        permutation_importance(OneFeature(), data, features=[5])
    with pytest.raises(LGMMLError, match="`within` must be one of 'lists', 'all', got 'list'"):
        permutation_importance(OneFeature(), data, within="list")
    with pytest.raises(LGMMLError, match="`n_repeats` must be positive, got 0"):
        permutation_importance(OneFeature(), data, n_repeats=0)
    with pytest.raises(LGMMLError, match="at least one query that is not skipped"):
        permutation_importance(OneFeature(), data.replace(labels=torch.zeros_like(data.labels)), features=[0])


def test_the_effect_of_a_linear_score_is_a_line() -> None:
    data = small_data(30, seed=2)
    found = partial_effect(OneFeature(), data, 2, points=7, documents=2, resamples=100)
    assert found.values[0] == pytest.approx(float(data.features[:, 2].min()))
    assert found.values[-1] == pytest.approx(float(data.features[:, 2].max()))
    means = [interval.mean for interval in found.intervals]
    assert np.diff(means) == pytest.approx(np.diff(found.values), abs=1e-6)
    assert [i.mean for i in partial_effect(OneFeature(), data, 0, points=4, resamples=10).intervals] == [0] * 4
    flat = partial_effect(OneFeature(), data, FEATURES - 1, resamples=10)
    assert flat.values == (2.0,)


def test_the_effect_sees_the_place_in_the_list() -> None:
    """The rank within the list changes only when one document moves and the others stay."""
    model, data = small_model(preprocess=Chain([ListRank(), Standardize()])), small_data(20, seed=4)
    found = partial_effect(model, data, 0, points=5, resamples=10)
    assert max(abs(interval.mean) for interval in found.intervals) > 0
    with pytest.raises(LGMMLError, match=r"`feature` must lie in \[0, 4\], got -1"):
        partial_effect(model, data, -1)


def test_small_helpers() -> None:
    data = small_data(20)
    assert sample_lists(data, 30) is data
    drawn = sample_lists(data, 5, seed=1)
    assert drawn.num_queries == 5
    assert list(drawn.qids) == sorted(drawn.qids)
    assert (feature_label(None, 2), feature_label(("a", "b"), 1)) == ("feature 3", "b")


def test_pictures() -> None:
    data = small_data(20)
    drops = permutation_importance(OneFeature(), data, n_repeats=1, resamples=20)
    names = [f"f{i}" for i in range(FEATURES)]
    intervals = dict(zip(names, drops.intervals, strict=True))
    values = {name: interval.mean for name, interval in intervals.items()}
    (axis,) = importance_picture(values, x="drop", intervals=intervals, count=3).axes
    assert [label.get_text() for label in axis.get_yticklabels()][-1] == "f2"
    effects = {name: partial_effect(OneFeature(), data, i, points=3, resamples=10) for i, name in enumerate(names[:4])}
    assert len(effect_picture(effects).axes) == 6
    (axis,) = differences_picture([0.1, -0.2, 0.0], first="a", second="b", measure="ndcg@10").axes
    assert axis.get_ylabel() == "difference in ndcg@10"
