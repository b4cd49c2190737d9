"""More rounds or epochs on new queries, on top of an old model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from tests.app.test_train import run
from tests.test_estimator import TINY, problem

TRAINED: dict[str, Any] = {
    "bank": "trained", "epochs": 2, "random_state": 0, "bank_options": {"num_metrics": 4, "rank": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def old() -> LGMMLRanker:
    X, y, qid = problem()
    return LGMMLRanker(**TINY).fit(X, y, qid=qid)


@pytest.fixture(scope="module")
def trained() -> LGMMLRanker:
    X, y, qid = problem()
    return LGMMLRanker(**TRAINED).fit(X, y, qid=qid)


class TestTheEstimator:
    def test_the_old_model_and_no_rounds_is_the_old_model(self, old: LGMMLRanker, tmp_path: Path) -> None:
        X, y, qid = problem(10, seed=5)
        old.save(tmp_path / "old.safetensors")
        ways: list[Any] = [old, old.model_, tmp_path / "old.safetensors"]
        for given in ways:
            same = LGMMLRanker(rounds=0, epochs=0, random_state=3).fit(X, y, qid=qid, init_model=given)
            before = old.model_.state_dict()
            for name, value in same.model_.state_dict().items():
                torch.testing.assert_close(value, before[name], rtol=1e-6, atol=0, equal_nan=True)
            np.testing.assert_allclose(same.predict(X, qid=qid), old.predict(X, qid=qid), rtol=1e-5)

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
    torch.testing.assert_close(same.model.score(data), LGMML.load(file).score(data), rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="`grow` needs a model to add rounds to"):
        run(tmp_path / "none", "grow=true")
    with pytest.raises(ConfigError, match="`grow` must be false for metrics that are neither boosted nor trained"):
        run(tmp_path / "sampled", *start, "grow=true", "local_metrics=sampled")
    with pytest.raises(LGMMLError, match=r"`local_metrics\.kernel` must be that of the metrics to go on from"):
        run(tmp_path / "kernel", *start, "grow=true", "local_metrics.kernel=rbf")
