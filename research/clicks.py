"""Simulated clicks on lists of known relevance, to try out what is meant for real ones.

The position-based model: somebody looks at the document at position p with chance p^(-η), and clicks on what is looked
at with a chance that grows with its relevance, whatever else is in the list.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lgmml_torch.checks import check_positive, check_shape, check_unit_interval, check_whole
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import argsort_segments, positions, segment_ids


class ClickLog(NamedTuple):
    """What was shown, where, and what was clicked on.

    Attributes:
        data: the documents that were shown, clicks (1 or 0) as labels, positions from 1.
        propensities: ``(N,)`` the chance that each of them was looked at.
    """

    data: RankingData
    propensities: Tensor


def simulate_clicks(
    data: RankingData,
    policy: Tensor,  # (N,)
    *,
    shown: int = 10,
    eta: float = 1.0,
    noise: float = 0.1,
    seed: int = 0,
) -> ClickLog:
    r"""Show the first documents of every list, by the scores of a logging policy, and draw who clicks on what.

    .. math:: P(\text{click}) = p^{-\eta} \cdot (\epsilon + (1 - \epsilon) (2^y - 1) / (2^{y_{\max}} - 1))

    Args:
        data: true relevance as labels.
        policy: what the lists were ranked by when they were shown.
        shown: documents of each list, at most.
        eta: η, how fast attention falls; 0 has everybody look at everything.
        noise: ε, the chance of a click on an irrelevant document that is looked at.
        seed: of all draws.

    >>> data = RankingData.from_arrays([[0.0], [1.0], [2.0]], [0, 1, 1], qid=[7, 7, 7])
    >>> log = simulate_clicks(data, torch.tensor([0.0, 2.0, 1.0]), shown=2)
    >>> log.data.in_caller_order(log.data.positions), log.data.in_caller_order(log.propensities)
    (tensor([1, 2]), tensor([1.0000, 0.5000]))
    """
    check_shape("policy", policy, (data.num_documents,))
    check_whole("shown", shown)
    check_positive("eta", eta, zero=True)
    check_unit_interval("noise", noise)
    ranked = argsort_segments(policy, data.offsets, descending=True)
    place = positions(data.offsets)
    rows, place = ranked[place < shown], place[place < shown] + 1
    look = place.double().pow(-eta)
    gain = torch.exp2(data.labels[rows].double()) - 1
    relevant = noise + (1 - noise) * gain / max(1.0, float(torch.exp2(data.labels.max()) - 1))
    draws = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log = RankingData.from_arrays(
        data.features[rows],
        (draws < look * relevant).float(),
        qid=[data.qids[query] for query in segment_ids(data.offsets)[rows].tolist()],
        dtype=data.features.dtype,
        positions=place,
        feature_names=data.feature_names,
    )
    return ClickLog(log, look[log.order].float())
