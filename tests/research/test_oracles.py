from __future__ import annotations

import pytest
import torch

from research.by_example.sets import ExampleSet
from research.systems.mlr import ORACLES, most_violated_cut
from tests.reference import rmlr as reference


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block of queries with different numbers of relevant, other and hidden documents."""
    g = torch.Generator().manual_seed(seed)
    n = 2 + seed % 6  # 2 to 7
    scores = -torch.rand(5, n, generator=g, dtype=torch.float64) * (0.1, 0.5, 2.0)[seed % 3]
    if seed % 4 == 0:
        scores = (scores * 4).round() / 4  # ties, and margins met exactly
    relevant = torch.rand(5, n, generator=g) < 0.5
    shown = torch.rand(5, n, generator=g) < (0.8 if seed % 2 else 1.1)
    return scores, relevant & shown, ~relevant & shown


@pytest.mark.parametrize("loss", ["map", "auc"])
@pytest.mark.parametrize("seed", [4, 5, 9])
def test_oracle_equals_brute_force_over_all_interleavings(seed: int, loss: str) -> None:
    scores, relevant, others = random_case(seed)
    worst = ORACLES[loss](scores, relevant, others)
    violation = worst.loss - (worst.coefficients * scores).sum(1)
    assert torch.allclose(worst.coefficients.sum(1), torch.zeros(5, dtype=torch.float64), atol=1e-12)
    for q in range(5):
        shown = (relevant | others)[q]
        if not (relevant[q].any() and others[q].any()):
            assert worst.loss[q] == 0
            assert (worst.coefficients[q] == 0).all()
            continue
        expected = reference.worst_violation(scores[q, shown].tolist(), relevant[q, shown].tolist(), loss)
        assert float(violation[q]) == pytest.approx(expected, abs=1e-12)
        assert (worst.coefficients[q, ~shown] == 0).all()


@pytest.mark.parametrize("loss", ["map", "auc"])
def test_no_permutation_is_worse_than_the_best_interleaving(loss: str) -> None:
    scores, relevant, _ = random_case(4)  # 6 documents
    relevant[:, 0], relevant[:, 1] = True, False
    worst = ORACLES[loss](scores, relevant, ~relevant)
    violation = worst.loss - (worst.coefficients * scores).sum(1)
    for q in range(2):
        expected = reference.worst_violation(scores[q].tolist(), relevant[q].tolist(), loss, everything=True)
        assert float(violation[q]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("loss", ["map", "auc"])
def test_right_order_with_wide_margins_is_never_violated(loss: str) -> None:
    scores = torch.tensor([[-0.0, -0.1, -100.0, -101.0]])
    relevant = torch.tensor([[True, True, False, False]])
    worst = ORACLES[loss](scores, relevant, ~relevant)
    assert float(worst.loss) == 0
    assert (worst.coefficients == 0).all()


@pytest.mark.parametrize("loss", ["map", "auc"])
def test_cut_is_the_mean_over_queries_in_any_block_size(loss: str, generator: torch.Generator) -> None:
    X = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    data = ExampleSet.from_labels(X, torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]))
    factor = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    cut = most_violated_cut(factor, data, ORACLES[loss])
    blocked = most_violated_cut(factor, data, ORACLES[loss], max_elements=20)
    assert torch.allclose(cut.psi, blocked.psi, atol=1e-12)
    assert cut.violation == pytest.approx(cut.loss - float((cut.psi * (factor @ factor.mT)).sum()), abs=1e-9)
    expected = 0.0
    relevant, others = data.masks()
    for q in range(9):
        shown = (relevant | others)[q]
        scores = -((X - X[q]) @ factor).square().sum(1)[shown]
        expected += reference.worst_violation(scores.tolist(), relevant[q, shown].tolist(), loss) / 9
    assert cut.violation == pytest.approx(expected, abs=1e-9)
