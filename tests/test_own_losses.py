"""Losses that are functions: of one's own, from Python and by dotted name, and the built-in ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.app.compose import recipe_of
from lgmml_torch.app.config import load_config
from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.functional.losses import softmax_loss
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_sum
from lgmml_torch.training.losses import ListLoss, build_loss
from lgmml_torch.training.module import LGMMLModule
from tests.app.test_train import SAMPLED, TRAINED, run
from tests.own_losses import squares
from tests.test_estimator import problem
from tests.training import tiny

OWN = "tests.own_losses.squares"
TINY: dict[str, Any] = {"bank": "trained", "num_metrics": 5, "epochs": 2, "random_state": 0}


def scores_of(loss: Any, **more: Any) -> Any:
    X, y, qid = problem(20)
    return LGMMLRanker(**{**TINY, "loss": loss, **more}).fit(X, y, qid=qid).predict(X, qid=qid)


def test_a_function_trains_as_the_built_in_loss_of_the_same_formula() -> None:
    def listwise(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
        return softmax_loss(scores, labels, offsets)

    expected = scores_of("softmax")
    assert (scores_of(listwise) == expected).all()
    assert (scores_of(partial(softmax_loss, weights=None)) == expected).all()
    assert (scores_of(None) == expected).all()  # what trained metrics get anyway


def test_a_query_counts_as_often_as_its_weight_says() -> None:
    """In one batch of all lists, weights of two are the loss twice: the same steps with half the learning rate."""
    X, y, qid = problem(20)
    settings = {"bank": "sampled", "num_metrics": 5, "epochs": 3, "random_state": 0, "validation_fraction": 0}
    once = LGMMLRanker(**settings, loss=squares, learning_rate=1e-4, batch_size=20).fit(X, y, qid=qid)
    twice = LGMMLRanker(**settings, loss=squares, learning_rate=5e-5, batch_size=20)
    twice.fit(X, y, qid=qid, sample_weight=[2.0] * len(X))
    torch.testing.assert_close(twice.model_.phi.table.weight, once.model_.phi.table.weight)
    untrained = LGMMLRanker(**{**settings, "epochs": 0}).fit(X, y, qid=qid)
    assert not torch.allclose(untrained.model_.phi.table.weight, once.model_.phi.table.weight)


@pytest.mark.parametrize("name", ["spearman", "label_differences"])
def test_built_in_losses_of_lists_learn(name: str) -> None:
    """From factors that know nothing of the labels."""
    X, y, qid = problem(30)
    data = RankingData.from_arrays(X, y, qid=qid)
    settings = {**TINY, "bank_options": {"start": "random"}, "validation_fraction": 0}
    ranker = LGMMLRanker(**{**settings, "loss": name, "epochs": 12}).fit(X, y, qid=qid)
    start = LGMMLRanker(**{**settings, "epochs": 0}).fit(X, y, qid=qid)
    loss = build_loss(name)
    assert isinstance(loss, ListLoss)
    assert ranker.score(X, y, qid=qid) > start.score(X, y, qid=qid) + 0.05
    assert ranker.model_.score(data).isfinite().all()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda s, y, o: s, r"the loss '.*<lambda>' must give a tensor of shape \(\d+,\), got \(\d+,\)"),
        (lambda s, y, o: 1.0, r"the loss '.*<lambda>' must give a tensor of shape \(\d+,\), got float"),
        (lambda s, y, o: segment_sum(s.detach(), o), "must be differentiable in the scores, got values without grad"),
        (3, "`loss` must be one of 'warp', .*got 3"),
        ("spaerman", "did you mean 'spearman'"),
        (OWN, f"`loss` must be one of 'warp', .*got '{OWN}'"),  # from Python a function is passed as it is
    ],
)
def test_what_is_no_loss(loss: Any, message: str) -> None:
    with pytest.raises(LGMMLError, match=message):
        scores_of(loss)


def test_boosted_metrics_take_no_function() -> None:
    for loss in (squares, "spearman"):
        with pytest.raises(ConfigError, match=r"`loss` must not be a function for boosted metrics \(chosen for 160 do"):
            scores_of(loss, bank="auto", num_metrics=None)
    with pytest.raises(ConfigError, match="name other metrics: bank='trained'"):
        scores_of(squares, bank="boosted", num_metrics=None)


def test_weights_of_documents_are_refused() -> None:
    X, y, qid = problem(20)
    weights = 1.0 + torch.arange(len(X)) % 2
    with pytest.raises(ConfigError, match=f"the loss '{OWN}' is a function without weights of documents, got some"):
        LGMMLRanker(**TINY, loss=squares).fit(X, y, qid=qid, sample_weight=weights)


class TestByDottedName:
    def test_under_the_rule_of_targets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cfg = load_config([f"loss={OWN}"])
        with pytest.raises(ConfigError, match=r"`loss` must lie in one of lgmml_torch, .*LGMML_TARGETS=package allows"):
            recipe_of(cfg)
        monkeypatch.setenv("LGMML_TARGETS", "tests.own_losses")
        assert recipe_of(cfg).phi.loss == ListLoss(OWN, squares)
        for name, message in {
            "tests.own_losses.gone": "`loss` must name a loss, got 'tests.own_losses.gone'",
            "tests.own_losses.NOT_A_FUNCTION": "`loss` must name a function, got 'tests.own_losses.NOT_A_FUNCTION'",
            "tests.own_losses.torch.load": "`loss` must lie in one of",
            "torch.load": "`loss` must lie in one of",
        }.items():
            with pytest.raises(ConfigError, match=message):
                recipe_of(load_config([f"loss={name}"]))

    def test_a_run_trains_by_it_and_resumes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LGMML_TARGETS", "tests.own_losses")
        words = [*SAMPLED, f"loss={OWN}", "logger=none", "optimizer.lr=1e-4", "keep=last"]
        whole = run(tmp_path / "whole", *words, "trainer.max_epochs=3")
        run(tmp_path / "first", *words, "trainer.max_epochs=1")
        last = f"resume={tmp_path / 'first/checkpoints/last.ckpt'}"
        resumed = run(tmp_path / "resumed", *words, "trainer.max_epochs=3", last)
        assert torch.equal(resumed.model.phi.table.weight, whole.model.phi.table.weight)
        assert OWN in (tmp_path / "whole" / "report.md").read_text()
        with pytest.raises(ConfigError, match=f"`loss` must be '{OWN}', as of the run that is resumed, got 'warp'"):
            run(tmp_path / "other", *SAMPLED, "logger=none", "trainer.max_epochs=3", last)

    def test_trained_metrics_train_by_it(self, tmp_path: Path) -> None:
        by_name = run(tmp_path / "name", *TRAINED, "loss=spearman", "logger=none")
        by_path = "loss=lgmml_torch.functional.losses.spearman_loss"
        assert torch.equal(
            by_name.model.phi.table.weight,
            run(tmp_path / "path", *TRAINED, by_path, "logger=none").model.phi.table.weight,
        )


def test_a_checkpoint_keeps_the_name_and_asks_for_the_function(tmp_path: Path) -> None:
    def local(scores: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
        return squares(scores, labels, offsets)

    trained = tiny.train(tmp_path, mode="shared", loss=build_loss(local), epochs=1)
    batch = next(iter(trained.trainer.datamodule.train_dataloader()))
    again = LGMMLModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert again.loss == ListLoss(f"{local.__module__}.{local.__qualname__}")
    again.attach("train", trained.module.data_of("train"), trained.module.inputs_of("train"))
    with pytest.raises(ConfigError, match=r"<locals>.local' is a function of yours, .*pass it again"):
        again.batch_loss(batch)
    with pytest.raises(ConfigError, match=r"`loss` must be '.*<locals>.local', as of the run that is resumed, got"):
        tiny.train(tmp_path, mode="shared", epochs=2, resume=True)
    resumed = tiny.train(tmp_path, mode="shared", loss=build_loss(local), epochs=2, resume=True)
    assert sorted(resumed.keeper.curve) == [0, 1, 2]
    given = LGMMLModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True, loss=local)
    given.attach("train", trained.module.data_of("train"), trained.module.inputs_of("train"))
    assert torch.isfinite(given.batch_loss(batch).total)
