"""A training batch, and its losses behind one small interface: what the Lightning module calls of them.

A loss gets a batch and a function that scores documents of it, and answers with a total to be differentiated. Which
documents it scores, and which of the scores carry gradients, the loss decides; how scores depend on Φ, or on metrics
that are trained, is autograd's. A function of whole lists is a loss by `ListLoss`. Any other new loss is a class with
the four members of `Loss`, named in `LOSSES`, and a file in ``conf/loss/``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from lgmml_torch.checks import ConfigError, check_choice, check_positive, check_whole
from lgmml_torch.functional.losses import label_difference_loss, lambda_gradients, softmax_loss, spearman_loss
from lgmml_torch.functional.measures import Function, one_per_query
from lgmml_torch.functional.warp import WarpOutcome, rank_weight_table, warp_loss


class Whole(NamedTuple):
    """Sizes of a batch that ranks share."""

    lists: int
    rows: int
    tuples: int


class TrainingBatch(NamedTuple):
    """Some lists, and for losses that draw, P tuples of (list, positive, T drawn negatives) of them.

    Documents are numbered by their place in ``rows``. Triplets are lists too: the positive and its draws, each with the
    weights Φ of its query. Where ranks share a batch, this is the part of one of them.
    """

    rows: Tensor  # (M,) documents the batch needs, as rows of the training data
    lists: Tensor  # (B,) the query of each list, numbered in the whole training data
    list_offsets: Tensor  # (B+1,) where each list stands in ``rows``
    list_weights: Tensor  # (B,) of the queries
    labels: Tensor  # (M,)
    document_weights: Tensor  # (M,); ``weights`` has those of the positives in it
    positives: Tensor  # (P,) place of the positive in ``rows``
    negatives: Tensor  # (P, T) places of the drawn negatives
    num_negatives: Tensor  # (P,) number of documents they were drawn from
    num_draws: Tensor  # (P,) number of the T draws that count
    weights: Tensor  # (P,)
    places: Tensor  # (M,) where the documents stand in the whole batch
    whole: Whole  # sizes of the whole batch

    @property
    def queries(self) -> Tensor:  # (P,)
        """The query of each tuple."""
        return self.lists[torch.bucketize(self.positives, self.list_offsets, right=True) - 1]


Score = Callable[[Tensor | None], Tensor]
"""Differentiable scores of the documents at the given places of a batch's rows; of all of them for None."""


@dataclass(frozen=True)
class LossValue:
    """The loss of a batch."""

    total: Tensor  # () to be differentiated; what processes that share a batch find adds up to its loss
    terms: int  # of how many terms that loss is the sum; logs show the mean
    facts: dict[str, Tensor] = field(default_factory=dict)  # further numbers worth a curve, by name


class Loss(Protocol):
    """What the module needs of a loss."""

    draws: ClassVar[bool]
    """Whether batches must come with drawn negatives."""

    @property
    def name(self) -> str:
        """What logs and descriptions call it."""

    def __call__(self, batch: TrainingBatch, score: Score) -> LossValue:
        """The loss of a batch."""

    def spec(self) -> dict[str, Any]:
        """Name and settings as primitives, from which `build_loss` makes the loss again."""


@dataclass(frozen=True)
class _Named:
    """Losses whose settings are the fields of a dataclass."""

    name: ClassVar[str]

    def spec(self) -> dict[str, Any]:
        """Name and settings as primitives."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class Warp(_Named):
    """Sampled WARP: Σ over tuples of weight · L(rank) · (ζ − f(p⁺) + f(p⁻)), p⁻ the first drawn violator."""

    name: ClassVar[str] = "warp"
    draws: ClassVar[bool] = True
    margin: float = 0.1  # ζ

    def __post_init__(self) -> None:
        check_positive("margin", self.margin)

    def __call__(self, batch: TrainingBatch, score: Score) -> LossValue:
        """Draws decide on fixed scores which pairs count; only those pairs are differentiated."""
        tuples, width = batch.negatives.shape
        few = 2 * tuples < len(batch.rows)  # triplets: most documents are only looked at
        with torch.set_grad_enabled(torch.is_grad_enabled() and not few):
            scores = score(None)
        outcome = self.outcome(batch, scores.detach())
        worst = batch.positives
        if width:
            worst = batch.negatives.gather(dim=1, index=outcome.violator.clamp_min(0)[:, None])[:, 0]
        pair = torch.cat([batch.positives, worst])
        chosen = score(pair) if few else scores[pair]
        total = (outcome.weight * (self.margin - chosen[:tuples] + chosen[tuples:])).sum()
        found, draws, count = (outcome.violator >= 0).to(total.dtype), outcome.draws.to(total.dtype), max(1, tuples)
        facts = {"violator_rate": found.sum() / count, "mean_draws": draws.sum() / count}
        return LossValue(total, batch.whole.tuples, facts)

    def outcome(self, batch: TrainingBatch, scores: Tensor) -> WarpOutcome:  # (M,)
        """Violators, ranks and weights at given scores; weights are 0 where nothing violates."""
        most = int(batch.num_negatives.max()) if len(batch.num_negatives) else 0
        return warp_loss(
            scores[batch.positives],
            scores[batch.negatives],
            batch.num_negatives,
            margin=self.margin,
            weights=batch.weights,
            num_draws=batch.num_draws,
            table=_rank_weights(most, scores.device),
        )


@dataclass(frozen=True)
class Softmax(_Named):
    """Listwise softmax with gains as targets: −Σ_q w_q Σ_i (gain_i/Σ gain) · log softmax(f)_i, mean over the lists."""

    name: ClassVar[str] = "softmax"
    draws: ClassVar[bool] = False
    temperature: float = 1.0  # scores are divided by it

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)

    def __call__(self, batch: TrainingBatch, score: Score) -> LossValue:
        """One term for each list."""
        scores = score(None) / self.temperature
        values = softmax_loss(scores, batch.labels, batch.list_offsets, weights=batch.document_weights)
        return LossValue((values * batch.list_weights).sum() / batch.whole.lists, 1)


@dataclass(frozen=True)
class LambdaRank(_Named):
    """The linear surrogate −Σ gᵢ·fᵢ of LambdaRank's gradients g, mean over the lists."""

    name: ClassVar[str] = "lambdarank"
    draws: ClassVar[bool] = False
    sigma: float = 1.0  # slope of the pairwise probability
    truncation: int = 30  # pairs need a document among the first ``truncation`` places

    def __post_init__(self) -> None:
        check_positive("sigma", self.sigma)
        check_whole("truncation", self.truncation)

    def __call__(self, batch: TrainingBatch, score: Score) -> LossValue:
        """Gradients at fixed scores; the surrogate has exactly these."""
        scores = score(None)
        lists = (scores.detach(), batch.labels.to(scores.dtype), batch.list_offsets)
        gradients, _ = lambda_gradients(*lists, weights=batch.document_weights, **asdict(self))
        weights = batch.list_weights.to(scores.dtype).repeat_interleave(batch.list_offsets.diff())
        return LossValue(-(gradients * weights * scores).sum() / batch.whole.lists, 1)


@dataclass(frozen=True)
class ListLoss:
    """A function ``(scores, labels, offsets) -> (Q,)`` of whole lists, differentiable in the scores; their mean."""

    draws: ClassVar[bool] = False
    name: str  # a built-in one, or the dotted name of the function, which is all that `spec` holds of it
    function: Function | None = field(default=None, repr=False)  # None where only its name is known

    def spec(self) -> dict[str, Any]:
        """The name."""
        return {"name": self.name}

    def __call__(self, batch: TrainingBatch, score: Score) -> LossValue:
        """One term for each list; refused where the function is not known, or gives no differentiable values."""
        if self.function is None:
            raise ConfigError(
                f"the loss {self.name!r} is a function of yours, of which a checkpoint keeps the name only: pass it "
                "again, e.g. LGMMLModule.load_from_checkpoint(file, loss=my_function)"
            )
        scores = score(None)
        if not len(batch.lists):  # which a function need not be ready for
            return LossValue(scores.sum(), 1)
        what = f"the loss {self.name!r}"
        values = one_per_query(what, self.function(scores, batch.labels, batch.list_offsets), batch.list_offsets)
        if scores.requires_grad and not values.requires_grad:
            raise ConfigError(f"{what} must be differentiable in the scores, got values without gradients")
        return LossValue((values * batch.list_weights).sum() / batch.whole.lists, 1)


LOSSES: dict[str, Callable[..., Any]] = {loss.name: loss for loss in (Warp, Softmax, LambdaRank)}
LOSSES["spearman"] = partial(ListLoss, "spearman", spearman_loss)
LOSSES["label_differences"] = partial(ListLoss, "label_differences", label_difference_loss)


def build_loss(given: Loss | Function | Mapping[str, Any] | str) -> Loss:
    """A loss as it is, by its name, by its `Loss.spec`, or of a function, see `ListLoss`.

    >>> build_loss({"name": "warp", "margin": 0.5}), build_loss(spearman_loss)
    (Warp(margin=0.5), ListLoss(name='lgmml_torch.functional.losses.spearman_loss'))
    """
    if hasattr(given, "spec"):
        return cast("Loss", given)
    if callable(given):
        name = getattr(given, "__qualname__", type(given).__qualname__)
        return ListLoss(f"{given.__module__}.{name}", given)
    settings: dict[str, Any] = {"name": given}
    if isinstance(given, Mapping):
        settings = dict(given)
        if "." in str(settings.get("name")):
            return ListLoss(settings["name"])
    name = settings.pop("name", None)
    check_choice("loss", name, LOSSES)
    try:
        loss: Loss = LOSSES[name](**settings)
    except TypeError as error:
        raise ConfigError(f"loss {name!r} does not take these settings: {error}") from error
    return loss


@lru_cache(maxsize=4)
def _rank_weights(most: int, device: torch.device) -> Tensor:
    return rank_weight_table(1 << most.bit_length(), device=device)
