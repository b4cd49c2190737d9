"""Boosted local metrics: regions, anchors and Φ chosen stage by stage against the ranking loss.

The score stays −Σ Φᵣ κ(dᵣ) with Φ ≥ 0 and closed-form metrics; each metric lives in a small subspace of features. Every
round fits a few metrics to the LambdaRank gradients of the scores so far. All draws of a round are a function of the
seed and the round alone, so a fit that was interrupted goes on to the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, DataError, DivergedError, check_whole
from lgmml_torch.fitting.bank import Bank, BankBuilder, OnRound, merge_banks
from lgmml_torch.fitting.round import BoostConfig, Problem
from lgmml_torch.functional.boosting import Learners
from lgmml_torch.functional.losses import num_positions, position_curve
from lgmml_torch.functional.measures import Measure, rank_metrics
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.ragged import RankingData

IDLE_ROUNDS = 5  # rounds without any useful candidate after which there is nothing left to fit


@dataclass(frozen=True)
class BoostState:
    """Everything a later call needs to go on as if it had never stopped."""

    round: int  # rounds done
    scores: Tensor  # (N,) float64 scores of the training documents, in the fit's own order
    valid_scores: Tensor  # the same for the validation documents; empty without any
    learners: Learners  # the metrics so far
    evaluated: tuple[int, ...] = ()  # rounds done at each evaluation
    train_ndcg: tuple[float, ...] = ()  # NDCG of the training queries at each evaluation
    valid_ndcg: tuple[float, ...] = ()  # NDCG of the validation queries; empty without any
    best_round: int = 0  # rounds done at the best smoothed validation NDCG
    best_value: float = float("-inf")  # that NDCG
    idle: int = 0  # rounds in a row that found no metric worth adding
    identity: str = ""  # what the fit belongs to (settings, seed, sizes of the data); a resume with another is refused
    # (P,) float64 what being shown at each position adds to a score; None without positions
    position_bias: Tensor | None = None
    best_bias: Tensor | None = None  # the same at the best round
    valid_measure: tuple[float, ...] = ()  # the measure that decides, at each evaluation, where it is another than NDCG

    def export(self) -> dict[str, Any]:
        """Tensors and primitives, fit for ``torch.save`` and ``weights_only=True``.

        Scores are left out: they follow from the metrics, and the size and the number of processes would be theirs.
        """
        plain = {**vars(self), "learners": dict(vars(self.learners))}
        del plain["scores"], plain["valid_scores"]
        return plain

    @classmethod
    def load(cls, exported: dict[str, Any]) -> Self:
        """The state that `export` wrote; a fit that goes on from it adds its scores up again."""
        plain = dict(exported)
        learners = Learners(**plain.pop("learners"))
        none = torch.empty(0, dtype=torch.float64)
        return cls(learners=learners, scores=none, valid_scores=none, **plain)

    @classmethod
    def first(cls, problem: Problem) -> BoostState:
        """Nothing chosen: all scores zero, or those of the bank to go on from, which may turn out to be the best."""
        data, valid, start = problem.data, problem.valid, problem.start
        scores = data.features.new_zeros(data.num_documents, dtype=torch.float64)
        valid_scores = scores.new_empty(0)
        if valid is not None:
            valid_scores = scores.new_zeros(valid.num_documents)
        learners = Learners.empty(max(problem.config.sizes), data.features)
        count = num_positions(data)
        bias = scores.new_zeros(count) if count else None
        state = cls(0, scores, valid_scores, learners, identity=problem.identity, position_bias=bias)
        if start is None:
            return state
        if valid is not None:
            valid_scores = start.score(valid.features).double()
        state = replace(state, scores=start.score(data.features).double(), valid_scores=valid_scores)
        return state.evaluate(problem)

    def one_round(self, problem: Problem) -> BoostState:
        """The state one round later."""
        config = problem.config
        generator = problem.generator(problem.seed, self.round)
        bag = problem.draw_bag(problem.seen(self.scores, problem.data, self.position_bias), generator)
        found = bag.find_learners(config, generator)
        found = replace(found, rounds=torch.full_like(found.rounds, self.round + 1))
        state = replace(self, round=self.round + 1, idle=self.idle + 1)
        if len(found):
            state = replace(state, idle=0)
            state = _with_scores_of(replace(state, learners=Learners.cat([state.learners, found])), found, problem)
            state.check_scores(config)
        if state.position_bias is not None:
            state = replace(state, position_bias=bag.position_step(state.position_bias, config))
        if state.round % config.evaluate_every and state.round < config.rounds:
            return state
        return state.evaluate(problem)

    def evaluate(self, problem: Problem) -> BoostState:
        """The state with what it is worth; lists that come with positions are judged as the loss sees them."""
        data, valid, config = problem.data, problem.valid, problem.config
        ndcg = Measure(f"ndcg@{config.k}")
        train = _measure_of_all(problem.seen(self.scores, data, self.position_bias), data, ndcg)
        if valid is None:
            return self.evaluated_with(train, None, smooth=config.smooth)
        scores = problem.seen(self.valid_scores, valid, self.position_bias)
        value = _measure_of_all(scores, valid, ndcg)
        measured = None
        if problem.measure is not None:
            measured = _measure_of_all(scores, valid, problem.measure)
        return self.evaluated_with(train, value, smooth=config.smooth, measured=measured)

    def check_scores(self, config: BoostConfig) -> None:
        """Require scores that a model of the learners' precision can give: finite ones."""
        phi = self.learners.phi
        totals = phi.cumsum(dim=0)  # the last bounds the score of a κ that is bounded by 1
        if not bool(torch.cat([totals, self.scores.to(phi), self.valid_scores.to(phi)]).isfinite().all()):
            raise DivergedError(
                f"scores are not finite any more in round {self.round} of boosting; no metrics are kept. A smaller "
                f"`shrinkage` (now {config.shrinkage:g}) or a larger `ridge` (now {config.ridge:g}) usually helps"
            )

    def finished(self, config: BoostConfig) -> bool:
        """Whether the rounds are used up, validation has stopped improving, or nothing is left to fit."""
        stale = bool(self.valid_ndcg) and self.round - self.best_round > config.patience
        return self.round >= config.rounds or stale or self.idle >= IDLE_ROUNDS

    def evaluated_with(
        self, train: float, valid: float | None, *, smooth: int, measured: float | None = None
    ) -> BoostState:
        """The state after an evaluation; the best round moves when the average of the last ones is better.

        What is averaged is NDCG, or the measure that was asked for instead.
        """
        after = replace(self, evaluated=(*self.evaluated, self.round), train_ndcg=(*self.train_ndcg, train))
        if valid is None:
            return after
        after = replace(after, valid_ndcg=(*self.valid_ndcg, valid))
        if measured is not None:
            after = replace(after, valid_measure=(*self.valid_measure, measured))
        last = (after.valid_measure or after.valid_ndcg)[-smooth:]
        average = sum(last) / len(last)
        if not average > self.best_value:
            return after
        return replace(after, best_round=self.round, best_value=average, best_bias=self.position_bias)


@dataclass(frozen=True)
class RoundInfo:
    """What `fit_boosted` reports after each round."""

    total: int  # rounds there may be at most
    num_metrics: int  # metrics so far
    train_ndcg: float | None  # NDCG of the training queries; None in rounds without an evaluation
    valid_ndcg: float | None  # NDCG of the validation queries; None likewise, and without validation data
    state: BoostState  # pass it as ``resume``, or store ``state.export()``, to go on from here


@dataclass(frozen=True)
class BoostedBuilder(BoostConfig, BankBuilder):
    """`fit_boosted` with its settings as fields."""

    kind: ClassVar[str] = "boosted"
    grows: ClassVar[bool] = True
    takes_measure: ClassVar[bool] = True
    takes_positions: ClassVar[bool] = True
    takes_shared_lists: ClassVar[bool] = True
    resumes: ClassVar[bool] = True

    def check_call(self, **further: Any) -> None:
        """No rounds at all are fine where there is a ``start``."""
        super().check_call(**further)
        if further.get("start") is None:
            check_whole("rounds", self.rounds)
        if further.get("measure") is not None:
            Measure.of(further["measure"])

    def fit(
        self,
        data: RankingData,
        valid: RankingData | None,
        *,
        seed: int,
        on_round: OnRound | None,
        resume: BoostState | None = None,
        start: Bank | None = None,
        measure: str | Callable[..., Any] | None = None,
    ) -> Bank:
        """See `fit_boosted`."""
        if start is not None and self.rounds == 0:
            return replace(start, history={"rounds": [], "train_ndcg": [], "valid_ndcg": [], "best_round": 0})
        judge = None if measure is None else Measure.of(measure)
        problem = Problem.of(data, valid, self, seed, start, judge)
        state = BoostState.first(problem)
        if resume is not None:
            state = _resumed(resume, state, problem)
        while not state.finished(self):
            state = state.one_round(problem)
            if on_round is not None:
                on_round(state.round, _round_info(state, self.rounds))
        return _make_bank(state, problem)

    def load_state(self, exported: dict[str, Any]) -> BoostState:
        """See `BoostState.load`."""
        return BoostState.load(exported)


def fit_boosted(
    data: RankingData,
    valid: RankingData | None = None,
    *,
    seed: int = 0,
    on_round: OnRound | None = None,
    resume: BoostState | None = None,
    start: Bank | None = None,
    measure: str | Callable[..., Any] | None = None,
    **settings: Any,
) -> Bank:
    """Build a bank of local metrics, with its Φ₀, for new queries.

    Args:
        data: training queries, features preprocessed (standardised; the quantile and list-rank features of
            `lgmml_torch.models.preprocess.compose` suit this best). Where they come with positions, what a position
            adds to a score is fitted along; `Bank.position_bias` has it.
        valid: queries that decide when to stop; without them all rounds are run and kept.
        seed: the same data, seed and settings give the same bank.
        on_round: called as ``on_round(rounds_done, info)`` after every round.
        resume: the state of an earlier call with the same data, seed and settings.
        start: a bank to add rounds to, fitted on whatever data with the same preprocessing; no round at all, asked for
            or kept, gives its metrics and weights back as they are.
        measure: a measure by name, or a function ``(scores, labels, offsets) -> (Q,)``, that decides by ``valid`` when
            to stop and which round is kept; NDCG@k when None.
        **settings: fields of `BoostConfig`.

    Raises:
        ConfigError: for an unknown setting, or a state that belongs to another fit.
        DataError: when no query has documents of different relevance, or no feature tells them apart.

    >>> x = torch.linspace(-1, 1, 40)[:, None]
    >>> data = RankingData.from_arrays(x, (x[:, 0] > 0.5).long(), qid=torch.arange(40) % 4)
    >>> bank = fit_boosted(data, rounds=5, sizes=(1,), candidates=2)
    >>> bool((bank.phi >= 0).all()), round(bank.history["train_ndcg"][-1], 6)
    (True, 1.0)
    """
    builder = BoostedBuilder.of(**settings)
    return builder(data, valid, seed=seed, on_round=on_round, resume=resume, start=start, measure=measure)


def _with_scores_of(state: BoostState, found: Learners, problem: Problem) -> BoostState:
    """The state with what these metrics add to the scores.

    In float64, rounded to float32 where a round looks at them (`Problem.seen`). The place of a document in a product,
    and so the number of processes, changes the last bits of float64 only. The rounding takes them away again.
    """
    kernel, valid = problem.config.kernel, problem.valid
    exact = found.double()

    def added(data: RankingData) -> Tensor:
        return exact.kernels(data.features, kernel) @ exact.phi

    valid_scores = state.valid_scores
    if valid is not None:
        valid_scores = valid_scores - added(valid)
    return replace(state, scores=state.scores - added(problem.data), valid_scores=valid_scores)


def _measure_of_all(scores: Tensor, data: RankingData, measure: Measure) -> float:
    """Mean of a measure over the queries it counts, of all processes that share the data."""
    values = rank_metrics(scores, data.labels, data.offsets, metrics=[measure])[measure.name]
    return float(data.all_lists.per_query(values).nanmean())


def _resumed(state: BoostState, start: BoostState, problem: Problem) -> BoostState:
    """The state with the scores its metrics give, added up round by round as the fit did, so that no bit differs."""
    if state.identity != problem.identity:
        raise ConfigError(
            f"`resume` must belong to this fit ({problem.identity}), got a state of another ({state.identity})"
        )
    state = replace(state, scores=start.scores, valid_scores=start.valid_scores)
    for number in torch.unique(state.learners.rounds).tolist():
        state = _with_scores_of(state, state.learners.select(state.learners.rounds == number), problem)
    return state


def _make_bank(state: BoostState, problem: Problem) -> Bank:
    """The metrics up to the best round, after those of the start."""
    validated, start = bool(state.valid_ndcg), problem.start
    last, bias = state.best_round, state.best_bias
    best: float | None = state.best_value
    if not validated:  # every round counts
        last, bias, best = state.round, state.position_bias, None
    kept = state.learners.select(state.learners.rounds <= last)
    history: dict[str, Any] = {
        "rounds": list(state.evaluated),
        "train_ndcg": list(state.train_ndcg),
        "valid_ndcg": list(state.valid_ndcg),
        "best_round": last,
        "best_valid_ndcg": best,
    }
    if problem.measure is not None:
        history["best_valid_ndcg"] = None
        history |= {"measure": problem.measure.name, "valid_measure": list(state.valid_measure), "best_measure": best}
    if bias is not None:
        history["position_bias"] = position_curve(bias, problem.data)
    if not len(kept):
        if start is None:
            raise DataError("`data` must have a feature that tells documents of a query apart, got none that does")
        return replace(start, history=history, position_bias=bias)
    found = _learned_bank(kept, problem.data.num_features, problem.config.kernel)
    if start is not None:
        assert start.phi is not None
        assert found.phi is not None
        found = merge_banks([replace(start, phi=start.phi.to(found.phi)), found], [1.0, 1.0])
    return replace(found, history=history, position_bias=bias)


def _learned_bank(learners: Learners, num_features: int, kernel: str) -> Bank:
    """A bank with one block for each size of metrics, and Φ in the order of its columns."""
    blocks, phi = [], []
    for width in torch.unique(learners.widths).tolist():
        part = learners.select(learners.widths == width)
        anchors, factors, support = part.anchors[:, :width], part.factors[:, :width, :width], part.support[:, :width]
        blocks.append(
            MetricBlock(anchors.clone(), factors.clone(), support=support.clone(), scales=part.scales.clone())
        )
        phi.append(part.phi)
    return Bank(LocalMetrics(blocks, num_features=num_features), kernel, torch.cat(phi))


def _round_info(state: BoostState, total: int) -> RoundInfo:
    """The report of the round just done."""
    train = valid = None
    if state.evaluated and state.evaluated[-1] == state.round:
        train = state.train_ndcg[-1]
        if state.valid_ndcg:
            valid = state.valid_ndcg[-1]
    return RoundInfo(total, len(state.learners), train, valid, state)
