"""Query-by-example sets: every item can be the query, and some of the others are relevant to it (songs, digits).

A folder of this kind, CAL10K prepared in this way for one, holds

- ``features.npy`` or ``features.csv`` (one item per line, comma separated, optionally ``.csv.gz``);
- ``relevant.txt``: line *i* lists the items relevant to item *i*, as row numbers from 0, blank between them;
- ``ids.txt``, optional: the name of each item, one per line;
- ``Split1`` … ``Split10``, optional, each with ``train.txt``, ``vali.txt`` and ``test.txt``: row numbers, one per line.

Without such folders, ten random splits of 40/30/30 percent are made from a seed. Two sets need no download: Gaussian
classes in any dimension, and scikit-learn's digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError, check_unit_interval
from lgmml_torch.data.catalog import data_folder
from lgmml_torch.data.source import PathLike
from lgmml_torch.files import npy_bytes, write_bytes, write_text
from lgmml_torch.segments import gather_segments, offsets_from_sizes, segment_ids
from research.by_example.sets import ExampleSet

SYNTHETIC_CONDITION = 3e3  # of Synthetic-C's covariances: it decides how much local metrics can gain there
FOLDERS = {"cal10k": ("cal10k", "CAL10K")}  # where a named set may lie below the data folder
_PARTS = {"train": "train.txt", "valid": "vali.txt", "test": "test.txt"}  # and the file of each


@dataclass(frozen=True)
class Split:
    """Row numbers of the items in each part; the parts share none."""

    train: Tensor
    valid: Tensor
    test: Tensor


@dataclass(frozen=True, eq=False)
class Examples:
    """Items with features, and which of them are relevant to which.

    Attributes:
        features: ``(N, D)``.
        relevant: ``(R,)`` row numbers: ``relevant[offsets[i]:offsets[i+1]]`` are relevant to item ``i``.
        offsets: ``(N+1,)``.
        ids: a name for each item, or None.
        splits: ways to cut the items into train, valid and test.
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


def find_examples(name: PathLike, data_dir: PathLike | None = None) -> Path | None:
    """The folder of a query-by-example set: a path, a name in `FOLDERS` or a folder below the data folder."""
    if Path(name).is_dir():
        return Path(name)
    home = data_folder(data_dir)
    for place in FOLDERS.get(str(name), (str(name),)):
        if (home / place).is_dir():
            return home / place
    return None


def open_examples(name: PathLike, data_dir: PathLike | None = None, *, seed: int = 0) -> Examples:
    """Load a query-by-example set by its name or folder."""
    folder = find_examples(name, data_dir)
    if folder is None:
        raise DataError(f"query-by-example set {str(name)!r} not found below {data_folder(data_dir)}")
    return load_examples(folder, seed=seed)


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
    write_bytes(home / "features.npy", npy_bytes(items.features.numpy()))
    rows = [items.relevant[a:b].tolist() for a, b in zip(items.offsets[:-1], items.offsets[1:], strict=True)]
    write_text(home / "relevant.txt", "".join(" ".join(map(str, row)) + "\n" for row in rows))
    if items.ids is not None:
        write_text(home / "ids.txt", "".join(f"{name}\n" for name in items.ids))
    for number, split in enumerate(items.splits, start=1):
        for part, name in _PARTS.items():
            rows_text = "".join(f"{row}\n" for row in getattr(split, part).tolist())
            write_text(home / f"Split{number}" / name, rows_text)


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
            if not word.isdigit() or len(word) > 18 or int(word) >= count:
                got = repr(word[:40].decode("ascii", "backslashreplace"))
                raise DataError(f"{file}:{number}: row numbers must lie in [0, {count}), got {got}")
        rows.append([int(word) for word in words])
        if len(set(rows[-1])) < len(words):
            raise DataError(f"{file}:{number}: an item is listed twice")
    return rows


def _read_split(folder: Path, count: int) -> Split:
    parts, owner = [], np.zeros(count, dtype=np.int64)
    for name in _PARTS.values():
        rows = [row for line in _row_lists(folder / name, count) for row in line]
        np.add.at(owner, rows, 1)
        parts.append(torch.tensor(rows, dtype=torch.long))
    if len(twice := np.flatnonzero(owner > 1)):
        raise DataError(f"{folder}: an item must be in one part only, got item {int(twice[0])} more than once")
    return Split(*parts)


def synthetic_classes(
    classes: int,
    dim: int = 20,
    points: int = 40,
    *,
    seed: int = 0,
    condition: float = SYNTHETIC_CONDITION,
    dtype: torch.dtype = torch.float32,
) -> ExampleSet:
    """Synthetic-C: Gaussian classes, each with a covariance of its own, close enough to overlap.

    Covariances are random rotations of spectra drawn log-uniformly from [condition^−½, condition^½]. Centres are
    normal, scaled so that at the median class the 95% ellipsoid touches that of its nearest neighbour, measured on the
    line through the centres. In 20 dimensions long axes then reach far into other classes: only a metric that knows
    the local covariance tells them apart. ``condition=1`` gives separate balls, which any metric ranks perfectly: this
    number decides how much local metrics gain over a global one. The paper gives none; 3,000 is ours.

    Args:
        classes: C; the paper has 2, 10, 50 and 100.
        dim: dimension; the paper's series runs from 10 to 1000.
        points: per class; half of them, rounded down, become the database, the others the queries.
        seed: the same seed gives the same set.
        condition: largest over smallest possible eigenvalue of a covariance.
        dtype: of the vectors, which are drawn in float64.

    Returns:
        Database and queries, relevant meaning: of the same class.

    Raises:
        LGMMLError: for fewer than two classes or points, no dimension, or a condition below 1.

    >>> data = synthetic_classes(2, seed=1)
    >>> tuple(data.database.shape), tuple(data.queries.shape), data.offsets.diff().unique().tolist()
    ((40, 20), (40, 20), [20])
    """
    for name, value, least in (("classes", classes, 2), ("dim", dim, 1), ("points", points, 2)):
        if value < least:
            raise LGMMLError(f"`{name}` must be at least {least}, got {value}")
    if not condition >= 1:
        raise LGMMLError(f"`condition` must be at least 1, got {condition}")
    rng = np.random.default_rng(np.random.SeedSequence([seed, classes, dim, points]))
    spread = condition ** (rng.uniform(-0.25, 0.25, (classes, dim)))  # roots of the eigenvalues
    axes = np.stack([_rotation(rng, dim) for _ in range(classes)])
    centres = rng.normal(size=(classes, dim))
    centres *= _touching_scale(centres, axes, spread)
    drawn = rng.normal(size=(classes, points, dim)) * spread[:, None]
    vectors = centres[:, None] + drawn @ axes.transpose(0, 2, 1)
    return _halves(vectors, points // 2, dtype)


def _rotation(rng: np.random.Generator, dim: int) -> NDArray[np.float64]:
    """A random orthogonal matrix; the columns are the axes."""
    q, r = np.linalg.qr(rng.normal(size=(dim, dim)))
    return np.asarray(q * np.sign(np.diag(r)))


def _touching_scale(
    centres: NDArray[np.float64],  # (C, D)
    axes: NDArray[np.float64],  # (C, D, D)
    spread: NDArray[np.float64],  # (C, D)
) -> float:
    """The factor on the centres at which the median class touches its nearest neighbour.

    From class i towards j the ellipsoid ends at r/√(uᵀΣᵢ⁻¹u), u the unit vector and r² the 95% point of χ² with D
    degrees of freedom.
    """
    from scipy.stats import chi2  # takes longer to import than the rest of this module

    difference = centres[:, None] - centres  # (C, C, D)
    length = np.linalg.norm(difference, axis=2) + np.eye(len(centres))
    along = np.stack([np.linalg.norm(d @ a / s, axis=1) for d, a, s in zip(difference, axes, spread, strict=True)])
    radius = np.sqrt(chi2.ppf(0.95, centres.shape[1])) * length / (along + np.eye(len(centres)))
    touching = (radius + radius.T) / length
    np.fill_diagonal(touching, 0)
    return float(np.median(touching.max(axis=1)))


def _halves(
    vectors: NDArray[np.float64],  # (C, P, D)
    database: int,
    dtype: torch.dtype,
) -> ExampleSet:
    x = torch.from_numpy(vectors).to(dtype)
    labels = torch.arange(len(x))
    left, right = x[:, :database].flatten(0, 1), x[:, database:].flatten(0, 1)
    return ExampleSet.from_labels(
        left, labels.repeat_interleave(database), right, labels.repeat_interleave(x.shape[1] - database)
    )


def digits_examples(
    *,
    queries: float = 0.5,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> ExampleSet:
    """Scikit-learn's 1797 handwritten digits (8×8 pixels in [0, 1]): relevant are images of the same digit.

    Args:
        queries: share of each digit's images that become queries; the others are the database.
        seed: decides which.
        dtype: of the vectors.

    >>> data = digits_examples(seed=1)
    >>> tuple(data.database.shape), tuple(data.queries.shape)
    ((901, 64), (896, 64))
    """
    from sklearn.datasets import load_digits

    check_unit_interval("queries", queries)
    if queries in (0, 1):
        raise LGMMLError(f"`queries` must be strictly between 0 and 1, got {queries:g}")
    images, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    asked = np.zeros(len(digits), dtype=bool)
    for digit in range(10):
        rows = rng.permutation(np.flatnonzero(digits == digit))
        asked[rows[: int(queries * len(rows))]] = True
    x, labels = torch.from_numpy(images / 16.0).to(dtype), torch.from_numpy(digits).long()
    chosen = torch.from_numpy(asked)
    return ExampleSet.from_labels(x[~chosen], labels[~chosen], x[chosen], labels[chosen])
