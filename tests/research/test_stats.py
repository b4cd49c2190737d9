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


def test_the_mean_gain_counts_every_set_alike_and_resamples_within_each() -> None:
    generator = torch.Generator().manual_seed(3)
    pairs = {str(count): torch.rand(2, count, generator=generator, dtype=torch.float64) for count in (5, 40, 11)}
    pairs["40"][0, 3] = pairs["11"][1, 0] = float("nan")
    found = stats.gains({name: (a, b) for name, (a, b) in pairs.items()})["mean"]
    draws = torch.Generator().manual_seed(stats.SEED)
    means, sums = [], torch.zeros(10_000, dtype=torch.float64)
    for a, b in pairs.values():
        both = [x - y for x, y in zip(a.tolist(), b.tolist(), strict=True) if x == x and y == y]
        gaps = torch.tensor(both, dtype=torch.float64)
        sums += gaps[torch.randint(len(gaps), (10_000, len(gaps)), generator=draws)].sum(1) / len(gaps)
        means.append(float(gaps.mean()))
    ordered = (sums / 3).sort().values
    assert found.mean == pytest.approx(sum(means) / 3)
    assert found.low == pytest.approx(float(ordered[249] + 0.975 * (ordered[250] - ordered[249])))  # .025 of 9,999
    assert found.high == pytest.approx(float(ordered[9749] + 0.025 * (ordered[9750] - ordered[9749])))
    assert (found.counted, found.skipped) == (54, 2)
