"""Φ ≥ 0 after training and in every file, whatever the optimizer remembers and however gradients are gathered."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.training.module import OptimizerFactory, make_optimizer
from lgmml_torch.training.recipe import TrainerSettings
from lgmml_torch.training.stages import Prepared, train_phi
from tests.training import tiny
from tests.training.test_resume import run

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")

# Steps so large, and a start so small, that many weights would pass 0.
RATE, INIT = 0.5, 0.01
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "SGD": partial(torch.optim.SGD, lr=RATE),
    "momentum": partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    "weight_decay": partial(torch.optim.SGD, lr=RATE, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=RATE),
    "AdamW": partial(torch.optim.AdamW, lr=RATE),
    "Adagrad": partial(torch.optim.Adagrad, lr=RATE),
    "SparseAdam": partial(torch.optim.SparseAdam, lr=RATE),
}
SPARSE = ("SGD", "momentum", "Adagrad", "SparseAdam")
MODES: dict[str, dict[str, Any]] = {
    "per_query": {"mode": "per_query"},
    "shared": {"mode": "shared"},
    "deviations": {"mode": "shared", "deviations": True},
}


@pytest.fixture(scope="module")
def found() -> Prepared:
    made = tiny.prepared()
    made.add_inputs(made.model(Phi))
    return made


def weights(phi: Phi) -> Tensor:
    """All weights a query may have: the rows of the table, and for deviations each training query's own."""
    base = phi.table.weight.detach()
    return base if phi.deviation is None else torch.cat([base, base + phi.deviation.weight.detach()])


@pytest.mark.parametrize(
    ("mode", "accumulate", "sparse", "optimizer"),
    [
        ("per_query", 1, True, "SGD"),
        ("per_query", 3, True, "momentum"),
        ("per_query", 1, True, "SparseAdam"),
        ("shared", 2, False, "AdamW"),
        ("deviations", 1, False, "weight_decay"),
        ("deviations", 2, True, "Adagrad"),
    ],
)
def test_one_process(
    found: Prepared,
    mode: str,
    accumulate: int,
    sparse: bool,
    optimizer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lowest, project = [], Phi.project_

    def watched(phi: Phi, rows: Tensor | None = None) -> None:
        lowest.append(float(weights(phi).min()))
        project(phi, rows)

    monkeypatch.setattr(Phi, "project_", watched)
    trained = tiny.train(
        tmp_path,
        found=found,
        epochs=1,
        every_n_steps=1000,
        loader={"batch_size": 2},
        keep="last",
        init=INIT,
        sparse=sparse,
        optimizer=OPTIMIZERS[optimizer],
        trainer={"accumulate_grad_batches": accumulate},
        **MODES[mode],
    )
    last = weights(trained.model.phi)
    assert min(lowest) < 0, "no step went below 0: the test says nothing"
    assert torch.equal(weights(LGMML.load(tmp_path / "last.ckpt").phi), last)
    for phi in (trained.model.phi, *(LGMML.load(tmp_path / f"{name}.ckpt").phi for name in ("best", "last"))):
        assert (weights(phi) >= 0).all()
        phi.check()


TWO: list[tuple[str, ...]] = [
    ("--optimizer", "SGD", "--momentum", "0.9", "--accumulate", "2"),
    ("--optimizer", "Adam", "--mode", "shared", "--deviations", "--accumulate", "2"),
]


@pytest.mark.parametrize("options", TWO, ids=lambda options: "-".join(options).replace("--", ""))
def test_two_processes(options: tuple[str, ...], tmp_path: Path) -> None:
    done = run(
        tmp_path, tmp_path / "result.pt", "--devices", 2, "--epochs", 1, "--rate", RATE, "--init", INIT, *options
    )
    assert done.code == 0, done.said
    for name in ("best", "last"):
        assert (weights(LGMML.load(tmp_path / f"{name}.ckpt").phi) >= 0).all()
    assert (weights(LGMML.load(tmp_path / "last.ckpt").phi) == 0).any()


@pytest.mark.parametrize(("bad", "deviations"), [(-0.25, True), (float("nan"), False), (float("inf"), False)])
def test_what_is_written_is_checked(found: Prepared, bad: float, deviations: bool, tmp_path: Path) -> None:
    model = found.model(partial(Phi, mode="shared", deviations=deviations))
    with torch.no_grad():
        if model.phi.deviation is None:
            model.phi.table.weight[0, 1] = bad
        else:
            model.phi.deviation.weight[2, 1] = bad - model.phi.table.weight[0, 1]
    with pytest.raises(LGMMLError, match=f"weights Φ must be finite and at least 0, got {bad}"):
        model.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "sparse", "message"),
    [
        ("Adam", True, "Adam takes no sparse gradients: set phi.sparse=false"),
        ("SparseAdam", False, "SparseAdam takes sparse gradients only: set phi.sparse=true"),
        ("weight_decay", True, r"`weight_decay` must be 0 with sparse gradients, got 0\.1"),
    ],
)
def test_optimizers_that_do_not_suit_are_refused(name: str, sparse: bool, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        make_optimizer(OPTIMIZERS[name], list(Phi(1, 1).parameters()), sparse=sparse)


def test_scales_of_trained_metrics_stay_positive(tmp_path: Path) -> None:
    recipe = tiny.trained_recipe()
    recipe = replace(recipe, phi=replace(recipe.phi, optimizer=OPTIMIZERS["AdamW"], step_size=None, keep="last"))
    found = tiny.prepared(mode="trained")
    trained = train_phi(found, recipe, TrainerSettings(tmp_path, {"max_epochs": 2, "accelerator": "cpu"}))
    scales = torch.cat([block.scales for block in trained.model.metrics.iter_blocks()])
    assert (scales > 0).all()
    assert (scales < 1e-3).any(), "no step went below 0: the test says nothing"
