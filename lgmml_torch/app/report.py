"""What a run leaves behind: the model, tables for people and programs, hyperparameters with the final figures."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger

from lgmml_torch.evaluation.evaluate import Evaluation
from lgmml_torch.evaluation.tables import print_evaluations, run_markdown
from lgmml_torch.files import write_text
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.training.callbacks import KeepCheckpoints

log = logging.getLogger(__name__)


def write_report(
    folder: Path,
    model: LGMML,
    evaluations: Sequence[Evaluation],
    keeper: KeepCheckpoints,
    bank_history: dict[str, Any],
    settings: Any,
    loggers: Sequence[Logger],
) -> None:
    """Write ``model.safetensors``, ``report.md`` and ``report.json``, print the table, and tell the loggers."""
    model.save(folder / "model.safetensors")
    print_evaluations(evaluations)
    page = run_markdown(evaluations, keeper.curve, keeper.best_epoch, settings["name"], settings["chosen"])
    write_text(folder / "report.md", page)
    content = {
        "evaluations": [evaluation.to_dict() for evaluation in evaluations],
        "validation curve": {str(epoch): value for epoch, value in keeper.curve.items()},
        "best epoch": keeper.best_epoch,
        "bank": bank_history,
        "config": settings,
    }
    write_text(folder / "report.json", json.dumps(content, indent=2, default=str))
    final = {f"final/{e.split}/{e.policy}/{name}": value for e in evaluations for name, value in e.means.items()}
    for logger in loggers:
        logger.log_hyperparams(flat(settings), final)
        logger.save()
    log.info("model, report and logs are in %s", folder)


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level of dotted keys.

    >>> flat({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': '[2]'}
    """
    out: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            out.update(flat(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return out
