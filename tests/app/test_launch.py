"""Who starts the processes of a run, one folder for all of them, and where a run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lgmml_torch.app.compose import build, settle
from lgmml_torch.app.config import load_config
from lgmml_torch.app.launch import Local, Slurm, Task, own_words
from lgmml_torch.app.start import STARTED, started
from lgmml_torch.app.train import found_resume, train
from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.models.ranker import LGMML

ROOT = Path(__file__).parent.parent.parent
QUICK = (
    "experiment=quick",
    "data.num_queries=30",
    "local_metrics.rounds=3",
    "trainer.max_epochs=3",
    "loader.num_workers=0",
)


def test_a_run_stays_here_unless_somebody_says_otherwise() -> None:
    launcher = build(load_config().launcher)
    assert launcher == Local()
    assert launcher([], Path()) is False


def test_processes_are_told_the_same_but_to_stay() -> None:
    words = ["data=mq2008", "launcher=torchrun", "launcher.processes=3", "seed=1"]
    here = ["launcher=local", "hydra.run.dir='a/b'"]
    assert own_words(words, Path("a/b"), auto=False) == ["data=mq2008", "seed=1", *here]
    assert own_words(words, Path("a/b"), auto=True)[-1] == "resume=auto"
    assert own_words([*words, "resume=x.ckpt"], Path("a/b"), auto=True)[-3:] == ["resume=x.ckpt", *here]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["launcher.processes=3"], ["--standalone", "--nnodes=1", "--nproc-per-node=3", "--max-restarts=0"]),
        (["launcher.nodes=2", "launcher.address=a:1"], ["--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "--nnodes=2"]),
        (
            ["launcher.nodes=2", "launcher.address=a:1", "launcher.own_address=a"],
            ["--local-addr=a", "--rdzv-conf=is_host=1"],
        ),
        (
            ["launcher.nodes=2", "launcher.address=a:1", "launcher.own_address=b"],
            ["--local-addr=b", "--rdzv-conf=is_host=0"],
        ),
        (["launcher.restarts=2"], ["--max-restarts=2", "resume=auto"]),
    ],
)
def test_what_torchrun_is_told(asked: list[str], expected: list[str]) -> None:
    launcher = build(load_config(["launcher=torchrun", *asked]).launcher)
    command = launcher.command(["seed=3"], Path("folder"))
    assert set(expected) <= set(command)
    assert command[command.index("lgmml_torch.app.cli") + 1 :][:2] == ["train", "seed=3"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["launcher.processes=0"], "`launcher.processes` must be positive, got 0"),
        (["launcher.nodes=2"], "`launcher.address` must say where 2 machines meet"),
    ],
)
def test_what_cannot_be_launched_is_refused(asked: list[str], message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        build(load_config(["launcher=torchrun", *asked]).launcher)


def test_all_processes_of_a_run_have_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTED, "2026-01-02_03-04-05")
    assert started() == "2026-01-02_03-04-05"
    monkeypatch.delenv(STARTED)
    assert started().startswith("20")


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
        return found_resume(load_config(["resume=auto", f"paths.output_dir={folder}"])).resume

    def test_the_newest_run_of_the_same_words_that_did_not_finish(self, tmp_path: Path) -> None:
        self.folder(tmp_path, "a")
        expected = self.folder(tmp_path, "b")
        self.folder(tmp_path, "c", report=True)
        self.folder(tmp_path, "d", words="- seed=2\n")
        self.folder(tmp_path, "e", last=False)
        now = self.folder(tmp_path, "f", last=False)
        assert self.found(now) == str(expected / "checkpoints" / "last.ckpt")

    def test_its_own_folder_first(self, tmp_path: Path) -> None:
        self.folder(tmp_path, "a")
        now = self.folder(tmp_path, "b", report=True)
        assert self.found(now) == str(now / "checkpoints" / "last.ckpt")

    def test_what_was_found_stays_when_the_data_decides_the_rest(self, tmp_path: Path) -> None:
        found = self.folder(tmp_path, "a")
        words = ["resume=auto", f"paths.output_dir={found}"]
        cfg = found_resume(load_config(words))
        settled = settle(cfg, words, letor_like(5, 3, num_documents=30))
        assert settled.resume == cfg.resume == str(found / "checkpoints" / "last.ckpt")
        assert settled.chosen is not None

    def test_nothing_to_go_on_from(self, tmp_path: Path) -> None:
        assert self.found(self.folder(tmp_path, "a", last=False)) is None
        assert found_resume(load_config([])).resume is None


def launched(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LGMML_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    environment.pop(STARTED, None)
    command = [sys.executable, str(ROOT / "train.py"), *QUICK, *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)  # three starts of two processes, however busy the machine
def test_a_killed_process_ends_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    long = ("trainer.max_epochs=40", "callbacks.early_stopping.patience=99", "trainer.enable_progress_bar=false")
    torchrun = ("launcher=torchrun", "launcher.processes=2", *long)
    first = launched(tmp_path, *torchrun)
    while not list(tmp_path.rglob("last.ckpt")) and first.poll() is None:
        time.sleep(0.05)
    workers = [p for p in psutil.Process(first.pid).children(recursive=True) if not p.children()]
    workers[-1].send_signal(signal.SIGKILL)
    _, said = first.communicate()
    assert first.returncode == 2
    assert "a process of the run died" in said.splitlines()[-1]
    again = launched(tmp_path, *torchrun, "resume=auto")
    _, said = again.communicate()
    assert again.returncode == 0, said
    folders = [file.parent for file in tmp_path.rglob("report.json")]
    assert len(folders) == 1
    (tmp_path / "alone").mkdir()
    launched(tmp_path / "alone", *long).communicate()
    models = [LGMML.load(next(place.rglob("model.safetensors"))) for place in (folders[0], tmp_path / "alone")]
    states = [model.state_dict() for model in models]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], atol=1e-6, rtol=1e-5, equal_nan=True)


class TestSlurm:
    def test_the_script_says_what_was_asked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        submitit = pytest.importorskip("submitit")
        monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda cls: 1))
        launcher = Slurm(processes=2, nodes=3, minutes=30, partition="long", memory=8)
        executor = launcher.executor(tmp_path)._executor
        text = executor._make_submission_file_text("srun python", "1")
        for line in ("nodes=3", "ntasks-per-node=2", "time=30", "partition=long", "mem=8GB", "signal=USR2"):
            assert line in text
        assert {"#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --signal=USR2@90"} <= set(text.splitlines())
        assert "\nsrun " in text
        assert text.rstrip().endswith("srun python")
        assert executor.max_num_timeout == launcher.requeues == 20

    def test_a_job_that_is_put_back_does_the_same_again(self, tmp_path: Path) -> None:
        submitit = pytest.importorskip("submitit")
        task = Task(("seed=1", "launcher=local", "resume=auto"))
        again = task.checkpoint()
        assert isinstance(again, submitit.helpers.DelayedSubmission)
        assert again.function == task

    def test_without_a_cluster_there_is_a_sentence(self, tmp_path: Path) -> None:
        pytest.importorskip("submitit")
        with pytest.raises(ConfigError, match=r"`launcher\.cluster` .nowhere. cannot be used here"):
            Slurm(cluster="nowhere")(["seed=1"], tmp_path)

    def test_what_a_cluster_cannot_do_is_told(self, tmp_path: Path) -> None:
        pytest.importorskip("submitit")
        with pytest.raises(ConfigError, match=r"`launcher\.cluster` 'local' cannot do what was asked for: .*one node"):
            Slurm(cluster="local", nodes=2)(["seed=1"], tmp_path)
        with pytest.raises(LGMMLError, match=r"`launcher\.requeues` must be at least 0, got -1"):
            Slurm(requeues=-1)

    def test_debug_runs_here_and_now(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("submitit")
        monkeypatch.chdir(tmp_path)
        before = dict(os.environ)
        assert Slurm(cluster="debug", nodes=1)([*QUICK, "logger=none", "callbacks=quiet"], tmp_path / "run")
        assert (tmp_path / "run" / "report.json").is_file()
        assert dict(os.environ) == before

    def test_a_job_that_fails_says_where_to_look(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        submitit = pytest.importorskip("submitit")

        def fails() -> None:
            raise submitit.core.utils.FailedJobError("a long story")

        job = SimpleNamespace(job_id="7", results=fails)
        monkeypatch.setattr(Slurm, "executor", lambda *_: SimpleNamespace(submit=lambda task: job))
        with pytest.raises(ConfigError, match=r"job 7 failed; what it said is in .*slurm"):
            Slurm(wait=True)(["seed=1"], tmp_path)

    @pytest.mark.timeout(600)  # two starts of two processes, however busy the machine
    def test_a_job_whose_time_is_up_goes_on_where_it_was(self, tmp_path: Path) -> None:
        pytest.importorskip("submitit")
        long = (
            "trainer.max_epochs=30",
            "loader.batch_size=4",
            "callbacks=quiet",
            "logger=none",
            "name=slurm",
            "threads=1",
        )
        words = (*QUICK, *long, "evaluation.ideal=false", "trainer.enable_progress_bar=false")
        folder = tmp_path / "run"
        task = Task(tuple(own_words(words, folder, auto=True)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(ROOT))
            patch.setenv("OMP_NUM_THREADS", "1")
            job = Slurm(cluster="local", nodes=1, processes=2).executor(folder).submit(task)
        while not (folder / "checkpoints" / "last.ckpt").is_file():
            assert job.state == "RUNNING", job.stderr()
            time.sleep(0.02)
        for process in psutil.Process(job._process.pid).children():
            process.send_signal(signal.SIGUSR2)  # as SLURM does
        assert job.results() == [0, 0]
        said = job.task(0).stdout()
        assert "Requeued job" in said
        assert f"resume=auto: {folder / 'checkpoints' / 'last.ckpt'}" in said
        train(load_config([*words, f"paths.output_dir={tmp_path / 'alone'}"]))
        states = [LGMML.load(place / "model.safetensors").state_dict() for place in (folder, tmp_path / "alone")]
        for name, value in states[0].items():
            torch.testing.assert_close(value, states[1][name], atol=1e-6, rtol=1e-5, equal_nan=True)
