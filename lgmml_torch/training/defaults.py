"""The one place that decides what is fitted: from the size of the data, the budget and the settings a user gave.

`train.py`, the command line and `LGMMLRanker` all ask `choose_defaults`. The kind of metrics follows from the size of
the data unless it is named; where the size leaves it open, `stages.choose_kind` lets validation queries decide. No
other setting changes it. A setting without effect on what is fitted is refused. docs/quality.md has the evidence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lgmml_torch.checks import ConfigError, LGMMLError, did_you_mean
from lgmml_torch.fitting.bank import BankBuilder
from lgmml_torch.fitting.boosted import BoostedBuilder
from lgmml_torch.fitting.sampled import SampledBuilder
from lgmml_torch.fitting.trained import TrainedBuilder
from lgmml_torch.models.encode import CategorySettings
from lgmml_torch.models.phi import PHIS, Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import all_views, build_preprocess, list_rank_features
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import OneCycle
from lgmml_torch.training.losses import ListLoss, Loss, Warp, build_loss
from lgmml_torch.training.module import Dropout
from lgmml_torch.training.recipe import CHOOSING_BANKS, PhiSettings, Recipe

BANKS = ("boosted", "trained", "sampled")
_TRAINED_DOCUMENTS = 20_000  # metrics are trained from this many documents and queries on
_TRAINED_QUERIES = 200
_OPEN_DOCUMENTS = (2_000, 100_000)  # below these sizes, with so many documents, both kinds are tried on validation
# Of fits with these settings, short fits with the usual ones say little; keys of the configuration begin with them.
_NOT_OPEN = ("epochs", "preprocess", "loss", "phi", "policy", "learning_rate", "optimizer", "step_size", "search")
# Dropout, lists in a batch and ramps of a feature, by number of documents: few take more steps and fewer columns.
_BY_DOCUMENTS = (
    (100_000, Dropout(0.1, 0.2), 16, 3),
    (400_000, Dropout(0.1, 0.2), 16, 6),
    (math.inf, Dropout(0.1, 0.1), 32, 6),
)
_MAX_COLUMNS = 1_000  # of the preprocessed features, within which a feature gets ramps
_MAX_COLUMN_BYTES = 4 << 30  # all preprocessed features of the training documents, in float32
_TRAINED_RATE, _WEIGHT_DECAY = 2e-3, 0.3
_WARP_EPOCHS, _WARP_RATE = 10, 0.001
_LONG_EPOCH = 100_000  # documents
_VALIDATIONS = 5  # of trained metrics, about: on few training queries, ranking validation lists takes half of the time
_GRADIENT_CLIP = 10.0  # of trained metrics, for the trainer
_SPEED = 3e10  # floating-point operations a second of one core, in training


@dataclass(frozen=True)
class _Budget:
    """How much work a fit may be."""

    rounds: int  # the most rounds of boosting
    directions: int  # K·R, the columns of the one product that training consists of
    visits: float  # documents visited in all epochs together
    epochs: tuple[int, int]  # least and most

    def epochs_for(self, documents: int) -> int:
        """Epochs that visit about ``visits`` documents; a third fewer at most where an epoch has many of them."""
        least, most = self.epochs
        if documents >= _LONG_EPOCH:
            most = most * 2 // 3
        return round(min(most, max(least, self.visits / max(1, documents))))

    def seconds_for(self, documents: int, columns: int) -> float:
        """Time of one core: two products of all visited documents, which is nearly all of the work."""
        return self.epochs_for(documents) * documents * columns * self.directions * 4 / _SPEED


BUDGETS = {
    "fast": _Budget(100, 512, 2.5e6, (4, 10)),
    "normal": _Budget(200, 1024, 7.5e6, (6, 15)),
    "thorough": _Budget(400, 2048, 2e7, (10, 20)),
}


def budget_seconds(budget: str) -> float | None:
    """The seconds of a budget that is a time; None for one that has a name.

    >>> budget_seconds("10m"), budget_seconds("fast")
    (600.0, None)
    """
    if isinstance(budget, str) and budget in BUDGETS:
        return None
    time = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", str(budget).strip())
    if time is None:
        names = list(BUDGETS)
        hint = did_you_mean(str(budget), names)
        raise LGMMLError(f"`budget` must be {', '.join(names)}, or a time such as 60s or 10m, got {budget!r}{hint}")
    return float(time[1]) * {"s": 1, "m": 60, "h": 3600}[time[2]]


def _find_budget(budget: str, documents: int, columns: int) -> _Budget:
    """The budget of that name, or the largest that takes at most a time such as ``"60s"`` or ``"10m"`` of one core.

    >>> _find_budget("90s", 700_000, 1_000).rounds, _find_budget("2h", 700_000, 1_000).rounds
    (100, 400)
    """
    seconds = budget_seconds(budget)
    if seconds is None:
        return BUDGETS[budget]
    chosen = BUDGETS["fast"]
    for each in BUDGETS.values():
        if each.seconds_for(documents, columns) <= seconds:
            chosen = each
    return chosen


@dataclass(frozen=True)
class Sizes:
    """How much training data there is, in all processes."""

    queries: int
    documents: int
    features: int  # raw

    @classmethod
    def of(cls, data: RankingData) -> Sizes:
        """The sizes of the training data."""
        return cls(len(data.all_lists), data.all_lists.num_documents, data.num_features)

    def leave_kind_open(self, asked: Mapping[str, Any]) -> bool:
        """Whether either kind of metrics may rank better on data of this size, and short fits of both can tell."""
        least, most = _OPEN_DOCUMENTS
        if asked.get("bank", "auto") != "auto" or not least <= self.documents < most:
            return False
        if _bank_for(self, None)[0] == "trained" or any(name.partition(".")[0] in _NOT_OPEN for name in asked):
            return False
        if _find_budget(asked.get("budget", "normal"), self.documents, 6 * self.features) is BUDGETS["fast"]:
            return False
        try:
            choose_defaults(self, {**asked, "bank": "trained"})
        except ConfigError:
            return False
        return True

    def __str__(self) -> str:
        return f"{self.queries:,} training queries with {self.documents:,} documents of {self.features} features"


@dataclass(frozen=True)
class _Setting:
    """A setting that not every fit makes use of."""

    key: str  # its name in the configuration
    banks: tuple[str, ...] = BANKS  # the kinds of metrics it has an effect on
    losses: tuple[str, ...] = ()  # the losses it has an effect on; empty for all
    named: bool = False  # whether the kind of metrics must be named beside it


SETTINGS = {
    "bank_options": _Setting("local_metrics.*", named=True),
    "num_metrics": _Setting("local_metrics.num_metrics", ("sampled", "trained"), named=True),
    "rounds": _Setting("local_metrics.rounds", ("boosted",)),
    "budget": _Setting("budget", ("boosted", "trained")),
    "margin": _Setting("loss.margin", losses=("warp",)),
    "max_draws": _Setting("loader.max_draws", losses=("warp",)),
    "batch_size": _Setting("loader.batch_size"),
    "negatives": _Setting("loader.negatives", losses=("warp",)),
    "batching": _Setting("loader.batching", losses=("warp",)),
    "feature_dropout": _Setting("dropout.features", ("trained",)),
    "metric_dropout": _Setting("dropout.metrics", ("trained",)),
    "distances": _Setting("distances", ("boosted", "sampled")),
    "epochs": _Setting("trainer.max_epochs"),
    "validate_every": _Setting("trainer.check_val_every_n_epoch"),
    "features": _Setting("features", CHOOSING_BANKS),
}
_USUAL_LOSSES = {"boosted": "warp", "trained": "softmax", "sampled": "warp"}


@dataclass(frozen=True)
class Defaults:
    """What is fitted, and why; values for the settings that the user did not give."""

    bank: str  # ``"boosted"`` or ``"sampled"``, then sampled WARP; or ``"trained"``
    reason: str  # a sentence for the log and the report
    rounds: int = BUDGETS["normal"].rounds  # the most rounds of boosting
    num_metrics: int = 128  # K of trained metrics
    rank: int = 8  # R of trained metrics
    ramps: int = 6  # of a feature, at most
    max_columns: int = _MAX_COLUMNS  # of the preprocessed features, within which a feature gets ramps
    epochs: int = _WARP_EPOCHS  # of training
    validate_every: int = 1  # epochs from one validation to the next; the last epoch is validated in any case
    dropout: Dropout = field(default_factory=Dropout)  # of trained metrics
    batch_size: int = 32  # lists in a batch

    @property
    def trainer(self) -> dict[str, Any]:
        """Settings of `pytorch_lightning.Trainer`."""
        settings: dict[str, Any] = {"max_epochs": self.epochs, "check_val_every_n_epoch": self.validate_every}
        if self.bank == "trained":
            settings["gradient_clip_val"] = _GRADIENT_CLIP
        return settings


def choose_defaults(
    sizes: Sizes, asked: Mapping[str, Any] | None = None, *, start: str | None = None, why: str = "asked for"
) -> Defaults:
    """Decide what is fitted; a setting that has no effect on it is refused.

    ``asked`` has the settings the user gave, by their names in `LGMMLRanker` and `SETTINGS`, and ``why`` says where the
    kind of metrics is from that it may name. ``start`` is the kind of metrics of an earlier model to go on from.

    >>> choose_defaults(Sizes(470, 9_630, 46)).bank, choose_defaults(Sizes(7_274, 722_339, 110)).bank
    ('boosted', 'trained')
    """
    asked = asked or {}
    bank = asked.get("bank", "auto")
    if bank == "auto":
        for name, setting in SETTINGS.items():
            if start is None and setting.named and name in asked:
                raise ConfigError(_bank_needed(name))
        bank, why = _bank_for(sizes, start)
    loss = build_loss(asked.get("loss", _USUAL_LOSSES[bank]))
    check_loss(bank, loss, why)
    check_effect(asked, bank, loss.name, why)
    return _sized(sizes, bank, asked, why)


def check_loss(bank: str, loss: Loss, why: str = "asked for") -> None:
    """Refuse a function as the loss of boosted metrics, which are chosen by LambdaRank's gradients and curvature."""
    if bank == "boosted" and isinstance(loss, ListLoss):
        raise ConfigError(
            f"`loss` must not be a function for boosted metrics ({why}), which need its curvature, too, got "
            f"{loss.name!r}; name other metrics: {_choices(('trained', 'sampled'))}"
        )


def _bank_for(sizes: Sizes, start: str | None) -> tuple[str, str]:
    """The kind of metrics, and why."""
    if start is not None:
        return start, "as the model to go on from"
    few = sizes.documents < _TRAINED_DOCUMENTS or sizes.queries < _TRAINED_QUERIES
    return "boosted" if few else "trained", f"chosen for {sizes.documents:,} documents and {sizes.queries:,} queries"


def _sized(sizes: Sizes, bank: str, asked: Mapping[str, Any], why: str) -> Defaults:
    """Width and length of a fit of this kind of metrics; the reason names those that the user did not set."""
    budget = asked.get("budget", "normal")
    room = max(1, min(_MAX_COLUMNS, _MAX_COLUMN_BYTES // (4 * max(1, sizes.documents))))
    _, dropout, batch_size, ramps = next(row for row in _BY_DOCUMENTS if sizes.documents < row[0])
    given = max(0, min(ramps, room // max(1, sizes.features) - 3))
    work = _find_budget(budget, sizes.documents, (3 + given) * sizes.features)
    if bank == "sampled":
        return Defaults(bank, f"{sizes}: {bank} metrics ({why}), then WARP")
    beginning = f"{sizes}, budget {budget}: {bank} metrics ({why})"
    if bank == "boosted":
        rounds = _unasked(asked, {"rounds": f"at most {work.rounds} rounds"})
        return Defaults(bank, f"{beginning}{rounds}, then WARP", work.rounds)
    rank = 8 if work.directions <= 1024 else 16
    count, epochs = work.directions // rank, work.epochs_for(sizes.documents)
    every = 1
    if "epochs" not in asked:
        every = max(1, epochs // _VALIDATIONS)
    values = {
        "num_metrics": f"{count} of rank {rank}",
        "epochs": f"at most {epochs} epochs",
        "preprocess": f"{ramps} ramps of a feature within {room:,} columns",
        "feature_dropout": f"dropout {dropout.features:g} of features",
        "metric_dropout": f"dropout {dropout.metrics:g} of metrics",
        "batch_size": f"batches of {batch_size} lists",
    }
    if every > 1:
        values["validate_every"] = f"one validation per {every} epochs"
    reason = beginning + _unasked(asked, values)
    return Defaults(bank, reason, work.rounds, count, rank, ramps, room, epochs, every, dropout, batch_size)


def _unasked(asked: Mapping[str, Any], values: Mapping[str, str]) -> str:
    """The values of settings that were not asked for."""
    return "".join(f", {text}" for name, text in values.items() if name not in asked)


def check_effect(asked: Collection[str], bank: str, loss: str, why: str = "asked for") -> None:
    """Refuse settings that have no effect on what is fitted."""
    for name, setting in SETTINGS.items():
        if name not in asked:
            continue
        if bank not in setting.banks:
            raise ConfigError(
                f"{_spelt(name)} has no effect on {bank} metrics ({why}); leave it out, or name other metrics: "
                f"{_choices(setting.banks)}"
            )
        if setting.losses and loss not in setting.losses:
            raise ConfigError(
                f"{_spelt(name)} has no effect with the loss {loss} of {bank} metrics ({why}); leave it out, or name "
                f"another loss: {', or '.join(setting.losses)}"
            )


def _bank_needed(name: str) -> str:
    """The sentence that refuses a setting of one kind of metrics where none is named."""
    return f"{_spelt(name)} belongs to one kind of metrics, so name it: {_choices(SETTINGS[name].banks)}"


def why_unknown(key: str, bank: str | None) -> str | None:
    """Why the configuration has no such key: it belongs to other metrics than those of ``bank``; None: to none."""
    if bank is not None and bank not in BANKS:
        return None
    for name, setting in SETTINGS.items():
        if setting.key != key:
            continue
        if bank is None:
            return _bank_needed(name)
        try:
            check_effect([name], bank, _USUAL_LOSSES[bank])
        except ConfigError as error:
            return str(error)
    if bank is None and key.startswith("local_metrics."):
        return _bank_needed("bank_options")
    return None


def _spelt(name: str) -> str:
    key = SETTINGS[name].key
    if name == key:
        return f"`{name}`"
    return f"`{name}` ({key})"


def _choices(banks: Collection[str]) -> str:
    return ", or ".join(f"bank={bank!r} (local_metrics={bank})" for bank in banks)


def make_recipe(params: Mapping[str, Any], chosen: Defaults, seed: int) -> Recipe:
    """The recipe that parameters of `LGMMLRanker` ask for; what is None or missing among them is as chosen."""
    preprocess: Callable[[], Preprocess] = list_rank_features
    if chosen.bank == "trained":
        preprocess = partial(all_views, ramps=chosen.ramps, max_columns=chosen.max_columns)
    if params.get("preprocess") is not None:
        preprocess = partial(_new_preprocess, params["preprocess"])
    mode = params.get("phi", "shared")
    sparse = mode == "per_query" and chosen.bank != "trained"  # AdamW takes no sparse gradients
    loss = build_loss(params.get("loss") or _USUAL_LOSSES[chosen.bank])
    loader = {"batch_size": params.get("batch_size") or chosen.batch_size}
    if loss.draws:
        loss = Warp(**_named(params, "margin"))
        loader |= _named(params, "max_draws")
    rate = params.get("learning_rate")
    phi = PhiSettings(loss, loader, partial(torch.optim.SGD, lr=rate or _WARP_RATE))
    if chosen.bank == "trained":
        adam = partial(torch.optim.AdamW, lr=rate or _TRAINED_RATE, weight_decay=_WEIGHT_DECAY)
        phi = PhiSettings(loss, loader, adam, OneCycle(), chosen.dropout)
    return Recipe(
        preprocess=preprocess,
        fit_bank=_builder(params, chosen),
        make_phi=partial(Phi, policy=params.get("policy"), sparse=sparse, **PHIS[mode]),
        phi=phi,
        seed=seed,
        categories=CategorySettings(**_named(params, "max_one_hot")),
        **_named(params, "measure", "features"),
    )


def _named(params: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Those of the parameters that are there."""
    return {name: params[name] for name in names if name in params}


def _builder(params: Mapping[str, Any], chosen: Defaults) -> BankBuilder:
    """The builder of the metrics, with the settings that were asked for or chosen."""
    options = _named(params, "kernel") | (params.get("bank_options") or {})
    count = params.get("num_metrics")
    if chosen.bank == "trained":
        return TrainedBuilder.of(**{"num_metrics": count or chosen.num_metrics, "rank": chosen.rank, **options})
    if chosen.bank == "boosted":
        rounds = params.get("rounds")
        if rounds is None:
            rounds = chosen.rounds
        return BoostedBuilder.of(rounds=rounds, **options)
    if count is not None:
        options = {"num_metrics": count, **options}
    return SampledBuilder.of(**options)


def _new_preprocess(given: Preprocess | Mapping[str, Any]) -> Preprocess:
    """An unfitted copy: fitting must not change what was passed in."""
    if isinstance(given, Preprocess):
        given = given.spec()
    return build_preprocess(given)
