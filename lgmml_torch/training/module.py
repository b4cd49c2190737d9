"""`LGMMLModule`: trains Φ by sampled WARP under Lightning; the local metrics stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lgmml_torch.checks import LGMMLError, check_positive
from lgmml_torch.evaluation.metric import RankingMetrics
from lgmml_torch.functional.ranking.presets import REPORTED
from lgmml_torch.functional.score import kernel, score
from lgmml_torch.functional.warp import WarpOutcome, rank_weight_table, warp_loss
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION, check_header
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.batches import WarpBatch


def constant() -> None:
    """No rule: the optimizer's learning rate stays as it is."""


@dataclass(frozen=True)
class Logistic:
    """μ_t = 1/(1 + exp(t/(100·Q))): half at the start, then falling within a few hundred updates per query.

    >>> Logistic(num_queries=10)(0)
    0.5
    """

    num_queries: int

    def __post_init__(self) -> None:
        check_positive("num_queries", self.num_queries)

    def __call__(self, updates: int) -> float:
        """The factor after so many single updates."""
        # exp overflows beyond 709; the step is zero in any float long before.
        return 1 / (1 + math.exp(min(updates / (100 * self.num_queries), 700.0)))


SPARSE_OPTIMIZERS = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class DivergedError(LGMMLError):
    """The loss is not a number any more; the last good checkpoint is kept."""


class LGMMLModule(pl.LightningModule):
    """Φ by sampled WARP over precomputed distances.

    Loss of a batch: Σ over its tuples of weight · L(rank) · (ζ − f(p⁺) + f(p⁻)); after every step Φ ← max(Φ, 0).

    Args:
        model_spec: from `LGMML.spec`; builds the model again in ``load_from_checkpoint``.
        model: the model itself, when there is one already.
        margin: ζ.
        deviation_penalty: weight of ½‖deviation‖² per tuple, for a shared Φ with deviations.
        optimizer: called with the parameters; plain SGD with step 0.1 when None.
        step_size: factor on the optimizer's learning rate after so many single updates; constant when None.
        preset: metric definitions, see `lgmml_torch.functional.ranking.measures`.
    """

    def __init__(
        self,
        model_spec: dict[str, Any],
        model: LGMML | None = None,
        *,
        margin: float = 0.1,
        deviation_penalty: float = 0.0,
        optimizer: OptimizerFactory | None = None,
        step_size: Callable[[int], float] | None = None,
        preset: str = "default",
    ) -> None:
        super().__init__()
        check_positive("margin", margin)
        check_positive("deviation_penalty", deviation_penalty, zero=True)
        self.save_hyperparameters("model_spec", "margin", "deviation_penalty", "preset", logger=False)
        self.model = LGMML.from_spec(model_spec) if model is None else model
        self.margin, self.deviation_penalty = margin, deviation_penalty
        self._optimizer, self._step_size = optimizer, step_size
        self._data: dict[str, tuple[RankingData, Tensor]] = {}
        self._rank_weights = torch.zeros(1)
        self.counts: dict[str, dict[str, int]] = {}  # queries counted in the last evaluation of a split
        self.valid_metrics = RankingMetrics(REPORTED, preset=preset)
        self.test_metrics = RankingMetrics(REPORTED, preset=preset)

    def attach(
        self,
        split: str,
        data: RankingData,
        dists: Tensor,  # (N, K)
    ) -> None:
        """Give the module the labels and distances of a split (``"train"``, ``"valid"`` or ``"test"``)."""
        self._data[split] = (data, dists)

    def on_fit_start(self) -> None:
        """Move what every batch needs to the device, and let Φ look at the training lists."""
        data, dists = self._split("train")
        longest = int(data.sizes.max())
        self._rank_weights = rank_weight_table(longest, device=self.device)
        if self.device.type != "cpu":
            self._data = {
                name: (data.to(self.device), dists.to(self.device)) for name, (data, dists) in self._data.items()
            }
        data, dists = self._split("train")
        self.model.summarize(dists, data.offsets)

    def training_step(self, batch: WarpBatch, batch_idx: int) -> Tensor:
        """Loss of one batch; the draws decide which pairs count, and only those pairs are differentiated."""
        outcome, total = self.list_loss(batch) if len(batch.lists) else self.triplet_loss(batch)
        if self.deviation_penalty:
            total = total + self.deviation_penalty * self.model.phi.penalty(batch.queries)
        if not bool(torch.isfinite(total)):
            raise DivergedError(
                f"the loss is {float(total)} at step {self.global_step}; training stopped, the last good checkpoint is "
                "kept. A smaller learning rate usually helps"
            )
        self._touched = batch.lists if len(batch.lists) else batch.queries
        tuples = max(1, len(batch.queries))
        found = (outcome.violator >= 0).float().mean() if len(batch.queries) else total.new_zeros(())
        self.log("train/loss", total.detach() / tuples, on_step=True, on_epoch=True, prog_bar=True, batch_size=tuples)
        self.log("train/violator_rate", found, on_step=True, on_epoch=True, batch_size=tuples)
        self.log("train/mean_draws", outcome.draws.float().mean(), on_step=True, on_epoch=True, batch_size=tuples)
        # Processes average their gradients; a batch loss is a sum.
        return total * self.trainer.world_size

    def triplet_loss(self, batch: WarpBatch) -> tuple[WarpOutcome, Tensor]:
        """Sampled WARP on single triplets."""
        _, dists = self._split("train")
        kappa = kernel(dists[batch.rows].to(self.model.phi.table.weight.dtype), self.model.kernel)
        phi = self.model.phi(batch.queries)
        count, width = batch.negatives.shape
        with torch.no_grad():
            pos, neg = kappa[:count], kappa[count:].view(count, width, -1)
            fixed = phi.detach()
            if len(fixed) == 1:
                pos_scores, neg_scores = -(pos @ fixed[0]), -(neg @ fixed[0])
            else:
                pos_scores = -torch.einsum("pk,pk->p", pos, fixed)
                neg_scores = -torch.einsum("ptk,pk->pt", neg, fixed)
            outcome = self._outcome(batch, pos_scores, neg_scores)
            worst = neg[torch.arange(count, device=neg.device), outcome.violator.clamp_min(0)]
            # Only Φ is trained, and the loss is linear in it: ζ + Φ·(κ(p⁺) − κ(p⁻)), weighted.
            slope = outcome.weight[:, None] * (pos - worst)
        return outcome, (outcome.weight * self.margin).sum() + (phi * slope).sum()

    def list_loss(self, batch: WarpBatch) -> tuple[WarpOutcome, Tensor]:
        """Sampled WARP on whole lists: each list is scored once, draws are look-ups."""
        _, dists = self._split("train")
        kappa = kernel(dists[batch.rows].to(self.model.phi.table.weight.dtype), self.model.kernel)
        scores = score(kappa, self.model.phi(batch.lists), batch.list_offsets)
        fixed = scores.detach()
        outcome = self._outcome(batch, fixed[batch.positives], fixed[batch.negatives])
        worst = batch.negatives.gather(1, outcome.violator.clamp_min(0)[:, None])[:, 0]
        loss = outcome.weight * (self.margin - scores[batch.positives] + scores[worst])
        return outcome, loss.sum()

    def _outcome(self, batch: WarpBatch, pos_scores: Tensor, neg_scores: Tensor) -> WarpOutcome:
        return warp_loss(
            pos_scores,
            neg_scores,
            batch.num_negatives,
            margin=self.margin,
            weights=batch.weights,
            num_draws=batch.num_draws,
            table=self._rank_weights,
        )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A step, then Φ ← max(Φ, 0)."""
        super().optimizer_step(*args, **kwargs)
        # Other processes' gradients arrive too, so only a lone process knows which rows have changed.
        alone = self.model.phi.sparse and self.trainer.world_size == 1
        self.model.phi.project_(self._touched if alone else None)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the size of the gradient."""
        grads = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in self.parameters() if p.grad is not None
        ]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        self.log("train/gradient_norm", norm, on_step=True, on_epoch=False)

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
        data, dists = self._split(split)
        start, stop = int(data.offsets[first]), int(data.offsets[last])
        offsets = data.offsets[first : last + 1] - start
        kappa = kernel(dists[start:stop].to(self.model.phi.table.weight.dtype), self.model.kernel)
        rows = torch.arange(first, last, device=kappa.device) if known else None
        return score(kappa, self.model.weights(kappa, offsets, rows=rows), offsets)

    def configure_optimizers(self) -> Any:
        """The optimizer, and the step-size rule counted in single updates."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1) if self._optimizer is None else self._optimizer(parameters)
        if self.model.phi.sparse and not isinstance(optimizer, SPARSE_OPTIMIZERS):
            raise LGMMLError(f"{type(optimizer).__name__} takes no sparse gradients: set phi.sparse=false, or use SGD")
        if self._step_size is None:
            return optimizer
        rule, per_step = self._step_size, self.trainer.datamodule.batches.batch_size * self.trainer.world_size  # type: ignore[attr-defined]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rule(step * per_step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the format, its version and the description of the model."""
        checkpoint[FORMAT] = {"version": VERSION, "spec": self.model.spec()}

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse what this release cannot read."""
        header = checkpoint.get(FORMAT) or {}
        check_header("the checkpoint", FORMAT if header else None, header.get("version"))

    def _evaluate(self, split: str, block: Tensor, metrics: RankingMetrics) -> None:
        first, last = block.tolist()
        data, _ = self._split(split)
        start, stop = int(data.offsets[first]), int(data.offsets[last])
        metrics.update(
            self.block_scores(split, first, last),
            data.labels[start:stop],
            data.offsets[first : last + 1] - start,
            tie_order=data.order[start:stop],
        )

    def _log_metrics(self, prefix: str, metrics: RankingMetrics) -> None:
        self.counts[prefix] = {name: found.counted for name, found in metrics.summary().items()}
        for name, value in metrics.compute().items():
            self.log(f"{prefix}/{name}", value, prog_bar=name == "ndcg@10")
        metrics.reset()

    def _split(self, name: str) -> tuple[RankingData, Tensor]:
        if name not in self._data:
            raise LGMMLError(f"the module has no {name!r} distances; call attach({name!r}, data, dists) first")
        return self._data[name]
