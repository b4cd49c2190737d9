"""One model from several scores what the weighted sum of them scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.models.merge import merge_models
from lgmml_torch.models.preprocess.compose import all_views, list_rank_features
from lgmml_torch.models.ranker import LGMML
from tests.doors import plain_chain, small_data, small_model

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
