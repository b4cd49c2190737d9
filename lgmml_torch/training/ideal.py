"""How well the metrics rank lists when each list's Φ is fitted to its own labels: never a result for new queries."""

from __future__ import annotations

import torch
from torch import Tensor

from lgmml_torch.checks import DataError
from lgmml_torch.functional.ranking.measures import rank_data
from lgmml_torch.functional.score import kernel as apply_kernel
from lgmml_torch.functional.score import score
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks, segment_ids
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.losses import Warp


def ideal_scores(
    dists: Tensor,  # (N, K)
    data: RankingData,
    start: Tensor,  # (K,)
    *,
    kernel: str,
    margin: float = 0.1,
    step: float = 0.5,
    passes: int = 60,
    k: int = 10,
    seed: int = 0,
) -> Tensor:  # (N,)
    """Scores after training a Φ of its own for every list, on that list's own labels.

    Sampled WARP on whole lists from the weights ``start``, margin and steps in units of their mean, steps falling as
    1/√pass; each list keeps the scores of the pass with its best NDCG@k, the start included. What comes out says how
    much of the ranking the local metrics can express; it is not to be had for a list whose labels are unknown.
    """
    unit = float(start.mean()) or 1.0
    loss, steps = Warp(margin * unit), [step * unit / (number + 1) ** 0.5 for number in range(passes)]
    parts = []
    lists = data.replace(features=data.features[:, :0])  # distances are all that is looked at
    for first, last in list_blocks(data.offsets, 8192):
        rows = slice(int(data.offsets[first]), int(data.offsets[last]))
        kappa = apply_kernel(dists[rows].to(start), kernel)
        parts.append(_fit_lists(kappa, lists.select(range(first, last)), start, loss, steps, k, seed))
    return torch.cat(parts) if parts else start.new_empty(0)


def _fit_lists(
    kappa: Tensor,  # (N, K)
    data: RankingData,
    start: Tensor,  # (K,)
    loss: Warp,
    steps: list[float],
    k: int,
    seed: int,
) -> Tensor:  # (N,)
    name = f"ndcg@{k}"
    phi = start.to(kappa).expand(data.num_queries, -1).clone()
    best = score(kappa, phi, data.offsets)
    best_ndcg = rank_data(best, data, metrics=[name])[name]
    try:
        batches = TrainingBatches(data, batch_size=data.num_queries, seed=seed)
    except DataError:  # nothing in these lists can be ordered better or worse
        return best
    for number, step in enumerate(steps):
        batch = batches[number, 0]
        phi = phi.detach().requires_grad_()
        rows = phi[batch.lists]
        scores = -torch.einsum("nk,nk->n", kappa[batch.rows], rows[segment_ids(batch.list_offsets)])
        total = loss(batch, lambda places, scores=scores: scores if places is None else scores[places]).total  # type: ignore[misc]
        (gradient,) = torch.autograd.grad(total, phi)
        phi = (phi.detach() - step * gradient).clamp_min(0)
        found = score(kappa, phi, data.offsets)
        found_ndcg = rank_data(found, data, metrics=[name])[name]
        better = found_ndcg > best_ndcg
        best = torch.where(better[data.query_index], found, best)
        best_ndcg = torch.where(better, found_ndcg, best_ndcg)
    return best
