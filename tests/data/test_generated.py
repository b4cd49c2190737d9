"""Generated sets against the same rules written out plainly, list by list, and the shapes they promise."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.data import generated
from lgmml_torch.data.generated import LetorLike, letor_like


class PlainWorld:
    """What the lists of a set have in common, and its lists, one feature after the other."""

    def __init__(self, spec: LetorLike) -> None:
        rng = np.random.default_rng([spec.seed, 1])
        self.spec, self.width = spec, spec.num_features
        self.informative = spec.informative or min(max(self.width // 3, 2), 16)
        self.placing = 2 if self.informative >= 8 else 1
        counting = self.informative - self.placing
        drawn = []
        for _ in range(spec.regions + 1):  # each region, then what holds everywhere
            chosen = rng.choice(counting, size=min(3, counting), replace=False)
            signs, sizes = rng.choice([-1.0, 1.0], len(chosen)), rng.uniform(0.5, 1.5, len(chosen))
            row = np.zeros(counting)
            row[chosen] = signs * sizes
            drawn.append(row)
        if spec.regions > 1:
            mean = sum(drawn[:-1]) / spec.regions
            drawn = [*(row - mean for row in drawn[:-1]), drawn[-1]]
        local = 0.75 if spec.regions > 1 else 0.0
        shares = [local] * spec.regions + [1 - local]
        self.combinations = [
            row / math.sqrt((row**2).sum()) * math.sqrt(share) for row, share in zip(drawn, shares, strict=True)
        ]
        rest = self.width - self.informative
        kinds = [place % 4 for place in rng.permutation(self.informative)]
        self.kinds = kinds + [place % 5 for place in rng.permutation(rest)]
        self.columns = rng.permutation(self.width)
        self.copied = rng.integers(0, self.informative, rest // 4)
        self.centres = 1.2 * rng.normal(size=(spec.regions, self.placing))
        self.location = rng.uniform(-1, 1, self.width).astype(np.float32)
        self.scale = rng.uniform(0.5, 1.5, self.width).astype(np.float32)
        pilot = np.concatenate([self.latent(rng, 20)[2] for _ in range(2000)])
        self.thresholds = np.quantile(pilot, [0.55, 0.85, 0.95, 0.98])

    def latent(self, rng: np.random.Generator, size: int) -> tuple[Any, Any, Any]:
        """Features before shifts and scales, the utility, and the utility with noise."""
        x = rng.standard_normal((size, self.width), dtype=np.float32)
        query = rng.standard_normal(self.placing, dtype=np.float32)
        for column in range(self.placing):
            x[:, column] = np.float32(0.8) * query[column] + np.float32(0.6) * x[:, column]
        for number, source in enumerate(self.copied):
            copy = self.informative + number
            x[:, copy] = np.float32(0.8) * x[:, source] + np.float32(0.6) * x[:, copy]
        place, rest = x[:, : self.placing].astype(float), x[:, self.placing : self.informative].astype(float)
        nearness = np.stack([np.exp(-4 * ((place - centre) ** 2).sum(1)) for centre in self.centres])
        local = sum(near * (rest @ row) for near, row in zip(nearness, self.combinations, strict=False))
        utility = local / nearness.sum(0) + rest @ self.combinations[-1]
        difficulty = 0.5 * rng.normal()
        return x, utility, utility + difficulty + self.spec.noise * rng.normal(size=size)

    def list(self, index: int) -> tuple[Any, Any, Any]:
        """Features, labels and utility of one list."""
        rng = np.random.default_rng([self.spec.seed, 2, index])
        x, utility, noisy = self.latent(rng, int(self.spec.sizes[index]))
        labels = [sum(value > limit for limit in self.thresholds) for value in noisy]
        stretch = np.exp(np.float32(0.3) * rng.standard_normal(self.width, dtype=np.float32))
        shift = rng.standard_normal(self.width, dtype=np.float32)
        features = np.empty_like(x)
        for column, kind in enumerate(self.kinds):
            own = x[:, column] if column < self.placing else x[:, column] * stretch[column] + shift[column]
            location, scale = self.location[column], self.scale[column]
            made = (
                lambda v, a, b: np.floor(np.exp(b * v + a)),
                lambda v, a, b: np.exp(2 * b * v + 10 + 4 * a),
                lambda v, a, b: 1 / (1 + np.exp(-(b * v + a))),
                lambda v, a, b: 10 * b * v - 30,
                lambda v, a, b: v > 1 + a,
            )[kind]
            features[:, self.columns[column]] = made(own, location, scale)
        return features, labels, utility


SPECS = {
    "few": LetorLike(4, 9, regions=3, seed=2),
    "wide": LetorLike(3, 61, regions=2, noise=0.2, seed=5),
    "one region": LetorLike(3, 14, regions=1, informative=8, noise=0.0, seed=1),
    "all informative": LetorLike(3, 12, informative=12, num_documents=60, seed=3),
    "smallest": LetorLike(2, 3, seed=4),
}


@cache
def plain(name: str) -> PlainWorld:
    return PlainWorld(SPECS[name])


def test_lists_are_those_of_the_rules() -> None:
    for name in SPECS:
        spec = SPECS[name]
        np.testing.assert_allclose(spec._world.thresholds, plain(name).thresholds, rtol=1e-9)
        for index in range(spec.num_queries):
            found, (features, labels, utility) = spec.query(index), plain(name).list(index)
            np.testing.assert_allclose(found.features, features, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found.utility, utility, rtol=1e-9, atol=1e-9)
            assert found.labels.tolist() == labels
            assert (found.features.dtype, found.labels.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize(("mean", "most"), [(120, 1250), (2, 5)])
def test_sizes_are_log_normal(mean: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """About 120 documents and 1250 at most, unless the constants say otherwise."""
    if mean != 120:
        monkeypatch.setattr(generated, "_MEAN_DOCUMENTS", mean)
        monkeypatch.setattr(generated, "_MAX_DOCUMENTS", most)
    drawn = np.random.default_rng([7, 0]).lognormal(math.log(mean) - 0.28, 0.75, 20_000)
    wanted = [round(min(max(size, 1), most)) for size in drawn]
    sizes = LetorLike(20_000, 3, seed=7).sizes
    assert sizes.tolist() == wanted
    assert sizes.max() == most
    offsets = LetorLike(20_000, 3, seed=7).offsets
    assert (offsets[0], offsets[-1], offsets.dtype) == (0, sum(wanted), np.int64)
    assert np.array_equal(np.diff(offsets), sizes)


def test_an_exact_total_is_shared_by_largest_remainders() -> None:
    for total in [50, 51, 97, 1234, 100_000]:
        drawn = np.random.default_rng([1, 0]).lognormal(math.log(120) - 0.28, 0.75, 50).clip(1, 1250)
        shares = [(total - 50) * size / drawn.sum() for size in drawn]
        wanted = [1 + math.floor(share) for share in shares]
        rest = sorted(range(50), key=lambda i: math.floor(shares[i]) - shares[i])
        for i in rest[: total - sum(wanted)]:
            wanted[i] += 1
        assert LetorLike(50, 3, num_documents=total, seed=1).sizes.tolist() == wanted
        assert sum(wanted) == total


def with_sizes(*sizes: int) -> LetorLike:
    """A set whose lists have these sizes; its world is one that is there already."""
    spec = LetorLike(len(sizes), 3)
    spec.__dict__.update(sizes=np.array(sizes), _world=SPECS["smallest"]._world)
    return spec


def test_a_set_in_memory() -> None:
    data = letor_like(3, 4, num_documents=12, dtype=torch.float64)
    assert data.features.dtype == torch.float64
    assert letor_like(3, 4, num_documents=12).features.dtype == torch.float32
    spec = LetorLike(3, 4, num_documents=12, seed=0)
    assert torch.equal(
        data.in_caller_order(data.features),
        torch.from_numpy(np.concatenate([spec.query(i).features for i in range(3)])).double(),
    )
    assert data.sizes.tolist() == spec.sizes.tolist()
    assert not torch.equal(letor_like(3, 4, num_documents=12, seed=1).features, data.features.float())


def test_settings_are_whole_numbers() -> None:
    for arguments, message in [
        ({"num_queries": 2.5}, "`num_queries` must be a whole number"),
        ({"num_features": 3.5}, "`num_features` must be a whole number"),
        ({"num_documents": 300.5}, "`num_documents` must be a whole number"),
        ({"regions": 1.5}, "`regions` must be a whole number"),
        ({"seed": 0.5}, "`seed` must be a whole number"),
        ({"num_queries": "3"}, "`num_queries` must be a number"),
        ({"noise": math.nan}, "`noise` must be"),
        ({"num_queries": None}, "`num_queries` must be a number"),
        ({"seed": None}, "`seed` must be a number"),
    ]:
        with pytest.raises(LGMMLError, match=message):
            LetorLike(**arguments)


def test_smallest_settings_are_allowed() -> None:
    for spec in (
        LetorLike(num_queries=1),
        LetorLike(num_features=3),
        LetorLike(num_documents=200),
        LetorLike(informative=2),
        LetorLike(informative=136),
        LetorLike(regions=1),
        LetorLike(noise=0.0),
        LetorLike(seed=0),
    ):
        assert spec.num_queries >= 1


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_lists_that_are_not_there(index: int) -> None:
    spec = with_sizes(1, 1, 1)
    assert len(spec.query(0).labels) == len(spec.query(2).labels) == 1
    with pytest.raises(LGMMLError, match=rf"`index` must lie in \[0, 3\), got {index}"):
        spec.query(index)


def test_targets_must_fit() -> None:
    spec = with_sizes(2, 1)
    with pytest.raises(LGMMLError, match=r"`labels` must have shape \(3,\), got \(4,\)"):
        spec.fill(np.empty((3, 3)), np.empty(4))
    features, labels = np.full((3, 3), np.nan), np.full(3, np.nan)
    spec.fill(features, labels)
    assert np.isfinite(features).all()
    assert np.isfinite(labels).all()
