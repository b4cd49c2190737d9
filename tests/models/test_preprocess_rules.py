"""Smaller promises of preprocessing: defaults, bounds, pieces of large inputs, what is said before and after a fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.models.preprocess import base as preprocess_base
from lgmml_torch.models.preprocess import lists as preprocess_lists
from lgmml_torch.models.preprocess import steps as preprocess_steps
from lgmml_torch.models.preprocess.base import Source
from lgmml_torch.models.preprocess.compose import Chain, Concat, all_views, build_preprocess, list_rank_features
from lgmml_torch.models.preprocess.steps import (
    PCA,
    Clip,
    ListMinMax,
    ListStandardize,
    Norm2,
    Quantile,
    Ramps,
    RemoveConstant,
    SignedLog1p,
    Standardize,
)
from tests.models.test_preprocess import every_case, lists


class TestDefaults:
    def test_of_steps(self) -> None:
        assert Clip().arguments() == {"limit": 5.0}
        assert RemoveConstant().arguments() == {"tolerance": 0.0}
        assert Quantile().arguments() == {"output": "uniform", "max_knots": 1024, "tail": 0.005}
        assert Ramps().arguments() == {"count": 6}
        assert PCA().arguments() == {"components": None}

    def test_of_list_rank_features(self) -> None:
        def expected(knots: int, limit: float) -> Chain:
            views = Concat([Quantile(max_knots=knots), preprocess_steps.ListRank()])
            return Chain([RemoveConstant(), views, RemoveConstant(1e-6), Standardize(), Clip(limit)])

        assert list_rank_features().spec() == expected(1024, 5.0).spec()
        assert list_rank_features(max_knots=64, limit=3.0).spec() == expected(64, 3.0).spec()

    @pytest.mark.parametrize(
        ("options", "given"),
        [
            ({}, (1024, 6, 5.0)),
            ({"max_knots": 9, "ramps": 2, "limit": 1.5}, (9, 2, 1.5)),
            ({"ramps": 0}, (1024, 0, 5.0)),
        ],
    )
    def test_of_all_views(self, options: dict[str, Any], given: tuple[int, int, float]) -> None:
        knots, ramps, limit = given
        views: list[Any] = [Quantile(max_knots=knots), preprocess_steps.ListRank()]
        views.append(Chain([ListStandardize(), Clip(limit)]))
        views += [Ramps(ramps)] if ramps else []
        expected = Chain([RemoveConstant(), Concat(views), RemoveConstant(1e-6), Standardize(), Clip(limit)])
        assert all_views(**options).spec() == expected.spec()

    def test_arguments_may_be_left_out(self) -> None:
        for spec in ({"name": "clip"}, {"name": "clip", "args": None}, {"name": "clip", "args": {}}):
            assert build_preprocess(spec).spec() == Clip().spec()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: all_views(ramps=-1), "`ramps` must be at least 0, got -1"),
        (lambda: Ramps(0), "`count` must be positive, got 0"),
        (lambda: Quantile(max_knots=4.5), "`max_knots` must be a whole number, got 4.5"),
        (lambda: Quantile(tail="thin"), "`tail` must be a number, got 'thin'"),
        (lambda: Quantile(tail=0.0), r"`tail` must lie in \(0, 0.5\), got 0.0"),
        (lambda: PCA(True), "`components` must be a positive whole number, a share .* got True"),
        (lambda: PCA(1.0), r"a share in \(0, 1\) or None, got 1.0"),
        (lambda: PCA(0.0), r"a share in \(0, 1\) or None, got 0.0"),
        (lambda: PCA(-1), "`components` must be a positive whole number, .* got -1"),
        (lambda: PCA("all"), "`components` must be a positive whole number, .* got 'all'"),
    ],
)
def test_bounds_are_named(build: Any, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        build()


def test_what_is_just_within_the_bounds() -> None:
    assert Quantile(max_knots=4).max_knots == 4
    assert Quantile(tail=0.4).tail == 0.4
    assert PCA(1).components == 1
    assert Concat([Clip()]).spec()["args"]["steps"] == [Clip().spec()]
    with pytest.raises(ConfigError, match="must be a mapping with 'name'"):
        build_preprocess(["name", "args"])  # type: ignore[arg-type]


class TestBeforeAndAfter:
    @every_case
    def test_nothing_is_known_before_a_fit(self, make: Any) -> None:
        prep = make()
        assert int(prep.width) == -1
        assert all(getattr(prep, name).shape == (0,) for name in prep.state)
        with pytest.raises(LGMMLError, match="must be fitted before it is used"):
            prep.sources()

    @every_case
    def test_sources_and_widths_agree_after_it(self, make: Any) -> None:
        x, offsets = lists()
        prep = make().fit(x, offsets)
        assert int(prep.width) == prep.num_features_in == 6
        assert len(prep.sources()) == prep.num_features_out == len(prep.origins())
        assert f"6 → {prep.num_features_out} features" in repr(prep)
        assert "not fitted" not in repr(prep).splitlines()[0]

    def test_what_is_printed(self) -> None:
        x, offsets = lists()
        assert repr(Clip(3.0)) == "Clip(limit=3.0, not fitted)"
        assert repr(Clip(3.0).fit(x, offsets)) == "Clip(limit=3.0, 6 → 6 features)"
        assert repr(Chain([])) == "Chain(\n  not fitted\n  (steps): ModuleList()\n)"
        assert repr(Chain([]).fit(x, offsets)).splitlines()[1] == "  6 → 6 features"

    def test_a_failed_fit_forgets_the_one_before(self) -> None:
        x, offsets = lists()
        for prep in (RemoveConstant(), Chain([Clip(), RemoveConstant()]), Chain([RemoveConstant(), Clip()])):
            prep.fit(x, offsets)
            with pytest.raises(LGMMLError, match="must have a feature that varies"):
                prep.fit(torch.ones(100, 6), offsets)
            assert (prep.fitted, int(prep.width)) == (False, -1)
            with pytest.raises(LGMMLError, match="must be fitted before it is used"):
                _ = prep.num_features_out

    def test_offsets_must_fit_the_training_rows(self) -> None:
        x, offsets = lists()
        for prep in (Standardize(), Chain([Standardize()])):
            for fit in (prep.fit, prep.fit_transform):
                with pytest.raises(LGMMLError, match="`offsets` must end at the number of rows, 100, got 99"):
                    fit(x, offsets.clamp_max(99))
                with pytest.raises(LGMMLError, match=r"`features` must have shape \(\*, \*\), got \(6,\)"):
                    fit(x[0], torch.tensor([0, 6]))

    def test_a_single_value_is_enough(self) -> None:
        x, offsets = torch.full((1, 1), 3.0), torch.tensor([0, 1])
        assert Standardize().fit_transform(x, offsets).tolist() == [[0.0]]
        assert Chain([Clip(2.0)]).fit_transform(x, offsets).tolist() == [[2.0]]

    def test_columns_are_called_by_feature_and_view(self) -> None:
        said = [str(Source(*parts)) for parts in ((0, ""), (3, "log"), (-1, "component 2"), (0, "log"))]
        assert said == ["feature 1", "feature 4, log", "component 2", "feature 1, log"]


class Counted(Clip):
    """Remembers how many rows and lists went through at once."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.seen: list[tuple[int, list[int]]] = []

    def _transform(self, features: Tensor, offsets: Tensor) -> Tensor:
        self.seen.append((len(features), offsets.tolist()))
        return super()._transform(features, offsets)


class TestPieces:
    SIZES = (5, 8, 4, 10, 30, 0, 13, 1)

    def fitted(self) -> tuple[Counted, Tensor, Tensor]:
        offsets = torch.tensor([0, *torch.tensor(self.SIZES).cumsum(0).tolist()])
        x = torch.arange(float(offsets[-1]))[:, None]
        return Counted().fit(x, offsets), x, offsets

    def test_whole_lists_up_to_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prep, x, offsets = self.fitted()
        monkeypatch.setattr(preprocess_base, "CHUNK_ROWS", 13)
        assert torch.equal(prep(x, offsets), x)
        assert [rows for rows, _ in prep.seen] == [13, 4, 10, 30, 13, 1]
        assert [bounds for _, bounds in prep.seen] == [[0, 5, 13], [0, 4], [0, 10], [0, 30], [0, 0, 13], [0, 1]]

    def test_small_inputs_and_those_with_slopes_go_through_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prep, x, offsets = self.fitted()
        prep(x, offsets)
        monkeypatch.setattr(preprocess_base, "CHUNK_ROWS", len(x))
        prep(x, offsets)
        assert [rows for rows, _ in prep.seen] == [71, 71]
        monkeypatch.setattr(preprocess_base, "CHUNK_ROWS", 13)
        traced = x.clone().requires_grad_()
        found = prep(traced, offsets)
        assert found.requires_grad
        assert [rows for rows, _ in prep.seen] == [71, 71, 71]
        with torch.no_grad():
            prep(traced, offsets)
        assert len(prep.seen) == 9

    def test_the_precision_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prep, x, offsets = self.fitted()
        monkeypatch.setattr(preprocess_base, "CHUNK_ROWS", 13)
        assert prep(x.double(), offsets).dtype == torch.float64


class TestSteps:
    def test_scales_that_leave_the_precision_count_as_one(self) -> None:
        x, offsets = torch.tensor([[3e38], [-3e38], [0.0]]), torch.tensor([0, 3])
        norm = Norm2().fit(x, offsets)
        assert (norm.norm.dtype, norm.norm.tolist()) == (torch.float32, [1.0])
        assert torch.equal(norm(x, offsets), x)
        step = Standardize().fit(torch.tensor([[1.0], [1.5]]), torch.tensor([0, 2]))
        assert (step.mean.tolist(), step.deviation.tolist()) == ([1.25], [0.25])
        assert {step.mean.dtype, step.deviation.dtype} == {torch.float32}

    def test_a_deviation_at_the_tolerance_is_not_above_it(self) -> None:
        x = torch.tensor([[0.0, 0.0, 5.0], [1.0, 2.0, 5.0]])  # deviations ½, 1 and 0
        for tolerance, kept in ((0.0, [0, 1]), (0.25, [0, 1]), (0.5, [1])):
            assert RemoveConstant(tolerance).fit(x, torch.tensor([0, 2])).kept.tolist() == kept

    def test_ramps_of_large_sets_are_taken_from_every_so_many_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(95, 2, generator=torch.Generator().manual_seed(0))
        monkeypatch.setattr(preprocess_steps, "RAMP_ROWS", 30)
        some = Ramps(4).fit(x, torch.tensor([0, 95]))
        monkeypatch.undo()
        expected, whole = Ramps(4).fit(x[::3], torch.tensor([0, 32])), Ramps(4).fit(x, torch.tensor([0, 95]))
        assert torch.equal(some.low, expected.low)
        assert torch.equal(some.span, expected.span)
        assert not torch.equal(some.low, whole.low)
        monkeypatch.setattr(preprocess_steps, "RAMP_ROWS", 60)
        assert torch.equal(Ramps(4).fit(x, torch.tensor([0, 95])).low, whole.low)

    def test_ramps_start_at_zero_and_end_at_one(self) -> None:
        ramps = Ramps(2).fit(torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 5]))
        found = ramps(torch.tensor([[-9.0], [1.0], [2.5], [9.0]]), torch.tensor([0, 4]))
        assert found.tolist() == [[0.0, 0.0], [0.5, 0.0], [1.0, 0.25], [1.0, 1.0]]
        assert [str(source) for source in ramps.sources()] == ["feature 1, ramp 1", "feature 1, ramp 2"]

    def test_lists_that_vary_too_little_for_a_deviation_are_level(self) -> None:
        x = torch.tensor([[0.0], [1e-200], [3.0], [5.0]], dtype=torch.float64)
        found = ListStandardize().fit_transform(x, torch.tensor([0, 2, 4]))
        assert found.flatten().tolist() == [0.0, 0.0, -1.0, 1.0]

    def test_missing_values_stay_missing_and_spare_other_lists(self) -> None:
        x = torch.tensor([[1.0], [2.0], [4.0], [4.0], [8.0]])
        offsets = torch.tensor([0, 2, 4, 5])
        for make in (ListMinMax, ListStandardize):
            prep = make().fit(x, offsets)
            holes = x.clone()
            holes[0] = math.nan
            found = prep(holes, offsets)
            assert found[0].isnan()
            assert torch.equal(found[2:], prep(x, offsets)[2:])

    def test_lists_far_from_zero_are_measured_by_their_own_ends(self) -> None:
        x = torch.tensor([[10.0], [12.0], [14.0], [-7.0], [-5.0]])
        offsets = torch.tensor([0, 3, 5])
        assert ListMinMax().fit_transform(x, offsets).flatten().tolist() == [0.0, 0.5, 1.0, 0.0, 1.0]
        found = ListStandardize().fit_transform(x, offsets).flatten()
        torch.testing.assert_close(found, torch.tensor([-(1.5**0.5), 0.0, 1.5**0.5, -1.0, 1.0]))


class TestPCA:
    def corners(self, *sides: float) -> Tensor:
        """All corners of a box: variances are the squares of its half sides."""
        grid = torch.cartesian_prod(*(torch.tensor([-side, side], dtype=torch.float64) for side in sides))
        return grid.reshape(-1, len(sides)) + 3

    @pytest.mark.parametrize("scale", [1.0, 0.01])
    @pytest.mark.parametrize(("share", "count"), [(0.5, 1), (0.8, 1), (0.81, 2), (0.9999, 2)])
    def test_as_many_as_keep_the_share(self, scale: float, share: float, count: int) -> None:
        x = self.corners(2.0, 1.0)
        if scale != 1.0 and share == 0.8:
            share = 0.79  # exact only where the squares are
        pca = PCA(share).fit(3 + scale * (x - 3), torch.tensor([0, 4]))
        assert pca.num_features_out == count

    def test_directions_are_ordered_signed_and_of_length_one(self) -> None:
        x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1)).double()
        x = x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).double() + 7
        turned = x @ torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(2)).double())[0]
        pca = PCA().fit(turned, torch.tensor([0, 60]))
        torch.testing.assert_close(pca.directions.norm(dim=0), torch.ones(6).double())
        found = pca(turned, torch.tensor([0, 60]))
        torch.testing.assert_close(found.mean(0), torch.zeros(6).double(), atol=1e-9, rtol=0)
        variances = found.var(0, unbiased=False)
        assert (variances.diff() < 0).all()
        largest = pca.directions.gather(0, pca.directions.abs().argmax(0, keepdim=True))
        assert (largest > 0).all()
        assert torch.equal(PCA(6).fit(turned, torch.tensor([0, 60])).directions, pca.directions)

    def test_components_belong_to_features_by_their_squares(self) -> None:
        pca = PCA().fit(self.corners(2.0, 1.0), torch.tensor([0, 4]))
        pca.directions = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
        expected = torch.tensor([[0.36, 0.64], [0.64, 0.36]], dtype=torch.float64)
        torch.testing.assert_close(pca.origins(), expected)
        assert [str(source) for source in pca.sources()] == ["component 1", "component 2"]

    def test_several_blocks_of_rows_have_one_covariance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = self.corners(3.0, 2.0, 1.0)
        whole = PCA(2).fit(x, torch.tensor([0, 8]))
        monkeypatch.setattr(preprocess_lists, "row_blocks", lambda rows, most: rows.split(3))
        found = PCA(2).fit(x, torch.tensor([0, 8]))
        torch.testing.assert_close(found.directions, whole.directions)


def test_origins_follow_a_chain_of_mixing_steps() -> None:
    x, offsets = lists()
    chain = Chain([RemoveConstant(), SignedLog1p(), PCA(2), Standardize()]).fit(x, offsets)
    first, mixed = chain.steps[0].origins(), chain.steps[2].origins()
    torch.testing.assert_close(chain.origins(), mixed @ first)
    single = Chain([PCA(2)]).fit(x, offsets)
    torch.testing.assert_close(single.origins(), single.steps[0].origins())
