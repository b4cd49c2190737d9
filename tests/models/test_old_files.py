"""Files written by earlier releases still load, and score as they did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch.checks import CheckpointError
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training.module import LGMMLModule

FIXTURES = Path(__file__).parent.parent / "fixtures"


def test_models_and_checkpoints_of_earlier_releases_load() -> None:
    """``scores.npz`` holds the scores of that release; 0.1 kept those of the model file only."""
    for release in ["release-0.1", "release-0.2"]:
        with np.load(FIXTURES / release / "scores.npz") as stored:
            data = RankingData.from_arrays(stored["features"], np.zeros(len(stored["qid"])), qid=stored["qid"])
            for name in ("model.safetensors", "last.ckpt"):
                found = LGMML.load(FIXTURES / release / name).score_in_caller_order(data)
                assert np.isfinite(found).all()
                expected = {"model.safetensors": stored.get("scores"), **stored}.get(name)
                if expected is not None:
                    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        module = LGMMLModule.load_from_checkpoint(FIXTURES / release / "last.ckpt", weights_only=True)
        again = LGMML.load(FIXTURES / release / "last.ckpt")
        assert torch.equal(module.model.phi.table.weight, again.phi.table.weight)
        assert module.model.phi.mode == {"release-0.1": "per_query", "release-0.2": "shared"}[release]


def test_damage_to_a_model_file_of_release_0_2_is_noticed(tmp_path: Path) -> None:
    content = bytearray((FIXTURES / "release-0.2" / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: its content does not match its checksum"):
        LGMML.load(tmp_path / "m")
