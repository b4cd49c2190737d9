"""What training reads of a data set: preprocessed features, and distances that are computed once and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.cache import Arrays, Cache
from lgmml_torch.distributed import limit_documents
from lgmml_torch.functional.selection import FeatureChoice, FeatureSums, choose_features
from lgmml_torch.models.preprocess.base import BLOCK_VALUES, Preprocess, TrainingLists
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import tensors_digest
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks, segment_min

SAMPLE_VALUES = 1 << 27  # raw values that a preprocessing and sampled metrics are fitted on at most
_START_VALUES = 3 << 21  # the same for metrics that are trained, whose preprocessing makes ten columns of a feature
_START_RELEVANT = 512  # documents above the lowest label of their list that these metrics find their anchors among
_KEPT_BYTES = 5 << 28  # of preprocessed training and validation lists; more are preprocessed batch by batch
_FORMAT = 2  # of the cached distances


@dataclass(frozen=True)
class Views:
    """Preprocessed features that are computed when a batch needs them."""

    features: Tensor  # (N, D) raw
    preprocess: Preprocess  # fitted; it gets whole lists, as in scoring
    dtype: torch.dtype  # of the preprocessed features
    device: torch.device | None = None  # of the preprocessed features; that of the raw ones when None

    def to(self, device: torch.device) -> Views:
        """The same on another device."""
        return replace(self, device=device)

    def of(self, rows: Tensor | slice, offsets: Tensor) -> Tensor:  # (M,), (B+1,) -> (M, D')
        """The preprocessed features of documents of whole lists; ``offsets`` says where each list stands among them."""
        if isinstance(rows, Tensor):
            rows = rows.to(self.features.device)
        raw = self.features[rows].to(device=self.device, dtype=self.dtype)
        with torch.no_grad():
            values: Tensor = self.preprocess(raw, offsets)
        return values


def views_fit(splits: Mapping[str, RankingData], columns: int, dtype: torch.dtype) -> bool:
    """Whether memory shall hold the preprocessed features of all training and validation lists."""
    lists = [splits[name] for name in ("train", "valid") if name in splits]
    return sum([data.all_lists.num_documents for data in lists]) * columns * dtype.itemsize <= _KEPT_BYTES


def sample_of(data: RankingData, seed: int, folder: Path | None = None, *, start: bool = False) -> RankingData:
    """The lists themselves, or a sample of about `SAMPLE_VALUES` values; the same for any number of processes.

    A ``start`` of trained metrics needs less, where that has enough relevant documents.
    """
    if start:
        few = limit_documents(data, _START_VALUES // max(1, data.num_features), seed=seed, folder=folder)
        lowest = segment_min(few.labels, few.offsets)[few.query_index]
        relevant = few.all_lists.all_reduce((few.labels > lowest).sum(), "sum")
        if len(few.all_lists) == len(data.all_lists) or int(relevant) >= _START_RELEVANT:
            return few
    return limit_documents(data, SAMPLE_VALUES // max(1, data.num_features), seed=seed, folder=folder)


def select_features(data: RankingData) -> FeatureChoice:
    """Which raw features stay, by the lists of all processes; the same for any number of them."""
    labels, everything = data.labels, data.all_lists
    if data.document_weights is not None:
        labels = labels * data.document_weights
    sums = FeatureSums(data.num_features, len(everything))
    sums.add(data.features, labels, data.offsets, everything.own)
    sums.parts = everything.all_reduce(sums.parts, "sum")
    return choose_features(sums)


def fit_preprocess(
    preprocess: Preprocess, sample: RankingData, data: RankingData, folder: Path | None = None
) -> RankingData:
    """Fit a preprocessing on a sample, that of all processes where they share it, and apply it to ``data``."""
    if data is sample and not sample.all_lists.shared:  # in one pass
        return sample.replace(features=preprocess.fit_transform(sample.features, sample.offsets))
    preprocess.fit_lists(TrainingLists.of(sample))
    return preprocessed(preprocess, data, folder)


def preprocessed(preprocess: Preprocess, data: RankingData, folder: Path | None = None) -> RankingData:
    """The lists with preprocessed features; features of shards, which may exceed memory, go to a file."""
    rows = max(1, BLOCK_VALUES // max(1, data.num_features, preprocess.num_features_out))
    features = data.all_lists.in_blocks(
        lambda some, offsets: preprocess(data.features[some], offsets), data.offsets, folder, rows
    )
    return data.replace(features=features)


@torch.no_grad()
def compute_distances(
    model: LGMML,
    data: RankingData,
    *,
    features: Tensor | None = None,  # (N, D') the same preprocessed, where they are known already
    cache: Cache | None = None,  # where the distances are kept, memory-mapped; only in memory when None
    dtype: torch.dtype | None = None,  # to keep them in: the model's when None, or a half precision
    documents_at_once: int = 16_384,  # that are preprocessed together
    progress: Callable[[int], None] | None = None,  # called with the number of documents done
) -> Tensor:  # (N, K)
    """Distances of every document of raw features, whole lists at a time; the model's Φ is not used.

    Half precision halves memory and disk and rounds each distance once: by at most 2⁻¹¹ of itself in float16 (plus
    3e-8, and only up to 65504) and 2⁻⁸ in bfloat16. Training turns them back into the model's dtype batch by batch.

    Raises:
        LGMMLError: a dtype that cannot hold them, or a distance beyond the range of float16.
    """
    shape = (data.num_documents, model.metrics.num_metrics)
    kept = dtype or model.dtype
    if not kept.is_floating_point:
        raise LGMMLError(f"`dtype` must be a floating-point dtype, got {kept}")
    device = model.device

    def fill(arrays: Arrays) -> None:
        out = torch.from_numpy(arrays["dists"]).view(kept)
        for first, last in list_blocks(data.offsets, documents_at_once):
            start, stop = int(data.offsets[first]), int(data.offsets[last])
            if features is None:
                raw = data.features[start:stop].to(device=device, dtype=model.dtype)
                prepared = model.preprocess(raw, (data.offsets[first : last + 1] - start).to(device))
            else:
                prepared = features[start:stop].to(device=device, dtype=model.dtype)
            if device.type == "cpu":
                model.metrics(prepared, out=out[start:stop])
            else:
                out[start:stop] = model.metrics(prepared).cpu()
            if kept == torch.float16 and not bool(out[start:stop].isfinite().all()):
                raise LGMMLError(
                    "`dtype` must hold scaled distances beyond 65504, got torch.float16; use torch.bfloat16"
                )
            if progress is not None:
                progress(stop)

    # Numpy has no bfloat16; the file holds its bits.
    on_disk = str(kept).removeprefix("torch.")
    if kept == torch.bfloat16:
        on_disk = "int16"
    if cache is None:
        arrays = {"dists": np.empty(shape, on_disk)}
        fill(arrays)
    else:
        arrays = cache.get_or_fill(_distance_key(model, data, kept), {"dists": (shape, on_disk)}, fill)
    return torch.from_numpy(arrays["dists"]).view(kept)


def _distance_key(model: LGMML, data: RankingData, dtype: torch.dtype) -> dict[str, str | int]:
    """What the distances depend on: the documents, the preprocessing and the metrics; not Φ, labels or ids."""
    state = [*model.preprocess.state_dict().values(), *model.metrics.state_dict().values()]
    spec = json.dumps([model.preprocess.spec(), model.metrics.spec()], sort_keys=True)
    return {
        "kind": "distances",
        "format": _FORMAT,
        "dtype": str(dtype).removeprefix("torch."),
        "model": tensors_digest(state),
        "spec": spec,
        "data": tensors_digest([data.features, data.offsets]),
    }
