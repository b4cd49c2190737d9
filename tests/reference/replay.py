"""A whole run of sampled WARP in loops: draws, losses, gradients, steps, projections, and the epoch that is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lgmml_torch.ragged import RankingData
from lgmml_torch.training.losses import TrainingBatch
from tests.reference.ranking import best_first, exponential, ndcg
from tests.reference.warp import negatives_of, warp

Floats = NDArray[np.float64]


@dataclass
class Adam:
    """As published by Kingma and Ba."""

    rate: float
    steps: int = 0
    mean: dict[str, Floats] = field(default_factory=dict)
    square: dict[str, Floats] = field(default_factory=dict)

    def step(self, values: dict[str, Floats], gradients: dict[str, Floats]) -> None:
        self.steps += 1
        for name, gradient in gradients.items():
            self.mean[name] = 0.9 * self.mean.get(name, 0.0) + 0.1 * gradient
            self.square[name] = 0.999 * self.square.get(name, 0.0) + 0.001 * gradient**2
            mean = self.mean[name] / (1 - 0.9**self.steps)
            square = self.square[name] / (1 - 0.999**self.steps)
            values[name] -= self.rate * mean / (np.sqrt(square) + 1e-8)


@dataclass
class SGD:
    """Plain steps, whose length falls by a factor with the number of single updates where one is given."""

    rate: float
    queries: int = 0  # of the paper's rule; 0: constant
    batch_size: int = 1
    steps: int = 0

    def step(self, values: dict[str, Floats], gradients: dict[str, Floats]) -> None:
        factor = 1.0
        if self.queries:
            factor = 1 / (1 + math.exp(self.steps * self.batch_size / (100 * self.queries)))
        self.steps += 1
        for name, gradient in gradients.items():
            values[name] -= self.rate * factor * gradient


@dataclass
class Replay:
    """Φ of each query is a row of ``table`` (its own, or the only one) plus, where there are any, its deviation."""

    train: RankingData
    train_kappa: Floats
    valid: RankingData
    valid_kappa: Floats
    values: dict[str, Floats]  # "table" and "deviation"
    optimizer: Adam | SGD
    margin: float
    penalty: float = 0.0
    curve: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # means over tuples, by epoch
    kept: dict[str, Floats] = field(default_factory=dict)
    best_epoch: int = 0

    def row(self, query: int) -> int:
        return query if len(self.values["table"]) > 1 else 0

    def phi(self, query: int) -> Floats:
        own = self.values["table"][self.row(query)]
        return own + self.values["deviation"][query] if "deviation" in self.values else own

    def run(self, epochs: Sequence[Sequence[TrainingBatch]]) -> None:
        self.judge()
        for batches in epochs:
            found = [self.step(batch) for batch in batches]
            self.losses.append(sum(loss for loss, _ in found) / sum(count for _, count in found))
            self.judge()

    def judge(self) -> None:
        """NDCG@10 of validation lists with the mean row; the first of the best epochs is kept."""
        weights, found = self.values["table"].mean(0), []
        for start, stop in zip(self.valid.offsets.tolist(), self.valid.offsets.tolist()[1:], strict=False):
            scores = [-float(weights @ self.valid_kappa[i]) for i in range(start, stop)]
            ranked = best_first(scores, self.valid.labels.tolist()[start:stop], self.valid.order.tolist()[start:stop])
            found.append(ndcg(ranked, 10, exponential, math.nan))
        value = float(np.nanmean(found))
        if not self.curve or value > max(self.curve):
            self.kept = {name: values.copy() for name, values in self.values.items()}
            self.best_epoch = len(self.curve)
        self.curve.append(value)

    def step(self, batch: TrainingBatch) -> tuple[float, int]:
        """A batch: the sum of its losses, and the number of its tuples."""
        gradients = {name: np.zeros_like(values) for name, values in self.values.items()}
        rows, total = batch.rows.tolist(), 0.0
        for i, place in enumerate(batch.positives.tolist()):
            positive, query = rows[place], int(batch.queries[i])
            drawn = [rows[j] for j in batch.negatives[i].tolist()]
            phi = self.phi(query)
            scores = [-float(phi @ self.train_kappa[j]) for j in (positive, *drawn)]
            below = self.negatives(query, positive)
            assert set(drawn) <= set(below)
            loss, j, _, _ = warp(
                scores[0], scores[1:], len(below), self.margin, float(batch.weights[i]), int(batch.num_draws[i])
            )
            total += loss
            if j >= 0:
                size = loss / (self.margin - scores[0] + scores[1 + j])
                self.add(gradients, query, size * (self.train_kappa[positive] - self.train_kappa[drawn[j]]))
            if self.penalty:
                own = self.values["deviation"][query]
                total += self.penalty * 0.5 * float(own @ own)
                gradients["deviation"][query] += self.penalty * own
        self.optimizer.step(self.values, gradients)
        self.project()
        return total, len(batch.positives)

    def negatives(self, query: int, positive: int) -> list[int]:
        start, stop = self.train.offsets[query : query + 2].tolist()
        return negatives_of(positive, self.train.labels.tolist(), range(start, stop), "lower")

    def add(self, gradients: dict[str, Floats], query: int, gradient: Floats) -> None:
        gradients["table"][self.row(query)] += gradient
        if "deviation" in gradients:
            gradients["deviation"][query] += gradient

    def project(self) -> None:
        self.values["table"] = np.maximum(self.values["table"], 0)
        if "deviation" in self.values:
            self.values["deviation"] = np.maximum(self.values["deviation"], -self.values["table"])


def check_lists(train: RankingData, batches: Sequence[TrainingBatch]) -> None:
    """An epoch of whole lists: each list with a pair once, each of its positives once with weight 1/|positives|."""
    wanted = {}
    for query, (start, stop) in enumerate(zip(train.offsets.tolist(), train.offsets.tolist()[1:], strict=False)):
        labels = train.labels.tolist()
        own = [i for i in range(start, stop) if negatives_of(i, labels, range(start, stop), "lower")]
        wanted.update({(query, i): 1 / len(own) for i in own})
    found = {}
    for batch in batches:
        for query, place, weight in zip(
            batch.queries.tolist(), batch.positives.tolist(), batch.weights.tolist(), strict=True
        ):
            found[query, int(batch.rows[place])] = weight
    assert found == wanted
