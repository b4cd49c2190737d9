"""Ranking data in the likeness of a web search set, of any size, generated list by list.

Each list is a function of the seed and its own number alone, so a set need not fit into memory. What the lists of a set
have in common (which features matter where, thresholds, raw scales) is its `_World`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import LGMMLError, at_least, check_all, check_shape, optional
from lgmml_torch.ragged import RankingData

_Floats = NDArray[np.float64]

_LABEL_SHARES = (0.55, 0.30, 0.10, 0.03, 0.02)
_LOCAL_SHARE = 0.75  # of the utility's variance, when there is more than one region
_PILOT_LISTS, _PILOT_DOCUMENTS = 2000, 20  # queries differ, so many lists tell more than long ones


class _GeneratedList(NamedTuple):
    """One list; ``utility`` is what the labels show through noise: the best order there is."""

    features: NDArray[np.float32]  # (n, D)
    labels: NDArray[np.float32]  # (n,)
    utility: _Floats  # (n,)


class _World:
    """Columns are kept in the order placing, counting (both informative), copies, noise; ``columns`` mixes them."""

    def __init__(self, rng: np.random.Generator, features: int, informative: int, regions: int, noise: float) -> None:
        self.noise, self.informative = noise, informative
        self.placing = max(1, min(2, informative // 4))
        counting = informative - self.placing
        combinations = np.zeros((regions + 1, counting))  # one for each region, then the one that holds everywhere
        for row in combinations:
            chosen = rng.choice(counting, size=min(3, counting), replace=False)
            row[chosen] = rng.choice([-1.0, 1.0], len(chosen)) * rng.uniform(0.5, 1.5, len(chosen))
        if regions > 1:  # what the regions have in common would be linear
            combinations[:-1] -= combinations[:-1].mean(0)
        combinations /= np.linalg.norm(combinations, axis=1, keepdims=True)
        local = _LOCAL_SHARE if regions > 1 else 0.0
        self.combinations = combinations * np.sqrt(np.append(np.full(regions, local), 1 - local))[:, None]
        # A flag, the fifth kind, would hide most of what matters.
        self.kinds = np.concatenate([rng.permutation(informative) % 4, rng.permutation(features - informative) % 5])
        self.columns = rng.permutation(features)  # (D,) place of each column in the set
        # (C,) the informative column behind each copy
        self.copied = rng.integers(0, informative, (features - informative) // 4)
        self.centres = 1.2 * rng.normal(size=(regions, self.placing))
        self.location = rng.uniform(-1, 1, features).astype(np.float32)
        self.scale = rng.uniform(0.5, 1.5, features).astype(np.float32)
        pilot = [self._latent(rng, _PILOT_DOCUMENTS)[2] for _ in range(_PILOT_LISTS)]
        self.thresholds = np.quantile(np.concatenate(pilot), np.cumsum(_LABEL_SHARES)[:-1])

    def make_list(self, rng: np.random.Generator, size: int) -> _GeneratedList:
        """One list."""
        latent, utility, noisy = self._latent(rng, size)
        labels = np.searchsorted(self.thresholds, noisy).astype(np.float32)
        features = np.empty_like(latent)
        features[:, self.columns] = self._raw(rng, latent)
        return _GeneratedList(features, labels, utility)

    def _latent(self, rng: np.random.Generator, size: int) -> tuple[NDArray[np.float32], _Floats, _Floats]:
        """Standard normal features before shifts and scales, the utility, and the utility with noise."""
        latent = rng.standard_normal((size, len(self.columns)), dtype=np.float32)
        # A query's documents gather in its part of the space, so that queries differ in what counts.
        query = rng.standard_normal(self.placing, dtype=np.float32)
        latent[:, : self.placing] = np.float32(0.8) * query + np.float32(0.6) * latent[:, : self.placing]
        copies = slice(self.informative, self.informative + len(self.copied))
        latent[:, copies] = np.float32(0.8) * latent[:, self.copied] + np.float32(0.6) * latent[:, copies]
        known = latent[:, : self.informative].astype(np.float64)
        distance = ((known[:, None, : self.placing] - self.centres) ** 2).sum(2)
        weights = np.exp(-4 * (distance - distance.min(1, keepdims=True)))
        weights /= weights.sum(1, keepdims=True)
        parts = known[:, self.placing :] @ self.combinations.T
        utility = (weights * parts[:, :-1]).sum(1) + parts[:, -1]
        difficulty = 0.5 * rng.normal()
        return latent, utility, utility + difficulty + self.noise * rng.normal(size=size)

    def _raw(self, rng: np.random.Generator, latent: NDArray[np.float32]) -> NDArray[np.float32]:
        """Shift and stretch by query, then the raw scale of each kind of feature."""
        width = latent.shape[1]
        stretch: NDArray[np.float32] = np.exp(np.float32(0.3) * rng.standard_normal((width,), dtype=np.float32))
        shift = rng.standard_normal((width,), dtype=np.float32)
        stretch[: self.placing], shift[: self.placing] = 1, 0  # their level tells the region
        x = latent * stretch + shift
        out: NDArray[np.float32] = np.empty_like(x)
        for kind in range(5):
            chosen = self.kinds == kind
            v, location, scale = x[:, chosen], self.location[chosen], self.scale[chosen]
            if kind == 0:  # counts, about a third of them zero
                out[:, chosen] = np.floor(np.exp(scale * v + location))
            elif kind == 1:  # sizes
                out[:, chosen] = np.exp(2 * scale * v + 10 + 4 * location)
            elif kind == 2:  # shares
                out[:, chosen] = 1 / (1 + np.exp(-(scale * v + location)))
            elif kind == 3:  # log-likelihoods
                out[:, chosen] = 10 * scale * v - 30
            else:  # flags
                out[:, chosen] = v > 1 + location
        return out


_SIZES, _WORLD, _LIST = 0, 1, 2  # streams of random numbers below one seed
_MEAN_DOCUMENTS, _MAX_DOCUMENTS = 120, 1250


@dataclass(frozen=True)
class LetorLike:
    """Description of a generated set; nothing is drawn before it is asked for.

    Labels 0–4 fall like MSLR's, about 55/30/10/3/2 per cent, by thresholds on a noisy utility. The utility is a quarter
    one linear function of a few informative features and for the rest local: two of these features place a document in
    one of ``regions`` regions, and in each region another combination of the others counts, so a linear ranker is
    limited and a local one is not. Features other than those two are shifted and stretched by query: their level says
    little, their order within the list much. Raw scales are mixed: counts with ties, log-normal values up to 1e8 and
    more, shares, negative scores and flags. The features that carry nothing new are noisy copies of informative ones or
    plain noise.
    """

    num_queries: int = 200  # number of lists
    num_features: int = 136  # D, at least 3
    num_documents: int | None = None  # exact total; without it about 120 for each list
    # features that matter, at least 2 (one to place, one to count); by default a third, at most 16
    informative: int | None = None
    regions: int = 6  # of different combinations; 1 leaves a linear utility
    noise: float = 0.5  # standard deviation of the labels' noise against a utility of about 1
    seed: int = 0  # the same seed gives the same lists

    def __post_init__(self) -> None:
        rules = {
            "num_queries": at_least(1, whole=True),
            "num_features": at_least(3, whole=True),
            "num_documents": optional(at_least(self.num_queries, whole=True)),
            "informative": optional(at_least(2, whole=True)),
            "regions": at_least(1, whole=True),
            "seed": at_least(0, whole=True),
            "noise": at_least(0),
        }
        check_all(rules, vars(self))
        if self.informative is not None and self.informative > self.num_features:
            most = f"the number of features, {self.num_features}"
            raise LGMMLError(f"`informative` must be at most {most}, got {self.informative}")

    @classmethod
    def web30k(cls, seed: int = 0) -> Self:
        """The shape of a training fold of MSLR-WEB30K: 18,919 lists, 2,270,296 documents, 136 features."""
        return cls(num_queries=18_919, num_documents=2_270_296, seed=seed)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:  # (Q,)
        """Documents of each list: log-normal, from 1 to 1250 unless an exact total asks for more."""
        rng = np.random.default_rng([self.seed, _SIZES])
        drawn = rng.lognormal(np.log(_MEAN_DOCUMENTS) - 0.28, 0.75, self.num_queries).clip(1, _MAX_DOCUMENTS)
        if self.num_documents is None:
            return np.round(drawn).astype(np.int64)
        shares = (self.num_documents - self.num_queries) * drawn / drawn.sum()
        sizes: NDArray[np.int64] = 1 + np.floor(shares).astype(np.int64)
        missing = self.num_documents - int(sizes.sum())
        sizes[np.argsort(np.floor(shares) - shares, kind="stable")[:missing]] += 1
        return sizes

    @cached_property
    def offsets(self) -> NDArray[np.int64]:  # (Q+1,)
        """Boundaries of the lists."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @cached_property
    def _world(self) -> _World:
        informative = self.informative or max(2, min(16, self.num_features // 3))
        rng = np.random.default_rng([self.seed, _WORLD])
        return _World(rng, self.num_features, informative, self.regions, self.noise)

    def query(self, index: int) -> _GeneratedList:
        """List number ``index``, from 0."""
        if not 0 <= index < self.num_queries:
            raise LGMMLError(f"`index` must lie in [0, {self.num_queries}), got {index}")
        rng = np.random.default_rng([self.seed, _LIST, index])
        return self._world.make_list(rng, int(self.sizes[index]))

    def fill(self, features: Any, labels: Any) -> None:
        """Write all rows into arrays of shapes (N, D) and (N,): numpy, memory maps or CPU tensors."""
        total = int(self.offsets[-1])
        for name, target, shape in (("features", features, (total, self.num_features)), ("labels", labels, (total,))):
            check_shape(name, torch.empty(tuple(target.shape), device="meta"), shape)
        features, labels = np.asarray(features), np.asarray(labels)  # which share the memory of tensors
        for index in range(self.num_queries):
            rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
            features[rows], labels[rows], _ = self.query(index)


def letor_like(
    num_queries: int = 200,
    num_features: int = 136,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> RankingData:
    """A set like `LetorLike` describes, in memory; ``options`` are its other attributes.

    >>> letor_like(3, 5, num_documents=40, seed=1)
    RankingData(3 queries, 40 documents, 5 features, ...)
    """
    spec = LetorLike(num_queries, num_features, seed=seed, **options)
    features = np.empty((int(spec.offsets[-1]), num_features), dtype=np.float32)
    labels = np.empty(len(features), dtype=np.float32)
    spec.fill(features, labels)
    return RankingData.from_arrays(features, labels, group=spec.sizes, dtype=dtype)
