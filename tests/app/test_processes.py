"""Runs of several processes, by torchrun and on Ray: the model of one process, to rounding; and where a run resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lgmml_torch.app.compose import build
from lgmml_torch.app.config import load_config
from lgmml_torch.app.start import RayLauncher, config_dir, main
from lgmml_torch.app.train import _resolve_resume, train
from lgmml_torch.checks import LGMMLError, MissingDependencyError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.write import write_shards
from lgmml_torch.models.storage import read_model
from tests.processes import forked

ROOT = Path(__file__).parent.parent.parent
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / "train.py"))
# `paper`: a progress bar and no early stopping, with which the first process once waited for ever.
SETTINGS = (
    "data=shards", "local_metrics=boosted", "local_metrics.rounds=3", "phi=shared", "optimizer.lr=0.3",
    "trainer.max_epochs=2", "loader.num_workers=0", "loader.batch_size=6", "logger=none", "callbacks=paper",
    "threads=1", "name=several",
)  # fmt: skip
GENERATED = ("data=generated_small", "data.num_queries=20")
CALLBACKS = sorted(path.stem for path in (config_dir() / "callbacks").glob("*.yaml"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """The folder of a run of one process, and the settings it was made with."""
    home = tmp_path_factory.mktemp("alone")
    parts = letor_like(40, 6, num_documents=400, seed=3).split((0.6, 0.2, 0.2), seed=0)
    for name, part in zip(("train", "valid", "test"), parts, strict=True):
        write_shards(part, home / "shards" / name, documents=60, progress=False)
    settings = (*SETTINGS, f"data.path={home / 'shards'}", f"paths.cache_dir={home / 'cache'}")
    train(load_config([*settings, f"paths.output_dir={home / 'run'}"]))
    return home / "run", settings


def assert_same_model(folder: Path, other: Path) -> None:
    tensors, others = (read_model(place / "model.safetensors")[1] for place in (folder, other))
    for name, value in tensors.items():
        torch.testing.assert_close(value, others[name], atol=1e-5, rtol=1e-4, equal_nan=True)


def started(home: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *words], cwd=home, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(300)
def test_torchrun_gives_the_model_of_one_process_and_resumes(
    alone: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    folder, settings = alone
    run = started(tmp_path, *TWO, *settings)
    said = run.communicate()[1]
    assert run.returncode == 0, said
    found = list(tmp_path.glob("outputs/several/*"))
    assert len(found) == 1  # one folder for both processes
    assert_same_model(found[0], folder)
    # Without its report a run counts as interrupted: one process continues from the checkpoint of two.
    (found[0] / "report.json").unlink()
    result = train(load_config([*settings, "resume=auto", f"paths.output_dir={found[0]}"]))
    assert result is not None
    assert_same_model(found[0], folder)


@pytest.mark.timeout(300)
def test_the_installed_command_starts_further_processes(tmp_path: Path) -> None:
    script = tmp_path / "lgmml"  # as pip writes it
    script.write_text("import sys\nfrom lgmml_torch.app.cli import main\nsys.exit(main())\n")
    small = (*GENERATED, *SETTINGS[1:], "trainer=ddp_cpu", "paths.cache_dir=cache")
    run = started(tmp_path, str(script), "train", *small)
    said = run.communicate()[1]
    assert run.returncode == 0, said
    assert len(list(tmp_path.glob("outputs/several/*/model.safetensors"))) == 1


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of this machine for all runs of this file."""
    pytest.importorskip("ray.train")
    import ray as found

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "240")  # for a busy machine
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        found.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield found
        found.shutdown()


def by_torchrun() -> None:
    """``train.py`` in a process that torchrun has started."""
    os.environ |= {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    main()


def sweep(settings: tuple[str, ...], folder: object) -> list[str]:
    """The settings with every choice of callbacks, one after the other in the same processes."""
    kept = [word for word in settings if not word.startswith("callbacks=")]
    return ["-m", *kept, f"callbacks={','.join(CALLBACKS)}", f"hydra.sweep.dir={folder}"]


class TestEveryChoiceOfCallbacks:
    """The model of one process; with `quiet`, Lightning's bar on the first process once waited for ever."""

    @pytest.mark.timeout(120)
    def test_with_torchrun(self, alone: tuple[Path, tuple[str, ...]], tmp_path: Path) -> None:
        folder, settings = alone
        ended = forked(by_torchrun, *sweep(settings, tmp_path / "sweep"), count=2)
        assert ended.code == 0, ended.said
        for number in range(len(CALLBACKS)):
            assert_same_model(tmp_path / "sweep" / str(number), folder)

    @pytest.mark.timeout(120)
    def test_with_processes_that_lightning_starts(self, tmp_path: Path) -> None:
        settings = (*GENERATED, *SETTINGS[1:], "trainer=ddp_cpu", "paths.cache_dir=false")
        ended = forked(main, *sweep(settings, tmp_path / "sweep"), count=2)
        assert ended.code == 0, ended.said
        for number in range(1, len(CALLBACKS)):
            assert_same_model(tmp_path / "sweep" / str(number), tmp_path / "sweep" / "0")


@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # Ray's own
def test_ray_gives_the_model_of_one_process(ray: Any, alone: tuple[Path, tuple[str, ...]], tmp_path: Path) -> None:
    folder, settings = alone
    build(load_config(["launcher=ray"]).launcher)(settings, tmp_path / "run")
    assert_same_model(tmp_path / "run", folder)
    assert not (tmp_path / "run" / "ray").exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("workers=0", r"`launcher\.workers` must be positive, got 0"),
        ("cpus=0", r"`launcher\.cpus` must be positive, got 0"),
        ("failures=-1", r"`launcher\.failures` must be at least 0, got -1"),
    ],
)
def test_a_launcher_that_cannot_be_is_refused(asked: str, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        build(load_config(["launcher=ray", f"launcher.{asked}"]).launcher)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"`ray` is needed to run on Ray; .*lgmml-torch\[ray\]"):
        RayLauncher()([], tmp_path)


class TestAuto:
    def folder(
        self, home: Path, name: str, *, words: str = "- seed=1\n", report: bool = False, last: bool = True
    ) -> Path:
        place = home / name
        (place / ".hydra").mkdir(parents=True)
        (place / ".hydra" / "overrides.yaml").write_text(words + "- resume=auto\n")
        if last:
            (place / "checkpoints").mkdir()
            (place / "checkpoints" / "last.ckpt").touch()
        if report:
            (place / "report.json").touch()
        return place

    def found(self, folder: Path) -> Any:
        return _resolve_resume(load_config(["resume=auto", f"paths.output_dir={folder}"])).resume

    def test_the_newest_unfinished_run_of_the_same_command(self, tmp_path: Path) -> None:
        self.folder(tmp_path, "a")
        expected = self.folder(tmp_path, "b")
        self.folder(tmp_path, "c", report=True)
        self.folder(tmp_path, "d", words="- seed=2\n")
        self.folder(tmp_path, "e", last=False)
        now = self.folder(tmp_path, "f", last=False)
        assert self.found(now) == str(expected / "checkpoints" / "last.ckpt")

    def test_its_own_folder_first_and_none_where_there_is_nothing(self, tmp_path: Path) -> None:
        first = self.folder(tmp_path, "a", last=False)
        assert self.found(first) is None
        assert _resolve_resume(load_config([])).resume is None
        self.folder(tmp_path, "b")
        now = self.folder(tmp_path, "c", report=True)
        assert self.found(now) == str(now / "checkpoints" / "last.ckpt")


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ("experiment=quick", "data.num_queries=30", "trainer.max_epochs=0", "logger=none", "callbacks=quiet")
    for _ in range(2):
        ended = forked(main, *quick, "hydra.run.dir=outputs/${now:same-second}")
        assert ended.code == 0, ended.said
    folders = sorted((tmp_path / "outputs").iterdir())
    assert [folder.name for folder in folders] == ["same-second", "same-second-2"]
    assert all((folder / "report.json").is_file() for folder in folders)
