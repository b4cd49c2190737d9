from __future__ import annotations

import itertools

import pytest
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.functional.score import kernel
from lgmml_torch.models.explain import explain
from lgmml_torch.models.preprocess.base import Source
from lgmml_torch.models.preprocess.compose import Chain, Concat, list_rank_features
from lgmml_torch.models.preprocess.steps import (
    PCA,
    ListRank,
    Quantile,
    RemoveConstant,
    SignedLog1p,
    Standardize,
)
from tests.doors import plain_chain, small_data, small_model

KINDS = list(itertools.product(["mahalanobis", "trace"], ["paper", "distance", "rbf"]))


def test_parts_add_up_to_the_difference_of_the_scores() -> None:
    for norm, name in KINDS:
        model, data = small_model(norm=norm, kernel=name, dtype=torch.float64), small_data(seed=3)
        data = data.to(dtype=torch.float64)
        scores = model.score(data)
        for query in range(data.num_queries):
            size = int(data.sizes[query])
            start = int(data.offsets[query])
            for a, b in itertools.permutations(range(min(size, 4)), 2):
                found = explain(model, data, qid=data.qids[query], document=a, over=b)
                rows = start + data.order[start : start + size].argsort()[[a, b]]
                torch.testing.assert_close(found.scores, scores[rows], rtol=1e-9, atol=1e-10)
                assert found.difference == pytest.approx(float(found.metrics.sum()), rel=1e-12, abs=1e-13)
                torch.testing.assert_close(found.features.sum(1), found.metrics, rtol=1e-9, atol=1e-11)


def test_a_float32_model_is_explained_to_its_own_precision() -> None:
    model, data = small_model(), small_data(seed=4, shuffled=True)
    scores = data.in_caller_order(model.score(data))
    queries = data.in_caller_order(data.query_index)
    query = int(data.sizes.argmax())
    rows = (queries == query).nonzero()[:, 0]
    found = explain(model, data, qid=data.qids[query], document=0, over=2)
    assert found.difference == pytest.approx(float(scores[rows[0]] - scores[rows[2]]), abs=1e-5)


def test_parts_match_the_integral_of_the_gradient() -> None:
    """The part of feature j is the integral of ∂f/∂x_j along the line between the two, for the kernel d² would have."""
    model = small_model(kernel="distance", dtype=torch.float64)
    data = small_data(seed=5).to(dtype=torch.float64)
    query = int(data.sizes.argmax())
    found = explain(model, data, qid=data.qids[query], document=0, over=1)
    block = model.metrics.iter_blocks()[1]
    a, b = found.values
    squared = torch.zeros(len(a), dtype=torch.float64)
    metric = block.metrics[0] / block.scales[0] ** 2
    for step in (torch.arange(2000) + 0.5) / 2000:  # midpoint rule; exact for a quadratic up to rounding
        point = a + step * (b - a)
        squared += 2 * (metric @ (point - block.anchors[0])) * (b - a) / 2000
    share = squared / squared.sum() * found.metrics[4]
    torch.testing.assert_close(found.features[4], share, rtol=1e-6, atol=1e-9)


def test_features_in_which_the_documents_agree_have_no_part() -> None:
    model = small_model(preprocess=plain_chain(), dtype=torch.float64)
    data = small_data(seed=6).to(dtype=torch.float64)
    features = data.features.clone()
    features[:, 1] = 0.7
    query = int(data.sizes.argmax())
    found = explain(model, data.replace(features=features), qid=data.qids[query], document=0, over=1)
    assert (found.features[:, 1] == 0).all()
    assert found.features.abs().sum() > 0


def test_the_same_document_twice_and_equal_distances_give_zeros() -> None:
    model, data = small_model(), small_data()
    query = int(data.sizes.argmax())
    found = explain(model, data, qid=data.qids[query], document=1, over=1)
    assert found.difference == 0
    assert not found.features.any()
    assert found.leading_metrics() == []
    assert found.leading_features() == []


def test_leading_parts_are_sorted_by_size() -> None:
    model, data = small_model(), small_data()
    found = explain(model, data, qid=data.qids[int(data.sizes.argmax())], document=0, over=1)
    sizes = [abs(float(found.metrics[r])) for r in found.leading_metrics(3)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 3
    assert 0 not in found.leading_metrics(7)  # its weight is zero
    parts = [abs(part) for _, part in found.leading_features(4)]
    assert parts == sorted(parts, reverse=True)
    columns = {column for column, _ in found.leading_features(9, metric=1)}
    assert columns <= set(model.metrics.iter_blocks()[0].support[1].tolist())
    assert found.anchors[1].isnan().sum() == model.metrics.num_features - 2


def test_weights_follow_the_policy_and_the_query() -> None:
    for mode in ["per_query", "shared", "amortized"]:
        model, data = small_model(mode=mode), small_data()
        query = int(data.sizes.argmax())
        ones = explain(model, data, qid=data.qids[query], document=0, over=1, policy="ones")
        assert (ones.phi == 1).all()
        if mode == "per_query":
            known = explain(model, data, qid=data.qids[query], document=0, over=1, known_queries=True)
            torch.testing.assert_close(known.phi, model.phi.table.weight[query].double())
        kappa = kernel(ones.distances, model.kernel)
        torch.testing.assert_close(ones.scores, -kappa.sum(1))


def test_documents_go_by_id_or_by_place() -> None:
    model, data = small_model(), small_data(shuffled=True)
    query = int(data.sizes.argmax())
    rows = range(int(data.offsets[query]), int(data.offsets[query + 1]))
    by_place = sorted(rows, key=lambda row: int(data.order[row]))
    assert data.doc_ids is not None
    name = data.doc_ids[by_place[2]]
    found = explain(model, data, qid=str(data.qids[query]), document=name, over=0)
    assert (found.document, found.over) == (name, data.doc_ids[by_place[0]])
    torch.testing.assert_close(found.raw[0], data.features[by_place[2]])


def test_errors() -> None:
    model, data = small_model(), small_data()
    qid = data.qids[int(data.sizes.argmax())]
    with pytest.raises(DataError, match=r"there is no query 99; the data has 10, 11, 12, 13, 14, …"):
        explain(model, data, qid=99, document=0, over=1)
    with pytest.raises(DataError, match=r"query \d+ has no document with the id 'x'"):
        explain(model, data, qid=qid, document="x", over=1)
    with pytest.raises(DataError, match=r"query \d+ has \d documents, got place 77"):
        explain(model, data, qid=qid, document=0, over=77)
    doubled = data.replace(doc_ids=("same",) * data.num_documents)
    with pytest.raises(DataError, match=r"query \d+ has \d documents with the id 'same'"):
        explain(model, doubled, qid=qid, document="same", over=1)


def test_columns_are_traced_to_raw_features() -> None:
    data = small_data()  # the last feature is constant
    chain = list_rank_features().fit(data.features, data.offsets)
    assert chain.sources() == [Source(j, "quantile") for j in range(4)] + [Source(j, "list rank") for j in range(4)]
    assert len(chain.sources()) == chain.num_features_out
    nested = Chain([RemoveConstant(), Concat([Standardize(), Chain([SignedLog1p(), ListRank()])])])
    nested.fit(data.features, data.offsets)
    assert [str(source) for source in nested.sources()][3:5] == ["feature 4", "feature 1, list rank of log"]
    mixed = Chain([Quantile(), PCA(2), ListRank()]).fit(data.features, data.offsets)
    assert [str(source) for source in mixed.sources()] == ["list rank of component 1", "list rank of component 2"]
    assert [source.feature for source in mixed.sources()] == [-1, -1]
    assert [s.feature for s in Chain([]).fit(data.features, data.offsets).sources()] == list(range(5))
