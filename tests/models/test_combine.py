"""Weights for a sum of scores rank as well as they can, and one model scores what the weighted sum of several does."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.functional.measures import ndcg
from lgmml_torch.models.combine import combination_weights, merge_models
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import all_views, list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.trees import TreeBase
from lgmml_torch.segments import offsets_from_sizes, segment_std
from tests.doors import plain_chain, small_data, small_model
from tests.models.test_encode import lists, words_model

PREPROCESSINGS = {"the same": (list_rank_features, list_rank_features), "different": (list_rank_features, all_views)}


# Two lists of three; each system ranks one of them well and is decided there, and errs narrowly in the other.
OFFSETS = torch.tensor([0, 3, 6])
LABELS = torch.tensor([2, 1, 0, 2, 1, 0])
FIRST = torch.tensor([9.0, 6.0, 0.0, 0.0, 0.5, 1.0])
SECOND = torch.tensor([0.0, 0.5, 1.0, 9.0, 6.0, 0.0])


def quality(weights: Tensor, scores: Tensor, labels: Tensor = LABELS, offsets: Tensor = OFFSETS) -> float:
    return round(float(ndcg((weights[:, None] * scores.double()).sum(0), labels, offsets, k=10)), 12)


def random_case(seed: int, systems: int, queries: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    offsets = offsets_from_sizes(torch.randint(1, 9, (queries,), generator=g))
    labels = torch.randint(0, 3, (int(offsets[-1]),), generator=g)
    scales = torch.tensor([1.0, 50.0, 0.01])[:systems, None]
    return scales * (labels + 1.5 * torch.randn(systems, len(labels), generator=g)), labels, offsets


def by_counting(scores: Tensor, labels: Tensor, offsets: Tensor, steps: int) -> Tensor:
    """The definition, with lists and loops."""
    bounds = offsets.tolist()
    lists = list(itertools.pairwise(bounds))
    deviations = [sum(float(row[a:b].std(correction=0)) for a, b in lists) / len(lists) for row in scores.double()]
    count = len(deviations)

    def weights(chosen: list[int]) -> Tensor:
        shares = [chosen.count(m) / len(chosen) / deviations[m] for m in range(count)]
        return torch.tensor(shares, dtype=torch.float64)

    chosen: list[int] = []
    prefixes: list[tuple[float, list[int]]] = []
    for _ in range(steps):
        values = [quality(weights([*chosen, m]), scores, labels, offsets) for m in range(count)]
        chosen = [*chosen, values.index(max(values))]
        prefixes.append((max(values), chosen))
    best = max(value for value, _ in prefixes)
    return weights(next(prefix for value, prefix in prefixes if value == best))


def test_a_sum_that_is_better_than_either_is_found() -> None:
    scores = torch.stack([FIRST, SECOND])
    found = combination_weights(scores, LABELS, OFFSETS)
    assert quality(found, scores) == pytest.approx(1.0, abs=1e-12)
    for alone in torch.eye(2, dtype=torch.float64):
        assert quality(alone, scores) < 0.999
    torch.testing.assert_close(found, 0.5 / segment_std(scores.double().T, OFFSETS).mean(0))


def test_a_system_that_does_not_help_gets_nothing() -> None:
    found = combination_weights(torch.stack([-LABELS.double(), LABELS.double()]), LABELS, OFFSETS)
    assert found.tolist() == [0.0, pytest.approx(1.5**0.5)]
    twice = combination_weights(torch.stack([FIRST, FIRST]), LABELS, OFFSETS)
    assert twice[0] > 0
    assert twice[1] == 0


def test_the_choice_is_the_definition() -> None:
    for systems, seed in [(1, 0), (2, 1), (3, 2)]:
        scores, labels, offsets = random_case(seed, systems)
        found = combination_weights(scores, labels, offsets, steps=7)
        torch.testing.assert_close(found, by_counting(scores, labels, offsets, 7), rtol=1e-9, atol=0)
        assert torch.equal(found, combination_weights(scores, labels, offsets, steps=7))


def test_the_choice_lies_between_the_best_alone_and_the_best_of_all() -> None:
    for seed, systems in enumerate((2, 3, 3)):
        scores, labels, offsets = random_case(100 + seed, systems, queries=5)
        found = quality(combination_weights(scores, labels, offsets, steps=6), scores, labels, offsets)
        deviations = segment_std(scores.double().T, offsets).mean(0)
        grid = [c for c in itertools.product(range(7), repeat=systems) if 0 < sum(c) <= 6]
        every = [quality(torch.tensor(c) / deviations, scores, labels, offsets) for c in grid]
        alone = [quality(unit, scores, labels, offsets) for unit in torch.eye(systems, dtype=torch.float64)]
        assert max(alone) <= found <= max(every) + 1e-12


def test_the_scale_of_the_scores_does_not_matter() -> None:
    scores, labels, offsets = random_case(3, 3)
    found = combination_weights(scores, labels, offsets)
    again = combination_weights(scores * torch.tensor([1024.0, 0.25, 8.0])[:, None], labels, offsets)
    torch.testing.assert_close(again * torch.tensor([1024.0, 0.25, 8.0]), found)


def test_scores_that_never_differ_within_a_list_count_nothing() -> None:
    constant = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 0.7], dtype=torch.float64)  # rounding gives it a deviation
    found = combination_weights(torch.stack([constant, FIRST, constant * 0]), LABELS, OFFSETS)
    assert found[0] == found[2] == 0
    assert found[1] > 0
    assert combination_weights(constant[None], LABELS, OFFSETS).tolist() == [0.0]
    assert combination_weights(torch.zeros(0, 6), LABELS, OFFSETS).shape == (0,)


def test_ties_follow_the_order_they_are_given() -> None:
    """The second system has two documents level: by the caller's order it is as good as the first, or not."""
    labels, offsets = torch.tensor([1, 0, 0]), torch.tensor([0, 3])
    scores = torch.tensor([[2.0, 3.0, 1.0], [1.0, 1.0, 0.0]])
    ahead = combination_weights(scores, labels, offsets, tie_order=torch.tensor([0, 1, 2]))
    behind = combination_weights(scores, labels, offsets, tie_order=torch.tensor([1, 0, 2]))
    assert ahead[0] == 0
    assert behind[0] > 0


def test_bad_use_is_named() -> None:
    scores = torch.stack([FIRST, SECOND])
    with pytest.raises(DataError, match="`labels` must have a list with a relevant document"):
        combination_weights(scores, LABELS * 0, OFFSETS)
    with pytest.raises(LGMMLError, match=r"`scores` must have shape \(\*, 6\), got \(2, 5\)"):
        combination_weights(scores[:, :5], LABELS, OFFSETS)
    with pytest.raises(LGMMLError, match="`scores` must be finite, got nan"):
        combination_weights(scores * torch.nan, LABELS, OFFSETS)
    with pytest.raises(LGMMLError, match="`steps` must be positive, got 0"):
        combination_weights(scores, LABELS, OFFSETS, steps=0)


def test_the_score_is_the_weighted_sum(tmp_path: Path) -> None:
    for name in PREPROCESSINGS:
        for weights in [(0.3, 2.5), (0.0, 0.5)]:
            models = [small_model(preprocess=make(), seed=seed) for seed, make in enumerate(PREPROCESSINGS[name])]
            data = small_data(queries=30, seed=5)
            merged = merge_models(models, weights)
            expected = sum(weight * model.score(data) for weight, model in zip(weights, models, strict=True))
            torch.testing.assert_close(merged.score(data), expected, rtol=1e-5, atol=1e-5)
            merged.save(tmp_path / "merged.safetensors")
            assert torch.equal(LGMML.load(tmp_path / "merged.safetensors").score(data), merged.score(data))
            used = sum(weight > 0 for weight in weights)
            assert merged.metrics.num_metrics == 7 * used
            columns = [
                model.preprocess.num_features_out for model, weight in zip(models, weights, strict=True) if weight
            ]
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
    return model.replace(feature_names=names)


def test_norm_kernel_and_precision_are_kept() -> None:
    for norm, kernel, dtype in [("trace", "paper", torch.float32), ("mahalanobis", "rbf", torch.float64)]:
        models = [small_model(norm=norm, kernel=kernel, dtype=dtype, seed=seed) for seed in (1, 2)]
        data = small_data(queries=20, seed=6).to(dtype=dtype)
        merged = merge_models(models, [1.0, 2.0])
        assert (merged.metrics.norm, merged.kernel, merged.dtype) == (norm, kernel, dtype)
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
