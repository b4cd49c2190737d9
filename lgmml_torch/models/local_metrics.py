"""`LocalMetrics`: a bank of local metrics, their anchors and scales: buffers, or parameters while they are trained.

A metric is kept as its factor F, with M = F Fᵀ, because distances need F and because F keeps M positive
semi-definite whatever rounding does. Metrics of the same shape stand together in a `MetricBlock`; a bank may mix
full-dimensional blocks with blocks whose metrics look at a few features each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from lgmml_torch.checks import LGMMLError, check_choice, check_finite, check_shape
from lgmml_torch.functional.distance import NORMS, TINY, DistanceTiles, low_rank_distances, norm_factors
from lgmml_torch.functional.score import kernel as kappa_of

_Made = TypeVar("_Made")

_LEAST_SCALE = 1e-4
_ZOOM_RATE = 5.0  # how much faster features are strengthened and muted than a single entry of a factor moves


class Kept:
    """Something made of tensors, kept until one of them is replaced or written to; copies and pickles start without.

    As torch's own gradients do, it overlooks what is written through ``.data``.
    """

    def __init__(self) -> None:
        self._kept: tuple[Any, Any, Sequence[Tensor]] | None = None

    def get(self, make: Callable[[], _Made], tensors: Sequence[Tensor], *key: Any) -> _Made:
        """What ``make`` gave for these tensors and this key, or gives now."""
        state = [*key]
        for tensor in tensors:
            version = 0
            if not tensor.is_inference():
                version = tensor._version
            state.append((tensor.data_ptr(), version))
        kept = self._kept  # which another thread may exchange
        if kept is None or kept[0] != state:
            kept = self._kept = (state, make(), tensors)  # with them, so that no other tensor gets their addresses
        made: _Made = kept[1]
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"_kept": None}


class MetricBlock(nn.Module):
    """K local metrics of one shape: in all D features, or each in s features of its own.

    Args:
        anchors: ``(K, s)`` ideal candidate documents, s = D without ``support``.
        factors: ``(K, s, r)``.
        support: ``(K, s)`` the features each metric looks at; None for all.
        scales: ``(K,)`` what distances are divided by (median over the training documents times bandwidth);
            ones when not given.
        quality: ``(K,)`` NDCG of the anchor on its region, NaN where it was not measured.

    While metrics in all features are trained there is also ``zoom (D,)``: row j of every factor counts 1 + 5·zoom[j]
    times, so that one number strengthens or mutes a feature in all metrics at once. When training is over it becomes
    part of the factors.
    """

    support: Tensor
    anchors: Tensor
    factors: Tensor
    scales: Tensor
    quality: Tensor
    zoom: Tensor | None

    def __init__(
        self,
        anchors: Tensor,
        factors: Tensor,
        *,
        support: Tensor | None = None,
        scales: Tensor | None = None,
        quality: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._kept_tiles = Kept()
        check_shape("anchors", anchors, (None, None))
        count, width = anchors.shape
        check_shape("factors", factors, (count, width, None))
        if support is None:
            support = torch.empty(0)
        else:
            check_shape("support", support, (count, width))
        if scales is None:
            scales = anchors.new_ones(count)
        if quality is None:
            quality = anchors.new_full((count,), float("nan"))
        self.register_buffer("support", support.long())
        self.register_buffer("anchors", anchors)
        self.register_buffer("factors", factors)
        self.register_buffer("scales", scales.to(anchors))
        self.register_buffer("quality", quality.to(anchors))
        self.register_buffer("zoom", None)
        check_shape("scales", scales, (count,))
        check_shape("quality", quality, (count,))
        for name in ("anchors", "factors", "scales"):
            check_finite(name, getattr(self, name))

    @property
    def _own_support(self) -> Tensor | None:  # (K, s)
        """The features of each metric; None where all look at all features."""
        return None if self.is_full else self.support

    @property
    def is_full(self) -> bool:
        """Whether the metrics look at all features."""
        return self.support.dim() == 1

    @property
    def num_metrics(self) -> int:
        """K."""
        return len(self.anchors)

    @property
    def metrics(self) -> Tensor:
        """``(K, s, s)`` the metrics M = F Fᵀ, derived from the factors."""
        return self.factors @ self.factors.mT

    @property
    def zoomed_factors(self) -> Tensor:
        """``(K, s, r)`` the factors as distances see them."""
        if self.zoom is None:
            return self.factors
        return self.factors * (1 + _ZOOM_RATE * self.zoom)[:, None]

    def train_metrics_(self, trained: bool = True) -> None:
        """Turn anchors, factors and scales into parameters, or back into buffers; names and distances stay."""
        values = {name: getattr(self, name).detach() for name in ("anchors", "factors", "scales")}
        if not trained:
            values["factors"] = self.zoomed_factors.detach()
        for name, value in values.items():
            delattr(self, name)
            if trained:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        zoom = self.zoom
        del self.zoom
        if trained and self.is_full:
            if zoom is None:
                zoom = values["anchors"].new_zeros(values["anchors"].shape[1])
            self.register_parameter("zoom", nn.Parameter(zoom.detach()))
        else:
            self.register_buffer("zoom", None)

    def traced(self, features: Tensor, *, norm: str = "mahalanobis") -> Tensor:  # (N, D) -> (N, K)
        """`distances` that gradients flow through, to features, anchors and factors.

        A document on its anchor has a distance of 1e-6 instead of 0, where the root has no slope.
        """
        lenses = norm_factors(self.zoomed_factors, norm)
        if self.is_full:
            dists = low_rank_distances(features, self.anchors, lenses)
        else:
            gaps = features[:, self.support] - self.anchors  # (N, K, s)
            dists = (torch.einsum("nks,ksr->nkr", gaps, lenses).square().sum(dim=2) + TINY).sqrt()
        return dists / self.scales.to(dists)

    @torch.no_grad()
    def distances(
        self, features: Tensor, *, norm: str = "mahalanobis", out: Tensor | None = None
    ) -> Tensor:  # (N, D), (N, K) -> (N, K)
        """Distances to the anchors, each divided by its scale.

        Many float32 rows take the quadratic form, which is within 1e-4 of the mean distance and usually far closer.
        """
        if out is None:
            out = features.new_empty((len(features), self.num_metrics))
        return self._tiles(features, norm).write(features, out, self.scales.to(features.dtype))

    @torch.no_grad()
    def add_weighted(
        self, features: Tensor, weights: Tensor, kernel: str, *, norm: str, out: Tensor
    ) -> None:  # (N, D), (K,), (N,)
        """Add Σᵣ wᵣ κ(dᵣ) to ``out``, tile by tile: the distances never leave the cache."""
        for rows, tile in self._tiles(features, norm).of(features, self.scales.to(features.dtype)):
            out[rows].addmv_(kappa_of(tile, kernel).T, weights)

    @torch.no_grad()
    def _tiles(self, features: Tensor, norm: str) -> DistanceTiles:
        """What fills tiles of such features, kept until the metrics change: large sets come in many blocks."""
        method, support = "factor", self._own_support
        if support is None:
            method = DistanceTiles.method_for(features, self.factors, norm)

        def make() -> DistanceTiles:
            lenses = self.zoomed_factors
            return DistanceTiles(features, self.anchors, lenses, support=support, norm=norm, method=method)

        buffers = [self.support, self.anchors, self.factors]
        if self.zoom is not None:
            buffers.append(self.zoom)
        return self._kept_tiles.get(make, buffers, features.dtype, features.device, norm, method)

    def select(self, columns: Tensor) -> MetricBlock:
        """The block with some of its metrics only, a zoom made part of their factors."""
        support = self._own_support
        if support is not None:
            support = support[columns]
        return MetricBlock(
            self.anchors[columns],
            self.zoomed_factors[columns],
            support=support,
            scales=self.scales[columns],
            quality=self.quality[columns],
        )


class LocalMetrics(nn.Module):
    """A bank of local metrics; called on features it gives scaled distances, one column per metric.

    Columns follow the blocks, and within a block its rows.

    Args:
        blocks: at least one.
        num_features: D, the width of the features.
        norm: ``"mahalanobis"`` ‖v‖² = vᵀMv, or ``"trace"`` ‖v‖² = vᵀMMv (the paper's Eq. trace_norm).

    >>> bank = LocalMetrics([MetricBlock(torch.zeros(1, 2), torch.eye(2)[None])], num_features=2)
    >>> bank(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[5.], [0.]])
    """

    def __init__(self, blocks: Sequence[MetricBlock], *, num_features: int, norm: str = "mahalanobis") -> None:
        super().__init__()
        check_choice("norm", norm, NORMS)
        if not blocks:
            raise LGMMLError("`blocks` must hold at least one block of metrics, got none")
        for block in blocks:
            width = block.anchors.shape[1]
            if block.is_full and width != num_features:
                raise LGMMLError(f"`anchors` must have {num_features} features, got {width}")
            if block.support.numel() and not 0 <= int(block.support.min()) <= int(block.support.max()) < num_features:
                raise LGMMLError(f"`support` must name features below {num_features}, got {int(block.support.max())}")
        self.blocks = nn.ModuleList(blocks)
        self.num_features = num_features
        self.norm = norm

    @property
    def num_metrics(self) -> int:
        """K, over all blocks."""
        return sum(block.num_metrics for block in self.iter_blocks())

    @property
    def scales(self) -> Tensor:
        """``(K,)`` what each column's distances are divided by."""
        return torch.cat([block.scales for block in self.iter_blocks()])

    @property
    def quality(self) -> Tensor:
        """``(K,)`` anchor NDCG of each column, NaN where it was not measured."""
        return torch.cat([block.quality for block in self.iter_blocks()])

    def iter_blocks(self) -> list[MetricBlock]:
        """The blocks, typed."""
        return [block for block in self.blocks if isinstance(block, MetricBlock)]

    def iter_columns(self) -> Iterator[tuple[slice, MetricBlock]]:
        """The columns of each block, and the block."""
        start = 0
        for block in self.iter_blocks():
            yield slice(start, start + block.num_metrics), block
            start += block.num_metrics

    def forward(self, features: Tensor, *, out: Tensor | None = None) -> Tensor:  # (N, D), (N, K) -> (N, K)
        """Scaled distances of every document to every anchor."""
        check_shape("features", features, (None, self.num_features))
        if out is None:
            out = features.new_empty(len(features), self.num_metrics)
        for columns, block in self.iter_columns():
            block.distances(features, norm=self.norm, out=out[:, columns])
        return out

    def train_metrics_(self, trained: bool = True) -> None:
        """Turn anchors, factors and scales of all blocks into parameters, or back into buffers."""
        for block in self.iter_blocks():
            block.train_metrics_(trained)

    @property
    def trained(self) -> bool:
        """Whether anchors, factors and scales are parameters."""
        return next(self.parameters(), None) is not None

    @torch.no_grad()
    def project_(self) -> None:
        """Scales that a step has moved to zero or below go back to a small positive number."""
        for block in self.iter_blocks():
            block.scales.clamp_(min=_LEAST_SCALE)

    def traced(self, features: Tensor) -> Tensor:  # (N, D) -> (N, K)
        """Scaled distances that gradients flow through, see `MetricBlock.traced`."""
        check_shape("features", features, (None, self.num_features))
        return torch.cat([block.traced(features, norm=self.norm) for block in self.iter_blocks()], dim=1)

    @torch.no_grad()
    def weighted_sum(self, features: Tensor, weights: Tensor, kernel: str) -> Tensor:  # (N, D), (K,) -> (N,)
        """Σᵣ wᵣ κ(dᵣ) of every document, without the (N, K) matrix of distances in between."""
        check_shape("features", features, (None, self.num_features))
        check_shape("weights", weights, (self.num_metrics,))
        out = features.new_zeros(len(features))
        for columns, block in self.iter_columns():
            block.add_weighted(features, weights[columns].to(features), kernel, norm=self.norm, out=out)
        return out

    def set_scales(self, scales: Tensor) -> None:  # (K,)
        """Replace what distances are divided by, column by column."""
        check_shape("scales", scales, (self.num_metrics,))
        for columns, block in self.iter_columns():
            block.scales.copy_(scales[columns])

    def select(self, columns: Tensor) -> LocalMetrics:  # (C,) ascending
        """The bank with some of its columns only, in ascending order."""
        blocks = []
        for own, block in self.iter_columns():
            chosen = columns[(columns >= own.start) & (columns < own.stop)] - own.start
            if len(chosen):
                blocks.append(block.select(chosen))
        return LocalMetrics(blocks, num_features=self.num_features, norm=self.norm)

    def shares(self, phi: Tensor) -> Tensor:  # (K,) -> (D,)
        """How much each feature counts: Φ-weighted share of each metric's diagonal, summing to one."""
        total = torch.zeros(self.num_features, dtype=torch.float64)
        for columns, block in self.iter_columns():
            weights = phi[columns].detach().cpu().double()
            diagonal = block.zoomed_factors.detach().square().sum(-1).cpu().double()
            share = diagonal / diagonal.sum(1, keepdim=True).clamp_min(1e-300) * weights[:, None]
            if block.is_full:
                total += share.sum(0)
            else:
                total.index_add_(0, block.support.cpu().reshape(-1), share.reshape(-1))
        return total / total.sum().clamp_min(1e-300)

    def spectra(self) -> tuple[Tensor, Tensor]:
        """All eigenvalues relative to the largest of their metric, and the condition number of each metric."""
        spectra, conditions = [], []
        for block in self.iter_blocks():
            values = torch.linalg.svdvals(block.zoomed_factors.detach().cpu().double()).square()
            relative = values / values.amax(-1, keepdim=True).clamp_min(1e-300)
            spectra.append(relative.reshape(-1))
            conditions.append(1 / relative.amin(-1).clamp_min(1e-16))
        return torch.cat(spectra), torch.cat(conditions)

    def spec(self) -> dict[str, Any]:
        """All that is needed, besides the buffers, to build the module again: primitives only.

        ``trained`` is there in the middle of training only: who goes on from a checkpoint must train the metrics, too.
        """
        shapes = []
        for block in self.iter_blocks():
            shape: dict[str, Any] = {"shape": list(block.factors.shape), "full": block.is_full}
            if block.zoom is not None:
                shape["zoomed"] = True
            shapes.append(shape)
        spec: dict[str, Any] = {"num_features": self.num_features, "norm": self.norm, "blocks": shapes}
        if self.trained:
            spec["trained"] = True
        return spec

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Self:
        """A bank of the right shapes, to be filled by ``load_state_dict``."""
        blocks = []
        for block in spec["blocks"]:
            count, width, rank = block["shape"]
            support = None if block["full"] else torch.zeros(count, width)
            made = MetricBlock(torch.zeros(count, width), torch.zeros(count, width, rank), support=support)
            if block.get("zoomed"):  # a checkpoint from the middle of training
                made.register_buffer("zoom", torch.zeros(width))
            blocks.append(made)
        return cls(blocks, num_features=spec["num_features"], norm=spec["norm"])
