"""How well the metrics could rank lists if each list had the best weights: an upper bound, never a result."""

from __future__ import annotations

import torch
from torch import Tensor

from lgmml_torch.functional.ranking.measures import ndcg
from lgmml_torch.functional.score import kernel as apply_kernel
from lgmml_torch.functional.score import score
from lgmml_torch.functional.warp import negative_table, projected_step_, sample_list_draws, warp_loss, warp_phi_gradient
from lgmml_torch.segments import gather_segments, list_blocks, segment_ids


@torch.no_grad()
def ideal_scores(
    dists: Tensor,  # (N, K)
    labels: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
    start: Tensor,  # (K,)
    *,
    kernel: str,
    margin: float = 0.1,
    step: float = 0.5,
    passes: int = 60,
    k: int = 10,
    max_draws: int = 10,
    seed: int = 0,
) -> Tensor:  # (N,)
    """Scores after training a Φ of its own for every list, on that list's own labels.

    Sampled WARP on whole lists from the weights ``start``, margin and steps in units of their mean, steps falling as
    1/√pass; each list keeps the scores of the pass with its best NDCG@k, the start included. What comes out says how
    much of the ranking the local metrics could express; it is not to be had for a list whose labels are unknown.
    """
    scores = start.new_empty(len(labels))
    generator = torch.Generator().manual_seed(seed)
    unit = float(start.mean()) or 1.0
    for first, last in list_blocks(offsets, 8192):
        rows, own = gather_segments(offsets, torch.arange(first, last))
        kappa, grades = apply_kernel(dists[rows].to(start), kernel), labels[rows]
        phi = start.to(kappa).expand(last - first, -1).clone()
        table = negative_table(grades, own)
        best = score(kappa, phi, own)
        best_ndcg = ndcg(best, grades, own, k=k, reduction="none")
        for number in range(passes if len(table.queries) else 0):
            current = score(kappa, phi, own)
            draws = sample_list_draws(table, table.queries, max_draws=max_draws, generator=generator)
            outcome = warp_loss(
                current[draws.positives],
                current[draws.negatives],
                draws.num_negatives,
                margin=margin * unit,
                weights=draws.weights,
            )
            worst = draws.negatives.gather(1, outcome.violator.clamp_min(0)[:, None])[:, 0]
            gradient = warp_phi_gradient(
                outcome, draws.queries, kappa[draws.positives], kappa[worst], num_queries=last - first
            )
            projected_step_(phi, gradient, step * unit / (number + 1) ** 0.5)
            found = score(kappa, phi, own)
            found_ndcg = ndcg(found, grades, own, k=k, reduction="none")
            better = found_ndcg > best_ndcg
            best = torch.where(better[segment_ids(own)], found, best)
            best_ndcg = torch.where(better, found_ndcg, best_ndcg)
        scores[rows] = best
    return scores
