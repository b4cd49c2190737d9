"""Scaled distances of a whole data set, computed once and kept: after that, training Φ is linear work."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.cache import Arrays, Cache
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import tensors_digest
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks

FORMAT = 2  # of the cached distances


@torch.no_grad()
def compute_distances(
    model: LGMML,
    data: RankingData,
    *,
    cache: Cache | None = None,
    dtype: torch.dtype | None = None,
    documents_at_once: int = 16_384,
    progress: Callable[[int], None] | None = None,
) -> Tensor:  # (N, K)
    """Distances of every document, whole lists at a time.

    Half precision halves memory and disk and rounds each distance once: by at most 2⁻¹¹ of itself in float16 (plus
    3e-8, and only up to 65504) and 2⁻⁸ in bfloat16. Training turns them back into the model's dtype batch by batch.

    Args:
        model: its preprocessing and metrics are used, its Φ is not.
        data: raw features.
        cache: where they are kept, memory-mapped; only in memory when None.
        dtype: to keep them in: the model's (when None), ``torch.float16`` or ``torch.bfloat16``.
        documents_at_once: how many documents are preprocessed together.
        progress: called with the number of documents done.

    Raises:
        LGMMLError: a dtype that cannot hold them, or a distance beyond the range of float16.
    """
    shape = (data.num_documents, model.metrics.num_metrics)
    kept = model.dtype if dtype is None else dtype
    if not kept.is_floating_point:
        raise LGMMLError(f"`dtype` must be a floating-point dtype, got {kept}")
    if cache is None:
        return _fill(model, data, torch.empty(shape, dtype=kept), documents_at_once, progress)

    def fill(arrays: Arrays) -> None:
        _fill(model, data, torch.from_numpy(arrays["dists"]).view(kept), documents_at_once, progress)

    # Numpy has no bfloat16; the file holds its bits.
    on_disk = "int16" if kept == torch.bfloat16 else str(kept).removeprefix("torch.")
    arrays = cache.get_or_fill(distance_key(model, data, kept), {"dists": (shape, on_disk)}, fill)
    return torch.from_numpy(arrays["dists"]).view(kept)


def distance_key(model: LGMML, data: RankingData, dtype: torch.dtype) -> dict[str, str | int]:
    """What the distances depend on: the documents, the preprocessing and the metrics; not Φ, labels or ids."""
    state = [*model.preprocess.state_dict().values(), *model.metrics.state_dict().values()]
    spec = json.dumps([model.preprocess.spec(), model.metrics.spec()], sort_keys=True)
    return {
        "kind": "distances",
        "format": FORMAT,
        "dtype": str(dtype).removeprefix("torch."),
        "model": tensors_digest(state),
        "spec": spec,
        "data": tensors_digest([data.features, data.offsets]),
    }


def _fill(
    model: LGMML, data: RankingData, out: Tensor, documents_at_once: int, progress: Callable[[int], None] | None
) -> Tensor:
    device, dtype = model.device, model.dtype
    for first, last in list_blocks(data.offsets, documents_at_once):
        start, stop = int(data.offsets[first]), int(data.offsets[last])
        features = data.features[start:stop].to(device=device, dtype=dtype)
        offsets = (data.offsets[first : last + 1] - start).to(device)
        prepared = model.preprocess(features, offsets)
        if device.type == "cpu":
            model.metrics(prepared, out=out[start:stop])
        else:
            out[start:stop] = model.metrics(prepared).cpu()
        if out.dtype == torch.float16 and not bool(out[start:stop].isfinite().all()):
            raise LGMMLError("`dtype` must hold scaled distances beyond 65504, got torch.float16; use torch.bfloat16")
        if progress is not None:
            progress(stop)
    return out
