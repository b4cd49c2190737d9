"""Exported models give the scores of the model they come from, one list per call."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lgmml_torch import checks
from lgmml_torch.checks import DataWarning, LGMMLError, MissingDependencyError
from lgmml_torch.models.export import _ListScorer, compare_exported, export_onnx, export_program
from lgmml_torch.models.local_metrics import LocalMetrics, MetricBlock
from lgmml_torch.models.phi import POLICIES, Phi
from lgmml_torch.models.preprocess.base import Preprocess
from lgmml_torch.models.preprocess.compose import Chain, Concat, all_views, list_rank_features
from lgmml_torch.models.preprocess.steps import (
    PCA,
    Clip,
    KeepColumns,
    ListMinMax,
    ListStandardize,
    Norm2,
    Quantile,
    SignedLog1p,
    Standardize,
)
from lgmml_torch.models.ranker import LGMML
from lgmml_torch.ragged import RankingData
from tests.doors import plain_chain, small_data, small_model
from tests.models.test_encode import BRANDS, COLOURS, NAMES, words_model
from tests.models.test_encode import lists as word_lists

onnxruntime = pytest.importorskip("onnxruntime")
WAYS = [(mode, policy) for mode, policies in POLICIES.items() for policy in policies]


def lists(seed: int = 0, queries: int = 12, dim: int = 6, longest: int = 30) -> RankingData:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, longest, (queries,), generator=g)
    x = torch.randn(int(sizes.sum()), dim, generator=g).exp()
    x[:, 0] = x[:, 0].round()  # ties
    return RankingData.from_arrays(x, torch.randint(0, 3, (len(x),), generator=g), group=sizes)


def ranker(data: RankingData, prep: Preprocess, *, norm: str = "mahalanobis", kernel: str = "paper", **phi) -> LGMML:
    g = torch.Generator().manual_seed(1)
    z = prep.fit_transform(data.features, data.offsets)
    dim = z.shape[1]
    support = torch.stack([torch.randperm(dim, generator=g)[:2] for _ in range(5)])
    blocks = [
        MetricBlock(z[:7].clone(), torch.randn(7, dim, dim, generator=g)),
        MetricBlock(z[:3].clone(), torch.randn(3, dim, 2, generator=g)),
        MetricBlock(torch.randn(5, 2, generator=g), torch.randn(5, 2, 2, generator=g), support=support),
    ]
    bank = LocalMetrics(blocks, num_features=dim, norm=norm)
    bank.set_scales(bank(z).median(dim=0).values)
    model = LGMML(prep, bank, Phi(data.num_queries, 15, init=torch.rand(15, generator=g), **phi), kernel=kernel)
    model.summarize(model.distances(data.features, data.offsets), data.offsets)
    with torch.no_grad():
        weight = model.phi.table.weight
        weight.add_(torch.rand(weight.shape, generator=g))
        if model.phi.gate is not None:
            model.phi.gate.last.weight.normal_(0, 0.3, generator=g)
    return model.eval()


def by_list(data: RankingData, score) -> torch.Tensor:
    return torch.cat([torch.as_tensor(score(x.contiguous())) for x in data.features.split(data.sizes.tolist())])


def session(model: LGMML, folder: Path, **options):
    run = onnxruntime.InferenceSession(export_onnx(model, folder / "model.onnx", **options))
    return lambda x: run.run(["scores"], {"features": x.numpy()})[0]


PREPROCESSINGS = {
    "paper": lambda: Chain([Norm2()]),
    "all_views": all_views,
    "no room for ramps": lambda: Chain([KeepColumns([0, 2, 3]), all_views(max_columns=1)]),
    "mixed": lambda: Concat(
        [
            Chain([SignedLog1p(), Standardize(), Clip(3.0)]),
            Chain([ListStandardize(), PCA(0.95)]),
            Chain([Quantile(output="normal"), ListMinMax()]),
        ]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PREPROCESSINGS)
def test_scores_of_lists_of_any_length_equal_the_models(name: str, tmp_path: Path) -> None:
    data = lists()
    model = ranker(data, PREPROCESSINGS[name](), norm="trace" if name == "mixed" else "mahalanobis")
    run = session(model, tmp_path)
    new = lists(seed=1, longest=200)
    expected = model.score(new)
    np.testing.assert_allclose(by_list(new, run), expected, rtol=1e-5, atol=1e-5)
    assert run(new.features[:1]).shape == (1,)
    long = new.features.repeat(3, 1)[:3000]  # from 2,048 documents on, distances may come from the quadratic form
    expected = model.score_in_caller_order(RankingData.from_arrays(long, torch.zeros(3000), group=[3000]))
    np.testing.assert_allclose(run(long), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "policy"),
    [("shared", "ones"), ("per_query", "knn"), ("per_query", "amortized"), ("amortized", "amortized")],
)
def test_policies_are_exported(mode: str, policy: str, tmp_path: Path) -> None:
    data = lists()
    model = ranker(data, Chain([Standardize()]), mode=mode, kernel="rbf" if mode == "shared" else "paper")
    run = session(model, tmp_path, policy=policy)
    expected = model.score(data, policy=policy)
    np.testing.assert_allclose(by_list(data, run), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mode", "policy"), WAYS)
@pytest.mark.parametrize("norm", ["mahalanobis", "trace"])
def test_the_scorer_that_is_exported_equals_the_model(mode: str, policy: str, norm: str) -> None:
    data = lists()
    model = ranker(data, list_rank_features(), mode=mode, norm=norm)
    with torch.no_grad():
        model.phi.table.weight[:, 3] = 0
        found = by_list(data, _ListScorer(model, policy))
    torch.testing.assert_close(found, model.score(data, policy=policy), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    import onnx

    model = ranker(lists(), Chain([Standardize()]))
    file = export_onnx(model, tmp_path / "model.onnx")
    stored = onnx.load(file)
    onnx.checker.check_model(stored, full_check=True)
    facts = {entry.key: entry.value for entry in stored.metadata_props}
    assert facts["format"] == "lgmml-torch"
    assert (facts["num_features"], facts["policy"]) == ("6", "shared")
    (given,) = stored.graph.input
    sizes = [size.dim_param or size.dim_value for size in given.type.tensor_type.shape.dim]
    assert sizes == ["documents", 6]


def test_programs_take_many_lists_at_once(tmp_path: Path) -> None:
    data, new = lists(), lists(seed=1)
    model = ranker(data, list_rank_features(), mode="per_query")
    file = export_program(model, tmp_path / "lists.pt2", policy="knn", batch=True)
    found = compare_exported(file, model, new, policy="knn", batch=True)
    assert found.largest <= 1e-5 * found.size
    assert (found.lists, found.documents) == (12, new.num_documents)
    assert found.engine == f"torch {torch.__version__}"
    run = torch.export.load(file).module()
    torch.testing.assert_close(
        run(new.features[:5], torch.tensor([0, 0, 2, 2, 5])),  # two of them empty
        torch.cat([run(rows, torch.tensor([0, len(rows)])) for rows in new.features[:5].split([2, 3])]),
    )


def test_onnx_takes_many_lists_at_once(tmp_path: Path) -> None:
    data = lists()
    model = ranker(data, list_rank_features(), mode="amortized")
    file = export_onnx(model, tmp_path / "lists.onnx", batch=True)
    found = compare_exported(file, model, lists(seed=1), batch=True)
    assert found.largest <= 1e-5 * found.size
    assert found.engine == f"onnxruntime {onnxruntime.__version__}"
    inputs = onnxruntime.InferenceSession(file).get_inputs()
    assert [(given.name, given.shape, given.type) for given in inputs] == [
        ("features", ["documents", 6], "tensor(float)"),
        ("offsets", ["bounds"], "tensor(int64)"),
    ]


def test_errors_name_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ranker(lists(), Chain([Standardize()]))
    with pytest.raises(LGMMLError, match="`policy` must be one of 'shared', 'ones', got 'knn'"):
        export_onnx(model, tmp_path / "model.onnx", policy="knn")
    real = importlib.import_module

    def without(name: str, *rest):
        if name == "onnxscript":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(checks.importlib, "import_module", without)
    with pytest.raises(MissingDependencyError, match=r"`onnxscript` is needed .* pip install 'lgmml-torch\[onnx\]'"):
        export_onnx(model, tmp_path / "model.onnx")


def test_models_too_large_for_one_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ranker(lists(), Chain([Standardize()]))
    monkeypatch.setattr(torch.Tensor, "element_size", lambda tensor: 2**40)
    with pytest.raises(LGMMLError, match=r"`model` must be smaller than 2 GiB for one ONNX file, got .* fewer metrics"):
        export_onnx(model, tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "write", [export_program, pytest.param(export_onnx, marks=pytest.mark.slow)], ids=["program", "onnx"]
)
def test_categories_are_places_in_the_vocabularies_of_the_file(write, tmp_path: Path) -> None:
    """Colours without white, so that a word of the vocabulary is unknown to the model; -1 is a word of none."""
    model, new = words_model(word_lists()), word_lists(seed=1)
    assert model.encoder is not None
    file = write(model, tmp_path / f"model{'.onnx' if write is export_onnx else '.pt2'}", batch=True)
    assert (new.features[:, [0, 2]] == -1).any()
    found = compare_exported(file, model, new, batch=True)
    assert found.largest < 1e-5 < found.size
    # The same words as codes of other vocabularies.
    backwards = tuple(None if words is None else tuple(reversed(words)) for words in new.categories or ())
    features = new.features.clone()
    for column in (0, 2):
        codes = new.features[:, column]
        features[:, column] = torch.where(codes < 0, codes, len(backwards[column] or ()) - 1 - codes)
    with pytest.warns(DataWarning, match="words that are missing or that training never saw"):
        again = compare_exported(file, model, new.replace(features=features, categories=backwards), batch=True)
    assert again == found
    if write is export_onnx:
        facts = onnxruntime.InferenceSession(file).get_modelmeta().custom_metadata_map
        assert json.loads(facts["categories"]) == {"colour": list(COLOURS), "brand": list(BRANDS)}
        assert (json.loads(facts["feature_names"]), facts["num_features"]) == (list(NAMES), "3")


@pytest.mark.parametrize("write", [export_onnx, export_program])
def test_unknown_policies_are_refused(write, tmp_path: Path) -> None:
    with pytest.raises(LGMMLError, match="`policy` must be one of 'shared', 'ones', got 'mean'"):
        write(small_model(), tmp_path / "m", policy="mean")


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
    scorer = _ListScorer(model, policies[mode])
    with torch.no_grad():
        found = scorer(data.features, data.offsets)
    torch.testing.assert_close(found, model.score(data, policy=policies[mode]), rtol=1e-4, atol=1e-4)
