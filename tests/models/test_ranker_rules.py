"""Smaller promises of the ranker: names, precision, what is left out, what a file keeps, what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lgmml_torch.checks import CheckpointError, LGMMLError
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import read_model, write_model
from lgmml_torch.ragged import RankingData
from tests.doors import plain_chain, small_data, small_model

NAMES = ("a", "b", "c", "d", "e")


def again(model: LGMML, **options: Any) -> LGMML:
    """The same parts, put together with other options."""
    given = {"kernel": model.kernel, "qids": model.qids, **options}
    return LGMML(model.preprocess, model.metrics, model.phi, **given)


class TestNames:
    def test_there_is_one_for_each_feature(self) -> None:
        model = small_model()
        assert again(model, feature_names=NAMES).feature_names == NAMES
        for names in (NAMES[:4], (*NAMES, "f"), ()):
            with pytest.raises(LGMMLError, match=f"`feature_names` must name 5 features, got {len(names)}"):
                again(model, feature_names=names)
        unfitted = LGMML(Chain([Standardize()]), model.metrics, model.phi, feature_names=("a", "b"))
        assert unfitted.feature_names == ("a", "b")  # a file is read into it

    def test_features_in_another_order_are_refused(self) -> None:
        model, data = again(small_model(), feature_names=NAMES), small_data()
        expected = model.score(data)
        assert torch.equal(model.score(data.replace(feature_names=NAMES)), expected)
        message = r"in their order \(a, b, c, …\), got b, a, c, …"
        with pytest.raises(LGMMLError, match=message):
            model.score(data.replace(feature_names=("b", "a", "c", "d", "e")))
        assert torch.equal(again(model).score(data.replace(feature_names=NAMES)), expected)

    def test_up_to_three_names_are_said_in_full(self) -> None:
        data = RankingData.from_arrays(torch.rand(4, 3), [0, 1, 0, 1], qid=[1, 1, 2, 2])
        model = again(small_model(preprocess=plain_chain(), data=data), feature_names=("a", "b", "c"))
        with pytest.raises(LGMMLError, match=r"in their order \(a, b, c\), got c, b, a$"):
            model.score(data.replace(feature_names=("c", "b", "a")))


class TestScore:
    def test_features_are_taken_in_the_precision_of_the_model(self) -> None:
        data = small_data(seed=3).to(dtype=torch.float64)
        narrow, wide = small_model(), small_model(dtype=torch.float64)
        assert torch.equal(narrow.score(data), narrow.score(data.to(dtype=torch.float32)))
        assert narrow.score(data).dtype == torch.float32
        coarse = data.to(dtype=torch.float32)
        assert torch.equal(wide.score(coarse), wide.score(coarse.to(dtype=torch.float64)))
        assert wide.score(coarse).dtype == torch.float64

    def test_offsets_that_leave_documents_out_are_refused(self) -> None:
        data = small_data()
        with pytest.raises(LGMMLError, match="`offsets` must end at the number of rows"):
            small_model().score(data.replace(offsets=data.offsets[:-1]))

    def test_known_lists_among_new_ones_have_their_own_weights(self) -> None:
        for policy in ["ones", "mean", "knn"]:
            model, data = small_model(mode="per_query"), small_data()
            strangers = data.replace(
                qids=tuple(qid if place == 3 else f"new {qid}" for place, qid in enumerate(data.qids))
            )
            found = model.score(strangers, known_queries=True, policy=policy)
            own = slice(int(data.offsets[3]), int(data.offsets[4]))
            expected = model.score(data, policy=policy)
            expected[own] = model.score(data, known_queries=True)[own]
            torch.testing.assert_close(found, expected)

    def test_forward_takes_policy_and_rows(self) -> None:
        model, data = small_model(mode="per_query"), small_data()
        for policy in ("ones", "mean", "knn"):
            found = model(data.features, data.offsets, policy=policy).detach()
            torch.testing.assert_close(found, model.score(data, policy=policy), rtol=1e-4, atol=1e-5)
        found = model(data.features, data.offsets, rows=torch.arange(12)).detach()
        torch.testing.assert_close(found, model.score(data, known_queries=True), rtol=1e-4, atol=1e-5)


class TestIdle:
    def test_a_single_metric_in_use_is_enough(self) -> None:
        model, data = small_model(kernel="rbf"), small_data()
        model.qids = data.qids
        with torch.no_grad():
            model.phi.table.weight.zero_()
            model.phi.table.weight[0, 5] = 0.25
        expected = model(data.features, data.offsets).detach()
        small = again(model).without_idle("shared")
        assert small.metrics.num_metrics == 1
        assert (small.kernel, small.qids) == ("rbf", data.qids)
        torch.testing.assert_close(model.score(data), expected, rtol=1e-4, atol=1e-5)

    def test_a_metric_that_one_query_uses_is_not_idle(self) -> None:
        model = small_model(mode="per_query")
        assert model.without_idle("mean").metrics.num_metrics == 6
        with torch.no_grad():
            model.phi.table.weight[7, 0] = 0.01
        assert model.without_idle("mean") is model

    def test_without_any_rows_nothing_is_left_out(self) -> None:
        model = small_model()
        empty = LGMML(model.preprocess, model.metrics, Phi(0, 7, mode="per_query", policy="ones"))
        assert empty.without_idle("mean") is empty
        assert torch.isfinite(empty.score(small_data(), policy="ones")).all()

    def test_metrics_in_training_count_as_they_are(self) -> None:
        """Zoom included, and whatever a step has changed since the last score."""
        model, data = small_model(), small_data()
        model.metrics.train_metrics_()
        assert model.without_idle("shared").metrics.num_metrics == 6
        full = model.metrics.iter_blocks()[1]
        for tensor, change in ((full.zoom, 0.1), (full.factors, 0.5), (full.anchors, 0.3), (full.scales, 0.2)):
            with torch.no_grad():
                tensor.add_(change)
            expected = model(data.features, data.offsets).detach()
            torch.testing.assert_close(model.score(data), expected, rtol=1e-4, atol=1e-5)

    def test_a_deviation_may_take_a_weight_away_from_all(self) -> None:
        model = small_model()
        phi = Phi(12, 7, init=1.0, deviations=True)
        with torch.no_grad():
            phi.deviation.weight[:, 2] = -1.0
            phi.deviation.weight[:, 4] = -1.0
            phi.deviation.weight[3, 4] = -0.5
        assert LGMML(model.preprocess, model.metrics, phi).without_idle("shared").metrics.num_metrics == 6


class TestSummaries:
    def test_shared_weights_remember_no_lists(self) -> None:
        model, data = small_model(), small_data()
        model.summarize(model.distances(data.features, data.offsets), data.offsets)
        assert model.phi.summaries.numel() == 0


class TestFiles:
    def test_what_is_said_about_a_model_is_kept(self, tmp_path: Path) -> None:
        model = small_model()
        model.save(tmp_path / "m")
        assert "about" not in model.spec()
        assert LGMML.load(tmp_path / "m").about is None
        model.about = {"seed": 3, "data": ["a", None]}
        model.save(tmp_path / "m")
        found = LGMML.load(tmp_path / "m")
        assert found.about == {"seed": 3, "data": ["a", None]}
        assert not found.training

    def test_kernel_names_and_queries_are_kept(self, tmp_path: Path) -> None:
        qids = (1, 2.5, "three", *(("four", place) for place in range(9)))
        model = again(small_model(kernel="rbf", norm="trace"), qids=qids, feature_names=NAMES)
        model.save(tmp_path / "m")
        found = LGMML.load(tmp_path / "m")
        assert found.qids == (1, 2.5, "three", *(f"('four', {place})" for place in range(9)))
        assert (found.kernel, found.metrics.norm, found.feature_names) == ("rbf", "trace", NAMES)
        assert again(model).spec()["feature_names"] is None
        assert "categories" not in model.spec()

    def test_weights_that_are_none_are_not_written(self, tmp_path: Path) -> None:
        model = small_model()
        with torch.no_grad():
            model.phi.table.weight[0, 3] = -1.0
        with pytest.raises(LGMMLError, match="weights Φ must be finite and at least 0, got -1"):
            model.save(tmp_path / "m")
        assert not (tmp_path / "m").exists()

    def test_a_model_from_the_middle_of_training_is_read_as_finished(self, tmp_path: Path) -> None:
        model, data = small_model(), small_data()
        model.metrics.train_metrics_()
        with torch.no_grad():
            model.metrics.iter_blocks()[1].zoom.fill_(0.1)
        model.save(tmp_path / "m")
        found = LGMML.load(tmp_path / "m")
        assert not found.metrics.trained
        assert found.metrics.iter_blocks()[1].zoom is None
        torch.testing.assert_close(found.score(data), model.score(data))

    def test_a_description_that_does_not_fit_is_told_in_short(self, tmp_path: Path) -> None:
        model = small_model()
        model.save(tmp_path / "m")
        spec, tensors = read_model(tmp_path / "m")
        write_model(tmp_path / "m", spec, {name: tensors[name] for name in list(tensors)[:2]})
        with pytest.raises(CheckpointError, match="is damaged: its description does not fit") as caught:
            LGMML.load(tmp_path / "m")
        reason = re.search(r"does not fit \((.*)\)$", str(caught.value))
        assert reason is not None
        assert len(reason[1]) == 200
        for key in ("kernel", "qids", "phi", "dtype"):
            write_model(tmp_path / "m", {name: value for name, value in spec.items() if name != key}, tensors)
            with pytest.raises(CheckpointError, match=rf"its description does not fit \('{key}'\)"):
                LGMML.load(tmp_path / "m")
        write_model(tmp_path / "m", {**spec, "kernel": "cosine"}, tensors)
        with pytest.raises(LGMMLError, match="`kernel` must be one of"):
            LGMML.load(tmp_path / "m")
