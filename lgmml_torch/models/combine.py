"""Several models as one: weights for the sum of their scores, and the model that scores this sum.

A sum of banks is a bank, so that one call scores all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from lgmml_torch.checks import DataError, LGMMLError, check_finite, check_offsets, check_positive, check_shape
from lgmml_torch.functional.measures import ndcg
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import Concat
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.segments import segment_ids, segment_std


def combination_weights(
    scores: Tensor, labels: Tensor, offsets: Tensor, *, tie_order: Tensor | None = None, steps: int = 20
) -> Tensor:  # (M, N), (N,), (Q+1,), (N,) -> (M,)
    r"""Nonnegative weights :math:`w` for :math:`\sum_m w_m s_m`, by greedy selection with replacement.

    Scores are first brought to one scale: the mean over the lists of their standard deviation within the list. The best
    system by itself comes first; then, step by step, the system is added, perhaps again, with which the sum ranks best,
    and the best sum on the way is kept. So no system alone ranks these lists better than the result. Where two are
    level, the earlier system and the shorter sum win.

    Args:
        scores: Finite scores of every document, a row for each system.
        labels: Relevance of each document.
        offsets: Boundaries of the lists.
        tie_order: As in :func:`~lgmml_torch.functional.measures.ndcg`.
        steps: How many summands are tried, the first among them: weights are multiples of 1/steps or coarser.

    Returns:
        Weights for the scores as they were given, float64; 0 for scores that never differ within a list.

    Raises:
        DataError: No list has a relevant document.
        LGMMLError: Shapes or offsets that do not fit, scores that are not finite, no steps.

    >>> scores = torch.tensor([[30.0, 20.0, 10.0], [1.0, 3.0, 2.0]])  # the second has the relevant document first
    >>> combination_weights(scores, torch.tensor([0, 1, 0]), torch.tensor([0, 3]))
    tensor([0.0000, 1.2247], dtype=torch.float64)
    """
    check_positive("steps", steps)
    check_shape("scores", scores, (None, len(labels)))
    check_offsets(offsets, len(labels))
    check_finite("scores", scores)
    wide = scores.detach().double()
    spread = _mean_deviations(wide, offsets)
    units = torch.eye(len(spread), dtype=spread.dtype, device=spread.device)[spread > 0]  # earlier systems first

    def weights(counts: Tensor) -> Tensor:
        return torch.where(spread > 0, counts / counts.sum().clamp_min(1) / spread, 0.0)

    def value(counts: Tensor) -> float:
        found = ndcg(_weighted_sum(weights(counts), wide), labels, offsets, k=10, tie_order=tie_order)
        return round(float(found), 12)  # sums that rank alike are level, however their NDCG was rounded

    counts = kept = torch.zeros_like(spread)
    if math.isnan(value(counts)):
        raise DataError("`labels` must have a list with a relevant document to choose weights by, got none")
    if not len(units):
        return weights(kept)
    best = -1.0
    for _ in range(steps):
        tried = [value(counts + unit) for unit in units]
        highest = max(tried)
        counts = counts + units[tried.index(highest)]
        if highest > best:
            best, kept = highest, counts
    return weights(kept)


def _weighted_sum(weights: Tensor, scores: Tensor) -> Tensor:  # (M,), (M, N) -> (N,)
    """Σ wₘ sₘ, one after the other: equal columns give equal sums, wherever they stand."""
    total = scores.new_zeros(scores.shape[1])
    for weight, row in zip(weights, scores, strict=True):
        total = total + weight * row
    return total


def _mean_deviations(scores: Tensor, offsets: Tensor) -> Tensor:  # (M, N), (Q+1,) -> (M,)
    """Standard deviation within lists, mean over the lists; exactly 0 for scores that never differ within one."""
    firsts = scores[:, offsets[:-1][segment_ids(offsets)]]  # the score of the first document of each list
    return segment_std((scores - firsts).T, offsets).mean(dim=0)


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
    kept = []
    for model, weight in zip(models, weights, strict=True):
        if weight > 0:
            kept.append((model, float(weight)))
    first = kept[0][0]
    preprocess, starts = _preprocessing([model for model, _ in kept])
    width = preprocess.num_features_out
    blocks, rows = [], []
    for (model, weight), start in zip(kept, starts, strict=True):
        for block in model.metrics.iter_blocks():
            blocks.append(_placed(block, start, width))
        rows.append(model.phi.for_new(None, 1, model.phi.policy)[0].detach() * weight)
    row = torch.cat(rows)
    phi = Phi(first.phi.num_queries, len(row), mode="shared", init=row)
    metrics = LocalMetrics(blocks, num_features=width, norm=first.metrics.norm)
    merged = first.replace(preprocess=preprocess, metrics=metrics, phi=phi)
    return merged.to(first.dtype).eval()


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
    agreed: dict[str, set[object]] = {}
    for model in models:
        for name, value in _nature(model).items():
            agreed.setdefault(name, set()).add(value)
    agreed["feature names"].discard(None)
    for name, natures in agreed.items():
        if len(natures) > 1:
            raise LGMMLError(f"`models` must agree on their {name}, got {', '.join(sorted(map(str, natures)))}")


def _preprocessing(models: Sequence[LGMML]) -> tuple[Preprocess, list[int]]:
    """All different preprocessings side by side, and the first column of each model's."""
    parts: list[Preprocess] = []
    starts: list[int] = []
    for model in models:
        start = 0
        for part in parts:
            if _equal(part, model.preprocess):
                break
            start += part.num_features_out
        else:
            parts.append(deepcopy(model.preprocess))
        starts.append(start)
    if len(parts) == 1:
        return parts[0], starts
    both = Concat(parts)
    return both._finish(models[0].num_features), starts


def _nature(model: LGMML) -> dict[str, object]:
    return {
        "number of features": model.num_features,
        "kernel": model.kernel,
        "norm": model.metrics.norm,
        "precision": str(model.dtype),
        "categories": str(model.encoder),
        "feature names": model.feature_names,
    }


def _equal(one: Preprocess, other: Preprocess) -> bool:
    if one.spec() != other.spec():
        return False
    state, states = one.state_dict(), other.state_dict()
    if state.keys() != states.keys():
        return False
    return all(torch.equal(values, states[name]) for name, values in state.items())


def _placed(block: MetricBlock, start: int, width: int) -> MetricBlock:
    """The block among wider features, its own beginning at ``start``."""
    anchors, factors, support = block.anchors.clone(), block.factors.clone(), None
    if block.is_full:
        after = width - start - anchors.shape[1]
        anchors = nn.functional.pad(anchors, (start, after))
        factors = nn.functional.pad(factors, (0, 0, start, after))
    else:
        support = block.support + start
    return MetricBlock(anchors, factors, support=support, scales=block.scales.clone(), quality=block.quality.clone())
