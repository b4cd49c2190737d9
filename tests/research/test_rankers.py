from __future__ import annotations

import lightgbm
import numpy as np
import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.functional.measures import mean_measure, ndcg
from lgmml_torch.ragged import RankingData
from research.systems.base import RankingSystem, choose, grid_points
from research.systems.simple import LinearRanker, RandomRanker
from research.systems.trees import GBRT, LambdaMART, TreeRanker, XGBoostRanker

TREES = [LambdaMART, GBRT, XGBoostRanker]


def lists(seed: int, queries: int = 40, *, fractional: bool = False) -> RankingData:
    """Labels from a smooth function of two of five features; every fourth list has no relevant document."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(8, 25, queries)
    X = rng.normal(size=(sizes.sum(), 5))
    hidden = X[:, 0] + np.abs(X[:, 1]) + 0.3 * rng.normal(size=len(X))
    y = np.digitize(hidden, [0.5, 1.5, 2.5]).astype(float)
    y[np.isin(np.repeat(np.arange(queries), sizes), np.arange(0, queries, 4))] = 0
    return RankingData.from_arrays(X, y / 2 if fractional else y, group=sizes)


def quality(system: RankingSystem, data: RankingData) -> float:
    return float(ndcg(system.score(data), data.labels, data.offsets, k=10, tie_order=data.order))


@pytest.mark.parametrize("make", TREES)
def test_trees_learn_and_stop_on_our_ndcg(make: type[TreeRanker]) -> None:
    train, valid, test = (lists(seed, fractional=True) for seed in range(3))
    system = make({"num_leaves": 7}, num_rounds=60, patience=10).fit(train, valid)
    assert 1 <= system.best_round <= 60
    assert quality(system, valid) == pytest.approx(system.valid_ndcg, abs=1e-6)  # empty lists skipped, best round kept
    assert quality(system, test) > quality(RandomRanker().fit(train, valid), test) + 0.15


def test_early_stopping_is_that_of_lightgbm_with_our_ndcg() -> None:
    """The loop, with sampling and a search for the best round, against `lightgbm.train` and its own callback."""
    train, valid = lists(0), lists(1)
    sampling = {"feature_fraction": 0.5, "bagging_fraction": 0.8, "bagging_freq": 1, "num_leaves": 7}
    ours = LambdaMART(sampling, num_rounds=80, patience=8, seed=3).fit(train, valid)
    values, grades = np.unique(train.labels.numpy(), return_inverse=True)
    data = lightgbm.Dataset(train.features.numpy(), grades, group=train.sizes.numpy())
    held = data.create_valid(valid.features.numpy(), np.zeros(valid.num_documents), group=valid.sizes.numpy())
    params = {
        "objective": "lambdarank", "metric": "none", "seed": 3, "num_threads": 1, "verbosity": -1,
        "deterministic": True, "force_row_wise": True, "label_gain": (np.exp2(values.astype(float)) - 1).tolist(),
        "learning_rate": 0.1, "min_data_in_leaf": 20, **sampling,
    }  # fmt: skip

    def feval(scores: np.ndarray, _: object) -> tuple[str, float, bool]:
        return "ndcg@10", mean_measure(torch.tensor(scores), valid), True

    stop = lightgbm.early_stopping(8, verbose=False)
    model = lightgbm.train(params, data, 80, valid_sets=[held], feval=feval, callbacks=[stop])
    assert ours.best_round == model.best_iteration < 72
    assert np.allclose(ours.score(valid).numpy(), model.predict(valid.features.numpy()), atol=1e-12)


def test_grid_is_decided_on_validation() -> None:
    train, valid = lists(0), lists(1)
    system = LambdaMART({"num_leaves": [2, 15], "learning_rate": [0.05, 0.3]}, num_rounds=20).fit(train, valid)
    scores = []
    for point in grid_points(num_leaves=[2, 15], learning_rate=[0.05, 0.3]):
        scores.append(LambdaMART(point, num_rounds=20).fit(train, valid).valid_ndcg)
    assert system.valid_ndcg == max(scores)
    assert system.chosen["num_leaves"] in (2, 15)


@pytest.mark.parametrize("make", [LambdaMART, LinearRanker])
def test_order_of_the_callers_rows_does_not_matter(make: type[RankingSystem]) -> None:
    rng = np.random.default_rng(0)
    X, qid = rng.normal(size=(120, 3)), np.repeat(np.arange(10), 12)
    y = (X[:, 0] > 0).astype(float)
    shuffle = rng.permutation(120)
    a, b = RankingData.from_arrays(X, y, qid=qid), RankingData.from_arrays(X[shuffle], y[shuffle], qid=qid[shuffle])
    one, two = make().fit(a, a), make().fit(b, b)
    found = b.in_caller_order(two.score(b))
    assert torch.allclose(a.in_caller_order(one.score(a))[torch.from_numpy(shuffle)], found, atol=1e-6)


def test_linear_ranker_is_the_ridge_solution() -> None:
    train, valid = lists(0), lists(1)
    system = LinearRanker(ridge=0.5).fit(train, valid)
    X = train.features.double()
    X = (X - X.mean(0)) / X.std(0, correction=0)
    y = train.labels.double().clone()
    for a, b in zip(train.offsets[:-1], train.offsets[1:], strict=True):
        X[a:b] -= X[a:b].mean(0)
        y[a:b] -= y[a:b].mean()
    expected = torch.linalg.solve(X.mT @ X + 0.5 * len(X) * torch.eye(5, dtype=torch.float64), X.mT @ y)
    assert torch.allclose(system.weights, expected)
    assert quality(LinearRanker().fit(train, valid), valid) > quality(RandomRanker().fit(train, valid), valid)


def test_errors_name_argument_rule_and_value() -> None:
    train, valid = lists(0), lists(1)
    with pytest.raises(LGMMLError, match=r"`labels` must be at least 0 for a gain of 2\^y - 1, got -1"):
        LambdaMART().fit(train.replace(labels=train.labels - 1), valid)
    with pytest.raises(DataError, match="`valid` must have a query with a relevant document"):
        GBRT().fit(train, valid.replace(labels=torch.zeros_like(valid.labels)))
    with pytest.raises(LGMMLError, match="`valid` must be given to choose among 2 combinations"):
        GBRT({"num_leaves": [3, 7]}, patience=None).fit(train)


def test_choose_takes_the_first_of_equals_and_skips_nan() -> None:
    points = [{"a": i} for i in range(4)]
    values = [float("nan"), 1.0, 2.0, 2.0]
    assert choose(points, lambda point: point["a"], lambda a: values[a]) == ({"a": 2}, 2)
