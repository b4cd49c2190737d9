"""Stored distances: the same from memory and disk, and in half precision off by one rounding at most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.cache import Cache
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.preprocess.steps import Standardize
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.preprocessed import compute_distances

HALVES = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


def example(mode: str = "shared") -> tuple[LGMML, RankingData]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=g)
    data = RankingData.from_arrays(x, torch.randint(0, 3, (200,), generator=g), group=[50, 30, 100, 20])
    prep = Chain([Standardize()]).fit(data.features, data.offsets)
    z = prep(data.features, data.offsets)
    bank = LocalMetrics([MetricBlock(z[:5].clone(), torch.randn(5, 6, 6, generator=g))], num_features=6)
    bank.set_scales(bank(z).median(dim=0).values)
    return LGMML(prep, bank, Phi(4, 5, mode=mode)), data


@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_memory_and_disk_agree(dtype: torch.dtype | None, tmp_path: Path) -> None:
    model, data = example()
    plain = compute_distances(model, data, dtype=dtype, documents_at_once=60)
    stored = compute_distances(model, data, dtype=dtype, cache=Cache(tmp_path), documents_at_once=60)
    assert stored.dtype == plain.dtype == (dtype or torch.float32)
    assert torch.equal(stored, plain)
    expected = model.distances(data.features, data.offsets)
    torch.testing.assert_close(plain.float(), expected, rtol=1e-5 + HALVES.get(plain.dtype, 0.0), atol=1e-5)


def test_half_precision_rounds_once() -> None:
    model, data = example()
    exact = compute_distances(model, data).double()
    for dtype, unit in HALVES.items():
        error = (compute_distances(model, data, dtype=dtype).double() - exact).abs()
        assert bool((error <= unit * exact + 3e-8).all())
        assert float(error.max()) > 0


def test_summaries_of_half_precision_distances_are_computed_in_full() -> None:
    model, data = example("amortized")
    model.summarize(compute_distances(model, data), data.offsets)
    exact = model.phi.summaries.clone()
    model.summarize(compute_distances(model, data, dtype=torch.float16), data.offsets)
    assert model.phi.summaries.dtype == torch.float32
    torch.testing.assert_close(model.phi.summaries, exact, rtol=2e-3, atol=2e-3)


def test_the_cache_has_an_entry_for_all_that_distances_depend_on(tmp_path: Path) -> None:
    """Other dtypes, documents, metrics and preprocessings are computed anew; other weights and labels are not."""
    model, data = example()

    def computed(model: LGMML, data: RankingData, dtype: torch.dtype | None = None) -> bool:
        calls: list[int] = []
        values = compute_distances(model, data, dtype=dtype, cache=Cache(tmp_path), progress=calls.append)
        expected = compute_distances(model, data, dtype=dtype)
        assert torch.equal(values, expected)
        return bool(calls)

    assert computed(model, data)
    assert computed(model, data, torch.float16)
    assert computed(model, data, torch.bfloat16)
    assert not computed(model, data, torch.float16)
    with torch.no_grad():
        model.phi.table.weight.mul_(2)
    assert not computed(model, data.replace(labels=1 - data.labels))
    assert computed(model, data.replace(features=data.features + 1))
    assert computed(model, data.select([1, 0, 2, 3]))
    model.metrics.set_scales(2 * model.metrics.scales)
    assert computed(model, data)
    other = Chain([Standardize()]).fit(2 * data.features, data.offsets)
    assert computed(LGMML(other, model.metrics, model.phi), data)


def test_progress_ends_at_the_number_of_documents() -> None:
    model, data = example()
    seen: list[int] = []
    compute_distances(model, data, documents_at_once=60, progress=seen.append)
    assert seen[-1] == 200
    assert seen == sorted(seen)


def test_errors_name_the_rule() -> None:
    model, data = example()
    with pytest.raises(LGMMLError, match=r"`dtype` must be a floating-point dtype, got torch.int16"):
        compute_distances(model, data, dtype=torch.int16)
    model.metrics.set_scales(torch.full((5,), 1e-6))
    with pytest.raises(LGMMLError, match=r"`dtype` must hold scaled distances beyond 65504.* use torch.bfloat16"):
        compute_distances(model, data, dtype=torch.float16)
    assert bool(compute_distances(model, data, dtype=torch.bfloat16).isfinite().all())
