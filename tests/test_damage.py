"""Damage of every kind to every file that is trusted later: model, checkpoint and cache entry. All of it is noticed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lgmml_torch.checks import CheckpointError, DataWarning
from lgmml_torch.data.cache import Cache
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION, load_checkpoint, read_model, write_checkpoint, write_model
from lgmml_torch.training.module import LGMMLModule
from tests.doors import small_model
from tests.training import tiny

KEY = {"what": "damage"}
PAGE = 4096


class Kept(NamedTuple):
    """A file and how it is read: an error means that damage was noticed."""

    file: Path
    read: Callable[[], object]


def make_cache(folder: Path, arrays: dict[str, np.ndarray]) -> Kept:
    cache = Cache(folder)
    cache.get_or_build(KEY, lambda: arrays)

    def read() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DataWarning)
            try:
                assert cache.get(KEY) is not None
            except DataWarning as told:
                raise CheckpointError(str(told)) from told

    return Kept(cache.path(KEY), read)


def make_model(folder: Path, tensors: dict[str, torch.Tensor]) -> Kept:
    file = folder / "model.safetensors"
    write_model(file, {"kernel": "paper"}, tensors)
    return Kept(file, lambda: read_model(file))


def make_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Kept:
    file = folder / "last.ckpt"
    header = {"version": VERSION, "spec": {"kernel": "paper"}}
    write_checkpoint(file, {FORMAT: header, "state_dict": tensors})
    return Kept(file, lambda: load_checkpoint(file))


def make(kind: str, folder: Path, numbers: int) -> Kept:
    generator = np.random.default_rng(numbers)
    values = generator.normal(size=numbers).astype(np.float32)
    if kind == "cache":
        return make_cache(folder, {"x": values, "y": generator.integers(0, 9, 5)})
    tensors = {"x": torch.from_numpy(values), "y": torch.arange(5)}
    return make_model(folder, tensors) if kind == "model" else make_checkpoint(folder, tensors)


def noticed(kept: Kept, content: bytes) -> None:
    kept.file.write_bytes(content)
    with pytest.raises(CheckpointError):
        kept.read()


@pytest.mark.parametrize("kind", ["cache", "model", "checkpoint"])
def test_every_flipped_byte_and_every_cut_is_noticed(kind: str, tmp_path: Path) -> None:
    kept = make(kind, tmp_path, 20)
    good = kept.file.read_bytes()
    masks = np.random.default_rng(0).integers(1, 256, len(good)).tolist()
    assert len(good) < 2500
    for place, mask in enumerate(masks):
        noticed(kept, good[:place] + bytes([good[place] ^ mask]) + good[place + 1 :])
        noticed(kept, good[:place])
    for longer in (good + b"\0", good + b"\0" * 64, b"\0" + good, good + good):
        noticed(kept, longer)
    kept.file.write_bytes(good)
    kept.read()


def damages(good: bytes, generator: np.random.Generator) -> Iterator[bytes]:
    """Bits flipped, pages that change places, a page that stands twice or is lost, or is full of zeros."""
    for _ in range(150):
        place = int(generator.integers(len(good)))
        yield good[:place] + bytes([good[place] ^ 1 << int(generator.integers(8))]) + good[place + 1 :]
    pages = [good[start : start + PAGE] for start in range(0, len(good), PAGE)]
    for _ in range(60):
        a, b = (int(n) for n in generator.choice(len(pages) - 1, 2, replace=False))
        for new in (pages[b], b"\0" * PAGE):
            changed = list(pages)
            changed[a] = new
            yield b"".join(changed)
        changed = list(pages)
        changed[a], changed[b] = pages[b], pages[a]
        yield b"".join(changed)
        yield b"".join([*pages[: a + 1], *pages[a:]])
        yield b"".join(pages[:a] + pages[a + 1 :])
        yield good[: int(generator.integers(len(good)))]


@pytest.mark.parametrize("kind", ["cache", "model", "checkpoint"])
def test_damage_to_large_files_is_noticed(kind: str, tmp_path: Path) -> None:
    kept = make(kind, tmp_path, 30_000)
    good = kept.file.read_bytes()
    assert len(good) > 25 * PAGE
    for bad in damages(good, np.random.default_rng(1)):
        noticed(kept, bad)
    kept.file.write_bytes(good)
    kept.read()


def test_two_values_that_change_places_within_a_block_are_noticed(tmp_path: Path) -> None:
    """Sums do not depend on the order of what is summed; the digest does."""
    kept = make("cache", tmp_path, 1000)
    good = kept.file.read_bytes()
    start = len(good) - 2048
    noticed(kept, good[:start] + good[start + 8 : start + 16] + good[start : start + 8] + good[start + 16 :])


def test_a_real_model_survives_the_way_and_no_flip(tmp_path: Path) -> None:
    model, file = small_model(), tmp_path / "model.safetensors"
    model.save(file)
    good = file.read_bytes()
    assert set(LGMML.load(file).state_dict()) == set(model.state_dict())
    for place in np.random.default_rng(2).integers(0, len(good), 200).tolist():
        noticed(Kept(file, lambda: LGMML.load(file)), good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of the same settings; only their files can tell them apart."""
    folder, prepared = tmp_path_factory.mktemp("runs"), tiny.prepared()
    for name in "ab":
        tiny.train(folder / name, found=prepared, epochs=1)
    return [folder / "a", folder / "b"]


def test_a_checkpoint_of_another_run_is_noticed(runs: list[Path], tmp_path: Path) -> None:
    for name, source in (("last.ckpt", runs[0]), ("best.ckpt", runs[1])):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"best\.ckpt belongs to another run"):
        tiny.train(tmp_path, resume=True, epochs=2)


def test_lightning_itself_refuses_a_changed_checkpoint(runs: list[Path], tmp_path: Path) -> None:
    good, file = bytearray((runs[0] / "last.ckpt").read_bytes()), tmp_path / "last.ckpt"
    file.write_bytes(good)
    assert LGMMLModule.load_from_checkpoint(file, weights_only=True).model.phi.mode == "per_query"
    good[len(good) // 2] ^= 1
    file.write_bytes(good)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is not a checkpoint of this package, or its bytes were"):
        LGMMLModule.load_from_checkpoint(file, weights_only=True)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is not a checkpoint"):
        tiny.train(tmp_path, resume=True, epochs=2)


def test_an_entry_of_another_key_and_a_folder_are_noticed(tmp_path: Path) -> None:
    kept = make("cache", tmp_path, 20)
    other = Cache(tmp_path)
    other.get_or_build({"what": "else"}, lambda: {"x": np.arange(3)})
    noticed(kept, other.path({"what": "else"}).read_bytes())
    kept.file.unlink()
    kept.file.mkdir()
    with pytest.raises(CheckpointError, match=r"\.lgc is a folder; building it again"):
        kept.read()
    with pytest.warns(DataWarning, match="is a folder") as told:
        assert other.get_or_build(KEY, lambda: {"x": np.arange(2)})["x"].tolist() == [0, 1]
    assert len(told) == 2
