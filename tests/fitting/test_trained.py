"""Trained metrics: the start in closed form, and what training makes of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError, LGMMLError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.fitting import trained
from lgmml_torch.fitting.trained import start_trained
from lgmml_torch.functional.gmml import scatter_matrices
from lgmml_torch.functional.regions import sample_regions, usable_queries
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_min
from lgmml_torch.training.callbacks import OneCycle
from lgmml_torch.training.losses import LambdaRank, Loss, Softmax, Warp
from lgmml_torch.training.module import Dropout
from lgmml_torch.training.stages import PhiSettings, Recipe, Surroundings, Trained, prepare, train_phi
from tests.reference import boosting as naive


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


class TestStarts:
    """Each start against its definition."""

    def drawn(self, data: RankingData, *, metrics: int = 6, rank: int = 2, seed: int = 4, before: int = 0) -> Tensor:
        """The random directions behind a start: after the anchors, and what the start itself draws before them."""
        g = torch.Generator().manual_seed(seed)
        lowest = segment_min(data.labels, data.offsets)[data.query_index]
        torch.randint(int((data.labels > lowest).sum()), (metrics,), generator=g)
        if before:
            torch.randperm(before, generator=g)
        return torch.randn(metrics, data.num_features, rank, generator=g)

    def factors(self, data: RankingData, start: str, **settings: Any) -> Tensor:
        bank = start_trained(data, num_metrics=6, rank=2, seed=4, start=start, **settings)
        return bank.metrics.iter_blocks()[0].factors

    def weighted(self, drawn: Tensor, weights: Tensor) -> Tensor:
        """Weights of at least a tenth of the largest, of mean square 1; directions of variance 1/(D·R)."""
        weights = weights.clamp_min(0.1 * float(weights.max()))
        weights = weights / weights.square().mean().sqrt()
        return drawn / (drawn.shape[1] * drawn.shape[2]) ** 0.5 * weights.float()[:, None]

    def test_random(self) -> None:
        data = lists(10)
        drawn = self.drawn(data)
        torch.testing.assert_close(self.factors(data, "random"), drawn / (data.num_features * 2) ** 0.5)

    def test_strength(self) -> None:
        data = lists(10)
        x, strengths = data.features.double(), []
        for j in range(data.num_features):
            covariance = 0.0
            for q in range(data.num_queries):
                rows = slice(int(data.offsets[q]), int(data.offsets[q + 1]))
                y = data.labels[rows].double()
                covariance += float((y - y.mean()) @ x[rows, j])
            strengths.append(abs(covariance) / max(float(x[:, j].std(unbiased=False)), 1e-6))
        torch.testing.assert_close(
            self.factors(data, "strength"),
            self.weighted(self.drawn(data), torch.tensor(strengths)),
            rtol=1e-3,
            atol=1e-5,
        )

    @pytest.mark.parametrize("lam", [0.1, 1.0])
    def test_diagonal(self, lam: float) -> None:
        data = lists(8)
        scatters = []
        for j in range(data.num_features):
            x, y = data.features[:, [j]].double().numpy(), data.labels.double()
            above = (y - segment_min(data.labels, data.offsets)[data.query_index]).numpy()
            scatters.append(naive.list_scatter(x, above, (above == 0).astype(float), data.offsets.tolist()))
        S, D = (torch.tensor([float(pair[side][0, 0]) for pair in scatters]) for side in (0, 1))
        level = lam * float((S + D).mean()) / 2
        expected = self.weighted(self.drawn(data, before=data.num_queries), ((D + level) / (S + level)) ** 0.25)
        torch.testing.assert_close(self.factors(data, "diagonal", lam=lam), expected, rtol=1e-3, atol=1e-5)

    def test_ratio_directions_are_of_length_one_and_in_order(self) -> None:
        data = lists(12)
        bank = start_trained(data, num_metrics=30, rank=3, start="ratio", pool=1, seed=4)
        factors = bank.metrics.iter_blocks()[0].factors
        usable = int(usable_queries(data.labels, data.offsets).sum())
        assert usable < 30  # fewer regions than metrics serve several times
        assert torch.equal(factors[0], factors[usable])
        assert not torch.equal(factors[0], factors[1])

    def test_distances_have_a_mean_of_one_where_there_are_any(self) -> None:
        data = lists(10)
        means = start_trained(data, num_metrics=6, rank=2, seed=4).metrics(data.features).mean(0)
        torch.testing.assert_close(means, torch.ones(6))
        same = data.replace(features=torch.zeros_like(data.features))
        bank = start_trained(same, num_metrics=2, rank=1, start="random")
        assert bank.metrics.scales.tolist() == [1.0, 1.0]

    def test_anchors_stand_above_the_lowest_label_of_their_own_list(self) -> None:
        """In the second list everything is relevant, and the least relevant is no anchor all the same."""
        x = torch.arange(6.0)[:, None]
        data = RankingData.from_arrays(x, [0, 1, 0, 2, 2, 3], qid=[0, 0, 0, 1, 1, 1])
        anchors = start_trained(data, num_metrics=40, rank=1, start="random").metrics.iter_blocks()[0].anchors
        assert set(anchors.flatten().tolist()) == {1.0, 5.0}


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


def test_the_same_seed_gives_the_same_model_and_dropout_has_an_effect(tmp_path: Path) -> None:
    found = [fit(tmp_path / str(i), epochs=2, seed=seed).model for i, seed in enumerate((0, 0, 1))]
    factors = [model.metrics.iter_blocks()[0].factors for model in found]
    assert torch.equal(factors[0], factors[1])
    assert not torch.equal(factors[0], factors[2])


@pytest.mark.parametrize("start", ["strength", "diagonal"])
def test_where_no_feature_says_anything_all_count_alike(start: str) -> None:
    data = RankingData.from_arrays(torch.ones(12, 3), [0, 1, 2] * 4, group=[3] * 4)
    found, plain = (start_trained(data, num_metrics=40, rank=2, start=way, seed=1) for way in (start, "random"))
    factors, others = (bank.metrics.iter_blocks()[0].factors for bank in (found, plain))
    assert torch.isfinite(factors).all()
    assert factors.square().mean() == pytest.approx(float(others.square().mean()), rel=0.5)


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


def test_scales_of_some_documents_follow_from_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data = lists()
    whole = start_trained(data, num_metrics=4, rank=2).metrics.scales
    monkeypatch.setattr(trained, "SCALE_DOCUMENTS", 50)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = start_trained(data, num_metrics=4, rank=2).metrics.scales
        torch.manual_seed(2)
        again = start_trained(data, num_metrics=4, rank=2).metrics.scales
    assert torch.equal(first, again)
    assert not torch.equal(first, whole)
    torch.testing.assert_close(first, whole, rtol=0.3, atol=0)
