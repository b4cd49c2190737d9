"""Which raw features say anything about the labels: a test in closed form, before anything is fitted.

A feature is seen through its rank r within each list, in (−½, ½). With the labels y of a list around their mean,

    C = Σᵢ (yᵢ − ȳ)·r̃ᵢ·r̃ᵢᵀ,   r̃ = (1, r),

has a feature by itself in its first row, the square of a feature on its diagonal and two features together elsewhere:
it is by how much the scatter of relevant documents differs from that of all documents of the list, the two matrices
whose geometric mean is a metric. A feature that matters only together with another one shows in C, too.

Over lists, T = ΣC/√max(ΣC², ΣV) is about standard normal where labels do not depend on features. V is the variance of C
over all orders of the labels within the list; the larger of the two keeps T small for features that are nearly always
0. The largest |T| that chance gives is measured, not assumed: the signs of whole lists are flipped at random.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lgmml_torch.functional.features import list_rank_percentiles
from lgmml_torch.segments import list_blocks, segment_max, segment_min

FLIPS = 30  # random signs of all lists; the middle of the largest |T| of each is the threshold
MAX_PAIRED = 1_000  # features up to which pairs are looked at: their number grows with the square
MIN_LISTS = 30  # with different labels, below which all features stay
MAX_NULL_SHARE = 0.5  # up to which all features stay: weak features help together
_WITHIN_ONE = 0.6827  # share of a standard normal variable within ±1
_BLOCK_VALUES = 1 << 22  # entries of C that are added up together


def flip_signs(
    lists: int,
    flips: int = FLIPS,
    seed: int = 0,
) -> Tensor:  # (F, Q) of ±1
    """Random signs of all lists of a set; the same for any number of processes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (flips, lists), generator=generator) * 2.0 - 1.0


class FeatureSums:
    """Sums over lists from which features are chosen; those of several processes add up to those of all.

    Args:
        features: number of columns.
        paired: whether pairs of features are looked at, by default where there are at most `MAX_PAIRED`.

    Attributes:
        parts: ``(F + 4, E)`` float64: ΣC, ΣC², ΣV, the number of lists, and ΣC with flipped signs. E counts the entries
            of C: all of them, or a row and a diagonal without pairs.

    >>> g = torch.Generator().manual_seed(0)
    >>> features, offsets = torch.randn(4000, 3, generator=g), torch.arange(0, 4001, 40)
    >>> labels = (features[:, 0] > 1).float()
    >>> sums = FeatureSums(3)
    >>> sums.add(features, labels, offsets, flip_signs(100))
    >>> sums.single()[0].abs() > 3
    tensor([ True, False, False])
    """

    def __init__(self, features: int, *, paired: bool | None = None, flips: int = FLIPS) -> None:
        self.features = features
        self.paired = features <= MAX_PAIRED if paired is None else paired
        entries = (features + 1) ** 2 if self.paired else 2 * features
        self.parts = torch.zeros(flips + 4, entries, dtype=torch.float64)

    def add(
        self,
        features: Tensor,  # (n, D)
        labels: Tensor,  # (n,)
        offsets: Tensor,  # (q+1,)
        signs: Tensor,  # (F, q) by `flip_signs`
    ) -> None:
        """Some more lists; those whose labels are all equal say nothing and are left out."""
        useful = segment_max(labels, offsets, empty=0.0) > segment_min(labels, offsets, empty=0.0)
        size = max(1, _BLOCK_VALUES // self.parts.shape[1])
        for some in useful.nonzero()[:, 0].split(size):
            differences, variances = [], torch.zeros_like(self.parts[0])
            for number in some.tolist():
                rows = slice(int(offsets[number]), int(offsets[number + 1]))
                difference, variance = self._of_list(features[rows].float(), labels[rows].float())
                differences.append(difference)
                variances += variance
            block = torch.stack(differences)
            self.parts[0] += block.sum(0)
            self.parts[1] += block.square().sum(0)
            self.parts[2] += variances
            self.parts[3] += len(some)
            self.parts[4:] += signs[:, some].to(block) @ block

    def _of_list(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # (E,), (E,)
        """C and its variance over all orders of the labels."""
        count = len(labels)
        ranks = list_rank_percentiles(features, torch.tensor([0, count]))
        centred = labels - labels.mean()
        if self.paired:
            seen = torch.cat([ranks.new_ones(count, 1), ranks], dim=1)
            squares = seen.square()
            difference = (seen * centred[:, None]).mT @ seen
            spread = squares.mT @ squares - (seen.mT @ seen).square() / count
        else:
            seen = torch.cat([ranks, ranks.square()], dim=1)
            difference = centred @ seen
            spread = seen.square().sum(0) - seen.sum(0).square() / count
        variance = spread.clamp_min(0) * (centred.square().sum() / (count - 1))
        return difference.flatten(), variance.flatten()

    @property
    def lists(self) -> int:
        """Lists with different labels so far."""
        return int(self.parts[3, 0])

    def _statistics(self) -> Tensor:  # (F + 1, E)
        scale = torch.maximum(self.parts[1], self.parts[2]).sqrt()
        sums = torch.cat([self.parts[:1], self.parts[4:]])
        return torch.where(scale > 0, sums / torch.where(scale > 0, scale, 1.0), 0.0)

    def single(self) -> Tensor:  # (F + 1, 2, D)
        """T of each feature by itself and of its square; first as it is, then with flipped signs."""
        found = self._statistics()
        if not self.paired:
            return found.view(len(found), 2, self.features)
        matrix = found.view(len(found), self.features + 1, self.features + 1)
        return torch.stack([matrix[:, 0, 1:], matrix.diagonal(dim1=1, dim2=2)[:, 1:]], dim=1)

    def pairs(self) -> Tensor:  # (F + 1, 1, D)
        """The largest |T| of each feature together with another one; as `single`. Zeros where pairs are not seen."""
        if not self.paired or self.features < 2:
            return torch.zeros(len(self.parts) - 3, 1, self.features, dtype=torch.float64)
        matrix = self._statistics().view(-1, self.features + 1, self.features + 1)[:, 1:, 1:].abs()
        matrix.diagonal(dim1=1, dim2=2).zero_()
        return matrix.amax(2)[:, None]


@dataclass(frozen=True)
class FeatureChoice:
    """Which features stay, and why.

    Attributes:
        kept: ``(D',)`` their columns, rising.
        features: how many there are.
        lists: with different labels, that the choice was made on.
        null_share: estimated share of features that do not matter by themselves, of those that vary within lists.
    """

    kept: Tensor
    features: int
    lists: int
    null_share: float

    @property
    def set_aside(self) -> Tensor:  # (D − D',)
        """The columns that do not stay."""
        gone = torch.ones(self.features, dtype=torch.bool)
        gone[self.kept] = False
        return gone.nonzero()[:, 0]

    @property
    def reason(self) -> str:
        """A sentence for the log and the report."""
        count = self.features - len(self.kept)
        if count:
            return (
                f"features set aside: {count} of {self.features}, because over {self.lists:,} queries neither they nor "
                f"their pairs go with the labels more than chance does ({self.null_share:.0%} of all features do not)"
            )
        if self.lists < MIN_LISTS:
            return f"all features stay: {self.lists} queries with different labels are too few to choose by"
        return f"all features stay: about {self.null_share:.0%} do not go with the labels by themselves"


def choose_features(sums: FeatureSums) -> FeatureChoice:
    """Keep what goes with the labels more than chance does, if most features do not; otherwise all.

    The share of features that do not is Storey's, #{|T| < 1}/(.683·#T), of T of features and of their squares. A feature
    stays if its T, that of its square or that of a pair it belongs to is above the largest of its kind that flipped signs
    give (the median over flips). What does not vary within lists cannot be judged by ranks and stays, as all do if
    nothing is above chance.
    """
    single = sums.single()
    scale = torch.maximum(sums.parts[1], sums.parts[2])
    if sums.paired:
        scale = scale.view(sums.features + 1, -1)[0, 1:]
    judged = scale[: sums.features] > 0
    near = single[0][:, judged].abs() < 1
    share = 0.0
    if near.numel():
        share = min(1.0, float(near.double().mean()) / _WITHIN_ONE)
    kept = torch.ones(sums.features, dtype=torch.bool)
    if sums.lists >= MIN_LISTS and share > MAX_NULL_SHARE:
        sizes = torch.cat([single.abs(), sums.pairs()], dim=1)  # (F + 1, 3, D)
        chance = sizes[1:].amax(2).median(0).values
        above = (sizes[0] > chance[:, None]).any(0)
        if bool(above.any()):
            kept = above | ~judged
    return FeatureChoice(kept.nonzero()[:, 0], sums.features, sums.lists, share)
