"""How labels go with scores: the mean label of documents that a model puts at the top, in the middle, at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, check_positive, check_shape
from lgmml_torch.functional.features import list_rank_percentiles
from lgmml_torch.functional.significance import Interval, bootstrap_interval
from lgmml_torch.ragged import RankingData


@dataclass(frozen=True)
class Calibration:
    """Mean label by place of the score within its list, lowest scores first.

    Attributes:
        labels: the mean label of each part of the lists with its bootstrap interval over queries; a query counts once,
            and where it has no document in a part it is skipped. None where no query has one.
        documents: how many fell into each part.
    """

    labels: tuple[Interval | None, ...]
    documents: tuple[int, ...]


def label_by_score(
    scores: Tensor,  # (N,) in the order of the rows of `data`
    data: RankingData,
    *,
    bins: int = 10,
    seed: int = 0,
    resamples: int = 2_000,
) -> Calibration:
    """Cut each list into parts by the rank of its scores, and average the labels of each part.

    Scores of a ranker have no unit and mean nothing across lists, so their ranks within the list are looked at; equal
    scores share theirs. A good ranking rises from left to right.

    Raises:
        LGMMLError: ``bins`` below 1, scores of another number of documents.
        DataError: no documents.

    >>> data = RankingData.from_arrays([[1.0], [2.0], [3.0], [4.0]], [0, 0, 1, 3], qid=[7] * 4)
    >>> [interval.mean for interval in label_by_score(data.features[:, 0], data, bins=2).labels]
    [0.0, 2.0]
    """
    check_positive("bins", bins)
    check_shape("scores", scores, (data.num_documents,))
    if not data.num_documents:
        raise DataError("there are no documents whose labels could be averaged")
    places = list_rank_percentiles(scores[:, None].double(), data.offsets)[:, 0] + 0.5
    cells = data.query_index * bins + (places * bins).long().clamp(0, bins - 1)
    shape = (data.num_queries, bins)
    sums = torch.zeros(shape[0] * bins, dtype=torch.float64).index_add(0, cells, data.labels.double()).view(shape)
    counts = torch.bincount(cells, minlength=shape[0] * bins).view(shape)
    means = sums / counts  # NaN where a query has no document there
    labels: list[Interval | None] = []
    for column in means.unbind(1):
        interval = None
        if not bool(column.isnan().all()):
            generator = torch.Generator().manual_seed(seed)
            interval = bootstrap_interval(column, generator=generator, resamples=resamples)
        labels.append(interval)
    return Calibration(tuple(labels), tuple(counts.sum(0).tolist()))
