from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.boosting import NewtonRows, list_scatter
from lgmml_torch.segments import offsets_from_sizes
from tests.reference import boosting as naive

SIZES = [4, 1, 7, 3, 12]


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(seed: int, width: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, gradients, hessians and offsets of a few lists, float64."""
    n = sum(SIZES)
    x = torch.randn(n, width, generator=gen(seed), dtype=torch.float64)
    g = torch.randn(n, generator=gen(seed + 1), dtype=torch.float64)
    h = torch.rand(n, generator=gen(seed + 2), dtype=torch.float64) + 0.1
    return x, g, h, offsets_from_sizes(torch.tensor(SIZES))


class TestPairScatter:
    def test_agrees_with_loops_over_pairs(self) -> None:
        for seed in range(4):
            for pooled in [False, True]:
                x, g, _, offsets = rows(seed)
                offsets = offsets[[0, -1]] if pooled else offsets
                p, n = g.clamp_min(0), (-g).clamp_min(0)
                values = torch.stack([x, x.flip(1) + 50.0], dim=1)  # (M, 2, 3)
                S, D = list_scatter(values, p, n, offsets)
                for c in range(2):
                    want = naive.list_scatter(values[:, c].numpy(), p.numpy(), n.numpy(), offsets.tolist())
                    np.testing.assert_allclose(S[c].numpy(), want[0], rtol=1e-9, atol=1e-11)
                    np.testing.assert_allclose(D[c].numpy(), want[1], rtol=1e-9, atol=1e-11)

    def test_lists_without_both_kinds_count_for_nothing(self) -> None:
        x = torch.tensor([0.0, 1.0, 100.0, 300.0], dtype=torch.float64).reshape(4, 1, 1)
        p = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
        S, D = list_scatter(x, p, torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64), torch.tensor([0, 2, 4]))
        assert S.item() == 0.0
        assert D.item() == pytest.approx(1.0)

    def test_one_positive_a_list_is_no_pair(self) -> None:
        """What is left of the sums is rounding, which must not be divided by rounding."""
        for dtype in [torch.float32, torch.float64]:
            x = 100 + torch.randn(60, 2, 2, generator=gen(0), dtype=dtype)
            p = torch.zeros(60, dtype=dtype)
            p[::3] = torch.rand(20, generator=gen(1), dtype=dtype) + 0.01
            n = torch.where(p > 0, 0.0, torch.rand(60, generator=gen(2), dtype=dtype))
            offsets = torch.arange(0, 61, 3)
            S, D = list_scatter(x, p, n, offsets)
            assert not S.any()
            for c in range(2):
                _, want = naive.list_scatter(
                    x[:, c].double().numpy(), p.double().numpy(), n.double().numpy(), offsets.tolist()
                )
                np.testing.assert_allclose(D[c].numpy(), want, rtol=1e-3, atol=1e-3)

    def test_nothing_at_all_gives_zeros(self) -> None:
        S, D = list_scatter(torch.randn(3, 2, 2, generator=gen(0)), torch.zeros(3), torch.ones(3), torch.tensor([0, 3]))
        assert not S.any()
        assert not D.any()

    def test_errors(self) -> None:
        with pytest.raises(LGMMLError, match=r"`positive` must have shape \(3,\), got \(2,\)"):
            list_scatter(torch.zeros(3, 1, 1), torch.ones(2), torch.ones(3), torch.tensor([0, 3]))
        with pytest.raises(LGMMLError, match=r"`negative` must have shape \(3,\), got \(2,\)"):
            list_scatter(torch.zeros(3, 1, 1), torch.ones(3), torch.ones(2), torch.tensor([0, 3]))


class TestNewtonRows:
    def test_gains_and_weights_agree_with_loops(self) -> None:
        for seed in range(12):
            k, g, h, offsets = rows(seed, width=4)
            newton = NewtonRows(g, h, offsets, ridge=0.05)
            a, b = naive.newton_parts(k.numpy(), g.numpy(), h.numpy(), offsets.tolist(), 0.05)
            np.testing.assert_allclose(newton.gains(k).numpy(), b * np.abs(b) / np.diag(a), rtol=1e-9)
            np.testing.assert_allclose(newton.weights(k).numpy(), naive.nonnegative_solve(a, b), rtol=1e-5, atol=1e-8)

    def test_shifts_of_the_kernel_change_nothing(self) -> None:
        k, g, h, offsets = rows(5)
        newton = NewtonRows(g, h, offsets)
        torch.testing.assert_close(newton.gains(k), newton.gains(k + 3.0))

    def test_flat_kernels_are_rejected(self) -> None:
        k, g, h, offsets = rows(6)
        assert NewtonRows(g, h, offsets).gains(1.0 + 1e-4 * k).tolist() == [-1.0] * 3

    def test_errors(self) -> None:
        _, g, h, offsets = rows(0)
        with pytest.raises(LGMMLError, match="`hessians` must be positive, got 0"):
            NewtonRows(g, torch.zeros_like(h), offsets)
        with pytest.raises(LGMMLError, match=r"`hessians` must have shape \(27,\), got \(2,\)"):
            NewtonRows(g, h[:2], offsets)
        with pytest.raises(LGMMLError, match="`ridge` must be positive, got 0"):
            NewtonRows(g, h, offsets, ridge=0)


def test_a_kernel_that_never_varies_gets_no_weight() -> None:
    rows = NewtonRows(torch.tensor([1.0, -1.0, 2.0]), torch.ones(3), torch.tensor([0, 3]))
    kernels = torch.tensor([[0.5, 0.1], [0.5, 0.9], [0.5, 0.1]])
    both, alone = rows.weights(kernels), rows.weights(kernels[:, 1:])
    assert both[0] == 0
    assert float(both[1]) == pytest.approx(float(alone), rel=1e-6)
    assert float(alone) > 0
