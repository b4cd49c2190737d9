"""A bank of local metrics at lower ranks: what each metric's kernel values would be, and the bank itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lgmml_torch.functional.distance import norm_factors
from lgmml_torch.functional.score import kernel as kappa_of
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock

# Ranks tried, below half of the full one: above that the quadratic form of the full rank is cheaper. Few, so that
# metrics stand in few blocks.
LADDER = (2, 4, 8, 16, 32, 64, 128, 256)
NARROW = 4  # factors of this rank or less are not truncated


class LowRank:
    """Kernel values of some documents under every metric, at every rank of the ladder.

    A metric's images Fᵀ(x − a) are turned to their principal directions, which changes no distance; the first R
    columns of the turned factor are then the factor of rank R that keeps most of the mean squared distance. The
    distance that is left is stretched to fit the whole one by least squares.

    Args:
        metrics: the bank.
        features: ``(N, D)`` documents, preprocessed.
        kernel: κ.
    """

    def __init__(self, metrics: LocalMetrics, features: Tensor, kernel: str) -> None:
        self.metrics, self.kernel = metrics, kernel
        self.values: list[dict[int, Tensor]] = []  # for each column: rank → (N,) kernel values
        self.factors: list[Tensor] = []  # for each column: (s, R), turned
        self.stretch: list[dict[int, float]] = []
        self.errors: list[dict[int, float]] = []  # for each column: rank → relative change of its contribution
        self.places: list[tuple[int, int]] = []  # for each column: its block and its row there
        for number, block in enumerate(metrics.iter_blocks()):
            lenses = norm_factors(block.factors, metrics.norm)
            for row in range(block.num_metrics):
                rows = features if block.is_full else features[:, block.support[row]]
                self._add(rows - block.anchors[row], lenses[row], float(block.scales[row]))
                self.places.append((number, row))

    def _add(
        self,
        gaps: Tensor,  # (N, s)
        lens: Tensor,  # (s, R)
        scale: float,
    ) -> None:
        full = lens.shape[1]
        # From the gaps' second moments, a smaller matrix than the images and shared work for any rank.
        turned = lens
        if full > NARROW:
            wide = lens.double()
            moments = wide.T @ (gaps.T @ gaps).double() @ wide
            turned = (wide @ torch.linalg.eigh(moments).eigenvectors.flip(1)).to(lens)
        squares = (gaps @ turned).square_()
        whole = squares.sum(dim=1).sqrt()
        values, stretch = {full: kappa_of(whole / scale, self.kernel)}, {full: 1.0}
        for rank in (rank for rank in LADDER if 2 * rank < full and full > NARROW):
            part = squares[:, :rank].sum(dim=1).sqrt()
            energy = float(part.square().sum())
            if energy > 0:
                stretch[rank] = float(part @ whole) / energy
                values[rank] = kappa_of(part * (stretch[rank] / scale), self.kernel)
        self.values.append(values)
        self.factors.append(turned)
        self.stretch.append(stretch)

    def kernels(self) -> Tensor:  # (N, K)
        """Kernel values of the documents under every metric at its full rank."""
        return torch.stack([by_rank[max(by_rank)] for by_rank in self.values], dim=1)

    def truncate(
        self,
        limit: float,
        weights: Tensor,  # (N, K) or (1, K)
        centre: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:  # (K,), (N, K)
        """Lowest rank of each metric whose contribution changes by at most ``limit`` of its size, and contributions.

        Both are measured after ``centre``, which takes the mean of every list away; weights and ``centre`` must be the
        same in every call.
        """
        if not self.errors:
            self.errors = [self._changes(by_rank, weights[:, r, None], centre) for r, by_rank in enumerate(self.values)]
        ranks = [min(rank for rank, error in errors.items() if error <= limit) for errors in self.errors]
        chosen = torch.stack([by_rank[rank] for by_rank, rank in zip(self.values, ranks, strict=True)], dim=1)
        return torch.tensor(ranks), centre(-weights * chosen)

    @staticmethod
    def _changes(by_rank: dict[int, Tensor], weights: Tensor, centre: Callable[[Tensor], Tensor]) -> dict[int, float]:
        """Relative change of one metric's contribution at each rank; exactly 0 at the full one."""
        ranks = sorted(by_rank)
        parts = centre(weights * torch.stack([by_rank[rank] for rank in ranks], dim=1))
        sizes = (parts - parts[:, -1:]).norm(dim=0) / parts[:, -1].norm().clamp_min(1e-300)
        return dict(zip(ranks, sizes.tolist(), strict=True))

    def costs(
        self,
        ranks: Tensor,  # (K,)
    ) -> Tensor:  # (K,)
        """Work of one distance under each metric: multiply–adds, half of them at full rank by the quadratic form."""
        widths = torch.tensor([len(factor) for factor in self.factors])
        return widths * torch.minimum(ranks, (widths + 1) // 2)

    def bank(
        self,
        columns: Tensor,  # (C,)
        ranks: Tensor,  # (C,)
    ) -> tuple[LocalMetrics, Tensor]:  # the bank and (C,) the place in ``columns`` of each of its metrics
        """The chosen metrics at the chosen ranks; those of one shape stand together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for place, (column, rank) in enumerate(zip(columns.tolist(), ranks.tolist(), strict=True)):
            groups.setdefault((self.places[column][0], rank), []).append(place)
        blocks, order = [], []
        for (number, rank), places in sorted(groups.items()):
            chosen = columns[places].tolist()
            block = self.metrics.iter_blocks()[number]
            rows = torch.tensor([self.places[column][1] for column in chosen], device=block.scales.device)
            stretch = torch.tensor([self.stretch[column][rank] for column in chosen]).to(block.scales)
            blocks.append(
                MetricBlock(
                    block.anchors[rows],
                    torch.stack([self.factors[column][:, :rank] for column in chosen]),
                    support=None if block.is_full else block.support[rows],
                    scales=block.scales[rows] / stretch,
                    quality=block.quality[rows],
                )
            )
            order.extend(places)
        bank = LocalMetrics(blocks, num_features=self.metrics.num_features, norm="mahalanobis")
        return bank, torch.tensor(order)


def distance_cost(metrics: LocalMetrics) -> int:
    """Multiply–adds of all distances of one document."""
    shapes = [norm_factors(block.factors[:1], metrics.norm).shape[1:].numel() for block in metrics.iter_blocks()]
    return sum(size * block.num_metrics for size, block in zip(shapes, metrics.iter_blocks(), strict=True))
