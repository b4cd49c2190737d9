"""Ctrl-C and SIGTERM at every stage: a sentence with the command to go on, a checkpoint, exit codes 130 and 143."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from lgmml_torch.app import start
from lgmml_torch.app import train as app
from lgmml_torch.app.cli import main as lgmml
from lgmml_torch.app.commands import score
from lgmml_torch.app.config import config_dir
from lgmml_torch.app.start import Interrupted, Watch
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import load_checkpoint, read_model
from lgmml_torch.training.module import LGMMLModule
from tests.processes import forked

SMALL = [
    "data.num_queries=24", "data.num_features=6", "local_metrics.rounds=4", "loader.batch_size=3", "threads=1",
    "loader.num_workers=0", "trainer.max_epochs=3", "trainer.accelerator=cpu", "callbacks=quiet", "logger=none",
    "trainer.enable_progress_bar=false", "keep=last",
    "hydra/job_logging=none", "hydra/hydra_logging=none",
]  # fmt: skip
CODES = {signal.SIGINT: (130, "Ctrl-C"), signal.SIGTERM: (143, "SIGTERM")}


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def before(function: Callable[..., Any], number: int, *, call: int = 1) -> Callable[..., Any]:
    """The function, but a signal comes just before its so manieth call."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            send(number)
        return function(*args, **kwargs)

    return wrapped


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run starts in an empty folder, and leaves handlers and Hydra as they were."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in CODES}
    yield
    assert {number: signal.getsignal(number) for number in CODES} == handlers
    GlobalHydra.instance().clear()


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """``python train.py`` in this process."""
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    try:
        start.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def told(capsys: pytest.CaptureFixture[str], number: int) -> list[str]:
    """The words of the command that standard error ends with, and nothing else there."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    sentence, _, command = lines[0].partition("go on with: ")
    assert sentence.startswith(f"stopped by {CODES[signal.Signals(number)][1]}; ")
    program, script, *words = shlex.split(command)
    assert (program, script) == ("python", "train.py")
    return words


def content(folder: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Description and tensors of a run's model, bit for bit."""
    spec, tensors = read_model(Path(folder, "model.safetensors"))
    return spec, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


STAGES = {"bank": (app, "prepare"), "report": (app.RunResult, "write")}


@pytest.mark.parametrize(("stage", "number"), [("bank", signal.SIGINT), ("report", signal.SIGTERM)])
def test_every_stage_ends_with_a_sentence(
    stage: str, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, name = STAGES[stage]
    words = [*SMALL, "trainer.max_epochs=1", "hydra.run.dir='a run'"]
    with monkeypatch.context() as patch:
        patch.setattr(home, name, before(getattr(home, name), number))
        assert run(patch, *words) == CODES[signal.Signals(number)][0]
    advice = told(capsys, number)
    trained = stage == "report"
    assert advice == [*words, *(['resume="a run/checkpoints/last.ckpt"'] if trained else [])]
    assert not Path("a run/model.safetensors").exists()
    if trained:
        assert run(monkeypatch, *advice) == 0
        assert Path("a run/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("number", "call", "options"),
    [
        (signal.SIGINT, 8, []),
        (signal.SIGTERM, 8, ["experiment=trained", "local_metrics.num_metrics=4", "local_metrics.rank=2"]),
    ],
    ids=["ctrl-c", "sigterm"],
)
def test_a_run_stopped_in_an_epoch_goes_on_to_the_same_model(
    number: int,
    call: int,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Five batches an epoch: the eighth is in the middle of the second."""
    if options:
        options = [*options, "trainer.max_epochs=3", "callbacks=quiet"]
    words = [word for word in SMALL if not (options and word.startswith("local_metrics."))] + options
    with monkeypatch.context() as patch:
        patch.setattr(LGMMLModule, "training_step", before(LGMMLModule.training_step, number, call=call))
        assert run(patch, *words, "hydra.run.dir=first") == CODES[signal.Signals(number)][0]
    stored = load_checkpoint("first/checkpoints/last.ckpt")
    assert stored["global_step"] == call
    advice = told(capsys, number)
    assert advice[-1] == "resume=first/checkpoints/last.ckpt"
    assert run(monkeypatch, *advice, "hydra.run.dir=second") == 0
    assert run(monkeypatch, *words, "hydra.run.dir=whole") == 0
    assert content("second") == content("whole")


def stopped_in_an_epoch() -> None:
    """``train.py`` in a process that torchrun has started; torchrun passes the signal on to all of them."""
    rank = {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {**rank, "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    sys.argv[0] = "train.py"
    LGMMLModule.training_step = before(LGMMLModule.training_step, signal.SIGTERM, call=8)  # type: ignore[method-assign]
    try:
        start.main()
    except SystemExit as end:
        sys.stderr.write(f"exit code {end.code}\n")


@pytest.mark.timeout(120)
def test_several_processes_end_with_one_sentence() -> None:
    words = [*SMALL, "hydra.run.dir=first"]
    said = forked(stopped_in_an_epoch, *words, count=2).said.splitlines()
    command = f"torchrun --nproc-per-node 2 train.py {' '.join(words)} resume=first/checkpoints/last.ckpt"
    goodbye = f"stopped by SIGTERM; what was trained is kept, go on with: {command}"
    assert sorted(said) == ["exit code 143", "exit code 143", goodbye]
    assert load_checkpoint("first/checkpoints/last.ckpt")["global_step"] == 8


def test_a_second_signal_does_not_wait() -> None:
    with Watch() as watch:
        watch.waits = True
        send(signal.SIGINT)
        assert watch.asked == signal.SIGINT
        with pytest.raises(Interrupted, match="stopped by SIGTERM"):
            send(signal.SIGTERM)


@pytest.mark.parametrize("number", CODES)
def test_a_loaders_worker_leaves_it_to_its_parent(number: int) -> None:
    with Watch():
        child = os.fork()
        if child == 0:
            send(number)
            os._exit(7)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended == (7 if number == signal.SIGINT else -signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_scoring_leaves_no_half_output(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = next((Path(__file__).parent.parent / "fixtures").rglob("*.safetensors"))
    width = LGMML.load(model).num_features
    lines = [f"1 qid:{q} " + " ".join(f"{j}:0.5" for j in range(1, width + 1)) for q in range(4)]
    Path("lists.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(score, "_write_score_lines", before(score._write_score_lines, number, call=3))
    words = ["score", str(model), "lists.txt", "-o", "scores.txt", "--batch-documents", "1"]
    assert lgmml(words) == CODES[signal.Signals(number)][0]
    assert capsys.readouterr().err == f"lgmml: stopped by {CODES[signal.Signals(number)][1]}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lists.txt"]


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_signals_are_watched_before_anything_is_imported(number: int, tmp_path: Path) -> None:
    """A module in the place of Hydra's sends the signal when it is imported."""
    (tmp_path / "hydra.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    home = config_dir().parent
    done = subprocess.run(
        [sys.executable, str(home / "train.py"), "data=mq2008"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{home}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    code, name = CODES[signal.Signals(number)]
    assert done.returncode == code
    program = shlex.quote(str(home / "train.py"))
    told = f"stopped by {name}; nothing has been trained yet, go on with: python {program} data=mq2008\n"
    assert done.stderr == told


def test_threads_are_those_of_the_setting_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    try:
        app._set_threads(2)
        assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        app._set_threads(None)
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        app._set_threads(None)
        assert torch.get_num_threads() <= len(os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    start.wait_quietly()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    start.wait_quietly()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
