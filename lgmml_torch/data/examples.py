"""Query-by-example sets: every item can be the query, and some of the others are relevant to it (songs, digits).

A folder of this kind, CAL10K prepared in this way for one, holds

- ``features.npy`` or ``features.csv`` (one item per line, comma separated, optionally ``.csv.gz``);
- ``relevant.txt``: line *i* lists the items relevant to item *i*, as row numbers from 0, blank between them;
- ``ids.txt``, optional: the name of each item, one per line;
- ``Split1`` … ``Split10``, optional, each with ``train.txt``, ``vali.txt`` and ``test.txt``: row numbers, one per line.

Without such folders, ten random splits of 40/30/30 percent are made from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import DataError
from lgmml_torch.data.loading import PathLike
from lgmml_torch.functional.examples import ExampleSet
from lgmml_torch.segments import gather_segments, offsets_from_sizes, segment_ids

_PARTS = ("train", "vali", "test")


@dataclass(frozen=True)
class Split:
    """Row numbers of the items in each part; the parts share none."""

    train: Tensor
    vali: Tensor
    test: Tensor


@dataclass(frozen=True, eq=False)
class Examples:
    """Items with features, and which of them are relevant to which.

    Attributes:
        features: ``(N, D)``.
        relevant: ``(R,)`` row numbers: ``relevant[offsets[i]:offsets[i+1]]`` are relevant to item ``i``.
        offsets: ``(N+1,)``.
        ids: a name for each item, or None.
        splits: ways to cut the items into train, vali and test.
    """

    features: Tensor
    relevant: Tensor
    offsets: Tensor
    ids: tuple[str, ...] | None = None
    splits: tuple[Split, ...] = ()

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        return (
            f"Examples({len(self):,} items, {self.features.shape[1]:,} features, "
            f"{len(self.relevant):,} relevant pairs, {len(self.splits)} splits)"
        )

    def example_set(
        self,
        queries: Tensor,  # (q,) rows
        database: Tensor,  # (n,) rows
    ) -> ExampleSet:
        """Rank ``database`` for each of ``queries``; relevant items outside the database are left out.

        Training ranks the training items for one another, a test the same items for new queries.

        >>> items = Examples(torch.eye(3), torch.tensor([1, 2, 0]), torch.tensor([0, 2, 3, 3]))
        >>> part = items.example_set(torch.tensor([0, 1]), torch.tensor([0, 2]))
        >>> part.relevant, part.offsets, part.own_rows
        (tensor([1, 0]), tensor([0, 1, 2]), tensor([ 0, -1]))
        """
        place = torch.full((len(self),), -1, dtype=torch.long)
        place[database] = torch.arange(len(database))
        rows, offsets = gather_segments(self.offsets, queries)
        found = place[self.relevant[rows]]
        inside = found >= 0
        sizes = torch.bincount(segment_ids(offsets)[inside], minlength=len(queries))
        return ExampleSet(
            self.features[database],
            self.features[queries],
            found[inside],
            offsets_from_sizes(sizes),
            place[queries],
        )


def load_examples(folder: PathLike, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Examples:
    """Load a folder laid out as this module describes.

    Raises:
        DataError: ``file:line: what is wrong``.
    """
    home = Path(folder)
    features = _features(home)
    count = len(features)
    sets = _row_lists(home / "relevant.txt", count)
    if len(sets) != count:
        raise DataError(f"{home / 'relevant.txt'}:{len(sets)}: {count} items need {count} lines, got {len(sets)}")
    for item, others in enumerate(sets):
        if item in others:
            raise DataError(f"{home / 'relevant.txt'}:{item + 1}: item {item} must not be relevant to itself")
    ids = _ids(home / "ids.txt", count)
    folders = sorted(home.glob("Split[0-9]*"), key=lambda path: int(path.name.removeprefix("Split")))
    splits = tuple(_read_split(path, count) for path in folders) or random_splits(count, seed=seed)
    return Examples(
        torch.from_numpy(features).to(dtype),
        torch.tensor([row for rows in sets for row in rows], dtype=torch.long),
        offsets_from_sizes(torch.tensor([len(rows) for rows in sets])),
        ids,
        splits,
    )


def random_splits(
    count: int, *, splits: int = 10, fractions: tuple[float, float, float] = (0.4, 0.3, 0.3), seed: int = 0
) -> tuple[Split, ...]:
    """Independent random cuts of ``count`` items."""
    generator = torch.Generator().manual_seed(seed)
    first = round(fractions[0] / sum(fractions) * count)
    second = round((fractions[0] + fractions[1]) / sum(fractions) * count)
    made = []
    for _ in range(splits):
        rows = torch.randperm(count, generator=generator)
        made.append(Split(*(part.sort().values for part in rows.tensor_split([first, second]))))
    return tuple(made)


def save_examples(items: Examples, folder: PathLike) -> None:
    """Write a folder that `load_examples` reads back."""
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    np.save(home / "features.npy", items.features.numpy(), allow_pickle=False)
    rows = [items.relevant[a:b].tolist() for a, b in zip(items.offsets[:-1], items.offsets[1:], strict=True)]
    (home / "relevant.txt").write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    if items.ids is not None:
        (home / "ids.txt").write_text("".join(f"{name}\n" for name in items.ids), encoding="utf-8")
    for number, split in enumerate(items.splits, start=1):
        for part in _PARTS:
            file = home / f"Split{number}" / f"{part}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text("".join(f"{row}\n" for row in getattr(split, part).tolist()))


def _features(home: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    for name in ("features.npy", "features.csv", "features.csv.gz"):
        file = home / name
        if not file.is_file():
            continue
        try:
            values = np.load(file) if file.suffix == ".npy" else np.loadtxt(file, delimiter=",", ndmin=2)
            array = np.asarray(values, dtype=np.float64)
        except (ValueError, EOFError, OSError) as error:
            raise DataError(f"{file}: cannot be read as numbers: {error}") from error
        if array.ndim != 2 or not array.size:
            raise DataError(f"{file}: must hold one row per item, got shape {array.shape}")
        if len(bad := np.argwhere(~np.isfinite(array))):
            raise DataError(f"{file}: values must be finite, got {array[tuple(bad[0])]} in row {int(bad[0][0])}")
        return array
    raise DataError(f"no features.npy or features.csv in {home}")


def _ids(file: Path, count: int) -> tuple[str, ...] | None:
    if not file.is_file():
        return None
    ids = tuple(file.read_text(encoding="utf-8").splitlines())
    if len(ids) != count:
        raise DataError(f"{file}:{len(ids)}: {count} items need {count} names, got {len(ids)}")
    return ids


def _row_lists(file: Path, count: int) -> list[list[int]]:
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        words = line.split()
        for word in words:
            if not word.isdigit() or int(word[:18]) >= count:
                got = repr(word[:40].decode("ascii", "backslashreplace"))
                raise DataError(f"{file}:{number}: row numbers must lie in [0, {count}), got {got}")
        rows.append([int(word) for word in words])
        if len(set(rows[-1])) < len(words):
            raise DataError(f"{file}:{number}: an item is listed twice")
    return rows


def _read_split(folder: Path, count: int) -> Split:
    parts, owner = [], np.zeros(count, dtype=np.int64)
    for part in _PARTS:
        rows = [row for line in _row_lists(folder / f"{part}.txt", count) for row in line]
        np.add.at(owner, rows, 1)
        parts.append(torch.tensor(rows, dtype=torch.long))
    if len(twice := np.flatnonzero(owner > 1)):
        raise DataError(f"{folder}: an item must be in one part only, got item {int(twice[0])} more than once")
    return Split(*parts)
