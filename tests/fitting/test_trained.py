"""Trained metrics: the start in closed form, and what training makes of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import DataError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.fitting.trained import SCALE_DOCUMENTS, TrainedBuilder, start_trained
from lgmml_torch.models.preprocess.compose import list_rank_features
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import OneCycle
from lgmml_torch.training.losses import LambdaRank, Loss, Softmax, Warp
from lgmml_torch.training.module import Dropout
from lgmml_torch.training.recipe import PhiSettings, Recipe, TrainerSettings
from lgmml_torch.training.stages import Trained, prepare, train_phi


def lists(queries: int = 60, seed: int = 0) -> RankingData:
    data = letor_like(queries, 8, num_documents=20 * queries, noise=0.2, seed=seed)
    return data.replace(features=list_rank_features().fit_transform(data.features, data.offsets))


def factors_of(data: RankingData, **settings: Any) -> Tensor:
    return start_trained(data, **settings).metrics.iter_blocks()[0].factors


def weights_of(data: RankingData, start: str, **settings: Any) -> Tensor:
    """What a start multiplies each feature by: the same seed gives the same random directions."""
    with_weights, plain = (
        factors_of(data, num_metrics=6, rank=2, seed=4, start=way, **settings) for way in (start, "random")
    )
    ratio = with_weights / plain
    torch.testing.assert_close(ratio, ratio[:1, :, :1].expand_as(ratio), rtol=1e-4, atol=0)
    return ratio[0, :, 0].double()


def normalised(weights: Tensor) -> Tensor:
    """At least a tenth of the largest, of mean square 1."""
    weights = weights.clamp_min(0.1 * float(weights.max()))
    return weights / weights.square().mean().sqrt()


class TestStarts:
    """Each start against its definition."""

    def test_what_all_of_them_have(self) -> None:
        data = lists()
        rows = {tuple(row) for row in data.features[data.labels > 0].tolist()}
        for start in ("random", "strength"):
            bank = start_trained(data, num_metrics=12, rank=3, start=start, seed=1, kernel="rbf")
            (block,) = bank.metrics.iter_blocks()
            assert (bank.trained, bank.kernel, bank.history) == (True, "rbf", {"start": start, "rank": 3})
            assert block.factors.shape == (12, data.num_features, 3)
            assert all(tuple(anchor) in rows for anchor in block.anchors.tolist())
            torch.testing.assert_close(bank.metrics(data.features).mean(0), torch.ones(12), rtol=1e-4, atol=0)
            assert bank.phi is not None
            torch.testing.assert_close(bank.phi, torch.full((12,), 4 / 12**0.5))
            assert torch.equal(factors_of(data, num_metrics=12, rank=3, start=start, seed=1), block.factors)
            again = start_trained(data, num_metrics=12, rank=3, start=start, seed=2)
            assert not torch.equal(again.metrics.iter_blocks()[0].anchors, block.anchors)
        assert factors_of(lists(20), rank=99).shape[2] == data.num_features

    def test_random(self) -> None:
        factors = factors_of(lists(10), num_metrics=500, rank=4, start="random")
        size = 1 / factors[0].numel()
        assert float(factors.mean()) == pytest.approx(0.0, abs=4 * (size / factors.numel()) ** 0.5)
        assert float(factors.square().mean()) == pytest.approx(size, rel=0.05)

    def test_strength(self) -> None:
        """Covariance with the labels, list by list, over the deviation: it does not depend on the unit."""
        data = lists(10)
        units = torch.logspace(-2, 3, data.num_features)
        x, strengths = data.features.double(), []
        for j in range(data.num_features):
            covariance = 0.0
            for q in range(data.num_queries):
                rows = slice(int(data.offsets[q]), int(data.offsets[q + 1]))
                y = data.labels[rows].double()
                covariance += float((y - y.mean()) @ x[rows, j])
            strengths.append(abs(covariance) / float(x[:, j].std(unbiased=False)))
        expected = normalised(torch.tensor(strengths, dtype=torch.float64))
        assert float(expected.max() / expected.min()) > 1.5
        for part in (data, data.replace(features=data.features * units)):
            torch.testing.assert_close(weights_of(part, "strength"), expected, rtol=1e-3, atol=1e-5)

    def test_features_that_tell_relevant_documents_apart_start_strong(self) -> None:
        """The first feature is the label and some noise, the others are noise; a constant one does no harm."""
        g = torch.Generator().manual_seed(0)
        y = torch.randint(0, 2, (400,), generator=g)
        x = torch.randn(400, 6, generator=g)
        x[:, 0] = y + 0.1 * x[:, 0]
        x[:, 5] = 0.0
        data = RankingData.from_arrays(x, y, qid=torch.arange(400) // 20)
        factors = factors_of(data, num_metrics=64, rank=4, start="strength")
        sizes = factors.square().mean((0, 2)).sqrt()
        assert sizes[0] > 1.5 * sizes[1:5].max()
        assert float(sizes[5]) > 0
        assert float(factors.square().mean() * factors[0].numel()) == pytest.approx(1.0, rel=0.2)
        constant = RankingData.from_arrays(torch.ones(12, 3), [0, 1, 2] * 4, group=[3] * 4)
        factors = factors_of(constant, num_metrics=400, rank=2, start="strength")
        assert float(factors.square().mean()) == pytest.approx(1 / 6, rel=0.2)  # no feature says anything: all alike
        bank = start_trained(constant, num_metrics=2, rank=1, start="random")
        assert bank.metrics.scales.tolist() == [1.0, 1.0]

    def test_anchors_stand_above_the_lowest_label_of_their_own_list(self) -> None:
        """In the second list everything is relevant, and the least relevant is no anchor all the same."""
        x = torch.arange(6.0)[:, None]
        data = RankingData.from_arrays(x, [0, 1, 0, 2, 2, 3], qid=[0, 0, 0, 1, 1, 1])
        anchors = start_trained(data, num_metrics=40, rank=1, start="random").metrics.iter_blocks()[0].anchors
        assert set(anchors.flatten().tolist()) == {1.0, 5.0}
        flat = RankingData.from_arrays(torch.rand(4, 2), [1, 1, 1, 1], qid=[1, 1, 2, 2])
        with pytest.raises(DataError, match="must have a query with documents of different labels"):
            start_trained(flat)

    def test_of_many_documents_some_are_looked_at(self) -> None:
        """Whatever others have drawn before: scales of some follow from the seed alone."""
        data = lists(SCALE_DOCUMENTS // 10)
        assert data.num_documents > SCALE_DOCUMENTS
        banks = []
        with torch.random.fork_rng():
            for before in (0, 1):
                torch.manual_seed(before)
                banks.append(start_trained(data, num_metrics=4, rank=2, start="strength"))
        for name, value in banks[0].metrics.state_dict().items():
            torch.testing.assert_close(value, banks[1].metrics.state_dict()[name], rtol=0, atol=0, equal_nan=True)
        means = banks[0].metrics(data.features).mean(0)
        torch.testing.assert_close(means, torch.ones(4), rtol=0.1, atol=0)
        assert not torch.allclose(means, torch.ones(4), rtol=1e-5)


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
    bank = TrainedBuilder(num_metrics=16, rank=4, start=start)
    recipe = Recipe(list_rank_features, bank, phi=settings, seed=seed)
    return train_phi(prepare(splits, recipe), recipe, TrainerSettings(folder, {"max_epochs": epochs}))


class TestTraining:
    @pytest.mark.parametrize("loss", [Softmax(), LambdaRank(), Warp()], ids=lambda loss: loss.name)
    def test_it_ranks_far_better_than_a_random_start(self, loss: Loss, tmp_path: Path) -> None:
        trained = fit(tmp_path, loss, start="random")
        curve = trained.keeper.curve
        assert max(curve.values()) > curve[0] + 0.1
        model = trained.model
        assert not list(model.metrics.parameters())  # buffers again: an ordinary model
        assert bool((model.phi.table.weight >= 0).all())
        assert bool((model.metrics.scales > 0).all())

    def test_the_model_is_like_any_other(self, tmp_path: Path) -> None:
        model = fit(tmp_path / "a", epochs=2).model
        data = letor_like(6, 8, seed=2)
        model.save(tmp_path / "a" / "model.safetensors")
        for name in ("model.safetensors", "best.ckpt"):
            assert torch.equal(LGMML.load(tmp_path / "a" / name).score(data), model.score(data))
        found = model.explain(data, qid=data.qids[0], document=0, over=1)
        assert float(found.features.sum()) == pytest.approx(found.difference, rel=1e-5, abs=1e-6)
        again, other = (fit(tmp_path / str(seed), epochs=2, seed=seed).model for seed in (0, 1))
        assert torch.equal(again.score(data), model.score(data))
        assert not torch.equal(other.score(data), model.score(data))
