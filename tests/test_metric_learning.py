"""`GMML` and `LocalGMML` as people use them: scikit-learn's habits, and what the closed form promises."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.datasets import load_wine
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from lgmml_torch import GMML, LocalGMML
from lgmml_torch.checks import DataError, LGMMLError, NotSPDError

Array = np.ndarray[Any, np.dtype[Any]]
BOTH = [GMML(), LocalGMML(rho=5.0), LocalGMML(3, rho=5.0, random_state=0)]


def labelled(seed: int = 0, rows: int = 40, classes: int = 3) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % classes
    return rng.normal(size=(rows, 4)) * [1, 2, 3, 0.5] + y[:, None] * [1, 0, 1, 0], y


def pair_means(X: Array, y: Array, first: Array) -> tuple[Array, Array]:
    """Mean of (x − z)(x − z)ᵀ over similar and dissimilar pairs, one by one."""
    sums, counts = np.zeros((2, X.shape[1], X.shape[1])), np.zeros(2)
    for i in np.flatnonzero(first):
        for j in range(len(X)):
            if i != j:
                side = int(y[i] != y[j])
                sums[side] += np.outer(X[i] - X[j], X[i] - X[j])
                counts[side] += 1
    return sums[0] / counts[0], sums[1] / counts[1]


def local_metric(model: LocalGMML, q: Array) -> Array:
    """M(q), written out."""
    metrics = [C.T @ C for C in model.components_]
    dists = [np.sqrt((q - a) @ M @ (q - a)) for a, M in zip(model.anchors_, metrics, strict=True)]
    weights = np.exp(-model.rho_ / 2 * np.array(dists) / model.scales_)
    return np.asarray(sum(w * M for w, M in zip(weights / weights.sum(), metrics, strict=True)))


def test_the_metric_solves_the_riccati_equation_of_the_looped_pairs() -> None:
    X, y = labelled()
    similar, dissimilar = pair_means(X, y, y >= 0)
    M = GMML(lam=0.0).fit(X, y).get_mahalanobis_matrix()
    np.testing.assert_allclose(M @ similar @ M, dissimilar, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(GMML(t=0.0, lam=0.0).fit(X, y).get_mahalanobis_matrix(), np.linalg.inv(similar))
    np.testing.assert_allclose(GMML(t=1.0, lam=0.0).fit(X, y).get_mahalanobis_matrix(), dissimilar)


def test_a_local_metric_solves_the_riccati_equation_of_the_pairs_of_its_region() -> None:
    X, y = labelled()
    model = LocalGMML(lam=0.0, rho=1.0).fit(X, y)
    for code, C in enumerate(model.components_):
        similar, dissimilar = pair_means(X, y, y == code)
        np.testing.assert_allclose(C.T @ C @ similar @ C.T @ C, dissimilar, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(model.anchors_[code], X[y == code].mean(0))


def test_regularization_leads_to_the_euclidean_metric() -> None:
    X, y = labelled()
    np.testing.assert_allclose(GMML(lam=1e9).fit(X, y).get_mahalanobis_matrix(), np.eye(4), atol=1e-6)


def test_both_routes_agree() -> None:
    X, y = labelled()
    one, two = (GMML(method=method).fit(X, y).get_mahalanobis_matrix() for method in ("cholesky", "eigh"))
    np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12)


def test_order_of_rows_and_names_of_classes_do_not_matter() -> None:
    X, y = labelled()
    order = np.random.default_rng(1).permutation(len(X))
    names = np.array(["z", "a", "m"])[y]
    for make in (GMML(), LocalGMML(rho=5.0)):
        base = clone(make).fit(X, y)
        for again in (clone(make).fit(X[order], y[order]), clone(make).fit(X, names)):
            pairs = np.stack([X[:-1], X[1:]], axis=1)
            np.testing.assert_allclose(again.pair_distance(pairs), base.pair_distance(pairs), rtol=1e-9)


def test_shifts_and_rotations_change_no_distance() -> None:
    X, y = labelled()
    pairs = np.stack([X[:-1], X[1:]], axis=1)
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(4, 4)))
    for make in (GMML(), LocalGMML(rho=5.0)):
        distances = clone(make).fit(X, y).pair_distance(pairs)
        moved = clone(make).fit(X @ turn + 1e3, y).pair_distance(pairs @ turn + 1e3)
        np.testing.assert_allclose(moved, distances, rtol=1e-8)


def test_matrix_map_and_distances_of_gmml_are_one() -> None:
    X, y = labelled()
    model = GMML().fit(X, y)
    M = model.get_mahalanobis_matrix()
    np.testing.assert_allclose(M, M.T, atol=1e-12)
    assert np.linalg.eigvalsh(M).min() > 0
    np.testing.assert_allclose(model.transform(X), X @ model.components_.T)
    gaps = X[:-1] - X[1:]
    expected = np.sqrt(np.einsum("pd,de,pe->p", gaps, M, gaps))
    np.testing.assert_allclose(model.pair_distance(np.stack([X[:-1], X[1:]], axis=1)), expected)
    np.testing.assert_allclose(np.linalg.norm(np.diff(model.transform(X), axis=0), axis=1), expected)


@pytest.mark.parametrize("model", BOTH[1:])
def test_matrices_distances_and_ranks_of_local_gmml_are_one(model: LocalGMML) -> None:
    X, y = labelled()
    queries, documents = labelled(1, rows=6)[0], labelled(2, rows=15)[0]
    model = clone(model).fit(X, y)
    matrices = model.get_mahalanobis_matrix(queries)
    for q, M in zip(queries, matrices, strict=True):
        np.testing.assert_allclose(M, local_metric(model, q), rtol=1e-9)
        assert np.linalg.eigvalsh(M).min() > 0
        expected = np.array([np.sqrt((q - x) @ M @ (q - x)) for x in documents])
        pairs = np.stack([np.broadcast_to(q, documents.shape), documents], axis=1)
        np.testing.assert_allclose(model.pair_distance(pairs), expected, rtol=1e-9)
        np.testing.assert_array_equal(model.rank(q, documents), np.argsort(expected, kind="stable"))
    np.testing.assert_array_equal(model.rank(queries, documents), [model.rank(q, documents) for q in queries])
    pairs = np.stack([np.repeat(queries, len(X), axis=0), np.tile(X, (len(queries), 1))], axis=1)
    np.testing.assert_allclose(model.transform(queries).ravel(), model.pair_distance(pairs), rtol=1e-6)


def test_one_region_is_the_global_metric() -> None:
    X, y = labelled()
    local, whole = LocalGMML(1, rho=3.0, random_state=0).fit(X, y), GMML().fit(X, y)
    np.testing.assert_allclose(local.get_mahalanobis_matrix(X[:1])[0], whole.get_mahalanobis_matrix(), rtol=1e-9)


def stretched(seed: int, points: int) -> tuple[Array, Array]:
    """Six overlapping classes, each stretched in a direction of its own."""
    fixed, rng = np.random.default_rng(0), np.random.default_rng(seed)
    maps = fixed.normal(size=(6, 8, 8)) * 10 ** fixed.uniform(-1, 1, (6, 1, 8))
    y = np.repeat(np.arange(6), points)
    noise = rng.normal(size=(len(y), 8))
    return np.einsum("nd,nde->ne", noise, maps[y].transpose(0, 2, 1)) + 5 * fixed.normal(size=(6, 8))[y], y


def test_local_metrics_rank_better_where_classes_are_stretched_differently() -> None:
    (X, y), (queries, labels) = stretched(1, 40), stretched(2, 10)
    local, whole = LocalGMML(lam=0.01, random_state=0).fit(X, y), GMML(lam=0.01).fit(X, y)
    flat = LocalGMML(lam=0.01, rho=0.0).fit(X, y)
    gaps = whole.transform(queries)[:, None] - whole.transform(X)
    orders = {
        "local": local.rank(queries, X),
        "flat": flat.rank(queries, X),
        "whole": np.linalg.norm(gaps, axis=2).argsort(axis=1),
    }
    found = {name: float((y[order[:, :20]] == labels[:, None]).mean()) for name, order in orders.items()}
    assert local.rho_ > 0
    assert found["local"] > max(found["flat"], found["whole"]) + 0.05, found


def test_pipelines_beat_euclidean_neighbours_on_wine() -> None:
    X, y = load_wine(return_X_y=True)
    plain = make_pipeline(StandardScaler(), KNeighborsClassifier())
    whole = make_pipeline(StandardScaler(), GMML(), KNeighborsClassifier())
    local = make_pipeline(StandardScaler(), LocalGMML(rho=10.0), KNeighborsClassifier(metric="precomputed"))
    base, *learned = (cross_val_score(model, X, y).mean() for model in (plain, whole, local))
    assert min(learned) > base
    search = GridSearchCV(whole, {"gmml__t": [0.3, 0.5], "gmml__lam": [0.01, 0.1]}).fit(X, y)
    assert search.best_score_ > base


@pytest.mark.parametrize("model", BOTH)
def test_scikit_learns_own_checks(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(model, on_skip=None)
    assert len(found) > 40


@pytest.mark.parametrize("model", BOTH)
def test_clones_pickles_and_frames(model: Any) -> None:
    X, y = labelled()
    frame = pd.DataFrame(X, columns=list("abcd"))
    fitted = clone(model).set_output(transform="pandas").fit(frame, y)
    again = pickle.loads(pickle.dumps(fitted))
    table = fitted.transform(frame)
    assert list(table.columns) == list(fitted.get_feature_names_out())
    assert list(fitted.feature_names_in_) == list("abcd")
    pd.testing.assert_frame_equal(again.transform(frame), table)
    with pytest.raises(ValueError, match="feature names"):
        fitted.transform(frame[["b", "a", "c", "d"]])
    assert clone(fitted).get_params() == model.get_params()


@pytest.mark.parametrize("count", [1, 50])
def test_equal_documents_keep_their_order(count: int) -> None:
    X, y = labelled(rows=60)
    model = LocalGMML(rho=5.0).fit(X, y)
    for order in model.rank(X[:count] + 0.1, np.concatenate([X, X[::-1]])):
        place = np.argsort(order)
        np.testing.assert_array_equal(place[60:][::-1], place[:60] + 1)


@pytest.mark.parametrize("model", BOTH)
def test_arrays_that_cannot_be_written_are_only_read(model: Any) -> None:
    X, y = labelled()
    expected = clone(model).fit(X.copy(), y).transform(X)
    X.setflags(write=False)
    np.testing.assert_array_equal(clone(model).fit(X, y).transform(X), expected)


def test_rho_is_the_same_for_the_same_seed_and_all_rows_are_kept() -> None:
    X, y = labelled(rows=60)
    one, two = (LocalGMML(4, random_state=3).fit(X, y) for _ in range(2))
    assert one.rho_ == two.rho_
    np.testing.assert_array_equal(one.transform(X), two.transform(X))
    assert one.rows_.shape == X.shape
    assert one.anchors_.shape == (4, 4)


@pytest.mark.parametrize("model", BOTH)
def test_errors_name_argument_rule_and_value(model: Any) -> None:
    X, y = labelled()
    with pytest.raises(DataError, match="`y` must hold at least two classes, got one class"):
        clone(model).fit(X, np.zeros(len(X)))
    with pytest.raises(DataError, match="`y` must hold a class of at least two rows, got 9 classes of one row each"):
        clone(model).fit(X[:9], np.arange(9))
    with pytest.raises(ValueError, match="NaN"):
        clone(model).fit(np.where(X > 2, np.nan, X), y)
    with pytest.raises(LGMMLError, match="`t` must lie in"):
        clone(model).set_params(t=1.5).fit(X, y)
    with pytest.raises(LGMMLError, match="`lam` must be finite and at least 0, got -1"):
        clone(model).set_params(lam=-1).fit(X, y)
    with pytest.raises(NotSPDError, match="are all its rows equal"):
        clone(model).fit(np.ones((6, 4)), [0, 1, 0, 1, 0, 1])
    with pytest.raises(NotFittedError):
        clone(model).pair_distance(X[None, :2])
    fitted = clone(model).fit(X, y)
    with pytest.raises(LGMMLError, match=r"`pairs` must have shape \(\*, 2, 4\), got \(40, 4\)"):
        fitted.pair_distance(X)
    with pytest.raises(LGMMLError, match="`pairs` must be finite"):
        fitted.pair_distance(np.full((1, 2, 4), np.nan))


def test_errors_of_local_settings() -> None:
    X, y = labelled()
    with pytest.raises(LGMMLError, match="`rho` must be at least 0, got -1"):
        LocalGMML(rho=-1.0).fit(X, y)
    with pytest.raises(LGMMLError, match="`rho` must be"):
        LocalGMML(rho="best").fit(X, y)  # type: ignore[arg-type]
    with pytest.raises(LGMMLError, match="`n_regions` must be"):
        LocalGMML(0).fit(X, y)
    with pytest.raises(LGMMLError, match="`rho` must be a number for so few rows"):
        LocalGMML(random_state=0).fit(X[:3], [0, 0, 1])
    with pytest.raises(ValueError, match="features"):
        LocalGMML(rho=1.0).fit(X, y).rank(X[0, :2], X)
