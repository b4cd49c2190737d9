from __future__ import annotations

import math

import pytest
import torch

from lgmml_torch.functional.significance import compare
from research import stats
from research.store import Record


def test_a_gain_holds_only_with_its_interval() -> None:
    base = torch.rand(50, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert stats.judged(stats.gain(base + 0.1 + 0.01 * noise, base).difference) == "holds"
    assert stats.judged(stats.gain(base - 0.1 + 0.01 * noise, base).difference) == "does not hold"
    assert stats.judged(stats.gain(base + 0.3 * (noise - noise.mean()), base).difference) == "not decided"


def test_differences_are_paired_and_skip_what_either_skips() -> None:
    first, second = torch.tensor([0.5, 0.7, math.nan]), torch.tensor([0.4, 0.4, 0.9])
    found = stats.gains({"one": (first, second), "two": (second, second)})
    assert found["one"].mean == pytest.approx(0.2)
    assert found["one"].low >= 0.1 - 1e-6
    assert found["one"].high <= 0.3 + 1e-6
    assert found["one"] == compare(first, second, generator=torch.Generator().manual_seed(stats.SEED)).difference
    assert found["mean"].mean == pytest.approx(0.1)
    assert (found["mean"].counted, found["mean"].skipped) == (5, 1)
    assert stats.signed(found["two"]) == "+0.0000 [+0.0000, +0.0000]"
    assert stats.gains({}) == {}


def test_folds_are_pooled_query_by_query() -> None:
    records = [Record({"map": [0.1, math.nan]}), Record({"map": [0.3]})]
    values = stats.pooled(records, "map")
    assert values[[0, 2]].tolist() == pytest.approx([0.1, 0.3])
    assert stats.counts(values) == "2 counted, 1 skipped"
    assert stats.interval(values).mean == pytest.approx(0.2)
