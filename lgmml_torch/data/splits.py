"""Training, validation and test queries from data that comes in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lgmml_torch.data.generated import letor_like
from lgmml_torch.ragged import RankingData


def split_queries(
    data: RankingData, fractions: Sequence[float] = (0.6, 0.2, 0.2), *, seed: int = 0
) -> dict[str, RankingData]:
    """Parts ``train``, ``valid`` and ``test``, cut by query."""
    train, valid, test = data.split(fractions, seed=seed)
    return {"train": train, "valid": valid, "test": test}


def generated_splits(
    num_queries: int = 600,
    num_features: int = 40,
    *,
    fractions: Sequence[float] = (0.6, 0.2, 0.2),
    seed: int = 0,
    **options: Any,
) -> dict[str, RankingData]:
    """LETOR-like lists (see `lgmml_torch.data.generated`), cut by query."""
    return split_queries(letor_like(num_queries, num_features, seed=seed, **options), fractions, seed=seed)
