"""Weights of documents and biases of positions, against naive loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.fitting.round import Bag, BoostConfig
from lgmml_torch.functional import losses
from lgmml_torch.functional.losses import (
    bias_of,
    lambda_gradients,
    num_positions,
    position_curve,
    softmax_loss,
)
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_ids
from tests.reference import weighted

OFFSETS = torch.tensor([0, 4, 4, 9, 10, 16])


def step(bias: Tensor, shown: Tensor, g: Tensor, h: Tensor, *, shrinkage: float, ridge: float) -> Tensor:
    """What one round makes of the biases of positions."""
    bag = Bag(torch.zeros(len(g), 1), g, h, torch.tensor([0, len(g)]), shown)
    return bag.position_step(bias, BoostConfig(shrinkage=shrinkage, position_ridge=ridge))


def some(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (16,), generator=g).double()
    weights = torch.rand(16, generator=g).double() * torch.randint(0, 3, (16,), generator=g)
    return torch.randn(16, generator=g).double(), labels, weights


def test_pairs_count_as_their_better_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK_PAIRS", 7)
    for seed in range(5):
        for truncation in [2, 30]:
            scores, labels, weights = some(seed)
            found = lambda_gradients(scores, labels, OFFSETS, truncation=truncation, weights=weights)
            plain = (scores.tolist(), labels.tolist(), weights.tolist(), OFFSETS.tolist())
            expected = weighted.lambda_gradients(*plain, truncation=truncation)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64))


def test_targets_count_as_their_documents() -> None:
    for seed in range(5):
        scores, labels, weights = some(seed)
        expected = weighted.softmax(scores.tolist(), labels.tolist(), weights.tolist(), OFFSETS.tolist())
        found = softmax_loss(scores, labels, OFFSETS, weights=weights)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-9)


def test_one_weight_for_a_list_is_a_factor() -> None:
    scores, labels, _ = some(9)
    factor = torch.tensor([2.0, 1.0, 0.5, 3.0, 4.0]).double()
    rows = factor[segment_ids(OFFSETS)]
    plain = lambda_gradients(scores, labels, OFFSETS)
    for found, unweighted in zip(lambda_gradients(scores, labels, OFFSETS, weights=rows), plain, strict=True):
        torch.testing.assert_close(found, unweighted * rows)
    torch.testing.assert_close(
        softmax_loss(scores, labels, OFFSETS, weights=rows), softmax_loss(scores, labels, OFFSETS) * factor
    )


def test_weights_of_one_are_no_weights() -> None:
    scores, labels, _ = some(3)
    ones = torch.ones(16).double()
    for found, plain in zip(
        lambda_gradients(scores, labels, OFFSETS, weights=ones), lambda_gradients(scores, labels, OFFSETS), strict=True
    ):
        assert torch.equal(found, plain)
    assert torch.equal(softmax_loss(scores, labels, OFFSETS, weights=ones), softmax_loss(scores, labels, OFFSETS))


def test_weights_must_fit() -> None:
    for loss in [lambda_gradients, softmax_loss]:
        scores, labels, weights = some(0)
        with pytest.raises(LGMMLError, match="`weights` must have shape"):
            loss(scores, labels, OFFSETS, weights=weights[:3])  # type: ignore[operator]


def test_a_step_on_positions() -> None:
    g = torch.Generator().manual_seed(0)
    shown = torch.tensor([0, 1, 1, 3, 3, 3])
    bias, gradients, hessians = (torch.randn(n, generator=g).double() for n in (5, 6, 6))
    hessians = hessians.abs()
    found = step(bias, shown, gradients, hessians, shrinkage=0.3, ridge=0.2)
    expected = weighted.position_step(
        bias.tolist(), shown.tolist(), gradients.tolist(), hessians.tolist(), shrinkage=0.3, ridge=0.2
    )
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert abs(found[2]) < abs(bias[2])  # nothing was shown there: it goes back to 0


def test_steps_end_where_the_loss_is_least() -> None:
    """One list after the other with the click on top, three times in four: log-odds of 3/4 between the places."""
    clicks = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]]).reshape(-1).double()
    offsets, shown = torch.arange(0, 9, 2), torch.tensor([0, 1] * 4)
    bias = torch.zeros(2).double()
    for _ in range(300):
        both = lambda_gradients(bias[shown], clicks, offsets)
        bias = step(bias, shown, *both, shrinkage=0.1, ridge=1e-9)
    assert float(bias[0] - bias[1]) == pytest.approx(torch.tensor(3.0).log().item(), abs=1e-3)


def test_positions_of_new_lists() -> None:
    bias = torch.tensor([0.5, -1.0])
    assert bias_of(bias, torch.tensor([1, 0, 7])).tolist() == [-1.0, 0.5, 0.0]
    data = RankingData.from_arrays([[1.0], [2.0], [3.0]], [1, 0, 0], qid=[1, 1, 2], positions=[4, 2, 2])
    assert num_positions(data) == 5
    assert num_positions(data.replace(positions=None)) == 0
    assert position_curve(torch.arange(5.0), data) == {2: 0.0, 4: 2.0}
