from __future__ import annotations

import pytest
import torch

from lgmml_torch import checks
from lgmml_torch.checks import LGMMLError


def test_numbers() -> None:
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(LGMMLError, match=r"`t` must lie in \[0, 1\], got"):
            checks.check_unit_interval("t", value)
    checks.check_positive("x", 0, zero=True)
    with pytest.raises(LGMMLError, match="`x` must be positive, got 0"):
        checks.check_positive("x", 0)
    with pytest.raises(LGMMLError, match="`x` must be at least 0, got -1"):
        checks.check_positive("x", -1, zero=True)
    with pytest.raises(LGMMLError, match="got nan"):
        checks.check_positive("x", float("nan"))
    for value in ("abc", True, [1]):
        with pytest.raises(LGMMLError, match="`lr` must be a number, got"):
            checks.check_number("lr", value)
    for value in (2.5, True, "2"):
        with pytest.raises(LGMMLError, match="`rounds` must be a whole number, got"):
            checks.check_whole("rounds", value)  # type: ignore[arg-type]


def test_finite_names_the_place() -> None:
    checks.check_finite("x", torch.tensor([1e38, -1e38]))
    checks.check_finite("x", torch.zeros(0))
    checks.check_finite("x", torch.tensor([1]))
    with pytest.raises(LGMMLError, match=r"`x` must be finite, got inf at position \(0, 1\)"):
        checks.check_finite("x", torch.tensor([[1.0, float("inf")]]))


def test_offsets() -> None:
    for offsets, message in (
        ([[0]], "must be 1-D"),
        ([0.0, 2.0], "must hold integers, got torch.float32"),
        ([1, 2], "must start at 0, got 1"),
        ([0, 2, 1, 2], "must not decrease, got 2 before 1 at position 2"),
        ([0, 3], "must end at the number of rows, 2, got 3"),
    ):
        with pytest.raises(LGMMLError, match=message):
            checks.check_offsets(torch.tensor(offsets), 2)


def test_suggestions() -> None:
    assert checks.did_you_mean("ndgc", ["ndcg", "map"]) == "; did you mean 'ndcg'?"
    assert checks.did_you_mean("zzz", ["ndcg"]) == ""
