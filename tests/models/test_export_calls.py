"""What the exporters are asked, without running them: shapes, names, facts, limits; and how parity is measured."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lgmml_torch.checks import LGMMLError
from lgmml_torch.models import export
from lgmml_torch.models.export import EXPORTERS, ListScorer, compare_exported, export_onnx, export_program
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import Phi
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from tests.doors import FEATURES, plain_chain, small_data, small_model
from tests.models.test_encode import lists, words_model

LOGGERS = ("torch.onnx", "onnx_ir", "onnxscript")


class Program(SimpleNamespace):
    """Stands for what the ONNX exporter gives."""

    def __init__(self) -> None:
        super().__init__(model=SimpleNamespace(metadata_props={"made by": "torch"}))
        self.model_proto = SimpleNamespace(SerializeToString=lambda: json.dumps(self.model.metadata_props).encode())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the exporter was asked last."""
    seen: dict[str, Any] = {}

    def exporter(scorer: ListScorer, inputs: tuple[Tensor, ...], **options: Any) -> Program:
        seen.update(options, scorer=scorer, inputs=inputs, grad=torch.is_grad_enabled())
        return Program()

    monkeypatch.setattr(export, "require", lambda *_: None)
    monkeypatch.setattr(torch.onnx, "export", exporter)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_list_of_any_length(dtype: torch.dtype, asked: dict[str, Any], tmp_path: Path) -> None:
    model = small_model(dtype=dtype)
    assert export_onnx(model, tmp_path / "m.onnx") == tmp_path / "m.onnx"
    (features,) = asked["inputs"]
    assert (features.shape[1], features.dtype) == (FEATURES, dtype)
    ((documents,),) = [tuple(shape.items()) for shape in asked["dynamic_shapes"]]
    assert (documents[0], documents[1].__name__, documents[1].min) == (0, "documents", 1)
    assert (asked["input_names"], asked["output_names"]) == (["features"], ["scores"])
    assert (asked["opset_version"], asked["dynamo"], asked["verbose"]) == (18, True, False)
    assert not any(parameter.requires_grad for parameter in asked["scorer"].parameters())
    assert not asked["scorer"].training
    assert asked["scorer"].policy == "shared"


def test_many_lists_with_their_bounds(asked: dict[str, Any], tmp_path: Path) -> None:
    export_onnx(small_model(mode="amortized"), tmp_path / "m.onnx", batch=True, policy="ones")
    features, offsets = asked["inputs"]
    assert int(offsets[0]) == 0
    assert int(offsets[-1]) == len(features)
    assert (offsets.diff() > 0).all()
    documents, bounds = (shape[0] for shape in asked["dynamic_shapes"])
    assert (documents.__name__, documents.min) == ("documents", 1)
    assert (bounds.__name__, bounds.min) == ("bounds", 2)
    assert asked["input_names"] == ["features", "offsets"]
    assert asked["scorer"].policy == "ones"


def test_the_file_says_what_it_is(asked: dict[str, Any], tmp_path: Path) -> None:
    model = small_model()
    expected = {"format": "lgmml-torch", "version": "1", "num_features": "5", "policy": "shared"}
    export_onnx(model, tmp_path / "m.onnx")
    assert json.loads((tmp_path / "m.onnx").read_bytes()) == {"made by": "torch", **expected}
    model.feature_names = ("a", "b", "c", "d", "e")
    export_onnx(model, tmp_path / "m.onnx", policy="ones")
    found = json.loads((tmp_path / "m.onnx").read_bytes())
    assert json.loads(found.pop("feature_names")) == ["a", "b", "c", "d", "e"]
    assert found == {"made by": "torch", **expected, "policy": "ones"}


def test_programs_carry_the_same_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def save(program: Any, stream: Any, **options: Any) -> None:
        seen.update(options, program=program)
        stream.write(b"program")

    def exporter(scorer: ListScorer, inputs: tuple[Tensor, ...], **options: Any) -> str:
        seen.update(options, inputs=inputs, grad=torch.is_grad_enabled())
        return "made"

    monkeypatch.setattr(torch.export, "export", exporter)
    monkeypatch.setattr(torch.export, "save", save)
    for batch in (False, True):
        options = {"batch": True} if batch else {}
        assert export_program(small_model(), tmp_path / "m.pt2", **options) == tmp_path / "m.pt2"
        assert len(seen["inputs"]) == len(seen["dynamic_shapes"]) == 1 + batch
    assert (tmp_path / "m.pt2").read_bytes() == b"program"
    assert (seen["program"], seen["grad"]) == ("made", False)
    assert json.loads(seen["extra_files"]["lgmml.json"])["num_features"] == "5"
    assert {".onnx": export_onnx, ".pt2": export_program} == EXPORTERS


@pytest.mark.parametrize(("size", "fits"), [(2**31 - 1, True), (2**31, False), (2**31 + 1, False)])
def test_two_gibibytes_are_too_many(
    size: int, fits: bool, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, rest = size // 8, size - 4 * (size // 8)
    tensors = [
        SimpleNamespace(numel=lambda: half, element_size=lambda: 4),
        SimpleNamespace(numel=lambda: rest, element_size=lambda: 1),
    ]
    scorer = SimpleNamespace(state_dict=lambda: dict(enumerate(tensors)), policy="shared")
    monkeypatch.setattr(export, "_to_export", lambda *_: (scorer, (), ()))
    if fits:
        export_onnx(small_model(), tmp_path / "m.onnx")
        assert asked["scorer"] is scorer
        return
    with pytest.raises(LGMMLError, match=f"smaller than 2 GiB for one ONNX file, got {size} bytes; fit fewer metrics"):
        export_onnx(small_model(), tmp_path / "m.onnx")


def test_an_exporter_that_gives_nothing(asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: None)
    with pytest.raises(LGMMLError, match="`model` could not be exported: the exporter gave no program"):
        export_onnx(small_model(), tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_both_packages_are_asked_for_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = []
    monkeypatch.setattr(export, "require", lambda *words: needed.append(words))
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: Program())
    export_onnx(small_model(), tmp_path / "m.onnx")
    assert needed == [(name, "to export a model", "onnx") for name in ("onnx", "onnxscript")]


@pytest.mark.parametrize("write", [export_onnx, export_program])
def test_words_and_unknown_policies_are_refused(write: Any, tmp_path: Path) -> None:
    model = words_model(lists())
    with pytest.raises(LGMMLError, match="must take numbers only to be exported, got one with categories in colour, b"):
        write(model, tmp_path / "m")
    with pytest.raises(LGMMLError, match="`policy` must be one of 'shared', 'ones', got 'mean'"):
        write(small_model(), tmp_path / "m", policy="mean")


def fail_quietly() -> None:
    with export._quiet():
        assert [logging.getLogger(name).level for name in LOGGERS] == [logging.ERROR] * 3
        warnings.warn("about itself", stacklevel=1)
        raise KeyError


def test_the_exporters_own_talk_is_left_out_and_comes_back() -> None:
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    logging.getLogger("onnx_ir").setLevel(logging.DEBUG)
    try:
        with pytest.raises(KeyError):
            fail_quietly()
        assert logging.getLogger("onnx_ir").level == logging.DEBUG
        assert logging.getLogger("torch.onnx").level == levels["torch.onnx"]
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


class TestParity:
    def gaps(self, data: RankingData) -> Tensor:
        gaps = torch.zeros(data.num_documents)
        gaps[1], gaps[3] = 0.5, -0.75
        return gaps

    def opened(self, model: LGMML, data: RankingData, seen: list[Any], policy: str | None = None) -> Any:
        """A file that scores as the model does, but for two documents."""
        scores, gaps = model.score(data, policy=policy), self.gaps(data)

        def run(features: Tensor, offsets: Tensor | None = None) -> Tensor:
            first = sum(len(rows) for rows, _ in seen)
            seen.append((features, offsets))
            return (scores + gaps)[first : first + len(features)]

        return run, "an engine"

    @pytest.mark.parametrize("batch", [False, True])
    @pytest.mark.parametrize("policy", [None, "ones"])
    def test_the_largest_gap_is_reported(
        self, batch: bool, policy: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, data, seen = small_model(), small_data(), []
        offsets = torch.cat([data.offsets[:3], data.offsets[2:]])  # the third list is empty
        data = data.replace(offsets=offsets, qids=(*data.qids, 99)).to(dtype=torch.float64)
        opened = self.opened(model, data, seen, policy)
        monkeypatch.setattr(export, "_open_exported", lambda path: opened)
        options = {"batch": True} if batch else {}
        found = compare_exported("m.onnx", model, data, policy=policy, **options)
        assert found.largest == pytest.approx(0.75)
        assert found.size == pytest.approx(float(model.score(data, policy=policy).abs().max()))
        assert (found.lists, found.documents, found.engine) == (13, data.num_documents, "an engine")
        assert all(features.dtype == torch.float32 for features, _ in seen)
        if batch:
            ((_, bounds),) = seen
            assert torch.equal(bounds, data.offsets)
        else:
            assert [len(features) for features, _ in seen] == [size for size in data.sizes.tolist() if size]
            assert all(bounds is None for _, bounds in seen)

    def test_onnx_files_are_run_on_the_processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []

        class Session:
            def __init__(self, path: Path, **options: Any) -> None:
                asked.append((path, options))

            def get_inputs(self) -> list[Any]:
                return [SimpleNamespace(name="features"), SimpleNamespace(name="offsets")]

            def run(self, wanted: list[str], given: dict[str, Any]) -> list[Any]:
                asked.append((wanted, sorted(given)))
                return [given["features"][:, 0]]

        runtime = SimpleNamespace(InferenceSession=Session, __version__="9")
        monkeypatch.setattr(export, "require", lambda *words: asked.append(words) or runtime)
        run, engine = export._open_exported(Path("m.onnx"))
        assert run(torch.ones(2, 3), torch.tensor([0, 2])).tolist() == [1.0, 1.0]
        assert engine == "onnxruntime 9"
        assert asked == [
            ("onnxruntime", "to try an exported model", "onnx"),
            (Path("m.onnx"), {"providers": ["CPUExecutionProvider"]}),
            (["scores"], ["features", "offsets"]),
        ]


@pytest.mark.parametrize("mode", ["shared", "per_query", "amortized"])
def test_many_metrics_go_through_in_groups(mode: str) -> None:
    data = small_data()
    chain = plain_chain()
    width = chain.fit_transform(data.features, data.offsets).shape[1]
    g = torch.Generator().manual_seed(0)
    full = MetricBlock(torch.randn(40, width, generator=g), torch.randn(40, width, 2, generator=g))
    support = torch.randint(0, width, (33, 2), generator=g)
    few = MetricBlock(torch.randn(33, 2, generator=g), torch.randn(33, 2, 1, generator=g), support=support)
    bank = LocalMetrics([full, few], num_features=width)
    bank.set_scales(torch.rand(73, generator=g) + 0.5)
    phi = Phi(data.num_queries, 73, mode=mode, init=torch.rand(73, generator=g))
    model = LGMML(chain, bank, phi).eval()
    model.summarize(model.distances(data.features, data.offsets), data.offsets)
    policies = {"shared": "shared", "per_query": "knn", "amortized": "amortized"}
    if phi.gate is not None:
        with torch.no_grad():
            phi.gate.last.weight.normal_(0, 0.3, generator=g)
    scorer = ListScorer(model, policies[mode])
    with torch.no_grad():
        found = scorer(data.features, data.offsets)
    torch.testing.assert_close(found, model.score(data, policy=policies[mode]), rtol=1e-4, atol=1e-4)
