"""The Lightning module by itself, with a trainer that is only pretended: what it is made of, does, logs and refuses."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lgmml_torch import distributed
from lgmml_torch.checks import CheckpointError, DivergedError, LGMMLError
from lgmml_torch.functional.ranking.custom import Measure
from lgmml_torch.functional.ranking.measures import rank_data
from lgmml_torch.functional.score import kernel, list_summary
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION, write_checkpoint
from lgmml_torch.ragged import RankingData
from lgmml_torch.training import module as modules
from lgmml_torch.training.batches import TrainingBatch, TrainingBatches, mixed_seed
from lgmml_torch.training.losses import LossValue, Softmax, Warp
from lgmml_torch.training.module import Dropout, LGMMLModule, Lists, make_optimizer
from lgmml_torch.training.views import Views

SIZES = [4, 3, 5]


def lists(**more: Any) -> RankingData:
    g = torch.Generator().manual_seed(3)
    X = torch.randn(12, 2, generator=g)
    return RankingData.from_arrays(X, [0, 1, 2, 0, 0, 1, 0, 0, 0, 1, 1, 2], group=SIZES, **more)


def make_model(mode: str = "per_query", *, trained: bool = False, **phi: Any) -> LGMML:
    g = torch.Generator().manual_seed(4)
    data = lists()
    preprocess = Chain([Standardize()]).fit(data.features, data.offsets)
    block = MetricBlock(torch.randn(4, 2, generator=g), torch.randn(4, 2, 1 if trained else 2, generator=g))
    metrics = LocalMetrics([block], num_features=2)
    if trained:
        metrics.train_metrics_()
    model = LGMML(preprocess, metrics, Phi(3, 4, mode=mode, **phi), qids=data.qids)
    with torch.no_grad():
        model.phi.table.weight.uniform_(0.2, 2.0, generator=g)
    return model


def make_module(
    mode: str = "per_query", *, data: RankingData | None = None, trained: bool = False, phi: Any = None, **settings: Any
) -> LGMMLModule:
    model = make_model(mode, trained=trained, **(phi or {}))
    module = LGMMLModule(model.spec(), model, **settings)
    data = lists() if data is None else data
    for name in ("train", "valid", "test"):
        seen = model.preprocess(data.features, data.offsets)
        module.attach(name, data, seen if trained else model.metrics(seen))
    module.logged = {}  # type: ignore[assignment]
    module.log = lambda name, value, **how: module.logged.update({name: (float(value), how)})  # type: ignore[assignment,method-assign,operator,union-attr]
    module._trainer = SimpleNamespace(world_size=1, global_step=0, global_rank=0)  # type: ignore[assignment]
    return module


def a_batch(data: RankingData | None = None, **settings: Any) -> TrainingBatch:
    return TrainingBatches(lists() if data is None else data, **settings)[0, 0]


def naive(module: LGMMLModule, rows: Tensor, phi: Tensor) -> Tensor:
    """−Σ Φ κ of each row with its own weights ``(M, K)``."""
    kappa = kernel(module._data["train"][1][rows], module.model.kernel)  # type: ignore[index]
    return torch.stack([-sum(w * k for w, k in zip(p, row, strict=True)) for p, row in zip(phi, kappa, strict=True)])  # type: ignore[arg-type]


class TestDropout:
    def test_by_default_nothing_is_dropped(self) -> None:
        assert Dropout() == Dropout(features=0.0, metrics=0.0)

    @pytest.mark.parametrize("name", ["features", "metrics"])
    def test_shares_are_at_least_0_and_below_1(self, name: str) -> None:
        for good in (0, 0.0, 0.5, 0.999):
            Dropout(**{name: good})
        for bad in (1.0, 1, 1.5, -0.1):
            with pytest.raises(LGMMLError, match=rf"`dropout\.{name}` must be at least 0 and below 1, got {bad}"):
                Dropout(**{name: bad})
        with pytest.raises(LGMMLError, match=rf"`dropout\.{name}` must be a number"):
            Dropout(**{name: "half"})  # type: ignore[arg-type]
        with pytest.raises(LGMMLError, match=rf"`dropout\.{name}`"):
            Dropout(**{name: float("nan")})


class TestMaking:
    def test_what_nobody_says(self) -> None:
        model = make_model()
        module = LGMMLModule(model.spec(), model)
        assert module.loss == Warp()
        assert (module.deviation_penalty, module.seed, module.dropout) == (0.0, 0, Dropout())
        assert module.position_bias is None
        assert "position_bias" in module._buffers
        assert module.trains_metrics is False
        assert module.rows is None
        assert module.valid_metrics.names == module.test_metrics.names == ("ndcg@1", "ndcg@5", "ndcg@10", "map")
        assert module.valid_metrics.preset.name == module.test_metrics.preset.name == "default"
        optimizer = module.configure_optimizers()
        assert isinstance(optimizer, torch.optim.SGD)
        assert optimizer.param_groups[0]["lr"] == 0.001

    def test_what_a_checkpoint_has_to_say(self) -> None:
        model = make_model()
        module = LGMMLModule(model.spec(), model, loss=Softmax(0.5), deviation_penalty=0.25, preset="letor4")
        plain = {
            "model_spec": model.spec(),
            "loss": {"name": "softmax", "temperature": 0.5},
            "deviation_penalty": 0.25,
            "preset": "letor4",
        }
        assert dict(module.hparams) == plain
        assert module._log_hyperparams is False
        with_positions = LGMMLModule(model.spec(), model, num_positions=3)
        assert with_positions.hparams["num_positions"] == 3
        again = LGMMLModule(**module.hparams)
        assert (again.loss, again.deviation_penalty) == (Softmax(0.5), 0.25)
        assert again.model.phi.table.weight.shape == (3, 4)
        assert again.model is not model
        assert module.valid_metrics.preset.name == module.test_metrics.preset.name == "letor4"

    def test_settings_are_taken(self) -> None:
        model = make_model()
        measure = Measure.of("precision@3")
        module = LGMMLModule(
            model.spec(), model, loss={"name": "warp", "margin": 0.7}, dropout=Dropout(0.5), measure=measure, seed=9,
            optimizer=partial(torch.optim.Adagrad, lr=0.5),
        )  # fmt: skip
        assert (module.loss, module.dropout, module.seed) == (Warp(0.7), Dropout(0.5), 9)
        assert module.valid_metrics.names[-1] == module.test_metrics.names[-1] == "precision@3"
        assert isinstance(module.configure_optimizers(), torch.optim.Adagrad)

    def test_a_penalty_is_no_reward(self) -> None:
        model = make_model()
        with pytest.raises(LGMMLError, match="`deviation_penalty` must be"):
            LGMMLModule(model.spec(), model, deviation_penalty=-0.5)

    def test_biases_of_positions_are_trained_with_the_metrics_only(self) -> None:
        for trained in (False, True):
            model = make_model("shared", trained=trained)
            module = LGMMLModule(model.spec(), model, num_positions=3)
            assert module.position_bias is not None
            assert isinstance(module.position_bias, nn.Parameter) == trained
            assert module.position_bias.tolist() == [0.0, 0.0, 0.0]
            assert "position_bias" in module.state_dict()
        model = make_model("shared", trained=True)
        assert LGMMLModule(model.spec(), model).position_bias is None

    def test_what_is_attached_anew_takes_its_place(self) -> None:
        module = make_module()
        before = module.lists("valid")
        assert module.lists("valid") is before
        fewer = lists().select([0])
        module.attach("valid", fewer, torch.zeros(4, 4))
        assert module.data_of("valid") is fewer
        assert module.lists("valid").inputs.shape == (4, 4)  # type: ignore[union-attr]
        assert module.lists("train").inputs.shape == (12, 4)  # type: ignore[union-attr]

    def test_lists_are_looked_at_through_views_or_as_they_are(self) -> None:
        data, x = lists(), torch.arange(8.0).view(4, 2)
        rows, offsets = torch.tensor([2, 0]), torch.tensor([0, 2])
        plain = Lists(data.labels, data.offsets, data.order, x)
        assert torch.equal(plain.part(rows, offsets), x[[2, 0]])
        preprocess = Chain([Standardize()]).fit(x, torch.tensor([0, 4]))
        seen = Lists(data.labels, data.offsets, data.order, Views(x, preprocess, torch.float32))
        assert torch.equal(seen.part(rows, offsets), preprocess(x[[2, 0]], offsets))


class TestFit:
    def test_rows_that_are_kept_are_left_out_of_what_is_averaged(self) -> None:
        module = make_module()
        rows: Any = SimpleNamespace(names=("phi.table.weight", "phi.summaries"))
        module.keep_rows(rows)
        assert module.rows is rows
        assert module._ddp_params_and_buffers_to_ignore == ["model.phi.table.weight", "model.phi.summaries"]

    def test_gradients_of_own_rows_are_divided_while_a_fit_lasts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []
        module = make_module("shared", phi={"deviations": True})
        monkeypatch.setattr(module.model, "summarize", lambda *args: asked.append(args))
        module.keep_rows(SimpleNamespace(names=("phi.deviation.weight",)))  # type: ignore[arg-type]
        module._trainer.world_size = 4  # type: ignore[union-attr]
        module.on_fit_start()
        assert asked == []  # weights that are shared need no summaries
        phi = module.model.phi

        def gradients() -> tuple[float, float]:
            for part in (phi.table, phi.deviation):
                part.weight.grad = None
            (phi.table.weight.sum() + phi.deviation.weight.sum()).backward()
            return float(phi.table.weight.grad[0, 0]), float(phi.deviation.weight.grad[0, 0])

        assert gradients() == (1.0, 0.25)
        module.on_fit_end()
        assert gradients() == (1.0, 1.0)

    @pytest.mark.parametrize("kept", [False, True])
    def test_lists_are_summarised_with_the_moments_of_all(self, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        module, data = make_module("amortized"), lists()
        if kept:
            module.rows = SimpleNamespace(names=())  # type: ignore[assignment]
        asked: list[Any] = []
        monkeypatch.setattr(distributed, "moments_of_all", lambda x: asked.append(len(x)) or (x.mean(0) + 1, x.std(0)))
        module.on_fit_start()
        kappa = kernel(module._data["train"][1], "paper")  # type: ignore[arg-type]
        summaries = list_summary(kappa, data.offsets)
        torch.testing.assert_close(module.model.phi.summaries, summaries)
        torch.testing.assert_close(module.model.phi.summary_mean, summaries.mean(0) + int(kept))
        assert asked == ([3] if kept else [])

    @pytest.mark.parametrize("kept", [False, True])
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_processes_agree_on_the_mean_row_where_each_has_some(
        self, kept: bool, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(distributed, "place", lambda: (0, size))
        monkeypatch.setattr(distributed, "moments_of_all", lambda x: (x.sum(0), x.sum(0) * 7))
        for start in ("agree_on_rows", "on_validation_epoch_start", "on_test_epoch_start"):
            module = make_module()
            module.rows = SimpleNamespace() if kept else None  # type: ignore[assignment]
            getattr(module, start)()
            found = module.model.phi.mean_of_all
            if kept and size > 1:
                torch.testing.assert_close(found, module.model.phi.table.weight.detach().sum(0)[None])
            else:
                assert found is None

    def test_a_step_is_followed_by_a_projection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done: list[Any] = []
        monkeypatch.setattr(pl.LightningModule, "optimizer_step", lambda self, *a, **k: done.append((a, k)))
        module = make_module()
        with torch.no_grad():
            module.model.phi.table.weight.fill_(-1.0)
        module._moved = torch.tensor([1])
        monkeypatch.setattr(module.model.metrics, "project_", lambda: done.append("metrics"))
        module.optimizer_step(0, 1, "optimizer", closure="c")
        assert done == [((0, 1, "optimizer"), {"closure": "c"})]
        assert module.model.phi.table.weight[:, 0].tolist() == [-1.0, 0.0, -1.0]
        module._moved = None
        module.optimizer_step()
        assert module.model.phi.table.weight[:, 0].tolist() == [0.0, 0.0, 0.0]
        trained = make_module("shared", trained=True)
        done.clear()
        monkeypatch.setattr(trained.model.metrics, "project_", lambda: done.append("metrics"))
        trained.optimizer_step()
        assert done == [((), {}), "metrics"]

    @pytest.mark.parametrize(
        ("groups", "any_row"),
        [([{}], False), ([{"momentum": 0.5}], True), ([{"weight_decay": 0.5}], True), ([{}, {"momentum": 0.5}], True)],
        ids=str,
    )
    def test_which_rows_a_step_moves(self, groups: list[dict[str, float]], any_row: bool) -> None:
        module = make_module(phi={"sparse": True})
        table = module.model.phi.table.weight
        index, values = torch.tensor([[2, 0]]), torch.tensor([[3.0, 0, 0, 0], [0, 4.0, 0, 0]])
        optimizer: Any = SimpleNamespace(param_groups=groups)
        table.grad = torch.sparse_coo_tensor(index, values, table.shape, check_invariants=True)
        module.on_before_optimizer_step(optimizer)
        assert (module._moved if any_row else module._moved.tolist()) == (None if any_row else [0, 2])  # type: ignore[union-attr]
        assert module.logged == {"train/gradient_norm": (5.0, {"on_step": True, "on_epoch": False})}
        table.grad = torch.ones_like(table)  # of all rows
        module.on_before_optimizer_step(optimizer)
        assert module._moved is None
        table.grad, module.model.preprocess.extra = None, nn.Parameter(torch.zeros(1))
        module.model.preprocess.extra.grad = torch.tensor([2.0])
        module.on_before_optimizer_step(optimizer)
        assert module._moved is None
        assert module.logged["train/gradient_norm"][0] == 2.0  # type: ignore[index]


class TestLoss:
    @pytest.mark.parametrize("mode", ["per_query", "shared"])
    @pytest.mark.parametrize("positions", [False, True])
    @pytest.mark.parametrize("count", [1, 3])
    def test_scores_of_a_batch_by_a_loop(self, mode: str, positions: bool, count: int) -> None:
        """All documents, or those at some places, with the bias of where they were shown."""
        places = torch.arange(12) % 5
        data = lists(positions=places) if positions else lists()
        module = make_module(mode, data=data, num_positions=4)
        bias = torch.tensor([0.5, -1.0, 2.0, 0.25])
        module.position_bias.copy_(bias)  # type: ignore[union-attr]
        batch, seen = a_batch(data, batch_size=count), list[Tensor]()
        at = torch.tensor([len(batch.rows) - 1, 0, 1, 1])

        def loss(given: TrainingBatch, score: Any) -> LossValue:
            assert given is batch
            seen.extend([score(None), score(at)])
            return LossValue(seen[0].sum(), 1)

        module.loss = loss  # type: ignore[assignment]
        module.batch_loss(batch)
        owner = torch.repeat_interleave(batch.lists, batch.list_offsets.diff())
        phi = module.model.phi.table.weight.detach()
        rows = phi[owner] if mode == "per_query" else phi.expand(len(owner), -1)
        expected = naive(module, batch.rows, rows)
        if positions:
            shown = data.positions[batch.rows]  # type: ignore[index]
            expected = expected + torch.tensor([*bias, 0.0])[shown]
        torch.testing.assert_close(seen[0].detach(), expected)
        torch.testing.assert_close(seen[1].detach(), expected[at])

    def test_without_biases_positions_change_nothing(self) -> None:
        data = lists(positions=torch.arange(12) % 5)
        module, plain = make_module(data=data), make_module()
        assert module.position_bias is None
        batch = a_batch()
        assert module.batch_loss(batch).total.item() == plain.batch_loss(batch).total.item()

    def test_half_precision_is_computed_in_full(self) -> None:
        module, batch = make_module(), a_batch()
        data, dists = module._data["train"]
        assert isinstance(dists, Tensor)
        module.attach("train", data, dists.half().float())
        exact = module.batch_loss(batch).total.item()
        module.attach("train", data, dists.half())
        found = module.batch_loss(batch).total
        assert found.dtype == torch.float32
        assert found.item() == exact
        assert module._distances(dists.half()).dtype == torch.float32

    def test_what_is_dropped_is_drawn_from_seed_step_and_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[int, ...]] = []
        monkeypatch.setattr(modules, "mixed_seed", lambda *numbers: asked.append(numbers) or mixed_seed(*numbers))
        module = make_module("shared", trained=True, dropout=Dropout(0.5, 0.0), seed=6)
        module._trainer.global_step = 8  # type: ignore[union-attr]
        module.batch_loss(a_batch(), 5)
        module.batch_loss(a_batch())
        assert asked == [(6, 8, 5, 0), (6, 8, 0, 0)]

    @pytest.mark.parametrize("dropout", [Dropout(0.5, 0.0), Dropout(0.0, 0.5)])
    def test_features_and_metrics_are_dropped_each_by_its_share(self, dropout: Dropout) -> None:
        module, batch = make_module("shared", trained=True, dropout=dropout), a_batch()
        inputs = module.lists("train").part(batch.rows, batch.list_offsets)
        kappa = module._batch_kappa(inputs, batch, 0).detach()
        draws = torch.Generator().manual_seed(mixed_seed(0, 0, 0, 0))
        kept = torch.rand((len(batch.rows), 2 if dropout.features else 4), generator=draws) >= 0.5
        whole = kernel(module.model.metrics.traced(inputs * kept * 2 if dropout.features else inputs), "paper").detach()
        torch.testing.assert_close(kappa, whole if dropout.features else whole * kept * 2)

    @pytest.mark.parametrize("trained", [False, True])
    def test_distances_are_made_of_features_where_metrics_are_trained(self, trained: bool) -> None:
        module = make_module("shared", trained=trained)
        inputs = module.lists("train").inputs
        assert isinstance(inputs, Tensor)
        found = module._distances(inputs)
        assert not found.requires_grad
        torch.testing.assert_close(found, module.model.metrics(inputs).detach() if trained else inputs)

    def test_what_a_step_logs(self) -> None:
        module, batch = make_module(), a_batch()
        module._trainer.world_size = 3  # type: ignore[union-attr]
        found = module.batch_loss(batch)
        total = module.training_step(batch, 0).item()
        assert total == pytest.approx(3 * found.total.item())
        how = {"on_step": True, "on_epoch": True, "batch_size": found.terms, "sync_dist": True}
        assert found.terms > 1
        assert module.logged == {
            "train/loss": (pytest.approx(total / found.terms), {**how, "prog_bar": True}),
            "train/violator_rate": (float(found.facts["violator_rate"]), {**how, "prog_bar": False}),
            "train/mean_draws": (float(found.facts["mean_draws"]), {**how, "prog_bar": False}),
        }

    @pytest.mark.parametrize(("terms", "divisor"), [(0, 1), (1, 1), (4, 4)])
    def test_curves_show_the_mean_of_the_terms(self, terms: int, divisor: int) -> None:
        module, batch = make_module(), a_batch()
        weight = module.model.phi.table.weight
        module.loss = lambda batch, score: LossValue(weight.sum() * 0 + 6.0, terms)  # type: ignore[assignment]
        module.training_step(batch, 0)
        value, how = module.logged["train/loss"]  # type: ignore[index]
        assert (value, how["batch_size"]) == (6.0 / divisor, divisor)

    @pytest.mark.parametrize("loss", [Warp(), Softmax()], ids=lambda loss: loss.name)
    def test_deviations_are_penalised_for_each_tuple_or_list(self, loss: Any) -> None:
        module = make_module("shared", loss=loss, deviation_penalty=2.0, phi={"deviations": True})
        batch = a_batch(draws=loss.draws)
        with torch.no_grad():
            module.model.phi.deviation.weight.fill_(0.5)
        plain = module.batch_loss(batch).total.item()
        count = len(batch.positives) if loss.draws else len(batch.lists)
        found = module.training_step(batch, 0).item()
        assert found == pytest.approx(plain + 2.0 * 0.5 * count * 4 * 0.25)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_a_loss_that_is_no_number_stops(self, bad: float) -> None:
        module = make_module()
        module._trainer.global_step = 17  # type: ignore[union-attr]
        module.loss = lambda batch, score: LossValue(torch.tensor(bad), 1)  # type: ignore[assignment]
        with pytest.raises(DivergedError, match=f"the loss is {bad} at step 17; training stopped"):
            module.training_step(a_batch(), 0)


class TestNothing:
    """A process without a list of the batch has gradients of zero for all that the others wait for."""

    def gradients(self, module: LGMMLModule) -> dict[str, Tensor | None]:
        total = module._nothing()
        assert total.item() == 0.0
        total.backward()
        return {name: parameter.grad for name, parameter in module.model.named_parameters()}

    @pytest.mark.parametrize("mode", ["per_query", "shared", "amortized"])
    def test_of_every_mode(self, mode: str) -> None:
        found = self.gradients(make_module(mode))
        assert len(found) == (5 if mode == "amortized" else 1)
        assert all(gradient is not None and not bool(gradient.any()) for gradient in found.values())

    def test_of_deviations_and_of_metrics(self) -> None:
        for module in (make_module("shared", phi={"deviations": True}), make_module("shared", trained=True)):
            found = self.gradients(module)
            assert len(found) > 1
            assert all(gradient is not None and not bool(gradient.any()) for gradient in found.values())

    @pytest.mark.parametrize("sparse", [False, True])
    def test_own_rows_are_not_touched(self, sparse: bool) -> None:
        module = make_module("shared", phi={"deviations": True, "sparse": sparse})
        module.rows = SimpleNamespace(names=("phi.deviation.weight",))  # type: ignore[assignment]
        found = self.gradients(module)
        if sparse:
            assert [found[f"phi.{name}.weight"]._nnz() for name in ("table", "deviation")] == [1, 0]  # type: ignore[union-attr]
        module = make_module("per_query", phi={"sparse": sparse})
        module.rows = SimpleNamespace(names=("phi.table.weight",))  # type: ignore[assignment]
        with torch.no_grad():  # a process may have no row at all
            module.model.phi.table = nn.Embedding(0, 4, sparse=sparse, _weight=torch.zeros(0, 4))
        assert self.gradients(module)["phi.table.weight"].shape == (0, 4)  # type: ignore[union-attr]

    def test_what_is_not_trained_needs_none(self) -> None:
        module = make_module("amortized")
        module.model.phi.gate.first.weight.requires_grad_(False)
        module.model.phi.gate.first.weight.data.fill_(float("nan"))
        assert module._nothing().item() == 0.0

    def test_in_a_step(self) -> None:
        module, batches = make_module(), TrainingBatches(lists(), batch_size=1)
        empty = batches.shared_by(1, 2)[0, 0]
        assert len(empty.rows) == 0
        total = module.training_step(empty, 0)
        assert total.item() == 0.0
        total.backward()
        assert not bool(module.model.phi.table.weight.grad.any())


class TestEvaluating:
    @pytest.mark.parametrize("mode", ["per_query", "shared"])
    @pytest.mark.parametrize(("first", "last"), [(0, 3), (1, 3), (1, 2)])
    def test_scores_of_a_block_are_the_models(self, mode: str, first: int, last: int) -> None:
        module, data = make_module(mode), lists()
        part = data.select(range(first, last))
        model = module.model.eval()
        torch.testing.assert_close(module.block_scores("train", first, last), model.score(part))
        known = module.block_scores("train", first, last, known=True)
        own = mode == "per_query"
        torch.testing.assert_close(known, model.score(part, known_queries=own))
        assert torch.equal(known, model.score(part)) != own

    def test_equal_documents_share_a_score(self) -> None:
        """Their distances may differ by a rounding."""
        module, data = make_module(), lists()
        features, dists = data.features.clone(), module._data["valid"][1].clone()  # type: ignore[union-attr]
        dists[1] = dists[0] * (1 + 1e-5)
        module.attach("valid", data, dists)
        assert len(module.block_scores("valid", 0, 3).unique()) == 12
        features[1] = features[0]
        module.attach("valid", data.replace(features=features), dists)
        scores = module.block_scores("valid", 0, 3)
        assert scores[0] == scores[1]
        assert len(scores.unique()) == 11

    def test_scores_that_are_not_finite_stop(self) -> None:
        module = make_module()
        module._trainer.global_step = 4  # type: ignore[union-attr]
        module._data["test"][1][2, 1] = float("nan")  # type: ignore[index]
        with pytest.raises(DivergedError, match="scores of the test lists are not finite at step 4; no model is kept"):
            module.block_scores("test", 0, 3)

    def test_lists_are_measured_whichever_way_they_come(self) -> None:
        module, data = make_module(), lists()
        expected = rank_data(module.model.score(data), data, metrics=["ndcg@10", "map"])
        means = {name: float(values.nanmean()) for name, values in expected.items()}
        blocks = [torch.tensor([0, 1]), torch.tensor([1, 3])]
        for prefix, step, end in (
            ("val", module.validation_step, module.on_validation_epoch_end),
            ("test", module.test_step, module.on_test_epoch_end),
        ):
            module.logged.clear()  # type: ignore[operator,union-attr]
            for _ in range(2):  # nothing is left over from the epoch before
                for index, block in enumerate(blocks):
                    step(block, index)
                end()
            assert set(module.logged) == {f"{prefix}/{name}" for name in ("ndcg@1", "ndcg@5", "ndcg@10", "map")}  # type: ignore[arg-type]
            for name, value in means.items():
                found, how = module.logged[f"{prefix}/{name}"]  # type: ignore[index]
                assert found == pytest.approx(value)
                assert how == {"prog_bar": name == "ndcg@10", "sync_dist": True}
            assert module.counts[prefix] == dict.fromkeys(("ndcg@1", "ndcg@5", "ndcg@10", "map"), 3)
        for _ in range(2):
            found = module.validate_now(blocks)
            assert found["val/ndcg@10"] == pytest.approx(means["ndcg@10"])
            assert found["val/map"] == pytest.approx(means["map"])

    def test_before_validation_outside_of_loops_processes_agree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module, asked = make_module(), list[int]()
        monkeypatch.setattr(module, "agree_on_rows", lambda: asked.append(1))
        module.validate_now([torch.tensor([0, 3])])
        assert asked == [1]

    def test_ties_are_broken_by_the_callers_order(self) -> None:
        data = RankingData.from_arrays(torch.zeros(3, 2), [2, 1, 0], group=[3])
        assert data.order.tolist() != [0, 1, 2]
        module = make_module(data=data)
        module.attach("valid", data, torch.zeros(3, 4))
        assert module.validate_now([torch.tensor([0, 1])])["val/ndcg@10"] == 1.0
        module.attach("valid", data.replace(order=data.order.flip(0)), torch.zeros(3, 4))
        assert module.validate_now([torch.tensor([0, 1])])["val/ndcg@10"] < 1.0

    def test_biases_count_in_validation_and_not_in_the_test(self) -> None:
        data = lists(positions=torch.arange(12) % 4)
        module = make_module(data=data, num_positions=4)
        module.position_bias.copy_(torch.tensor([0.0, 5.0, -5.0, 9.0]))  # type: ignore[union-attr]
        block = torch.tensor([1, 3])
        scores = module.block_scores("valid", 1, 3)
        part = data.select([1, 2])
        shown = scores + module.position_bias[part.positions]  # type: ignore[index]
        module._evaluate("valid", block, module.valid_metrics)
        module._evaluate("test", block, module.test_metrics)
        for metrics, want in ((module.valid_metrics, shown), (module.test_metrics, scores)):
            expected = float(rank_data(want, part, metrics=["ndcg@10"])["ndcg@10"].nanmean())
            assert float(metrics.compute()["ndcg@10"]) == pytest.approx(expected)
        assert float(module.valid_metrics.compute()["ndcg@10"]) != float(module.test_metrics.compute()["ndcg@10"])

    def test_lists_that_are_not_there_are_named(self) -> None:
        module = make_module()
        with pytest.raises(LGMMLError, match=r"the module has no 'more' lists; call attach\('more', data, inputs\)"):
            module.lists("more")


class TestOptimizers:
    def horizon(self, max_steps: int, max_epochs: int | None) -> tuple[int, int]:
        asked: list[Any] = []
        module = make_module(step_size=lambda updates, horizon: asked.append((updates, horizon)) or 1.0)
        batches = SimpleNamespace(batch_size=5, batches_per_epoch=7, sizes=range(11))
        module._trainer = SimpleNamespace(
            datamodule=SimpleNamespace(batches=batches), max_steps=max_steps, max_epochs=max_epochs
        )  # type: ignore[assignment]
        made = module.configure_optimizers()
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
        assert made["lr_scheduler"]["interval"] == "step"
        assert [updates for updates, _ in asked] == [0, 5]
        return tuple(asked[0][1])  # type: ignore[return-value]

    @pytest.mark.parametrize(
        ("max_steps", "max_epochs", "steps"), [(-1, 3, 21), (0, 3, 21), (1, 3, 1), (4, None, 4), (-1, None, 7)]
    )
    def test_how_far_training_goes(self, max_steps: int, max_epochs: int | None, steps: int) -> None:
        assert self.horizon(max_steps, max_epochs) == (11, steps * 5)

    def test_biases_of_positions_move_faster_and_do_not_decay(self) -> None:
        module = make_module(
            "shared", trained=True, num_positions=3, optimizer=partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
        )
        optimizer = module.configure_optimizers()
        first, second = optimizer.param_groups
        assert second["params"] == [module.position_bias]
        assert (first["lr"], second["lr"]) == (0.01, pytest.approx(0.2))
        assert (first["weight_decay"], second["weight_decay"]) == (0.5, 0.0)
        trained = [p for p in module.model.parameters() if p.requires_grad]
        assert [id(p) for p in first["params"]] == [id(p) for p in trained]
        assert len(make_module("shared", num_positions=3).configure_optimizers().param_groups) == 1

    def test_what_needs_no_gradient_is_left_out(self) -> None:
        module = make_module("amortized")
        module.model.phi.gate.last.bias.requires_grad_(False)
        given = module.configure_optimizers().param_groups[0]["params"]
        assert len(given) == 4
        assert all(p is not module.model.phi.gate.last.bias for p in given)

    def test_gradients_and_optimizers_have_to_suit(self) -> None:
        module = make_module(phi={"sparse": True}, optimizer=partial(torch.optim.Adam, lr=0.1))
        with pytest.raises(LGMMLError, match="Adam takes no sparse gradients"):
            module.configure_optimizers()

        def two(parameters: Any) -> torch.optim.Optimizer:
            first, second = parameters
            return torch.optim.SGD([{"params": [first], "weight_decay": 0.25}, {"params": [second]}], lr=0.1)

        parts = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
        with pytest.raises(LGMMLError, match=r"`weight_decay` must be 0 with sparse gradients, got 0\.25"):
            make_optimizer(two, parts, sparse=True)
        assert len(make_optimizer(two, parts, sparse=False).param_groups) == 2
        for name, sparse in (("SGD", True), ("Adagrad", True), ("SparseAdam", True), ("Adam", False), ("SGD", False)):
            made = make_optimizer(partial(getattr(torch.optim, name), lr=0.1), parts, sparse=sparse)
            assert type(made).__name__ == name


class TestCheckpoints:
    def content(self) -> dict[str, Any]:
        module = make_module()
        content: dict[str, Any] = {
            "state_dict": module.state_dict(),
            "hyper_parameters": dict(module.hparams),
            "pytorch-lightning_version": pl.__version__,
        }
        module.on_save_checkpoint(content)
        return content

    def test_what_is_added(self) -> None:
        content = self.content()
        assert content[FORMAT] == {"version": VERSION, "spec": make_model().spec()}

    def test_weights_below_zero_are_never_written(self) -> None:
        module = make_module()
        with torch.no_grad():
            module.model.phi.table.weight[1, 1] = -0.5
        content: dict[str, Any] = {}
        with pytest.raises(LGMMLError, match=r"weights Φ must be finite and at least 0, got -0\.5"):
            module.on_save_checkpoint(content)
        assert content == {}

    def test_a_file_gives_the_module_again(self, tmp_path: Path) -> None:
        file = tmp_path / "a.ckpt"
        write_checkpoint(file, self.content())
        for path in (file, str(file)):
            again = LGMMLModule.load_from_checkpoint(path)
            assert torch.equal(again.model.phi.table.weight, make_model().phi.table.weight)
        with file.open("rb") as stream:
            assert LGMMLModule.load_from_checkpoint(io.BytesIO(stream.read())).loss == Warp()

    def test_bytes_that_were_changed_are_noticed(self, tmp_path: Path) -> None:
        file = tmp_path / "a.ckpt"
        write_checkpoint(file, self.content())
        whole = file.read_bytes()
        file.write_bytes(whole.replace(b"version", b"persion"))
        for path in (file, str(file)):
            with pytest.raises(CheckpointError, match="or it is damaged"):
                LGMMLModule.load_from_checkpoint(path)

    def test_a_file_is_not_run_unless_it_is_trusted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(
            pl.LightningModule, "load_from_checkpoint", classmethod(lambda cls, *a, **k: asked.append((a, k)))
        )
        LGMMLModule.load_from_checkpoint("nowhere", 1)
        LGMMLModule.load_from_checkpoint("nowhere", weights_only=False, preset="letor4")
        assert asked == [
            (("nowhere", 1), {"weights_only": True}),
            (("nowhere",), {"weights_only": False, "preset": "letor4"}),
        ]

    def test_foreign_and_newer_ones_are_refused(self) -> None:
        module = make_module()
        module.on_load_checkpoint({FORMAT: {"version": VERSION}})
        for content in ({}, {FORMAT: None}):
            with pytest.raises(CheckpointError, match="the checkpoint was not written by this package"):
                module.on_load_checkpoint(content)
        with pytest.raises(CheckpointError, match=f"the checkpoint has format version {VERSION + 1}"):
            module.on_load_checkpoint({FORMAT: {"version": VERSION + 1}})
