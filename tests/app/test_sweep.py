"""Searches for settings at toy size: they go on, stop bad trials, and leave tables; means over plain sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lgmml_torch.app import cli, sweep
from lgmml_torch.app.compose import build
from lgmml_torch.app.config import MeansOfJobs, load_config
from lgmml_torch.app.report import means_markdown
from lgmml_torch.app.sweep import Search
from lgmml_torch.app.train import train
from lgmml_torch.checks import ConfigError, DataError, MissingDependencyError
from tests.app.test_train import small

TOY = [
    "data.num_queries=24", "data.num_features=6", "local_metrics.rounds=3", "trainer.max_epochs=1",
    "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "callbacks=quiet", "logger=none",
    "loader.num_workers=0", "threads=1",
]  # fmt: skip
optuna = pytest.importorskip("optuna")

BOOSTED = "local_metrics=boosted"


def test_a_search_goes_on_and_keeps_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", *TOY, "loss.margin=choice(0.1,0.5)", "--folder", str(tmp_path), "--trials"]
    assert cli.main([*words, "1"]) == 0
    first = (tmp_path / "0" / "model.safetensors").read_bytes()
    assert cli.main([*words, "2"]) == 0
    assert (tmp_path / "0" / "model.safetensors").read_bytes() == first
    values = []
    for number in range(2):
        facts = json.loads((tmp_path / str(number) / "trial.json").read_text())
        report = json.loads((tmp_path / str(number) / "report.json").read_text())
        assert facts["state"] == "complete"
        assert facts["validation ndcg@10"] == pytest.approx(max(report["validation curve"].values()))
        assert set(facts["settings"]) == {"local_metrics.shrinkage", "local_metrics.lam", "loss.margin", "optimizer.lr"}
        assert report["config"]["loss"]["margin"] in (0.1, 0.5)
        values.append(facts["validation ndcg@10"])
    study = optuna.load_study(study_name="lgmml", storage=f"sqlite:///{tmp_path}/study.db")
    assert study.best_value == pytest.approx(max(values))  # maximised
    assert study.trials[0].params != study.trials[1].params
    best = values.index(max(values))
    assert f"the best trial: {tmp_path / str(best)}" in capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "study.png").stat().st_size > 1000
    assert (tmp_path / "study.md").read_text().splitlines()[4].startswith(f"| {best} | {max(values):.4f} | finished |")


def pretend_to_train(monkeypatch: pytest.MonkeyPatch, values: list[Any]) -> list[list[str]]:
    """Runs that only say how good they are, or how they end; returns what they were asked for."""
    asked: list[list[str]] = []

    class Result:
        def __init__(self, value: float) -> None:
            self.best_valid = value

    def pretended(cfg: Any, words: list[str], watchers: Any) -> Result:
        Path(cfg.paths.output_dir).mkdir()
        asked.append([word for word in words if word.startswith("loss.margin")])
        value = values.pop(0)
        if isinstance(value, BaseException):
            raise value
        return Result(value)

    monkeypatch.setattr(sweep, "train", pretended)
    monkeypatch.setattr(sweep, "save_figure", lambda figure, file: None)  # which another test looks at
    return asked


def test_what_a_kill_left_unfinished_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend_to_train(monkeypatch, [0.1, KeyboardInterrupt(), 0.3, 0.2])
    search = Search.read([BOOSTED, "loss.margin=interval(0,1)"])
    with pytest.raises(KeyboardInterrupt):
        search.run(tmp_path, 3)
    study = search.run(tmp_path, 3)
    assert [trial.value for trial in study.trials] == [0.1, None, 0.3, 0.2]
    assert asked[2] == asked[1]
    assert len({word for words in asked for word in words}) == 3
    assert "| 1 |  | failed |" in (tmp_path / "study.md").read_text()
    assert len(search.run(tmp_path, 3).trials) == 4  # nothing to do


def test_stopped_and_diverged_trials_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_train(monkeypatch, [0.4, optuna.TrialPruned("x"), sweep.DivergedError("loss is NaN"), 0.5])
    study = Search.read([BOOSTED, "loss.margin=range(1,4)"]).run(tmp_path, 3)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE"]
    assert all(trial.params["loss.margin"] in (1, 2, 3) for trial in study.trials)
    pretend_to_train(monkeypatch, [float("nan")])
    with pytest.raises(ConfigError, match="a search needs validation queries with relevant documents"):
        Search.read([BOOSTED]).run(tmp_path / "other", 1)


def test_a_trial_that_falls_behind_is_stopped(tmp_path: Path) -> None:
    class Trial:
        reported: list[tuple[float, int]] = []  # noqa: RUF012

        def report(self, value: float, step: int) -> None:
            self.reported.append((value, step))

        def should_prune(self) -> bool:
            return len(self.reported) == 2

    trial = Trial()
    words = ["local_metrics.rounds=3", "logger=none", "trainer.max_epochs=4"]
    with pytest.raises(optuna.TrialPruned, match="after epoch 2"):
        train(small(tmp_path, *words), watchers=[sweep._Prune(trial)])  # type: ignore[arg-type]
    assert [step for _, step in trial.reported] == [1, 2]
    (first, second) = (value for value, _ in trial.reported)
    assert 0 < first <= second <= 1  # the best so far


def test_one_folder_one_search_one_process(tmp_path: Path) -> None:
    search = Search.read([BOOSTED, "loss.margin=interval(0,1)"])
    told = "another process runs the search in"
    with search.open_study(tmp_path), pytest.raises(ConfigError, match=told):
        search.run(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"belongs to a search with other settings .*; use another --folder"):
        Search.read([BOOSTED, "loss.margin=interval(0,2)"]).run(tmp_path, 1)


def test_distributions_are_written_as_for_hydra() -> None:
    for text, kind, facts in (
        ("interval(0.3,0.7)", "Float", {"low": 0.3, "high": 0.7, "log": False}),
        ("tag(log,interval(0.01,1))", "Float", {"low": 0.01, "high": 1.0, "log": True}),
        ("int(interval(2,9))", "Int", {"low": 2, "high": 9}),
        ("range(2,9,3)", "Int", {"low": 2, "high": 8, "step": 3}),
        ("range(0,1,0.25)", "Float", {"low": 0.0, "high": 0.75, "step": 0.25}),
        ("choice(a,b)", "Categorical", {"choices": ("a", "b")}),
        ("1,2", "Categorical", {"choices": ("1", "2")}),
    ):
        found = Search((), {"loss.margin": text}).distributions()["loss.margin"]
        assert type(found).__name__ == f"{kind}Distribution"
        assert {name: getattr(found, name) for name in facts} == facts
    for text in ("interval(2,1)", "tag(log,interval(0,1))", "range(3,3)", "7"):
        with pytest.raises(ConfigError, match=r"`loss\.margin` must be interval"):
            Search((), {"loss.margin": text}).distributions()


def test_what_is_fixed_is_not_searched(tmp_path: Path) -> None:
    found = Search.read(["experiment=quick", "loss.margin=0.3", "local_metrics.t=interval(0.3,0.7)"])
    assert found.fixed == ("experiment=quick", "loss.margin=0.3")
    assert set(found.space) == {"local_metrics.shrinkage", "local_metrics.lam", "local_metrics.t", "optimizer.lr"}
    with pytest.raises(ConfigError, match=r"unknown setting .loss\.margn."):
        Search.read([BOOSTED, "loss.margn=interval(0,1)"])
    (tmp_path / "none.yaml").write_text("seed: 3\n")
    with pytest.raises(ConfigError, match="there is nothing to search"):
        Search.read([BOOSTED, "seed=1"], tmp_path / "none.yaml")
    assert Search.read([BOOSTED, "seed=1,2"], tmp_path / "none.yaml").seed == 3


def test_a_missing_optuna_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MissingDependencyError, match=r"`optuna` is needed to search for settings; .*\[sweep\]"):
        Search.read([BOOSTED])


def write_job(folder: Path, words: list[str], mean: float | None) -> None:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words))
    metric = {"mean": mean, "counted": 5, "skipped": 1, "definition": "ndcg@10 (default): …"}
    evaluation = {"split": "test: unseen queries", "policy": "shared", "metrics": {"ndcg@10": metric}}
    (folder / "report.json").write_text(json.dumps({"evaluations": [evaluation]}))


def test_means_over_folds_stand_apart_by_what_else_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [("shared", 1, 0.5), ("shared", 2, 0.7), ("amortized", 1, 0.4), ("amortized", 2, None)]
    for number, (phi, fold, mean) in enumerate(jobs):
        write_job(tmp_path / str(number), ["data=mq2008", f"phi={phi}", f"data.fold={fold}"], mean)
    assert cli.main(["sweep", "--table", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("All runs: data=mq2008.\n")
    assert "| phi=shared | test: unseen queries | shared | 0.6000 ± 0.1414 | 2 | 10 |" in told
    assert "| phi=amortized | test: unseen queries | shared | 0.4000 | 2 | 10 |" in told
    assert "ndcg@10 (default)" in told
    MeansOfJobs().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    assert (tmp_path / "means.md").read_text() == told
    with pytest.raises(DataError, match=r"there is no run with a report\.json below it"):
        means_markdown(tmp_path / "0")
    assert cli.main(["sweep", "seed=1", "--table", str(tmp_path)]) == 2


@pytest.mark.parametrize("name", ["os.system", "subprocess.Popen", "lgmml_torch.files.os.system", "torch.load"])
def test_code_of_others_is_not_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load_config([f"+phi.inner._target_={name}"])
    with pytest.raises(
        ConfigError, match=r"`_target_` must lie in one of lgmml_torch, .*; LGMML_TARGETS=package allows"
    ):
        build(cfg.phi)


def test_further_packages_are_allowed_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load_config(["loss._target_=collections.OrderedDict"])
    with pytest.raises(ConfigError, match=r"got .collections\.OrderedDict."):
        build(cfg.loss)
    monkeypatch.setenv("LGMML_TARGETS", "mine,collections")
    assert build(cfg.loss) == {"margin": 0.1}


def test_each_kind_of_metrics_has_a_space_of_its_own() -> None:
    trained = Search.read(["experiment=trained"])
    assert "dropout.features" in trained.space
    assert "loss.margin" not in trained.space
    by_size = Search.read(["data=generated_small"])
    assert "local_metrics=boosted" in by_size.fixed
    assert by_size.space == Search.read([BOOSTED]).space
