"""Settings are checked before data is read: one sentence with the full name of the setting, the rule and the value."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from lgmml_torch.app import compose
from lgmml_torch.app.compose import load_splits
from lgmml_torch.app.config import RUN_SETTINGS, _search_path, check_command, check_settings, config_dir, load_config
from lgmml_torch.app.train import train
from lgmml_torch.checks import ConfigError, LGMMLError
from lgmml_torch.training.recipe import Recipe

PARTS: dict[str, list[str]] = {
    "plain": [],
    "sampled": ["local_metrics=sampled", "phi=per_query"],
    "trained": ["experiment=trained"],
    "amortized": ["local_metrics=boosted", "phi=amortized", "loss=lambdarank"],
}


@pytest.fixture(scope="module")
def configs() -> dict[str, DictConfig]:
    found = {name: load_config(words) for name, words in PARTS.items()}
    for cfg in found.values():
        OmegaConf.set_struct(cfg, False)  # as with +key=value
    return found


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(cfg: DictConfig) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(compose, "load_splits", read)


BAD = [
    ("plain", "seed=-1"), ("plain", "seed=x"), ("plain", "seed=1.5"), ("plain", "seed=4294967296"),
    ("plain", "seed=null"), ("plain", "seed=true"), ("plain", "threads=-1"), ("plain", "threads=0"),
    ("plain", "threads=many"), ("plain", "budget=5"), ("plain", "budget=slow"), ("plain", "distances=float8"),
    ("plain", "keep=first"), ("plain", "deviation_penalty=-1"), ("plain", "deviation_penalty=much"),
    ("plain", "optimizer.lr=-1"), ("plain", "optimizer.lr=abc"), ("plain", "optimizer.lr=0"),
    ("plain", "optimizer.lr=.inf"), ("plain", "optimizer.momentum=-0.5"), ("trained", "optimizer.weight_decay=-1"),
    ("trained", "optimizer.weight_decay=abc"), ("plain", "trainer.max_epochs=two"), ("plain", "trainer.max_epochs=-2"),
    ("plain", "trainer.max_epochs=1.5"), ("plain", "trainer.accelerator=tpuu"), ("plain", "trainer.devices=0"),
    ("plain", "trainer.devices=none"), ("plain", "trainer.strategy=5"), ("plain", "trainer.enable_progress_bar=5"),
    ("plain", "trainer.log_every_n_steps=-5"), ("plain", "trainer.gradient_clip_val=-1"),
    ("plain", "trainer.limit_train_batches=some"), ("plain", "trainer.deterministic=maybe"),
    ("plain", "local_metrics.rounds=ten"), ("plain", "local_metrics.rounds=0"), ("plain", "local_metrics.rounds=2.5"),
    ("plain", "local_metrics.shrinkage=1e30"), ("plain", "local_metrics.shrinkage=abc"),
    ("plain", "local_metrics.sizes=3"), ("plain", "local_metrics.sizes=[1,two]"), ("plain", "local_metrics.lam=-1"),
    ("plain", "local_metrics.t=half"), ("plain", "local_metrics.kernel=7"), ("plain", "local_metrics.patience=null"),
    ("plain", "local_metrics.batch=x"),
    ("sampled", "local_metrics.num_metrics=many"), ("sampled", "local_metrics.bandwidth=wide"),
    ("sampled", "local_metrics.bandwidth=[1,-1]"), ("sampled", "local_metrics.alphas=[far]"),
    ("sampled", "local_metrics.relative=perhaps"), ("sampled", "local_metrics.pool=0"),
    ("trained", "local_metrics.rank=0"), ("trained", "local_metrics.start=cold"),
    ("trained", "dropout.features=1"), ("trained", "dropout.metrics=most"), ("trained", "step_size.warmup=long"),
    ("trained", "preprocess.ramps=-1"), ("plain", "preprocess.max_knots=few"), ("plain", "preprocess.limit=0"),
    ("plain", "loader.batch_size=0"), ("plain", "loader.batch_size=all"), ("plain", "loader.max_draws=0"),
    ("plain", "loader.negatives=none"), ("plain", "loader.num_workers=-1"), ("plain", "loader.num_workers=two"),
    ("plain", "loader.batches_per_epoch=-3"), ("plain", "loss.margin=abc"), ("amortized", "loss.truncation=2.5"),
    ("amortized", "phi.hidden=-1"), ("sampled", "phi.neighbours=0"), ("sampled", "phi.sparse=maybe"),
    ("plain", "phi.mode=shard"), ("plain", "phi.policy=5"), ("plain", "search.margin=0.1"),
    ("plain", "search.margin=[-1]"), ("plain", "search.init=[x]"), ("plain", "search.policy=knn"),
    ("plain", "evaluation.metrics=ndcg@10"), ("plain", "evaluation.metrics=[ndgc@10]"),
    ("plain", "evaluation.preset=letor5"), ("plain", "base=5"), ("plain", "resume=7"),
    ("plain", "callbacks.early_stopping.patience=-1"), ("plain", "callbacks.early_stopping.mode=up"),
]  # fmt: skip


def test_a_bad_setting_is_refused_by_its_full_name(configs: dict[str, DictConfig]) -> None:
    for parts, override in BAD:
        name, _, value = override.partition("=")
        cfg = OmegaConf.merge(configs[parts], OmegaConf.from_dotlist([override]))
        assert isinstance(cfg, DictConfig)
        with pytest.raises(LGMMLError, match=rf"^`{re.escape(name)}[\[`].*, got ") as caught:
            train(cfg)
        assert "\n" not in str(caught.value)
        shown = value.strip("[]").split(",")[-1].replace("1e30", "1e+30").lstrip(".")
        assert shown.replace("null", "None").replace("true", "True") in str(caught.value), override


def test_parts_that_a_run_needs(configs: dict[str, DictConfig]) -> None:
    for name in ("loader", "trainer", "local_metrics"):
        with pytest.raises(ConfigError, match=f"^`{name}` must be one of its choices or a group of settings, got None"):
            train(OmegaConf.merge(configs["plain"], {name: None}))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="data was read"):
        train(OmegaConf.merge(configs["plain"], {"callbacks": None, "logger": None}))  # type: ignore[arg-type]


def test_settings_that_are_right_get_as_far_as_the_data(configs: dict[str, DictConfig]) -> None:
    for cfg in configs.values():
        with pytest.raises(AssertionError, match="data was read"):
            train(cfg)


def test_the_table_names_settings_that_there_are(configs: dict[str, DictConfig]) -> None:
    """A rule for a name that is misspelt would never be asked."""
    optional = ("optimizer.", "trainer.", "callbacks.")  # further arguments of what is made there
    for name in RUN_SETTINGS:
        there = any(OmegaConf.select(cfg, name, default="absent") != "absent" for cfg in configs.values())
        assert there or name.startswith(optional), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=letor"], r"^`data.name` must be given, e.g. data.name=\.\.\.$"),
        (["seed=-1"], "^`seed` must be at least 0, got -1$"),
        (["--config-dir", "nowhere"], "^`--config-dir` must name an existing folder, got nowhere$"),
        (["seed=${nothing}"], "nothing"),
        (["trainer.max_epochs=two", "trainer.max_epoch=2", "--cfg", "job"], "did you mean 'trainer.max_epochs'"),
    ],
)
def test_the_command_line_is_checked_before_hydra_runs(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_command(words)


def test_runs_of_a_sweep_check_themselves() -> None:
    check_command(["-m", "data=letor", "data.name=a,b", "seed=0,1"])
    check_command(["--help", "seed=-1"])
    check_command(["data=letor", "--cfg", "job"])


@pytest.mark.parametrize("how", ["--config-dir", "hydra.searchpath"])
def test_parts_of_ones_own(how: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("_target_: my.own.reader\nwhere: here\n")
    place = ["--config-dir", str(tmp_path)] if how == "--config-dir" else _search_path([f"file://{tmp_path}"])
    check_command([*place, "data=mine", "data.where=there"])
    with pytest.raises(ConfigError, match=r"unknown setting 'data\.were'"):
        check_command([*place, "data=mine", "data.were=there"])
    with pytest.raises(ConfigError, match="data has no choice 'mine'"):
        check_command(["data=mine"])
    assert load_config([*_search_path([f"file://{tmp_path}"]), "data=mine"]).data.where == "here"


def test_quick_goes_with_any_data_and_metrics() -> None:
    words = ["experiment=quick", "data=mq2008", "local_metrics=sampled"]
    cfg = load_config(words)
    check_settings(cfg)
    assert "num_queries" not in cfg.data
    assert "rounds" not in cfg.local_metrics
    quick = load_config(words[:1])
    assert (quick.data.num_queries, quick.local_metrics.rounds, quick.trainer.max_epochs) == (80, 15, 2)


def test_a_model_file_is_no_checkpoint(configs: dict[str, DictConfig]) -> None:
    model = next((Path(__file__).parent.parent / "fixtures").rglob("*.safetensors"))
    with pytest.raises(ConfigError, match=rf"^`resume` must be a checkpoint .* warm_start={re.escape(str(model))}"):
        train(OmegaConf.merge(configs["plain"], {"resume": str(model)}))  # type: ignore[arg-type]
    for name in ("resume", "warm_start"):
        with pytest.raises(LGMMLError, match=r"nowhere\.ckpt"):
            train(OmegaConf.merge(configs["plain"], {name: "nowhere.ckpt"}))  # type: ignore[arg-type]


def test_help_does_without_torch() -> None:
    script = (
        "import sys; sys.argv = ['train.py', '--help']\n"
        "from lgmml_torch.app.start import main\n"
        "try: main()\nfinally: print([name for name in ('torch', 'pytorch_lightning', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=config_dir().parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    for word in ("== Parts ==", "local_metrics: boosted", "data=mq2008", "max_epochs: 10"):
        assert word in done.stdout
    for setting, meaning in (("budget=normal", "how much work"), ("loader.batch_size=32", "lists or triplets"),
                             ("trainer.max_epochs=10", "passes over"), ("loss.margin=0.1", "ζ")):  # fmt: skip
        assert re.search(rf"^{re.escape(setting)} +{meaning}", done.stdout, re.MULTILINE), setting


def test_training_that_leaves_the_numbers_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configs: dict[str, DictConfig]
) -> None:
    monkeypatch.setattr(compose, "load_splits", load_splits)
    small = {
        "data": {"num_queries": 20, "num_features": 5}, "local_metrics": {"rounds": 3}, "optimizer": {"lr": 1e38},
        "paths": {"output_dir": str(tmp_path)}, "name": "test", "logger": None, "callbacks": None, "keep": "last",
        "loader": {"num_workers": 0}, "trainer": {"accelerator": "cpu", "enable_progress_bar": False},
    }  # fmt: skip
    with pytest.raises(LGMMLError, match=r"finite|the loss is"):
        train(OmegaConf.merge(configs["plain"], small))  # type: ignore[arg-type]
    assert not (tmp_path / "model.safetensors").exists()


def test_optimizers_say_what_they_do_not_take(configs: dict[str, DictConfig]) -> None:
    for extra in ({"optimizer": {"lrr": 1}}, {"optimizer": {"dampening": "x", "momentum": 0.1, "nesterov": True}}):
        with pytest.raises(LGMMLError, match="optim"):
            train(OmegaConf.merge(configs["plain"], extra))  # type: ignore[arg-type]


def test_a_recipe_is_rehearsed_with_its_optimizer() -> None:
    from lgmml_torch.fitting.boosted import fit_boosted
    from lgmml_torch.models.preprocess.compose import list_rank_features
    from lgmml_torch.training.recipe import PhiSettings, rehearse

    def negative(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=-1)

    with pytest.raises(ConfigError, match="`optimizer`: Invalid learning rate: -1"):
        rehearse(Recipe(list_rank_features, fit_boosted, phi=PhiSettings(optimizer=negative)))
