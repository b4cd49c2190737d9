"""What a builder may be asked before it fits anything."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.fitting.bagged import fit_bagged
from lgmml_torch.fitting.bank import check_builder, trains_metrics
from lgmml_torch.fitting.boosted import fit_boosted
from lgmml_torch.fitting.learners import BoostConfig
from lgmml_torch.fitting.sampled import fit_sampled
from lgmml_torch.fitting.trained import start_trained


def plain(data: Any, valid: Any = None, *, size: int = 1) -> Any:
    """A builder without a check of its own."""


def test_builders_say_whether_their_metrics_are_trained() -> None:
    assert trains_metrics(start_trained)
    assert trains_metrics(partial(partial(start_trained, rank=2), num_metrics=3))
    assert not any(
        trains_metrics(builder) for builder in (fit_sampled, fit_boosted, partial(fit_bagged, members=2), plain)
    )


def test_settings_that_a_builder_does_not_take_are_refused() -> None:
    check_builder(partial(plain, size=2))
    for builder, name in ((partial(plain, sise=2), "plain"), (partial(fit_sampled, colour=1), "fit_sampled")):
        with pytest.raises(ConfigError, match=f"{name} does not take these settings: .*unexpected keyword argument"):
            check_builder(builder)


def test_the_outer_of_two_settings_counts() -> None:
    check_builder(partial(partial(fit_sampled, pool=0), pool=2))
    with pytest.raises(LGMMLError, match="`pool` must be positive, got 0"):
        check_builder(partial(partial(fit_sampled, pool=2), pool=0))


def test_a_configuration_file_may_give_lists() -> None:
    assert BoostConfig(sizes=[1, 2], steps=[2.0], bandwidths=[1.0]) == BoostConfig(  # type: ignore[arg-type]
        sizes=(1, 2), steps=(2.0,), bandwidths=(1.0,)
    )
