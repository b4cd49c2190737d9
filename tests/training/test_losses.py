"""Losses of batches put together by hand: what they add up to, which documents they score, what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.functional.losses import lambda_gradients
from lgmml_torch.training.losses import (
    LOSSES,
    LambdaRank,
    Loss,
    LossValue,
    Softmax,
    TrainingBatch,
    Warp,
    Whole,
    build_loss,
)


def batch(
    documents: int,
    positives: list[int],
    negatives: list[list[int]],
    *,
    num_negatives: list[int] | None = None,
    num_draws: list[int] | None = None,
    weights: list[float] | None = None,
    **more: Any,
) -> TrainingBatch:
    """One list of documents, and tuples of it."""
    width = len(negatives[0]) if negatives else 0
    count = len(positives)
    fields = {
        "rows": torch.arange(documents),
        "lists": torch.zeros(1, dtype=torch.long),
        "list_offsets": torch.tensor([0, documents]),
        "list_weights": torch.ones(1, dtype=torch.float64),
        "labels": torch.zeros(documents),
        "document_weights": torch.ones(documents),
        "positives": torch.tensor(positives, dtype=torch.long),
        "negatives": torch.tensor(negatives, dtype=torch.long).view(count, width),
        "num_negatives": torch.tensor(num_negatives or [width] * count, dtype=torch.long),
        "num_draws": torch.tensor(num_draws or [width] * count, dtype=torch.long),
        "weights": torch.tensor(weights or [1.0] * count, dtype=torch.float64),
        "places": torch.arange(documents),
        "whole": Whole(1, documents, count),
    }
    return TrainingBatch(**{**fields, **more})


class Scores:
    """Given scores, with notes on who asked for them."""

    def __init__(self, values: list[float]) -> None:
        self.values = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        self.asked: list[tuple[list[int] | None, bool]] = []

    def __call__(self, places: Tensor | None) -> Tensor:
        self.asked.append((None if places is None else places.tolist(), torch.is_grad_enabled()))
        return self.values * 1 if places is None else self.values[places]


class TestWarp:
    def test_by_hand(self) -> None:
        """The second draw of the first tuple violates, the first of the second, none of the third."""
        found = batch(
            6,
            [0, 1, 2],
            [[3, 4], [5, 3], [3, 3]],
            num_negatives=[4, 9, 2],
            weights=[0.5, 2.0, 1.0],
        )
        score = Scores([1.0, 0.5, 9.0, 0.1, 0.8, 0.7])
        value = Warp(margin=0.5)(found, score)
        rank_weights = [1 + 1 / math.log2(3), sum(1 / math.log2(i + 1) for i in range(1, 10))]  # ⌊4/2⌋ and ⌊9/1⌋
        expected = 0.5 * rank_weights[0] * (0.5 - 1.0 + 0.8) + 2.0 * rank_weights[1] * (0.5 - 0.5 + 0.7)
        assert value.total.item() == pytest.approx(expected)
        assert value.terms == 3
        assert {name: float(fact) for name, fact in value.facts.items()} == pytest.approx(
            {"violator_rate": 2 / 3, "mean_draws": (2 + 1 + 2) / 3}
        )
        (gradient,) = torch.autograd.grad(value.total, score.values)
        first, second = 0.5 * rank_weights[0], 2.0 * rank_weights[1]
        assert gradient.tolist() == pytest.approx([-first, -second, 0.0, 0.0, first, second])

    def test_only_so_many_draws_count(self) -> None:
        found = batch(3, [0], [[1, 2]], num_draws=[1])
        value = Warp(margin=0.5)(found, Scores([1.0, 0.1, 0.9]))
        assert (value.total.item(), float(value.facts["mean_draws"])) == (0.0, 1.0)

    @pytest.mark.parametrize(("documents", "few"), [(3, False), (4, False), (5, True)])
    def test_where_most_documents_are_only_looked_at_the_pairs_are_scored_again(
        self, documents: int, few: bool
    ) -> None:
        """Two tuples have four places: with more documents than that, only the pairs carry gradients."""
        found = batch(documents, [0, 1], [[2], [2]])
        score = Scores([1.0, 0.3, 0.9, 0.0, 0.0][:documents])
        value = Warp(margin=0.5)(found, score)
        assert score.asked == ([(None, False), ([0, 1, 2, 2], True)] if few else [(None, True)])
        assert value.total.item() == pytest.approx(0.5 - 1.0 + 0.9 + 0.5 - 0.3 + 0.9)
        with torch.no_grad():
            Warp()(found, score)
        assert not any(grads for _, grads in score.asked[2 if few else 1 :])

    def test_without_tuples_or_without_draws_it_is_zero(self) -> None:
        for found in (batch(2, [], []), batch(2, [1], [[]], num_negatives=[1])):
            value = Warp()(found, Scores([1.0, 2.0]))
            assert value.total.item() == 0.0
            assert [float(fact) for fact in value.facts.values()] == [0.0, 0.0]

    def test_one_tuple_is_its_own_mean(self) -> None:
        value = Warp(margin=0.5)(batch(2, [0], [[1]]), Scores([0.0, 1.0]))
        assert [float(fact) for fact in value.facts.values()] == [1.0, 1.0]

    def test_terms_are_those_of_the_whole_batch(self) -> None:
        assert Warp()(batch(2, [0], [[1]], whole=Whole(3, 9, 7)), Scores([0.0, 1.0])).terms == 7


class TestOfLists:
    """Two lists of four that processes share, with weights of queries and of documents."""

    def shared(self, **more: Any) -> TrainingBatch:
        return batch(
            5,
            [],
            [],
            lists=torch.tensor([4, 2]),
            list_offsets=torch.tensor([0, 2, 5]),
            list_weights=torch.tensor([0.5, 3.0], dtype=torch.float64),
            labels=torch.tensor([0.0, 1.0, 0.0, 1.0, 2.0]),
            whole=Whole(4, 11, 0),
            **more,
        )

    @pytest.mark.parametrize("weighed", [False, True])
    def test_softmax_by_hand(self, weighed: bool) -> None:
        weights = torch.tensor([1.0, 2.0, 1.0, 4.0, 0.5]) if weighed else torch.ones(5)
        found, scores = self.shared(document_weights=weights), [0.3, -0.2, 0.5, 0.1, 0.9]
        value = Softmax(temperature=0.5)(found, Scores(scores))
        expected = 0.0
        for start, stop, weight in ((0, 2, 0.5), (2, 5, 3.0)):
            gains = [2 ** float(found.labels[i]) - 1 for i in range(start, stop)]
            parts = [math.exp(scores[i] / 0.5) for i in range(start, stop)]
            for i, gain, part in zip(range(start, stop), gains, parts, strict=True):
                counts = float(weights[i])
                expected -= weight * counts * gain / sum(gains) * math.log(part / sum(parts))
        assert value.total.item() == pytest.approx(expected / 4)
        assert (value.terms, value.facts) == (1, {})

    @pytest.mark.parametrize("weighed", [False, True])
    @pytest.mark.parametrize("settings", [{}, {"sigma": 2.5}, {"truncation": 1}], ids=str)
    def test_lambdarank_is_the_product_of_its_gradients_and_the_scores(
        self, settings: dict[str, Any], weighed: bool
    ) -> None:
        weights = torch.tensor([1.0, 2.0, 1.0, 4.0, 0.5]) if weighed else torch.ones(5)
        found, score = self.shared(document_weights=weights), Scores([0.3, -0.2, 0.5, 0.1, 0.4])
        value = LambdaRank(**settings)(found, score)
        gradients, _ = lambda_gradients(
            score.values.detach(),
            found.labels.double(),
            found.list_offsets,
            weights=weights if weighed else None,
            **{"sigma": 1.0, "truncation": 30, **settings},
        )
        each = gradients * torch.tensor([0.5, 0.5, 3.0, 3.0, 3.0], dtype=torch.float64)
        assert float(value.total.detach()) == pytest.approx(-float((each * score.values.detach()).sum()) / 4)
        (gradient,) = torch.autograd.grad(value.total, score.values)
        torch.testing.assert_close(gradient, -each / 4)
        assert (value.terms, value.facts) == (1, {})


class TestSettings:
    def test_what_nobody_says(self) -> None:
        assert Warp() == Warp(margin=0.1)
        assert Softmax() == Softmax(temperature=1.0)
        assert LambdaRank() == LambdaRank(sigma=1.0, truncation=30)
        assert LossValue(torch.zeros(()), 1).facts == {}

    def test_who_draws(self) -> None:
        found = {name: build_loss({"name": name}).draws for name in LOSSES}
        assert found == {
            "warp": True,
            "softmax": False,
            "lambdarank": False,
            "spearman": False,
            "label_differences": False,
        }

    @pytest.mark.parametrize(
        "loss", [Warp(0.5), Softmax(0.25), LambdaRank(2.0, 5), build_loss("spearman")], ids=lambda loss: loss.name
    )
    def test_a_description_makes_the_loss_again(self, loss: Loss) -> None:
        assert build_loss(loss.spec()) == loss

    @pytest.mark.parametrize(
        ("make", "wrong"),
        [(Warp, {"margin": 0.0}), (Softmax, {"temperature": 0.0}), (LambdaRank, {"sigma": 0.0}),
         (LambdaRank, {"truncation": 0}), (LambdaRank, {"truncation": 1.5})],
    )  # fmt: skip
    def test_bad_settings_are_named(self, make: Any, wrong: dict[str, float]) -> None:
        with pytest.raises(LGMMLError, match=f"`{next(iter(wrong))}` must be"):
            make(**wrong)

    def test_bad_names_are_named(self) -> None:
        with pytest.raises(LGMMLError, match=r"`loss` must be one of .*got 'wrap'"):
            build_loss({"name": "wrap"})
        with pytest.raises(ConfigError, match=r"loss 'warp' does not take these settings: .*sigma"):
            build_loss({"name": "warp", "sigma": 1.0})


def test_a_process_without_a_list_of_a_batch_adds_nothing_to_its_loss() -> None:
    """Its function is not asked: it may not be ready for no documents at all."""
    none = torch.zeros(0, dtype=torch.long)
    found = batch(0, [], [], lists=none, list_offsets=torch.zeros(1, dtype=torch.long), list_weights=torch.zeros(0))
    value = build_loss(lambda scores, labels, offsets: scores.max()[None])(found, Scores([]))
    assert (value.total.item(), value.terms) == (0.0, 1)
    value.total.backward()
