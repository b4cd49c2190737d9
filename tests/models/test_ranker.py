from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import CheckpointError, LGMMLError
from lgmml_torch.functional.score import kernel, list_summary
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION
from lgmml_torch.ragged import RankingData

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
