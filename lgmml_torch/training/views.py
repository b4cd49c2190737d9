"""Lists seen through a preprocessing: all of them, in a file, or when asked for; and the sample it is fitted on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lgmml_torch.files import scratch_array
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.lists import TrainingLists
from lgmml_torch.ragged import RankingData
from lgmml_torch.sharing import sample_lists

SAMPLE_VALUES = 1 << 27  # raw features that a preprocessing and the start of metrics are fitted on at most


@dataclass(frozen=True)
class Views:
    """All views of a set's features, list by list.

    Attributes:
        features: ``(N, D)`` raw.
        preprocess: fitted; it sees whole lists, as in scoring.
        dtype: of what it makes.
        device: where it is made; where the raw ones are when None.
    """

    features: Tensor
    preprocess: Preprocess
    dtype: torch.dtype
    device: torch.device | None = None

    def to(self, device: torch.device) -> Views:
        """The same, made elsewhere."""
        return replace(self, device=device)

    def of(
        self,
        rows: Tensor | slice,  # (M,) documents of whole lists
        offsets: Tensor,  # (B+1,) where each list stands among them
    ) -> Tensor:  # (M, D')
        """The preprocessed features of some lists."""
        rows = rows.to(self.features.device) if isinstance(rows, Tensor) else rows
        raw = self.features[rows].to(device=self.device, dtype=self.dtype)
        with torch.no_grad():
            made: Tensor = self.preprocess(raw, offsets)
        return made


def sample_of(data: RankingData, seed: int, folder: Path | None = None) -> RankingData:
    """The lists themselves, or, of very many, the sample that stands for them, wherever and on whatever processes."""
    return sample_lists(data, SAMPLE_VALUES // max(1, data.num_features), seed=seed, folder=folder)


def fit_through(
    preprocess: Preprocess, shown: RankingData, wanted: RankingData, folder: Path | None = None
) -> RankingData:
    """Fit a preprocessing on some lists, those of all processes where they share them; the wanted ones through it."""
    if wanted is shown and shown.spread is None:
        return shown.replace(features=preprocess.fit_transform(shown.features, shown.offsets))
    preprocess.fit_lists(TrainingLists(shown.features, shown.offsets, shown.spread))
    return seen_through(preprocess, wanted, folder)


def seen_through(preprocess: Preprocess, data: RankingData, folder: Path | None = None) -> RankingData:
    """The lists with preprocessed features; those of shards, which may be larger than memory, in a file."""
    if data.spread is None:
        return data.replace(features=preprocess(data.features, data.offsets))
    kind = preprocess(data.features[:0], data.offsets[:1])
    found = torch.from_numpy(scratch_array((data.num_documents, kind.shape[1]), kind.numpy().dtype, folder))
    done = 0
    for block in TrainingLists(data.features, data.offsets, data.spread, steps=(preprocess,)).blocks():
        found[done : done + len(block)] = block
        done += len(block)
    return data.replace(features=found)
