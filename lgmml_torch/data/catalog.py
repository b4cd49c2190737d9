"""Known data sets by name, in the folders their owners distribute them in, and splits of those that come whole.

The data itself is not part of this package: it is looked for below ``data_dir``, or else below ``LGMML_DATA``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lgmml_torch.checks import DataError, did_you_mean
from lgmml_torch.data.examples import Examples, load_examples
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.letor import find_file, load_agreed, load_letor, load_letor_splits, load_lightgbm
from lgmml_torch.data.loading import PathLike
from lgmml_torch.ragged import RankingData

VALIDATION_SHARE = 0.2  # of the training queries, where a data set has no validation part


@dataclass(frozen=True)
class Entry:
    """Where a data set may lie below the data folder, and what it is."""

    about: str
    folders: tuple[str, ...]
    prefix: str = ""  # of the file names, for sets that share a folder
    examples: bool = False


CATALOG = {
    "mq2008": Entry("LETOR 4.0 MQ2008, five folds", ("mq2008", "MQ2008")),
    "ohsumed": Entry("LETOR 3.0 OHSUMED, five folds", ("ohsumed", "OHSUMED/QueryLevelNorm", "OHSUMED")),
    "mslr-sample": Entry("the head of MSLR-WEB30K's first fold", ("mslr-sample",)),
    "mslr": Entry("MSLR-WEB10K or WEB30K, five folds", ("mslr", "MSLR-WEB10K", "MSLR-WEB30K")),
    "mslr-web10k": Entry("MSLR-WEB10K, five folds", ("MSLR-WEB10K", "mslr-web10k")),
    "mslr-web30k": Entry("MSLR-WEB30K, five folds", ("MSLR-WEB30K", "mslr-web30k")),
    "yahoo1": Entry("Yahoo! learning to rank challenge, set 1", ("yahoo1", "yahoo", "ltrc_yahoo"), prefix="set1."),
    "yahoo2": Entry("Yahoo! learning to rank challenge, set 2", ("yahoo2", "yahoo", "ltrc_yahoo"), prefix="set2."),
    "letor": Entry("any LETOR data: train.txt, vali.txt, test.txt, or folds of them", ("letor", ".")),
    "lgbm-rank": Entry("LightGBM's ranking example", ("lgbm-rank",)),
    "cal10k": Entry("CAL10K music similarity, ten splits", ("cal10k", "CAL10K"), examples=True),
}


def open_dataset(
    name: PathLike,
    data_dir: PathLike | None = None,
    *,
    fold: int | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, RankingData]:
    """Load the parts ``train``, ``valid`` and ``test`` of a data set.

    Args:
        name: a name in `CATALOG`, a folder below the data folder, or any folder laid out like one of them.
        data_dir: the data folder; by default the environment variable ``LGMML_DATA``.
        fold: which fold, from 1 (the default), of sets that come in folds.
        seed: for the validation queries of sets that come without.
        options: those of `lgmml_torch.data.letor.load_letor`.

    Raises:
        DataError: if the data is not there, saying where it was looked for.
    """
    folder, entry = _locate(name, data_dir)
    if entry.examples or any((folder / f"features{ending}").is_file() for ending in (".npy", ".csv", ".csv.gz")):
        raise DataError(f"{folder} holds a query-by-example set: use `open_examples`")
    if not entry.prefix and any(folder.glob("Fold[0-9]*")):
        return load_letor_splits(_fold(folder, 1 if fold is None else fold), **options)
    if fold is not None:
        raise DataError(f"`fold` must be None for data without folds, got {fold} for {folder}")
    if entry.prefix or find_file(folder, ["set1.train", "set2.train"]):
        return _load_prefixed(folder, entry.prefix or _only_prefix(folder), **options)
    if (train := find_file(folder, ["rank"], ".train")) is not None:
        return _load_lightgbm(folder, train, seed, **options)
    return load_letor_splits(folder, **options)


def open_examples(name: PathLike, data_dir: PathLike | None = None, **options: Any) -> Examples:
    """Load a query-by-example set, by a name in `CATALOG` or a folder; ``options`` are those of `load_examples`."""
    return load_examples(_locate(name, data_dir)[0], **options)


def data_folder(data_dir: PathLike | None = None) -> Path:
    """The folder with the data sets: the argument, or else ``LGMML_DATA``."""
    chosen = data_dir if data_dir is not None else os.environ.get("LGMML_DATA")
    if not chosen:
        raise DataError("no data folder: pass `data_dir` or set the environment variable LGMML_DATA")
    folder = Path(chosen)
    if not folder.is_dir():
        source = "`data_dir`" if data_dir is not None else "LGMML_DATA"
        raise DataError(f"{source} must name an existing folder, got {folder}")
    return folder


def _locate(name: PathLike, data_dir: PathLike | None) -> tuple[Path, Entry]:
    entry = CATALOG.get(str(name))
    if entry is None and Path(name).is_dir():
        return Path(name), Entry("a folder", ())
    if entry is None and (os.sep in str(name) or isinstance(name, Path)):
        raise DataError(f"no such folder: {name}")
    home = data_folder(data_dir)
    places = [home / place for place in (entry.folders if entry else (str(name),))]
    for place in places:
        if place.is_dir():
            return place, entry or Entry("a folder", ())
    hint = "" if entry else f" (known names: {', '.join(CATALOG)}){did_you_mean(str(name), list(CATALOG))}"
    looked = " or ".join(str(place) for place in places)
    raise DataError(f"data set {str(name)!r} not found: looked for {looked}; set `data_dir` or LGMML_DATA{hint}")


def _fold(folder: Path, fold: int) -> Path:
    chosen = folder / f"Fold{fold}"
    if not chosen.is_dir():
        there = ", ".join(sorted(path.name for path in folder.glob("Fold[0-9]*")))
        raise DataError(f"`fold` must be one of those in {folder} ({there}), got {fold}")
    return chosen


def _only_prefix(folder: Path) -> str:
    found = [prefix for prefix in ("set1.", "set2.") if find_file(folder, [prefix + "train"])]
    if len(found) > 1:
        raise DataError(f"{folder} holds set 1 and set 2: ask for 'yahoo1' or 'yahoo2'")
    return found[0]


def _load_prefixed(folder: Path, prefix: str, **options: Any) -> dict[str, RankingData]:
    files = {}
    for part in ("train", "valid", "test"):
        file = find_file(folder, [prefix + part])
        if file is None:
            raise DataError(f"{folder / (prefix + part + '.txt')}: no such file")
        files[part] = file
    return load_agreed(load_letor, files, **options)


def _load_lightgbm(folder: Path, train: Path, seed: int, **options: Any) -> dict[str, RankingData]:
    test = find_file(folder, ["rank"], ".test")
    if test is None:
        raise DataError(f"{folder / 'rank.test'}: no such file")
    parts = load_agreed(load_lightgbm, {"train": train, "test": test}, **options)
    rest, valid = parts["train"].split((1 - VALIDATION_SHARE, VALIDATION_SHARE), seed=seed)
    return {"train": rest, "valid": valid, "test": parts["test"]}


def split_queries(
    data: RankingData, fractions: Sequence[float] = (0.6, 0.2, 0.2), *, seed: int = 0
) -> dict[str, RankingData]:
    """Parts ``train``, ``valid`` and ``test``, cut by query."""
    train, valid, test = data.split(fractions, seed=seed)
    return {"train": train, "valid": valid, "test": test}


def generated_splits(
    num_queries: int = 600,
    num_features: int = 40,
    *,
    fractions: Sequence[float] = (0.6, 0.2, 0.2),
    seed: int = 0,
    **options: Any,
) -> dict[str, RankingData]:
    """LETOR-like lists (see `lgmml_torch.data.generated`), cut by query."""
    return split_queries(letor_like(num_queries, num_features, seed=seed, **options), fractions, seed=seed)
