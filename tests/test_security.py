"""Every sentence of SECURITY.md about loading is claimed by a test here; a sentence that nobody claims is a failure."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lgmml_torch import __version__, files
from lgmml_torch.app.compose import build
from lgmml_torch.app.config import load_config
from lgmml_torch.checks import CheckpointError, ConfigError, DataError, DataWarning, LGMMLError
from lgmml_torch.data.cache import Cache, check_cache
from lgmml_torch.data.source import open_source
from lgmml_torch.data.write import save_letor, save_table
from lgmml_torch.fitting.boosted import BoostedBuilder
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import (
    FORMAT,
    VERSION,
    load_checkpoint,
    read_model,
    write_checkpoint,
    write_model,
)
from lgmml_torch.models.trees import TreeBase
from lgmml_torch.training.module import LGMMLModule
from lgmml_torch.training.resume import Unfinished
from tests.doors import small_data, small_model
from tests.models.test_trees import lightgbm_booster

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
SENTENCES = re.findall(r"^- (.*)$", TEXT, flags=re.MULTILINE)
CLAIMED: list[str] = []


def claims(beginning: str) -> Callable[[Any], Any]:
    """The sentence that begins so, and only that, is what a test is about."""
    (sentence,) = [sentence for sentence in SENTENCES if sentence.startswith(beginning)]
    CLAIMED.append(sentence)
    return lambda test: test


class Run:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def read_rows(file: Path) -> None:
    with open_source(file) as source:
        source.read()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


def test_each_sentence_is_claimed_once() -> None:
    assert len(SENTENCES) > 10
    assert sorted(CLAIMED) == sorted(SENTENCES)


def test_the_supported_version_is_this_one() -> None:
    assert f"| {'.'.join(__version__.split('.')[:2])} | yes |" in TEXT


@claims("A model file (")
@claims("A pickle given as a model")
def test_a_pickle_is_never_opened(tmp_path: Path, trace: Path) -> None:
    content = pickle.dumps(Run(trace))
    for name in ("model.safetensors", "model.txt", "rows.npz", "a.pkl"):
        (tmp_path / name).write_bytes(content)
        for read in (LGMML.load, TreeBase.read, read_rows):
            with pytest.raises(LGMMLError):
                read(tmp_path / name)
    np.savez(tmp_path / "objects.npz", X=np.array([[Run(trace)]]), qid=np.array([1]))
    with pytest.raises(DataError):
        read_rows(tmp_path / "objects.npz")
    assert not trace.exists()
    pickle.loads(content)  # it would have
    assert trace.exists()


@claims("A description that names")
@pytest.mark.parametrize("part", ["preprocess", "kernel", "norm"])
def test_unknown_parts_are_refused(part: str, tmp_path: Path) -> None:
    spec, tensors = _parts(tmp_path)
    if part == "preprocess":
        spec["preprocess"] = {"kind": "os.system", "type": "os.system", "name": "os.system"}
    elif part == "kernel":
        spec["kernel"] = "os.system"
    else:
        spec["metrics"]["norm"] = "os.system"
    write_model(tmp_path / "other.safetensors", spec, tensors)
    with pytest.raises(LGMMLError):
        LGMML.load(tmp_path / "other.safetensors")


def _parts(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    small_model().save(folder / "model.safetensors")
    return read_model(folder / "model.safetensors")


@claims("A checkpoint (")
def test_a_checkpoint_that_would_run_something(tmp_path: Path, trace: Path) -> None:
    content = {FORMAT: {"version": VERSION, "spec": {}}, "state_dict": {"x": Run(trace)}}
    file = tmp_path / "last.ckpt"
    torch.save(content, file)
    for read in (load_checkpoint, read_model, LGMML.load):
        with pytest.raises(CheckpointError):
            read(file)
    with pytest.raises(pickle.UnpicklingError):
        LGMMLModule.load_from_checkpoint(file)
    assert not trace.exists()


@claims("A cache entry, and")
def test_an_entry_and_a_state_run_nothing(tmp_path: Path, trace: Path) -> None:
    cache = Cache(tmp_path)
    with pytest.raises(Exception, match=r"object|dtype"):
        cache.get_or_build({"a": 1}, lambda: {"x": np.array([Run(trace)])})
    cache.get_or_build({"a": 1}, lambda: {"x": np.arange(3)})
    array = cache.path({"a": 1}) / "x.npy"
    array.write_bytes(pickle.dumps(Run(trace)).ljust(array.stat().st_size, b"."))
    with pytest.warns(DataWarning):
        assert cache.get({"a": 1}) is None
    kept = Unfinished(tmp_path, BoostedBuilder(), small_data(), None, 0)
    assert kept.path is not None
    write_checkpoint(kept.path, {"fit": kept.path.stem, "state": Run(trace)})
    with pytest.warns(DataWarning, match="starts from the beginning"):
        assert kept.arguments() == {}
    assert not trace.exists()


@claims("A model or checkpoint whose")
@claims("The digest in a file")
def test_the_digest_finds_accidents_and_no_more(tmp_path: Path) -> None:
    spec, tensors = _parts(tmp_path)
    file = tmp_path / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        LGMML.load(file)
    tensors["phi.table.weight"] = tensors["phi.table.weight"] * 2
    write_model(file, spec, tensors)  # on purpose, with a new digest
    LGMML.load(file)
    write_checkpoint(file, {FORMAT: {"version": VERSION, "spec": {}}})
    file.write_bytes(file.read_bytes().replace(b"version", b"persion"))
    with pytest.raises(CheckpointError, match="or it is damaged"):
        load_checkpoint(file)
    cache = Cache(tmp_path)
    cache.get_or_build({"a": 1}, lambda: {"x": np.arange(3)})
    array = cache.path({"a": 1}) / "x.npy"
    content = array.read_bytes()
    array.write_bytes(content[:-1] + b"\1")
    (told,) = check_cache(tmp_path)
    assert "does not match its checksum" in told
    array.write_bytes(content[:-1])
    with pytest.warns(DataWarning):
        assert cache.get_or_build({"a": 1}, lambda: {"x": np.arange(3)})["x"].tolist() == [0, 1, 2]


@claims("A tree file (")
def test_trees_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "trees.txt"
    lightgbm_booster().save_model(file)
    TreeBase.read(file)
    text = file.read_text()
    for wrong in (text[: text.index("end of trees")], text.replace("left_child=", "left_child=x", 1)):
        file.write_text(wrong)
        with pytest.raises(CheckpointError, match="cannot be used"):
            TreeBase.read(file)


@claims("A configuration can make objects of")
def test_a_configuration_makes_no_other_objects(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = OmegaConf.create({"_target_": "pathlib.Path.touch", "self": str(trace)})
    for wrong in (part, {"a": [part]}, {"_target_": "lgmml_torch.files.os.system", "command": f"touch {trace}"}):
        with pytest.raises(
            ConfigError, match=r"`_target_` must lie in one of lgmml_torch, pytorch_lightning, torch\.optim"
        ):
            build(OmegaConf.create(wrong))
    assert not trace.exists()
    monkeypatch.setenv("LGMML_TARGETS", "fractions")
    assert build(OmegaConf.create({"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2})) == 0.5


@claims("A configuration can name any file")
def test_a_configuration_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of mine")
    cfg = load_config(["name=${oc.env:A_SECRET}", "paths.output_dir=/anywhere"])
    assert (cfg.name, cfg.paths.output_dir) == ("of mine", "/anywhere")


@claims("Settings below `hydra`")
def test_settings_of_hydra_may_run_code(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "mine.py").write_text(f"from pathlib import Path\ndef run():\n    Path({str(trace)!r}).touch()\n")
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nhydra:\n  callbacks:\n    mine:\n      _target_: mine.run\n"
    (tmp_path / "conf" / "experiment" / "theirs.yaml").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    words = ["experiment=theirs", "data=letor", f"data.name={tmp_path}/none", "--config-dir", str(tmp_path / "conf")]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=False)
    assert trace.exists()


@claims("A data file (")
def test_data_are_parsed(tmp_path: Path, trace: Path) -> None:
    words = f"__import__('pathlib').Path('{trace}').touch()"
    lines = {
        "a.txt": f"1 qid:{words} 1:{words}\n",
        "a.csv": f"label,qid,f\n1,1,={words}\n1,1,!!python/object:{words}\n",
    }
    for name, text in lines.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError):
            read_rows(tmp_path / name)
    for name in ("a.npz", "a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(pickle.dumps(Run(trace)))
        with pytest.raises(DataError):
            read_rows(tmp_path / name)
    assert not trace.exists()


@claims("A compressed text or")
def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_UNPACKED", 1 << 16)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"1 qid:1 1:0\n" * 20_000))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", bytes(10_000_000))
    for name in ("a.txt.gz", "a.npz"):
        with pytest.raises(DataError, match="100 times"):
            read_rows(tmp_path / name)


WATCHED = """
import json, sys
from pathlib import Path
from lgmml_torch.data.source import open_source
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import load_checkpoint
import pyarrow.parquet
seen = []
def hook(event, arguments):
    if event.startswith("socket.") or event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        seen.append(event)
    if event == "open" and isinstance(arguments[1], str) and set("wax+") & set(arguments[1]):
        seen.append(f"open {arguments[0]}")
sys.addaudithook(hook)
folder = Path(sys.argv[1])
LGMML.load(folder / "model.safetensors")
load_checkpoint(folder / "last.ckpt")
models = list(seen)
for name in ("rows.txt", "rows.csv", "rows.npz", "rows.parquet"):
    with open_source(folder / name) as source:
        source.read()
print(json.dumps(models + [event for event in seen if not event.startswith("open ")]))
"""


@claims("Loading a model, a checkpoint or data")
@claims("Loading a model writes")
def test_loading_opens_no_connection_and_writes_no_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    small_model().save(tmp_path / "model.safetensors")
    write_checkpoint(tmp_path / "last.ckpt", {FORMAT: {"version": VERSION, "spec": {}}})
    save_letor(small_data(), tmp_path / "rows.txt")
    for name in ("rows.csv", "rows.parquet"):
        save_table(small_data(), tmp_path / name)
    np.savez(tmp_path / "rows.npz", X=small_data().features.numpy(), qid=small_data().query_index.numpy())
    before = sorted(tmp_path.iterdir())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path)], env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == []
    assert sorted(tmp_path.iterdir()) == before
