"""What the lists of one generated set have in common: which features matter where, thresholds, raw scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Lists = tuple[NDArray[np.float32], NDArray[np.float32], Floats]

LABEL_SHARES = (0.55, 0.30, 0.10, 0.03, 0.02)
LOCAL_SHARE = 0.75  # of the utility's variance, when there is more than one region
_PILOT_LISTS, _PILOT_DOCUMENTS = 2000, 20  # queries differ, so many lists tell more than long ones


@dataclass(frozen=True, eq=False)
class World:
    """Columns are kept in the order placing, counting (both informative), copies, noise; ``columns`` mixes them."""

    columns: NDArray[np.int64]  # (D,) place of each column in the set
    placing: int
    informative: int
    copied: NDArray[np.int64]  # (C,) the informative column behind each copy
    centres: Floats  # (R, placing)
    combinations: Floats  # (R+1, counting): one for each region, then the one that holds everywhere
    kinds: NDArray[np.int64]  # (D,)
    location: NDArray[np.float32]  # (D,)
    scale: NDArray[np.float32]  # (D,)
    thresholds: Floats  # (4,)
    noise: float

    @classmethod
    def draw(cls, rng: np.random.Generator, features: int, informative: int, regions: int, noise: float) -> World:
        """Draw the world; the thresholds come from a pilot sample."""
        placing = max(1, min(2, informative // 4))
        counting = informative - placing
        combinations = np.zeros((regions + 1, counting))
        for row in combinations:
            chosen = rng.choice(counting, size=min(3, counting), replace=False)
            row[chosen] = rng.choice([-1.0, 1.0], len(chosen)) * rng.uniform(0.5, 1.5, len(chosen))
        if regions > 1:  # what the regions have in common would be linear
            combinations[:-1] -= combinations[:-1].mean(0)
        combinations /= np.linalg.norm(combinations, axis=1, keepdims=True)
        local = LOCAL_SHARE if regions > 1 else 0.0
        combinations *= np.sqrt(np.append(np.full(regions, local), 1 - local))[:, None]
        # A flag, the fifth kind, would hide most of what matters.
        kinds = np.concatenate([rng.permutation(informative) % 4, rng.permutation(features - informative) % 5])
        world = cls(
            columns=rng.permutation(features),
            placing=placing,
            informative=informative,
            copied=rng.integers(0, informative, (features - informative) // 4),
            centres=1.2 * rng.normal(size=(regions, placing)),
            combinations=combinations,
            kinds=kinds,
            location=rng.uniform(-1, 1, features).astype(np.float32),
            scale=rng.uniform(0.5, 1.5, features).astype(np.float32),
            thresholds=np.zeros(4),
            noise=noise,
        )
        pilot = [world._latent(rng, _PILOT_DOCUMENTS) for _ in range(_PILOT_LISTS)]
        seen = np.concatenate([noisy for _, _, noisy in pilot])
        world.thresholds[:] = np.quantile(seen, np.cumsum(LABEL_SHARES)[:-1])
        return world

    def make_list(self, rng: np.random.Generator, size: int) -> Lists:
        """Features, labels and utility of one list."""
        latent, utility, noisy = self._latent(rng, size)
        labels = np.searchsorted(self.thresholds, noisy).astype(np.float32)
        features = np.empty_like(latent)
        features[:, self.columns] = self._raw(rng, latent)
        return features, labels, utility

    def _latent(self, rng: np.random.Generator, size: int) -> tuple[NDArray[np.float32], Floats, Floats]:
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
