"""Two machines that share no folder: network namespaces with a cable between them, and a run over both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lgmml_torch.app.start import STARTED
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.shards import write_shards
from lgmml_torch.models.ranker import LGMML

ROOT = Path(__file__).parent.parent.parent
ADDRESSES = ("10.77.13.1", "10.77.13.2")
WORDS = (
    "data=shards", "data.path=shards", "local_metrics=boosted", "local_metrics.rounds=3", "phi=per_query",
    "phi.policy=mean", "optimizer.lr=0.3", "trainer.max_epochs=2", "loader.num_workers=0", "logger=none",
    "hydra.run.dir=run", "paths.cache_dir=cache",
)  # fmt: skip


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need root and iproute2")
    names = (f"lgmml-a{os.getpid()}", f"lgmml-b{os.getpid()}")
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", f"cable{number}")
            for device in ("lo", f"cable{number}"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    finally:
        for name in made:
            ip("netns", "delete", name)


def write_data(folder: Path) -> None:
    """The same shards on every machine, as if they had been copied there."""
    parts = letor_like(40, 6, num_documents=400, seed=3).split((0.6, 0.2, 0.2), seed=0)
    for name, part in zip(("train", "valid", "test"), parts, strict=True):
        write_shards(part, folder / "shards" / name, documents=60, progress=False)


def started(folder: Path, *words: str, machine: str | None = None) -> subprocess.Popen[str]:
    inside = [] if machine is None else ["ip", "netns", "exec", machine]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop(STARTED, None)
    command = [*inside, sys.executable, str(ROOT / "train.py"), *WORDS, *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_machines_without_shared_folders_end_with_the_model_of_one(machines: tuple[str, str], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "alone")]
    for folder in folders:
        folder.mkdir()
        write_data(folder)
    meeting = (
        "launcher=torchrun",
        "launcher.processes=1",
        "launcher.nodes=2",
        f"launcher.address={ADDRESSES[0]}:29477",
    )
    runs = [
        started(folder, *meeting, f"launcher.own_address={address}", machine=machine)
        for folder, address, machine in zip(folders, ADDRESSES, machines, strict=False)
    ]
    try:
        told = [run.communicate(timeout=600)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], told
    alone = started(folders[2])
    said = alone.communicate(timeout=600)[1]
    assert alone.returncode == 0, said
    both, one = (LGMML.load(folder / "run" / "model.safetensors") for folder in (folders[0], folders[2]))
    assert not (folders[1] / "run" / "model.safetensors").exists()
    assert both.qids == one.qids
    assert all(
        a.equal(b) for a, b in zip(both.metrics.buffers(), one.metrics.buffers(), strict=True) if not a.isnan().any()
    )
    torch.testing.assert_close(both.phi.table.weight, one.phi.table.weight, atol=1e-6, rtol=1e-5)
    test = letor_like(40, 6, num_documents=400, seed=3).split((0.6, 0.2, 0.2), seed=0)[2]
    torch.testing.assert_close(both.score(test), one.score(test), atol=1e-5, rtol=1e-5)
