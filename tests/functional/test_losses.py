from __future__ import annotations

from typing import Any

import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional import losses
from lgmml_torch.functional.losses import label_difference_loss, lambda_gradients, spearman_loss
from lgmml_torch.segments import offsets_from_sizes, segment_sum
from tests.reference import lambdarank as naive
from tests.reference import list_losses


def lists(seed: int, sizes: list[int], *, ties: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    scores = torch.randn(n, generator=gen, dtype=torch.float64)
    labels = torch.randint(0, 5, (n,), generator=gen).double()
    return scores.round() if ties else scores, labels, offsets_from_sizes(torch.tensor(sizes))


def test_agrees_with_loops_over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK_PAIRS", 64)
    for ties in [False, True]:
        for settings in [{}, {"truncation": 1}, {"truncation": 3, "sigma": 2.0, "floor": 0.0}]:
            for sizes in [[5, 1, 0, 40, 2], [7], [0, 0, 3], [1, 1]]:
                scores, labels, offsets = lists(sum(sizes), sizes, ties=ties)
                got = lambda_gradients(scores, labels, offsets, **settings)  # type: ignore[arg-type]
                want = naive.lambda_gradients(scores.tolist(), labels.tolist(), offsets.tolist(), **settings)  # type: ignore[arg-type]
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a, torch.tensor(b, dtype=torch.float64))


def test_gradients_sum_to_zero_over_every_list() -> None:
    scores, labels, offsets = lists(3, [12, 30, 1, 50])
    g, h = lambda_gradients(scores, labels, offsets, truncation=5)
    torch.testing.assert_close(segment_sum(g, offsets), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    assert (h >= 0).all()


def test_lists_do_not_depend_on_each_other() -> None:
    scores, labels, offsets = lists(4, [9, 14])
    together = lambda_gradients(scores, labels, offsets)
    alone = lambda_gradients(scores[9:], labels[9:], torch.tensor([0, 14]))
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a[9:], b, atol=1e-14, rtol=1e-12)


def test_lists_without_a_pair_have_no_gradient() -> None:
    for labels in (torch.zeros(6), torch.full((6,), 2.0), -torch.arange(6.0)):
        g, h = lambda_gradients(torch.arange(6.0), labels, torch.tensor([0, 1, 6]))
        assert not g.any()
        assert not h.any()
    empty = lambda_gradients(torch.zeros(0), torch.zeros(0), torch.tensor([0]))
    assert [len(x) for x in empty] == [0, 0]


def test_extreme_scores_stay_finite() -> None:
    for spread in [0.0, 1.0, 1e4, 1e30]:
        scores, labels, offsets = lists(5, [20, 20])
        g, h = lambda_gradients(scores.float() * spread, labels.float(), offsets)
        assert torch.isfinite(g).all()
        assert torch.isfinite(h).all()


def test_a_list_of_50_000_documents_is_handled_in_bounded_memory() -> None:
    gen = torch.Generator().manual_seed(0)
    n = 50_000
    labels = torch.randint(0, 5, (n,), generator=gen).float()
    g, h = lambda_gradients(torch.randn(n, generator=gen), labels, torch.tensor([0, n]))
    assert torch.isfinite(g).all()
    assert float(h.sum()) > 0


def test_errors_name_the_argument() -> None:
    ok = (torch.zeros(2), torch.zeros(2), torch.tensor([0, 2]))
    with pytest.raises(LGMMLError, match=r"`labels` must have shape \(2,\), got \(3,\)"):
        lambda_gradients(ok[0], torch.zeros(3), ok[2])
    with pytest.raises(LGMMLError, match="`offsets` must end at the number of rows, 2, got 1"):
        lambda_gradients(*ok[:2], torch.tensor([0, 1]))
    with pytest.raises(LGMMLError, match="`truncation` must be positive, got 0"):
        lambda_gradients(*ok, truncation=0)
    with pytest.raises(LGMMLError, match="`sigma` must be positive, got -1"):
        lambda_gradients(*ok, sigma=-1.0)
    with pytest.raises(LGMMLError, match="`floor` must be at least 0, got -1"):
        lambda_gradients(*ok, floor=-1.0)


LIST_LOSSES = [(spearman_loss, list_losses.spearman), (label_difference_loss, list_losses.label_differences)]


@pytest.mark.parametrize(("loss", "reference"), LIST_LOSSES)
class TestLossesOfLists:
    """Spearman's and that of label differences, beside loops over pairs."""

    def test_agrees_with_loops_over_pairs(self, loss: Any, reference: Any) -> None:
        for ties in [False, True]:
            scores, labels, offsets = lists(3, [5, 1, 0, 40, 2, 6], ties=ties)
            labels[-6:] = 2.0  # a list of one label
            bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            want = [reference(scores[a:b].tolist(), labels[a:b].tolist()) for a, b in bounds]
            torch.testing.assert_close(loss(scores, labels, offsets), torch.tensor(want, dtype=torch.float64))

    def test_gradients_agree_with_finite_differences(self, loss: Any, reference: Any) -> None:
        for ties in [False, True]:
            scores, labels, offsets = lists(5, [6, 1, 0, 9, 4], ties=ties)
            labels[-4:] = 1.0
            assert torch.autograd.gradcheck(lambda f, y=labels, o=offsets: loss(f, y, o), scores.requires_grad_())

    def test_what_has_nothing_to_tell_apart_is_zero(self, loss: Any, reference: Any) -> None:
        scores = torch.tensor([1.0, 5.0, 5.0], requires_grad=True)
        found = loss(scores, torch.tensor([3, 1, 1]), torch.tensor([0, 1, 1, 3]))  # one document, none, one label
        assert found.tolist() == [0.0, 0.0, 0.0]
        (gradient,) = torch.autograd.grad(found.sum(), scores)
        assert gradient.tolist() == [0.0, 0.0, 0.0]
        assert loss(torch.zeros(0), torch.zeros(0), torch.tensor([0])).shape == (0,)

    def test_a_shift_of_a_list_changes_nothing(self, loss: Any, reference: Any) -> None:
        scores, labels, offsets = lists(7, [8, 5])
        shift = torch.tensor([3.0, -1.0], dtype=torch.float64).repeat_interleave(torch.tensor([8, 5]))
        torch.testing.assert_close(loss(scores + shift, labels, offsets), loss(scores, labels, offsets))

    def test_errors_name_the_argument(self, loss: Any, reference: Any) -> None:
        with pytest.raises(LGMMLError, match=r"`labels` must have shape \(2,\), got \(3,\)"):
            loss(torch.zeros(2), torch.zeros(3), torch.tensor([0, 2]))


def test_spearman_loss_is_one_minus_the_correlation_of_scores_far_apart() -> None:
    """ρ = 1 − 6 Σ d² / (n (n² − 1)) where nothing is tied."""
    g = torch.Generator().manual_seed(2)
    labels = torch.arange(7, dtype=torch.float64)
    for scores in (labels, -labels, labels[torch.randperm(7, generator=g)]):
        rho = 1 - 6 * float((scores.argsort().argsort() - labels).square().sum()) / (7 * 48)
        if torch.equal(scores, -labels):
            assert rho == pytest.approx(-1)
        found = spearman_loss(1000 * scores, labels, torch.tensor([0, 7]))
        assert float(found) == pytest.approx(1 - rho)
