"""A run on Ray: as without it, and as undisturbed when a worker is killed; what cannot be is refused at once."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lgmml_torch.app.compose import build
from lgmml_torch.app.config import load_config
from lgmml_torch.app.launch_ray import Heard, Ray, open_storage, run_name
from lgmml_torch.app.train import train
from lgmml_torch.checks import LGMMLError, MissingDependencyError
from lgmml_torch.data.write import save_letor
from lgmml_torch.models.storage import read_model
from tests.app.test_cli import lgmml, refused
from tests.doors import small_data, small_model


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same bits; NaN equals NaN."""
    if a.keys() != b.keys():
        return False
    pairs = [(value, b[name]) for name, value in a.items()]
    return all(x.isnan().equal(y.isnan()) and x.nan_to_num().equal(y.nan_to_num()) for x, y in pairs)


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in process.children(recursive=True):
        try:
            if "TrainWorker" in " ".join(child.cmdline()[:1]):
                found.append(child)
        except psutil.Error:  # gone in the meantime
            continue
    return sorted(found, key=lambda child: child.pid)


WORDS = (
    "experiment=quick", "data.num_queries=30", "local_metrics.rounds=3", "trainer.max_epochs=60", "callbacks=quiet",
    "loader.batch_size=6", "loader.num_workers=0", "logger=none", "trainer.enable_progress_bar=false", "name=ray",
    "evaluation.ideal=false", "threads=1",
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # Ray's own
SEEN = 1.5  # seconds after which Ray has noticed a report, and the checkpoint counts
PATIENCE = 900  # seconds that any wait may take, however busy the machine


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("processes=0", r"`launcher\.processes` must be positive, got 0"),
        ("processes=1.5", r"`launcher\.processes` must be a whole number, got 1\.5"),
        ("cpus=0", r"`launcher\.cpus` must be positive, got 0"),
        ("failures=-1", r"`launcher\.failures` must be at least 0, got -1"),
        ("storage=3", r"`launcher\.storage` must be text, got 3"),
        ("storage='nowhere://a/b'", r"`launcher\.storage` 'nowhere://a/b' cannot be used"),
    ],
)
def test_what_cannot_be_launched_is_refused(asked: str, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        build(load_config(["launcher=ray", f"launcher.{asked}"]).launcher)


def test_without_ray_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"`ray` is needed to run on Ray; .*lgmml-torch\[ray\]"):
        Ray()([], tmp_path)


def test_a_storage_is_a_folder_or_a_url(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for place in (str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}"):  # the last one by fsspec
        system, path = open_storage(place)
        assert path == str(tmp_path)
        with system.open_output_stream(f"{path}/file") as stream:
            stream.write(b"there")
        assert (tmp_path / "file").read_bytes() == b"there"
        (tmp_path / "file").unlink()


def test_a_run_has_a_name_of_its_own_unless_it_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = ["seed=1", "launcher=ray", "launcher.processes=2"]
    first = run_name(str(tmp_path), words)
    (tmp_path / first).mkdir()  # killed before anything was reported: nothing to go on from
    assert run_name(str(tmp_path), [*words[:1], "resume=auto"])[:19] == first[:19]
    assert run_name(str(tmp_path), ["seed=2"])[:19] != first[:19]


def test_only_the_first_process_is_heard_and_errors_are_told_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    queue = SimpleNamespace(put=kept.append)
    monkeypatch.setenv("RANK", "0")
    heard = Heard(queue)
    for text in ("one", " line\nand a", "nother\n", "error: no such file\n"):
        assert heard.write(text) == len(text)
    monkeypatch.setenv("RANK", "1")
    Heard(queue).write("a second voice\n")
    assert kept == ["one line\n", "and another\n"]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of this machine for all runs of this file; none of its processes outlives it."""
    pytest.importorskip("ray.train")
    from lgmml_torch.app.launch_ray import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
        patch.delenv("RAY_ADDRESS", raising=False)
        resource_tracker.ensure_running()  # it is not Ray's, and stays
        before = psutil.Process().children(recursive=True)
        with cluster(None, 2) as found:
            children = [child for child in psutil.Process().children(recursive=True) if child not in before]
            yield found
        for left in psutil.wait_procs(children, timeout=30)[1]:
            left.kill()


@pytest.fixture(scope="module")
def undisturbed(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert Ray()(WORDS, folder)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(2 * PATIENCE)
def test_a_run_on_ray_is_a_run(undisturbed: Path, tmp_path: Path) -> None:
    train(load_config([*WORDS, f"paths.output_dir={tmp_path}"]))
    tensors, others = (read_model(place / "model.safetensors")[1] for place in (undisturbed, tmp_path))
    for name, value in tensors.items():
        torch.testing.assert_close(value, others[name], atol=1e-6, rtol=1e-5, equal_nan=True)
    assert not (undisturbed / "ray").exists()  # copies of checkpoints


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(2 * PATIENCE)
def test_a_killed_worker_costs_time_only(
    ray: Any, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []

    def kill() -> None:
        end, first = time.monotonic() + PATIENCE, math.inf
        while time.monotonic() < end and not killed:
            if any((tmp_path / "run" / "ray").glob("lgmml-*/checkpoint_*")):
                first = min(first, time.monotonic())
            workers = workers_of(psutil.Process())
            if time.monotonic() - first > SEEN and workers:
                killed.append(workers[-1].pid)
                os.kill(workers[-1].pid, signal.SIGKILL)
            time.sleep(0.01)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    assert Ray(failures=1)(WORDS, tmp_path / "run")
    killer.join()
    assert killed
    said = capsys.readouterr().out
    assert said.count("] - train: ") == 2
    assert f"resume=auto: {tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}" in said
    (spec, tensors), (other, others) = (
        read_model(place / "model.safetensors") for place in (undisturbed, tmp_path / "run")
    )
    assert spec == other
    assert equal(tensors, others)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(2 * PATIENCE)
def test_scores_are_those_of_processes(ray: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model().save(tmp_path / "model.safetensors")
    save_letor(small_data(seed=7), tmp_path / "new.txt")
    lgmml("convert", tmp_path / "new.txt", tmp_path / "shards", "--documents", 15)
    score = ("score", tmp_path / "model.safetensors", tmp_path / "shards")
    lgmml(*score, "-o", tmp_path / "here")
    lgmml(*score, "-o", tmp_path / "ray", "--engine", "ray", "--jobs", 2)
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("here", "ray")]
    assert files[0] == files[1]
    first = min(files[1])
    (tmp_path / "ray" / first).unlink()
    capsys.readouterr()
    lgmml(*score, "-o", tmp_path / "ray", "--engine", "ray", "--jobs", 2)
    assert f"1 shards scored, {len(files[1]) - 1} were there already" in capsys.readouterr().out
    assert (tmp_path / "ray" / first).read_bytes() == files[1][first]
    shard = tmp_path / "shards" / first
    shard.write_bytes(shard.read_bytes()[:60] + b"x" + shard.read_bytes()[61:])
    message = refused(capsys, *score, "-o", tmp_path / "other", "--engine", "ray")
    assert message.endswith(f"{first}: the file was changed: its content does not match the manifest")
