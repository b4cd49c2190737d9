"""Files written by earlier releases still load, and score as they did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.module import LGMMLModule

FOLDER = Path(__file__).parent.parent / "fixtures" / "release-0.1"


@pytest.mark.parametrize("name", ["model.safetensors", "last.ckpt"])
def test_a_model_and_a_checkpoint_of_release_0_1_load(name: str) -> None:
    """``scores.npz`` holds what 0.1 made of the model file; the run kept its best epoch there and went on."""
    model = LGMML.load(FOLDER / name)
    with np.load(FOLDER / "scores.npz") as stored:
        data = RankingData.from_arrays(stored["features"], np.zeros(len(stored["qid"])), qid=stored["qid"])
        found = model.score_in_caller_order(data)
        assert np.isfinite(found).all()
        if name == "model.safetensors":
            np.testing.assert_allclose(found, stored["scores"], rtol=1e-5, atol=1e-6)


def test_a_lightning_checkpoint_of_release_0_1_loads() -> None:
    module = LGMMLModule.load_from_checkpoint(FOLDER / "last.ckpt", weights_only=True)
    again = LGMML.load(FOLDER / "last.ckpt")
    assert torch.equal(module.model.phi.table.weight, again.phi.table.weight)
    assert module.model.phi.mode == "per_query"
