"""Trained metrics: the start in closed form, and what training makes of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.fitting.trained import start_trained
from lgmml_torch.functional.gmml import scatter_matrices
from lgmml_torch.functional.ranking.measures import mean_ndcg
from lgmml_torch.functional.regions import sample_regions
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.losses import LambdaRank, Loss, Softmax, Warp
from lgmml_torch.training.module import Dropout, OneCycle
from lgmml_torch.training.stages import PhiSettings, Recipe, Surroundings, Trained, prepare, train_phi


def lists(queries: int = 60, seed: int = 0) -> RankingData:
    data = letor_like(queries, 8, num_documents=20 * queries, noise=0.2, seed=seed)
    return data.replace(features=list_rank_features().fit_transform(data.features, data.offsets))


@pytest.mark.parametrize("start", ["random", "strength", "diagonal", "ratio"])
def test_the_start_is_what_it_says(start: str) -> None:
    data = lists()
    bank = start_trained(data, num_metrics=12, rank=3, start=start, seed=1)
    (block,) = bank.metrics.iter_blocks()
    assert bank.trained
    assert block.factors.shape == (12, data.num_features, 3)
    rows = {tuple(row) for row in data.features[data.labels > 0].tolist()}
    assert all(tuple(anchor) in rows for anchor in block.anchors.tolist())
    torch.testing.assert_close(bank.metrics(data.features).mean(0), torch.ones(12), rtol=0.1, atol=0.05)
    assert bank.phi is not None
    torch.testing.assert_close(bank.phi, torch.full((12,), 4 / 12**0.5))
    again, other = (start_trained(data, num_metrics=12, rank=3, start=start, seed=seed) for seed in (1, 2))
    assert torch.equal(again.metrics.iter_blocks()[0].factors, block.factors)
    assert not torch.equal(other.metrics.iter_blocks()[0].anchors, block.anchors)


def test_ratio_keeps_the_directions_that_tell_relevant_documents_apart() -> None:
    """No other direction has a larger quotient of dissimilar to (regularised) similar scatter than the first."""
    data, lam = lists(), 0.1
    bank = start_trained(data, num_metrics=4, rank=2, start="ratio", pool=8, lam=lam, seed=3)
    g = torch.Generator().manual_seed(3)
    relevant = int((data.labels > 0).sum())
    torch.randint(relevant, (4,), generator=g)  # the anchors come first
    r = sample_regions(data.labels, data.offsets, 4, pool=8, generator=g)
    similar, dissimilar = scatter_matrices(
        data.features, r.positives, r.positive_offsets, r.negatives, r.negative_offsets
    )
    scale = (similar + dissimilar).diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] / 2
    similar = similar + lam * scale * torch.eye(data.num_features)
    first = bank.metrics.iter_blocks()[0].factors[..., 0].double()
    best = torch.linalg.eigvals(torch.linalg.solve(similar, dissimilar)).real.amax(-1)

    def quotient(v: torch.Tensor) -> torch.Tensor:
        return torch.einsum("kd,kde,ke->k", v, dissimilar, v) / torch.einsum("kd,kde,ke->k", v, similar, v)

    torch.testing.assert_close(quotient(first), best, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("start", ["strength", "diagonal"])
def test_features_that_tell_relevant_documents_apart_start_strong(start: str) -> None:
    """The first feature is the label and some noise, the others are noise; a constant one does no harm."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (400,), generator=g)
    x = torch.randn(400, 6, generator=g)
    x[:, 0] = y + 0.1 * x[:, 0]
    x[:, 5] = 0.0
    data = RankingData.from_arrays(x, y, qid=torch.arange(400) // 20)
    (block,) = start_trained(data, num_metrics=64, rank=4, start=start).metrics.iter_blocks()
    sizes = block.factors.square().mean((0, 2)).sqrt()
    assert sizes.argmax() == 0
    assert sizes[0] > 1.5 * sizes[1:5].max()
    assert float(block.factors.square().mean() * block.factors[0].numel()) == pytest.approx(1.0, rel=0.2)


def fit(
    folder: Path, loss: Loss | None = None, *, epochs: int = 6, seed: int = 0, start: str = "strength", **phi: Any
) -> Trained:
    train, valid = letor_like(80, 8, num_documents=1600, noise=0.2, seed=0).split((0.75, 0.25), seed=0)
    splits = {"train": train, "valid": valid}
    settings = PhiSettings(
        loss=loss or Softmax(),
        loader={"batch_size": 8},
        optimizer=partial(torch.optim.AdamW, lr=5e-3, weight_decay=0.1),
        step_size=OneCycle(),
        dropout=Dropout(0.1, 0.1),
        **phi,
    )
    bank = partial(start_trained, num_metrics=16, rank=4, start=start)
    recipe = Recipe(list_rank_features, bank, phi=settings, seed=seed)
    return train_phi(prepare(splits, recipe), recipe, Surroundings(folder, {"max_epochs": epochs}))


@pytest.mark.parametrize("loss", [Softmax(), LambdaRank(), Warp()], ids=lambda loss: loss.name)
def test_training_ranks_far_better_than_a_random_start(loss: Loss, tmp_path: Path) -> None:
    trained = fit(tmp_path, loss, start="random")
    curve = trained.keeper.curve
    assert max(curve.values()) > curve[0] + 0.1
    model = trained.model
    assert not list(model.metrics.parameters())  # buffers again: an ordinary model
    assert bool((model.phi.table.weight >= 0).all())
    assert bool((model.metrics.scales > 0).all())


def test_the_model_is_like_any_other(tmp_path: Path) -> None:
    model = fit(tmp_path, epochs=3).model
    data = letor_like(6, 8, seed=2)
    model.save(tmp_path / "model.safetensors")
    for name in ("model.safetensors", "best.ckpt"):
        assert torch.equal(LGMML.load(tmp_path / name).score(data), model.score(data))
    found = model.explain(data, qid=data.qids[0], document=0, over=1)
    assert float(found.features.sum()) == pytest.approx(found.difference, rel=1e-6)
    small = model.compress(0.05, data)
    assert small.score_error <= 0.06
    assert mean_ndcg(small.model.score(data), data) == pytest.approx(mean_ndcg(model.score(data), data), abs=0.05)


def test_the_same_seed_gives_the_same_model_and_dropout_has_an_effect(tmp_path: Path) -> None:
    found = [fit(tmp_path / str(i), epochs=2, seed=seed).model for i, seed in enumerate((0, 0, 1))]
    factors = [model.metrics.iter_blocks()[0].factors for model in found]
    assert torch.equal(factors[0], factors[1])
    assert not torch.equal(factors[0], factors[2])


def test_bad_settings_and_data_are_named() -> None:
    with pytest.raises(LGMMLError, match=r"`dropout.metrics` must be at least 0 and below 1, got 1"):
        Dropout(0.1, 1)
    with pytest.raises(LGMMLError, match=r"`start` must be one of 'random', .* 'ratio', got 'zero'"):
        start_trained(lists(5), start="zero")
    with pytest.raises(LGMMLError, match="`rank` must be positive, got 0"):
        start_trained(lists(5), rank=0)
    flat = RankingData.from_arrays(torch.rand(4, 2), [1, 1, 1, 1], qid=[1, 1, 2, 2])
    with pytest.raises(DataError, match="must have a query with documents of different labels"):
        start_trained(flat)
    assert start_trained(lists(20), rank=99).metrics.iter_blocks()[0].factors.shape[2] == lists(20).num_features
