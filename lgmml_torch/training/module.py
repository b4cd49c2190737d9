"""`LGMMLModule`: trains Φ under Lightning, behind the seam of `losses`; and how the step size falls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lgmml_torch.checks import LGMMLError, check_positive, check_unit_interval
from lgmml_torch.evaluation.metric import RankingMetrics
from lgmml_torch.functional.ranking.presets import REPORTED
from lgmml_torch.functional.score import kernel, score, tie_equal_rows
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION, check_header
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_ids
from lgmml_torch.training.batches import TrainingBatch, mixed_seed
from lgmml_torch.training.losses import Loss, LossValue, Warp, build_loss

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
DEFAULT_OPTIMIZER: OptimizerFactory = partial(torch.optim.SGD, lr=0.001)
SPARSE_OPTIMIZERS = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)


class Horizon(NamedTuple):
    """How far training goes: what a rule for the step size may depend on."""

    queries: int
    updates: int  # single updates in all: batches times their size


StepSize = Callable[[int, Horizon], float]
"""Factor on the learning rate after so many single updates."""


def constant() -> None:
    """No rule: the optimizer's learning rate stays as it is."""


@dataclass(frozen=True)
class Logistic:
    """μ_t = 1/(1 + exp(t/(100·Q))): half at the start, then falling within a few hundred updates per query.

    >>> Logistic()(0, Horizon(queries=10, updates=100))
    0.5
    """

    def __call__(self, updates: int, horizon: Horizon) -> float:
        """The factor after so many single updates."""
        # exp overflows beyond 709; the step is zero in any float long before.
        return 1 / (1 + math.exp(min(updates / (100 * horizon.queries), 700.0)))


@dataclass(frozen=True)
class OneCycle:
    """A rise along half a cosine over the share ``warmup`` of all updates, then a fall along the other half to zero.

    >>> rule, horizon = OneCycle(warmup=0.25, start=0.0), Horizon(queries=10, updates=100)
    >>> [round(rule(t, horizon), 3) for t in (0, 25, 100)]
    [0.0, 1.0, 0.0]
    """

    warmup: float = 0.15
    start: float = 0.04

    def __post_init__(self) -> None:
        check_unit_interval("warmup", self.warmup)
        check_unit_interval("start", self.start)

    def __call__(self, updates: int, horizon: Horizon) -> float:
        """The factor after so many single updates."""
        done = min(1.0, updates / max(1, horizon.updates))
        if done < self.warmup:
            return self.start + (1 - self.start) * (1 - math.cos(math.pi * done / self.warmup)) / 2
        return (1 + math.cos(math.pi * (done - self.warmup) / max(1e-9, 1 - self.warmup))) / 2


@dataclass(frozen=True)
class Dropout:
    """Shares of features and of metrics that a training batch does without; only metrics that are trained have use.

    Attributes:
        features: of each document, drawn for itself.
        metrics: of each document's kernel values.
    """

    features: float = 0.0
    metrics: float = 0.0

    def __post_init__(self) -> None:
        for name in ("features", "metrics"):
            if not 0 <= getattr(self, name) < 1:
                raise LGMMLError(f"`dropout.{name}` must be at least 0 and below 1, got {getattr(self, name)}")


class Lists(NamedTuple):
    """What evaluating and training need of a split, on the device of the module."""

    labels: Tensor  # (N,)
    offsets: Tensor  # (Q+1,)
    order: Tensor  # (N,)
    inputs: Tensor  # (N, K) distances, or (N, D) preprocessed features where the metrics are trained


class DivergedError(LGMMLError):
    """The loss is not a number any more; the last good checkpoint is kept."""


class LGMMLModule(pl.LightningModule):
    """Φ over precomputed distances, or Φ and the metrics over preprocessed features; after every step Φ ← max(Φ, 0).

    Whether metrics are trained is the model's own: `LocalMetrics.train_metrics_` makes parameters of them.

    Args:
        model_spec: from `LGMML.spec`; builds the model again in ``load_from_checkpoint``.
        model: the model itself, when there is one already.
        loss: what is minimised, or its `Loss.spec`; sampled WARP when None.
        deviation_penalty: weight of ½‖deviation‖² per tuple (or list), for a shared Φ with deviations.
        optimizer: called with the parameters; `DEFAULT_OPTIMIZER` when None.
        step_size: how the optimizer's learning rate rises and falls; constant when None.
        dropout: for trained metrics.
        seed: of what is dropped.
        preset: metric definitions, see `lgmml_torch.functional.ranking.presets`.
    """

    def __init__(
        self,
        model_spec: dict[str, Any],
        model: LGMML | None = None,
        *,
        loss: Loss | Mapping[str, Any] | None = None,
        deviation_penalty: float = 0.0,
        optimizer: OptimizerFactory | None = None,
        step_size: StepSize | None = None,
        dropout: Dropout | None = None,
        preset: str = "default",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_positive("deviation_penalty", deviation_penalty, zero=True)
        self.loss: Loss = Warp() if loss is None else build_loss(loss) if isinstance(loss, Mapping) else loss
        settings = {"loss": self.loss.spec(), "deviation_penalty": deviation_penalty, "preset": preset}
        self.save_hyperparameters({"model_spec": model_spec, **settings}, logger=False)
        self.model = LGMML.from_spec(model_spec) if model is None else model
        self.deviation_penalty = deviation_penalty
        self._optimizer, self._step_size = optimizer or DEFAULT_OPTIMIZER, step_size
        self.dropout, self.seed = dropout or Dropout(), seed
        self.trains_metrics = self.model.metrics.trained  # inputs are features then, also when training is over
        self._data: dict[str, tuple[RankingData, Tensor]] = {}
        self._placed: dict[str, Lists] = {}
        self._moved: Tensor | None = None  # rows of Φ that the coming step moves; None: any
        self.counts: dict[str, dict[str, int]] = {}  # queries counted in the last evaluation of a split
        self.valid_metrics = RankingMetrics(REPORTED, preset=preset)
        self.test_metrics = RankingMetrics(REPORTED, preset=preset)

    def attach(
        self,
        split: str,
        data: RankingData,
        inputs: Tensor,  # (N, K) distances; (N, D) preprocessed features where the metrics are trained
    ) -> None:
        """Give the module the labels and inputs of a split (``"train"``, ``"valid"`` or ``"test"``)."""
        self._data[split] = (data, inputs)
        self._placed.pop(split, None)

    def on_fit_start(self) -> None:
        """Let Φ look at the training lists."""
        if self.model.phi.needs_summaries:
            lists = self.lists("train")
            self.model.summarize(self._distances(lists.inputs), lists.offsets)

    def training_step(self, batch: TrainingBatch, batch_idx: int) -> Tensor:
        """Loss of one batch."""
        found = self.batch_loss(batch, batch_idx)
        total = found.total
        if self.deviation_penalty:
            total = total + self.deviation_penalty * self.model.phi.penalty(
                batch.queries if len(batch.positives) else batch.lists
            )
        if not bool(torch.isfinite(total)):
            raise DivergedError(
                f"the loss is {float(total)} at step {self.global_step}; training stopped, the last good checkpoint is "
                "kept. A smaller learning rate usually helps"
            )
        terms = max(1, found.terms)
        curves = {"loss": total.detach() / terms, **found.facts}
        for name, value in curves.items():  # of all processes: three numbers cost less than a second call for the epoch
            shown = name == "loss"
            self.log(
                f"train/{name}", value, on_step=True, on_epoch=True, prog_bar=shown, batch_size=terms, sync_dist=True
            )
        return total * self.trainer.world_size if found.summed else total  # processes average their gradients

    def batch_loss(self, batch: TrainingBatch, batch_idx: int = 0) -> LossValue:
        """The loss of a batch, differentiable in all that is trained."""
        kappa = self._batch_kappa(self.lists("train").inputs[batch.rows], batch_idx)
        owner = segment_ids(batch.list_offsets)

        def scores(places: Tensor | None) -> Tensor:
            phi: Tensor = self.model.phi(batch.lists)
            if places is None:
                return score(kappa, phi, batch.list_offsets)
            rows = phi if len(phi) == 1 else phi[owner[places]]
            return -(kappa[places] * rows).sum(dim=1)

        return self.loss(batch, scores)

    def _batch_kappa(
        self,
        inputs: Tensor,  # (M, K) or (M, D)
        batch_idx: int,
    ) -> Tensor:  # (M, K)
        """κ of a training batch; what is dropped is a function of the seed, the batch and the process alone."""
        inputs = inputs.to(self.model.phi.table.weight.dtype)
        if not self.trains_metrics:
            return kernel(inputs, self.model.kernel)
        place = (self.global_step, batch_idx, self.global_rank)
        draws = torch.Generator(inputs.device).manual_seed(mixed_seed(self.seed, *place))
        kept = _dropped(inputs, self.dropout.features, draws)
        return _dropped(kernel(self.model.metrics.traced(kept), self.model.kernel), self.dropout.metrics, draws)

    @torch.no_grad()
    def _distances(
        self,
        inputs: Tensor,  # (M, K) or (M, D)
    ) -> Tensor:  # (M, K)
        found: Tensor = self.model.metrics(inputs) if self.trains_metrics else inputs
        return found.to(self.model.phi.table.weight.dtype)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the size of the gradient, and note which rows of Φ the step will move."""
        grads = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in self.parameters() if p.grad is not None
        ]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        self.log("train/gradient_norm", norm, on_step=True, on_epoch=False)
        self._moved = None
        gradient = self.model.phi.table.weight.grad
        remembers = any(group.get("momentum") or group.get("weight_decay") for group in optimizer.param_groups)
        if gradient is not None and gradient.is_sparse and not remembers:  # accumulated, and of all processes
            self._moved = gradient.coalesce().indices()[0]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A step, then Φ ← max(Φ, 0) on every row that it may have moved."""
        super().optimizer_step(*args, **kwargs)
        self.model.phi.project_(self._moved)
        if self.model.metrics.trained:
            self.model.metrics.project_()

    def validation_step(self, block: Tensor, batch_idx: int) -> None:
        """Rank whole lists of unseen queries."""
        self._evaluate("valid", block, self.valid_metrics)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics over all lists of all processes."""
        self._log_metrics("val", self.valid_metrics)

    def test_step(self, block: Tensor, batch_idx: int) -> None:
        """Rank whole lists."""
        self._evaluate("test", block, self.test_metrics)

    def on_test_epoch_end(self) -> None:
        """Log the metrics over all lists of all processes."""
        self._log_metrics("test", self.test_metrics)

    @torch.no_grad()
    def validate_now(self, blocks: Iterable[Tensor]) -> dict[str, float]:
        """Validation metrics of the weights as they are, outside Lightning's loops."""
        for block in blocks:
            self._evaluate("valid", block, self.valid_metrics)
        values = {f"val/{name}": float(value) for name, value in self.valid_metrics.compute().items()}
        self.valid_metrics.reset()
        return values

    @torch.no_grad()
    def block_scores(self, split: str, first: int, last: int, *, known: bool = False) -> Tensor:
        """Scores of the lists first … last − 1 of a split; ``known`` uses each training query's own weights."""
        lists = self.lists(split)
        start, stop = int(lists.offsets[first]), int(lists.offsets[last])
        offsets = lists.offsets[first : last + 1] - start
        kappa = kernel(self._distances(lists.inputs[start:stop]), self.model.kernel)
        rows = torch.arange(first, last, device=kappa.device) if known else None
        scores = score(kappa, self.model.weights(kappa, offsets, rows=rows), offsets)
        return tie_equal_rows(scores, self._data[split][0].features[start:stop], offsets)

    def configure_optimizers(self) -> Any:
        """The optimizer, and the step-size rule counted in single updates."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = make_optimizer(self._optimizer, parameters, sparse=self.model.phi.sparse)
        if self._step_size is None:
            return optimizer
        rule, batches = self._step_size, self.trainer.datamodule.batches  # type: ignore[attr-defined]
        per_step = batches.batch_size * self.trainer.world_size
        # Counted here: Lightning's own estimate would set the loader up before a checkpoint says where it stands.
        epoch = max(1, batches.batches_per_epoch // self.trainer.world_size)
        steps = self.trainer.max_steps if self.trainer.max_steps > 0 else (self.trainer.max_epochs or 1) * epoch
        horizon = Horizon(len(batches.offsets) - 1, steps * per_step)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rule(step * per_step, horizon))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the format, its version and the description of the model; Φ < 0 must never be written."""
        self.model.phi.check()
        checkpoint[FORMAT] = {"version": VERSION, "spec": self.model.spec()}

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse what this release cannot read."""
        header = checkpoint.get(FORMAT) or {}
        check_header("the checkpoint", FORMAT if header else None, header.get("version"))

    def _evaluate(self, split: str, block: Tensor, metrics: RankingMetrics) -> None:
        first, last = block.tolist()
        lists = self.lists(split)
        start, stop = int(lists.offsets[first]), int(lists.offsets[last])
        metrics.update(
            self.block_scores(split, first, last),
            lists.labels[start:stop],
            lists.offsets[first : last + 1] - start,
            tie_order=lists.order[start:stop],
        )

    def _log_metrics(self, prefix: str, metrics: RankingMetrics) -> None:
        self.counts[prefix] = {name: found.counted for name, found in metrics.summary().items()}
        for name, value in metrics.compute().items():
            # All processes have the same value by now; Lightning is told to average so that it does not warn.
            self.log(f"{prefix}/{name}", value, prog_bar=name == "ndcg@10", sync_dist=True)
        metrics.reset()

    def lists(self, name: str) -> Lists:
        """A split where the module is: moved there when it is first asked for; raw features stay where they are."""
        if name not in self._data:
            raise LGMMLError(f"the module has no {name!r} lists; call attach({name!r}, data, inputs) first")
        placed = self._placed.get(name)
        if placed is None or placed.inputs.device != self.device:
            data, inputs = self._data[name]
            placed = Lists(*(x.to(self.device) for x in (data.labels, data.offsets, data.order, inputs)))
            self._placed[name] = placed
        return placed


def make_optimizer(
    factory: OptimizerFactory, parameters: Iterable[nn.Parameter], *, sparse: bool
) -> torch.optim.Optimizer:
    """The optimizer, if it suits the gradients.

    Raises:
        LGMMLError: it, or its weight decay, takes no gradients of that kind.
    """
    optimizer = factory(parameters)
    name = type(optimizer).__name__
    if sparse and not isinstance(optimizer, SPARSE_OPTIMIZERS):
        raise LGMMLError(f"{name} takes no sparse gradients: set phi.sparse=false, or use SGD")
    if not sparse and isinstance(optimizer, torch.optim.SparseAdam):
        raise LGMMLError(f"{name} takes sparse gradients only: set phi.sparse=true, or use Adam")
    decay = max(group.get("weight_decay") or 0.0 for group in optimizer.param_groups)
    if sparse and decay:
        raise LGMMLError(
            f"`weight_decay` must be 0 with sparse gradients, got {decay}: set phi.sparse=false to have it"
        )
    return optimizer


def _dropped(
    values: Tensor,  # (M, ...)
    share: float,
    generator: torch.Generator,
) -> Tensor:  # (M, ...)
    """The values with a share of them set to zero, the others raised so that the mean stays."""
    if not share:
        return values
    kept = torch.rand(values.shape, generator=generator, device=values.device) >= share
    return values * kept / (1 - share)
