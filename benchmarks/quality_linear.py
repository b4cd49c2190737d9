"""One weight per feature, trained on the same features and the same LambdaRank loss as the boosted metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.quality_trees import Score, mean_ndcg
from lgmml_torch.baselines.simple import LinearRanker, RandomRanker
from lgmml_torch.experiments.sources import RankingFold
from lgmml_torch.functional.lambdarank import ideal_dcg, lambda_gradients
from lgmml_torch.models.preprocess import list_rank_features

STEPS, EVERY, RATE = 150, 5, 0.02


def fit_linear(fold: RankingFold, seed: int, chosen: Mapping[str, Any]) -> tuple[dict[str, Score], dict[str, Any]]:
    """Adam on all lists at once; validation NDCG@10 keeps the best step."""
    features = list_rank_features()
    train = fold.train.replace(features=features.fit_transform(fold.train.features, fold.train.offsets))
    valid = fold.valid.replace(features=features(fold.valid.features, fold.valid.offsets))
    weights = torch.zeros(train.num_features, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=RATE)
    ideal = ideal_dcg(train.labels, train.offsets)
    best, kept, kept_step = -1.0, weights.detach().clone(), 0
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            scores = train.features @ weights
            gradients, _ = lambda_gradients(scores, train.labels.to(scores), train.offsets, ideal=ideal)
            weights.grad = -(train.features.mT @ gradients.to(scores)) / train.num_queries
        optimizer.step()
        if step % EVERY == 0:
            value = mean_ndcg(valid.features @ weights.detach(), valid)
            if value > best:
                best, kept, kept_step = value, weights.detach().clone(), step
    return {"linear": lambda data: features(data.features, data.offsets) @ kept}, {"step": kept_step}


def fit_ridge(fold: RankingFold, seed: int, chosen: Mapping[str, Any]) -> tuple[dict[str, Score], dict[str, Any]]:
    """Ridge regression on the same features; validation chooses the penalty."""
    features = list_rank_features()
    train = fold.train.replace(features=features.fit_transform(fold.train.features, fold.train.offsets))
    valid = fold.valid.replace(features=features(fold.valid.features, fold.valid.offsets))
    ranker = LinearRanker().fit(train, valid)
    score: Score = lambda data: ranker.score(data.replace(features=features(data.features, data.offsets)))  # noqa: E731
    return {"ridge": score}, dict(ranker.chosen)


def fit_random(fold: RankingFold, seed: int, chosen: Mapping[str, Any]) -> tuple[dict[str, Score], dict[str, Any]]:
    """Random order."""
    return {"random": RandomRanker(seed).fit(fold.train, fold.valid).score}, {}
