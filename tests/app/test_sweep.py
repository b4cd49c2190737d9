"""A search with Optuna at toy size, through the real command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lgmml_torch.app.config import check_overrides, load_config
from lgmml_torch.checks import ConfigError

ROOT = Path(__file__).parent.parent.parent
TOY = [
    "data.num_queries=24", "data.num_features=6", "local_metrics.rounds=3", "trainer.max_epochs=1",
    "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "callbacks=quiet", "logger=none",
    "loader.num_workers=0", "evaluation.ideal=false", "threads=1",
]  # fmt: skip


def search(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    words = ["-m", "+hparams_search=optuna", f"paths.cache_dir={folder}/cache"]
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words, *TOY, *overrides],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=560,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_keeps_the_best_of_its_trials(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    done = search(tmp_path, "hydra.sweeper.n_trials=2", "loss.margin=choice(0.1,0.5)")
    assert done.returncode == 0, done.stderr
    (results,) = tmp_path.glob("multirun/optuna/*/optimization_results.yaml")
    found = yaml.safe_load(results.read_text())
    settings = {"local_metrics.shrinkage", "local_metrics.lam", "loss.margin", "optimizer.lr"}
    assert set(found["best_params"]) == settings
    assert found["best_params"]["loss.margin"] in (0.1, 0.5)
    values = []
    for trial in ("0", "1"):
        assert (results.parent / trial / "model.safetensors").is_file()
        curve = yaml.safe_load((results.parent / trial / "report.json").read_text())["validation curve"]
        values.append(max(curve.values()))
    assert found["best_value"] == pytest.approx(max(values))
    assert values[0] != values[1]


def test_the_search_composes_on_top_of_any_run() -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    cfg = load_config(["+hparams_search=optuna", "experiment=quick"])
    assert cfg.local_metrics.rounds == 15
    check_overrides(["+hparams_search=optuna", "local_metrics.shrinkage=interval(0.05,0.2)"])
    with pytest.raises(ConfigError, match="hparams_search has no choice 'optna'; did you mean 'optuna'"):
        check_overrides(["+hparams_search=optna"])
