"""The frozen form: the model's scores to rounding, ties kept, from threads as well; used where there is one."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import Chain, Concat, all_views, list_rank_features
from lgmml_torch.models.preprocess.steps import (
    PCA,
    Clip,
    KeepColumns,
    ListMinMax,
    ListRank,
    ListStandardize,
    Norm2,
    Quantile,
    SignedLog1p,
    Standardize,
)
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from tests.doors import FEATURES, small_data, small_model

PREPROCESS: dict[str, Preprocess] = {
    "list_rank_features": list_rank_features(),
    "all_views": all_views(),
    "few ramps": all_views(max_knots=16, ramps=2),
    "kept columns": Chain([KeepColumns([0, 2, 3]), all_views()]),
    "paper": Chain([Norm2()]),
    "others": Concat([Chain([SignedLog1p(), PCA(2)]), ListMinMax(), Quantile("normal")]),
    "lists": Chain([Concat([ListRank(), ListStandardize()]), Standardize(), Clip(2.0)]),
}


def oracle(model: LGMML, features: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The definition, in float64: the distances that gradients flow through, κ and Φ."""
    wide = copy.deepcopy(model).double()
    dists = wide.metrics.traced(wide.preprocess(features.double(), offsets))
    kappa = {"paper": dists * (-dists).exp(), "distance": dists, "rbf": -(-dists).exp()}[model.kernel]
    return -(kappa @ wide.phi.for_new(None, 1)[0]).detach()


def assert_scores(model: LGMML, features: torch.Tensor, offsets: torch.Tensor) -> None:
    """Equal to the definition within a hundred-thousandth of the size of the scores."""
    found = model.freeze()(features.numpy(), offsets.numpy())
    expected = oracle(model, features, offsets)
    assert found.dtype == torch.empty(0, dtype=model.dtype).numpy().dtype
    gap = float((torch.from_numpy(found) - expected).abs().max())
    assert gap <= 1e-5 * float(expected.abs().max().clamp_min(1.0))


def drawn(rows: int, seed: int = 5) -> torch.Tensor:
    """Values of few digits, so that columns have ties; the last feature is as constant as in training."""
    features = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    features[:, -1] = 2.0
    return features


class TestScores:
    @pytest.mark.parametrize("preprocess", list(PREPROCESS))
    @pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 300])
    def test_of_one_list(self, preprocess: str, rows: int) -> None:
        model = small_model(preprocess=copy.deepcopy(PREPROCESS[preprocess]))
        assert_scores(model, drawn(rows), torch.tensor([0, rows]))

    @pytest.mark.parametrize("preprocess", list(PREPROCESS))
    def test_of_several_lists_some_of_them_empty(self, preprocess: str) -> None:
        model = small_model(preprocess=copy.deepcopy(PREPROCESS[preprocess]))
        assert_scores(model, drawn(60), torch.tensor([0, 0, 1, 12, 12, 59, 60, 60]))

    @pytest.mark.parametrize("kernel", ["paper", "distance", "rbf"])
    @pytest.mark.parametrize("norm", ["mahalanobis", "trace"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_of_all_kernels_norms_and_precisions(self, kernel: str, norm: str, dtype: torch.dtype) -> None:
        model = small_model(kernel=kernel, norm=norm, dtype=dtype)
        features, offsets = drawn(20).to(dtype), torch.tensor([0, 20])
        found = torch.from_numpy(model.freeze()(features.numpy()))
        expected = model(features, offsets).detach()
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("preprocess", ["list_rank_features", "all_views", "kept columns"])
    def test_far_beyond_the_training_data(self, preprocess: str) -> None:
        model = small_model(preprocess=copy.deepcopy(PREPROCESS[preprocess]))
        features = drawn(12)
        features[0], features[1], features[2:4, 0], features[4] = 1e30, -1e30, 3e38, 1e-40
        assert_scores(model, features, torch.tensor([0, 12]))
        assert_scores(model, features, torch.tensor([0, 1, 12]))

    @pytest.mark.parametrize("value", [0.0, -0.0, 7.25, 1e30])
    def test_of_lists_that_do_not_vary(self, value: float) -> None:
        model = small_model(preprocess=all_views())
        features = torch.full((9, FEATURES), value)
        assert_scores(model, features, torch.tensor([0, 9]))
        assert len(set(model.freeze()(features.numpy()).tolist())) == 1

    def test_zeros_of_either_sign_are_the_same_number(self) -> None:
        features = drawn(8)
        features[:4, 0], features[4:, 0] = 0.0, -0.0
        frozen = small_model(preprocess=all_views()).freeze()
        assert np.array_equal(frozen(features.numpy()), frozen(features.numpy() + 0.0))

    def test_without_any_rows(self) -> None:
        frozen = small_model(preprocess=all_views()).freeze()
        assert frozen(np.zeros((0, FEATURES), np.float32)).shape == (0,)
        assert frozen(np.zeros((0, FEATURES), np.float32), [0, 0, 0]).shape == (0,)

    def test_where_all_weights_are_zero(self) -> None:
        model = small_model()
        model.phi.reset(0.0)
        assert not model.freeze()(drawn(4).numpy()).any()

    def test_a_metric_may_name_a_feature_twice(self) -> None:
        block = MetricBlock(torch.tensor([[0.0, 1.0]]), torch.tensor([[[1.0], [2.0]]]), support=torch.tensor([[1, 1]]))
        data = small_data()
        preprocess = Chain([Clip(5.0)]).fit(data.features, data.offsets)
        metrics = LocalMetrics([block], num_features=FEATURES)
        model = LGMML(preprocess, metrics, Phi(1, 1), kernel="distance")
        features = drawn(6)
        x = features[:, 1]
        expected = -(x + 2 * (x - 1)).abs()
        torch.testing.assert_close(torch.from_numpy(model.freeze()(features.numpy())), expected)


class TestTies:
    @pytest.mark.parametrize("rows", [2, 13, 257])
    def test_equal_rows_of_a_list_are_level_wherever_they_stand(self, rows: int) -> None:
        frozen = small_model(preprocess=all_views()).freeze()
        features = drawn(rows)
        twice = torch.cat([features, features.flip(0)]).numpy()
        scores = frozen(twice)
        assert np.array_equal(scores[:rows], scores[rows:][::-1])

    def test_the_order_of_the_rows_does_not_matter(self) -> None:
        frozen = small_model(preprocess=all_views()).freeze()
        features = drawn(50)
        order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
        moved = frozen(features[order].numpy())
        np.testing.assert_allclose(moved, frozen(features.numpy())[order.numpy()], rtol=1e-5)


class TestCalls:
    def test_threads_may_share_it(self) -> None:
        frozen = small_model(preprocess=all_views()).freeze()
        lists = [drawn(5 + 7 * number, seed=number).numpy() for number in range(8)]
        alone = [frozen(features) for features in lists]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(frozen, lists * 25))
        for number, scores in enumerate(together):
            np.testing.assert_allclose(scores, alone[number % 8], rtol=1e-5)

    def test_arguments_are_left_alone(self) -> None:
        frozen = small_model(preprocess=all_views()).freeze()
        features = drawn(40).numpy()
        before = features.copy()
        frozen(features)
        assert np.array_equal(features, before)

    def test_arrays_that_may_not_be_written_to(self) -> None:
        frozen = small_model(preprocess=all_views()).freeze()
        features = drawn(40).numpy()
        expected = frozen(features)
        features.flags.writeable = False
        assert np.array_equal(frozen(features), expected)

    def test_later_changes_of_the_model_do_not_reach_it(self) -> None:
        model, features = small_model(), drawn(9).numpy()
        frozen = model.freeze()
        before = frozen(features)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.mul_(3)
        assert np.array_equal(frozen(features), before)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_finite_is_refused(self, value: float) -> None:
        features = drawn(4)
        features[2, 1] = value
        with pytest.raises(LGMMLError, match="`features` must be finite"):
            small_model().freeze()(features.numpy())

    def test_an_overflow_is_refused(self) -> None:
        model = small_model(preprocess=Chain([Clip(1e38)]), kernel="rbf")
        with pytest.raises(LGMMLError, match="distances must stay below"):
            model.freeze()(np.full((2, FEATURES), 1e30, np.float32))

    def test_other_shapes_are_refused(self) -> None:
        frozen = small_model().freeze()
        with pytest.raises(LGMMLError, match=r"`features` must have shape \(\*, 5\), got \(3, 4\)"):
            frozen(np.zeros((3, 4), np.float32))
        with pytest.raises(LGMMLError, match="`offsets` must end at the number of rows, 3, got 2"):
            frozen(np.zeros((3, FEATURES), np.float32), [0, 2])


class Doubled(Preprocess):
    """A step of a user."""

    name = "doubled"

    def _transform(self, features: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return features * 2


class TestWithoutFrozenForm:
    """`freeze` says why, and scores come from the ordinary path."""

    def test_weights_that_depend_on_the_list(self) -> None:
        model, data = small_model(mode="per_query"), small_data()
        for policy in ("knn", "amortized"):
            with pytest.raises(LGMMLError, match=f"`policy` must give all lists the same weights.*'{policy}'"):
                model.freeze(policy)
            expected = model(data.features, data.offsets, policy=policy).detach()
            torch.testing.assert_close(model.score(data, policy=policy), expected, rtol=1e-4, atol=1e-5)

    def test_policies_that_there_are_not(self) -> None:
        with pytest.raises(LGMMLError, match=r"`policy` must be one of .*, got 'meen'"):
            small_model(mode="per_query").freeze("meen")
        with pytest.raises(LGMMLError, match=r"`policy` must be one of .*, got 'mean'"):
            small_model(mode="shared").freeze("mean")

    def test_narrow_numbers(self) -> None:
        with pytest.raises(LGMMLError, match=r"of float32 or float64 to be frozen, got torch.bfloat16"):
            small_model().to(torch.bfloat16).freeze()

    def test_steps_of_users(self) -> None:
        model, data = small_model(preprocess=Chain([Doubled()])), small_data()
        with pytest.raises(LGMMLError, match="steps of this package to be frozen, got 'doubled'"):
            model.freeze()
        expected = model(data.features, data.offsets).detach()
        torch.testing.assert_close(model.score(data), expected, rtol=1e-4, atol=1e-5)

    def test_metrics_too_large_for_one_matrix(self) -> None:
        width = 260
        data = RankingData.from_arrays(torch.rand(8, width), [0, 1] * 4, group=[8])
        preprocess = Chain([Standardize()]).fit(data.features, data.offsets)
        factors = torch.eye(width).expand(64, width, width)
        metrics = LocalMetrics([MetricBlock(torch.zeros(64, width), factors)], num_features=width)
        model = LGMML(preprocess, metrics, Phi(1, 64), kernel="distance")
        with pytest.raises(LGMMLError, match=r"metrics must have at most 4,194,304 entries together.*got 4,326,400"):
            model.freeze()
        expected = -64 * preprocess(data.features, data.offsets).norm(dim=1)
        torch.testing.assert_close(model.score(data), expected, rtol=1e-4, atol=1e-4)

    def test_categories_and_bases(self) -> None:
        model = small_model()
        for part, word in (("encoder", "categories"), ("base", "a base")):
            other: Any = copy.copy(model)
            setattr(other, part, object())
            with pytest.raises(LGMMLError, match=f"to be frozen, got one with {word}"):
                other.freeze()


class TestModelsInUse:
    def test_scores_follow_every_change(self) -> None:
        model, data = small_model(), small_data()
        changes = [
            lambda: model.phi.table.weight[0, 3].fill_(5.0),
            lambda: model.phi.reset(torch.arange(7.0)),
            lambda: model.metrics.set_scales(torch.arange(1.0, 8.0)),
            lambda: setattr(
                model.metrics.iter_blocks()[1], "anchors", torch.ones_like(model.metrics.blocks[1].anchors)
            ),
            lambda: setattr(model, "kernel", "distance"),
            lambda: setattr(model, "preprocess", small_model(data=small_data(seed=9)).preprocess),
            lambda: setattr(model, "phi", Phi(1, 7, init=0.5)),
        ]
        for change in changes:
            before = model.score(data)
            with torch.no_grad():
                change()
            after = model.score(data)
            assert not torch.allclose(before, after)
            torch.testing.assert_close(after, model(data.features, data.offsets).detach(), rtol=1e-4, atol=1e-5)

    def test_metrics_in_training(self) -> None:
        model, data = small_model(), small_data()
        before = model.score(data)
        model.metrics.train_metrics_()
        torch.testing.assert_close(model.score(data), before, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for tensor in model.metrics.parameters():
                tensor.add_(0.3)
        torch.testing.assert_close(model.score(data), model(data.features, data.offsets).detach(), rtol=1e-4, atol=1e-5)

    def test_copies_and_pickles_score_alike(self) -> None:
        model, data = small_model(), small_data()
        expected = model.score(data)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other.score(data), expected)

    def test_long_and_short_calls_agree(self) -> None:
        model, features = small_model(preprocess=all_views()), drawn(3000)
        sizes = [1000, 1000, 1000]
        together = RankingData.from_arrays(features, torch.zeros(3000), group=sizes)
        parts = []
        for part in features.split(sizes):
            data = RankingData.from_arrays(part, torch.zeros(1000), group=[1000])
            parts.append(model.score_in_caller_order(data))
        np.testing.assert_allclose(model.score_in_caller_order(together), np.concatenate(parts), rtol=1e-5)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> LGMMLRanker:
    file = tmp_path_factory.mktemp("frozen") / "model.safetensors"
    small_model(preprocess=all_views()).save(file)
    return LGMMLRanker.load(file)


class TestPredict:
    def test_one_list_in_every_form_gets_the_same_scores(self, ranker: LGMMLRanker) -> None:
        X = drawn(12).numpy()
        expected = oracle(ranker.model_, torch.from_numpy(X), torch.tensor([0, 12])).numpy()
        queries: list[dict[str, Any]] = [
            {"group": [12]}, {"group": np.array([12])}, {"group": torch.tensor([12])}, {"qid": [3] * 12},
            {"qid": ["a"] * 12}, {"qid": np.full(12, 3)}, {"qid": np.full(12, "a")}, {"qid": torch.full((12,), 3)},
            {"qid": np.full(12, 1.5)}, {"qid": [(1, 2)] * 12},
        ]  # fmt: skip
        for given in queries:
            for rows in (X, X.astype(np.float64), np.asfortranarray(X), torch.from_numpy(X), X.tolist()):
                np.testing.assert_allclose(ranker.predict(rows, **given), expected, rtol=1e-5)

    def test_several_lists_are_not_taken_for_one(self, ranker: LGMMLRanker) -> None:
        X = drawn(12).numpy()
        for given in ({"group": [5, 7]}, {"qid": [0] * 5 + [1] * 7}, {"qid": np.repeat([0, 1], [5, 7])}):
            found = ranker.predict(X, **given)
            np.testing.assert_allclose(found[:5], ranker.predict(X[:5], group=[5]), rtol=1e-5)
            np.testing.assert_allclose(found[5:], ranker.predict(X[5:], group=[7]), rtol=1e-5)

    def test_what_is_wrong_is_refused_as_ever(self, ranker: LGMMLRanker) -> None:
        X = drawn(3).numpy()
        for rows, given, message in (
            (X, {}, "`qid` must name the query of each row"),
            (X, {"group": [2]}, "`group` must be sizes that add up to the number of rows, 3, got 2"),
            (X, {"qid": [1, 1]}, "`qid` must have one entry per row, 3, got 2"),
            (X, {"qid": [float("nan")] * 3}, "`qid` must not be missing"),
            (X[:, :4], {"group": [3]}, "`X` must have 5 features"),
            (X * np.float32("nan"), {"group": [3]}, "NaN|finite|missing"),
            (np.full((3, FEATURES), 1e300), {"group": [3]}, "inf|finite"),
            (X[0], {"group": [1]}, "`X` must have shape"),
        ):
            with pytest.raises(LGMMLError, match=message):
                ranker.predict(rows, **given)

    def test_a_changed_model_gives_its_new_scores(self, ranker: LGMMLRanker) -> None:
        X = drawn(6).numpy()
        before = ranker.predict(X, group=[6])
        weights = ranker.model_.phi.table.weight
        with torch.no_grad():
            weights.mul_(2)
        np.testing.assert_allclose(ranker.predict(X, group=[6]), 2 * before, rtol=1e-5)
        with torch.no_grad():
            weights.div_(2)
