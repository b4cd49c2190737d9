from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from lgmml_torch.checks import CheckpointError, DivergedError, LGMMLError
from lgmml_torch.functional.score import kernel
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION
from lgmml_torch.segments import segment_ids
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.losses import Warp
from lgmml_torch.training.module import LGMMLModule, make_optimizer
from lgmml_torch.training.recipe import TrainerSettings
from lgmml_torch.training.resume import KeepCheckpoints
from tests.reference.warp import warp_phi_gradient
from tests.training import tiny

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def make_module(mode: str, dtype: torch.dtype = torch.float32, **options) -> LGMMLModule:
    found = tiny.prepared(dtype)
    model = found.model(lambda queries, metrics: Phi(queries, metrics, mode=mode, **options))
    with torch.no_grad():
        model.phi.table.weight.uniform_(0.2, 2, generator=torch.Generator().manual_seed(2))
    found.add_inputs(model)
    module = LGMMLModule(model.spec(), model, loss=Warp(margin=0.3))
    for name, data in found.splits.items():
        module.attach(name, data, found.inputs[name])
    module.on_fit_start()
    return module


def owners(batch) -> torch.Tensor:
    return segment_ids(batch.list_offsets)


def hand_gradient(module: LGMMLModule, batch, shared: bool) -> torch.Tensor:
    data, dists = module._data["train"]
    kappa = kernel(dists[batch.rows], "paper")
    scores = -(kappa * module.model.phi(batch.lists).detach().expand(len(batch.lists), -1)[owners(batch)]).sum(1)
    outcome = module.loss.outcome(batch, scores)
    worst = batch.negatives.gather(1, outcome.violator.clamp_min(0)[:, None])[:, 0]
    queries = torch.zeros_like(batch.queries) if shared else batch.queries
    count = 1 if shared else data.num_queries
    return warp_phi_gradient(outcome, queries, kappa[batch.positives], kappa[worst], num_queries=count)


@pytest.mark.parametrize(
    ("mode", "batching", "sparse"),
    [("per_query", "lists", True), ("per_query", "triplets", False), ("shared", "lists", False)],
)
def test_gradient_equals_the_hand_formula(mode: str, batching: str, sparse: bool) -> None:
    module = make_module(mode, torch.float64, sparse=sparse)
    data, _ = module._data["train"]
    # More triplets than queries: some query occurs twice, and must get both terms.
    batch = TrainingBatches(data, batching=batching, batch_size=40, max_draws=5)[0, 0]
    found = module.batch_loss(batch)
    assert found.facts["violator_rate"] > 0
    found.total.backward()
    gradient = module.model.phi.table.weight.grad
    gradient = gradient.to_dense() if sparse else gradient
    assert torch.allclose(gradient, hand_gradient(module, batch, mode == "shared"), atol=1e-12)
    assert found.terms == len(batch.positives)


def test_no_operation_of_a_step_assumes_a_device() -> None:
    module = make_module("per_query")
    data, _ = module._data["train"]
    for batching in ("lists", "triplets"):
        batch = TrainingBatches(data, batching=batching, batch_size=8)[0, 0]
        expected = module.batch_loss(batch).total.detach()
        with torch.device("meta"):
            assert torch.equal(module.batch_loss(batch).total.detach(), expected)


@pytest.mark.parametrize(("mode", "batching"), [("per_query", "triplets"), ("shared", "lists"), ("amortized", "lists")])
def test_training_lowers_the_loss(mode: str, batching: str, tmp_path: Path) -> None:
    loader = {"batch_size": 3 if batching == "lists" else 24}
    trained = tiny.train(tmp_path, mode=mode, batching=batching, epochs=4, keep="last", loader=loader)
    module, keeper = trained.module, trained.keeper
    data, dists = module._data["train"]
    model = tiny.prepared().model(lambda queries, metrics: Phi(queries, metrics, mode=mode))
    start = LGMMLModule(model.spec(), model)
    start.attach("train", data, dists)
    start.on_fit_start()
    fresh_draws = TrainingBatches(data, batch_size=data.num_queries, seed=99)[0, 0]
    assert module.batch_loss(fresh_draws).total.detach() < start.batch_loss(fresh_draws).total.detach()
    assert (module.model.phi.table.weight >= 0).all()
    assert sorted(keeper.curve) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_seed_same_result_for_any_number_of_workers(dtype: torch.dtype, tmp_path: Path) -> None:
    found = [
        tiny.train(tmp_path / str(i), workers=workers, dtype=dtype).model.phi.table.weight.detach()
        for i, workers in enumerate((0, 0, 1, 2))
    ]
    assert found[0].dtype == dtype
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_best_epoch_includes_the_start(tmp_path: Path) -> None:
    """With steps far too large, nothing beats the weights training started from."""
    trained = tiny.train(tmp_path, mode="shared", epochs=2)
    module, keeper = trained.module, trained.keeper
    assert keeper.best == max(keeper.curve.values())
    kept = LGMML.load(tmp_path / "best.ckpt")
    assert torch.equal(kept.phi.table.weight, module.model.phi.table.weight)


def test_checkpoints_hold_tensors_and_primitives_only(tmp_path: Path) -> None:
    module = tiny.train(tmp_path, epochs=1).module
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert content[FORMAT]["version"] == VERSION
    data = tiny.splits()[2]
    for kept in ("best.ckpt", "last.ckpt"):
        assert torch.isfinite(LGMML.load(tmp_path / kept).score(data)).all()
    again = LGMMLModule.load_from_checkpoint(tmp_path / "best.ckpt", weights_only=True)
    assert torch.equal(again.model.score(data), module.model.score(data))


def test_foreign_and_cut_checkpoints_are_named(tmp_path: Path) -> None:
    tiny.train(tmp_path, epochs=1)
    file = tmp_path / "last.ckpt"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        LGMML.load(file)
    torch.save({"state_dict": {}}, file)
    with pytest.raises(CheckpointError, match="was not written by this package"):
        LGMML.load(file)


class Poison(tiny.pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.global_step == 5:
            with torch.no_grad():
                module._data["train"][1].fill_(float("nan"))


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(LGMMLError, match=r"must be finite|the loss is nan at step 5"):
        tiny.train(tmp_path, callbacks=(Poison(),))
    assert torch.isfinite(LGMML.load(tmp_path / "last.ckpt").phi.table.weight).all()


def test_missing_distances_are_named() -> None:
    module = make_module("shared")
    module._data.pop("valid")
    with pytest.raises(LGMMLError, match="the module has no 'valid' lists"):
        module.block_scores("valid", 0, 1)
    assert issubclass(DivergedError, LGMMLError)


def test_files_of_checkpoints_can_be_removed(tmp_path: Path) -> None:
    keeper = KeepCheckpoints(tmp_path, monitor="val/ndcg@10", every_n_steps=9, seed=0)
    trainer = TrainerSettings(tmp_path, {"accelerator": "cpu"}).make_trainer(keeper, validated=True)
    files, path = trainer.strategy.checkpoint_io, tmp_path / "a.ckpt"
    files.save_checkpoint({"epoch": 3}, path)
    assert path.is_file()
    for _ in range(2):  # also one that is gone
        files.remove_checkpoint(path)
        assert not path.exists()


def test_weight_decay_of_any_group_needs_dense_gradients() -> None:
    def factory(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        other = {"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": 0.5}
        return torch.optim.SGD([{"params": list(parameters)}, other], lr=0.1)

    weights = [torch.nn.Parameter(torch.zeros(2))]
    make_optimizer(factory, weights, sparse=False)
    with pytest.raises(LGMMLError, match=r"`weight_decay` must be 0 with sparse gradients, got 0\.5"):
        make_optimizer(factory, weights, sparse=True)
