"""Boosted local metrics: regions, anchors and Φ chosen stage by stage against the ranking loss.

The score stays −Σ Φᵣ κ(dᵣ) with Φ ≥ 0 and closed-form metrics; each metric lives in a small subspace of features. Every
round fits a few metrics to the LambdaRank gradients of the scores so far. All draws of a round are a function of the
seed and the round alone, so a fit that was interrupted goes on to the same result.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from lgmml_torch.checks import ConfigError, DataError, did_you_mean
from lgmml_torch.fitting.bank import Bank, OnRound, checked_by
from lgmml_torch.fitting.boosted.learners import BoostConfig, BoostState, Learners
from lgmml_torch.fitting.boosted.search import Problem, draw_bag, find_learners, make_problem, round_generator
from lgmml_torch.functional.ranking.measures import ndcg
from lgmml_torch.ragged import RankingData

IDLE_ROUNDS = 5  # rounds without any useful candidate after which there is nothing left to fit


@dataclass(frozen=True)
class RoundInfo:
    """What `fit_boosted` reports after each round.

    Attributes:
        total: rounds there may be at most.
        num_metrics: metrics so far.
        train_ndcg: NDCG of the training queries; None in rounds without an evaluation.
        valid_ndcg: NDCG of the validation queries; None likewise, and without validation data.
        best_round: rounds up to which the bank would be kept if the fit ended now.
        state: pass it as ``resume``, or store ``state.export()``, to go on from here.
    """

    total: int
    num_metrics: int
    train_ndcg: float | None
    valid_ndcg: float | None
    best_round: int
    state: BoostState


def make_config(**settings: Any) -> BoostConfig:
    """The settings as a checked `BoostConfig`."""
    known = [field.name for field in fields(BoostConfig)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"`{name}` is no setting of fit_boosted{did_you_mean(name, known)}")
    return BoostConfig(**settings)


@checked_by(make_config)
def fit_boosted(
    data: RankingData,
    valid: RankingData | None = None,
    *,
    seed: int = 0,
    on_round: OnRound | None = None,
    resume: BoostState | None = None,
    **settings: Any,
) -> Bank:
    """Build a bank of local metrics, with its Φ₀, for queries nobody has seen.

    Args:
        data: training queries, features preprocessed (standardised; the quantile and list-rank features of
            `lgmml_torch.models.preprocess.compose` suit this best).
        valid: queries that decide when to stop; without them all rounds are run and kept.
        seed: the same data, seed and settings give the same bank.
        on_round: called as ``on_round(rounds_done, info)`` after every round.
        resume: the state of an earlier call with the same data, seed and settings.
        **settings: fields of `BoostConfig`.

    Raises:
        ConfigError: for an unknown setting, or a state that belongs to another fit.
        DataError: when no query has documents of different relevance, or no feature tells them apart.

    >>> x = torch.linspace(-1, 1, 40)[:, None]
    >>> data = RankingData.from_arrays(x, (x[:, 0] > 0.5).long(), qid=torch.arange(40) % 4)
    >>> bank = fit_boosted(data, rounds=5, sizes=(1,), candidates=2)
    >>> bool((bank.phi >= 0).all()), bank.history["train_ndcg"]
    (True, [1.0])
    """
    config = make_config(**settings)
    problem = make_problem(data, valid, config, seed)
    state = resume or initial_state(problem)
    if state.identity != problem.identity:
        raise ConfigError(
            f"`resume` must belong to this fit ({problem.identity}), got a state of another ({state.identity})"
        )
    while not finished(state, config):
        state = one_round(state, problem)
        if on_round is not None:
            on_round(state.round, round_info(state, config.rounds))
    return make_bank(state, config.kernel, data.num_features)


def one_round(state: BoostState, problem: Problem) -> BoostState:
    """The state one round later."""
    data, valid, config = problem.data, problem.valid, problem.config
    generator = round_generator(problem.seed, state.round)
    bag, wide = draw_bag(data, state.scores, problem.usable, problem.ideal, config, generator)
    found = find_learners(bag, wide, problem.prior, config, generator)
    found = replace(found, rounds=torch.full_like(found.rounds, state.round + 1))
    state = replace(state, round=state.round + 1, idle=0 if len(found) else state.idle + 1)
    if len(found):
        state = replace(
            state,
            learners=Learners.cat([state.learners, found]),
            scores=state.scores - (found.kernels(data.features, config.kernel) @ found.phi).double(),
            valid_scores=state.valid_scores
            if valid is None
            else state.valid_scores - (found.kernels(valid.features, config.kernel) @ found.phi).double(),
        )
    if state.round % config.evaluate_every and state.round < config.rounds:
        return state
    train = float(ndcg(state.scores, data.labels, data.offsets, k=config.k))
    value = None if valid is None else float(ndcg(state.valid_scores, valid.labels, valid.offsets, k=config.k))
    return state.evaluated_with(train, value, smooth=config.smooth)


def finished(state: BoostState, config: BoostConfig) -> bool:
    """Whether the rounds are used up, validation has stopped improving, or nothing is left to fit."""
    stale = bool(state.valid_ndcg) and state.round - state.best_round > config.patience
    return state.round >= config.rounds or stale or state.idle >= IDLE_ROUNDS


def make_bank(state: BoostState, kernel: str, num_features: int) -> Bank:
    """The metrics up to the best round."""
    last = state.best_round if state.valid_ndcg else state.round  # without validation every round counts
    kept = state.learners.select(state.learners.rounds <= last)
    if not len(kept):
        raise DataError("`data` must have a feature that tells documents of a query apart, got none that does")
    metrics, phi = kept.local_metrics(num_features)
    history = {
        "rounds": list(state.evaluated),
        "train_ndcg": list(state.train_ndcg),
        "valid_ndcg": list(state.valid_ndcg),
        "best_round": last,
        "best_valid_ndcg": state.best_value if state.valid_ndcg else None,
    }
    return Bank(metrics, kernel, phi, history)


def initial_state(problem: Problem) -> BoostState:
    """Nothing chosen, all scores zero."""
    data, valid = problem.data, problem.valid
    scores = data.features.new_zeros(data.num_documents, dtype=torch.float64)
    valid_scores = scores.new_zeros(0 if valid is None else valid.num_documents)
    learners = Learners.empty(max(problem.config.sizes), data.features)
    return BoostState(0, scores, valid_scores, learners, identity=problem.identity)


def round_info(state: BoostState, total: int) -> RoundInfo:
    """The report of the round just done."""
    fresh = bool(state.evaluated) and state.evaluated[-1] == state.round
    return RoundInfo(
        total=total,
        num_metrics=len(state.learners),
        train_ndcg=state.train_ndcg[-1] if fresh else None,
        valid_ndcg=state.valid_ndcg[-1] if fresh and state.valid_ndcg else None,
        best_round=state.best_round,
        state=state,
    )
