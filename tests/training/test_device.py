"""Everything that runs where the module is, on a device that does not mix with the CPU; results are the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor

from lgmml_torch.estimator import LGMMLRanker
from lgmml_torch.estimator_inputs import ACCELERATORS
from lgmml_torch.models.explain import explain
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.training.batches import RankingDataModule, TrainingBatches
from lgmml_torch.training.callbacks import QUIET, LogModel, quiet_lightning
from lgmml_torch.training.losses import LambdaRank, Loss, Softmax, TrainingBatch, Warp
from lgmml_torch.training.module import LGMMLModule, OptimizerFactory
from lgmml_torch.training.preprocessed import compute_distances
from lgmml_torch.training.recipe import TrainerSettings
from lgmml_torch.training.stages import Prepared, train_phi
from tests.pretend import DEVICE, MOVED, PretendTensor, pretend
from tests.training import tiny

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")

MODES: dict[str, dict[str, Any]] = {
    "per_query": {"mode": "per_query"},
    "sparse": {"mode": "per_query", "sparse": True},
    "shared": {"mode": "shared"},
    "deviations": {"mode": "shared", "deviations": True},
    "amortized": {"mode": "amortized"},
}
CHOICES = [("per_query", "knn"), ("deviations", "shared"), ("amortized", "amortized")]


@pytest.fixture
def _device() -> Iterator[None]:
    with pretend():
        yield


@pytest.fixture(scope="module")
def found() -> Prepared:
    made = tiny.prepared()
    made.add_inputs(made.model(Phi))
    return made


def make_model(found: Prepared, name: str) -> LGMML:
    """On the CPU, with weights that differ and some that are zero; its parts are its own, to be moved."""
    model = deepcopy(found.model(lambda queries, metrics: Phi(queries, metrics, **MODES[name])))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        model.phi.table.weight.uniform_(0.2, 2, generator=draw)[:, 1] = 0
        for part in (model.phi.deviation, model.phi.gate):
            for parameter in () if part is None else part.parameters():
                parameter.uniform_(-0.1, 0.2, generator=draw)
    model.phi.project_()
    model.summarize(found.inputs["train"], found.splits["train"].offsets)
    return model


def make_module(found: Prepared, name: str, loss: Loss | None = None) -> LGMMLModule:
    model = make_model(found, name)
    module = LGMMLModule(model.spec(), model, loss=loss)
    for split, data in found.splits.items():
        module.attach(split, data, found.inputs[split])
    return module


def moved(batch: TrainingBatch) -> TrainingBatch:
    return TrainingBatch(*(part.to(DEVICE) if isinstance(part, Tensor) else part for part in batch))


def same(there: Tensor, here: Tensor) -> bool:
    """Whether a tensor of the device has the values of one of the CPU."""
    assert isinstance(there, PretendTensor)
    return torch.allclose(there.cpu(), here, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("_device")
class TestModel:
    @pytest.mark.parametrize(("name", "policy"), CHOICES)
    def test_scores(self, found: Prepared, name: str, policy: str) -> None:
        model, data = make_model(found, name).eval(), found.splits["test"]
        known = MODES[name]["mode"] == "per_query" or name == "deviations"
        expected = [model.score(data, policy=policy, known_queries=own) for own in (False, known)]
        expected_forward = model(data.features, data.offsets, policy=policy)
        model.to(DEVICE)
        assert same(model(data.features.to(DEVICE), data.offsets.to(DEVICE), policy=policy), expected_forward)
        for own, scores in zip((False, known), expected, strict=True):
            got = model.score(data, policy=policy, known_queries=own, documents_at_once=100)
            assert got.device.type == "cpu"
            assert torch.allclose(got, scores, rtol=1e-5, atol=1e-7)

    def test_known_queries_in_a_forward(self, found: Prepared) -> None:
        name = "per_query"
        model, data = make_model(found, name).eval(), found.splits["train"]
        rows = torch.arange(data.num_queries).where(torch.arange(data.num_queries) % 3 > 0, -1)
        expected = model(data.features, data.offsets, rows=rows)
        model.to(DEVICE)
        got = model(data.features.to(DEVICE), data.offsets.to(DEVICE), rows=rows.to(DEVICE))
        assert same(got, expected)

    @pytest.mark.parametrize("name", ["per_query", "amortized"])
    def test_explanations(self, found: Prepared, name: str) -> None:
        model, data = make_model(found, name).eval(), found.splits["test"]
        ask = partial(explain, model, data, qid=data.qids[0], document=0, over=1)
        expected = ask()
        model.to(DEVICE)
        got = ask()
        for field in ("scores", "phi", "distances", "quality", "metrics", "features", "anchors", "values", "raw"):
            assert torch.allclose(getattr(got, field), getattr(expected, field), rtol=1e-5, equal_nan=True), field

    @pytest.mark.parametrize("name", ["sparse", "amortized"])
    def test_files(self, found: Prepared, name: str, tmp_path: Path) -> None:
        model, data = make_model(found, name).eval(), found.splits["test"]
        expected = model.score(data)
        model.to(DEVICE).save(tmp_path / "model")
        again = LGMML.load(tmp_path / "model")
        assert torch.equal(again.score(data), expected)
        assert torch.allclose(again.to(DEVICE).score(data), expected)

    def test_distances(self, found: Prepared) -> None:
        model, data = make_model(found, "shared").to(DEVICE), found.splits["valid"]
        for dtype in (None, torch.float16):
            got = compute_distances(model, data, dtype=dtype, documents_at_once=200)
            assert torch.allclose(got.float(), found.inputs["valid"], rtol=2e-3 if dtype else 1e-5)


@pytest.mark.usefixtures("_device")
class TestModule:
    @pytest.mark.parametrize(
        ("name", "loss", "batching"),
        [("sparse", Warp(), "triplets"), ("deviations", Softmax(), "lists"), ("amortized", LambdaRank(), "lists")],
    )
    def test_a_step(self, found: Prepared, name: str, loss: Loss, batching: str) -> None:
        module = make_module(found, name, loss)
        size = 40 if batching == "triplets" else 4
        batch = TrainingBatches(found.splits["train"], batching=batching, batch_size=size, draws=loss.draws)[0, 0]
        twin = deepcopy(module).to(DEVICE)
        assert twin.device == DEVICE
        for module_, batch_ in ((module, batch), (twin, moved(batch))):
            queries = batch_.queries if len(batch_.positives) else batch_.lists
            optimizer = torch.optim.SGD(module_.parameters(), lr=0.05, momentum=0.9)
            for _ in range(2):
                optimizer.zero_grad()
                (module_.batch_loss(batch_).total + 0.1 * module_.model.phi.penalty(queries)).backward()
                optimizer.step()
                module_.model.phi.project_()
                if name == "sparse":
                    module_.model.phi.project_(module_.model.phi.table.weight.grad.coalesce().indices()[0])
        start = make_model(found, name).phi.state_dict()
        there, here = twin.model.phi.state_dict(), module.model.phi.state_dict()
        assert any(not torch.equal(here[key], start[key]) for key in here)
        for key, value in here.items():
            assert same(there[key], value), key

    @pytest.mark.parametrize(("name", "known"), [("per_query", True), ("amortized", False), ("deviations", True)])
    def test_scores_of_a_block(self, found: Prepared, name: str, known: bool) -> None:
        module = make_module(found, name)
        expected = module.block_scores("train", 2, 7, known=known)
        assert same(module.to(DEVICE).block_scores("train", 2, 7, known=known), expected)

    def test_a_split_follows_the_module_and_its_features_do_not(self, found: Prepared) -> None:
        module, data = make_module(found, "shared").to(DEVICE), found.splits["train"]
        MOVED.clear()
        lists = module.lists("train")
        assert lists.positions is None
        assert all(isinstance(part, PretendTensor) for part in lists if part is not None)
        labels_and_order, offsets, dists = (data.num_documents,), (data.num_queries + 1,), found.inputs["train"].shape
        assert dict(MOVED) == {labels_and_order: 2, offsets: 1, tuple(dists): 1}
        assert module.lists("train") is lists
        module.cpu()
        assert not any(isinstance(part, PretendTensor) for part in module.lists("train"))


class Pretended(Accelerator):
    """The device, for Lightning."""

    def setup_device(self, device: torch.device) -> None:
        assert device == DEVICE

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [DEVICE]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "pretend"


def on_device() -> dict[str, Any]:
    return {"accelerator": Pretended(), "strategy": SingleDeviceStrategy(device=DEVICE)}


def assert_features_stayed(found: Prepared) -> None:
    """Nothing as wide as raw features was moved, the anchors excepted; labels, order and distances were."""
    width = found.splits["train"].num_features
    anchors = {tuple(block.anchors.shape) for block in found.bank.metrics.iter_blocks()}
    assert {shape for shape in MOVED if len(shape) == 2 and shape[1] == width} <= anchors
    assert width != found.inputs["train"].shape[1]


def evaluated(module: LGMMLModule, data: RankingDataModule, stage: str, **trainer: Any) -> dict[str, float]:
    """What a new trainer finds that has fitted nothing."""
    with quiet_lightning():
        fresh = pl.Trainer(**{**QUIET, "logger": False, "enable_checkpointing": False, **trainer})
        return dict(getattr(fresh, stage)(module, data, verbose=False)[0])


class TestLightning:
    @pytest.mark.parametrize(
        ("mode", "batching"), [("per_query", "lists"), ("amortized", "lists"), ("per_query", "triplets")]
    )
    def test_a_fit_equals_the_cpus(self, found: Prepared, mode: str, batching: str, tmp_path: Path) -> None:
        loader = {} if batching == "lists" else {"batches_per_epoch": 4, "batch_size": 20}
        settings = {"found": found, "mode": mode, "batching": batching, "loader": loader, "epochs": 1, "keep": "last"}
        here = tiny.train(tmp_path / "here", **settings)
        with pretend():
            there = tiny.train(tmp_path / "there", trainer=on_device(), **settings)
            assert MOVED[tuple(found.inputs["train"].shape)] == 1
            assert_features_stayed(found)
        assert there.keeper.curve == pytest.approx(here.keeper.curve)
        for key, value in here.model.phi.state_dict().items():
            assert torch.allclose(there.model.phi.state_dict()[key], value, rtol=1e-5), key

    def test_the_story_is_told(self, found: Prepared, tmp_path: Path) -> None:
        """Histograms and pictures of what is on the device."""
        logger = TensorBoardLogger(tmp_path, name="", version="")
        settings = tiny.recipe("per_query", {"num_workers": 0})
        around = TrainerSettings(tmp_path, {"max_epochs": 1, **on_device()}, callbacks=(LogModel(),), loggers=(logger,))
        with pretend():
            train_phi(found, settings, around)
        assert list(tmp_path.glob("events.out.tfevents.*"))

    @pytest.mark.parametrize(
        ("mode", "optimizer"),
        [
            ("per_query", partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
            ("shared", partial(torch.optim.Adam, lr=0.01)),
        ],
    )
    def test_a_run_goes_on(self, found: Prepared, mode: str, optimizer: OptimizerFactory, tmp_path: Path) -> None:
        """What the optimizer remembers has to come back to the device, too."""
        settings = {"found": found, "mode": mode, "keep": "last", "optimizer": optimizer}
        whole = tiny.train(tmp_path / "whole", epochs=2, **settings)
        with pretend():
            tiny.train(tmp_path / "parts", epochs=1, trainer=on_device(), **settings)
            parts = tiny.train(tmp_path / "parts", epochs=2, resume=True, trainer=on_device(), **settings)
        assert sorted(parts.keeper.curve) == [0, 1, 2]
        assert torch.allclose(parts.model.phi.table.weight, whole.model.phi.table.weight, rtol=1e-5)

    @pytest.mark.parametrize(("name", "stage"), [("per_query", "validate"), ("amortized", "test")])
    def test_nothing_need_be_fitted_before(self, found: Prepared, name: str, stage: str) -> None:
        module, data = make_module(found, name), RankingDataModule(**found.splits)
        expected = evaluated(module, data, stage, accelerator="cpu")
        with pretend():
            got = evaluated(module, data, stage, **on_device())
            split = found.inputs["valid" if stage == "validate" else "test"]
            assert MOVED[tuple(split.shape)] == 1
            assert_features_stayed(found)
        assert got == pytest.approx(expected)
        assert module.device.type == "cpu"


@pytest.mark.parametrize("epochs", [0, 1])
def test_an_estimator_predicts_where_it_was_fitted(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny.splits()[0]
    lists = data.offsets.diff()
    given = {"X": data.features.numpy(), "qid": torch.arange(len(lists)).repeat_interleave(lists).numpy()}
    ranker = LGMMLRanker(bank="sampled", num_metrics=4, epochs=epochs, phi="per_query", policy="knn", random_state=0)
    expected = ranker.fit(y=data.labels.numpy(), **given).predict(**given)
    monkeypatch.setitem(ACCELERATORS, "cuda", Pretended())
    monkeypatch.setitem(QUIET, "strategy", SingleDeviceStrategy(device=DEVICE))
    with pretend():
        ranker.set_params(device="cuda").fit(y=data.labels.numpy(), **given)
        assert ranker.model_.device == DEVICE
        assert ranker.predict(**given) == pytest.approx(expected, rel=1e-5)
