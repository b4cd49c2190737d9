"""`LGMMLRanker` as people use it: with the habits of scikit-learn, LightGBM and XGBoost."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.experimental import enable_halving_search_cv  # noqa: F401 - `HalvingGridSearchCV` needs it
from sklearn.model_selection import GridSearchCV, GroupKFold, HalvingGridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from lgmml_torch.checks import DataError, DataWarning
from lgmml_torch.estimator import LGMMLRanker
from tests.test_estimator import problem

TINY: dict[str, Any] = {
    "bank": "boosted", "rounds": 2, "epochs": 0, "random_state": 0, "bank_options": {"candidates": 6},
}  # fmt: skip


def all_of(X: Any) -> list[int]:
    return [X.shape[0] if hasattr(X, "shape") else len(np.asarray(X))]


class OneList(LGMMLRanker):
    """All rows are one list: scikit-learn's checks know nothing of queries."""

    def fit(self, X: Any, y: Any, *, sample_weight: Any = None) -> OneList:  # type: ignore[override]
        return super().fit(X, y, group=all_of(X), sample_weight=sample_weight)

    def predict(self, X: Any) -> np.ndarray:  # type: ignore[override]
        return super().predict(X, group=all_of(X))

    def score(self, X: Any, y: Any) -> float:  # type: ignore[override]
        return super().score(X, y, group=all_of(X))


WORDS = "refused as it should be, in this package's words, which the check does not know"
COUNTS = "repeats rows; here a weight multiplies what the relevance of a document counts, and lists stay as they are"
EXCEPTIONS = {
    "check_n_features_in_after_fitting": WORDS,  # `X` must have 4 features as in `fit`, got 1
    "check_all_zero_sample_weights_error": WORDS,  # `sample_weight` must be above 0 for some query
    "check_dtype_object": WORDS,  # `X` must be numeric, got ndarray: …
    "check_estimators_empty_data_messages": WORDS,  # `features` must have rows and columns to fit …
    "check_estimators_nan_inf": WORDS,  # `X` must be finite, got nan at row …
    "check_fit2d_1sample": WORDS,  # `features` must have a feature that varies
    "check_fit2d_predict1d": WORDS,  # `X` must have shape (rows, features), got (3,)
    "check_sample_weight_equivalence_on_dense_data": COUNTS,
    "check_sample_weight_equivalence_on_sparse_data": COUNTS,
    "check_methods_subset_invariance": "scores rows in groups; here a score depends on the rest of the list",
}


def test_scikit_learns_own_checks() -> None:
    """All pass but those listed; one that has come to pass must leave the list."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(
            OneList(**{**TINY, "rounds": 1, "validation_fraction": 0}),
            on_fail=None,
            on_skip=None,
            expected_failed_checks=EXCEPTIONS,
        )
    assert len(found) > 40
    by_status = {
        status: {one["check_name"] for one in found if one["status"] == status} for status in ("failed", "xfail")
    }
    assert by_status == {"failed": set(), "xfail": set(EXCEPTIONS)}
    for one in found:
        if one["status"] == "xfail" and EXCEPTIONS[one["check_name"]] == WORDS:
            assert isinstance(
                one["exception"] if isinstance(one["exception"], ValueError) else refusal(one), ValueError
            )


def refusal(one: dict[str, Any]) -> BaseException | None:
    """The error behind the check's own."""
    return one["exception"].__cause__ or one["exception"].__context__


def frame(X: np.ndarray, qid: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(X, columns=["a", "b", "c", "d"]).assign(qid=qid)[["a", "qid", "b", "c", "d"]]


def test_queries_as_a_column_of_any_frame() -> None:
    X, y, qid = problem(10)
    expected = LGMMLRanker(**TINY).fit(X, y, qid=qid)
    table = frame(X, qid)
    for given in (table, pl.from_pandas(table), pa.Table.from_pandas(table)):
        ranker = LGMMLRanker(**TINY).fit(given, y)
        assert ranker.feature_names_in_.tolist() == ["a", "b", "c", "d"]
        assert ranker.n_features_in_ == 4
        np.testing.assert_array_equal(ranker.predict(given), expected.predict(X, qid=qid))
        assert ranker.score(given, y) == expected.score(X, y, qid=qid)
    with pytest.raises(DataError, match=r"`qid` must be None where `X` has a column 'qid', got both"):
        LGMMLRanker().fit(table, y, qid=qid)
    with pytest.raises(DataError, match=r"`group` must be None where `X` has a column 'qid', got both"):
        expected.predict(table, group=[len(X)])


def test_group_is_sizes_of_consecutive_queries() -> None:
    X, y, qid = problem(10)
    order = qid.argsort(kind="stable")
    X, y, qid, sizes = X[order], y[order], qid[order], [10] * 10
    one, other = LGMMLRanker(**TINY).fit(X, y, qid=qid), LGMMLRanker(**TINY).fit(X, y, group=sizes)
    np.testing.assert_array_equal(one.predict(X, qid=qid), other.predict(X, group=sizes))
    assert one.score(X, y, qid=qid) == other.score(X, y, group=sizes)
    with pytest.raises(DataError, match=r"give either `qid` .* or `group` .*, got both"):
        other.predict(X, qid=qid, group=sizes)


def test_sets_to_validate_on_in_every_shape() -> None:
    X, y, qid = problem(10)
    V, v, q = problem(6, seed=2)
    order = q.argsort(kind="stable")
    V, v, q = V[order], v[order], q[order]
    sizes = [10] * 6
    expected = LGMMLRanker(**TINY).fit(X, y, qid=qid, eval_set=(V, v, q)).predict(V, qid=q)
    for given in (
        {"eval_set": [(V, v)], "eval_qid": [q]},
        {"eval_set": [(V, v)], "eval_qid": q},
        {"eval_set": [(V, v)], "eval_group": [sizes]},
        {"eval_set": (V, v), "eval_group": sizes},
        {"eval_set": [(V, v, q)]},
    ):
        np.testing.assert_array_equal(LGMMLRanker(**TINY).fit(X, y, qid=qid, **given).predict(V, qid=q), expected)
    found = LGMMLRanker(**TINY).fit(frame(X, qid), y, eval_set=[(frame(V, q), v)])
    np.testing.assert_array_equal(found.predict(frame(V, q)), expected)
    with pytest.warns(DataWarning, match="of the 2 sets in `eval_set` the last one decides"):
        found = LGMMLRanker(**TINY).fit(X, y, qid=qid, eval_set=[(X, y), (V, v)], eval_qid=[qid, q])
    np.testing.assert_array_equal(found.predict(V, qid=q), expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_set": []}, r"`eval_set` must be \(X, y, qid\), got a list of other things; or \[\(X, y\)\] with"),
        ({"eval_set": [([[1]], [1], [1])], "eval_qid": [1]}, "`eval_qid` must be None where `eval_set` holds"),
        ({"eval_set": [([[1]], [1])], "eval_qid": [[1], [2]]}, "`eval_qid` must have one array for each of 1 sets"),
    ],
)
def test_bad_sets_to_validate_on(given: dict[str, Any], message: str) -> None:
    X, y, qid = problem(4)
    with pytest.raises(DataError, match=message):
        LGMMLRanker(**TINY).fit(X, y, qid=qid, **given)


def test_weights_weigh_queries_in_the_score() -> None:
    X, y, qid = problem(10)
    ranker = LGMMLRanker(**TINY).fit(X, y, qid=qid)
    weight = (qid % 3).astype(float)
    total = 0.0
    counted = [query for query in np.unique(qid) if y[qid == query].any()]
    for query in counted:
        rows = qid == query
        total += weight[rows][0] * ranker.score(X[rows], y[rows], qid=qid[rows])
    expected = total / sum(query % 3 for query in counted)
    assert ranker.score(X, y, qid=qid, sample_weight=weight) == pytest.approx(expected)
    assert ranker.score(X, y, qid=qid, sample_weight=np.ones(len(X))) == pytest.approx(ranker.score(X, y, qid=qid))


def test_a_search_over_frames_needs_no_routing() -> None:
    """The column of queries goes through the pipeline, into fits, scores and predictions."""
    X, y, qid = problem(12)
    table = frame(X, qid)
    scale = ColumnTransformer(
        [("scale", StandardScaler(), ["a", "b", "c", "d"])], remainder="passthrough", verbose_feature_names_out=False
    ).set_output(transform="pandas")
    pipeline = Pipeline([("scale", scale), ("ranker", LGMMLRanker(**TINY))])
    search = GridSearchCV(pipeline, {"ranker__rounds": [1, 2]}, cv=GroupKFold(2), error_score="raise")
    search.fit(table, y, groups=qid)
    assert (search.cv_results_["mean_test_score"] > 0.6).all()
    scores = search.predict(table)
    assert search.best_estimator_.named_steps["ranker"].feature_names_in_.tolist() == ["a", "b", "c", "d"]
    order = np.random.default_rng(1).permutation(len(X))
    np.testing.assert_allclose(search.predict(table.iloc[order]), scores[order], rtol=1e-5)


def test_a_search_with_routing_passes_queries_and_weights() -> None:
    X, y, qid = problem(12)
    weight = 1.0 + qid % 2
    with sklearn.config_context(enable_metadata_routing=True):
        ranker = LGMMLRanker(**TINY).set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
        pipeline = Pipeline([("scale", StandardScaler().set_fit_request(sample_weight=False)), ("ranker", ranker)])
        search = GridSearchCV(pipeline, {"ranker__rounds": [1, 2]}, cv=GroupKFold(2), error_score="raise")
        search.fit(X, y, qid=qid, groups=qid, sample_weight=weight)
        assert (search.cv_results_["mean_test_score"] > 0.6).all()
        # `GridSearchCV.predict` passes nothing on; the pipeline it has found does.
        assert search.best_estimator_.predict(X, qid=qid).shape == (len(X),)
        assert 0.6 < search.score(X, y, qid=qid, sample_weight=weight) <= 1
        found = cross_val_score(
            LGMMLRanker(**TINY), X, y, cv=GroupKFold(2), params={"qid": qid, "groups": qid}, error_score="raise"
        )
    assert (found > 0.6).all()


def test_a_halving_search_over_rounds_with_routing() -> None:
    X, y, qid = problem(12)
    ranker = LGMMLRanker(**{**TINY, "rounds": None})
    rounds = {"resource": "rounds", "min_resources": 1, "max_resources": 2, "factor": 2}
    with sklearn.config_context(enable_metadata_routing=True):
        search = HalvingGridSearchCV(
            ranker, {"kernel": ["paper", "rbf"]}, cv=GroupKFold(2), error_score="raise", **rounds
        )
        search.fit(X, y, qid=qid, groups=qid)
    assert search.n_resources_ == [1, 2]
    assert search.best_score_ > 0.6


def test_a_pipeline_of_polars_frames_is_that_of_pandas_frames() -> None:
    X, y, qid = problem(12)
    table = frame(X.astype(float), qid)  # scikit-learn makes float64 of polars columns, but not of pandas ones
    scores = []
    for kind, given, labels in (("pandas", table, pd.Series(y)), ("polars", pl.from_pandas(table), pl.Series(y))):
        scale = ColumnTransformer(
            [("scale", StandardScaler(), list("abcd"))], remainder="passthrough", verbose_feature_names_out=False
        ).set_output(transform=kind)
        pipeline = Pipeline([("scale", scale), ("ranker", LGMMLRanker(**TINY))]).fit(given, labels)
        assert pipeline[-1].feature_names_in_.tolist() == ["a", "b", "c", "d"]
        scores.append(pipeline.predict(given))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)


def test_copies_predict_the_same_and_clones_are_not_fitted() -> None:
    X, y, qid = problem(12)
    ranker = LGMMLRanker(**TINY).fit(X, y, qid=qid)
    scores = ranker.predict(X, qid=qid)  # what scoring keeps for the next time must not hinder copies
    stream = io.BytesIO()
    joblib.dump(ranker, stream)
    stream.seek(0)
    for copied in (pickle.loads(pickle.dumps(ranker)), joblib.load(stream), copy.deepcopy(ranker)):
        np.testing.assert_array_equal(copied.predict(X, qid=qid), scores)
        assert copied.get_params() == ranker.get_params()
    again = clone(ranker)
    assert again.get_params() == ranker.get_params()
    assert not hasattr(again, "model_")


def test_notebooks_show_settings() -> None:
    assert repr(LGMMLRanker(rounds=3)) == "LGMMLRanker(rounds=3)"
    X, y, qid = problem(4)
    for ranker in (LGMMLRanker(**TINY), LGMMLRanker(**TINY).fit(X, y, qid=qid)):
        html = ranker._repr_html_()  # scikit-learn's name, which notebooks call
        assert "LGMMLRanker" in html
        assert "bank_options" in html


def test_a_loaded_ranker_knows_its_columns(tmp_path: Any) -> None:
    X, y, qid = problem(10)
    LGMMLRanker(**TINY).fit(frame(X, qid), y).save(tmp_path / "m.safetensors")
    loaded = LGMMLRanker.load(tmp_path / "m.safetensors")
    assert loaded.feature_names_in_.tolist() == ["a", "b", "c", "d"]
    with pytest.raises(DataError, match="`X` must have the columns it had in `fit`, got the same names in another"):
        loaded.predict(frame(X, qid)[["b", "a", "c", "d", "qid"]])
    LGMMLRanker(**TINY).fit(X, y, qid=qid).save(tmp_path / "m.safetensors")
    assert not hasattr(LGMMLRanker.load(tmp_path / "m.safetensors"), "feature_names_in_")


@pytest.fixture
def usual_interrupts() -> Iterator[None]:
    """Python's own handler of Ctrl-C: Ray Train leaves one of its own in the process, shells in the background none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_interrupts")
def test_ctrl_c_stays_a_keyboard_interrupt() -> None:
    """Before Lightning trains, while it does, and after it was interrupted before."""
    X, y, qid = problem(10)
    handler = signal.getsignal(signal.SIGINT)
    for last in (1, 2, 3):
        called = []

        def measure(scores: Any, labels: Any, offsets: Any, last: int = last, called: list[Any] = called) -> Any:
            called.append(scores)
            if len(called) == last:
                os.kill(os.getpid(), signal.SIGINT)
            return torch.ones(len(offsets) - 1)

        with pytest.raises(KeyboardInterrupt):
            LGMMLRanker(bank="trained", epochs=1, num_metrics=4, measure=measure).fit(X, y, qid=qid)
        assert len(called) == last
        assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("bank", ["boosted", "trained"])
def test_a_shared_phi_with_deviations(bank: str, tmp_path: Any) -> None:
    X, y, qid = problem(10)
    settings: dict[str, Any] = {"rounds": 2} if bank == "boosted" else {}
    ranker = LGMMLRanker(
        bank=bank, phi="deviations", epochs=1, validation_fraction=0, learning_rate=0.05, random_state=0, **settings
    )
    ranker.fit(X, y, qid=qid)
    assert ranker.model_.phi.deviations
    assert ranker.model_.phi.deviation is not None
    assert bool((ranker.model_.phi.deviation.weight != 0).any())
    ranker.save(tmp_path / "model.safetensors")
    loaded = LGMMLRanker.load(tmp_path / "model.safetensors")
    assert loaded.phi == "deviations"
    np.testing.assert_array_equal(loaded.predict(X, qid=qid), ranker.predict(X, qid=qid))


def test_verbose_tells_how_it_goes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where nobody has set up logging."""
    X, y, qid = problem(10)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    LGMMLRanker(**{**TINY, "rounds": 20, "epochs": 2}, verbose=1).fit(X, y, qid=qid)
    lines = capsys.readouterr().err.splitlines()
    assert any("boosted metrics" in line for line in lines)
    rounds = [line for line in lines if line.startswith("local metrics: ")]
    assert 1 <= len(rounds) <= 11
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert [line.partition(",")[0] for line in epochs] == ["epoch 1 of 2", "epoch 2 of 2"]
    assert all(", validation NDCG@10 0." in line or ", validation NDCG@10 1." in line for line in epochs)
    assert logging.getLogger("lgmml_torch").handlers == []


def test_values_that_float32_cannot_tell_apart() -> None:
    rng = np.random.default_rng(0)
    when = 1_700_000_000 + 7 * rng.permutation(400)
    y = (when.reshape(20, 20) >= np.sort(when.reshape(20, 20), axis=1)[:, [17]]).astype(int).ravel()
    table = pd.DataFrame({"noise": rng.normal(size=400), "when": when, "qid": np.repeat(np.arange(20), 20)})
    message = "float32 cannot tell all values of feature 'when' apart: take `precision=\"float64\"`"
    with pytest.warns(DataWarning, match=message):
        flat = LGMMLRanker(**{**TINY, "rounds": 20}).fit(table, y)
    with pytest.warns(DataWarning, match=message):
        assert flat.score(table, y) < 1
    assert LGMMLRanker(**{**TINY, "rounds": 20}, precision="float64").fit(table, y).score(table, y) == pytest.approx(1)
