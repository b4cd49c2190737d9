from __future__ import annotations

import copy
import io
import json

import numpy as np
import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.models.preprocess import base as preprocess_base
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import (
    PREPROCESS_STEPS,
    Chain,
    Concat,
    all_views,
    build_preprocess,
    list_rank_features,
)
from lgmml_torch.models.preprocess.steps import (
    PCA,
    Clip,
    KeepColumns,
    ListMinMax,
    ListRank,
    ListStandardize,
    Norm2,
    Quantile,
    Ramps,
    RemoveConstant,
    SignedLog1p,
    Standardize,
)
from lgmml_torch.segments import offsets_from_sizes
from tests.reference import preprocess as reference

CASES = {
    "norm2": Norm2,
    "standardize": Standardize,
    "signed_log1p": SignedLog1p,
    "clip": lambda: Clip(0.7),
    "remove_constant": RemoveConstant,
    "quantile": Quantile,
    "rank_gauss": lambda: Quantile("normal", max_knots=64, tail=0.01),
    "list_rank": ListRank,
    "list_min_max": ListMinMax,
    "list_standardize": ListStandardize,
    "pca": lambda: PCA(3),
    "pca_share": lambda: PCA(0.9),
    "empty_chain": lambda: Chain([]),
    "chain": lambda: Chain([SignedLog1p(), Standardize(), Clip()]),
    "concat": lambda: Concat([Quantile(), ListRank(), Chain([RemoveConstant(), PCA()])]),
    "list_rank_features": list_rank_features,
    "ramps": lambda: Ramps(4),
    "kept columns": lambda: KeepColumns([1]),
    "all_views": all_views,
}
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def lists(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Columns: raw scale, ties, constant, constant within lists, negative, mostly zero; a list of one, an empty one."""
    rng = np.random.default_rng(seed)
    sizes = np.array([1, 12, 0, 30, 2, 55])
    n = sizes.sum()
    x = np.stack(
        [
            np.exp(6 * rng.normal(size=n)),
            rng.integers(0, 4, n),
            np.full(n, 7.3),
            np.repeat(rng.normal(size=len(sizes)), sizes),
            -rng.random(n),
            rng.normal(size=n) * (rng.random(n) < 0.2),
        ],
        axis=1,
    ).astype(np.float32)
    return torch.from_numpy(x).to(dtype), offsets_from_sizes(torch.from_numpy(sizes))


def test_every_step_has_a_case() -> None:
    assert {make().name for make in CASES.values()} == set(PREPROCESS_STEPS)


def test_steps_match_their_definitions() -> None:
    for dtype in (torch.float32, torch.float64):
        (x, offsets), (new, _) = lists(0, dtype), lists(1, dtype)
        a, b, bounds = x.double().numpy(), new.double().numpy(), offsets.numpy()
        deviation = np.where(np.ptp(a, axis=0) > 0, a.std(0), 1)
        expected = {
            Norm2(): b / np.sqrt((a**2).sum(0)),
            Standardize(): (b - a.mean(0)) / deviation,
            SignedLog1p(): np.sign(b) * np.log(1 + np.abs(b)),
            Clip(0.5): np.clip(b, -0.5, 0.5),
            RemoveConstant(): b[:, [0, 1, 3, 4, 5]],
            KeepColumns([4, 1, 4]): b[:, [1, 4]],
            Quantile(): reference.quantiles(a, b),
            Ramps(3): reference.ramps(a, b, 3),
            Ramps(7): reference.ramps(a, b, 7),
            ListRank(): reference.per_list(b, bounds, reference.rank_percentile),
            ListMinMax(): reference.per_list(b, bounds, reference.min_max),
            ListStandardize(): reference.per_list(b, bounds, reference.standard),
        }
        for step, want in expected.items():
            got = step.fit(x, offsets)(new, offsets)
            assert got.dtype == dtype
            assert got.shape == (len(new), step.num_features_out)
            np.testing.assert_allclose(got.double().numpy(), want, rtol=2e-5, atol=2e-6, err_msg=step.name)


def test_rank_gauss_has_normal_quantiles_at_the_training_values() -> None:
    x, offsets = torch.arange(99.0)[:, None], torch.tensor([0, 99])
    z = Quantile("normal", tail=0.1).fit_transform(x, offsets)[:, 0]
    u = (torch.arange(99.0) + 0.5) / 99
    torch.testing.assert_close(z, torch.special.ndtri(u.clamp(0.1, 0.9)), atol=1e-5, rtol=1e-5)
    assert z[49] == 0


def test_ramps_keep_within_a_number_of_columns() -> None:
    """Three views of each feature come first; then as many ramps as there is room for."""
    x, offsets = torch.rand(300, 20), torch.tensor([0, 100, 300])
    for limit, ramps in ((None, 6), (500, 6), (179, 5), (100, 2), (80, 1), (79, 0), (20, 0), (1, 0)):
        views = all_views(max_columns=limit).fit(x, offsets)
        assert views.num_features_out == (3 + ramps) * 20
        again = build_preprocess(json.loads(json.dumps(views.spec())))
        again.load_state_dict(views.state_dict())
        assert again(x, offsets).equal(views(x, offsets))


def test_ramps_of_a_feature_add_up_to_where_it_lies() -> None:
    """One for every ramp passed, and the rest of the way along the one it is on; each ramp knows its feature."""
    x, offsets = lists()
    ramps = Ramps(5).fit(x, offsets)
    found = ramps(x, offsets)
    sources = ramps.sources()
    assert [source.feature for source in sources] == ramps.origin.tolist()
    for feature in set(ramps.origin.tolist()):
        own = found[:, ramps.origin == feature]
        numbers = [int(source.view.removeprefix("ramp ")) for source in sources if source.feature == feature]
        assert numbers == list(range(1, own.shape[1] + 1))
        assert own.shape[1] <= 5
        order = x[:, feature].argsort()
        assert (own.sum(1)[order].diff() >= 0).all()
        assert (own.min(), own.max()) == (0, 1)
    assert 2 not in ramps.origin.tolist()  # the constant one has none
    with pytest.raises(LGMMLError, match="must have a feature that varies, got 1 that do not"):
        Ramps().fit(x[:, 2:3], offsets)


def test_pca_projects_on_the_leading_directions(generator: torch.Generator) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(200, 3, generator=generator, dtype=torch.float64) @ torch.diag(
            torch.tensor([5.0, 2.0, 0.1]).double()
        )
        rotation = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
        x, offsets = (x @ rotation + 40).to(dtype), torch.tensor([0, 200])
        pca = PCA().fit(x, offsets)
        z = pca(x, offsets)
        variances = torch.linalg.eigvalsh(torch.cov(x.double().mT, correction=0)).flip(0)
        torch.testing.assert_close(torch.cov(z.double().mT, correction=0), variances.diag(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(PCA(2).fit_transform(x, offsets), z[:, :2])
        largest = pca.directions.abs().argmax(0)
        assert (pca.directions[largest, torch.arange(3)] > 0).all()
        share = (variances.cumsum(0) / variances.sum())[0]
        assert PCA(float(share) - 0.01).fit(x, offsets).num_features_out == 1
        assert PCA(float(share) + 0.01).fit(x, offsets).num_features_out == 2


def test_list_rank_features_follow_the_recipe() -> None:
    for dtype in (torch.float32, torch.float64):
        for seed in range(3):
            (x, offsets), (new, _) = lists(seed, dtype), lists(seed + 10, dtype)
            prep = list_rank_features()
            got_train, got_new = prep.fit_transform(x, offsets), prep(new, offsets)
            for got, rows in ((got_train, x), (got_new, new)):
                want = reference.list_rank_features(x.numpy(), offsets.numpy(), rows.numpy(), offsets.numpy())
                assert want.shape[1] == 9  # 2·6, less the constant column twice and one column constant within lists
                np.testing.assert_allclose(got.numpy(), want, atol=2e-5)


def test_lists_do_not_see_each_other_nor_the_order_of_rows(generator: torch.Generator) -> None:
    for make in CASES.values():
        x, offsets = lists(3)
        prep = make().fit(x, offsets)
        whole = prep(x, offsets)
        shuffled = torch.arange(len(x))
        for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            torch.testing.assert_close(prep(x[a:b], torch.tensor([0, b - a])), whole[a:b], rtol=1e-6, atol=1e-6)
            shuffled[a:b] = a + torch.randperm(b - a, generator=generator)
        torch.testing.assert_close(prep(x[shuffled], offsets), whole[shuffled], rtol=1e-6, atol=1e-6)


def test_independence_is_exact_where_nothing_is_summed(generator: torch.Generator) -> None:
    for make in [ListRank, ListMinMax, list_rank_features]:
        x, offsets = lists(3)
        prep = make().fit(x, offsets)
        whole, order = prep(x, offsets), torch.arange(len(x))
        order[45:] = 45 + torch.randperm(55, generator=generator)
        assert torch.equal(prep(x[order], offsets), whole[order])
        assert torch.equal(prep(x[45:], torch.tensor([0, 55])), whole[45:])


def test_state_travels_bit_for_bit() -> None:
    for make in CASES.values():
        x, offsets = lists(4)
        prep = make().fit(x, offsets)
        file = io.BytesIO()
        torch.save(prep.state_dict(), file)
        file.seek(0)
        again = build_preprocess(json.loads(json.dumps(prep.spec())))
        assert not again.fitted
        again.load_state_dict(torch.load(file, weights_only=True))
        assert again.spec() == prep.spec()
        assert (again.num_features_in, again.num_features_out) == (prep.num_features_in, prep.num_features_out)
        new, _ = lists(5)
        assert torch.equal(again(new, offsets), prep(new, offsets))
        assert torch.equal(copy.deepcopy(prep)(new, offsets), prep(new, offsets))
        for name, value in prep.state_dict().items():
            assert not value.is_floating_point() or value.isfinite().all(), name


def test_an_unfitted_state_travels_too() -> None:
    for make in CASES.values():
        again = make()
        again.load_state_dict(make().state_dict())
        assert not again.fitted
        assert "not fitted" in repr(again)


def test_refitting_replaces_the_state() -> None:
    for make in CASES.values():
        (x, offsets), (other, _) = lists(4), lists(6)
        assert torch.equal(make().fit(other, offsets).fit(x, offsets)(x, offsets), make().fit_transform(x, offsets))


@every_case
def test_large_inputs_in_chunks_give_the_same(make, monkeypatch: pytest.MonkeyPatch) -> None:
    x, offsets = lists(7)
    prep = make().fit(x, offsets)
    whole = prep(x, offsets)
    monkeypatch.setattr(preprocess_base, "_CHUNK_ROWS", 13)
    torch.testing.assert_close(prep(x, offsets), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(make().fit_transform(x, offsets), whole, rtol=1e-5, atol=1e-5)


def test_degenerate_inputs() -> None:
    for make in CASES.values():
        x, offsets = lists(8)
        prep = make().fit(x, offsets)
        for bounds in ([0], [0, 0], [0, 0, 0]):
            assert prep(x[:0], torch.tensor(bounds)).shape == (0, prep.num_features_out)
        singles = prep(x, torch.arange(len(x) + 1))
        equal = prep(x[:1].expand(9, -1), torch.tensor([0, 9]))
        beyond = prep(torch.full((3, 6), 3e30), torch.tensor([0, 3]))
        for result in (singles, equal, beyond):
            assert result.isfinite().all()
        torch.testing.assert_close(equal, equal[:1].expand_as(equal))


def test_list_steps_give_zero_where_a_list_does_not_vary() -> None:
    for make in [ListRank, ListMinMax, ListStandardize]:
        for value in (0.1, 1e8, -3.3e38, 1e-42):
            x = torch.full((7, 2), value)
            assert make().fit_transform(x, torch.tensor([0, 3, 4, 7])).eq(0).all()


def test_standardize_centres_what_is_constant() -> None:
    x = torch.full((7, 1), 0.1)
    assert Standardize().fit_transform(x, torch.tensor([0, 7])).eq(0).all()
    assert Norm2().fit_transform(0 * x, torch.tensor([0, 7])).eq(0).all()


def test_errors() -> None:
    for make in CASES.values():
        x, offsets = lists(9)
        prep = make()
        with pytest.raises(LGMMLError, match=f"preprocessing '{prep.name}' must be fitted before it is used"):
            prep(x, offsets)
        with pytest.raises(LGMMLError, match="must be fitted before"):
            _ = prep.num_features_out
        with pytest.raises(LGMMLError, match=r"`features` must have rows and columns to fit .*, got \(0, 6\)"):
            prep.fit(x[:0], torch.tensor([0]))
        with pytest.raises(LGMMLError, match=r"`features` must be finite, got nan at position \(3, 1\)"):
            prep.fit(x.clone().index_put_((torch.tensor(3), torch.tensor(1)), torch.tensor(torch.nan)), offsets)
        with pytest.raises(LGMMLError, match=r"`features` must hold floating-point values, got torch\.int64"):
            prep.fit(x.long(), offsets)
        prep.fit(x, offsets)
        with pytest.raises(LGMMLError, match=f"must have 6 columns, as when '{prep.name}' was fitted, got 7"):
            prep(torch.zeros(len(x), 7), offsets)
        with pytest.raises(LGMMLError, match=r"must have 6 columns, .*, got shape \(6,\)"):
            prep(x[0], offsets)
        with pytest.raises(LGMMLError, match="`offsets` must end at the number of rows, 100, got 99"):
            prep(x, offsets.clamp_max(99))


def test_a_failed_fit_leaves_nothing_usable() -> None:
    x, offsets = lists(9)
    prep = Chain([Standardize(), RemoveConstant()]).fit(x, offsets)
    with pytest.raises(LGMMLError, match="must have a feature that varies, got 6 with a deviation of at most 0"):
        prep.fit(torch.ones(100, 6), offsets)
    assert not prep.fitted


def test_bad_descriptions() -> None:
    for spec, error, message in [
        ({"name": "quantil"}, LGMMLError, "`name` must be one of .* did you mean 'quantile'?"),
        ({"args": {}}, ConfigError, "must be a mapping with 'name'"),
        ("clip", ConfigError, "must be a mapping with 'name'.*got 'clip'"),
        ({"name": "clip", "limit": 3}, ConfigError, "must be a mapping with 'name'"),
        ({"name": "clip", "args": {"limits": 3}}, ConfigError, "'clip' does not take these arguments: .*limits"),
        ({"name": "clip", "args": {"limit": 0}}, LGMMLError, "`limit` must be positive, got 0"),
        ({"name": "quantile", "args": {"output": "gauss"}}, LGMMLError, "`output` must be one of"),
        ({"name": "quantile", "args": {"max_knots": 3}}, LGMMLError, "`max_knots` must be at least 4, got 3"),
        ({"name": "quantile", "args": {"tail": 0.5}}, LGMMLError, r"`tail` must lie in \(0, 0.5\), got 0.5"),
        ({"name": "pca", "args": {"components": 0}}, LGMMLError, "`components` must be a positive whole .* got 0"),
        ({"name": "pca", "args": {"components": 1.5}}, LGMMLError, r"a share in \(0, 1\) or None, got 1.5"),
        ({"name": "remove_constant", "args": {"tolerance": -1}}, LGMMLError, "`tolerance` must be at least 0"),
        ({"name": "concat", "args": {"steps": []}}, LGMMLError, "`steps` must hold at least one step, got none"),
    ]:
        with pytest.raises(error, match=message):
            build_preprocess(spec)


def test_bad_steps_and_components() -> None:
    with pytest.raises(LGMMLError, match="`steps` must be Preprocess modules, got str at position 1"):
        Chain([Clip(), "clip"])  # type: ignore[list-item]
    with pytest.raises(LGMMLError, match="`components` must be at most the number of features, 6, got 7"):
        PCA(7).fit(*lists())


def test_large_values_have_a_finite_state() -> None:
    x = torch.tensor([[3e38], [-3e38], [0.0]])
    for make in (Norm2, Standardize, Quantile, list_rank_features):
        prep = make().fit(x, torch.tensor([0, 3]))
        assert all(value.double().isfinite().all() for value in prep.state_dict().values())
        assert not prep(x, torch.tensor([0, 3])).isnan().any()


def test_gradients_pass_through_smooth_steps() -> None:
    x, offsets = lists(2, torch.float64)
    x = x.requires_grad_()
    Chain([SignedLog1p(), Standardize()]).fit(x.detach(), offsets)(x, offsets).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_moves_with_the_module() -> None:
    x, offsets = lists(2)
    prep: Preprocess = list_rank_features().fit(x, offsets).double()
    assert prep(x.double(), offsets).dtype == torch.float64
    torch.testing.assert_close(prep(x, offsets).double(), prep(x.double(), offsets), atol=1e-5, rtol=1e-5)


def test_exports() -> None:
    for make in CASES.values():
        x, offsets = lists(2)
        prep = make().fit(x, offsets)
        rows, bounds = torch.export.Dim("rows", min=2), torch.export.Dim("bounds", min=2)
        program = torch.export.export(prep, (x, offsets), dynamic_shapes=({0: rows}, {0: bounds}))
        new, new_offsets = lists(3)[0][:57], torch.tensor([0, 20, 57])
        torch.testing.assert_close(program.module()(new, new_offsets), prep(new, new_offsets), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_list_rank_features_run_in_onnxruntime(tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x, offsets = lists(2)
    prep = list_rank_features().fit(x, offsets)
    rows, bounds = torch.export.Dim("rows", min=2), torch.export.Dim("bounds", min=2)
    program = torch.onnx.export(prep, (x, offsets), dynamic_shapes=({0: rows}, {0: bounds}), dynamo=True, verbose=False)
    program.save(tmp_path / "prep.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "prep.onnx")
    new = lists(3)[0]
    for new_offsets in (offsets, torch.tensor([0, 100])):
        got = session.run(None, {"features": new.numpy(), "offsets": new_offsets.numpy()})[0]
        np.testing.assert_allclose(got, prep(new, new_offsets).numpy(), atol=1e-5)
