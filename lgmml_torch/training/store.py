"""Scaled distances of a whole data set, computed once: after that, training Φ is linear work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks


@torch.no_grad()
def fill_distances(
    model: LGMML,
    data: RankingData,
    out: Tensor,  # (N, K)
    *,
    documents_at_once: int = 16_384,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:  # (N, K)
    """Write the distances of every document into ``out``, whole lists at a time.

    Args:
        model: its preprocessing and metrics are used, its Φ is not.
        data: raw features.
        out: where to, e.g. a memory-mapped array.
        documents_at_once: how many documents are preprocessed together.
        progress: called with (documents done, documents in all).
    """
    device, dtype = model.metrics.scales.device, model.metrics.scales.dtype
    for first, last in list_blocks(data.offsets, documents_at_once):
        start, stop = int(data.offsets[first]), int(data.offsets[last])
        features = data.features[start:stop].to(device=device, dtype=dtype)
        offsets = (data.offsets[first : last + 1] - start).to(device)
        out[start:stop] = model.distances(features, offsets).to(out)
        if progress is not None:
            progress(stop, data.num_documents)
    return out


def compute_distances(
    model: LGMML,
    data: RankingData,
    *,
    file: str | Path | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:  # (N, K)
    """Distances of every document, in memory or, with ``file``, in a memory-mapped file that others may open."""
    shape = (data.num_documents, model.metrics.num_metrics)
    dtype = dtype or model.metrics.scales.dtype
    if file is None:
        out = torch.empty(shape, dtype=dtype)
    else:
        out = torch.from_file(str(file), shared=True, size=shape[0] * shape[1], dtype=dtype).view(shape)
    return fill_distances(model, data, out, progress=progress)
