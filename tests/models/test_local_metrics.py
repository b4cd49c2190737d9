"""Banks: distances and their slopes, what is prepared for them and kept, descriptions, and what is refused."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.functional import distance
from lgmml_torch.functional.distance import local_distances
from lgmml_torch.functional.score import KERNELS
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock

D = 5


def mixed_bank(norm: str = "mahalanobis", dtype: torch.dtype = torch.float32) -> LocalMetrics:
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=dtype)

    full = MetricBlock(rand(3, D), rand(3, D, D), scales=rand(3).abs() + 0.1, quality=rand(3))
    support = torch.tensor([[0, 4], [2, 1]])
    small = MetricBlock(rand(2, 2), rand(2, 2, 2), support=support, scales=rand(2).abs() + 0.1)
    return LocalMetrics([full, small], num_features=D, norm=norm)


def naive(bank: LocalMetrics, x: torch.Tensor) -> torch.Tensor:
    columns = []
    for block in bank.iter_blocks():
        for r in range(block.num_metrics):
            seen = x if block.is_full else x[:, block.support[r]]
            v = (seen - block.anchors[r]).double()
            m = block.metrics[r].double()
            m = m if bank.norm == "mahalanobis" else m @ m
            columns.append(torch.einsum("nd,de,ne->n", v, m, v).clamp_min(0).sqrt() / block.scales[r])
    return torch.stack(columns, dim=1)


def test_mixed_blocks_equal_the_loop() -> None:
    for norm in ["mahalanobis", "trace"]:
        for dtype in [torch.float32, torch.float64]:
            bank = mixed_bank(norm, dtype)
            x = torch.randn(20, D, generator=torch.Generator().manual_seed(1), dtype=dtype)
            tolerance = 1e-4 if dtype == torch.float32 else 1e-10
            assert torch.allclose(bank(x).double(), naive(bank, x), atol=tolerance, rtol=tolerance)
            out = torch.empty(20, 5, dtype=dtype)
            assert bank(x, out=out) is out
            assert bank(x[:0]).shape == (0, 5)


def test_weighted_sums_equal_the_matrix_times_the_weights() -> None:
    for norm in ["mahalanobis", "trace"]:
        for kernel in ["paper", "distance", "rbf"]:
            for n in [0, 1, 3000]:
                bank = mixed_bank(norm, torch.float64)
                x = torch.randn(n, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                x[:1] = bank.iter_blocks()[0].anchors[0]
                weights = torch.tensor([0.5, 0.0, 2.0, 1.0, 3.0], dtype=torch.float64)
                expected = (KERNELS[kernel](naive(bank, x)) * weights).sum(dim=1)
                torch.testing.assert_close(bank.weighted_sum(x, weights, kernel), expected)
                torch.testing.assert_close(
                    bank.float().weighted_sum(x.float(), weights, kernel).double(), expected, atol=1e-4, rtol=1e-4
                )


def test_metrics_are_derived_and_positive() -> None:
    for block in mixed_bank().iter_blocks():
        assert torch.allclose(block.metrics, block.factors @ block.factors.mT)
        assert (torch.linalg.eigvalsh(block.metrics) > -1e-5).all()


def test_everything_is_a_buffer_and_nothing_a_parameter() -> None:
    bank = mixed_bank()
    assert not list(bank.parameters())
    assert {"support", "anchors", "factors", "scales", "quality"} == {n.split(".")[-1] for n, _ in bank.named_buffers()}


def test_spec_and_state_restore_the_bank() -> None:
    bank = mixed_bank("trace")
    again = LocalMetrics.from_spec(bank.spec())
    again.load_state_dict(bank.state_dict())
    x = torch.randn(4, D)
    assert torch.equal(again(x), bank(x))


def test_select_keeps_columns() -> None:
    bank = mixed_bank()
    x = torch.randn(6, D, generator=torch.Generator().manual_seed(2))
    chosen = torch.tensor([1, 3])
    assert torch.allclose(bank.select(chosen)(x), bank(x)[:, chosen], atol=1e-5)


def test_set_scales() -> None:
    bank = mixed_bank()
    x = torch.randn(6, D)
    before = bank(x)
    bank.set_scales(bank.scales * 2)
    assert torch.allclose(bank(x), before / 2)


def test_errors_are_named() -> None:
    for build, message in [
        (lambda: LocalMetrics([], num_features=3), "`blocks` must hold at least one block"),
        (
            lambda: LocalMetrics([MetricBlock(torch.zeros(1, 2), torch.eye(2)[None])], num_features=3),
            "3 features, got 2",
        ),
        (lambda: MetricBlock(torch.zeros(2, 2), torch.eye(2)[None]), r"`factors` must have shape \(2, 2, \*\)"),
        (lambda: MetricBlock(torch.full((1, 1), float("nan")), torch.ones(1, 1, 1)), "`anchors` must be finite"),
        (lambda: mixed_bank()(torch.zeros(1, 4)), r"`features` must have shape \(\*, 5\), got \(1, 4\)"),
        (lambda: mixed_bank("manhattan"), "`norm` must be one of"),
        (lambda: mixed_bank().set_scales(torch.ones(2)), r"`scales` must have shape \(5,\)"),
        (
            lambda: LocalMetrics(
                [MetricBlock(torch.zeros(1, 1), torch.ones(1, 1, 1), support=torch.tensor([[7]]))], num_features=3
            ),
            "`support` must name features below 3, got 7",
        ),
    ]:
        with pytest.raises(LGMMLError, match=message):
            build()


def test_traced_distances_are_the_distances_and_have_their_slopes() -> None:
    for norm in ["mahalanobis", "trace"]:
        g = torch.Generator().manual_seed(0)

        def draw(*shape: int, g: torch.Generator = g) -> torch.Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        support = torch.tensor([[0, 3], [2, 1]])
        blocks = [
            MetricBlock(draw(3, 5), draw(3, 5, 2), scales=draw(3).abs() + 0.5),
            MetricBlock(draw(2, 2), draw(2, 2, 2), support=support, scales=draw(2).abs() + 0.5),
        ]
        bank = LocalMetrics(blocks, num_features=5, norm=norm)
        x = draw(6, 5)
        torch.testing.assert_close(bank.traced(x), bank(x), rtol=1e-9, atol=1e-9)
        bank.train_metrics_()
        assert bank.trained
        torch.autograd.gradcheck(bank.traced, (x.clone().requires_grad_(),))
        bank.traced(x).sum().backward()
        for block in bank.iter_blocks():
            assert all(bool(torch.isfinite(p.grad).all()) for p in block.parameters())


def test_metrics_become_parameters_and_buffers_again_under_the_same_names() -> None:
    bank = LocalMetrics([MetricBlock(torch.rand(2, 3), torch.rand(2, 3, 2))], num_features=3)
    before, x = {name: value.clone() for name, value in bank.state_dict().items()}, torch.rand(4, 3)
    expected = bank(x)
    bank.train_metrics_()
    trained = {f"blocks.0.{name}" for name in ("anchors", "factors", "scales", "zoom")}
    assert {name for name, _ in bank.named_parameters()} == trained
    assert set(bank.state_dict()) == {*before, "blocks.0.zoom"}
    assert torch.equal(bank(x), expected)
    with torch.no_grad():
        bank.iter_blocks()[0].factors.mul_(2)
    torch.testing.assert_close(bank(x), 2 * expected)  # what is kept for tiles follows the parameters
    bank.load_state_dict({**before, "blocks.0.zoom": torch.zeros(3)})
    bank.train_metrics_(False)
    assert sorted(bank.state_dict()) == sorted(before)
    assert not bank.trained
    assert torch.equal(bank(x), expected)


def test_zoom_strengthens_a_feature_in_all_metrics_and_ends_up_in_the_factors() -> None:
    bank = LocalMetrics([MetricBlock(torch.rand(2, 3), torch.rand(2, 3, 2))], num_features=3)
    bank.train_metrics_()
    (block,), x = bank.iter_blocks(), torch.rand(4, 3)
    with torch.no_grad():
        block.zoom.copy_(torch.tensor([0.0, -0.2, 0.4]))
    by_hand = MetricBlock(block.anchors.detach(), block.factors.detach() * torch.tensor([1.0, 0.0, 3.0])[:, None])
    expected = by_hand.distances(x)
    torch.testing.assert_close(bank(x), expected)
    torch.testing.assert_close(bank.traced(x), expected)
    again = LocalMetrics.from_spec(bank.spec())  # as a checkpoint of a run that goes on is read
    again.load_state_dict(bank.state_dict())
    torch.testing.assert_close(again(x), expected)
    for finished in (bank, again):
        finished.train_metrics_(False)
        assert "blocks.0.zoom" not in finished.state_dict()
        assert "zoomed" not in finished.spec()["blocks"][0]
        torch.testing.assert_close(finished(x), expected)


def test_a_document_on_its_anchor_has_a_finite_slope() -> None:
    bank = LocalMetrics([MetricBlock(torch.ones(1, 2), torch.eye(2)[None])], num_features=2)
    x = torch.ones(1, 2, requires_grad=True)
    bank.traced(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(1, 2))


def block_of(support: list[int]) -> MetricBlock:
    width = len(support)
    return MetricBlock(torch.zeros(1, width), torch.ones(1, width, 1), support=torch.tensor([support]))


def test_more_errors_are_named() -> None:
    for build, message in [
        (lambda: MetricBlock(torch.zeros(3), torch.ones(1, 3, 1)), r"`anchors` must have shape \(\*, \*\), got \(3,\)"),
        (
            lambda: MetricBlock(torch.zeros(1, 2), torch.ones(1, 2, 1), support=torch.tensor([[1]])),
            r"`support` must have shape \(1, 2\), got \(1, 1\)",
        ),
        (
            lambda: MetricBlock(torch.zeros(1, 2), torch.ones(1, 2, 1), scales=torch.ones(2)),
            r"`scales` must have shape \(1,\), got \(2,\)",
        ),
        (
            lambda: MetricBlock(torch.zeros(1, 2), torch.ones(1, 2, 1), quality=torch.ones(2)),
            r"`quality` must have shape \(1,\), got \(2,\)",
        ),
        (lambda: MetricBlock(torch.zeros(1, 2), torch.full((1, 2, 1), torch.inf)), "`factors` must be finite, got inf"),
        (
            lambda: MetricBlock(torch.zeros(1, 2), torch.ones(1, 2, 1), scales=torch.tensor([torch.nan])),
            "`scales` must be finite, got nan",
        ),
        (lambda: LocalMetrics([block_of([-1, 2])], num_features=3), "`support` must name features below 3"),
        (lambda: LocalMetrics([block_of([0, 3])], num_features=3), "`support` must name features below 3, got 3"),
        (lambda: mixed_bank().traced(torch.zeros(1, 4)), r"`features` must have shape \(\*, 5\), got \(1, 4\)"),
        (
            lambda: mixed_bank().weighted_sum(torch.zeros(1, 4), torch.ones(5), "paper"),
            r"`features` must have shape \(\*, 5\), got \(1, 4\)",
        ),
        (
            lambda: mixed_bank().weighted_sum(torch.zeros(1, 5), torch.ones(4), "paper"),
            r"`weights` must have shape \(5,\), got \(4,\)",
        ),
    ]:
        with pytest.raises(LGMMLError, match=message):
            build()


def test_the_first_and_the_last_feature_may_be_looked_at() -> None:
    assert LocalMetrics([block_of([0, 2])], num_features=3).num_metrics == 1


def test_scales_below_the_least_are_raised_to_it() -> None:
    bank = mixed_bank()
    bank.set_scales(torch.tensor([-1.0, 0.0, 0.7, 5e-5, 1.5e-4]))
    bank.project_()
    torch.testing.assert_close(bank.scales, torch.tensor([1e-4, 1e-4, 0.7, 1e-4, 1.5e-4]))


def test_selected_columns_keep_norm_scales_and_quality() -> None:
    for norm in ["mahalanobis", "trace"]:
        for columns in [[0], [2], [3], [4], [0, 2, 3, 4], [2, 3], [0, 1, 2]]:
            bank = mixed_bank(norm)
            x = torch.randn(6, D, generator=torch.Generator().manual_seed(2))
            chosen = torch.tensor(columns)
            small = bank.select(chosen)
            torch.testing.assert_close(small(x), bank(x)[:, chosen])
            assert torch.equal(small.scales, bank.scales[chosen])
            torch.testing.assert_close(small.quality, bank.quality[chosen], equal_nan=True)
            assert (small.norm, small.num_features) == (norm, D)


def test_a_document_on_its_anchor_is_a_millionth_away_where_slopes_are_wanted() -> None:
    for full in [True, False]:
        support = None if full else torch.tensor([[1, 0]])
        bank = LocalMetrics([MetricBlock(torch.ones(1, 2), torch.eye(2)[None], support=support)], num_features=2)
        x = torch.ones(1, 2, requires_grad=True)
        found = bank.traced(x)
        assert found.item() == pytest.approx(1e-6)
        found.sum().backward()
        assert torch.equal(x.grad, torch.zeros(1, 2))
        assert bank(x.detach()).item() == 0


def test_zoom_goes_on_from_where_it_was() -> None:
    bank = LocalMetrics([MetricBlock(torch.rand(2, 3), torch.rand(2, 3, 2)), block_of([1])], num_features=3)
    bank.train_metrics_()
    full, small = bank.iter_blocks()
    assert full.zoom.tolist() == [0.0, 0.0, 0.0]
    assert small.zoom is None
    with torch.no_grad():
        full.zoom.copy_(torch.tensor([0.1, 0.2, 0.3]))
    bank.train_metrics_()  # as a run does that goes on from a checkpoint
    assert full.zoom.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert isinstance(full.zoom, torch.nn.Parameter)


def test_the_description_says_whether_metrics_are_trained() -> None:
    bank = mixed_bank()
    assert "trained" not in bank.spec()
    assert all("zoomed" not in block for block in bank.spec()["blocks"])
    bank.train_metrics_()
    spec = bank.spec()
    assert spec["trained"] is True
    assert [block.get("zoomed") for block in spec["blocks"]] == [True, None]
    assert [block["full"] for block in spec["blocks"]] == [True, False]
    bank.train_metrics_(False)
    assert "trained" not in bank.spec()


def test_a_description_gives_a_bank_of_its_shapes_and_precision() -> None:
    for dtype in [torch.float32, torch.float64]:
        bank = mixed_bank()
        bank.train_metrics_()
        again = LocalMetrics.from_spec(bank.spec()).to(dtype)
        for block, other in zip(bank.iter_blocks(), again.iter_blocks(), strict=True):
            assert block.factors.shape == other.factors.shape
            assert {other.anchors.dtype, other.factors.dtype, other.scales.dtype} == {dtype}
            assert other.zoom is None or other.zoom.dtype == dtype
            assert block.is_full == other.is_full
        assert LocalMetrics.from_spec(bank.spec()).scales.dtype == torch.float32
        single = LocalMetrics([block_of([0])], num_features=1)
        assert LocalMetrics.from_spec(single.spec()).num_features == 1


def test_distances_are_written_where_asked() -> None:
    bank = mixed_bank()
    x = torch.randn(4, D, generator=torch.Generator().manual_seed(3))
    block = bank.iter_blocks()[1]
    out = torch.full((4, 2), torch.nan)
    assert block.distances(x, out=out) is out
    assert torch.equal(out, bank(x)[:, 3:])


def block(count: int = 4, dim: int = 8, seed: int = 0) -> tuple[MetricBlock, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(300, dim, generator=g)
    return MetricBlock(
        x[:count].clone(), torch.randn(count, dim, dim, generator=g), scales=torch.arange(1, count + 1)
    ), x


@pytest.mark.parametrize("norm", ["mahalanobis", "trace"])
@pytest.mark.parametrize("many", [10, 10_000])
def test_distances_are_divided_by_the_scales(norm: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "MANY_ROWS", many)
    metrics, x = block()
    expected = local_distances(x.double(), metrics.anchors, metrics.factors, norm=norm) / metrics.scales
    found = metrics.distances(x, norm=norm)
    assert ((found - expected).abs() <= 1e-4 * expected.median(dim=0).values).all()
    assert (found.diagonal() == 0).all()


def test_changed_metrics_change_the_distances() -> None:
    for change in ["in place", "load", "replace", "float64"]:
        metrics, x = block()
        other, _ = block(seed=1)
        metrics.distances(x)
        if change == "in place":
            metrics.factors.copy_(other.factors)
            metrics.anchors.copy_(other.anchors)
        elif change == "load":
            metrics.load_state_dict(other.state_dict())
        elif change == "replace":
            metrics.factors, metrics.anchors = other.factors, other.anchors
        else:
            metrics, x, other = metrics.double(), x.double(), deepcopy(metrics).double()
        torch.testing.assert_close(metrics.distances(x), other.distances(x))


def test_blocks_can_be_copied_and_pickled_after_use() -> None:
    metrics, x = block()
    bank = LocalMetrics([metrics], num_features=8)
    expected = bank(x)
    assert torch.equal(pickle.loads(pickle.dumps(bank))(x), expected)
    assert torch.equal(deepcopy(bank)(x), expected)


def test_models_used_in_inference_mode_work_outside_it() -> None:
    with torch.inference_mode():
        metrics, x = block()
        inside = metrics.distances(x)
    assert torch.equal(metrics.distances(x.clone()), inside.clone())


def test_features_that_need_gradients_give_distances_without() -> None:
    metrics, x = block()
    assert not metrics.distances(x.requires_grad_()).requires_grad


def by_hand(metrics: MetricBlock, x: torch.Tensor) -> list[list[float]]:
    pairs = zip(metrics.anchors, metrics.support, strict=True)
    columns = [((x[:, own] - anchor) ** 2).sum(1).sqrt() for anchor, own in pairs]
    return torch.stack(columns, dim=1).tolist()


def test_spectra_are_relative_to_each_metric() -> None:
    factors = torch.stack([torch.diag(torch.tensor([1.0, 2.0])), torch.diag(torch.tensor([10.0, 10.0]))])
    spectra, conditions = LocalMetrics([MetricBlock(torch.zeros(2, 2), factors)], num_features=2).spectra()
    torch.testing.assert_close(spectra, torch.tensor([1.0, 0.25, 1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(conditions, torch.tensor([4.0, 1.0], dtype=torch.float64))
