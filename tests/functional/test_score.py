"""Kernels and scores against the loop over documents and metrics."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from lgmml_torch.checks import DegenerateScoresWarning, LGMMLError
from lgmml_torch.functional import score as score_module
from lgmml_torch.functional.score import (
    KERNELS,
    kernel,
    score,
    warn_if_degenerate,
)
from tests.reference import score as reference

OFFSETS = torch.tensor([0, 1, 1, 5, 9])


def case(k: int = 3, n: int = 9, q: int = 4):
    g = torch.Generator().manual_seed(k)
    dists = 2 * torch.rand(n, k, generator=g, dtype=torch.float64)
    return dists, torch.rand(q, k, generator=g, dtype=torch.float64)


def test_equals_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in sorted(KERNELS):
        for shape in ["query", "row", "vector"]:
            for k in [1, 5]:
                dists, phi = case(k)
                phi = {"query": phi, "row": phi[:1], "vector": phi[0]}[shape]
                expected = reference.score(dists, phi, OFFSETS, name)
                for entries in (1, 4, 1000):
                    monkeypatch.setattr(score_module, "_CHUNK_ENTRIES", entries)
                    torch.testing.assert_close(score(dists, phi, OFFSETS, kernel=name), expected)
                torch.testing.assert_close(score(kernel(dists, name), phi, OFFSETS), expected)


def test_no_documents_no_metrics_one_query() -> None:
    dists, phi = case()
    assert score(dists[:0], phi, torch.zeros(5, dtype=torch.long)).shape == (0,)
    assert score(dists[:0], phi[:0], torch.zeros(1, dtype=torch.long)).shape == (0,)
    assert torch.equal(score(dists[:, :0], phi[:, :0], OFFSETS), torch.zeros(9, dtype=torch.float64))
    one = torch.tensor([0, 9])
    torch.testing.assert_close(score(dists, phi[:1], one), score(dists, phi[0], one))


def test_permuting_metrics_or_documents_changes_no_score() -> None:
    dists, phi = case(5)
    order = torch.tensor([4, 2, 0, 1, 3])
    torch.testing.assert_close(score(dists[:, order], phi[:, order], OFFSETS), score(dists, phi, OFFSETS))
    rows = torch.tensor([0, 4, 2, 3, 1, 8, 5, 6, 7])
    torch.testing.assert_close(score(dists[rows], phi, OFFSETS), score(dists, phi, OFFSETS)[rows])


def test_gradient_in_phi_is_minus_kappa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_module, "_CHUNK_ENTRIES", 4)
    dists, phi = case()
    phi.requires_grad_()
    score(dists, phi, OFFSETS, kernel="paper")[6].backward()
    expected = torch.zeros_like(phi)
    expected[3] = -kernel(dists[6], "paper")
    torch.testing.assert_close(phi.grad, expected)


def test_gradient_flows_to_distances() -> None:
    dists, phi = case()
    dists.requires_grad_()
    assert torch.autograd.gradcheck(lambda d: score(d, phi, OFFSETS, kernel="rbf"), dists)


def test_narrow_storage_gives_the_dtype_of_phi() -> None:
    dists, phi = case()
    found = score(dists.half(), phi.float(), OFFSETS, kernel="paper")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, score(dists, phi, OFFSETS, kernel="paper").float(), atol=2e-3, rtol=2e-3)


def test_kernel_values() -> None:
    d = torch.tensor([0.0, 1.0, 30.0])
    torch.testing.assert_close(kernel(d, "paper"), torch.tensor([0.0, math.exp(-1), 30 * math.exp(-30)]))
    torch.testing.assert_close(kernel(d, "rbf"), torch.tensor([-1.0, -math.exp(-1), -math.exp(-30)]))
    assert torch.equal(kernel(d, "distance"), d)
    for name in KERNELS:
        torch.testing.assert_close(kernel(d.clone(), name, overwrite=True), kernel(d, name))
    around = torch.tensor([0.9, 1.0, 1.1])  # the paper's kernel turns at 1
    assert kernel(around, "paper").argmax() == 1


def test_flat_lists() -> None:
    scores = torch.tensor([-5.0, 1.0, 1.0, 1.0 + 1e-7, 1.0, 2.0, 2.0, -2.0, -2.0])
    with pytest.warns(DegenerateScoresWarning, match="within 67% of the lists"):
        assert warn_if_degenerate(scores, torch.tensor([0, 1, 4, 6, 6, 7, 9])) == pytest.approx(2 / 3)
    with pytest.warns(DegenerateScoresWarning, match="within 100% of the lists"):
        assert warn_if_degenerate(torch.zeros(4), torch.tensor([0, 4])) == 1.0
    assert math.isnan(warn_if_degenerate(torch.zeros(2), torch.tensor([0, 1, 2])))
    assert math.isnan(warn_if_degenerate(torch.zeros(0), torch.tensor([0])))


def test_degenerate_scores_are_said_and_others_are_not() -> None:
    with pytest.warns(DegenerateScoresWarning, match="nearly constant within 100% of the lists"):
        assert warn_if_degenerate(torch.full((6,), -3.0), torch.tensor([0, 3, 6])) == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_if_degenerate(torch.arange(6.0), torch.tensor([0, 3, 6])) == 0.0
        warn_if_degenerate(torch.zeros(1), torch.tensor([0, 1]))


def test_errors_name_argument_rule_and_value() -> None:
    dists, phi = case()
    with pytest.raises(LGMMLError, match=r"`kernel` must be one of .*, got 'papr'; did you mean 'paper'"):
        kernel(dists, "papr")
    with pytest.raises(LGMMLError, match=r"`kernel` must be one of .*, got 'rbff'"):
        score(dists, phi, OFFSETS, kernel="rbff")
    for bad in (phi[:2], phi[:, :2], phi[None]):
        with pytest.raises(LGMMLError, match=r"`phi` must have shape \(4, 3\), \(1, 3\) or \(3,\), got \("):
            score(dists, bad, OFFSETS)
    with pytest.raises(LGMMLError, match=r"`values` must have shape \(\*, \*\), got \(9,\)"):
        score(dists[:, 0], phi, OFFSETS)
    with pytest.raises(LGMMLError, match=r"`offsets` must end at the number of rows, 9, got 4"):
        score(dists, phi, torch.tensor([0, 1, 2, 3, 4]))
    with pytest.raises(LGMMLError, match=r"`offsets` must not decrease"):
        warn_if_degenerate(torch.zeros(4), torch.tensor([0, 3, 2, 4]))
