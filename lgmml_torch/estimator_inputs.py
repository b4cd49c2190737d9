"""What `LGMMLRanker` is given: parameters, rows with their queries, weights, and sets to validate on.

Queries come as `qid` (one id per row), as `group` (sizes of consecutive queries, LightGBM's way), or as a column of
``X`` called ``qid`` (XGBoost's way), which goes wherever ``X`` goes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import (
    DataError,
    DataWarning,
    LGMMLError,
    Rule,
    check_all,
    check_positive,
    check_seed,
    check_unit_interval,
    check_whole,
    count_or_all,
    counts_from_zero,
    flag_or,
    instance_of,
    one_of,
    optional,
    shortened,
)
from lgmml_torch.functional.measures import Measure
from lgmml_torch.functional.score import KERNELS
from lgmml_torch.inputs import MISSING_POLICIES, as_frame, dense_features, flattened
from lgmml_torch.models.phi import PHIS, POLICIES
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_max, segment_min
from lgmml_torch.training.losses import build_loss

if TYPE_CHECKING:
    from lgmml_torch.models.ranker import LGMML

_QID = "qid"  # the column of a frame that holds the query
_WAYS = "`eval_set` must be (X, y, qid), got {}; or [(X, y)] with `eval_qid` or `eval_group`"


class Rows(NamedTuple):
    """Rows of lists; their queries are given by ``qid`` or by ``group``."""

    X: Any
    y: Any
    qid: Any = None
    group: Any = None

    @classmethod
    def to_validate_on(cls, eval_set: Any, eval_qid: Any, eval_group: Any) -> Rows | None:
        """The rows to validate on, if there are any: of one set, or of the last of several.

        Raises:
            DataError: a set that is neither ``(X, y, qid)`` nor ``(X, y)`` with its queries elsewhere.
        """
        if eval_set is None:
            for name, value in (("eval_qid", eval_qid), ("eval_group", eval_group)):
                if value is not None:
                    raise DataError(f"`{name}` must be None without an `eval_set`, got {type(value).__name__}")
            return None
        got = f"a {type(eval_set).__name__} of other things"
        if isinstance(eval_set, tuple):
            got = f"{len(eval_set)} parts"
            eval_set = [eval_set]
        sets = list(eval_set)
        if not sets or not all(isinstance(one, (tuple, list)) and len(one) in (2, 3) for one in sets):
            raise DataError(_WAYS.format(got))
        if len(sets) > 1:
            warnings.warn(
                f"of the {len(sets)} sets in `eval_set` the last one decides when to stop; the others are not looked "
                "at",
                DataWarning,
                stacklevel=3,
            )
        qid, group = _last("eval_qid", eval_qid, len(sets)), _last("eval_group", eval_group, len(sets))
        X, y, *own = sets[-1]
        known = qid is not None or group is not None
        if own and qid is not None:
            raise DataError("`eval_qid` must be None where `eval_set` holds (X, y, qid), got both")
        if own:
            qid = own[0]
        try:
            return cls(X, y, qid, group).with_queries(name="eval_set")
        except DataError:
            if known:
                raise
            raise DataError(_WAYS.format(f"{len(sets[-1])} parts")) from None

    def with_queries(self, *, name: str = "X") -> Rows:
        """The rows with their queries apart from the features.

        Raises:
            DataError: no queries, or two sorts of them; no labels.
        """
        if self.y is None:
            raise DataError("`y` must be given: a ranker requires y to be passed, but the target y is None")
        frame = as_frame(self.X)
        if frame is not None and _QID in frame.columns:
            for word, value in (("qid", self.qid), ("group", self.group)):
                if value is not None:
                    raise DataError(f"`{word}` must be None where `{name}` has a column {_QID!r}, got both")
            return Rows(frame.drop(_QID).to_native(), self.y, frame[_QID].to_native())
        if self.qid is None and self.group is None:
            raise DataError(
                "`qid` must name the query of each row, got None; `group` (sizes of consecutive queries) or a column "
                f"{_QID!r} of a frame do as well"
            )
        return self

    def score_one_list(self, model: LGMML | None, dtype: torch.dtype) -> NDArray[Any] | None:  # (N,)
        """Scores of one short list in a plain array, without the work that other inputs need; None for any other input.

        What has to be refused or warned about counts as other input.
        """
        X = self.X
        if model is None or type(X) is not np.ndarray or X.ndim != 2 or X.dtype.kind not in "fiu":
            return None
        if not self._is_one_list():
            return None
        features = dense_features(X, dtype)
        if X.dtype != features.dtype and flattened(features, lambda column: X[:, column]):
            return None
        return model.score_list(features)

    def _is_one_list(self) -> bool:
        """Whether all rows have the same query, and it is a number or a word."""
        qid, count = self.qid, len(self.X)
        if not count or (qid is None) == (self.group is None):
            return False
        if qid is None:
            return bool(np.array_equal(self.group, [count]))
        if isinstance(qid, list):
            return len(qid) == count and isinstance(qid[0], int | str) and qid.count(qid[0]) == count
        plain = isinstance(qid, np.ndarray) and qid.shape == (count,) and qid.dtype.kind in "iuU"
        return plain and bool((qid == qid[0]).all())


def check_columns(got: Sequence[str] | None, fitted: Sequence[str] | None, what: str) -> None:
    """Require the columns of `fit`, in their order, where both have names."""
    if got is None or fitted is None or list(got) == list(fitted):
        return
    new = [name for name in got if name not in fitted]
    gone = [name for name in fitted if name not in got]
    how = "the same names in another order"
    if new or gone:
        how = f"unknown {new[:3]}, missing {gone[:3]}"
    raise DataError(f"`{what}` must have the columns it had in `fit`, got {how}")


def _last(name: str, given: Any, count: int) -> Any:
    """What belongs to the last set: of one array per set, or of a bare array where there is one set."""
    if given is None:
        return None
    per_set = isinstance(given, (list, tuple)) and len(given) > 0 and np.ndim(given[0]) > 0
    if not per_set and count == 1:
        return given
    if not per_set or len(given) != count:
        raise DataError(f"`{name}` must have one array for each of {count} sets, got {len(given)} entries")
    return given[-1]


def query_weights(
    sample_weight: Any,  # (N,) in the caller's order
    data: RankingData,
) -> Tensor:  # (Q,)
    """One weight per query from weights of rows, which must agree within a query.

    Raises:
        DataError: for weights that are negative, not finite, all zero, or different within a query.

    >>> data = RankingData.from_arrays([[1.0], [2.0], [3.0]], [0, 1, 0], qid=["b", "b", "a"])
    >>> query_weights([2.0, 2.0, 0.5], data)
    tensor([0.5000, 2.0000])
    """
    found = data.replace(query_weights=None, document_weights=None).weighed(sample_weight, name="sample_weight")
    rows = found.document_weights
    if rows is not None:
        low, high = segment_min(rows, data.offsets), segment_max(rows, data.offsets)
        query = int((low != high).nonzero()[0])
        raise DataError(
            "`sample_weight` must be the same for all rows of a query, because queries are what is weighted, got "
            f"{float(low[query]):g} and {float(high[query]):g} for qid {data.qids[query]!r}"
        )
    assert found.query_weights is not None
    return found.query_weights


def weighed(data: RankingData, sample_weight: Any) -> RankingData:
    """The lists with weights of their rows, see `RankingData.weighed`, without those that weigh nothing.

    Raises:
        DataError: for weights that are negative, not finite or all zero.
    """
    if sample_weight is None:
        return data
    found = data.weighed(sample_weight, name="sample_weight")
    counts = found.query_weights
    if found.document_weights is not None:
        counts = segment_max(found.document_weights, data.offsets)
    if counts is None:
        return found
    return found.select((counts > 0).nonzero()[:, 0])


def held_out(data: RankingData, fraction: float, seed: int) -> tuple[RankingData, RankingData | None]:
    """The data cut by query into training and validation; without the latter when that would be of no use.

    Queries with different labels are shared out apart from the others, so that both parts have some of them.
    """
    if fraction == 0:
        return data, None
    varied = segment_max(data.labels, data.offsets) > segment_min(data.labels, data.offsets)
    useful, others = varied.nonzero()[:, 0], (~varied).nonzero()[:, 0]
    if len(useful) < 2:
        warnings.warn(
            f"of {data.num_queries} queries, {len(useful)} have documents of different labels: none can be held out "
            "for validation; training on all of them, to the end",
            DataWarning,
            stacklevel=3,
        )
        return data, None
    generator = torch.Generator().manual_seed(seed)
    count = min(max(1, round(fraction * len(useful))), len(useful) - 1)
    chosen = torch.zeros(data.num_queries, dtype=torch.bool)
    chosen[useful[torch.randperm(len(useful), generator=generator)[:count]]] = True
    chosen[others[torch.randperm(len(others), generator=generator)[: round(fraction * len(others))]]] = True
    return data.select((~chosen).nonzero()[:, 0]), data.select(chosen.nonzero()[:, 0])


ACCELERATORS = {"cpu": "cpu", "cuda": "gpu", "auto": "auto"}  # and what Lightning calls them


def _seed_or_state(name: str, value: Any) -> None:
    """What scikit-learn calls a random state."""
    if not isinstance(value, np.random.RandomState):
        instance_of(Integral, called="a seed, a numpy.random.RandomState or None")(name, value)
        check_seed(name, value)


def _column_names(name: str, value: Any) -> None:
    """A list of words."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not all(isinstance(x, str) for x in value):
        raise LGMMLError(f"`{name}` must be a list of names of columns, got {shortened(value)}")


def _measure_or_function(name: str, value: Any) -> None:
    """A measure by name, or a function ``(scores, labels, offsets) -> (Q,)``."""
    try:
        Measure.of(value)
    except (LGMMLError, TypeError, AttributeError) as error:
        rule = "a measure such as 'ndcg@10', or a function with a name"
        raise LGMMLError(f"`{name}` must be {rule}, got {shortened(value)}") from error


PARAMETERS: dict[str, Rule] = {
    "bank": one_of(("auto", "boosted", "trained", "sampled")),
    "rounds": optional(counts_from_zero),
    "num_metrics": optional(check_whole),
    "bank_options": optional(instance_of(Mapping, called="a mapping")),
    "preprocess": optional(instance_of(Preprocess, Mapping, called="a Preprocess or a mapping that describes one")),
    "features": one_of(("auto", "all")),
    "categories": optional(_column_names),
    "missing": one_of(MISSING_POLICIES),
    "max_one_hot": counts_from_zero,
    "kernel": one_of(KERNELS),
    "phi": one_of(PHIS),
    "epochs": optional(counts_from_zero),
    "learning_rate": optional(check_positive),
    "loss": optional(lambda name, value: build_loss(value)),
    "margin": check_positive,
    "measure": _measure_or_function,
    "batch_size": optional(check_whole),
    "max_draws": optional(check_whole),
    "validation_fraction": check_unit_interval,
    "precision": one_of(("float32", "float64")),
    "random_state": optional(_seed_or_state),
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


@contextmanager
def surroundings(threads: int | None, verbose: int) -> Iterator[None]:
    """Temporarily set the number of threads and the log level.

    Messages go where the program's own logging sends them, or to standard error where it has no handler.
    """
    talkers = list(map(logging.getLogger, ("lgmml_torch", "pytorch_lightning", "lightning")))
    levels = [talker.level for talker in talkers]
    before = torch.get_num_threads()
    wanted, handler = logging.WARNING, None
    if verbose:
        wanted = logging.INFO
    for talker in talkers:
        talker.setLevel(wanted)
    if verbose and not talkers[0].hasHandlers():
        handler = logging.StreamHandler()
        talkers[0].addHandler(handler)
    try:
        if threads is not None and threads > 0:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
        if handler is not None:
            talkers[0].removeHandler(handler)
        for talker, level in zip(talkers, levels, strict=True):
            talker.setLevel(level)
