"""Chances of grades at every door: fitted in training, stored in the model file, refused where there are none."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lgmml_torch import LGMMLRanker, merge_models
from lgmml_torch.app.page import make_page
from lgmml_torch.app.page_data import PageData
from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.functional.calibration import GradeMap, fit_grade_map, reliability
from lgmml_torch.functional.measures import ndcg
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import read_model, write_model
from lgmml_torch.ragged import RankingData
from tests.app.test_cli import lgmml, refused
from tests.app.test_page import content_of
from tests.data.test_source import write
from tests.doors import small_data, small_model
from tests.test_estimator import problem

FIXTURES = Path(__file__).parent / "fixtures"
MISSING = "the model has no map from scores to chances: train it with validation queries whose labels are grades"
TINY: dict[str, Any] = {
    "bank": "boosted", "rounds": 2, "epochs": 0, "random_state": 0, "bank_options": {"candidates": 6},
}  # fmt: skip


def calibrated_model(**options: Any) -> LGMML:
    """A model of random weights whose scores are turned so that they rise with the labels of its lists."""
    for seed in range(20):
        model = small_model(seed=seed, **options)
        try:
            model.calibrate(small_data(40, seed=3))
        except DataError:
            continue
        return model
    raise AssertionError("no seed gives scores that rise with the labels")


class TestModel:
    def test_chances_are_those_of_the_scores_in_the_order_of_the_rows(self) -> None:
        model, data = calibrated_model(), small_data(seed=9, shuffled=True)
        scores = model.score(data)
        assert torch.equal(model.predict_proba(data), model.calibrated.chances(scores))
        assert model.calibrated.grades == (0.0, 1.0, 2.0)
        expected = model.calibrated.expected(scores)
        assert ndcg(expected, data.labels, data.offsets) == ndcg(scores, data.labels, data.offsets)

    def test_what_keeps_the_scores_keeps_the_chances(self, tmp_path: Path) -> None:
        model, data = calibrated_model(), small_data(seed=9)
        model.save(tmp_path / "m.safetensors")
        copies = [LGMML.load(tmp_path / "m.safetensors"), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        copies.append(model.replace(qids=()))
        for one in copies:
            assert one.calibrated == model.calibrated
            assert torch.equal(one.predict_proba(data), model.predict_proba(data))
        frozen = torch.from_numpy(model.freeze()(data.features.numpy(), data.offsets.numpy()))
        torch.testing.assert_close(model.calibrated.chances(frozen), model.predict_proba(data), atol=1e-5, rtol=0)

    def test_other_scores_have_no_chances_until_they_are_fitted(self) -> None:
        model, data = calibrated_model(), small_data(40, seed=3)
        others = [merge_models([model, calibrated_model()], [0.5, 0.5]), model.replace(kernel="rbf")]
        others.append(model.replace(phi=copy.deepcopy(model.phi)))
        for one in others:
            with pytest.raises(LGMMLError, match=MISSING):
                one.predict_proba(data)
        others[0].calibrate(data)
        assert others[0].predict_proba(data).shape == (data.num_documents, 3)

    def test_files_of_earlier_releases_have_none(self) -> None:
        for release in ("release-0.1", "release-0.2"):
            for name in ("model.safetensors", "last.ckpt"):
                model = LGMML.load(FIXTURES / release / name)
                assert model.grade_map is None
                with pytest.raises(LGMMLError, match=MISSING):
                    _ = model.calibrated

    def test_the_file_holds_numbers_and_they_are_checked(self, tmp_path: Path) -> None:
        file, model = tmp_path / "m.safetensors", calibrated_model()
        model.save(file)
        with safe_open(file, framework="pt") as content:
            stored = json.loads(content.metadata()["spec"])["grade_map"]
        assert stored.keys() == {"grades", "centre", "slope", "cuts"}
        assert stored["slope"] == model.calibrated.slope
        spec, tensors = read_model(file)
        for bad in ({"slope": -1.0}, {"cuts": [0.0]}, {"cuts": "ab"}, {"slope": None}, {"grades": [2, 1, 0]}):
            write_model(file, {**spec, "grade_map": {**stored, **bad}}, tensors)
            with pytest.raises(LGMMLError):
                LGMML.load(file)

    def test_labels_that_are_no_grades_are_refused(self) -> None:
        data = small_data(40)
        with pytest.raises(DataError, match="`labels` must have 2 to 32 different values, got 1"):
            small_model().calibrate(data.replace(labels=torch.zeros(data.num_documents)))


class TestRanker:
    def test_chances_of_the_validation_grades_in_the_callers_order(self) -> None:
        X, y, qid = problem(20)
        V, v, q = problem(12, seed=2)
        ranker = LGMMLRanker(**TINY).fit(X, y, qid=qid, eval_set=(V, v, q))
        chances, scores = ranker.predict_proba(V, qid=q), ranker.predict(V, qid=q)
        assert ranker.classes_.tolist() == sorted(set(v.tolist()))
        expected = fit_grade_map(torch.from_numpy(scores), torch.as_tensor(v, dtype=torch.float32))
        np.testing.assert_allclose(chances, expected.chances(scores).numpy(), atol=1e-6)
        np.testing.assert_allclose(ranker.expected_label(V, qid=q), chances @ ranker.classes_, rtol=1e-9)
        one = qid == qid[0]  # a list by itself takes another way to its scores
        np.testing.assert_allclose(
            ranker.predict_proba(X[one], qid=qid[one]), ranker.predict_proba(X, qid=qid)[one], atol=1e-5
        )

    def test_stored_pickled_and_in_a_pipeline(self, tmp_path: Path) -> None:
        X, y, qid = problem(20)
        ranker = LGMMLRanker(**TINY).fit(X, y, qid=qid)
        expected = ranker.predict_proba(X, qid=qid)
        ranker.save(tmp_path / "m.safetensors")
        for one in (LGMMLRanker.load(tmp_path / "m.safetensors"), pickle.loads(pickle.dumps(ranker))):
            np.testing.assert_array_equal(one.predict_proba(X, qid=qid), expected)
        piped = make_pipeline(StandardScaler(), LGMMLRanker(**TINY)).fit(X, y, lgmmlranker__qid=qid)
        assert piped.predict_proba(X, qid=qid).shape == expected.shape
        assert piped.classes_.tolist() == ranker.classes_.tolist()

    @pytest.mark.parametrize("reason", ["no validation", "fractions"])
    def test_without_chances_the_attribute_is_missing_and_says_why(
        self, reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        X, y, qid = problem(20)
        settings, line = {"validation_fraction": 0}, "there are no validation queries to fit them to"
        if reason == "fractions":
            settings, line = {}, "`labels` must have 2 to 32 different values, got 40"
            y = y + np.random.default_rng(0).random(len(y)) / 10
        with caplog.at_level(logging.INFO):
            ranker = LGMMLRanker(**TINY, **settings, verbose=1).fit(X, y, qid=qid)
        assert line in caplog.text
        assert np.isfinite(ranker.predict(X, qid=qid)).all()
        for name in ("predict_proba", "classes_"):
            assert not hasattr(ranker, name)
            with pytest.raises(AttributeError, match=MISSING):
                getattr(ranker, name)
        with pytest.raises(AttributeError, match=MISSING):
            ranker.expected_label(X, qid=qid)

    def test_going_on_from_a_model_fits_the_map_again(self) -> None:
        X, y, qid = problem(20)
        V, v, q = problem(12, seed=2)
        first = LGMMLRanker(**TINY).fit(X, y, qid=qid)
        further = LGMMLRanker(**TINY).fit(X, y, qid=qid, eval_set=(V, v, q), init_model=first)
        np.testing.assert_allclose(further.expected_label(V, qid=q).mean(), v.mean(), rtol=1e-6)
        alone = LGMMLRanker(**TINY, validation_fraction=0).fit(X, y, qid=qid, init_model=first)
        assert alone.model_.grade_map is None


class TestCommands:
    def test_score_writes_the_chance_to_be_relevant(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model, data, file = calibrated_model(), small_data(seed=9, shuffled=True), tmp_path / "m.safetensors"
        model.save(file)
        lists = write(data, tmp_path, "txt")
        expected = model.calibrated.at_least(model.score_in_caller_order(data)).numpy()
        for name in ("scores.txt", "scores.npy"):
            lgmml("score", file, lists, "--calibrated", "-o", tmp_path / name)
        np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected, atol=1e-6)
        np.testing.assert_array_equal(np.loadtxt(tmp_path / "scores.txt"), np.load(tmp_path / "scores.npy"))
        message = refused(capsys, "score", file, lists, "--calibrated", "--policy", "shared")
        assert message == "`calibrated` needs the model's own weights: no `policy` and no `known-queries`"

    def test_folders_of_shards_are_not_mixed(self, tmp_path: Path) -> None:
        parquet = pytest.importorskip("pyarrow.parquet")
        model, data, file = calibrated_model(), small_data(seed=9), tmp_path / "m.safetensors"
        model.save(file)
        lgmml("convert", write(data, tmp_path, "txt"), tmp_path / "shards", "--documents", 20)
        found = []
        for options in ([], ["--calibrated"]):
            lgmml("score", file, tmp_path / "shards", "-o", tmp_path / "scores", *options)
            found.append(parquet.read_table(tmp_path / "scores")["score"].to_numpy())
        np.testing.assert_allclose(model.calibrated.at_least(found[0]).numpy(), found[1], atol=1e-6)

    def test_a_model_without_chances_is_refused_before_data_is_read(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        small_model().save(tmp_path / "m.safetensors")
        message = refused(capsys, "score", tmp_path / "m.safetensors", tmp_path / "no file", "--calibrated")
        assert message.startswith(MISSING)
        model = small_model()
        model.grade_map = GradeMap((1.0, 2.0), 0.0, 1.0, (0.0,))  # every label is relevant
        model.save(tmp_path / "m.safetensors")
        message = refused(capsys, "score", tmp_path / "m.safetensors", tmp_path / "no file", "--calibrated")
        assert message == "`threshold` must part the grades [1.0, 2.0], got 1"

    def test_merge_fits_the_map_to_its_lists(self, tmp_path: Path) -> None:
        model, data = calibrated_model(), small_data(40, seed=3)
        model.save(tmp_path / "m.safetensors")
        small_model(seed=8).save(tmp_path / "n.safetensors")
        words = [tmp_path / "m.safetensors", write(data, tmp_path, "txt"), "--with", tmp_path / "n.safetensors"]
        lgmml("merge", *words, "-o", tmp_path / "both.safetensors")
        both = LGMML.load(tmp_path / "both.safetensors")
        mean = both.calibrated.expected(both.score(data)).mean()
        torch.testing.assert_close(mean, data.labels.double().mean(), rtol=1e-5, atol=0)


class TestPage:
    TITLE = "Chance to be relevant, and how often it came true"

    def page(self, model: LGMML, data: RankingData, split: str, folder: Path) -> str:
        content = content_of(model, data, folder)
        return make_page(content, PageData(content, model, data, split))

    def test_the_diagram_with_its_errors_and_counts(self, tmp_path: Path) -> None:
        model, data = calibrated_model(), small_data(60, seed=5)
        page = self.page(model, data, "test", tmp_path)
        found = reliability(model.calibrated.at_least(model.score(data)), data.labels >= 1)
        assert self.TITLE in page
        assert f"Expected calibration error {found.error:.4f}, Brier score {found.brier:.4f}." in page
        assert f"All 60 queries of test, {data.num_documents:,} documents." in page
        assert "fitted to these very queries" not in page
        assert "fitted to these very queries" in self.page(model, data, "valid", tmp_path)

    def test_models_without_chances_have_none(self, tmp_path: Path) -> None:
        assert self.TITLE not in self.page(small_model(), small_data(60, seed=5), "test", tmp_path)
