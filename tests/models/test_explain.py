"""Explanations: parts that add up, by hand and by integration, what things are called, and who is found."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lgmml_torch.checks import DataError
from lgmml_torch.functional.score import kernel
from lgmml_torch.models.encode import CategoryEncoder, CategorySettings
from lgmml_torch.models.explain import Explanation, document_label, explain, explain_pairs
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Source
from lgmml_torch.models.preprocess.compose import Chain, Concat, list_rank_features
from lgmml_torch.models.preprocess.steps import PCA, Clip, ListRank, Quantile, RemoveConstant, SignedLog1p, Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from tests.doors import plain_chain, small_data, small_model
from tests.models.test_encode import lists as word_lists

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


def plain_model(anchors: list[list[float]], rows: list[list[float]], **options: Any) -> tuple[LGMML, RankingData]:
    """Features as they are, distances as the crow flies; float64."""
    points, x = torch.tensor(anchors, dtype=torch.float64), torch.tensor(rows, dtype=torch.float64)
    width = points.shape[1]
    data = RankingData.from_arrays(x, torch.zeros(len(x)), qid=[7] * len(x), dtype=torch.float64)
    block = MetricBlock(points, torch.eye(width, dtype=torch.float64).expand(len(points), width, width))
    bank = LocalMetrics([block], num_features=width)
    chain = Chain([Clip(1e9)]).fit(data.features, data.offsets)
    return LGMML(chain, bank, Phi(1, len(points)), **options).double().eval(), data


def made_up(metrics: list[float], features: list[list[float]] | None = None, **options: Any) -> Explanation:
    zero = torch.zeros(1)
    shares = torch.tensor(features if features is not None else [[value] for value in metrics])
    given = {"qid": 1, "document": "a", "over": "b", "scores": torch.tensor([3.0, 1.0]), "phi": zero, "columns": []}
    tensors = dict.fromkeys(("distances", "quality", "anchors", "values", "raw"), zero)
    return Explanation(**{**given, **tensors, "metrics": torch.tensor(metrics), "features": shares, **options})


class TestByHand:
    def test_equal_distances_are_split_by_the_slope(self) -> None:
        """(1, 2) and (2, 1) are equally far from the origin: what one feature adds the other takes away."""
        model, data = plain_model([[0.0, 0.0], [5.0, 5.0]], [[1.0, 2.0], [2.0, 1.0]])
        found = explain(model, data, qid=7, document=0, over=1)
        for metric, d2, size in ((0, 5.0, 3.0), (1, 25.0, -7.0)):
            d = math.sqrt(d2)
            slope = (1 - d) * math.exp(-d) / (2 * d)  # of d·exp(−d) by d²
            expected = torch.tensor([slope * size, -slope * size], dtype=torch.float64)
            torch.testing.assert_close(found.features[metric], expected)
        assert found.metrics.abs().max() < 1e-12
        assert found.difference == pytest.approx(0, abs=1e-12)

    def test_other_distances_are_split_by_the_secant(self) -> None:
        model, data = plain_model([[0.0, 0.0]], [[1.0, 2.0], [3.0, 0.5]])
        found = explain(model, data, qid=7, document=0, over=1)
        near, far = 5.0, 9.25
        kappa = [math.sqrt(square) * math.exp(-math.sqrt(square)) for square in (near, far)]
        slope = (kappa[1] - kappa[0]) / (far - near)
        expected = torch.tensor([slope * (9 - 1), slope * (0.25 - 4)], dtype=torch.float64)
        torch.testing.assert_close(found.features[0], expected)
        assert found.scores.tolist() == pytest.approx([-kappa[0], -kappa[1]])
        assert found.distances[:, 0].tolist() == pytest.approx([math.sqrt(near), math.sqrt(far)])
        assert float(found.metrics[0]) == pytest.approx(kappa[1] - kappa[0])

    def test_a_document_on_the_anchor_beside_itself_has_no_parts(self) -> None:
        model, data = plain_model([[1.0, 2.0], [0.0, 0.0]], [[1.0, 2.0], [3.0, 4.0]])
        for over in (0, 1):
            found = explain(model, data, qid=7, document=0, over=over)
            assert found.features.isfinite().all()
            assert found.features.any() == bool(over)
        row = int(data.order.argsort()[0])
        both = explain_pairs(model, data, torch.tensor([[row, row]]))
        assert not both.features.any()
        assert not both.metrics.any()

    def test_what_comes_with_it(self) -> None:
        model, data = small_model(), small_data()
        model.feature_names = ("a", "b", "c", "d", "e")
        query = int(data.sizes.argmax())
        found = explain(model, data, qid=data.qids[query], document=1, over=0)
        part = data.select([query])
        rows = part.order.argsort()[[1, 0]]
        prepared = model.preprocess(part.features, part.offsets)
        torch.testing.assert_close(found.values, prepared[rows].double())
        assert torch.equal(found.raw, part.features[rows])
        torch.testing.assert_close(found.quality, model.metrics.quality.double(), equal_nan=True)
        torch.testing.assert_close(found.phi, model.phi.table.weight[0].detach().double())
        torch.testing.assert_close(found.distances, model.metrics(prepared[rows]).double(), rtol=1e-4, atol=1e-5)
        assert found.columns == model.preprocess.sources()
        assert (found.feature_names, found.qid, found.base) == (model.feature_names, data.qids[query], 0.0)
        few, full = model.metrics.iter_blocks()
        torch.testing.assert_close(found.anchors[4:], full.anchors.double())
        for row in range(4):
            torch.testing.assert_close(found.anchors[row, few.support[row]], few.anchors[row].double())
            assert found.anchors[row].isnan().sum() == model.metrics.num_features - 2

    def test_features_are_taken_in_the_precision_of_the_model(self) -> None:
        model, data = small_model(), small_data()
        qid = data.qids[int(data.sizes.argmax())]
        narrow = explain(model, data, qid=qid, document=0, over=1)
        wide = explain(model, data.to(dtype=torch.float64), qid=qid, document=0, over=1)
        torch.testing.assert_close(wide.features, narrow.features)
        assert wide.features.dtype == torch.float64

    def test_words_are_explained_by_the_columns_they_become(self) -> None:
        data = word_lists()
        encoder = CategoryEncoder.fit(data, CategorySettings(max_one_hot=3))
        numbers = encoder.encode(data)
        plain = small_model(data=numbers, preprocess=plain_chain())
        model = LGMML(plain.preprocess, plain.metrics, plain.phi, feature_names=encoder.columns, encoder=encoder)
        found = explain(model, data, qid=2, document=0, over=1)
        expected = explain(plain, numbers, qid=2, document=0, over=1)
        assert torch.equal(found.features, expected.features)
        assert found.called(0) == "colour=blue"


class Added(nn.Module):
    """Stands for trees: the first feature, three times, and half of ours."""

    own_weight = 0.5
    title = "other"

    def add_to(self, own: Tensor, data: RankingData) -> Tensor:
        return self.own_weight * own + 3 * data.features[:, 0].double()


def test_what_trees_add_is_a_part_of_its_own() -> None:
    model, data = small_model(), small_data()
    part = data.select([int(data.sizes.argmax())])
    alone = explain(model, part, qid=part.qids[0], document=0, over=1)
    model.base = Added()
    found = explain(model, part, qid=part.qids[0], document=0, over=1)
    rows = part.order.argsort()[[0, 1]]
    raw = part.features[rows, 0].double()
    assert found.base == pytest.approx(3 * float(raw[0] - raw[1]))
    torch.testing.assert_close(found.phi, 0.5 * alone.phi)
    torch.testing.assert_close(found.features, 0.5 * alone.features)
    torch.testing.assert_close(found.scores, 0.5 * alone.scores + 3 * raw)
    pairs = torch.stack([rows, rows.flip(0)])
    both = explain_pairs(model, part, pairs)
    assert both.base.tolist() == pytest.approx([found.base, -found.base])
    torch.testing.assert_close(both.metrics, torch.stack([found.metrics, -found.metrics]))


class TestPairs:
    def test_weights_follow_policy_and_query(self) -> None:
        model, data = small_model(mode="per_query"), small_data()
        part = data.select([3])
        pairs = torch.tensor([[0, 1], [1, 0]])
        place = [int(part.order[row]) for row in (0, 1)]
        for options in ({}, {"policy": "mean"}, {"policy": "knn"}):
            one = explain(model, part, qid=part.qids[0], document=place[0], over=place[1], **options)
            found = explain_pairs(model, part, pairs, **options)
            torch.testing.assert_close(found.metrics[0], one.metrics)
            torch.testing.assert_close(found.features[1], -one.features.sum(0))
        ones, means = (explain_pairs(model, part, pairs, policy=policy) for policy in ("ones", "mean"))
        assert not torch.allclose(ones.metrics, means.metrics)


class TestNames:
    def test_columns_are_called_by_the_raw_feature_and_the_view(self) -> None:
        columns = [Source(0, ""), Source(1, "list rank"), Source(-1, "component 1")]
        named = made_up([1.0], columns=columns, feature_names=("clicks", "age"))
        assert [named.called(place) for place in range(3)] == ["clicks", "age, list rank", "component 1"]
        plain = made_up([1.0], columns=columns)
        assert [plain.called(place) for place in range(3)] == ["feature 1", "feature 2, list rank", "component 1"]
        assert (plain.feature_names, plain.base, plain.difference) == (None, 0.0, 2.0)

    def test_documents_are_called_by_id_or_number(self) -> None:
        data = RankingData.from_arrays([[3.0], [1.0], [2.0]], [0, 0, 0], qid=[1, 1, 1], doc_ids=["x", "", "z"])
        given = data.order.tolist()  # the caller's place of each row
        assert given != [0, 1, 2]
        assert [document_label(data, row) for row in range(3)] == [("x", "no. 2", "z")[place] for place in given]
        without = data.replace(doc_ids=None)
        assert [document_label(without, row) for row in range(3)] == [f"no. {place + 1}" for place in given]


class TestFinding:
    def lists(self, qids: list[Any]) -> RankingData:
        return RankingData.from_arrays(torch.zeros(len(qids), 1), [0] * len(qids), qid=qids)

    def test_a_query_that_is_not_there(self) -> None:
        for count, said in [(2, "0, 1"), (5, "0, 1, 2, 3, 4"), (6, "0, 1, 2, 3, 4, …")]:
            with pytest.raises(DataError, match=f"there is no query 'x'; the data has {said}$"):
                explain(small_model(), self.lists(list(range(count))), qid="x", document=0, over=0)

    def test_documents_by_place_and_id(self) -> None:
        model, data = small_model(), small_data()
        part = data.select([int(data.sizes.argmax())])
        (qid,), count = part.qids, part.num_documents
        names = [(part.doc_ids or ())[row] for row in part.order.argsort().tolist()]  # in the caller's order
        for place in (0, count - 1):
            found = explain(model, part, qid=qid, document=place, over=names[1])
            assert (found.document, found.over) == (names[place], names[1])
            assert torch.equal(found.raw, part.in_caller_order(part.features)[[place, 1]])

        def refused(message: str, document: str | int, lists: RankingData = part) -> None:
            with pytest.raises(DataError, match=message):
                explain(model, lists, qid=qid, document=document, over=0)

        for place in (-1, count):
            refused(f"query {qid} has {count} documents, got place {place}, counted from 0", place)
        refused(f"query {qid} has no document with the id 'x'", "x", part.replace(doc_ids=None))
        refused(f"query {qid} has 2 documents with the id 'x'", "x", part.replace(doc_ids=("x", "x", *names[2:])))
