"""What being shown at a position adds to the score that clicks speak of: biases that are learned and then dropped.

People look at the first places of a list most, so documents that were shown there have more clicks than their
relevance earns. While a model is fitted the loss sees f(x) + b[position], so that b explains what the place has earned
and f what the document has; new lists are ranked by f alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lgmml_torch.distributed import all_gather
from lgmml_torch.ragged import RankingData


def num_positions(data: RankingData) -> int:
    """Positions from 0 to the last one at which a document of any process was shown; 0 where nobody says."""
    last = -1 if data.positions is None or not data.num_documents else int(data.positions.max())
    return 1 + (max(all_gather(last)) if data.spread is not None else last)


def position_step(
    bias: Tensor,  # (P,)
    positions: Tensor,  # (M,) long
    gradients: Tensor,  # (M,)
    hessians: Tensor,  # (M,)
    *,
    shrinkage: float,
    ridge: float,
) -> Tensor:  # (P,)
    r"""The biases of positions after a damped Newton step on what documents shown there want together.

    With :math:`G_p, H_p` the gradients and Hessians summed over position p and λ = ``ridge`` times the mean of H over
    the positions that occur,

    .. math:: b_p \leftarrow b_p + \mathrm{shrinkage} \cdot (G_p - \lambda b_p) / (H_p + \lambda)

    so a position that nothing is known about goes back to 0. Limiting case: positions that differ in nothing keep
    biases of 0.

    >>> step = position_step(torch.zeros(2), torch.tensor([0, 1]), torch.tensor([1.0, -1.0]), torch.ones(2),
    ...                      shrinkage=0.5, ridge=1.0)
    >>> step
    tensor([ 0.2500, -0.2500])
    """
    pull = torch.zeros_like(bias).index_add_(0, positions, gradients.to(bias))
    stiff = torch.zeros_like(bias).index_add_(0, positions, hessians.to(bias))
    least = ridge * stiff.sum() / (stiff > 0).sum().clamp_min(1)
    return bias + shrinkage * (pull - least * bias) / (stiff + least).clamp_min(1e-12)


def bias_of(
    bias: Tensor,  # (P,)
    positions: Tensor,  # (N,)
) -> Tensor:  # (N,)
    """The bias of each document's position; 0 for one beyond all that were trained on."""
    known = torch.cat([bias, bias.new_zeros(1)])
    return known[positions.clamp_max(len(bias))]


def position_curve(
    bias: Tensor,  # (P,)
    data: RankingData,
) -> dict[int, float]:
    """The bias of each position that occurs, against that of the first: adding a number to all of them means nothing.

    >>> data = RankingData.from_arrays([[1.0], [2.0]], [1, 0], qid=[7, 7], positions=[1, 3])
    >>> position_curve(torch.tensor([0.0, 2.0, 0.0, 0.5]), data)
    {1: 0.0, 3: -1.5}
    """
    shown = [] if data.positions is None else torch.unique(data.positions).tolist()
    values = bias.detach().tolist()
    return {position: values[position] - values[shown[0]] for position in shown}
