"""Smaller promises of preprocessing: defaults, bounds, pieces of large inputs, what is said before and after a fit."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.models.preprocess.base import Source
from lgmml_torch.models.preprocess.compose import Chain, Concat, all_views, build_preprocess, list_rank_features
from lgmml_torch.models.preprocess.steps import (
    PCA,
    Clip,
    KeepColumns,
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


def test_bounds_are_named() -> None:
    for build, message in [
        (lambda: all_views(ramps=-1), "`ramps` must be at least 0, got -1"),
        (lambda: all_views(max_columns=0), "`max_columns` must be positive, got 0"),
        (lambda: KeepColumns([]), r"`columns` must name at least one feature, counted from 0, got \[\]"),
        (lambda: KeepColumns([3, -1]), r"`columns` must name at least one feature, .* got \[3, -1\]"),
        (lambda: Ramps(0), "`count` must be positive, got 0"),
        (lambda: Quantile(max_knots=4.5), "`max_knots` must be a whole number, got 4.5"),
        (lambda: Quantile(tail="thin"), "`tail` must be a number, got 'thin'"),
        (lambda: Quantile(tail=0.0), r"`tail` must lie in \(0, 0.5\), got 0.0"),
        (lambda: PCA(True), "`components` must be a positive whole number, a share .* got True"),
        (lambda: PCA(1.0), r"a share in \(0, 1\) or None, got 1.0"),
        (lambda: PCA(0.0), r"a share in \(0, 1\) or None, got 0.0"),
        (lambda: PCA(-1), "`components` must be a positive whole number, .* got -1"),
        (lambda: PCA("all"), "`components` must be a positive whole number, .* got 'all'"),
    ]:
        with pytest.raises(LGMMLError, match=message):
            build()


def test_quantiles_of_ready_made_views_have_the_knots_that_were_asked_for() -> None:
    values = torch.arange(100.0).reshape(-1, 1)
    for make in (list_rank_features, all_views):
        view = make(max_knots=4)
        view.fit(values, torch.tensor([0, 50, 100]))
        assert '"max_knots": 4' in json.dumps(view.spec())


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

    def test_as_many_as_keep_the_share(self) -> None:
        for scale in [1.0, 0.01]:
            for share, count in [(0.5, 1), (0.8, 1), (0.81, 2), (0.9999, 2)]:
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


def test_origins_follow_a_chain_of_mixing_steps() -> None:
    x, offsets = lists()
    chain = Chain([RemoveConstant(), SignedLog1p(), PCA(2), Standardize()]).fit(x, offsets)
    first, mixed = chain.steps[0].origins(), chain.steps[2].origins()
    torch.testing.assert_close(chain.origins(), mixed @ first)
    single = Chain([PCA(2)]).fit(x, offsets)
    torch.testing.assert_close(single.origins(), single.steps[0].origins())
