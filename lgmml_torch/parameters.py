"""What the parameters of `LGMMLRanker` may be: one table, gone through before a fit looks at its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from lgmml_torch.checks import LGMMLError, check_positive, check_seed, check_unit_interval, check_whole, shortened
from lgmml_torch.functional.ranking.custom import Measure
from lgmml_torch.functional.score import KERNELS
from lgmml_torch.models.phi import POLICIES
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.rules import (
    Rule,
    check_all,
    count_or_all,
    counts_from_zero,
    flag_or,
    instance_of,
    one_of,
    optional,
)

# What `phi` can be, as settings of `Phi`.
PHIS: dict[str, dict[str, Any]] = {
    **{mode: {"mode": mode} for mode in POLICIES},
    "deviations": {"mode": "shared", "deviations": True},
}
BANKS = ("auto", "boosted", "trained", "sampled")
ACCELERATORS = {"cpu": "cpu", "cuda": "gpu", "auto": "auto"}  # and what Lightning calls them


def seed_or_state(name: str, value: Any) -> None:
    """What scikit-learn calls a random state."""
    if not isinstance(value, np.random.RandomState):
        instance_of(Integral, called="a seed, a numpy.random.RandomState or None")(name, value)
        check_seed(name, value)


def column_names(name: str, value: Any) -> None:
    """A list of words."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not all(isinstance(x, str) for x in value):
        raise LGMMLError(f"`{name}` must be a list of names of columns, got {shortened(value)}")


def measure_or_function(name: str, value: Any) -> None:
    """A measure by name, or a function ``(scores, labels, offsets) -> (Q,)``."""
    try:
        Measure.of(value)
    except (LGMMLError, TypeError, AttributeError) as error:
        rule = "a measure such as 'ndcg@10', or a function with a name"
        raise LGMMLError(f"`{name}` must be {rule}, got {shortened(value)}") from error


PARAMETERS: dict[str, Rule] = {
    "bank": one_of(BANKS),
    "rounds": optional(counts_from_zero),
    "num_metrics": optional(check_whole),
    "bank_options": optional(instance_of(Mapping, called="a mapping")),
    "preprocess": optional(instance_of(Preprocess, Mapping, called="a Preprocess or a mapping that describes one")),
    "categories": optional(column_names),
    "max_one_hot": counts_from_zero,
    "kernel": one_of(KERNELS),
    "phi": one_of(PHIS),
    "epochs": optional(counts_from_zero),
    "learning_rate": optional(check_positive),
    "margin": check_positive,
    "measure": measure_or_function,
    "batch_size": check_whole,
    "max_draws": optional(check_whole),
    "validation_fraction": check_unit_interval,
    "precision": one_of(("float32", "float64")),
    "random_state": optional(seed_or_state),
    "n_jobs": optional(count_or_all),
    "device": one_of(ACCELERATORS),
    "verbose": flag_or(counts_from_zero),
}


def check_parameters(params: Mapping[str, Any], *, grows: bool = False) -> None:
    """Refuse what is unknown, of another type or out of range before any work is done.

    ``grows``: there is a model to go on from, to which no rounds at all may be added.
    """
    from lgmml_torch.training.defaults import budget_seconds

    check_all(PARAMETERS, params)
    if params["rounds"] is not None and not grows:
        check_whole("rounds", params["rounds"])
    optional(one_of(POLICIES[PHIS[params["phi"]]["mode"]]))("policy", params["policy"])
    budget_seconds(params["budget"])
    if params["validation_fraction"] == 1:
        raise LGMMLError("`validation_fraction` must leave queries to train on, got 1")
