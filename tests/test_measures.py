"""Measures of one's own, wherever a built-in one may be named."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lgmml_torch.app.compose import find_measure, measuring_rules
from lgmml_torch.app.config import load_config
from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.evaluation.evaluate import evaluate, evaluate_scores
from lgmml_torch.evaluation.metric import RankingMetrics
from lgmml_torch.fitting.boosted import fit_boosted
from lgmml_torch.functional.measures import Measure, mean_measure, rank_metrics
from lgmml_torch.ragged import RankingData
from tests.app.test_train import run
from tests.own_measures import first_is_good, nothing_better
from tests.test_estimator import TINY, problem

LISTS = RankingData.from_arrays(torch.arange(5.0)[:, None], [0, 1, 1, 0, 1], qid=[1, 1, 2, 2, 3])
OWN = "tests.own_measures.first_is_good"


def test_beside_the_built_in_ones() -> None:
    scores = LISTS.features[:, 0]
    found = evaluate_scores(scores, LISTS, metrics=["ndcg@1", first_is_good])
    assert list(found.means) == ["ndcg@1", "first_is_good"]
    assert found.means["first_is_good"] == pytest.approx(0.5)
    assert (found.counted["first_is_good"], found.skipped["first_is_good"]) == (2, 1)
    line = "first_is_good (own): Whether the first document is relevant; lists of one document do not count."
    assert found.definitions["first_is_good"] == line
    assert line in found.markdown()
    assert found.interval("first_is_good") is not None
    metric = RankingMetrics([first_is_good, "map"])
    metric.update(scores, LISTS.labels, LISTS.offsets)
    assert float(metric.compute()["first_is_good"]) == pytest.approx(0.5)
    assert metric.summary()["first_is_good"].definition == line
    weights = torch.tensor([3.0, 1.0, 5.0])
    values = rank_metrics(scores, LISTS.labels, LISTS.offsets, metrics=[first_is_good])["first_is_good"]
    expected = float((values[:2] * weights[:2]).sum() / 4)
    assert mean_measure(scores, LISTS, first_is_good, weights=weights) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, y, o: s, r"the measure '<lambda>' must give a tensor of shape \(3,\), got \(5,\)"),
        (lambda s, y, o: 1.0, r"the measure '<lambda>' must give a tensor of shape \(3,\), got float"),
        (lambda s, y, o: torch.full((3,), torch.inf), "must give finite numbers or NaN"),
        (partial(first_is_good), r"a partial call needs a `__name__`"),
        (3, "a measure must be a name or a function with a name, got int"),
        ("ndgc@10", "did you mean 'ndcg'"),
    ],
)
def test_what_is_no_measure(function: Any, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        rank_metrics(LISTS.features[:, 0], LISTS.labels, LISTS.offsets, metrics=[function])


def test_two_of_one_name() -> None:
    with pytest.raises(LGMMLError, match="names of their own, got two called '<lambda>'"):
        rank_metrics(LISTS.labels, LISTS.labels, LISTS.offsets, metrics=[lambda *a: a[0], lambda *a: a[1]])


def test_the_measure_decides_when_boosting_stops() -> None:
    X, y, qid = problem(20)
    data = RankingData.from_arrays(X, y, qid=qid)
    settings: dict[str, Any] = {"rounds": 20, "candidates": 6, "evaluate_every": 1, "patience": 3, "smooth": 1}
    stopped = fit_boosted(data, data, measure=nothing_better, **settings)
    assert stopped.history["best_round"] == 1
    assert stopped.history["rounds"] == [1, 2, 3, 4, 5]
    assert stopped.history["valid_measure"] == [1.0] * 5
    assert (stopped.history["measure"], stopped.history["best_measure"]) == ("nothing_better", 1.0)
    assert stopped.history["best_valid_ndcg"] is None
    by_name, usual = (fit_boosted(data, data, measure=name, **settings) for name in ("ndcg@10", None))
    assert by_name.history["valid_measure"] == pytest.approx(usual.history["valid_ndcg"])
    assert torch.equal(by_name.phi, usual.phi)


def test_the_estimator_goes_by_it() -> None:
    X, y, qid = problem(20)
    ranker = LGMMLRanker(**TINY, measure=first_is_good).fit(X, y, qid=qid)
    assert ranker.bank_history_["measure"] == "first_is_good"
    data = RankingData.from_arrays(X, y, qid=qid)
    expected = evaluate(ranker.model_, data, metrics=[first_is_good]).means["first_is_good"]
    assert ranker.score(X, y, qid=qid) == pytest.approx(expected)
    assert all(0 <= value <= 1 for value in ranker.validation_curve_.values())
    flat = LGMMLRanker(**{**TINY, "epochs": 2}, measure=nothing_better).fit(X, y, qid=qid)
    assert flat.best_epoch_ == 0  # no epoch is better than the start
    assert set(flat.validation_curve_.values()) == {1.0}
    named = LGMMLRanker(**TINY, measure="map").fit(X, y, qid=qid)
    assert named.score(X, y, qid=qid) == pytest.approx(evaluate(named.model_, data, metrics=["map"]).means["map"])


def test_dotted_names_are_under_the_rule_of_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"`measure` must lie in one of lgmml_torch, .*LGMML_TARGETS=package allows"):
        find_measure("measure", OWN)
    monkeypatch.setenv("LGMML_TARGETS", "tests.own_measures")
    assert find_measure("measure", OWN) == Measure(OWN, first_is_good)
    with pytest.raises(ConfigError, match=r"`measure` must name a measure, got 'tests.own_measures.gone'"):
        find_measure("measure", "tests.own_measures.gone")
    with pytest.raises(ConfigError, match=r"`measure` must name a function, got 'tests.own_measures.NOT_A_FUNCTION'"):
        find_measure("measure", "tests.own_measures.NOT_A_FUNCTION")
    with pytest.raises(ConfigError, match="`measure` must lie in one of"):
        find_measure("measure", "tests.own_measures.torch.load")
    cfg = load_config([f"measure={OWN}", f"evaluation.metrics=[map,{OWN}]"])
    assert [measure.name for measure in measuring_rules(cfg)["metrics"]] == ["map", OWN]
    assert cfg.callbacks.early_stopping.monitor == f"val/{OWN}"


def test_a_run_goes_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LGMML_TARGETS", "tests.own_measures")
    result = run(tmp_path, "local_metrics.rounds=6", f"measure={OWN}", "evaluation.metrics=[ndcg@10]", "logger=none")
    assert result.bank_history["measure"] == OWN
    assert list(result.evaluations[0].means) == ["ndcg@10", OWN]
    report = (tmp_path / "report.md").read_text()
    assert f"| epoch | validation {OWN} |" in report
    assert f"| round | validation {OWN} |" in report
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["evaluations"][0]["metrics"][OWN]["counted"] > 0
    assert f"{OWN} by boosting round" in (tmp_path / "report.html").read_text()
