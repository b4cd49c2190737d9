"""Training by several processes, each with its own lists: to rounding, the model does not depend on their number."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException

from lgmml_torch import distributed
from lgmml_torch.data.generated import letor_like
from lgmml_torch.evaluation.evaluate import evaluate
from lgmml_torch.fitting.boosted import BoostedBuilder
from lgmml_torch.models.phi import Phi
from lgmml_torch.ragged import RankingData
from lgmml_torch.training import preprocessed, stages
from lgmml_torch.training.callbacks import QUIET
from lgmml_torch.training.losses import Warp
from lgmml_torch.training.recipe import Recipe, TrainerSettings
from lgmml_torch.training.resume import KeepCheckpoints
from lgmml_torch.training.stages import prepare, quiet_lightning, train_phi
from tests.processes import in_processes, own_part
from tests.training.tiny import recipe as tiny_recipe
from tests.training.tiny import trained_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS = 3
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
UNEVEN = {"train": [2] * 14 + [0], "valid": [1] * 6, "test": [0] * 9}  # some processes have no list


def boosted_recipe() -> Recipe:
    settings = tiny_recipe("shared", {"batch_size": 5, "max_draws": 4}, loss=Warp(), keep="last")
    return replace(settings, fit_bank=BoostedBuilder(rounds=4, candidates=3))


def rows_recipe(mode: str, optimizer: str, policy: str | None = None, **settings: Any) -> Recipe:
    """Weights of single queries."""
    rate = 0.3 if optimizer == "SGD" else 0.05
    made = tiny_recipe(
        mode,
        {"batch_size": 5, "max_draws": 4},
        optimizer=partial(getattr(torch.optim, optimizer), lr=rate),
        **settings,
    )
    assert isinstance(made.make_phi, partial)
    return replace(made, make_phi=partial(Phi, **{**made.make_phi.keywords, "policy": policy}))


def layout(here: int) -> list[int]:
    """Devices of a machine and machines, as Lightning sees them where a machine has so many processes."""
    os.environ["LOCAL_WORLD_SIZE"] = str(here)
    folder = Path("unused")
    keeper = KeepCheckpoints(folder, monitor="val/ndcg@10", every_n_steps=500, seed=0)
    trainer = TrainerSettings(folder, {**QUIET, "accelerator": "cpu"}).make_trainer(keeper, validated=False)
    return [trainer.num_devices, trainer.num_nodes, trainer.local_rank]


def test_machines_may_have_different_numbers_of_processes() -> None:
    assert in_processes(2, layout, 2) == [[2, 1, 0], [2, 1, 1]]
    assert in_processes(3, layout, 2) == [[1, 3, 0]] * 3


RECIPES = {
    "boosted": boosted_recipe,
    "trained": lambda: trained_recipe({"batch_size": 5}, keep="last"),
    "knn": lambda: rows_recipe("per_query", "SGD", "knn"),
    "adam": lambda: rows_recipe("per_query", "SparseAdam", "mean"),
    "deviations": lambda: rows_recipe("shared", "Adam", deviations=True, deviation_penalty=0.1, sparse=False),
    "amortized": lambda: rows_recipe("amortized", "Adam"),
}
ROWS = ("knn", "adam", "deviations", "amortized")


def whole_splits() -> dict[str, RankingData]:
    parts = letor_like(30, 8, seed=1, num_documents=300).split((0.5, 0.2, 0.3), seed=0)
    return dict(zip(("train", "valid", "test"), parts, strict=True))


def run(kind: str, owners: dict[str, list[int]], home: str | None = None, epochs: int = EPOCHS) -> dict[str, Any]:
    """Every process has a folder of its own; ``home`` keeps what the first one writes, to resume from it."""
    parts, recipe = whole_splits(), RECIPES[kind]()
    if kind == "trained":  # with biases, which are trained beside the model
        train = parts["train"]
        parts["train"] = train.replace(positions=torch.arange(train.num_documents) % 4)
    splits = {name: own_part(data, owners.get(name)) for name, data in parts.items()}
    with tempfile.TemporaryDirectory() as own:
        first = distributed.rank() == 0
        folder = Path(home) if home is not None and first else Path(own)
        resume = None
        if home is not None and epochs == EPOCHS:
            resume = folder / "last.ckpt"
            distributed.broadcast_file(resume)
        around = TrainerSettings(folder, {"max_epochs": epochs, "accelerator": "cpu"}, resume=resume, every_n_steps=2)
        trained = train_phi(prepare(splits, recipe), recipe, around)
        with quiet_lightning():
            trained.trainer.test(trained.module, trained.trainer.datamodule, verbose=False)  # type: ignore[attr-defined]
    measured = evaluate(trained.model, splits["test"], metrics=["ndcg@10"])
    train = splits["train"]
    assert train.shared_lists is not None
    known = kind in ("knn", "adam", "deviations")
    return {
        "model": trained.model.state_dict(),
        "qids": list(trained.model.qids),
        "rows": train.shared_lists.own_rows,
        "scores": trained.model.score(train, known_queries=known),
        "ndcg": measured.per_query["ndcg@10"],
        "counted": measured.counted["ndcg@10"] + measured.skipped["ndcg@10"],
        "lightning": float(trained.trainer.callback_metrics["test/ndcg@10"]),
        "curve": list(trained.keeper.curve.values()),
        "best": trained.keeper.best_epoch,
        "map": trained.model.spec().get("grade_map"),  # none where scores do not rise with these few labels
    }


def run_each(kinds: tuple[str, ...], owners: dict[str, list[int]]) -> dict[str, Any]:
    return {kind: run(kind, owners) for kind in kinds}


def agree(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Every process has the model that one process finds, to rounding, and the same bits as the others."""
    scores = torch.full_like(alone["scores"], torch.nan)
    for each in found:
        for name, value in each["model"].items():
            if "quality" not in name:  # only the process that fitted a metric knows it
                torch.testing.assert_close(value, alone["model"][name], **CLOSE)
                assert torch.equal(value, found[0]["model"][name]), name
        torch.testing.assert_close(each["ndcg"], alone["ndcg"], atol=1e-6, rtol=0, equal_nan=True)
        assert each["counted"] == alone["counted"] == 9
        assert each["lightning"] == pytest.approx(alone["lightning"], abs=1e-6)
        assert each["curve"] == pytest.approx(alone["curve"], abs=1e-6)
        assert each["best"] == alone["best"]
        assert each["map"] == found[0]["map"]
        assert (each["map"] is None) == (alone["map"] is None)
        for name, numbers in (each["map"] or {}).items():
            assert numbers == pytest.approx(alone["map"][name], rel=1e-3, abs=1e-3)
        scores[each["rows"]] = each["scores"]
    torch.testing.assert_close(scores, alone["scores"], **CLOSE)


@pytest.mark.parametrize(("kind", "processes", "owners"), [("boosted", 2, {}), ("trained", 3, UNEVEN)])
def test_processes_learn_what_one_does(kind: str, processes: int, owners: dict[str, list[int]]) -> None:
    agree(in_processes(processes, run, kind, owners), run(kind, {}))


def test_so_they_do_with_weights_for_each_query() -> None:
    alone = run_each(ROWS, {})
    together = in_processes(2, run_each, ROWS, {})
    for kind in ROWS:
        agree([each[kind] for each in together], alone[kind])
        assert alone[kind]["map"] is not None
        assert together[0][kind]["qids"] == alone[kind]["qids"] == list(whole_splits()["train"].qids)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    in_processes(2, run, "adam", {}, str(tmp_path), EPOCHS - 1)
    agree(in_processes(3, run, "adam", {}, str(tmp_path)), run("adam", {}))


def too_large() -> None:
    stages._LARGEST_PHI = 100
    prepared = prepare({"train": own_part(whole_splits()["train"])}, RECIPES["adam"]())
    prepared.model(partial(Phi, mode="shared"))
    prepared.model(RECIPES["adam"]().make_phi)


def test_weights_that_would_not_fit_are_refused() -> None:
    with pytest.raises(ProcessRaisedException, match=r"Φ of 15 queries takes .* GiB on every process, .*; use phi"):
        in_processes(2, too_large)


def banks_of_a_sample(values: int, owner: list[int] | None) -> dict[str, dict[str, Tensor]]:
    """What is fitted where a sample of that size stands for the training lists."""
    preprocessed.SAMPLE_VALUES = values
    found = {}
    for kind in ("boosted", "trained", "adam"):
        splits = {name: own_part(data, owner if name == "train" else None) for name, data in whole_splits().items()}
        prepared = prepare(splits, RECIPES[kind]())
        found[kind] = {**prepared.preprocess.state_dict(), **prepared.bank.metrics.state_dict()}
    return found


def test_a_sample_is_the_same_in_memory_from_files_and_on_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 lists have 1,200 values."""
    monkeypatch.setattr(preprocessed, "SAMPLE_VALUES", 500)
    alone = {kind: prepare(whole_splits(), RECIPES[kind]()) for kind in ("boosted", "trained", "adam")}
    each = [banks_of_a_sample(500, None), *in_processes(3, banks_of_a_sample, 500, [0] * 10 + [2] * 5)]
    for found in each:
        for kind, state in found.items():
            expected = {**alone[kind].preprocess.state_dict(), **alone[kind].bank.metrics.state_dict()}
            for name, value in state.items():
                if "quality" not in name:
                    torch.testing.assert_close(value, expected[name], **CLOSE)
