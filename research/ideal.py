"""How well the metrics of a run rank its test lists when each list's Φ is fitted to its own labels.

``python -m research.ideal RUN``, the folder of a run. Optimistic, since the labels are what is to be found out, so
never a result for new queries; and no bound either, since the best Φ of a list is searched for and need not be found.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from lgmml_torch.app.compose import load_splits
from lgmml_torch.checks import DataError
from lgmml_torch.evaluation.evaluate import Evaluation, evaluate_scores
from lgmml_torch.evaluation.tables import read_report
from lgmml_torch.functional.measures import rank_data
from lgmml_torch.functional.score import first_equal_rows, score
from lgmml_torch.functional.score import kernel as apply_kernel
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import list_blocks, segment_ids, segment_std
from lgmml_torch.training.batches import TrainingBatches
from lgmml_torch.training.losses import Warp
from lgmml_torch.training.preprocessed import compute_distances

_SINGLES = 256  # metrics tried alone, those of the largest starting weight
_COORDINATES = 16  # of these, the best of each list, whose weights are changed one at a time
ROUNDS = 3
_RATIOS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)  # size of a metric's part of the scores beside all others' to try


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
    """Scores with a Φ of its own for every list, fitted to that list's own labels.

    Tried are the weights ``start``, equal weights, single metrics (Φ = e_r), ``passes`` passes of sampled WARP from
    ``start`` (margin and steps in units of their mean, steps falling as 1/√pass), and from the best of these a search
    along one weight at a time. Each list keeps the scores with its best NDCG@k, so none ends below its start. What
    comes out says how much of the ranking the local metrics can express. It is optimistic, not to be had for a list
    whose labels are unknown; and it is not the maximum, which no fast algorithm finds.

    The cost is bounded: every list is ranked at most 2 + 256 + ``passes`` + 288 times (16 weights × 6 values × 3
    rounds), and only the passes look at more than one metric at a time.
    """
    unit = float(start.mean()) or 1.0
    loss, steps = Warp(margin * unit), [step * unit / (number + 1) ** 0.5 for number in range(passes)]
    parts = []
    lists = data.replace(features=data.features[:, :0])  # from here on distances are all that is looked at
    for first, last in list_blocks(data.offsets, 8192):
        rows = slice(int(data.offsets[first]), int(data.offsets[last]))
        kappa = apply_kernel(dists[rows].to(start), kernel)
        best = _Best(kappa, lists.select(range(first, last)), data.features[rows], start, k)
        best.try_weights(torch.ones_like(best.phi))
        _descend(best, start, loss, steps, seed)
        coordinates = best.try_singles(start.argsort(descending=True, stable=True)[:_SINGLES])
        for number in range(ROUNDS):
            best.try_coordinates(coordinates, [ratio * 1.7**number for ratio in _RATIOS])
        parts.append(best.scores)
    if not parts:
        return start.new_empty(0)
    return torch.cat(parts)


class _Best:
    """The best scores so far of each list, with their Φ and NDCG."""

    def __init__(self, kappa: Tensor, data: RankingData, features: Tensor, start: Tensor, k: int) -> None:
        self.kappa, self.data, self.measure = kappa, data, f"ndcg@{k}"
        self.owner = segment_ids(data.offsets)
        self.twins = first_equal_rows(features, self.owner)
        self.phi = start.to(kappa).expand(data.num_queries, -1).clone()
        self.scores = score(kappa, self.phi, data.offsets)[self.twins]
        self.ndcg = self._judge(self.scores)

    def _judge(self, scores: Tensor) -> Tensor:  # (Q,)
        return rank_data(scores, self.data, metrics=[self.measure])[self.measure]

    def offer(self, scores: Tensor, among: Tensor | None = None) -> tuple[Tensor, Tensor]:  # (N,), (Q,) -> (Q,), (Q,)
        """Keep the scores of the lists, ``among`` some, that they are better for; which these are, and every NDCG."""
        scores = scores[self.twins]  # among hundreds of tries, rounding would break ties the right way now and then
        found = self._judge(scores)
        better = found > self.ndcg
        if among is not None:
            better &= among
        self.scores = torch.where(better[self.owner], scores, self.scores)
        self.ndcg = torch.where(better, found, self.ndcg)
        return better, found

    def try_weights(self, phi: Tensor) -> None:  # (Q, K)
        """A row for each list; Φ = 0 leaves the caller's order, which is no merit of Φ and does not count."""
        better, _ = self.offer(score(self.kappa, phi, self.data.offsets), (phi > 0).any(1))
        self.phi[better] = phi[better]

    def try_singles(self, metrics: Tensor) -> Tensor:  # (S,) -> (C, Q)
        """Φ = e_r for every metric given; the few that are best in each list, best first."""
        ranked = []
        for r in metrics.tolist():
            better, found = self.offer(-self.kappa[:, r])
            self.phi[better] = 0.0
            self.phi[better, r] = 1.0
            ranked.append(found)
        order = torch.stack(ranked).nan_to_num(-1.0).argsort(dim=0, descending=True, stable=True)
        return metrics.to(order.device)[order[:_COORDINATES]]

    def try_coordinates(self, coordinates: Tensor, ratios: list[float]) -> None:
        """Change one weight of each list at a time, to where its part of the scores is so large beside the rest."""
        for metric in coordinates:  # (Q,), one of its own for each list
            own = self.kappa.gather(1, metric[self.owner, None])[:, 0]
            weight = self.phi.gather(1, metric[:, None])[:, 0]
            rest = self.scores + weight[self.owner] * own
            size = self._spread(rest)
            mixed = size > 1e-3 * self._spread(self.scores)  # where this metric is all there is, the rest is rounding
            for ratio in ratios:
                value = ratio * size / self._spread(own).clamp_min(1e-12)
                better, _ = self.offer(rest - value[self.owner] * own, mixed)
                self.phi[better, metric[better]] = value[better]

    def _spread(self, values: Tensor) -> Tensor:  # (N,) -> (Q,)
        return segment_std(values, self.data.offsets)


def _descend(best: _Best, start: Tensor, loss: Warp, steps: list[float], seed: int) -> None:
    """Passes of sampled WARP from the weights ``start (K,)``."""
    data, kappa = best.data, best.kappa
    phi = start.to(kappa).expand(data.num_queries, -1)
    try:
        batches = TrainingBatches(data, batch_size=data.num_queries, seed=seed)
    except DataError:  # nothing in these lists can be ordered better or worse
        return
    for number, step in enumerate(steps):
        batch = batches[number, 0]
        phi = phi.detach().requires_grad_()
        rows = phi[batch.lists]
        scores = -torch.einsum("nk,nk->n", kappa[batch.rows], rows[segment_ids(batch.list_offsets)])
        total = loss(batch, lambda places, scores=scores: scores if places is None else scores[places]).total  # type: ignore[misc]
        (gradient,) = torch.autograd.grad(total, phi)
        phi = (phi.detach() - step * gradient).clamp_min(0)
        best.try_weights(phi)


def evaluate_ideal(run: Path) -> Evaluation:
    """The test lists of a run, each with a Φ of its own."""
    cfg, model = OmegaConf.create(read_report(run / "report.json")["config"]), LGMML.load(run / "model.safetensors")
    data = model.encoded(load_splits(cfg)["test"])
    start = model.phi.mean_row()[0].detach()
    scores = ideal_scores(compute_distances(model, data), data, start, kernel=model.kernel, seed=cfg.seed)
    options = {"metrics": list(cfg.evaluation.metrics), "preset": cfg.evaluation.preset, "seed": cfg.seed}
    return evaluate_scores(scores, data, split="test", policy="own labels", **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    print(evaluate_ideal(parser.parse_args().run).markdown())


if __name__ == "__main__":
    main()
