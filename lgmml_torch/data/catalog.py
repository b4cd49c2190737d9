"""Data to train on: known sets by name, in the folders their owners distribute them in, and tables of your own.

The data itself is not part of this package: it is looked for below ``data_dir``, or else below ``LGMML_DATA``.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lgmml_torch.categories import Asked, WordColumns, vocabularies
from lgmml_torch.checks import DataError, check_choice, did_you_mean
from lgmml_torch.data.columns import Columns, pa, require_arrow
from lgmml_torch.data.generated import letor_like
from lgmml_torch.data.letor import SPLITS, load_file
from lgmml_torch.data.source import FORMATS, PathLike, ReadOptions, is_folder, open_file, sizes_file
from lgmml_torch.inputs import place_vector
from lgmml_torch.ragged import RankingData

CATALOG = {  # where a data set may lie below the data folder
    "mq2008": ("mq2008", "MQ2008"),
    "ohsumed": ("ohsumed", "OHSUMED/QueryLevelNorm", "OHSUMED"),
    "mslr-sample": ("mslr-sample",),  # the head of MSLR-WEB30K's first fold
    "mslr": ("mslr", "MSLR-WEB10K", "MSLR-WEB30K"),
    "mslr-web10k": ("MSLR-WEB10K", "mslr-web10k"),
    "mslr-web30k": ("MSLR-WEB30K", "mslr-web30k"),
    "yahoo1": ("yahoo1", "yahoo", "ltrc_yahoo"),  # Yahoo! learning to rank challenge
    "yahoo2": ("yahoo2", "yahoo", "ltrc_yahoo"),
    "debian": ("debian",),  # which packages go with this one?
    "moby": ("moby",),  # which words does a thesaurus list? built by research.moby
    "letor": ("letor", "."),
    "lgbm-rank": ("lgbm-rank",),  # LightGBM's ranking example
}
_PREFIXES = {"yahoo1": "set1.", "yahoo2": "set2."}  # of the file names of sets that share a folder


def open_dataset(
    name: PathLike, data_dir: PathLike | None = None, *, fold: int | None = None, seed: int = 0, **options: Any
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
    folder, prefix = _locate(name, data_dir), _PREFIXES.get(str(name), "")
    if not prefix and any(folder.glob("Fold[0-9]*")):
        return _load_folder(_fold(folder, 1 if fold is None else fold), **options)
    if fold is not None:
        raise DataError(f"`fold` must be None for data without folds, got {fold} for {folder}")
    if prefix := prefix or _only_prefix(folder):
        return _load_prefixed(folder, prefix, **options)
    if not _parts(folder) and (files := _lightgbm_parts(folder)):
        return _load_lightgbm(folder, files, seed, **options)
    return _load_folder(folder, **options)


def data_folder(data_dir: PathLike | None = None) -> Path:
    """The folder with the data sets: the argument, or else ``LGMML_DATA``."""
    source, chosen = "`data_dir`", data_dir
    if chosen is None:
        source, chosen = "LGMML_DATA", os.environ.get("LGMML_DATA")
    if not chosen:
        raise DataError("no data folder: pass `data_dir` or set the environment variable LGMML_DATA")
    folder = Path(chosen)
    if not folder.is_dir():
        raise DataError(f"{source} must name an existing folder, got {folder}")
    return folder


def _locate(name: PathLike, data_dir: PathLike | None) -> Path:
    hint, folders = "", CATALOG.get(str(name))
    if folders is None:
        if Path(name).is_dir():
            return Path(name)
        if os.sep in str(name) or isinstance(name, Path):
            raise DataError(f"no such folder: {name}")
        hint = f" (known names: {', '.join(CATALOG)}){did_you_mean(str(name), list(CATALOG))}"
        folders = (str(name),)
    places = [data_folder(data_dir) / folder for folder in folders]
    for place in places:
        if place.is_dir():
            return place
    looked = " or ".join(map(str, places))
    raise DataError(f"data set {str(name)!r} not found: looked for {looked}; set `data_dir` or LGMML_DATA{hint}")


def _fold(folder: Path, fold: int) -> Path:
    chosen = folder / f"Fold{fold}"
    if not chosen.is_dir():
        there = ", ".join(sorted([path.name for path in folder.glob("Fold[0-9]*")]))
        raise DataError(f"`fold` must be one of those in {folder} ({there}), got {fold}")
    return chosen


def _only_prefix(folder: Path) -> str:
    found = [prefix for prefix in _PREFIXES.values() if _find_file(folder, [prefix + "train"])]
    if len(found) > 1:
        raise DataError(f"{folder} holds set 1 and set 2: ask for 'yahoo1' or 'yahoo2'")
    return "".join(found)


def _load_prefixed(folder: Path, prefix: str, **options: Any) -> dict[str, RankingData]:
    files = {}
    for part in ("train", "valid", "test"):
        if (file := _find_file(folder, [prefix + part])) is None:
            raise DataError(f"{folder / (prefix + part + '.txt')}: no such file")
        files[part] = file
    return load_parts(files, **options)


def _lightgbm_parts(folder: Path) -> dict[str, Path]:
    """Files with their sizes beside them, by the word for a part in their name, as in ``web_test.svm``."""
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.name.endswith(".query") or not sizes_file(file).is_file():
            continue
        words = set(re.split(r"[^a-z]+", file.name.lower()))
        for split, aliases in SPLITS.items():
            if words.isdisjoint(aliases):
                continue
            first, name = found.setdefault(split, file).name.removesuffix(".gz"), file.name.removesuffix(".gz")
            if first != name:
                word = {"train": "training", "valid": "validation"}.get(split, split)
                raise DataError(f"{folder} holds several {word} files: {first}, {name}")
    return found if "train" in found else {}


def _load_lightgbm(folder: Path, files: dict[str, Path], seed: int, **options: Any) -> dict[str, RankingData]:
    if "test" not in files:
        name = files["train"].name.lower().replace("train", "test")
        raise DataError(f"{folder / name}: no such file")
    parts = load_parts({split: files[split] for split in SPLITS if split in files}, kind="lightgbm", **options)
    if "valid" in parts:
        return parts
    rest, held = parts["train"].split((0.8, 0.2), seed=seed)
    return {"train": rest, "valid": held, "test": parts["test"]}


def _parts(folder: Path, suffixes: Sequence[str] = ()) -> dict[str, Path]:
    """The files of a folder that are called after a part, in whatever format or of some."""
    found: dict[str, Path] = {}
    for split, names in SPLITS.items():
        for suffix in suffixes or _suffixes():
            if split not in found and (file := _find_file(folder, names, suffix)) is not None:
                found[split] = file
    return found


def _suffixes() -> list[str]:
    """The endings of file names of all formats."""
    return [suffix for form in FORMATS.values() for suffix in form.suffixes]


def load_letor_splits(folder: PathLike, **options: Any) -> dict[str, RankingData]:
    """Load ``train``, ``valid`` and ``test`` of a folder, with the same number of features in all of them.

    The files are ``train.txt``, ``vali.txt`` (or ``valid.txt``, ``validation.txt``) and ``test.txt``, or these with
    ``.gz``. Those that are not there are left out, but one must be. ``options`` are those of `load_letor`.
    """
    files = _parts(Path(folder), [".txt"])
    if not files:
        hint = "pieces of one table are opened with data=table data.path=FOLDER"
        raise DataError(f"no train.txt, vali.txt or test.txt in {Path(folder)}; {hint}")
    return load_parts(files, kind="letor", **options)


def _load_folder(folder: Path, **options: Any) -> dict[str, RankingData]:
    if not (files := _parts(folder)):
        return load_letor_splits(folder)  # which says what it looked for
    if (names := folder / "features.txt").is_file():
        options.setdefault("feature_names", _read_names(names))
    return load_parts(files, **options)


def _read_names(file: Path) -> tuple[str, ...]:
    """The names of features, one per line; numbers before the names are left out if they count the lines."""
    lines = list(filter(None, map(str.strip, file.read_text(encoding="utf-8").splitlines())))
    if not lines:
        raise DataError(f"{file}: the file must name the features, one per line, but it is empty; remove or fill it")
    pairs = [line.split(None, 1) for line in lines]
    numbers = [pair[0] for pair in pairs]
    for first in (0, 1):
        counted = list(map(str, range(first, first + len(lines))))
        if numbers == counted and min(map(len, pairs)) > 1:
            return tuple([name for _, name in pairs])
    return tuple(lines)


def _find_file(folder: PathLike, names: Sequence[str], suffix: str = ".txt") -> Path | None:
    """The first of ``names`` that exists in ``folder``, plain or gzipped."""
    for name in names:
        for ending in (suffix, suffix + ".gz"):
            file = Path(folder) / (name + ending)
            if file.is_file():
                return file
    return None


def load_parts(
    files: Mapping[str, PathLike],
    *,
    feature_names: Sequence[str] | None = None,
    categories: Asked = None,
    same_words: bool = True,
    **options: Any,
) -> dict[str, RankingData]:
    """Load several files with the same features: by name where the first has names, else as many as the widest has.

    Categories have the words of the first file too, the training part, unless ``same_words`` is False.
    """
    parts = {}
    for split, file in files.items():
        data = load_file(file, feature_names=feature_names, categories=categories, **options)
        feature_names = feature_names or data.feature_names
        if same_words:
            categories = vocabularies(data.feature_names, data.categories) or categories
        parts[split] = data
    widest = max([part.num_features for part in parts.values()])
    for split, part in parts.items():
        if part.num_features < widest:  # lines, which have no names
            parts[split] = load_file(files[split], categories=categories, **{**options, "num_features": widest})
    return parts


def open_table(
    path: PathLike,
    *,
    qid: str = "qid",
    label: str = "label",
    doc_id: str = "docid",
    split: str | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] | None = None,
    weight: str | None = None,
    position: str | None = None,
    fractions: Sequence[float] = (0.6, 0.2, 0.2),
    seed: int = 0,
    stream: bool = False,
    **options: Any,
) -> dict[str, RankingData]:
    """Load the parts ``train``, ``valid`` and ``test`` of one file, or of a folder of tables.

    A folder holds files called after the parts, or pieces of one table, which are put together. In pieces of other
    formats than Parquet lists must be whole.

    Args:
        path: the file, of any format in `FORMATS`, the folder, or a pattern or address of Parquet files.
        qid: the column with the query.
        label: the column with the relevance.
        doc_id: the column with the document's id, which may be absent.
        split: a column whose values are ``train``, ``valid`` and ``test``; otherwise the queries are cut at random.
        drop: columns to leave out.
        categories: columns whose words are categories, besides those whose type says so.
        weight: a column with what the relevance of each row counts, see `RankingData.weighed`.
        position: a column with the place where each row was shown, whole numbers. In a folder of files called after the
            parts, those beside ``train`` may lack both columns.
        fractions: shares of the queries in each part, where they are cut at random; 0 leaves a part out.
        seed: for that cut.
        stream: decode the lists into the cache, a few at a time, for tables that do not fit into memory.
        options: those of `load_file`.

    Raises:
        DataError: the file, the place and what is wrong.
    """
    if split is not None:
        drop = (*drop, split)
    columns = Columns(qid, label, doc_id, tuple(drop), weight, position)
    reading = ReadOptions(columns=columns, categories=WordColumns.of(categories))
    kind = options.get("kind")
    parts, files = _table_files(path)

    def cut(data: RankingData) -> dict[str, RankingData]:
        if split is not None:
            words = _column_words("split", files, split, reading, kind)
            return _split_by_words(data, words, f"{path}: column {split!r}")
        found = _split_queries(data, fractions, seed=seed)
        for name, part in found.items():
            if not part.num_queries:
                few = f"{data.num_queries} queries are too few to cut"
                raise DataError(f"{path}: {few}: none would be left for {name}")
        return found

    if stream:
        if weight is not None or position is not None:
            raise DataError("`stream` has no place for weights and positions; read the table into memory")
        from lgmml_torch.data.folder import stream_table  # which few need

        return stream_table(parts or {"": path}, cut, columns=columns, categories=categories, **options)
    if parts:
        found = load_parts(parts, columns=columns, categories=categories, **options)
        for name, part in found.items():
            found[name] = _with_extras(part, [parts[name]], reading, kind, needed=name == "train")
        return found
    numbered = dict(zip(map(str, range(len(files))), files, strict=True))
    pieces = load_parts(numbered, columns=columns, categories=categories, same_words=False, **options)
    data = RankingData.merge(list(pieces.values())) if len(pieces) > 1 else pieces["0"]
    return cut(_with_extras(data, files, reading, kind, needed=True))


def _table_files(path: PathLike) -> tuple[Mapping[str, PathLike], Sequence[PathLike]]:
    """The parts of a table, where its files or folders are called after them; else the pieces it consists of."""
    if not is_folder(path):
        return {}, [path]
    if Path(path).is_dir():
        if parts := _parts(Path(path)):
            return parts, []
        files = []
        for file in sorted(Path(path).iterdir()):
            if Path(file.name.removesuffix(".gz")).suffix in _suffixes() and file.is_file():
                files.append(file)
        if {file.suffix for file in files} - set(FORMATS["parquet"].suffixes):
            return {}, files
    from lgmml_torch.data.folder import ParquetFiles  # which few need

    return ParquetFiles.find(path).parts(path), [path]


def open_ray(dataset: Any, **settings: Any) -> dict[str, RankingData]:
    """The parts of a `ray.data.Dataset` with a row per document, as `open_table` gives them with ``stream=True``.

    Args:
        dataset: the rows. They come to this process block by block, and go to temporary files (``TMPDIR``).
        settings: those of `open_table`.
    """
    require_arrow("for data of Ray")
    with tempfile.TemporaryDirectory() as home:  # what is mapped from there stays until it is not needed
        for number, rows in enumerate(dataset.iter_batches(batch_size=None, batch_format="pyarrow")):
            pa.parquet.write_table(rows, Path(home) / f"{number:09d}.parquet")
        return open_table(home, **{**settings, "stream": True, "cache": Path(home) / "cache"})


def find_table(path: PathLike, split: str | None) -> PathLike | None:
    """The Parquet files that a path stands for, or a part of them; None for what is laid out in another way.

    Raises:
        LGMMLError: there are parts, and ``split`` is none of them.
    """
    from lgmml_torch.data.folder import ParquetFiles

    if str(path) in CATALOG or not is_folder(path):
        return None
    if (folder := Path(path)).is_dir():
        named = [*folder.glob("Fold[0-9]*"), *_parts(folder).values()]
        if named or not any(folder.rglob("*.parquet")):
            return None
    if not (parts := ParquetFiles.find(path).parts(path)):
        return path
    check_choice("split", str(split), parts)
    return parts[str(split)]


def _split_by_words(data: RankingData, words: Sequence[str], where: str) -> dict[str, RankingData]:
    """Parts by a word for each row, which must be the same for all rows of a query."""
    known = {alias: number for number, aliases in enumerate(SPLITS.values()) for alias in aliases}
    numbers = []
    for row, word in enumerate(words):
        if word.strip().lower() not in known:
            raise DataError(f"{where} must say train, valid or test, got {word!r} at row {row + 1} (from 1)")
        numbers.append(known[word.strip().lower()])
    codes = torch.tensor(numbers)[data.order]
    first = codes[data.offsets[:-1]]
    if len(mixed := (codes != first[data.query_index]).nonzero()):
        qid = data.qids[int(data.query_index[mixed[0]])]
        raise DataError(f"{where} must be the same for all rows of a query, got several for query {qid!r}")
    parts = {}
    for number, split in enumerate(SPLITS):
        queries = (first == number).nonzero()[:, 0]
        if len(queries):
            parts[split] = data.select(queries)
    return parts


def _split_queries(data: RankingData, fractions: Sequence[float], *, seed: int) -> dict[str, RankingData]:
    """Parts ``train``, ``valid`` and ``test``, cut by query; a part whose share is 0 is left out."""
    if len(fractions) != len(SPLITS):
        raise DataError(f"`fractions` must be three shares, of train, valid and test, got {list(fractions)}")
    shares = dict(zip(SPLITS, map(float, fractions), strict=True))
    parts = {}
    for name, part in zip(shares, data.split(tuple(shares.values()), seed=seed), strict=True):
        if shares[name]:
            parts[name] = part
    return parts


def _column_words(
    asked: str, files: Sequence[PathLike], name: str, reading: ReadOptions, kind: str | None, *, needed: bool = True
) -> list[str]:
    """The text of a column, row by row, file after file; nothing of a file without it, where it is not needed."""
    words: list[str] = []
    for file in files:
        with open_file(file, reading, kind=kind) as source:
            if name in source.header:
                words.extend(source.column(name))
            elif needed:
                hint = did_you_mean(name, list(source.header))
                raise DataError(f"{file}: `{asked}` needs a table with a column {name!r}{hint}")
    return words


def _with_extras(
    data: RankingData, files: Sequence[PathLike], reading: ReadOptions, kind: str | None, *, needed: bool
) -> RankingData:
    """The lists with the weights and positions that columns of their files hold."""
    for asked, name in (("weight", reading.columns.weight), ("position", reading.columns.position)):
        if name is None:
            continue
        words = _column_words(asked, files, name, reading, kind, needed=needed)
        if not words:
            continue
        values = np.empty(len(words))
        for row, word in enumerate(words):
            try:
                values[row] = float(word)
            except ValueError:
                raise DataError(f"column {name!r} must hold numbers, got {word!r} at row {row + 1} (from 1)") from None
        if asked == "weight":
            data = data.weighed(values, name=name)
        else:
            places = torch.from_numpy(place_vector(name, values, data.num_documents))
            data = data.replace(positions=places[data.order])
    return data


def generated_splits(
    num_queries: int = 600,
    num_features: int = 40,
    *,
    fractions: Sequence[float] = (0.6, 0.2, 0.2),
    seed: int = 0,
    **options: Any,
) -> dict[str, RankingData]:
    """LETOR-like lists (see `lgmml_torch.data.generated`), cut by query."""
    return _split_queries(letor_like(num_queries, num_features, seed=seed, **options), fractions, seed=seed)
