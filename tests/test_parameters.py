"""Every parameter of `LGMMLRanker` that has another type is refused by its name, before data is looked at."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from lgmml_torch.checks import LGMMLError
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.estimator_inputs import PARAMETERS, check_parameters

NAMES = list(inspect.signature(LGMMLRanker).parameters)
WRONG: tuple[Any, ...] = (object(), "no such word", -2.5)


class Untouched:
    """Data nobody may look at."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"data was looked at: {name}")


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_a_wrong_type_is_refused_before_the_data(value: Any) -> None:
    for name in NAMES:
        with pytest.raises(LGMMLError, match=rf"^`{name}` must .*got ") as caught:
            LGMMLRanker(**{name: value}).fit(Untouched(), Untouched(), qid=Untouched())
        assert "\n" not in str(caught.value)


def test_the_message_has_name_rule_and_value() -> None:
    refused: list[tuple[str, Any, str]] = [
        ("random_state", "a", "`random_state` must be a seed, a numpy.random.RandomState or None, got 'a'"),
        ("random_state", 2**32, "`random_state` must be at most 4294967295, got 4294967296"),
        ("rounds", 2.5, "`rounds` must be a whole number, got 2.5"),
        ("rounds", True, "`rounds` must be a whole number, got True"),
        ("learning_rate", float("inf"), "`learning_rate` must be finite, got inf"),
        ("learning_rate", float("nan"), "`learning_rate` must be .*, got nan"),
        ("bank_options", [("t", 0.5)], r"`bank_options` must be a mapping, got \[\('t', 0.5\)\]"),
    ]
    for name, value, message in refused:
        with pytest.raises(LGMMLError, match=f"^{message}$"):
            check_parameters({**LGMMLRanker().get_params(), name: value})


def test_what_scikit_learn_allows_is_allowed() -> None:
    good = {
        "random_state": [0, np.int64(3), np.random.RandomState(1), None], "rounds": [np.int32(5), None],
        "margin": [np.float32(0.5), 1], "n_jobs": [None, -1, 2], "verbose": [True, 0, 2], "validation_fraction": [0],
    }  # fmt: skip
    for name, values in good.items():
        for value in values:
            check_parameters({**LGMMLRanker().get_params(), name: value})


def test_every_parameter_has_a_rule() -> None:
    assert {*PARAMETERS, "policy", "budget"} == {*NAMES}  # these two depend on others, or have a language of their own
