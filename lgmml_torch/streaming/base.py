"""Reading ranking data list by list, from files that need not fit into memory.

A file is looked through once for its query ids; after that whole lists are read, as many at a time as wanted. Where the
rows of a query do not follow one another, their places in the file were noted on the first pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.checks import DataError, check_choice, check_positive
from lgmml_torch.data.missing import POLICIES, fill_missing
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks, offsets_from_sizes


@dataclass
class Rows:
    """Rows of a file, in the order asked for."""

    features: NDArray[Any]  # (n, D), NaN where missing
    labels: NDArray[np.float32] | None  # (n,)
    doc_ids: Sequence[str] | None  # (n,)


@dataclass(frozen=True)
class Batch:
    """Some whole lists.

    Attributes:
        data: the lists; its caller's order is the order of the rows in the file.
        rows: ``(n,)`` the row of the file, from 0, of each document in that order.
    """

    data: RankingData
    rows: NDArray[np.int64]


class Lists(ABC):
    """The lists of one file.

    Attributes:
        name: what messages call it.
        codes: ``(N,)`` the query of each row, numbered by first appearance.
        qids: the id of each query.
        has_labels: whether the file says how relevant the documents are.
    """

    name: str
    codes: NDArray[np.int64]
    qids: Sequence[Hashable]
    has_labels: bool

    def __init__(self, *, dtype: torch.dtype = torch.float32, missing: str = "error") -> None:
        check_choice("missing", missing, POLICIES)
        self.dtype, self.missing = dtype, missing

    @property
    def num_rows(self) -> int:
        """Documents in the file."""
        return len(self.codes)

    @property
    def in_order(self) -> bool:
        """Whether the rows of each query follow one another."""
        return bool((np.diff(self.codes) >= 0).all())

    def batches(self, documents: int = 32_768) -> Iterator[Batch]:
        """Whole lists, in the order in which their queries first appear, about so many documents at a time."""
        check_positive("documents", documents)
        order = None if self.in_order else np.argsort(self.codes, kind="stable")
        sizes = np.bincount(self.codes, minlength=len(self.qids))
        offsets = offsets_from_sizes(torch.from_numpy(sizes))
        for first, last in list_blocks(offsets, documents):
            start, stop = int(offsets[first]), int(offsets[last])
            yield self._batch(np.arange(start, stop) if order is None else np.sort(order[start:stop]))

    def only(self, qid: str) -> RankingData:
        """The list of one query, by its id as text.

        Raises:
            DataError: when there is no such query.
        """
        for code, known in enumerate(self.qids):
            if str(known) == qid:
                return self._batch(np.flatnonzero(self.codes == code)).data
        some = ", ".join(str(known) for known in self.qids[:5]) + (", …" if len(self.qids) > 5 else "")
        raise DataError(f"{self.name}: there is no query {qid!r}; there are {some}")

    def close(self) -> None:  # noqa: B027 - most lists hold no file
        """Let go of the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _read(self, rows: NDArray[np.int64]) -> Rows:
        """The given rows, which ascend."""

    def _batch(self, rows: NDArray[np.int64]) -> Batch:
        part = self._read(rows)
        codes = self.codes[rows]
        if self.missing != "error":
            fill_missing(part.features, np.unique(codes, return_inverse=True)[1], self.missing)
        data = RankingData.from_arrays(
            part.features,
            np.zeros(len(rows), np.float32) if part.labels is None else part.labels,
            qid=[self.qids[code] for code in codes.tolist()],
            doc_ids=part.doc_ids,
            dtype=self.dtype,
        )
        return Batch(data, rows)
