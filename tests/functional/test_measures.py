from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lgmml_torch.checks import DataWarning, LGMMLError
from lgmml_torch.functional import presets as ranked_module
from lgmml_torch.functional.measures import (
    Measure,
    average_precision,
    dcg,
    err,
    ndcg,
    precision,
    rank_metrics,
    recall,
    reciprocal_rank,
)
from lgmml_torch.functional.presets import MEASURES, PRESETS, Preset, describe
from lgmml_torch.segments import gather_segments, offsets_from_sizes
from tests.reference import ranking as reference

CUTOFFS = (1, 3, 10, 50, None)
NAMES = [kind if k is None else f"{kind}@{k}" for kind in MEASURES for k in CUTOFFS]


def lists(
    seed: int, sizes: list[int], *, fractional: bool = False, ties: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Random scores, labels 0..4 and offsets; every fourth list has no relevant document."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    scores = torch.randn(total, generator=generator, dtype=torch.float64)
    scores = (2 * scores).round() if ties else scores
    labels = torch.randint(0, 5, (total,), generator=generator).double()
    labels = labels * torch.rand(total, generator=generator) if fractional else labels
    offsets = offsets_from_sizes(torch.tensor(sizes, dtype=torch.int64))
    for q in range(0, len(sizes), 4):
        labels[offsets[q] : offsets[q + 1]] = 0
    return scores, labels, offsets


def shuffle_within(sizes: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    starts = offsets_from_sizes(torch.tensor(sizes)).tolist()
    return torch.cat(
        [start + torch.randperm(size, generator=generator) for start, size in zip(starts, sizes, strict=False)]
    )


def by_loop(scores: Tensor, labels: Tensor, offsets: Tensor, tie_order: Tensor | None = None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        order = None if tie_order is None else tie_order[start:end].tolist()
        best = reference.best_first(scores[start:end].tolist(), labels[start:end].tolist(), order)
        for k in CUTOFFS:
            at = "" if k is None else f"@{k}"
            values = {
                "ndcg": reference.ndcg(best, k, reference.exponential, math.nan),
                "dcg": reference.dcg(best, k, reference.exponential),
                "map": reference.average_precision(best, k),
                "mrr": reference.reciprocal_rank(best, k),
                "err": reference.err(best, k, 4),
                "precision": reference.precision(best, k) if best else math.nan,
                "recall": reference.recall(best, k),
            }
            for kind, value in values.items():
                found[kind + at].append(value if best else math.nan)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, list[float]]) -> None:
    for name, values in expected.items():
        wanted = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-14, equal_nan=True, msg=name)


def test_default_rules_equal_the_loop() -> None:
    for fractional in [False, True]:
        for ties in [False, True]:
            for sizes in [
                [7, 1, 0, 40, 2, 3, 130, 4, 0],
                [1],
                [1, 1, 1],
                [0, 0],
                [],
                [5, 5, 5, 5],
                [64, 63, 65, 32, 31, 33],
            ]:
                data = lists(1, sizes, ties=ties, fractional=fractional)
                assert_same(rank_metrics(*data, metrics=NAMES, max_grade=4), by_loop(*data))


def test_blocks_of_bounded_memory_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = lists(2, [3, 90, 5, 17, 1, 0, 33, 90, 90, 2])
    whole = rank_metrics(*data, metrics=NAMES, max_grade=4)
    monkeypatch.setattr(ranked_module, "_BLOCK", 64)
    for name, values in rank_metrics(*data, metrics=NAMES, max_grade=4).items():
        torch.testing.assert_close(values, whole[name], equal_nan=True)


def test_ties_follow_the_callers_order() -> None:
    for seed in range(3):
        scores, labels, offsets = lists(seed, [6, 0, 20, 9, 4], ties=True)  # the last and the first share a block
        tie_order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
        found = rank_metrics(scores, labels, offsets, metrics=NAMES, max_grade=4, tie_order=tie_order)
        assert_same(found, by_loop(scores, labels, offsets, tie_order))


def test_a_tie_order_makes_the_storage_order_irrelevant() -> None:
    scores, labels, offsets = lists(4, [8, 3, 30], ties=True)
    caller = torch.arange(len(scores))
    shuffled = shuffle_within([8, 3, 30])
    before = rank_metrics(scores, labels, offsets, metrics=NAMES, max_grade=4)
    after = rank_metrics(
        scores[shuffled], labels[shuffled], offsets, metrics=NAMES, max_grade=4, tie_order=caller[shuffled]
    )
    for name in NAMES:
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=0, equal_nan=True)


def test_queries_may_come_in_any_order() -> None:
    for preset in PRESETS:
        scores, labels, offsets = lists(5, [4, 12, 0, 1, 33, 7], ties=True)
        labels = labels.clamp(max=2)
        order = torch.tensor([3, 0, 5, 2, 4, 1])
        rows, new_offsets = gather_segments(offsets, order)
        before = rank_metrics(scores, labels, offsets, metrics=NAMES, max_grade=4, preset=preset)
        after = rank_metrics(scores[rows], labels[rows], new_offsets, metrics=NAMES, max_grade=4, preset=preset)
        for name in NAMES:
            torch.testing.assert_close(before[name][order], after[name], rtol=0, atol=0, equal_nan=True)


def test_without_ties_documents_may_come_in_any_order() -> None:
    for preset in PRESETS:
        scores, labels, offsets = lists(6, [25, 9])
        labels = labels.clamp(max=2)
        rows = shuffle_within([25, 9])
        before = rank_metrics(scores, labels, offsets, metrics=NAMES, max_grade=4, preset=preset)
        after = rank_metrics(scores[rows], labels[rows], offsets, metrics=NAMES, max_grade=4, preset=preset)
        for name in NAMES:
            torch.testing.assert_close(before[name], after[name], rtol=1e-13, atol=0, equal_nan=True)


@given(
    shift=st.floats(-1e3, 1e3),
    scale=st.floats(1e-2, 1e2),
    values=st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 4)), min_size=1, max_size=12),
)
def test_only_the_order_of_scores_matters(shift: float, scale: float, values: list[tuple[int, int]]) -> None:
    scores = torch.tensor([float(score) for score, _ in values], dtype=torch.float64)
    labels = torch.tensor([label for _, label in values])
    offsets = torch.tensor([0, len(values)])
    before = rank_metrics(scores, labels, offsets, metrics=NAMES, max_grade=4)
    after = rank_metrics(scores * scale + shift, labels, offsets, metrics=NAMES, max_grade=4)
    for name in NAMES:
        torch.testing.assert_close(before[name], after[name], equal_nan=True)
        assert bool((before[name].isnan() | (before[name] >= 0)).all())
        assert name.startswith("dcg") or bool((before[name].isnan() | (before[name] <= 1)).all())


def test_negative_scores_rank_like_any_others() -> None:
    for preset in ["default", "lightgbm", "sklearn", "catboost"]:
        scores, labels, offsets = lists(7, [9, 30, 2])
        before = rank_metrics(scores, labels, offsets, metrics=NAMES, max_grade=4, preset=preset)
        after = rank_metrics(-scores.exp().reciprocal(), labels, offsets, metrics=NAMES, max_grade=4, preset=preset)
        for name in NAMES:
            torch.testing.assert_close(before[name], after[name], rtol=0, atol=0, equal_nan=True)


def test_infinite_scores_rank_first_and_last_and_before_padding() -> None:
    for preset in ["default", "sklearn", "catboost"]:
        inf = math.inf
        scores = torch.tensor([-inf, 0.0, inf, -inf, 1.0, -inf])
        labels = torch.tensor([2, 1, 0, 2, 0, 1])
        finite = torch.tensor([-9.0, 0.0, 9.0, -9.0, 1.0, -9.0])
        for offsets in ([0, 4, 6], [0, 1, 4, 6], [0, 3, 6]):  # unequal lists in one block are padded
            before = rank_metrics(scores, labels, torch.tensor(offsets), metrics=NAMES, max_grade=2, preset=preset)
            after = rank_metrics(finite, labels, torch.tensor(offsets), metrics=NAMES, max_grade=2, preset=preset)
            for name in NAMES:
                torch.testing.assert_close(before[name], after[name], rtol=0, atol=0, equal_nan=True)


def test_scores_of_any_type() -> None:
    for dtype in [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8]:
        scores = torch.tensor([3, 1, 2, 0, 5], dtype=dtype)
        labels = torch.tensor([True, False, True, False, True])
        values = rank_metrics(scores, labels, torch.tensor([0, 3, 5]), metrics=["ndcg", "mrr"])
        torch.testing.assert_close(values["ndcg"], torch.ones(2, dtype=torch.float64))
        assert values["mrr"].dtype == torch.float64


def test_scores_with_a_gradient_are_accepted() -> None:
    scores = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not ndcg(scores, torch.tensor([1, 0]), torch.tensor([0, 2])).requires_grad


def test_equal_labels_make_every_order_the_best() -> None:
    scores, _, offsets = lists(8, [5, 1, 12])
    values = rank_metrics(scores, torch.full_like(scores, 0.25), offsets, metrics=["ndcg@3", "ndcg"])
    for column in values.values():
        torch.testing.assert_close(column, torch.ones(3, dtype=torch.float64))


def test_high_grades_count_or_sort_to_the_same_ideal() -> None:
    for high in [12, 31, 40, 900]:
        scores, _, offsets = lists(9, [20, 3])
        labels = torch.randint(0, high + 1, scores.shape, generator=torch.Generator().manual_seed(0)).double()
        labels[0] = high
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", DataWarning)
            found = ndcg(scores, labels, offsets, k=[2, 10], reduction="none")
        assert bool(told) == (high > 31)
        for q, (start, end) in enumerate([(0, 20), (20, 23)]):
            best = reference.best_first(scores[start:end].tolist(), labels[start:end].tolist())
            for column, k in enumerate([2, 10]):
                assert float(found[q, column]) == pytest.approx(
                    reference.ndcg(best, k, reference.exponential, 0), rel=1e-12
                )


def test_single_functions_equal_rank_metrics_and_average_over_counted_queries() -> None:
    data = lists(10, [4, 7, 0, 12, 3])
    functions = {
        "ndcg": ndcg,
        "dcg": dcg,
        "map": average_precision,
        "mrr": reciprocal_rank,
        "precision": precision,
        "recall": recall,
    }
    for kind, function in functions.items():
        wanted = rank_metrics(*data, metrics=[f"{kind}@3", kind])
        both = function(*data, k=[3, None], reduction="none")
        torch.testing.assert_close(both, torch.stack([wanted[f"{kind}@3"], wanted[kind]], dim=1), equal_nan=True)
        counted = wanted[kind][~wanted[kind].isnan()]
        torch.testing.assert_close(function(*data), counted.mean())
        torch.testing.assert_close(function(*data, k=[3, None])[1], counted.mean())
    torch.testing.assert_close(
        err(*data, k=3, max_grade=4, reduction="none"),
        rank_metrics(*data, metrics=["err@3"], max_grade=4)["err@3"],
        equal_nan=True,
    )


def test_thresholds_say_what_is_relevant() -> None:
    scores, labels, offsets = lists(11, [15, 8])
    found = rank_metrics(scores, labels, offsets, metrics=["map", "precision@5", "mrr", "recall@5"], threshold=3)
    binary = (labels >= 3).double()
    expected = rank_metrics(scores, binary, offsets, metrics=["map", "precision@5", "mrr", "recall@5"])
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=0, equal_nan=True)


def test_no_lists_at_all_and_no_metrics_at_all() -> None:
    nothing = torch.zeros(0), torch.zeros(0), torch.tensor([0])
    assert rank_metrics(*nothing, metrics=["ndcg@10"])["ndcg@10"].shape == (0,)
    assert bool(ndcg(*nothing).isnan())
    assert ndcg(*nothing, k=[1, 2], reduction="none").shape == (0, 2)
    assert rank_metrics(*lists(0, [3]), metrics=[]) == {}


ONE = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]), torch.tensor([0, 2])


def test_errors_name_argument_rule_and_value() -> None:
    for arguments, options, message in [
        ((torch.tensor([1.0, math.nan]), *ONE[1:]), {}, r"`scores` must not be NaN, got NaN at position 1"),
        ((torch.zeros(2, 1), *ONE[1:]), {}, r"`scores` must have shape \(\*,\), got \(2, 1\)"),
        ((ONE[0], torch.zeros(3), ONE[2]), {}, r"`labels` must have shape \(2,\), got \(3,\)"),
        ((ONE[0], torch.tensor([1.0, math.inf]), ONE[2]), {}, r"`labels` must be finite, got inf at position \(1,\)"),
        ((ONE[0], torch.tensor([1.0, -1.0]), ONE[2]), {}, r"`labels` must be at least 0, got -1"),
        ((ONE[0], torch.tensor([1.0, 2000.0]), ONE[2]), {}, r"`labels` must be at most 960 for the gain .*, got 2000"),
        ((*ONE[:2], torch.tensor([0, 3])), {}, r"`offsets` must end at the number of rows, 2, got 3"),
        ((*ONE[:2], torch.tensor([0, 2, 1, 2])), {}, r"`offsets` must not decrease, got 2 before 1 at position 2"),
        (ONE, {"metrics": ["ndgc@10"]}, r"`metrics` must hold names like .*, got 'ndgc@10'; did you mean 'ndcg'\?"),
        (ONE, {"metrics": ["ndcg@0"]}, r"`metrics` must have a whole number of at least 1 after '@', got 'ndcg@0'"),
        (ONE, {"metrics": ["ndcg@"]}, r"`metrics` must have a whole number of at least 1 after '@', got 'ndcg@'"),
        (ONE, {"preset": "lightgmb"}, r"`preset` must be one of .*, got 'lightgmb'; did you mean 'lightgbm'\?"),
        (ONE, {"threshold": 0.0}, r"`threshold` must be positive, got 0.0"),
        (ONE, {"metrics": ["err"]}, r"`max_grade` must be given for err: .*, got None"),
        (ONE, {"metrics": ["err"], "max_grade": 0.5}, r"`max_grade` must be from the highest label, 1, .* got 0.5"),
        (ONE, {"tie_order": torch.zeros(3, dtype=torch.long)}, r"`tie_order` must have shape \(2,\), got \(3,\)"),
        (ONE, {"tie_order": torch.zeros(2)}, r"`tie_order` must hold integers, got torch.float32"),
        (
            (ONE[0], torch.tensor([0.0, 1.5]), ONE[2]),
            {"preset": "lightgbm"},
            r"`labels` must be whole numbers from 0 to 30 for preset 'lightgbm', got 1.5",
        ),
        (
            (ONE[0], torch.tensor([0.0, 3.0]), ONE[2]),
            {"preset": "letor4"},
            r"`labels` must be whole numbers from 0 to 2 for preset 'letor4', got 3",
        ),
    ]:
        with pytest.raises(LGMMLError, match=message):
            rank_metrics(*arguments, **options)


def test_single_functions_refuse() -> None:
    for options, message in [
        ({"k": 0}, r"`k` must be None or whole numbers of at least 1, got 0"),
        ({"k": [5, True]}, r"`k` must be None or whole numbers of at least 1, got True"),
        ({"k": 2.0}, r"`k` must be None or whole numbers of at least 1, got 2.0"),
        ({"k": []}, r"`k` must hold at least one cutoff, got none"),
        ({"reduction": "sum"}, r"`reduction` must be one of 'mean', 'none', got 'sum'"),
    ]:
        with pytest.raises(LGMMLError, match=message):
            ndcg(*ONE, **options)


def test_a_preset_refuses_rules_that_do_not_exist() -> None:
    for field in ["gain", "discount", "short_lists", "ties", "map_divisor", "precision_divisor"]:
        with pytest.raises(LGMMLError, match=rf"`{field}` must be one of .*, got 'other'"):
            dataclasses.replace(PRESETS["default"], **{field: "other"})
        with pytest.raises(LGMMLError, match=r"`threshold` must be positive, got -1"):
            Preset("mine", threshold=-1)


def test_every_definition_is_one_line_that_names_its_preset() -> None:
    for preset in PRESETS:
        for name in NAMES:
            line = describe(name, preset)
            assert line.startswith(f"{name} ({preset}): ")
            assert "ties: " in line
            assert "\n" not in line
        assert "no relevant document" in describe("ndcg@10", preset)


def test_definitions_differ_where_the_rules_do() -> None:
    assert "query skipped" in describe("ndcg@10")
    assert "no relevant document: 1" in describe("ndcg@10", "lightgbm")
    assert "lowest label first" in describe("ndcg@10", "catboost")
    assert "1 at ranks 1 and 2" in describe("dcg", "letor4")
    assert "shorter lists: 0" in describe("ndcg@5", "mslr")
    assert "at most k" in describe("map@5", "lightgbm")
    assert "found up to rank k" in describe("map@5", "torchmetrics")
    assert "label >= 3" in describe("mrr", threshold=3)
    assert "divided by min(k, n)" in describe("precision@5", "xgboost")
    assert "highest grade" in describe("err@5")


def test_a_measure_has_a_name_that_is_known() -> None:
    with pytest.raises(LGMMLError, match=r"got 'ndgc@10'; did you mean 'ndcg'\?"):
        Measure.of("ndgc@10")


def test_a_measure_of_ones_own_gets_scores_labels_and_offsets() -> None:
    def own(scores: torch.Tensor, labels: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.stack([scores[offsets[0]], labels[offsets[1]]])

    found = rank_metrics(torch.tensor([5.0, 1, 2]), torch.tensor([0.0, 1, 7]), torch.tensor([0, 2, 3]), metrics=[own])
    assert found["own"].tolist() == [5.0, 7.0]


def test_labels_beyond_the_range_of_gains_are_fine_where_no_gain_is_taken() -> None:
    data = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0.0, 5000.0, 961.0]), torch.tensor([0, 3])
    found = rank_metrics(*data, metrics=["map", "mrr", "recall@2", "precision@2"])
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {"map": (1 / 2 + 2 / 3) / 2, "mrr": 0.5, "recall@2": 0.5, "precision@2": 0.5}
    )
    for kind in (ndcg, dcg):
        with pytest.raises(LGMMLError, match=r"`labels` must be at most 960 for the gain 2\^y - 1, got 5000"):
            kind(*data)
    by_hand = (5000 / math.log2(3) + 961 / 2) / (5000 + 961 / math.log2(3))
    assert float(ndcg(*data, preset="trec_eval")) == pytest.approx(by_hand)


def test_a_function_is_not_asked_about_no_lists() -> None:
    def first(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
        return labels[offsets[:-1]] + scores.max()  # fails where there are no documents

    found = rank_metrics(torch.zeros(0), torch.zeros(0), torch.tensor([0]), metrics=[first, "ndcg"])
    assert {name: (len(value), value.dtype) for name, value in found.items()} == {
        "first": (0, torch.float64), "ndcg": (0, torch.float64)
    }  # fmt: skip
    found = rank_metrics(torch.ones(1), torch.ones(1), torch.tensor([0, 1]), metrics=[first])
    assert found["first"].tolist() == [2.0]
