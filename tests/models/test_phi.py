from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional.score import list_summary, nearest_mean
from lgmml_torch.models.phi import POLICIES, Phi


def test_modes_and_default_policies() -> None:
    assert Phi(3, 2, mode="per_query").policy == "ones"
    assert Phi(3, 2, mode="shared").policy == "shared"
    assert Phi(3, 2, mode="amortized").policy == "amortized"


def test_per_query_policies() -> None:
    phi = Phi(3, 2, mode="per_query", neighbours=1)
    with torch.no_grad():
        phi.table.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]))
    assert phi(torch.tensor([2, 0])).tolist() == [[5.0, 9.0], [1.0, 2.0]]
    assert phi.for_new(None, 4, "ones").tolist() == [[1.0, 1.0]]
    assert phi.for_new(None, 4, "mean").tolist() == [[3.0, 5.0]]
    summaries = torch.tensor([[0.0, 0, 0, 0], [1, 1, 0, 0], [2, 2, 0, 0]])
    phi.set_summaries(summaries)
    assert phi.for_new(summaries[[1]], 1, "knn").tolist() == [[3.0, 4.0]]
    phi.policy = "mean"
    assert phi.for_new(None, 1).tolist() == [[3.0, 5.0]]


def test_shared_with_deviations() -> None:
    phi = Phi(2, 2, mode="shared", init=torch.tensor([1.0, 0.5]), deviations=True)
    with torch.no_grad():
        phi.deviation.weight.copy_(torch.tensor([[0.5, -2.0], [0.0, 0.0]]))
    assert phi(torch.tensor([0, 1])).tolist() == [[1.5, 0.0], [1.0, 0.5]]
    assert float(phi.penalty(torch.tensor([0])).detach()) == pytest.approx(0.5 * (0.25 + 4.0))
    phi.project_()
    assert phi.deviation.weight.tolist() == [[0.5, -0.5], [0.0, 0.0]]
    assert phi.for_new(None, 7).tolist() == [[1.0, 0.5]]


def test_amortized_starts_at_phi0_and_stays_positive() -> None:
    phi = Phi(4, 3, mode="amortized", init=2.0)
    summaries = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    phi.set_summaries(summaries)
    assert torch.equal(phi.for_new(summaries, 4), torch.full((4, 3), 2.0))
    with torch.no_grad():
        phi.gate.last.weight.normal_(0, 100, generator=torch.Generator().manual_seed(1))
    assert (phi.for_new(summaries, 4) > 0).all()
    assert torch.isfinite(phi.for_new(summaries * 1e6, 4)).all()
    assert torch.equal(phi(torch.arange(4)), phi.for_new(summaries, 4))


def test_projection_touches_given_rows_only() -> None:
    phi = Phi(3, 1, mode="per_query")
    with torch.no_grad():
        phi.table.weight.fill_(-1.0)
    phi.project_(torch.tensor([1, 1]))
    assert phi.table.weight.flatten().tolist() == [-1.0, 0.0, -1.0]
    phi.project_()
    assert (phi.table.weight == 0).all()


@pytest.mark.parametrize("mode", POLICIES)
def test_state_round_trip(mode: str) -> None:
    phi = Phi(3, 2, mode=mode, init=torch.tensor([0.25, 4.0]))
    again = Phi.from_spec(phi.spec())
    again.load_state_dict(phi.state_dict())
    assert torch.equal(again(torch.tensor([1])), phi(torch.tensor([1])))


def test_no_global_random_state() -> None:
    before = torch.get_rng_state()
    Phi(3, 2, mode="amortized")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Phi(1, 1, mode="global"), "`mode` must be one of"),
        (lambda: Phi(1, 1, mode="shared", policy="knn"), "`policy` must be one of 'shared', 'ones', got 'knn'"),
        (lambda: Phi(1, 1, init=-1.0), "`init` must be finite and at least 0, got -1"),
        (lambda: Phi(1, 1, init=float("nan")), "`init` must be finite"),
        (lambda: Phi(1, 2, init=torch.ones(3)), r"`init` must have shape \(2,\)"),
        (lambda: Phi(1, 1, mode="per_query", deviations=True), "`deviations` needs `mode` 'shared'"),
        (lambda: Phi(1, 1, mode="per_query").for_new(None, 1, "knn"), "`summaries` must be given for policy 'knn'"),
        (lambda: Phi(1, 0), "`num_metrics` must be positive"),
    ],
)
def test_errors_are_named(build, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        build()


def test_list_summary_equals_the_loop() -> None:
    g = torch.Generator().manual_seed(3)
    kappa = torch.rand(9, 4, generator=g, dtype=torch.float64)
    offsets = torch.tensor([0, 1, 1, 5, 9])
    rows = []
    for a, b in itertools.pairwise(offsets):
        part = kappa[a:b]
        mean = part.mean(0) if len(part) else torch.zeros(4, dtype=torch.float64)
        spread = part.std(0, unbiased=False) if len(part) else torch.zeros(4, dtype=torch.float64)
        rows.append(torch.cat([mean, (spread + 1e-4).log()]))
    assert torch.allclose(list_summary(kappa, offsets), torch.stack(rows))


def test_nearest_mean_equals_the_loop() -> None:
    g = torch.Generator().manual_seed(4)
    new, known, rows = torch.randn(3, 5, generator=g), torch.randn(8, 5, generator=g), torch.rand(8, 2, generator=g)
    spread = known.std(0, unbiased=False)
    expected = []
    for point in new:
        gaps = [float((((point - other) / spread) ** 2).sum()) for other in known]
        nearest = sorted(range(8), key=gaps.__getitem__)[:3]
        expected.append(rows[nearest].mean(0))
    assert torch.allclose(nearest_mean(new, known, rows, 3), torch.stack(expected))


class TestPolicies:
    """Each policy against its definition, on tables where any other would give something else."""

    ROWS = ((1.0, 2.0), (3.0, 4.0), (5.0, 12.0), (7.0, 0.0))

    def per_query(self, **options: Any) -> Phi:
        phi = Phi(4, 2, mode="per_query", **options)
        with torch.no_grad():
            phi.table.weight.copy_(torch.tensor(self.ROWS))
        return phi

    def test_ones_are_ones_whatever_was_trained(self) -> None:
        shared = Phi(3, 2, mode="shared", init=torch.tensor([0.25, 4.0]))
        amortized = Phi(3, 2, mode="amortized", init=torch.tensor([0.25, 4.0]))
        for phi in (self.per_query(), shared, amortized):
            assert phi.for_new(None, 5, "ones").tolist() == [[1.0, 1.0]]

    def test_shared_is_the_row_without_deviations_or_gate(self) -> None:
        shared = Phi(3, 2, mode="shared", init=torch.tensor([0.25, 4.0]), deviations=True)
        amortized = Phi(3, 2, mode="amortized", init=torch.tensor([0.25, 4.0]))
        with torch.no_grad():
            shared.deviation.weight.fill_(1.0)
            amortized.gate.last.bias.fill_(1.0)
        for phi in (shared, amortized):
            assert phi.for_new(None, 5, "shared").tolist() == [[0.25, 4.0]]

    def test_mean_is_over_queries(self) -> None:
        assert self.per_query().for_new(None, 5, "mean").tolist() == [[4.0, 4.5]]

    def test_neighbours_are_found_by_means_not_by_spreads(self) -> None:
        """The last two columns are spreads of the lists: they would name the query at the other end."""
        phi = self.per_query(neighbours=2)
        phi.set_summaries(torch.tensor([[0.0, 0, 9, 9], [1, 1, 6, 6], [2, 2, 3, 3], [3, 3, 0, 0]]))
        found = phi.for_new(torch.tensor([[0.1, 0.1, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]]), 2, "knn")
        assert found.tolist() == [[2.0, 3.0], [6.0, 6.0]]
        phi.neighbours = 99  # more than there are: all of them
        assert phi.for_new(torch.zeros(1, 4), 1, "knn").tolist() == [[4.0, 4.5]]

    def test_columns_are_standardised_before_they_are_compared(self) -> None:
        """The first column is a thousand times as wide as the second, and says the opposite."""
        phi = self.per_query(neighbours=1)
        phi.set_summaries(torch.tensor([[0.0, 3, 0, 0], [1000, 2, 0, 0], [2000, 1, 0, 0], [3000, 0, 0, 0]]))
        assert phi.for_new(torch.tensor([[600.0, 3.4, 0, 0]]), 1, "knn").tolist() == [[1.0, 2.0]]

    def test_the_gate_multiplies_by_its_exponential(self) -> None:
        phi = Phi(3, 1, mode="amortized", init=2.0, hidden=1)
        phi.set_summaries(torch.tensor([[0.0, 5.0], [2.0, 5.0], [4.0, 5.0]]))  # the second column never varies
        with torch.no_grad():
            phi.gate.first.weight.copy_(torch.tensor([[0.5, 0.25]]))
            phi.gate.first.bias.fill_(0.1)
            phi.gate.last.weight.fill_(1.5)
            phi.gate.last.bias.fill_(-0.3)
        new = torch.tensor([[1.0, 5.5], [4.0, 5.0]])
        spread = (8 / 3) ** 0.5
        for summary, weight in zip(new.tolist(), phi.for_new(new, 2).flatten().tolist(), strict=True):
            hidden = math.tanh(0.5 * (summary[0] - 2) / spread + 0.25 * (summary[1] - 5) + 0.1)
            gate = 3 * math.tanh((1.5 * hidden - 0.3) / 3)
            assert weight == pytest.approx(2 * math.exp(gate), rel=1e-5)

    def test_the_gate_is_bounded_and_so_is_what_it_sees(self) -> None:
        phi = Phi(2, 1, mode="amortized", init=2.0, hidden=1)
        phi.set_summaries(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
        with torch.no_grad():
            phi.gate.first.weight.fill_(0.01)
            phi.gate.last.weight.fill_(1e6)
        far = torch.tensor([[100.0, 100.0], [-100.0, -100.0]])
        torch.testing.assert_close(phi.for_new(far, 2), 2 * torch.tensor([[3.0], [-3.0]]).exp())
        with torch.no_grad():
            phi.gate.last.weight.fill_(1.0)
        seen = [phi.for_new(torch.full((1, 2), value), 1).item() for value in (4.0, 5.0, 6.0, -5.0, -6.0)]
        assert seen[0] < seen[1] == seen[2]  # five deviations, no more
        assert seen[3] == seen[4] < seen[0]


def test_summaries_are_remembered_with_their_moments() -> None:
    phi = Phi(3, 1, mode="per_query")
    phi.set_summaries(torch.tensor([[1.0, 4.0], [2.0, 4.0], [6.0, 4.0]]))
    assert phi.summary_mean.tolist() == [3.0, 4.0]
    torch.testing.assert_close(phi.summary_spread, torch.tensor([(14 / 3) ** 0.5, 1.0]))
    with pytest.raises(LGMMLError, match=r"`summaries` must have shape \(3, 2\)"):
        phi.set_summaries(torch.zeros(2, 2))
    shared = Phi(3, 1, mode="shared")
    shared.set_summaries(torch.zeros(99, 7))  # has no use for any
    assert shared.summaries.shape == (0, 2)


def test_the_gate_starts_with_a_pattern_of_its_own_size() -> None:
    phi = Phi(2, 50, mode="amortized", hidden=64)
    assert phi.gate.first.weight.detach().std().item() == pytest.approx(0.1, rel=0.05)
    assert all(not bool(part.any()) for part in (phi.gate.first.bias, phi.gate.last.weight, phi.gate.last.bias))


def test_columns_of_a_gate_are_selected_with_its_summaries() -> None:
    phi = Phi(4, 3, mode="amortized", init=torch.tensor([1.0, 2.0, 3.0]), hidden=5)
    g = torch.Generator().manual_seed(0)
    summaries = torch.randn(4, 6, generator=g)
    phi.set_summaries(summaries)
    with torch.no_grad():
        for parameter in phi.gate.parameters():
            parameter.normal_(0, 1, generator=g)
        phi.gate.first.weight[:, [1, 4]] = 0  # the gate does not look at the metric that goes
    kept, both = torch.tensor([0, 2]), torch.tensor([0, 2, 3, 5])
    small = phi.select(kept, torch.tensor([2.0, 5.0]))
    torch.testing.assert_close(
        small.for_new(summaries[:, both], 4), phi.for_new(summaries, 4)[:, kept] * torch.tensor([2.0, 5.0])
    )
    assert torch.equal(small.summaries, summaries[:, both])
