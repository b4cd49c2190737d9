"""Geometric means of SPD matrices: theorems, peers, degenerate input and errors.

The theorems are those of Bhatia, Positive Definite Matrices (2007), chapters 4 and 6.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from pyriemann.geometry.geodesic import geodesic_riemann
from torch import Tensor

from lgmml_torch.checks import LGMMLError, NotSPDError, NumericsWarning
from lgmml_torch.functional.gmml import gmml
from lgmml_torch.functional.spd import (
    METHODS,
    _check_symmetric,
    cholesky_jittered,
    geometric_mean,
)
from tests.reference.spd import geometric_mean as reference_mean
from tests.reference.spd import random_rotation, random_spd, relative_error

EPS = torch.finfo(torch.float64).eps
WEIGHTS = (0.0, 0.1, 0.5, 0.8, 1.0)
theorem = pytest.mark.parametrize(
    ("dim", "cond", "batch"), [(1, 1e0, (3,)), (7, 1e12, (2, 2)), (46, 1e6, (1, 2, 1))], ids=["1", "7", "46"]
)


def pair(dim: int, cond: float, batch: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    make = lambda: random_spd(*batch, dim=dim, cond=cond if dim > 1 else 1.0, generator=generator)  # noqa: E731
    return make(), make()


@theorem
def test_riccati_equation(dim: int, cond: float, batch: tuple[int, ...]) -> None:
    S, D = pair(dim, cond, batch)
    F = gmml(S, D).factor
    M = F @ F.mT
    # Far below what is promised, 1e-10 up to condition 1e6 and 1e-4 at 1e12, thanks to the singular value route.
    assert relative_error(M @ S @ M, D) <= 1e-11


@theorem
def test_end_points(dim: int, cond: float, batch: tuple[int, ...]) -> None:
    A, B = pair(dim, cond, batch)
    tolerance = 100 * EPS * cond
    assert relative_error(geometric_mean(A, B, 0.0), A) <= tolerance
    assert relative_error(geometric_mean(A, B, 1.0), B) <= tolerance
    F = gmml(A, B, 0.0).factor
    assert relative_error(F @ F.mT @ A, torch.eye(dim, dtype=A.dtype).expand_as(A)) <= tolerance
    F = gmml(A, B, 1.0).factor
    assert relative_error(F @ F.mT, B) <= tolerance


@theorem
def test_reversed_geodesic_is_the_same(dim: int, cond: float, batch: tuple[int, ...]) -> None:
    A, B = pair(dim, cond, batch)
    for t in WEIGHTS:
        assert relative_error(geometric_mean(A, B, t), geometric_mean(B, A, 1 - t)) <= 100 * EPS * cond


@theorem
def test_congruence_commutes_with_the_mean(dim: int, cond: float, batch: tuple[int, ...]) -> None:
    A, B = pair(dim, cond, batch)
    generator = torch.Generator().manual_seed(1)
    C = random_rotation(dim=dim, generator=generator) * torch.linspace(0.5, 2.0, dim, dtype=torch.float64)
    moved = [(X + X.mT) / 2 for X in (C.mT @ A @ C, C.mT @ B @ C)]
    for t in (0.3, 0.5):
        assert relative_error(geometric_mean(*moved, t), C.mT @ geometric_mean(A, B, t) @ C) <= 100 * EPS * cond


@theorem
def test_inverse_of_the_mean_is_the_mean_of_the_inverses(dim: int, cond: float, batch: tuple[int, ...]) -> None:
    A, B = pair(dim, cond, batch)
    inverses = [(X + X.mT) / 2 for X in (torch.linalg.inv(A), torch.linalg.inv(B))]
    eye = torch.eye(dim, dtype=A.dtype).expand_as(A)
    for t in (0.3, 0.5):
        assert relative_error(geometric_mean(*inverses, t) @ geometric_mean(A, B, t), eye) <= 100 * EPS * cond


@theorem
def test_determinant_is_the_weighted_product(dim: int, cond: float, batch: tuple[int, ...]) -> None:
    A, B = pair(dim, cond, batch)
    for t in WEIGHTS:
        got = torch.linalg.slogdet(geometric_mean(A, B, t))[1]
        want = (1 - t) * torch.linalg.slogdet(A)[1] + t * torch.linalg.slogdet(B)[1]
        assert float((got - want).abs().max()) / dim <= 100 * EPS * cond


@theorem
def test_commuting_matrices_give_the_power_product(dim: int, cond: float, batch: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    Q = random_rotation(dim=dim, generator=generator)
    a = torch.logspace(0, -1, dim, dtype=torch.float64).pow(torch.log10(torch.tensor(cond)).item())
    b = a.flip(0)
    A, B = ((Q * x) @ Q.mT for x in (a, b))
    A, B = (A + A.mT) / 2, (B + B.mT) / 2
    for t in WEIGHTS:
        assert relative_error(geometric_mean(A, B, t), (Q * (a ** (1 - t) * b**t)) @ Q.mT) <= 100 * EPS * cond


@pytest.mark.parametrize("t", WEIGHTS)
@pytest.mark.parametrize("cond", [1e0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("dim", [1, 5, 46])
def test_agrees_with_pyriemann_and_the_reference(dim: int, cond: float, t: float) -> None:
    A, B = pair(dim, cond, (2, 2))
    tolerance = max(100 * EPS * cond, EPS * cond**2)  # the peers' own error grows with the square
    A, B = A / 20, 700 * B
    means = [geometric_mean(A, B, t, method=method) for method in METHODS]
    reference = torch.stack([reference_mean(a, b, t) for a, b in zip(A.flatten(0, 1), B.flatten(0, 1), strict=True)])
    for mean in means:
        assert relative_error(mean, geodesic_riemann(A, B, t)) <= tolerance
        assert relative_error(mean.flatten(0, 1), reference) <= tolerance


@pytest.mark.parametrize("method", METHODS)
def test_each_route_inverts_the_first(method: str) -> None:
    A, B = pair(12, 1e3, (4,))
    A, B = 50 * A, B / 300
    for t in WEIGHTS:
        F = gmml(A, B, t, method=method).factor
        assert relative_error(F @ F.mT, geometric_mean(torch.linalg.inv(A), B, t)) <= 1e-9


def test_opposed_spectra_whose_middle_matrix_looks_harmless() -> None:
    """A large where B is small: the middle matrix LᵀBL is near a multiple of I, yet rounded as if it were large."""
    generator = torch.Generator().manual_seed(3)
    Q = random_rotation(dim=30, generator=generator)
    a = torch.logspace(0, -12, 30, dtype=torch.float64)
    A, B = ((Q * x) @ Q.mT for x in (a, a.flip(0)))
    A, B = (A + A.mT) / 2, (B + B.mT) / 2
    F = gmml(A, B).factor
    assert relative_error(F @ F.mT, (Q * (a.flip(0) / a).sqrt()) @ Q.mT) <= 1e-4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("a", "b"), [(1e-280, 1e-280), (1e290, 1e290), (1e-200, 1e250)])
def test_extreme_scales_neither_overflow_nor_underflow(method: str, a: float, b: float) -> None:
    A, B = pair(6, 10.0, (2,))
    F = gmml(a * A, b * B, method=method).factor / (b**0.25 / a**0.25)
    assert relative_error(F @ F.mT, gmml(A, B, method=method).metric) <= 1e-12
    mean = geometric_mean(a * A, b * B, method=method)
    assert relative_error(mean / (a**0.5 * b**0.5), geometric_mean(A, B, method=method)) <= 1e-12


def test_what_is_singular_is_lifted_to_the_rounding_of_the_middle_matrix() -> None:
    A, B = (torch.diag(torch.tensor(values, dtype=torch.float64)) for values in ([1e-10, 1.0], [1.0, 0.0]))
    with pytest.warns(NumericsWarning, match="lifted 1 eigenvalues of the middle matrix to 2.22e-16 of the largest"):
        G = geometric_mean(A, B, method="eigh")  # of the middle matrix, that is 1e10
    torch.testing.assert_close(G.diagonal(), torch.tensor([1e-5, (EPS * 1e10) ** 0.5]).double(), rtol=1e-6, atol=0)


def test_broadcasting_and_batches() -> None:
    A, _ = pair(4, 10.0, (3,))
    _, B = pair(4, 10.0, (2, 2), seed=5)
    got = geometric_mean(A[:1], B)
    assert got.shape == (2, 2, 4, 4)
    assert relative_error(got[1, 0], geometric_mean(A[0], B[1, 0])) <= 1e-14
    assert geometric_mean(A[:0], A[:0]).shape == (0, 4, 4)


@pytest.mark.parametrize("method", METHODS)
def test_more_members_than_one_step_holds(method: str) -> None:
    generator = torch.Generator().manual_seed(4)
    A, B = (random_spd(9, dim=140, cond=100.0, generator=generator) for _ in "AB")
    whole = geometric_mean(A, B, 0.3, method=method)
    assert relative_error(whole, torch.stack([geometric_mean(a, b, 0.3) for a, b in zip(A, B, strict=True)])) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_of_the_caller(dtype: torch.dtype) -> None:
    assert geometric_mean(torch.eye(2, dtype=dtype), torch.eye(2, dtype=dtype)).dtype == dtype


def test_integers_give_the_default_dtype_and_mixed_input_the_wider_one() -> None:
    eye = torch.eye(2, dtype=torch.int64)
    assert geometric_mean(eye, eye).dtype == torch.get_default_dtype()
    assert geometric_mean(eye.float(), eye.double()).dtype == torch.float64


def test_float32_input_is_computed_in_float64() -> None:
    A, B = pair(20, 1e5, (2,))
    got = geometric_mean(A.float(), B.float())
    assert relative_error(got.double(), geometric_mean(A.float().double(), B.float().double())) <= 1e-7


def test_arguments_are_left_alone() -> None:
    A, B = pair(5, 1e12, (2,))
    kept = A.clone(), B.clone()
    geometric_mean(A, B)
    assert torch.equal(A, kept[0])
    assert torch.equal(B, kept[1])


def test_only_failing_members_get_jitter() -> None:
    good = random_spd(3, dim=5, cond=10.0, generator=torch.Generator().manual_seed(0))
    v = torch.arange(1.0, 6.0, dtype=torch.float64)
    A = torch.cat([good, torch.outer(v, v)[None]]).reshape(2, 2, 5, 5)
    with pytest.warns(NumericsWarning, match=r"`S` is singular to rounding: added up to \d.*e-1\d .* 1 of 4"):
        L = cholesky_jittered(A, name="S")
    torch.testing.assert_close(L.reshape(4, 5, 5)[:3], torch.linalg.cholesky(good), rtol=1e-13, atol=1e-14)
    assert relative_error(L[1, 1] @ L[1, 1].mT, A[1, 1]) <= 1e-12


def test_indefinite_members_are_named() -> None:
    A = torch.eye(3, dtype=torch.float64).repeat(4, 1, 1)
    A[2, 0, 0] = -2.0
    with pytest.raises(NotSPDError, match="`A` must be positive definite, got smallest eigenvalue -2 in member 2"):
        cholesky_jittered(A)
    for method, (first, name) in itertools.product(METHODS, ((True, "A"), (False, "B"))):
        pair_of = (A, torch.eye(3)) if first else (torch.eye(3), A)
        with pytest.raises(NotSPDError, match=f"`{name}` must be positive definite, got smallest .* -2 in member 2"):
            geometric_mean(*pair_of, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "bad", [torch.zeros(2, 2), -torch.eye(2), torch.diag(torch.tensor([1.0, -1.0]))], ids=["zero", "negative", "mixed"]
)
def test_matrices_that_are_far_from_positive_definite_are_rejected(bad: Tensor, method: str) -> None:
    for A, B in ((bad, torch.eye(2)), (torch.eye(2), bad)):
        with pytest.raises(NotSPDError, match=r"smallest eigenvalue (0|-1) in member 0"):
            geometric_mean(A, B, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_singular_matrices_give_finite_means_and_a_warning(method: str) -> None:
    generator = torch.Generator().manual_seed(6)
    X, Y = (torch.randn(3, 20, dtype=torch.float64, generator=generator) for _ in "XY")
    A, B = X.mT @ X, Y.mT @ Y
    for mean in (lambda: geometric_mean(A, B, method=method), lambda: gmml(A, B, method=method).metric):
        with pytest.warns(NumericsWarning, match=r"added up to|lifted \d+ "):
            found = mean()
        assert torch.isfinite(found).all()
        assert torch.linalg.eigvalsh(found)[0] > -1e-9 * torch.linalg.eigvalsh(found)[-1]


def test_eigenvalues_lost_to_rounding_are_lifted_with_a_warning() -> None:
    A, B = torch.diag(torch.tensor([1.0, 1e-40], dtype=torch.float64)), torch.eye(2, dtype=torch.float64)
    with pytest.warns(NumericsWarning, match=r"lifted 1 singular values of the middle matrix to 2\.22e-16"):
        gmml(A, A)
    with pytest.warns(NumericsWarning, match=r"lifted 1 eigenvalues of `A` to 2\.22e-16 of the largest"):
        geometric_mean(A, B, method="eigh")


@pytest.mark.parametrize("seed", range(20))
def test_noise_never_gives_nan(seed: int) -> None:
    """Random symmetric matrices, mostly indefinite, and products of few vectors: an answer or a named error."""
    generator = torch.Generator().manual_seed(seed)
    A, B = (torch.randn(6, seed % 6 + 1, dtype=torch.float64, generator=generator) for _ in "AB")
    A, B = A @ A.mT, B @ B.mT - (seed % 3 == 0) * torch.eye(6, dtype=torch.float64)
    for method in METHODS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericsWarning)
            try:
                assert torch.isfinite(geometric_mean(A, B, method=method)).all()
            except NotSPDError as error:
                assert "member 0" in str(error)  # noqa: PT017


def bad(value: float) -> Tensor:
    A = torch.eye(3).repeat(2, 1, 1)
    A[1, 2, 2] = value
    return A


@pytest.mark.parametrize(
    ("A", "B", "options", "message"),
    [
        (bad(float("nan")), torch.eye(3), {}, r"`A` must be finite, got nan at position \(1, 2, 2\)"),
        (torch.eye(3), bad(float("inf")), {}, r"`B` must be finite, got inf at position \(1, 2, 2\)"),
        (torch.eye(3), torch.ones(3, 3).tril(), {}, "`B` must be symmetric, got a relative asymmetry of 1"),
        (torch.eye(3), torch.stack([torch.eye(3), torch.ones(3, 3).tril()]), {}, "a relative asymmetry of 1"),
        (torch.eye(3, dtype=int), torch.tensor([[1, 2], [0, 1]]), {}, "`B` must be symmetric"),
        (torch.zeros(3, 2), torch.eye(3), {}, r"`A` must be square, \(..., D, D\), got \(3, 2\)"),
        (torch.zeros(3), torch.eye(3), {}, r"`A` must be square, \(..., D, D\), got \(3,\)"),
        (torch.eye(3), torch.eye(2), {}, r"`A` and `B` must have matching shapes .* got \(3, 3\) and \(2, 2\)"),
        (torch.eye(3).repeat(2, 1, 1), torch.eye(3).repeat(3, 1, 1), {}, r"got \(2, 3, 3\) and \(3, 3, 3\)"),
        (torch.zeros(0, 0), torch.zeros(0, 0), {}, r"D >= 1, got \(0, 0\) and \(0, 0\)"),
        (torch.eye(3), torch.eye(3), {"t": 1.3}, r"`t` must lie in \[0, 1\], got 1.3"),
        (torch.eye(3), torch.eye(3), {"t": float("nan")}, r"`t` must lie in \[0, 1\], got nan"),
        (torch.eye(3), torch.eye(3), {"method": "cholesk"}, "`method` must be one of .* did you mean 'cholesky'"),
    ],
)
def test_errors_name_the_argument_the_rule_and_the_value(A: Tensor, B: Tensor, options: dict, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        geometric_mean(A, B, **options)


@pytest.mark.parametrize(
    ("A", "message"),
    [
        (bad(float("nan")), r"`A` must be finite, got nan at position \(1, 2, 2\)"),
        (torch.ones(3, 3).tril(), "`A` must be symmetric"),
        (torch.tensor([[-1.0, 1e-8], [0.0, -1.0]]), "`A` must be positive definite"),  # symmetric up to rounding
        (torch.zeros(2, 3), "`A` must be square"),
    ],
)
def test_cholesky_errors(A: Tensor, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        cholesky_jittered(A)


def test_each_singular_member_gets_jitter_of_its_own_scale() -> None:
    """Two of four members fail, a million apart; the others are returned as torch computes them."""
    ones = torch.ones(3, 3, dtype=torch.float64)
    fine = 2 * torch.eye(3, dtype=torch.float64) + ones
    A = torch.stack([fine, ones, 1e6 * fine, 1e6 * ones])
    with pytest.warns(NumericsWarning, match="added up to .* to the diagonal of 2 of 4 matrices"):
        L = cholesky_jittered(A)
    torch.testing.assert_close(L[[0, 2]], torch.linalg.cholesky(A[[0, 2]]), rtol=1e-12, atol=0)
    added = (L @ L.mT - A).diagonal(dim1=-2, dim2=-1)
    assert 0 < float(added[1].max()) <= 1e-14
    assert 0 < float(added[3].max()) <= 1e-8


def test_square_and_symmetric() -> None:
    _check_symmetric("A", torch.eye(3).expand(2, 3, 3))
    _check_symmetric("A", torch.zeros(0, 3, 3))
    nearly = torch.tensor([[2.0, 1.0], [1.0 + 3e-7, 2.0]]).double()
    _check_symmetric("A", torch.stack([1e9 * nearly, nearly]))  # each by its own entries
    with pytest.raises(LGMMLError, match="`A` must be square"):
        _check_symmetric("A", torch.zeros(2, 3))
    with pytest.raises(LGMMLError, match="`A` must be symmetric, got a relative asymmetry of 1"):
        _check_symmetric("A", torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
