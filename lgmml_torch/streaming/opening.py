"""Opening a file of lists, whatever its format."""

from __future__ import annotations

from pathlib import Path

import torch

from lgmml_torch.checks import DataError, check_choice
from lgmml_torch.streaming.arrays import open_npz
from lgmml_torch.streaming.base import Lists
from lgmml_torch.streaming.letor import LetorLists
from lgmml_torch.streaming.table import Columns, CsvLists

KINDS = ("letor", "csv", "npz")
SUFFIXES = {".csv": "csv", ".tsv": "csv", ".npz": "npz"}


def open_lists(
    path: str | Path,
    *,
    num_features: int,
    kind: str | None = None,
    columns: Columns | None = None,
    dtype: torch.dtype = torch.float32,
    missing: str = "error",
) -> Lists:
    """Open a LETOR file or a CSV file with a header (both plain or gzipped), or an ``.npz`` file of arrays.

    Args:
        path: the file, ``-`` for standard input. LETOR lines may lack the label; features a line does not mention are
            0. An ``.npz`` file holds ``X``, ``qid`` and, optionally, ``y`` and ``docid``; it is read whole.
        num_features: features of the model the data is for; more than that are an error.
        kind: ``"letor"``, ``"csv"`` or ``"npz"``; by the name when None, LETOR when that says nothing.
        columns: names of the columns of a CSV file that are no features; the label's and the document's may be absent.
        dtype: of the features.
        missing: what ``NULL``, ``nan`` and empty cells stand for, see `lgmml_torch.data.missing.fill_missing`.

    Raises:
        DataError: ``file:line: what is wrong``.
    """
    suffixes = [suffix for suffix in Path(path).suffixes if suffix != ".gz"]
    kind = kind or SUFFIXES.get(suffixes[-1].lower() if suffixes else "", "letor")
    check_choice("kind", kind, KINDS)
    if str(path) != "-" and not Path(path).is_file():
        raise DataError(f"{path}: no such file")
    if kind == "npz":
        return open_npz(path, num_features, dtype, missing)
    if kind == "csv":
        return CsvLists(path, num_features, columns or Columns(), dtype=dtype, missing=missing)
    return LetorLists(path, num_features, dtype=dtype, missing=missing)
