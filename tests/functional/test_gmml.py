"""GMML metrics and scatter matrices: loops over pairs, degenerate regions, memory, errors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError, NotSPDError, NumericsWarning
from lgmml_torch.functional.gmml import gmml, gmml_bank, pooled_scatter, scatter_matrices
from lgmml_torch.functional.regions import Regions
from lgmml_torch.segments import offsets_from_sizes
from tests.reference import gmml as reference
from tests.reference.spd import random_spd, relative_error

REDUCTIONS = ("mean", "sum")


def regions(
    seed: int, *, dim: int = 5, positives: tuple[int, ...] = (3, 1, 6, 2), negatives: tuple[int, ...] = (4, 7, 1, 2)
) -> tuple[Tensor, Regions]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(30, dim, dtype=torch.float64, generator=generator) * 3 + 10
    rows = [torch.randint(30, (sum(sizes),), generator=generator) for sizes in (positives, negatives)]
    offsets = [offsets_from_sizes(torch.tensor(sizes)) for sizes in (positives, negatives)]
    return X, sides(rows[0], offsets[0], rows[1], offsets[1])


def sides(positives: Tensor, positive_offsets: Tensor, negatives: Tensor, negative_offsets: Tensor) -> Regions:
    """Regions of one query each."""
    queries = torch.arange(len(positive_offsets))
    return Regions(queries[:-1], queries, positives, positive_offsets, negatives, negative_offsets)


def loop(args: tuple[Tensor, Regions], reduction: str) -> tuple[Tensor, Tensor]:
    X, found = args
    both = []
    for k in range(len(found)):
        p = slice(found.positive_offsets[k], found.positive_offsets[k + 1])
        n = slice(found.negative_offsets[k], found.negative_offsets[k + 1])
        both.append(reference.scatter(X[found.positives[p]], X[found.negatives[n]], reduction))
    return torch.stack([s for s, _ in both]), torch.stack([d for _, d in both])


def assert_close(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    assert float((got - want).abs().max()) <= tolerance * max(float(want.abs().max()), 1.0)


def test_closed_form_scatter_equals_the_double_loop() -> None:
    for seed in range(5):
        for reduction in REDUCTIONS:
            args = regions(seed)
            got = scatter_matrices(*args, reduction=reduction)
            for ours, theirs in zip(got, loop(args, reduction), strict=True):
                assert ours.dtype == torch.float64
                assert_close(ours, theirs)


def test_scatter_does_not_cancel_far_from_the_origin() -> None:
    X, some = regions(0)
    near, far = scatter_matrices(X, some), scatter_matrices(X + 2.0**30, some)
    # What is left is the rounding of the shifted features themselves, 2^30 · 2^-52.
    assert_close(far[0], near[0], 1e-6)
    assert_close(far[1], near[1], 1e-6)


def test_scatter_does_not_depend_on_the_order_of_rows() -> None:
    for reduction in REDUCTIONS:
        X, some = regions(1, positives=(6,), negatives=(7,))
        turned = replace(some, positives=some.positives.flip(0), negatives=some.negatives.flip(0))
        want = scatter_matrices(X, some, reduction=reduction)
        got = scatter_matrices(X, turned, reduction=reduction)
        assert_close(got[0], want[0], 1e-13)
        assert_close(got[1], want[1], 1e-13)


def test_one_positive_has_no_similar_scatter() -> None:
    S, D = scatter_matrices(*regions(3, positives=(1,), negatives=(5,)))
    assert not S.any()
    assert D.diagonal(dim1=-2, dim2=-1).gt(0).all()


def test_equal_rows_and_constant_features_are_exactly_zero() -> None:
    X = torch.full((6, 3), 0.1)
    X[:, 1] = torch.arange(6) / 10
    one = sides(torch.tensor([0, 1, 2]), torch.tensor([0, 3]), torch.tensor([3, 4]), torch.tensor([0, 2]))
    S, D = scatter_matrices(X, one)
    for scatter in (S, D):
        assert not scatter[0, [0, 2]].any()
        assert scatter[0, 1, 1] > 0


def test_no_regions() -> None:
    nothing, start = torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    assert gmml_bank(torch.zeros(0, 3), sides(nothing, start, nothing, start)).shape == (0, 3, 3)


def test_bank_equals_the_loop_over_regions() -> None:
    for relative in [True, False]:
        for with_prior in [False, True]:
            for t in [0.0, 0.3, 0.5, 1.0]:
                args = regions(4)
                prior = random_spd(dim=5, cond=10.0, generator=torch.Generator().manual_seed(0)) if with_prior else None
                F = gmml_bank(*args, t=t, lam=0.2, relative=relative, prior=prior)
                plain = torch.eye(5, dtype=torch.float64) if prior is None else prior
                for k, (S, D) in enumerate(zip(*loop(args, "mean"), strict=True)):
                    assert_close(F[k] @ F[k].mT, reference.metric(S, D, t, 0.2, relative, plain))


def test_bank_equals_gmml_of_the_scatters() -> None:
    for reduction in REDUCTIONS:
        args = regions(5)
        priors = random_spd(4, dim=5, cond=10.0, generator=torch.Generator().manual_seed(0))
        want = gmml(*scatter_matrices(*args, reduction=reduction), 0.4, lam=0.1, prior=priors).metric
        for max_bytes in (1, 7_000, 2**29):
            steps: list[tuple[int, int]] = []
            rules: dict[str, Any] = {"reduction": reduction, "t": 0.4, "prior": priors, "max_bytes": max_bytes}
            F = gmml_bank(*args, **rules, progress=lambda *s: steps.append(s))  # noqa: B023
            assert_close(F @ F.mT, want, 1e-12)
            assert steps[-1] == (4, 4)
            assert len(steps) == {1: 4, 7_000: 2, 2**29: 1}[max_bytes]


def test_both_methods_give_one_bank() -> None:
    args = regions(3)
    cholesky, eigh = (gmml_bank(*args, t=0.3, method=method) for method in ("cholesky", "eigh"))
    assert_close(cholesky @ cholesky.mT, eigh @ eigh.mT, 1e-11)
    assert not torch.equal(cholesky, eigh)
    with pytest.raises(LGMMLError, match="`method` must be one of 'cholesky', 'eigh', got 'svd'"):
        gmml_bank(*args, method="svd")


def test_pooled_scatter_is_the_mean_over_all_pairs_of_all_regions() -> None:
    args = regions(7, positives=(3, 1, 6, 2), negatives=(4, 7, 1, 2))
    sums = loop(args, "sum")
    want = sums[0].sum(0) / (6 + 0 + 30 + 2), sums[1].sum(0) / (12 + 7 + 6 + 4)
    for max_bytes in (1, 2**29):
        got = pooled_scatter(*args, max_bytes=max_bytes)
        assert_close(got[0], want[0])
        assert_close(got[1], want[1])


def test_long_regions_are_taken_one_at_a_time() -> None:
    """Rows count for the memory of a step as matrices do."""
    X, rows = torch.randn(400, 2, generator=torch.Generator().manual_seed(0)), torch.arange(400)
    for size, expected in ((2, [(4, 4)]), (100, [(1, 4), (2, 4), (3, 4), (4, 4)])):
        offsets, steps = torch.arange(5) * size, list[tuple[int, int]]()
        four = sides(rows[: 4 * size], offsets, rows[: 4 * size].flip(0), offsets)
        gmml_bank(X, four, max_bytes=15_000, progress=lambda *step: steps.append(step))  # noqa: B023
        assert steps == expected


def test_gmml_solves_the_riccati_equation() -> None:
    generator = torch.Generator().manual_seed(0)
    S, D = (random_spd(2, 3, dim=8, cond=1e4, generator=generator) for _ in "SD")
    for method in ("cholesky", "eigh"):
        result = gmml(S, D, method=method)
        assert result.factor.shape == (2, 3, 8, 8)
        assert relative_error(result.metric @ S @ result.metric, D) <= 1e-10


def test_large_lambda_gives_the_prior() -> None:
    S, D = (random_spd(3, dim=4, cond=10.0, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    prior = random_spd(dim=4, cond=10.0, generator=torch.Generator().manual_seed(2))
    for relative in (True, False):
        assert relative_error(gmml(S, D, lam=1e9, relative=relative, prior=prior).metric, prior.expand_as(S)) <= 1e-7


def test_a_relative_lambda_follows_the_scale_of_the_data() -> None:
    S, D = (random_spd(2, dim=4, cond=10.0, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    want = gmml(S, D, lam=0.3).metric
    assert relative_error(gmml(S * 1e6, D * 1e6, lam=0.3).metric, want) <= 1e-12
    assert relative_error(gmml(S * 1e6, D * 1e6, lam=0.3, relative=False).metric, want) > 1e-3


def test_dtype_of_the_caller() -> None:
    for dtype in [torch.float32, torch.float64]:
        X, some = regions(6)
        F = gmml_bank(X.to(dtype), some)
        assert F.dtype == dtype
        assert gmml(torch.eye(2, dtype=dtype), torch.eye(2, dtype=dtype)).factor.dtype == dtype
        exact = gmml_bank(X.to(dtype).double(), some)
        assert relative_error(F.double() @ F.mT.double(), exact @ exact.mT) <= 10 * torch.finfo(dtype).eps


def test_float32_results_do_not_pay_for_digits_they_cannot_hold() -> None:
    S, D = (random_spd(3, dim=30, cond=3e4, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    exact, coarse = gmml(S, D).metric, gmml(S.float(), D.float()).metric.double()
    assert relative_error(coarse, gmml(S.float().double(), D.float().double()).metric) <= 1e-5
    assert relative_error(exact @ S @ exact, D) <= 1e-11


def test_two_positives_in_300_dimensions() -> None:
    for reduction in REDUCTIONS:
        for num_positives in [1, 2]:
            X = torch.randn(40, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            rows = torch.arange(40)
            one = sides(rows[:num_positives], torch.tensor([0, num_positives]), rows[2:], torch.tensor([0, 38]))
            F = gmml_bank(X, one, reduction=reduction)
            spectrum = torch.linalg.eigvalsh(F @ F.mT)[0]
            assert spectrum[0] > 0
            assert spectrum[-1] / spectrum[0] < 1e4
            if (
                num_positives == 2 and reduction == "mean"
            ):  # the metric shortens similar pairs, relative to dissimilar ones
                similar, dissimilar = X[0] - X[1], X[0] - X[2:]
                stretch = (
                    (similar @ F[0]).norm() / similar.norm(),
                    (dissimilar @ F[0]).norm(dim=1) / dissimilar.norm(dim=1),
                )
                assert stretch[0] < 0.5 * stretch[1].min()


def test_singular_scatter_without_lambda_warns_and_stays_finite() -> None:
    X = torch.randn(20, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(20)
    with pytest.warns(NumericsWarning, match=r"`[SD]` is singular to rounding: added up to|lifted \d+ singular"):
        F = gmml_bank(X, sides(rows[:3], torch.tensor([0, 3]), rows[3:], torch.tensor([0, 17])), lam=0.0)
    assert torch.isfinite(F).all()


def test_duplicate_rows_and_constant_features_give_a_metric() -> None:
    X = torch.rand(12, 6, generator=torch.Generator().manual_seed(0))
    X[:6] = X[0]
    X[:, 3] = 0.7
    rows = torch.arange(12)
    F = gmml_bank(X, sides(rows[:5], torch.tensor([0, 5]), rows[5:], torch.tensor([0, 7])))
    assert torch.isfinite(F).all()
    assert torch.linalg.eigvalsh(F @ F.mT).amin() > 0


def test_equal_rows_are_a_named_error() -> None:
    for max_bytes in [1, 2**29]:
        X = torch.rand(12, 3, generator=torch.Generator().manual_seed(0))
        X[4:] = 0.1
        rows = torch.arange(12)
        two = sides(rows[[0, 1, 4, 5, 6]], torch.tensor([0, 2, 5]), rows[[2, 3, 7, 8]], torch.tensor([0, 2, 4]))
        with pytest.raises(NotSPDError, match="diagonal to scale `lam` by, got 0 in member 1: are all its rows equal"):
            gmml_bank(X, two, max_bytes=max_bytes)


def test_equal_rows_without_lambda_name_the_region_too() -> None:
    for max_bytes in [1, 2**29]:
        X = torch.rand(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        X[20:] = 0.1
        rows = torch.arange(40)
        two = sides(rows[5:35], torch.tensor([0, 15, 30]), rows[[0, 1, 2, 37, 38]], torch.tensor([0, 3, 5]))
        with pytest.raises(NotSPDError, match="`S` must be positive definite, got smallest eigenvalue 0 in member 1"):
            gmml_bank(X, two, lam=0.0, max_bytes=max_bytes)


def test_zero_matrices_have_no_scale() -> None:
    with pytest.raises(NotSPDError, match=r"`S` and `D` must have a positive mean diagonal .* got 0 in member 0"):
        gmml(torch.zeros(2, 2), torch.zeros(2, 2), lam=0.1)


def test_a_mean_over_no_pairs_names_the_region() -> None:
    for max_bytes in [1, 2**29]:
        for positives, negatives, side in [((2, 0), (2, 2), "positives"), ((2, 2), (2, 0), "negatives")]:
            args = regions(7, positives=positives, negatives=negatives)
            message = f"`{side}` must give every region a row, region 1 has none"
            with pytest.raises(DataError, match=message):
                gmml_bank(*args, max_bytes=max_bytes)
            with pytest.raises(DataError, match=message):
                scatter_matrices(*args)


def test_a_sum_over_no_pairs_is_zero() -> None:
    args = regions(7, positives=(3, 0), negatives=(0, 2))
    S, D = scatter_matrices(*args, reduction="sum")
    assert S[0].any()
    assert not S[1].any()
    assert not D.any()


BASE: dict[str, Any] = dict(zip(("features", "regions"), regions(8, positives=(3, 2), negatives=(2, 2)), strict=True))
HOLE = BASE["features"].clone()
HOLE[3, 1] = float("nan")


def test_scatter_and_bank_errors() -> None:
    for change, message in [
        ({"features": HOLE}, r"`features` must be finite, got nan at position \(3, 1\)"),
        ({"features": torch.zeros(5)}, r"`features` must have shape \(\*, \*\), got \(5,\)"),
        (
            {"features": BASE["features"] * 1e200},
            "`features` must have products within the range",
        ),
        (
            {"features": BASE["features"] * torch.tensor([1.0, 1e200, 1.0, 1.0, 1.0], dtype=torch.float64)},
            "`features` must have products within the range",
        ),
        (
            {"regions": replace(BASE["regions"], negatives=torch.tensor([0, 1, 2, 30]))},
            "`negatives` must hold row numbers from 0 to 29, got 0 to 30",
        ),
        (
            {"regions": replace(BASE["regions"], positives=torch.tensor([0, 1, 2, -1, 3]))},
            "`positives` must hold row numbers from 0 to 29, got -1 to 3",
        ),
        ({"reduction": "average"}, "`reduction` must be one of 'mean', 'sum', got 'average'"),
    ]:
        for function in (scatter_matrices, gmml_bank):
            with pytest.raises(LGMMLError, match=message):
                function(**{**BASE, **change})


def test_gmml_and_bank_errors() -> None:
    for change, message in [
        ({"t": -0.1}, r"`t` must lie in \[0, 1\], got -0.1"),
        ({"lam": -1.0}, r"`lam` must be at least 0, got -1\.0"),
        ({"lam": float("inf")}, "`lam` must be finite, got inf"),
        ({"prior": torch.eye(4)}, r"`prior` must have shape \(5, 5\), got \(4, 4\)"),
        ({"prior": torch.eye(5).repeat(3, 1, 1)}, r"`prior` must have shape \(2, 5, 5\), got \(3, 5, 5\)"),
        ({"prior": -torch.eye(5)}, "`prior` must be positive definite, got smallest eigenvalue -1 in member 0"),
        ({"prior": torch.ones(5, 5).tril()}, "`prior` must be symmetric"),
    ]:
        with pytest.raises(LGMMLError, match=message):
            gmml_bank(**BASE, **change)
        with pytest.raises(LGMMLError, match=message):
            gmml(torch.eye(5).repeat(2, 1, 1), torch.eye(5), **change)


def test_gmml_matrix_errors() -> None:
    for S, D, message in [
        (torch.full((2, 2), torch.nan), torch.eye(2), r"`S` must be finite, got nan at position \(0, 0\)"),
        (torch.eye(2), torch.ones(2, 2).tril(), "`D` must be symmetric"),
        (torch.eye(2), torch.eye(3), "`S` and `D` must have matching shapes"),
        (torch.eye(2), -torch.eye(2), "`D` must be positive definite, got smallest eigenvalue -1 in member 0"),
    ]:
        with pytest.raises(LGMMLError, match=message):
            gmml(S, D)


def test_gmml_unknown_method() -> None:
    with pytest.raises(LGMMLError, match="`method` must be one of 'cholesky', 'eigh', got 'svd'"):
        gmml(torch.eye(2), torch.eye(2), method="svd")


MEASURE = """
import resource, sys, torch
from lgmml_torch.functional.gmml import gmml_bank
from lgmml_torch.functional.regions import Regions
K, D, dtype, budget = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
X = torch.randn(500, D, dtype=dtype, generator=torch.Generator().manual_seed(0))
rows = torch.arange(20 * K) % 500
offsets = torch.arange(K + 1) * 20
options = {"max_bytes": budget} if budget else {}
regions = Regions(rows[:K], torch.arange(K + 1), rows, offsets, (rows + 250) % 500, offsets)
gmml_bank(X[:, :8].contiguous(), regions)  # libraries loaded, pools filled
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
F = gmml_bank(X, regions, **options)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert torch.isfinite(F).all()
print((after - before) * 1024 - F.numel() * F.element_size())
"""


def memory_beyond_result(*arguments: object) -> int:
    command = [sys.executable, "-c", MEASURE, *map(str, arguments)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_bank_keeps_to_its_budget() -> None:
    for dtype in ["float32", "float64"]:
        assert memory_beyond_result(60, 220, dtype, 32 * 2**20) <= 48 * 2**20


@pytest.mark.slow
def test_bank_fits_in_two_gibibytes() -> None:
    for num_regions, dim in [(500, 136), (14, 1000)]:
        assert memory_beyond_result(num_regions, dim, "float32", 0) <= 2 * 2**30
