"""Lightning without the talk that does not apply here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What a library call should not do by itself: print tables, bars and advice.
QUIET: dict[str, Any] = {
    "accelerator": "auto",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "use_distributed_sampler": False,
    "inference_mode": False,
}


SIGNALS = "pytorch_lightning.trainer.connectors.signal_connector"  # who asks for the end hears of it elsewhere


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Leave out advice that does not apply: loaders here hand out row numbers, which costs nothing worth a worker."""
    talkers = ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.rank_zero", SIGNALS)
    for name in talkers:
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")
        warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
        warnings.filterwarnings("ignore", message=".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*")
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
        yield
