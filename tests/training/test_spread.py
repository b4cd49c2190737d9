"""Training by several processes, each with its own lists: what comes of it does not depend on how many there are."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from lgmml_torch import distributed
from lgmml_torch.checks import LGMMLError
from lgmml_torch.data.generated import letor_like
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.fitting.boosted import fit_boosted
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from lgmml_torch.training import views
from lgmml_torch.training.losses import Warp
from lgmml_torch.training.rows import copy_checkpoint
from lgmml_torch.training.stages import Recipe, Surroundings, Trained, prepare, quiet_lightning, train_phi
from tests.processes import in_processes, own_part
from tests.training.tiny import recipe as tiny_recipe
from tests.training.tiny import trained_recipe

EPOCHS = 3


def boosted_recipe() -> Recipe:
    settings = tiny_recipe("shared", {"batch_size": 5, "max_draws": 4}, loss=Warp(), keep="last")
    return Recipe(
        settings.preprocess, partial(fit_boosted, rounds=4, candidates=3), partial(Phi, mode="shared"), settings.phi
    )


def rows_recipe(mode: str, optimizer: str = "SGD", policy: str | None = None, **settings: Any) -> Recipe:
    """Weights of single queries, which stay with the process that has the list."""
    made = tiny_recipe(
        mode,
        {"batch_size": 5, "max_draws": 4},
        keep="best",
        optimizer=partial(getattr(torch.optim, optimizer), lr=0.3 if optimizer == "SGD" else 0.05),
        **settings,
    )
    return made if policy is None else replace(made, make_phi=partial(made.make_phi, policy=policy))


RECIPES = {
    "boosted": boosted_recipe,
    "trained": lambda: trained_recipe({"batch_size": 5}, keep="last"),
    "per_query": lambda: rows_recipe("per_query", policy="mean"),
    "remembering": lambda: rows_recipe("per_query", "SparseAdam", policy="mean"),
    "dense": lambda: rows_recipe("per_query", "Adam", policy="mean", sparse=False),
    "deviations": lambda: rows_recipe("shared", "Adam", deviations=True, deviation_penalty=0.1, sparse=False),
    "amortized": lambda: rows_recipe("amortized", "Adam"),
}
ROWS = ["per_query", "remembering", "dense", "deviations", "amortized"]


def whole_splits() -> dict[str, RankingData]:
    parts = letor_like(30, 8, seed=1, num_documents=300).split((0.5, 0.2, 0.3), seed=0)
    return dict(zip(("train", "valid", "test"), parts, strict=True))


def trained_in(folder: Path, kind: str, epochs: int, owners: dict[str, list[int]], resume: bool) -> Trained:
    splits = {name: own_part(data, owners.get(name)) for name, data in whole_splits().items()}
    recipe = RECIPES[kind]()
    around = Surroundings(
        folder=folder,
        trainer={"max_epochs": epochs, "accelerator": "cpu"},
        resume=folder / "last.ckpt" if resume else None,
        every_n_steps=2,
    )
    if resume:
        distributed.file_of_first(folder / "last.ckpt")
    trained = train_phi(prepare(splits, recipe), recipe, around)
    with quiet_lightning():
        trained.trainer.test(trained.module, trained.trainer.datamodule, verbose=False)  # type: ignore[attr-defined]
    return trained


def run(
    kind: str,
    owners: dict[str, list[int]],
    home: str | None = None,
    epochs: int = EPOCHS,
    together: bool = False,
) -> dict[str, Any]:
    """Every process has a folder of its own, unless ``home`` keeps what the first one, or all ``together``, write."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(home) if home is not None and (together or distributed.place()[0] == 0) else Path(own)
        trained = trained_in(folder, kind, epochs, owners, resume=home is not None and epochs == EPOCHS)
        whole = trained.whole_model(Path(own))
    test = own_part(whole_splits()["test"], owners.get("test"))
    found = evaluate(trained.model, test, metrics=["ndcg@10", "map"])
    train = own_part(whole_splits()["train"], owners.get("train"))
    own_names = () if trained.module.rows is None else trained.module.rows.names
    return {
        "model": {name: value for name, value in trained.model.state_dict().items() if name not in own_names},
        "whole": {name: whole.state_dict()[name].clone() for name in own_names},
        "qids": list(whole.qids),
        "seen": trained.model.score(train, known_queries=bool(own_names) and kind != "amortized"),
        "rows": train.spread.own_rows if train.spread is not None else torch.arange(train.num_documents),
        "ndcg": found.per_query["ndcg@10"],
        "counted": found.counted["ndcg@10"] + found.skipped["ndcg@10"],
        "lightning": float(trained.trainer.callback_metrics["test/ndcg@10"]),
        "curve": [trained.keeper.curve[epoch] for epoch in range(EPOCHS + 1) if epoch in trained.keeper.curve],
        "best": trained.keeper.best_epoch,
    }


def agree(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for each in found:
        assert all(value.equal(found[0]["model"][name]) or "quality" in name for name, value in each["model"].items())
        torch.testing.assert_close(each["ndcg"], alone["ndcg"], atol=1e-6, rtol=0, equal_nan=True)
        assert each["counted"] == alone["counted"] == 9
        assert each["lightning"] == pytest.approx(alone["lightning"], abs=1e-6)
        assert each["curve"] == pytest.approx(alone["curve"], abs=1e-6)
        assert each["best"] == alone["best"]


@pytest.mark.parametrize(
    ("kind", "processes"), [("boosted", 2), ("boosted", 4), ("trained", 2), ("trained", 3), ("trained", 4)]
)
def test_processes_learn_what_one_does(kind: str, processes: int) -> None:
    agree(in_processes(processes, run, kind, {}), run(kind, {}))


def test_a_process_may_have_no_list() -> None:
    owners = {"train": [2] * 14 + [0], "valid": [1] * 6, "test": [0] * 9}
    agree(in_processes(3, run, "trained", owners), run("trained", {}))


def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    in_processes(2, run, "boosted", {}, str(tmp_path), EPOCHS - 1)
    agree(in_processes(3, run, "boosted", {}, str(tmp_path)), run("boosted", {}))


def agree_on_rows(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Shared parts, the first process's table of all rows, and the scores of training lists by their own rows."""
    agree_closely(found, alone)
    for name, table in alone["whole"].items():
        torch.testing.assert_close(found[0]["whole"][name], table, atol=2e-6, rtol=2e-5)
    assert found[0]["qids"] == alone["qids"]
    seen = torch.full_like(alone["seen"], torch.nan)
    for each in found:
        seen[each["rows"]] = each["seen"]
    torch.testing.assert_close(seen, alone["seen"], atol=2e-6, rtol=2e-5)


def agree_closely(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for each in found:
        for name, value in each["model"].items():
            torch.testing.assert_close(value, alone["model"][name], atol=2e-6, rtol=2e-5, equal_nan=True)
        torch.testing.assert_close(each["ndcg"], alone["ndcg"], atol=1e-6, rtol=0, equal_nan=True)
        assert each["curve"] == pytest.approx(alone["curve"], abs=1e-6)
        assert each["best"] == alone["best"]


class TestRowsOfSingleQueries:
    """They live where their list is; nothing of them is sent but for the file of the whole model."""

    @pytest.mark.parametrize("kind", ROWS)
    def test_three_processes_learn_what_one_does(self, kind: str) -> None:
        found, alone = in_processes(3, run, kind, {}), run(kind, {})
        agree(found, alone)
        agree_on_rows(found, alone)
        names = {"deviations": "phi.deviation.weight", "amortized": "phi.summaries"}
        assert [len(each["whole"][names.get(kind, "phi.table.weight")]) for each in found] == [15, 5, 5]

    def test_a_process_may_have_no_list(self) -> None:
        owners = {"train": [2] * 14 + [0], "valid": [1] * 6, "test": [0] * 9}
        agree_on_rows(in_processes(3, run, "remembering", owners), run("remembering", {}))

    @pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 2), (3, 1)])
    def test_a_run_goes_on_with_another_number_of_processes(self, before: int, after: int, tmp_path: Path) -> None:
        kind = "remembering"
        in_processes(before, run, kind, {}, str(tmp_path), EPOCHS - 1, True)
        agree_on_rows(in_processes(after, run, kind, {}, str(tmp_path), EPOCHS, True), run(kind, {}))

    def test_rows_that_are_missing_or_of_another_moment_are_named(self, tmp_path: Path) -> None:
        in_processes(2, run, "per_query", {}, str(tmp_path), EPOCHS - 1, True)
        first, second = sorted(tmp_path.glob("last.*.rows"))
        assert len(list(tmp_path.glob("*.rows"))) == 4  # of the best and the last checkpoint, nothing older
        first.write_bytes(second.read_bytes())
        with pytest.raises(ProcessRaisedException, match=f"needs {first.name} beside it"):
            in_processes(2, run, "per_query", {}, str(tmp_path), EPOCHS, True)

    def test_a_run_goes_on_elsewhere_with_all_its_files(self, tmp_path: Path) -> None:
        home, other = tmp_path / "a", tmp_path / "b"
        home.mkdir()
        in_processes(2, run, "per_query", {}, str(home), EPOCHS - 1, True)
        (home / "best.ckpt").unlink()  # the last one then stands in for it
        copy_checkpoint(home / "last.ckpt", other / "best.ckpt")
        copy_checkpoint(home / "last.ckpt", other / "last.ckpt")
        found = in_processes(3, run, "per_query", {}, str(other), EPOCHS, True)
        assert found[0]["curve"] == pytest.approx(run("per_query", {})["curve"], abs=1e-6)

    def test_a_checkpoint_without_its_rows_ranks_new_queries(self, tmp_path: Path) -> None:
        in_processes(2, run, "per_query", {}, str(tmp_path), 1, True)
        model = LGMML.load(tmp_path / "best.ckpt")
        test = whole_splits()["test"]
        assert model.score(test, policy="ones").isfinite().all()
        for policy in ("mean", "knn"):
            with pytest.raises(LGMMLError, match="needs the rows of"):
                model.score(test, policy=policy)

    def test_what_needs_all_rows_is_refused(self) -> None:
        with pytest.raises(ProcessRaisedException, match=r"`phi\.policy` 'knn' needs all training queries"):
            in_processes(2, refused, "knn", None)
        with pytest.raises(ProcessRaisedException, match=r"`trainer\.gradient_clip_val` must be null"):
            in_processes(2, refused, "mean", 1.0)


def refused(policy: str, clip: float | None) -> None:
    splits = {name: own_part(data) for name, data in whole_splits().items()}
    recipe = rows_recipe("per_query", policy=policy)
    with tempfile.TemporaryDirectory() as folder:
        around = Surroundings(Path(folder), {"max_epochs": 1, "accelerator": "cpu", "gradient_clip_val": clip})
        train_phi(prepare(splits, recipe), recipe, around)


def banks_of_a_sample(values: int, owner: list[int] | None) -> dict[str, Any]:
    """What is fitted where a sample of so many values stands for the training lists."""
    views.SAMPLE_VALUES = values
    found = {}
    for kind in ("boosted", "trained", "per_query"):
        splits = {name: own_part(data, owner if name == "train" else None) for name, data in whole_splits().items()}
        prepared = prepare(splits, RECIPES[kind]())
        found[kind] = {**prepared.preprocess.state_dict(), **prepared.bank.metrics.state_dict()}
    return found


@pytest.mark.parametrize("values", [500, 1 << 27])
def test_a_sample_is_the_same_in_memory_from_files_and_on_processes(
    values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 15 lists with 1,200 values: some, all. No kind of metrics differs in a bit."""
    monkeypatch.setattr(views, "SAMPLE_VALUES", values)
    alone = {kind: prepare(whole_splits(), RECIPES[kind]()) for kind in ("boosted", "trained", "per_query")}
    for found in [
        banks_of_a_sample(values, None),
        *in_processes(2, banks_of_a_sample, values, None),
        *in_processes(3, banks_of_a_sample, values, [0] * 10 + [2] * 5),
    ]:
        for kind, state in found.items():
            expected = {**alone[kind].preprocess.state_dict(), **alone[kind].bank.metrics.state_dict()}
            assert all(value.equal(expected[name]) for name, value in state.items() if "quality" not in name), kind
