from __future__ import annotations

import json
import math

import pytest
import torch

from lgmml_torch.app.commands.common import print_evaluations
from lgmml_torch.checks import DataError, DegenerateScoresWarning, LGMMLError
from lgmml_torch.evaluation.evaluate import evaluate, evaluate_scores
from lgmml_torch.evaluation.metric import RankingMetrics
from lgmml_torch.functional.measures import rank_metrics
from lgmml_torch.functional.presets import REPORTED, describe
from lgmml_torch.ragged import RankingData
from tests.doors import FEATURES, small_data, small_model


@pytest.mark.parametrize("preset", ["default", "letor4", "lightgbm"])
def test_equals_the_metrics_of_the_scores(preset: str) -> None:
    model, data = small_model(), small_data(seed=2, shuffled=True)
    found = evaluate(model, data, split="test", preset=preset, seed=3)
    scores = model.score(data)
    values = rank_metrics(scores, data.labels, data.offsets, metrics=REPORTED, preset=preset, tie_order=data.order)
    other = RankingMetrics(REPORTED, preset=preset)
    other.update(scores, data.labels, data.offsets, tie_order=data.order)
    for name, summary in other.summary().items():
        torch.testing.assert_close(found.per_query[name], values[name], equal_nan=True)
        assert found.means[name] == pytest.approx(summary.value, abs=1e-12)
        assert (found.counted[name], found.skipped[name]) == (summary.counted, summary.skipped)
        assert found.definitions[name] == summary.definition == describe(name, preset)
    assert (found.split, found.policy, found.seed, found.documents) == ("test", "shared", 3, data.num_documents)
    assert found.qids == data.qids


def test_parts_add_up() -> None:
    model, data = small_model(), small_data(seed=2)
    parts = [data.select(range(5)), data.select(range(5, 12))]
    whole, streamed = evaluate(model, data), evaluate(model, iter(parts))
    assert streamed.qids == whole.qids
    for name in REPORTED:
        assert streamed.means[name] == pytest.approx(whole.means[name], abs=1e-9)
        assert streamed.counted[name] == whole.counted[name]


@pytest.mark.filterwarnings("ignore::lgmml_torch.checks.DegenerateScoresWarning")
def test_ties_are_broken_in_the_callers_order() -> None:
    X, y, qid = torch.ones(2, FEATURES), [1, 0], [1, 1]
    model = small_model()
    assert evaluate(model, RankingData.from_arrays(X, y, qid=qid)).means["ndcg@1"] == 1
    assert evaluate(model, RankingData.from_arrays(X, y[::-1], qid=qid)).means["ndcg@1"] == 0


def test_flat_scores_are_warned_of() -> None:
    data = RankingData.from_arrays(torch.ones(2, FEATURES), [1, 0], qid=[1, 1])
    with pytest.warns(DegenerateScoresWarning, match="nearly constant within 100% of the lists"):
        evaluate(small_model(), data)


def test_known_queries_use_their_own_weights() -> None:
    model, data = small_model(mode="per_query"), small_data()
    own, ones = evaluate(model, data, known_queries=True), evaluate(model, data, policy="ones")
    assert (own.policy, ones.policy) == ("own Φ", "ones")
    scores = model.score(data, known_queries=True)
    expected = evaluate_scores(scores, data, policy="own Φ")
    assert own.means == expected.means


def test_json_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    data = small_data()
    labels = data.labels.clone()
    labels[: int(data.offsets[3])] = 0
    found = evaluate(small_model(), data.replace(labels=labels), split="test", metrics=["ndcg@10", "mrr"])
    content = json.loads(found.to_json())
    assert content["metrics"]["ndcg@10"]["counted"] == found.counted["ndcg@10"]
    assert content["metrics"]["ndcg@10"]["skipped"] >= 3
    assert content["per_query"]["ndcg@10"][0] is None
    assert content["qids"] == list(data.qids)
    assert "per_query" not in found.to_dict()
    text = found.markdown()
    assert text.startswith("| data | weights | ndcg@10 | mrr | queries | skipped |\n| --- | --- | ---: |")
    assert f"{found.means['ndcg@10']:.4f}" in text
    assert "- ndcg@10 (default): gain 2^y-1" in text
    assert f"{found.counted['ndcg@10']} (ndcg@10), 12 (mrr)" in text
    print_evaluations([found, found])
    printed = capsys.readouterr().out
    assert printed.count("ndcg@10 (default): gain 2^y-1") == 1
    assert printed.count(f"{found.means['mrr']:.4f}") == 2


def test_a_metric_that_counts_nothing_is_nan() -> None:
    data = small_data()
    found = evaluate(small_model(), data.replace(labels=torch.zeros_like(data.labels)))
    assert math.isnan(found.means["map"])
    assert (found.counted["map"], found.skipped["map"]) == (0, 12)
    assert json.loads(found.to_json())["metrics"]["map"]["mean"] is None
    assert "| data | shared | – | – | – | – | 0 | 12 |" in found.markdown()


def test_errors() -> None:
    model, data = small_model(), small_data()
    with pytest.raises(DataError, match=r"there are no queries to evaluate in 'test'"):
        evaluate(model, iter([]), split="test")
    with pytest.raises(LGMMLError, match=r"did you mean 'ndcg'\?"):
        evaluate(model, data, metrics=["ndgc@10"])
    with pytest.raises(LGMMLError, match=r"`preset` must be one of"):
        evaluate(model, data, preset="letor")
    with pytest.raises(LGMMLError, match=r"`policy` must be one of 'shared', 'ones', got 'knn'"):
        evaluate(model, data, policy="knn")
    with pytest.raises(LGMMLError, match=r"`features` must have shape \(\*, 5\)"):
        evaluate(model, data.replace(features=data.features[:, :3]))
    with pytest.raises(LGMMLError, match=r"`scores` must have shape"):
        evaluate_scores(torch.zeros(2), data)
