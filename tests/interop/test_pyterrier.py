"""A stage of a PyTerrier pipeline, with the real package; it needs no Java for this."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from lgmml_torch.checks import DataError, MissingDependencyError
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.interop.pyterrier import LGMMLTransformer, _features_of, _labels_of

pd = pytest.importorskip("pandas")


def results(seed: int, queries: int = 24) -> tuple[Any, Any]:
    """Results with features of which the first tells relevance, and judgements of most of them."""
    g = np.random.default_rng(seed)
    rows, judged = [], []
    for query in range(queries):
        for document in range(10):
            x = g.random(4)
            rows.append(
                {"qid": f"{seed}-{query}", "query": "words", "docno": f"d{document}", "features": x, "score": 0.0}
            )
            if document != 3:
                judged.append({"qid": f"{seed}-{query}", "docno": f"d{document}", "label": int(x[0] * 3) - 1})
    return pd.DataFrame(rows), pd.DataFrame(judged)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # PyTerrier's own, with pandas 3.1
def test_a_pipeline_is_fitted_and_ranks() -> None:
    pt = pytest.importorskip("pyterrier", reason="the extra `terrier` is not installed")
    (train, qrels), (valid, valid_qrels), (test, _) = results(0), results(1, 8), results(2, 8)
    ranker = LGMMLRanker(bank="boosted", rounds=4, epochs=0, random_state=0)
    stage = LGMMLTransformer(ranker)
    assert isinstance(stage, pt.Estimator)
    doubled = pt.apply.generic(lambda frame: frame.assign(features=frame["features"].map(lambda x: x * 2)))
    pipeline = doubled >> stage
    pipeline.fit(train, qrels, valid, valid_qrels)
    shuffled = test.sample(frac=1, random_state=0)
    found = pipeline(shuffled)
    X = np.stack([2 * x for x in shuffled["features"]])
    expected = ranker.predict(X, qid=shuffled["qid"].to_numpy())
    ours = found.set_index(["qid", "docno"])["score"]
    assert ours.loc[list(zip(shuffled["qid"], shuffled["docno"], strict=True))].to_numpy() == pytest.approx(expected)
    assert set(found.columns) == {*test.columns, "rank"}
    assert sorted(found[found["qid"] == "2-0"]["rank"]) == list(range(10))
    assert ranker.score(X, _labels_of(shuffled, results(2, 8)[1]), qid=shuffled["qid"].to_numpy()) > 0.6
    assert list(stage(test.iloc[:0]).columns) == [*test.columns, "rank"]


def test_frames_that_do_not_fit_are_refused() -> None:
    rows, qrels = results(0, 2)
    assert _labels_of(rows, qrels).min() == 0  # judged below 0, and not judged
    with pytest.raises(DataError, match="there is no 'features'"):
        _features_of(rows.drop(columns="features"))
    with pytest.raises(DataError, match="there is no 'label'"):
        _labels_of(rows, qrels.drop(columns="label"))
    with pytest.raises(DataError, match="at least one row, got none"):
        _features_of(rows.iloc[:0])
    rows.at[3, "features"] = np.zeros(3)
    with pytest.raises(DataError, match=r"`features` must hold vectors of one length, got shapes \[\(3,\), \(4,\)\]"):
        _features_of(rows)


def test_a_missing_pyterrier_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyterrier", None)
    with pytest.raises(MissingDependencyError, match=r"`pyterrier` is needed for pipelines .*\[terrier\]"):
        LGMMLTransformer()
