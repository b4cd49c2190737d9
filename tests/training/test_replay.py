"""Whole Lightning runs against the naive replay of `tests.reference.replay`, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.models.phi import Phi
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.callbacks import Logistic
from lgmml_torch.training.losses import Warp
from lgmml_torch.training.recipe import TrainerSettings
from lgmml_torch.training.stages import Prepared, train_phi
from tests.reference.replay import SGD, Adam, Replay, check_lists
from tests.training import tiny

MARGIN, EPOCHS, SEED = 0.3, 3, 5
RUNS: dict[str, dict[str, Any]] = {
    "per query, lists": {"phi": {"mode": "per_query", "policy": "mean", "sparse": True}, "rate": 0.4},
    "per query, the paper's triplets and steps": {
        "phi": {"mode": "per_query", "policy": "mean", "sparse": True},
        "loader": {"batching": "triplets", "batch_size": 11, "max_draws": None},
        "paper": True,
        "rate": 0.5,
    },
    "shared": {"phi": {"mode": "shared"}, "rate": 0.02},
    "shared, Adam": {"phi": {"mode": "shared"}, "rate": 0.1, "adam": True},
    "deviations": {"phi": {"mode": "shared", "deviations": True}, "rate": 0.05, "penalty": 0.7},
}


@pytest.fixture(scope="module")
def found() -> Prepared:
    return tiny.prepared(torch.float64)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_its_replay(name: str, found: Prepared, tmp_path: Path) -> None:
    run = {"loader": {}, "paper": False, "adam": False, "penalty": 0.0, **RUNS[name]}
    loader = {"batch_size": 4, "max_draws": 5, **run["loader"]}
    train, valid = found.splits["train"], found.splits["valid"]
    factory = partial(torch.optim.Adam if run["adam"] else torch.optim.SGD, lr=run["rate"])
    recipe = tiny.recipe(
        loader=loader,
        optimizer=factory,
        loss=Warp(MARGIN),
        step_size=Logistic() if run["paper"] else None,
        deviation_penalty=run["penalty"],
    )
    recipe = replace(recipe, make_phi=partial(Phi, **run["phi"]), seed=SEED)
    trained = train_phi(found, recipe, TrainerSettings(tmp_path, {"max_epochs": EPOCHS, "accelerator": "cpu"}))

    batches = TrainingBatches(train, seed=SEED, **loader)
    epochs = [[batches[epoch, i] for i in range(batches.batches_per_epoch)] for epoch in range(EPOCHS)]
    optimizer: Adam | SGD = SGD(run["rate"])
    if run["paper"]:
        optimizer = SGD(run["rate"], train.num_queries, loader["batch_size"])
    else:
        for epoch in epochs:
            check_lists(train, epoch)
    if run["adam"]:
        optimizer = Adam(run["rate"])
    sides = (train, kappa(trained.model, train), valid, kappa(trained.model, valid))
    expected = Replay(*sides, start(run, train), optimizer, MARGIN, run["penalty"])
    expected.run(epochs)

    keeper, phi = trained.keeper, trained.model.phi
    assert [keeper.curve[epoch] for epoch in range(EPOCHS + 1)] == pytest.approx(expected.curve, abs=1e-6)
    assert keeper.best_epoch == expected.best_epoch
    last = LGMML.load(keeper.last_file).phi
    for key, values in expected.values.items():
        np.testing.assert_allclose(getattr(last, key).weight.detach(), values, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(getattr(phi, key).weight.detach(), expected.kept[key], rtol=1e-9, atol=1e-12)
        assert np.abs(values - start(run, train)[key]).max() > 1e-3
    logged = float(trained.trainer.callback_metrics["train/loss_epoch"])
    assert logged == pytest.approx(expected.losses[-1], rel=1e-5)


def kappa(model: LGMML, data: Any) -> Any:
    dists = model.distances(data.features, data.offsets).detach().numpy()
    return dists * np.exp(-dists)


def start(run: dict[str, Any], train: Any) -> dict[str, Any]:
    rows = train.num_queries if run["phi"]["mode"] == "per_query" else 1
    values = {"table": np.ones((rows, 6))}
    if run["phi"].get("deviations"):
        values["deviation"] = np.zeros((train.num_queries, 6))
    return values
