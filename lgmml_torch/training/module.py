"""`LGMMLModule`: trains Φ under Lightning, behind the seam of `losses`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lgmml_torch.checks import DivergedError, LGMMLError, check_number, check_positive
from lgmml_torch.evaluation.metric import RankingMetrics
from lgmml_torch.functional.losses import bias_of
from lgmml_torch.functional.measures import Function, Measure
from lgmml_torch.functional.presets import REPORTED
from lgmml_torch.functional.score import kernel, score, tie_equal_rows
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.models.storage import FORMAT, VERSION, check_archive, check_header
from lgmml_torch.ragged import RankingData
from lgmml_torch.segments import segment_ids
from lgmml_torch.training.batches import mixed_seed
from lgmml_torch.training.callbacks import Horizon, StepSize
from lgmml_torch.training.losses import Loss, LossValue, TrainingBatch, Warp, build_loss
from lgmml_torch.training.preprocessed import Views

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
DEFAULT_OPTIMIZER: OptimizerFactory = partial(torch.optim.SGD, lr=0.001)
_POSITION_RATE = 20.0  # how much faster biases of positions move than metrics, which are many and each small
_SPARSE_OPTIMIZERS = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)


@dataclass(frozen=True)
class Dropout:
    """Shares of features and of metrics that a training batch does without; only metrics that are trained have use."""

    features: float = 0.0  # of each document, drawn for itself
    metrics: float = 0.0  # of each document's kernel values

    def __post_init__(self) -> None:
        for name in ("features", "metrics"):
            check_number(f"dropout.{name}", getattr(self, name))
            if not 0 <= getattr(self, name) < 1:
                raise LGMMLError(f"`dropout.{name}` must be at least 0 and below 1, got {getattr(self, name)}")


class _Lists(NamedTuple):
    """What evaluating and training need of a split, on the device of the module."""

    labels: Tensor  # (N,)
    offsets: Tensor  # (Q+1,)
    order: Tensor  # (N,)
    inputs: Tensor | Views  # (N, K) distances, or (N, D) preprocessed features where the metrics are trained
    positions: Tensor | None = None  # (N,)

    def part(self, rows: Tensor | slice, offsets: Tensor) -> Tensor:  # (M,), (B+1,) -> (M, K) or (M, D)
        """The inputs of some whole lists."""
        if isinstance(self.inputs, Tensor):
            return self.inputs[rows]
        return self.inputs.of(rows, offsets)


class LGMMLModule(pl.LightningModule):
    """Φ over precomputed distances, or Φ and the metrics over preprocessed features; after every step Φ ← max(Φ, 0).

    Whether metrics are trained is the model's own: `LocalMetrics.train_metrics_` makes parameters of them.

    Args:
        model_spec: from `LGMML.spec`; builds the model again in ``load_from_checkpoint``.
        model: the model itself, when there is one already.
        loss: what is minimised, see `build_loss`; sampled WARP when None.
        deviation_penalty: weight of ½‖deviation‖² per tuple (or list), for a shared Φ with deviations.
        optimizer: called with the parameters; `DEFAULT_OPTIMIZER` when None.
        step_size: how the optimizer's learning rate rises and falls; constant when None.
        dropout: for trained metrics.
        seed: of what is dropped.
        preset: metric definitions, see `lgmml_torch.functional.presets`.
        num_positions: of the training documents, where they come with any: each has a bias that the loss adds to the
            scores, trained with the metrics where these are trained, otherwise what the boosting found.
        measure: what is measured on validation and test lists beside the usual.
    """

    position_bias: Tensor | None

    def __init__(
        self,
        model_spec: dict[str, Any],
        model: LGMML | None = None,
        *,
        loss: Loss | Function | Mapping[str, Any] | None = None,
        deviation_penalty: float = 0.0,
        optimizer: OptimizerFactory | None = None,
        step_size: StepSize | None = None,
        dropout: Dropout | None = None,
        preset: str = "default",
        seed: int = 0,
        num_positions: int = 0,
        measure: Measure | None = None,
    ) -> None:
        super().__init__()
        check_positive("deviation_penalty", deviation_penalty, zero=True)
        self.loss = build_loss(loss or Warp())
        settings = {"loss": self.loss.spec(), "deviation_penalty": deviation_penalty, "preset": preset}
        if num_positions:
            settings["num_positions"] = num_positions
        self.save_hyperparameters({"model_spec": model_spec, **settings}, logger=False)
        self.model = model or LGMML.from_spec(model_spec)
        self.deviation_penalty = deviation_penalty
        self._optimizer, self._step_size = optimizer or DEFAULT_OPTIMIZER, step_size
        self.dropout, self.seed = dropout or Dropout(), seed
        self.trains_metrics = self.model.metrics.trained  # inputs are features then, also when training is over
        self._data: dict[str, tuple[RankingData, Tensor | Views]] = {}
        self._placed: dict[str, _Lists] = {}
        self._moved: Tensor | None = None  # rows of Φ that the coming step moves; None: any
        self.counts: dict[str, dict[str, int]] = {}  # queries counted in the last evaluation of a split
        self._add_position_bias(num_positions)
        asked: list[str | Measure] = list(REPORTED)
        if measure is not None:
            asked.append(measure)
        self.valid_metrics = RankingMetrics(asked, preset=preset)
        self.test_metrics = RankingMetrics(asked, preset=preset)

    def _add_position_bias(self, count: int) -> None:
        """A parameter where the metrics are trained, otherwise a buffer."""
        if count and self.trains_metrics:
            self.position_bias = nn.Parameter(torch.zeros(count))
        elif count:
            self.register_buffer("position_bias", torch.zeros(count))
        else:
            self.register_buffer("position_bias", None)

    def attach(self, split: str, data: RankingData, inputs: Tensor | Views) -> None:
        """Give the module the labels and inputs of a split (``"train"``, ``"valid"`` or ``"test"``).

        Inputs are distances ``(N, K)``, or preprocessed features ``(N, D)`` where the metrics are trained.
        """
        self._data[split] = (data, inputs)
        self._placed.pop(split, None)

    def data_of(self, split: str) -> RankingData:
        """The lists of a split, as they were attached."""
        return self._data[split][0]

    def inputs_of(self, split: str) -> Tensor | Views:
        """The inputs of a split, as they were attached."""
        return self._data[split][1]

    def on_fit_start(self) -> None:
        """Let Φ look at the training lists."""
        if self.model.phi.needs_summaries:
            lists = self.lists("train")
            everything = lists.part(slice(None), lists.offsets)
            self.model.summarize(self._distances(everything), lists.offsets, self.data_of("train").all_lists.per_query)

    def training_step(self, batch: TrainingBatch, batch_idx: int) -> Tensor:
        """Loss of one batch."""
        found = self.batch_loss(batch, batch_idx)
        total = found.total
        if not len(batch.rows):
            total = total.detach() + self._nothing()
        if self.deviation_penalty:
            queries = batch.queries if len(batch.positives) else batch.lists
            total = total + self.deviation_penalty * self.model.phi.penalty(queries)
        if not bool(torch.isfinite(total)):
            raise DivergedError(
                f"the loss is {float(total)} at step {self.global_step}; training stopped, the last good checkpoint is "
                "kept. A smaller learning rate usually helps"
            )
        total = total * self.trainer.world_size  # processes average their gradients, and those of a batch add up
        terms = max(1, found.terms)
        curves = {"loss": total.detach() / terms, **found.facts}
        for name, value in curves.items():  # of all processes: three numbers cost less than a second call for the epoch
            shown = name == "loss"
            self.log(
                f"train/{name}", value, on_step=True, on_epoch=True, prog_bar=shown, batch_size=terms, sync_dist=True
            )
        return total

    def _nothing(self) -> Tensor:
        """Zero, with gradients of zero for all that is trained: DDP waits for them on every rank."""
        nothing = list[Tensor]()
        if isinstance(self.position_bias, nn.Parameter):
            nothing.append(self.position_bias[:0])
        no_rows = torch.zeros(0, dtype=torch.long, device=self.device)
        for part in self.model.modules():
            if isinstance(part, nn.Embedding):
                nothing.append(part(no_rows).flatten())
                continue
            for parameter in part.parameters(recurse=False):
                if parameter.requires_grad:
                    nothing.append(parameter.flatten()[:0])
        return torch.cat(nothing).sum()

    def batch_loss(self, batch: TrainingBatch, batch_idx: int = 0) -> LossValue:
        """The loss of a batch, differentiable in all that is trained."""
        inputs = self.lists("train").part(batch.rows, batch.list_offsets)
        kappa = self._batch_kappa(inputs, batch, batch_idx)
        owner = segment_ids(batch.list_offsets)

        def scores(places: Tensor | None) -> Tensor:
            phi: Tensor = self.model.phi(batch.lists)
            if places is None:
                return self._shown(score(kappa, phi, batch.list_offsets), "train", batch.rows)
            if len(phi) != 1:
                phi = phi[owner[places]]
            return self._shown(-(kappa[places] * phi).sum(dim=1), "train", batch.rows[places])

        return self.loss(batch, scores)

    def _shown(self, scores: Tensor, split: str, rows: Tensor | slice) -> Tensor:  # (M,), (M,) -> (M,)
        """Scores with the biases of the positions where the documents were shown, where there are any."""
        positions = self.lists(split).positions
        if positions is None or self.position_bias is None:
            return scores
        return scores + bias_of(self.position_bias, positions[rows]).to(scores.dtype)

    def _batch_kappa(self, inputs: Tensor, batch: TrainingBatch, batch_idx: int) -> Tensor:  # (M, K or D) -> (M, K)
        """κ of a training batch; what is dropped is a function of the seed, the step and the whole batch alone."""
        inputs = inputs.to(self.model.phi.table.weight.dtype)
        if not self.trains_metrics:
            return kernel(inputs, self.model.kernel)
        draws = torch.Generator(inputs.device).manual_seed(mixed_seed(self.seed, self.global_step, batch_idx, 0))
        kept = _dropped(inputs, self.dropout.features, draws, batch)
        return _dropped(kernel(self.model.metrics.traced(kept), self.model.kernel), self.dropout.metrics, draws, batch)

    @torch.no_grad()
    def _distances(self, inputs: Tensor) -> Tensor:  # (M, K) or (M, D) -> (M, K)
        if self.trains_metrics:
            inputs = self.model.metrics(inputs)
        return inputs.to(self.model.phi.table.weight.dtype)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the size of the gradient, and note which rows of Φ the step will move."""
        norms = []
        for parameter in self.parameters():
            values = parameter.grad
            if values is not None and values.is_sparse:
                values = values.coalesce().values()
            if values is not None:
                norms.append(torch.linalg.vector_norm(values))
        self.log("train/gradient_norm", torch.linalg.vector_norm(torch.stack(norms)), on_step=True, on_epoch=False)
        self._moved = None
        gradient = self.model.phi.table.weight.grad
        remembers = optimizer.param_groups[0].get("momentum")
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
    def block_scores(
        self, split: str, first: int, last: int, *, known: bool = False, policy: str | None = None
    ) -> Tensor:
        """Scores of the lists first … last − 1 of a split; ``known`` uses each training query's own weights."""
        lists = self.lists(split)
        start, stop = int(lists.offsets[first]), int(lists.offsets[last])
        offsets = lists.offsets[first : last + 1] - start
        kappa = kernel(self._distances(lists.part(slice(start, stop), offsets)), self.model.kernel)
        rows = None
        if known:
            rows = self.data_of(split).all_lists.own[first:last].to(kappa.device)
        scores = score(kappa, self.model.weights(kappa, offsets, policy=policy, rows=rows), offsets)
        if not bool(scores.isfinite().all()):
            raise DivergedError(
                f"scores of the {split} lists are not finite at step {self.global_step}; no model is kept"
            )
        return tie_equal_rows(scores, self._data[split][0].features[start:stop], offsets)

    def configure_optimizers(self) -> Any:
        """The optimizer, and the step-size rule counted in single updates."""
        parameters = [p for p in self.parameters() if p.requires_grad and p is not self.position_bias]
        optimizer = make_optimizer(self._optimizer, parameters, sparse=self.model.phi.sparse)
        if isinstance(self.position_bias, nn.Parameter):
            faster = {"lr": _POSITION_RATE * optimizer.param_groups[0]["lr"], "weight_decay": 0.0}
            optimizer.add_param_group({"params": [self.position_bias], **faster})
        if self._step_size is None:
            return optimizer
        rule, batches = self._step_size, self.trainer.datamodule.batches  # type: ignore[attr-defined]
        per_step, epoch = batches.batch_size, batches.batches_per_epoch
        # Counted here: Lightning's own estimate would set the loader up before a checkpoint says where it stands.
        steps = self.trainer.max_steps
        if steps <= 0:
            steps = (self.trainer.max_epochs or 1) * epoch
        horizon = Horizon(len(batches.all_lists), steps * per_step)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rule(step * per_step, horizon))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **settings: Any) -> Self:
        """As in Lightning, of a file that is whole, and of tensors and plain values unless ``weights_only=False``.

        Raises:
            CheckpointError: bytes of it were changed.
        """
        if isinstance(checkpoint_path, (str, Path)) and Path(checkpoint_path).is_file():
            with Path(checkpoint_path).open("rb") as stream:
                check_archive(stream, checkpoint_path)
        return super().load_from_checkpoint(checkpoint_path, *args, **{"weights_only": True, **settings})

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
        rows = slice(int(lists.offsets[first]), int(lists.offsets[last]))
        scores = self.block_scores(split, first, last)
        if split == "valid":
            scores = self._shown(scores, split, rows)
        offsets = lists.offsets[first : last + 1] - rows.start
        metrics.update(scores, lists.labels[rows], offsets, tie_order=lists.order[rows])

    def _log_metrics(self, prefix: str, metrics: RankingMetrics) -> None:
        self.counts[prefix] = {name: found.counted for name, found in metrics.summary().items()}
        for name, value in metrics.compute().items():
            # All processes have the same value by now; Lightning is told to average so that it does not warn.
            self.log(f"{prefix}/{name}", value, prog_bar=name == "ndcg@10", sync_dist=True)
        metrics.reset()

    def lists(self, name: str) -> _Lists:
        """A split where the module is: moved there when it is first asked for; raw features stay where they are."""
        if name not in self._data:
            raise LGMMLError(f"the module has no {name!r} lists; call attach({name!r}, data, inputs) first")
        placed, device = self._placed.get(name), self.device
        if placed is None or placed.inputs.device != device:
            data, inputs = self._data[name]
            placed = _Lists(data.labels.to(device), data.offsets.to(device), data.order.to(device), inputs.to(device))
            if data.positions is not None:
                placed = placed._replace(positions=data.positions.to(device))
            self._placed[name] = placed
        return placed


def make_optimizer(
    factory: OptimizerFactory, parameters: Iterable[nn.Parameter], *, sparse: bool
) -> torch.optim.Optimizer:
    """The optimizer, if it and its weight decay suit the gradients."""
    optimizer = factory(parameters)
    name = type(optimizer).__name__
    if sparse and not isinstance(optimizer, _SPARSE_OPTIMIZERS):
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
    batch: TrainingBatch,
) -> Tensor:  # (M, ...)
    """The values with a share of them set to zero, the others raised so that the mean stays.

    Drawn for the whole batch, so that it does not matter how many processes share it.
    """
    if not share:
        return values
    drawn = torch.rand((batch.whole.rows, *values.shape[1:]), generator=generator, device=values.device)
    if len(drawn) != len(values):
        drawn = drawn[batch.places]
    kept = drawn >= share
    return values * kept / (1 - share)
