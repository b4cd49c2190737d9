from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.functional.combine import combination_weights, mean_deviations, weighted_sum
from lgmml_torch.functional.ranking.measures import ndcg
from lgmml_torch.segments import offsets_from_sizes

# Two lists of three; each system ranks one of them well and is decided there, and errs narrowly in the other.
OFFSETS = torch.tensor([0, 3, 6])
LABELS = torch.tensor([2, 1, 0, 2, 1, 0])
FIRST = torch.tensor([9.0, 6.0, 0.0, 0.0, 0.5, 1.0])
SECOND = torch.tensor([0.0, 0.5, 1.0, 9.0, 6.0, 0.0])


def quality(weights: Tensor, scores: Tensor, labels: Tensor = LABELS, offsets: Tensor = OFFSETS) -> float:
    return float(ndcg((weights[:, None] * scores.double()).sum(0), labels, offsets, k=10))


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
    assert quality(found, scores) == 1.0
    for alone in torch.eye(2, dtype=torch.float64):
        assert quality(alone, scores) < 1.0
    deviations = mean_deviations(scores.double(), OFFSETS)
    torch.testing.assert_close(found, 0.5 / deviations)


def test_a_system_that_does_not_help_gets_nothing() -> None:
    found = combination_weights(torch.stack([-LABELS.double(), LABELS.double()]), LABELS, OFFSETS)
    assert found.tolist() == [0.0, pytest.approx(1.5**0.5)]
    twice = combination_weights(torch.stack([FIRST, FIRST]), LABELS, OFFSETS)
    assert twice[0] > 0
    assert twice[1] == 0


@pytest.mark.parametrize("systems", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_definition(systems: int, seed: int) -> None:
    scores, labels, offsets = random_case(seed, systems)
    found = combination_weights(scores, labels, offsets, steps=7)
    torch.testing.assert_close(found, by_counting(scores, labels, offsets, 7), rtol=1e-9, atol=0)
    assert torch.equal(found, combination_weights(scores, labels, offsets, steps=7))


@pytest.mark.parametrize("systems", [2, 3])
def test_the_choice_lies_between_the_best_alone_and_the_best_of_all(systems: int) -> None:
    for seed in range(6):
        scores, labels, offsets = random_case(100 + seed, systems, queries=5)
        found = quality(combination_weights(scores, labels, offsets, steps=6), scores, labels, offsets)
        deviations = mean_deviations(scores.double(), offsets)
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
    constant = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 0.7])
    found = combination_weights(torch.stack([constant, FIRST, constant * 0]), LABELS, OFFSETS)
    assert found[0] == found[2] == 0
    assert found[1] > 0
    assert combination_weights(constant[None], LABELS, OFFSETS).tolist() == [0.0]
    assert combination_weights(torch.zeros(0, 6), LABELS, OFFSETS).shape == (0,)


def test_one_system_alone_keeps_its_order() -> None:
    found = combination_weights(FIRST[None], LABELS, OFFSETS)
    assert found.tolist() == [pytest.approx(1 / float(mean_deviations(FIRST[None].double(), OFFSETS)))]


def test_ties_follow_the_order_they_are_given() -> None:
    """The second system has two documents level: by the caller's order it is as good as the first, or not."""
    labels, offsets = torch.tensor([1, 0, 0]), torch.tensor([0, 3])
    scores = torch.tensor([[2.0, 3.0, 1.0], [1.0, 1.0, 0.0]])
    ahead = combination_weights(scores, labels, offsets, tie_order=torch.tensor([0, 1, 2]))
    behind = combination_weights(scores, labels, offsets, tie_order=torch.tensor([1, 0, 2]))
    assert ahead[0] == 0
    assert behind[0] > 0


def test_equal_documents_get_equal_sums() -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 1, generator=g).expand(5, 1003).contiguous()
    assert weighted_sum(torch.rand(5, generator=g), scores).unique().numel() == 1


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
