"""`RankingData` as named arrays, so that the cache can keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lgmml_torch.ragged import RankingData

_TENSORS = ("features", "labels", "offsets", "order", "query_weights")


def to_arrays(data: RankingData) -> dict[str, NDArray[Any]]:
    """Arrays of numbers only; query ids must all be whole numbers or all be strings without a newline."""
    arrays: dict[str, NDArray[Any]] = {}
    for name in _TENSORS:
        tensor = getattr(data, name)
        if tensor is not None:
            arrays[name] = tensor.numpy()
    if all(isinstance(qid, int) for qid in data.qids):
        arrays["qids"] = np.array(data.qids, dtype=np.int64)
    else:
        arrays["qid_text"] = _pack([str(qid) for qid in data.qids])
    if data.doc_ids is not None:
        arrays["doc_text"] = _pack(data.doc_ids)
    return arrays


def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> RankingData:
    """The inverse of `to_arrays`; the tensors share the arrays' memory."""
    tensors = {name: torch.from_numpy(arrays[name]) for name in _TENSORS if name in arrays}
    qids: Sequence[Any] = arrays["qids"].tolist() if "qids" in arrays else _unpack(arrays["qid_text"])
    doc_ids = tuple(_unpack(arrays["doc_text"])) if "doc_text" in arrays else None
    return RankingData(qids=tuple(qids), doc_ids=doc_ids, **tensors)


def _pack(words: Sequence[str]) -> NDArray[np.uint8]:
    return np.frombuffer("\n".join(words).encode(), dtype=np.uint8)


def _unpack(text: NDArray[np.uint8]) -> list[str]:
    return text.tobytes().decode().split("\n")
