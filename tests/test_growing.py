"""More rounds or epochs on new queries, on top of an old model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.fitting.boosted import BoostState, RoundInfo, fit_boosted
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from tests.app.test_train import run
from tests.test_estimator import TINY, problem

TRAINED: dict[str, Any] = {
    "bank": "trained", "epochs": 2, "random_state": 0, "bank_options": {"num_metrics": 4, "rank": 2},
}  # fmt: skip
QUICK: dict[str, Any] = {"candidates": 6, "rounds": 4}


@pytest.fixture(scope="module")
def old() -> LGMMLRanker:
    X, y, qid = problem()
    return LGMMLRanker(**TINY).fit(X, y, qid=qid)


@pytest.fixture(scope="module")
def trained() -> LGMMLRanker:
    X, y, qid = problem()
    return LGMMLRanker(**TRAINED).fit(X, y, qid=qid)


def lists(seed: int, queries: int = 20) -> RankingData:
    X, y, qid = problem(queries, seed=seed)
    return RankingData.from_arrays(X, y, qid=qid)


class TestBoosted:
    def test_no_rounds_change_nothing(self) -> None:
        bank = fit_boosted(lists(0), **QUICK)
        same = fit_boosted(lists(1), start=bank, rounds=0)
        assert same.metrics is bank.metrics
        assert same.phi is bank.phi
        with pytest.raises(LGMMLError, match="`rounds` must be positive, got 0"):
            fit_boosted(lists(1), rounds=0)

    def test_rounds_are_added(self) -> None:
        data, new = lists(0), lists(1)
        bank = fit_boosted(data, **QUICK)
        grown = fit_boosted(new, start=bank, **QUICK)
        assert grown.metrics.num_metrics > bank.metrics.num_metrics
        assert float(grown.phi.sum()) > float(bank.phi.sum())
        assert grown.history["rounds"][0] == 0
        assert grown.history["train_ndcg"][-1] > grown.history["train_ndcg"][0]
        rest = grown.score(new.features) - bank.score(new.features)
        assert float(rest.std()) > 0

    def test_rounds_that_do_not_help_are_not_kept(self) -> None:
        data = lists(0)
        bank = fit_boosted(data, **QUICK)
        wrong = data.replace(labels=1 - data.labels)
        kept = fit_boosted(wrong, data, start=bank, smooth=1, **QUICK)
        assert kept.history["best_round"] == 0
        assert kept.metrics is bank.metrics
        assert torch.equal(kept.phi, bank.phi)

    def test_a_fit_that_was_stopped_goes_on(self) -> None:
        bank, new, states = fit_boosted(lists(0), **QUICK), lists(1), []

        def tell(done: int, info: RoundInfo) -> None:
            states.append(info.state.export())

        whole = fit_boosted(new, start=bank, on_round=tell, **QUICK)
        again = fit_boosted(new, start=bank, resume=BoostState.load(states[1]), **QUICK)
        assert torch.equal(whole.phi, again.phi)
        with pytest.raises(ConfigError, match="`resume` must belong to this fit"):
            fit_boosted(new, resume=BoostState.load(states[1]), **QUICK)

    def test_what_cannot_be_added_to(self) -> None:
        bank = fit_boosted(lists(0), **QUICK)
        with pytest.raises(LGMMLError, match="`kernel` must be that of the metrics to go on from, 'paper', got 'rbf'"):
            fit_boosted(lists(1), start=bank, kernel="rbf", **QUICK)
        narrow = lists(1)
        with pytest.raises(LGMMLError, match="`start` must look at 2 features, got 4"):
            fit_boosted(narrow.replace(features=narrow.features[:, :2]), start=bank, **QUICK)


class TestTheEstimator:
    @pytest.mark.parametrize("way", ["ranker", "model", "file"])
    def test_the_old_model_and_no_rounds_is_the_old_model(self, old: LGMMLRanker, way: str, tmp_path: Path) -> None:
        X, y, qid = problem(10, seed=5)
        old.save(tmp_path / "old.safetensors")
        given: Any = {"ranker": old, "model": old.model_, "file": tmp_path / "old.safetensors"}[way]
        same = LGMMLRanker(rounds=0, epochs=0, random_state=3).fit(X, y, qid=qid, init_model=given)
        np.testing.assert_array_equal(same.predict(X, qid=qid), old.predict(X, qid=qid))

    def test_and_no_epochs_of_trained_metrics(self, trained: LGMMLRanker) -> None:
        X, y, qid = problem(10, seed=5)
        before = trained.predict(X, qid=qid)
        same = LGMMLRanker(epochs=0).fit(X, y, qid=qid, init_model=trained)
        np.testing.assert_array_equal(same.predict(X, qid=qid), before)
        on = LGMMLRanker(epochs=2, validation_fraction=0, random_state=0).fit(X, y, qid=qid, init_model=trained)
        assert on.model_.metrics.num_metrics == trained.model_.metrics.num_metrics
        new, earlier = (next(iter(one.model_.metrics.iter_blocks())).anchors for one in (on, trained))
        assert not torch.equal(new, earlier)
        np.testing.assert_array_equal(trained.predict(X, qid=qid), before)  # the old one stays as it is

    def test_new_queries_teach_it_something(self, old: LGMMLRanker) -> None:
        X, y, qid = problem(40, seed=7)
        y = (X[:, 2] > 0.8).astype(int)  # another taste
        before = old.predict(X, qid=qid)
        grown = LGMMLRanker(**{**TINY, "rounds": 20, "epochs": 0}).fit(X, y, qid=qid, init_model=old)
        assert grown.model_.metrics.num_metrics > old.model_.metrics.num_metrics
        assert grown.score(X, y, qid=qid) > old.score(X, y, qid=qid) + 0.1
        np.testing.assert_array_equal(old.predict(X, qid=qid), before)
        assert grown.model_.preprocess.spec() == old.model_.preprocess.spec()
        for name, value in old.model_.preprocess.state_dict().items():
            assert torch.equal(grown.model_.preprocess.state_dict()[name], value)

    def test_sampled_keeps_the_metrics(self, old: LGMMLRanker) -> None:
        X, y, qid = problem(10, seed=5)
        only_phi = LGMMLRanker(bank="sampled", epochs=1).fit(X, y, qid=qid, init_model=old)
        assert only_phi.model_.metrics.num_metrics == old.model_.metrics.num_metrics

    def test_refusals(self, old: LGMMLRanker) -> None:
        X, y, qid = problem(10, seed=5)
        with pytest.raises(LGMMLError, match="`init_model` must be a model, its file or a fitted ranker, got int"):
            LGMMLRanker().fit(X, y, qid=qid, init_model=3)
        with pytest.raises(LGMMLError, match="`rounds` must be positive, got 0"):
            LGMMLRanker(rounds=0).fit(X, y, qid=qid)
        with pytest.raises(ConfigError, match="the model to start from has 4 features, the data has 3"):
            LGMMLRanker(**TINY).fit(X[:, :3], y, qid=qid, init_model=old)
        own = LGMMLRanker(**TINY, phi="per_query").fit(X, y, qid=qid)
        with pytest.raises(LGMMLError, match="must have weights Φ shared by all queries"):
            LGMMLRanker(**TINY).fit(X, y, qid=qid, init_model=own)
        with pytest.raises(LGMMLError, match="`kernel` must be that of the metrics to go on from"):
            LGMMLRanker(**TINY, kernel="rbf").fit(X, y, qid=qid, init_model=old)

    def test_columns_in_another_order(self) -> None:
        pandas = pytest.importorskip("pandas")
        X, y, qid = problem(10)
        frame = pandas.DataFrame(X, columns=list("abcd"))
        ranker = LGMMLRanker(**TINY).fit(frame, y, qid=qid)
        with pytest.raises(ConfigError, match="got the same names in another order"):
            LGMMLRanker(**TINY).fit(frame[list("bacd")], y, qid=qid, init_model=ranker)
        with pytest.raises(ConfigError, match=r"got unknown \['e'\]"):
            LGMMLRanker(**TINY).fit(frame.rename(columns={"a": "e"}), y, qid=qid, init_model=ranker)


def test_on_the_command_line(tmp_path: Path) -> None:
    first = run(tmp_path / "first", "local_metrics.rounds=6", "logger=none")
    file = tmp_path / "first" / "model.safetensors"
    start = [f"warm_start={file}", "logger=none", "data.seed=1"]
    grown = run(tmp_path / "grown", *start, "grow=true", "local_metrics.rounds=6")
    assert grown.model.metrics.num_metrics >= first.model.metrics.num_metrics
    assert grown.bank_history["rounds"][0] == 0
    same = run(tmp_path / "same", *start, "grow=true", "local_metrics.rounds=0", "trainer.max_epochs=0")
    X, _, qid = problem(5)
    data = RankingData.from_arrays(np.concatenate([X, X[:, :2]], axis=1), np.zeros(len(X)), qid=qid)
    assert torch.equal(same.model.score(data), LGMML.load(file).score(data))
    with pytest.raises(ConfigError, match="`grow` needs a model to add rounds to"):
        run(tmp_path / "none", "grow=true")
    with pytest.raises(ConfigError, match="`grow` must be false for metrics that are neither boosted nor trained"):
        run(tmp_path / "sampled", *start, "grow=true", "local_metrics=sampled")
    with pytest.raises(LGMMLError, match=r"`local_metrics\.kernel` must be that of the metrics to go on from"):
        run(tmp_path / "kernel", *start, "grow=true", "local_metrics.kernel=rbf")
