from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from lgmml_torch.checks import DivergedError, LGMMLError
from lgmml_torch.functional.score import list_summary
from lgmml_torch.models.phi import POLICIES, Phi, _nearest_mean


def test_modes_and_default_policies() -> None:
    assert Phi(3, 2, mode="per_query").policy == "auto"  # validation chooses
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


def test_state_round_trip() -> None:
    for mode in POLICIES:
        phi = Phi(3, 2, mode=mode, init=torch.tensor([0.25, 4.0]))
        again = Phi(**phi.spec())
        again.load_state_dict(phi.state_dict())
        assert torch.equal(again(torch.tensor([1])), phi(torch.tensor([1])))


def test_errors_are_named() -> None:
    for build, message in [
        (lambda: Phi(1, 1, mode="global"), "`mode` must be one of"),
        (lambda: Phi(1, 1, mode="shared", policy="knn"), "`policy` must be one of 'shared', 'ones', got 'knn'"),
        (lambda: Phi(1, 1, init=-1.0), "`init` must be finite and at least 0, got -1"),
        (lambda: Phi(1, 1, init=float("nan")), "`init` must be finite"),
        (lambda: Phi(1, 2, init=torch.ones(3)), r"`init` must have shape \(2,\)"),
        (lambda: Phi(1, 1, mode="per_query", deviations=True), "`deviations` needs `mode` 'shared'"),
        (lambda: Phi(1, 1, mode="per_query").for_new(None, 1, "knn"), "`summaries` must be given for policy 'knn'"),
        (lambda: Phi(1, 0), "`num_metrics` must be positive"),
    ]:
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


def test_neighbours_are_near_in_deviations_not_in_units() -> None:
    """The first column varies in thousandths, the second in thousands: both count alike."""
    known = torch.tensor([[0.000, 0.0], [0.001, 0.0], [0.000, 4000.0], [0.001, 4000.0]])
    rows = torch.arange(4.0)[:, None]
    new = torch.tensor([[0.001, 100.0], [0.0, 3900.0]])
    assert _nearest_mean(new, known, rows, 1).flatten().tolist() == [1.0, 2.0]
    # In deviations the other value of a column is 2 away, 100 units of the second are .05.
    assert _nearest_mean(new[:1], known, rows, 2).item() in (0.5, 2.0)
    assert _nearest_mean(new, known, rows, 99).flatten().tolist() == [1.5, 1.5]


def test_a_column_that_never_varies_says_nothing() -> None:
    known = torch.tensor([[7.0, 0.0], [7.0, 1.0]])
    found = _nearest_mean(torch.tensor([[7.0, 0.9]]), known, torch.tensor([[1.0], [2.0]]), 1)
    assert found.tolist() == [[2.0]]


def test_nearest_mean_equals_the_loop() -> None:
    g = torch.Generator().manual_seed(4)
    new, known, rows = torch.randn(40, 5, generator=g), torch.randn(30, 5, generator=g), torch.rand(30, 2, generator=g)
    spread = known.std(0, unbiased=False)
    expected = []
    for point in new:
        gaps = [float((((point - other) / spread) ** 2).sum()) for other in known]
        nearest = sorted(range(30), key=gaps.__getitem__)[:3]
        expected.append(rows[nearest].mean(0))
    assert torch.allclose(_nearest_mean(new, known, rows, 3), torch.stack(expected))


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
    phi.set_summaries(torch.tensor([[0.1, 4.0], [0.2, 4.0], [0.6, 4.0]]))
    torch.testing.assert_close(phi.summary_spread, torch.tensor([(0.14 / 3) ** 0.5, 1.0]))
    with pytest.raises(LGMMLError, match=r"`summaries` must have shape \(3, 2\)"):
        phi.set_summaries(torch.zeros(2, 2))
    shared = Phi(3, 1, mode="shared")
    shared.set_summaries(torch.zeros(99, 7))  # has no use for any
    assert shared.summaries.shape == (0, 2)


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
    small = phi.select(kept)
    torch.testing.assert_close(small.for_new(summaries[:, both], 4), phi.for_new(summaries, 4)[:, kept])
    assert torch.equal(small.summaries, summaries[:, both])


def test_what_has_a_row_for_each_query() -> None:
    for mode, deviations, rows, names in [
        ("shared", False, 1, ()),
        ("shared", True, 1, ("deviation.weight",)),
        ("per_query", False, 3, ("table.weight", "summaries")),
        ("amortized", False, 1, ("summaries",)),
    ]:
        phi = Phi(3, 2, mode=mode, deviations=deviations)
        assert phi.rows_by_query == names
        assert phi.table.weight.shape == (rows, 2)
        tensors = phi.state_dict()
        assert all(len(tensors[name]) == 3 for name in names)
        assert phi.needs_summaries == (mode != "shared")
        assert len(phi.summaries) == (0 if mode == "shared" else 3)


def test_lists_that_nobody_has_summarised_are_standardised_by_nothing() -> None:
    phi = Phi(3, 2, mode="amortized")
    assert phi.summaries.tolist() == [[0.0] * 4] * 3
    assert phi.summary_mean.tolist() == [0.0] * 4
    assert phi.summary_spread.tolist() == [1.0] * 4


def test_gradients_are_sparse_where_asked_for() -> None:
    for sparse in [False, True]:
        phi = Phi(3, 2, mode="per_query", sparse=sparse)
        phi(torch.tensor([1])).sum().backward()
        assert phi.table.weight.grad is not None
        assert phi.table.weight.grad.is_sparse == sparse
        shared = Phi(3, 2, deviations=True, sparse=sparse)
        shared(torch.tensor([1])).sum().backward()
        assert shared.deviation.weight.grad.is_sparse == sparse


def test_starting_weights_may_be_zero_and_are_given_to_every_row() -> None:
    phi = Phi(3, 2, mode="per_query", init=torch.tensor([0.0, 0.25]))
    assert phi.table.weight.tolist() == [[0.0, 0.25]] * 3
    shared = Phi(3, 2, deviations=True, init=0.0)
    with torch.no_grad():
        shared.deviation.weight.fill_(1.0)
    shared.reset(0.5)
    assert shared.table.weight.tolist() == [[0.5, 0.5]]
    assert not shared.deviation.weight.any()


def test_more_errors_are_named() -> None:
    for build, message in [
        (lambda: Phi(1, 2, init=torch.tensor([1.0, -1.0])), "`init` must be finite and at least 0, got -1"),
        (lambda: Phi(1, 2, init=torch.tensor([1.0, torch.inf])), "`init` must be finite and at least 0"),
        (lambda: Phi(1, 1, init=torch.tensor([1e39], dtype=torch.float64)), "`init` must be finite and at least 0"),
        (lambda: Phi(1, 1, init="much"), "`init` must be a number, got 'much'"),
        (lambda: Phi(1, 1, neighbours=0), "`neighbours` must be positive, got 0"),
        (lambda: Phi(1, 1, hidden=1.5), "`hidden` must be a whole number, got 1.5"),
        (lambda: Phi(1, 1, deviations="yes"), "`deviations` must be true or false, got 'yes'"),
        (lambda: Phi(1, 1, sparse=1), "`sparse` must be true or false, got 1"),
        (lambda: Phi(1, 1, mode="amortized", deviations=True), "`deviations` needs `mode` 'shared', got 'amortized'"),
        (lambda: setattr(Phi(1, 1), "policy", "mean"), "`policy` must be one of 'shared', 'ones', got 'mean'"),
        (lambda: Phi(1, 1).for_new(None, 1, "mean"), "`policy` must be one of 'shared', 'ones', got 'mean'"),
        (
            lambda: Phi(1, 2, mode="per_query").for_new(torch.zeros(3, 4), 2, "knn"),
            r"`summaries` must have shape \(2, 4\), got \(3, 4\)",
        ),
        (
            lambda: Phi(1, 2, mode="amortized").for_new(torch.zeros(1, 2), 1),
            r"`summaries` must have shape \(1, 4\), got \(1, 2\)",
        ),
        (lambda: Phi(1, 1, mode="amortized").for_new(None, 1), "`summaries` must be given for policy 'amortized'"),
    ]:
        with pytest.raises(LGMMLError, match=message):
            build()


def test_policies_that_do_not_look_take_any_summaries() -> None:
    phi = Phi(3, 2, mode="per_query", init=0.5)
    assert phi.for_new(torch.zeros(7, 1), 2, "mean").tolist() == [[0.5, 0.5]]


def test_all_training_queries_share_one_row() -> None:
    phi = Phi(3, 2, init=0.5)
    assert phi(torch.tensor([0, 2, 1])).tolist() == [[0.5, 0.5]]


class TestWithoutRows:
    def test_without_rows_there_is_no_mean(self) -> None:
        phi = Phi(0, 2, mode="per_query")
        with pytest.raises(LGMMLError, match="`policy` 'mean' needs the rows of the training queries, and this file"):
            phi.for_new(None, 1, "mean")
        with pytest.raises(LGMMLError, match="`policy` 'knn' needs the rows of the training queries, and this file"):
            phi.for_new(torch.zeros(1, 4), 1, "knn")
        phi.check()


def test_the_penalty_is_half_the_squares_of_the_queries_asked_for() -> None:
    phi = Phi(3, 2, deviations=True)
    with torch.no_grad():
        phi.deviation.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, -4.0], [9.0, 9.0]]))
    assert float(phi.penalty(torch.tensor([0, 1])).detach()) == pytest.approx(0.5 * (1 + 4 + 9 + 16))
    assert float(Phi(3, 2).penalty(torch.tensor([0]))) == 0.0


def test_projection_leaves_weights_above_zero_alone() -> None:
    phi = Phi(2, 3, mode="per_query")
    values = torch.tensor([[0.5, -0.5, 2.0], [-1.0, 0.0, 0.25]])
    for rows in (None, torch.tensor([0, 1])):
        with torch.no_grad():
            phi.table.weight.copy_(values)
        phi.project_(rows)
        assert phi.table.weight.tolist() == [[0.5, 0.0, 2.0], [0.0, 0.0, 0.25]]


class TestCheck:
    def test_weights_from_zero_on_pass(self) -> None:
        Phi(2, 2, mode="per_query", init=0.0).check()
        Phi(2, 2, init=1e30).check()
        phi = Phi(2, 2, deviations=True, init=1.0)
        with torch.no_grad():
            phi.deviation.weight.copy_(torch.tensor([[-1.0, 5.0], [0.0, 0.0]]))
        phi.check()

    def test_one_bad_weight_is_enough(self) -> None:
        for value, said in [(-0.5, "-0.5"), (math.nan, "nan"), (math.inf, "inf")]:
            phi = Phi(2, 2, mode="per_query")
            with torch.no_grad():
                phi.table.weight[1, 0] = value
            with pytest.raises(LGMMLError, match=f"weights Φ must be finite and at least 0, got {said}$"):
                phi.check()

    def test_a_querys_own_weights_are_base_and_deviation(self) -> None:
        phi = Phi(2, 2, deviations=True, init=1.0)
        with torch.no_grad():
            phi.deviation.weight[1, 0] = -1.5
        with pytest.raises(LGMMLError, match=r"weights Φ must be finite and at least 0, got -0\.5$"):
            phi.check()

    def test_the_sum_of_a_query_must_be_finite_and_that_of_all_need_not(self) -> None:
        phi = Phi(3, 2, mode="per_query", init=0.0)
        with torch.no_grad():
            phi.table.weight[:, 0] = 2e38
        phi.check()
        with torch.no_grad():
            phi.table.weight[1, 1] = 2e38
        with pytest.raises(DivergedError, match=r"weights Φ must have a finite sum, or scores are infinite, got some"):
            phi.check()


def test_columns_are_selected_from_all_rows() -> None:
    phi = Phi(3, 3, mode="per_query", policy="knn", neighbours=2)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        phi.table.weight.copy_(torch.rand(3, 3, generator=g))
    phi.set_summaries(torch.rand(3, 6, generator=g))
    columns, both = torch.tensor([2, 0]), torch.tensor([2, 0, 5, 3])
    small = phi.select(columns)
    assert torch.equal(small.table.weight, phi.table.weight[:, columns])
    for name in ("summaries", "summary_mean", "summary_spread"):
        assert torch.equal(getattr(small, name), getattr(phi, name)[..., both])
    assert small.spec() == {**phi.spec(), "num_metrics": 2}


def test_amortized_rows_are_a_ridge_regression_on_list_summaries() -> None:
    """Against numpy: the row of a new list is the mean row plus what the regression of the training rows predicts."""
    g = torch.Generator().manual_seed(0)
    phi = Phi(9, 2, mode="per_query")
    with torch.no_grad():
        phi.table.weight.copy_(torch.rand((9, 2), generator=g) * 3)
    known, new = torch.randn((9, 4), generator=g), torch.randn((5, 4), generator=g)
    phi.set_summaries(known)
    z = ((known - phi.summary_mean) / phi.summary_spread).clamp(-5, 5).double().numpy()
    z_new = ((new - phi.summary_mean) / phi.summary_spread).clamp(-5, 5).double().numpy()
    rows = phi.table.weight.detach().double().numpy()
    mean = rows.mean(axis=0)
    stacked = np.vstack([z, np.sqrt(10.0 * 4) * np.eye(4)])
    solution = np.linalg.lstsq(stacked, np.vstack([rows - mean, np.zeros((4, 2))]), rcond=None)[0]
    expected = np.maximum(mean + z_new @ solution, 0)
    np.testing.assert_allclose(phi.for_new(new, 5, "amortized").detach().numpy(), expected, rtol=1e-5)
