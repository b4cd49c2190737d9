"""`FrozenScorer`: a model's scores in few operations, for short lists, where calls cost more than numbers.

Preprocessing is done in numpy, which starts an operation several times as fast as torch and is there wherever torch is.
All metrics become one matrix, so distances are one product; it stays in torch, whose number of threads users set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from lgmml_torch.checks import LGMMLError, check_choice, check_finite, check_offsets
from lgmml_torch.functional.distance import TILE_IMAGES, norm_factors
from lgmml_torch.functional.score import KERNELS, first_equal_rows
from lgmml_torch.inputs import fingerprint
from lgmml_torch.models.local_metrics import LocalMetrics, tensor_state
from lgmml_torch.models.phi import RULES
from lgmml_torch.segments import row_slices, segment_ids

if TYPE_CHECKING:
    from lgmml_torch.models.ranker import LGMML

_Array = NDArray[Any]
_MOST_ENTRIES = 1 << 22  # of the matrix of all metrics: a larger one is slower than one metric after another


class FrozenScorer:
    """What `LGMML.score` gives, to rounding, as a function of arrays; what the model becomes later does not change it.

    Calls change nothing, so threads may share it. Equal rows of a list get equal scores.

    Args:
        model: of any preprocessing of this package; an encoder and a base are left out.
        policy: what queries get, by default the model's own policy; not one that looks at the list.

    Raises:
        LGMMLError: a policy that looks at the list, steps of other makers, or metrics too large for one matrix.
    """

    def __init__(self, model: LGMML, policy: str | None = None) -> None:
        from lgmml_torch.models.preprocess.arrays import frozen_step  # long lists do without

        policy = policy or model.phi.policy
        check_choice("policy", policy, RULES)
        if RULES[policy].looks:
            raise LGMMLError(f"`policy` must give all lists the same weights to be frozen, got {policy!r}")
        if model.dtype not in (torch.float32, torch.float64):
            raise LGMMLError(f"a model must be of float32 or float64 to be frozen, got {model.dtype}")
        self.num_features = model.num_features
        self._dtype = torch.empty(0, dtype=model.dtype).numpy().dtype
        self._prepare = frozen_step(model.preprocess, self._dtype)
        with torch.no_grad():
            phi = model.phi.for_new(None, 1, policy)[0]
            metrics, used = model.metrics, phi.nonzero()[:, 0]
            if len(used):
                metrics, phi = metrics.select(used), phi[used]
            self._weights = phi.cpu().clone()
            lenses, centres = _stacked(metrics)
        self._shape = centres.shape  # directions of each metric, metrics
        self._lenses, self._centres = lenses.flatten(0, 1).to(model.dtype), centres.flatten().to(model.dtype)
        self._kernel = KERNELS[model.kernel]

    def __call__(
        self,
        features: ArrayLike,  # (N, D)
        offsets: ArrayLike | None = None,  # (Q+1,) all rows are one list when None
    ) -> _Array:  # (N,)
        """Scores of whole lists, in the order of the rows; higher is better.

        Raises:
            LGMMLError: shapes that do not fit, or features that are not finite.
        """
        rows = np.asarray(features)
        if rows.ndim != 2 or rows.shape[1] != self.num_features:
            raise LGMMLError(f"`features` must have shape (*, {self.num_features}), got {rows.shape}")
        bounds = [0, len(rows)]
        if offsets is not None:
            given = torch.as_tensor(offsets)
            check_offsets(given, len(rows))
            bounds = given.tolist()
        return self.of_lists(rows, bounds)

    @torch.no_grad()
    def of_lists(
        self,
        features: _Array,  # (N, D)
        bounds: Sequence[int],  # (Q+1,)
    ) -> _Array:  # (N,)
        """The same, of shapes that were checked already."""
        rows = np.ascontiguousarray(features, dtype=self._dtype)
        if not math.isfinite(float(rows.sum(dtype=np.float64))):
            check_finite("features", torch.from_numpy(rows))
        with np.errstate(over="ignore"):  # infinite for a moment: steps limit what they give
            prepared = np.ascontiguousarray(self._prepare(rows, bounds))
        scores = self._scores(torch.from_numpy(prepared)).numpy()
        return _level(scores, rows, bounds)

    def _scores(
        self,
        prepared: Tensor,  # (N, D')
    ) -> Tensor:  # (N,)
        out = prepared.new_empty(len(prepared))
        for rows in row_slices(len(prepared), len(self._lenses), TILE_IMAGES):
            images = nn.functional.linear(prepared[rows], self._lenses, self._centres)
            dists = images.square_().view(len(images), *self._shape).sum(dim=1).sqrt_()
            if not math.isfinite(float(dists.sum())):
                raise LGMMLError(f"distances must stay below {torch.finfo(dists.dtype).max:.3g}, got an overflow")
            torch.mv(self._kernel(dists), self._weights, out=out[rows])
        return out.neg_()


class KeptFrozen:
    """The frozen form of a model, made when it is first asked for and again when a tensor of the model has changed.

    As torch's own gradients do, it overlooks what is written through ``.data``.
    """

    def __init__(self) -> None:
        self._kept: tuple[Any, FrozenScorer | None, list[Tensor]] | None = None

    def of(self, model: LGMML, policy: str) -> FrozenScorer | None:
        """None while metrics are trained, on other devices, and where there is no frozen form."""
        parts, tensors = _module_state(model)
        state = (policy, model.kernel, parts)
        kept = self._kept
        if kept is None or kept[0] != state:
            frozen = None
            if model.device.type == "cpu" and not model.metrics.trained:
                with suppress(LGMMLError):
                    frozen = FrozenScorer(model, policy)
            kept = self._kept = (state, frozen, tensors)
        return kept[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"_kept": None}


def _module_state(module: nn.Module) -> tuple[tuple[Any, ...], list[Tensor]]:
    """What changes when a part or a tensor of the module is replaced or written to; valid while the tensors are kept.

    `Module.buffers` and `Module.modules` take longer than scoring a short list.
    """
    tensors, modules = list[Tensor](), [module]
    for part in modules:
        for value in (*part._parameters.values(), *part._buffers.values()):
            if value is not None:
                tensors.append(value)
        for child in part._modules.values():
            if child is not None:
                modules.append(child)
    return (*map(id, modules), *map(id, tensors), *tensor_state(tensors)), tensors


def _stacked(metrics: LocalMetrics) -> tuple[Tensor, Tensor]:  # (R, K, D), (R, K) float64
    """Factors over their scales, one direction of all metrics after another, and minus what anchors become by them."""
    rank = 0
    for block in metrics.iter_blocks():
        rank = max(rank, norm_factors(block.factors[:1], metrics.norm).shape[2])
    entries = rank * metrics.num_metrics * metrics.num_features
    if entries > _MOST_ENTRIES:
        raise LGMMLError(f"metrics must have at most {_MOST_ENTRIES:,} entries together to be frozen, got {entries:,}")
    lenses = torch.zeros(rank, metrics.num_metrics, metrics.num_features, dtype=torch.float64)
    centres = torch.zeros(rank, metrics.num_metrics, dtype=torch.float64)
    for columns, block in metrics.iter_columns():
        own = norm_factors(block.zoomed_factors, metrics.norm).double() / block.scales.double()[:, None, None]
        own = own.cpu().permute(2, 0, 1)  # (r, K, s)
        centres[: len(own), columns] = -(own * block.anchors.double().cpu()).sum(dim=2)
        if block.is_full:
            lenses[: len(own), columns] = own
        else:
            place = block.support.cpu().expand(own.shape)
            lenses[: len(own), columns].scatter_add_(2, place, own)  # a feature may be named twice
    return lenses, centres


def _level(
    scores: _Array,  # (N,)
    rows: _Array,  # (N, D)
    bounds: Sequence[int],  # (Q+1,)
) -> _Array:  # (N,)
    """The scores with equal rows of a list level: a row's place in a product may move its last bits."""
    keys = fingerprint(rows)
    ordered = np.sort(keys)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(again):
        return scores
    several = np.flatnonzero(np.isin(keys, again))
    ids = segment_ids(torch.tensor(bounds))[torch.from_numpy(several)]
    first = first_equal_rows(torch.from_numpy(rows[several]), ids).numpy()
    scores[several] = scores[several[first]]
    return scores
