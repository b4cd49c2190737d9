"""Bags of boosted banks, merged into one: a score is a sum over metrics, so a mean of models is a model of its kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lgmml_torch.checks import DataError, check_positive, check_unit_interval, check_whole
from lgmml_torch.fitting.bank import Bank, OnRound, merge_banks
from lgmml_torch.fitting.boosted import BoostedBuilder, BoostState, RoundInfo
from lgmml_torch.functional.losses import position_curve
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import centre_segments

log = logging.getLogger(__name__)

SEED_STEP = 1000  # between members, so that bags of neighbouring seeds share none


@dataclass(frozen=True)
class BaggedBuilder(BoostedBuilder):
    r"""Several boosted banks as one: :math:`\Phi = (\Phi_1 / (M s_1), \dots, \Phi_M / (M s_M))`.

    :math:`s_m` is the spread of member m's scores within the training lists, so every member has the same say. The
    result is an ordinary bank: one checkpoint, one call to score. One member ranks as `fit_boosted` does. The seed is
    that of the first member; the others follow from it. Rounds are counted over all members.

    Attributes:
        members: M.
        share: of the training queries, drawn anew for each member; 1 gives every member all of them.

    Raises:
        LGMMLError: for a number of members below 1 or a share outside (0, 1].

    >>> x = torch.linspace(-1, 1, 40)[:, None]
    >>> data = RankingData.from_arrays(x, (x[:, 0] > 0.5).long(), qid=torch.arange(40) % 4)
    >>> bank = BaggedBuilder(members=2, rounds=3, sizes=(1,), candidates=2)(data)
    >>> bank.history["members"], bool((bank.phi >= 0).all())
    (2, True)
    """

    members: int = 5
    share: float = 1.0

    grows: ClassVar[bool] = False
    takes_shared_lists: ClassVar[bool] = False
    resumes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("members", self.members)
        check_unit_interval("share", self.share)
        check_positive("share", self.share)

    def fit(
        self,
        data: RankingData,
        valid: RankingData | None,
        *,
        seed: int,
        on_round: OnRound | None,
        resume: BoostState | None = None,
        start: Bank | None = None,
        measure: str | Callable[..., Any] | None = None,
    ) -> Bank:
        """Fit one member after the other, and merge them.

        Raises:
            DataError: when a member's share holds nothing to learn from.
        """
        banks, spreads = [], []
        for member in range(self.members):
            own = seed + SEED_STEP * member
            part = query_share(data, self.share, own)
            told = _counted(on_round, member, self.members)
            bank = super().fit(part, valid, seed=own, on_round=told, measure=measure)
            banks.append(bank)
            spreads.append(score_spread(bank.score(data.features), data.offsets))
            log.info("member %d of %d: %d metrics", member + 1, self.members, bank.metrics.num_metrics)
        merged = merge_banks(banks, [1 / (self.members * spread) for spread in spreads])
        history: dict[str, Any] = {
            "members": self.members,
            "spreads": spreads,
            "best_round": [bank.history["best_round"] for bank in banks],
            "best_valid_ndcg": None,
        }
        if valid is not None:
            history["best_valid_ndcg"] = mean_ndcg(merged.score(valid.features), valid)
        if merged.position_bias is not None:
            history["position_bias"] = position_curve(merged.position_bias, data)
        return replace(merged, history=history)


def score_spread(
    scores: Tensor,  # (N,)
    offsets: Tensor,  # (Q+1,)
) -> float:
    """Standard deviation of the scores around the means of their lists.

    What is the same for a whole list ranks nothing.

    Raises:
        DataError: when every list has equal scores.

    >>> score_spread(torch.tensor([1.0, 3.0, 7.0, 9.0]), torch.tensor([0, 2, 4]))
    1.0
    """
    spread = float(centre_segments(scores.double(), offsets).square().mean().sqrt())
    if not spread > 0:
        raise DataError("a member of the bag scores all documents of every training list alike; more rounds may help")
    return spread


def query_share(data: RankingData, share: float, seed: int) -> RankingData:
    """A random share of the queries, at least one, in their order."""
    count = max(1, round(share * data.num_queries))
    drawn = torch.randperm(data.num_queries, generator=torch.Generator().manual_seed(seed))[:count]
    return data.select(drawn.sort().values)


def _counted(on_round: OnRound | None, member: int, members: int) -> OnRound | None:
    """Rounds counted over all members."""
    if on_round is None:
        return None

    def tell(done: int, info: RoundInfo) -> None:
        on_round(member * info.total + done, replace(info, total=members * info.total))

    return tell
