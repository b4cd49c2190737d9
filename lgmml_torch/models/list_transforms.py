"""Preprocessing steps that look at a document's own list, and principal components."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.moments import column_moments, row_blocks
from lgmml_torch.functional.quantile import list_ids, list_rank_percentiles
from lgmml_torch.models.preprocess_base import Preprocess, Source


class ListRank(Preprocess):
    """Rank percentile of each value within its own list, mid-ranks for ties, in (−½, ½); 0 when all are tied.

    Makes the score depend on the list: a new query brings its own context.

    >>> ListRank().fit_transform(torch.tensor([[1.0], [9.0], [5.0], [5.0]]), torch.tensor([0, 2, 4])).flatten()
    tensor([-0.2500,  0.2500,  0.0000,  0.0000])
    """

    name = "list_rank"
    view = "list rank"

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        return list_rank_percentiles(features, offsets)


class ListMinMax(Preprocess):
    """(x − min)/(max − min) over the document's own list, in [0, 1]; 0 where the list does not vary.

    >>> ListMinMax().fit_transform(torch.tensor([[1.0], [9.0], [5.0], [5.0]]), torch.tensor([0, 3, 4])).flatten()
    tensor([0.0000, 1.0000, 0.5000, 0.0000])
    """

    name = "list_min_max"
    view = "list min-max"

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        lists = list_ids(offsets, features.shape[0])
        low = _list_extreme(features, offsets, lists, "amin").double()
        span = _list_extreme(features, offsets, lists, "amax").double() - low
        return _ratio(features.double() - low, span).to(features.dtype)


class ListStandardize(Preprocess):
    """(x − mean)/deviation over the document's own list; 0 where the list does not vary.

    >>> ListStandardize().fit_transform(torch.tensor([[1.0], [9.0], [5.0]]), torch.tensor([0, 2, 3])).flatten()
    tensor([-1.,  1.,  0.])
    """

    name = "list_standardize"
    view = "list z-score"

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        lists = list_ids(offsets, features.shape[0])
        sizes = (offsets[lists + 1] - offsets[lists]).double()[:, None]
        # From the minimum, in float64: a list that does not vary is exactly 0, however large its values.
        raised = features.double() - _list_extreme(features, offsets, lists, "amin").double()
        centred = raised - _list_sum(raised, offsets, lists) / sizes
        deviation = (_list_sum(centred.square(), offsets, lists) / sizes).sqrt()
        return _ratio(centred, deviation).to(features.dtype)


class PCA(Preprocess):
    """Projection of the centred features on the leading eigenvectors of their training covariance.

    ``components`` is a number of components, or a share of the variance in (0, 1) to be kept at least; all of them
    without it. Each eigenvector's largest entry is made positive, so that the result has one sign. A `Standardize`
    after it whitens.

    >>> x = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    >>> PCA(1).fit_transform(x, torch.tensor([0, 3])).flatten()
    tensor([-1.4142,  0.0000,  1.4142])
    """

    name = "pca"
    state = ("mean", "directions")
    mean: Tensor  # (D,)
    directions: Tensor  # (D, C)

    def __init__(self, components: int | float | None = None) -> None:
        whole = isinstance(components, int) and not isinstance(components, bool) and components > 0
        share = isinstance(components, float) and 0 < components < 1
        if not (components is None or whole or share):
            raise LGMMLError(
                f"`components` must be a positive whole number, a share in (0, 1) or None, got {components!r}"
            )
        super().__init__()
        self.components = components

    @property
    def num_features_out(self) -> int:
        """Number of components."""
        return self.directions.shape[1] if self.fitted else self.num_features_in

    def sources(self) -> list[Source]:
        """Components, each of several features."""
        return [Source(-1, f"component {number + 1}") for number in range(self.num_features_out)]

    def arguments(self) -> dict[str, Any]:
        """The number of components, or the share of the variance."""
        return {"components": self.components}

    def _fit(self, features: Tensor, offsets: Tensor) -> None:
        columns = features.shape[1]
        if isinstance(self.components, int) and self.components > columns:
            raise LGMMLError(f"`components` must be at most the number of features, {columns}, got {self.components}")
        mean, _ = column_moments(features)
        covariance = mean.new_zeros((columns, columns))
        for block in row_blocks(features):
            centred = block - mean
            covariance.addmm_(centred.mT, centred, alpha=1 / len(features))
        variances, vectors = torch.linalg.eigh(covariance)
        variances, vectors = variances.flip(0).clamp_min(0), vectors.flip(1)
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        vectors = vectors * torch.where(largest < 0, -1.0, 1.0)
        self.mean = mean.to(features.dtype)
        self.directions = vectors[:, : self._count(variances)].to(features.dtype).contiguous()

    def _count(self, variances: Tensor) -> int:
        if isinstance(self.components, float):
            below = variances.cumsum(0) < self.components * variances.sum()
            return min(int(below.sum()) + 1, len(variances))
        return len(variances) if self.components is None else self.components

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        return (features - self.mean.to(features.dtype)) @ self.directions.to(features.dtype)


# One row more than there are lists keeps the exported program free of assumptions about a single list.
def _list_extreme(
    features: Tensor,  # (N, D)
    offsets: Tensor,  # (Q+1,)
    lists: Tensor,  # (N,)
    reduce: str,
) -> Tensor:  # (N, D)
    out = features.new_zeros((offsets.shape[0], features.shape[1]))
    index = lists[:, None].expand(features.shape)
    return out.scatter_reduce(0, index, features, reduce=reduce, include_self=False)[lists]


def _list_sum(
    values: Tensor,  # (N, D)
    offsets: Tensor,  # (Q+1,)
    lists: Tensor,  # (N,)
) -> Tensor:  # (N, D)
    return values.new_zeros((offsets.shape[0], values.shape[1])).index_add(0, lists, values)[lists]


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Numerator/denominator, 0 where the denominator is; NaN stays NaN."""
    varies = denominator != 0
    return torch.where(varies, numerator / torch.where(varies, denominator, 1.0), 0 * numerator)
