from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_digits

from lgmml_torch.checks import DataError, LGMMLError
from research.by_example.sets import ExampleSet
from research.systems import admm
from research.systems.mlr import MLR, RMLR, Limits, RMLRResult, fit_rmlr
from research.systems.simple import Euclidean
from tests.reference import examples as synthetic
from tests.reference import rmlr as reference

EXACT = Limits(tol=1e-5, final_steps=20_000)


def small_problem(seed: int, D: int = 2) -> tuple[ExampleSet, list[list[bool]]]:
    """Four queries, five documents: all 120 orders can be enumerated."""
    rng = np.random.default_rng(seed)
    database, queries = rng.normal(size=(5, D)), rng.normal(size=(4, D))
    relevant = rng.random((4, 5)) < 0.5
    relevant[:, 0], relevant[:, 1] = True, False
    offsets = torch.tensor([0, *np.cumsum(relevant.sum(1))])
    data = ExampleSet(torch.tensor(database), torch.tensor(queries), torch.tensor(relevant.nonzero()[1]), offsets)
    return data, relevant.tolist()


def check_optimality(result: RMLRResult, C: float, lam: float, tol: float = 1e-4) -> None:
    """Karush-Kuhn-Tucker conditions of the working set, each to ``tol``."""
    cuts, state, W = result.cuts, result.state, result.metric
    alpha, inner, slack = state.alpha, cuts.inner(W), cuts.slack(W)
    assert torch.linalg.eigvalsh(W)[0] >= -1e-10
    assert alpha.min() >= 0
    assert alpha.sum() <= C * (1 + 1e-9)
    assert np.abs(alpha * (cuts.deltas - inner - slack)).max() < tol * C
    assert (C - alpha.sum()) * slack < tol * C
    Y = admm.column_multiplier(state, lam)
    columns = torch.linalg.vector_norm(W, dim=0)
    assert torch.linalg.vector_norm(Y, dim=0).max() <= lam * (1 + 1e-9)
    assert abs(float((Y * W).sum()) - lam * float(columns.sum())) < tol
    D = len(W)
    cone = torch.eye(D, dtype=torch.float64) / D - cuts.combine(alpha) + (Y + Y.mT) / 2
    assert torch.linalg.eigvalsh(cone)[0] > -tol
    assert abs(float((cone * W).sum())) < tol


@pytest.mark.parametrize(
    ("seed", "loss", "lam", "C"),
    [(0, "map", 0.1, 1.0), (1, "auc", 0.05, 2.0), (2, "map", 0.0, 5.0)],
)
def test_solution_is_optimal_and_equals_a_generic_solver(seed: int, loss: str, lam: float, C: float) -> None:
    data, relevant = small_problem(seed)
    result = fit_rmlr(data, C, lam, loss=loss, limits=EXACT)
    assert result.converged
    assert not result.cut
    check_optimality(result, C, lam)
    cuts = reference.all_cuts(data.queries.numpy(), data.database.numpy(), relevant, loss)
    ours = reference.objective(result.metric.numpy(), cuts, C, lam)
    generic, _ = reference.solve_generic(cuts, C, lam, D=2)
    assert ours == pytest.approx(generic, abs=1e-3)
    last = result.history[-1]
    assert last.objective == pytest.approx(ours, abs=1e-6)
    assert last.lower_bound <= generic + 1e-6
    assert 0 <= last.gap + 1e-9 < 1e-3


def test_large_lam_removes_every_column_and_small_c_gives_zero() -> None:
    data, _ = small_problem(0)
    assert float(fit_rmlr(data, 1.0, 100.0, limits=EXACT).metric.abs().max()) < 1e-6
    assert float(fit_rmlr(data, 1e-4, 0.0, limits=EXACT).metric.abs().max()) < 1e-6


def test_time_limit_cuts_and_says_so() -> None:
    data, _ = small_problem(1)
    result = fit_rmlr(data, 1.0, 0.1, limits=Limits(time_limit=0.0))
    assert result.cut
    assert not result.converged
    assert len(result.history) == 1
    system = RMLR([1.0, 10.0, 100.0], 0.1, limits=Limits(time_limit=0.0)).fit(data, data)
    assert system.cut
    assert system.chosen == {"C": 1.0, "lam": 0.1}
    assert torch.isfinite(system.metric).all()


@pytest.mark.parametrize("seed", [3, 4, 7])
def test_simplex_qp_equals_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = 1 + seed
    A = rng.normal(size=(m, 3 if seed % 2 else m))  # odd seeds: rank deficient
    H, b, C = A @ A.T, rng.normal(size=m), (0.3, 2.0)[seed % 2]
    ours = admm.simplex_qp(H, b, C, start=rng.random(m) if seed > 3 else None)
    value = lambda x: 0.5 * x @ H @ x + b @ x  # noqa: E731
    generic = minimize(
        value, np.full(m, C / (2 * m)), jac=lambda x: H @ x + b, method="SLSQP", bounds=[(0, None)] * m,
        constraints={"type": "ineq", "fun": lambda x: C - x.sum()}, options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    assert ours.min() >= 0
    assert ours.sum() <= C + 1e-9
    assert value(ours) <= generic.fun + 1e-7


def test_psd_part_and_shrink_columns_are_the_nearest_points(generator: torch.Generator) -> None:
    A = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    P = admm.psd_part(A)
    assert torch.linalg.eigvalsh(P)[0] > -1e-12
    rest = (A + A.mT) / 2 - P  # Moreau: the rest is negative semidefinite and orthogonal to the part
    assert torch.linalg.eigvalsh(rest)[-1] < 1e-12
    assert abs(float((rest * P).sum())) < 1e-12
    V = admm.shrink_columns(A, 0.7)
    gone = torch.linalg.vector_norm(A, dim=0) <= 0.7
    assert torch.equal(torch.linalg.vector_norm(V, dim=0) == 0, gone)
    assert torch.allclose(torch.linalg.vector_norm(A - V, dim=0)[~gone], torch.tensor(0.7, dtype=torch.float64))


def test_errors_name_argument_rule_and_value() -> None:
    data, _ = small_problem(0)
    with pytest.raises(LGMMLError, match=r"`loss` must be one of 'map', 'auc', got 'mpa'; did you mean 'map'\?"):
        fit_rmlr(data, 1.0, loss="mpa")
    with pytest.raises(LGMMLError, match="`valid` must be given to choose among 9 combinations"):
        RMLR().fit(data)
    with pytest.raises(LGMMLError, match="`RMLR` must be fitted first"):
        RMLR().distances(data.queries, data.database)
    lonely = ExampleSet(data.database, data.queries, torch.zeros(0, dtype=torch.long), torch.zeros(5, dtype=torch.long))
    with pytest.raises(DataError, match="query with both a relevant and another document, got none"):
        fit_rmlr(lonely, 1.0)


def test_beats_euclidean_on_digits() -> None:
    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X), torch.tensor(y)
    train, valid, test = (slice(0, 200), slice(200, 350), slice(350, 800))
    data = ExampleSet.from_labels(X[train], y[train])
    held = ExampleSet.from_labels(X[train], y[train], X[valid], y[valid])
    unseen = ExampleSet.from_labels(X[train], y[train], X[test], y[test])
    system = RMLR([0.1, 1.0], 0.01, loss="auc", limits=Limits(max_rounds=60, final_steps=200)).fit(data, held)
    gain = system.evaluate(unseen)["map"] - Euclidean().fit(data).evaluate(unseen)["map"]
    assert float(gain.mean()) > 3 * float(gain.std()) / len(gain) ** 0.5  # far outside chance, query by query


def test_beats_euclidean_on_synthetic_10() -> None:
    train, valid, test = synthetic.synthetic_splits(10, seed=1)
    euclidean = Euclidean().fit(train).evaluate(test)["map"]
    robust = RMLR([0.1, 1.0], 0.01, loss="map").fit(train, valid)
    assert robust.result.converged
    plain = MLR(0.1, loss="map", limits=Limits(max_rounds=60, final_steps=200)).fit(train)
    for system in (robust, plain):
        gain = system.evaluate(test)["map"] - euclidean
        assert float(gain.mean()) > 3 * float(gain.std()) / len(gain) ** 0.5


def test_without_convergence_the_best_metric_seen_is_kept() -> None:
    data, relevant = small_problem(6)
    result = fit_rmlr(data, 5.0, 0.01, limits=Limits(max_rounds=3, final_steps=5))
    cuts = reference.all_cuts(data.queries.numpy(), data.database.numpy(), relevant, "map")
    assert not result.converged
    kept = reference.objective(result.metric.numpy(), cuts, 5.0, 0.01)
    assert kept == pytest.approx(result.history[-1].objective, abs=1e-9)
    assert kept == pytest.approx(min(entry.objective for entry in result.history), abs=1e-9)
