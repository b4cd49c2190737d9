"""Importance: shares that add up, drops and effects that a naive loop finds too, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.measures import rank_data
from lgmml_torch.functional.significance import Interval
from lgmml_torch.models import importance as parts
from lgmml_torch.models.explain import explain, explain_pairs
from lgmml_torch.models.importance import (
    Importance,
    pair_importance,
    partial_effect,
    permutation_importance,
    sample_lists,
    structural_importance,
)
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.preprocess.base import feature_label
from lgmml_torch.models.preprocess.compose import Chain, Concat, list_rank_features
from lgmml_torch.models.preprocess.steps import PCA, ListRank, Quantile, RemoveConstant, Standardize
from lgmml_torch.models.trees import TreeBase
from lgmml_torch.plots import differences_picture, effect_picture, importance_picture
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_std
from tests.doors import FEATURES, small_data, small_model
from tests.models.test_explain import Added
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


class Curved:
    """The square of the third feature, and a little of the first."""

    def score(self, data: RankingData) -> Tensor:
        return (data.features[:, 2] ** 2 + 0.1 * data.features[:, 0]).double()


def test_leading_features_are_the_largest_shares() -> None:
    shares = [0.05 * place for place in range(25)]
    found = Importance(torch.tensor(shares), torch.ones(1))
    assert found.base == 0.0
    assert [feature for feature, _ in found.leading()] == list(range(24, 14, -1))
    assert found.leading(1) == [(24, pytest.approx(1.2))]
    assert 0 not in [feature for feature, _ in found.leading(99)]
    level = Importance(torch.full((3000,), 0.25), torch.ones(1))
    assert [feature for feature, _ in level.leading(3000)] == list(range(3000))


class TestStructure:
    def test_zoomed_factors_count_as_distances_see_them(self) -> None:
        bank = LocalMetrics([MetricBlock(torch.zeros(1, 2), torch.eye(2)[None])], num_features=2)
        bank.train_metrics_()
        with torch.no_grad():
            bank.iter_blocks()[0].zoom.copy_(torch.tensor([0.4, 0.0]))
        found = bank.shares(torch.ones(1))
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx([0.9, 0.1])

    def test_metrics_and_weights_of_nothing_have_no_share(self) -> None:
        factors = torch.stack([torch.zeros(2, 2), torch.diag(torch.tensor([1.0, 3.0]))])
        bank = LocalMetrics([MetricBlock(torch.zeros(2, 2), factors)], num_features=2)
        assert bank.shares(torch.tensor([5.0, 1.0])).tolist() == pytest.approx([0.1, 0.9])
        assert bank.shares(torch.zeros(2)).tolist() == [0.0, 0.0]
        model = small_model()
        with torch.no_grad():
            model.phi.table.weight.zero_()
        found = structural_importance(model)
        assert not found.features.any()
        assert not found.metrics.any()

    def test_weights_are_those_of_a_new_query(self) -> None:
        for mode, policy in [("per_query", "mean"), ("per_query", "knn"), ("amortized", "shared")]:
            model = small_model(mode=mode)
            model.phi.policy = policy
            phi = model.phi.table.weight.detach().double().mean(0)
            torch.testing.assert_close(structural_importance(model).metrics, phi / phi.sum())
            model.phi.policy = "ones"
            assert structural_importance(model).metrics.tolist() == pytest.approx([1 / 7] * 7)


class TestPairs:
    def test_shares_are_what_a_loop_over_the_pairs_finds(self) -> None:
        for base in [False, True]:
            for policy in [None, "mean"]:
                model, data = small_model(mode="per_query"), small_data(14, seed=3)
                model.base = Added() if base else None
                found = pair_importance(model, data, lists=5, pairs=3, seed=2, policy=policy)
                useful = sample_lists(data.select((data.sizes >= 2).nonzero()[:, 0]), 5, seed=2)
                generator = torch.Generator().manual_seed(2)
                features, metrics, trees = torch.zeros(FEATURES).double(), torch.zeros(7).double(), 0.0
                for query, size in enumerate(useful.sizes.tolist()):
                    part = useful.select([query])
                    first = torch.randint(size, (3,), generator=generator)
                    other = (first + torch.randint(1, size, (3,), generator=generator)) % size
                    assert not (first == other).any()
                    for a, b in zip(first.tolist(), other.tolist(), strict=True):
                        places = int(part.order[a]), int(part.order[b])
                        one = explain(model, part, qid=part.qids[0], document=places[0], over=places[1], policy=policy)
                        columns = one.features.sum(0)
                        own = torch.zeros(FEATURES).double()
                        for column, source in enumerate(one.columns):
                            own[source.feature] += columns[column]
                        features += own.abs()
                        metrics += one.metrics.abs()
                        trees += abs(one.base)
                torch.testing.assert_close(found.features, features / (features.sum() + trees))
                torch.testing.assert_close(found.metrics, metrics / (metrics.sum() + trees))
                assert found.base == pytest.approx(trees / float(features.sum() + trees))
                assert (found.base > 0) == base

    def test_lists_of_two_count_and_lists_of_one_do_not(self) -> None:
        model = small_model()
        x = torch.randn(5, FEATURES, generator=torch.Generator().manual_seed(0))
        two = RankingData.from_arrays(x[:2], [0, 1], qid=[1, 1])
        mixed = RankingData.from_arrays(x, [0, 1, 0, 1, 0], qid=[1, 1, 2, 3, 4])
        assert torch.equal(pair_importance(model, two).features, pair_importance(model, mixed).features)

    def test_scores_without_differences_have_no_shares(self) -> None:
        model, data = small_model(), small_data()
        with torch.no_grad():
            model.phi.table.weight.zero_()
        found = pair_importance(model, data)
        assert not found.features.any()
        assert not found.metrics.any()
        assert found.base == 0

    def test_there_must_be_lists_and_pairs(self) -> None:
        model, data = small_model(), small_data()
        for name in ("lists", "pairs"):
            with pytest.raises(LGMMLError, match=f"`{name}` must be positive, got 0"):
                pair_importance(model, data, **{name: 0})


class Asked:
    """Stands for the bootstrap, and remembers what it was asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        patch.setattr(parts, "bootstrap_interval", self)

    def __call__(self, values: Tensor, **options: Any) -> Interval:
        seed = options.pop("generator").initial_seed()
        self.calls.append({"values": values.clone(), "seed": seed, **options})
        return Interval(float(values.nanmean()), 0.0, 0.0, 0.0, 0, 0)

    def settings(self) -> set[tuple[Any, ...]]:
        return {(call["seed"], call["confidence"], call["resamples"]) for call in self.calls}


class TestShuffles:
    def test_rules_of_the_measure_are_those_asked_for(self) -> None:
        data = small_data(20)
        for preset in ("default", "letor4"):
            found = permutation_importance(Curved(), data, features=[2], preset=preset, n_repeats=1, resamples=5)
            before = rank_data(Curved().score(data), data, metrics=["ndcg@10"], preset=preset)["ndcg@10"]
            assert found.baseline.mean == pytest.approx(float(before.nanmean()))
            assert f"({preset})" in found.definition

    def test_the_first_and_the_last_feature(self) -> None:
        data = small_data(8)
        found = permutation_importance(Curved(), data, features=[0, 4], n_repeats=1, resamples=5)
        assert found.drops.shape == (2, 8)
        for feature in (-1, FEATURES):
            with pytest.raises(LGMMLError, match=rf"`feature` must lie in \[0, 4\], got {feature}"):
                permutation_importance(Curved(), data, features=[feature])

    def test_the_data_stay_as_they_are(self) -> None:
        data = small_data(8)
        before = data.features.clone()
        permutation_importance(Curved(), data, n_repeats=1, resamples=5)
        partial_effect(Curved(), data, 2, points=3, resamples=5)
        assert torch.equal(data.features, before)


class TestEffects:
    def test_changes_are_what_a_loop_finds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked, data = Asked(monkeypatch), small_data(15, seed=2)
        found = partial_effect(Curved(), data, 2, points=5, documents=2, seed=6, confidence=0.5, resamples=9)
        column = np.sort(data.features[:, 2].numpy())
        places = [round(float(place)) for place in np.linspace(0, len(column) - 1, 5)]
        assert found.values == pytest.approx(sorted({float(column[place]) for place in places}))
        generator = torch.Generator().manual_seed(6)
        expected = np.zeros((len(found.values), 15))
        for _ in range(2):
            draws = torch.rand(15, generator=generator)
            for query in range(15):
                row = int(data.offsets[query]) + int(draws[query] * data.sizes[query])
                own = float(data.features[row, 2])
                for place, value in enumerate(found.values):
                    expected[place, query] += (value**2 - own**2) / 2
        for place, call in enumerate(asked.calls):
            assert call["values"].tolist() == pytest.approx(expected[place].tolist(), abs=1e-5)
        assert asked.settings() == {(6, 0.5, 9)}
        assert found.spread == pytest.approx(float(segment_std(Curved().score(data), data.offsets).mean()))

    def test_values_are_those_that_occur(self) -> None:
        data = small_data(6)
        found = partial_effect(Curved(), data, 1, points=4, resamples=5)
        assert set(found.values) <= {float(value) for value in data.features[:, 1]}
        assert len(found.values) == 4
        assert partial_effect(Curved(), data, 1, points=1, resamples=5).values == (float(data.features[:, 1].min()),)

    def test_the_same_documents_are_drawn_without_a_seed_as_with_0(self) -> None:
        data = small_data(15, seed=2)
        found, same, other = (
            partial_effect(Curved(), data, 2, points=3, documents=1, resamples=5, **seed)
            for seed in ({}, {"seed": 0}, {"seed": 1})
        )
        assert found.intervals == same.intervals
        assert found.intervals != other.intervals

    def test_empty_lists_are_left_out(self) -> None:
        data = small_data(6)
        offsets = torch.cat([data.offsets[:3], data.offsets[2:]])
        holes = data.replace(offsets=offsets, qids=(*data.qids, 99))
        found, expected = (partial_effect(Curved(), lists, 2, points=3, resamples=20) for lists in (holes, data))
        assert found.intervals == expected.intervals
        single = data.select((data.sizes == 1).nonzero()[:, 0])
        assert single.num_queries
        assert partial_effect(Curved(), single, 2, points=2, resamples=5).spread == 0
        with pytest.raises(LGMMLError, match="`data` must have documents, got none"):
            partial_effect(Curved(), data.select([]), 2)

    def test_there_must_be_points_and_documents(self) -> None:
        for name in ("points", "documents"):
            with pytest.raises(LGMMLError, match=f"`{name}` must be positive, got 0"):
                partial_effect(Curved(), small_data(), 0, **{name: 0})
        for feature in (-1, FEATURES):
            with pytest.raises(LGMMLError, match=rf"`feature` must lie in \[0, 4\], got {feature}"):
                partial_effect(Curved(), small_data(), feature)
