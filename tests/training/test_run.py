"""What a run of training says, keeps and refuses."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lgmml_torch.checks import ConfigError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.fitting.boosted import BoostedBuilder
from lgmml_torch.functional.calibration import fit_grade_map
from lgmml_torch.functional.measures import mean_measure
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import all_views
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.storage import load_checkpoint
from lgmml_torch.training import preprocessed
from lgmml_torch.training.callbacks import QUIET
from lgmml_torch.training.defaults import check_effect
from lgmml_torch.training.preprocessed import Views, sample_of, views_fit
from lgmml_torch.training.recipe import Recipe, TrainerSettings, check_precision
from lgmml_torch.training.stages import Prepared, Trained, prepare, train_phi
from tests.training import tiny


@pytest.fixture(scope="module")
def found() -> Prepared:
    return tiny.prepared()


class WrittenSteps(pl.Callback):
    """The step of ``last.ckpt`` after every batch; None before it is there."""

    def __init__(self, file: Path) -> None:
        self.file, self.steps = file, list[int | None]()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.steps.append(load_checkpoint(self.file)["global_step"] if self.file.exists() else None)


def test_the_last_checkpoint_is_written_every_few_steps_and_at_the_end_of_an_epoch(
    found: Prepared, tmp_path: Path
) -> None:
    watch = WrittenSteps(tmp_path / "last.ckpt")
    tiny.train(tmp_path, found=found, epochs=2, every_n_steps=3, callbacks=(watch,))
    # Epochs of seven batches; callbacks of the user come first.
    assert watch.steps == [None, None, None, 3, 3, 3, 6, 7, 7, 9, 9, 9, 12, 12]


@pytest.mark.parametrize(
    ("settings", "judged"),
    [
        ({"check_val_every_n_epoch": 2}, [0, 2, 4, 5]),
        ({"check_val_every_n_epoch": 9}, [0, 5]),
        ({"check_val_every_n_epoch": 2, "max_steps": 9}, [0, 2]),
        ({"check_val_every_n_epoch": 2, "max_steps": 4}, [0, 1]),
    ],
)
def test_weights_that_were_judged_are_kept_and_the_last_ones_are_judged(
    found: Prepared, tmp_path: Path, settings: dict[str, Any], judged: list[int]
) -> None:
    trained = tiny.train(tmp_path, found=found, epochs=5, trainer=settings)
    curve = trained.keeper.curve
    assert sorted(curve) == judged
    assert trained.keeper.best_epoch == max(curve, key=curve.__getitem__)
    data = trained.module.data_of("valid")
    assert mean_measure(trained.score("valid"), data) == pytest.approx(max(curve.values()), abs=1e-6)


def test_the_log_says_if_nothing_was_gained(found: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = "The weights kept are those before training"
    for rate, gained in ((1e4, False), (0.01, True)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="lgmml_torch.training.stages"):
            trained = tiny.train(
                tmp_path / str(rate),
                found=found,
                mode="shared",
                optimizer=partial(torch.optim.SGD, lr=rate),
                keep="last" if gained else "best",
                epochs=1,
            )
        assert trained.moved is gained
        assert (said in caplog.text) is not gained


def test_validation_is_measured_by_the_definitions_of_the_preset(found: Prepared, tmp_path: Path) -> None:
    """LightGBM counts a list without a relevant document as 1; by our definition it is skipped."""
    valid = found.splits["valid"]
    labels = valid.labels.clone()
    labels[: int(valid.offsets[1])] = 0
    splits = {**found.splits, "valid": valid.replace(labels=labels)}
    curves = {}
    for preset in ("default", "lightgbm"):
        trained = tiny.train(tmp_path / preset, found=replace(found, splits=splits), preset=preset, epochs=1)
        curves[preset] = trained.keeper.curve[1]
    skipped, ones = curves["default"], curves["lightgbm"]
    assert ones == pytest.approx((skipped * (len(valid) - 1) + 1) / len(valid), abs=1e-6)


def test_a_run_is_resumed_with_its_own_seed_only(found: Prepared, tmp_path: Path) -> None:
    tiny.train(tmp_path, found=found, epochs=1)
    around = TrainerSettings(tmp_path, {"max_epochs": 2, "accelerator": "cpu"}, resume=tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match="`seed` must be 0, as of the run that is resumed, got 4"):
        train_phi(found, replace(tiny.recipe(), seed=4), around)


def test_scores_from_the_inputs_of_training_are_the_model_s(found: Prepared, tmp_path: Path) -> None:
    for mode, own_rows in (("per_query", True), ("amortized", False), ("trained", False)):
        trained = tiny.train(tmp_path / mode, mode=mode, epochs=1)
        for split in ("train", "valid", "test"):
            rows = own_rows and split == "train"
            expected = trained.model.score(found.splits[split], known_queries=rows)
            torch.testing.assert_close(trained.score(split, own_rows=rows), expected, rtol=1e-4, atol=1e-5)
        valid = found.splits["valid"]
        chances = fit_grade_map(trained.score("valid"), valid.labels)
        assert trained.model.grade_map is not None
        torch.testing.assert_close(torch.tensor(trained.model.grade_map.cuts), torch.tensor(chances.cuts))
    wide = tiny.train(tmp_path / "wide", mode="shared", epochs=0, dtype=torch.float64)
    assert wide.score("test").dtype == torch.float64
    half = tiny.train(tmp_path / "half", mode="shared", epochs=1, distances=torch.bfloat16)
    assert torch.equal(half.score("test"), half.model.score(found.splits["test"]))
    policy = tiny.train(tmp_path / "policy", mode="amortized", epochs=1)
    ones = policy.model.score(found.splits["test"], policy="ones")
    torch.testing.assert_close(policy.score("test", policy="ones"), ones, rtol=1e-4, atol=1e-5)


def test_documents_are_preprocessed_once(tmp_path: Path) -> None:
    class Counting(Standardize):
        name = "counting"
        rows = 0

        def _transform(self, features: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            Counting.rows += len(features)
            return super()._transform(features, offsets)

    splits = dict(zip(("train", "valid", "test"), tiny.splits(), strict=True))
    for mode in ("shared", "trained"):
        Counting.rows = 0
        recipe = replace(tiny.recipe(mode), preprocess=Counting)
        made = prepare(splits, recipe)
        trained = train_phi(made, recipe, TrainerSettings(tmp_path / mode, {"max_epochs": 1, "accelerator": "cpu"}))
        for name in splits:
            trained.score(name)
        assert Counting.rows == sum(part.num_documents for part in splits.values()), mode
        assert not made.preprocessed  # given to `inputs`, or free again


class NoHalfPrecision(TorchDispatchMode):
    """A processor that has no products in bfloat16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func) and args[0].dtype == torch.bfloat16:
            raise RuntimeError("could not create a primitive")
        return func(*args, **(kwargs or {}))


def test_a_precision_that_the_processor_lacks_is_refused() -> None:
    def trainer(precision: str) -> pl.Trainer:
        settings = {**QUIET, "accelerator": "cpu", "precision": precision}
        return pl.Trainer(logger=False, enable_checkpointing=False, **settings)

    with NoHalfPrecision():
        check_precision(trainer("32-true"))
        sentence = r"`trainer.precision` must be one that cpu can compute in, got 'bf16-mixed' \(could not create"
        with pytest.raises(ConfigError, match=sentence):
            check_precision(trainer("bf16-mixed"))


def test_biases_of_positions_that_boosting_found_are_those_of_training() -> None:
    data = letor_like(20, 4, seed=1)
    shown = torch.arange(data.num_documents) % 4
    recipe = Recipe(Standardize, BoostedBuilder.of(rounds=3), partial(Phi, mode="shared"))
    made = prepare({"train": data.replace(positions=shown)}, recipe)
    module = made.module(recipe)
    assert made.bank.position_bias is not None
    assert module.position_bias is not None
    assert bool(made.bank.position_bias.any())
    assert torch.equal(module.position_bias, made.bank.position_bias.to(module.position_bias))


def test_large_lists_are_seen_as_a_sample_of_whole_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    data = letor_like(12, 5, seed=2)
    monkeypatch.setattr(preprocessed, "SAMPLE_VALUES", data.num_documents * 5 // 2)
    sample = sample_of(data, seed=0)
    assert 1 <= len(sample) < len(data)
    assert sample.num_documents <= data.num_documents // 2
    assert set(sample.qids) <= set(data.qids)
    monkeypatch.setattr(preprocessed, "SAMPLE_VALUES", data.num_documents * 5)
    assert sample_of(data, seed=0) is data


def test_metrics_start_from_enough_relevant_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small sample of long lists may have none."""
    data = letor_like(12, 5, seed=2)
    monkeypatch.setattr(preprocessed, "_START_VALUES", 1)
    assert sample_of(data, seed=0, start=True) is data
    monkeypatch.setattr(preprocessed, "_START_RELEVANT", 1)
    few = sample_of(data.select([3]), seed=0, start=True)
    assert len(few) == 1
    labels = torch.zeros_like(data.labels)
    assert sample_of(data.replace(labels=labels), seed=0, start=True).num_queries == data.num_queries


def test_lists_too_large_to_be_kept_are_preprocessed_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is the same to rounding. From a sample of the lists, the preprocessing is that of the sample."""
    splits = dict(zip(("train", "valid", "test"), tiny.splits(), strict=True))
    recipe = replace(tiny.recipe("trained"), preprocess=partial(all_views, ramps=2), features="all")

    def fitted(folder: Path) -> Trained:
        made = prepare(splits, recipe)
        return train_phi(made, recipe, TrainerSettings(folder, {"max_epochs": 2, "accelerator": "cpu"}))

    for spare, fits in ((0, True), (-1, False)):  # four bytes for each column of training and validation lists
        documents = splits["train"].num_documents + splits["valid"].num_documents
        with monkeypatch.context() as patch:
            patch.setattr(preprocessed, "_KEPT_BYTES", 4 * 30 * documents + spare)
            assert views_fit(splits, 30, torch.float32) is fits
    kept = fitted(tmp_path / "kept")
    assert isinstance(kept.module.inputs_of("train"), torch.Tensor)
    assert isinstance(kept.module.inputs_of("test"), Views)  # seen once, at the end
    monkeypatch.setattr(preprocessed, "_KEPT_BYTES", 0)
    monkeypatch.setattr(preprocessed, "_START_RELEVANT", 1)
    monkeypatch.setattr(
        preprocessed, "_START_VALUES", splits["train"].num_documents * 4
    )  # of 8 features: half of the lists
    made = prepare(splits, recipe)
    made.add_inputs(made.model(recipe.make_phi))
    assert not made.preprocessed
    for name, part in splits.items():
        views = made.inputs[name]
        assert isinstance(views, Views)
        torch.testing.assert_close(views.of(slice(None), part.offsets), made.preprocess(part.features, part.offsets))
    monkeypatch.setattr(preprocessed, "_START_VALUES", splits["train"].num_documents * 8)
    by_batch = fitted(tmp_path / "batches")
    for split in ("valid", "test"):
        torch.testing.assert_close(by_batch.score(split), kept.score(split), rtol=1e-3, atol=1e-3)


def test_a_refusal_names_the_setting_and_the_metrics_it_belongs_to() -> None:
    with pytest.raises(ConfigError) as refused:
        check_effect(["margin"], "trained", "softmax")
    assert str(refused.value) == (
        "`margin` (loss.margin) has no effect with the loss softmax of trained metrics (asked for); leave it out, or "
        "name another loss: warp"
    )
    with pytest.raises(ConfigError, match=r"^`budget` has no effect on sampled metrics"):
        check_effect(["budget"], "sampled", "warp")
    with pytest.raises(ConfigError, match=r"^`distances` has no effect on trained metrics"):
        check_effect(["distances"], "trained", "softmax")


KILLED = textwrap.dedent("""
    import os, signal, torch
    from lgmml_torch.ragged import RankingData
    from lgmml_torch.training.batches import BatchLoader, TrainingBatches

    count = 60_000  # a batch that does not fit into a pipe, so that its worker waits
    data = RankingData.from_arrays(torch.rand(count, 1), torch.arange(count) % 2, group=[count // 4] * 4)
    loader = BatchLoader(TrainingBatches(data, batch_size=1, draws=False), num_workers=2)
    next(iter(loader))
    os.kill(os.getpid(), signal.SIGKILL)
""")


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_workers_end_with_the_run() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], start_new_session=True) as run:
        run.wait(60)
    assert run.returncode == -9
    for _ in range(100):
        left = [one.pid for one in psutil.process_iter() if _session(one.pid) == run.pid]
        if not left:
            return
        time.sleep(0.1)
    pytest.fail(f"workers are left: {left}")


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
