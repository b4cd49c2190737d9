"""Starts of trained metrics that lost, against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lgmml_torch.fitting.trained import STARTS, start_trained
from lgmml_torch.functional.gmml import scatter_matrices
from lgmml_torch.functional.regions import regions_from_queries, usable_queries
from lgmml_torch.segments import segment_min
from research.starts import CLOSED_FORMS, OWN_STARTS, START_SETTINGS, diagonal_start, ratio_start
from tests.fitting.test_trained import lists, normalised
from tests.reference import boosting as naive


def test_every_start_of_the_page_is_known_to_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in OWN_STARTS.items():
        monkeypatch.setitem(STARTS, name, function)
    data = lists(12)
    for (setting,) in (START_SETTINGS | CLOSED_FORMS).values():
        start = setting.partition("=")[2]
        bank = start_trained(data, num_metrics=5, rank=2, start=start, seed=1)
        assert bank.history == {"start": start, "rank": 2}
        assert bool(torch.isfinite(bank.metrics(data.features)).all())


def test_diagonal() -> None:
    data = lists(8)
    above = (data.labels - segment_min(data.labels, data.offsets)[data.query_index]).double().numpy()
    scatters = [
        naive.list_scatter(x[:, None].double().numpy(), above, (above == 0).astype(float), data.offsets.tolist())
        for x in data.features.T
    ]
    S, D = (torch.tensor([float(pair[side][0, 0]) for pair in scatters]).double() for side in (0, 1))
    for lam in (0.1, 1.0):
        level = lam * float((S + D).mean()) / 2
        expected = normalised(((D + level) / (S + level)) ** 0.25)
        factors = diagonal_start(data, (3000, data.num_features, 2), torch.Generator().manual_seed(0), lam=lam)
        found = factors.double().square().mean((0, 2)).sqrt() * factors[0].numel() ** 0.5
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


def test_ratio() -> None:
    """Generalised eigenvectors of a region, largest ratio first, of length 1 in the similar scatter."""
    data = lists(12).select(range(12))
    data = data.replace(features=data.features.double())
    queries = usable_queries(data.labels, data.offsets).nonzero()[:, 0]
    every = len(queries)
    generator = torch.Generator().manual_seed(1)
    found = ratio_start(data, (every + 2, data.num_features, 3), generator, pool=1, lam=0.3)
    assert torch.equal(found[:2], found[every:])  # fewer regions than metrics serve several times
    assert not torch.equal(found[0], found[1])
    r = regions_from_queries(data.labels, data.offsets, queries, torch.arange(every + 1))
    S, D = scatter_matrices(data.features, r)
    level = 0.3 * (S + D).diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] / 2
    S = S + level * torch.eye(data.num_features).double()
    values = torch.linalg.eigvals(torch.linalg.solve(S, D)).real.sort(-1, descending=True).values[:, :3]

    def belongs(W: Tensor, region: int) -> bool:
        length, ratio = W.mT @ S[region] @ W, W.mT @ D[region] @ W
        return torch.allclose(length, torch.eye(3).double(), atol=1e-6) and torch.allclose(
            ratio, torch.diag(values[region]), rtol=1e-5, atol=1e-6
        )

    owners = [[region for region in range(every) if belongs(W, region)] for W in found[:every]]
    assert sorted(owners) == [[region] for region in range(every)]
