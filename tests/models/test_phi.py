from __future__ import annotations

import itertools

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
