"""The ranker: scores by the formula, whose weights a list gets, what a file keeps, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import CheckpointError, LGMMLError
from lgmml_torch.functional.score import kernel, list_summary
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain, list_rank_features
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION, read_model, write_model
from lgmml_torch.ragged import RankingData
from tests.doors import plain_chain, small_data, small_model

FEATURES = 4


def make_data(seed: int = 0, queries: int = 12) -> RankingData:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (queries,), generator=g)
    rows = int(sizes.sum())
    X = torch.randn(rows, FEATURES, generator=g).round(decimals=1)
    return RankingData.from_arrays(X, torch.randint(0, 3, (rows,), generator=g), group=sizes)


def make_model(mode: str = "per_query", dtype: torch.dtype = torch.float32) -> LGMML:
    data = make_data().to(dtype=dtype)
    preprocess = list_rank_features().fit(data.features, data.offsets)
    width = preprocess.num_features_out
    g = torch.Generator().manual_seed(1)
    block = MetricBlock(
        torch.randn(3, width, generator=g, dtype=dtype), torch.randn(3, width, width, generator=g, dtype=dtype)
    )
    small = MetricBlock(
        torch.randn(2, 1, generator=g, dtype=dtype), torch.ones(2, 1, 1, dtype=dtype), support=torch.tensor([[0], [1]])
    )
    phi = Phi(data.num_queries, 5, mode=mode)
    with torch.no_grad():
        phi.table.weight.uniform_(0, 2, generator=g)
    model = LGMML(preprocess, LocalMetrics([block, small], num_features=width), phi, qids=data.qids).to(dtype)
    model.summarize(model.distances(data.features, data.offsets), data.offsets)
    return model


def test_score_equals_the_formula() -> None:
    for mode in ["per_query", "shared", "amortized"]:
        for dtype in [torch.float32, torch.float64]:
            model, data = make_model(mode, dtype), make_data(5).to(dtype=dtype)
            dists = model.distances(data.features, data.offsets)
            kappa = dists * (-dists).exp()
            phi = model.weights(kappa, data.offsets).detach().expand(data.num_queries, -1)
            expected = torch.stack(
                [-(phi[q] * row).sum() for q, row in zip(data.query_index.tolist(), kappa, strict=True)]
            )
            assert torch.allclose(model.score(data), expected, atol=1e-5)
            assert model.score(data).dtype == dtype


def test_shuffled_rows_get_the_same_scores() -> None:
    model, data = make_model("shared"), make_data(6)
    X, y = data.in_caller_order(data.features), data.in_caller_order(data.labels)
    qid = data.in_caller_order(data.query_index)
    shuffled = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    other = RankingData.from_arrays(X[shuffled], y[shuffled], qid=qid[shuffled])
    there = model.score_in_caller_order(data)
    np.testing.assert_array_equal(model.score_in_caller_order(other), there[shuffled.numpy()])


def test_scores_of_a_list_do_not_depend_on_other_lists() -> None:
    for mode in ["per_query", "shared", "amortized"]:
        model, data = make_model(mode), make_data(7)
        together = model.score(data)
        for q in range(data.num_queries):
            alone = data.select([q])
            part = together[int(data.offsets[q]) : int(data.offsets[q + 1])]
            assert torch.allclose(model.score(alone), part, atol=1e-6)
        assert torch.allclose(model.score(data, documents_at_once=1), model.score(data), atol=1e-6)


def test_known_queries_only_on_request() -> None:
    model, data = make_model("per_query"), make_data()
    model.phi.policy = "ones"
    unknown = model.score(data)
    known = model.score(data, known_queries=True)
    assert not torch.allclose(unknown, known)
    strangers = data.replace(qids=tuple(f"new{q}" for q in data.qids))
    assert torch.equal(model.score(strangers, known_queries=True), unknown)
    with pytest.raises(LGMMLError, match="`known_queries` needs weights for each query"):
        make_model("shared").score(data, known_queries=True)


def test_every_stored_query_is_found_and_has_its_own_weights() -> None:
    for policy in ["ones", "mean", "knn"]:
        model, data = make_model("per_query"), make_data()
        order = [3, 0, 7]
        some = data.select(order)
        assert model.known_rows((*some.qids, "new")).tolist() == [*order, -1]
        dists = model.distances(some.features, some.offsets)
        kappa = dists * (-dists).exp()
        expected = -(kappa * model.phi.table.weight.detach()[torch.tensor(order)][some.query_index]).sum(dim=1)
        for documents in (32_768, 1):
            scores = model.score(some, known_queries=True, policy=policy, documents_at_once=documents)
            torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
        first = data.select([0])  # row 0 is a row like any other
        assert not torch.allclose(model.score(first, known_queries=True), model.score(first, policy=policy))


def test_known_and_new_lists_side_by_side() -> None:
    model, data = make_model("per_query"), make_data()
    kappa = torch.rand(data.num_documents, 5, generator=torch.Generator().manual_seed(0))
    rows = torch.full((data.num_queries,), -1)
    rows[2], rows[5] = 0, 11
    found = model.weights(kappa, data.offsets, policy="mean", rows=rows)
    table = model.phi.table.weight
    expected = table.mean(0).repeat(data.num_queries, 1)
    expected[2], expected[5] = table[0], table[11]
    torch.testing.assert_close(found, expected)
    assert model.weights(kappa, data.offsets, policy="mean", rows=torch.full((12,), -1)).shape == (1, 5)


def test_lists_are_summarised_by_kernel_values() -> None:
    """Not by distances: a list far away and one on the anchors look alike to κ, and not to d."""
    model, data = make_model("per_query"), make_data()
    dists = model.distances(data.features, data.offsets)
    expected = list_summary(dists * (-dists).exp(), data.offsets)
    torch.testing.assert_close(model.phi.summaries, expected)
    other = LGMML(model.preprocess, model.metrics, model.phi, kernel="rbf")
    other.summarize(dists, data.offsets)
    torch.testing.assert_close(model.phi.summaries, list_summary(kernel(dists, "rbf"), data.offsets))


def test_ones_score_as_ones_although_weights_were_trained() -> None:
    for mode in ("per_query", "shared", "amortized"):
        model, data = make_model(mode), make_data(3)
        with torch.no_grad():
            model.phi.table.weight[:, 1] = 0  # idle for others, not for this policy
        dists = model.distances(data.features, data.offsets)
        expected = -(dists * (-dists).exp()).sum(dim=1)
        torch.testing.assert_close(model.score(data, policy="ones"), expected, rtol=1e-4, atol=1e-5)


def test_idle_metrics_are_left_out_and_missed_by_nobody() -> None:
    model, data = make_model("shared"), make_data(3)
    with torch.no_grad():
        model.phi.table.weight[:, [1, 3]] = 0
    expected = model(data.features, data.offsets).detach()
    assert model.without_idle("shared").metrics.num_metrics == 3
    torch.testing.assert_close(model.score(data), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.phi.table.weight[:, 1] = 2.0
    assert model.without_idle("shared").metrics.num_metrics == 4
    torch.testing.assert_close(model.score(data), model(data.features, data.offsets).detach(), rtol=1e-4, atol=1e-5)
    assert model.without_idle("ones") is model
    with torch.no_grad():
        model.phi.table.weight.zero_()
    assert model.without_idle("shared") is model
    assert bool((model.score(data) == 0).all())


def test_deviations_keep_a_metric_from_being_idle() -> None:
    data, model = make_data(), make_model("shared")
    phi = Phi(data.num_queries, 5, init=torch.tensor([1.0, 0, 1, 0, 1]), deviations=True)
    with torch.no_grad():
        phi.deviation.weight[4, 1] = 0.5
    own = LGMML(model.preprocess, model.metrics, phi, qids=data.qids)
    assert own.without_idle("shared").metrics.num_metrics == 4
    dists = own.distances(data.features, data.offsets)
    expected = -(dists * (-dists).exp() * phi(torch.arange(12)).detach()[data.query_index]).sum(dim=1)
    torch.testing.assert_close(own.score(data, known_queries=True), expected, rtol=1e-4, atol=1e-5)


def test_policies_can_be_switched() -> None:
    model, data = make_model("per_query"), make_data(3)
    scores = {policy: model.score(data, policy=policy) for policy in ("ones", "mean", "knn")}
    assert not torch.allclose(scores["ones"], scores["mean"])
    with pytest.raises(LGMMLError, match="`policy` must be one of 'mean', 'knn', 'amortized', 'ones', got 'shared'"):
        model.score(data, policy="shared")


def test_degenerate_lists() -> None:
    model = make_model("amortized")
    one = RankingData.from_arrays(torch.randn(1, FEATURES), [0], qid=[1])
    same = RankingData.from_arrays(torch.ones(30, FEATURES), [0] * 30, qid=[1] * 30)
    none = RankingData.from_arrays(torch.zeros(0, FEATURES), [], qid=[])
    assert torch.isfinite(model.score(one)).all()
    assert model.score(same).unique().numel() == 1
    assert model.score(none).shape == (0,)


@pytest.mark.slow
def test_a_list_of_fifty_thousand() -> None:
    model = make_model("shared")
    data = RankingData.from_arrays(torch.randn(50_000, FEATURES), torch.zeros(50_000), qid=[1] * 50_000)
    assert torch.isfinite(model.score(data)).all()


def test_save_and_load_bit_for_bit(tmp_path: Path) -> None:
    for mode in ["per_query", "shared", "amortized"]:
        for dtype in [torch.float32, torch.float64]:
            model, data = make_model(mode, dtype), make_data(4).to(dtype=dtype)
            model.save(tmp_path / "m.safetensors")
            again = LGMML.load(tmp_path / "m.safetensors")
            assert torch.equal(again.score(data), model.score(data))
            assert again.qids == model.qids
            assert again.phi.policy == model.phi.policy


def test_wrong_feature_count_is_named() -> None:
    with pytest.raises(LGMMLError, match=r"`features` must have shape \(\*, 4\), got \(2, 3\)"):
        make_model().score(RankingData.from_arrays(torch.zeros(2, 3), [0, 1], qid=[1, 1]))


def test_bad_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    with pytest.raises(CheckpointError, match="no model file at"):
        LGMML.load(file)
    file.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="is not a model file, or it is damaged"):
        LGMML.load(file)
    torch.save({"a": 1}, file)
    with pytest.raises(CheckpointError, match="was not written by this package"):
        LGMML.load(file)
    make_model().save(file)
    whole = file.read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            LGMML.load(file)
    for version in (b"3", b"9", b"x"):
        file.write_bytes(whole.replace(b'"version":"2"', b'"version":"' + version + b'"'))
        with pytest.raises(CheckpointError, match=f"has format version {version.decode()}; this release reads up to 2"):
            LGMML.load(file)


def test_checkpoints_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    for version in [VERSION + 1, None, "one"]:
        model, file = make_model("shared"), tmp_path / "last.ckpt"
        state = {f"model.{name}": value for name, value in model.state_dict().items()}
        torch.save({"state_dict": state, FORMAT: {"version": VERSION, "spec": model.spec()}}, file)
        assert torch.equal(LGMML.load(file).score(make_data()), model.score(make_data()))
        torch.save({"state_dict": state, FORMAT: {"version": version, "spec": model.spec()}}, file)
        with pytest.raises(CheckpointError, match=f"has format version {version}; this release reads up to {VERSION}"):
            LGMML.load(file)


def test_mismatched_parts_are_named() -> None:
    model = make_model()
    with pytest.raises(LGMMLError, match="`phi` must weigh 5 metrics, got 2"):
        LGMML(model.preprocess, model.metrics, Phi(1, 2))
    with pytest.raises(LGMMLError, match="`kernel` must be one of"):
        LGMML(model.preprocess, model.metrics, model.phi, kernel="cosine")


def test_no_operation_assumes_a_device() -> None:
    """With another default device, whatever forgets to say where it makes a tensor clashes with the rest."""
    for mode in ["per_query", "shared", "amortized"]:
        model, data = make_model(mode), make_data(5)
        expected = model.score(data)
        with torch.device("meta"):
            found = model.score(data)
        assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_scores_equal_cpu_scores() -> None:
    model, data = make_model("amortized"), make_data(5)
    expected = model.score(data)
    assert torch.allclose(model.to("cuda").score(data), expected, atol=1e-4)


def test_explain_splits_the_difference() -> None:
    model, data = make_model("shared"), RankingData.from_arrays(torch.randn(5, FEATURES), [0, 1, 0, 2, 1], qid=[0] * 5)
    found = model.explain(data, qid=0, document=0, over=1)
    scores = model.score_in_caller_order(data).astype("float64")
    assert found.difference == pytest.approx(float(scores[0] - scores[1]), abs=1e-5)


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


def test_summaries_of_many_lists_are_those_of_each() -> None:
    """More documents than are looked at together."""
    model = small_model(mode="per_query")
    queries, kept = model.phi.num_queries, model.phi.num_metrics
    sizes = torch.full((queries,), 40_000 // queries + 1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    dists = torch.rand(int(offsets[-1]), kept, generator=torch.Generator().manual_seed(0))
    model.summarize(dists, offsets)
    torch.testing.assert_close(model.phi.summaries, list_summary(kernel(dists, model.kernel), offsets))


def test_data_of_another_precision_is_scored_in_the_models() -> None:
    data = small_data(4)
    wide = data.replace(features=data.features.double())
    for dtype in (torch.float32, torch.float64):
        model = small_model(mode="amortized", dtype=dtype)  # weights that look at the list: no frozen form
        found = model.score(wide)
        assert found.dtype == dtype
        torch.testing.assert_close(found, model.score(data), rtol=1e-5, atol=1e-6)
