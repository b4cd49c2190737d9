"""What training decides in passing: which epoch is kept, how large a step is, what batches and cache keys hold."""

from __future__ import annotations

import math
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.functional.losses import lambda_gradients
from lgmml_torch.functional.score import kernel
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.batches import BatchLoader, TrainingBatch, TrainingBatches
from lgmml_torch.training.callbacks import KeepCheckpoints, bank_curve
from lgmml_torch.training.datamodule import RankingDataModule
from lgmml_torch.training.distances import compute_distances, distance_key
from lgmml_torch.training.losses import LambdaRank, Loss, Softmax, Warp
from lgmml_torch.training.module import Dropout, LGMMLModule, _dropped
from lgmml_torch.training.stages import Prepared, add_inputs, make_module
from lgmml_torch.training.step_size import Horizon, Logistic, OneCycle
from tests.training import tiny


@pytest.fixture(scope="module")
def found() -> Prepared:
    made = tiny.prepared()
    add_inputs(made, made.model(Phi))
    return made


def alone(found: Prepared, mode: str = "shared", world_size: int = 1, **settings: Any) -> LGMMLModule:
    """A module that thinks it is being trained."""
    module = make_module(found, tiny.recipe(mode, **settings))
    module.log = lambda *args, **options: None  # type: ignore[method-assign]
    module._trainer = SimpleNamespace(world_size=world_size, global_step=0, global_rank=0)  # type: ignore[assignment]
    return module


class Saves:
    """A trainer that only notes what it is told to save."""

    def __init__(self, **state: Any) -> None:
        self.saved: list[str] = []
        self.loggers: list[Any] = []
        self.__dict__.update(state)

    def save_checkpoint(self, file: Any, weights_only: bool) -> None:
        assert not weights_only  # to go on from it, the optimizer's memory is needed, too
        self.saved.append(file.name)


class TestKeeping:
    def judged(self, *values: float) -> tuple[KeepCheckpoints, list[str]]:
        keeper, trainer = KeepCheckpoints("somewhere"), Saves()
        for epoch, value in enumerate(values):
            keeper._judge(trainer, epoch, value)  # type: ignore[arg-type]
        assert list(keeper.curve) == list(range(len(values)))
        return keeper, trainer.saved

    def test_the_first_of_equal_epochs_is_kept(self) -> None:
        keeper, saved = self.judged(0.4, 0.5, 0.5, 0.3, 0.5)
        assert (keeper.best, keeper.best_epoch, len(saved)) == (0.5, 1, 2)

    def test_a_better_epoch_takes_its_place(self) -> None:
        keeper, saved = self.judged(0.4, 0.3, 0.6, math.nan, 0.5)
        assert (keeper.best, keeper.best_epoch, saved) == (0.6, 2, ["best.ckpt"] * 2)

    def test_where_nothing_can_be_judged_the_last_stands(self) -> None:
        keeper, saved = self.judged(math.nan, math.nan)
        assert (keeper.best, keeper.best_epoch, len(saved)) == (-math.inf, 1, 2)
        keeper, _ = self.judged(math.nan, 0.1, math.nan)
        assert (keeper.best, keeper.best_epoch) == (0.1, 1)

    def test_a_place_to_go_on_from_every_so_many_steps(self) -> None:
        keeper, trainer = KeepCheckpoints("somewhere", every_n_steps=3), Saves()
        for trainer.global_step in range(1, 8):
            keeper.on_train_batch_end(trainer)  # type: ignore[arg-type]
        assert trainer.saved == ["last.ckpt"] * 2

    def test_without_validation_the_last_epoch_is_the_best(self) -> None:
        keeper = KeepCheckpoints("somewhere")
        for validated, files in (([], ["best.ckpt", "last.ckpt"]), ([1], ["last.ckpt"])):
            trainer = Saves(val_dataloaders=validated, current_epoch=4)
            keeper.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
            assert trainer.saved == files
            assert keeper.best_epoch == 5

    def test_the_state_goes_on(self) -> None:
        keeper, _ = self.judged(0.4, 0.6)
        again = KeepCheckpoints("elsewhere")
        again.load_state_dict(keeper.state_dict())
        assert (again.best, again.best_epoch, again.curve) == (0.6, 1, {0: 0.4, 1: 0.6})
        again._judge(Saves(), 2, 0.6)  # type: ignore[arg-type]
        assert again.best_epoch == 1

    def test_only_the_epochs_of_a_fit_are_judged(self) -> None:
        keeper = KeepCheckpoints("somewhere")
        for fn, sanity, judged in (("fit", False, 1), ("validate", False, 0), ("fit", True, 0)):
            keeper.curve.clear()
            trainer = Saves(
                state=SimpleNamespace(fn=fn),
                sanity_checking=sanity,
                current_epoch=0,
                callback_metrics={"val/ndcg@10": 0.5},
            )
            keeper.on_validation_end(trainer, None)  # type: ignore[arg-type]
            assert keeper.curve == ({1: 0.5} if judged else {})

    def test_numbers_of_a_fit_reach_the_loggers(self) -> None:
        told: list[tuple[dict[str, float], int]] = []
        logger = SimpleNamespace(log_metrics=lambda numbers, step: told.append((numbers, step)))
        tell = bank_curve([logger])  # type: ignore[list-item]
        tell(3, SimpleNamespace(total=9, valid_ndcg=0.5, train_ndcg=None))
        tell(4, SimpleNamespace(total=9, valid_ndcg=None))
        assert told == [({"bank/valid_ndcg": 0.5}, 3)]


class TestStepSize:
    def test_logistic_falls_with_a_hundred_updates_per_query(self) -> None:
        rule, horizon = Logistic(), Horizon(queries=20, updates=7)
        assert rule(0, horizon) == 0.5
        assert rule(2000, horizon) == pytest.approx(1 / (1 + math.e))
        assert rule(6000, horizon) == pytest.approx(1 / (1 + math.e**3))
        assert 0 <= rule(10**12, horizon) < 1e-300

    def test_one_cycle_rises_and_falls_along_cosines(self) -> None:
        rule, horizon = OneCycle(warmup=0.2, start=0.1), Horizon(queries=3, updates=1000)
        assert rule(0, horizon) == pytest.approx(0.1)
        assert rule(100, horizon) == pytest.approx(0.55)
        assert rule(200, horizon) == pytest.approx(1.0)
        assert rule(400, horizon) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
        assert rule(600, horizon) == pytest.approx(0.5)
        assert rule(1000, horizon) == rule(5000, horizon) == pytest.approx(0.0)
        assert OneCycle(warmup=0.0)(0, horizon) == 1.0
        assert OneCycle(warmup=1.0, start=0.0)(1000, horizon) == 1.0
        assert OneCycle()(0, Horizon(1, 0)) == pytest.approx(0.04)

    @pytest.mark.parametrize(
        ("world_size", "max_steps", "steps"), [(1, -1, 3 * 7), (2, -1, 3 * 7), (1, 5, 5), (100, -1, 3 * 7)]
    )
    def test_it_is_counted_in_single_updates_whatever_the_number_of_processes(
        self, found: Prepared, world_size: int, max_steps: int, steps: int
    ) -> None:
        asked: list[tuple[int, Horizon]] = []

        def rule(updates: int, horizon: Horizon) -> float:
            asked.append((updates, horizon))
            return 0.5**updates

        batches = TrainingBatches(found.splits["train"], batch_size=3)
        assert batches.batches_per_epoch == 7
        module = alone(found, step_size=rule)
        module._trainer = SimpleNamespace(
            datamodule=SimpleNamespace(batches=batches), world_size=world_size, max_steps=max_steps, max_epochs=3
        )  # type: ignore[assignment]
        made = module.configure_optimizers()
        assert made["lr_scheduler"]["interval"] == "step"
        optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
        optimizer.step()
        scheduler.step()
        horizon = Horizon(found.splits["train"].num_queries, steps * 3)
        assert asked == [(0, horizon), (3, horizon)]
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**3)

    def test_without_a_rule_there_is_none(self, found: Prepared) -> None:
        assert isinstance(alone(found).configure_optimizers(), torch.optim.Optimizer)


class TestSteps:
    @pytest.mark.parametrize("loss", [Warp(), Softmax()], ids=lambda loss: loss.name)
    def test_deviations_are_penalised_tuple_by_tuple(self, found: Prepared, loss: Loss) -> None:
        batch = TrainingBatches(found.splits["train"], batch_size=3, draws=loss.draws)[0, 0]
        for world_size in (1, 2):
            module = alone(found, deviations=True, loss=loss, deviation_penalty=0.5, world_size=world_size)
            with torch.no_grad():
                module.model.phi.deviation.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
            rows = module.model.phi.deviation.weight.detach()[batch.queries if loss.draws else batch.lists]
            plain = module.batch_loss(batch).total.detach()
            expected = plain + 0.5 * 0.5 * rows.square().sum()
            # What processes find of a batch adds up, and Lightning averages.
            torch.testing.assert_close(module.training_step(batch, 0).detach(), expected * world_size)
            assert float(expected) > float(plain)

    def test_every_row_that_a_gradient_names_is_projected(self, found: Prepared) -> None:
        """Also those of other processes, which are not in this one's batch."""
        module = alone(found, "per_query")
        table = module.model.phi.table.weight
        with torch.no_grad():
            table.fill_(-1.0)
        index, values = torch.tensor([[4, 1, 4]]), torch.ones(3, table.shape[1])
        table.grad = torch.sparse_coo_tensor(index, values, table.shape, check_invariants=True)
        module.on_before_optimizer_step(torch.optim.SGD([table], lr=0.0))
        assert module._moved is not None
        assert module._moved.tolist() == [1, 4]
        module.on_before_optimizer_step(torch.optim.SGD([table], lr=0.0, momentum=0.9))  # moves any row
        assert module._moved is None

    def test_the_gradient_norm_is_that_of_all_parameters(self, found: Prepared) -> None:
        module, told = alone(found, deviations=True), {}
        module.log = lambda name, value, **options: told.update({name: float(value)})  # type: ignore[method-assign]
        phi = module.model.phi
        phi.table.weight.grad, phi.deviation.weight.grad = (
            torch.zeros_like(part.weight) for part in (phi.table, phi.deviation)
        )
        phi.table.weight.grad[0, 0], phi.deviation.weight.grad[2, 1] = 3.0, 4.0
        module.on_before_optimizer_step(torch.optim.SGD(phi.parameters(), lr=0.0))
        assert told == {"train/gradient_norm": 5.0}

    def test_what_is_dropped_is_dropped_at_its_share(self, found: Prepared) -> None:
        batch = TrainingBatches(found.splits["train"], batch_size=20)[0, 0]
        values = torch.full((len(batch.rows), 50), 3.0)
        g = torch.Generator().manual_seed(0)
        out = _dropped(values, 0.25, g, batch)
        assert set(out.unique().tolist()) == {0.0, 4.0}
        assert float((out == 0).double().mean()) == pytest.approx(0.25, abs=0.02)
        assert _dropped(values, 0.0, g, batch) is values

    def test_drops_differ_from_step_to_step_and_not_by_who_shares_the_batch(self) -> None:
        prepared = tiny.prepared(mode="trained")
        module = make_module(prepared, tiny.trained_recipe())
        module.dropout = Dropout(0.5, 0.0)
        batches = TrainingBatches(prepared.splits["train"], batch_size=5)
        batch = batches[0, 0]
        inputs = prepared.inputs["train"]
        assert isinstance(inputs, torch.Tensor)
        rows = inputs[batch.rows]
        drawn = []
        for step, index, rank in ((0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0)):
            module._trainer = SimpleNamespace(global_step=step, global_rank=rank)  # type: ignore[assignment]
            drawn.append(module._batch_kappa(rows, batch, index).detach())
        assert torch.equal(drawn[0], drawn[1])
        assert all(not torch.equal(drawn[0], other) for other in drawn[2:])
        module._trainer = SimpleNamespace(global_step=0, global_rank=0)  # type: ignore[assignment]
        for share in (batches.shared_by(rank, 2)[0, 0] for rank in range(2)):
            part = module._batch_kappa(inputs[share.rows], share, 0).detach()
            torch.testing.assert_close(part, drawn[0][share.places])
        module.dropout = Dropout()
        kappa = kernel(module.model.metrics(rows), "paper")
        torch.testing.assert_close(module._batch_kappa(rows, batch, 0).detach(), kappa, rtol=1e-4, atol=1e-5)


class TestLosses:
    @pytest.fixture
    def batch(self, found: Prepared) -> TrainingBatch:
        data = found.splits["train"]
        weights = torch.linspace(0.5, 2.0, data.num_queries)
        return TrainingBatches(data.replace(query_weights=weights), batch_size=4, draws=False)[0, 0]

    def slope(self, loss: Loss, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.randn(len(batch.rows), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        scores.requires_grad_()
        total = loss(batch, lambda places: scores if places is None else scores[places]).total
        (gradient,) = torch.autograd.grad(total, scores)
        return total.detach(), gradient, scores.detach()

    @pytest.mark.parametrize("temperature", [1.0, 0.25])
    def test_softmax_by_hand(self, batch: TrainingBatch, temperature: float) -> None:
        total, _, scores = self.slope(Softmax(temperature), batch)
        expected = 0.0
        for q in range(len(batch.lists)):
            rows = slice(int(batch.list_offsets[q]), int(batch.list_offsets[q + 1]))
            gains = torch.exp2(batch.labels[rows].double()) - 1
            logs = torch.log_softmax(scores[rows] / temperature, dim=0)
            expected -= float(batch.list_weights[q]) * float((gains / gains.sum()) @ logs)
        assert float(total) == pytest.approx(expected / len(batch.lists))

    @pytest.mark.parametrize("settings", [{}, {"sigma": 3.0}, {"truncation": 1}], ids=str)
    def test_lambdarank_has_the_gradients_it_is_named_for(self, batch: TrainingBatch, settings: dict[str, Any]) -> None:
        _, gradient, scores = self.slope(LambdaRank(**settings), batch)
        g, _ = lambda_gradients(scores, batch.labels.double(), batch.list_offsets, **settings)
        weights = batch.list_weights.repeat_interleave(batch.list_offsets.diff())
        torch.testing.assert_close(gradient, -g * weights / len(batch.lists))


class TestBatches:
    def test_every_epoch_has_draws_of_its_own(self, found: Prepared) -> None:
        data = found.splits["train"]
        lists = TrainingBatches(data, batch_size=4)
        assert not torch.equal(lists[0, 0].lists, lists[1, 0].lists)
        whole = TrainingBatches(data, batch_size=1000, max_draws=3)
        first, second = whole[0, 0], whole[1, 0]
        places = [
            {(q, p) for q, p in zip(b.queries.tolist(), b.rows[b.positives].tolist(), strict=True)}
            for b in (first, second)
        ]
        assert places[0] == places[1]  # the same positives, other negatives
        drawn = [
            dict(zip(b.rows[b.positives].tolist(), b.rows[b.negatives].tolist(), strict=True)) for b in (first, second)
        ]
        assert drawn[0] != drawn[1]
        triplets = TrainingBatches(data, batching="triplets", batch_size=30)
        assert not torch.equal(triplets[0, 0].rows, triplets[1, 0].rows)
        assert not torch.equal(triplets[0, 0].rows, triplets[0, 1].rows)

    def test_the_seed_draws_them(self, found: Prepared) -> None:
        first, again, other = (TrainingBatches(found.splits["train"], seed=seed)[0, 0] for seed in (1, 1, 2))
        assert torch.equal(first.rows, again.rows)
        assert not torch.equal(first.rows, other.rows)

    def test_epochs_have_as_many_batches_as_they_need(self, found: Prepared) -> None:
        data = found.splits["train"]
        items = len(TrainingBatches(data).table.queries)
        positives = len(TrainingBatches(data).table.positives)
        assert TrainingBatches(data, batch_size=items).batches_per_epoch == 1
        assert TrainingBatches(data, batch_size=items - 1).batches_per_epoch == 2
        triplets = TrainingBatches(data, batching="triplets", batch_size=10)
        assert triplets.batches_per_epoch == math.ceil(positives / 10)
        few = TrainingBatches(data, batching="triplets", batch_size=10, batches_per_epoch=2)
        assert few.batches_per_epoch == 2

    def test_a_loader_begins_every_epoch_at_its_first_batch(self, found: Prepared) -> None:
        batches = TrainingBatches(found.splits["train"], batch_size=5)
        loader = BatchLoader(batches)
        for epoch in range(2):
            assert loader.state_dict() == {"epoch": epoch, "position": 0}
            for index, batch in enumerate(loader):
                assert torch.equal(batch.rows, batches[epoch, index].rows)
        assert loader.state_dict() == {"epoch": 2, "position": 0}

    def test_another_epoch_begins_at_its_first_batch_and_the_same_goes_on(self, found: Prepared) -> None:
        loader = BatchLoader(TrainingBatches(found.splits["train"], batch_size=5))
        loader.load_state_dict({"epoch": 3, "position": 2})
        loader.sampler.set_epoch(3)
        assert loader.state_dict() == {"epoch": 3, "position": 2}
        assert len(loader.sampler) == len(loader) - 2
        loader.sampler.set_epoch(4)
        assert loader.state_dict() == {"epoch": 4, "position": 0}

    def test_evaluation_is_split_over_processes(self, found: Prepared) -> None:
        module = RankingDataModule(**found.splits)
        whole = [tuple(block.tolist()) for block in module.test_dataloader()]
        assert whole == [(0, found.splits["test"].num_queries)]
        shares = []
        for rank in range(3):
            module.trainer = SimpleNamespace(global_rank=rank, world_size=3)  # type: ignore[assignment]
            for loader in (module.val_dataloader(), module.test_dataloader()):
                shares.append([q for block in loader for q in range(*block.tolist())])
            assert module.train_dataloader()._loader.dataset.share == (rank, 3)  # type: ignore[attr-defined]
        for split, parts in (("valid", shares[::2]), ("test", shares[1::2])):
            assert all(parts)
            assert sorted(q for part in parts for q in part) == list(range(found.splits[split].num_queries))


class TestDistances:
    def model(self, data: RankingData) -> LGMML:
        prep = list_rank_features().fit(data.features, data.offsets)
        width = prep.num_features_out
        return LGMML(
            prep,
            LocalMetrics([MetricBlock(torch.zeros(1, width), torch.eye(width)[None])], num_features=width),
            Phi(2, 1),
        )

    def test_the_key_knows_where_lists_begin(self) -> None:
        """Features that look at the list differ when the same rows stand in other lists."""
        x = torch.arange(12.0).reshape(6, 2)
        one = RankingData.from_arrays(x, [0, 1] * 3, group=[2, 4])
        other = one.replace(offsets=torch.tensor([0, 4, 6]))
        model = self.model(one)
        assert not torch.equal(compute_distances(model, one), compute_distances(model, other))
        assert distance_key(model, one, torch.float32) != distance_key(model, other, torch.float32)

    def test_the_key_knows_all_that_distances_depend_on_and_nothing_else(self) -> None:
        x = torch.arange(12.0).reshape(6, 2)
        data = RankingData.from_arrays(x, [0, 1] * 3, group=[2, 4])
        model = self.model(data)
        key = distance_key(model, data, torch.float32)
        weighed = deepcopy(model)
        with torch.no_grad():
            weighed.phi.table.weight.fill_(7.0)
        assert distance_key(weighed, data.replace(labels=1 - data.labels), torch.float32) == key
        moved = deepcopy(model)
        moved.metrics.iter_blocks()[0].anchors[0, 0] = 1.0
        scaled = deepcopy(model)
        scaled.metrics.set_scales(torch.tensor([2.0]))
        trace = LGMML(
            model.preprocess,
            LocalMetrics(model.metrics.iter_blocks(), num_features=model.metrics.num_features, norm="trace"),
            model.phi,
        )
        prepared = deepcopy(model)
        for value in prepared.preprocess.state_dict().values():
            if value.is_floating_point():
                value.add_(1.0)
        changed = [distance_key(other, data, torch.float32) for other in (moved, scaled, trace, prepared)]
        changed.append(distance_key(model, data.replace(features=x + 1), torch.float32))
        changed.append(distance_key(model, data, torch.float16))
        assert key not in changed
