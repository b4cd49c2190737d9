"""The weights a run comes back with: brought along to a resumed run, taken from a checkpoint, or those of the start."""

from __future__ import annotations

import logging
from pathlib import Path

from lgmml_torch import distributed
from lgmml_torch.files import sweep, write_bytes
from lgmml_torch.functional.positions import bias_of
from lgmml_torch.functional.ranking.custom import Measure
from lgmml_torch.functional.ranking.measures import mean_measure
from lgmml_torch.models.storage import load_checkpoint, read_model
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.callbacks import KeepCheckpoints, check_same_run, run_of
from lgmml_torch.training.module import LGMMLModule

log = logging.getLogger(__name__)


def bring_best(resume: Path, best_file: Path) -> None:
    """A run resumed in another folder may never beat the best epoch so far: that model has to come along."""
    if not resume.is_file():
        return
    for folder in resume.parents[:2]:  # of checkpoints and of the whole run
        sweep(folder)
    earlier = best_file if best_file.exists() else resume.parent / best_file.name
    if not earlier.is_file():
        log.warning("there is no %s beside %s: its own weights stand in for the best so far", best_file.name, resume)
        earlier = resume
    check_same_run(earlier, run_of(resume))
    if earlier != best_file:
        write_bytes(best_file, earlier.read_bytes())


def take_kept(module: LGMMLModule, file: Path, run: str) -> None:
    """Give all processes the weights of a checkpoint; only the first one needs to see it."""
    model = module.model
    if file.exists() or distributed.place()[0] == 0:
        check_same_run(file, run)
        model.load_state_dict(read_model(file)[1])
        if module.position_bias is not None:
            module.position_bias.data.copy_(load_checkpoint(file)["state_dict"]["position_bias"])
    distributed.copy_of_first(model.state_dict())


def keep_start(module: LGMMLModule, keeper: KeepCheckpoints, valid: RankingData | None, measure: Measure) -> None:
    """No epochs were asked for: the starting weights are the model, and lists are summarised as a fit would."""
    module.on_fit_start()
    keeper.best_epoch = 0
    if valid is not None:
        scores = module.model.eval().score(valid)
        if valid.positions is not None and module.position_bias is not None:
            scores = scores + bias_of(module.position_bias.detach(), valid.positions).to(scores)
        keeper.best = mean_measure(scores, valid, measure)
        keeper.curve[0] = keeper.best
