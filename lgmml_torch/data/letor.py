"""Loading ranking data from text: LETOR, MSLR and Yahoo lines with ``qid:``, LightGBM files with a ``.query`` file.

A line is ``label qid:7 1:0.5 2:0 … #docid = x``: blanks or tabs between the parts, indices rising from 1, features that
are not mentioned are 0. Parsing happens once; after that the data is memory-mapped from the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import DataError
from lgmml_torch.data.cache import Cache
from lgmml_torch.data.loading import Options, PathLike
from lgmml_torch.ragged import RankingData

SPLITS = {"train": ("train",), "valid": ("vali", "valid", "validation"), "test": ("test",)}


def load_letor(
    path: PathLike,
    *,
    num_features: int | None = None,
    missing: str = "error",
    absent: str = "zero",
    dtype: torch.dtype = torch.float32,
    cache: bool | PathLike | Cache = True,
    progress: bool = True,
) -> RankingData:
    r"""Load a file in LETOR/SVMlight format, plain or gzipped.

    Query ids become whole numbers if all of them are, strings otherwise; a ``#docid = x`` or any other
    comment becomes the document's id. Every value is ``float(text)`` rounded to ``dtype``.

    Args:
        path: the file.
        num_features: how many features there are; by default the largest index in the file.
        missing: what ``NULL`` and ``nan`` stand for: ``"error"``, ``"zero"``, ``"query-min"`` or ``"query-mean"``.
        absent: features a line does not mention: ``"zero"``, or ``"missing"`` to treat them as ``missing`` says.
        dtype: of the features, float32 or float64.
        cache: False, True for the default folder (``LGMML_CACHE``), or a folder.
        progress: show a bar if it takes more than two seconds.

    Raises:
        DataError: ``file:line: what is wrong``.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "train.txt"
    >>> _ = file.write_text("1 qid:7 1:0.5 3:2 #docid = b\n0 qid:7 2:1 #docid = a\n")
    >>> data = load_letor(file, cache=False)
    >>> data.features.tolist(), data.doc_ids
    ([[0.0, 1.0, 0.0], [0.5, 0.0, 2.0]], ('a', 'b'))
    """
    options = Options(num_features, missing, absent, dtype, cache, progress)
    rules, file = options.rules(qid=True), Path(path)
    return options.cached([file], rules, lambda: options.finish(options.read(file, rules)))


def load_lightgbm(
    path: PathLike,
    *,
    query: PathLike | None = None,
    zero_based: bool = False,
    num_features: int | None = None,
    missing: str = "error",
    absent: str = "zero",
    dtype: torch.dtype = torch.float32,
    cache: bool | PathLike | Cache = True,
    progress: bool = True,
) -> RankingData:
    """Load a file without ``qid:`` whose queries are consecutive lines, their numbers in a second file.

    Args:
        path: the file, ``label index:value …``.
        query: the file with the number of documents of each query; by default ``path`` + ``.query``.
        zero_based: whether indices start at 0 instead of 1. (LightGBM itself counts from 0 always.)
        num_features: as in `load_letor`, like the arguments after it.
        missing: see `load_letor`.
        absent: see `load_letor`.
        dtype: see `load_letor`.
        cache: see `load_letor`.
        progress: see `load_letor`.

    Raises:
        DataError: ``file:line: what is wrong``, also if the sizes do not add up to the number of lines.
    """
    options = Options(num_features, missing, absent, dtype, cache, progress)
    rules, file = options.rules(qid=False, first_index=0 if zero_based else 1), Path(path)
    sizes_file = Path(query) if query is not None else file.with_name(file.name.removesuffix(".gz") + ".query")

    def parse() -> RankingData:
        sizes = read_sizes(sizes_file)
        table = options.read(file, rules)
        if sizes.sum() != len(table.labels):
            raise DataError(
                f"{sizes_file}:{len(sizes)}: the sizes add up to {int(sizes.sum())}, "
                f"but {file} has {len(table.labels)} documents"
            )
        table.codes = np.repeat(np.arange(len(sizes)), sizes)
        return options.finish(table, sizes=sizes)

    return options.cached([file, sizes_file], rules, parse)


def load_letor_splits(folder: PathLike, *, num_features: int | None = None, **options: Any) -> dict[str, RankingData]:
    """Load ``train``, ``valid`` and ``test`` of a folder, with the same number of features in all of them.

    The files are ``train.txt``, ``vali.txt`` (or ``valid.txt``, ``validation.txt``) and ``test.txt``, or these with
    ``.gz``. Those that are not there are left out, but one must be. ``options`` are those of `load_letor`.
    """
    files = {split: find_file(folder, names) for split, names in SPLITS.items()}
    present = {split: file for split, file in files.items() if file is not None}
    if not present:
        raise DataError(f"no train.txt, vali.txt or test.txt in {Path(folder)}")
    return load_agreed(load_letor, present, num_features=num_features, **options)


def load_agreed(
    load: Callable[..., RankingData], files: dict[str, Path], *, num_features: int | None = None, **options: Any
) -> dict[str, RankingData]:
    """Load several files with one number of features: the given one, or the largest found in any of them."""
    parts = {split: load(file, num_features=num_features, **options) for split, file in files.items()}
    widest = max(part.num_features for part in parts.values())
    for split, part in parts.items():
        if part.num_features < widest:
            parts[split] = load(files[split], num_features=widest, **options)
    return parts


def find_file(folder: PathLike, names: Sequence[str], suffix: str = ".txt") -> Path | None:
    """The first of ``names`` that exists in ``folder``, plain or gzipped."""
    for name in names:
        for ending in (suffix, suffix + ".gz"):
            file = Path(folder) / (name + ending)
            if file.is_file():
                return file
    return None


def read_sizes(path: Path) -> NDArray[np.int64]:
    """The number of documents of each query, one per line."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; it must give the number of documents of each query")
    sizes = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        if not re.fullmatch(rb"[0-9]{1,18}", word) or int(word) == 0:
            got = repr(word[:40].decode("ascii", "backslashreplace"))
            raise DataError(f"{path}:{number}: the size of a query must be a positive whole number, got {got}")
        sizes.append(int(word))
    return np.array(sizes, dtype=np.int64)
