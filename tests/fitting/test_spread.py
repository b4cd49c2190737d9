"""Banks fitted by several processes, each with its own lists: as by one alone, and the same bits on every one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.fitting.boosted import fit_boosted
from lgmml_torch.fitting.trained import STARTS, start_trained
from lgmml_torch.ragged import RankingData
from tests.fitting.test_boosted import make
from tests.processes import in_processes, own_part

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {"rounds": 7, "candidates": 6, "evaluate_every": 3, "cap": 150}
OWNERS = [None, [0] * 20 + [2] * 4]  # in turn; and one process of three without a list


def lists() -> RankingData:
    g = torch.Generator().manual_seed(0)
    data = make(0, queries=24, size=9)
    return data.replace(query_weights=torch.rand(24, generator=g), document_weights=torch.rand(216, generator=g) + 0.5)


def fitted(train: RankingData, valid: RankingData) -> dict[str, Any]:
    found = {}
    for measure in (None, "mrr"):
        bank = fit_boosted(train, valid, seed=3, measure=measure, **SETTINGS)
        assert bank.phi is not None
        name = str(measure)
        found[name] = {"phi": bank.phi, **bank.metrics.state_dict(), "curve": bank.history["valid_ndcg"]}
    return found


def started(data: RankingData) -> dict[str, Any]:
    return {
        start: start_trained(data, num_metrics=5, rank=2, start=start, seed=4).metrics.state_dict() for start in STARTS
    }


def work(owner: list[int] | None) -> dict[str, Any]:
    train, valid = own_part(lists(), owner), own_part(make(1, queries=7))
    return {"boosted": fitted(train, valid), "trained": started(train)}


def assert_the_same(found: Any, expected: Any, path: str = "", **tolerance: float) -> None:
    """Numbers that are chosen are equal, all others close."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_the_same(found[name], expected[name], f"{path}.{name}", **tolerance)
    elif isinstance(expected, Tensor):
        limits = {"rtol": 0.0, "atol": 0.0} if "support" in path else {"rtol": 1e-5, "atol": 1e-6} | tolerance
        torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda text: f"{path}: {text}", **limits)
    else:
        assert found == pytest.approx(expected, rel=0, abs=tolerance.get("atol", 1e-9))


@pytest.mark.parametrize(("processes", "owner"), [(2, OWNERS[0]), (3, OWNERS[1])])
def test_a_bank_does_not_depend_on_how_many_fit_it(processes: int, owner: list[int] | None) -> None:
    alone = {"boosted": fitted(lists(), make(1, queries=7)), "trained": started(lists())}
    found = in_processes(processes, work, owner)
    assert len(found) == processes
    assert_the_same(found[0], alone)
    for other in found[1:]:
        assert_the_same(other, found[0], rtol=0.0, atol=0.0)
    assert_the_same(work(None), alone)  # one process that has all
