"""Which raw features say anything about the labels: a test in closed form, before anything is fitted.

A feature is seen through its rank r within each list, in (−½, ½). With the labels y of a list around their mean,

    C = Σᵢ (yᵢ − ȳ)·r̃ᵢ·r̃ᵢᵀ,   r̃ = (1, r),

has each feature by itself in its first row, the square of each on its diagonal and two features together elsewhere.
It is by how much the scatter of relevant documents differs from that of all documents of the list, the two matrices
whose geometric mean is a metric. A feature that matters only together with another one shows in C, too.

Over lists, T = ΣC/√max(ΣC², ΣV) is about standard normal where labels do not depend on features. V is the variance of C
over all orders of the labels within the list; the larger of the two keeps T small for features that are nearly always
0. The largest |T| that chance gives is measured, not assumed: the signs of whole lists are flipped at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.checks import check_shape
from lgmml_torch.functional.features import list_rank_percentiles
from lgmml_torch.functional.regions import usable_queries
from lgmml_torch.segments import row_slices

_FLIPS = 30  # random signs of all lists
_MAX_PAIRED = 1_000  # features up to which pairs are looked at: their number grows with the square
_NAMES_TOLD = 20  # of features set aside
_MIN_LISTS = 30  # with different labels, below which all features stay
_MAX_NULL_SHARE = 0.5  # up to which all features stay: weak features help together
_WITHIN_ONE = 0.6827  # share of a standard normal variable within ±1
_BLOCK_VALUES = 1 << 22  # entries of C that are added up together


class FeatureSums:
    """Sums over lists by which features are chosen; those of several processes add up to those of all.

    ``features`` is the number of columns. The ``lists`` of all processes together have random signs, which do not
    depend on the processes. Pairs of features are looked at where there are at most 1,000 features, unless ``paired``
    says otherwise.
    """

    def __init__(self, features: int, lists: int, *, paired: bool | None = None) -> None:
        self.paired = features <= _MAX_PAIRED if paired is None else paired
        self.features = features
        each = torch.arange(1, features + 1)
        pairs = torch.triu_indices(features, features, offset=1) + 1
        if not self.paired:
            pairs = pairs[:, :0]
        # Rows and columns of C: a feature by itself, its square, pairs.
        self.rows = torch.cat([torch.zeros_like(each), each, pairs[0]])
        self.columns = torch.cat([each, each, pairs[1]])
        generator = torch.Generator().manual_seed(0)
        self.signs = torch.randint(0, 2, (_FLIPS, lists), generator=generator) * 2.0 - 1.0
        # (F + 4, E) ΣC, ΣC², ΣV, the number of lists, and ΣC for each flip of signs
        self.parts = torch.zeros(_FLIPS + 4, len(self.rows), dtype=torch.float64)

    def add(
        self,
        features: Tensor,  # (n, D)
        labels: Tensor,  # (n,)
        offsets: Tensor,  # (q+1,)
        numbers: Tensor | None = None,  # (q,)
    ) -> None:
        """Some more lists, by their numbers among all of them; lists whose labels are all equal are left out."""
        if numbers is None:
            numbers = torch.arange(len(offsets) - 1)
        check_shape("numbers", numbers, (len(offsets) - 1,))
        useful = usable_queries(labels, offsets).nonzero()[:, 0].cpu()
        for part in row_slices(len(useful), len(self.rows), _BLOCK_VALUES):
            some, block = useful[part], []
            for number in some.tolist():
                rows = slice(int(offsets[number]), int(offsets[number + 1]))
                difference, variance = self._of_list(features[rows].cpu().float(), labels[rows].cpu().float())
                block.append(difference)
                self.parts[2] += variance
            differences = torch.stack(block)
            self.parts[0] += differences.sum(0)
            self.parts[1] += differences.square().sum(0)
            self.parts[3] += len(some)
            self.parts[4:] += self.signs[:, numbers[some]] @ differences

    def _of_list(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # (E,), (E,)
        """C and its variance over all orders of the labels."""
        count = len(labels)
        ranks = list_rank_percentiles(features, torch.tensor([0, count]))
        centred = labels - labels.mean()
        if self.paired:
            seen = torch.cat([ranks.new_ones(count, 1), ranks], dim=1)
            squares = seen.square()
            difference = ((seen * centred[:, None]).mT @ seen)[self.rows, self.columns]
            spread = (squares.mT @ squares - (seen.mT @ seen).square() / count)[self.rows, self.columns]
        else:
            seen = torch.cat([ranks, ranks.square()], dim=1)
            difference = centred @ seen
            spread = seen.square().sum(0) - seen.sum(0).square() / count
        return difference, spread.clamp_min(0) * (centred.square().sum() / (count - 1))

    @property
    def lists(self) -> int:
        """Lists with different labels so far."""
        return int(self.parts[3].max()) if self.features else 0

    @property
    def varies(self) -> Tensor:  # (D,) bool
        """Which features differ within a list; ranks cannot judge the others."""
        return self.parts[2, : self.features] > 0

    def statistics(self) -> Tensor:  # (F + 1, E) float64
        """T of features, of their squares and of pairs; first as it is, then with flipped signs."""
        scale = torch.maximum(self.parts[1], self.parts[2]).sqrt()
        sums = torch.cat([self.parts[:1], self.parts[4:]])
        return torch.where(scale > 0, sums / torch.where(scale > 0, scale, 1.0), 0.0)


@dataclass(frozen=True)
class FeatureChoice:
    """Which features stay, and why."""

    kept: Tensor  # (D',) their columns, rising
    features: int  # how many there are
    lists: int  # with different labels, by which they were chosen
    null_share: float  # estimated share of the features that do not go with the labels by themselves

    @property
    def set_aside(self) -> list[int]:
        """The columns that do not stay."""
        return sorted(set(range(self.features)) - set(self.kept.tolist()))

    def names_set_aside(self, names: Sequence[str] | None) -> str:
        """The features that do not stay, by their names or numbers from 1; many are cut short."""
        if names is None:
            names = [str(column + 1) for column in range(self.features)]
        listed = [names[column] for column in self.set_aside]
        if len(listed) > _NAMES_TOLD:
            listed[_NAMES_TOLD:] = ["…"]
        return ", ".join(listed)

    @property
    def reason(self) -> str:
        """A sentence for the log and the report."""
        if self.set_aside:
            return (
                f"Features set aside: {len(self.set_aside)} of {self.features}, because over {self.lists:,} queries "
                "they go with the labels no more than chance does, alone or in pairs (about "
                f"{self.null_share:.0%} of the features mean nothing by themselves)"
            )
        if self.lists < _MIN_LISTS:
            return f"All features stay: {self.lists} queries with different labels are too few to choose by"
        return f"All features stay: about {self.null_share:.0%} of them mean nothing by themselves"


def choose_features(sums: FeatureSums) -> FeatureChoice:
    """Keep what goes with the labels more than chance does, if most features do not; otherwise all.

    The share of features that do not is Storey's, #{|T| < 1}/(.683·#T), with T of features and of their squares. A
    feature stays if its T, that of its square or that of a pair it belongs to exceeds the largest of its kind that
    flipped signs give (the median over flips). What is equal within every list cannot be judged by ranks and stays. All
    features stay where none exceeds chance.
    """
    sizes, count = sums.statistics().abs(), sums.features
    near = sizes[0, : 2 * count].view(2, count)[:, sums.varies] < 1
    share = 0.0
    if near.numel():
        share = min(1.0, float(near.double().mean()) / _WITHIN_ONE)
    kept = torch.ones(count, dtype=torch.bool)
    if sums.lists >= _MIN_LISTS and share > _MAX_NULL_SHARE:
        found = torch.zeros(count + 1, dtype=torch.bool)
        for start, stop in ((0, count), (count, 2 * count), (2 * count, sizes.shape[1])):
            if start < stop:
                chance = sizes[1:, start:stop].amax(dim=1).median()
                above = (sizes[0, start:stop] > chance).nonzero()[:, 0] + start
                found[sums.rows[above]] = True
                found[sums.columns[above]] = True
        if bool(found[1:].any()):
            kept = found[1:] | ~sums.varies
    return FeatureChoice(kept.nonzero()[:, 0], count, sums.lists, share)
