"""One model from several: a sum of banks is a bank, and one score call serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import Concat
from lgmml_torch.models.ranker import LGMML


def merge_models(models: Sequence[LGMML], weights: Sequence[float]) -> LGMML:
    """The model whose score is the weighted sum of the models' scores.

    Preprocessings that differ stand side by side, each model's metrics looking at the columns of its own. A model of
    weight 0 is left out altogether.

    Args:
        models: with one Φ for all queries, of the same features, kernel and norm.
        weights: at least 0, one for each model, not all 0.

    Raises:
        LGMMLError: models that do not go together, or weights that are not such.
    """
    _check(models, weights)
    kept = [(model, float(weight)) for model, weight in zip(models, weights, strict=True) if weight > 0]
    first = kept[0][0]
    preprocess, starts = _preprocessing([model for model, _ in kept])
    width = preprocess.num_features_out
    blocks = [
        _placed(block, start, width)
        for (model, _), start in zip(kept, starts, strict=True)
        for block in model.metrics.iter_blocks()
    ]
    rows = torch.cat([model.phi.for_new(None, 1, model.phi.policy)[0].detach() * weight for model, weight in kept])
    phi = Phi(first.phi.num_queries, len(rows), mode="shared", init=rows)
    metrics = LocalMetrics(blocks, num_features=width, norm=first.metrics.norm)
    merged = LGMML(
        preprocess,
        metrics,
        phi,
        kernel=first.kernel,
        qids=first.qids,
        feature_names=first.feature_names,
        encoder=first.encoder,
    )
    return merged.to(first.metrics.scales.dtype).eval()


def _check(models: Sequence[LGMML], weights: Sequence[float]) -> None:
    if not models or len(models) != len(weights):
        raise LGMMLError(f"`weights` must be one for each of at least one model, got {len(weights)} for {len(models)}")
    if min(weights) < 0 or max(weights) <= 0:
        raise LGMMLError(f"`weights` must be at least 0 and not all 0, got {list(weights)}")
    for model in models:
        if model.phi.mode != "shared" or model.phi.deviations:
            raise LGMMLError(f"`models` must have one Φ for all queries, got one of mode {model.phi.mode!r}")
        if model.base is not None:
            raise LGMMLError("`models` must be metrics alone, got one that adds to trees; merge before trees are added")
    agreed: dict[str, set[object]] = {
        "number of features": {model.num_features for model in models},
        "kernel": {model.kernel for model in models},
        "norm": {model.metrics.norm for model in models},
        "precision": {str(model.metrics.scales.dtype) for model in models},
        "categories": {str(model.encoder) for model in models},
        "feature names": {model.feature_names for model in models if model.feature_names is not None},
    }
    for name, natures in agreed.items():
        if len(natures) > 1:
            raise LGMMLError(f"`models` must agree on their {name}, got {', '.join(sorted(map(str, natures)))}")


def _preprocessing(models: Sequence[LGMML]) -> tuple[Preprocess, list[int]]:
    """All different preprocessings side by side, and the first column of each model's."""
    parts: list[Preprocess] = []
    starts: list[int] = []
    for model in models:
        same = next((place for place, part in enumerate(parts) if _equal(part, model.preprocess)), None)
        if same is None:
            same = len(parts)
            parts.append(deepcopy(model.preprocess))
        starts.append(sum(part.num_features_out for part in parts[:same]))
    if len(parts) == 1:
        return parts[0], starts
    both = Concat(parts)
    return both._finish(models[0].num_features), starts


def _equal(one: Preprocess, other: Preprocess) -> bool:
    if one.spec() != other.spec():
        return False
    state, states = one.state_dict(), other.state_dict()
    return state.keys() == states.keys() and all(torch.equal(state[name], states[name]) for name in state)


def _placed(block: MetricBlock, start: int, width: int) -> MetricBlock:
    """The block among wider features, its own beginning at ``start``."""
    if not block.is_full:
        return _copied(block, block.anchors.clone(), block.factors.clone(), block.support + start)
    count, own, rank = block.factors.shape
    anchors, factors = block.anchors.new_zeros(count, width), block.factors.new_zeros(count, width, rank)
    anchors[:, start : start + own], factors[:, start : start + own] = block.anchors, block.factors
    return _copied(block, anchors, factors, None)


def _copied(block: MetricBlock, anchors: Tensor, factors: Tensor, support: Tensor | None) -> MetricBlock:
    return MetricBlock(anchors, factors, support=support, scales=block.scales.clone(), quality=block.quality.clone())
