"""Lists from arrays in memory, and from ``.npz`` files of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import DataError
from lgmml_torch.ragged import RankingData, check_length, check_values, dense_features, float_vector, query_codes
from lgmml_torch.streaming.base import Lists, Rows


class ArrayLists(Lists):
    """Lists that are in memory already."""

    def __init__(
        self,
        name: str,
        X: Any,
        y: Any | None,
        qid: Any,
        *,
        num_features: int,
        doc_ids: Sequence[str] | None = None,
        dtype: torch.dtype = torch.float32,
        missing: str = "error",
    ) -> None:
        super().__init__(dtype=dtype, missing=missing)
        self.name, self.has_labels = name, y is not None
        try:
            self._features = dense_features(X, dtype)
            self._labels = None if y is None else float_vector("y", y)
            self.codes, self.qids = query_codes(qid, None, len(self._features))
            for word, values in (("y", self._labels), ("doc_ids", doc_ids)):
                if values is not None:
                    check_length(word, len(values), len(self._features))
            if missing == "error":
                check_values(self._features, np.zeros(1, np.float32) if self._labels is None else self._labels)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        width = self._features.shape[1]
        if width != num_features:
            raise DataError(f"{name}: the model was trained on {num_features} features, but `X` has {width}")
        self._doc_ids = doc_ids

    @classmethod
    def from_data(cls, data: RankingData, name: str, *, num_features: int) -> Self:
        """The lists of a data set that was loaded."""
        ids = None if data.doc_ids is None else [data.doc_ids[row] for row in data.order.argsort().tolist()]
        return cls(
            name,
            data.in_caller_order(data.features),
            data.in_caller_order(data.labels),
            [data.qids[query] for query in data.in_caller_order(data.query_index).tolist()],
            num_features=num_features,
            doc_ids=ids,
            dtype=data.features.dtype,
        )

    def _read(self, rows: NDArray[np.int64]) -> Rows:
        labels = None if self._labels is None else self._labels[rows]
        ids = None if self._doc_ids is None else [self._doc_ids[row] for row in rows.tolist()]
        return Rows(self._features[rows], labels, ids)


def open_npz(path: str | Path, num_features: int, dtype: torch.dtype, missing: str) -> ArrayLists:
    """Arrays ``X``, ``qid`` and, optionally, ``y`` and ``docid``; the file is read whole."""
    name = "<stdin>" if str(path) == "-" else str(path)
    try:
        with np.load(sys.stdin.buffer if str(path) == "-" else path, allow_pickle=False) as arrays:
            found = {key: arrays[key] for key in arrays.files}
    except (ValueError, EOFError, OSError, AttributeError, TypeError) as error:
        raise DataError(f"{name}: not a readable .npz file: {error}") from error
    for key in ("X", "qid"):
        if key not in found:
            raise DataError(f"{name}: there must be an array {key!r}, got {', '.join(sorted(found)) or 'none'}")
    ids = found.get("docid")
    return ArrayLists(
        name,
        found["X"],
        found.get("y"),
        found["qid"],
        num_features=num_features,
        doc_ids=None if ids is None else [str(value) for value in ids.tolist()],
        dtype=dtype,
        missing=missing,
    )
