"""Damage of every kind to every file that is trusted later: model and checkpoint.

Reading a damaged file is refused, or gives what was written: some bytes of a file mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lgmml_torch.checks import CheckpointError
from lgmml_torch.models.storage import FORMAT, VERSION, load_checkpoint, read_model, write_checkpoint, write_model
from lgmml_torch.training.module import LGMMLModule
from tests.training import tiny

PAGE = 4096


class Kept(NamedTuple):
    """A file and how it is read: an error means that damage was noticed."""

    file: Path
    read: Callable[[], object]


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
    tensors = {"x": torch.from_numpy(values), "y": torch.arange(5)}
    return make_model(folder, tensors) if kind == "model" else make_checkpoint(folder, tensors)


def noticed(kept: Kept, content: bytes) -> bool:
    """Whether a changed file is refused; otherwise its content must be the same."""
    good = plain(kept.read())
    whole = kept.file.read_bytes()
    kept.file.write_bytes(content)
    try:
        found = plain(kept.read())
    except CheckpointError:
        return True
    finally:
        kept.file.write_bytes(whole)
    assert found == good
    return False


def plain(content: object) -> object:
    """The content of a file in values that can be compared."""
    if isinstance(content, dict):
        return {key: plain(value) for key, value in content.items()}
    if isinstance(content, tuple):
        return [plain(value) for value in content]
    if isinstance(content, (torch.Tensor, np.ndarray)):
        return str(content.dtype), content.tolist()
    return content


@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_flipped_bytes_and_cuts_are_noticed(kind: str, tmp_path: Path) -> None:
    kept = make(kind, tmp_path, 20)
    good = kept.file.read_bytes()
    generator = np.random.default_rng(0)
    masks = generator.integers(1, 256, len(good)).tolist()
    assert len(good) < 2500
    for place in range(len(good)):
        noticed(kept, good[:place] + bytes([good[place] ^ masks[place]]) + good[place + 1 :])
        assert noticed(kept, good[:place])
    start = good.index(np.random.default_rng(20).normal(size=20).astype(np.float32).tobytes())
    for place in range(start, start + 80):  # the numbers themselves
        assert noticed(kept, good[:place] + bytes([good[place] ^ masks[place]]) + good[place + 1 :])


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


@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_damage_to_large_files_is_noticed(kind: str, tmp_path: Path) -> None:
    kept = make(kind, tmp_path, 30_000)
    good = kept.file.read_bytes()
    assert len(good) > 25 * PAGE
    for bad in damages(good, np.random.default_rng(1)):
        noticed(kept, bad)


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
    good[good.index(b"archive/data.pkl") + 300] ^= 1
    file.write_bytes(good)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is not a checkpoint of this package, or it is damaged"):
        LGMMLModule.load_from_checkpoint(file, weights_only=True)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is not a checkpoint"):
        tiny.train(tmp_path, resume=True, epochs=2)
