"""Simulated clicks: the model by a loop, its defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.ragged import RankingData
from research.clicks import simulate_clicks

SIZES = (4, 1, 13, 7, 30)


def lists(grades: float = 3.0, dtype: torch.dtype = torch.float32) -> RankingData:
    """Lists shorter and longer than what is shown, labels from 0 to ``grades``."""
    generator = torch.Generator().manual_seed(3)
    rows = sum(SIZES)
    labels = (torch.randint(0, 4, (rows,), generator=generator) / 3 * grades).float()
    features = torch.rand(rows, 2, generator=generator).to(dtype)
    return RankingData.from_arrays(features, labels, group=SIZES, dtype=dtype, feature_names=("a", "b"))


def policy_of(data: RankingData) -> torch.Tensor:
    return torch.rand(data.num_documents, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("grades", "options"),
    [(3.0, {}), (0.5, {"eta": 0.0, "seed": 4, "shown": 3}), (1.0, {"eta": 2.0, "noise": 0.6, "shown": 100})],
)
def test_clicks_are_those_of_a_loop(grades: float, options: dict[str, Any]) -> None:
    data = lists(grades)
    policy = policy_of(data)
    log = simulate_clicks(data, policy, **options)
    shown, eta = options.get("shown", 10), options.get("eta", 1.0)
    noise, seed = options.get("noise", 0.1), options.get("seed", 0)
    most = max(1.0, 2.0**grades - 1)
    expected = []
    for query in range(data.num_queries):
        rows = range(int(data.offsets[query]), int(data.offsets[query + 1]))
        best = sorted(rows, key=lambda row: -float(policy[row]))[:shown]
        for place, row in enumerate(best, start=1):
            chance = place**-eta * (noise + (1 - noise) * (2.0 ** float(data.labels[row]) - 1) / most)
            expected.append((data.qids[query], tuple(data.features[row].tolist()), place, chance))
    draws = torch.rand(len(expected), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    found = log.data
    assert found.positions is not None
    seen = {
        (found.qids[query], tuple(features), place): (click, looked)
        for query, features, place, click, looked in zip(
            found.query_index.tolist(),
            found.features.tolist(),
            found.positions.tolist(),
            found.labels.tolist(),
            log.propensities.tolist(),
            strict=True,
        )
    }
    assert len(seen) == len(expected)
    for (qid, features, place, chance), draw in zip(expected, draws, strict=True):
        click, looked = seen[qid, features, place]
        assert click == (draw < chance)
        assert looked == pytest.approx(place**-eta)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shown": 0}, "`shown` must be"),
        ({"noise": 1.1}, r"`noise` must lie in \[0, 1\]"),
        ({"policy": torch.zeros(3)}, r"`policy` must have shape \(55,\), got \(3,\)"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    data = lists()
    with pytest.raises(LGMMLError, match=message):
        simulate_clicks(data, **{"policy": policy_of(data), **options})
