"""What all text loaders share: their options, missing values, the way into `RankingData` and the cache."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import DataError, LGMMLError, check_choice, check_positive
from lgmml_torch.data.cache import Cache, from_arrays, resolve, to_arrays
from lgmml_torch.data.missing import POLICIES, fill_missing
from lgmml_torch.data.reader import Table, line_of_row, read_table
from lgmml_torch.data.svmlight import Rules
from lgmml_torch.ragged import RankingData

PathLike = str | os.PathLike[str]
PARSER = 1  # part of every cache key: raise it when the same text comes to mean other numbers
_WHOLE = re.compile(rb"0|-?[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class Options:
    """The arguments of `lgmml_torch.data.letor.load_letor`, checked."""

    num_features: int | None
    missing: str
    absent: str
    dtype: torch.dtype
    cache: bool | PathLike | Cache
    progress: bool

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, POLICIES)
        check_choice("absent", self.absent, ("zero", "missing"))
        if self.num_features is not None:
            check_positive("num_features", self.num_features)
        if self.dtype not in (torch.float32, torch.float64):
            raise LGMMLError(f"`dtype` must be torch.float32 or torch.float64, got {self.dtype}")

    def rules(self, *, qid: bool, first_index: int = 1) -> Rules:
        """What the parser may accept under these options."""
        kind: Any = np.float32 if self.dtype == torch.float32 else np.float64
        return Rules(qid, first_index, self.num_features, self.missing != "error", kind)

    def read(self, file: Path, rules: Rules) -> Table:
        """The rows of a file; missing values are still NaN."""
        absent = np.nan if self.absent == "missing" else 0.0
        table = read_table(file, rules, absent=absent, progress=self.progress)
        if not rules.missing and self.absent == "missing" and len(gaps := np.argwhere(np.isnan(table.features))):
            row, column = map(int, gaps[0])
            raise DataError(
                f"{file}:{line_of_row(file, row)}: feature {column + rules.first_index} is absent; "
                "`missing=` says what to put there"
            )
        return table

    def finish(self, table: Table, *, sizes: NDArray[np.int64] | None = None) -> RankingData:
        """Fill what is missing and sort; ``table`` gives up its arrays, because sorting copies them."""
        if self.missing != "error":
            fill_missing(table.features, table.codes, self.missing)
        queries = {"qid": query_ids(table)} if sizes is None else {"group": sizes}
        features, table.features = table.features, np.empty((0, 0))
        table.codes = np.empty(0, dtype=np.int64)
        return RankingData.from_arrays(
            features,
            table.labels,
            doc_ids=table.doc_ids,
            dtype=self.dtype,
            **queries,
        )

    def cached(self, files: list[Path], rules: Rules, parse: Callable[[], RankingData]) -> RankingData:
        """What ``parse`` makes of the files, from the cache if they were parsed before in the same way."""
        cache = resolve(self.cache)
        if cache is None or not all(file.is_file() for file in files):
            return parse()
        key = {
            "parser": PARSER,
            "content": [cache.content(file) for file in files],
            "qid": rules.qid,
            "first_index": rules.first_index,
            "num_features": self.num_features,
            "missing": self.missing,
            "absent": self.absent,
            "dtype": str(self.dtype),
        }

        def build() -> dict[str, NDArray[Any]]:
            before = [_state(file) for file in files]
            arrays = to_arrays(parse())
            for file, state in zip(files, before, strict=True):
                if _state(file) != state:
                    raise DataError(f"{file}: the file was changed while it was being read")
            return arrays

        return from_arrays(cache.get_or_build(key, build))


def _state(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def query_ids(table: Table) -> list[Hashable]:
    """One id per row: whole numbers if all ids are written as such, so that nothing is lost, otherwise text."""
    whole = all(_WHOLE.fullmatch(qid) for qid in table.qids)
    ids = np.array([int(qid) if whole else qid.decode("ascii") for qid in table.qids], dtype=object)
    # Rows of a query share one object: a list of fresh numbers would be as large as several columns of features.
    shared: list[Hashable] = ids[table.codes].tolist()
    return shared
