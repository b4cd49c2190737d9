"""The two trials with closed forms, against their definitions."""

from __future__ import annotations

import pytest
import torch

from lgmml_torch.functional.gmml import gmml, scatter_matrices
from lgmml_torch.functional.regions import regions_from_queries
from research.closed_forms import LAM, TowardsStart, gradients, weighted_metrics
from tests.fitting.test_trained import lists


@pytest.mark.parametrize("pull", [0.0, 10.0, 1e6])
def test_factors_are_pulled_towards_their_start_and_nothing_else_is(pull: float) -> None:
    factors, phi = torch.nn.Parameter(torch.ones(2, 3, 1)), torch.nn.Parameter(torch.ones(2))
    optimizer = TowardsStart([factors, phi], pull=pull, lr=0.01, weight_decay=0.0)
    for _ in range(3):
        (factors.sum() + phi.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = 0.0
    for _ in range(3):
        moved = (moved + 0.01) * max(0.0, 1 - 0.01 * pull)  # Adam's first steps are of the learning rate
    torch.testing.assert_close(factors.detach(), torch.full((2, 3, 1), 1 - moved))
    torch.testing.assert_close(phi.detach(), torch.full((2,), 0.97))


def test_equal_weights_give_the_closed_form_of_all_pairs() -> None:
    data = lists(6)
    data = data.replace(features=data.features.double(), labels=(data.labels > 0).to(data.labels))
    pull = torch.where(data.labels > 0, 1.0, -1.0).double()
    before = torch.zeros(2, data.num_features, data.num_features).double()
    found = weighted_metrics(data, pull, [3, 1], before)
    regions = regions_from_queries(data.labels, data.offsets, torch.tensor([3, 1]), torch.arange(3))
    S, D = scatter_matrices(data.features, regions)
    torch.testing.assert_close(found @ found.mT, gmml(S, D, lam=LAM).metric, rtol=1e-6, atol=1e-8)
    assert torch.equal(weighted_metrics(data, 0 * pull, [3, 1], before), before)


def test_the_scale_of_scores_means_nothing() -> None:
    data = lists(6)
    scores = torch.randn(data.num_documents, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gradients(scores, data), gradients(100 * scores, data))
