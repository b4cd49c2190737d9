"""Throughput of the training loop: `LGMMLModule` under Lightning against a bare torch loop with the same arithmetic.

Run with ``python -m research.speed.training``. Settings follow as ``name=value``:

    metrics=500    K
    batch=4096     triplets in a batch
    draws=10       negatives drawn for each positive
    steps=30       timed steps of a round
    rounds=5       rounds, the two loops in turn
    documents=40000
    threads=2      cores
    phi=shared     or per_query, whose gradients are sparse

Both loops take the same batches from the same kind of loader, look up the same distances and find the same Φ. The
target is 60% of the bare loop's triplets per second.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn

from lgmml_torch.data.generated import letor_like
from lgmml_torch.functional.warp import rank_weight_table
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.preprocess.compose import Chain
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.batches import BatchLoader, RankingDataModule, TrainingBatches
from lgmml_torch.training.callbacks import QUIET, quiet_lightning
from lgmml_torch.training.losses import Warp
from lgmml_torch.training.module import LGMMLModule
from research.speed.harness import parse, print_table, save_result
from research.stats import target_word

DEFAULTS: dict[str, Any] = {
    "metrics": 500, "batch": 4096, "draws": 10, "steps": 30, "rounds": 5, "documents": 40_000, "threads": 2,
    "phi": "shared",
}  # fmt: skip
SHARE = 0.6
WARMUP = 3
MARGIN, STEP = 0.1, 1e-4


class Timer(Callback):
    """Seconds of the steps after the first few."""

    def __init__(self) -> None:
        self.start, self.seconds = 0.0, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Start after the warm-up, stop at the last step."""
        if trainer.global_step == WARMUP:
            self.start = time.perf_counter()
        self.seconds = time.perf_counter() - self.start


def lightning(data: RankingData, dists: Tensor, settings: dict[str, Any]) -> tuple[float, Tensor]:
    """Seconds of the timed steps, and Φ after them."""
    count = settings["metrics"]
    bank = LocalMetrics([MetricBlock(torch.zeros(count, 1), torch.ones(count, 1, 1))], num_features=1)
    sparse = settings["phi"] == "per_query"
    phi = Phi(data.num_queries, count, mode=settings["phi"], sparse=sparse)
    model = LGMML(Chain([]).fit(data.features[:, :1], data.offsets), bank, phi)
    module = LGMMLModule(
        model.spec(), model, loss=Warp(MARGIN), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=STEP)
    )
    module.attach("train", data, dists)
    steps = WARMUP + settings["steps"]
    loader = RankingDataModule(
        data, batching="triplets", batch_size=settings["batch"], max_draws=settings["draws"], batches_per_epoch=steps
    )
    timer = Timer()
    with tempfile.TemporaryDirectory() as folder, quiet_lightning():
        own: dict[str, Any] = {
            "max_steps": steps, "limit_val_batches": 0, "callbacks": [timer], "logger": False,
            "log_every_n_steps": 50, "enable_checkpointing": False, "default_root_dir": folder,
        }  # fmt: skip
        pl.Trainer(**{**QUIET, **own}).fit(module, loader)
    return timer.seconds, module.model.phi.table.weight.detach()


def bare(data: RankingData, dists: Tensor, settings: dict[str, Any]) -> tuple[float, Tensor]:
    """The same in plain torch, without logging, hooks, checks or projection beyond what the method asks for."""
    batches = TrainingBatches(
        data,
        batching="triplets",
        batch_size=settings["batch"],
        max_draws=settings["draws"],
        batches_per_epoch=WARMUP + settings["steps"],
    )
    own = settings["phi"] == "per_query"
    phi = nn.Parameter(torch.ones(data.num_queries if own else 1, settings["metrics"]))
    weights = rank_weight_table(int(data.sizes.max())).to(phi.dtype)
    start = 0.0
    for step, batch in enumerate(BatchLoader(batches)):
        if step == WARMUP:
            start = time.perf_counter()
        count, width = batch.negatives.shape
        d = dists[batch.rows]
        kappa = d * torch.exp(-d)
        with torch.no_grad():
            rows = phi[batch.queries] if own else phi
            tuples = kappa.view(count, width + 1, -1)
            pos, neg = tuples[:, 0], tuples[:, 1:]
            f_pos = -(pos * rows).sum(1) if own else -(pos @ rows[0])
            f_neg = -torch.einsum("ptk,pk->pt", neg, rows) if own else -(neg @ rows[0])
            draw = torch.arange(width)
            hit = (MARGIN + f_neg > f_pos[:, None]) & (draw < batch.num_draws[:, None])
            first = torch.where(hit, draw, width).amin(dim=1)
            rank = (batch.num_negatives // (first + 1)).clamp_min(1)
            weight = torch.where(first < width, weights[rank] * batch.weights.to(phi.dtype), 0.0)
            worst = neg[torch.arange(count), first.clamp_max(width - 1)]
            slope = weight[:, None] * (pos - worst)
            if own:
                phi.index_add_(0, batch.queries, slope, alpha=-STEP)
            else:
                phi.sub_(slope.sum(dim=0), alpha=STEP)
            phi.clamp_(min=0)
    return time.perf_counter() - start, phi.detach()


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Time both loops in turn and compare."""
    data = letor_like(settings["documents"] // 120, 3, num_documents=settings["documents"], informative=2)
    dists = torch.rand(settings["documents"], settings["metrics"], generator=torch.Generator().manual_seed(0)) * 2
    seconds: dict[str, list[float]] = {"lightning": [], "bare": []}
    for _ in range(settings["rounds"]):
        found = {"lightning": lightning(data, dists, settings), "bare": bare(data, dists, settings)}
        for name, (spent, _) in found.items():
            seconds[name].append(spent)
    difference = float((found["lightning"][1] - found["bare"][1]).abs().max())
    share = statistics.median(b / a for a, b in zip(seconds["lightning"], seconds["bare"], strict=True))
    triplets = settings["batch"] * settings["steps"]
    rates = {name: triplets / statistics.median(values) for name, values in seconds.items()}
    return {
        "settings": settings,
        "triplets_per_second": rates,
        "share_of_bare": share,
        "largest_difference_of_phi": difference,
        "largest_change_of_phi": float((found["bare"][1] - 1).abs().max()),
        "met": share >= SHARE,
    }


def main() -> None:
    settings = parse(sys.argv[1:], DEFAULTS, __doc__, choices={"phi": ("shared", "per_query")})
    torch.set_num_threads(settings["threads"])
    result = run(settings)
    rates = result["triplets_per_second"]
    rows = [(name, rate) for name, rate in rates.items()]
    print_table("Triplets per second", ("loop", "triplets/s"), rows)
    moved, difference = result["largest_change_of_phi"], result["largest_difference_of_phi"]
    print(f"the steps change Φ by up to {moved:.2g}; the two loops differ by at most {difference:.2g}")
    print(f"share of the bare loop: {result['share_of_bare']:.0%}, target {SHARE:.0%}: {target_word(result['met'])}")
    name = "training" if settings["phi"] == "shared" else f"training-{settings['phi']}"
    print(f"saved {save_result(name, result).name}")


if __name__ == "__main__":
    main()
