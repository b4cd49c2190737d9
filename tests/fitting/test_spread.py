"""Banks fitted by several processes, each with its own lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch import distributed
from lgmml_torch.checks import ConfigError
from lgmml_torch.fitting.boosted.fit import fit_boosted
from lgmml_torch.fitting.trained import STARTS, start_trained
from lgmml_torch.ragged import RankingData
from tests.fitting.test_boosted import make
from tests.processes import in_processes, own_part

SETTINGS: dict[str, Any] = {"rounds": 7, "candidates": 6, "evaluate_every": 3, "cap": 150, "phi_cap": 250}


def weighted(seed: int, queries: int) -> RankingData:
    data = make(seed, queries=queries, size=9)
    return data.replace(query_weights=torch.rand(queries, generator=torch.Generator().manual_seed(seed)))


def fitted(owner: list[int] | None) -> dict[str, Any]:
    train, valid = own_part(weighted(0, 24), owner), own_part(make(1, queries=7))
    bank = fit_boosted(train, valid, seed=3, **SETTINGS)
    assert bank.phi is not None
    assert train.spread is not None
    sent = train.spread.traffic
    return {"phi": bank.phi, **bank.metrics.state_dict(), "curve": bank.history["valid_ndcg"], "calls": sent.calls}


def agree(a: dict[str, Any], b: dict[str, Any], **tolerance: float) -> None:
    assert a["curve"] == pytest.approx(b["curve"], abs=1e-6)
    for name, value in a.items():
        if isinstance(value, Tensor) and "qual" not in name:  # only the process that fitted a metric knows its quality
            torch.testing.assert_close(value, b[name], **tolerance)


# In turn; and one process without a list.
@pytest.mark.parametrize(("processes", "owner"), [(2, None), (3, [0] * 20 + [2] * 4)])
def test_a_bank_does_not_depend_on_how_many_fit_it(processes: int, owner: list[int] | None) -> None:
    """Equal bits on every process, and to rounding what one process finds."""
    bank = fit_boosted(weighted(0, 24), make(1, queries=7), seed=3, **SETTINGS)
    alone = {"phi": bank.phi, **bank.metrics.state_dict(), "curve": bank.history["valid_ndcg"]}
    found = in_processes(processes, fitted, owner)
    assert len(found) == processes
    for each in found:
        agree(each, alone, rtol=1e-4, atol=1e-4)
        agree(each, found[0], rtol=0.0, atol=0.0)
    # usable, weights; and, each round, scores, labels and twice the features of a bag; NDCG after rounds 3, 6, 7
    assert found[0]["calls"] <= 2 + 7 * 4 + 3


def test_one_process_has_all() -> None:
    agree(fitted(None), fitted([0] * 24), rtol=0.0, atol=0.0)


def starts(owner: list[int] | None) -> dict[str, Any]:
    data = own_part(make(0, queries=24, size=9), owner)
    return {start: started(data, start) for start in STARTS}


def started(data: RankingData, start: str) -> dict[str, Any]:
    metrics = start_trained(data, num_metrics=5, rank=2, start=start, seed=4).metrics
    return {name: value for name, value in metrics.state_dict().items() if "qual" not in name}


@pytest.mark.parametrize(("processes", "owner"), [(2, None), (3, [0] * 20 + [2] * 4)])
def test_the_start_of_trained_metrics_does_not_depend_on_it_either(processes: int, owner: list[int] | None) -> None:
    data = make(0, queries=24, size=9)
    for found in [starts(None), *in_processes(processes, starts, owner)]:
        for start, state in found.items():
            alone = started(data, start)
            for name, value in state.items():
                torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-5, msg=f"{start} {name}")


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match="`prior_power` must be 0 where processes share the data, got 2"):
        fit_boosted(own_part(make(0)), prior_power=2.0, **SETTINGS)
    assert distributed.world_size() == 1
