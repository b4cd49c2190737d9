"""Runs that are killed, or shared by two processes, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lgmml_torch.training.batches import TrainingBatches

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "default", "-m", "tests.training.tiny", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def result(*arguments: object) -> dict:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return torch.load(str(arguments[1]), weights_only=True)


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
    assert killed.returncode == -9, killed.stderr
    assert not file.exists()
    resumed = result(folder, file, "--resume", "--workers", workers)
    assert resumed["test"] == alone["test"]
    assert resumed["curve"] == alone["curve"]
    assert resumed["phi"].keys() == alone["phi"].keys()
    for name, value in alone["phi"].items():
        torch.testing.assert_close(resumed["phi"][name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.slow
def test_two_processes_evaluate_every_list_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two = result(folder, tmp_path / "two.pt", "--devices", 2, "--epochs", 1)
    assert set(two["counted"].values()) == {10}
    assert (two["phi"]["phi.table.weight"] >= 0).all()
    from lgmml_torch.evaluation.evaluate import evaluate
    from lgmml_torch.models.ranker import LGMML
    from tests.training import tiny

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
    assert killed.returncode != 0
    resumed = result(tmp_path / "run", tmp_path / "result.pt", *options, "--resume")
    assert resumed["curve"] == whole["curve"]
    for name, value in whole["phi"].items():
        torch.testing.assert_close(resumed["phi"][name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.slow
def test_two_processes_are_given_no_advice(tmp_path: Path) -> None:
    """What is logged at the end of an epoch is of all processes, so Lightning has nothing to recommend."""
    done = run(tmp_path / "run", tmp_path / "two.pt", "--devices", 2, "--epochs", 1)
    assert done.returncode == 0, done.stderr
    assert "sync_dist" not in done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr, done.stderr


@pytest.mark.slow
def test_what_processes_find_adds_up_to_the_loss_of_the_batch(tmp_path: Path) -> None:
    """Lightning averages gradients over processes; each has a part of the batch, so its loss is taken that often."""
    from lgmml_torch.training.losses import Softmax, Warp
    from lgmml_torch.training.stages import make_module
    from tests.training import tiny

    for loss in (Softmax(), Warp()):
        recipe = tiny.recipe("shared", loss=loss)
        module = make_module(tiny.prepared(), recipe)
        batches = TrainingBatches(tiny.splits()[0], batch_size=3, draws=loss.draws)
        module.log = lambda *args, **options: None  # type: ignore[method-assign]
        module._trainer = SimpleNamespace(world_size=1, global_step=0)  # type: ignore[assignment]
        alone = module.training_step(batches[0, 0], 0)
        module._trainer = SimpleNamespace(world_size=4, global_step=0)  # type: ignore[assignment]
        shares = [module.training_step(batches.shared_by(rank, 4)[0, 0], 0) for rank in range(4)]  # one has none
        torch.testing.assert_close(torch.stack(shares).mean(), alone)
