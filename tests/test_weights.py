"""Weights of queries and documents: what they mean is the same in boosting, WARP and trained metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError
from lgmml_torch.data.catalog import open_table
from lgmml_torch.distributed import limit_documents
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.fitting.boosted import fit_boosted
from lgmml_torch.fitting.round import Bag, BoostConfig, Problem
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.losses import LambdaRank, Softmax, Warp

EVERYTHING = BoostConfig(subsample=1.0, cap=10_000)


def make(seed: int = 0, queries: int = 8, size: int = 6) -> RankingData:
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(queries * size, 3, generator=g)
    y = (X[:, 0] > 0.3).long() + (X[:, 1] > 1).long()
    y[::size], y[1::size] = 1, 0
    return RankingData.from_arrays(X, y, group=[size] * queries)


def repeated(data: RankingData, query: int) -> RankingData:
    """With one list twice."""
    rest = [(features, label, qid) for features, label, qid in zip(
        data.features.tolist(), data.labels.tolist(), data.query_index.tolist(), strict=True)]  # fmt: skip
    rest += [(features, label, data.num_queries) for features, label, qid in rest if qid == query]
    X, y, qid = zip(*rest, strict=True)
    return RankingData.from_arrays(np.array(X, np.float32), y, qid=list(qid))


def doubled(data: RankingData, query: int) -> RankingData:
    weights = torch.ones(data.num_queries)
    weights[query] = 2.0
    return data.replace(query_weights=weights)


def bag_of(data: RankingData) -> Bag:
    problem = Problem.of(data, None, EVERYTHING, 0)
    scores = problem.data.features[:, 2]  # none are equal, so that the order of the rows does not matter
    return problem.draw_bag(scores, torch.Generator().manual_seed(0))


class TestAQueryOfWeightTwoIsTheQueryTwice:
    def test_in_the_gradients_of_boosting(self) -> None:
        data = make()
        sums = {}
        for name, one in (("twice", repeated(data, 3)), ("weighed", doubled(data, 3))):
            bag, found = bag_of(one), {}
            for row, g, h in zip(bag.features.tolist(), bag.gradients.tolist(), bag.hessians.tolist(), strict=True):
                before = found.get(tuple(row), (0.0, 0.0))
                found[tuple(row)] = (before[0] + g, before[1] + h)
            sums[name] = found
        assert sums["twice"].keys() == sums["weighed"].keys()
        for row, both in sums["twice"].items():
            assert sums["weighed"][row] == pytest.approx(both, rel=1e-4, abs=1e-6)

    def test_in_its_metrics(self) -> None:
        data, factors = make(), []
        for one in (repeated(data, 3), doubled(data, 3), data):
            bag = bag_of(one)
            factors.append(bag.subspace_factors(bag.features[:, torch.tensor([[0, 1]])], EVERYTHING))
        torch.testing.assert_close(factors[0], factors[1], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(factors[0], factors[2], rtol=1e-3)

    @pytest.mark.parametrize("loss", [Softmax(), LambdaRank(), Warp()])
    def test_in_the_losses_of_training(self, loss: Any) -> None:
        data = make(size=2)  # WARP's draws are then the same whatever is drawn
        totals = []
        for one in (repeated(data, 3), doubled(data, 3)):
            batch = TrainingBatches(one, batch_size=100, draws=loss.draws)[0, 0]
            scores = one.features[batch.rows, 0].clone().requires_grad_()
            value = loss(batch, lambda places, scores=scores: scores if places is None else scores[places])
            count = 1 if loss.draws else batch.whole.lists  # the others are means over the lists
            value.total.backward()
            gradient: dict[tuple[float, ...], float] = {}
            for row, g in zip(one.features[batch.rows].tolist(), scores.grad.tolist(), strict=True):
                gradient[tuple(row)] = gradient.get(tuple(row), 0.0) + g * count
            totals.append((float(value.total.detach()) * count, gradient))
        assert totals[0][0] == pytest.approx(totals[1][0], rel=1e-5)
        assert totals[0][1] == pytest.approx(totals[1][1], rel=1e-5)

    @pytest.mark.parametrize("bank", ["boosted", "trained"])
    def test_and_the_model_follows(self, bank: str) -> None:
        """Half of the queries want the feature high, half want it low: the heavier half has its way."""
        g = torch.Generator().manual_seed(0)
        X, half = torch.rand(400, 1, generator=g), torch.arange(400) // 10 % 2 == 0
        y = torch.where(half, X[:, 0] > 0.6, X[:, 0] < 0.4).long()
        settings: dict[str, Any] = {"bank": bank, "epochs": 20, "validation_fraction": 0}
        if bank == "trained":
            settings |= {"bank_options": {"num_metrics": 8, "rank": 2}, "learning_rate": 0.05, "batch_size": 8}
        else:
            settings["rounds"] = 10
        up, down = (
            LGMMLRanker(**settings, random_state=0).fit(
                X, y, group=[10] * 40, sample_weight=torch.where(half == liked, 5.0, 1.0)
            ).score(X[half], y[half], group=[10] * 20)
            for liked in (True, False)
        )  # fmt: skip
        assert up > 0.9 > 0.7 > down


class TestDocuments:
    @pytest.mark.parametrize("batching", ["lists", "triplets"])
    def test_positives_weigh_their_tuples(self, batching: str) -> None:
        data = make()
        weights = torch.arange(data.num_documents).float()
        plain = TrainingBatches(data, batching=batching)[0, 0]
        weighed = TrainingBatches(data.replace(document_weights=weights), batching=batching)[0, 0]
        assert torch.equal(weighed.weights, plain.weights * weights[plain.rows[plain.positives]])
        assert torch.equal(weighed.document_weights, weights[plain.rows])
        assert torch.equal(plain.document_weights, torch.ones(len(plain.rows)))

    @pytest.mark.parametrize("loss", [Softmax(), LambdaRank(), Warp()])
    def test_the_same_weight_within_a_query_is_the_query_s(self, loss: Any) -> None:
        data = make()
        weights = torch.rand(data.num_queries, generator=torch.Generator().manual_seed(1))
        values = []
        for one in (
            data.replace(query_weights=weights),
            data.replace(document_weights=weights[data.query_index]),
        ):
            batch = TrainingBatches(one, batch_size=100, draws=loss.draws)[0, 0]
            scores = one.features[batch.rows, 0]
            values.append(loss(batch, lambda places, s=scores: s if places is None else s[places]).total)
        torch.testing.assert_close(*values)

    def test_in_boosting_too(self) -> None:
        data = make()
        weights = torch.rand(data.num_queries, generator=torch.Generator().manual_seed(1))
        one, other = (
            bag_of(data.replace(query_weights=weights)),
            bag_of(data.replace(document_weights=weights[data.query_index])),
        )
        torch.testing.assert_close(one.gradients, other.gradients)
        torch.testing.assert_close(one.hessians, other.hessians)

    def test_a_list_whose_better_documents_weigh_nothing_teaches_nothing(self) -> None:
        data = make()
        none = (data.labels == 0).float()
        with pytest.raises(DataError, match="`data` must have a query with documents of different labels"):
            fit_boosted(data.replace(document_weights=none), rounds=1)
        none[data.offsets[2] : data.offsets[3]] = 1.0
        problem = Problem.of(data.replace(document_weights=none), None, BoostConfig(), 0)
        assert problem.usable.tolist() == [2]

    def test_the_estimator_takes_both(self) -> None:
        data = make(queries=20)
        rows = {"X": data.features, "y": data.labels, "group": data.sizes}
        settings: dict[str, Any] = {"rounds": 3, "epochs": 1, "random_state": 0, "validation_fraction": 0}
        ones = torch.ones(data.num_documents)
        plain = LGMMLRanker(**settings).fit(**rows)
        same = LGMMLRanker(**settings).fit(**rows, sample_weight=ones)
        np.testing.assert_array_equal(
            plain.predict(data.features, group=data.sizes), same.predict(data.features, group=data.sizes)
        )
        ones[torch.nonzero(data.labels)[0]] = 7.0
        other = LGMMLRanker(**settings).fit(**rows, sample_weight=ones)
        assert not np.array_equal(
            plain.predict(data.features, group=data.sizes), other.predict(data.features, group=data.sizes)
        )
        with pytest.raises(DataError, match="`sample_weight` must be finite and at least 0, got -1"):
            LGMMLRanker(**settings).fit(**rows, sample_weight=-ones / ones)


class TestTheWay:
    """Weights and positions go wherever their documents go."""

    def given(self) -> RankingData:
        g = torch.Generator().manual_seed(0)
        X = torch.arange(30.0)[torch.randperm(30, generator=g)][:, None]
        return RankingData.from_arrays(
            X, X[:, 0] % 3, qid=(X[:, 0] // 5).long(), document_weights=X[:, 0] + 0.5, positions=X[:, 0].long() + 1
        )

    def check(self, data: RankingData) -> None:
        assert data.document_weights is not None
        assert data.positions is not None
        assert torch.equal(data.document_weights, data.features[:, 0] + 0.5)
        assert torch.equal(data.positions, data.features[:, 0].long() + 1)

    def test_through_everything(self) -> None:
        data = self.given()
        self.check(data)
        self.check(data.select([3, 1]))
        for part in data.split((1, 1)):
            self.check(part)
        for pair in data.kfold(3):
            self.check(pair[1])
        self.check(limit_documents(data, 12))
        self.check(data.to("cpu"))
        self.check(RankingData.merge(data.split((1, 2))))
        self.check(Problem.of(data, None, BoostConfig(), 0).data)

    def test_parts_without_weights_count_once(self) -> None:
        one, other = self.given().split((1, 1))
        merged = RankingData.merge([one, other.replace(document_weights=None, positions=None)])
        assert merged.positions is None
        assert merged.document_weights is not None
        own = torch.isin(merged.features[:, 0], one.features[:, 0])
        assert torch.equal(merged.document_weights, torch.where(own, merged.features[:, 0] + 0.5, 1.0))
        weighed = one.replace(query_weights=torch.full((one.num_queries,), 3.0))
        both = RankingData.merge([weighed, other]).query_weights
        assert both is not None
        assert sorted(both.tolist()) == [1.0] * other.num_queries + [3.0] * one.num_queries

    def test_equal_rows_have_an_order_of_their_own(self) -> None:
        found = []
        for order in ([0, 1], [1, 0]):
            found.append(RankingData.from_arrays(
                [[1.0], [1.0]], [0, 0], qid=[1, 1], document_weights=np.array([2.0, 3.0])[order],
                positions=np.array([5, 4])[order],
            ))  # fmt: skip
        assert torch.equal(found[0].positions, found[1].positions)
        assert torch.equal(found[0].document_weights, found[1].document_weights)

    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_as_columns_of_a_table(self, tmp_path: Path, ending: str) -> None:
        pandas = pytest.importorskip("pandas")
        rng = np.random.default_rng(0)
        frame = pandas.DataFrame({
            "query": np.repeat(np.arange(10), 4), "click": rng.integers(0, 2, 40), "f": rng.normal(size=40),
            "w": rng.uniform(size=40), "place": np.tile(np.arange(4), 10),
        })  # fmt: skip
        path = tmp_path / f"clicks.{ending}"
        (frame.to_csv if ending == "csv" else frame.to_parquet)(path, index=False)
        names = {"qid": "query", "label": "click", "cache": False}
        parts = open_table(path, weight="w", position="place", **names)
        for part in parts.values():
            assert part.feature_names == ("f",)
            for row in range(part.num_documents):
                source = frame[np.isclose(frame.f, float(part.features[row, 0]))].iloc[0]
                assert float(part.document_weights[row]) == pytest.approx(source.w)
                assert int(part.positions[row]) == source.place
        frame["w"] = frame["query"] + 1.0
        (frame.to_csv if ending == "csv" else frame.to_parquet)(path, index=False)
        whole = open_table(path, weight="w", **names | {"position": "place"})["train"]
        assert whole.document_weights is None
        assert whole.query_weights.tolist() == [qid + 1.0 for qid in whole.qids]
        with pytest.raises(DataError, match=r"`weight` needs a table with a column 'ww'"):
            open_table(path, weight="ww", **names)

    def test_judged_parts_need_neither(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text("qid,label,a,w,p\n1,1,0.5,2,1\n1,0,0.25,1,2\n")
        (tmp_path / "vali.csv").write_text("qid,label,a\n2,1,0.5\n2,0,0.25\n")
        parts = open_table(tmp_path, weight="w", position="p", cache=False)
        assert parts["train"].positions.tolist() == [2, 1]
        assert parts["valid"].positions is None
        (tmp_path / "train.csv").write_text("qid,label,a,w,p\n1,1,0.5,x,1\n1,0,0.25,1,2\n")
        with pytest.raises(DataError, match=r"column 'w' must hold numbers, got 'x' at row 1"):
            open_table(tmp_path, weight="w", position="p", cache=False)

    def test_lists_in_nested_columns(self, tmp_path: Path) -> None:
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = pa.table({
            "qid": [1, 2], "label": [[1.0, 0.0], [0.0, 1.0, 0.0]], "a": [[0.1, 0.2], [0.3, 0.4, 0.5]],
            "p": [[1, 2], [1, 2, 3]], "w": [2.0, 3.0],
        })  # fmt: skip
        (tmp_path / "parts").mkdir()
        parquet.write_table(table, tmp_path / "parts" / "train.parquet")
        train = open_table(tmp_path / "parts", weight="w", position="p", cache=False)["train"]
        assert train.in_caller_order(train.positions).tolist() == [1, 2, 1, 2, 3]
        assert train.query_weights.tolist() == [2.0, 3.0]

    def test_shards_have_no_place_for_them(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        from lgmml_torch.data.write import write_shards

        with pytest.raises(DataError, match="shards have no place for weights and positions"):
            write_shards(self.given(), tmp_path / "shards")


def test_weights_must_be_numbers_from_zero() -> None:
    rows: dict[str, Any] = {"X": [[1.0], [2.0]], "y": [0, 1], "qid": [1, 1]}
    with pytest.raises(DataError, match="`document_weights` must be finite and at least 0, got -1"):
        RankingData.from_arrays(**rows, document_weights=[1, -1])
    with pytest.raises(DataError, match="`document_weights` must have one entry per row, 2, got 1"):
        RankingData.from_arrays(**rows, document_weights=[1])
    with pytest.raises(DataError, match="`query_weights` must be finite and at least 0, got inf"):
        RankingData.from_arrays(**rows, query_weights=[np.inf])
    data = RankingData.from_arrays(**rows)
    with pytest.raises(DataError, match="`w` must be above 0 for some query, got 0 for all"):
        data.weighed([0, 0], name="w")
    assert replace(data).weighed([2, 2]).query_weights.tolist() == [2.0]
