"""Generated sets of the shapes of public ones, split into training and validation lists of one world."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lgmml_torch.data.generated import LetorLike
from lgmml_torch.ragged import RankingData

VALID_SHARE = 0.1  # validation lists, beside the training lists


@dataclass(frozen=True)
class Shape:
    """Training documents, lists and features of a set."""

    documents: int
    queries: int
    features: int

    def part(self, fraction: float) -> Shape:
        """The same kind of set with a share of the lists."""
        return Shape(max(2, round(self.documents * fraction)), max(2, round(self.queries * fraction)), self.features)


SHAPES = {
    "web10k": Shape(723_412, 6_000, 136),
    "web30k": Shape(2_270_296, 18_919, 136),
    "yahoo1": Shape(473_134, 19_944, 519),
    "small": Shape(20_000, 300, 46),
}


def generate(shape: Shape, *, seed: int = 0) -> tuple[RankingData, RankingData]:
    """Training and validation lists; the validation lists are further lists of the same world."""
    train = LetorLike(shape.queries, shape.features, num_documents=shape.documents, seed=seed)
    features = np.empty((shape.documents, shape.features), dtype=np.float32)
    labels = np.empty(shape.documents, dtype=np.float32)
    train.fill(features, labels)
    held = max(20, round(VALID_SHARE * shape.queries))
    mean = shape.documents / shape.queries
    more = LetorLike(
        shape.queries + held, shape.features, num_documents=round((shape.queries + held) * mean), seed=seed
    )
    lists = [more.query(index) for index in range(shape.queries, shape.queries + held)]
    valid = RankingData.from_arrays(
        np.concatenate([part.features for part in lists]),
        np.concatenate([part.labels for part in lists]),
        group=np.array([len(part.labels) for part in lists]),
    )
    return RankingData.from_arrays(features, labels, group=train.sizes), valid
