"""One model from several scores what the weighted sum of them scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.models.merge import merge_models
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import all_views, list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.trees import TreeBase
from tests.doors import plain_chain, small_data, small_model
from tests.models.test_encode import lists, words_model

PREPROCESSINGS = {"the same": (list_rank_features, list_rank_features), "different": (list_rank_features, all_views)}


@pytest.mark.parametrize("name", PREPROCESSINGS)
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.3, 2.5), (1.0, 0.0), (0.0, 0.5)])
def test_the_score_is_the_weighted_sum(name: str, weights: tuple[float, float], tmp_path: Path) -> None:
    models = [small_model(preprocess=make(), seed=seed) for seed, make in enumerate(PREPROCESSINGS[name])]
    data = small_data(queries=30, seed=5)
    merged = merge_models(models, weights)
    expected = sum(weight * model.score(data) for weight, model in zip(weights, models, strict=True))
    torch.testing.assert_close(merged.score(data), expected, rtol=1e-5, atol=1e-5)
    merged.save(tmp_path / "merged.safetensors")
    assert torch.equal(LGMML.load(tmp_path / "merged.safetensors").score(data), merged.score(data))
    used = sum(weight > 0 for weight in weights)
    assert merged.metrics.num_metrics == 7 * used
    columns = [model.preprocess.num_features_out for model, weight in zip(models, weights, strict=True) if weight]
    assert merged.preprocess.num_features_out == (columns[0] if name == "the same" else sum(columns))


def test_three_models_of_two_preprocessings_share_columns() -> None:
    makes = (list_rank_features, plain_chain, list_rank_features)
    models = [small_model(preprocess=make(), seed=seed) for seed, make in enumerate(makes)]
    data = small_data(queries=20, seed=6)
    merged = merge_models(models, [1.0, 2.0, 3.0])
    expected = models[0].score(data) + 2 * models[1].score(data) + 3 * models[2].score(data)
    torch.testing.assert_close(merged.score(data), expected, rtol=1e-5, atol=1e-5)
    assert merged.preprocess.num_features_out == sum(m.preprocess.num_features_out for m in models[:2])


def test_each_model_keeps_its_own_policy() -> None:
    models = [small_model(seed=seed) for seed in (1, 2)]
    models[1].phi.policy = "ones"
    data = small_data(queries=20, seed=6)
    expected = models[0].score(data) + 2 * models[1].score(data)
    torch.testing.assert_close(merge_models(models, [1.0, 2.0]).score(data), expected, rtol=1e-5, atol=1e-5)


def test_an_explanation_of_the_sum_adds_up() -> None:
    merged = merge_models([small_model(seed=1), small_model(preprocess=all_views(), seed=2)], [1.0, 0.5])
    data = small_data(queries=5, seed=7)
    query = int(data.sizes.argmax())
    found = merged.explain(data, qid=data.qids[query], document=0, over=1)
    assert float(found.features.sum()) == pytest.approx(found.difference, rel=1e-5, abs=1e-6)


def test_models_that_do_not_go_together_are_refused() -> None:
    model = small_model()
    for others, weights, message in (
        ([], [], "must be one for each of at least one model, got 0 for 0"),
        ([model], [1.0, 1.0], "got 2 for 1"),
        ([model, model], [1.0, -0.5], "at least 0 and not all 0"),
        ([model, model], [0.0, 0.0], "at least 0 and not all 0"),
        ([model, small_model(kernel="rbf")], [1.0, 1.0], "agree on their kernel, got paper, rbf"),
        ([model, small_model(norm="trace")], [1.0, 1.0], "agree on their norm, got mahalanobis, trace"),
        ([model, small_model(dtype=torch.float64)], [1.0, 1.0], "agree on their precision"),
        ([small_model(mode="per_query")], [1.0], "one Φ for all queries, got one of mode 'per_query'"),
    ):
        with pytest.raises(LGMMLError, match=message):
            merge_models(others, weights)


def named(model: LGMML, names: tuple[str, ...] | None) -> LGMML:
    return LGMML(model.preprocess, model.metrics, model.phi, kernel=model.kernel, qids=model.qids, feature_names=names)


@pytest.mark.parametrize(("norm", "kernel"), [("trace", "paper"), ("mahalanobis", "rbf"), ("mahalanobis", "distance")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_kernel_and_precision_are_kept(norm: str, kernel: str, dtype: torch.dtype) -> None:
    models = [small_model(norm=norm, kernel=kernel, dtype=dtype, seed=seed) for seed in (1, 2)]
    data = small_data(queries=20, seed=6).to(dtype=dtype)
    merged = merge_models(models, [1.0, 2.0])
    assert (merged.metrics.norm, merged.kernel, merged.metrics.scales.dtype) == (norm, kernel, dtype)
    expected = models[0].score(data) + 2 * models[1].score(data)
    torch.testing.assert_close(merged.score(data), expected, rtol=1e-5, atol=1e-5)
    assert not merged.training
    assert merged.phi.mode == "shared"


def test_preprocessings_fitted_on_other_data_are_different_ones() -> None:
    fits = [small_data(queries=12), small_data(queries=15, seed=8)]
    models = [small_model(data=data, preprocess=plain_chain(), seed=seed) for seed, data in enumerate(fits)]
    data = small_data(queries=20, seed=6)
    merged = merge_models(models, [1.0, 0.5])
    assert merged.preprocess.num_features_out == 10
    expected = models[0].score(data) + 0.5 * models[1].score(data)
    torch.testing.assert_close(merged.score(data), expected, rtol=1e-5, atol=1e-5)


def test_each_metric_stands_in_its_own_columns_with_scale_and_quality() -> None:
    models = [small_model(preprocess=plain_chain(), seed=1), small_model(preprocess=all_views(ramps=0), seed=2)]
    merged = merge_models(models, [1.0, 1.0])
    torch.testing.assert_close(merged.metrics.scales, torch.cat([model.metrics.scales for model in models]))
    quality = torch.cat([model.metrics.quality for model in models])
    torch.testing.assert_close(merged.metrics.quality, quality, equal_nan=True)
    (small, full), (_, _, few, wide) = models[1].metrics.iter_blocks(), merged.metrics.iter_blocks()
    assert torch.equal(few.support, small.support + 5)
    assert torch.equal(wide.anchors[:, 5:], full.anchors)
    assert torch.equal(wide.factors[:, 5:], full.factors)
    assert not wide.anchors[:, :5].any()
    assert not wide.factors[:, :5].any()


def test_queries_and_names_come_along() -> None:
    names = ("a", "b", "c", "d", "e")
    first, second = named(small_model(seed=1), names), named(small_model(seed=2), None)
    merged = merge_models([first, second], [1.0, 1.0])
    assert (merged.qids, merged.feature_names) == (first.qids, names)
    assert merged.phi.num_queries == first.phi.num_queries
    assert merge_models([second, first], [1.0, 1.0]).feature_names is None
    assert merge_models([first, second], [0.0, 1.0]).feature_names is None  # the first is not there at all
    with pytest.raises(LGMMLError, match=r"agree on their feature names, got \('a',.*\), \('v',"):
        merge_models([first, named(second, ("v", "w", "x", "y", "z"))], [1.0, 1.0])


def test_nothing_is_shared_with_the_models() -> None:
    model, data = small_model(), small_data()
    merged = merge_models([model], [1.0])
    expected = merged.score(data)
    with torch.no_grad():
        for tensor in (*model.metrics.buffers(), *model.preprocess.buffers(), *model.phi.parameters()):
            tensor.zero_()
    assert torch.equal(merged.score(data), expected)


def test_other_models_that_do_not_go_together() -> None:
    model = small_model()
    deviating = small_model()
    deviating.phi = Phi(12, 7, deviations=True)
    with pytest.raises(LGMMLError, match="one Φ for all queries, got one of mode 'shared'"):
        merge_models([deviating], [1.0])
    treed = small_model()
    treed.base = TreeBase(b"", kind="lightgbm")
    with pytest.raises(LGMMLError, match="`models` must be metrics alone, got one that adds to trees"):
        merge_models([model, treed], [1.0, 1.0])
    data = small_data()
    narrow = small_model(data=data.replace(features=data.features[:, :4]))
    with pytest.raises(LGMMLError, match="agree on their number of features, got 4, 5"):
        merge_models([model, narrow], [1.0, 1.0])
    for weights in ([-1.0, 2.0], [-1.0, -1.0]):
        with pytest.raises(LGMMLError, match="at least 0 and not all 0"):
            merge_models([model, model], weights)
    for weights in ([0.2], [0.2, 0.3, 0.1]):
        with pytest.raises(LGMMLError, match=f"got {len(weights)} for 2"):
            merge_models([model, model], weights)
    assert merge_models([model, model], [0.2, 0.3]).metrics.num_metrics == 14


def test_models_of_words_stay_models_of_words() -> None:
    data = lists()
    model = words_model(data)
    merged = merge_models([model, model], [1.0, 2.0])
    assert merged.encoder == model.encoder
    torch.testing.assert_close(merged.score(data), 3 * model.score(data), rtol=1e-5, atol=1e-5)
    plain = LGMML(model.preprocess, model.metrics, model.phi, feature_names=model.feature_names)
    with pytest.raises(LGMMLError, match="agree on their categories"):
        merge_models([model, plain], [1.0, 1.0])
