from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GroupKFold, cross_validate

import lgmml_torch
from lgmml_torch.checks import ConfigError, DataError, DataWarning, LGMMLError
from lgmml_torch.estimator import LGMMLRanker, query_weights
from lgmml_torch.functional.measures import ndcg
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

TINY: dict[str, Any] = {
    "bank": "boosted", "rounds": 3, "epochs": 1, "random_state": 0, "bank_options": {"candidates": 6},
}  # fmt: skip


def problem(queries: int = 30, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ten documents per query, relevant by the first two features; the rows of a query do not follow one another."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(queries * 10, 4)).astype(np.float32)
    y = (X[:, 0] - 0.5 * X[:, 1] + 0.2 * rng.normal(size=len(X)) > 0.8).astype(int)
    return X, y, rng.permutation(np.repeat(np.arange(queries) + 100, 10))


@pytest.fixture(scope="module")
def fitted() -> LGMMLRanker:
    X, y, qid = problem()
    return LGMMLRanker(**TINY).fit(X, y, qid=qid)


def test_learns_and_predicts(fitted: LGMMLRanker) -> None:
    X, y, qid = problem(seed=1)
    found = fitted.predict(X, qid=qid)
    assert found.shape == (300,)
    value = fitted.score(X, y, qid=qid)
    assert value > 0.8  # random: about .5
    data = RankingData.from_arrays(found[:, None], y, qid=qid)
    expected = ndcg(data.features[:, 0], data.labels, data.offsets, k=10, tie_order=data.order)
    assert value == pytest.approx(float(expected), abs=1e-9)
    assert isinstance(fitted.model_, LGMML)
    assert fitted.n_features_in_ == 4
    assert not hasattr(fitted, "feature_names_in_")
    assert list(fitted.validation_curve_) == [0, 1]
    assert fitted.best_epoch_ in (0, 1)
    assert fitted.bank_history_["best_round"] >= 1


def test_feature_importances_add_up_and_find_what_matters(fitted: LGMMLRanker) -> None:
    shares = fitted.feature_importances_
    assert shares.shape == (4,)
    assert shares.sum() == pytest.approx(1)
    assert (shares >= 0).all()
    assert shares.argmax() == 0
    assert not hasattr(LGMMLRanker(), "feature_importances_")


def test_rows_may_come_in_any_order(fitted: LGMMLRanker) -> None:
    X, y, qid = problem()
    order = np.random.default_rng(5).permutation(len(X))
    np.testing.assert_allclose(fitted.predict(X, qid=qid)[order], fitted.predict(X[order], qid=qid[order]), rtol=1e-5)
    again = LGMMLRanker(**TINY).fit(X[order], y[order], qid=qid[order])
    np.testing.assert_allclose(fitted.predict(X, qid=qid), again.predict(X, qid=qid), rtol=1e-5)


def test_parameters_are_stored_untouched_and_cloned() -> None:
    chain = Chain([Standardize()])
    ranker = LGMMLRanker(bank="boosted", rounds=7, preprocess=chain, bank_options={"candidates": 6})
    assert ranker.get_params()["preprocess"] is chain
    copy = clone(ranker)
    assert copy.get_params()["rounds"] == 7
    assert copy.preprocess is not chain
    assert copy.preprocess.spec() == chain.spec()
    assert ranker.set_params(rounds=9, phi="amortized").rounds == 9
    assert repr(LGMMLRanker(rounds=7)) == "LGMMLRanker(rounds=7)"
    X, y, qid = problem(8)
    ranker.set_params(rounds=1, epochs=0, phi="shared").fit(X, y, qid=qid)
    assert not chain.fitted


def test_cross_validation_keeps_queries_together() -> None:
    X, y, qid = problem(18)
    with sklearn.config_context(enable_metadata_routing=True):
        found = cross_validate(
            LGMMLRanker(**{**TINY, "rounds": 2, "epochs": 0}),
            X,
            y,
            cv=GroupKFold(3),
            params={"qid": qid, "groups": qid},
            return_indices=True,
            error_score="raise",
        )
    assert len(found["test_score"]) == 3
    assert (found["test_score"] > 0.6).all()
    for train, test in zip(found["indices"]["train"], found["indices"]["test"], strict=True):
        assert not set(qid[train]) & set(qid[test])


def test_frames_keep_their_column_names() -> None:
    pandas = pytest.importorskip("pandas")
    X, y, qid = problem(8)
    frame = pandas.DataFrame(X, columns=["a", "b", "c", "d"])
    ranker = LGMMLRanker(rounds=1, epochs=0, random_state=0).fit(frame, pandas.Series(y), qid=pandas.Series(qid))
    assert ranker.feature_names_in_.tolist() == ["a", "b", "c", "d"]
    np.testing.assert_array_equal(ranker.predict(frame, qid=qid), ranker.predict(X, qid=qid))
    with pytest.raises(DataError, match=r"`X` must have the columns .*, got the same names in another order"):
        ranker.predict(frame[["b", "a", "c", "d"]], qid=qid)
    with pytest.raises(DataError, match=r"`X` must have the columns .*, got unknown \['e'\], missing \['d'\]"):
        ranker.predict(frame.rename(columns={"d": "e"}), qid=qid)
    ranker.fit(X, y, qid=qid)
    assert not hasattr(ranker, "feature_names_in_")


def test_evaluation_set_replaces_the_held_out_queries() -> None:
    X, y, qid = problem(12)
    ranker = LGMMLRanker(**TINY).fit(X, y, qid=qid, eval_set=problem(6, seed=2))
    assert len(ranker.model_.qids) == 12
    assert list(ranker.validation_curve_) == [0, 1]
    held = LGMMLRanker(**TINY).fit(X, y, qid=qid)
    assert len(held.model_.qids) == 10
    none = LGMMLRanker(**TINY, validation_fraction=0).fit(X, y, qid=qid)
    assert len(none.model_.qids) == 12
    assert none.validation_curve_ == {}


@pytest.mark.parametrize(
    ("bank", "phi", "size"),
    [
        ("sampled", "per_query", {"num_metrics": 4, "epochs": 0}),
        ("sampled", "amortized", {"num_metrics": 4, "epochs": 1}),
        ("boosted", "per_query", {"rounds": 2, "epochs": 1}),
    ],
)
def test_every_way_of_training(bank: str, phi: str, size: dict[str, int]) -> None:
    X, y, qid = problem(10)
    policy = "knn" if phi == "per_query" else None
    ranker = LGMMLRanker(bank=bank, phi=phi, policy=policy, random_state=1, precision="float64", **size)
    found = ranker.fit(X, y, qid=qid).predict(X, qid=qid)
    assert found.dtype == np.float64
    assert np.isfinite(found).all()
    if phi == "per_query":
        assert ranker.model_.phi.summaries.abs().sum() > 0


def test_weights_of_queries() -> None:
    X, y, qid = problem(12)
    settings = {**TINY, "learning_rate": 0.05, "validation_fraction": 0}
    plain = LGMMLRanker(**settings).fit(X, y, qid=qid)
    ones = LGMMLRanker(**settings).fit(X, y, qid=qid, sample_weight=np.ones(len(X)))
    torch.testing.assert_close(plain.model_.phi.table.weight, ones.model_.phi.table.weight, rtol=0, atol=0)
    weight = np.where(qid % 2 == 0, 3.0, 0.1)
    other = LGMMLRanker(**settings).fit(X, y, qid=qid, sample_weight=weight)
    assert not torch.equal(plain.model_.phi.table.weight, other.model_.phi.table.weight)
    half = LGMMLRanker(**settings).fit(X, y, qid=qid, sample_weight=(qid % 2 == 0).astype(float))
    even = qid % 2 == 0
    alone = LGMMLRanker(**settings).fit(X[even], y[even], qid=qid[even])
    np.testing.assert_allclose(half.predict(X, qid=qid), alone.predict(X, qid=qid), rtol=1e-5)


def test_bad_weights() -> None:
    data = RankingData.from_arrays([[1.0], [2.0], [3.0]], [0, 1, 0], qid=["b", "b", "a"])
    for weights, message in (
        ([1, 2, 1], r"`sample_weight` must be the same for all rows of a query.*, got 1 and 2 for qid 'b'"),
        ([1, 1, -1], r"`sample_weight` must be finite and at least 0, got -1"),
        ([1, 1, np.nan], r"`sample_weight` must be finite and at least 0, got nan"),
        ([0, 0, 0], r"`sample_weight` must be above 0 for some query, got 0 for all"),
        ([1, 1], r"`sample_weight` must have one entry per row, 3, got 2"),
    ):
        with pytest.raises(DataError, match=message):
            query_weights(weights, data)


def test_travels(fitted: LGMMLRanker, tmp_path: Path) -> None:
    X, _, qid = problem(5, seed=3)
    expected = fitted.predict(X, qid=qid)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict(X, qid=qid), expected)
    fitted.save(tmp_path / "model.safetensors")
    loaded = LGMMLRanker.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.predict(X, qid=qid), expected)
    assert loaded.n_features_in_ == 4


def test_bad_parameters() -> None:
    X, y, qid = problem(6)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"bank": "bosted"}, r"`bank` must be one of .*did you mean 'boosted'\?"),
        ({"policy": "knn"}, r"`policy` must be one of 'shared', 'ones', got 'knn'"),
        ({"rounds": 0}, r"`rounds` must be positive, got 0"),
        ({"epochs": -1}, r"`epochs` must be at least 0, got -1"),
        ({"validation_fraction": 1}, r"`validation_fraction` must leave queries to train on, got 1"),
        ({"bank": "boosted", "bank_options": {"shrink": 1}}, r"`shrink` is no setting of boosted metrics"),
        ({"bank": "sampled", "bank_options": {"shrink": 1}}, r"`shrink` is no setting of sampled metrics"),
        ({"budget": 60}, r"`budget` must be fast, normal, thorough, or a time such as 60s or 10m, got 60"),
    ]
    for settings, message in refused:
        with pytest.raises(LGMMLError, match=message):
            LGMMLRanker(**settings).fit(X, y, qid=qid)


def test_an_unknown_option_of_trained_metrics() -> None:
    X, y, qid = problem(6)
    with pytest.raises(ConfigError, match="`shrink` is no setting of trained metrics"):
        LGMMLRanker(bank="trained", bank_options={"shrink": 1}).fit(X, y, qid=qid)


def test_bad_data(fitted: LGMMLRanker) -> None:
    X, y, qid = problem(6)
    ranker = LGMMLRanker(**TINY)
    with pytest.raises(NotFittedError, match="LGMMLRanker instance is not fitted"):
        ranker.predict(X, qid=qid)
    with pytest.raises(DataError, match=r"`qid` must name the query of each row, got None"):
        ranker.fit(X, y)
    with pytest.raises(DataError, match=r"`qid` must name the query of each row, got None"):
        fitted.predict(X)
    with pytest.raises(DataError, match=r"`y` must have one entry per row, 60, got 59"):
        ranker.fit(X, y[:-1], qid=qid)
    with pytest.raises(DataError, match=r"`X` must have 4 features as in `fit`, got 3"):
        fitted.predict(X[:, :3], qid=qid)
    with pytest.raises(DataError, match=r"`eval_set` must be \(X, y, qid\), got 2 parts"):
        ranker.fit(X, y, qid=qid, eval_set=(X, y))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"`eval_set` must have a query with a relevant document, got none"):
        ranker.fit(X, y, qid=qid, eval_set=(X, np.zeros_like(y), qid))
    with pytest.raises(DataError, match=r"`eval_set` must have 4 features as `X`, got 2"):
        ranker.fit(X, y, qid=qid, eval_set=(X[:, :2], y, qid))
    with (
        pytest.warns(DataWarning, match=r"of 6 queries, 0 have documents of different labels: none can be held out"),
        pytest.raises(DataError, match=r"must have a query with documents of different labels, got none"),
    ):
        ranker.fit(X, np.zeros_like(y), qid=qid)


def test_one_query_is_trained_on_without_validation() -> None:
    X, y, _ = problem(4)
    with pytest.warns(DataWarning, match="training on all of them, to the end"):
        ranker = LGMMLRanker(rounds=1, epochs=1, random_state=0).fit(X, y, qid=np.zeros(len(X)))
    assert ranker.best_epoch_ == 1


def test_nothing_is_printed_left_behind_or_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    X, y, qid = problem(6)
    monkeypatch.chdir(tmp_path)
    threads, level = torch.get_num_threads(), logging.getLogger("pytorch_lightning").level
    LGMMLRanker(rounds=1, epochs=1, n_jobs=1, random_state=np.random.RandomState(3)).fit(X, y, qid=qid)
    assert torch.get_num_threads() == threads
    assert logging.getLogger("pytorch_lightning").level == level
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_public_names_exist() -> None:
    for name in lgmml_torch.__all__:
        assert getattr(lgmml_torch, name) is not None
    assert set(lgmml_torch.__all__) <= set(dir(lgmml_torch))
    assert lgmml_torch.LGMMLRanker is LGMMLRanker
    with pytest.raises(AttributeError, match="module 'lgmml_torch' has no attribute 'ndgc'"):
        lgmml_torch.ndgc  # noqa: B018
