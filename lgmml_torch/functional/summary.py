"""What a list looks like from the anchors: the statistics by which a new query finds its Φ."""

from __future__ import annotations

import torch
from torch import Tensor

from lgmml_torch.checks import check_offsets, check_shape
from lgmml_torch.segments import segment_ids, segment_sum

SPREAD_FLOOR = 1e-4


def list_summary(
    kappa: Tensor,  # (N, K)
    offsets: Tensor,  # (Q+1,)
    *,
    floor: float = SPREAD_FLOOR,
) -> Tensor:  # (Q, 2K)
    """Mean and log-spread of the kernel values of each list, metric by metric.

    The first K columns are the means over the list, the last K are log(floor + standard deviation). An empty list
    has zeros for means and log(floor) for spreads; so has the spread of a list of one document.

    >>> list_summary(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 2]))
    tensor([[2.0000e+00, 1.0001e-04]])
    """
    check_shape("kappa", kappa, (None, None))
    check_offsets(offsets, len(kappa))
    counts = offsets.diff().clamp_min(1).unsqueeze(1).to(kappa.dtype)
    mean = segment_sum(kappa, offsets) / counts
    centred = kappa - mean[segment_ids(offsets)]
    spread = (segment_sum(centred.square(), offsets) / counts).sqrt()
    return torch.cat([mean, (spread + floor).log()], dim=1)


def nearest_mean(
    summaries: Tensor,  # (Q, S) of the new lists
    known: Tensor,  # (T, S) of the training lists
    rows: Tensor,  # (T, K) what the training lists have
    neighbours: int,
) -> Tensor:  # (Q, K)
    """Mean row of the training lists whose summaries are nearest, each column of the summaries standardised."""
    mean, spread = known.mean(0), known.std(0, unbiased=False)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    gaps = torch.cdist((summaries - mean) / spread, (known - mean) / spread)
    nearest = gaps.topk(min(neighbours, len(known)), largest=False).indices
    return rows[nearest].mean(dim=1)
