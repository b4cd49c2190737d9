"""Small runs through `train_phi`: which weights are kept, resuming, stopping, learning rates, lines of the log."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from torch import Tensor

from lgmml_torch.checks import CheckpointError, ConfigError, DataWarning, LGMMLError
from lgmml_torch.files import SUFFIX
from lgmml_torch.fitting.boosted import BoostedBuilder
from lgmml_torch.functional.losses import bias_of, softmax_loss
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import load_checkpoint, write_checkpoint
from lgmml_torch.training import stages
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.callbacks import (
    Horizon,
    LogEpochs,
    Logistic,
    OneCycle,
    StopAtStep,
    log_rounds,
    quiet_lightning,
)
from lgmml_torch.training.losses import LossValue, Score, TrainingBatch, build_loss
from lgmml_torch.training.module import Dropout, LGMMLModule
from lgmml_torch.training.preprocessed import Views
from lgmml_torch.training.recipe import PhiSettings, Recipe, TrainerSettings
from lgmml_torch.training.resume import Start
from lgmml_torch.training.stages import Prepared, prepare, train_phi
from tests.training import tiny


@pytest.fixture(scope="module")
def found() -> Prepared:
    return tiny.prepared()


def phi_of(file: Path) -> torch.Tensor:
    return LGMML.load(file).phi.table.weight.detach()


def test_the_epoch_with_the_best_validation_is_kept_epoch_0_included(found: Prepared, tmp_path: Path) -> None:
    valid = found.splits["valid"]
    for rate in (0.01, 1e4):  # with huge steps the start is the best
        settings = {"found": found, "mode": "shared", "optimizer": partial(torch.optim.SGD, lr=rate)}
        trained = tiny.train(tmp_path / str(rate), epochs=3, **settings)
        keeper = trained.keeper
        assert sorted(keeper.curve) == [0, 1, 2, 3]
        assert keeper.best == max(keeper.curve.values()) == keeper.curve[keeper.best_epoch]
        assert torch.equal(phi_of(keeper.best_file), trained.model.phi.table.weight)
        assert mean_measure(trained.model.score(valid), valid, "ndcg@10") == pytest.approx(keeper.best, abs=1e-6)
        sane = tiny.train(tmp_path / f"sane-{rate}", epochs=3, trainer={"num_sanity_val_steps": 2}, **settings)
        with quiet_lightning():
            trained.trainer.validate(sane.module, trained.trainer.datamodule, verbose=False)
        assert sane.keeper.curve == keeper.curve  # a check before training and validation after it are no epochs
        assert sorted(keeper.curve) == [0, 1, 2, 3]
        last = tiny.train(tmp_path / f"last-{rate}", epochs=3, keep="last", **settings)
        assert torch.equal(phi_of(keeper.last_file), last.model.phi.table.weight)
        assert not last.model.training
    assert keeper.best_epoch == 0
    assert torch.equal(trained.model.phi.table.weight, torch.ones(1, 6))


def test_without_validation_and_without_epochs(found: Prepared, tmp_path: Path) -> None:
    alone = Prepared(found.preprocess, found.bank, {"train": found.splits["train"]})
    trained = tiny.train(tmp_path / "alone", found=alone, epochs=2)
    assert trained.keeper.best_epoch == 2
    assert math.isnan(trained.keeper.best)
    assert torch.equal(trained.model.phi.table.weight, phi_of(tmp_path / "alone" / "last.ckpt"))
    start = tiny.train(tmp_path / "start", found=found, epochs=0, mode="amortized")
    valid = found.splits["valid"]
    assert start.keeper.curve == {0: mean_measure(start.model.score(valid), valid, "ndcg@10")}
    assert start.keeper.best_epoch == 0
    still = tiny.train(tmp_path / "still", found=found, mode="shared", optimizer=partial(torch.optim.SGD, lr=0.0))
    assert still.keeper.best_epoch == 0  # of equally good epochs the first
    assert float(start.model.phi.summaries.abs().sum()) > 0
    flat = found.splits["valid"].replace(labels=torch.zeros_like(valid.labels))
    undecided = Prepared(found.preprocess, found.bank, {"train": found.splits["train"], "valid": flat})
    trained = tiny.train(tmp_path / "flat", found=undecided, epochs=2)
    assert trained.keeper.best_epoch == 2  # no validation query decides: the last epoch


def test_resuming_needs_files_of_the_same_run(
    found: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tiny.train(tmp_path / "whole", found=found, epochs=2, keep="last")
    for name in ("a", "b"):
        tiny.train(tmp_path / name, found=found, epochs=1)
    a, b = tmp_path / "a", tmp_path / "b"
    best = (a / "best.ckpt").read_bytes()
    (a / "best.ckpt").write_bytes((b / "best.ckpt").read_bytes())
    with pytest.raises(CheckpointError, match=r"best\.ckpt belongs to another run; put back the file"):
        tiny.train(a, found=found, epochs=2, resume=True)
    (a / "best.ckpt").write_bytes(best)
    content = load_checkpoint(a / "last.ckpt")
    around = TrainerSettings(tmp_path / "new", {"max_epochs": 2, "accelerator": "cpu"}, resume=a / "last.ckpt")
    settings = tiny.recipe(keep="last")
    resumed = train_phi(found, settings, around)  # in another folder: the best file comes along
    assert torch.equal(resumed.model.phi.table.weight, whole.model.phi.table.weight)
    assert resumed.keeper.curve == whole.keeper.curve
    assert "There is no best.ckpt beside" not in caplog.text
    (b / "best.ckpt").unlink()
    left = b / f".best.ckpt.123{SUFFIX}"  # of a writer that was killed
    left.touch()
    tiny.train(b, found=found, epochs=2, resume=True)
    assert not left.exists()
    assert "There is no best.ckpt beside" in caplog.text
    write_checkpoint(a / "last.ckpt", {**content, "rows": {"last.1.0-of-2.rows": "x"}})
    with pytest.raises(CheckpointError, match=r"keeps rows of Φ in other files, which only release 0\.2 reads"):
        tiny.train(a, found=found, epochs=2, resume=True)


class Asked:
    """Asks for the end at a step."""

    def __init__(self, step: int) -> None:
        self.step, self.asked, self.waits, self.listened = step, None, False, 0

    def listen(self) -> None:
        self.listened += 1

    def stop(self) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt


class AskAt(pl.Callback):
    def __init__(self, stopper: Any) -> None:
        self.stopper = stopper

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        assert self.stopper.waits
        if trainer.global_step == self.stopper.step:
            self.stopper.asked = signal.SIGTERM


@pytest.mark.parametrize(("asked_at", "accumulate"), [(3, 1), (6, 1), (2, 2)])
def test_a_run_that_is_stopped_resumes_to_the_same_bits(
    found: Prepared, asked_at: int, accumulate: int, tmp_path: Path
) -> None:
    """Seven batches make an epoch: within one, at its end, and while gradients are accumulated."""
    trainer = {"accumulate_grad_batches": accumulate}
    whole = tiny.train(tmp_path / "whole", found=found, epochs=2, keep="last", trainer=trainer)
    stopper = Asked(asked_at)
    callbacks = (AskAt(stopper), StopAtStep(stopper))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        tiny.train(tmp_path / "run", found=found, every_n_steps=1000, callbacks=callbacks, trainer=trainer)
    assert stopper.listened == 1
    assert not stopper.waits
    step = load_checkpoint(tmp_path / "run" / "last.ckpt")["global_step"]
    assert step == asked_at + 1
    resumed = tiny.train(tmp_path / "run", found=found, epochs=2, keep="last", resume=True, trainer=trainer)
    assert torch.equal(resumed.model.phi.table.weight, whole.model.phi.table.weight)
    assert resumed.keeper.curve == whole.keeper.curve


def test_a_run_that_is_asked_at_its_very_end_has_ended(found: Prepared, tmp_path: Path) -> None:
    for step in (6, 99):
        stopper = Asked(step)
        callbacks = (AskAt(stopper), StopAtStep(stopper))
        with pytest.raises((KeyboardInterrupt, SystemExit)) if step == 6 else nullcontext():
            tiny.train(tmp_path / str(step), found=found, epochs=1, callbacks=callbacks)
        assert not stopper.waits
        assert load_checkpoint(tmp_path / str(step) / "last.ckpt")["global_step"] == 7


def test_weights_that_validation_cannot_judge_are_trained_to_the_end(found: Prepared, tmp_path: Path) -> None:
    for policy, epochs in (("ones", 4), ("mean", 2)):
        recipe = tiny.recipe(optimizer=partial(torch.optim.SGD, lr=0.0))
        recipe = replace(recipe, make_phi=partial(Phi, mode="per_query", sparse=True, policy=policy))
        stop = EarlyStopping(monitor="val/ndcg@10", mode="max", patience=1)
        around = TrainerSettings(tmp_path / policy, {"max_epochs": 4, "accelerator": "cpu"}, (stop,))
        assert train_phi(found, recipe, around).trainer.current_epoch == epochs


class Rates(pl.Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_the_learning_rate_follows_its_rule(found: Prepared, tmp_path: Path) -> None:
    watch, rule = Rates(), OneCycle(warmup=0.5, start=0.2)
    tiny.train(tmp_path, found=found, epochs=2, step_size=rule, callbacks=(watch,))
    horizon = Horizon(queries=20, updates=14 * 3)
    assert watch.rates == pytest.approx([0.1 * rule(3 * step, horizon) for step in range(14)])
    assert [rule(t, horizon) for t in (0, 21, 42, 99)] == pytest.approx([0.2, 1.0, 0.0, 0.0])
    assert OneCycle(warmup=0.0)(0, horizon) == 1.0
    logistic = Logistic()
    assert [logistic(t, Horizon(2, 0)) for t in (0, 200, 10**9)] == pytest.approx([0.5, 1 / (1 + math.e), 0.0])
    with pytest.raises(LGMMLError, match=r"`warmup` must lie in \[0, 1\]"):
        OneCycle(warmup=1.5)


def test_lines_of_the_log(found: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lgmml_torch.training.callbacks"):
        for done in range(1, 26):
            log_rounds(done, SimpleNamespace(total=25, valid_ndcg=0.5, best=3))
        log_rounds(1, SimpleNamespace(total=2, valid_ndcg=0.5))
        trained = tiny.train(tmp_path, found=found, epochs=1, callbacks=(LogEpochs(),))
        alone = Prepared(found.preprocess, found.bank, {"train": found.splits["train"]})
        tiny.train(tmp_path / "alone", found=alone, epochs=1, callbacks=(LogEpochs(),))
    rounds = [f"local metrics: {done} of 25, valid_ndcg 0.5000" for done in (*range(2, 25, 2), 25)]
    said = [record.message for record in caplog.records if record.name == "lgmml_torch.training.callbacks"]
    rounds.append("local metrics: 1 of 2, valid_ndcg 0.5000")
    curve = trained.keeper.curve
    assert said == [*rounds, f"epoch 1 of 1, validation NDCG@10 {curve[1]:.4f}", "epoch 1 of 1"]


def test_bars_end_where_the_work_does(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: dict[str, list[float]] = {}

    @contextmanager
    def noted(title: str, total: float) -> Iterator[Callable[[float], None]]:
        shares[title] = []
        yield lambda done: shares[title].append(done / total)

    monkeypatch.setattr(stages, "progress_bar", noted)
    recipe = Recipe(Standardize, BoostedBuilder.of(rounds=3), partial(Phi, mode="shared"))
    prepare({"train": tiny.splits()[0]}, recipe).module(recipe)
    assert shares["local metrics"] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert shares["distances, train"][-1] == 1.0


def test_another_seed_is_another_run(found: Prepared, tmp_path: Path) -> None:
    weights, settings = [], {"max_epochs": 1, "accelerator": "cpu"}
    for seed in (0, 4):
        recipe = replace(tiny.recipe(keep="last"), seed=seed)
        trained = train_phi(found, recipe, TrainerSettings(tmp_path / str(seed), settings))
        weights.append(trained.model.phi.table.weight)
    assert not torch.equal(*weights)


def test_a_start_that_does_not_grow_keeps_its_metrics(found: Prepared) -> None:
    """And so does a run that resumes, which grew before."""
    start = Start.of(found.model(partial(Phi, mode="shared")))
    data = found.splits["train"]
    shown = data.replace(positions=torch.zeros(data.num_documents, dtype=torch.long))
    growing = Recipe(Standardize, BoostedBuilder.of(rounds=3), partial(Phi, mode="shared"), grows=True)
    for recipe, resumes in ((tiny.recipe(), False), (tiny.recipe("trained"), False), (growing, True)):
        again = prepare({"train": data}, recipe, start=start, resumes=resumes)
        assert again.bank.metrics is start.bank.metrics
        assert again.bank.trained == (recipe.builder.kind == "trained")
        if recipe.builder.trains_metrics or resumes:
            prepare({"train": shown}, recipe, start=start, resumes=resumes)
            continue
        with pytest.raises(ConfigError, match="Position debiasing works only with boosted or trained metrics"):
            prepare({"train": shown}, recipe, start=start)


def test_boosted_metrics_are_not_prepared_for_a_function() -> None:
    recipe = Recipe(Standardize, BoostedBuilder.of(rounds=3), phi=PhiSettings(build_loss("spearman")))
    with pytest.raises(ConfigError, match="`loss` must not be a function for boosted metrics"):
        prepare({"train": tiny.splits()[0]}, recipe)


class TestTrainedMetrics:
    def module(self, **phi: Any) -> LGMMLModule:
        return tiny.prepared(torch.float64, "trained").module(replace_phi(**phi))

    def test_the_loss_is_that_of_the_models_scores(self) -> None:
        """And so are its gradients, in Φ and in the metrics."""
        module = self.module(dropout=Dropout())
        data = module.data_of("train")
        batch = TrainingBatches(data, batch_size=data.num_queries, draws=False)[0, 0]
        module.batch_loss(batch).total.backward()
        found = {name: p.grad.clone() for name, p in module.model.named_parameters() if p.grad is not None}
        module.zero_grad()
        scores = module.model(data.features, data.offsets)
        softmax_loss(scores, data.labels, data.offsets)[batch.lists].mean().backward()
        assert len(found) > 2
        for name, parameter in module.model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-10)

    def test_dropout_is_a_function_of_the_seed_and_off_in_evaluation(self) -> None:
        plain, dropped, other = self.module(dropout=Dropout()), self.module(), self.module(dropout=Dropout(0.5, 0.0))
        batch = TrainingBatches(plain.data_of("train"), batch_size=9, draws=False)[0, 0]
        losses = [module.batch_loss(batch, 1).total.item() for module in (plain, dropped, dropped, other)]
        assert losses[1] == losses[2]
        assert len(set(losses)) == 3
        assert dropped.batch_loss(batch, 2).total.item() != losses[1]
        valid = plain.data_of("valid")
        for module in (plain, dropped):
            scores = module.block_scores("valid", 0, valid.num_queries)
            torch.testing.assert_close(scores, module.model.score(valid), rtol=1e-5, atol=1e-6)
        for wrong in ({"features": 1.0}, {"metrics": -0.1}):
            with pytest.raises(LGMMLError, match=r"`dropout\.\w+` must be at least 0 and below 1"):
                Dropout(**wrong)

    def test_what_is_dropped_leaves_the_mean_of_a_score(self) -> None:
        """What stays counts more: over many draws the mean is the score without dropping."""
        dropping, plain = self.module(dropout=Dropout(0.0, 0.5)), self.module(dropout=Dropout())
        batch = TrainingBatches(plain.data_of("train"), batch_size=9, draws=False)[0, 0]
        scores: list[Tensor] = []

        def keep(_: TrainingBatch, score: Score) -> LossValue:
            scores.append(score(None).detach())
            return LossValue(scores[-1].sum(), 1)

        dropping.loss = plain.loss = keep  # type: ignore[assignment]
        for index in range(300):
            dropping.batch_loss(batch, index)
        plain.batch_loss(batch)
        assert float(torch.stack(scores[:-1]).mean() / scores[-1].mean()) == pytest.approx(1, abs=0.02)

    def test_features_made_for_a_batch_are_those_kept(self) -> None:
        module = self.module()
        data = module.data_of("train")
        batch = TrainingBatches(data, batch_size=4, draws=False)[0, 0]
        kept = module.batch_loss(batch).total
        module.attach("train", data, Views(data.features, module.model.preprocess, torch.float64))
        torch.testing.assert_close(module.batch_loss(batch).total, kept, rtol=1e-6, atol=1e-8)


def replace_phi(**phi: Any) -> Any:
    recipe = tiny.recipe("trained")
    return replace(recipe, phi=replace(recipe.phi, **phi))


def test_the_penalty_of_deviations_is_part_of_the_loss(found: Prepared, tmp_path: Path) -> None:
    """Each batch is a list, so a large penalty keeps deviations small."""
    sizes = []
    for penalty in ({}, {"deviation_penalty": 0.0}, {"deviation_penalty": 5.0}):
        settings = {"deviations": True, "mode": "shared", "keep": "last", **penalty}
        phi = tiny.train(tmp_path / str(len(sizes)), found=found, epochs=2, **settings).model.phi
        assert phi.deviation is not None
        sizes.append(float(phi.deviation.weight.detach().norm()))
    assert 0 < sizes[2] < 0.9 * sizes[1]
    assert sizes[0] == sizes[1]  # none unless it is asked for


def test_positions_get_biases_that_scores_do_not_have(tmp_path: Path) -> None:
    splits = dict(zip(("train", "valid"), tiny.splits(), strict=False))
    for name, data in splits.items():
        shown = torch.cat([torch.arange(int(size)) for size in data.sizes])
        splits[name] = data.replace(positions=shown, labels=(shown < 2).float())
    recipe = replace_phi(keep="last")
    prepared = prepare(splits, recipe)
    trained = train_phi(prepared, recipe, TrainerSettings(tmp_path, {"max_epochs": 3, "accelerator": "cpu"}))
    bias = trained.position_bias
    assert bias is not None
    assert not trained.model.metrics.trained
    assert min(bias[0], bias[1]) > max(value for place, value in bias.items() if 2 <= place < 6)
    valid = splits["valid"]
    again = trained.model.score(valid.replace(positions=None))
    assert torch.equal(again, trained.model.score(valid))
    assert valid.positions is not None
    shown = again + bias_of(trained.module.position_bias.detach(), valid.positions)  # which validation judges
    assert trained.keeper.curve[3] == pytest.approx(mean_measure(shown, valid, "ndcg@10"), abs=1e-6)
    assert trained.keeper.curve[3] != pytest.approx(mean_measure(again, valid, "ndcg@10"), abs=1e-6)
    with pytest.raises(ConfigError, match="Position debiasing works only with boosted or trained metrics"):
        prepare(splits, tiny.recipe())


def test_biases_of_positions_do_not_decay(tmp_path: Path) -> None:
    train = tiny.splits()[0]
    shown = torch.cat([torch.arange(int(size)) for size in train.sizes])
    recipe = tiny.trained_recipe()
    around = TrainerSettings(tmp_path, {"max_epochs": 1, "accelerator": "cpu"})
    trained = train_phi(prepare({"train": train.replace(positions=shown)}, recipe), recipe, around)
    decay = {
        id(parameter): group["weight_decay"]
        for group in trained.trainer.optimizers[0].param_groups
        for parameter in group["params"]
    }
    assert decay.pop(id(trained.module.position_bias)) == 0
    assert all(decay.values())


def test_biases_of_positions_are_those_of_the_kept_epoch(tmp_path: Path) -> None:
    splits = dict(zip(("train", "valid"), tiny.splits(), strict=False))
    for name, data in splits.items():
        shown = torch.cat([torch.arange(int(size)) for size in data.sizes])
        first = (shown < 2) == (name == "train")  # what is learned is wrong in validation: an early epoch is the best
        splits[name] = data.replace(positions=shown, labels=first.float())
    recipe = replace_phi()
    around = TrainerSettings(tmp_path, {"max_epochs": 2, "accelerator": "cpu"})
    trained = train_phi(prepare(splits, recipe), recipe, around)
    best, last = (
        load_checkpoint(tmp_path / name)["state_dict"]["position_bias"] for name in ("best.ckpt", "last.ckpt")
    )
    assert not torch.equal(best, last)
    assert trained.module.position_bias is not None
    assert torch.equal(trained.module.position_bias, best)


def test_without_epochs_the_start_is_judged_with_the_biases_of_its_positions(tmp_path: Path) -> None:
    splits = dict(zip(("train", "valid"), tiny.splits(), strict=False))
    for name, data in splits.items():
        shown = torch.cat([torch.arange(int(size)) for size in data.sizes])
        splits[name] = data.replace(positions=shown, labels=(shown < 2).float())
    recipe = Recipe(Standardize, BoostedBuilder.of(rounds=3), partial(Phi, mode="shared"))
    made = prepare(splits, recipe)
    trained = train_phi(made, recipe, TrainerSettings(tmp_path, {"max_epochs": 0, "accelerator": "cpu"}))
    assert made.bank.position_bias is not None
    valid, measure = splits["valid"], recipe.measure
    assert valid.positions is not None
    scores = trained.model.score(valid)
    shown_scores = scores + bias_of(made.bank.position_bias, valid.positions).to(scores)
    assert trained.keeper.best == pytest.approx(mean_measure(shown_scores, valid, measure))
    assert trained.keeper.best != pytest.approx(mean_measure(scores, valid, measure))


def test_the_log_says_what_is_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    boosted = Recipe(Standardize, BoostedBuilder.of(rounds=2), partial(Phi, mode="shared"))
    parts = dict(zip(("train", "valid"), tiny.splits(), strict=False))
    no_epochs = TrainerSettings(tmp_path, {"max_epochs": 0, "accelerator": "cpu"})
    for recipe, said in (
        (tiny.recipe(), "local metrics in closed form, kept as buffers; Φ: a 20 × 6 embedding"),
        (tiny.recipe(), "loss: sampled WARP; 0 loader workers"),
        (tiny.recipe("trained"), "6 local metrics trained by gradient; Φ: a 1 × 6 embedding"),
        (boosted, "local metrics in closed form, chosen by boosting, kept as buffers; Φ: a 1 × "),
    ):
        with caplog.at_level(logging.INFO):
            train_phi(prepare(parts, recipe), recipe, no_epochs)
        assert said in caplog.text
        caplog.clear()


def test_labels_of_a_steep_gain_are_warned_about() -> None:
    data = tiny.splits()[0]
    with pytest.warns(DataWarning, match="gain"):
        prepare({"train": data.replace(labels=data.labels * 10)}, tiny.recipe("trained"))


def test_a_start_must_suit(found: Prepared) -> None:
    data = found.splits["train"]
    start = Start.of(found.model(Phi))
    assert torch.equal(start.bank.phi, torch.ones(6))
    without_rows = found.model(lambda queries, width, **init: Phi(0, width, mode="per_query"))
    assert torch.equal(Start.of(without_rows).bank.phi, torch.ones(6))
    narrow = data.replace(features=data.features[:, :3])
    with pytest.raises(ConfigError, match="the model to start from has 8 features, the data has 3"):
        start.read({"train": narrow}, tiny.recipe().categories)
    named = replace(start, feature_names=tuple("abcdefgh"))
    for names, reason in ((tuple("abcdefgx"), r"unknown \['x'\]"), (tuple("bacdefgh"), "the same names in another")):
        with pytest.raises(ConfigError, match=f"features of the model to start from, in order, got {reason}"):
            named.read({"train": data.replace(feature_names=names)}, tiny.recipe().categories)
    assert named.read({"train": data}, tiny.recipe().categories)["train"].feature_names == tuple("abcdefgh")
    with pytest.raises(LGMMLError, match="must have weights Φ shared by all queries"):
        Start.of(found.model(partial(Phi, mode="per_query"))).check_growing()
