"""Local distances against the loop over pairs, near anchors, in tiles and into given memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError, NumericsWarning
from lgmml_torch.functional import distance
from lgmml_torch.functional import distance as quadratic
from lgmml_torch.functional.distance import DistanceTiles, _QuadraticFiller, local_distances, norm_factors
from lgmml_torch.functional.score import median_scales
from tests.reference import distance as reference


def case(n: int, d: int, k: int, r: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=dtype)
    return x, torch.randn(k, d, generator=g, dtype=dtype), torch.randn(k, d, r, generator=g, dtype=dtype)


def tiled(x: Tensor, a: Tensor, F: Tensor, *, norm: str = "mahalanobis", method: str = "factor", rows: int = 2048):
    """Distances by one of the forms, ``rows`` at a time; "auto" takes the one that suits."""
    if method == "auto":
        method = DistanceTiles.method_for(x, F, norm)
    tiles = DistanceTiles(x, a, F, norm=norm, method=method)
    tiles.chunk_rows = rows
    return tiles.write(x, x.new_empty((len(x), len(a))))


def test_equals_the_loop() -> None:
    for norm in ["mahalanobis", "trace"]:
        for n, d, k, r in [(0, 3, 2, 3), (1, 1, 1, 1), (7, 4, 1, 4), (9, 5, 6, 2), (5, 3, 0, 3)]:
            x, a, F = case(n, d, k, r, seed=n + d)
            found = tiled(x, a, F, norm=norm, rows=4)
            torch.testing.assert_close(found, reference.local_distances(x, a, F, norm), rtol=1e-12, atol=1e-12)


def test_float32_stays_within_a_ten_thousandth_of_the_median_everywhere() -> None:
    for norm in ["mahalanobis", "trace"]:
        for scale in [1.0, 1e3]:
            x, _, F = case(300, 40, 6, 40, dtype=torch.float32)
            x += scale  # far from the origin, where expanded squares would cancel
            anchors = x[:6].clone()
            x[6:12] = anchors + 1e-3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
            found = local_distances(x, anchors, F, norm=norm)
            exact = reference.local_distances(x, anchors, F, norm)
            assert not found.isnan().any()
            assert ((found - exact).abs() <= 1e-4 * exact.median(dim=0).values).all()
            assert (found.diagonal() == 0).all()  # documents 0..5 are the anchors


def quadratic_case(kind: str, dim: int = 24, k: int = 6, n: int = 700):
    """Rows, anchors among them, near copies of the anchors, and factors of the given temper."""
    g = torch.Generator().manual_seed(dim)
    x = torch.randn(n, dim, generator=g, dtype=torch.float64)
    F = torch.randn(k, dim, dim, generator=g, dtype=torch.float64)
    if kind == "heavy":
        x = x.sign() * (2 * x.abs()).exp()
    if kind == "offset":
        x = x + 1000
    if kind == "units":
        x = x * torch.logspace(-8, 8, dim, dtype=x.dtype)
        F = F / torch.logspace(-8, 8, dim, dtype=x.dtype)[:, None]
    if kind in ("correlated", "mixed"):  # weak directions weigh most: the quadratic form itself cancels
        x = x @ torch.diag(torch.logspace(0, -3, dim, dtype=x.dtype)) @ torch.linalg.qr(F[0]).Q
        values, vectors = torch.linalg.eigh(torch.cov(x.T))
        F[: k if kind == "correlated" else k // 2] = vectors * values**-0.4
    x = x.float()
    anchors = x[:k].clone()
    x[k : 2 * k] = anchors * (1 + 1e-4 * torch.randn(k, dim, generator=g))
    return x, anchors, F.float()


def test_the_quadratic_form_keeps_its_tolerance_everywhere() -> None:
    for kind in ["plain", "heavy", "offset", "units", "correlated", "mixed"]:
        x, anchors, F = quadratic_case(kind)
        found = tiled(x, anchors, F, method="quadratic", rows=300)
        exact = local_distances(x.double(), anchors, F)
        assert not found.isnan().any()
        assert ((found - exact).abs() <= 1e-4 * exact.median(dim=0).values).all()
        assert (found.diagonal() == 0).all()


def test_the_quadratic_form_of_small_things() -> None:
    for n, d, k, r in [(0, 3, 2, 3), (1, 1, 1, 1), (7, 4, 1, 4), (9, 5, 6, 2), (5, 3, 0, 3)]:
        x, a, F = case(n, d, k, r, dtype=torch.float32)
        found = tiled(x, a, F, method="quadratic", rows=4)
        torch.testing.assert_close(found, local_distances(x, a, F), rtol=1e-4, atol=1e-4)


def test_what_the_quadratic_form_is_sure_of_keeps_to_the_tolerance() -> None:
    """Features move together and metrics look at their differences: terms are far larger than what is left of them."""
    for dim in [8, 30]:
        for common in [20.0, 40.0]:
            g = torch.Generator().manual_seed(0)
            x = torch.randn(300, dim, generator=g) + common * torch.randn(300, 1, generator=g)
            factors = torch.randn(12, dim, dim, generator=g)
            anchors, factors = x[:12].clone(), factors - factors.mean(dim=1, keepdim=True)
            exact = reference.local_distances(x.double(), anchors.double(), factors.double(), "mahalanobis").T
            tile = torch.empty(12, len(x))
            unsure = _QuadraticFiller(anchors, factors).approximate(x, tile)
            error = (tile.double() - exact).abs() / exact.mean(dim=1, keepdim=True)
            assert float(error.max()) > 5 * quadratic.TOLERANCE  # the form alone would not do
            assert float(error[~unsure].max()) <= quadratic.TOLERANCE
            assert 0.1 < float(unsure.double().mean()) < 0.9


def test_metrics_the_quadratic_form_does_not_suit_are_left_to_the_factors() -> None:
    for kind, suits in (("mixed", False), ("plain", True)):
        x, anchors, F = quadratic_case(kind, dim=40, k=40)
        for unit in (1.0, 2.0**10, 2.0**-10):  # of the distances
            tiles = DistanceTiles(x, anchors, unit * F, method="quadratic")
            assert isinstance(tiles.fill, _QuadraticFiller) == suits


def test_monomials_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, anchors, F = quadratic_case("plain")
    whole = tiled(x, anchors, F, method="quadratic")
    monkeypatch.setattr(quadratic, "_BLOCK", 1)
    torch.testing.assert_close(tiled(x, anchors, F, method="quadratic"), whole, rtol=1e-4, atol=1e-4)


def test_float64_always_gets_the_factor_form() -> None:
    x, a, F = case(10, 3, 2, 3)
    assert torch.equal(tiled(x, a, F, method="quadratic"), local_distances(x, a, F))


def test_auto_takes_the_quadratic_form_for_many_rows_of_high_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    x, anchors, F = quadratic_case("plain", dim=10)
    few, narrow = local_distances(x, anchors, F), local_distances(x, anchors, F[:, :, :5])
    many = tiled(x, anchors, F, method="quadratic")
    assert torch.equal(tiled(x, anchors, F, method="auto"), few)
    monkeypatch.setattr(distance, "MANY_ROWS", len(x))
    assert torch.equal(tiled(x, anchors, F, method="auto"), many)
    assert not torch.equal(many, few)
    assert torch.equal(tiled(x, anchors, F[:, :, :5], method="auto"), narrow)
    wide = tiled(x, anchors, F[:, :, :5], method="auto", norm="trace")  # whose factor is the metric itself
    assert torch.equal(wide, tiled(x, anchors, F[:, :, :5], method="quadratic", norm="trace"))


def test_scales_divide_before_the_result_is_rounded() -> None:
    x, a, F = case(40, 5, 3, 5, dtype=torch.float32)
    scales = torch.tensor([1e-3, 1.0, 7.0])
    tiles = DistanceTiles(x, a, 1e5 * F)  # beyond float16 unless divided first
    tiles.chunk_rows = 16
    found = tiles.write(x, torch.empty(40, 3, dtype=torch.float16), 1e5 * scales)
    expected = local_distances(x, a, F) / scales
    torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-6)


def test_identity_factors_give_euclidean_distances_under_both_norms() -> None:
    x, a, _ = case(20, 5, 4, 1)
    eye = torch.eye(5, dtype=x.dtype).expand(4, 5, 5)
    for norm in ("mahalanobis", "trace"):
        torch.testing.assert_close(local_distances(x, a, eye, norm=norm), torch.cdist(x, a))


def test_scaling_the_factor_scales_one_norm_once_and_the_other_twice() -> None:
    x, a, F = case(20, 5, 4, 3)
    torch.testing.assert_close(local_distances(x, a, 3 * F), 3 * local_distances(x, a, F))
    torch.testing.assert_close(local_distances(x, a, 3 * F, norm="trace"), 9 * local_distances(x, a, F, norm="trace"))


def test_permuting_documents_and_metrics_permutes_the_result() -> None:
    x, a, F = case(40, 6, 9, 6)
    rows, metrics = torch.randperm(40, generator=torch.Generator().manual_seed(2)), torch.arange(8, -1, -1)
    permuted = tiled(x[rows], a[metrics], F[metrics], rows=7)
    torch.testing.assert_close(permuted, local_distances(x, a, F)[rows][:, metrics])


def test_a_rotation_of_the_factor_changes_nothing() -> None:
    x, a, F = case(15, 4, 3, 4)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=x.dtype)).Q
    torch.testing.assert_close(local_distances(x, a, F @ turn), local_distances(x, a, F))


def test_features_are_left_alone() -> None:
    x, a, F = case(10, 3, 2, 3)
    before = x.clone()
    local_distances(x, a, F)
    assert torch.equal(x, before)


def test_features_decide_the_dtype_and_strides_do_not_matter() -> None:
    x, a, F = case(10, 3, 2, 3)
    wide = torch.stack([x, x], dim=2)[:, :, 0].float()
    assert local_distances(wide, a, F).dtype == torch.float32
    torch.testing.assert_close(local_distances(x.T.contiguous().T, a, F), local_distances(x, a, F))


def test_subspaces_equal_the_loop() -> None:
    for norm in ["mahalanobis", "trace"]:
        for s in [1, 2, 3, 12]:
            g = torch.Generator().manual_seed(s)
            x = torch.randn(30, 14, generator=g, dtype=torch.float64)
            support = torch.stack([torch.randperm(14, generator=g)[:s] for _ in range(5)])
            a = torch.randn(5, s, generator=g, dtype=torch.float64)
            F = torch.randn(5, s, max(1, s - 1), generator=g, dtype=torch.float64)
            found = local_distances(x, a, F, support=support, norm=norm)
            expected = reference.subspace_distances(x, support, a, F, norm)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
            full_a, full_F = torch.zeros(5, 14, dtype=x.dtype), torch.zeros(5, 14, F.shape[2], dtype=x.dtype)
            for r in range(5):
                full_a[r, support[r]], full_F[r, support[r]] = a[r], F[r]
            torch.testing.assert_close(found, local_distances(x, full_a, full_F, norm=norm))


def test_subspace_factors_of_any_rank() -> None:
    for rank in [0, 1, 2, 3, 5]:
        for size in [1e-15, 1.0, 1e15]:
            g = torch.Generator().manual_seed(rank)
            x = torch.randn(30, 6, generator=g)
            support = torch.tensor([[0, 5, 2], [1, 2, 3]])
            anchors, factors = torch.randn(2, 3, generator=g), size * torch.randn(2, 3, rank, generator=g)
            factors[1, :, 1:] = 0  # a metric of lower rank than the others
            found = local_distances(x, anchors, factors, support=support)
            expected = reference.subspace_distances(
                x.double(), support, anchors.double(), factors.double(), "mahalanobis"
            )
            assert ((found - expected).abs() <= 1e-5 * expected.median(dim=0).values).all()


def test_subspaces_of_nothing() -> None:
    x, support = torch.zeros(0, 3), torch.zeros(2, 1, dtype=torch.long)
    assert local_distances(x, torch.zeros(2, 1), torch.ones(2, 1, 1), support=support).shape == (0, 2)
    none = torch.zeros(0, 2, dtype=torch.long)
    assert local_distances(torch.zeros(4, 3), torch.zeros(0, 2), torch.ones(0, 2, 2), support=none).shape == (4, 0)


def test_subspace_distance_is_zero_at_the_anchor() -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) + 100
    support = torch.tensor([[4, 1]])
    assert local_distances(x, x[2:3, [4, 1]], torch.randn(1, 2, 2), support=support)[2, 0] == 0


def test_medians_are_the_lower_middle_value() -> None:
    for n in [1, 2, 7, 8]:
        dists = torch.rand(n, 21, generator=torch.Generator().manual_seed(n)) + 0.1
        expected = [sorted(dists[:, r].tolist())[(n - 1) // 2] for r in range(21)]
        torch.testing.assert_close(median_scales(dists), torch.tensor(expected))
        assert torch.equal(median_scales(dists), median_scales(dists.flip(0)))


def test_a_median_of_zero_is_replaced_and_said() -> None:
    dists = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 2.0], [3.0, 0.0, 3.0]])
    with pytest.warns(NumericsWarning, match="2 of 3 metrics have a median distance of 0"):
        scales = median_scales(dists)
    torch.testing.assert_close(scales, torch.tensor([1.0, 1.0, 2.0]))


def test_trace_factor_is_the_metric() -> None:
    F = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(norm_factors(F, "trace"), F @ F.mT)
    assert norm_factors(F, "mahalanobis") is F


def test_errors_name_argument_rule_and_value() -> None:
    x, a, F = case(4, 3, 2, 3, dtype=torch.float32)
    with pytest.raises(LGMMLError, match=r"`features` must have shape \(\*, \*\), got \(3,\)"):
        local_distances(x[0], a, F)
    with pytest.raises(LGMMLError, match=r"`anchors` must have shape \(\*, 3\), got \(2, 2\)"):
        local_distances(x, a[:, :2], F)
    with pytest.raises(LGMMLError, match=r"`factors` must have shape \(2, 3, \*\), got \(1, 3, 3\)"):
        local_distances(x, a, F[:1])
    with pytest.raises(LGMMLError, match=r"`norm` must be one of .*, got 'trac'; did you mean 'trace'"):
        local_distances(x, a, F, norm="trac")
    with pytest.raises(LGMMLError, match=r"`method` must be one of 'factor', .* 'stacked', got 'fast'"):
        tiled(x, a, F, method="fast")
    with pytest.raises(LGMMLError, match=r"`features` must be finite, got nan at position \(1, 2\)"):
        local_distances(torch.where(torch.arange(12).view(4, 3) == 5, torch.nan, x), a, F)
    with pytest.raises(LGMMLError, match=r"`anchors` must be finite, got inf"):
        local_distances(x, a.abs() / 0.0, F)
    with pytest.raises(LGMMLError, match=r"`factors` must be finite, got nan"):
        local_distances(x, a, F * torch.nan)
    with pytest.raises(LGMMLError, match=r"distances must stay below 3.4e\+38 \(torch.float32\), got an overflow"):
        local_distances(x * 1e30, a, F)
    with pytest.raises(LGMMLError, match=r"`support` must index the 3 features, got 3"):
        local_distances(x, torch.zeros(1, 1), torch.ones(1, 1, 1), support=torch.tensor([[3]]))
    with pytest.raises(LGMMLError, match=r"`support` must index the 3 features, got -1"):
        local_distances(x, torch.zeros(1, 1), torch.ones(1, 1, 1), support=torch.tensor([[-1]]))
    with pytest.raises(DataError, match=r"`dists` must have at least one row to take medians of, got 0"):
        median_scales(torch.zeros(0, 3))
    with pytest.raises(LGMMLError, match=r"`dists` must be finite, got nan"):
        median_scales(torch.full((2, 2), torch.nan))


def test_an_overflow_of_some_distances_is_noticed() -> None:
    x = torch.tensor([[3e19], [0.0]])
    with pytest.raises(LGMMLError, match="got an overflow"):
        local_distances(x, torch.zeros(1, 1), torch.full((1, 1, 1), 3e19))
