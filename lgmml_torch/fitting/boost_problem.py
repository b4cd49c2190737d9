"""What boosting works on: the data in an order of its own, and all that stays the same from round to round."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, DataWarning, LGMMLError, check_finite
from lgmml_torch.fitting.boost_config import BoostConfig
from lgmml_torch.functional.boosting import feature_prior
from lgmml_torch.functional.lambdarank import ideal_dcg, lambda_gradients
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_ids, segment_max, segment_min


@dataclass(frozen=True)
class Problem:
    """What stays the same from round to round."""

    data: RankingData
    valid: RankingData | None
    usable: Tensor  # (U,) queries with different labels
    ideal: Tensor  # (Q,)
    prior: Tensor | None  # (D,)
    config: BoostConfig
    seed: int

    @property
    def identity(self) -> str:
        """What a state must belong to for a fit of this problem to go on from it."""
        valid = None if self.valid is None else tuple(self.valid.features.shape)
        return f"{self.config} seed={self.seed} data={tuple(self.data.features.shape)} valid={valid}"


def make_problem(data: RankingData, valid: RankingData | None, config: BoostConfig, seed: int) -> Problem:
    """Check and reorder the data, and compute what every round needs."""
    check_data(data, valid)
    if valid is not None and not bool((valid.labels > 0).any()):
        warnings.warn(
            "no validation query has a relevant document, so all rounds are run and kept", DataWarning, stacklevel=2
        )
        valid = None
    data, valid = shuffled(data, seed), None if valid is None else shuffled(valid, seed)
    ideal = ideal_dcg(data.labels, data.offsets, truncation=config.truncation)
    usable = usable_queries(data, ideal)
    prior = first_prior(data, config, seed) if config.prior_power else None
    return Problem(data, valid, usable, ideal, prior, config, seed)


def check_data(data: RankingData, valid: RankingData | None) -> None:
    """Features finite, and of one width."""
    check_finite("features", data.features)
    if valid is None:
        return
    check_finite("valid.features", valid.features)
    if valid.num_features != data.num_features:
        raise LGMMLError(f"`valid` must have {data.num_features} features as `data` has, got {valid.num_features}")


def usable_queries(
    data: RankingData,
    ideal: Tensor,  # (Q,)
) -> Tensor:  # (U,)
    """Queries with a pair to order: different labels, some gain, and a weight above 0."""
    usable = (segment_max(data.labels, data.offsets) > segment_min(data.labels, data.offsets)) & (ideal > 0)
    if data.query_weights is not None:
        usable &= data.query_weights > 0
    if not bool(usable.any()):
        raise DataError("`data` must have a query with documents of different labels, got none")
    return usable.nonzero()[:, 0]


def shuffled(data: RankingData, seed: int) -> RankingData:
    """The data with the documents of each query in random order, by which equal scores are ranked.

    The canonical order would rank the worst first among equals, and the caller's would make the fit depend on it.
    """
    order = torch.randperm(data.num_documents, generator=round_generator(seed, -1)).to(data.offsets.device)
    order = order[segment_ids(data.offsets)[order].argsort(stable=True)]
    return replace(data, features=data.features[order], labels=data.labels[order])


def first_prior(data: RankingData, config: BoostConfig, seed: int) -> Tensor:
    """The prior on features from the gradients at scores of zero."""
    zero = data.features.new_zeros(data.num_documents)
    gradients, _ = lambda_gradients(zero, data.labels.to(zero), data.offsets, truncation=config.truncation)
    generator = round_generator(seed, -2)
    return feature_prior(data.features, gradients, data.offsets, power=config.prior_power, generator=generator)


def round_generator(seed: int, step: int) -> torch.Generator:
    """Random numbers that depend on the seed and the step alone."""
    mixed = np.random.SeedSequence([abs(seed), step + 2]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> np.uint64(1)))
