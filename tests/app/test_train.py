"""The whole path through Hydra, at the smallest size that still does everything."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lgmml_torch.app.compose import load_splits
from lgmml_torch.app.config import check_command, config_dir, load_config
from lgmml_torch.app.start import main
from lgmml_torch.app.train import RunResult, train
from lgmml_torch.checks import CheckpointError, ConfigError, DataError, LGMMLError
from lgmml_torch.data.write import save_table
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.models.ranker import LGMML
from research.ideal import evaluate_ideal
from tests.doors import small_data
from tests.processes import forked

SMALL = [
    "data.num_queries=24",
    "data.num_features=6",
    "loader.num_workers=0",
    "trainer.max_epochs=2",
    "trainer.enable_progress_bar=false",
    "trainer.accelerator=cpu",
    "callbacks.progress=null",
    "trainer.log_every_n_steps=1",
    "threads=1",
]
BOOSTED = ["local_metrics.rounds=6"]
SAMPLED = ["local_metrics=sampled", "local_metrics.num_metrics=5"]
TRAINED = ["experiment=trained", "local_metrics.num_metrics=5", "local_metrics.rank=2", "step_size=constant"]


def small(folder: Path, *overrides: str) -> DictConfig:
    cfg = load_config([*SMALL, *overrides])
    with open_dict(cfg):
        cfg.name = "test"
        cfg.paths.output_dir = str(folder)
        cfg.pop("hydra", None)
    return cfg


def run(folder: Path, *overrides: str) -> RunResult:
    result = train(small(folder, *overrides))
    assert result is not None
    return result


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(tmp_path_factory.mktemp("default"), *BOOSTED)


def test_a_run_leaves_everything_behind(default_run: RunResult) -> None:
    folder = default_run.folder
    for name in ("model.safetensors", "report.md", "report.json", "report.html", "checkpoints/best.ckpt"):
        assert (folder / name).is_file(), name
    assert (folder / "checkpoints/last.ckpt").is_file()
    assert {"## Time", "## Settings", "### Rounds of boosting"} <= set((folder / "report.md").read_text().splitlines())
    report = json.loads((folder / "report.json").read_text())
    assert {"evaluations", "validation curve", "best epoch", "bank", "config"} <= set(report)
    text = (folder / "report.md").read_text()
    for word in ("ndcg@10", "queries", "skipped", "gain 2^y-1"):
        assert word in text


def test_a_run_fits_chances_of_grades_to_its_validation_lists(default_run: RunResult) -> None:
    model, valid = LGMML.load(default_run.folder / "model.safetensors"), default_run.splits["valid"]
    expected = model.calibrated.expected(model.score(valid)).mean()
    torch.testing.assert_close(expected, valid.labels.double().mean(), rtol=1e-5, atol=0)
    page = (default_run.folder / "report.html").read_text()
    assert "Chance to be relevant, and how often it came true" in page


def test_what_to_compare_with_is_tried_before_the_fit(default_run: RunResult, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model file at .*none\.safetensors"):
        run(tmp_path, *BOOSTED, f"reference={tmp_path / 'none.safetensors'}")
    with pytest.raises(LGMMLError, match=r"`features` must have shape \(\*, 6\)"):
        run(tmp_path, *BOOSTED, "data.num_features=7", f"reference={default_run.folder}")
    assert not (tmp_path / "model.safetensors").exists()


def test_training_and_unseen_queries_stay_apart(default_run: RunResult) -> None:
    kinds = [evaluation.split for evaluation in default_run.evaluations]
    assert kinds == ["training queries", "valid: unseen queries", "test: unseen queries"]
    fitted = evaluate_ideal(default_run.folder)  # to the labels of each list
    assert fitted.means["ndcg@10"] >= default_run.evaluations[2].means["ndcg@10"]
    for evaluation in default_run.evaluations:
        assert evaluation.seed == 0
        assert evaluation.counted["ndcg@10"] + evaluation.skipped["ndcg@10"] == len(evaluation.qids)


def tags_of(folder: Path) -> dict[str, set[str]]:
    tags: dict[str, set[str]] = {"scalars": set(), "histograms": set(), "images": set()}
    for file in (folder / "tensorboard").glob("events*"):
        events = EventAccumulator(str(file))
        events.Reload()
        for kind, found in tags.items():
            found |= set(events.Tags()[kind])
    return tags


def test_event_files_hold_the_listed_tags(default_run: RunResult) -> None:
    tags = tags_of(default_run.folder)
    assert {
        "train/loss_step", "train/loss_epoch", "train/violator_rate_step", "train/mean_draws_step",
        "train/gradient_norm", "train/tuples_per_second", "val/ndcg@1", "val/ndcg@5", "val/ndcg@10", "val/map",
        "phi/share_zero", "phi/mean", "lr-SGD", "bank/valid_ndcg", "bank/train_ndcg",
    } <= tags["scalars"]  # fmt: skip
    assert {"phi/values", "metrics/log10_relative_eigenvalues", "metrics/log10_condition"} <= tags["histograms"]
    assert {"metrics/learned", "metrics/spectrum"} <= tags["images"]
    assert not any(tag.startswith(("final/", "test/", "metrics/")) for tag in tags["scalars"])  # no curves


def test_checkpoint_and_report_agree(default_run: RunResult) -> None:
    data = load_splits(small(default_run.folder, *BOOSTED))["test"]
    expected = next(e for e in default_run.evaluations if e.split == "test: unseen queries")
    for name in ("model.safetensors", "checkpoints/best.ckpt"):
        again = evaluate(LGMML.load(default_run.folder / name), data)
        assert again.means == pytest.approx(expected.means, abs=1e-6)


def test_same_seed_same_model_other_seed_other_model(default_run: RunResult, tmp_path: Path) -> None:
    again = run(tmp_path / "again", *BOOSTED)
    other = run(tmp_path / "other", *BOOSTED, "seed=1")
    data = load_splits(small(tmp_path, *BOOSTED))["test"]
    assert torch.equal(again.model.score(data), default_run.model.score(data))
    assert not torch.equal(other.model.score(data), default_run.model.score(data))


@pytest.mark.parametrize("kept", ["last"])
def test_a_run_without_an_epoch_leaves_the_model_it_started_from(kept: str, tmp_path: Path) -> None:
    found = run(tmp_path, *BOOSTED, "trainer.max_epochs=0", f"keep={kept}")
    stored = LGMML.load(tmp_path / "model.safetensors")
    assert torch.equal(stored.phi.table.weight, found.model.phi.table.weight)
    assert (stored.phi.table.weight > 0).any()
    assert list(json.loads((tmp_path / "report.json").read_text())["validation curve"]) in ([], ["0"])


def test_resume_and_warm_start(default_run: RunResult, tmp_path: Path) -> None:
    last = default_run.folder / "checkpoints" / "last.ckpt"
    longer = run(tmp_path / "longer", *BOOSTED, f"resume={last}", "trainer.max_epochs=3")
    report = json.loads((longer.folder / "report.json").read_text())
    assert sorted(map(int, report["validation curve"])) == [0, 1, 2, 3]
    warm = run(tmp_path / "warm", *BOOSTED, f"warm_start={default_run.folder / 'model.safetensors'}", "data.seed=5")
    assert warm.model.metrics.num_metrics == default_run.model.metrics.num_metrics
    with pytest.raises(ConfigError, match="the model to start from has 6 features, the data has 7"):
        run(tmp_path / "bad", "data.num_features=7", f"warm_start={default_run.folder / 'model.safetensors'}")


def test_trained_metrics_resume_and_start_others(default_run: RunResult, tmp_path: Path) -> None:
    first = run(tmp_path / "first", *TRAINED, "trainer.max_epochs=1")
    start = ["trainer.max_epochs=1", "data.seed=5", "keep=last", f"warm_start={first.folder / 'model.safetensors'}"]
    phi, both = run(tmp_path / "phi", *start), run(tmp_path / "both", *TRAINED, *start)
    before, kept, tuned = (result.model.metrics.iter_blocks()[0].factors for result in (first, phi, both))
    assert torch.equal(before, kept)  # metrics are trained only where that is asked for
    assert not torch.equal(before, tuned)
    assert not torch.equal(first.model.phi.table.weight, phi.model.phi.table.weight)
    files = [result.folder / "checkpoints" / "last.ckpt" for result in (default_run, first)]
    with pytest.raises(ConfigError, match=r"last.ckpt were not trained; go on with .* e\.g\. local_metrics=boosted"):
        run(tmp_path / "second", *TRAINED, f"resume={files[0]}")
    with pytest.raises(ConfigError, match=r"last.ckpt were trained; go on with .* e\.g\. experiment=trained"):
        run(tmp_path / "third", *BOOSTED, f"resume={files[1]}")


@pytest.mark.parametrize(
    ("metrics", "phi"), [("extrapolated", "shared"), ("sampled", "amortized"), ("boosted", "deviations")]
)
def test_every_part_trains(phi: str, metrics: str, tmp_path: Path) -> None:
    sizes = BOOSTED if metrics == "boosted" else ["local_metrics.num_metrics=5"]
    result = run(tmp_path, f"local_metrics={metrics}", f"phi={phi}", *sizes, "trainer.max_epochs=1")
    assert all(torch.isfinite(values).any() for e in result.evaluations for values in e.per_query.values())
    if metrics == "sampled":
        assert "metrics/anchor_ndcg" in tags_of(tmp_path)["histograms"]


@pytest.mark.parametrize(
    "options",
    [["experiment=paper", "local_metrics.num_metrics=5"], [*TRAINED, "keep=last"]],
    ids=["paper", "trained"],
)
def test_a_finished_run_goes_on_as_if_it_had_never_stopped(options: list[str], tmp_path: Path) -> None:
    run(tmp_path / "first", *options, "trainer.max_epochs=1")
    last = tmp_path / "first" / "checkpoints" / "last.ckpt"
    longer = run(tmp_path / "longer", *options, "trainer.max_epochs=2", f"resume={last}")
    whole = run(tmp_path / "whole", *options, "trainer.max_epochs=2")
    assert torch.equal(longer.model.phi.table.weight, whole.model.phi.table.weight)


def test_training_without_validation_keeps_the_last_epoch(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    lines = [f"{d % 3} qid:{q} 1:{(d * 7 + q) % 5} 2:{d % 3 + q / 10}" for q in range(8) for d in range(6)]
    (tmp_path / "data" / "train.txt").write_text("\n".join(lines) + "\n")
    drop = [word for word in SMALL if not word.startswith("data.")]
    cfg = load_config([*drop, "data=letor", f"data.name={tmp_path / 'data'}", *BOOSTED])
    with open_dict(cfg):
        cfg.name, cfg.paths.output_dir = "test", str(tmp_path / "run")
        cfg.pop("hydra", None)
    result = train(cfg)
    assert result is not None
    assert result.keeper.best_epoch == 2
    assert result.model.grade_map is None
    assert (
        "No validation queries: the weights of the last epoch (2) were kept"
        in (tmp_path / "run" / "report.md").read_text()
    )
    cfg.search.margin = [0.1, 0.2]
    with pytest.raises(ConfigError, match="`search` needs validation queries"):
        train(cfg)
    (tmp_path / "data" / "train.txt").rename(tmp_path / "data" / "test.txt")
    with pytest.raises(DataError, match="`data` must have a training part, got test"):
        load_splits(cfg)


@pytest.mark.parametrize("kept", ["bfloat16"])
def test_distances_may_be_kept_in_half_precision(kept: str, default_run: RunResult, tmp_path: Path) -> None:
    half = run(tmp_path, *BOOSTED, f"distances={kept}")
    before, after = default_run.model.phi.table.weight, half.model.phi.table.weight
    assert torch.equal(before > 0, after > 0)
    assert (before - after).abs().max() < 0.02 * before.abs().max()


def test_paper_reports_every_policy(tmp_path: Path) -> None:
    result = run(
        tmp_path, "experiment=paper", "local_metrics.num_metrics=6", "search.margin=[0.1]", "search.init=[1.0,0.1]",
        "search.policy=mean", "trainer.max_epochs=2",
    )  # fmt: skip
    policies = [e.policy for e in result.evaluations if e.split == "test: unseen queries"]
    assert policies == ["mean", "knn", "amortized", "ones"]
    assert result.model.metrics.norm == "trace"
    assert result.evaluations[0].policy == "own Φ"


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))


def test_every_choice_composes_and_instantiates(tmp_path: Path) -> None:
    """One choice of every group at a time."""
    needed = {"letor": "data.name=somewhere", "table": "data.path=some.csv", "shards": "data.path=somewhere"}
    needed["folder"] = needed["shards"]
    groups = ("preprocess", "local_metrics", "phi", "optimizer", "step_size", "trainer", "callbacks", "logger")
    rows = [[f"{group}={choice}" for choice in choices(group)] for group in groups]
    combined = [[word for word in row if word] for row in zip_longest(*rows, fillvalue="")]
    combined += [[f"{group}={choice}"] for group in ("experiment", "debug") for choice in choices(group)]
    for words in combined:
        cfg = load_config(words)
        with open_dict(cfg):
            cfg.name, cfg.paths.output_dir = "test", str(tmp_path)
            cfg.pop("hydra", None)
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        for group in groups[:-2]:
            instantiate(cfg[group])
        for part in (*cfg.callbacks.values(), *(cfg.logger or {}).values()):
            if part:
                instantiate(part)
    for choice in choices("data"):
        if not choice.startswith("generated"):
            cfg = load_config([f"data={choice}", *filter(None, [needed.get(choice)]), f"paths.data_dir={tmp_path}"])
            with pytest.raises(DataError, match=r"not found|no such"):
                load_splits(cfg)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["foo=1"], "unknown setting 'foo'"),
        (["phi.polcy=ones"], r"unknown setting 'phi.polcy'; did you mean 'phi.policy'\?"),
        (["data=mq2007"], r"data has no choice 'mq2007'; did you mean 'mq2008'\? \(there are: debian, folder"),
        (["dta=mq2008"], r"unknown setting 'dta'; did you mean 'data'\?"),
        (["seed=[1"], "."),
    ],
)
def test_unknown_keys_get_a_suggestion(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_command(overrides)


def test_a_plain_sweep_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = forked(main, "-m", *SMALL, *BOOSTED, "trainer.max_epochs=1", "logger=none", "seed=0,1")
    assert ended.code == 0, ended.said
    assert len(list(tmp_path.glob("multirun/*/*/model.safetensors"))) == 2
    assert len(list(tmp_path.glob("multirun/*/means.md"))) == 1


def test_sweeps_are_left_to_hydra() -> None:
    check_command(["seed=0,1,2", "hydra.run.dir=x"])


def test_bad_use_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LGMMLError, match=r"`phi\.policy` must be one of 'shared', 'ones', got 'knn'"):
        run(tmp_path / "policy", *BOOSTED, "phi.policy=knn")
    with pytest.raises(LGMMLError, match=r"Adam takes no sparse gradients: set phi.sparse=false"):
        run(tmp_path / "adam", *BOOSTED, "phi=per_query", "optimizer=adam")
    with pytest.raises(LGMMLError, match="`distances` must be one of 'float32', 'float16', 'bfloat16', got 'float8'"):
        run(tmp_path / "half", *BOOSTED, "distances=float8")
    with pytest.raises(ConfigError, match=r"`search\.init` needs metrics without weights of their own"):
        run(tmp_path / "init", *BOOSTED, "search.init=[0.1,1]")
    with pytest.raises(ConfigError, match="colour"):
        run(tmp_path / "extra", *BOOSTED, "+phi.colour=red")
    for choice, key in (("letor", "name"), ("table", "path")):
        with pytest.raises(ConfigError, match=rf"^`data.{key}` must be given, e.g. data.{key}=...$"):
            load_splits(load_config([f"data={choice}"]))
    missing = load_config(["data=mq2008", f"paths.data_dir={tmp_path}/none"])
    with pytest.raises(DataError, match="must name an existing folder"):
        load_splits(missing)


@pytest.mark.parametrize("ending", ["parquet"])
def test_a_table_is_trained_on(tmp_path: Path, ending: str) -> None:
    pd = pytest.importorskip("pandas")
    data = small_data(queries=30, seed=5)
    save_table(data, tmp_path / "all.csv")
    frame = pd.read_csv(tmp_path / "all.csv").rename(columns={"qid": "query", "label": "grade"})
    frame["title"] = "text"
    if ending == "csv":
        frame.to_csv(tmp_path / "clicks.csv", index=False)
    else:
        frame.to_parquet(tmp_path / "clicks.parquet")
    table = ["data=table", f"data.path={tmp_path / 'clicks'}.{ending}", "data.qid=query", "data.label=grade"]
    words = [
        *SMALL[2:],
        *BOOSTED,
        *table,
        "data.drop=[title]",
        "data.fractions=[0.5,0.25,0.25]",
        "trainer.max_epochs=1",
    ]
    cfg = load_config(words)
    with open_dict(cfg):
        cfg.name = "test"
        cfg.paths.output_dir = str(tmp_path / "run")
        cfg.pop("hydra", None)
    result = train(cfg)
    assert result is not None
    assert (len(result.model.qids), result.model.num_features) == (15, 5)
