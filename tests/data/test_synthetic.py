from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Ridge

from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.generated import LetorLike, letor_like
from lgmml_torch.functional.measures import ndcg
from lgmml_torch.models.preprocess.compose import Chain, list_rank_features
from lgmml_torch.models.preprocess.steps import Quantile, Standardize

SMALL = LetorLike(30, 12, num_documents=900, seed=4)


def test_a_filled_set_holds_the_lists_one_after_the_other() -> None:
    features, labels = np.empty((900, 12), np.float32), np.empty(900, np.float32)
    SMALL.fill(features, labels)
    for number, start in enumerate(SMALL.offsets[:-1]):
        alone = SMALL.query(number)
        rows = slice(start, start + SMALL.sizes[number])
        assert np.array_equal(features[rows], alone.features)
        assert np.array_equal(labels[rows], alone.labels)
    assert SMALL.offsets[-1] == 900


def test_lists_are_a_function_of_seed_and_number() -> None:
    longer = LetorLike(40, 12, seed=4)
    shorter = LetorLike(30, 12, seed=4)
    assert np.array_equal(longer.sizes[:30], shorter.sizes)
    assert np.array_equal(longer.query(29).features, shorter.query(29).features)
    assert not np.array_equal(longer.query(28).features[:1], longer.query(29).features[:1])
    assert not np.array_equal(LetorLike(30, 12, seed=5).query(0).features[:1], shorter.query(0).features[:1])


def test_filling_takes_arrays_maps_and_tensors(tmp_path) -> None:
    data = letor_like(30, 12, num_documents=900, seed=4)
    mapped = np.memmap(tmp_path / "x", dtype=np.float32, mode="w+", shape=(900, 12))
    labels = torch.empty(900)
    SMALL.fill(mapped, labels)
    tensors = torch.empty(900, 12)
    SMALL.fill(tensors, np.empty(900, dtype=np.float32))
    assert np.array_equal(mapped, tensors.numpy())
    assert torch.equal(data.in_caller_order(data.features), tensors)
    assert torch.equal(data.in_caller_order(data.labels), labels)
    assert data.sizes.tolist() == SMALL.sizes.tolist()
    with pytest.raises(LGMMLError, match=r"`features` must have shape \(900, 12\), got \(900, 13\)"):
        SMALL.fill(np.empty((900, 13)), labels)


def test_likeness() -> None:
    spec = LetorLike(300, 20, seed=1)
    x, y = np.empty((spec.offsets[-1], 20), np.float32), np.empty(spec.offsets[-1], np.float32)
    spec.fill(x, y)
    shares = np.bincount(y.astype(int), minlength=5) / len(y)
    np.testing.assert_allclose(shares, [0.55, 0.30, 0.10, 0.03, 0.02], rtol=0.3)  # three deviations at 300 lists
    assert np.isfinite(x).all()
    assert np.abs(x).max() > 1e6
    assert x.min() < 0
    assert (x.std(0) > 0).all()
    assert 90 < spec.sizes.mean() < 150
    assert spec.sizes.min() < 30
    assert spec.sizes.max() > 500


def test_web30k_has_its_shape() -> None:
    spec = LetorLike.web30k()
    assert (len(spec.sizes), int(spec.sizes.sum()), spec.num_features) == (18_919, 2_270_296, 136)
    assert spec.sizes.min() >= 1
    assert spec.query(18_918).features.shape == (spec.sizes[-1], 136)


def test_generator_refuses() -> None:
    for arguments, message in (
        ({"num_queries": 0}, "`num_queries` must be at least 1, got 0"),
        ({"num_features": 2}, "`num_features` must be at least 3, got 2"),
        ({"num_documents": 199}, "`num_documents` must be at least 200, got 199"),
        ({"informative": 1}, "`informative` must be at least 2, got 1"),
        ({"informative": 137}, "`informative` must be at most the number of features, 136, got 137"),
        ({"regions": 0}, "`regions` must be at least 1, got 0"),
        ({"noise": -1.0}, "`noise` must be at least 0, got -1.0"),
        ({"seed": -1}, "`seed` must be at least 0, got -1"),
    ):
        with pytest.raises(LGMMLError, match=message):
            LetorLike(**arguments)  # type: ignore[arg-type]


def test_generator_refuses_foreign_numbers() -> None:
    with pytest.raises(LGMMLError, match=r"`index` must lie in \[0, 30\), got 30"):
        SMALL.query(30)


def test_smallest_sets() -> None:
    for spec in (LetorLike(1, 3, num_documents=1), LetorLike(5, 3, num_documents=5, regions=1, informative=3)):
        assert all(np.isfinite(spec.query(number).features).all() for number in range(spec.num_queries))
        assert (spec.sizes == 1).all()


def held_out_quality(seed: int) -> list[float]:
    """NDCG@10 on unseen lists: linear on quantiles; linear, then trees, with list ranks as well; a random order."""
    data = letor_like(160, 20, num_documents=8000, seed=seed)
    train, test = data.select(range(110)), data.select(range(110, 160))

    def quality(scores) -> float:
        return float(ndcg(torch.as_tensor(scores, dtype=torch.float32), test.labels, test.offsets, k=10))

    def fitted(prep, model) -> float:
        model.fit(prep.fit_transform(train.features, train.offsets).numpy(), train.labels.numpy())
        return quality(model.predict(prep(test.features, test.offsets).numpy()))

    return [
        fitted(Chain([Quantile(), Standardize()]), Ridge(10.0)),
        fitted(list_rank_features(), Ridge(10.0)),
        fitted(list_rank_features(), HistGradientBoostingRegressor(max_iter=50, max_leaf_nodes=16, random_state=0)),
        quality(np.random.default_rng(0).random(test.num_documents)),
    ]


@pytest.mark.slow
def test_local_beats_linear_and_list_ranks_beat_levels() -> None:
    levels, linear, local, chance = np.mean([held_out_quality(seed) for seed in range(2)], axis=0)
    assert chance + 0.1 < levels
    assert levels + 0.01 < linear
    assert linear + 0.04 < local
