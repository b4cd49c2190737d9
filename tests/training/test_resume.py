"""Runs that are killed, or shared by two processes, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.losses import Softmax, Warp
from tests.processes import Ended, forked
from tests.training import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent.parent


def run(*words: object) -> Ended:
    """The program of `tiny`, by as many processes as it is told to have."""
    return forked(tiny.main, *words, count=int(str(words[words.index("--devices") + 1])) if "--devices" in words else 1)


def result(*words: object) -> dict:
    done = run(*words)
    assert done.code == 0, done.said
    return torch.load(str(words[1]), weights_only=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("alone")
    return result(folder / "run", folder / "result.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("die_at", "workers"), [(3, 0), (4, 2), (9, 0), (14, 1)])
def test_a_killed_run_resumes_to_the_same_bits(alone: dict, die_at: int, workers: int, tmp_path: Path) -> None:
    """Seven steps make an epoch, so the kills fall within the first, second and third, and at an epoch's end."""
    folder, file = tmp_path / "run", tmp_path / "result.pt"
    killed = run(folder, file, "--die-at", die_at, "--workers", workers)
    assert killed.code == -9, killed.said
    assert not file.exists()
    resumed = result(folder, file, "--resume", "--workers", workers)
    assert resumed["test"] == alone["test"]
    assert resumed["curve"] == alone["curve"]
    assert resumed["phi"].keys() == alone["phi"].keys()
    for name, value in alone["phi"].items():
        torch.testing.assert_close(resumed["phi"][name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.slow
def test_two_processes_evaluate_every_list_once_and_are_given_no_advice(tmp_path: Path) -> None:
    """Processes as Lightning starts them. What is logged is of all of them, so it has nothing to recommend."""
    folder, file = tmp_path / "run", tmp_path / "two.pt"
    program = [sys.executable, "-W", "default", "-m", "tests.training.tiny"]
    words = [*program, folder, file, "--devices", "2", "--epochs", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sync_dist" not in done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr, done.stderr
    two = torch.load(file, weights_only=True)
    assert set(two["counted"].values()) == {10}
    assert (two["phi"]["phi.table.weight"] >= 0).all()
    one = evaluate(LGMML.load(folder / "last.ckpt"), tiny.splits()[2], split="test")
    for name, value in one.means.items():
        assert two["test"][f"test/{name}"] == pytest.approx(value, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_trained_metrics_resume_to_the_same_bits(processes: int, tmp_path: Path) -> None:
    """Dropout, the schedule, Adam's moments and the loader's place all go on as if nothing had happened."""
    options = ("--mode", "trained", "--devices", processes)
    whole = result(tmp_path / "whole", tmp_path / "whole.pt", *options)
    killed = run(tmp_path / "run", tmp_path / "result.pt", *options, "--die-at", 6)
    assert killed.code == -9, killed.said
    resumed = result(tmp_path / "run", tmp_path / "result.pt", *options, "--resume")
    assert resumed["curve"] == whole["curve"]
    for name, value in whole["phi"].items():
        torch.testing.assert_close(resumed["phi"][name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.slow
def test_what_processes_find_adds_up_to_the_loss_of_the_batch(tmp_path: Path) -> None:
    """Lightning averages gradients over processes; each has a part of the batch, so its loss is taken that often."""
    for loss in (Softmax(), Warp()):
        recipe = tiny.recipe("shared", loss=loss)
        module = tiny.prepared().module(recipe)
        batches = TrainingBatches(tiny.splits()[0], batch_size=3, draws=loss.draws)
        module.log = lambda *args, **options: None  # type: ignore[method-assign]
        module._trainer = SimpleNamespace(world_size=1, global_step=0)  # type: ignore[assignment]
        alone = module.training_step(batches[0, 0], 0)
        module._trainer = SimpleNamespace(world_size=4, global_step=0)  # type: ignore[assignment]
        shares = [module.training_step(batches.shared_by(rank, 4)[0, 0], 0) for rank in range(4)]  # one has none
        torch.testing.assert_close(torch.stack(shares).mean(), alone)
