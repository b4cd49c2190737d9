"""The soak: its slope finds what grows, and its threads notice a score that is not one thread's."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest

from tools.soak import Soak, Work, slope


def walk(hourly: float, hours: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Samples every ten seconds about a line, each near the one before."""
    rng = np.random.default_rng(0)
    seconds = np.arange(0, 3600 * hours, 10.0)
    near = np.zeros(len(seconds))
    for i in range(1, len(near)):
        near[i] = 0.8 * near[i - 1] + rng.normal()
    return seconds, 700 + hourly * seconds / 3600 + near


def test_a_slope_and_its_interval() -> None:
    for hourly in (0.0, 6.0):
        found = slope(*walk(hourly))
        assert found.low < hourly < found.high
        assert found.high - found.low < 3
    exact = slope(*(np.array(values) for values in ([0.0, 10.0, 20.0, 30.0], [1.0, 2.0, 3.0, 4.0])))
    assert exact == pytest.approx((360, 360, 360))


def test_the_interval_of_neighbours_that_are_alike_is_not_too_narrow() -> None:
    seconds, values = walk(0.0)
    alone = np.random.default_rng(1).permutation(values)
    wide, narrow = slope(seconds, values), slope(seconds, alone)
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


@pytest.mark.skipif("LGMML_PROCESSOR" in os.environ, reason="threads do not run on the pretend processor")
def test_a_soak_of_seconds_counts_calls_and_differences() -> None:
    work = Work.prepare()
    assert {len(X) for X in work.lists} >= {1, 5000}
    soak, out = Soak(work, share=0.9), io.StringIO()
    soak.run(1, out, every=0.2)
    lines = out.getvalue().splitlines()
    assert len(lines) > 1
    assert sum(soak.calls) > 0
    assert (sum(soak.differences), soak.faults) == (0, [])
    work.expected["boosted"] = [scores + 1 for scores in work.expected["boosted"]]
    work.models.pop("trained")
    other = Soak(work, share=0.9)
    other.run(0.1, io.StringIO())
    assert sum(other.differences) == sum(other.calls) > 0
