"""From the parameters of `LGMMLRanker` to a fitted model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lgmml_torch.checks import LGMMLError, check_choice, check_positive, check_unit_interval
from lgmml_torch.fitting.bank import Bank
from lgmml_torch.fitting.boosted import fit_boosted
from lgmml_torch.fitting.sampled import fit_sampled
from lgmml_torch.functional.score import KERNELS
from lgmml_torch.models.phi import POLICIES, Phi
from lgmml_torch.models.preprocess import Preprocess, build_preprocess, list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData

BANKS = ("boosted", "sampled")


@dataclass(frozen=True)
class Fitted:
    """A model and how it came about."""

    model: LGMML
    bank_history: dict[str, Any]
    curve: dict[int, float]
    best_epoch: int


def fit_model(train: RankingData, valid: RankingData | None, params: Mapping[str, Any], seed: int) -> Fitted:
    """Metrics in closed form, then Φ by sampled WARP; nothing stays on disk."""
    from lgmml_torch.training.fit import prepare, train_phi  # Lightning takes its time to import
    from lgmml_torch.training.store import compute_distances

    prepared = prepare(
        train,
        valid,
        preprocess=new_preprocess(params["preprocess"]),
        fit_bank=bank_fitter(params),
        kernel=params["kernel"],
        seed=seed,
    )
    make_phi = partial(Phi, mode=params["phi"], policy=params["policy"])
    if params["epochs"] == 0:
        model = prepared.model(make_phi).eval()
        if model.phi.needs_summaries:
            model.summarize(compute_distances(model, train), train.offsets)
        return Fitted(model, prepared.bank.history, {}, 0)
    trainer: dict[str, Any] = {"max_epochs": params["epochs"], "accelerator": "cpu"}
    if valid is None:
        trainer["limit_val_batches"] = 0  # Lightning would warn about empty loaders
    with tempfile.TemporaryDirectory() as folder:
        module, keeper, _ = train_phi(
            prepared,
            make_phi=make_phi,
            folder=folder,
            loader={"batch_size": params["batch_size"], "max_draws": params["max_draws"]},
            margin=params["margin"],
            optimizer=partial(torch.optim.SGD, lr=params["learning_rate"]),
            trainer={**trainer, "default_root_dir": folder},
            seed=seed,
        )
    return Fitted(module.model.eval(), prepared.bank.history, dict(keeper.curve), keeper.best_epoch)


def bank_fitter(params: Mapping[str, Any]) -> Callable[..., Bank]:
    """The way to build the metrics, with its settings."""
    options = dict(params["bank_options"] or {})
    if params["bank"] == "sampled":
        return partial(fit_sampled, num_metrics=params["num_metrics"], kernel=params["kernel"], **options)
    return partial(fit_boosted, rounds=params["rounds"], **options)


def new_preprocess(given: Preprocess | Mapping[str, Any] | None) -> Preprocess:
    """An unfitted copy: fitting must not change what was passed in."""
    if given is None:
        return list_rank_features()
    return build_preprocess(given.spec() if isinstance(given, Preprocess) else given)


def check_parameters(params: Mapping[str, Any]) -> None:
    """Refuse what is unknown or out of range before any work is done."""
    bank, kernel, phi = params["bank"], params["kernel"], params["phi"]
    check_choice("bank", bank, BANKS)
    check_choice("kernel", kernel, KERNELS)
    check_choice("phi", phi, POLICIES)
    check_choice("precision", params["precision"], ("float32", "float64"))
    if params["policy"] is not None:
        check_choice("policy", params["policy"], POLICIES[phi])
    if bank == "boosted" and kernel != "paper":
        raise LGMMLError(f"`kernel` must be 'paper' for a boosted bank, which is fitted with it, got {kernel!r}")
    for name in ("rounds", "num_metrics", "learning_rate", "margin", "batch_size"):
        check_positive(name, params[name])
    check_positive("epochs", params["epochs"], zero=True)
    check_unit_interval("validation_fraction", params["validation_fraction"])
    if params["validation_fraction"] == 1:
        raise LGMMLError("`validation_fraction` must leave queries to train on, got 1")
    if params["n_jobs"] not in (None, -1):
        check_positive("n_jobs", params["n_jobs"])
