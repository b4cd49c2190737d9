"""Data to train on: known sets by name, in the folders their owners distribute them in, and tables of your own.

The data itself is not part of this package: it is looked for below ``data_dir``, or else below ``LGMML_DATA``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lgmml_torch.checks import DataError, did_you_mean
from lgmml_torch.data.cache import Cache
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.letor import SPLITS, find_file, load_agreed, load_letor, load_letor_splits, load_lightgbm
from lgmml_torch.data.source import FORMATS, Columns, PathLike, ReadOptions, cached, kind_of, open_file, sizes_file
from lgmml_torch.ragged import RankingData

if TYPE_CHECKING:
    from lgmml_torch.data.examples import Examples

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
    "debian": Entry("which packages go with this one? from Debian's package index", ("debian",)),
    "moby": Entry("which words does a thesaurus list? built by research.moby", ("moby",)),
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
    """Load the parts ``train``, ``valid`` and ``test`` of a data set, whose files may be of any format in `FORMATS`.

    A file ``features.txt`` beside them names the features, one per line, or as ``0 name``, ``1 name``, ….

    Args:
        name: a name in `CATALOG`, a folder below the data folder, or any folder laid out like one of them.
        data_dir: the data folder; by default the environment variable ``LGMML_DATA``.
        fold: which fold, from 1 (the default), of sets that come in folds.
        seed: for the validation queries of sets that come without.
        options: those of `load_file`.

    Raises:
        DataError: if the data is not there, saying where it was looked for.
    """
    folder, entry = _locate(name, data_dir)
    if entry.examples or any((folder / f"features{ending}").is_file() for ending in (".npy", ".csv", ".csv.gz")):
        raise DataError(f"{folder} holds a query-by-example set: use `open_examples`")
    if not entry.prefix and any(folder.glob("Fold[0-9]*")):
        return _load_folder(_fold(folder, 1 if fold is None else fold), **options)
    if fold is not None:
        raise DataError(f"`fold` must be None for data without folds, got {fold} for {folder}")
    if entry.prefix or find_file(folder, ["set1.train", "set2.train"]):
        return _load_prefixed(folder, entry.prefix or _only_prefix(folder), **options)
    if not _parts(folder) and (train := _lightgbm_file(folder)) is not None:
        return _load_lightgbm(folder, train, seed, **options)
    return _load_folder(folder, **options)


def open_examples(name: PathLike, data_dir: PathLike | None = None, **options: Any) -> Examples:
    """Load a query-by-example set, by a name in `CATALOG` or a folder; ``options`` are those of `load_examples`."""
    from lgmml_torch.data.examples import load_examples  # other sets need nothing of it

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
    return load_parts(files, **options)


def _lightgbm_file(folder: Path) -> Path | None:
    """``rank.train``, or the one file of another name that ends in ``.train`` and has its sizes beside it."""
    if (train := find_file(folder, ["rank"], ".train")) is not None:
        return train
    found = [
        file for file in sorted(folder.glob("*.train*")) if sizes_file(file) != file and sizes_file(file).is_file()
    ]
    if len(found) > 1:
        raise DataError(f"{folder} holds several training files: {', '.join(file.name for file in found)}")
    return found[0] if found else None


def _load_lightgbm(folder: Path, train: Path, seed: int, **options: Any) -> dict[str, RankingData]:
    stem = train.name.partition(".train")[0]
    test = find_file(folder, [stem], ".test")
    if test is None:
        raise DataError(f"{folder / (stem + '.test')}: no such file")
    files = {"train": train, "test": test}
    valid = next((file for word in SPLITS["valid"] if (file := find_file(folder, [stem], f".{word}"))), None)
    if valid is not None:
        return load_parts({"train": train, "valid": valid, "test": test}, kind="lightgbm", **options)
    parts = load_parts(files, kind="lightgbm", **options)
    rest, held = parts["train"].split((1 - VALIDATION_SHARE, VALIDATION_SHARE), seed=seed)
    return {"train": rest, "valid": held, "test": parts["test"]}


def _parts(folder: Path) -> dict[str, Path]:
    """The files of a folder that are called after a part, in whatever format."""
    suffixes = [suffix for form in FORMATS.values() for suffix in form.suffixes]
    found = {}
    for split, names in SPLITS.items():
        file = next((file for suffix in suffixes if (file := find_file(folder, names, suffix)) is not None), None)
        if file is not None:
            found[split] = file
    return found


def _load_folder(folder: Path, **options: Any) -> dict[str, RankingData]:
    files = _parts(folder)
    if not files:
        return load_letor_splits(folder)  # which says what it looked for
    if (names := _read_names(folder / "features.txt")) is not None:
        options.setdefault("feature_names", names)
    return load_parts(files, **options)


def _read_names(file: Path) -> tuple[str, ...] | None:
    """One name per line; numbers before the names are left out if they count the lines."""
    if not file.is_file():
        return None
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    pairs = [line.split(None, 1) for line in lines]
    if all(len(pair) == 2 and pair[0].isdigit() for pair in pairs):
        numbers = [int(pair[0]) for pair in pairs]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] in (0, 1):
            return tuple(pair[1] for pair in pairs)
    return tuple(lines)


def load_file(
    path: PathLike,
    *,
    kind: str | None = None,
    num_features: int | None = None,
    feature_names: Sequence[str] | None = None,
    columns: Columns | None = None,
    missing: str = "error",
    absent: str = "zero",
    dtype: torch.dtype = torch.float32,
    cache: bool | PathLike | Cache = True,
    progress: bool = True,
) -> RankingData:
    """Load a file of any format to train on; text is parsed once and kept in the cache.

    Args:
        path: the file.
        kind: its format, one of `FORMATS`; by default what its name says.
        num_features: how many features there are; by default what the file says.
        feature_names: names they must have (in a table, in any order), or get (in LETOR lines).
        columns: which columns of a table are no features.
        missing: see `lgmml_torch.load_letor`, like the arguments after it.
        absent: see `lgmml_torch.load_letor`.
        dtype: see `lgmml_torch.load_letor`.
        cache: see `lgmml_torch.load_letor`.
        progress: see `lgmml_torch.load_letor`.

    Raises:
        DataError: the file, the place and what is wrong; also where there are no labels.
    """
    kind = kind_of(path) if kind is None else kind
    names = None if feature_names is None else tuple(feature_names)
    options = ReadOptions(num_features, names, missing, absent, dtype, columns or Columns(), progress)
    if kind in ("letor", "lightgbm"):
        load = load_letor if kind == "letor" else load_lightgbm
        width = options.num_features
        data = load(
            path, num_features=width, missing=missing, absent=absent, dtype=dtype, cache=cache, progress=progress
        )
        return data.replace(feature_names=names)

    def parse() -> RankingData:
        with open_file(path, options, kind=kind) as source:
            return source.read(labelled=True)

    if kind not in ("csv", "tsv"):  # others are read about as fast as the cache
        return parse()
    used = options.columns
    facts = {
        "kind": kind,
        "columns": [used.qid, used.label, used.doc_id, list(used.drop)],
        "num_features": options.num_features,
        "feature_names": None if names is None else list(names),
        "missing": missing,
        "dtype": str(dtype),
    }
    return cached(cache, [Path(path)], facts, parse)


def load_parts(
    files: dict[str, Path], *, feature_names: Sequence[str] | None = None, **options: Any
) -> dict[str, RankingData]:
    """Load several files with the same features: by name where the first has names, else as many as the widest has."""
    known = feature_names

    def load(file: Path, **chosen: Any) -> RankingData:
        nonlocal known
        data = load_file(file, feature_names=known, **chosen)
        known = data.feature_names if known is None else known
        return data

    return load_agreed(load, files, **options)


def open_table(
    path: PathLike,
    *,
    qid: str = "qid",
    label: str = "label",
    doc_id: str = "docid",
    split: str | None = None,
    drop: Sequence[str] = (),
    fractions: Sequence[float] = (0.6, 0.2, 0.2),
    seed: int = 0,
    **options: Any,
) -> dict[str, RankingData]:
    """Load the parts ``train``, ``valid`` and ``test`` of one file, or of a folder of tables.

    A folder holds files called after the parts, or pieces of one table (whole lists in each), which are put together.

    Args:
        path: the file, of any format in `FORMATS`, or the folder.
        qid: the column with the query.
        label: the column with the relevance.
        doc_id: the column with the document's id, which may be absent.
        split: a column whose values are ``train``, ``valid`` and ``test``; otherwise the queries are cut at random.
        drop: columns to leave out.
        fractions: shares of the queries in each part, where they are cut at random.
        seed: for that cut.
        options: those of `load_file`.

    Raises:
        DataError: the file, the place and what is wrong.
    """
    place = Path(path)
    columns = Columns(qid, label, doc_id, (*drop, *([] if split is None else [split])))
    files = [place]
    if place.is_dir():
        if parts := _parts(place):
            return load_parts(parts, columns=columns, **options)
        suffixes = {suffix for form in FORMATS.values() for suffix in form.suffixes}
        files = [file for file in sorted(place.iterdir()) if Path(file.name.removesuffix(".gz")).suffix in suffixes]
        if not files:
            raise DataError(f"{place}: no file of a known format in this folder")
    pieces = load_parts({str(number): file for number, file in enumerate(files)}, columns=columns, **options)
    data = RankingData.merge(list(pieces.values())) if len(pieces) > 1 else pieces["0"]
    if split is not None:
        words = [word for file in files for word in _column(file, split, columns, options.get("kind"))]
        return _split_by_words(data, words, f"{place}: column {split!r}")
    if len(fractions) != len(SPLITS):
        raise DataError(f"`fractions` must be three shares, of train, valid and test, got {list(fractions)}")
    found = split_queries(data, [float(share) for share in fractions], seed=seed)
    for name, part in found.items():
        if not part.num_queries:
            raise DataError(f"{place}: {data.num_queries} queries are too few to cut: none would be left for {name}")
    return found


def _column(file: Path, name: str, columns: Columns, kind: str | None) -> list[str]:
    with open_file(file, ReadOptions(columns=columns), kind=kind) as source:
        if not hasattr(source, "column"):
            raise DataError(f"{file}: `split` needs a table with a column {name!r}")
        words: list[str] = source.column(name)
        return words


def _split_by_words(data: RankingData, words: Sequence[str], where: str) -> dict[str, RankingData]:
    """Parts by a word for each row, which must be the same for all rows of a query."""
    known = {alias: split for split, aliases in SPLITS.items() for alias in (split, *aliases)}
    place = {split: number for number, split in enumerate(SPLITS)}
    for row, word in enumerate(words):
        if word.strip().lower() not in known:
            raise DataError(f"{where} must say train, valid or test, got {word!r} at row {row} (from 0)")
    codes = torch.tensor([place[known[word.strip().lower()]] for word in words])[data.order]
    first = codes[data.offsets[:-1]]
    if len(mixed := (codes != first[data.query_index]).nonzero()):
        qid = data.qids[int(data.query_index[mixed[0]])]
        raise DataError(f"{where} must be the same for all rows of a query, got several for query {qid!r}")
    parts = {split: data.select((first == number).nonzero()[:, 0]) for split, number in place.items()}
    return {split: part for split, part in parts.items() if part.num_queries}


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
